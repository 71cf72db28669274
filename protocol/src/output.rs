//! Output of a step, sent by an executor.

use crate::{Epoch, StepId, ThinVec, Token, TokenVec};
use serde::{Deserialize, Serialize};

/// Output of one step: one entry per batch row, in the same order. A step in which no row samples has an
/// output too.
#[derive(Debug, Clone, PartialEq, Serialize, Deserialize)]
pub struct StepOutput {
    /// Step id.
    pub step: StepId,
    /// Epoch of the executor group: a number that increases when the executors are restarted.
    pub epoch: Epoch,
    /// One result per batch row.
    pub rows: Vec<RowOutput>,
    /// Time spent in each part of the step.
    pub timing: StepTiming,
    /// Number of tokens routed to each expert in this step, without experts that got no token. Empty for
    /// models without experts, or if routing is not counted.
    #[serde(with = "crate::packed_list")]
    pub expert_tokens: Vec<ExpertTokenCount>,
}

/// Number of tokens routed to one expert of a layer.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct ExpertTokenCount {
    /// Layer index, from 0; dense layers are included in the numbering.
    pub layer: u16,
    /// Expert index, from 0.
    pub expert: u16,
    /// Number of tokens.
    pub tokens: u32,
}

/// Result of one batch row.
#[derive(Debug, Clone, PartialEq, Default, Serialize, Deserialize)]
pub struct RowOutput {
    /// Sampled token ids: accepted draft tokens, then one token sampled after them. Empty for a row that does
    /// not sample.
    pub sampled_tokens: TokenVec,
    /// Number of verified draft tokens: at most `BatchRow::drafts`, fewer if the proposer had fewer.
    pub drafted: u8,
    /// Number of accepted draft tokens.
    pub accepted: u8,
    /// Error of the row, such as an overdue grammar bitmask; a row with an error emits no tokens. `None` = no
    /// error.
    pub error: Option<RowError>,
    /// Logprobs, one entry per emitted token, if requested; otherwise empty.
    pub logprobs: ThinVec<TokenLogprobs>,
    /// Results about the prompt, if requested. Boxed because they are rare, and steps have thousands of rows.
    pub prompt: Option<Box<PromptResults>>,
}

impl RowOutput {
    /// Returns the results about the prompt, for writing.
    pub fn prompt_mut(&mut self) -> &mut PromptResults {
        self.prompt.get_or_insert_default()
    }
}

/// Results of one row about the prompt tokens.
#[derive(Debug, Clone, PartialEq, Default, Serialize, Deserialize)]
pub struct PromptResults {
    /// Logprobs of the prompt positions `start + 1 ..` of the chunk, one entry per position, if requested;
    /// otherwise empty.
    pub logprobs: Vec<TokenLogprobs>,
    /// Result of the pooling method, in the row that ends a pooling request's prompt; otherwise empty.
    #[serde(with = "crate::packed_list")]
    pub pooled: Vec<f32>,
}

/// Error of a single row; other rows of the step are unaffected.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Serialize, Deserialize)]
pub enum RowError {
    /// The logits contain NaN or infinity.
    NonFiniteLogits,
    /// All token ids were masked, so that none could be sampled.
    AllMasked,
    /// The grammar bitmask was overdue: all tokens of the row were forwarded, but nothing was sampled.
    #[serde(rename = "MaskLate")]
    MaskOverdue,
}

/// Logprobs of one token under the raw logits (log-softmax in f32).
#[derive(Debug, Clone, PartialEq, Serialize, Deserialize)]
pub struct TokenLogprobs {
    /// Token id.
    pub token: Token,
    /// Natural log-probability.
    pub logprob: f32,
    /// Rank of the token among all token ids by logprob, from 1.
    pub rank: u32,
    /// Top-k tokens with their logprobs, highest first; ties by lowest id.
    #[serde(with = "crate::packed_list")]
    pub top_logprobs: Vec<(Token, f32)>,
}

/// Nanoseconds spent in each part of a step on the executor.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Default, Serialize, Deserialize)]
pub struct StepTiming {
    /// Time to prepare the inputs.
    pub inputs_ns: u64,
    /// Time of the forward pass, including logits.
    pub forward_ns: u64,
    /// Time of sampling.
    pub sample_ns: u64,
    /// Whether the step replayed a captured graph.
    pub replayed: bool,
    /// Time of collectives in the forward pass and sampling.
    pub collectives: CollectiveTiming,
}

/// Nanoseconds spent in each kind of collective, including the wait for other ranks; 0 with a single rank.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Default, Serialize, Deserialize)]
pub struct CollectiveTiming {
    /// Time of all-reduces over the TP ranks of a replica.
    pub tp_all_reduce_ns: u64,
    /// Time of all-gathers over the TP ranks of a replica, for sampling.
    pub tp_all_gather_ns: u64,
    /// Time of all-gathers of hidden states (a row per token) over the replicas, as inputs of the experts.
    pub dp_all_gather_rows_ns: u64,
    /// Time of reduce-scatters of expert outputs, over replicas.
    pub dp_reduce_scatter_ns: u64,
    /// Time of the exchange of row counts before the all-to-all: each replica sends to every other replica
    /// the number of rows that it will send.
    pub dp_exchange_counts_ns: u64,
    /// Time of all-to-alls over replicas: of hidden states to the experts (dispatch), and of expert outputs
    /// back (combine).
    pub dp_all_to_all_ns: u64,
}
