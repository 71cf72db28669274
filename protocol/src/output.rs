//! What an executor answers to a batch.

use crate::{Epoch, StepId, ThinVec, Token, TokenVec};
use serde::{Deserialize, Serialize};

/// Result of one step: one entry per batch row, in the same order. A step that sampled nothing still answers.
#[derive(Debug, Clone, PartialEq, Serialize, Deserialize)]
pub struct StepOutput {
    /// The step answered.
    pub step: StepId,
    /// Group generation the executor belongs to.
    pub epoch: Epoch,
    /// One result per batch row.
    pub rows: Vec<RowOutput>,
    /// Where the time went.
    pub timing: StepTiming,
    /// What the routers of this step chose, by layer and expert, without those that got nothing. Empty where there are
    /// no experts, or where they are not counted.
    #[serde(with = "crate::packed_list")]
    pub expert_tokens: Vec<ExpertTokenCount>,
}

/// Tokens that one expert of a layer got.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct ExpertTokenCount {
    /// The layer, from 0; dense ones count.
    pub layer: u16,
    /// The expert, from 0.
    pub expert: u16,
    /// How many.
    pub tokens: u32,
}

/// Result of one row.
#[derive(Debug, Clone, PartialEq, Default, Serialize, Deserialize)]
pub struct RowOutput {
    /// Sampled ids: accepted drafts, then one more. Empty for a row that does not sample.
    pub sampled_tokens: TokenVec,
    /// Drafts verified: those of the row, or fewer where the drafter had no more.
    pub drafted: u8,
    /// Of these, accepted.
    pub accepted: u8,
    /// Set if the row failed, or its mask was late; nothing was emitted then.
    pub error: Option<RowError>,
    /// One entry per emitted id, if asked for; else empty.
    pub logprobs: ThinVec<TokenLogprobs>,
    /// One entry per prompt position `start + 1 ..` of the chunk, if asked for; else empty.
    pub prompt_logprobs: ThinVec<TokenLogprobs>,
}

/// Why a single row failed while its neighbours went on.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Serialize, Deserialize)]
pub enum RowError {
    /// Logits held NaN or infinity.
    NonFiniteLogits,
    /// Every id was masked.
    AllMasked,
    /// Its mask did not come in time: all tokens of the row were forwarded, but nothing was sampled.
    #[serde(rename = "MaskLate")]
    MaskOverdue,
}

/// Log-probability of one token under the raw logits (log-softmax in f32).
#[derive(Debug, Clone, PartialEq, Serialize, Deserialize)]
pub struct TokenLogprobs {
    /// The token.
    pub token: Token,
    /// Its natural log-probability.
    pub logprob: f32,
    /// Its rank among all ids, from 1.
    pub rank: u32,
    /// The most likely ids, best first, lowest id first on ties.
    #[serde(with = "crate::packed_list")]
    pub top_logprobs: Vec<(Token, f32)>,
}

/// Nanoseconds spent per part of a step on the executor.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Default, Serialize, Deserialize)]
pub struct StepTiming {
    /// Preparing inputs.
    pub inputs_ns: u64,
    /// Forward pass, logits included.
    pub forward_ns: u64,
    /// Sampling.
    pub sample_ns: u64,
    /// Whether the step was a replay of a captured graph.
    pub replayed: bool,
    /// What the forward pass and the sampling spent with other ranks.
    pub collectives: CollectiveTiming,
}

/// Nanoseconds spent in each collective that steps call, the wait for the other ranks included; 0 where there are none.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Default, Serialize, Deserialize)]
pub struct CollectiveTiming {
    /// Sums over the ranks of a replica.
    pub tp_all_reduce_ns: u64,
    /// What the ranks of a replica tell each other to choose tokens.
    pub tp_all_gather_ns: u64,
    /// Rows brought to the experts of all replicas.
    pub dp_all_gather_rows_ns: u64,
    /// Sums of what those experts made of them.
    pub dp_reduce_scatter_ns: u64,
    /// Numbers of rows that replicas send to the experts of others.
    pub dp_exchange_counts_ns: u64,
    /// These rows, and what those experts made of them.
    pub dp_all_to_all_ns: u64,
}
