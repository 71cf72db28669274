//! Builds the Lark grammar of a model family's tool calls: the family's markers, and JSON that matches the
//! schema of each tool.
//!
//! Each tool's schema is a rule of its own, so that `$ref` references are resolved inside it.

use super::schema_types::SchemaTypes;
use super::{ToolCallSyntax, ToolDefinition, deepseek, mistral};
use serde_json::{Map, Value, json};
use std::fmt::Write as _;

/// Text of a model family's tool call syntax before, between and after the calls of an output.
struct CallDelimiters {
    open: String,
    between: String,
    close: String,
}

/// Builds the grammar of one call, or with `multiple` of one or more calls, of any of `tools`.
/// `format_marker` writes a marker of the family in Lark: a special token is written differently from text.
pub(super) fn lark_grammar<'a>(
    syntax: ToolCallSyntax,
    tools: impl IntoIterator<Item = &'a ToolDefinition>,
    multiple: bool,
    format_marker: impl Fn(&str) -> String,
) -> String {
    let mut rules = String::new();
    let mut names = Vec::new();
    for (index, tool) in tools.into_iter().enumerate() {
        names.push(format!("call_{index}"));
        let call = call(syntax, index, tool, &format_marker, &mut rules);
        // Writing to a string cannot fail, so the result is ignored.
        let _ = writeln!(rules, "call_{index}: {call}");
    }
    let CallDelimiters { open, between, close } = delimiters(syntax, &format_marker);
    // Llama's syntax has no marker at the end of a call, which could separate several calls from the text
    // that follows.
    let more = if multiple && syntax != ToolCallSyntax::Llama3Json {
        format!("({between} call)*")
    } else {
        String::new()
    };
    format!("start: {open} call {more} {close}\ncall: {}\n{rules}", names.join(" | "))
}

fn delimiters(syntax: ToolCallSyntax, format_marker: impl Fn(&str) -> String) -> CallDelimiters {
    let delimiters = |open: String, between: &str, close: String| {
        let between = if between.is_empty() { String::new() } else { text(between) };
        CallDelimiters { open, between, close }
    };
    match syntax {
        ToolCallSyntax::Hermes | ToolCallSyntax::Qwen3Coder => {
            delimiters(String::new(), "\n", String::new())
        }
        ToolCallSyntax::Llama3Json => delimiters(String::new(), "", String::new()),
        ToolCallSyntax::Mistral => {
            delimiters(format_marker(mistral::CALLS) + " \"[\"", ", ", text("]"))
        }
        ToolCallSyntax::DeepSeekV3 => delimiters(
            format_marker(deepseek::CALLS_BEGIN),
            "\n",
            format_marker(deepseek::CALLS_END),
        ),
        ToolCallSyntax::DeepSeekV31 => {
            delimiters(format_marker(deepseek::CALLS_BEGIN), "", format_marker(deepseek::CALLS_END))
        }
    }
}

/// Builds the right-hand side of the grammar rule of a call.
fn call(
    syntax: ToolCallSyntax,
    index: usize,
    tool: &ToolDefinition,
    format_marker: impl Fn(&str) -> String,
    rules: &mut String,
) -> String {
    use super::hermes::{CLOSE, OPEN};
    use deepseek::{CALL_BEGIN, CALL_END, SEPARATOR};
    let name = &tool.name;
    if syntax == ToolCallSyntax::Qwen3Coder {
        return qwen3_coder_call(index, tool, format_marker, rules);
    }
    let _ = writeln!(rules, "args_{index}: %json {}", with_python_whitespace(&tool.parameters));
    let arguments = format!("args_{index}");
    match syntax {
        ToolCallSyntax::Hermes | ToolCallSyntax::Qwen3Coder => {
            let head = text(&format!("\n{{\"name\": \"{name}\", \"arguments\": "));
            format!(
                "{} {head} {arguments} {} {}",
                format_marker(OPEN),
                text("}\n"),
                format_marker(CLOSE)
            )
        }
        ToolCallSyntax::Llama3Json => {
            let head = text(&format!("{{\"name\": \"{name}\", \"parameters\": "));
            format!("{head} {arguments} {}", text("}"))
        }
        ToolCallSyntax::Mistral => {
            let head = text(&format!("{{\"name\": \"{name}\", \"arguments\": "));
            format!("{head} {arguments} {}", text("}"))
        }
        ToolCallSyntax::DeepSeekV3 => {
            let (begin, separator, end) =
                (format_marker(CALL_BEGIN), format_marker(SEPARATOR), format_marker(CALL_END));
            let (kind, head) = (text("function"), text(&format!("{name}\n```json\n")));
            format!("{begin} {kind} {separator} {head} {arguments} {} {end}", text("\n```"))
        }
        ToolCallSyntax::DeepSeekV31 => {
            let (begin, separator, end) =
                (format_marker(CALL_BEGIN), format_marker(SEPARATOR), format_marker(CALL_END));
            format!("{begin} {} {separator} {arguments} {end}", text(name))
        }
    }
}

/// Builds the right-hand side of the grammar rule of a Qwen3-Coder call: each property of the schema in
/// order.
fn qwen3_coder_call(
    index: usize,
    tool: &ToolDefinition,
    format_marker: impl Fn(&str) -> String,
    rules: &mut String,
) -> String {
    use super::hermes::{CLOSE, OPEN};
    let schema = &tool.parameters;
    let required: Vec<&str> =
        schema["required"].as_array().into_iter().flatten().filter_map(Value::as_str).collect();
    let mut parameters = String::new();
    for (at, (key, property)) in schema["properties"].as_object().into_iter().flatten().enumerate()
    {
        let rule = format!("value_{index}_{at}");
        let end = "\n</parameter>\n";
        let is_text =
            SchemaTypes::of(schema, key) == SchemaTypes::text() && property.get("enum").is_none();
        if is_text {
            let _ = writeln!(rules, "{rule}[suffix={}]: /(?s:.*)/", text(end));
        } else if let Some(words) = enum_strings(property) {
            let words: Vec<String> = words.iter().map(|word| text(word)).collect();
            let _ = writeln!(rules, "{rule}: ({}) {}", words.join(" | "), text(end));
        } else {
            let _ = writeln!(
                rules,
                "json_{rule}: %json {}",
                with_python_whitespace(&with_definitions(schema, property))
            );
            let _ = writeln!(rules, "{rule}: json_{rule} {}", text(end));
        }
        let one = format!("{} {rule}", text(&format!("<parameter={key}>\n")));
        let optional = if required.contains(&key.as_str()) { "" } else { "?" };
        let _ = write!(parameters, "({one}){optional} ");
    }
    let head = text(&format!("\n<function={}>\n", tool.name));
    format!(
        "{} {head} {parameters}{} {}",
        format_marker(OPEN),
        text("</function>\n"),
        format_marker(CLOSE)
    )
}

/// Returns the schema with the restriction that JSON contains only the whitespace that chat templates print;
/// otherwise a model could generate any amount of whitespace.
fn with_python_whitespace(schema: &Value) -> Value {
    let mut object = schema.as_object().cloned().unwrap_or_default();
    let options =
        json!({"whitespace_flexible": false, "item_separator": ", ", "key_separator": ": "});
    object.insert("x-guidance".to_owned(), options);
    Value::Object(object)
}

/// Returns the `enum` values of a property if all of them are strings.
fn enum_strings(property: &Value) -> Option<Vec<&str>> {
    let list = property.get("enum")?.as_array().filter(|list| !list.is_empty())?;
    list.iter().map(Value::as_str).collect()
}

/// Returns the schema of a property, with the definitions of the whole schema that its references need.
fn with_definitions(schema: &Value, property: &Value) -> Value {
    let mut object = Map::new();
    for key in ["$defs", "definitions"] {
        if let Some(definitions) = schema.get(key) {
            object.insert(key.to_owned(), definitions.clone());
        }
    }
    object.extend(property.as_object().cloned().unwrap_or_default());
    Value::Object(object)
}

/// Formats `text` as a Lark string literal.
pub(super) fn text(text: &str) -> String {
    Value::from(text).to_string()
}
