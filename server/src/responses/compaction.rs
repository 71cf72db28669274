//! `context_management` of the Responses API, which replaces a long conversation by a summary. This server writes no
//! summaries: the field is accepted as long as the prompt does not exceed its threshold.

use crate::api_error::ApiError;
use crate::app::ServingContext;
use crate::openai::chat::generation_start::prompt_fits;
use crate::openai::chat::types::ChatCompletionRequest;
use crate::request_fields::{RequestFields, wrong_type};
use crate::strict_json::JsonValue;
use text::ChatInput;

const NAME: &str = "context_management";
const ENTRIES_MAX: usize = 64;

/// Thresholds above which a request asks for a summary of its conversation.
#[derive(Debug, Default, PartialEq)]
pub(super) struct CompactionThresholds {
    entries: Vec<CompactionThreshold>,
}

#[derive(Debug, PartialEq)]
struct CompactionThreshold {
    /// Path of the threshold in the request.
    path: String,
    tokens: usize,
}

impl CompactionThresholds {
    /// Removes `context_management` from `fields` and parses it. Records it as having no effect if an entry has no
    /// threshold.
    ///
    /// Errors: HTTP status 400 with the name of an invalid or unknown part.
    pub(super) fn take(fields: &mut RequestFields) -> Result<Self, ApiError> {
        let list = match fields.take(NAME) {
            None => return Ok(Self::default()),
            Some(JsonValue::List(list)) if list.len() <= ENTRIES_MAX => list,
            Some(JsonValue::List(list)) => {
                let message = format!("at most {ENTRIES_MAX} entries, got {}", list.len());
                return Err(ApiError::invalid(NAME, message));
            }
            Some(other) => return Err(wrong_type(NAME.to_owned(), "a list", &other)),
        };
        let mut entries = Vec::new();
        for (index, entry) in list.into_iter().enumerate() {
            let mut entry = RequestFields::of(format!("{NAME}[{index}]"), entry)?;
            if entry.required_string("type")? != "compaction" {
                return Err(ApiError::unsupported(entry.path("type"), "must be compaction"));
            }
            let path = entry.path("compact_threshold");
            match entry.int("compact_threshold", 1..=i64::from(u32::MAX))? {
                Some(tokens) => {
                    entries.push(CompactionThreshold { path, tokens: tokens as usize });
                }
                None => fields.accept_without_effect(NAME.to_owned()),
            }
            fields.accept_rest(&entry);
        }
        Ok(Self { entries })
    }

    /// Checks that no threshold is exceeded by the prompt of `request`.
    ///
    /// Errors: HTTP status 400 with the name of the exceeded threshold; an error of the chat template.
    pub(super) fn check(
        &self,
        serving: &ServingContext,
        request: &ChatCompletionRequest,
    ) -> Result<(), ApiError> {
        for CompactionThreshold { path, tokens } in &self.entries {
            let tools = request.tools.template_value.clone();
            let input = ChatInput { tools, ..request.input.clone() };
            if !prompt_fits(serving, input, *tokens, request.prompt_field)? {
                let message = format!(
                    "the prompt exceeds these {tokens} tokens, and this server writes no summaries: shorten the \
                     conversation, raise the threshold, or set truncation to auto"
                );
                return Err(ApiError::unsupported(path.clone(), message));
            }
        }
        Ok(())
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn taken(body: &str) -> Result<CompactionThresholds, ApiError> {
        let mut fields = RequestFields::of_body(JsonValue::parse(body.as_bytes()).unwrap())?;
        CompactionThresholds::take(&mut fields)
    }

    #[test]
    fn thresholds_are_parsed_and_named_in_errors() {
        let entry = r#"{"context_management":[{"type":"compaction","compact_threshold":5}]}"#;
        let path = "context_management[0].compact_threshold".to_owned();
        assert_eq!(taken(entry).unwrap().entries, [CompactionThreshold { path, tokens: 5 }]);
        assert_eq!(taken("{}").unwrap(), CompactionThresholds::default());
        let no_threshold = r#"{"context_management":[{"type":"compaction"}]}"#;
        assert_eq!(taken(no_threshold).unwrap(), CompactionThresholds::default());
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
