//! Row facts: values for each row of a step that kernels read in addition to tokens and block tables. They
//! are declared here, computed by the executor (table in `executor/src/step/row_facts.rs`), and written by
//! [`StepPreparation`](crate::StepPreparation) to an array i32 `[facts, rows]`.

/// A row fact: a value for each row of a step that kernels read. The discriminant of a field is its row index
/// in the array `[facts, rows]`. All fields of padding rows are 0, which is also a valid sequence slot: a
/// kernel that writes by sequence slot recognises padding rows by their context length of 0.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
#[repr(usize)]
pub enum RowMetadataField {
    /// Sequence slot of the row, which is also the index of its block table; 0 for padding.
    SequenceSlot,
    /// 1 if the sequence has tokens before this row; 0 if the row begins the sequence, or is padding.
    ContinuesSequence,
    /// State slot with the recurrent state before the row, plus 1; 0 if the row starts with the zero state.
    StateRead,
    /// State slot to which the recurrent state after the row is written, plus 1; 0 if the model has no recurrent
    /// state, or the row is padding.
    StateWrite,
    /// Number of tokens of the same sequence in later rows of the step: a row with draft tokens may be staged as several
    /// rows. 0 if the model has no recurrent state.
    LaterTokens,
    /// Index of the row among the rows of the step whose recurrent state is updated after their draft tokens have been
    /// verified, plus 1; 0 for all other rows.
    Replay,
}

impl RowMetadataField {
    /// All row facts, in the order of their discriminants.
    pub const ALL: [Self; 6] = [
        Self::SequenceSlot,
        Self::ContinuesSequence,
        Self::StateRead,
        Self::StateWrite,
        Self::LaterTokens,
        Self::Replay,
    ];
    /// Number of row facts.
    pub const COUNT: usize = Self::ALL.len();
}

/// Sizes of the updates of recurrent states after the draft tokens of a step have been verified.
#[derive(Debug, Clone, Copy, Default, PartialEq, Eq)]
pub struct ReplayShape {
    /// Number of rows with draft tokens; 0 = all states are written by the forward pass.
    pub rows: usize,
    /// Number of leading tokens of the step that include all tokens of these rows.
    pub tokens: usize,
}
