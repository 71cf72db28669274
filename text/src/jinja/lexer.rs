//! Splits a template into tokens as Jinja2's lexer does with `trim_blocks` and `lstrip_blocks`: the first line
//! break after a block is dropped, and so is the white space from the start of a line to a block.

use super::error::{JinjaError, JinjaResult};
use super::escapes::unescape;
use super::python_text::is_space;
use super::token::{JinjaToken, TokenKind};
use std::sync::Arc;

/// Operators, longer ones first.
const OPERATORS: [&str; 26] = [
    "//", "**", "==", "!=", ">=", "<=", "+", "-", "/", "*", "%", "~", "[", "]", "(", ")", "{", "}",
    ">", "<", "=", ".", ":", "|", ",", ";",
];

/// Splits the template `source` into tokens; the last one is `TokenKind::End`.
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
    lexer.push(TokenKind::End);
    Ok(lexer.tokens)
}

/// Kind of a tag that begins in template data.
#[derive(Clone, Copy, PartialEq, Eq)]
enum TagKind {
    Comment,
    Block,
    Variable,
    Raw,
}

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

    fn push(&mut self, kind: TokenKind) {
        self.tokens.push(JinjaToken { kind, line: self.line });
    }

    /// Moves past `bytes` bytes, and counts their lines.
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
            self.push(TokenKind::Data(Arc::from(rest)));
            self.advance(rest.len());
            return Ok(());
        };
        let sign = rest[start + 2..].chars().next();
        let text = kept_data(&rest[..start], sign, kind == TagKind::Variable, self.line_starting);
        if !text.is_empty() {
            self.push(TokenKind::Data(Arc::from(text)));
        }
        self.advance(start);
        match kind {
            TagKind::Raw => self.raw(),
            TagKind::Comment => {
                self.advance(2 + usize::from(matches!(sign, Some('-' | '+'))));
                self.comment()
            }
            TagKind::Block | TagKind::Variable => {
                let is_block = kind == TagKind::Block;
                self.push(if is_block { TokenKind::BlockBegin } else { TokenKind::VariableBegin });
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
                if !text.is_empty() {
                    self.push(TokenKind::Data(Arc::from(text)));
                }
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

    /// Reads the tokens of a tag and its end.
    fn tag(&mut self, is_block: bool) -> JinjaResult<()> {
        let mut brackets = Vec::new();
        while !self.rest().is_empty() {
            if brackets.is_empty()
                && let Some(length) = tag_end_length(self.rest(), is_block)
            {
                self.push(if is_block { TokenKind::BlockEnd } else { TokenKind::VariableEnd });
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
            self.push(TokenKind::Float(number.unwrap_or(f64::INFINITY)));
            self.advance(length);
        } else if let Some((digits, length)) = integer(rest) {
            self.push(TokenKind::Integer(digits));
            self.advance(length);
        } else if let Some(length) = name_length(rest) {
            let name = &rest[..length];
            if name.starts_with(|c: char| !c.is_alphabetic() && c != '_') {
                return Err(JinjaError::syntax("Invalid character in identifier", self.line));
            }
            self.push(TokenKind::Name(Arc::from(name)));
            self.advance(length);
        } else if let Some(length) = string_length(rest) {
            let text = unescape(&rest[1..length - 1])
                .map_err(|message| JinjaError::syntax(message, self.line))?;
            self.push(TokenKind::Text(text));
            self.advance(length);
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
        self.push(TokenKind::Operator(operator));
        self.advance(operator.len());
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

/// Template data before a tag, without the white space that the tag removes.
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

/// Length of the tag `{% word %}` at the start of `text`, with the white space that its end removes.
fn raw_tag_length(text: &str, word: &str, trims_line: bool) -> Option<usize> {
    let inner = text.strip_prefix("{%")?;
    let inner = inner.strip_prefix(['-', '+']).unwrap_or(inner).trim_start_matches(is_space);
    let inner = inner.strip_prefix(word)?.trim_start_matches(is_space);
    let end = match inner.strip_prefix('-') {
        Some(end) => end.strip_prefix("%}")?.trim_start_matches(is_space),
        None if !trims_line => inner.strip_prefix("%}")?,
        None => match inner.strip_prefix('+') {
            Some(end) => end.strip_prefix("%}")?,
            None => {
                let end = inner.strip_prefix("%}")?;
                end.strip_prefix('\n').unwrap_or(end)
            }
        },
    };
    Some(text.len() - end.len())
}

/// Length of the end of a tag at the start of `text`, with the white space that it removes.
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

/// Length of digits that may be separated by single underscores.
fn digits_length(text: &str, is_digit: impl Fn(u8) -> bool) -> usize {
    let bytes = text.as_bytes();
    let mut length = 0;
    while let Some(&byte) = bytes.get(length) {
        if is_digit(byte) {
            length += 1;
        } else if byte == b'_' && length > 0 && bytes.get(length + 1).is_some_and(|&b| is_digit(b))
        {
            length += 2;
        } else {
            break;
        }
    }
    length
}

/// Length of a floating-point literal at the start of `text`: digits with a fraction or an exponent.
fn float_length(text: &str) -> Option<usize> {
    let is_digit = |byte: u8| byte.is_ascii_digit();
    let mut length = digits_length(text, is_digit);
    if length == 0 {
        return None;
    }
    let mut is_float = false;
    if let Some(fraction) = text[length..].strip_prefix('.') {
        let digits = digits_length(fraction, is_digit);
        if digits > 0 {
            length += 1 + digits;
            is_float = true;
        }
    }
    if let Some(exponent) = text[length..].strip_prefix(['e', 'E']) {
        let unsigned = exponent.strip_prefix(['+', '-']).unwrap_or(exponent);
        let digits = digits_length(unsigned, is_digit);
        if digits > 0 {
            length += 1 + exponent.len() - unsigned.len() + digits;
            is_float = true;
        }
    }
    is_float.then_some(length)
}

/// Decimal digits and length of an integer literal at the start of `text`.
fn integer(text: &str) -> Option<(String, usize)> {
    let prefixed = |digits: &str, radix: u32| {
        let digits = digits.strip_prefix('_').unwrap_or(digits);
        let length = digits_length(digits, |byte| (byte as char).is_digit(radix));
        let number = num_bigint::BigInt::parse_bytes(&digits.as_bytes()[..length], radix)?;
        Some((number.to_string(), text.len() - digits.len() + length))
    };
    let radix = match text.as_bytes().get(..2).map(|prefix| [prefix[0], prefix[1] | 0x20]) {
        Some([b'0', b'b']) => prefixed(&text[2..], 2),
        Some([b'0', b'o']) => prefixed(&text[2..], 8),
        Some([b'0', b'x']) => prefixed(&text[2..], 16),
        _ => None,
    };
    if radix.is_some() {
        return radix;
    }
    let is_zero = text.starts_with('0');
    let length =
        digits_length(text, |byte| if is_zero { byte == b'0' } else { byte.is_ascii_digit() });
    (length > 0).then(|| (text[..length].replace('_', ""), length))
}

fn name_length(text: &str) -> Option<usize> {
    let length =
        text.len() - text.trim_start_matches(|c: char| c.is_alphanumeric() || c == '_').len();
    (length > 0).then_some(length)
}

/// Length of a string literal at the start of `text`, with its quotes; `None` if it is not closed.
fn string_length(text: &str) -> Option<usize> {
    let quote = text.chars().next().filter(|c| matches!(c, '\'' | '"'))?;
    let mut escaped = false;
    for (at, c) in text.char_indices().skip(1) {
        if escaped {
            escaped = false;
        } else if c == '\\' {
            escaped = true;
        } else if c == quote {
            return Some(at + 1);
        }
    }
    None
}
