//! POST `/v1/chat/completions`, and the code that other conversation endpoints share.

mod chat_message;
mod convert;
pub(crate) mod custom_input;
pub(crate) mod custom_tools;
mod delta_parts;
pub(crate) mod generation_start;
pub(crate) mod ignored_values;
pub(crate) mod messages;
mod reasoning_head;
mod reply;
mod stream;
pub(crate) mod system_turns;
pub(crate) mod tool_choice;
pub(crate) mod tools;
pub(crate) mod types;

use super::endpoint;
use crate::api_error::ApiError;
use crate::app::{AppState, ServingContext};
use crate::openai::params::{FieldBounds, SamplingDefaults};
use crate::openai::submit::{EndpointParams, max_tokens, truncate};
use crate::render::RenderedRequest;
use crate::request_fields::RequestFields;
use axum::body::Body;
use axum::extract::{Request, State};
use axum::http::Response;
use reply::ChatCompletionReplyFormatter;
use std::sync::Arc;
use types::ChatCompletionRequest;

/// Names of the reply fields that contain reasoning.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Default)]
pub enum ReasoningFieldNames {
    /// `reasoning` and `reasoning_content`.
    #[default]
    Both,
    /// `reasoning`, the current name.
    Reasoning,
    /// `reasoning_content`, the older name.
    ReasoningContent,
}

impl ReasoningFieldNames {
    /// Returns the field names.
    pub fn names(self) -> &'static [&'static str] {
        match self {
            Self::Both => &["reasoning", "reasoning_content"],
            Self::Reasoning => &["reasoning"],
            Self::ReasoningContent => &["reasoning_content"],
        }
    }
}

/// Handles a chat completion request.
pub async fn handle(
    State(app): State<Arc<AppState>>,
    request: Request,
) -> Result<Response<Body>, ApiError> {
    endpoint::serve::<ChatCompletionReplyFormatter>(app, request).await
}

/// Parses, validates, renders and tokenises a chat completion request.
///
/// Errors: HTTP status 400; the error names the invalid field.
pub(crate) fn render_request(
    serving: &ServingContext,
    fields: &mut RequestFields,
) -> Result<RenderedRequest, ApiError> {
    let request =
        ChatCompletionRequest::take(fields, &serving.field_bounds, &serving.sampling_defaults)?;
    fields.bool("include_reasoning")?;
    let ChatCompletionRequest { params, mut input, tools, logprobs, prompt_field, .. } = request;
    input.tools = tools.template_value;
    let add_special_tokens = request.add_special_tokens;
    let mut ids = generation_start::render(serving, input, add_special_tokens, prompt_field)?.ids;
    truncate(&mut ids, params.truncate);
    let extra = EndpointParams {
        logprobs,
        prompt_logprobs: params.prompt_logprobs,
        max_tokens_default: None,
        prompt_field,
        parser: None,
        thinking: None,
    };
    let max_tokens = vec![max_tokens(serving, &params, ids.len(), extra)?];
    Ok(RenderedRequest { prompts: vec![ids], max_tokens, params, logprobs })
}

/// Validates the fields of a chat completion request.
///
/// Errors: HTTP status 400; the error names the invalid field.
pub fn validate(
    fields: &mut RequestFields,
    bounds: &FieldBounds,
    defaults: &SamplingDefaults,
) -> Result<(), ApiError> {
    ChatCompletionRequest::take(fields, bounds, defaults).map(|_| ())
}
