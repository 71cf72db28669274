//! Builds the Lark grammar of a model family's tool calls: the family's markers, and arguments that match the
//! schema of each tool.
//!
//! Each tool's schema is a rule of its own, so that `$ref` references are resolved inside it.

use super::json_sections::{CallHeadForm, FENCE};
use super::{ToolCallSyntax, ToolDefinition, hermes, mistral, python_grammar, tag_grammar};
use serde_json::{Value, json};
use std::fmt::Write as _;

/// Reason why calls of a tool cannot be forced in the syntax of a model family.
#[derive(Debug, Clone, PartialEq, Eq, thiserror::Error)]
pub enum CallGrammarError {
    /// The schema has a keyword that cannot be enforced where the syntax writes arguments without JSON.
    #[error(
        "the keyword {keyword} of tool {tool} cannot be enforced in this model's tool call syntax"
    )]
    UnsupportedKeyword {
        /// Name of the tool.
        tool: String,
        /// Keyword of the schema.
        keyword: &'static str,
    },
    /// The syntax has no form for the name of a required parameter.
    #[error(
        "the parameter {key:?} of tool {tool} cannot be written in this model's tool call syntax"
    )]
    UnsupportedKey {
        /// Name of the tool.
        tool: String,
        /// Name of the parameter.
        key: String,
    },
    /// The schema accepts no object.
    #[error("the parameters of tool {tool} must be an object")]
    NoObject {
        /// Name of the tool.
        tool: String,
    },
}

/// Returns the Lark form of a marker that is a special token; `None` if it is plain text.
pub(super) type SpecialMarkerFn<'a> = &'a dyn Fn(&str) -> Option<String>;

/// Writes the rules of a grammar.
pub(super) struct GrammarWriter<'a> {
    special: SpecialMarkerFn<'a>,
    /// Markers of the syntax that may be special tokens.
    markers: Vec<&'static str>,
    /// Rules and terminals that the calls refer to.
    pub rules: String,
}

/// Text at the end of a value, in the two parts that a grammar needs.
pub(super) struct EndText {
    /// Plain text up to the first special token, as it is.
    pub plain: String,
    /// Rest in Lark; empty if there is no special token.
    pub rest: String,
}

impl GrammarWriter<'_> {
    /// Formats `text` in Lark; the markers in it that are special tokens are written as such.
    pub(super) fn text(&self, text: &str) -> String {
        let EndText { plain, rest } = self.split(text);
        let plain = if plain.is_empty() { String::new() } else { literal(&plain) };
        format!("{plain} {rest}").trim().to_owned()
    }

    /// Splits `text` at its first special token.
    pub(super) fn split(&self, text: &str) -> EndText {
        let first = self
            .markers
            .iter()
            .filter_map(|marker| Some((text.find(marker)?, marker.len(), (self.special)(marker)?)));
        match first.min_by_key(|(at, _, _)| *at) {
            None => EndText { plain: text.to_owned(), rest: String::new() },
            Some((at, len, token)) => {
                let rest = format!("{token} {}", self.text(&text[at + len..]));
                EndText { plain: text[..at].to_owned(), rest: rest.trim().to_owned() }
            }
        }
    }

    /// Whether `marker` is a special token.
    fn has_special(&self, marker: &str) -> bool {
        (self.special)(marker).is_some()
    }

    /// Adds a rule or a terminal.
    pub(super) fn rule(&mut self, name: &str, body: &str) {
        // Writing to a string cannot fail, so the result is ignored.
        let _ = writeln!(self.rules, "{name}: {body}");
    }

    /// Adds the rule `name` of the JSON texts that `schema` accepts.
    pub(super) fn json_rule(&mut self, name: &str, schema: &Value) {
        let schema = with_python_whitespace(schema);
        self.rule(name, &format!("%json {schema}"));
    }
}

/// Text of a model family's tool call syntax before, between and after the calls of an output, in Lark.
struct CallDelimiters {
    open: String,
    between: String,
    close: String,
}

/// Builds the grammar of one call, or with `multiple` of one or more calls, of any of `tools`.
///
/// Errors: the arguments of a tool cannot be written in this syntax as its schema requires.
pub(super) fn lark_grammar<'a>(
    syntax: ToolCallSyntax,
    tools: impl IntoIterator<Item = &'a ToolDefinition>,
    multiple: bool,
    special: SpecialMarkerFn<'_>,
) -> Result<String, CallGrammarError> {
    let markers = syntax.special_markers();
    let mut writer = GrammarWriter { special, markers, rules: String::new() };
    let mut names = Vec::new();
    for (index, tool) in tools.into_iter().enumerate() {
        let call = call(syntax, index, tool, &mut writer)?;
        names.push(format!("call_{index}"));
        writer.rule(&format!("call_{index}"), &call);
    }
    let CallDelimiters { open, between, close } = delimiters(syntax, &writer);
    // Llama's syntax has no marker at the end of a call, which could separate several calls from the text
    // that follows.
    let more = if multiple && syntax != ToolCallSyntax::Llama3Json {
        format!("({between} call)*")
    } else {
        String::new()
    };
    let (calls, rules) = (names.join(" | "), writer.rules);
    Ok(format!("start: {open} call {more} {close}\ncall: {calls}\n{rules}"))
}

fn delimiters(syntax: ToolCallSyntax, writer: &GrammarWriter<'_>) -> CallDelimiters {
    let delimiters = |open: &str, between: &str, close: &str| CallDelimiters {
        open: writer.text(open),
        between: writer.text(between),
        close: writer.text(close),
    };
    if let Some(tags) = syntax.tags() {
        return match tags.wrapper.filter(|_| !tags.wraps_each_call) {
            None => delimiters("", tags.line_break, ""),
            Some(wrapper) => {
                let (open, close) = (format!("{}\n", wrapper.open), format!("\n{}", wrapper.close));
                delimiters(&open, "\n", &close)
            }
        };
    }
    if let Some(section) = syntax.section() {
        return delimiters(section.section_open, section.between, section.section_close);
    }
    match syntax {
        ToolCallSyntax::Mistral if writer.has_special(mistral::ARGS) => delimiters("", "", ""),
        ToolCallSyntax::Mistral => delimiters("[TOOL_CALLS][", ", ", "]"),
        ToolCallSyntax::Pythonic | ToolCallSyntax::Xlam => delimiters("[", ", ", "]"),
        ToolCallSyntax::Granite if writer.has_special("<|tool_call|>") => {
            delimiters("<|tool_call|>[", ", ", "]")
        }
        ToolCallSyntax::Granite => delimiters("<tool_call>[", ", ", "]"),
        ToolCallSyntax::Phi4Mini if writer.has_special("<|tool_call|>") => {
            delimiters("<|tool_call|>[", ", ", "]<|/tool_call|>")
        }
        ToolCallSyntax::Phi4Mini => delimiters("functools[", ", ", "]"),
        ToolCallSyntax::Llama3Json => delimiters("", "", ""),
        _ => delimiters("", "\n", ""),
    }
}

/// Builds the right-hand side of the grammar rule of a call.
fn call(
    syntax: ToolCallSyntax,
    index: usize,
    tool: &ToolDefinition,
    writer: &mut GrammarWriter<'_>,
) -> Result<String, CallGrammarError> {
    let name = &tool.name;
    if let Some(tags) = syntax.tags() {
        return tag_grammar::tagged_call(tags, index, tool, writer);
    }
    if syntax == ToolCallSyntax::Pythonic {
        return python_grammar::python_call(index, tool, writer);
    }
    let arguments = format!("args_{index}");
    writer.json_rule(&arguments, &object_schema(tool)?);
    let call = |head: &str, tail: &str| {
        Ok(format!("{} {arguments} {}", writer.text(head), writer.text(tail)))
    };
    if let Some(section) = syntax.section() {
        let (open, separator, close) = (section.call_open, section.separator, section.call_close);
        return match section.head {
            CallHeadForm::Name => call(&format!("{open}{name}{separator}"), close),
            CallHeadForm::Type => call(
                &format!("{open}function{separator}{name}\n{FENCE}\n"),
                &format!("\n```{close}"),
            ),
            CallHeadForm::Index => {
                let head = writer.text(&format!("{open}functions.{name}:"));
                let (separator, close) = (writer.text(separator), writer.text(close));
                Ok(format!("{head} /[0-9]{{1,3}}/ {separator} {arguments} {close}"))
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
        _ => call(&format!("{{\"name\": \"{name}\", \"arguments\": "), "}"),
    }
}

/// Returns the schema of a tool's arguments, restricted to objects.
fn object_schema(tool: &ToolDefinition) -> Result<Value, CallGrammarError> {
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

/// Returns the schema with the restriction that JSON contains only the whitespace that chat templates print;
/// otherwise a model could generate any amount of whitespace.
fn with_python_whitespace(schema: &Value) -> Value {
    let mut object = schema.as_object().cloned().unwrap_or_default();
    let options =
        json!({"whitespace_flexible": false, "item_separator": ", ", "key_separator": ": "});
    object.insert("x-guidance".to_owned(), options);
    Value::Object(object)
}

/// Formats `text` as a Lark string literal.
pub(super) fn literal(text: &str) -> String {
    // Lark's strings are those of JSON, except that they contain no U+007F.
    Value::from(text).to_string().replace('\u{7f}', "\\u007f")
}
