//! What the host stages for one step, and what a step leaves behind: records shared with the device.
//!
//! The device twin of every record is in `csrc/step/step.h`; a test compares sizes and offsets. A stage is
//! one buffer, so that a step needs one copy to the device: a header, then seven regions.
//!
//! Legend: S seats, W block table width, L longest request, V vocabulary, T tokens, R rows, Q questions.

mod row_facts;
mod staging;

use device::{MatMut, MatRef};

pub use row_facts::RowFact;
pub(crate) use staging::StageReader;
pub use staging::StagingBuffer;

/// A record as the device reads it.
///
/// # Safety
/// The type is `repr(C)`, has no padding, and every bit pattern is a value.
pub unsafe trait StageRecord: Copy + Send + Sync + 'static {}

macro_rules! records {
    ($($name:ty),*) => {$(
        // SAFETY: `repr(C)` structs of 32- and 64-bit numbers whose sizes add up (checked by a test).
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

/// Where the regions of a stage begin, in bytes, and how many records they hold.
#[derive(Debug, Clone, Copy, Default, PartialEq, Eq)]
#[repr(C)]
pub struct StageHeader {
    /// Records of the rows region.
    pub rows: u32,
    /// Records of the questions region.
    pub logits_rows: u32,
    /// Records of the seat region.
    pub inits: u32,
    /// Words of the words region.
    pub words: u32,
    /// Records of the edits region.
    pub edits: u32,
    /// First byte of the rows.
    pub rows_at: u32,
    /// First byte of the questions.
    pub logits_rows_at: u32,
    /// First byte of the seat records.
    pub inits_at: u32,
    /// First byte of the words.
    pub words_at: u32,
    /// First byte of the edits.
    pub edits_at: u32,
    /// Tokens of the step.
    pub tokens: u32,
    /// Records of the rows as draft layers see them.
    pub drafts: u32,
    /// First byte of those.
    pub drafts_at: u32,
    /// First byte of the facts about rows, row by row.
    pub facts_at: u32,
    /// Words of facts per row.
    pub facts_per_row: u32,
    /// Zero.
    pub reserved: u32,
}

/// One row of the step: `len` tokens of the request on `seat`, from position `start`.
#[derive(Debug, Clone, Copy, Default, PartialEq, Eq)]
#[repr(C)]
pub struct StageRow {
    /// Whose tokens.
    pub seq_slot: i32,
    /// Position of the first one; where the seat knows it, the furthest that it may be.
    pub start: i32,
    /// How many.
    pub len: i32,
    /// Index of the first one in the step.
    pub token: i32,
    /// Index of their ids in the words; −1 − n = the row begins n positions behind the newest token of the seat, whose id
    /// stands for all of its ids until drafts are entered.
    pub ids: i32,
    /// First entry of the block table that is replaced.
    pub table_from: i32,
    /// Entries replaced.
    pub table_len: i32,
    /// Index of the new entries in the words.
    pub table_at: i32,
}

/// A request takes a seat.
#[derive(Debug, Clone, Copy, Default, PartialEq)]
#[repr(C)]
pub struct StageSequenceInit {
    /// Which seat.
    pub seq_slot: i32,
    /// Index of known ids in the words.
    pub history_at: i32,
    /// Position of the first of them.
    pub history_from: i32,
    /// How many.
    pub history_len: i32,
    /// Index of `ceil(V / 32)` mask words; −1 = none.
    pub mask_at: i32,
    /// Zero.
    pub reserved: [i32; 3],
    /// How its tokens are chosen.
    pub params: SequenceSamplingParams,
}

/// What is asked about the logits behind one token of the step.
#[derive(Debug, Clone, Copy, Default, PartialEq, Eq)]
#[repr(C)]
pub struct StageLogitsRow {
    /// The token of the step, behind which the one asked for comes; −1 = padding, nothing is asked.
    pub token: i32,
    /// Whose rules.
    pub seq_slot: i32,
    /// Drafts in front of it in its row: all must be right.
    pub draft_index: i32,
    /// 1 = the step's next token is a draft of what is asked for; 0 = nothing is guessed.
    pub has_draft: i32,
    /// The token, where only its log-probability is asked for; −1 = choose one.
    pub known_token: i32,
    /// Ids to report beside the token; −1 = no log-probabilities at all.
    pub top: i32,
    /// First of its edits.
    pub edits_at: i32,
    /// How many.
    pub edits: i32,
}

/// Changes one logit, always or behind certain ids.
#[derive(Debug, Clone, Copy, Default, PartialEq)]
#[repr(C)]
pub struct StageEdit {
    /// Whose logit; ids beyond the row have none and are passed over.
    pub id: u32,
    /// Added; −∞ masks.
    pub value: f32,
    /// Index in the words of the ids that must stand before the position.
    pub when_at: i32,
    /// How many of them; 0 = always, below 0 = at positions below `when_at`.
    pub when_len: i32,
}

/// A row of the step as a draft layer sees it: `len` known tokens, then `drafts` drafts.
#[derive(Debug, Clone, Copy, Default, PartialEq, Eq)]
#[repr(C)]
pub struct DraftRow {
    /// Whose tokens.
    pub seq_slot: i32,
    /// How many are known.
    pub len: i32,
    /// Index of the first one in the step.
    pub token: i32,
    /// Drafts behind them that the layer makes.
    pub drafts: i32,
    /// 1 = the seat holds the state before the first token; 0 = it lies elsewhere.
    pub state_in_slot: i32,
    /// It is the one at the end of this block; −1 = it lies elsewhere, and with `held` 0 it is zeros.
    pub boundary_block: i32,
    /// Zero.
    pub reserved: [i32; 2],
}

/// The newest token of the request on a seat, which no row has forwarded yet.
#[derive(Debug, Clone, Copy, Default, PartialEq, Eq)]
#[repr(C)]
pub struct LatestToken {
    /// The token.
    pub token: i32,
    /// Its position.
    pub position: i32,
    /// Whether the draft behind it is right: a row may have more of them.
    pub draft_accepted: i32,
}

/// How the tokens of the request on a seat are chosen; held on the device for the life of the seat.
#[derive(Debug, Clone, Copy, Default, PartialEq)]
#[repr(C)]
pub struct SequenceSamplingParams {
    /// Softmax temperature; below `1e-5` the likeliest id is taken.
    pub temperature: f32,
    /// Probability kept; 1 = all.
    pub top_p: f32,
    /// Least probability, relative to the likeliest id; 0 = off.
    pub min_p: f32,
    /// Ids kept; 0 = all.
    pub top_k: i32,
    /// Divides positive and multiplies negative logits of ids in prompt or output; 1 = off.
    pub repetition: f32,
    /// Subtracted per occurrence in the output.
    pub frequency: f32,
    /// Subtracted once for an occurrence in the output.
    pub presence: f32,
    /// [`RULE_MASKED`], [`RULE_HISTORY`].
    pub flags: u32,
    /// Key of the request's noise.
    pub key: u64,
    /// Positions from here on are output.
    pub prompt_len: i32,
    /// Zero.
    pub reserved: i32,
}

/// Ids whose mask bit is clear are out.
pub const RULE_MASKED: u32 = 1;
/// A rule reads earlier ids: sampled ones are appended to the history.
pub const RULE_HISTORY: u32 = 2;

/// The answer to one question.
#[derive(Debug, Clone, Copy, Default, PartialEq)]
#[repr(C)]
pub struct SampledToken {
    /// The token.
    pub token: i32,
    /// [`SAMPLE_OK`], [`SAMPLE_DRAFT_ACCEPTED`], [`SAMPLE_NON_FINITE`] or [`SAMPLE_ALL_MASKED`].
    pub status: u32,
    /// Its log-probability under the raw logits, if asked for.
    pub logprob: f32,
    /// Its place among all ids, from 1; if asked for.
    pub rank: u32,
}

/// A token was chosen or scored.
pub const SAMPLE_OK: u32 = 0;
/// A logit is NaN or infinite.
pub const SAMPLE_NON_FINITE: u32 = 1;
/// The rules mask every id.
pub const SAMPLE_ALL_MASKED: u32 = 2;
/// A token was chosen, and the draft of it is right; or chance lets that draft stand, and it is the token.
pub const SAMPLE_DRAFT_ACCEPTED: u32 = 3;

/// A stage on the device.
#[derive(Debug, Clone, Copy)]
pub struct StageView<'a> {
    /// The stage's bytes as words, i32 `[1, n]`, from the header on.
    pub bytes: MatRef<'a>,
    /// Rows to prepare: those of the stage, or more where a captured graph has a fixed number. Rows
    /// beyond the stage's are padding: no token, no key.
    pub rows: usize,
    /// Tokens to lay out, likewise; those beyond the stage's get id 0, position 0 and slot −1.
    pub tokens: usize,
    /// Questions to lay out, likewise.
    pub logits_rows: usize,
}

/// Per-request state on the device.
#[derive(Debug)]
pub struct SequenceSlotArrays<'a> {
    /// [`LatestToken`] tokens as words; i32 `[S, 3]`.
    pub latest: MatMut<'a>,
    /// Block tables, i32 `[S, W]`.
    pub tables: MatMut<'a>,
    /// Known ids by position, where a rule reads them; i32 `[S, L]`.
    pub history: MatMut<'a>,
    /// Masks of allowed ids, one bit each; i32 `[S, ceil(V / 32)]`.
    pub masks: MatMut<'a>,
    /// [`SequenceSamplingParams`] as words; i32 `[S, 12]`.
    pub params: MatMut<'a>,
}

/// What a forward pass reads, written by `prepare`.
#[derive(Debug)]
pub struct StepArrays<'a> {
    /// i32 `[1, T]`.
    pub ids: MatMut<'a>,
    /// i32 `[1, T]`.
    pub positions: MatMut<'a>,
    /// i64 `[1, T]`; −1 stores nothing.
    pub slots: MatMut<'a>,
    /// First token of each row, and the end of the last; i32 `[1, R + 1]`.
    pub cu_q: MatMut<'a>,
    /// Keys of each row, its own tokens included; i32 `[1, R]`.
    pub context_lens: MatMut<'a>,
    /// Token of each logits row, 0 for padding; i32 `[1, Q]`.
    pub logits_indices: MatMut<'a>,
    /// [`RowFact`]s of each row, 0 for padding; i32 `[facts, R]`.
    pub row_facts: MatMut<'a>,
}

/// What `prepare` has laid out of the step that questions are about, and what becomes of its drafts.
#[derive(Debug, Clone, Copy)]
pub struct PreparedStep<'a> {
    /// i32 `[1, T]`.
    pub ids: MatRef<'a>,
    /// i32 `[1, T]`.
    pub positions: MatRef<'a>,
    /// Who says which drafts stand.
    pub verification: DraftVerification,
}

/// Who says which drafts stand.
#[derive(Debug, Clone, Copy, Default, PartialEq, Eq)]
pub enum DraftVerification {
    /// Nobody: there are none.
    #[default]
    NoDrafts,
    /// The answers: one that is the token which was chosen.
    MatchSampled,
    /// Chance, for benchmarks.
    Synthetic {
        /// Of 1000 drafts so many stand.
        per_mille: u16,
    },
}

/// What a pass of a draft layer reads, written by `prepare_draft_pass`: a row of one token for each row of the step.
#[derive(Debug)]
pub struct DraftPassArrays<'a> {
    /// i32 `[1, R]`.
    pub ids: MatMut<'a>,
    /// i32 `[1, R]`.
    pub positions: MatMut<'a>,
    /// i64 `[1, R]`; −1 stores nothing.
    pub slots: MatMut<'a>,
    /// i32 `[1, R + 1]`.
    pub cu_q: MatMut<'a>,
    /// Keys of each row, its own token included, 0 for padding; i32 `[1, R]`.
    pub context_lens: MatMut<'a>,
    /// Seat of each row; i32 `[1, R]`.
    pub row_seq_slots: MatMut<'a>,
}

/// What such a pass is made of.
#[derive(Debug, Clone, Copy)]
pub struct DraftPass<'a> {
    /// Which one, from 0.
    pub pass: usize,
    /// Rows to lay out.
    pub rows: usize,
    /// Ids of the step, i32 `[1, T]`.
    pub ids: MatRef<'a>,
    /// Positions of the step, i32 `[1, T]`.
    pub positions: MatRef<'a>,
    /// What the passes before have made, i32 `[passes, R]`.
    pub drafts: MatRef<'a>,
    /// Block tables by seat, i32 `[S, W]`.
    pub tables: MatRef<'a>,
    /// Positions per block.
    pub block_tokens: usize,
}

/// Hidden states that draft layers go on from, in the type of activations. H channels.
#[derive(Debug)]
pub struct DraftHiddenStates<'a> {
    /// Those of each seat's newest tokens, `[S · depth, H]`: of the one before the newest that is known, if there is one, of
    /// that one, and of the drafts behind it.
    pub slot_states: MatMut<'a>,
    /// Position of the first of them, i32 `[1, S]`.
    pub first_positions: MatMut<'a>,
    /// How many a seat has room for.
    pub states_per_slot: usize,
    /// Those at the ends of blocks, `[blocks, H]`.
    pub boundary_states: MatMut<'a>,
}

/// What `sample_rows` writes.
#[derive(Debug)]
pub struct SamplerOutputArrays<'a> {
    /// [`SampledToken`]s as words; i32 `[Q, 4]`.
    pub sampled: MatMut<'a>,
    /// Likeliest ids in order, as many as asked for; i32 `[Q, most]`.
    pub top_ids: MatMut<'a>,
    /// Their log-probabilities; f32 `[Q, most]`.
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
