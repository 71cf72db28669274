//! Grammar of the text of one call.

use super::super::delimited_calls::LABEL;
use super::super::json_sections::{CallHeaderFormat, FENCE};
use super::super::{ToolCallSyntax, ToolDefinition, harmony_grammar, hermes, mistral, tag_grammar};
use super::{CallGrammarError, CallGrammarWriter, CallWrapperText};
use serde_json::{Value, json};

/// Returns the text around the arguments in a call of the function `name`.
pub(crate) fn call_text(
    syntax: ToolCallSyntax,
    name: &str,
    writer: &CallGrammarWriter<'_>,
) -> CallWrapperText {
    let call = |head: &str, tail: &str| CallWrapperText {
        head: head.to_owned(),
        infix: String::new(),
        tail: tail.to_owned(),
    };
    if let Some(tags) = syntax.tags() {
        return tag_grammar::call_tags(tags, name);
    }
    if let Some(delimited) = syntax.delimited() {
        return call(&format!("{}{LABEL}{name}", delimited.open), delimited.close);
    }
    if let Some(section) = syntax.section() {
        let (open, separator, close) = (section.call_open, section.separator, section.call_close);
        return match section.head {
            CallHeaderFormat::Name => call(&format!("{open}{name}{separator}"), close),
            CallHeaderFormat::Type => call(
                &format!("{open}function{separator}{name}\n{FENCE}\n"),
                &format!("\n```{close}"),
            ),
            CallHeaderFormat::Index => {
                let infix = format!("/[0-9]{{1,3}}/ {}", writer.text(separator));
                CallWrapperText { infix, ..call(&format!("{open}functions.{name}:"), close) }
            }
        };
    }
    match syntax {
        ToolCallSyntax::Hermes => call(
            &format!("{}\n{{\"name\": \"{name}\", \"arguments\": ", hermes::OPEN),
            &format!("}}\n{}", hermes::CLOSE),
        ),
        ToolCallSyntax::Mistral if writer.has_special(mistral::ARGS) => {
            call(&format!("{}{name}{}", mistral::CALLS, mistral::ARGS), "")
        }
        ToolCallSyntax::Llama3Json => {
            call(&format!("{{\"name\": \"{name}\", \"parameters\": "), "}")
        }
        ToolCallSyntax::Glm4 => call(&format!("{name}\n"), ""),
        _ if syntax.is_pythonic() => call(&format!("{name}("), ")"),
        ToolCallSyntax::Harmony => harmony_grammar::call_header(name, writer),
        ToolCallSyntax::Granite20b => {
            call(&format!("{} {{\"name\": \"{name}\", \"arguments\": ", hermes::FUNCTION_CALL), "}")
        }
        _ => call(&format!("{{\"name\": \"{name}\", \"arguments\": "), "}"),
    }
}

/// Returns the schema of a tool's arguments, restricted to objects.
pub(super) fn object_schema(tool: &ToolDefinition) -> Result<Value, CallGrammarError> {
    let mut schema = tool.parameters.as_object().cloned().unwrap_or_default();
    let is_object = match schema.get("type") {
        None => true,
        Some(Value::Array(names)) => names.iter().any(|name| name == "object"),
        Some(name) => name == "object",
    };
    if !is_object {
        return Err(CallGrammarError::NoObject { tool: tool.name.clone() });
    }
    schema.insert("type".to_owned(), Value::from("object"));
    Ok(Value::Object(schema))
}

/// Returns the schema with whitespace restricted to the form that chat templates print; without the
/// restriction, a model could generate unlimited whitespace.
pub(super) fn with_python_whitespace(schema: &Value) -> Value {
    let mut object = schema.as_object().cloned().unwrap_or_default();
    let options =
        json!({"whitespace_flexible": false, "item_separator": ", ", "key_separator": ": "});
    object.insert("x-guidance".to_owned(), options);
    Value::Object(object)
}
