//! SGLang's native routes: `/generate`, `/health_generate`, `/model_info` and `/server_info`. `/generate` is
//! a text completion with other field names and another reply format.

mod generate_fields;
mod generate_output;
mod generate_reply;
mod generation_probe;
#[cfg(test)]
mod tests;

pub(crate) use generation_probe::health_generate;

use super::api_error::ApiError;
use super::app::AppState;
use super::openai::endpoint;
use axum::Json;
use axum::body::Body;
use axum::extract::{Request, State};
use axum::http::Response;
use generate_reply::GenerateReplyFormatter;
use serde_json::{Value, json};
use std::sync::Arc;

/// Handles POST `/generate`.
pub(crate) async fn generate(
    State(app): State<Arc<AppState>>,
    request: Request,
) -> Result<Response<Body>, ApiError> {
    endpoint::serve::<GenerateReplyFormatter>(app, request).await
}

/// Handles `/model_info` and `/get_model_info`.
pub(crate) async fn model_info(State(app): State<Arc<AppState>>) -> Result<Json<Value>, ApiError> {
    let serving = app.serving()?;
    Ok(Json(json!({
        "model_path": serving.card.root,
        "tokenizer_path": serving.card.root,
        "served_model_name": serving.card.names.first(),
        "is_generation": serving.pooler.is_none(),
        "preferred_sampling_params": null,
        "weight_version": serving.card.fingerprint,
        "has_image_understanding": false,
        "has_audio_understanding": false,
        "max_model_len": serving.field_bounds.max_model_len,
        "vocab_size": serving.field_bounds.vocab_size,
    })))
}
