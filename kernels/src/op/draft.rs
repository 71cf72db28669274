//! Forward passes of a draft model. Legend: T tokens, R rows, S sequence slots, W blocks of a block table, L
//! tokens of a history.

use device::{MatMut, MatRef};

use crate::step::{DraftHiddenStates, DraftPass, DraftPassArrays};
use crate::{GatherFn, VocabShard};

/// Prepares the inputs of pass `pass` of a draft model: the newest token of each row of the stage with more
/// than `pass` draft tokens. Other rows are padding: no key, id 0, KV slot -1.
#[derive(Debug)]
pub struct DraftPassPreparation<'a, 'b> {
    /// Staged inputs of the step.
    pub stage: MatRef<'a>,
    /// Arrays of the pass.
    pub arrays: &'a mut DraftPassArrays<'b>,
    /// Index, rows and inputs of the pass.
    pub pass: &'a DraftPass<'a>,
}

/// Gathers the hidden state of the preceding token: for the first token of each of the first `rows` rows of a
/// stage, or with `hidden` for all tokens of those rows.
#[derive(Debug)]
pub struct DraftInputGather<'a> {
    /// Staged inputs of the step.
    pub stage: MatRef<'a>,
    /// Positions of the tokens of the step; i32 `[1, T]`
    pub positions: MatRef<'a>,
    /// Rows of the stage.
    pub rows: usize,
    /// `[rows, H]`, or `[T, H]` with `hidden`.
    pub y: MatMut<'a>,
    /// Hidden states of the step; `[T, H]`
    pub hidden: Option<MatRef<'a>>,
    /// Stored hidden states.
    pub states: &'a DraftHiddenStates<'a>,
}

/// Stores hidden states of a step: those that the next step of each row begins with, and those at block
/// boundaries.
#[derive(Debug)]
pub struct DraftStateStore<'a, 'b> {
    /// Staged inputs of the step.
    pub stage: MatRef<'a>,
    /// Positions of the tokens of the step; i32 `[1, T]`
    pub positions: MatRef<'a>,
    /// Stored hidden states.
    pub states: &'a mut DraftHiddenStates<'b>,
    /// Hidden states of the step; `[T, H]`
    pub hidden: MatRef<'a>,
    /// Rows of the stage.
    pub rows: usize,
    /// Block tables by sequence slot; i32 `[S, W]`
    pub tables: MatRef<'a>,
    /// Tokens of a KV block.
    pub block_tokens: usize,
}

/// Writes `drafts[pass, first + i]`: the lowest id with the largest logit of row `i`.
#[derive(Debug)]
pub struct DraftArgmax<'a> {
    /// i32 `[passes, R]`
    pub drafts: MatMut<'a>,
    /// Row of `drafts`.
    pub pass: usize,
    /// First column of `drafts`.
    pub first: usize,
    /// f32 `[n, V]`
    pub logits: MatRef<'a>,
}

/// [`DraftArgmax`] where every rank has the logits of a vocabulary shard: the ranks gather one candidate per
/// row, and all of them select the argmax of the whole row.
///
/// Errors: [`DeviceError::PeerRanksFailed`](device::DeviceError::PeerRanksFailed) if `gather` fails.
pub struct VocabParallelDraftArgmax<'a, 'b> {
    /// i32 `[passes, R]`
    pub drafts: MatMut<'a>,
    /// Row of `drafts`.
    pub pass: usize,
    /// First column of `drafts`.
    pub first: usize,
    /// Logits of this shard; f32 `[n, shard.cols]`
    pub logits: MatRef<'a>,
    /// Vocabulary shard of this rank.
    pub shard: &'a VocabShard,
    /// All-gather of the ranks.
    pub gather: &'a mut GatherFn<'b>,
}

/// Maps the first `count` draft token ids of a pass to token ids of the target model.
#[derive(Debug)]
pub struct DraftIdMap<'a> {
    /// i32 `[passes, R]`
    pub drafts: MatMut<'a>,
    /// Row of `drafts`.
    pub pass: usize,
    /// Number of draft tokens of the pass.
    pub count: usize,
    /// Target token id by draft token id; i32 `[1, V]`
    pub ids: MatRef<'a>,
}

/// Inserts the draft tokens of the first `rows` rows of a stage after their known token ids.
#[derive(Debug)]
pub struct DraftInsertion<'a> {
    /// Staged inputs of the step.
    pub stage: MatRef<'a>,
    /// Positions of the tokens of the step; i32 `[1, T]`
    pub positions: MatRef<'a>,
    /// Rows of the stage.
    pub rows: usize,
    /// Token ids of the step; i32 `[1, T]`
    pub ids: MatMut<'a>,
    /// Token ids by sequence slot; i32 `[S, L]`
    pub history: MatMut<'a>,
    /// i32 `[passes, R]`
    pub drafts: MatRef<'a>,
}
