//! Context edits of Anthropic's API (`context_management`). Tool results are cleared; edits of other types are
//! accepted without effect, so that the prompt is only longer.

use super::tool_use_clearing::{AppliedToolUseClearing, PromptTokenCounter, ToolUseClearing};
use crate::api_error::ApiError;
use crate::request_fields::{RequestFields, wrong_type};
use crate::strict_json::JsonValue;
use serde::Serialize;
use serde_json::Value;

const NAME: &str = "context_management";
const EDITS_MAX: usize = 64;
/// Type prefix of edits that clear tool results.
const CLEAR_TOOL_USES: &str = "clear_tool_uses_";
/// Type prefixes of edits without effect.
const WITHOUT_EFFECT: &[&str] = &["clear_thinking_", "compact_"];

/// Context edits of a request that this server performs.
#[derive(Debug, PartialEq)]
pub(super) struct RequestedContextEdits {
    clearings: Vec<ToolUseClearing>,
}

/// `context_management` object of a reply: the edits that were applied to the prompt.
#[derive(Debug, Clone, PartialEq, Serialize)]
pub(super) struct AppliedContextEdits {
    applied_edits: Vec<AppliedToolUseClearing>,
}

impl AppliedContextEdits {
    /// Returns the number of tokens that all edits cleared.
    pub(super) fn cleared_tokens(&self) -> usize {
        self.applied_edits.iter().map(|edit| edit.cleared_input_tokens).sum()
    }
}

/// Removes the list of edits from `management`.
fn edit_list(management: &mut RequestFields) -> Result<Vec<JsonValue>, ApiError> {
    match management.take("edits") {
        None => Ok(Vec::new()),
        Some(JsonValue::List(edits)) if edits.len() <= EDITS_MAX => Ok(edits),
        Some(JsonValue::List(edits)) => {
            let message = format!("at most {EDITS_MAX} edits, got {}", edits.len());
            Err(ApiError::invalid(management.path("edits"), message))
        }
        Some(other) => Err(wrong_type(management.path("edits"), "a list of edits", &other)),
    }
}

impl RequestedContextEdits {
    /// Removes `context_management` from `fields` and parses it; `None` if the request has none. Records the
    /// field as having no effect if it contains an edit that is not performed.
    ///
    /// Errors: HTTP status 400 with the name of an invalid or unknown part.
    pub(super) fn take(fields: &mut RequestFields) -> Result<Option<Self>, ApiError> {
        let Some(value) = fields.take(NAME) else { return Ok(None) };
        let mut management = RequestFields::of(NAME.to_owned(), value)?;
        let path = management.path("edits");
        let edits = edit_list(&mut management)?;
        let count = edits.len();
        let mut clearings = Vec::new();
        for (index, edit) in edits.into_iter().enumerate() {
            let mut edit = RequestFields::of(format!("{path}[{index}]"), edit)?;
            let kind = edit.required_string("type")?;
            if kind.starts_with(CLEAR_TOOL_USES) {
                clearings.push(ToolUseClearing::take(kind, &mut edit)?);
                fields.accept_rest(&edit);
            } else if !WITHOUT_EFFECT.iter().any(|prefix| kind.starts_with(prefix)) {
                let message = "context edits of this type are not supported";
                return Err(ApiError::unsupported(edit.path("type"), message));
            }
        }
        fields.accept_rest(&management);
        if clearings.len() < count {
            fields.accept_without_effect(NAME.to_owned());
        }
        Ok(Some(Self { clearings }))
    }

    /// Applies the edits to `messages` in order.
    ///
    /// Errors: an error of the chat template.
    pub(super) fn apply(
        &self,
        messages: &mut Value,
        prompt: &impl PromptTokenCounter,
    ) -> Result<AppliedContextEdits, ApiError> {
        let mut applied_edits = Vec::new();
        for clearing in &self.clearings {
            applied_edits.extend(clearing.apply(messages, prompt)?);
        }
        Ok(AppliedContextEdits { applied_edits })
    }
}

#[cfg(test)]
mod tests {
    use super::super::tool_use_clearing::PLACEHOLDER;
    use super::*;
    use serde_json::json;

    /// Counts one token per byte of content and arguments.
    struct ByteCounter;

    impl PromptTokenCounter for ByteCounter {
        fn fits(&self, messages: &Value, tokens_max: usize) -> Result<bool, ApiError> {
            Ok(self.count(messages)? <= tokens_max)
        }

        fn count(&self, messages: &Value) -> Result<usize, ApiError> {
            let arguments = |message: &Value| {
                let calls = message["tool_calls"].as_array().into_iter().flatten();
                calls.map(|call| call["function"]["arguments"].to_string().len()).sum::<usize>()
            };
            let list = messages.as_array().unwrap().iter();
            Ok(list.map(|m| m["content"].as_str().unwrap().len() + arguments(m)).sum())
        }
    }

    fn taken(edit: &Value) -> Result<RequestedContextEdits, ApiError> {
        let body = json!({NAME: {"edits": [edit]}});
        let mut fields =
            RequestFields::of_body(JsonValue::parse(body.to_string().as_bytes()).unwrap())?;
        RequestedContextEdits::take(&mut fields).map(Option::unwrap)
    }

    /// Returns a conversation with `count` calls, of `find` and `save` in turn, and results of 1,000 bytes.
    fn conversation(count: usize) -> Value {
        let mut messages = vec![json!({"role": "user", "content": "a"})];
        for index in 0..count {
            let (id, name) = (format!("c{index}"), if index % 2 == 0 { "find" } else { "save" });
            let function = json!({"name": name, "arguments": {"q": "x".repeat(100)}});
            let call = json!({"id": id, "type": "function", "function": function});
            messages.push(json!({"role": "assistant", "content": "", "tool_calls": [call]}));
            let content = "r".repeat(1_000);
            messages.push(json!({"role": "tool", "tool_call_id": id, "content": content}));
        }
        Value::Array(messages)
    }

    /// Outcome of an edit: the calls whose result and whose input were cleared, by index, and the reply.
    struct ClearedCalls {
        results: Vec<usize>,
        inputs: Vec<usize>,
        edits: Value,
    }

    /// Applies an edit to a conversation with `count` calls.
    fn applied(edit: &Value, count: usize) -> ClearedCalls {
        let mut messages = conversation(count);
        let edits = taken(edit).unwrap().apply(&mut messages, &ByteCounter).unwrap();
        let result = |i: &usize| messages[2 * i + 2]["content"] == PLACEHOLDER;
        let arguments = |i: usize| &messages[2 * i + 1]["tool_calls"][0]["function"]["arguments"];
        let edits = serde_json::to_value(edits).unwrap();
        ClearedCalls {
            results: (0..count).filter(result).collect(),
            inputs: (0..count).filter(|&i| *arguments(i) == json!({})).collect(),
            edits: edits["applied_edits"].clone(),
        }
    }

    #[test]
    fn oldest_results_are_cleared_above_the_trigger() {
        let tokens = |value: usize| json!({"type": "input_tokens", "value": value});
        let edit = json!({"type": "clear_tool_uses_20250919", "trigger": tokens(5_000)});
        let ClearedCalls { results, inputs, edits } = applied(&edit, 6);
        assert_eq!((results, inputs), (vec![0, 1, 2], vec![]));
        let tokens_cleared = 3 * (1_000 - PLACEHOLDER.len());
        assert_eq!(
            edits,
            json!([{"type": "clear_tool_uses_20250919", "cleared_tool_uses": 3,
            "cleared_input_tokens": tokens_cleared}])
        );
        assert_eq!(applied(&edit, 4).edits, json!([]), "below the trigger");
        assert_eq!(applied(&json!({"type": "clear_tool_uses_20250919"}), 50).edits, json!([]));
        assert_eq!(applied(&json!({"type": "clear_tool_uses_20250919"}), 100).results.len(), 97);
    }

    #[test]
    fn options_limit_what_is_cleared() {
        let uses = |value: usize| json!({"type": "tool_uses", "value": value});
        let edit = json!({"type": "clear_tool_uses_20250919", "trigger": uses(4), "keep": uses(1),
            "exclude_tools": ["save"], "clear_tool_inputs": true});
        let ClearedCalls { results, inputs, .. } = applied(&edit, 5);
        assert_eq!((results, inputs), (vec![0, 2], vec![0, 2]));
        assert_eq!(applied(&edit, 4).edits, json!([]), "exactly the trigger");
        let mut named = edit.clone();
        named["clear_tool_inputs"] = json!(["save"]);
        named["exclude_tools"] = json!([]);
        let ClearedCalls { results, inputs, .. } = applied(&named, 5);
        assert_eq!((results, inputs), (vec![0, 1, 2, 3], vec![1, 3]));
        let mut at_least = edit.clone();
        at_least["clear_at_least"] = json!({"type": "input_tokens", "value": 5_000});
        assert_eq!(applied(&at_least, 5).edits, json!([]), "too few tokens");
    }

    #[test]
    fn invalid_edits_are_rejected_by_name() {
        for (edit, param) in [
            (json!({"type": "rewrite_20300101"}), "type"),
            (json!({}), "type"),
            (
                json!({"type": "clear_tool_uses_20250919", "keep": {"type": "input_tokens", "value": 1}}),
                "keep.type",
            ),
            (
                json!({"type": "clear_tool_uses_20250919", "trigger": {"type": "tool_uses"}}),
                "trigger.value",
            ),
            (
                json!({"type": "clear_tool_uses_20250919", "clear_tool_inputs": 7}),
                "clear_tool_inputs",
            ),
        ] {
            let error = taken(&edit).unwrap_err();
            assert_eq!(error.param, Some(format!("{NAME}.edits[0].{param}")), "{edit}");
        }
    }
}
