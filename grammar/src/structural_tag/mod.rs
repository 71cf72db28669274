//! Structural tags: a tree of formats that mixes free text with constrained parts, in xgrammar's JSON form. A
//! structural tag is converted to a Lark grammar.
//!
//! A lexer takes the longest match, so adjacent texts and regular expressions are merged into one terminal.

mod fields;
mod formats;
mod free_text;
mod tag_branches;
#[cfg(test)]
mod tests;

use crate::limits::TEXT_BYTES_MAX;
use fields::FormatFields;
pub(super) use formats::TagGrammarWriter;
use serde_json::Value;

/// Maximum nesting depth of formats.
const DEPTH_MAX: usize = 32;
/// Maximum number of formats in a structural tag.
const FORMATS_MAX: usize = 1_024;

/// Reason why a structural tag cannot be converted.
#[derive(Debug, Clone, PartialEq, Eq, thiserror::Error)]
#[error("{message}")]
pub struct StructuralTagError {
    /// Path of the invalid value within the structural tag.
    pub path: String,
    /// Description of the error.
    pub message: String,
}

impl StructuralTagError {
    fn new(path: impl Into<String>, message: impl Into<String>) -> Self {
        Self { path: path.into(), message: message.into() }
    }

    fn too_long(path: &str) -> Self {
        let message =
            format!("a structural tag and its grammar have at most {TEXT_BYTES_MAX} bytes");
        Self::new(path, message)
    }
}

/// Converts a structural tag to a Lark grammar. The tag is an object with `format`, or has the older form
/// with `structures` and `triggers`. If `type` is present, it must be `structural_tag`.
///
/// Errors: the path of an invalid value, or of a format that cannot be enforced.
pub fn structural_tag_grammar(tag: &Value) -> Result<String, StructuralTagError> {
    if tag.to_string().len() > TEXT_BYTES_MAX {
        return Err(StructuralTagError::too_long(""));
    }
    let mut fields = FormatFields::of(tag, "")?;
    if fields.optional_text("type")?.is_some_and(|kind| kind != "structural_tag") {
        return Err(StructuralTagError::new("type", "must be structural_tag"));
    }
    let mut writer = TagGrammarWriter::default();
    let whole = match fields.take("format") {
        Some(format) => writer.closed(format, "format", &[], 0)?,
        None => writer.structures(&mut fields)?,
    };
    fields.finish()?;
    let start = writer.rule_expression(whole);
    let grammar = format!("start: {start}\n{}", writer.rules);
    if grammar.len() > TEXT_BYTES_MAX {
        return Err(StructuralTagError::too_long(""));
    }
    Ok(grammar)
}

/// Expression of a Lark grammar: the right-hand side of a rule or of a terminal.
#[derive(Debug, Clone, PartialEq, Eq)]
pub(super) enum LarkExpression {
    /// Right-hand side of a terminal.
    Terminal(String),
    /// Right-hand side of a rule.
    Rule(String),
}

impl LarkExpression {
    /// Returns the expression repeated `min` to `max` times; `max` = `None` means unlimited.
    pub(super) fn repeated(self, min: u32, max: Option<u32>) -> Self {
        let operator = match (min, max) {
            (0, Some(0)) => return Self::Terminal(EMPTY.to_owned()),
            (0, Some(1)) => "?".to_owned(),
            (0, None) => "*".to_owned(),
            (1, None) => "+".to_owned(),
            (min, None) => format!("{{{min},}}"),
            (min, Some(max)) => format!("{{{min},{max}}}"),
        };
        match self {
            Self::Terminal(text) => Self::Terminal(format!("({text}){operator}")),
            Self::Rule(text) => Self::Rule(format!("({text}){operator}")),
        }
    }
}

/// Lark literal for the empty text.
const EMPTY: &str = "\"\"";

/// Texts that may end a format; empty = the format ends at the end of the output.
type EndTexts = [String];

impl TagGrammarWriter {
    /// Returns `expression` in a form that is valid on the right-hand side of a rule; a terminal is first
    /// added to the grammar under a name.
    pub(super) fn rule_expression(&mut self, expression: LarkExpression) -> String {
        match expression {
            LarkExpression::Rule(text) => text,
            LarkExpression::Terminal(text) if text == EMPTY => text,
            LarkExpression::Terminal(text) => self.terminal(&text),
        }
    }
}
