//! Context edit `clear_tool_uses_…` of Anthropic's API: replaces the oldest tool results by a placeholder once
//! the prompt exceeds a threshold.
//!
//! Fields and default values: <https://platform.claude.com/docs/en/build-with-claude/context-editing>.

use crate::api_error::ApiError;
use crate::request_fields::{RequestFields, string_list};
use crate::strict_json::JsonValue;
use serde::Serialize;
use serde_json::{Value, json};
use std::collections::HashMap;

const TOOL_NAMES_MAX: usize = 1_024;
const TRIGGER_TOKENS_DEFAULT: usize = 100_000;
const KEEP_DEFAULT: usize = 3;
/// Content of a cleared tool result.
pub(super) const PLACEHOLDER: &str = "[This tool result was removed to shorten the conversation.]";

/// Edit that clears the oldest tool results.
#[derive(Debug, PartialEq)]
pub(super) struct ToolUseClearing {
    kind: String,
    trigger: ClearingTrigger,
    /// Number of the most recent tool results that are kept.
    keep: usize,
    /// Minimum number of tokens to clear; if fewer would be cleared, nothing is.
    tokens_min: usize,
    /// Names of the tools whose results are kept.
    excluded: Vec<String>,
    inputs: ClearedToolInputs,
}

/// Size of a conversation above which an edit is applied.
#[derive(Debug, PartialEq)]
enum ClearingTrigger {
    InputTokens(usize),
    ToolUses(usize),
}

/// Tools whose calls lose their arguments when their results are cleared.
#[derive(Debug, PartialEq)]
enum ClearedToolInputs {
    None,
    All,
    Named(Vec<String>),
}

/// Number of tool results and tokens that an edit cleared.
#[derive(Debug, Clone, PartialEq, Serialize)]
pub(super) struct AppliedToolUseClearing {
    r#type: String,
    cleared_tool_uses: usize,
    pub(super) cleared_input_tokens: usize,
}

/// Counts the tokens of the prompt for edited messages.
pub(super) trait PromptTokenCounter {
    /// Returns the number of tokens of the prompt; `None` if it has more than `maximum`.
    ///
    /// Errors: an error of the chat template.
    fn count_up_to(&self, messages: &Value, maximum: usize) -> Result<Option<usize>, ApiError>;

    /// Returns the number of tokens of the prompt.
    ///
    /// Errors: an error of the chat template.
    fn count(&self, messages: &Value) -> Result<usize, ApiError>;
}

impl ClearingTrigger {
    /// Whether a conversation with `tool_results` tool results is larger than the trigger.
    fn is_exceeded(
        &self,
        tool_results: usize,
        messages: &Value,
        prompt: &impl PromptTokenCounter,
    ) -> Result<bool, ApiError> {
        Ok(match *self {
            Self::ToolUses(count) => tool_results > count,
            Self::InputTokens(tokens) => prompt.count_up_to(messages, tokens)?.is_none(),
        })
    }
}

impl ToolUseClearing {
    /// Parses the options of the edit of type `kind`.
    ///
    /// Errors: HTTP status 400 with the name of the invalid option.
    pub(super) fn take(kind: String, edit: &mut RequestFields) -> Result<Self, ApiError> {
        let mut quantity =
            |name: &str, kinds: &[&str]| -> Result<Option<TypedQuantity>, ApiError> {
                let path = edit.path(name);
                let Some(value) = edit.take(name) else { return Ok(None) };
                TypedQuantity::take(edit, path, value, kinds).map(Some)
            };
        let trigger = quantity("trigger", &["input_tokens", "tool_uses"])?;
        let keep = quantity("keep", &["tool_uses"])?;
        let tokens_min = quantity("clear_at_least", &["input_tokens"])?;
        let excluded = edit.strings("exclude_tools", 256, TOOL_NAMES_MAX)?.unwrap_or_default();
        let inputs = match edit.take("clear_tool_inputs") {
            None | Some(JsonValue::Bool(false)) => ClearedToolInputs::None,
            Some(JsonValue::Bool(true)) => ClearedToolInputs::All,
            Some(names) => {
                let path = edit.path("clear_tool_inputs");
                ClearedToolInputs::Named(string_list(&path, names, 256, TOOL_NAMES_MAX)?)
            }
        };
        let trigger = match trigger {
            None => ClearingTrigger::InputTokens(TRIGGER_TOKENS_DEFAULT),
            Some(TypedQuantity { kind, value }) if kind == "tool_uses" => {
                ClearingTrigger::ToolUses(value)
            }
            Some(TypedQuantity { value, .. }) => ClearingTrigger::InputTokens(value),
        };
        let keep = keep.map_or(KEEP_DEFAULT, |keep| keep.value);
        let tokens_min = tokens_min.map_or(0, |tokens| tokens.value);
        Ok(Self { kind, trigger, keep, tokens_min, excluded, inputs })
    }

    /// Clears tool results if the trigger is exceeded and enough tokens would be cleared; `None` if nothing
    /// was cleared.
    ///
    /// Errors: an error of the chat template.
    pub(super) fn apply(
        &self,
        messages: &mut Value,
        prompt: &impl PromptTokenCounter,
    ) -> Result<Option<AppliedToolUseClearing>, ApiError> {
        let Some(list) = messages.as_array() else { return Ok(None) };
        let results = tool_results(list);
        let old = &results[..results.len().saturating_sub(self.keep)];
        let is_cleared = |result: &&ToolResultPosition| {
            !self.excluded.contains(&result.tool) && list[result.message]["content"] != PLACEHOLDER
        };
        let cleared: Vec<&ToolResultPosition> = old.iter().filter(is_cleared).collect();
        if cleared.is_empty() || !self.trigger.is_exceeded(results.len(), messages, prompt)? {
            return Ok(None);
        }
        let mut edited = messages.clone();
        for result in &cleared {
            self.clear(result, &mut edited);
        }
        let tokens = prompt.count(messages)?.saturating_sub(prompt.count(&edited)?);
        if tokens < self.tokens_min {
            return Ok(None);
        }
        let cleared_tool_uses = cleared.len();
        *messages = edited;
        let r#type = self.kind.clone();
        Ok(Some(AppliedToolUseClearing { r#type, cleared_tool_uses, cleared_input_tokens: tokens }))
    }

    /// Replaces one tool result, and the arguments of its call if this is requested.
    fn clear(&self, result: &ToolResultPosition, messages: &mut Value) {
        messages[result.message]["content"] = Value::from(PLACEHOLDER);
        let clears_input = match &self.inputs {
            ClearedToolInputs::None => false,
            ClearedToolInputs::All => true,
            ClearedToolInputs::Named(names) => names.contains(&result.tool),
        };
        if let Some(call) = result.call.filter(|_| clears_input) {
            messages[call.message]["tool_calls"][call.index]["function"]["arguments"] = json!({});
        }
    }
}

/// Number with its unit, as in `{"type": "input_tokens", "value": 1000}`.
pub(super) struct TypedQuantity {
    kind: String,
    pub(super) value: usize,
}

impl TypedQuantity {
    /// Parses a quantity at `path` within `edit`, whose unit is one of `kinds`.
    ///
    /// Errors: HTTP status 400 with the name of the invalid member.
    pub(super) fn take(
        edit: &RequestFields,
        path: String,
        value: JsonValue,
        kinds: &[&str],
    ) -> Result<Self, ApiError> {
        let mut fields = edit.nested(path, value)?;
        let kind = fields.required_string("type")?;
        if !kinds.contains(&kind.as_str()) {
            let message = format!("must be {}", kinds.join(" or "));
            return Err(ApiError::invalid(fields.path("type"), message));
        }
        match fields.int("value", 0..=i64::from(u32::MAX))? {
            Some(value) => Ok(Self { kind, value: value as usize }),
            None => Err(ApiError::invalid(fields.path("value"), "is missing")),
        }
    }
}

/// Position of a tool call in a conversation.
#[derive(Debug, Clone, Copy, PartialEq)]
struct ToolCallPosition {
    message: usize,
    /// Index in the tool calls of the message.
    index: usize,
}

/// Tool result in a conversation, with the name of its tool and the position of its call.
#[derive(Debug, PartialEq)]
struct ToolResultPosition {
    message: usize,
    tool: String,
    call: Option<ToolCallPosition>,
}

/// Returns the tool results in the order of the conversation.
fn tool_results(messages: &[Value]) -> Vec<ToolResultPosition> {
    let mut calls: HashMap<&str, ToolCallPosition> = HashMap::new();
    let mut results = Vec::new();
    for (message, value) in messages.iter().enumerate() {
        for (index, call) in value["tool_calls"].as_array().into_iter().flatten().enumerate() {
            calls.extend(call["id"].as_str().map(|id| (id, ToolCallPosition { message, index })));
        }
        if value["role"] == "tool" {
            let id = value["tool_call_id"].as_str().unwrap_or_default();
            let call = calls.get(id).copied();
            let tool = call.and_then(|call| {
                messages[call.message]["tool_calls"][call.index]["function"]["name"].as_str()
            });
            results.push(ToolResultPosition {
                message,
                tool: tool.unwrap_or_default().to_owned(),
                call,
            });
        }
    }
    results
}
