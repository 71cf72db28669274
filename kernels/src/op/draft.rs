//! Ops before and after the forward passes of a draft model in speculative decoding: input preparation,
//! hidden states, argmax and insertion of draft tokens.

use device::{MatMut, MatRef};

use crate::step::{DraftHiddenStates, DraftPassArgs, DraftPassArrays};
use crate::{AllGatherFn, VocabShard};

/// Prepares the inputs of pass `pass` of a draft model, one token for each row of the step: in pass 0 the
/// newest known token of the row, later the draft token of the previous pass. Rows that propose at most
/// `pass` draft tokens become padding rows in this pass: token id 0, context length 0 and KV slot −1.
#[derive(Debug)]
pub struct DraftPassPreparation<'a, 'b> {
    /// Staged inputs of the step.
    pub stage: MatRef<'a>,
    /// Outputs: the input arrays of the draft model for this pass.
    pub arrays: &'a mut DraftPassArrays<'b>,
    /// Draft pass (0 = first draft token), number of rows, and the arrays from which the inputs of the pass
    /// are computed.
    pub pass: &'a DraftPassArgs<'a>,
}

/// Gathers the hidden states that an MTP module or an EAGLE-3 head combines with its input tokens. The input
/// token at position `p` is combined with the hidden state of the target model at position `p - 1`.
///
/// Without `hidden`, each of the first `rows` draft rows has one input token: its first token. With `hidden`,
/// all tokens of these rows are input tokens: the state of a row's first token comes from `states`, because an
/// earlier step computed it, and the states of its other tokens from `hidden`.
#[derive(Debug)]
pub struct DraftHiddenStateGather<'a> {
    /// Staged inputs of the step.
    pub stage: MatRef<'a>,
    /// Positions of the tokens of the step; i32 `[1, tokens]`.
    pub positions: MatRef<'a>,
    /// Number of draft rows to process: the first `rows` entries of the draft rows in `stage`.
    pub rows: usize,
    /// Gathered hidden states: `[rows, hidden_size]`, or `[tokens, hidden_size]` with `hidden`.
    pub y: MatMut<'a>,
    /// Hidden states of the tokens of the step, `[tokens, hidden_size]`.
    pub hidden: Option<MatRef<'a>>,
    /// Hidden states stored by earlier steps.
    pub states: &'a DraftHiddenStates<'a>,
}

/// Stores hidden states of a step for later steps: for each row, the states of the newest tokens, which the
/// next step of the request needs, and the state of the last token of each full KV block.
#[derive(Debug)]
pub struct DraftHiddenStateWrite<'a, 'b> {
    /// Staged inputs of the step.
    pub stage: MatRef<'a>,
    /// Positions of the tokens of the step; i32 `[1, tokens]`.
    pub positions: MatRef<'a>,
    /// Arrays to which the hidden states are written: by sequence slot, and by KV block.
    pub states: &'a mut DraftHiddenStates<'b>,
    /// Hidden states of the tokens of the step, `[tokens, hidden_size]`.
    pub hidden: MatRef<'a>,
    /// Number of draft rows to process: the first `rows` entries of the draft rows in `stage`.
    pub rows: usize,
    /// Block tables by sequence slot; i32 `[sequence_slots, blocks]`.
    pub tables: MatRef<'a>,
    /// Number of tokens per KV block.
    pub block_tokens: usize,
}

/// Selects draft tokens greedily: `drafts[pass, first + i]` becomes the lowest token id with the largest
/// logit in row `i`.
#[derive(Debug)]
pub struct DraftArgmax<'a> {
    /// Draft tokens by draft pass and row; i32 `[passes, rows]`.
    pub drafts: MatMut<'a>,
    /// Draft pass (0 = first draft token), and the row of `drafts` to which the selected tokens are written.
    pub pass: usize,
    /// Column of `drafts` that row 0 of `logits` is written to; row `i` is written to column `first + i`.
    pub first: usize,
    /// Logits; f32 `[logits_rows, vocab_size]`.
    pub logits: MatRef<'a>,
}

/// [`DraftArgmax`] for a vocab-parallel LM head, where every rank has the logits of a vocabulary shard: each
/// rank sends the largest logit of its shard and the token id of that logit for each row in an all-gather,
/// and every rank then selects the argmax of the whole row.
///
/// Errors: [`DeviceError::PeerRanksFailed`](device::DeviceError::PeerRanksFailed) if `gather` fails.
pub struct VocabParallelDraftArgmax<'a, 'b> {
    /// Draft tokens by draft pass and row; i32 `[passes, rows]`.
    pub drafts: MatMut<'a>,
    /// Draft pass (0 = first draft token), and the row of `drafts` to which the selected tokens are written.
    pub pass: usize,
    /// Column of `drafts` that row 0 of `logits` is written to; row `i` is written to column `first + i`.
    pub first: usize,
    /// Logits of this shard; f32 `[logits_rows, shard.cols]`.
    pub logits: MatRef<'a>,
    /// Vocabulary shard of this rank: the token ids of the columns of `logits`.
    pub shard: &'a VocabShard,
    /// All-gather over the ranks of the vocab-parallel LM head.
    pub gather: &'a mut AllGatherFn<'b>,
}

/// Maps the first `count` draft tokens of a pass from ids of the draft vocabulary to ids of the target model;
/// used if the draft model has a smaller vocabulary (EAGLE-3).
#[derive(Debug)]
pub struct DraftIdTranslation<'a> {
    /// Draft tokens, replaced in place; i32 `[passes, rows]`.
    pub drafts: MatMut<'a>,
    /// Draft pass (0 = first draft token), and the row of `drafts` whose ids are mapped from the draft
    /// vocabulary to the target vocabulary.
    pub pass: usize,
    /// Number of draft tokens to map: the first `count` columns of row `pass`.
    pub count: usize,
    /// Target token id of each draft token id; i32 `[1, draft_vocab_size]`.
    pub ids: MatRef<'a>,
}

/// Inserts the draft tokens of the first `rows` rows of a stage into the inputs of the target model, after
/// the known token ids of each row.
#[derive(Debug)]
pub struct DraftInsertion<'a> {
    /// Staged inputs of the step.
    pub stage: MatRef<'a>,
    /// Positions of the tokens of the step; i32 `[1, tokens]`.
    pub positions: MatRef<'a>,
    /// Number of draft rows to process: the first `rows` entries of the draft rows in `stage`.
    pub rows: usize,
    /// Token ids of the step, which the target model verifies; i32 `[1, tokens]`.
    pub ids: MatMut<'a>,
    /// Token ids of requests by position, for each sequence slot; i32 `[sequence_slots, max_len]`.
    pub history: MatMut<'a>,
    /// Draft tokens by draft pass and row; i32 `[passes, rows]`.
    pub drafts: MatRef<'a>,
}
