//! `/kv_event_sources`: where the publishers of KV events are, for routers that look for them.

use super::app::App;
use super::error::ApiError;
use crate::kv_events::Source;
use axum::Json;
use axum::extract::State;
use serde_json::Value;
use std::sync::Arc;

/// One member per DP rank, named by it as in vLLM; none if nothing is published.
pub(super) async fn sources(State(app): State<Arc<App>>) -> Result<Json<Value>, ApiError> {
    let sources = &app.serving()?.kv_event_sources;
    let by_rank = |source: &Arc<Source>| (source.rank.to_string(), source.describe());
    Ok(Json(Value::Object(sources.iter().map(by_rank).collect())))
}
