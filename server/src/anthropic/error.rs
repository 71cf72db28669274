//! Errors of the Anthropic Messages API: `{"type":"error","error":{"type","message"}}`.

use crate::api_error::ApiError;
use axum::body::Body;
use axum::http::{Response, header};
use serde::Serialize;

/// Path prefix of the Messages API; errors on these paths have Anthropic's JSON form.
const PREFIX: &str = "/v1/messages";

#[derive(Serialize)]
struct AnthropicErrorBody<'a> {
    r#type: &'static str,
    error: AnthropicErrorDetail<'a>,
}

#[derive(Serialize)]
struct AnthropicErrorDetail<'a> {
    r#type: &'static str,
    message: &'a str,
}

/// Formats the body of an error reply in Anthropic's JSON form.
pub(crate) fn body(error: &ApiError) -> String {
    let message = match (error.context_overflow, &error.param) {
        (Some(overflow), _) => overflow.anthropic_message(),
        (None, Some(param)) => format!("{param}: {}", error.message),
        (None, None) => error.message.clone(),
    };
    let inner = AnthropicErrorDetail { r#type: kind(error.status.as_u16()), message: &message };
    let body = AnthropicErrorBody { r#type: "error", error: inner };
    serde_json::to_string(&body).unwrap_or_default() // Strings can always be serialised.
}

/// Whether `path` is a path of the Messages API.
pub(crate) fn is_anthropic_path(path: &str) -> bool {
    path.strip_prefix(PREFIX).is_some_and(|rest| rest.is_empty() || rest.starts_with('/'))
}

/// Replaces the body of an error reply by Anthropic's JSON form; other replies are returned unchanged.
pub(crate) fn in_anthropic_shape(mut response: Response<Body>) -> Response<Body> {
    let Some(error) = response.extensions().get::<ApiError>() else { return response };
    let body = Body::from(body(error));
    response.headers_mut().remove(header::CONTENT_LENGTH);
    response.map(|_| body)
}

fn kind(status: u16) -> &'static str {
    match status {
        401 => "authentication_error",
        404 => "not_found_error",
        413 => "request_too_large",
        429 => "rate_limit_error",
        503 => "overloaded_error",
        400..500 => "invalid_request_error",
        _ => "api_error",
    }
}
