//! `/start_profile` and `/stop_profile`: traces of the executors' steps, as vLLM switches them.

use super::app::App;
use super::error::ApiError;
use axum::Json;
use axum::extract::State;
use axum::http::StatusCode;
use protocol::Profiled;
use serde_json::{Value, json};
use std::path::Path;
use std::sync::Arc;
use std::time::Duration;
use tokio::time::timeout;

/// Executors answer between two steps, and complete a file first.
const REPLY_WAIT: Duration = Duration::from_secs(30);

/// Steps from now on go into a new file.
pub async fn start(State(app): State<Arc<App>>) -> Result<Json<Value>, ApiError> {
    switch(&app, true).await
}

/// No step is recorded any more, and the file is complete.
pub async fn stop(State(app): State<Arc<App>>) -> Result<Json<Value>, ApiError> {
    switch(&app, false).await
}

async fn switch(app: &App, on: bool) -> Result<Json<Value>, ApiError> {
    if !app.options.profile {
        let message = "this server records no traces: start it with --profile DIR";
        return Err(ApiError::new(StatusCode::NOT_FOUND, "profiling_off", message));
    }
    let mut answers = app.serving()?.client.profile(on);
    let all = async {
        let mut told = Vec::new();
        while let Some(answer) = answers.recv().await {
            told.push(answer);
        }
        told
    };
    match timeout(REPLY_WAIT, all).await {
        Ok(told) if !told.is_empty() => said(on, told),
        Ok(_) | Err(_) => {
            Err(ApiError::unavailable("engine_unavailable", "the executor does not answer", 10))
        }
    }
}

/// What the executors answered, as one answer: `file` is the first one's, `files` are those of several.
fn said(on: bool, told: Vec<Profiled>) -> Result<Json<Value>, ApiError> {
    let several = told.len() > 1;
    let mut files = Vec::new();
    for profiled in told {
        match profiled {
            Profiled::Started(path) => files.push(name(&path)),
            Profiled::Stopped(path) => files.extend(path.as_deref().map(name)),
            Profiled::Failed(error) => {
                tracing::error!(error, on, "the trace cannot be switched");
                return Err(ApiError::internal());
            }
        }
    }
    files.sort_unstable();
    let status = if on { "started" } else { "stopped" };
    let mut reply = json!({"status": status, "file": files.first()});
    if several {
        reply["files"] = files.into();
    }
    Ok(Json(reply))
}

/// Without the folder, which is the operator's.
fn name(path: &str) -> String {
    Path::new(path).file_name().map_or_else(String::new, |name| name.to_string_lossy().into_owned())
}
