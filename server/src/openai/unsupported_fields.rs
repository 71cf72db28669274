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
    check_modalities(fields)?;
    accept_service_fields(fields)
}

/// Rejects a list of output kinds without `text`. Kinds in addition to text are named as having no effect.
fn check_modalities(fields: &mut RequestFields) -> Result<(), ApiError> {
    const NAME: &str = "modalities";
    let Some(kinds) = fields.strings(NAME, 64, 16)? else { return Ok(()) };
    if !kinds.iter().any(|kind| kind == "text") {
        let message = "must contain text: this model generates text only";
        return Err(ApiError::unsupported(NAME, message));
    }
    if kinds.iter().any(|kind| kind != "text") {
        fields.accept_without_effect(NAME.to_owned());
    }
    Ok(())
}

/// Accepts the fields about accounting, storage and tools that a server runs, and names those that have no
/// effect. Nothing is stored, so `store: false` has its effect.
fn accept_service_fields(fields: &mut RequestFields) -> Result<(), ApiError> {
    for name in ["user", "metadata", "service_tier", "safety_identifier"] {
        if fields.take(name).is_some() {
            fields.accept_without_effect(name.to_owned());
        }
    }
    if fields.bool("store")? == Some(true) {
        fields.accept_without_effect("store".to_owned());
    }
    // The limit applies to tools that run on the server; this server runs none.
    if fields.int("max_tool_calls", 1..=i64::MAX)?.is_some() {
        fields.accept_without_effect("max_tool_calls".to_owned());
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

#[cfg(test)]
mod tests {
    use super::*;
    use crate::strict_json::JsonValue;

    fn named(body: &str) -> Result<Vec<String>, ApiError> {
        let mut fields = RequestFields::of_body(JsonValue::parse(body.as_bytes()).unwrap())?;
        reject_shared(&mut fields)?;
        assert_eq!(fields.remaining(), 0, "{body}");
        Ok(fields.hints().names())
    }

    #[test]
    fn output_kinds_need_text() {
        for body in [r#"{"modalities":["audio"]}"#, r#"{"modalities":["image"]}"#] {
            let error = named(body).unwrap_err();
            assert_eq!((error.status.as_u16(), error.param.as_deref()), (400, Some("modalities")));
        }
        assert_eq!(named(r#"{"modalities":["text","audio"]}"#).unwrap(), ["modalities"]);
        assert!(named(r#"{"modalities":["text"]}"#).unwrap().is_empty());
    }

    #[test]
    fn service_fields_without_effect_are_named() {
        let body = r#"{"user":"u","metadata":{"a":"b"},"service_tier":"flex","safety_identifier":"s",
            "store":true,"max_tool_calls":3}"#;
        let expected =
            ["user", "metadata", "service_tier", "safety_identifier", "store", "max_tool_calls"];
        assert_eq!(named(body).unwrap(), expected);
        assert!(named(r#"{"store":false,"user":null}"#).unwrap().is_empty());
        for body in [r#"{"store":"yes"}"#, r#"{"max_tool_calls":0}"#] {
            assert!(named(body).is_err(), "{body}");
        }
    }
}
