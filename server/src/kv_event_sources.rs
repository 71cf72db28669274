//! `/kv_event_sources`: endpoints at which routers can subscribe to the KV events of each replica.

use super::api_error::ApiError;
use super::app::AppState;
use axum::Json;
use axum::extract::State;
use metrics::kv_events::KvEventPublisherInfo;
use serde_json::Value;
use std::sync::Arc;

/// Returns the KV event endpoints as a JSON object with one member per DP rank, whose key is the rank, as in
/// vLLM; empty if KV events are off.
pub(super) async fn sources(State(app): State<Arc<AppState>>) -> Result<Json<Value>, ApiError> {
    let sources = &app.serving()?.kv_event_sources;
    let by_rank = |source: &Arc<KvEventPublisherInfo>| (source.rank.to_string(), source.describe());
    Ok(Json(Value::Object(sources.iter().map(by_rank).collect())))
}
