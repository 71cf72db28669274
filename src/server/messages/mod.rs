//! POST `/v1/messages` and `/v1/messages/count_tokens`: the Anthropic Messages API over the chat path.

mod convert;
pub mod error;
mod reply;
mod stream;
mod types;

use super::app::App;
use super::error::ApiError;
use super::openai::chat::start::render;
use super::openai::exchange;
use super::tokenisation;
use axum::body::Body;
use axum::extract::{Request, State};
use axum::http::Response;
use reply::Reply;
use serde_json::json;
use std::sync::Arc;

/// Answers one request.
pub async fn create(
    State(app): State<Arc<App>>,
    request: Request,
) -> Result<Response<Body>, ApiError> {
    exchange::serve::<Reply>(app, request).await
}

/// Counts the tokens of a prompt.
pub async fn count_tokens(
    State(app): State<Arc<App>>,
    request: Request,
) -> Result<Response<Body>, ApiError> {
    tokenisation::answer(app, request, |_, serving, fields, _ticket| {
        let model = fields.string("model", 512)?;
        serving.check_model(model.as_deref())?;
        let conversation = types::Conversation::take(fields)?;
        fields.take("max_tokens");
        let mut input = conversation.input;
        input.tools = conversation.tools.shown;
        let prompt = render(serving, input, false, "messages")?;
        let count = json!({"input_tokens": prompt.ids.len()});
        Ok(Body::from(count.to_string()))
    })
    .await
}
