//! HTTP errors of tokenisation and overload.

use crate::api_error::ApiError;
use crate::app::AppState;
use axum::http::StatusCode;
use text::TextError;

/// `Retry-After` in seconds if other requests currently use the memory budget for tokenisation.
const MEMORY_RETRY_S: u32 = 5;

/// Converts an error of the tokenizer or the chat template to status 400, or to 429 if other requests use the
/// available memory or processes. Its details are logged.
pub(crate) fn text_error(error: &TextError, param: &str) -> ApiError {
    let detail = match error {
        TextError::Template(detail)
        | TextError::InvalidRequestTemplate(detail)
        | TextError::NoTemplateProcess(detail) => Some(detail.as_str()),
        _ => None,
    };
    tracing::debug!(%error, detail, "text rejected");
    match error {
        TextError::MemoryBusy { .. }
        | TextError::NoTemplateProcess(_)
        | TextError::TemplatesBusy(_) => ApiError {
            retry_after_s: Some(MEMORY_RETRY_S),
            ..ApiError::new(StatusCode::TOO_MANY_REQUESTS, "text_memory", error.to_string())
        },
        TextError::TooMuchMemory { .. } => {
            ApiError::bad_request("never_fits", param, error.to_string())
        }
        _ => ApiError::invalid(param, error.to_string()),
    }
}

impl AppState {
    /// Completes an engine error: sets `Retry-After` if the engine is unavailable, and the configured HTTP
    /// status if the server is overloaded.
    pub fn complete_engine_error(&self, error: ApiError) -> ApiError {
        match error.reason {
            "engine_unavailable" => {
                ApiError { retry_after_s: Some(self.health.restart_s()), ..error }
            }
            "max_num_queued_reqs"
            | "max_num_queued_tokens"
            | "grammars_overloaded"
            | "text_memory" => ApiError { status: self.options.overload_status, ..error },
            _ => error,
        }
    }

    /// Creates an overload error with the configured HTTP status.
    pub fn overloaded(&self, overload: &engine::OverloadRejection) -> ApiError {
        let message = format!(
            "{} in flight, the limit is {}: try again later",
            overload.current, overload.cap
        );
        let status: StatusCode = self.options.overload_status;
        let error = ApiError::new(status, overload.reason, message);
        ApiError { retry_after_s: Some(overload.retry_after_s), ..error }
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::app::ServerOptions;
    use std::sync::Arc;

    #[test]
    fn overload_uses_the_configured_status() {
        let overload_status = StatusCode::SERVICE_UNAVAILABLE;
        let options = ServerOptions { overload_status, ..ServerOptions::default() };
        let app = AppState::new(options, Arc::default());
        let status = |error: ApiError| app.complete_engine_error(error).status.as_u16();
        let full = |reason| ApiError::new(StatusCode::TOO_MANY_REQUESTS, reason, "full");
        assert_eq!(status(full("max_num_queued_reqs")), 503);
        assert_eq!(status(full("max_num_queued_tokens")), 503);
        assert_eq!(status(full("grammars_overloaded")), 503);
        assert_eq!(status(ApiError::invalid("n", "0")), 400);
    }
}
