//! Validates one JSON value character by character (RFC 8259). The memory use is one flag per open container.

/// Maximum nesting depth of objects and arrays, as in `serde_json`.
const DEPTH_MAX: usize = 127;

/// State of a JSON value after the next character.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(super) enum JsonScanStatus {
    /// The value continues.
    Continues,
    /// The value is complete with this character.
    Done,
    /// The value, a number, ended before this character.
    EndedBefore,
    /// The text is not valid JSON.
    Invalid,
}

#[derive(Debug, Clone, Copy, PartialEq, Eq)]
enum JsonScannerState {
    /// A value must follow. With `may_close` the array may also end here.
    Value {
        may_close: bool,
    },
    /// A key must follow. With `may_close` the object may also end here.
    Key {
        may_close: bool,
    },
    Colon,
    /// After a value inside an object or array: a comma or the closing bracket must follow.
    Next,
    Text {
        key: bool,
    },
    Escape {
        key: bool,
    },
    Hex {
        key: bool,
        left: u8,
    },
    /// Remaining characters of `true`, `false` or `null`.
    Word(&'static str),
    Minus,
    Zero,
    Int,
    Dot,
    Fraction,
    E,
    ESign,
    Exponent,
}

/// Scanner that validates one JSON value; keeps the state between two characters.
#[derive(Debug, Clone)]
pub(super) struct JsonScanner {
    state: JsonScannerState,
    /// Open containers, outermost first; true = object, false = array.
    open: Vec<bool>,
}

impl Default for JsonScanner {
    fn default() -> Self {
        Self { state: JsonScannerState::Value { may_close: false }, open: Vec::new() }
    }
}

impl JsonScanner {
    /// Validates the next character. Whitespace before the value is part of the value.
    pub(super) fn push(&mut self, c: char) -> JsonScanStatus {
        match self.state {
            JsonScannerState::Value { may_close } => self.value(c, may_close),
            JsonScannerState::Key { may_close } => match c {
                '"' => self.go(JsonScannerState::Text { key: true }),
                '}' if may_close => self.close(),
                _ => space(c),
            },
            JsonScannerState::Colon if c == ':' => {
                self.go(JsonScannerState::Value { may_close: false })
            }
            JsonScannerState::Next => self.next(c),
            JsonScannerState::Colon => space(c),
            JsonScannerState::Text { key } => self.text(c, key),
            JsonScannerState::Escape { key } => self.escaped(c, key),
            JsonScannerState::Hex { key, left } if c.is_ascii_hexdigit() => match left {
                1 => self.go(JsonScannerState::Text { key }),
                _ => self.go(JsonScannerState::Hex { key, left: left - 1 }),
            },
            JsonScannerState::Hex { .. } => JsonScanStatus::Invalid,
            JsonScannerState::Word(rest) => match rest.strip_prefix(c) {
                Some("") => self.ended(),
                Some(rest) => self.go(JsonScannerState::Word(rest)),
                None => JsonScanStatus::Invalid,
            },
            _ => self.in_number(c),
        }
    }

    /// Whether closing the open objects and arrays here would complete the value: the innermost container is
    /// empty, or its last value has ended.
    pub(super) fn may_close(&self) -> bool {
        match self.state {
            JsonScannerState::Value { may_close } | JsonScannerState::Key { may_close } => {
                may_close
            }
            JsonScannerState::Next => true,
            _ => false,
        }
    }

    /// Returns whether the current number may end here; `None` if the position is not inside a number.
    pub(super) fn number(&self) -> Option<bool> {
        match self.state {
            JsonScannerState::Zero
            | JsonScannerState::Int
            | JsonScannerState::Fraction
            | JsonScannerState::Exponent => Some(true),
            JsonScannerState::Minus
            | JsonScannerState::Dot
            | JsonScannerState::E
            | JsonScannerState::ESign => Some(false),
            _ => None,
        }
    }

    /// Returns the missing closing brackets of the open containers, innermost first.
    pub(super) fn closings(&self) -> impl Iterator<Item = char> {
        self.open.iter().rev().map(|object| if *object { '}' } else { ']' })
    }

    fn go(&mut self, state: JsonScannerState) -> JsonScanStatus {
        self.state = state;
        JsonScanStatus::Continues
    }

    fn value(&mut self, c: char, may_close: bool) -> JsonScanStatus {
        match c {
            '{' | '[' if self.open.len() == DEPTH_MAX => JsonScanStatus::Invalid,
            '{' => {
                self.open.push(true);
                self.go(JsonScannerState::Key { may_close: true })
            }
            '[' => {
                self.open.push(false);
                self.go(JsonScannerState::Value { may_close: true })
            }
            ']' if may_close => self.close(),
            '"' => self.go(JsonScannerState::Text { key: false }),
            't' => self.go(JsonScannerState::Word("rue")),
            'f' => self.go(JsonScannerState::Word("alse")),
            'n' => self.go(JsonScannerState::Word("ull")),
            '-' => self.go(JsonScannerState::Minus),
            '0' => self.go(JsonScannerState::Zero),
            '1'..='9' => self.go(JsonScannerState::Int),
            _ => space(c),
        }
    }

    fn next(&mut self, c: char) -> JsonScanStatus {
        match (c, self.open.last()) {
            (',', Some(true)) => self.go(JsonScannerState::Key { may_close: false }),
            (',', Some(false)) => self.go(JsonScannerState::Value { may_close: false }),
            ('}', Some(true)) | (']', Some(false)) => self.close(),
            _ => space(c),
        }
    }

    fn text(&mut self, c: char, key: bool) -> JsonScanStatus {
        match c {
            '"' if key => self.go(JsonScannerState::Colon),
            '"' => self.ended(),
            '\\' => self.go(JsonScannerState::Escape { key }),
            '\0'..='\x1f' => JsonScanStatus::Invalid,
            _ => JsonScanStatus::Continues,
        }
    }

    /// Processes the character after a backslash in a string.
    fn escaped(&mut self, c: char, key: bool) -> JsonScanStatus {
        match c {
            'u' => self.go(JsonScannerState::Hex { key, left: 4 }),
            '"' | '\\' | '/' | 'b' | 'f' | 'n' | 'r' | 't' => {
                self.go(JsonScannerState::Text { key })
            }
            _ => JsonScanStatus::Invalid,
        }
    }

    fn in_number(&mut self, c: char) -> JsonScanStatus {
        use JsonScannerState as State;
        let next = match (self.state, c) {
            (State::Minus, '0') => State::Zero,
            (State::Minus, '1'..='9') | (State::Int, '0'..='9') => State::Int,
            (State::Zero | State::Int, '.') => State::Dot,
            (State::Dot | State::Fraction, '0'..='9') => State::Fraction,
            (State::Zero | State::Int | State::Fraction, 'e' | 'E') => State::E,
            (State::E, '+' | '-') => State::ESign,
            (State::E | State::ESign | State::Exponent, '0'..='9') => State::Exponent,
            (State::Zero | State::Int | State::Fraction | State::Exponent, _) => {
                // A number ends at the first character that is not part of it.
                return match self.ended() {
                    JsonScanStatus::Done => JsonScanStatus::EndedBefore,
                    _ => self.next(c),
                };
            }
            _ => return JsonScanStatus::Invalid,
        };
        self.go(next)
    }

    fn close(&mut self) -> JsonScanStatus {
        self.open.pop();
        self.ended()
    }

    /// Updates the state after the end of a value: either the whole value or a value inside an object or
    /// array.
    fn ended(&mut self) -> JsonScanStatus {
        if self.open.is_empty() {
            return JsonScanStatus::Done;
        }
        self.go(JsonScannerState::Next)
    }
}

/// Accepts whitespace only.
fn space(c: char) -> JsonScanStatus {
    if is_space(c) { JsonScanStatus::Continues } else { JsonScanStatus::Invalid }
}

/// Whether `c` is JSON whitespace.
pub(super) fn is_space(c: char) -> bool {
    matches!(c, ' ' | '\t' | '\n' | '\r')
}

#[cfg(test)]
mod tests {
    use super::*;

    /// Scans `text` and returns the status after its last character; `Invalid` if the value ends earlier.
    fn scan(text: &str) -> JsonScanStatus {
        let mut json = JsonScanner::default();
        let mut last = JsonScanStatus::Continues;
        for c in text.chars() {
            if last != JsonScanStatus::Continues {
                return JsonScanStatus::Invalid;
            }
            last = json.push(c);
        }
        last
    }

    #[test]
    fn json_scanner_agrees_with_serde_json() {
        let whole = [
            r#"{"a": [1, -0.5e+3, {"b": null}], "c": "x\u00e9\"\n", "d": {}}"#,
            "[]",
            " [ true , false ]",
            r#""""#,
            "null",
        ];
        for text in whole {
            assert_eq!(scan(text), JsonScanStatus::Done, "{text}");
            assert!(serde_json::from_str::<serde_json::Value>(text).is_ok(), "{text}");
        }
        let bad = [
            "{a",
            "{\"a\" 1",
            "[1,]",
            "{\"a\":1,}",
            "01",
            "-x",
            "1.e",
            "\"\n",
            "\"\\x",
            "\"\\u00g",
            "tru ",
            "[1}",
            "{]",
            ",",
            "1e+-",
            "{\"a\":1]",
        ];
        for text in bad {
            assert!(
                matches!(scan(text), JsonScanStatus::Invalid | JsonScanStatus::EndedBefore),
                "{text}"
            );
            assert!(serde_json::from_str::<serde_json::Value>(text).is_err(), "{text}");
        }
        assert_eq!(scan("12 "), JsonScanStatus::EndedBefore);
        let deepest = "[".repeat(DEPTH_MAX) + &"]".repeat(DEPTH_MAX);
        assert_eq!(scan(&deepest), JsonScanStatus::Done);
        assert!(serde_json::from_str::<serde_json::Value>(&deepest).is_ok());
        assert_eq!(scan(&"[".repeat(DEPTH_MAX + 1)), JsonScanStatus::Invalid);
    }
}
