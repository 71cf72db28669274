//! Converts the messages of a conversation to the forms that a chat template takes: content as a string or as
//! parts, tool call arguments as an object or as JSON text, the role `developer` as `system` and the role `tool`
//! as `observation` if needed.
//!
//! A message remains unchanged if the template includes its original form in the output.

use super::super::error::TextError;
use super::super::json_text::json_text;
use super::super::tool_calls::closed_arguments;
use super::capabilities::{RoleCapability, TemplateCapabilities};
use super::metadata_calls::write_calls_as_metadata;
use super::trial::ArgumentsForm;
use serde_json::{Map, Value, json};

/// Separator of content parts in a string, as in vLLM.
const PART_SEPARATOR: &str = "\n";

/// Marker that chat templates in the harmony format print.
const CHANNEL: &str = "<|channel|>";

/// Returns the arguments of each tool call, in order, in the other form: arguments given as JSON text as an
/// object, and arguments given as an object as JSON text. This is done before sentinels are inserted, because
/// a character that is escaped in JSON text is visible only in the object.
pub(super) fn other_argument_forms(messages: &mut Value) -> Vec<Value> {
    let mut forms = Vec::new();
    for_each_arguments(messages, |arguments| {
        forms.push(match arguments {
            Value::String(text) => Value::Object(closed_arguments(text)),
            value => Value::String(json_text(value, " ")),
        });
    });
    forms
}

/// Converts `messages` to the forms that the template takes. `other_arguments` is the result of
/// `other_argument_forms`; `mentions` returns whether the template source contains a text.
///
/// Errors: the template renders no messages of a role that occurs in `messages`.
pub(super) fn adapt(
    messages: &mut Value,
    other_arguments: Vec<Value>,
    capabilities: &TemplateCapabilities,
    mentions: impl Fn(&str) -> bool,
) -> Result<(), TextError> {
    adapt_arguments(messages, other_arguments, capabilities.arguments);
    let is_harmony = mentions(CHANNEL);
    for (index, message) in messages.as_array_mut().into_iter().flatten().enumerate() {
        let Some(message) = message.as_object_mut() else { continue };
        normalize(message);
        if is_harmony {
            add_preamble_to_reasoning(message);
        }
        let role = shown_role(index, message, capabilities, &mentions)?;
        adapt_content(message, role, capabilities);
    }
    if capabilities.takes_metadata {
        write_calls_as_metadata(messages);
    }
    Ok(())
}

/// Gives the arguments of all tool calls the form `form`; `other_arguments` are the arguments in the other form.
fn adapt_arguments(messages: &mut Value, other_arguments: Vec<Value>, form: ArgumentsForm) {
    let mut other_arguments = other_arguments.into_iter();
    for_each_arguments(messages, |arguments| {
        let other = other_arguments.next();
        let has_form = match form {
            ArgumentsForm::Object => arguments.is_object(),
            ArgumentsForm::Text => arguments.is_string(),
        };
        if let Some(other) = other.filter(|_| !has_form) {
            *arguments = other;
        }
    });
}

/// Applies `action` to the arguments of each tool call in order.
fn for_each_arguments(messages: &mut Value, mut action: impl FnMut(&mut Value)) {
    for message in messages.as_array_mut().into_iter().flatten() {
        let calls = message.get_mut("tool_calls").and_then(Value::as_array_mut);
        for call in calls.into_iter().flatten() {
            let function = call.get_mut("function");
            if let Some(arguments) = function.and_then(|f| f.get_mut("arguments")) {
                action(arguments);
            }
        }
    }
}

/// Returns the capability for the role of a message. A developer message becomes a system message if the
/// template renders system messages but not developer messages, and the result of a tool becomes an observation
/// if the template renders observations but not the role `tool`.
///
/// Errors: the template renders no messages of this role.
fn shown_role(
    index: usize,
    message: &mut Map<String, Value>,
    capabilities: &TemplateCapabilities,
    mentions: impl Fn(&str) -> bool,
) -> Result<Option<RoleCapability>, TextError> {
    let is_empty = message.get("content").is_none_or(is_blank);
    let Some(Value::String(role)) = message.get_mut("role") else { return Ok(None) };
    let mut capability = capabilities.role(role);
    if role == "developer"
        && let Some(system) = capabilities.system_for_developer()
    {
        "system".clone_into(role);
        capability = Some(system);
    }
    if role == "tool"
        && let Some(observation) = capabilities.observation
    {
        "observation".clone_into(role);
        capability = Some(observation);
    }
    let hidden = match capability {
        Some(capability) => capability.is_hidden(),
        None => !mentions(role),
    };
    if hidden && capabilities.shows_users() && !is_empty {
        return Err(TextError::RoleNotShown { index, role: role.clone() });
    }
    Ok(capability)
}

/// Whether content has no text except white space, so that a template that omits it loses no text.
pub(super) fn is_blank(content: &Value) -> bool {
    match content {
        Value::String(text) => text.trim().is_empty(),
        Value::Array(parts) => parts.iter().all(|part| part.get("text").is_none_or(is_blank)),
        _ => true,
    }
}

fn adapt_content(
    message: &mut Map<String, Value>,
    role: Option<RoleCapability>,
    capabilities: &TemplateCapabilities,
) {
    let role = role.unwrap_or(RoleCapability::ONLY_TEXT);
    match message.get_mut("content") {
        None if !capabilities.absent_content => {
            message.insert("content".to_owned(), json!(""));
        }
        Some(content @ Value::String(_)) if role.parts && !role.text => {
            let text = content.take();
            *content = json!([{"type": "text", "text": text}]);
        }
        Some(content @ Value::Array(_)) if !role.parts => *content = joined(content),
        _ => {}
    }
}

/// Joins the texts of content parts.
fn joined(parts: &Value) -> Value {
    let parts = parts.as_array().into_iter().flatten();
    let texts: Vec<&str> = parts.filter_map(|part| part["text"].as_str()).collect();
    Value::String(texts.join(PART_SEPARATOR))
}

/// Prepares a message as transformers does: keys with the value null are removed, and reasoning is stored
/// under each key that templates read.
fn normalize(message: &mut Map<String, Value>) {
    message.retain(|_, value| !value.is_null());
    let sent = ["reasoning_content", "thinking", "reasoning"];
    let Some(reasoning) = sent.into_iter().find_map(|key| message.get(key).cloned()) else {
        return;
    };
    let mut named = Map::new();
    named.insert("thinking".to_owned(), reasoning.clone());
    named.extend(std::mem::take(message));
    named.insert("reasoning_content".to_owned(), reasoning);
    *message = named;
}

/// Moves the content of a message with reasoning and tool calls to the end of its reasoning. The template of
/// gpt-oss prints either of them as reasoning before a call and rejects a message with both, but an output may
/// have both.
fn add_preamble_to_reasoning(message: &mut Map<String, Value>) {
    let has_calls =
        message.get("tool_calls").and_then(Value::as_array).is_some_and(|c| !c.is_empty());
    let content = match message.get("content") {
        Some(parts @ Value::Array(_)) => joined(parts),
        Some(content) => content.clone(),
        None => return,
    };
    let (Some(Value::String(reasoning)), Some(content)) =
        (message.get_mut("thinking"), content.as_str())
    else {
        return;
    };
    if has_calls && !reasoning.is_empty() && !content.is_empty() {
        reasoning.push_str(PART_SEPARATOR);
        reasoning.push_str(content);
        message.insert("content".to_owned(), Value::from(""));
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn escaped_arguments_have_an_object_form() {
        let call = |arguments: Value| json!({"function": {"name": "f", "arguments": arguments}});
        let calls = [call(json!("{\"a\": \"\\u003c\"}")), call(json!({"b": [1, "x"]}))];
        let mut messages = json!([{"role": "assistant", "tool_calls": calls}]);
        let forms = other_argument_forms(&mut messages);
        assert_eq!(forms, [json!({"a": "<"}), json!("{\"b\": [1, \"x\"]}")]);
    }

    #[test]
    fn reasoning_gets_all_names_and_null_keys_are_left_out() {
        let mut message = json!({"role": "assistant", "name": null, "reasoning": "r"});
        normalize(message.as_object_mut().unwrap());
        let text = r#"{"thinking":"r","role":"assistant","reasoning":"r","reasoning_content":"r"}"#;
        assert_eq!(message.to_string(), text);
    }

    #[test]
    fn preamble_of_a_call_is_added_to_its_reasoning() {
        let moved = |mut message: Value| {
            add_preamble_to_reasoning(message.as_object_mut().unwrap());
            message
        };
        let calls = json!([{"function": {"name": "f"}}]);
        for content in [json!("I look."), json!([{"type": "text", "text": "I look."}])] {
            let message = json!({"thinking": "hm", "content": content, "tool_calls": calls});
            let expected = json!({"thinking": "hm\nI look.", "content": "", "tool_calls": calls});
            assert_eq!(moved(message), expected);
        }
        for message in [
            json!({"thinking": "hm", "content": "So."}),
            json!({"thinking": "hm", "content": "So.", "tool_calls": []}),
            json!({"content": "So.", "tool_calls": calls}),
            json!({"thinking": "", "content": "So.", "tool_calls": calls}),
            json!({"thinking": "hm", "content": "", "tool_calls": calls}),
            json!({"thinking": "hm", "tool_calls": calls}),
        ] {
            assert_eq!(moved(message.clone()), message);
        }
    }
}
