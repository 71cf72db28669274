//! Parses one message of a conversation: its content and, for assistant messages, its tool calls.

use super::custom_tools::INPUT;
use super::messages::{ASSISTANT_PARTS, PARTS_MAX, REFUSAL, TEXT_PARTS, arguments, part, text_of};
use crate::api_error::ApiError;
use crate::ignored_parts::IgnoredRequestParts;
use crate::request_fields::{RequestFields, wrong_type};
use crate::strict_json::JsonValue;
use serde_json::{Map, Value, json};

/// Maximum number of tool calls in a message.
const CALLS_MAX: usize = 128;
/// Maximum length of a role in bytes.
const ROLE_MAX: usize = 64;
/// Optional message keys. As in all fields of the API, null means that the key is absent.
const OPTIONAL_KEYS: &[&str] =
    &["function_call", "name", "reasoning", "reasoning_content", "tool_call_id"];

/// Parses a message. Keys remain in the order of the request, and unknown keys are passed to the template
/// unchanged, because some templates print whole messages.
pub(super) fn parse(path: String, value: JsonValue) -> Result<Value, ApiError> {
    let JsonValue::Object(pairs) = value else {
        return Err(wrong_type(path, "an object", &value));
    };
    let member = |name: &str| pairs.iter().find(|(key, _)| key == name).map(|(_, value)| value);
    let role = role(&path, member("role"))?;
    check_content(&path, member("content"), &role)?;
    let mut message = Map::new();
    for (key, value) in pairs {
        let field = format!("{path}.{key}");
        let value = match key.as_str() {
            "content" if value.is_null() => Value::Null,
            "content" => content_value(&field, value, &role)?,
            "tool_calls" => match calls(field, value, &role)? {
                Some(calls) => calls,
                None => continue,
            },
            "function_call" if !value.is_null() => {
                let message = "is no longer supported; use tool_calls";
                return Err(ApiError::unsupported(field, message));
            }
            _ if value.is_null() && OPTIONAL_KEYS.contains(&key.as_str()) => continue,
            _ => value.into_template_value(),
        };
        message.insert(key, value);
    }
    show_refusal(&mut message, &role);
    Ok(Value::Object(message))
}

/// Rejects a message without content, which only the assistant may send.
fn check_content(path: &str, content: Option<&JsonValue>, role: &str) -> Result<(), ApiError> {
    let has_content = content.is_some_and(|content| !content.is_null());
    if role != "assistant" && !has_content {
        return Err(ApiError::invalid(format!("{path}.content"), "is missing"));
    }
    Ok(())
}

/// Copies `refusal` to the content of an assistant message without content, because templates print only the
/// content.
fn show_refusal(message: &mut Map<String, Value>, role: &str) {
    let has_content = message.get("content").is_some_and(|content| !content.is_null());
    if role == "assistant"
        && !has_content
        && let Some(Value::String(refusal)) = message.get(REFUSAL)
    {
        let refusal = Value::String(refusal.clone());
        message.insert("content".to_owned(), refusal);
    }
}

/// Parses the role of the message `path`.
fn role(path: &str, value: Option<&JsonValue>) -> Result<String, ApiError> {
    let path = format!("{path}.role");
    match value {
        None | Some(JsonValue::Null) => Err(ApiError::invalid(path, "is missing")),
        Some(JsonValue::Str(role)) if role.is_empty() => Err(ApiError::invalid(path, "is missing")),
        Some(JsonValue::Str(role)) if role == "function" => {
            let message = "is no longer supported; send the result as role tool";
            Err(ApiError::unsupported(path, message))
        }
        Some(JsonValue::Str(role)) if role.len() <= ROLE_MAX => Ok(role.clone()),
        Some(JsonValue::Str(role)) => {
            let message = format!("at most {ROLE_MAX} bytes, got {}", role.len());
            Err(ApiError::invalid(path, message))
        }
        Some(other) => Err(wrong_type(path, "a string", other)),
    }
}

/// Parses message content for a chat template: a string or a list of text parts. A list remains a list.
fn content_value(path: &str, value: JsonValue, role: &str) -> Result<Value, ApiError> {
    let kinds = if role == "assistant" { ASSISTANT_PARTS } else { TEXT_PARTS };
    match value {
        JsonValue::Str(text) => Ok(Value::String(text)),
        JsonValue::List(parts) if parts.len() <= PARTS_MAX => {
            // Templates receive all fields of a part, so none of them is without effect.
            let hints = IgnoredRequestParts::default();
            let part =
                |(index, value)| template_part(&hints, format!("{path}[{index}]"), value, kinds);
            parts.into_iter().enumerate().map(part).collect()
        }
        other => text_of(&IgnoredRequestParts::default(), path, other, kinds).map(Value::String),
    }
}

/// Parses a text part. The part's type becomes `text`, the only part type that templates handle.
fn template_part(
    hints: &IgnoredRequestParts,
    path: String,
    value: JsonValue,
    kinds: &[&str],
) -> Result<Value, ApiError> {
    let text = part(hints, path, value.clone(), kinds)?;
    let pairs = match value {
        JsonValue::Object(pairs) if !pairs.iter().any(|(key, _)| key == REFUSAL) => pairs,
        _ => return Ok(json!({"type": "text", "text": text})),
    };
    let values = pairs.into_iter().map(|(key, value)| match key.as_str() {
        "type" => (key, json!("text")),
        _ => (key, value.into_template_value()),
    });
    Ok(Value::Object(values.collect()))
}

/// Parses the tool calls of an earlier assistant message; `None` if there are none.
fn calls(path: String, value: JsonValue, role: &str) -> Result<Option<Value>, ApiError> {
    let list = match value {
        JsonValue::Null => return Ok(None),
        JsonValue::List(list) if list.is_empty() => return Ok(None),
        JsonValue::List(list) if list.len() <= CALLS_MAX => list,
        JsonValue::List(list) => {
            let message = format!("at most {CALLS_MAX} calls, got {}", list.len());
            return Err(ApiError::invalid(path, message));
        }
        other => return Err(wrong_type(path, "a list of objects", &other)),
    };
    if role != "assistant" {
        return Err(ApiError::invalid(path, "only the assistant calls tools"));
    }
    let one = |(index, call)| one_call(format!("{path}[{index}]"), call);
    list.into_iter().enumerate().map(one).collect::<Result<Value, _>>().map(Some)
}

/// Parses a tool call. Its keys remain in the order of the request.
fn one_call(path: String, value: JsonValue) -> Result<Value, ApiError> {
    let JsonValue::Object(pairs) = value else {
        return Err(wrong_type(path, "an object", &value));
    };
    let mut call = Map::new();
    for (key, value) in pairs {
        let field = format!("{path}.{key}");
        let value = match (key.as_str(), value) {
            ("type" | "function" | "custom", JsonValue::Null) => continue,
            ("type", kind) => call_type(field, kind)?,
            ("custom", custom) => {
                call.insert("function".to_owned(), called_custom_tool(field, custom)?);
                continue;
            }
            ("function", function) => called_function(&field, function)?,
            (_, value) => value.into_template_value(),
        };
        call.insert(key, value);
    }
    if !call.contains_key("function") {
        return Err(ApiError::invalid(format!("{path}.function"), "is missing"));
    }
    call.entry("type").or_insert_with(|| json!("function"));
    Ok(Value::Object(call))
}

/// Parses the type of a tool call, and returns the type for templates. Templates handle only function calls,
/// so a custom tool call is converted to a function call.
fn call_type(path: String, value: JsonValue) -> Result<Value, ApiError> {
    match value {
        JsonValue::Str(kind) if kind == "function" || kind == "custom" => {
            Ok(Value::from("function"))
        }
        JsonValue::Str(_) => Err(ApiError::unsupported(path, "must be function or custom")),
        other => Err(wrong_type(path, "a string", &other)),
    }
}

/// Parses the name and input of a custom tool call, and returns an equivalent function call.
fn called_custom_tool(path: String, value: JsonValue) -> Result<Value, ApiError> {
    let mut custom = RequestFields::of(path, value)?;
    let (name, input) = (custom.required_string("name")?, custom.required_string("input")?);
    Ok(json!({"name": name, "arguments": {INPUT: input}}))
}

/// Parses the name and arguments of a tool call. Arguments given as text remain text, because some templates
/// print them unchanged.
fn called_function(path: &str, value: JsonValue) -> Result<Value, ApiError> {
    let JsonValue::Object(pairs) = value else {
        return Err(wrong_type(path.to_owned(), "an object", &value));
    };
    let mut function = Map::new();
    for (key, value) in pairs {
        let field = format!("{path}.{key}");
        let value = match (key.as_str(), value) {
            ("name" | "arguments", JsonValue::Null) => continue,
            ("name", JsonValue::Str(name)) => Value::String(name),
            ("name", other) => return Err(wrong_type(field, "a string", &other)),
            ("arguments", JsonValue::Str(text)) => {
                arguments(&field, Some(JsonValue::Str(text.clone())))?;
                Value::String(text)
            }
            ("arguments", value) => arguments(&field, Some(value))?,
            (_, value) => value.into_template_value(),
        };
        function.insert(key, value);
    }
    if !function.contains_key("name") {
        return Err(ApiError::invalid(format!("{path}.name"), "is missing"));
    }
    function.entry("arguments").or_insert_with(|| json!({}));
    Ok(Value::Object(function))
}

#[cfg(test)]
mod tests {
    use super::*;

    fn parsed(body: &str) -> Result<Value, ApiError> {
        parse("messages[0]".to_owned(), JsonValue::parse(body.as_bytes())?)
    }

    #[test]
    fn keys_and_unknown_keys_remain_as_sent() {
        for body in [
            r#"{"content":"a","z":null,"role":"user","name":"n","a":[{"y":1,"b":2}]}"#,
            r#"{"content":null,"tool_calls":[{"function":{"arguments":"{\"a\":1}","name":"f","x":0},"type":"function","id":"c"}],"reasoning":"r","role":"assistant"}"#,
            r#"{"content":[{"text":"a","type":"text","cache_control":null}],"role":"user"}"#,
        ] {
            assert_eq!(parsed(body).unwrap().to_string(), body);
        }
    }

    #[test]
    fn absent_keys_of_calls_get_their_defaults() {
        let body = r#"{"role":"assistant","name":null,"tool_calls":[{"function":{"name":"f"}}]}"#;
        let call = json!({"function": {"name": "f", "arguments": {}}, "type": "function"});
        assert_eq!(parsed(body).unwrap(), json!({"role": "assistant", "tool_calls": [call]}));
        let none = r#"{"role":"assistant","content":"x","tool_calls":[],"function_call":null}"#;
        assert_eq!(parsed(none).unwrap(), json!({"role": "assistant", "content": "x"}));
    }

    #[test]
    fn calls_of_custom_tools_become_calls_of_functions() {
        let call =
            json!({"id": "c", "type": "custom", "custom": {"name": "patch", "input": "a\"b"}});
        let body = json!({"role": "assistant", "content": null, "tool_calls": [call]});
        let function = json!({"name": "patch", "arguments": {"input": "a\"b"}});
        let parsed = parsed(&body.to_string()).unwrap();
        let expected = json!({"id": "c", "type": "function", "function": function});
        assert_eq!(parsed["tool_calls"], json!([expected]));
    }

    #[test]
    fn refusals_are_content_of_the_assistant() {
        let message = parsed(r#"{"role":"assistant","content":null,"refusal":"No."}"#).unwrap();
        assert_eq!(message["content"], "No.");
        let parts = r#"{"role":"assistant","content":[{"type":"refusal","refusal":"No."}]}"#;
        assert_eq!(parsed(parts).unwrap()["content"], json!([{"type": "text", "text": "No."}]));
        let parts = r#"{"role":"user","content":[{"type":"refusal","refusal":"No."}]}"#;
        assert_eq!(
            parsed(parts).unwrap_err().param.as_deref(),
            Some("messages[0].content[0].type")
        );
    }

    #[test]
    fn media_parts_are_rejected_with_their_place_and_kind() {
        for (kind, media) in [
            ("image_url", "images are"),
            ("input_audio", "audio is"),
            ("file", "files are"),
            ("video_url", "videos are"),
        ] {
            let parts = json!([{"type": "text", "text": "a"}, {"type": kind, kind: {}}]);
            let error = parsed(&json!({"role": "user", "content": parts}).to_string()).unwrap_err();
            let message = format!("{media} not supported by this model, which reads text only");
            assert_eq!(
                (error.param.as_deref(), error.message),
                (Some("messages[0].content[1]"), message)
            );
        }
    }

    #[test]
    fn invalid_messages_name_the_field() {
        for (body, param) in [
            (r#"{"content":"a"}"#, "messages[0].role"),
            (r#"{"role":"user","content":null}"#, "messages[0].content"),
            (r#"{"role":"user","content":[{"type":"image_url"}]}"#, "messages[0].content[0]"),
            (r#"{"role":"user","content":[{"type":"x"}]}"#, "messages[0].content[0].type"),
            (r#"{"role":"user","content":"a","tool_calls":[1]}"#, "messages[0].tool_calls"),
            (r#"{"role":"assistant","tool_calls":[{}]}"#, "messages[0].tool_calls[0].function"),
            (
                r#"{"role":"assistant","tool_calls":[{"function":{"name":"f","arguments":"[]"}}]}"#,
                "messages[0].tool_calls[0].function.arguments",
            ),
            (r#"{"role":"assistant","function_call":{}}"#, "messages[0].function_call"),
            (
                r#"{"role":"assistant","tool_calls":[{"type":"custom","custom":{"name":"c"}}]}"#,
                "messages[0].tool_calls[0].custom.input",
            ),
            (
                r#"{"role":"assistant","tool_calls":[{"type":"x"}]}"#,
                "messages[0].tool_calls[0].type",
            ),
        ] {
            assert_eq!(parsed(body).unwrap_err().param.as_deref(), Some(param), "{body}");
        }
    }
}
