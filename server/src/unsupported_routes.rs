//! vLLM routes that this server does not implement. They reply 501 with a reason; a 404 would suggest a
//! mistyped path.

use super::api_error::ApiError;
use super::auth::RouteAccess;
use axum::http::StatusCode;

/// Group of vLLM routes that are unsupported for the same reason.
pub struct UnsupportedRoutes {
    /// Paths of the routes; all HTTP methods of these paths reply 501.
    pub paths: &'static [&'static str],
    /// API key required to see the reason; without it, the reply is the same 401 or 404 as for an implemented
    /// route.
    pub access: RouteAccess,
    /// Reason why the routes are unsupported, and the available alternative.
    reason: &'static str,
}

/// All unsupported routes.
pub const UNSUPPORTED_ROUTES: &[UnsupportedRoutes] = &[
    UnsupportedRoutes {
        paths: &["/pooling", "/classify", "/v2/embed"],
        access: RouteAccess::Key,
        reason: "pooled vectors are returned by /v1/embeddings, scores by /score and /rerank",
    },
    UnsupportedRoutes {
        paths: &["/inference/v1/generate"],
        access: RouteAccess::Key,
        reason: "send token ids to /v1/completions as `prompt`, and get them with `return_token_ids`",
    },
    UnsupportedRoutes {
        paths: &["/v1/responses/compact"],
        access: RouteAccess::Key,
        reason: "let the model summarise the conversation with a request to /v1/responses, or set `truncation` to \
                 \"auto\", which drops the oldest messages",
    },
    UnsupportedRoutes {
        paths: &["/sleep", "/wake_up", "/is_sleeping", "/pause", "/resume", "/is_paused"],
        access: RouteAccess::Admin,
        reason: "sleep and pause are not supported: weights and KV cache stay in memory",
    },
    UnsupportedRoutes {
        paths: &["/v1/load_lora_adapter", "/v1/unload_lora_adapter"],
        access: RouteAccess::Admin,
        reason: "LoRA adapters are not supported",
    },
];

impl UnsupportedRoutes {
    /// Creates the 501 error with the reason.
    pub fn not_implemented(&self) -> ApiError {
        let message = format!("this route is not implemented: {}", self.reason);
        ApiError::new(StatusCode::NOT_IMPLEMENTED, "not_implemented", message)
    }
}
