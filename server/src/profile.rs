//! `/start_profile` and `/stop_profile`: control profiler traces of the executors' steps, as in vLLM.

use super::api_error::ApiError;
use super::app::AppState;
use axum::Json;
use axum::extract::State;
use axum::http::StatusCode;
use protocol::ProfilerStatus;
use serde_json::{Value, json};
use std::path::Path;
use std::sync::Arc;
use std::time::Duration;
use tokio::time::timeout;

/// Maximum wait for the replies of the executors. An executor replies between two steps; when profiling
/// stops, after it has completed its trace file.
const REPLY_TIMEOUT: Duration = Duration::from_secs(30);

/// Starts profiling: the executors record all following steps in a new trace file.
pub(crate) async fn start(State(app): State<Arc<AppState>>) -> Result<Json<Value>, ApiError> {
    set_profiling(&app, true).await
}

/// Stops profiling: the executors complete their trace file.
pub(crate) async fn stop(State(app): State<Arc<AppState>>) -> Result<Json<Value>, ApiError> {
    set_profiling(&app, false).await
}

async fn set_profiling(app: &AppState, on: bool) -> Result<Json<Value>, ApiError> {
    if !app.options.profile {
        let message = "profiling is disabled: start the server with --profile DIR";
        return Err(ApiError::new(StatusCode::NOT_FOUND, "profiling_off", message));
    }
    let mut replies = app.serving()?.client.profile(on);
    let all = async {
        let mut statuses = Vec::new();
        while let Some(reply) = replies.recv().await {
            statuses.push(reply);
        }
        statuses
    };
    match timeout(REPLY_TIMEOUT, all).await {
        Ok(statuses) if !statuses.is_empty() => merged_reply(on, statuses),
        Ok(_) | Err(_) => {
            Err(ApiError::unavailable("engine_unavailable", "the executor timed out", 10))
        }
    }
}

/// Merges the executors' replies. `file` is the first trace file; with several executors, `files` lists all
/// trace files.
fn merged_reply(on: bool, statuses: Vec<ProfilerStatus>) -> Result<Json<Value>, ApiError> {
    let multiple = statuses.len() > 1;
    let mut files = Vec::new();
    for status in statuses {
        match status {
            ProfilerStatus::Started(path) => files.push(file_name(&path)),
            ProfilerStatus::Stopped(path) => files.extend(path.as_deref().map(file_name)),
            ProfilerStatus::Failed(error) => {
                tracing::error!(error, on, "profiling cannot be started or stopped");
                return Err(ApiError::internal());
            }
        }
    }
    files.sort_unstable();
    let status = if on { "started" } else { "stopped" };
    let mut reply = json!({"status": status, "file": files.first()});
    if multiple {
        reply["files"] = files.into();
    }
    Ok(Json(reply))
}

/// Returns the file name of `path` without its folder, because folders must not be disclosed to clients.
fn file_name(path: &str) -> String {
    Path::new(path).file_name().map_or_else(String::new, |name| name.to_string_lossy().into_owned())
}
