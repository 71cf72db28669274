//! Estimates and reserves the memory that a request needs in addition to its body, before the memory is
//! allocated.

use super::params::CompletionParams;
use crate::api_error::ApiError;
use crate::app::{AppState, ServingContext};
use crate::json_heap_size::heap_bytes;
use engine::AdmissionPermit;
use grammar::GrammarSpec;
use protocol::{Token, TokenLogprobs};
use scheduler::RequestSubmission;

/// Bytes per prompt token of a request in progress: the token id in the server and in the engine, and the
/// token's share of the block hashes.
const PROMPT_TOKEN_BYTES: u64 = 16;
/// Bytes per token with log-probabilities, excluding its top-k tokens: two list entries (old and new buffer
/// while the list grows), the token id and the token text. Like the following constants, measured by
/// `tests/e2e/http/memory_amplification.rs`.
const ENTRY_BYTES: u64 = 3 * size_of::<TokenLogprobs>() as u64;
/// Bytes of one top-k entry (token id and log-probability), plus a quarter for rounding by the allocator.
const TOP_LOGPROB_BYTES: u64 = size_of::<(Token, f32)>() as u64 * 5 / 4;
/// Number of copies of a prompt's log-probabilities that are in memory at once: the log-probabilities of
/// all prompt tokens arrive in one message, and are then appended to a list.
const PROMPT_COPIES: u64 = 3;
/// Bytes of text per entry in a prompt's log-probabilities if a stream echoes the prompt: the whole echo is
/// one SSE event.
const ECHOED_BYTES: u64 = 64;

/// Bytes per pooled value, which exists both in an event and as a list entry.
const POOLED_VALUE_BYTES: u64 = 2 * size_of::<f32>() as u64;

/// Numbers of choices and tokens of a request, used to estimate its memory.
#[derive(Debug, Clone, Copy)]
pub(super) struct RequestTokenCounts {
    /// Number of choices of all prompts.
    pub(super) requests: u64,
    /// Sum of the prompt lengths of all choices, in tokens; a prompt with `n` choices counts `n` times.
    pub(super) prompt_tokens: u64,
    /// Sum of the maximum output lengths of all choices, in tokens.
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

/// Returns the bytes of a token's buffered log-probabilities with `listed` top-k tokens; `None` = the request
/// has no log-probabilities.
fn logprob_bytes(listed: Option<u32>, vocab_size: u32) -> u64 {
    let listed = listed.map(|listed| u64::from(listed.min(vocab_size)));
    listed.map_or(0, |listed| ENTRY_BYTES + listed * TOP_LOGPROB_BYTES)
}

/// Returns the bytes of the parsed JSON schema of a request.
fn schema_bytes(params: &CompletionParams) -> u64 {
    match params.constraint.as_deref().map(|constraint| &constraint.spec) {
        Some(GrammarSpec::Json { schema, .. }) => heap_bytes(schema),
        _ => 0,
    }
}

impl RequestMemoryEstimate {
    /// Estimates the bytes for a request with the given token counts.
    pub(super) fn of(
        serving: &ServingContext,
        params: &CompletionParams,
        template: &RequestSubmission,
        counts: RequestTokenCounts,
    ) -> Self {
        let vocab_size = serving.field_bounds.vocab_size;
        let buffered_bytes = |listed: Option<u32>| logprob_bytes(listed, vocab_size);
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
        let schema = schema_bytes(params);
        // A stream sends log-probabilities immediately, so they are not buffered.
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

    /// Returns the name of the field that accounts for most of the memory: the prompt field or the output
    /// length field.
    pub(super) fn field<'a>(self, prompt_field: &'a str, output_field: &'a str) -> &'a str {
        if self.outputs > self.prompts { output_field } else { prompt_field }
    }
}

/// Reserves `bytes` for a request in the memory budget shared by all requests.
///
/// Errors: HTTP status 400 if `bytes` exceeds the whole budget, 429 or 503 if other requests currently use
/// too much of the budget.
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
