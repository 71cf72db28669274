//! Routes that clients of vLLM know and this server has not: 501 with the reason, where a 404 would read like a
//! mistyped path.

use super::api_error::ApiError;
use super::auth::RouteAccess;
use axum::http::StatusCode;

/// Routes that are absent for one reason.
pub struct UnsupportedRoutes {
    /// Their paths, whatever the method.
    pub paths: &'static [&'static str],
    /// Who is told the reason; for all others there is no such route, as with those that exist.
    pub access: RouteAccess,
    /// The reason, and what does instead.
    reason: &'static str,
}

/// All of them.
pub const UNSUPPORTED_ROUTES: &[UnsupportedRoutes] = &[
    UnsupportedRoutes {
        paths: &["/v1/embeddings", "/pooling", "/classify"],
        access: RouteAccess::Key,
        reason: "models generate text here: no embeddings, no classes",
    },
    UnsupportedRoutes {
        paths: &["/score", "/v1/score", "/rerank", "/v1/rerank", "/v2/rerank"],
        access: RouteAccess::Key,
        reason: "models generate text here: nothing is scored or ranked",
    },
    UnsupportedRoutes {
        paths: &["/generate", "/inference/v1/generate"],
        access: RouteAccess::Key,
        reason: "token ids go to /v1/completions as `prompt` and come back with `return_token_ids`",
    },
    UnsupportedRoutes {
        paths: &["/sleep", "/wake_up", "/is_sleeping", "/pause", "/resume", "/is_paused"],
        access: RouteAccess::Admin,
        reason: "the engine is always awake: weights and KV cache stay where they are",
    },
    UnsupportedRoutes {
        paths: &["/v1/load_lora_adapter", "/v1/unload_lora_adapter"],
        access: RouteAccess::Admin,
        reason: "adapters are not loaded",
    },
];

impl UnsupportedRoutes {
    /// What a caller who may know is told.
    pub fn not_implemented(&self) -> ApiError {
        let message = format!("this route is not implemented: {}", self.reason);
        ApiError::new(StatusCode::NOT_IMPLEMENTED, "not_implemented", message)
    }
}
