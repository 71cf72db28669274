//! Fields of a Responses request that control services of OpenAI's API. They are accepted and have no effect.

use crate::api_error::ApiError;
use crate::request_fields::RequestFields;

/// Fields used by OpenAI's servers for caching, billing and moderation; many clients set them by default.
const FIELDS: &[&str] = &[
    "client_metadata",
    "moderation",
    "prompt_cache_key",
    "prompt_cache_options",
    "prompt_cache_retention",
    "safety_identifier",
    "service_tier",
    "user",
];

/// Removes the fields that have no effect from `fields`, regardless of their values.
///
/// Errors: HTTP status 400 for values of `include` that request log-probabilities, and for stream options
/// that are not an object.
pub(super) fn take(fields: &mut RequestFields) -> Result<(), ApiError> {
    for name in FIELDS {
        if fields.take(name).is_some() {
            fields.accept_without_effect((*name).to_owned());
        }
    }
    if let Some(value) = fields.take("stream_options") {
        RequestFields::of("stream_options".to_owned(), value)?.bool("include_obfuscation")?;
        fields.accept_without_effect("stream_options".to_owned());
    }
    let included = fields.strings("include", 256, 64)?.unwrap_or_default();
    // All other values of `include` request data that this server does not generate, or encrypted
    // reasoning. Encrypted reasoning is not needed, because reasoning is always returned as text.
    if included.iter().any(|name| name == "message.output_text.logprobs") {
        return Err(no_logprobs("include"));
    }
    if !included.is_empty() {
        fields.accept_without_effect("include".to_owned());
    }
    Ok(())
}

/// Creates the 400 error for a field that requests log-probabilities.
pub(super) fn no_logprobs(field: &str) -> ApiError {
    ApiError::unsupported(field, "log-probabilities are supported by /v1/chat/completions only")
}
