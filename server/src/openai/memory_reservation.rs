//! Reserves the memory that a request needs in addition to its body, before it is allocated.

use super::params::CompletionParams;
use crate::api_error::ApiError;
use crate::app::{AppState, ServingContext};
use crate::json_heap_size::heap_bytes;
use engine::AdmissionPermit;
use grammar::GrammarSpec;
use protocol::{Token, TokenLogprobs};
use scheduler::RequestSubmission;

/// Bytes per prompt token of a live request: its id here and in the engine, and its share of block hashes.
const PROMPT_TOKEN_BYTES: u64 = 16;
/// Bytes per token with log-probabilities, without its top-k tokens: its entry, twice while the list grows,
/// and its id and text. Measured, like the following constants, by `tests/e2e/http/memory_amplification.rs`.
const ENTRY_BYTES: u64 = 3 * size_of::<TokenLogprobs>() as u64;
/// Bytes of one top-k token id and its value, including the allocator's rounding.
const TOP_LOGPROB_BYTES: u64 = size_of::<(Token, f32)>() as u64 * 5 / 4;
/// Number of copies of a prompt's log-probabilities while they arrive: all at once, as a message and as
/// entries.
const PROMPT_COPIES: u64 = 3;
/// Bytes of text per prompt log-probability that a stream echoes, in one event.
const ECHOED_BYTES: u64 = 64;

/// Token and choice counts of a request, over all its choices.
#[derive(Debug, Clone, Copy)]
pub(super) struct RequestCounts {
    /// Number of choices of all prompts.
    pub(super) requests: u64,
    /// Number of prompt tokens, counted for each choice.
    pub(super) prompt_tokens: u64,
    /// Maximum number of output tokens.
    pub(super) output_tokens: u64,
}

/// Bytes that a request needs in addition to its body.
#[derive(Debug, Clone, Copy)]
pub(super) struct RequestBytes {
    /// Bytes for prompts and parameters: ids, hashes, lists of choices, prompt log-probabilities, the parsed
    /// schema.
    prompts: u64,
    /// Bytes for the log-probabilities of the outputs.
    outputs: u64,
}

impl RequestBytes {
    /// Estimates the bytes that a request will need.
    pub(super) fn of(
        serving: &ServingContext,
        params: &CompletionParams,
        template: &RequestSubmission,
        counts: RequestCounts,
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
        let all_requests_bytes = counts.requests.saturating_mul(request_bytes);
        let schema = match params.constraint.as_deref().map(|constraint| &constraint.spec) {
            Some(GrammarSpec::Json { schema, .. }) => heap_bytes(schema),
            _ => 0,
        };
        // A stream sends log-probabilities as they arrive.
        let output_token_bytes = if params.stream { 0 } else { buffered_bytes(sampling.logprobs) };
        Self {
            prompts: prompt_bytes.saturating_add(all_requests_bytes).saturating_add(schema),
            outputs: counts.output_tokens.saturating_mul(output_token_bytes),
        }
    }

    /// Total number of bytes.
    pub(super) fn total(self) -> u64 {
        self.prompts.saturating_add(self.outputs)
    }

    /// Returns the field that accounts for most of the bytes.
    pub(super) fn field<'a>(self, prompt_field: &'a str, output_field: &'a str) -> &'a str {
        if self.outputs > self.prompts { output_field } else { prompt_field }
    }
}

/// Reserves the bytes that a request will need.
///
/// Errors: 400 if they exceed the limit for all requests together, 429 or 503 if too many are in use now.
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
