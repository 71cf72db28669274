//! Splits a template into tokens as Jinja2's lexer does with `trim_blocks` and `lstrip_blocks`: the first line
//! break after a block is dropped, and so is the white space from the start of a line to a block.

use super::error::{JinjaError, JinjaResult};
use super::escapes::unescape;
use super::literals::{float_length, integer, name_length, string_length};
use super::python_text::is_space;
use super::token::{JinjaToken, JinjaTokenValue};
use std::sync::Arc;

/// Operators, longer ones first.
const OPERATORS: [&str; 26] = [
    "//", "**", "==", "!=", ">=", "<=", "+", "-", "/", "*", "%", "~", "[", "]", "(", ")", "{", "}",
    ">", "<", "=", ".", ":", "|", ",", ";",
];

/// Splits the template `source` into tokens; the last one is `JinjaTokenValue::End`.
///
/// Errors: a tag is not closed, or contains a character or a literal that is invalid.
pub(crate) fn tokenize(source: &str) -> JinjaResult<Vec<JinjaToken>> {
    let mut text = source.replace("\r\n", "\n").replace('\r', "\n");
    if text.ends_with('\n') {
        text.pop(); // `keep_trailing_newline` is false.
    }
    let mut lexer =
        TemplateLexer { source: &text, at: 0, line: 1, line_starting: true, tokens: Vec::new() };
    while lexer.at < text.len() {
        lexer.data()?;
    }
    lexer.push(JinjaTokenValue::End);
    Ok(lexer.tokens)
}

/// Kind of a tag, determined by its opening delimiter in the template data.
#[derive(Clone, Copy, PartialEq, Eq)]
enum TagKind {
    Comment,
    Block,
    Variable,
    Raw,
}

/// Splits the source of a template into tokens.
struct TemplateLexer<'a> {
    source: &'a str,
    at: usize,
    line: u32,
    /// Whether the previous token ends with a line break.
    line_starting: bool,
    tokens: Vec<JinjaToken>,
}

impl<'a> TemplateLexer<'a> {
    fn rest(&self) -> &'a str {
        &self.source[self.at..]
    }

    fn push(&mut self, kind: JinjaTokenValue) {
        self.tokens.push(JinjaToken { kind, line: self.line });
    }

    /// Adds a token for template data, unless the data is empty.
    fn push_data(&mut self, text: &str) {
        if !text.is_empty() {
            self.push(JinjaTokenValue::Data(Arc::from(text)));
        }
    }

    /// Adds the token at the current position and advances by its length in bytes.
    fn read_token(&mut self, kind: JinjaTokenValue, length: usize) {
        self.push(kind);
        self.advance(length);
    }

    /// Advances the position by `bytes` bytes and adds the line breaks in them to the line number.
    fn advance(&mut self, bytes: usize) {
        let passed = &self.rest()[..bytes];
        self.line += passed.matches('\n').count() as u32;
        if bytes > 0 {
            self.line_starting = passed.ends_with('\n');
        }
        self.at += bytes;
    }

    /// Reads template data up to the next tag, and the tag.
    fn data(&mut self) -> JinjaResult<()> {
        let rest = self.rest();
        let Some((start, kind)) = next_tag(rest) else {
            self.read_token(JinjaTokenValue::Data(Arc::from(rest)), rest.len());
            return Ok(());
        };
        let sign = rest[start + 2..].chars().next();
        let text = kept_data(&rest[..start], sign, kind == TagKind::Variable, self.line_starting);
        self.push_data(text);
        self.advance(start);
        match kind {
            TagKind::Raw => self.raw(),
            TagKind::Comment => {
                self.advance(2 + usize::from(matches!(sign, Some('-' | '+'))));
                self.comment()
            }
            TagKind::Block | TagKind::Variable => {
                let is_block = kind == TagKind::Block;
                self.push(if is_block {
                    JinjaTokenValue::BlockBegin
                } else {
                    JinjaTokenValue::VariableBegin
                });
                self.advance(2 + usize::from(matches!(sign, Some('-' | '+'))));
                self.tag(is_block)
            }
        }
    }

    fn comment(&mut self) -> JinjaResult<()> {
        let rest = self.rest();
        if rest.is_empty() {
            return Ok(());
        }
        let Some(close) = rest.find("#}") else {
            return Err(JinjaError::syntax("Missing end of comment tag", self.line));
        };
        let mut end = close + 2;
        if rest[..close].ends_with('-') {
            end += space_length(&rest[end..]);
        } else if !rest[..close].ends_with('+') && rest[end..].starts_with('\n') {
            end += 1;
        }
        self.advance(end);
        Ok(())
    }

    /// Reads `{% raw %}` with its text and `{% endraw %}`.
    fn raw(&mut self) -> JinjaResult<()> {
        let begin = raw_tag_length(self.rest(), "raw", false).unwrap_or(0);
        self.advance(begin);
        let rest = self.rest();
        let mut from = 0;
        while let Some(found) = rest[from..].find("{%") {
            let start = from + found;
            if let Some(length) = raw_tag_length(&rest[start..], "endraw", true) {
                let sign = rest[start + 2..].chars().next();
                let text = kept_data(&rest[..start], sign, false, self.line_starting);
                self.push_data(text);
                self.advance(start + length);
                return Ok(());
            }
            from = start + 2;
        }
        if rest.is_empty() {
            return Ok(());
        }
        Err(JinjaError::syntax("Missing end of raw directive", self.line))
    }

    /// Reads the tokens of a tag up to and including its end.
    fn tag(&mut self, is_block: bool) -> JinjaResult<()> {
        let mut brackets = Vec::new();
        while !self.rest().is_empty() {
            if brackets.is_empty()
                && let Some(length) = tag_end_length(self.rest(), is_block)
            {
                self.push(if is_block {
                    JinjaTokenValue::BlockEnd
                } else {
                    JinjaTokenValue::VariableEnd
                });
                self.advance(length);
                return Ok(());
            }
            self.tag_token(&mut brackets)?;
        }
        Ok(())
    }

    fn tag_token(&mut self, brackets: &mut Vec<&'static str>) -> JinjaResult<()> {
        let rest = self.rest();
        let space = space_length(rest);
        if space > 0 {
            self.advance(space);
            return Ok(());
        }
        if let Some(length) = float_length(rest).filter(|_| !self.source[..self.at].ends_with('.'))
        {
            let number = rest[..length].replace('_', "").parse();
            self.read_token(JinjaTokenValue::Float(number.unwrap_or(f64::INFINITY)), length);
        } else if let Some((digits, length)) = integer(rest) {
            self.read_token(JinjaTokenValue::Integer(digits), length);
        } else if let Some(length) = name_length(rest) {
            let name = &rest[..length];
            if name.starts_with(|c: char| !c.is_alphabetic() && c != '_') {
                return Err(JinjaError::syntax("Invalid character in identifier", self.line));
            }
            self.read_token(JinjaTokenValue::Name(Arc::from(name)), length);
        } else if let Some(length) = string_length(rest) {
            let text = unescape(&rest[1..length - 1])
                .map_err(|message| JinjaError::syntax(message, self.line))?;
            self.read_token(JinjaTokenValue::Text(text), length);
        } else {
            self.operator(brackets)?;
        }
        Ok(())
    }

    fn operator(&mut self, brackets: &mut Vec<&'static str>) -> JinjaResult<()> {
        let rest = self.rest();
        let Some(operator) = OPERATORS.into_iter().find(|operator| rest.starts_with(operator))
        else {
            let found = rest.chars().next().unwrap_or_default();
            let message = format!("unexpected char {found:?} at {}", self.at);
            return Err(JinjaError::syntax(message, self.line));
        };
        match operator {
            "{" => brackets.push("}"),
            "(" => brackets.push(")"),
            "[" => brackets.push("]"),
            "}" | ")" | "]" => match brackets.pop() {
                Some(expected) if expected == operator => {}
                Some(expected) => {
                    let message = format!("unexpected '{operator}', expected '{expected}'");
                    return Err(JinjaError::syntax(message, self.line));
                }
                None => {
                    return Err(JinjaError::syntax(format!("unexpected '{operator}'"), self.line));
                }
            },
            _ => {}
        }
        self.read_token(JinjaTokenValue::Operator(operator), operator.len());
        Ok(())
    }
}

/// Position and kind of the first tag in template data.
fn next_tag(text: &str) -> Option<(usize, TagKind)> {
    let mut from = 0;
    loop {
        let at = from + text[from..].find('{')?;
        match text.as_bytes().get(at + 1) {
            Some(b'%') if raw_tag_length(&text[at..], "raw", false).is_some() => {
                return Some((at, TagKind::Raw));
            }
            Some(b'%') => return Some((at, TagKind::Block)),
            Some(b'#') => return Some((at, TagKind::Comment)),
            Some(b'{') => return Some((at, TagKind::Variable)),
            _ => from = at + 1,
        }
    }
}

/// Returns the template data before a tag, without the white space that the tag strips.
fn kept_data(text: &str, sign: Option<char>, is_variable: bool, line_starting: bool) -> &str {
    match sign {
        Some('-') => text.trim_end_matches(is_space),
        Some('+') => text,
        _ if is_variable => text,
        _ => {
            let line = text.rfind('\n').map_or(0, |at| at + 1);
            let is_blank = text[line..].chars().all(is_space);
            if is_blank && (line > 0 || line_starting) { &text[..line] } else { text }
        }
    }
}

/// Length of the white space at the start of `text`.
fn space_length(text: &str) -> usize {
    text.len() - text.trim_start_matches(is_space).len()
}

/// Returns the length of the tag `{% word %}` at the start of `text`, including the white space that its end
/// strips.
fn raw_tag_length(text: &str, word: &str, trims_line: bool) -> Option<usize> {
    let inner = text.strip_prefix("{%")?;
    let inner = inner.strip_prefix(['-', '+']).unwrap_or(inner).trim_start_matches(is_space);
    let inner = inner.strip_prefix(word)?.trim_start_matches(is_space);
    let end = if let Some(end) = inner.strip_prefix('-') {
        end.strip_prefix("%}")?.trim_start_matches(is_space)
    } else if let Some(end) = inner.strip_prefix('+').filter(|_| trims_line) {
        end.strip_prefix("%}")?
    } else {
        let end = inner.strip_prefix("%}")?;
        if trims_line { end.strip_prefix('\n').unwrap_or(end) } else { end }
    };
    Some(text.len() - end.len())
}

/// Returns the length of the end of a tag at the start of `text`, including the white space that it strips.
fn tag_end_length(text: &str, is_block: bool) -> Option<usize> {
    let close = if is_block { "%}" } else { "}}" };
    if let Some(rest) = text.strip_prefix('-')
        && let Some(rest) = rest.strip_prefix(close)
    {
        return Some(3 + space_length(rest));
    }
    if is_block && text.strip_prefix('+').is_some_and(|rest| rest.starts_with(close)) {
        return Some(3);
    }
    let rest = text.strip_prefix(close)?;
    Some(2 + usize::from(is_block && rest.starts_with('\n')))
}
