//! Probe routes `/livez`, `/readyz`, `/health` and `/ping`, and the routes `/version` and `/load`.
//!
//! The replies are computed from atomics only, without the tokenizer and the scheduler.

use super::api_error::ApiError;
use super::app::AppState;
use super::openai::generation::draining;
use axum::Json;
use axum::extract::State;
use engine::ServerStatus as Health;
use metrics::RestartFailureKind;
use serde_json::{Value, json};
use std::sync::Arc;

/// Liveness probe: fails if the engine is stalled, because the process should then be restarted.
pub(crate) async fn live(State(app): State<Arc<AppState>>) -> Result<(), ApiError> {
    match app.health.status() {
        Health::Stalled => Err(stalled()),
        _ => Ok(()),
    }
}

/// Readiness probe: fails if this server should receive no new requests.
pub(crate) async fn ready(State(app): State<Arc<AppState>>) -> Result<(), ApiError> {
    match app.health.status() {
        Health::Serving => Ok(()),
        Health::Starting => Err(app.starting()),
        Health::Draining => Err(draining()),
        Health::Stalled => Err(stalled()),
        Health::Restarting => {
            let retry_s = app.health.restart_s();
            Err(restarting(app.health.start_failure(), retry_s))
        }
        Health::Unavailable => {
            Err(ApiError::unavailable("engine_unavailable", "no replica is available", 10))
        }
    }
}

fn restarting(failure: Option<RestartFailureKind>, retry_s: u32) -> ApiError {
    let Some(failure) = failure else {
        return ApiError::unavailable("engine_unavailable", "the executor is restarting", retry_s);
    };
    let name = failure.name();
    let message = format!("the executor is restarting; its last start failed: {name}");
    let reason = match failure {
        RestartFailureKind::WeightsChanged => name,
        _ => "engine_unavailable",
    };
    ApiError::unavailable(reason, &message, retry_s)
}

fn stalled() -> ApiError {
    ApiError::unavailable("engine_unavailable", "an engine step exceeded its deadline", 10)
}

/// Returns the version of this server.
pub(crate) async fn version() -> Json<Value> {
    Json(json!({"version": env!("CARGO_PKG_VERSION")}))
}

/// Returns the number of requests in progress.
pub(crate) async fn load(State(app): State<Arc<AppState>>) -> Json<Value> {
    let requests = app.serving().map_or(0, |serving| serving.client.admission().requests());
    Json(json!({"server_load": requests}))
}
