//! POST `/v1/completions`: text completions.

mod convert;
mod reply;
mod types;

use super::endpoint::{self, EndpointRequest};
use super::generation::RequestGeneration;
use super::logprobs::TokenFormatter;
use crate::api_error::ApiError;
use crate::app::{AppState, ServingContext};
use crate::openai::params::{FieldBounds, SamplingDefaults};
use crate::openai::submit::{EndpointParams, max_tokens};
use crate::render::RenderedRequest;
use crate::request_fields::RequestFields;
use axum::body::Body;
use axum::extract::{Request, State};
use axum::http::Response;
use protocol::Token;
use reply::CompletionReplyFormatter;
use std::sync::Arc;
use types::CompletionRequest;
pub(crate) use types::{CompletionPrompt, take_prompts};

/// Handles a text completion request.
pub async fn handle(
    State(app): State<Arc<AppState>>,
    request: Request,
) -> Result<Response<Body>, ApiError> {
    endpoint::serve::<CompletionReplyFormatter>(app, request).await
}

/// Submitted text completion whose reply is written by another endpoint.
pub(crate) struct SubmittedCompletion {
    /// Choices of the request, which receive the generated tokens.
    pub generation: RequestGeneration,
    /// Formatter of the tokens in log-probabilities.
    pub tokens: TokenFormatter,
    /// Token ids of each prompt, with `return_token_ids`; else empty.
    pub prompts: Vec<Arc<[Token]>>,
    /// Number of choices per prompt.
    pub n: usize,
    /// Whether the reply is streamed.
    pub stream: bool,
    /// Request id reported to the client.
    pub request_id: String,
}

/// Parses, validates, tokenises and submits a text completion request. Must not run on the async runtime.
pub(crate) fn submit(request: EndpointRequest<'_>) -> Result<SubmittedCompletion, ApiError> {
    let prepared = convert::prepare(request)?;
    let prompts = prepared.reply.echoes.into_iter().map(|echo| echo.ids).collect();
    Ok(SubmittedCompletion {
        generation: prepared.generation,
        tokens: prepared.reply.tokens,
        prompts,
        n: prepared.reply.n,
        stream: prepared.stream,
        request_id: prepared.request_id,
    })
}

/// Parses, validates and tokenises a text completion request.
///
/// Errors: HTTP status 400; the error names the invalid field.
pub(crate) fn render_request(
    serving: &ServingContext,
    fields: &mut RequestFields,
) -> Result<RenderedRequest, ApiError> {
    let request =
        CompletionRequest::take(fields, &serving.field_bounds, &serving.sampling_defaults)?;
    let CompletionRequest { params, prompts, logprobs, add_special_tokens } = request;
    let prompts = convert::encode(serving, &prompts, add_special_tokens, &params)?;
    let extra = EndpointParams {
        logprobs,
        prompt_logprobs: params.prompt_logprobs,
        max_tokens_default: Some(convert::MAX_TOKENS_DEFAULT),
        prompt_field: convert::FIELD,
        parser: None,
        thinking: None,
    };
    let limit = |prompt: &Vec<Token>| max_tokens(serving, &params, prompt.len(), extra);
    let max_tokens = prompts.iter().map(limit).collect::<Result<_, _>>()?;
    Ok(RenderedRequest { prompts, max_tokens, params, logprobs })
}

/// Validates the fields of a text completion request.
///
/// Errors: HTTP status 400; the error names the invalid field.
pub fn validate(
    fields: &mut RequestFields,
    bounds: &FieldBounds,
    defaults: &SamplingDefaults,
) -> Result<(), ApiError> {
    CompletionRequest::take(fields, bounds, defaults).map(|_| ())
}
