//! Tool calls for templates of GLM-4, which take a call as a message of the assistant whose content is the arguments
//! and whose `metadata` is the name of the function.

use super::conversation::is_blank;
use serde_json::{Map, Value, json};

/// Replaces each message with tool calls by a message with its content, if it has any, and a message per call.
pub(super) fn write_calls_as_metadata(messages: &mut Value) {
    let Value::Array(list) = messages else { return };
    *list = std::mem::take(list).into_iter().flat_map(separated).collect();
}

fn separated(mut message: Value) -> Vec<Value> {
    let calls = message.as_object_mut().and_then(|message| message.remove("tool_calls"));
    let Some(Value::Array(calls)) = calls else { return vec![message] };
    let has_content = message.get("content").is_some_and(|content| !is_blank(content));
    let mut messages: Vec<Value> =
        calls.iter().filter_map(|call| call.get("function")).map(of_call).collect();
    if has_content || messages.is_empty() {
        messages.insert(0, message);
    }
    messages
}

fn of_call(function: &Value) -> Value {
    let field = |name: &str| function.get(name).cloned().unwrap_or_else(|| json!(""));
    let mut message = Map::new();
    message.insert("role".to_owned(), json!("assistant"));
    message.insert("metadata".to_owned(), field("name"));
    message.insert("content".to_owned(), field("arguments"));
    Value::Object(message)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn calls_become_messages_with_metadata() {
        let call = |name: &str| json!({"function": {"name": name, "arguments": "{\"a\": 1}"}});
        let of_call =
            |name: &str| json!({"role": "assistant", "metadata": name, "content": "{\"a\": 1}"});
        let user = json!({"role": "user", "content": "q"});
        let said = |content: Value, calls: Value| json!({"role": "assistant", "content": content, "tool_calls": calls});
        let without_calls = |content: &str| json!({"role": "assistant", "content": content});
        let mut messages = json!([
            user,
            said(json!("Look."), json!([call("f"), call("g")])),
            said(json!(" "), json!([call("f")])),
            said(json!("x"), json!([])),
        ]);
        write_calls_as_metadata(&mut messages);
        let expected = json!([
            user,
            without_calls("Look."),
            of_call("f"),
            of_call("g"),
            of_call("f"),
            without_calls("x"),
        ]);
        assert_eq!(messages, expected);
    }
}
