//! Fields of a request that most steps do not read: tokens, block table, block keys and request parameters.

use crate::request::states::RequestStates;
use crate::request_queue::QueueKey;
use crate::stats::RequeueReason;
use crate::{FirstAdmission, RequestSubmission};
use kvcache::{BlockKey, BlockTables, ExtraKeys, SequenceContent};
use protocol::{SamplingParams, Token};
use std::sync::Arc;

/// Maximum number of output tokens for which the token vector reserves capacity when a request is submitted;
/// longer outputs grow the vector by doubling.
const OUTPUT_TOKENS_RESERVED: u32 = 1_024;

/// Fields of a request that most steps do not read. `repr(C)` keeps the first four fields in two cache lines,
/// because these fields are read when a full block is registered in the prefix cache.
#[derive(Debug)]
#[repr(C)]
pub(crate) struct RequestColdFields {
    /// Committed tokens. The newest committed tokens may be only in `Request::tail` until
    /// `Request::flush_tail` copies them.
    pub(crate) tokens: Vec<Token>,
    pub(crate) block_tables: BlockTables,
    pub(crate) block_keys: Vec<BlockKey>,
    /// Extra keys of the block hashes (salt, adapter, media).
    pub(crate) extra_keys: Option<Arc<ExtraKeys>>,
    pub(crate) queue_key: QueueKey,
    pub(crate) windows: WindowTableState,
    pub(crate) states: RequestStates,
    pub(crate) prompt_len: u32,
    /// Lowest prompt position whose logprobs have not been delivered.
    pub(crate) prompt_logprobs_sent: u32,
    /// Number of EOS ids in `Request::stop_ids`; they come first in this list.
    pub(crate) eos_count: u32,
    pub(crate) params: RequestParams,
}

/// State of a request's block tables in window groups.
#[derive(Debug, Clone, Copy, Default)]
pub(crate) struct WindowTableState {
    /// Number of entries in each of these tables.
    pub(crate) entries: u32,
    /// Number of leading entries that were sent to the executor.
    pub(crate) sent_entries: u32,
    /// End of the prefix hit of the last admission, or where it would have ended if all windows before it had been
    /// cached; 0 = no hit.
    pub(crate) hit_end: u32,
}

/// Parameters of a request, and data about its last requeue and its first admission.
#[derive(Debug)]
pub(crate) struct RequestParams {
    pub(crate) sampling: SamplingParams,
    /// Philox key of the request's random numbers.
    pub(crate) rng_key: u64,
    /// Position of the first token that is sampled under a grammar bitmask.
    pub(crate) first_masked_position: u32,
    /// Whether the client selected the replica, so that the request never migrates to another replica.
    pub(crate) pinned_to_replica: bool,
    /// Number of prompt tokens, which this request adds to the load of its replica until it finishes. The
    /// router compares the loads of the replicas.
    pub(crate) load_tokens: u64,
    pub(crate) submitted_ms: u64,
    /// Reason why the request was last moved back to the waiting queue (for example a preemption), and the
    /// number of positions that had been computed before.
    pub(crate) last_requeue: Option<(RequeueReason, u32)>,
    pub(crate) first_admission: Option<FirstAdmission>,
}

impl RequestColdFields {
    pub(crate) fn new(submit: RequestSubmission, arrival: u64, now_ms: u64) -> Self {
        let mut tokens = submit.tokens;
        tokens.reserve_exact(submit.max_tokens.min(OUTPUT_TOKENS_RESERVED) as usize);
        let params = RequestParams {
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
            block_tables: BlockTables::default(),
            windows: WindowTableState::default(),
            states: RequestStates::default(),
            block_keys: submit.block_keys,
            extra_keys: submit.extra_keys,
            queue_key: QueueKey { priority: submit.priority, arrival },
            prompt_logprobs_sent: 1,
            eos_count: submit.eos_ids.len() as u32,
            params,
        }
    }

    /// Returns the block tables, and the tokens and keys with which their full blocks are registered in the
    /// prefix cache.
    pub(crate) fn block_tables_and_content(&mut self) -> (&mut BlockTables, SequenceContent<'_>) {
        let Self { tokens, block_tables, block_keys, extra_keys, .. } = self;
        (block_tables, SequenceContent { tokens, block_keys, extra_keys: extra_keys.as_ref() })
    }
}
