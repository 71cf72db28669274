//! Request submissions, and reasons to reject them before any step.

use kvcache::{BlockKey, ExtraKeys};
use protocol::{Replica, RequestId, SamplingParams, Token};
use std::sync::Arc;

/// A submitted request: one choice (`n`) of one prompt.
#[derive(Debug, Clone)]
pub struct RequestSubmission {
    /// Request id, unique for the life of the process.
    pub id: RequestId,
    /// Token ids of the prompt.
    pub tokens: Vec<Token>,
    /// Maximum number of output tokens; 0 = only compute the prompt's log-probabilities or pooling result.
    pub max_tokens: u32,
    /// Sampling parameters.
    pub sampling: SamplingParams,
    /// Index of the first output token that grammar bitmasks constrain. Each row that samples it or a later
    /// token is `masked` and waits for the previous token. `None` = unconstrained. The submitter arranges for
    /// the bitmasks to be computed.
    pub first_masked_token: Option<u32>,
    /// Philox key of the request's random numbers, drawn by the submitter.
    pub rng_key: u64,
    /// EOS token ids, which end the request; empty to ignore EOS.
    pub eos_ids: Vec<Token>,
    /// Stop token ids of the client, which end the request.
    pub stop_ids: Vec<Token>,
    /// Priority: smaller values are served first, equal priorities in order of arrival.
    pub priority: i32,
    /// Extra keys of the request's block hashes (`ExtraKeys::salted`); `None` = none.
    pub extra_keys: Option<Arc<ExtraKeys>>,
    /// Replica named by the client; `None` = chosen by the router.
    pub replica: Option<Replica>,
    /// Keys of the prompt's full blocks, computed with the scheduler's `PromptHasher` and the same
    /// `extra_keys`. The scheduler computes missing keys, which adds to the step time.
    pub block_keys: Vec<BlockKey>,
}

#[cfg(test)]
impl RequestSubmission {
    /// Returns a greedy request for 8 output tokens after prompt `tokens`.
    pub(crate) fn greedy(id: u64, tokens: Vec<Token>, hasher: &kvcache::BlockHasher) -> Self {
        let mut keys = Vec::new();
        hasher.extend_keys(&mut keys, &tokens, None);
        Self {
            id: RequestId(id),
            tokens,
            max_tokens: 8,
            sampling: SamplingParams::greedy(),
            first_masked_token: None,
            rng_key: 0,
            eos_ids: Vec::new(),
            stop_ids: Vec::new(),
            priority: 0,
            extra_keys: None,
            replica: None,
            block_keys: keys,
        }
    }
}

/// Reason to reject a request before any step: the request is invalid, a queue is full, or a prerequisite of
/// the request (such as its grammar) is unavailable.
#[derive(Debug, Clone, PartialEq, Eq, thiserror::Error)]
pub enum RejectReason {
    /// The prompt has no tokens.
    #[error("the prompt is empty")]
    EmptyPrompt,
    /// A token id is outside the vocabulary.
    #[error("token id {token} is not below the vocabulary size {vocab_size}")]
    UnknownToken {
        /// First invalid token id.
        token: Token,
        /// Vocabulary size.
        vocab_size: u32,
    },
    /// The prompt is as long as the context length or longer, so no output token fits. The prompt of a
    /// pooling request may be as long as the context length.
    #[error(
        "the prompt has {prompt_len} tokens, it must be shorter than the context length of {max_model_len}"
    )]
    PromptTooLong {
        /// Number of prompt tokens.
        prompt_len: u64,
        /// Maximum length of prompt plus output.
        max_model_len: u32,
    },
    /// Prompt and output together exceed `max_model_len`.
    #[error(
        "{prompt_len} prompt tokens and max_tokens {max_tokens} exceed the context length of \
         {max_model_len}"
    )]
    TotalTooLong {
        /// Number of prompt tokens.
        prompt_len: u64,
        /// Requested maximum number of output tokens.
        max_tokens: u32,
        /// Maximum length of prompt plus output.
        max_model_len: u32,
    },
    /// The KV pool cannot hold the request even alone.
    #[error("the request needs {blocks} KV blocks, the pool has {pool}")]
    PoolTooSmall {
        /// Blocks needed by prompt plus output.
        blocks: u32,
        /// Blocks in the pool.
        pool: u32,
    },
    /// The waiting queue has its maximum number of requests.
    #[error("{waiting} requests are waiting, the limit is {cap}")]
    QueueFull {
        /// Number of waiting requests.
        waiting: u32,
        /// Configured limit.
        cap: u32,
    },
    /// The request would exceed the maximum number of tokens in the waiting queue.
    #[error("{waiting} tokens are waiting and {requested} more exceed the limit of {cap}")]
    QueueTokensFull {
        /// Number of tokens of waiting requests.
        waiting: u64,
        /// Number of prompt tokens of this request.
        requested: u64,
        /// Configured limit.
        cap: u64,
    },
    /// A prerequisite of the request (such as its grammar) is invalid; detected before the submission.
    #[error("{message}")]
    InvalidParameter {
        /// Invalid request field.
        param: String,
        /// Error message for the client.
        message: String,
    },
    /// A prerequisite of the request (such as its grammar) is unavailable; the request itself is valid.
    #[error("{message}")]
    TemporarilyUnavailable {
        /// Error message.
        message: String,
    },
    /// The component that provides a prerequisite of the request (such as its grammar) is overloaded or lacks
    /// resources.
    #[error("{message}")]
    Overloaded {
        /// Error message for the client.
        message: String,
    },
    /// The named replica does not exist.
    #[error("replica {replica} does not exist, the number of replicas is {replicas}")]
    UnknownReplica {
        /// Requested replica.
        replica: u16,
        /// Number of configured replicas.
        replicas: u16,
    },
}
