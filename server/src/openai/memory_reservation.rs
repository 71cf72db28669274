//! What requests hold besides their bodies, counted before it is there.

use super::params::CompletionParams;
use crate::api_error::ApiError;
use crate::app::{AppState, ServingContext};
use crate::json_heap_size::heap_bytes;
use engine::AdmissionPermit;
use grammar::GrammarSpec;
use protocol::{Token, TokenLogprobs};
use scheduler::RequestSubmission;

/// Bytes of a prompt's token while its request lives: the id here and in the engine, its share of block hashes.
const PROMPT_TOKEN_BYTES: u64 = 16;
/// Bytes of a token with log-probabilities besides the likeliest ids: its entry, twice while the list of them grows, and
/// its id and text. Measured by `tests/e2e/http/memory_amplification.rs`, and so are the next ones.
const ENTRY_BYTES: u64 = 3 * size_of::<TokenLogprobs>() as u64;
/// Bytes of one of the likeliest ids and its value, with what the allocator rounds up.
const LISTED_BYTES: u64 = size_of::<(Token, f32)>() as u64 * 5 / 4;
/// How often a prompt's log-probabilities are there while they come: all at once, as a message and as entries.
const PROMPT_COPIES: u64 = 3;
/// Bytes of text of each log-probability of a prompt that a stream echoes, in one event.
const ECHOED_BYTES: u64 = 64;

/// What a request asks for in numbers, all its choices together.
#[derive(Debug, Clone, Copy)]
pub(super) struct RequestCounts {
    /// Choices of all prompts.
    pub(super) requests: u64,
    /// Tokens of prompts, for each choice.
    pub(super) prompt_tokens: u64,
    /// Tokens that may be generated.
    pub(super) output_tokens: u64,
}

/// Bytes that a request holds besides its body.
#[derive(Debug, Clone, Copy)]
pub(super) struct RequestBytes {
    /// Of its prompts and rules: ids, hashes, lists of choices, log-probabilities of prompts, the parsed schema.
    prompts: u64,
    /// Log-probabilities of its outputs.
    outputs: u64,
}

impl RequestBytes {
    /// What it is going to hold.
    pub(super) fn of(
        serving: &ServingContext,
        params: &CompletionParams,
        template: &RequestSubmission,
        counts: RequestCounts,
    ) -> Self {
        let kept = |listed: Option<u32>| {
            let listed =
                listed.map(|listed| u64::from(listed.min(serving.field_bounds.vocab_size)));
            listed.map_or(0, |listed| ENTRY_BYTES + listed * LISTED_BYTES)
        };
        let sampling = &template.sampling;
        let listed = u64::from(sampling.prompt_logprobs.unwrap_or(0)) + 1;
        let echoed = params.stream && params.echo && sampling.logprobs.is_some();
        let of_echo = if echoed { listed.saturating_mul(ECHOED_BYTES) } else { 0 };
        let of_entry = PROMPT_COPIES * kept(sampling.prompt_logprobs) + of_echo;
        let of_prompts = counts.prompt_tokens.saturating_mul(PROMPT_TOKEN_BYTES + of_entry);
        let allowed = sampling.allowed_token_ids.as_ref().map_or(0, |ids| ids.len() as u64);
        let of_request = size_of::<RequestSubmission>() as u64 + allowed * PROMPT_TOKEN_BYTES;
        let of_requests = counts.requests.saturating_mul(of_request);
        let schema = match params.constraint.as_deref().map(|constraint| &constraint.spec) {
            Some(GrammarSpec::Json { schema, .. }) => heap_bytes(schema),
            _ => 0,
        };
        // A stream sends them as they come.
        let of_token = if params.stream { 0 } else { kept(sampling.logprobs) };
        Self {
            prompts: of_prompts.saturating_add(of_requests).saturating_add(schema),
            outputs: counts.output_tokens.saturating_mul(of_token),
        }
    }

    /// All of them.
    pub(super) fn total(self) -> u64 {
        self.prompts.saturating_add(self.outputs)
    }

    /// The field that most of them come from.
    pub(super) fn field<'a>(self, of_prompts: &'a str, of_outputs: &'a str) -> &'a str {
        if self.outputs > self.prompts { of_outputs } else { of_prompts }
    }
}

/// Counts what a request is going to hold.
///
/// Errors: 400 if it is more than all requests may hold, 429 or 503 if others hold too much now.
pub(crate) fn reserve(
    app: &AppState,
    ticket: &mut AdmissionPermit,
    bytes: u64,
    field: &str,
) -> Result<(), ApiError> {
    ticket.reserve_bytes(bytes).map_err(|overload| {
        if bytes <= overload.cap {
            return app.overloaded(&overload);
        }
        let cap = overload.cap;
        let message = format!("the request takes {bytes} bytes of memory, the limit is {cap}");
        ApiError::bad_request("never_fits", field, message)
    })
}
