//! Grammars in the EBNF syntax of xgrammar and llama.cpp (GBNF): rules `name ::= body`, with the start rule
//! `root`. They are converted to Lark.
//!
//! A rule that does not refer to a recursive rule, directly or indirectly, becomes a terminal, which the
//! lexer matches as a whole. Text that could belong either to a terminal or to the grammar element after it
//! is assigned to the terminal.
//!
//! Lark grammars are parsed too, because a regular grammar can be enforced for text inside a JSON string.

mod lark_parser;
mod parser;
mod pattern;
mod reachability;
#[cfg(test)]
mod tests;
mod writer;

use crate::limits::TEXT_BYTES_MAX;
use crate::structural_tag::TagGrammarWriter;
use parser::EbnfParser;
pub use pattern::lark_pattern;

/// Name of the start rule.
const ROOT: &str = "root";
/// Text between the name and the body of a rule.
const DEFINES: &str = "::=";
/// Maximum number of rules.
const RULES_MAX: usize = 512;
/// Maximum nesting depth of groups.
const DEPTH_MAX: usize = 64;
/// Maximum number of repetition operators (`*`, `+`, `?`, `{n}`) after one grammar element, limited because
/// each operator adds a nesting level.
const OPERATORS_MAX: u32 = 4;
/// Maximum value of `n` and `m` in a repetition `{n,m}`.
pub(super) const REPEAT_MAX: u32 = 4_096;

/// Reason why a grammar cannot be converted.
#[derive(Debug, Clone, PartialEq, Eq, thiserror::Error)]
#[error("{message}, in line {line} of the grammar")]
pub struct EbnfError {
    /// Description of the error.
    pub message: String,
    /// Line number, starting at 1.
    pub line: usize,
}

/// Parsed grammar.
#[derive(Debug)]
pub(super) struct EbnfGrammar {
    bodies: Vec<EbnfNode>,
    root: usize,
}

/// Node in the syntax tree of a rule body.
#[derive(Debug, Clone, PartialEq)]
enum EbnfNode {
    Text(String),
    /// Regular expression.
    Regex(String),
    /// Reference to the rule with this index.
    Rule(usize),
    Sequence(Vec<EbnfNode>),
    Choice(Vec<EbnfNode>),
    Repeat(Box<EbnfRepeat>),
}

/// Repetition of a node, with minimum and maximum counts.
#[derive(Debug, Clone, PartialEq)]
struct EbnfRepeat {
    node: EbnfNode,
    min: u32,
    /// `None` = unlimited.
    max: Option<u32>,
}

impl EbnfGrammar {
    /// Parses a grammar.
    ///
    /// Errors: a message and the line of the error.
    pub(super) fn parse(text: &str) -> Result<Self, EbnfError> {
        if text.len() > TEXT_BYTES_MAX {
            let message = format!("at most {TEXT_BYTES_MAX} bytes, got {}", text.len());
            return Err(EbnfError { message, line: 1 });
        }
        EbnfParser::new(text).grammar()
    }
}

/// Whether a grammar is written in EBNF, that is, a line begins with a name and `::=`. Lark uses a colon
/// instead.
pub fn is_ebnf(text: &str) -> bool {
    text.lines().any(|line| {
        let rest = line.trim_start().trim_start_matches(parser::is_name_part);
        rest.len() < line.trim_start().len() && rest.trim_start().starts_with(DEFINES)
    })
}

/// Converts an EBNF grammar to Lark.
///
/// Errors: a message and the line of the error.
pub fn ebnf_to_lark(text: &str) -> Result<String, EbnfError> {
    let mut writer = TagGrammarWriter::default();
    let whole = writer.ebnf(&EbnfGrammar::parse(text)?);
    let start = writer.rule_expression(whole);
    Ok(format!("start: {start}\n{}", writer.rules))
}
