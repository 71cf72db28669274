//! Facts about the rows of a step that kernels read: declared here, filled in by one table of the executor
//! (`executor/src/step/row_facts.rs`), and laid out by [`StepPreparation`](crate::StepPreparation) as i32
//! `[facts, R]`.

/// A fact about a row. Its discriminant is the row index in the array of facts.
///
/// Facts of padding rows are 0, which is also a valid sequence slot: a kernel that writes by sequence slot
/// recognises padding rows by their context length of 0.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
#[repr(usize)]
pub enum RowFact {
    /// Sequence slot of the row, which is also its block table; 0 for padding.
    SequenceSlot,
    /// 1 if the sequence has tokens before this row; 0 if the row begins the sequence, or is padding. Recurrent
    /// layers (gated delta nets, Mamba) read it to reset the state of a sequence slot; no served model has such
    /// layers today.
    ContinuesSequence,
}

impl RowFact {
    /// All facts, in the order of their numbers.
    pub const ALL: [Self; 2] = [Self::SequenceSlot, Self::ContinuesSequence];
    /// Number of facts.
    pub const COUNT: usize = Self::ALL.len();
}
