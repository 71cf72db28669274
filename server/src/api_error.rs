//! API errors, with one JSON form for every route and status.
//!
//! Messages are fixed texts with numbers. They contain no path, type name or panic message; such details are
//! logged with the request id.

use super::context_overflow::ContextOverflow;
use axum::body::Body;
use axum::http::{HeaderValue, Response, StatusCode, header};
use axum::response::IntoResponse;
use serde_json::json;

/// Error response of the API.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct ApiError {
    /// HTTP status.
    pub status: StatusCode,
    /// Error message, with the numbers that explain the error.
    pub message: String,
    /// Name of the request field that caused the error.
    pub param: Option<String>,
    /// Machine-readable error code, which does not change between versions.
    pub reason: &'static str,
    /// Value of `Retry-After` in seconds (429 and 503).
    pub retry_after_s: Option<u32>,
    /// Token counts if the request exceeds the context length. Each API formats its own message from them.
    pub context_overflow: Option<ContextOverflow>,
}

impl ApiError {
    /// Creates an error that names no field and has no `Retry-After`.
    pub fn new(status: StatusCode, reason: &'static str, message: impl Into<String>) -> Self {
        Self {
            status,
            message: message.into(),
            param: None,
            reason,
            retry_after_s: None,
            context_overflow: None,
        }
    }

    /// Creates a 400 error: the value of the field `param` is invalid.
    pub fn invalid(param: impl Into<String>, message: impl Into<String>) -> Self {
        Self::bad_request("invalid_value", param, message)
    }

    /// Creates a 400 error: the field `param` requests a feature that this server does not support.
    pub fn unsupported(param: impl Into<String>, message: impl Into<String>) -> Self {
        Self::bad_request("unsupported_field", param, message)
    }

    /// Creates a 400 error for the field `param` with the error code `reason`.
    pub fn bad_request(
        reason: &'static str,
        param: impl Into<String>,
        message: impl Into<String>,
    ) -> Self {
        let param = Some(param.into()).filter(|p| !p.is_empty());
        Self { param, ..Self::new(StatusCode::BAD_REQUEST, reason, message) }
    }

    /// Creates a 500 error; its details are only logged.
    pub fn internal() -> Self {
        Self::new(StatusCode::INTERNAL_SERVER_ERROR, "internal", "internal error")
    }

    /// Creates a 503 error with a `Retry-After` value.
    pub fn unavailable(reason: &'static str, message: &str, retry_after_s: u32) -> Self {
        let retry_after_s = Some(retry_after_s);
        Self { retry_after_s, ..Self::new(StatusCode::SERVICE_UNAVAILABLE, reason, message) }
    }

    /// Returns the message. The field name is put before a message that does not contain it, because many
    /// clients display only the message. Messages about the context length remain unchanged, because clients
    /// recognise them.
    pub fn text(&self) -> String {
        let in_word = |c: char| c.is_alphanumeric() || "_-.[]".contains(c);
        match &self.param {
            Some(_) if self.context_overflow.is_some() => self.message.clone(),
            Some(param) if !self.message.split(|c| !in_word(c)).any(|word| word == param) => {
                format!("{param}: {}", self.message)
            }
            _ => self.message.clone(),
        }
    }

    /// Formats the body of the reply: `{"error":{"message","type","param","code","reason"}}`. `code` is the
    /// HTTP status, except for context length errors, which have OpenAI's string code, by which clients
    /// recognise them.
    pub fn body(&self) -> String {
        let code = match self.context_overflow {
            Some(_) => json!(self.reason),
            None => json!(self.status.as_u16()),
        };
        json!({"error": {
            "message": self.text(),
            "type": kind(self.status),
            "param": self.param,
            "code": code,
            "reason": self.reason,
        }})
        .to_string()
    }
}

/// Returns the value of `type` for an error with this HTTP status.
fn kind(status: StatusCode) -> &'static str {
    match status.as_u16() {
        400 => "BadRequestError",
        401 => "AuthenticationError",
        404 => "NotFoundError",
        405 => "MethodNotAllowedError",
        408 => "RequestTimeoutError",
        413 => "PayloadTooLargeError",
        415 => "UnsupportedMediaTypeError",
        429 => "RateLimitError",
        431 => "HeadersTooLargeError",
        501 => "NotImplementedError",
        503 => "ServiceUnavailableError",
        _ => "InternalServerError",
    }
}

/// Converts the error to a response. The error is also attached to the response as an extension, which
/// middleware reads to count errors and to convert the body to the JSON form of other APIs.
impl IntoResponse for ApiError {
    fn into_response(self) -> Response<Body> {
        let mut response = Response::new(Body::from(self.body()));
        *response.status_mut() = self.status;
        let headers = response.headers_mut();
        headers.insert(header::CONTENT_TYPE, HeaderValue::from_static("application/json"));
        if let Some(seconds) = self.retry_after_s {
            headers.insert(header::RETRY_AFTER, HeaderValue::from(seconds));
        }
        response.extensions_mut().insert(self);
        response
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn invalid_field_is_named_once_in_the_message() {
        let text = |param, message| ApiError::invalid(param, message).text();
        assert_eq!(text("n", "must be an integer, got 0"), "n: must be an integer, got 0");
        assert_eq!(text("n", "3 prompts with n = 9"), "3 prompts with n = 9");
        assert_eq!(text("stop[0]", "must have 1 byte"), "stop[0]: must have 1 byte");
        assert_eq!(text("", "the request body is incomplete"), "the request body is incomplete");
    }
}
