//! Records of one step shared with the device: the inputs that the host stages, and the outputs.
//!
//! The device twin of every record is in `csrc/step/step.h`; a test compares sizes and offsets. A stage is
//! one buffer, so that a step needs one copy to the device: a header, then seven regions.
//!
//! Legend: S sequence slots, W block table width, L maximum length of a request in tokens, V vocabulary size,
//! T tokens, R rows, Q logits rows.

mod row_facts;
mod staging;

use device::{MatMut, MatRef};

pub use row_facts::RowFact;
pub(crate) use staging::StageReader;
pub use staging::StagingBuffer;

/// A record that host and device share.
///
/// # Safety
/// Implementors are `repr(C)` structs of 32- and 64-bit numbers, or such numbers, without padding; every bit
/// pattern is a value.
pub unsafe trait StageRecord: Copy + Send + Sync + 'static {}

macro_rules! records {
    ($($name:ty),*) => {$(
        // SAFETY: `repr(C)` structs of 32- and 64-bit numbers without padding (a test checks their sizes).
        unsafe impl StageRecord for $name {}
    )*};
}
records!(
    StageHeader,
    StageRow,
    StageSequenceInit,
    StageLogitsRow,
    StageEdit,
    DraftRow,
    SequenceSamplingParams,
    LatestToken,
    SampledToken,
    i32,
    u32
);

/// Offsets of the regions of a stage, in bytes, and their numbers of records.
#[derive(Debug, Clone, Copy, Default, PartialEq, Eq)]
#[repr(C)]
pub struct StageHeader {
    /// Number of records in the rows region.
    pub rows: u32,
    /// Number of records in the logits rows region.
    pub logits_rows: u32,
    /// Number of records in the region of sequence slot initialisations.
    pub inits: u32,
    /// Number of 32-bit words in the words region.
    pub words: u32,
    /// Number of records in the logit edits region.
    pub edits: u32,
    /// Offset of the rows region.
    pub rows_at: u32,
    /// Offset of the logits rows region.
    pub logits_rows_at: u32,
    /// Offset of the region of sequence slot initialisations.
    pub inits_at: u32,
    /// Offset of the words region.
    pub words_at: u32,
    /// Offset of the logit edits region.
    pub edits_at: u32,
    /// Number of tokens of the step.
    pub tokens: u32,
    /// Number of records in the draft rows region.
    pub drafts: u32,
    /// Offset of the draft rows region.
    pub drafts_at: u32,
    /// Offset of the facts about rows, row by row.
    pub facts_at: u32,
    /// Number of words of facts per row.
    pub facts_per_row: u32,
    /// Reserved; zero.
    pub reserved: u32,
}

/// One row of the step: `len` tokens of the request in sequence slot `seq_slot`, from position `start` on.
#[derive(Debug, Clone, Copy, Default, PartialEq, Eq)]
#[repr(C)]
pub struct StageRow {
    /// Sequence slot of the request.
    pub seq_slot: i32,
    /// Position of the first token. If `ids` is negative, the upper bound of that position, which the device
    /// computes from the latest token of the sequence slot.
    pub start: i32,
    /// Number of tokens.
    pub len: i32,
    /// Index of the first token in the step.
    pub token: i32,
    /// Index of the token ids in the words region. −1 − n = the row begins n positions after the latest token
    /// of the sequence slot; the id of that token is the placeholder for all ids of the row until draft
    /// tokens are inserted.
    pub ids: i32,
    /// First replaced entry of the block table.
    pub table_from: i32,
    /// Number of replaced entries.
    pub table_len: i32,
    /// Index of the new entries in the words region.
    pub table_at: i32,
}

/// Initialises a sequence slot for a new request.
#[derive(Debug, Clone, Copy, Default, PartialEq)]
#[repr(C)]
pub struct StageSequenceInit {
    /// Sequence slot of the request.
    pub seq_slot: i32,
    /// Index of the known token ids in the words region.
    pub history_at: i32,
    /// Position of the first known token id.
    pub history_from: i32,
    /// Number of known token ids.
    pub history_len: i32,
    /// Index of the `ceil(V / 32)` mask words in the words region; −1 = no mask.
    pub mask_at: i32,
    /// Reserved; zero.
    pub reserved: [i32; 3],
    /// Sampling parameters of the request.
    pub params: SequenceSamplingParams,
}

/// Sampling request for the logits row of one token of the step.
#[derive(Debug, Clone, Copy, Default, PartialEq, Eq)]
#[repr(C)]
pub struct StageLogitsRow {
    /// Index in the step of the token that the logits row belongs to; the sample position is the next
    /// position. −1 = padding, no token is sampled.
    pub token: i32,
    /// Sequence slot of the request, with its sampling rules.
    pub seq_slot: i32,
    /// Number of draft tokens before the sample position in its row; the sample counts only if all of them
    /// are accepted.
    pub draft_index: i32,
    /// 1 = the next token of the step is the draft token at the sample position; 0 = no draft token to
    /// verify.
    pub has_draft: i32,
    /// Token to score, if only its log-probability is requested; −1 = sample a token.
    pub known_token: i32,
    /// Number of top log-probabilities to report in addition to that of the token; −1 = no log-probabilities.
    pub top: i32,
    /// Index of the first edit in the logit edits region.
    pub edits_at: i32,
    /// Number of edits.
    pub edits: i32,
}

/// Logit edit of one token id, unconditional or conditional on preceding tokens or on the position.
#[derive(Debug, Clone, Copy, Default, PartialEq)]
#[repr(C)]
pub struct StageEdit {
    /// Token id of the logit; ids outside the logits row are ignored.
    pub id: u32,
    /// Value added to the logit; −∞ masks the id.
    pub value: f32,
    /// Index in the words region of the token ids that must directly precede the sample position.
    pub when_at: i32,
    /// Number of those token ids; 0 = always applies, negative = applies at positions below `when_at`.
    pub when_len: i32,
}

/// A row of the step as a draft model sees it: `len` known tokens, then `drafts` draft tokens.
#[derive(Debug, Clone, Copy, Default, PartialEq, Eq)]
#[repr(C)]
pub struct DraftRow {
    /// Sequence slot of the request.
    pub seq_slot: i32,
    /// Number of known tokens.
    pub len: i32,
    /// Index of the first token in the step.
    pub token: i32,
    /// Number of draft tokens that the draft model proposes after the known tokens.
    pub drafts: i32,
    /// 1 = the sequence slot has the hidden state of the token before the first token; 0 = it has not.
    pub state_in_slot: i32,
    /// Block with that hidden state as its block-boundary state, which takes precedence; −1 = not at a block
    /// boundary, and with `state_in_slot` 0 the state is zeros.
    pub boundary_block: i32,
    /// Reserved; zero.
    pub reserved: [i32; 2],
}

/// The latest token of the request in a sequence slot, which no row has forwarded yet.
#[derive(Debug, Clone, Copy, Default, PartialEq, Eq)]
#[repr(C)]
pub struct LatestToken {
    /// Token id.
    pub token: i32,
    /// Position of the token.
    pub position: i32,
    /// 1 if the token is an accepted draft token, so that the next logits row of the request counts as well.
    pub draft_accepted: i32,
}

/// Sampling parameters of the request in a sequence slot, kept on the device until the slot is reused.
#[derive(Debug, Clone, Copy, Default, PartialEq)]
#[repr(C)]
pub struct SequenceSamplingParams {
    /// Softmax temperature; below `1e-5` sampling is greedy.
    pub temperature: f32,
    /// Top-p: cumulative probability kept; 1 = off.
    pub top_p: f32,
    /// Min-p: minimum probability relative to the most likely id; 0 = off.
    pub min_p: f32,
    /// Top-k: number of ids kept; 0 = off.
    pub top_k: i32,
    /// Repetition penalty: divides positive and multiplies negative logits of ids in the prompt or output;
    /// 1 = off.
    pub repetition: f32,
    /// Frequency penalty, subtracted per occurrence in the output.
    pub frequency: f32,
    /// Presence penalty, subtracted once if the id occurs in the output.
    pub presence: f32,
    /// Bits [`RULE_MASKED`] and [`RULE_HISTORY`].
    pub flags: u32,
    /// Philox key of the request.
    pub key: u64,
    /// Prompt length in tokens; later positions are output.
    pub prompt_len: i32,
    /// Reserved; zero.
    pub reserved: i32,
}

/// Flag: ids with a clear bit in the grammar bitmask are masked.
pub const RULE_MASKED: u32 = 1;
/// Flag: a rule reads earlier token ids, so sampled tokens are appended to the history.
pub const RULE_HISTORY: u32 = 2;

/// Output of one logits row.
#[derive(Debug, Clone, Copy, Default, PartialEq)]
#[repr(C)]
pub struct SampledToken {
    /// Sampled or scored token.
    pub token: i32,
    /// [`SAMPLE_OK`], [`SAMPLE_DRAFT_ACCEPTED`], [`SAMPLE_NON_FINITE`] or [`SAMPLE_ALL_MASKED`].
    pub status: u32,
    /// Log-probability of the token under the raw logits, if requested.
    pub logprob: f32,
    /// Rank of the token among all ids, from 1, if requested.
    pub rank: u32,
}

/// A token was sampled or scored.
pub const SAMPLE_OK: u32 = 0;
/// A logit is NaN or infinite.
pub const SAMPLE_NON_FINITE: u32 = 1;
/// The rules mask every id.
pub const SAMPLE_ALL_MASKED: u32 = 2;
/// A token was sampled and its draft token is accepted: both are equal, or the synthetic acceptance rate
/// accepts the draft token, which then replaces the sampled token.
pub const SAMPLE_DRAFT_ACCEPTED: u32 = 3;

/// A stage on the device.
#[derive(Debug, Clone, Copy)]
pub struct StageView<'a> {
    /// Bytes of the stage as words, from the header on; i32 `[1, n]`.
    pub bytes: MatRef<'a>,
    /// Number of rows to prepare: those of the stage, or more if a captured graph has a fixed number. Rows
    /// after those of the stage are padding: no token, no key.
    pub rows: usize,
    /// Number of tokens to prepare: those of the stage, or more for a captured graph. Padding tokens get
    /// id 0, position 0 and KV slot −1.
    pub tokens: usize,
    /// Number of logits rows to prepare: those of the stage, or more for a captured graph.
    pub logits_rows: usize,
}

/// State of requests on the device, by sequence slot.
#[derive(Debug)]
pub struct SequenceSlotArrays<'a> {
    /// [`LatestToken`] records as words; i32 `[S, 3]`.
    pub latest: MatMut<'a>,
    /// Block tables; i32 `[S, W]`.
    pub tables: MatMut<'a>,
    /// Token ids by position, kept if a rule reads them; i32 `[S, L]`.
    pub history: MatMut<'a>,
    /// Grammar bitmasks: bit set = token id allowed; i32 `[S, ceil(V / 32)]`.
    pub masks: MatMut<'a>,
    /// [`SequenceSamplingParams`] records as words; i32 `[S, 12]`.
    pub params: MatMut<'a>,
}

/// Inputs of a forward pass, written by [`StepPreparation`](crate::StepPreparation).
#[derive(Debug)]
pub struct StepArrays<'a> {
    /// Token ids; i32 `[1, T]`.
    pub ids: MatMut<'a>,
    /// Positions; i32 `[1, T]`.
    pub positions: MatMut<'a>,
    /// KV slots; i64 `[1, T]`; −1 stores nothing.
    pub slots: MatMut<'a>,
    /// First token of each row, then the end of the last row; i32 `[1, R + 1]`.
    pub cu_q: MatMut<'a>,
    /// Context length of each row in keys, its own tokens included; i32 `[1, R]`.
    pub context_lens: MatMut<'a>,
    /// Token index of each logits row, 0 for padding; i32 `[1, Q]`.
    pub logits_indices: MatMut<'a>,
    /// [`RowFact`]s of each row, 0 for padding; i32 `[facts, R]`.
    pub row_facts: MatMut<'a>,
}

/// Prepared inputs of the step that the sampler reads, and the verification of its draft tokens.
#[derive(Debug, Clone, Copy)]
pub struct PreparedStep<'a> {
    /// Token ids; i32 `[1, T]`.
    pub ids: MatRef<'a>,
    /// Positions; i32 `[1, T]`.
    pub positions: MatRef<'a>,
    /// Verification of draft tokens.
    pub verification: DraftVerification,
}

/// Verification of draft tokens: the rule that accepts or rejects them.
#[derive(Debug, Clone, Copy, Default, PartialEq, Eq)]
pub enum DraftVerification {
    /// The step has no draft tokens.
    #[default]
    NoDrafts,
    /// A draft token is accepted if it equals the sampled token.
    MatchSampled,
    /// Draft tokens are accepted at random at a fixed rate, for benchmarks.
    Synthetic {
        /// Acceptance rate in per mille.
        per_mille: u16,
    },
}

/// Inputs of a forward pass of a draft model, written by
/// [`DraftPassPreparation`](crate::DraftPassPreparation): a row of one token for each row of the step.
#[derive(Debug)]
pub struct DraftPassArrays<'a> {
    /// Token ids; i32 `[1, R]`.
    pub ids: MatMut<'a>,
    /// Positions; i32 `[1, R]`.
    pub positions: MatMut<'a>,
    /// KV slots; i64 `[1, R]`; −1 stores nothing.
    pub slots: MatMut<'a>,
    /// First token of each row, then the end of the last row; i32 `[1, R + 1]`.
    pub cu_q: MatMut<'a>,
    /// Context length of each row in keys, its own token included, 0 for padding; i32 `[1, R]`.
    pub context_lens: MatMut<'a>,
    /// Sequence slot of each row; i32 `[1, R]`.
    pub row_seq_slots: MatMut<'a>,
}

/// Arguments of a forward pass of a draft model.
#[derive(Debug, Clone, Copy)]
pub struct DraftPass<'a> {
    /// Index of the pass, from 0.
    pub pass: usize,
    /// Number of rows to prepare.
    pub rows: usize,
    /// Token ids of the step; i32 `[1, T]`.
    pub ids: MatRef<'a>,
    /// Positions of the step; i32 `[1, T]`.
    pub positions: MatRef<'a>,
    /// Draft tokens of the previous passes; i32 `[passes, R]`.
    pub drafts: MatRef<'a>,
    /// Block tables by sequence slot; i32 `[S, W]`.
    pub tables: MatRef<'a>,
    /// Number of tokens of a KV block.
    pub block_tokens: usize,
}

/// Hidden states from which draft models continue, in the activation type. H channels.
#[derive(Debug)]
pub struct DraftHiddenStates<'a> {
    /// Hidden states of the newest tokens of each sequence slot, `[S · states_per_slot, H]`: of the token
    /// before the newest known token (if any), of the newest known token, and of the draft tokens after it.
    pub slot_states: MatMut<'a>,
    /// Position of the first hidden state of each sequence slot; i32 `[1, S]`.
    pub first_positions: MatMut<'a>,
    /// Maximum number of hidden states per sequence slot.
    pub states_per_slot: usize,
    /// Hidden states at block boundaries, `[blocks, H]`: of the last token of each block.
    pub boundary_states: MatMut<'a>,
}

/// Outputs of the sampler, written by [`RowSampling`](crate::RowSampling).
#[derive(Debug)]
pub struct SamplerOutputArrays<'a> {
    /// [`SampledToken`] records as words; i32 `[Q, 4]`.
    pub sampled: MatMut<'a>,
    /// Top-k token ids in order, as many as requested; i32 `[Q, most]`.
    pub top_ids: MatMut<'a>,
    /// Log-probabilities of `top_ids`; f32 `[Q, most]`.
    pub top_logprobs: MatMut<'a>,
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn records_have_no_padding() {
        assert_eq!(size_of::<StageHeader>(), 64);
        assert_eq!(size_of::<StageRow>(), 32);
        assert_eq!(size_of::<StageLogitsRow>(), 32);
        assert_eq!(size_of::<StageEdit>(), 16);
        assert_eq!(size_of::<DraftRow>(), 32);
        assert_eq!(size_of::<SequenceSamplingParams>(), 48);
        assert_eq!(size_of::<LatestToken>(), 12);
        assert_eq!(size_of::<StageSequenceInit>(), 80);
        assert_eq!(size_of::<SampledToken>(), 16);
    }
}
