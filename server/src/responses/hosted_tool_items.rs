//! Converts input items of tools that run on other servers. Such items occur in a conversation that began on
//! another server.

use super::tool_names::function_name;
use crate::api_error::ApiError;
use crate::request_fields::RequestFields;
use crate::strict_json::JsonValue;
use serde_json::{Map, Value, json};
use text::json_text;

/// Item types that contain nothing for the model.
const SKIPPED: &[&str] = &[
    "compaction_trigger",
    "computer_call",
    "ghost_snapshot",
    "image_generation_call",
    "mcp_approval_request",
    "mcp_approval_response",
    "mcp_list_tools",
    "web_search_call",
];
/// Fields that may contain text for the model, in items of unknown type.
const TEXT_FIELDS: &[&str] = &[
    "arguments",
    "code",
    "content",
    "encrypted_content",
    "input",
    "output",
    "outputs",
    "result",
    "results",
    "summary",
    "text",
    "tools",
];

/// Input item of a tool that ran on another server: the call of the tool, its output, or both.
#[derive(Debug, Default, PartialEq)]
pub(super) struct HostedToolItem {
    pub(super) call_id: String,
    pub(super) call: Option<HostedToolCall>,
    pub(super) output: Option<String>,
}

/// Function name and arguments of a call.
#[derive(Debug, PartialEq)]
pub(super) struct HostedToolCall {
    pub(super) name: String,
    pub(super) arguments: Value,
}

impl HostedToolItem {
    /// Parses an item of type `kind`; `None` if the item contains nothing for the model.
    ///
    /// Errors: HTTP status 400 for items with content that cannot be passed to the model.
    pub(super) fn take(kind: &str, item: &mut RequestFields) -> Result<Option<Self>, ApiError> {
        let call_id = match item.string("call_id", usize::MAX)? {
            Some(call_id) => call_id,
            None => item.string("id", usize::MAX)?.unwrap_or_default(),
        };
        let call = |name: &str, arguments: Option<JsonValue>| {
            let arguments = arguments.map_or_else(|| json!({}), members);
            Some(Self {
                call_id: call_id.clone(),
                call: Some(HostedToolCall { name: name.to_owned(), arguments }),
                output: None,
            })
        };
        let output = |output: Option<JsonValue>| {
            let output = Some(output.map(text).unwrap_or_default());
            Some(Self { call_id: call_id.clone(), call: None, output })
        };
        Ok(match kind {
            "local_shell_call" => call("local_shell", item.take("action")),
            "shell_call" => call("shell", item.take("action")),
            "apply_patch_call" => call("apply_patch", item.take("operation")),
            "tool_search_call" => call("tool_search", item.take("arguments")),
            "local_shell_call_output" | "shell_call_output" => output(item.take("output")),
            "apply_patch_call_output" => {
                let (text, status) = (item.take("output"), item.take("status"));
                output(text.or(status))
            }
            "tool_search_output" => output(item.take("tools")),
            "mcp_call" => Some(mcp_call(item, call_id)?),
            "code_interpreter_call" => {
                let code = item.string("code", usize::MAX)?.unwrap_or_default();
                let name = "code_interpreter".to_owned();
                let call = Some(HostedToolCall { name, arguments: json!({"code": code}) });
                Some(Self { call_id, call, output: item.take("outputs").map(text) })
            }
            kind if SKIPPED.contains(&kind) => None,
            _ => return reject_text(item).map(|()| None),
        })
    }
}

/// Parses a call to an MCP server, with its output or error.
fn mcp_call(item: &mut RequestFields, call_id: String) -> Result<HostedToolItem, ApiError> {
    let server = item.string("server_label", usize::MAX)?;
    let name = function_name(server.as_deref(), &item.required_string("name")?);
    let arguments = item.string("arguments", usize::MAX)?.unwrap_or_default();
    let arguments = super::items::template_arguments(&arguments);
    let (output, error) = (item.take("output"), item.take("error"));
    let output = output.or(error).map(text);
    Ok(HostedToolItem { call_id, call: Some(HostedToolCall { name, arguments }), output })
}

/// Rejects an item of an unknown type that may contain text for the model.
fn reject_text(item: &mut RequestFields) -> Result<(), ApiError> {
    let is_empty = |value: &JsonValue| match value {
        JsonValue::Str(text) => text.is_empty(),
        JsonValue::List(list) => list.is_empty(),
        _ => false,
    };
    for name in TEXT_FIELDS {
        if item.take(name).is_some_and(|value| !is_empty(&value)) {
            let message = "items of this type are not supported";
            let path = item.path("type");
            return Err(ApiError::bad_request("unsupported_content", path, message));
        }
    }
    Ok(())
}

/// Returns the members of an object, except `type`, as the arguments of a call.
fn members(value: JsonValue) -> Value {
    match value {
        JsonValue::Object(mut pairs) => {
            pairs.retain(|(key, _)| key != "type");
            JsonValue::Object(pairs).into_template_value()
        }
        JsonValue::Str(arguments) => super::items::template_arguments(&arguments),
        _ => Value::Object(Map::new()),
    }
}

/// Returns a string unchanged, and other values as JSON text.
fn text(value: JsonValue) -> String {
    match value {
        JsonValue::Str(text) => text,
        other => json_text(&other.into_template_value(), ""),
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn taken(item: &Value) -> Result<Option<HostedToolItem>, ApiError> {
        let value = JsonValue::parse(item.to_string().as_bytes())?;
        let mut fields = RequestFields::of("input[0]".to_owned(), value)?;
        let kind = fields.required_string("type")?;
        HostedToolItem::take(&kind, &mut fields)
    }

    #[test]
    fn calls_and_outputs_are_converted() {
        let action = json!({"type": "exec", "command": ["ls"], "env": {}});
        let shell = json!({"type": "local_shell_call", "call_id": "c", "action": action});
        let call =
            |name: &str, arguments| Some(HostedToolCall { name: name.to_owned(), arguments });
        let item = |call, output: Option<&str>| {
            Some(HostedToolItem {
                call_id: "c".to_owned(),
                call,
                output: output.map(str::to_owned),
            })
        };
        let arguments = json!({"command": ["ls"], "env": {}});
        assert_eq!(taken(&shell).unwrap(), item(call("local_shell", arguments), None));
        let output = json!({"type": "local_shell_call_output", "id": "c", "output": "a"});
        assert_eq!(taken(&output).unwrap(), item(None, Some("a")));
        let output =
            json!({"type": "shell_call_output", "call_id": "c", "output": [{"stdout": "a"}]});
        assert_eq!(taken(&output).unwrap(), item(None, Some("[{\"stdout\":\"a\"}]")));
        let patch = json!({"type": "apply_patch_call_output", "call_id": "c", "status": "failed"});
        assert_eq!(taken(&patch).unwrap(), item(None, Some("failed")));
        let mcp = json!({"type": "mcp_call", "id": "c", "server_label": "s", "name": "f",
            "arguments": "{\"a\": 1}", "output": "b"});
        assert_eq!(taken(&mcp).unwrap(), item(call("s__f", json!({"a": 1})), Some("b")));
    }

    #[test]
    fn items_without_text_are_skipped_and_others_rejected() {
        let skipped = [
            json!({"type": "web_search_call", "id": "ws", "action": {"query": "x"}}),
            json!({"type": "image_generation_call", "id": "ig", "result": "AAAA"}),
            json!({"type": "a_later_type", "id": "x", "status": "completed", "output": []}),
        ];
        for item in skipped {
            assert_eq!(taken(&item).unwrap(), None, "{item}");
        }
        for name in TEXT_FIELDS {
            let error = taken(&json!({"type": "a_later_type", *name: "x"})).unwrap_err();
            assert_eq!(error.param.as_deref(), Some("input[0].type"), "{name}");
        }
    }
}
