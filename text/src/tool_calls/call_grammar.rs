//! Builds the Lark grammar of a model family's tool calls, from the family's markers and each tool's argument
//! schema.
//!
//! The schema of each tool is a separate grammar rule, so that `$ref` references are resolved within the
//! schema.

mod argument_schema;

use super::{ToolCallSyntax, ToolDefinition, harmony_grammar};
pub(super) use argument_schema::object_schema;
use argument_schema::with_python_whitespace;
use grammar::TEXT_BYTES_MAX;
use grammar::lark_text::{ANY, literal, up_to, without};
use serde_json::Value;
use std::fmt::Write as _;

/// Reason why a grammar cannot enforce the calls of a tool in the syntax of a model family.
#[derive(Debug, Clone, PartialEq, Eq, thiserror::Error)]
pub enum CallGrammarError {
    /// The schema has a keyword that cannot be enforced in a syntax that does not write arguments as JSON.
    #[error(
        "the keyword {keyword} of tool {tool} cannot be enforced in this model's tool call syntax"
    )]
    UnsupportedKeyword {
        /// Name of the tool.
        tool: String,
        /// Keyword of the schema.
        keyword: &'static str,
    },
    /// The syntax cannot represent the name of a required parameter.
    #[error(
        "the parameter {key:?} of tool {tool} cannot be written in this model's tool call syntax"
    )]
    UnsupportedKey {
        /// Name of the tool.
        tool: String,
        /// Name of the parameter.
        key: String,
    },
    /// The schema of the parameters accepts no object.
    #[error("the parameters of tool {tool} must be an object")]
    NoObject {
        /// Name of the tool.
        tool: String,
    },
    /// The grammar exceeds the maximum length of the grammar compiler.
    #[error("the grammar of the tools has more than {TEXT_BYTES_MAX} bytes")]
    TooLong,
}

/// Function that returns the Lark form of a marker that is a special token; `None` if the marker is plain
/// text.
pub(super) type SpecialMarkerFn<'a> = &'a dyn Fn(&str) -> Option<String>;

/// Writes the rules of a grammar.
pub(crate) struct CallGrammarWriter<'a> {
    special: SpecialMarkerFn<'a>,
    /// Markers of the syntax that may be special tokens.
    markers: Vec<&'static str>,
    /// Rules and terminals that the calls refer to.
    pub rules: String,
    /// Whether a rule was omitted because the grammar would exceed its maximum length.
    is_too_long: bool,
}

/// Text split at its first special token. A Lark terminal cannot contain a special token, so the text before
/// the token is written separately.
pub(super) struct SpecialTokenSplit {
    /// Plain text before the first special token, not escaped.
    pub plain: String,
    /// Rest of the text, in Lark syntax; empty if the text contains no special token.
    pub rest: String,
}

impl<'a> CallGrammarWriter<'a> {
    /// Creates a writer of a grammar without rules.
    pub(super) fn new(syntax: ToolCallSyntax, special: SpecialMarkerFn<'a>) -> Self {
        Self {
            special,
            markers: syntax.special_markers(),
            rules: String::new(),
            is_too_long: false,
        }
    }

    /// Converts `text` to Lark syntax; a marker in `text` that is a special token is written as a special
    /// token.
    pub(super) fn text(&self, text: &str) -> String {
        let SpecialTokenSplit { plain, rest } = self.split(text);
        let plain = if plain.is_empty() { String::new() } else { literal(&plain) };
        format!("{plain} {rest}").trim().to_owned()
    }

    /// Splits `text` at its first special token.
    pub(super) fn split(&self, text: &str) -> SpecialTokenSplit {
        let first = self
            .markers
            .iter()
            .filter_map(|marker| Some((text.find(marker)?, marker.len(), (self.special)(marker)?)));
        match first.min_by_key(|(at, _, _)| *at) {
            None => SpecialTokenSplit { plain: text.to_owned(), rest: String::new() },
            Some((at, len, token)) => {
                let rest = format!("{token} {}", self.text(&text[at + len..]));
                SpecialTokenSplit { plain: text[..at].to_owned(), rest: rest.trim().to_owned() }
            }
        }
    }

    /// Whether `marker` is a special token.
    pub(super) fn has_special(&self, marker: &str) -> bool {
        (self.special)(marker).is_some()
    }

    /// Checks that no rule was omitted.
    ///
    /// Errors: the grammar exceeds its maximum length.
    pub(super) fn check_length(&self) -> Result<(), CallGrammarError> {
        if self.is_too_long { Err(CallGrammarError::TooLong) } else { Ok(()) }
    }

    /// Adds a rule or a terminal. Rules beyond the maximum length of a grammar are omitted; `check_length`
    /// then fails.
    pub(super) fn rule(&mut self, name: &str, body: &str) {
        if self.rules.len() + name.len() + body.len() > TEXT_BYTES_MAX {
            self.is_too_long = true;
            return;
        }
        // Writing to a string cannot fail, so the result is ignored.
        let _ = writeln!(self.rules, "{name}: {body}");
    }

    /// Adds the terminal `name` for the text up to and including the first `end`; the text contains none of
    /// `excluded`. Returns the Lark expression of this text.
    pub(super) fn text_up_to(&mut self, name: &str, end: &str, excluded: &[String]) -> String {
        let SpecialTokenSplit { plain, rest } = self.split(end);
        if rest.is_empty() {
            self.rule(name, &up_to(&[plain], excluded));
            return name.to_owned();
        }
        // A Lark terminal cannot contain a special token, so the terminal ends before the special token.
        // `end` is excluded from the terminal because the output parsers also recognise the text of the
        // special token in plain text.
        let excluded: Vec<String> = excluded.iter().cloned().chain([end.to_owned()]).collect();
        self.rule(name, &format!("{} & {ANY} {}", without(&excluded), literal(&plain)));
        format!("{name} {rest}")
    }

    /// Adds the rule `name` for the JSON texts that `schema` accepts.
    pub(super) fn json_rule(&mut self, name: &str, schema: &Value) {
        let schema = with_python_whitespace(schema);
        self.rule(name, &format!("%json {schema}"));
    }
}

/// Text of a model family's tool call syntax before, between and after the calls of an output.
#[derive(Debug, Default)]
pub(crate) struct CallDelimiters {
    pub open: String,
    pub between: String,
    pub close: String,
}

impl CallDelimiters {
    pub(super) fn new(open: &str, between: &str, close: &str) -> Self {
        let [open, between, close] = [open, between, close].map(str::to_owned);
        Self { open, between, close }
    }
}

/// Text of one call before and after its arguments.
pub(crate) struct CallWrapperText {
    pub head: String,
    /// Text between `head` and the arguments, in Lark syntax.
    pub infix: String,
    pub tail: String,
}

impl CallWrapperText {
    pub(super) fn new(head: &str, tail: &str) -> Self {
        Self { head: head.to_owned(), infix: String::new(), tail: tail.to_owned() }
    }

    /// Returns the text of a call of the function `name` that is a JSON object, with the arguments in the member `key`.
    pub(super) fn json_object(name: &str, key: &str) -> Self {
        Self::new(&format!("{{\"name\": \"{name}\", \"{key}\": "), "}")
    }

    /// Returns the Lark expression of the text `open` and one call whose arguments match the rule named
    /// `arguments`. The prefix `read` of this text is omitted, because the grammar has already matched it.
    pub(super) fn written(
        &self,
        open: &str,
        read: &str,
        arguments: &str,
        writer: &CallGrammarWriter<'_>,
    ) -> String {
        let Self { head, infix, tail } = self;
        let head = format!("{open}{head}");
        let head = writer.text(head.strip_prefix(read).unwrap_or(&head));
        format!("{head} {infix} {arguments} {}", writer.text(tail))
    }
}

/// Returns the name of the rule of the arguments of tool `index`.
pub(super) fn arguments_rule(index: usize) -> String {
    format!("args_{index}")
}

/// Builds the grammar of one call of any of `tools`; with `multiple`, of one or more calls.
///
/// Errors: this syntax cannot represent the arguments of a tool as its schema requires.
pub(super) fn lark_grammar<'a>(
    syntax: ToolCallSyntax,
    tools: impl IntoIterator<Item = &'a ToolDefinition>,
    multiple: bool,
    special: SpecialMarkerFn<'_>,
) -> Result<String, CallGrammarError> {
    let (kind, mut writer) = (syntax.kind(), CallGrammarWriter::new(syntax, special));
    let mut names = Vec::new();
    for (index, tool) in tools.into_iter().enumerate() {
        kind.add_arguments(index, tool, &mut writer)?;
        writer.check_length()?;
        let text = kind.call_text(&tool.name, &writer);
        let call = text.written("", "", &arguments_rule(index), &writer);
        names.push(format!("call_{index}"));
        writer.rule(&format!("call_{index}"), &call);
    }
    add_common_rules(syntax, &mut writer);
    let CallDelimiters { open, between, close } = kind.delimiters(&writer);
    let [open, between, close] = [open, between, close].map(|text| writer.text(&text));
    let more = if multiple && kind.allows_several() {
        format!("({between} call)*")
    } else {
        String::new()
    };
    writer.check_length()?;
    let (calls, rules) = (names.join(" | "), writer.rules);
    Ok(format!("start: {open} call {more} {close}\ncall: {calls}\n{rules}"))
}

/// Adds the rules that the calls of all tools refer to, if the syntax has any.
pub(super) fn add_common_rules(syntax: ToolCallSyntax, writer: &mut CallGrammarWriter<'_>) {
    if syntax.is_harmony() {
        harmony_grammar::add_call_rules(writer);
    }
}
