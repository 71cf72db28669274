//! Checks one JSON value as its characters come (RFC 8259). Keeps a bit per open container.

/// Containers inside each other at most: as many as `serde_json` reads.
const DEPTH_MAX: usize = 127;

/// What a character did.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(super) enum Scan {
    /// The value goes on.
    More,
    /// The value ends with this character.
    Done,
    /// The value (a number) ended before this character, which is not part of it.
    Over,
    /// No JSON value goes on like this.
    Bad,
}

#[derive(Debug, Clone, Copy, PartialEq, Eq)]
enum State {
    /// Before a value; an array may also end here.
    Value {
        may_close: bool,
    },
    /// Before a key; the object may also end here.
    Key {
        may_close: bool,
    },
    Colon,
    /// Behind a value inside a container.
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
    /// The rest of `true`, `false` or `null`.
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

/// A value being read.
#[derive(Debug, Clone)]
pub(super) struct JsonScan {
    state: State,
    /// True = object.
    open: Vec<bool>,
}

impl Default for JsonScan {
    fn default() -> Self {
        Self { state: State::Value { may_close: false }, open: Vec::new() }
    }
}

impl JsonScan {
    /// Takes the next character. Whitespace before the value is part of it.
    pub(super) fn push(&mut self, c: char) -> Scan {
        match self.state {
            State::Value { may_close } => self.value(c, may_close),
            State::Key { may_close } => match c {
                '"' => self.go(State::Text { key: true }),
                '}' if may_close => self.close(),
                _ => space(c),
            },
            State::Colon if c == ':' => self.go(State::Value { may_close: false }),
            State::Next => self.next(c),
            State::Colon => space(c),
            State::Text { key } => self.text(c, key),
            State::Escape { key } => match c {
                'u' => self.go(State::Hex { key, left: 4 }),
                '"' | '\\' | '/' | 'b' | 'f' | 'n' | 'r' | 't' => self.go(State::Text { key }),
                _ => Scan::Bad,
            },
            State::Hex { key, left } if c.is_ascii_hexdigit() => match left {
                1 => self.go(State::Text { key }),
                _ => self.go(State::Hex { key, left: left - 1 }),
            },
            State::Hex { .. } => Scan::Bad,
            State::Word(rest) => match rest.strip_prefix(c) {
                Some("") => self.ended(),
                Some(rest) => self.go(State::Word(rest)),
                None => Scan::Bad,
            },
            _ => self.in_number(c),
        }
    }

    /// Whether nothing but the ends of containers is missing: one has just begun, or a value inside one has ended.
    pub(super) fn may_close(&self) -> bool {
        match self.state {
            State::Value { may_close } | State::Key { may_close } => may_close,
            State::Next => true,
            _ => false,
        }
    }

    /// Inside a number: whether it may end here.
    pub(super) fn number(&self) -> Option<bool> {
        match self.state {
            State::Zero | State::Int | State::Fraction | State::Exponent => Some(true),
            State::Minus | State::Dot | State::E | State::ESign => Some(false),
            _ => None,
        }
    }

    /// The ends of the containers that are open, innermost first.
    pub(super) fn closings(&self) -> impl Iterator<Item = char> {
        self.open.iter().rev().map(|object| if *object { '}' } else { ']' })
    }

    fn go(&mut self, state: State) -> Scan {
        self.state = state;
        Scan::More
    }

    fn value(&mut self, c: char, may_close: bool) -> Scan {
        match c {
            '{' | '[' if self.open.len() == DEPTH_MAX => Scan::Bad,
            '{' => {
                self.open.push(true);
                self.go(State::Key { may_close: true })
            }
            '[' => {
                self.open.push(false);
                self.go(State::Value { may_close: true })
            }
            ']' if may_close => self.close(),
            '"' => self.go(State::Text { key: false }),
            't' => self.go(State::Word("rue")),
            'f' => self.go(State::Word("alse")),
            'n' => self.go(State::Word("ull")),
            '-' => self.go(State::Minus),
            '0' => self.go(State::Zero),
            '1'..='9' => self.go(State::Int),
            _ => space(c),
        }
    }

    fn next(&mut self, c: char) -> Scan {
        match (c, self.open.last()) {
            (',', Some(true)) => self.go(State::Key { may_close: false }),
            (',', Some(false)) => self.go(State::Value { may_close: false }),
            ('}', Some(true)) | (']', Some(false)) => self.close(),
            _ => space(c),
        }
    }

    fn text(&mut self, c: char, key: bool) -> Scan {
        match c {
            '"' if key => self.go(State::Colon),
            '"' => self.ended(),
            '\\' => self.go(State::Escape { key }),
            '\0'..='\x1f' => Scan::Bad,
            _ => Scan::More,
        }
    }

    fn in_number(&mut self, c: char) -> Scan {
        let next = match (self.state, c) {
            (State::Minus, '0') => State::Zero,
            (State::Minus, '1'..='9') | (State::Int, '0'..='9') => State::Int,
            (State::Zero | State::Int, '.') => State::Dot,
            (State::Dot | State::Fraction, '0'..='9') => State::Fraction,
            (State::Zero | State::Int | State::Fraction, 'e' | 'E') => State::E,
            (State::E, '+' | '-') => State::ESign,
            (State::E | State::ESign | State::Exponent, '0'..='9') => State::Exponent,
            (State::Zero | State::Int | State::Fraction | State::Exponent, _) => {
                // A number ends where something else begins.
                return match self.ended() {
                    Scan::Done => Scan::Over,
                    _ => self.next(c),
                };
            }
            _ => return Scan::Bad,
        };
        self.go(next)
    }

    fn close(&mut self) -> Scan {
        self.open.pop();
        self.ended()
    }

    /// A value has ended: the whole one, or one inside a container.
    fn ended(&mut self) -> Scan {
        if self.open.is_empty() {
            return Scan::Done;
        }
        self.go(State::Next)
    }
}

/// Where nothing but whitespace may stand.
fn space(c: char) -> Scan {
    if is_space(c) { Scan::More } else { Scan::Bad }
}

/// Whitespace of JSON.
pub(super) fn is_space(c: char) -> bool {
    matches!(c, ' ' | '\t' | '\n' | '\r')
}

#[cfg(test)]
mod tests {
    use super::*;

    /// Whether `text` is one value, and what the last character did.
    fn scan(text: &str) -> Scan {
        let mut json = JsonScan::default();
        let mut last = Scan::More;
        for c in text.chars() {
            if last != Scan::More {
                return Scan::Bad;
            }
            last = json.push(c);
        }
        last
    }

    #[test]
    fn it_agrees_with_serde_json() {
        let whole = [
            r#"{"a": [1, -0.5e+3, {"b": null}], "c": "x\u00e9\"\n", "d": {}}"#,
            "[]",
            " [ true , false ]",
            r#""""#,
            "null",
        ];
        for text in whole {
            assert_eq!(scan(text), Scan::Done, "{text}");
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
            assert!(matches!(scan(text), Scan::Bad | Scan::Over), "{text}");
            assert!(serde_json::from_str::<serde_json::Value>(text).is_err(), "{text}");
        }
        assert_eq!(scan("12 "), Scan::Over);
        let deepest = "[".repeat(DEPTH_MAX) + &"]".repeat(DEPTH_MAX);
        assert_eq!(scan(&deepest), Scan::Done);
        assert!(serde_json::from_str::<serde_json::Value>(&deepest).is_ok());
        assert_eq!(scan(&"[".repeat(DEPTH_MAX + 1)), Scan::Bad);
    }
}
