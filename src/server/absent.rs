//! Routes that clients of vLLM know and this server has not: 501 with the reason, where a 404 would read like a
//! mistyped path.

use super::error::ApiError;
use super::keys::Access;
use axum::http::StatusCode;

/// Routes that are absent for one reason.
pub struct Absent {
    /// Their paths, whatever the method.
    pub paths: &'static [&'static str],
    /// Who is told the reason; for all others there is no such route, as with those that exist.
    pub access: Access,
    /// The reason, and what does instead.
    why: &'static str,
}

/// All of them.
pub const ABSENT: &[Absent] = &[
    Absent {
        paths: &["/v1/embeddings", "/pooling", "/classify"],
        access: Access::Key,
        why: "models generate text here: no embeddings, no classes",
    },
    Absent {
        paths: &["/score", "/v1/score", "/rerank", "/v1/rerank", "/v2/rerank"],
        access: Access::Key,
        why: "models generate text here: nothing is scored or ranked",
    },
    Absent {
        paths: &["/generate", "/inference/v1/generate"],
        access: Access::Key,
        why: "token ids go to /v1/completions as `prompt` and come back with `return_token_ids`",
    },
    Absent {
        paths: &["/sleep", "/wake_up", "/is_sleeping", "/pause", "/resume", "/is_paused"],
        access: Access::Admin,
        why: "the engine is always awake: weights and KV cache stay where they are",
    },
    Absent {
        paths: &["/v1/load_lora_adapter", "/v1/unload_lora_adapter"],
        access: Access::Admin,
        why: "adapters are not loaded",
    },
];

impl Absent {
    /// What a caller who may know is told.
    pub fn refusal(&self) -> ApiError {
        let message = format!("this route is not implemented: {}", self.why);
        ApiError::new(StatusCode::NOT_IMPLEMENTED, "not_implemented", message)
    }
}
