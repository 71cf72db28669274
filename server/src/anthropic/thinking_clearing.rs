//! Context edit `clear_thinking_…` of Anthropic's API: removes the thinking blocks of older assistant turns.
//!
//! Fields and default values: <https://platform.claude.com/docs/en/build-with-claude/context-editing>.

use super::tool_use_clearing::{PromptTokenCounter, TypedQuantity};
use crate::api_error::ApiError;
use crate::request_fields::{RequestFields, wrong_type};
use crate::strict_json::JsonValue;
use serde::Serialize;
use serde_json::Value;

/// Member of a message with the text of its thinking blocks.
const REASONING: &str = "reasoning_content";
const KEEP_DEFAULT: usize = 1;

/// Edit that clears the thinking blocks of all but the most recent assistant turns.
#[derive(Debug, PartialEq)]
pub(super) struct ThinkingClearing {
    kind: String,
    /// Number of the most recent assistant turns with thinking blocks that keep them; `None`: all.
    keep: Option<usize>,
}

/// Number of assistant turns and tokens that an edit cleared.
#[derive(Debug, Clone, PartialEq, Serialize)]
pub(super) struct AppliedThinkingClearing {
    r#type: String,
    cleared_thinking_turns: usize,
    pub(super) cleared_input_tokens: usize,
}

impl ThinkingClearing {
    /// Parses the options of the edit of type `kind`.
    ///
    /// Errors: HTTP status 400 with the name of the invalid option.
    pub(super) fn take(kind: String, edit: &mut RequestFields) -> Result<Self, ApiError> {
        let path = edit.path("keep");
        let keep = match edit.take("keep") {
            None => Some(KEEP_DEFAULT),
            Some(JsonValue::Str(word)) if word == "all" => None,
            Some(value @ JsonValue::Object(_)) => kept_turns(edit, &path, value)?,
            Some(other) => return Err(wrong_type(path, "\"all\" or an object", &other)),
        };
        Ok(Self { kind, keep })
    }

    /// Removes the thinking blocks of older turns; `None` if there are none.
    ///
    /// Errors: an error of the chat template.
    pub(super) fn apply(
        &self,
        messages: &mut Value,
        prompt: &impl PromptTokenCounter,
    ) -> Result<Option<AppliedThinkingClearing>, ApiError> {
        let (Some(keep), Some(list)) = (self.keep, messages.as_array()) else { return Ok(None) };
        let turns = thinking_turns(list);
        let cleared = &turns[..turns.len().saturating_sub(keep)];
        if cleared.is_empty() {
            return Ok(None);
        }
        let mut edited = messages.clone();
        for &message in cleared.iter().flatten() {
            edited[message].as_object_mut().map(|fields| fields.remove(REASONING));
        }
        let cleared_input_tokens = prompt.count(messages)?.saturating_sub(prompt.count(&edited)?);
        // Some templates leave out the reasoning of earlier turns themselves.
        if cleared_input_tokens == 0 {
            return Ok(None);
        }
        let cleared_thinking_turns = cleared.len();
        *messages = edited;
        let r#type = self.kind.clone();
        Ok(Some(AppliedThinkingClearing { r#type, cleared_thinking_turns, cleared_input_tokens }))
    }
}

/// Parses `{"type": "all"}` (`None`) or `{"type": "thinking_turns", "value": N}`, where N is at least 1.
fn kept_turns(
    edit: &RequestFields,
    path: &str,
    value: JsonValue,
) -> Result<Option<usize>, ApiError> {
    let is_all = |(key, value): &(String, JsonValue)| {
        key == "type" && matches!(value, JsonValue::Str(kind) if kind == "all")
    };
    if matches!(&value, JsonValue::Object(pairs) if pairs.iter().any(is_all)) {
        return Ok(None);
    }
    let TypedQuantity { value, .. } =
        TypedQuantity::take(edit, path.to_owned(), value, &["thinking_turns"])?;
    if value == 0 {
        return Err(ApiError::invalid(format!("{path}.value"), "must be at least 1"));
    }
    Ok(Some(value))
}

/// Returns the assistant turns that have thinking blocks, as lists of positions of such messages. A turn
/// extends to the next message of the user; results of tools do not end it.
fn thinking_turns(messages: &[Value]) -> Vec<Vec<usize>> {
    let is_user = |message: &Value| message["role"] == "user";
    let mut turns: Vec<Vec<usize>> = vec![Vec::new()];
    for (position, message) in messages.iter().enumerate() {
        if is_user(message) {
            turns.push(Vec::new());
        } else if message.get(REASONING).is_some() {
            turns.last_mut().expect("starts with one turn").push(position);
        }
    }
    turns.retain(|turn| !turn.is_empty());
    turns
}
