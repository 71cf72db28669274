//! Converts regular Lark grammars to regular expressions, which can be enforced for text inside a JSON
//! string, where characters may be escaped.

use super::lark_parser::LarkParser;
use super::reachability::RuleReachability;
use super::{EbnfGrammar, EbnfNode, EbnfRepeat};
use crate::{GrammarSpec, OutputConstraint, llguidance_grammar};
use llguidance::derivre::RegexBuilder;
use std::fmt::Write as _;

/// Maximum length of a regular expression in bytes.
const PATTERN_BYTES_MAX: usize = 16 << 10;
/// Maximum number of syntax tree nodes that are visited. A limit is needed because rules are expanded
/// wherever they are used, so a short grammar can produce many nodes.
const PARTS_MAX: u32 = 16_384;
/// Maximum nesting depth of rules and groups.
const NESTING_MAX: u32 = 128;

/// Returns a regular expression for the language of a Lark grammar; `None` if the grammar is recursive,
/// contains parts that no regular expression can express, or exceeds the limits of constraints.
pub fn lark_pattern(text: &str) -> Option<String> {
    let grammar = LarkParser::new(text).grammar()?;
    let is_regular = RuleReachability::of(&grammar).is_terminal[grammar.root];
    let mut writer = PatternWriter { grammar: &grammar, pattern: String::new(), parts: PARTS_MAX };
    is_regular.then(|| writer.rule(grammar.root, 0))??;
    let pattern = writer.pattern;
    // The expression is parsed once to validate it, because Lark's regular expressions have Python syntax,
    // which the grammar engine supports only in part.
    RegexBuilder::new().mk_regex(&pattern).ok()?;
    let constraint = OutputConstraint::new(GrammarSpec::Regex(pattern.clone()), "format");
    llguidance_grammar::check(&constraint).ok().map(|_| pattern)
}

/// Returns a regular expression that matches `text` literally; `None` if a character has no form common to
/// all regular expression dialects.
pub(super) fn escaped(text: &str) -> Option<String> {
    let mut escaped = String::new();
    for c in text.chars() {
        match c {
            '\n' => escaped.push_str("\\n"),
            '\r' => escaped.push_str("\\r"),
            '\t' => escaped.push_str("\\t"),
            '<' | '>' => escaped.push(c), // Escaped, they are word boundaries.
            c if c.is_ascii_punctuation() => escaped.extend(['\\', c]),
            c if c.is_ascii_control() => return None,
            c => escaped.push(c),
        }
    }
    Some(escaped)
}

/// Writes the regular expression of a grammar. Methods return `None` if a limit is exceeded.
struct PatternWriter<'a> {
    grammar: &'a EbnfGrammar,
    pattern: String,
    /// Remaining number of syntax tree nodes that may be visited.
    parts: u32,
}

impl PatternWriter<'_> {
    fn rule(&mut self, rule: usize, depth: u32) -> Option<()> {
        let grammar = self.grammar;
        self.pattern.push_str("(?:");
        self.node(&grammar.bodies[rule], depth + 1)?;
        self.pattern.push(')');
        Some(())
    }

    fn node(&mut self, node: &EbnfNode, depth: u32) -> Option<()> {
        self.parts = self.parts.checked_sub(1)?;
        if depth > NESTING_MAX || self.pattern.len() > PATTERN_BYTES_MAX {
            return None;
        }
        match node {
            EbnfNode::Text(text) => self.pattern.push_str(&escaped(text)?),
            EbnfNode::Regex(regex) => self.pattern.push_str(regex),
            EbnfNode::Rule(rule) => self.rule(*rule, depth)?,
            EbnfNode::Sequence(nodes) => {
                nodes.iter().try_for_each(|node| self.node(node, depth + 1))?;
            }
            EbnfNode::Choice(nodes) => {
                self.pattern.push_str("(?:");
                for (index, node) in nodes.iter().enumerate() {
                    self.pattern.push_str(if index > 0 { "|" } else { "" });
                    self.node(node, depth + 1)?;
                }
                self.pattern.push(')');
            }
            EbnfNode::Repeat(repeat) => self.repeat(repeat, depth)?,
        }
        Some(())
    }

    fn repeat(&mut self, repeat: &EbnfRepeat, depth: u32) -> Option<()> {
        let EbnfRepeat { node, min, max } = repeat;
        self.pattern.push_str("(?:");
        self.node(node, depth + 1)?;
        // Writing to a string cannot fail, so the result is ignored.
        let _ = match max {
            None => write!(self.pattern, "){{{min},}}"),
            Some(max) => write!(self.pattern, "){{{min},{max}}}"),
        };
        Some(())
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::GrammarCompiler;
    use crate::tests::{accepts, compile_with, vocabulary};

    /// Checks that the pattern of the grammar `lark` accepts the texts `good` and rejects the texts `bad`.
    fn check_pattern(compiler: &GrammarCompiler, lark: &str, good: &[&str], bad: &[&str]) {
        let pattern = lark_pattern(lark).unwrap_or_else(|| panic!("{lark}"));
        let constraint = OutputConstraint::new(GrammarSpec::Regex(pattern.clone()), "test");
        let compiled = compile_with(compiler, &constraint).unwrap();
        for text in good {
            assert!(accepts(&compiled, text), "{text:?} of {pattern}");
        }
        for text in bad {
            assert!(!accepts(&compiled, text), "{text:?} of {pattern}");
        }
    }

    #[test]
    fn regular_grammars_have_a_pattern() {
        let compiler = GrammarCompiler::new(vocabulary()).unwrap();
        for (lark, good, bad) in [
            ("start: \"a.\" | B\nB: /b+\\/?/", &["a.", "bb/"][..], &["ax", "b//", ""][..]),
            (
                "// Dates\nstart: year \"-\" MONTH -> date\n  | \"now\"i\nyear: DIGIT~4\n\
                 MONTH.2: (\"0\" \"1\"..\"9\"\n  | \"1\" [\"0\"])\n%import common.DIGIT\n",
                &["2026-09", "2026-1", "NOW"],
                &["206-09", "2026-00", "2026-19"],
            ),
            ("?start: (x \",\")* x\n!x: \"\\\"\" | \"\\n\"", &["\"", "\n,\""], &[",", "\",", ""]),
            (
                "start: SIGNED_NUMBER LF\n%import common.SIGNED_NUMBER\n%import common.LF\n",
                &["-1.5e3\n", ".5\n", "7\n"],
                &["-\n", "1e\n", "7"],
            ),
            ("start: /[^,]+/s \"!\"? | ", &["", "a\nb!", "!"], &["a,"]),
            ("start: \"<\" /[a-z]+/ \">\" | \"<\"..\"?\" \"<>\"i", &["<ab>", "=<>"], &["<>", "ab"]),
            ("start: \"!#$%&'()*+,-./:;=?@[]^_`{|}~\"", &["!#$%&'()*+,-./:;=?@[]^_`{|}~"], &["!"]),
        ] {
            check_pattern(&compiler, lark, good, bad);
        }
    }

    #[test]
    fn large_grammars_have_no_pattern() {
        let doubled: String = (0..30)
            .map(|rule| format!("r{rule}: r{} r{}\n", rule + 1, rule + 1))
            .collect::<Vec<_>>()
            .concat();
        let chain =
            (0..200).map(|rule| format!("r{rule}: r{}\n", rule + 1)).collect::<Vec<_>>().concat();
        for lark in [
            format!("start: r0\n{doubled}r30: \"\""),
            format!("start: /{}/", "\\(".repeat(200)),
            format!("start: r0\n{chain}r200: \"a\""),
        ] {
            assert_eq!(lark_pattern(&lark), None, "{lark}");
        }
    }

    #[test]
    fn other_grammars_have_no_pattern() {
        for lark in [
            "start: \"(\" start? \")\"",
            "start: a\na: \"x\" b\nb: a |",
            "start: x",
            "x: \"a\"",
            "start: \"a\"\n%ignore \" \"",
            "start: /a(?=b)/",
            "start: /(a)\\1/",
            "start: /\\bfoo\\b/",
            "start: /a\\Z/",
            "start: /{\"a\"}/",
            "start: /[[]/",
            "start: /a # note/x",
            "start: \"a\"\nstart: \"b\"",
            "start: %json {}",
            "start: <think>",
            "%import common.ESCAPED_STRING\nstart: ESCAPED_STRING",
            "start: \"b\"..\"a\"",
            "start: \"a",
            "start: (\"a\"",
            "",
        ] {
            assert_eq!(lark_pattern(lark), None, "{lark}");
        }
    }
}
