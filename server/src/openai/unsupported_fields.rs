//! Rejects unsupported fields that restrict the output: if such a field were ignored, the output could
//! violate a restriction that the client relies on.

use crate::api_error::ApiError;
use crate::request_fields::RequestFields;

/// Fields of other servers that have another name or no equivalent in this server; the first three are
/// structured output fields.
const UNSUPPORTED_FIELDS: &[&str] =
    &["ebnf", "grammar", "structural_tag", "prompt_embeds", "kv_transfer_params"];

/// Rejects fields that no completion endpoint supports.
pub(crate) fn reject_shared(fields: &mut RequestFields) -> Result<(), ApiError> {
    for name in fields.names_with_prefix("guided_") {
        if fields.take(&name).is_some() {
            let message = "guided_* fields are not supported";
            return Err(ApiError::unsupported(name, message));
        }
    }
    for name in UNSUPPORTED_FIELDS {
        if fields.take(name).is_some() {
            let message = format!("{name} is not supported by this server");
            return Err(ApiError::unsupported(*name, message));
        }
    }
    if fields.bool("use_beam_search")? == Some(true) {
        let message = "beam search is not supported";
        return Err(ApiError::unsupported("use_beam_search", message));
    }
    if fields.string("suffix", usize::MAX)?.is_some_and(|suffix| !suffix.is_empty()) {
        let message = "a suffix is not supported";
        return Err(ApiError::unsupported("suffix", message));
    }
    for ignored in ["user", "metadata", "store", "service_tier", "safety_identifier"] {
        fields.take(ignored);
    }
    Ok(())
}

/// Rejects `best_of` greater than `n`, because generating extra outputs and choosing the best is not
/// supported.
pub(crate) fn reject_best_of(fields: &mut RequestFields, n: u32) -> Result<(), ApiError> {
    match fields.int("best_of", 1..=1_000_000)? {
        Some(best_of) if best_of > i64::from(n) => {
            let message = format!("best_of is {best_of}, more than n = {n}: not supported");
            Err(ApiError::unsupported("best_of", message))
        }
        _ => Ok(()),
    }
}
