//! What requests hold besides their bodies, counted before it is there.

use super::params::Params;
use crate::engine_client::Ticket;
use crate::grammar::Form;
use crate::server::app::{App, Serving};
use crate::server::error::ApiError;
use crate::server::value_size::heap_bytes;
use scheduler::Submit;

/// Bytes of a prompt's token while its request lives: the id here and in the engine, its share of block hashes.
const PROMPT_TOKEN_BYTES: u64 = 16;
/// Bytes of one log-probability of a prompt's token, as it is kept and as text: with room to grow. Measured by
/// `tests/e2e/http/multiplied.rs`, and so is the next one.
const PROMPT_LOGPROB_BYTES: u64 = 512;
/// The same of an echoed prompt, whose log-probabilities are values before they are text.
const ECHOED_LOGPROB_BYTES: u64 = 1_024;

/// Bytes that a request holds besides its body: ids and hashes of its prompts and lists of its choices, log-probabilities
/// of prompts and the answer that tells them, and its parsed schema.
pub(super) fn held_bytes(
    serving: &Serving,
    params: &Params,
    template: &Submit,
    requests: u64,
    prompt_tokens: u64,
) -> u64 {
    let listed = template.sampling.prompt_logprobs;
    let listed = listed.map_or(0, |count| u64::from(count.min(serving.bounds.vocab_size)) + 1);
    let of_logprob = match (params.echo, params.prompt_logprobs) {
        (false, _) => PROMPT_LOGPROB_BYTES,
        (true, None) => ECHOED_LOGPROB_BYTES,
        (true, Some(_)) => PROMPT_LOGPROB_BYTES + ECHOED_LOGPROB_BYTES,
    };
    let allowed = template.sampling.allowed.as_ref().map_or(0, |ids| ids.len() as u64);
    let of_request = size_of::<Submit>() as u64 + allowed * PROMPT_TOKEN_BYTES;
    let schema = match params.constraint.as_deref().map(|constraint| &constraint.form) {
        Some(Form::Json { schema, .. }) => heap_bytes(schema),
        _ => 0,
    };
    let of_token = PROMPT_TOKEN_BYTES + listed.saturating_mul(of_logprob);
    let of_prompts = prompt_tokens.saturating_mul(of_token);
    of_prompts.saturating_add(requests.saturating_mul(of_request)).saturating_add(schema)
}

/// Counts what a request is going to hold.
///
/// Errors: 400 if it is more than all requests may hold, 429 or 503 if others hold too much now.
pub fn hold(app: &App, ticket: &mut Ticket, bytes: u64, field: &str) -> Result<(), ApiError> {
    ticket.hold_bytes(bytes).map_err(|overload| {
        if bytes <= overload.cap {
            return app.overloaded(&overload);
        }
        let cap = overload.cap;
        let message = format!("the request takes {bytes} bytes of memory, the limit is {cap}");
        ApiError::bad_request("never_fits", field, message)
    })
}
