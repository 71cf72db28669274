//! What most steps leave alone of a request: its tokens, blocks and keys, and what the user asked.

use crate::request_queue::QueueKey;
use crate::stats::RequeueReason;
use crate::{FirstAdmission, RequestSubmission};
use kvcache::{BlockKey, BlockTable, ExtraKeys, SequenceContent};
use protocol::{SamplingParams, Token};
use std::sync::Arc;

/// Output tokens that a request has room for from the start; longer outputs grow by doubling.
const OUTPUT_TOKENS_RESERVED: u32 = 1_024;

/// The part of a request that most steps leave alone. In this order: filling a block needs the first
/// four fields, thus two cache lines.
#[derive(Debug)]
#[repr(C)]
pub(crate) struct ColdFields {
    /// Committed tokens, but for the newest ones, which may so far lie in the tail of `Request` only.
    pub(crate) tokens: Vec<Token>,
    pub(crate) block_table: BlockTable,
    pub(crate) block_keys: Vec<BlockKey>,
    /// What else the request's blocks depend on.
    pub(crate) extra_keys: Option<Arc<ExtraKeys>>,
    pub(crate) queue_key: QueueKey,
    pub(crate) prompt_len: u32,
    /// Prompt position whose log-probability is delivered next.
    pub(crate) prompt_logprobs_sent: u32,
    /// Ids of `Request::stops` that mean end of text.
    pub(crate) eos_count: u32,
    pub(crate) params: RequestParams,
}

/// What the user asked and what became of it.
#[derive(Debug)]
pub(crate) struct RequestParams {
    pub(crate) sampling: SamplingParams,
    /// Key of the request's random numbers.
    pub(crate) rng_key: u64,
    /// Position of the first token that a mask limits.
    pub(crate) first_masked_position: u32,
    /// The replica was chosen by the user: the request moves to no other.
    pub(crate) pinned_to_replica: bool,
    /// Tokens this request adds to its replica's outstanding load.
    pub(crate) load_tokens: u64,
    pub(crate) submitted_ms: u64,
    /// Why its blocks were last taken back, and the positions that were computed then.
    pub(crate) last_requeue: Option<(RequeueReason, u32)>,
    pub(crate) first_admission: Option<FirstAdmission>,
}

impl ColdFields {
    pub(crate) fn new(submit: RequestSubmission, arrival: u64, now_ms: u64) -> Self {
        let mut tokens = submit.tokens;
        tokens.reserve_exact(submit.max_tokens.min(OUTPUT_TOKENS_RESERVED) as usize);
        let asked = RequestParams {
            sampling: submit.sampling,
            rng_key: submit.rng_key,
            first_masked_position: submit
                .first_masked_token
                .map_or(u32::MAX, |from| from.saturating_add(tokens.len() as u32)),
            pinned_to_replica: submit.replica.is_some(),
            load_tokens: tokens.len() as u64,
            submitted_ms: now_ms,
            last_requeue: None,
            first_admission: None,
        };
        Self {
            prompt_len: tokens.len() as u32,
            tokens,
            block_table: BlockTable::default(),
            block_keys: submit.block_keys,
            extra_keys: submit.extra_keys,
            queue_key: QueueKey { priority: submit.priority, arrival },
            prompt_logprobs_sent: 1,
            eos_count: submit.eos_ids.len() as u32,
            params: asked,
        }
    }

    /// The table, and what its full blocks hold.
    pub(crate) fn block_table_and_content(&mut self) -> (&mut BlockTable, SequenceContent<'_>) {
        let Self { tokens, block_table: table, block_keys: keys, extra_keys: extra, .. } = self;
        (table, SequenceContent { tokens, block_keys: keys, extra_keys: extra.as_ref() })
    }
}
