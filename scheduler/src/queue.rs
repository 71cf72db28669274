//! Refuses what can never fit, and what the queue has no room for, before any step.

use crate::{EngineConfig, Refusal, Submit};

/// What the queue holds over all replicas.
#[derive(Debug, Clone, Copy, Default)]
pub(crate) struct Backlog {
    pub(crate) requests: u32,
    pub(crate) tokens: u64,
}

/// Why `submit` cannot be accepted, if so. `pool` is the smallest pool of the replicas it may go to.
pub(crate) fn refusal(
    submit: &Submit,
    config: &EngineConfig,
    pool: u32,
    backlog: Backlog,
) -> Option<Refusal> {
    never_fits(submit, config, pool).or_else(|| no_room(submit, config, backlog))
}

fn never_fits(submit: &Submit, config: &EngineConfig, pool: u32) -> Option<Refusal> {
    let limits = &config.limits;
    let (vocab_size, max_model_len) = (limits.vocab_size, limits.max_model_len);
    let prompt_len = submit.tokens.len() as u64;
    let max_tokens = submit.max_tokens;
    if prompt_len == 0 {
        return Some(Refusal::EmptyPrompt);
    }
    if prompt_len >= u64::from(max_model_len) {
        return Some(Refusal::PromptTooLong { prompt_len, max_model_len });
    }
    if let Some(&token) = submit.tokens.iter().find(|&&token| token >= vocab_size) {
        return Some(Refusal::UnknownToken { token, vocab_size });
    }
    let total = prompt_len + u64::from(max_tokens);
    if total > u64::from(max_model_len) {
        return Some(Refusal::TotalTooLong { prompt_len, max_tokens, max_model_len });
    }
    let blocks = (total as u32).div_ceil(config.kv.spec.block_tokens);
    if blocks > pool {
        return Some(Refusal::PoolTooSmall { blocks, pool });
    }
    let replica = submit.replica.filter(|replica| replica.0 >= config.replicas)?;
    Some(Refusal::UnknownReplica { replica: replica.0, replicas: config.replicas })
}

fn no_room(submit: &Submit, config: &EngineConfig, backlog: Backlog) -> Option<Refusal> {
    let cap = config.limits.requests_waiting;
    if backlog.requests >= cap {
        return Some(Refusal::QueueFull { waiting: backlog.requests, cap });
    }
    let (asked, cap) = (submit.tokens.len() as u64, config.limits.tokens_waiting);
    let full = backlog.tokens + asked > cap;
    full.then_some(Refusal::QueueTokens { waiting: backlog.tokens, asked, cap })
}
