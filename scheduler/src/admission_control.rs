//! Rejects requests that can never fit in the KV cache and requests that exceed the queue limits, before any
//! step.

use crate::{RejectReason, RequestSubmission, SchedulerConfig, SchedulerLimits};

/// Number of waiting requests and total number of their tokens, over all replicas. The queue limits bound
/// both numbers.
#[derive(Debug, Clone, Copy, Default)]
pub(crate) struct QueueBacklog {
    pub(crate) requests: u32,
    pub(crate) tokens: u64,
}

/// Returns the reason to reject `submit`, or `None` if it is accepted. `pool` is the number of blocks in the
/// smallest KV pool of all replicas.
pub(crate) fn reject_reason(
    submit: &RequestSubmission,
    config: &SchedulerConfig,
    pool: u32,
    backlog: QueueBacklog,
) -> Option<RejectReason> {
    exceeds_limits(submit, config, pool).or_else(|| queue_is_full(submit, config, backlog))
}

fn exceeds_limits(
    submit: &RequestSubmission,
    config: &SchedulerConfig,
    pool: u32,
) -> Option<RejectReason> {
    let limits = &config.limits;
    if let Some(reason) = invalid_prompt(submit, limits) {
        return Some(reason);
    }
    let (prompt_len, max_tokens) = (submit.tokens.len() as u64, submit.max_tokens);
    let max_model_len = limits.max_model_len;
    let total = prompt_len + u64::from(max_tokens);
    if total > u64::from(max_model_len) {
        return Some(RejectReason::TotalTooLong { prompt_len, max_tokens, max_model_len });
    }
    let in_flight = limits.request_tokens_in_flight();
    let blocks = config.kv.spec.blocks_of_request(total as u32, in_flight);
    if blocks > pool {
        return Some(RejectReason::PoolTooSmall { blocks, pool });
    }
    let replica = submit.replica.filter(|replica| replica.0 >= config.replicas)?;
    Some(RejectReason::UnknownReplica { replica: replica.0, replicas: config.replicas })
}

/// Returns the reason to reject the prompt of `submit`, without regard to the number of output tokens.
fn invalid_prompt(submit: &RequestSubmission, limits: &SchedulerLimits) -> Option<RejectReason> {
    let (vocab_size, max_model_len) = (limits.vocab_size, limits.max_model_len);
    let prompt_len = submit.tokens.len() as u64;
    if prompt_len == 0 {
        return Some(RejectReason::EmptyPrompt);
    }
    // A pooling request samples no token, so its prompt needs no position for an output token.
    let output_min = u64::from(submit.sampling.pooling.is_none());
    if prompt_len + output_min > u64::from(max_model_len) {
        return Some(RejectReason::PromptTooLong { prompt_len, max_model_len });
    }
    let &token = submit.tokens.iter().find(|&&token| token >= vocab_size)?;
    Some(RejectReason::UnknownToken { token, vocab_size })
}

fn queue_is_full(
    submit: &RequestSubmission,
    config: &SchedulerConfig,
    backlog: QueueBacklog,
) -> Option<RejectReason> {
    let cap = config.limits.max_waiting_requests;
    if backlog.requests >= cap {
        return Some(RejectReason::QueueFull { waiting: backlog.requests, cap });
    }
    let (requested, cap) = (submit.tokens.len() as u64, config.limits.max_waiting_tokens);
    let full = backlog.tokens + requested > cap;
    full.then_some(RejectReason::QueueTokensFull { waiting: backlog.tokens, requested, cap })
}
