//! Grammars in EBNF as xgrammar and llama.cpp (GBNF) write it: `name ::= body`, from the rule `root` on. They are
//! converted to Lark.
//!
//! A rule that does not refer to itself, not even through others, is a terminal, which a lexer matches as a whole. A
//! text that could belong to a terminal or to what follows it belongs to the terminal.
//!
//! Grammars in Lark are parsed too, because a regular one can be enforced for a text within JSON.

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

/// Name of the rule with which a text begins.
const ROOT: &str = "root";
/// Text between the name and the body of a rule.
const DEFINES: &str = "::=";
/// Maximum number of rules.
const RULES_MAX: usize = 512;
/// Maximum nesting depth of groups.
const DEPTH_MAX: usize = 64;
/// Maximum number of repetition operators of one part: each nests the part once more.
const OPERATORS_MAX: u32 = 4;
/// Maximum number of repetitions, unless it is unlimited.
pub(super) const REPEAT_MAX: u32 = 4_096;

/// Reason why a grammar cannot be converted.
#[derive(Debug, Clone, PartialEq, Eq, thiserror::Error)]
#[error("{message}, in line {line} of the grammar")]
pub struct EbnfError {
    /// What is wrong.
    pub message: String,
    /// Number of the line, from 1 on.
    pub line: usize,
}

/// Parsed grammar.
#[derive(Debug)]
pub(super) struct EbnfGrammar {
    bodies: Vec<EbnfNode>,
    root: usize,
}

/// Part of the body of a rule.
#[derive(Debug, Clone, PartialEq)]
enum EbnfNode {
    Text(String),
    /// Regular expression.
    Regex(String),
    /// Index of a rule.
    Rule(usize),
    Sequence(Vec<EbnfNode>),
    Choice(Vec<EbnfNode>),
    Repeat(Box<EbnfRepeat>),
}

/// Repetition of a part.
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
    /// Errors: what is wrong, and where.
    pub(super) fn parse(text: &str) -> Result<Self, EbnfError> {
        if text.len() > TEXT_BYTES_MAX {
            let message = format!("at most {TEXT_BYTES_MAX} bytes, got {}", text.len());
            return Err(EbnfError { message, line: 1 });
        }
        EbnfParser::new(text).grammar()
    }
}

/// Whether a grammar is written in EBNF: a line begins with a name and `::=`. Lark has a colon there.
pub fn is_ebnf(text: &str) -> bool {
    text.lines().any(|line| {
        let rest = line.trim_start().trim_start_matches(parser::is_name_part);
        rest.len() < line.trim_start().len() && rest.trim_start().starts_with(DEFINES)
    })
}

/// Converts a grammar in EBNF to Lark.
///
/// Errors: what is wrong, and where.
pub fn ebnf_to_lark(text: &str) -> Result<String, EbnfError> {
    let mut writer = TagGrammarWriter::default();
    let whole = writer.ebnf(&EbnfGrammar::parse(text)?);
    let start = writer.rule_expression(whole);
    Ok(format!("start: {start}\n{}", writer.rules))
}
