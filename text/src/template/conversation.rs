//! Converts the messages of a conversation to the forms that a chat template takes: content as a string or as
//! parts, arguments of tool calls as an object or as text, the role `developer`, the field of reasoning.
//!
//! Messages that the template shows as they were sent remain unchanged.

use super::super::error::TextError;
use super::super::tool_calls::closed_arguments;
use super::capabilities::{REASONING_KEYS, RoleCapability, TemplateCapabilities};
use super::json_text::json_text;
use super::trial::ArgumentsForm;
use serde_json::{Map, Value, json};

/// Separator of content parts in a string, as in vLLM.
const PART_SEPARATOR: &str = "\n";

/// Returns the other form of the arguments of each tool call in order: the object for arguments that are
/// text, JSON text for an object. They are built before sentinels are inserted, because an escaped character
/// of JSON text becomes visible only in the object.
pub(super) fn other_argument_forms(messages: &mut Value) -> Vec<Value> {
    let mut forms = Vec::new();
    for_each_arguments(messages, |arguments| {
        forms.push(match arguments {
            Value::String(text) => Value::Object(closed_arguments(text)),
            value => Value::String(json_text(value)),
        });
    });
    forms
}

/// Converts `messages` to the forms that the template takes. `other_arguments` is the result of
/// `other_argument_forms`; `mentions` says whether the source of the template contains a text.
///
/// Errors: the template shows no messages of a role.
pub(super) fn adapt(
    messages: &mut Value,
    other_arguments: Vec<Value>,
    capabilities: &TemplateCapabilities,
    mentions: impl Fn(&str) -> bool,
) -> Result<(), TextError> {
    let mut other_arguments = other_arguments.into_iter();
    for_each_arguments(messages, |arguments| {
        let other = other_arguments.next();
        let has_form = match capabilities.arguments {
            ArgumentsForm::Object => arguments.is_object(),
            ArgumentsForm::Text => arguments.is_string(),
        };
        if let Some(other) = other.filter(|_| !has_form) {
            *arguments = other;
        }
    });
    for (index, message) in messages.as_array_mut().into_iter().flatten().enumerate() {
        let Some(message) = message.as_object_mut() else { continue };
        let role = shown_role(index, message, capabilities, &mentions)?;
        adapt_content(message, role, capabilities);
        adapt_reasoning(message, &capabilities.reasoning_keys);
    }
    Ok(())
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
/// template shows only the latter.
///
/// Errors: the template shows no messages of this role.
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
        && capability.is_some_and(|c| !c.shown_first)
        && let Some(system) = capabilities.role("system").filter(|c| c.shown_first)
    {
        "system".clone_into(role);
        capability = Some(system);
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

/// Whether content has no text that the template could leave out.
fn is_blank(content: &Value) -> bool {
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
        Some(content @ Value::Null) if !capabilities.null_content => *content = json!(""),
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

/// Renames the reasoning of a message to a field that the template shows, unless the message has such a
/// field.
fn adapt_reasoning(message: &mut Map<String, Value>, shown: &[&str]) {
    let Some(name) = shown.first() else { return };
    if shown.iter().any(|key| message.contains_key(*key)) {
        return;
    }
    let Some(sent) = REASONING_KEYS.into_iter().find(|key| message.contains_key(*key)) else {
        return;
    };
    let rename = |key: String| if key == sent { (*name).to_owned() } else { key };
    *message = std::mem::take(message).into_iter().map(|(key, v)| (rename(key), v)).collect();
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
    fn reasoning_keeps_its_place_when_it_is_renamed() {
        let mut message = json!({"role": "assistant", "reasoning": "r", "content": "c"});
        adapt_reasoning(message.as_object_mut().unwrap(), &["reasoning_content"]);
        let renamed = "{\"role\":\"assistant\",\"reasoning_content\":\"r\",\"content\":\"c\"}";
        assert_eq!(message.to_string(), renamed);
    }
}
