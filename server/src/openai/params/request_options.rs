//! Options of completion requests that do not affect sampling.

use super::{FieldBounds, PromptTruncation, StreamOptions};
use crate::api_error::ApiError;
use crate::request_fields::{RequestFields, wrong_type};
use crate::strict_json::JsonValue;

pub(super) fn stream_options(
    fields: &mut RequestFields,
    stream: bool,
) -> Result<StreamOptions, ApiError> {
    let Some(value) = fields.take("stream_options") else { return Ok(StreamOptions::default()) };
    let mut options = fields.nested("stream_options".to_owned(), value)?;
    if !stream {
        let message = "stream_options needs stream: true";
        return Err(ApiError::invalid("stream_options", message));
    }
    Ok(StreamOptions {
        include_usage: options.bool("include_usage")?.unwrap_or(false),
        continuous_usage: options.bool("continuous_usage_stats")?.unwrap_or(false),
    })
}

/// Parses `truncate_prompt_tokens` and `truncation_side`. `default_side` applies if `truncation_side` is
/// absent; `longest` is the number of tokens kept for −1.
pub(crate) fn truncation(
    fields: &mut RequestFields,
    bounds: &FieldBounds,
    default_side: fn(u32) -> PromptTruncation,
    longest: u32,
) -> Result<Option<PromptTruncation>, ApiError> {
    let limit = i64::from(bounds.max_model_len);
    let side = fields.string("truncation_side", 16)?;
    let truncation = match side.as_deref() {
        None => default_side,
        // `truncation_side` names the side that is cut; the other side is kept.
        Some("left") => PromptTruncation::KeepLast,
        Some("right") => PromptTruncation::KeepFirst,
        Some(_) => {
            return Err(ApiError::invalid("truncation_side", "must be \"left\" or \"right\""));
        }
    };
    let Some(count) = fields.int("truncate_prompt_tokens", -1..=limit)? else { return Ok(None) };
    let count = match count {
        0 => return Err(ApiError::invalid("truncate_prompt_tokens", "must be -1 or at least 1")),
        -1 => longest,
        count => count as u32,
    };
    Ok(Some(truncation(count)))
}

pub(crate) fn cache_salt(fields: &mut RequestFields) -> Result<Option<String>, ApiError> {
    let Some((name, value)) = fields.take_with_alias("cache_salt", "extra_key")? else {
        return Ok(None);
    };
    let is_valid =
        |s: &str| (1..=128).contains(&s.chars().count()) && !s.contains(['@', '/', '\\', '\0']);
    match value {
        JsonValue::Str(salt) if is_valid(&salt) => Ok(Some(salt)),
        JsonValue::Str(_) => {
            let message = "must have 1 to 128 characters, none of them @ / \\ or NUL";
            Err(ApiError::invalid(name, message))
        }
        other => Err(wrong_type(name.to_owned(), "a string", &other)),
    }
}

/// Whether a request id sent by a client is well-formed.
pub(crate) fn is_request_id(id: &str) -> bool {
    let allowed = |b: u8| b.is_ascii_alphanumeric() || b"._:-".contains(&b);
    (1..=128).contains(&id.len()) && id.bytes().all(allowed)
}

pub(crate) fn request_id(fields: &mut RequestFields) -> Result<Option<String>, ApiError> {
    let check = |(name, value): (&str, JsonValue)| match value {
        JsonValue::Str(id) if is_request_id(&id) => Ok(id),
        JsonValue::Str(_) => {
            let message = "must have 1 to 128 characters out of A-Z a-z 0-9 . _ : -";
            Err(ApiError::invalid(name, message))
        }
        other => Err(wrong_type(name.to_owned(), "a string", &other)),
    };
    fields.take("session_id").map(|id| check(("session_id", id))).transpose()?;
    fields.take_with_alias("request_id", "rid")?.map(check).transpose()
}

pub(crate) fn priority(fields: &mut RequestFields, bounds: &FieldBounds) -> Result<i32, ApiError> {
    let range = i64::from(i32::MIN)..=i64::from(i32::MAX);
    let priority = fields.int("priority", range)?.unwrap_or(0) as i32;
    if priority != 0 && !bounds.priorities {
        let message = format!(
            "priority {priority} needs --scheduling-policy priority; this server uses fcfs"
        );
        return Err(ApiError::invalid("priority", message));
    }
    Ok(priority)
}
