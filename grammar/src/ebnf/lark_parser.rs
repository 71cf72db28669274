//! Parser for the regular subset of Lark's own syntax, without `%ignore`, templates and lookarounds.

use super::parser::single;
use super::{DEPTH_MAX, EbnfGrammar, EbnfNode, EbnfRepeat, REPEAT_MAX, RULES_MAX};
use std::collections::HashMap;

/// Name of the start rule.
const START: &str = "start";
/// `INT EXP | DECIMAL EXP?`, where `EXP` is `("e"|"E") SIGNED_INT`; `NUMBER` is also an `INT`.
const FLOAT: &str = "(?:[0-9]+[eE][+-]?[0-9]+|(?:[0-9]+\\.[0-9]*|\\.[0-9]+)(?:[eE][+-]?[0-9]+)?)";
const NUMBER: &str =
    "(?:[0-9]+(?:[eE][+-]?[0-9]+)?|(?:[0-9]+\\.[0-9]*|\\.[0-9]+)(?:[eE][+-]?[0-9]+)?)";
const SIGNED_FLOAT: &str =
    "[+-]?(?:[0-9]+[eE][+-]?[0-9]+|(?:[0-9]+\\.[0-9]*|\\.[0-9]+)(?:[eE][+-]?[0-9]+)?)";
const SIGNED_NUMBER: &str =
    "[+-]?(?:[0-9]+(?:[eE][+-]?[0-9]+)?|(?:[0-9]+\\.[0-9]*|\\.[0-9]+)(?:[eE][+-]?[0-9]+)?)";
/// Terminals of Lark's library.
const COMMON: &[(&str, &str)] = &[
    ("CNAME", "[a-zA-Z_][a-zA-Z0-9_]*"),
    ("CR", "\\r"),
    ("DECIMAL", "(?:[0-9]+\\.[0-9]*|\\.[0-9]+)"),
    ("DIGIT", "[0-9]"),
    ("FLOAT", FLOAT),
    ("HEXDIGIT", "[a-fA-F0-9]"),
    ("INT", "[0-9]+"),
    ("LCASE_LETTER", "[a-z]"),
    ("LETTER", "[a-zA-Z]"),
    ("LF", "\\n"),
    ("NEWLINE", "(?:\\r?\\n)+"),
    ("NUMBER", NUMBER),
    ("SIGNED_FLOAT", SIGNED_FLOAT),
    ("SIGNED_INT", "[+-]?[0-9]+"),
    ("SIGNED_NUMBER", SIGNED_NUMBER),
    ("UCASE_LETTER", "[A-Z]"),
    ("WORD", "[a-zA-Z]+"),
    ("WS", "[ \\t\\f\\r\\n]+"),
    ("WS_INLINE", "[ \\t]+"),
];
/// Regular expression syntax that Python supports and the grammar engine does not.
const UNSUPPORTED: &[&str] = &["(?=", "(?!", "(?<", "(?P", "(?#", "(?("];

/// Parser of one grammar. Each method returns `None` for unsupported syntax.
pub(super) struct LarkParser<'a> {
    text: &'a str,
    at: usize,
    names: HashMap<&'a str, usize>,
    /// For each rule whose name has been read so far, its body; `None` = the rule is not defined yet.
    bodies: Vec<Option<EbnfNode>>,
}

impl<'a> LarkParser<'a> {
    pub(super) fn new(text: &'a str) -> Self {
        Self { text, at: 0, names: HashMap::new(), bodies: Vec::new() }
    }

    pub(super) fn grammar(mut self) -> Option<EbnfGrammar> {
        self.skip_lines();
        while self.at < self.text.len() {
            if self.takes("%import") {
                self.import()?;
            } else {
                self.definition()?;
            }
            let rest = self.rest();
            if !rest.is_empty() && !rest.starts_with('\n') {
                return None;
            }
            self.skip_lines();
        }
        let root = *self.names.get(START)?;
        Some(EbnfGrammar { bodies: self.bodies.into_iter().collect::<Option<_>>()?, root })
    }

    /// Parses `common.NAME`.
    fn import(&mut self) -> Option<()> {
        self.skip_space();
        self.takes("common.").then_some(())?;
        let name = self.name()?;
        let (_, regex) = COMMON.iter().find(|(common, _)| *common == name)?;
        self.skip_space();
        self.define(name, EbnfNode::Regex((*regex).to_owned()))
    }

    fn definition(&mut self) -> Option<()> {
        let _ = self.takes("?") || self.takes("!");
        let name = self.name()?;
        if self.takes(".") {
            self.count()?; // Priorities do not change the language of a grammar.
        }
        self.skip_space();
        self.takes(":").then_some(())?;
        let body = self.choice(0)?;
        self.define(name, body)
    }

    fn define(&mut self, name: &'a str, body: EbnfNode) -> Option<()> {
        let index = self.rule(name)?;
        self.bodies[index].replace(body).is_none().then_some(())
    }

    fn rule(&mut self, name: &'a str) -> Option<usize> {
        let next = self.bodies.len();
        let index = *self.names.entry(name).or_insert(next);
        if index == next {
            self.bodies.push(None);
        }
        (self.bodies.len() <= RULES_MAX).then_some(index)
    }

    /// Parses alternatives. A line may begin with `|`.
    fn choice(&mut self, depth: usize) -> Option<EbnfNode> {
        if depth > DEPTH_MAX {
            return None;
        }
        let mut alternatives = vec![self.sequence(depth)?];
        loop {
            let end = self.at;
            self.skip_lines();
            if !self.takes("|") {
                self.at = end;
                return Some(single(alternatives, EbnfNode::Choice));
            }
            alternatives.push(self.sequence(depth)?);
        }
    }

    fn sequence(&mut self, depth: usize) -> Option<EbnfNode> {
        let mut parts = Vec::new();
        loop {
            if depth > 0 {
                self.skip_lines();
            } else {
                self.skip_space();
            }
            match self.peek() {
                None | Some('|' | ')' | ']' | '\n') => break,
                Some('-') if self.takes("->") => {
                    self.skip_space();
                    self.name()?;
                }
                Some(_) => {
                    let part = self.part(depth)?;
                    parts.push(self.repeated(part)?);
                }
            }
        }
        if parts.is_empty() {
            return Some(EbnfNode::Text(String::new()));
        }
        Some(single(parts, EbnfNode::Sequence))
    }

    fn part(&mut self, depth: usize) -> Option<EbnfNode> {
        match self.peek()? {
            '"' => self.quoted(),
            '/' => self.regex(),
            '(' => {
                self.at += 1;
                let group = self.choice(depth + 1)?;
                self.takes(")").then_some(group)
            }
            '[' => {
                self.at += 1;
                let node = self.choice(depth + 1)?;
                let optional = EbnfRepeat { node, min: 0, max: Some(1) };
                self.takes("]").then(|| EbnfNode::Repeat(Box::new(optional)))
            }
            _ => {
                let name = self.name()?;
                self.rule(name).map(EbnfNode::Rule)
            }
        }
    }

    fn repeated(&mut self, node: EbnfNode) -> Option<EbnfNode> {
        let (min, max) = match self.peek() {
            Some('*') => (0, None),
            Some('+') => (1, None),
            Some('?') => (0, Some(1)),
            Some('~') => {
                self.at += 1;
                self.skip_space();
                let min = self.count()?;
                let max = if self.takes("..") { self.count()? } else { min };
                let is_valid = min <= max && max <= REPEAT_MAX;
                let repeat = EbnfRepeat { node, min, max: Some(max) };
                return is_valid.then(|| EbnfNode::Repeat(Box::new(repeat)));
            }
            _ => return Some(node),
        };
        self.at += 1;
        Some(EbnfNode::Repeat(Box::new(EbnfRepeat { node, min, max })))
    }

    /// Parses a string, or a character range such as `"a".."z"`.
    fn quoted(&mut self) -> Option<EbnfNode> {
        let first = self.string()?;
        if !self.takes("..") {
            let ignores_case = self.takes("i");
            let regex =
                || Some(EbnfNode::Regex(format!("(?i:{})", super::pattern::escaped(&first)?)));
            return if ignores_case { regex() } else { Some(EbnfNode::Text(first)) };
        }
        let last = self.string()?;
        let is_one = |text: &str| text.chars().count() == 1;
        if !is_one(&first) || !is_one(&last) || first > last {
            return None;
        }
        let (first, last) = (super::pattern::escaped(&first)?, super::pattern::escaped(&last)?);
        Some(EbnfNode::Regex(format!("[{first}-{last}]")))
    }

    fn string(&mut self) -> Option<String> {
        self.takes("\"").then_some(())?;
        let mut text = String::new();
        loop {
            match self.next()? {
                '"' => return Some(text),
                '\\' => text.push(match self.next()? {
                    'n' => '\n',
                    'r' => '\r',
                    't' => '\t',
                    c if c.is_ascii_punctuation() => c,
                    _ => return None,
                }),
                '\n' => return None,
                c => text.push(c),
            }
        }
    }

    fn regex(&mut self) -> Option<EbnfNode> {
        self.at += 1;
        let mut regex = String::new();
        loop {
            match self.next()? {
                '/' => break,
                '\\' => match self.next()? {
                    '/' => regex.push('/'),
                    c if c.is_ascii_digit() => return None, // A reference to a group.
                    c => regex.extend(['\\', c]),
                },
                '\n' => return None,
                c => regex.push(c),
            }
        }
        let rest = self.rest();
        let flags = &rest[..rest.find(|c| !"imsx".contains(c)).unwrap_or(rest.len())];
        self.at += flags.len();
        if UNSUPPORTED.iter().any(|part| regex.contains(part)) {
            return None;
        }
        Some(EbnfNode::Regex(format!("(?{flags}:{regex})")))
    }

    fn rest(&self) -> &'a str {
        &self.text[self.at..]
    }

    fn peek(&self) -> Option<char> {
        self.rest().chars().next()
    }

    fn next(&mut self) -> Option<char> {
        let c = self.peek()?;
        self.at += c.len_utf8();
        Some(c)
    }

    fn takes(&mut self, text: &str) -> bool {
        let is_next = self.rest().starts_with(text);
        self.at += if is_next { text.len() } else { 0 };
        is_next
    }

    fn name(&mut self) -> Option<&'a str> {
        let rest = self.rest();
        let is_part = |c: char| c.is_ascii_alphanumeric() || c == '_';
        let name = &rest[..rest.find(|c| !is_part(c)).unwrap_or(rest.len())];
        self.at += name.len();
        (!name.is_empty() && !name.starts_with(|c: char| c.is_ascii_digit())).then_some(name)
    }

    fn count(&mut self) -> Option<u32> {
        let rest = self.rest();
        let digits = &rest[..rest.find(|c: char| !c.is_ascii_digit()).unwrap_or(rest.len())];
        self.at += digits.len();
        digits.parse().ok()
    }

    /// Skips spaces and comments within a line.
    fn skip_space(&mut self) {
        let rest = self.rest().trim_start_matches([' ', '\t', '\r']);
        self.at = self.text.len() - rest.len();
        if rest.starts_with("//") {
            self.at += rest.find('\n').unwrap_or(rest.len());
        }
    }

    /// Skips spaces, comments and line breaks.
    fn skip_lines(&mut self) {
        self.skip_space();
        while self.takes("\n") {
            self.skip_space();
        }
    }
}
