//! Reads request bodies and checks their type, encoding, size and reception time, and the memory budget
//! shared by all requests.

use super::api_error::ApiError;
use super::app::{AppState, ServingContext};
use axum::body::Body;
use axum::http::{HeaderMap, StatusCode, header};
use bytes::{Bytes, BytesMut};
use engine::AdmissionPermit;
use http_body_util::BodyExt;
use std::time::Duration;

/// Reads the JSON body of a request and admits the request. Bytes are counted in the memory budget as they
/// arrive; the request is counted once its body is complete.
///
/// Errors: the errors of `read`; HTTP status 429 or 503 for overload.
pub(crate) async fn read_and_admit(
    app: &AppState,
    serving: &ServingContext,
    headers: &HeaderMap,
    body: Body,
) -> Result<(Bytes, AdmissionPermit), ApiError> {
    let admission = serving.client.admission();
    let mut memory_reservation = admission.queue_body();
    let count =
        |bytes: usize| memory_reservation.grow(bytes as u64).map_err(|o| app.overloaded(&o));
    let (cap, limit) = (serving.body_bytes_max, app.options.body_timeout);
    let bytes = read(headers, body, cap, limit, count).await?;
    let permit = admission.admit(memory_reservation).map_err(|o| app.overloaded(&o))?;
    Ok((bytes, permit))
}

/// Reads a JSON body. `count` is called with the number of bytes of each frame and may reject them.
///
/// Errors: HTTP status 415 for a compressed body or another content type, 413 above the size limit, 408
/// after the timeout, 400 if the body is incomplete; the errors of `count`.
pub(crate) async fn read(
    headers: &HeaderMap,
    body: Body,
    bytes_max: usize,
    limit: Duration,
    count: impl FnMut(usize) -> Result<(), ApiError>,
) -> Result<Bytes, ApiError> {
    check_headers(headers, bytes_max)?;
    let read = collect(body, bytes_max, count);
    tokio::time::timeout(limit, read).await.unwrap_or_else(|_| {
        let message = format!("the body was not complete after {} s", limit.as_secs());
        Err(ApiError::new(StatusCode::REQUEST_TIMEOUT, "slow_body", message))
    })
}

fn check_headers(headers: &HeaderMap, bytes_max: usize) -> Result<(), ApiError> {
    let media = StatusCode::UNSUPPORTED_MEDIA_TYPE;
    if headers.contains_key(header::CONTENT_ENCODING) {
        let message = "compressed bodies are not accepted";
        return Err(ApiError::new(media, "compressed_body", message));
    }
    if let Some(kind) = headers.get(header::CONTENT_TYPE) {
        let essence = kind.as_bytes().split(|b| *b == b';').next().unwrap_or_default();
        if !essence.trim_ascii().eq_ignore_ascii_case(b"application/json") {
            let message = "the content type must be application/json";
            return Err(ApiError::new(media, "not_json", message));
        }
    }
    let content_length =
        headers.get(header::CONTENT_LENGTH).and_then(|v| v.to_str().ok()?.parse().ok());
    if content_length.is_some_and(|bytes: u64| bytes > bytes_max as u64) {
        return Err(too_large(bytes_max));
    }
    Ok(())
}

async fn collect(
    mut body: Body,
    bytes_max: usize,
    mut count: impl FnMut(usize) -> Result<(), ApiError>,
) -> Result<Bytes, ApiError> {
    let mut first: Option<Bytes> = None;
    let mut rest = BytesMut::new();
    while let Some(frame) = body.frame().await {
        let incomplete = |_| ApiError::invalid("", "the request body is incomplete");
        let Ok(data) = frame.map_err(incomplete)?.into_data() else { continue };
        let length = first.as_ref().map_or(0, Bytes::len).max(rest.len()) + data.len();
        if length > bytes_max {
            return Err(too_large(bytes_max));
        }
        count(data.len())?;
        // Most bodies arrive as one frame; a single frame is not copied.
        match &first {
            None => first = Some(data),
            Some(head) => {
                if rest.is_empty() {
                    rest.extend_from_slice(head);
                }
                rest.extend_from_slice(&data);
            }
        }
    }
    Ok(if rest.is_empty() { first.unwrap_or_default() } else { rest.freeze() })
}

fn too_large(bytes_max: usize) -> ApiError {
    let message = format!("the body exceeds {bytes_max} bytes");
    ApiError::new(StatusCode::PAYLOAD_TOO_LARGE, "body_limit", message)
}
