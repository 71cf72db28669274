//! What a user asked, and why it may be refused before any step.

use kvcache::{BlockKey, ExtraKeys};
use protocol::{Replica, RequestId, SamplingParams, Token};
use std::sync::Arc;

/// One request: one choice of one prompt.
#[derive(Debug, Clone)]
pub struct RequestSubmission {
    /// Unique for the life of the process.
    pub id: RequestId,
    /// Ids of the prompt.
    pub tokens: Vec<Token>,
    /// Tokens to produce at most; 0 = only score the prompt.
    pub max_tokens: u32,
    /// How tokens are chosen.
    pub sampling: SamplingParams,
    /// The token of the output, counted from 0, from which on masks limit what may be sampled: each row that samples
    /// there is `masked` and waits for the token before it. `None` = no mask. Whoever submits sees to it that the masks
    /// are made.
    pub first_masked_token: Option<u32>,
    /// Key of the request's random numbers, drawn by the submitter.
    pub rng_key: u64,
    /// Ids that end the request as end of text; empty if they shall be ignored.
    pub eos_ids: Vec<Token>,
    /// Ids that end the request because the user said so.
    pub stop_ids: Vec<Token>,
    /// Smaller is served first; equal ones in order of arrival.
    pub priority: i32,
    /// What sets this request's cache blocks apart (`ExtraKeys::salted`); `None` = nothing.
    pub extra_keys: Option<Arc<ExtraKeys>>,
    /// The replica to use; `None` = the engine chooses.
    pub replica: Option<Replica>,
    /// Keys of the prompt's full blocks, from the engine's `PromptHasher` and the same `extra`.
    /// Missing ones are computed by the engine, at the cost of its step time.
    pub block_keys: Vec<BlockKey>,
}

#[cfg(test)]
impl RequestSubmission {
    /// A greedy request for 8 tokens behind `tokens`.
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

/// Why a request was refused: the user's fault or a full queue, never a failure.
#[derive(Debug, Clone, PartialEq, Eq, thiserror::Error)]
pub enum RejectReason {
    /// Nothing to condition on.
    #[error("the prompt is empty")]
    EmptyPrompt,
    /// An id the model does not have.
    #[error("token id {token} is not below the vocabulary size {vocab_size}")]
    UnknownToken {
        /// The first such id.
        token: Token,
        /// Ids below this exist.
        vocab_size: u32,
    },
    /// No room for a single output token.
    #[error("the prompt has {prompt_len} tokens, the model takes less than {max_model_len}")]
    PromptTooLong {
        /// Tokens of the prompt.
        prompt_len: u64,
        /// Limit on prompt plus output.
        max_model_len: u32,
    },
    /// Prompt and output together exceed the model.
    #[error(
        "{prompt_len} prompt tokens and max_tokens {max_tokens} exceed the model's {max_model_len} \
         tokens"
    )]
    TotalTooLong {
        /// Tokens of the prompt.
        prompt_len: u64,
        /// Output tokens asked for.
        max_tokens: u32,
        /// Limit on prompt plus output.
        max_model_len: u32,
    },
    /// The KV pool could not hold the request even alone.
    #[error("the request needs {blocks} KV blocks, the pool has {pool}")]
    PoolTooSmall {
        /// Blocks of prompt plus output.
        blocks: u32,
        /// Blocks of the replica.
        pool: u32,
    },
    /// Too many requests wait.
    #[error("{waiting} requests are waiting, the limit is {cap}")]
    QueueFull {
        /// Requests waiting.
        waiting: u32,
        /// Configured cap.
        cap: u32,
    },
    /// Too many tokens wait.
    #[error("{waiting} tokens are waiting and {requested} more exceed the limit of {cap}")]
    QueueTokensFull {
        /// Tokens of waiting requests.
        waiting: u64,
        /// Tokens of this prompt.
        requested: u64,
        /// Configured cap.
        cap: u64,
    },
    /// Something that it needs could not be made: found out by whoever held it back before it was submitted.
    #[error("{message}")]
    InvalidParameter {
        /// The request field at fault.
        param: String,
        /// Why, with numbers.
        message: String,
    },
    /// The same, and not the fault of the request.
    #[error("{message}")]
    TemporarilyUnavailable {
        /// Why.
        message: String,
    },
    /// The same, because whoever makes it has too much to do, or too little of the machine.
    #[error("{message}")]
    Overloaded {
        /// Why, with numbers.
        message: String,
    },
    /// The replica named does not exist.
    #[error("replica {replica} does not exist, there are {replicas}")]
    UnknownReplica {
        /// Replica asked for.
        replica: u16,
        /// Replicas configured.
        replicas: u16,
    },
}
