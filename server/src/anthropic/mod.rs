//! POST `/v1/messages` and `/v1/messages/count_tokens`: the Anthropic Messages API, implemented with the code
//! of chat completions.

mod compaction;
mod content_blocks;
mod context_edits;
mod convert;
pub(crate) mod error;
mod reply;
mod server_tools;
mod service_fields;
mod stream;
mod system_messages;
mod thinking_clearing;
mod tool_use_clearing;
mod tools;
mod types;

use super::api_error::ApiError;
use super::app::AppState;
use super::openai::chat::generation_start::render;
use super::openai::endpoint;
use super::tokenize;
use axum::body::Body;
use axum::extract::{Request, State};
use axum::http::Response;
use reply::AnthropicReplyFormatter;
use serde_json::json;
use std::sync::Arc;

/// Handles a `/v1/messages` request.
pub(crate) async fn create(
    State(app): State<Arc<AppState>>,
    request: Request,
) -> Result<Response<Body>, ApiError> {
    endpoint::serve::<AnthropicReplyFormatter>(app, request).await
}

/// Handles `/v1/messages/count_tokens`: returns the number of tokens of the prompt.
pub(crate) async fn count_tokens(
    State(app): State<Arc<AppState>>,
    request: Request,
) -> Result<Response<Body>, ApiError> {
    tokenize::serve(app, request, |app, serving, fields, _permit| {
        let model = fields.string("model", 512)?;
        serving.check_model(model.as_deref())?;
        let conversation = types::AnthropicPromptParams::take(fields, app, serving)?;
        fields.take("max_tokens");
        let mut input = conversation.input;
        input.tools = conversation.tools.template_value;
        let prompt = render(serving, input, false, "messages")?;
        let tokens = prompt.ids.len();
        let mut count = json!({"input_tokens": tokens});
        if let Some(edits) = conversation.context_edits {
            let original = tokens + edits.cleared_tokens();
            count["context_management"] = json!({"original_input_tokens": original});
        }
        Ok(Body::from(count.to_string()))
    })
    .await
}
