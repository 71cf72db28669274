//! Parser for EBNF grammars.

use super::{
    DEFINES, DEPTH_MAX, EbnfError, EbnfGrammar, EbnfNode, EbnfRepeat, OPERATORS_MAX, REPEAT_MAX,
    ROOT, RULES_MAX,
};
use std::collections::HashMap;
use std::fmt::Write as _;

/// Parser of one grammar.
pub(super) struct EbnfParser<'a> {
    text: &'a str,
    at: usize,
    names: HashMap<&'a str, usize>,
    /// For each rule whose name has been read so far, its body; `None` = the rule is not defined yet.
    bodies: Vec<Option<EbnfNode>>,
}

/// Parsed element of a rule body, or the reason why it cannot be converted.
type EbnfNodeResult = Result<EbnfNode, EbnfError>;

/// Whether a character may occur in a rule name.
pub(super) fn is_name_part(c: char) -> bool {
    c.is_ascii_alphanumeric() || matches!(c, '_' | '-' | '.')
}

impl<'a> EbnfParser<'a> {
    pub(super) fn new(text: &'a str) -> Self {
        Self { text, at: 0, names: HashMap::new(), bodies: Vec::new() }
    }

    /// Parses the grammar.
    ///
    /// Errors: a message and the line of the error.
    pub(super) fn grammar(mut self) -> Result<EbnfGrammar, EbnfError> {
        self.skip_space();
        while self.at < self.text.len() {
            let name = self.name().ok_or_else(|| self.error("expected the name of a rule"))?;
            self.skip_space();
            if !self.takes(DEFINES) {
                return Err(self.error("expected ::="));
            }
            let index = self.rule(name)?;
            let body = self.choice(0)?;
            if self.bodies[index].replace(body).is_some() {
                return Err(self.error(&format!("the rule {name} is defined twice")));
            }
        }
        let Some(&root) = self.names.get(ROOT) else {
            return Err(self.error("the rule root is missing"));
        };
        let undefined = self.names.iter().filter(|(_, index)| self.bodies[**index].is_none());
        if let Some(name) = undefined.map(|(name, _)| *name).min() {
            return Err(self.error(&format!("the rule {name} is not defined")));
        }
        Ok(EbnfGrammar { bodies: self.bodies.into_iter().flatten().collect(), root })
    }

    fn error(&self, message: &str) -> EbnfError {
        let line = self.text[..self.at].matches('\n').count() + 1;
        EbnfError { message: message.to_owned(), line }
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

    /// Skips whitespace and comments.
    fn skip_space(&mut self) {
        loop {
            let rest = self.rest().trim_start();
            self.at = self.text.len() - rest.len();
            if !rest.starts_with('#') {
                return;
            }
            self.at += rest.find('\n').unwrap_or(rest.len());
        }
    }

    fn name(&mut self) -> Option<&'a str> {
        let rest = self.rest();
        let len = rest.find(|c| !is_name_part(c)).unwrap_or(rest.len());
        self.at += len;
        (len > 0).then(|| &rest[..len])
    }

    /// Returns the index of the rule `name`; a new name gets the next index.
    fn rule(&mut self, name: &'a str) -> Result<usize, EbnfError> {
        let next = self.bodies.len();
        let index = *self.names.entry(name).or_insert(next);
        if index == next {
            self.bodies.push(None);
        }
        if self.bodies.len() > RULES_MAX {
            return Err(self.error(&format!("more than {RULES_MAX} rules")));
        }
        Ok(index)
    }

    fn choice(&mut self, depth: usize) -> EbnfNodeResult {
        if depth > DEPTH_MAX {
            return Err(self.error(&format!("more than {DEPTH_MAX} nested groups")));
        }
        let mut alternatives = vec![self.sequence(depth)?];
        while self.takes("|") {
            alternatives.push(self.sequence(depth)?);
        }
        Ok(single(alternatives, EbnfNode::Choice))
    }

    fn sequence(&mut self, depth: usize) -> EbnfNodeResult {
        let mut parts = Vec::new();
        loop {
            self.skip_space();
            if self.begins_rule() {
                break;
            }
            let Some(part) = self.part(depth)? else { break };
            parts.push(self.repeated(part)?);
        }
        if parts.is_empty() {
            return Ok(EbnfNode::Text(String::new()));
        }
        Ok(single(parts, EbnfNode::Sequence))
    }

    /// Whether a rule definition begins at the current position.
    fn begins_rule(&self) -> bool {
        let rest = self.rest();
        if rest.starts_with('.') {
            return false; // Any character; scanning a run of them once per dot would be quadratic.
        }
        let after = rest.trim_start_matches(is_name_part);
        after.len() < rest.len() && after.trim_start().starts_with(DEFINES)
    }

    /// Parses one element of a sequence (string, character class, rule name or group) without its
    /// repetition operators; `None` at the end of the sequence.
    fn part(&mut self, depth: usize) -> Result<Option<EbnfNode>, EbnfError> {
        Ok(Some(match self.peek() {
            None | Some('|' | ')') => return Ok(None),
            Some('"') => self.quoted()?,
            Some('[') => self.class()?,
            Some('.') => {
                self.next();
                EbnfNode::Regex("(?s:.)".to_owned())
            }
            Some('(') => {
                self.next();
                let group = self.choice(depth + 1)?;
                if !self.takes(")") {
                    return Err(self.error("expected )"));
                }
                group
            }
            Some(c) => match self.name() {
                Some(name) => EbnfNode::Rule(self.rule(name)?),
                None => return Err(self.error(&format!("unexpected {c:?}"))),
            },
        }))
    }

    fn repeated(&mut self, node: EbnfNode) -> EbnfNodeResult {
        let (mut node, mut operators) = (node, 0);
        loop {
            if matches!(self.peek(), Some('*' | '+' | '?' | '{')) {
                operators += 1;
            }
            if operators > OPERATORS_MAX {
                let message = format!("more than {OPERATORS_MAX} repetition operators of one part");
                return Err(self.error(&message));
            }
            let (min, max) = match self.peek() {
                Some('*') => (0, None),
                Some('+') => (1, None),
                Some('?') => (0, Some(1)),
                Some('{') => {
                    self.next();
                    node = self.counted(node)?;
                    continue;
                }
                _ => return Ok(node),
            };
            self.next();
            node = EbnfNode::Repeat(Box::new(EbnfRepeat { node, min, max }));
        }
    }

    /// Parses the rest of `{min}`, `{min,}` or `{min,max}` after the opening brace; `node` is the repeated
    /// element.
    fn counted(&mut self, node: EbnfNode) -> EbnfNodeResult {
        let min = self.count()?.ok_or_else(|| self.error("expected a number"))?;
        self.skip_space();
        let max = if self.takes(",") { self.count()? } else { Some(min) };
        self.skip_space();
        if !self.takes("}") {
            return Err(self.error("expected }"));
        }
        if max.is_some_and(|max| max < min) {
            return Err(self.error("the second number is less than the first one"));
        }
        Ok(EbnfNode::Repeat(Box::new(EbnfRepeat { node, min, max })))
    }

    fn count(&mut self) -> Result<Option<u32>, EbnfError> {
        self.skip_space();
        let rest = self.rest();
        let digits = &rest[..rest.find(|c: char| !c.is_ascii_digit()).unwrap_or(rest.len())];
        self.at += digits.len();
        match digits.parse() {
            _ if digits.is_empty() => Ok(None),
            Ok(count) if count <= REPEAT_MAX => Ok(Some(count)),
            _ => Err(self.error(&format!("at most {REPEAT_MAX} repetitions"))),
        }
    }

    fn quoted(&mut self) -> EbnfNodeResult {
        self.next();
        let mut text = String::new();
        loop {
            match self.next() {
                Some('"') => return Ok(EbnfNode::Text(text)),
                Some('\\') => text.push(self.escape()?),
                Some(c) if c != '\n' => text.push(c),
                _ => return Err(self.error("expected \" at the end of a string")),
            }
        }
    }

    /// Parses a character class.
    fn class(&mut self) -> EbnfNodeResult {
        self.next();
        let mut class = String::from(if self.takes("^") { "[^" } else { "[" });
        let start = class.len();
        while !self.takes("]") {
            let first = self.class_character()?;
            let last = match self.rest().strip_prefix('-') {
                Some(rest) if !rest.starts_with(']') => {
                    self.next();
                    self.class_character()?
                }
                _ => first,
            };
            if last < first {
                return Err(self.error("the range of characters is empty"));
            }
            // Writing to a string cannot fail, so the result is ignored.
            let _ = write!(class, "\\x{{{:x}}}-\\x{{{:x}}}", u32::from(first), u32::from(last));
        }
        if class.len() == start {
            return Err(self.error("the class of characters is empty"));
        }
        Ok(EbnfNode::Regex(class + "]"))
    }

    fn class_character(&mut self) -> Result<char, EbnfError> {
        match self.next() {
            Some('\\') => self.escape(),
            Some(c) => Ok(c),
            None => Err(self.error("expected ] at the end of a class")),
        }
    }

    /// Parses an escape sequence after its backslash.
    fn escape(&mut self) -> Result<char, EbnfError> {
        let digits = match self.next() {
            Some('n') => return Ok('\n'),
            Some('r') => return Ok('\r'),
            Some('t') => return Ok('\t'),
            Some('x') => 2,
            Some('u') => 4,
            Some('U') => 8,
            Some(c) if c.is_ascii_punctuation() => return Ok(c),
            _ => return Err(self.error("unknown escape")),
        };
        let hex = self.rest().get(..digits).unwrap_or_default();
        let code = u32::from_str_radix(hex, 16).ok().filter(|_| hex.len() == digits);
        let c = code.and_then(char::from_u32).ok_or_else(|| self.error("unknown escape"))?;
        self.at += digits;
        Ok(c)
    }
}

/// Returns the node itself if there is only one, otherwise all nodes combined by `combine`.
pub(super) fn single(
    mut nodes: Vec<EbnfNode>,
    combine: impl Fn(Vec<EbnfNode>) -> EbnfNode,
) -> EbnfNode {
    match nodes.pop() {
        Some(only) if nodes.is_empty() => only,
        last => combine(nodes.into_iter().chain(last).collect()),
    }
}
