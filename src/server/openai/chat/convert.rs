//! From the fields of a chat request to a reply that waits for tokens.

use super::reply::Reply;
use super::start::{Started, start};
use super::types::ChatRequest;
use crate::engine_client::Ticket;
use crate::server::app::{App, Serving};
use crate::server::error::ApiError;
use crate::server::fields::Fields;
use crate::server::openai::exchange::{FromHeaders, Prepared, ReplyHead, ignored};
use crate::server::openai::logprobs::TokenNames;
use std::sync::Arc;

/// Reads, refuses and starts.
pub(super) fn prepare(
    app: &App,
    serving: &Arc<Serving>,
    mut fields: Fields,
    headers: &FromHeaders,
    ticket: Ticket,
) -> Result<Prepared<Reply>, ApiError> {
    let request = ChatRequest::take(&mut fields, &serving.bounds, &serving.defaults)?;
    let include_reasoning = fields.bool("include_reasoning")?.unwrap_or(true);
    let ignored = ignored(app, &fields)?;
    let logprobs = request.logprobs.is_some();
    let started = start(app, serving, request, headers, ticket)?;
    let Started { generation, model, request_id, params, prompt, echo, names } = started;
    let spelling = params.spelling(&app.options);
    let reply = Reply {
        head: ReplyHead::new("chatcmpl", &request_id, model, serving),
        tokens: TokenNames { tokenizer: Arc::clone(&serving.tokenizer), spelling },
        logprobs,
        prompt_logprobs: params.prompt_logprobs.is_some(),
        echo,
        prompt_ids: params.return_token_ids.then_some(prompt),
        stream_options: params.events(&app.options),
        names,
        reasoning: include_reasoning.then_some(app.options.reasoning_field),
    };
    Ok(Prepared { generation, reply, stream: params.stream, request_id, ignored })
}
