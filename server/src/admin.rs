//! Admin routes: server information, reset of the prefix cache, abort of requests.

use super::api_error::ApiError;
use super::app::AppState;
use super::request_body;
use super::request_fields::RequestFields;
use super::strict_json::JsonValue;
use axum::Json as Reply;
use axum::extract::{RawQuery, Request, State};
use serde_json::{Value, json};
use std::collections::HashSet;
use std::sync::Arc;
use std::time::Duration;
use tokio::time::timeout;

/// Maximum wait for the scheduler's reply, which normally takes at most one scheduler step.
const REPLY_TIMEOUT: Duration = Duration::from_secs(30);
/// Maximum body size of an admin request, in bytes.
const BODY_BYTES_MAX: usize = 1 << 20;
/// Maximum number of request ids in one abort request.
const REQUEST_IDS_MAX: usize = 10_000;
const REQUEST_ID_BYTES_MAX: usize = 160;
/// Prefixes of the field `id` in OpenAI and Anthropic replies; the field is a prefix followed by the
/// request id.
const REPLY_ID_PREFIXES: [&str; 3] = ["chatcmpl-", "cmpl-", "msg_"];

/// Returns the configuration that the server runs with, without secrets.
pub(crate) async fn server_info(
    State(app): State<Arc<AppState>>,
) -> Result<Reply<Value>, ApiError> {
    Ok(Reply(app.serving()?.info.clone()))
}

/// Resets the prefix cache. Nothing is reset while requests hold KV blocks, unless `reset_running_requests`
/// allows these requests to be preempted and restarted.
pub(crate) async fn reset_prefix_cache(
    State(app): State<Arc<AppState>>,
    RawQuery(query): RawQuery,
) -> Result<Reply<Value>, ApiError> {
    let restart = reset_running(query.as_deref().unwrap_or_default())?;
    let reply = app.serving()?.client.reset_prefix_cache(restart);
    match timeout(REPLY_TIMEOUT, reply).await {
        Ok(Ok(success)) => Ok(Reply(json!({"success": success}))),
        Ok(Err(_)) | Err(_) => {
            Err(ApiError::unavailable("engine_unavailable", "the engine timed out", 10))
        }
    }
}

/// Parses the query parameter `reset_running_requests`. vLLM's parameter `reset_external` is accepted only
/// with the value false, because there is no external KV cache that could be reset.
fn reset_running(query: &str) -> Result<bool, ApiError> {
    let mut restart = false;
    for pair in query.split('&').filter(|pair| !pair.is_empty()) {
        let (name, value) = pair.split_once('=').unwrap_or((pair, "true"));
        let on = match value.to_ascii_lowercase().as_str() {
            "true" | "1" => true,
            "false" | "0" => false,
            _ => return Err(ApiError::invalid(name, "must be true or false")),
        };
        match name {
            "reset_running_requests" => restart = on,
            "reset_external" if !on => {}
            "reset_external" => {
                let message = "there is no external KV cache";
                return Err(ApiError::unsupported(name, message));
            }
            _ => return Err(ApiError::unsupported(name, "unknown parameter")),
        }
    }
    Ok(restart)
}

/// Aborts the requests with the given ids, or all requests. Requests that are still being tokenised are not
/// in the engine yet and are not found.
pub(crate) async fn abort_requests(
    State(app): State<Arc<AppState>>,
    request: Request,
) -> Result<Reply<Value>, ApiError> {
    let client = &app.serving()?.client;
    let (parts, body) = request.into_parts();
    // No memory is reserved for this body in the budget shared by all requests, because an abort must be
    // accepted even if the server is overloaded.
    let (limit, count) = (app.options.body_timeout, |_| Ok(()));
    let body = request_body::read(&parts.headers, body, BODY_BYTES_MAX, limit, count).await?;
    let mut fields = RequestFields::of_body(JsonValue::parse(&body)?)?;
    let aborted = match requested_ids(&mut fields)? {
        Some(names) => {
            let request_ids = request_ids_of(&names);
            client.abort_by_client_id(|name| request_ids.contains(name))
        }
        None => client.abort_by_client_id(|_| true),
    };
    Ok(Reply(json!({"aborted": aborted})))
}

/// Returns the request ids that `names` may refer to: each name is a request id, or a reply id, which is a
/// prefix followed by the request id.
fn request_ids_of(names: &[String]) -> HashSet<&str> {
    let ids = names.iter().flat_map(|name| {
        let from_reply_id = REPLY_ID_PREFIXES.iter().filter_map(|kind| name.strip_prefix(kind));
        from_reply_id.chain([name.as_str()])
    });
    ids.collect()
}

/// Validates the body of an `/abort_request` request.
pub(crate) fn check_abort(fields: &mut RequestFields) -> Result<(), ApiError> {
    requested_ids(fields).map(|_| ())
}

/// Parses the request ids in the body of an abort request; `None` = all requests.
fn requested_ids(fields: &mut RequestFields) -> Result<Option<Vec<String>>, ApiError> {
    let all = fields.bool("abort_all")?.unwrap_or(false);
    let one = match fields.take_alias("request_id", "rid")? {
        None => None,
        Some(JsonValue::Str(name)) => Some(name),
        Some(other) => {
            return Err(super::request_fields::wrong_type(
                "request_id".to_owned(),
                "a string",
                &other,
            ));
        }
    };
    let list = fields.strings("request_ids", REQUEST_ID_BYTES_MAX, REQUEST_IDS_MAX)?;
    match (all, one, list) {
        (true, None, None) => Ok(None),
        (true, ..) => {
            Err(ApiError::invalid("abort_all", "give request ids or abort_all, not both"))
        }
        (false, Some(name), None) if name.is_empty() => {
            Err(ApiError::invalid("request_id", "is empty; abort_all: true means every request"))
        }
        (false, None, None) => {
            Err(ApiError::invalid("request_id", "is missing; or give request_ids or abort_all"))
        }
        (false, one, list) => Ok(Some(one.into_iter().chain(list.unwrap_or_default()).collect())),
    }
}
