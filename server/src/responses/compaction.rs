//! `context_management` of the Responses API, which replaces a long conversation by a summary. This server writes no
//! summaries: the field is accepted as long as the prompt does not exceed its threshold.

use crate::api_error::ApiError;
use crate::app::ServingContext;
use crate::compaction_threshold::CompactionThreshold;
use crate::openai::chat::generation_start::prompt_token_count;
use crate::openai::chat::types::ChatCompletionRequest;
use crate::request_fields::{RequestFields, wrong_type};
use crate::strict_json::JsonValue;
use text::ChatInput;

const NAME: &str = "context_management";
const ENTRIES_MAX: usize = 64;

/// Removes `context_management` from `fields` and parses it; returns the smallest threshold. Records the field as
/// having no effect if an entry has no threshold.
///
/// Errors: HTTP status 400 with the name of an invalid or unknown part.
pub(super) fn take_threshold(
    fields: &mut RequestFields,
) -> Result<Option<CompactionThreshold>, ApiError> {
    let list = match fields.take(NAME) {
        None => return Ok(None),
        Some(JsonValue::List(list)) if list.len() <= ENTRIES_MAX => list,
        Some(JsonValue::List(list)) => {
            let message = format!("at most {ENTRIES_MAX} entries, got {}", list.len());
            return Err(ApiError::invalid(NAME, message));
        }
        Some(other) => return Err(wrong_type(NAME.to_owned(), "a list", &other)),
    };
    let mut smallest: Option<CompactionThreshold> = None;
    for (index, entry) in list.into_iter().enumerate() {
        let mut entry = fields.nested(format!("{NAME}[{index}]"), entry)?;
        if entry.required_string("type")? != "compaction" {
            return Err(ApiError::unsupported(entry.path("type"), "must be compaction"));
        }
        let path = entry.path("compact_threshold");
        match entry.int("compact_threshold", 1..=i64::from(u32::MAX))? {
            Some(tokens) => {
                let threshold = CompactionThreshold { path, tokens: tokens as usize };
                let is_smaller = |other: &CompactionThreshold| threshold.tokens < other.tokens;
                if smallest.as_ref().is_none_or(is_smaller) {
                    smallest = Some(threshold);
                }
            }
            None => fields.accept_without_effect(NAME.to_owned()),
        }
    }
    Ok(smallest)
}

/// Checks that the prompt of `request` does not exceed `threshold`.
///
/// Errors: HTTP status 400 with the name of the exceeded threshold; an error of the chat template.
pub(super) fn check_threshold(
    threshold: &CompactionThreshold,
    serving: &ServingContext,
    request: &ChatCompletionRequest,
) -> Result<(), ApiError> {
    threshold.check(serving.field_bounds.max_model_len as usize, |maximum| {
        let tools = request.tools.template_value.clone();
        let input = ChatInput { tools, ..request.input.clone() };
        prompt_token_count(serving, input, maximum, request.prompt_field)
    })
}

#[cfg(test)]
mod tests {
    use super::*;

    fn taken(body: &str) -> Result<Option<CompactionThreshold>, ApiError> {
        let mut fields = RequestFields::of_body(JsonValue::parse(body.as_bytes()).unwrap())?;
        take_threshold(&mut fields)
    }

    #[test]
    fn thresholds_are_parsed_and_named_in_errors() {
        let entry =
            |tokens: u32| format!(r#"{{"type":"compaction","compact_threshold":{tokens}}}"#);
        let entries = format!(r#"{{"context_management":[{},{}]}}"#, entry(7), entry(5));
        let path = "context_management[1].compact_threshold".to_owned();
        assert_eq!(taken(&entries).unwrap(), Some(CompactionThreshold { path, tokens: 5 }));
        assert_eq!(taken("{}").unwrap(), None);
        let no_threshold = r#"{"context_management":[{"type":"compaction"}]}"#;
        assert_eq!(taken(no_threshold).unwrap(), None);
        for (value, param) in [
            ("7", "context_management"),
            ("[{}]", "context_management[0].type"),
            (r#"[{"type":"rewrite"}]"#, "context_management[0].type"),
            (
                r#"[{"type":"compaction","compact_threshold":0}]"#,
                "context_management[0].compact_threshold",
            ),
        ] {
            let error = taken(&format!(r#"{{"context_management":{value}}}"#)).unwrap_err();
            assert_eq!((error.status.as_u16(), error.param.as_deref()), (400, Some(param)));
        }
    }
}
