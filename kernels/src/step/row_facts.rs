//! Facts about the rows of a step that kernels read: declared here, filled in by one table of the executor
//! (`executor/src/step/row_facts.rs`), and laid out by [`StepPreparation`](crate::StepPreparation) as i32 `[facts, R]`.

/// A fact about a row. Its number is the row of the array that holds it.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
#[repr(usize)]
pub enum RowFact {
    /// Sequence slot, and so block table; 0 for padding.
    SequenceSlot,
}

impl RowFact {
    /// All facts, in the order of their numbers.
    pub const ALL: [Self; 1] = [Self::SequenceSlot];
    /// Number of facts.
    pub const COUNT: usize = Self::ALL.len();
}
