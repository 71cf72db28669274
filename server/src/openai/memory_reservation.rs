//! Estimates and reserves the memory that a request needs in addition to its body, before this memory is
//! allocated.

use super::params::CompletionParams;
use crate::api_error::ApiError;
use crate::app::{AppState, ServingContext};
use crate::json_heap_size::heap_bytes;
use engine::AdmissionPermit;
use grammar::GrammarSpec;
use protocol::{Token, TokenLogprobs};
use scheduler::RequestSubmission;

/// Bytes per prompt token of a request in progress: its id in the server and in the engine, and its share of
/// the block hashes.
const PROMPT_TOKEN_BYTES: u64 = 16;
/// Bytes per token with log-probabilities, without its top-k tokens: two entries while the list grows, the
/// token id and its text. Measured, like the following constants, by
/// `tests/e2e/http/memory_amplification.rs`.
const ENTRY_BYTES: u64 = 3 * size_of::<TokenLogprobs>() as u64;
/// Bytes of one top-k token id with its log-probability, plus a quarter for the rounding of the allocator.
const TOP_LOGPROB_BYTES: u64 = size_of::<(Token, f32)>() as u64 * 5 / 4;
/// Number of copies of a prompt's log-probabilities when they arrive: all arrive at once, and exist both as a
/// message and as entries of a list.
const PROMPT_COPIES: u64 = 3;
/// Bytes of text per log-probability of a prompt that a stream echoes; the echo is one event.
const ECHOED_BYTES: u64 = 64;

/// Bytes of one pooled value: it exists as an event and as an entry of a list.
const POOLED_VALUE_BYTES: u64 = 2 * size_of::<f32>() as u64;

/// Numbers of choices and tokens of a request, from which its memory is estimated.
#[derive(Debug, Clone, Copy)]
pub(super) struct RequestTokenCounts {
    /// Number of choices, over all prompts.
    pub(super) requests: u64,
    /// Number of prompt tokens over all choices: each choice counts the tokens of its prompt.
    pub(super) prompt_tokens: u64,
    /// Maximum number of output tokens, over all choices.
    pub(super) output_tokens: u64,
}

/// Estimated bytes that a request needs in addition to its body.
#[derive(Debug, Clone, Copy)]
pub(super) struct RequestMemoryEstimate {
    /// Bytes for prompts and parameters: token ids, block hashes, submissions of the choices, prompt
    /// log-probabilities and the parsed JSON schema.
    prompts: u64,
    /// Bytes for the log-probabilities of the output tokens.
    outputs: u64,
}

impl RequestMemoryEstimate {
    /// Estimates the bytes for a request with these counts.
    pub(super) fn of(
        serving: &ServingContext,
        params: &CompletionParams,
        template: &RequestSubmission,
        counts: RequestTokenCounts,
    ) -> Self {
        let buffered_bytes = |listed: Option<u32>| {
            let listed =
                listed.map(|listed| u64::from(listed.min(serving.field_bounds.vocab_size)));
            listed.map_or(0, |listed| ENTRY_BYTES + listed * TOP_LOGPROB_BYTES)
        };
        let sampling = &template.sampling;
        let listed = u64::from(sampling.prompt_logprobs.unwrap_or(0)) + 1;
        let echoed = params.stream && params.echo && sampling.logprobs.is_some();
        let echo_bytes = if echoed { listed.saturating_mul(ECHOED_BYTES) } else { 0 };
        let entry_bytes = PROMPT_COPIES * buffered_bytes(sampling.prompt_logprobs) + echo_bytes;
        let prompt_bytes = counts.prompt_tokens.saturating_mul(PROMPT_TOKEN_BYTES + entry_bytes);
        let allowed = sampling.allowed_token_ids.as_ref().map_or(0, |ids| ids.len() as u64);
        let request_bytes = size_of::<RequestSubmission>() as u64 + allowed * PROMPT_TOKEN_BYTES;
        let pooled_bytes = match (&sampling.pooling, &serving.pooler) {
            (Some(_), Some(pooler)) => POOLED_VALUE_BYTES * pooler.values_per_prompt(),
            _ => 0,
        };
        let all_requests_bytes = counts.requests.saturating_mul(request_bytes + pooled_bytes);
        let schema = match params.constraint.as_deref().map(|constraint| &constraint.spec) {
            Some(GrammarSpec::Json { schema, .. }) => heap_bytes(schema),
            _ => 0,
        };
        // A stream sends log-probabilities at once, so it buffers none.
        let output_token_bytes = if params.stream { 0 } else { buffered_bytes(sampling.logprobs) };
        Self {
            prompts: prompt_bytes.saturating_add(all_requests_bytes).saturating_add(schema),
            outputs: counts.output_tokens.saturating_mul(output_token_bytes),
        }
    }

    /// Returns the total number of bytes.
    pub(super) fn total(self) -> u64 {
        self.prompts.saturating_add(self.outputs)
    }

    /// Returns the name of the field that causes most of the memory: the prompt field or the output field.
    pub(super) fn field<'a>(self, prompt_field: &'a str, output_field: &'a str) -> &'a str {
        if self.outputs > self.prompts { output_field } else { prompt_field }
    }
}

/// Reserves `bytes`, which a request will need, in the memory budget of all requests.
///
/// Errors: HTTP status 400 if `bytes` exceeds the whole budget, 429 or 503 if other requests use too much of
/// it now.
pub(crate) fn reserve(
    app: &AppState,
    permit: &mut AdmissionPermit,
    bytes: u64,
    field: &str,
) -> Result<(), ApiError> {
    permit.reserve_bytes(bytes).map_err(|overload| {
        if bytes <= overload.cap {
            return app.overloaded(&overload);
        }
        let cap = overload.cap;
        let message = format!("the request takes {bytes} bytes of memory, the limit is {cap}");
        ApiError::bad_request("never_fits", field, message)
    })
}
