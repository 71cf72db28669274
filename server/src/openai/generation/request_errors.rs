//! HTTP errors of requests that the engine has rejected or failed.

use super::PromptInfo;
use crate::api_error::ApiError;
use crate::context_overflow::ContextOverflow;
use axum::http::StatusCode;
use protocol::RowError;
use scheduler::{RejectReason, RequestError};

/// Converts a rejection by the scheduler to an API error.
pub(super) fn rejection_error(reason: &RejectReason, prompts: &PromptInfo) -> ApiError {
    let (field, max_tokens_field) = (prompts.field, prompts.max_tokens_field);
    let message = reason.to_string();
    match reason {
        RejectReason::QueueFull { .. } => overloaded("max_num_queued_reqs", message, 1),
        RejectReason::QueueTokensFull { .. } => overloaded("max_num_queued_tokens", message, 1),
        &RejectReason::PromptTooLong { prompt_len, max_model_len } => {
            context_overflow(prompt_len, 1, max_model_len).into_error(field)
        }
        &RejectReason::TotalTooLong { prompt_len, max_tokens, max_model_len } => {
            context_overflow(prompt_len, max_tokens, max_model_len).into_error(field)
        }
        RejectReason::PoolTooSmall { .. } => {
            ApiError::bad_request("never_fits", max_tokens_field, message)
        }
        RejectReason::InvalidParameter { param, message } => {
            let message = format!("{param}: {message}");
            ApiError::bad_request("invalid_grammar", param.clone(), message)
        }
        RejectReason::Overloaded { .. } => overloaded("grammars_overloaded", message, 10),
        RejectReason::TemporarilyUnavailable { .. } => {
            ApiError::unavailable("engine_unavailable", &message, 10)
        }
        RejectReason::UnknownReplica { .. } => ApiError::invalid("data_parallel_rank", message),
        RejectReason::EmptyPrompt | RejectReason::UnknownToken { .. } => {
            ApiError::invalid(field, message)
        }
    }
}

fn context_overflow(prompt_tokens: u64, max_tokens: u32, context_length: u32) -> ContextOverflow {
    ContextOverflow { prompt_tokens, is_lower_bound: false, max_tokens, context_length }
}

fn overloaded(reason: &'static str, message: String, retry_after_s: u32) -> ApiError {
    let error = ApiError::new(StatusCode::TOO_MANY_REQUESTS, reason, message);
    ApiError { retry_after_s: Some(retry_after_s), ..error }
}

/// Converts an engine failure to an API error.
pub(crate) fn engine_error(code: RequestError) -> ApiError {
    match code {
        RequestError::ReplicaUnavailable => {
            ApiError::unavailable("engine_unavailable", "the engine is not available", 10)
        }
        // The request's constraints have no allowed token in common. The error cannot name the wrong
        // constraint, because only the intersection of all constraints is empty.
        RequestError::RowFailed(RowError::AllMasked) => ApiError::bad_request(
            "no_token_allowed",
            "",
            "no token is allowed at this position: the request's constraints (allowed_token_ids, bad_words, min_tokens, \
             logit_bias, a grammar) exclude each other, or the grammar exceeds its cost limit",
        ),
        RequestError::RowFailed(RowError::NonFiniteLogits) => ApiError::new(
            StatusCode::INTERNAL_SERVER_ERROR,
            "nan_logits",
            "the model produced non-finite logits for this request",
        ),
        // The scheduler reschedules a row whose grammar bitmask is overdue, so `MaskOverdue` never ends a
        // request.
        RequestError::BadOutput | RequestError::RowFailed(RowError::MaskOverdue) => {
            ApiError::internal()
        }
    }
}

/// Creates the 503 error for requests that are ended by the shutdown.
pub(crate) fn draining() -> ApiError {
    ApiError::unavailable("draining", "the server is shutting down", 1)
}
