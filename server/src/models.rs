//! Handlers of GET `/v1/models` and `/v1/models/{id}`.

use super::api_error::ApiError;
use super::app::{AppState, ServingContext};
use super::path_param::PathParam;
use axum::Json;
use axum::extract::State;
use serde_json::{Value, json};
use std::sync::Arc;

/// Returns the list of served model names.
pub(crate) async fn list(State(app): State<Arc<AppState>>) -> Result<Json<Value>, ApiError> {
    let serving = app.serving()?;
    let cards: Vec<Value> =
        serving.card.names.plain().iter().map(|name| card(&app, serving, name)).collect();
    Ok(Json(json!({"object": "list", "data": cards})))
}

/// Returns one served model. The requested name may contain slashes, and may match a pattern of the served
/// names.
pub(crate) async fn retrieve(
    State(app): State<Arc<AppState>>,
    PathParam(name): PathParam,
) -> Result<Json<Value>, ApiError> {
    let serving = app.serving()?;
    let name = serving.check_model(Some(&name))?;
    Ok(Json(card(&app, serving, &name)))
}

fn card(app: &AppState, serving: &ServingContext, name: &str) -> Value {
    json!({
        "id": name,
        "object": "model",
        "created": serving.card.created,
        "owned_by": app.options.owned_by,
        "root": serving.card.root,
        "parent": null,
        "max_model_len": serving.field_bounds.max_model_len,
        "permission": [],
    })
}
