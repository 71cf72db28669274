//! Rejects requests for routes that the server's runner (`--runner`) does not serve.

use super::api_error::ApiError;
use super::app::AppState;
use axum::body::Body;
use axum::extract::{Request, State};
use axum::http::Response;
use axum::middleware::Next;
use axum::response::IntoResponse;
use std::sync::Arc;

/// Mode of the server (`--runner`).
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum RunnerType {
    /// Generates text.
    Generate,
    /// Pools hidden states: embeddings and scores.
    Pooling,
}

/// Runner required by a route, which is compared with the server's runner before the request is handled.
#[derive(Clone)]
pub(crate) struct RequiredRunner {
    /// Application state, which contains the runner of the server.
    pub app: Arc<AppState>,
    /// Runner that serves the route.
    pub runner: RunnerType,
}

/// Passes a request to its route if the server's runner serves the route. Otherwise replies 400 and names the
/// flag of the other runner. Before the model is loaded, every request is passed on.
pub(crate) async fn check_runner(
    State(guard): State<RequiredRunner>,
    request: Request,
    next: Next,
) -> Response<Body> {
    let runs_pooling = guard.app.serving().map(|serving| serving.pooler.is_some());
    let needs_pooling = guard.runner == RunnerType::Pooling;
    match runs_pooling {
        Ok(runs_pooling) if runs_pooling != needs_pooling => {
            wrong_runner(guard.runner).into_response()
        }
        _ => next.run(request).await,
    }
}

/// Creates the 400 error: the route needs `runner`, but the server uses the other runner.
pub(crate) fn wrong_runner(runner: RunnerType) -> ApiError {
    let message = match runner {
        RunnerType::Generate => {
            "this server computes embeddings or scores (--runner pooling) and generates no text; start it with \
             --runner generate"
        }
        RunnerType::Pooling => {
            "this server generates text (--runner generate) and computes no embeddings or scores; start it with \
             --runner pooling"
        }
    };
    ApiError::bad_request("wrong_runner", "", message)
}
