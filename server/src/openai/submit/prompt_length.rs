//! Limits of the prompt and of the output, and truncation of prompts.

use super::super::params::{CompletionParams, PromptTruncation};
use super::EndpointParams;
use crate::api_error::ApiError;
use crate::app::ServingContext;
use crate::context_overflow::ContextOverflow;
use protocol::Token;

/// Rejects a text whose minimum token count exceeds the context length, because tokenising it could take
/// seconds.
pub(crate) fn reject_if_too_long(
    serving: &ServingContext,
    text: &str,
    params: &CompletionParams,
    field: &str,
) -> Result<(), ApiError> {
    let limit = prompt_end(serving, params);
    if params.truncate.is_some() || text.len() < limit {
        return Ok(());
    }
    match serving.tokenizer.min_token_count(text) {
        lower_bound if lower_bound < limit => Ok(()),
        lower_bound => {
            let overflow = context_overflow(serving, params, lower_bound);
            Err(ContextOverflow { is_lower_bound: true, ..overflow }.into_error(field))
        }
    }
}

/// Returns the token counts for the error about an exceeded context length.
fn context_overflow(
    serving: &ServingContext,
    params: &CompletionParams,
    prompt_len: usize,
) -> ContextOverflow {
    ContextOverflow {
        prompt_tokens: prompt_len as u64,
        is_lower_bound: false,
        max_tokens: params.max_tokens.unwrap_or(1).max(output_tokens_min(params)),
        context_length: serving.field_bounds.max_model_len,
    }
}

/// Returns the minimum number of output tokens: 0 for pooling requests, else 1.
fn output_tokens_min(params: &CompletionParams) -> u32 {
    u32::from(params.sampling.pooling.is_none())
}

/// Returns the smallest number of tokens with which a prompt is too long.
fn prompt_end(serving: &ServingContext, params: &CompletionParams) -> usize {
    (serving.field_bounds.max_model_len + 1 - output_tokens_min(params)) as usize
}

/// Rejects a prompt that is empty or exceeds the context length; `field` is the field name in the error.
pub(crate) fn check_prompt_len(
    serving: &ServingContext,
    params: &CompletionParams,
    prompt_len: usize,
    field: &str,
) -> Result<(), ApiError> {
    if prompt_len == 0 {
        return Err(ApiError::invalid(field, "the prompt is empty"));
    }
    if prompt_len >= prompt_end(serving, params) {
        return Err(context_overflow(serving, params, prompt_len).into_error(field));
    }
    Ok(())
}

/// Returns the maximum number of output tokens for a prompt.
pub(crate) fn max_tokens(
    serving: &ServingContext,
    params: &CompletionParams,
    prompt_len: usize,
    extra: EndpointParams<'_>,
) -> Result<u32, ApiError> {
    let limit = serving.field_bounds.max_model_len as usize;
    check_prompt_len(serving, params, prompt_len, extra.prompt_field)?;
    let overflow = || context_overflow(serving, params, prompt_len).into_error(extra.prompt_field);
    let remaining = (limit - prompt_len) as u32;
    let Some(requested) = params.max_tokens else {
        let max_tokens =
            extra.max_tokens_default.map_or(remaining, |default| default.min(remaining));
        let min_tokens = params.sampling.min_tokens;
        if min_tokens > max_tokens {
            let message =
                format!("min_tokens is {min_tokens}, the output has at most {max_tokens} tokens");
            return Err(ApiError::invalid("min_tokens", message));
        }
        return Ok(max_tokens);
    };
    if requested > remaining {
        return Err(overflow());
    }
    // The scheduler checks whether one choice fits in the KV cache. Choices that do not fit together run one
    // after another.
    Ok(requested)
}

/// Truncates the token ids of a prompt as specified by the field `truncate_prompt_tokens`.
pub(crate) fn truncate(ids: &mut Vec<Token>, truncate: Option<PromptTruncation>) {
    match truncate {
        Some(PromptTruncation::KeepLast(count)) => {
            let cut = ids.len().saturating_sub(count as usize);
            ids.drain(..cut);
        }
        Some(PromptTruncation::KeepFirst(count)) => ids.truncate(count as usize),
        None => {}
    }
}
