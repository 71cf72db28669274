//! Translates the text of a Python string literal to the text of a JSON string.

use super::json_escape::escape;

/// Parser of one Python string literal, whose opening quote has been read; translates it to JSON.
#[derive(Debug, Clone)]
pub(super) struct PythonStringParser {
    quote: char,
    escape: PythonEscape,
    /// Leading surrogate that has been read; the trailing surrogate must follow.
    high: Option<u32>,
}

#[derive(Debug, Clone, Copy)]
enum PythonEscape {
    None,
    /// After a backslash.
    Begun,
    /// Inside a hexadecimal escape of a character.
    Hex {
        left: u8,
        code: u32,
    },
    /// Inside an octal escape of a character.
    Octal {
        left: u8,
        code: u32,
    },
}

impl PythonStringParser {
    /// Creates a parser that starts after the opening quote `quote`.
    pub(super) fn new(quote: char) -> Self {
        Self { quote, escape: PythonEscape::None, high: None }
    }

    /// Processes the next character. Returns whether it ends the string; `None` if the character is invalid.
    pub(super) fn push(&mut self, c: char, out: &mut dyn FnMut(&str)) -> Option<bool> {
        match self.escape {
            PythonEscape::None if c == '\\' => self.escape = PythonEscape::Begun,
            PythonEscape::None if c == self.quote => {
                self.flush(out);
                out("\"");
                return Some(true);
            }
            PythonEscape::None => self.character(u32::from(c), out),
            PythonEscape::Begun => self.escaped(c, out),
            PythonEscape::Hex { left, code } => {
                let code = code << 4 | c.to_digit(16)?;
                self.escape = PythonEscape::Hex { left: left - 1, code };
                if left == 1 {
                    self.end_escape(code, out);
                }
            }
            PythonEscape::Octal { left, code } => match c.to_digit(8) {
                Some(digit) if left > 0 => {
                    self.escape = PythonEscape::Octal { left: left - 1, code: code << 3 | digit };
                }
                _ => {
                    self.end_escape(code, out);
                    return self.push(c, out);
                }
            },
        }
        Some(false)
    }

    /// Processes the character after a backslash.
    fn escaped(&mut self, c: char, out: &mut dyn FnMut(&str)) {
        self.escape = PythonEscape::None;
        let code = match c {
            'n' => '\n',
            't' => '\t',
            'r' => '\r',
            'a' => '\x07',
            'b' => '\x08',
            'f' => '\x0c',
            'v' => '\x0b',
            // An escaped line break continues the string on the next line.
            '\n' => return,
            'x' => return self.escape = PythonEscape::Hex { left: 2, code: 0 },
            'u' => return self.escape = PythonEscape::Hex { left: 4, code: 0 },
            'U' => return self.escape = PythonEscape::Hex { left: 8, code: 0 },
            '0'..='7' => {
                let code = c.to_digit(8).unwrap_or_default();
                return self.escape = PythonEscape::Octal { left: 2, code };
            }
            '\\' | '\'' | '"' | '/' => c,
            // Python keeps the backslash of an unknown escape sequence.
            other => {
                self.character(u32::from('\\'), out);
                other
            }
        };
        self.character(u32::from(code), out);
    }

    /// Ends a hexadecimal or octal escape and emits its character `code`.
    fn end_escape(&mut self, code: u32, out: &mut dyn FnMut(&str)) {
        self.escape = PythonEscape::None;
        self.character(code, out);
    }

    /// Emits the character `code`; surrogate pairs are combined.
    fn character(&mut self, code: u32, out: &mut dyn FnMut(&str)) {
        if let (Some(high), 0xdc00..=0xdfff) = (self.high, code) {
            self.high = None;
            return emit(0x1_0000 + ((high - 0xd800) << 10) + (code - 0xdc00), out);
        }
        self.flush(out);
        match code {
            0xd800..=0xdbff => self.high = Some(code),
            code => emit(code, out),
        }
    }

    /// Emits the replacement character for an unpaired leading surrogate.
    fn flush(&mut self, out: &mut dyn FnMut(&str)) {
        if self.high.take().is_some() {
            emit(0xfffd, out);
        }
    }
}

/// Emits a character in the form that JSON requires inside a string.
fn emit(code: u32, out: &mut dyn FnMut(&str)) {
    escape(char::from_u32(code).unwrap_or(char::REPLACEMENT_CHARACTER), out);
}
