//! Data of one step that host and device share: the inputs that the host stages (a stage), the arrays on the
//! device, and the outputs of the sampler.
//!
//! A stage is one buffer, so that a step needs one copy to the device: a header, then eight regions of
//! records. The C++ definition of every record is in `csrc/step/step.h`; a test compares sizes and offsets.

mod row_facts;
mod staging;

use device::{DeviceError, MatMut, MatRef, check_size};

pub use row_facts::{ReplayShape, RowMetadataField};
pub use staging::StagingBuffer;
pub(crate) use staging::StagingReader;

/// A record of a stage (the staged inputs of a step) or of the sampler output, which host and device read and
/// write.
///
/// # Safety
/// Implementors are `repr(C)` structs of 32- and 64-bit numbers, or such numbers, without padding;
/// every bit pattern is a valid value.
pub unsafe trait StagedRecord: Copy + Send + Sync + 'static {}

macro_rules! records {
    ($($name:ty),*) => {$(
        // SAFETY: `repr(C)` structs of 32- and 64-bit numbers without padding (a test checks their sizes).
        unsafe impl StagedRecord for $name {}
    )*};
}
records!(
    StagingHeader,
    StagedStepRow,
    StagedTableChange,
    StagedSequenceInit,
    StagedLogitsRow,
    StagedLogitEdit,
    StagedDraftRow,
    SequenceSamplingParams,
    LatestToken,
    SampledToken,
    i32,
    u32
);

/// Header of a stage (the staged inputs of a step in one buffer): for each region of the stage its offset in
/// bytes and its number of records.
#[derive(Debug, Clone, Copy, Default, PartialEq, Eq)]
#[repr(C)]
pub struct StagingHeader {
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
    /// Offset of the rows region from the start of the stage, in bytes.
    pub rows_at: u32,
    /// Offset of the logits rows region from the start of the stage, in bytes.
    pub logits_rows_at: u32,
    /// Offset of the region of sequence slot initialisations from the start of the stage, in bytes.
    pub inits_at: u32,
    /// Offset of the words region from the start of the stage, in bytes.
    pub words_at: u32,
    /// Offset of the logit edits region from the start of the stage, in bytes.
    pub edits_at: u32,
    /// Number of tokens of the step.
    pub tokens: u32,
    /// Number of records in the draft rows region.
    pub drafts: u32,
    /// Offset of the draft rows region from the start of the stage, in bytes.
    pub drafts_at: u32,
    /// Offset of the row facts region from the start of the stage, in bytes. The region has the values of all
    /// [`RowMetadataField`]s of row 0, then those of row 1, and so on.
    pub facts_at: u32,
    /// Number of row facts ([`RowMetadataField`] values, one 32-bit word each) per row.
    pub facts_per_row: u32,
    /// Offset of the table changes region from the start of the stage, in bytes. The region has a
    /// [`StagedTableChange`] of row 0 for each KV group from 1 on, then those of row 1, and so on; it is empty
    /// for a model with one KV group.
    pub table_changes_at: u32,
}

/// One row of the step: `len` tokens of the request in sequence slot `seq_slot`, from position `start` on.
#[derive(Debug, Clone, Copy, Default, PartialEq, Eq)]
#[repr(C)]
pub struct StagedStepRow {
    /// Sequence slot of the request.
    pub seq_slot: i32,
    /// Position of the first token. If `ids` is negative, the device computes this position from the latest
    /// token of the sequence slot, and `start` is an upper bound.
    pub start: i32,
    /// Number of tokens.
    pub len: i32,
    /// Index of the first token of the row in the step.
    pub token: i32,
    /// Index of the first token id in the words region. A negative value −1 − n means that the row begins n
    /// positions after the latest token of the sequence slot; all token ids of the row are then the id of the
    /// latest token, until draft tokens are inserted.
    pub ids: i32,
    /// Index of the first entry that is replaced in the block table of KV group 0.
    pub table_from: i32,
    /// Number of block table entries that are replaced.
    pub table_len: i32,
    /// Index of the new block table entries in the words region.
    pub table_at: i32,
}

/// Change of a block table by a row of the step, for the KV groups from 1 on. The change for group 0 is in
/// [`StagedStepRow`].
#[derive(Debug, Clone, Copy, Default, PartialEq, Eq)]
#[repr(C)]
pub struct StagedTableChange {
    /// Index of the first entry that is replaced.
    pub from: i32,
    /// Number of entries that are replaced.
    pub len: i32,
    /// Index of the new entries in the words region.
    pub at: i32,
}

/// Initialises a sequence slot for a new request.
#[derive(Debug, Clone, Copy, Default, PartialEq)]
#[repr(C)]
pub struct StagedSequenceInit {
    /// Sequence slot of the request.
    pub seq_slot: i32,
    /// Index of the first known token id in the words region.
    pub history_at: i32,
    /// Position of the first known token id.
    pub history_from: i32,
    /// Number of known token ids.
    pub history_len: i32,
    /// Index of the bitmask of allowed token ids, `ceil(vocab_size / 32)` words, in the words region; −1 = no
    /// bitmask.
    pub mask_at: i32,
    /// Reserved; zero.
    pub reserved: [i32; 3],
    /// Sampling parameters of the request.
    pub params: SequenceSamplingParams,
}

/// Request to sample or score a token from the logits row of one token of the step.
#[derive(Debug, Clone, Copy, Default, PartialEq, Eq)]
#[repr(C)]
pub struct StagedLogitsRow {
    /// Index in the step of the token that the logits row belongs to. The sample position is the position
    /// after that token. −1 = padding: no token is sampled.
    pub token: i32,
    /// Sequence slot of the request, which has the sampling parameters.
    pub seq_slot: i32,
    /// Number of draft tokens of the row at positions before the sample position. The sampled token is valid
    /// only if all of these draft tokens are accepted.
    pub draft_index: i32,
    /// 1 = the next token of the step is a draft token at the sample position, which is verified; 0 = there
    /// is no such draft token.
    pub has_draft: i32,
    /// Token to score, if only its log-probability is requested; −1 = a token is sampled.
    pub known_token: i32,
    /// Number of top log-probabilities to report in addition to that of the token; −1 = no log-probabilities.
    pub top: i32,
    /// Index of the first edit in the logit edits region.
    pub edits_at: i32,
    /// Number of edits in the logit edits region.
    pub edits: i32,
    /// Index of the grammar bitmask of the sample position in the words region. It replaces the bitmask of
    /// the sequence slot.
    pub mask_at: i32,
    /// Number of 32-bit words of the grammar bitmask at `mask_at`, `ceil(vocab_size / 32)`; 0 = there is no
    /// grammar bitmask for this sample position, and the bitmask of the sequence slot applies.
    pub mask_words: i32,
}

/// Change of the logit of one token id, either unconditional or conditional on the preceding tokens or on the
/// position.
#[derive(Debug, Clone, Copy, Default, PartialEq)]
#[repr(C)]
pub struct StagedLogitEdit {
    /// Token id of the changed logit; ids outside the logits row are ignored.
    pub id: u32,
    /// Value added to the logit; −∞ masks the id.
    pub value: f32,
    /// If `when_len` is positive: index in the words region of the token ids that must directly precede the
    /// sample position. If it is negative: the position below which the edit applies.
    pub when_at: i32,
    /// Number of token ids that must precede the sample position; 0 = the edit always applies; negative = the
    /// edit applies at positions below `when_at`.
    pub when_len: i32,
}

/// Input row of a draft model: `len` known tokens of a request, then `drafts` draft tokens.
#[derive(Debug, Clone, Copy, Default, PartialEq, Eq)]
#[repr(C)]
pub struct StagedDraftRow {
    /// Sequence slot of the request.
    pub seq_slot: i32,
    /// Number of known tokens in the row.
    pub len: i32,
    /// Index of the first token of the row in the step.
    pub token: i32,
    /// Number of draft tokens that the draft model proposes after the known tokens.
    pub drafts: i32,
    /// 1 = the sequence slot has the hidden state of the token before the first token of the row; 0 = it does
    /// not.
    pub state_in_slot: i32,
    /// Block whose boundary state is the hidden state of the token before the row; it takes precedence over
    /// the state in the sequence slot. −1 = the row does not begin at a block boundary; if `state_in_slot` is
    /// 0 as well, the preceding state is zeros.
    pub boundary_block: i32,
    /// Reserved; zero.
    pub reserved: [i32; 2],
}

/// The latest token of the request in a sequence slot: no forward pass has processed it yet.
#[derive(Debug, Clone, Copy, Default, PartialEq, Eq)]
#[repr(C)]
pub struct LatestToken {
    /// Token id.
    pub token: i32,
    /// Position of the token.
    pub position: i32,
    /// 1 = the token is an accepted draft token, so that the next logits row of the request is valid as well.
    pub draft_accepted: i32,
}

impl LatestToken {
    /// Size of a record in 32-bit words.
    pub const WORDS: usize = size_of::<Self>() / 4;
}

/// Sampling parameters of the request in a sequence slot, kept on the device until the slot is reused.
#[derive(Debug, Clone, Copy, Default, PartialEq)]
#[repr(C)]
pub struct SequenceSamplingParams {
    /// Softmax temperature; below `1e-5` sampling is greedy.
    pub temperature: f32,
    /// Top-p: cumulative probability of the tokens that are kept; 1 = off.
    pub top_p: f32,
    /// Min-p: minimum probability relative to that of the most likely token; 0 = off.
    pub min_p: f32,
    /// Top-k: number of most likely tokens that are kept; 0 = off.
    pub top_k: i32,
    /// Repetition penalty: positive logits of tokens in the prompt or output are divided by it, negative
    /// logits multiplied; 1 = off.
    pub repetition: f32,
    /// Frequency penalty: subtracted from the logit of a token for each of its occurrences in the output.
    pub frequency: f32,
    /// Presence penalty: subtracted once from the logit of a token that occurs in the output.
    pub presence: f32,
    /// Flags: bits [`RULE_MASKED`] and [`RULE_HISTORY`].
    pub flags: u32,
    /// Philox key of the request: the seed of its random numbers.
    pub key: u64,
    /// Prompt length in tokens; tokens at later positions are output.
    pub prompt_len: i32,
    /// Reserved; zero.
    pub reserved: i32,
}

/// Flag: the sequence slot has a bitmask of allowed token ids, and ids with a clear bit are masked.
pub const RULE_MASKED: u32 = 1;
/// Flag: a sampling rule reads earlier token ids, so sampled tokens are appended to the token history.
pub const RULE_HISTORY: u32 = 2;

/// Result of one logits row.
#[derive(Debug, Clone, Copy, Default, PartialEq)]
#[repr(C)]
pub struct SampledToken {
    /// Sampled or scored token.
    pub token: i32,
    /// [`SAMPLE_OK`], [`SAMPLE_DRAFT_ACCEPTED`], [`SAMPLE_NON_FINITE`] or [`SAMPLE_ALL_MASKED`].
    pub status: u32,
    /// Log-probability of the token, computed from the raw logits (before edits and temperature), if
    /// requested.
    pub logprob: f32,
    /// Rank of the token among all token ids by logit, from 1, if requested.
    pub rank: u32,
}

/// Status: a token was sampled or scored.
pub const SAMPLE_OK: u32 = 0;
/// Status: a logit of the row is NaN or infinite.
pub const SAMPLE_NON_FINITE: u32 = 1;
/// Status: the sampling rules mask every token id.
pub const SAMPLE_ALL_MASKED: u32 = 2;
/// Status: a token was sampled, and the draft token at its position is accepted. Either the two tokens are
/// equal, or synthetic acceptance accepts the draft token at random; the draft token then replaces the
/// sampled token.
pub const SAMPLE_DRAFT_ACCEPTED: u32 = 3;

/// A stage on the device, and the numbers of rows, tokens and logits rows to prepare from it.
#[derive(Debug, Clone, Copy)]
pub struct StagingBufferView<'a> {
    /// Bytes of the stage as 32-bit words, beginning with the header; i32 `[1, words]`.
    pub bytes: MatRef<'a>,
    /// Number of rows to prepare: the number of rows in the stage, or more for a captured graph with a fixed
    /// number of rows. Rows after those of the stage are padding: they have no tokens and context length 0.
    pub rows: usize,
    /// Number of tokens to prepare: the number of tokens in the stage, or more for a captured graph with a
    /// fixed number of tokens. Padding tokens get id 0, position 0 and KV slot −1.
    pub tokens: usize,
    /// Number of logits rows to prepare: the number of logits rows in the stage, or more for a captured graph
    /// with a fixed number of logits rows.
    pub logits_rows: usize,
}

/// State of requests on the device, in arrays indexed by sequence slot.
#[derive(Debug)]
pub struct SequenceSlotArrays<'a> {
    /// [`LatestToken`] records as 32-bit words; i32 `[sequence_slots, 3]`.
    pub latest: MatMut<'a>,
    /// Block tables of each KV group; i32 `[groups · sequence_slots, blocks]`: the tables of all sequence slots
    /// in group 0, then those in group 1, and so on.
    pub tables: MatMut<'a>,
    /// Token history: token ids by position, stored if a sampling rule reads them; i32 `[sequence_slots,
    /// max_len]`.
    pub history: MatMut<'a>,
    /// Bitmasks of allowed token ids (a set bit allows the token id); i32 `[sequence_slots, ceil(vocab_size / 32)]`.
    pub masks: MatMut<'a>,
    /// [`SequenceSamplingParams`] records as 32-bit words; i32 `[sequence_slots, 12]`.
    pub params: MatMut<'a>,
}

impl SequenceSlotArrays<'_> {
    /// Returns the number of sequence slots, if the block tables are those of `groups` KV groups.
    pub(crate) fn slots_of_groups(&self, groups: usize) -> Result<usize, DeviceError> {
        let (rows, seq_slots) = (self.tables.rows(), self.params.rows());
        check_size("prepare", "block tables", rows, groups * seq_slots)?;
        Ok(seq_slots)
    }
}

/// Inputs of a forward pass, written by [`StepPreparation`](crate::StepPreparation).
#[derive(Debug)]
pub struct StepInputArrays<'a> {
    /// Token ids; i32 `[1, tokens]`.
    pub ids: MatMut<'a>,
    /// Position of each token; i32 `[1, tokens]`.
    pub positions: MatMut<'a>,
    /// KV slot of each token in each KV group; i64 `[groups, tokens]`. −1 = keys and values of the token are
    /// not stored.
    pub slots: MatMut<'a>,
    /// Index of the first token of each row, then the end of the last row; i32 `[1, rows + 1]`.
    pub cu_q: MatMut<'a>,
    /// Context length of each row in keys, the tokens of the row included; i32 `[1, rows]`.
    pub context_lens: MatMut<'a>,
    /// Index of the token of each logits row, 0 for padding; i32 `[1, logits_rows]`.
    pub logits_indices: MatMut<'a>,
    /// [`RowMetadataField`]s of each row, 0 for padding; i32 `[facts, rows]`.
    pub row_facts: MatMut<'a>,
}

/// Prepared inputs of the step that the sampler reads, and how draft tokens are verified.
#[derive(Debug, Clone, Copy)]
pub struct PreparedStep<'a> {
    /// Token ids; i32 `[1, tokens]`.
    pub ids: MatRef<'a>,
    /// Position of each token; i32 `[1, tokens]`.
    pub positions: MatRef<'a>,
    /// Rule by which the draft tokens of the step are accepted or rejected.
    pub verification: DraftVerification,
}

/// Rule by which the draft tokens of a step are accepted or rejected.
#[derive(Debug, Clone, Copy, Default, PartialEq, Eq)]
pub enum DraftVerification {
    /// The step has no draft tokens.
    #[default]
    NoDrafts,
    /// A draft token is accepted if it equals the sampled token.
    MatchSampled,
    /// Draft tokens are accepted at random with fixed probabilities, for benchmarks.
    Synthetic {
        /// Acceptance probability of the first draft token of a row, in thousandths; from 1000 on the draft
        /// token is always accepted.
        per_mille: u16,
        /// Acceptance probability is reduced by this amount, in thousandths (absolute), from each draft token
        /// of a row to the next.
        decrease: u16,
    },
}

/// Input arrays of one forward pass of a draft model, written by
/// [`DraftPassPreparation`](crate::DraftPassPreparation). The batch has one row of one token for each row of
/// the step.
#[derive(Debug)]
pub struct DraftPassArrays<'a> {
    /// Token ids; i32 `[1, rows]`.
    pub ids: MatMut<'a>,
    /// Position of each token; i32 `[1, rows]`.
    pub positions: MatMut<'a>,
    /// KV slot of each token; i64 `[1, rows]`. −1 = keys and values of the token are not stored.
    pub slots: MatMut<'a>,
    /// Index of the first token of each row, then the end of the last row; i32 `[1, rows + 1]`.
    pub cu_q: MatMut<'a>,
    /// Context length of each row in keys, its token included, 0 for padding; i32 `[1, rows]`.
    pub context_lens: MatMut<'a>,
    /// Sequence slot of each row; i32 `[1, rows]`.
    pub row_seq_slots: MatMut<'a>,
}

/// Arguments of the preparation of one forward pass of a draft model.
#[derive(Debug, Clone, Copy)]
pub struct DraftPassArgs<'a> {
    /// Draft pass within the step, from 0: pass `p` proposes draft token `p` of each row.
    pub pass: usize,
    /// Number of rows to prepare, padding rows included.
    pub rows: usize,
    /// Token ids of the step; i32 `[1, tokens]`.
    pub ids: MatRef<'a>,
    /// Positions of the tokens of the step; i32 `[1, tokens]`.
    pub positions: MatRef<'a>,
    /// Draft tokens of the previous draft passes, by pass and row; i32 `[passes, rows]`.
    pub drafts: MatRef<'a>,
    /// Block tables, of which the first rows are those of KV group 0 by sequence slot; i32 `[at least
    /// sequence_slots, blocks]`.
    pub tables: MatRef<'a>,
    /// Number of tokens per KV block.
    pub block_tokens: usize,
}

/// Stored hidden states that draft models take as input in later steps, in the activation type.
#[derive(Debug)]
pub struct DraftHiddenStates<'a> {
    /// Hidden states of the newest tokens of each sequence slot, `[sequence_slots · states_per_slot,
    /// hidden_size]`: those of the token before the newest known token (if there is one), of the newest known
    /// token, and of the draft tokens that follow the newest known token.
    pub slot_states: MatMut<'a>,
    /// Position of the first stored hidden state of each sequence slot; i32 `[1, sequence_slots]`.
    pub first_positions: MatMut<'a>,
    /// Maximum number of hidden states per sequence slot.
    pub states_per_slot: usize,
    /// Hidden state of the last token of each KV block, `[blocks, hidden_size]`.
    pub boundary_states: MatMut<'a>,
}

/// Output arrays of the sampler, written by [`RowSampling`](crate::RowSampling).
#[derive(Debug)]
pub struct SamplerOutputArrays<'a> {
    /// [`SampledToken`] records as 32-bit words; i32 `[logits_rows, 4]`.
    pub sampled: MatMut<'a>,
    /// Ids of the most likely tokens in descending order of probability; each row has as many ids as its
    /// request specifies; i32 `[logits_rows, max_top]`.
    pub top_ids: MatMut<'a>,
    /// Log-probabilities of `top_ids`; f32 `[logits_rows, max_top]`.
    pub top_logprobs: MatMut<'a>,
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn records_have_no_padding() {
        assert_eq!(size_of::<StagingHeader>(), 64);
        assert_eq!(size_of::<StagedStepRow>(), 32);
        assert_eq!(size_of::<StagedTableChange>(), 12);
        assert_eq!(size_of::<StagedLogitsRow>(), 40);
        assert_eq!(size_of::<StagedLogitEdit>(), 16);
        assert_eq!(size_of::<StagedDraftRow>(), 32);
        assert_eq!(size_of::<SequenceSamplingParams>(), 48);
        assert_eq!(size_of::<LatestToken>(), 12);
        assert_eq!(size_of::<StagedSequenceInit>(), 80);
        assert_eq!(size_of::<SampledToken>(), 16);
    }
}
