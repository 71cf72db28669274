//! Context edits of Anthropic's API (`context_management`). Tool results and thinking blocks are cleared;
//! compaction is accepted below its threshold, where it has no effect, and rejected above.

use super::compaction;
use super::thinking_clearing::{AppliedThinkingClearing, ThinkingClearing};
use super::tool_use_clearing::{AppliedToolUseClearing, PromptTokenCounter, ToolUseClearing};
use crate::api_error::ApiError;
use crate::compaction_threshold::CompactionThreshold;
use crate::request_fields::{RequestFields, wrong_type};
use crate::strict_json::JsonValue;
use serde::Serialize;
use serde_json::Value;
use std::mem::discriminant;

const NAME: &str = "context_management";
const EDITS_MAX: usize = 64;
/// Type prefix of edits that clear tool results.
const CLEAR_TOOL_USES: &str = "clear_tool_uses_";
/// Type prefix of edits that clear thinking blocks.
const CLEAR_THINKING: &str = "clear_thinking_";
/// Type prefix of edits that summarise the conversation.
const COMPACT: &str = "compact_";

/// Context edits of a request.
#[derive(Debug, PartialEq)]
pub(super) struct RequestedContextEdits {
    edits: Vec<ContextEdit>,
}

/// Context edit of a request.
#[derive(Debug, PartialEq)]
enum ContextEdit {
    Compaction(CompactionThreshold),
    ToolUses(ToolUseClearing),
    Thinking(ThinkingClearing),
}

/// Context edit that changed the prompt.
#[derive(Debug, Clone, PartialEq, Serialize)]
#[serde(untagged)]
enum AppliedEdit {
    ToolUses(AppliedToolUseClearing),
    Thinking(AppliedThinkingClearing),
}

/// `context_management` object of a reply: the edits that were applied to the prompt.
#[derive(Debug, Clone, PartialEq, Serialize)]
pub(super) struct AppliedContextEdits {
    applied_edits: Vec<AppliedEdit>,
}

impl AppliedContextEdits {
    /// Returns the number of tokens that all edits cleared.
    pub(super) fn cleared_tokens(&self) -> usize {
        let tokens = |edit: &AppliedEdit| match edit {
            AppliedEdit::ToolUses(edit) => edit.cleared_input_tokens,
            AppliedEdit::Thinking(edit) => edit.cleared_input_tokens,
        };
        self.applied_edits.iter().map(tokens).sum()
    }
}

impl RequestedContextEdits {
    /// Removes `context_management` from `fields` and parses it; `None` if the request has none.
    ///
    /// Errors: HTTP status 400 with the name of an invalid or unknown part.
    pub(super) fn take(fields: &mut RequestFields) -> Result<Option<Self>, ApiError> {
        let Some(value) = fields.take(NAME) else { return Ok(None) };
        let mut management = fields.nested(NAME.to_owned(), value)?;
        let path = management.path("edits");
        let mut edits = Vec::new();
        for (index, edit) in listed_edits(&mut management)?.into_iter().enumerate() {
            let mut edit = management.nested(format!("{path}[{index}]"), edit)?;
            let path = edit.path("type");
            let taken = ContextEdit::take(&mut edit)?;
            // Each edit renders and tokenises the prompt.
            let is_same_kind = |earlier| discriminant(earlier) == discriminant(&taken);
            if edits.iter().any(is_same_kind) {
                return Err(ApiError::invalid(path, "an earlier edit has this type"));
            }
            edits.push(taken);
        }
        Ok(Some(Self { edits }))
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
        for edit in &self.edits {
            applied_edits.extend(match edit {
                ContextEdit::Compaction(_) => None,
                ContextEdit::ToolUses(edit) => {
                    edit.apply(messages, prompt)?.map(AppliedEdit::ToolUses)
                }
                ContextEdit::Thinking(edit) => {
                    edit.apply(messages, prompt)?.map(AppliedEdit::Thinking)
                }
            });
        }
        Ok(AppliedContextEdits { applied_edits })
    }

    /// Checks that no edit would replace the edited `messages` by a summary, in a prompt of up to `context` tokens.
    ///
    /// Errors: HTTP status 400 with the name of the edit whose threshold the prompt exceeds; an error of the chat template.
    pub(super) fn check_compaction(
        &self,
        messages: &Value,
        prompt: &impl PromptTokenCounter,
        context: usize,
    ) -> Result<(), ApiError> {
        self.edits.iter().try_for_each(|edit| match edit {
            ContextEdit::Compaction(threshold) => {
                threshold.check(context, |maximum| prompt.count_up_to(messages, maximum))
            }
            ContextEdit::ToolUses(_) | ContextEdit::Thinking(_) => Ok(()),
        })
    }
}

impl ContextEdit {
    /// Parses one edit.
    ///
    /// Errors: HTTP status 400 with the name of the invalid option, or of a type that is not supported.
    fn take(edit: &mut RequestFields) -> Result<Self, ApiError> {
        let kind = edit.required_string("type")?;
        if kind.starts_with(CLEAR_TOOL_USES) {
            return Ok(Self::ToolUses(ToolUseClearing::take(kind, edit)?));
        }
        if kind.starts_with(CLEAR_THINKING) {
            return Ok(Self::Thinking(ThinkingClearing::take(kind, edit)?));
        }
        if kind.starts_with(COMPACT) {
            return Ok(Self::Compaction(compaction::take(edit)?));
        }
        let message = "context edits of this type are not supported";
        Err(ApiError::unsupported(edit.path("type"), message))
    }
}

/// Takes the list `edits` from `management`; an absent list is empty.
fn listed_edits(management: &mut RequestFields) -> Result<Vec<JsonValue>, ApiError> {
    let path = management.path("edits");
    match management.take("edits") {
        None => Ok(Vec::new()),
        Some(JsonValue::List(edits)) if edits.len() <= EDITS_MAX => Ok(edits),
        Some(JsonValue::List(edits)) => {
            let message = format!("at most {EDITS_MAX} edits, got {}", edits.len());
            Err(ApiError::invalid(path, message))
        }
        Some(other) => Err(wrong_type(path, "a list of edits", &other)),
    }
}

#[cfg(test)]
mod tests {
    use super::super::tool_use_clearing::PLACEHOLDER;
    use super::*;
    use serde_json::json;

    /// Counts one token per byte of content, reasoning and arguments.
    struct ByteCounter;

    impl PromptTokenCounter for ByteCounter {
        fn count_up_to(&self, messages: &Value, maximum: usize) -> Result<Option<usize>, ApiError> {
            Ok(Some(self.count(messages)?).filter(|&count| count <= maximum))
        }

        fn count(&self, messages: &Value) -> Result<usize, ApiError> {
            let arguments = |message: &Value| {
                let calls = message["tool_calls"].as_array().into_iter().flatten();
                calls.map(|call| call["function"]["arguments"].to_string().len()).sum::<usize>()
            };
            let list = messages.as_array().unwrap().iter();
            let text = |m: &Value, name: &str| m[name].as_str().map_or(0, str::len);
            Ok(list.map(|m| text(m, "content") + text(m, "reasoning_content") + arguments(m)).sum())
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

    /// Returns a conversation with three turns that have thinking blocks, two of them in the second turn.
    fn thinking_conversation() -> Value {
        let assistant = |thinking: &str| json!({"role": "assistant", "content": "a", "reasoning_content": thinking});
        json!([{"role": "user", "content": "q"}, assistant("one"), {"role": "user", "content": "q"},
            assistant("two"), {"role": "tool", "content": "r"}, assistant("three"),
            {"role": "user", "content": "q"}, assistant("four"), {"role": "user", "content": "q"}])
    }

    /// Returns the thinking blocks that an edit keeps, and the reply.
    fn kept_thinking(edit: &Value) -> (Vec<String>, Value) {
        let mut messages = thinking_conversation();
        let edits = taken(edit).unwrap().apply(&mut messages, &ByteCounter).unwrap();
        let kept = messages.as_array().unwrap().iter();
        let kept =
            kept.filter_map(|m| m["reasoning_content"].as_str().map(str::to_owned)).collect();
        (kept, serde_json::to_value(edits).unwrap()["applied_edits"].clone())
    }

    #[test]
    fn thinking_of_older_turns_is_cleared() {
        let turns = |value: usize| {
            json!({"type": "clear_thinking_20251015",
                "keep": {"type": "thinking_turns", "value": value}})
        };
        let reply = |turns: usize, tokens: usize| {
            json!([{"type": "clear_thinking_20251015", "cleared_thinking_turns": turns,
                "cleared_input_tokens": tokens}])
        };
        let all = ["one", "two", "three", "four"].map(str::to_owned).to_vec();
        assert_eq!(kept_thinking(&turns(2)), (all[1..].to_vec(), reply(1, 3)));
        assert_eq!(
            kept_thinking(&json!({"type": "clear_thinking_20251015"})),
            (all[3..].to_vec(), reply(2, 11))
        );
        assert_eq!(kept_thinking(&turns(3)), (all.clone(), json!([])));
        for keep in [json!("all"), json!({"type": "all"})] {
            let keep_all = json!({"type": "clear_thinking_20251015", "keep": keep});
            assert_eq!(kept_thinking(&keep_all), (all.clone(), json!([])));
        }
    }

    #[test]
    fn compaction_is_rejected_above_its_threshold() {
        let edit = |value: usize| {
            json!({"type": "compact_20260112", "trigger": {"type": "input_tokens", "value": value},
                "instructions": "Keep names.", "pause_after_compaction": true})
        };
        let tokens = ByteCounter.count(&conversation(4)).unwrap();
        let check = |edit: &Value, context: usize| {
            taken(edit).unwrap().check_compaction(&conversation(4), &ByteCounter, context)
        };
        assert!(check(&edit(tokens), usize::MAX).is_ok());
        assert!(check(&edit(tokens - 2), tokens - 1).is_ok(), "too long for the model");
        let error = check(&edit(tokens - 1), tokens).unwrap_err();
        assert_eq!(error.param.as_deref(), Some("context_management.edits[0].type"));
        assert!(error.message.contains(&(tokens - 1).to_string()), "{}", error.message);
        assert_eq!(applied(&json!({"type": "compact_20260112"}), 4).edits, json!([]));
    }

    #[test]
    fn edits_of_one_type_are_rejected() {
        let edit = json!({"type": "clear_thinking_20251015"});
        let body = json!({NAME: {"edits": [edit, {"type": "compact_20260112"}, edit]}});
        let body = JsonValue::parse(body.to_string().as_bytes()).unwrap();
        let error =
            RequestedContextEdits::take(&mut RequestFields::of_body(body).unwrap()).unwrap_err();
        assert_eq!(error.param.as_deref(), Some("context_management.edits[2].type"));
    }

    #[test]
    fn invalid_edits_are_rejected_by_name() {
        for (edit, param) in [
            (
                json!({"type": "compact_20260112", "pause_after_compaction": 1}),
                "pause_after_compaction",
            ),
            (json!({"type": "compact_20260112", "instructions": []}), "instructions"),
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
            (json!({"type": "clear_thinking_20251015", "keep": "some"}), "keep"),
            (
                json!({"type": "clear_thinking_20251015", "keep": {"type": "tool_uses", "value": 1}}),
                "keep.type",
            ),
            (
                json!({"type": "clear_thinking_20251015", "keep": {"type": "thinking_turns", "value": 0}}),
                "keep.value",
            ),
        ] {
            let error = taken(&edit).unwrap_err();
            assert_eq!(error.param, Some(format!("{NAME}.edits[0].{param}")), "{edit}");
        }
    }
}
