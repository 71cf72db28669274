//! `/kv_event_sources`: where the publishers of KV events are, for routers that look for them.

use super::api_error::ApiError;
use super::app::AppState;
use axum::Json;
use axum::extract::State;
use metrics::kv_events::KvEventSource;
use serde_json::Value;
use std::sync::Arc;

/// One member per DP rank, named by it as in vLLM; none if nothing is published.
pub(super) async fn sources(State(app): State<Arc<AppState>>) -> Result<Json<Value>, ApiError> {
    let sources = &app.serving()?.kv_event_sources;
    let by_rank = |source: &Arc<KvEventSource>| (source.rank.to_string(), source.describe());
    Ok(Json(Value::Object(sources.iter().map(by_rank).collect())))
}
