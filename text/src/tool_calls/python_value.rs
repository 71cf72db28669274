//! Translates one Python literal to JSON character by character: strings, numbers, `True`, `False`, `None`,
//! lists and dictionaries with string keys. JSON's own spelling of these values is accepted too.

use super::python_text::PythonStringParser;
use super::schema_types::is_json;

/// Maximum nesting depth of lists and dictionaries, as in `serde_json`.
const DEPTH_MAX: usize = 127;
/// Maximum number of bytes of a number or a name.
const WORD_MAX: usize = 512;

/// State of a literal after the next character.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(super) enum PythonScanStatus {
    /// The literal continues.
    Continues,
    /// The literal is complete with this character.
    Done,
    /// The literal, a number or a name, ended before this character.
    EndedBefore,
    /// The text is not a literal that can be written as JSON.
    Invalid,
}

#[derive(Debug, Clone)]
enum PythonValueState {
    /// A value must follow. With `may_close` the list may also end here.
    Value {
        may_close: bool,
    },
    /// A key must follow, or the dictionary ends.
    Key,
    Colon,
    /// After a value in a list or dictionary: a comma or the closing bracket must follow.
    Next,
    Text {
        text: PythonStringParser,
        is_key: bool,
    },
    Word(String),
}

/// Parser of one Python literal, which it translates to JSON.
#[derive(Debug, Clone)]
pub(super) struct PythonValueParser {
    state: PythonValueState,
    /// Open containers, outermost first; true = dictionary, false = list.
    open: Vec<bool>,
    /// For each open container, whether it has a member, so that a comma precedes the next member.
    has_members: Vec<bool>,
}

impl Default for PythonValueParser {
    fn default() -> Self {
        let state = PythonValueState::Value { may_close: false };
        Self { state, open: Vec::new(), has_members: Vec::new() }
    }
}

impl PythonValueParser {
    /// Processes the next character and passes the JSON text of the literal to `out`.
    pub(super) fn push(&mut self, c: char, out: &mut dyn FnMut(&str)) -> PythonScanStatus {
        match &mut self.state {
            PythonValueState::Text { text, is_key } => {
                let is_key = *is_key;
                match text.push(c, out) {
                    None => PythonScanStatus::Invalid,
                    Some(false) => PythonScanStatus::Continues,
                    Some(true) if is_key => self.go(PythonValueState::Colon),
                    Some(true) => self.ended(),
                }
            }
            PythonValueState::Word(word) if c.is_ascii_alphanumeric() || "+-._".contains(c) => {
                word.push(c);
                if word.len() > WORD_MAX {
                    return PythonScanStatus::Invalid;
                }
                PythonScanStatus::Continues
            }
            PythonValueState::Word(word) => {
                let word = std::mem::take(word);
                let Some(json) = word_json(&word) else { return PythonScanStatus::Invalid };
                out(json);
                match self.ended() {
                    PythonScanStatus::Done => PythonScanStatus::EndedBefore,
                    _ => self.push(c, out),
                }
            }
            _ if c.is_ascii_whitespace() => PythonScanStatus::Continues,
            PythonValueState::Value { may_close } => {
                let may_close = *may_close;
                self.value(c, may_close, out)
            }
            PythonValueState::Key if c == '}' => self.close('}', out),
            PythonValueState::Key if matches!(c, '"' | '\'') => {
                self.separate(out);
                self.text(c, true, out)
            }
            PythonValueState::Colon if c == ':' => {
                out(": ");
                self.go(PythonValueState::Value { may_close: false })
            }
            PythonValueState::Next if c == ',' => self.go(if self.open.last() == Some(&true) {
                PythonValueState::Key
            } else {
                PythonValueState::Value { may_close: true }
            }),
            PythonValueState::Next if matches!(c, ']' | '}') => self.close(c, out),
            PythonValueState::Key | PythonValueState::Colon | PythonValueState::Next => {
                PythonScanStatus::Invalid
            }
        }
    }

    fn go(&mut self, state: PythonValueState) -> PythonScanStatus {
        self.state = state;
        PythonScanStatus::Continues
    }

    fn value(&mut self, c: char, may_close: bool, out: &mut dyn FnMut(&str)) -> PythonScanStatus {
        if c == ']' && may_close {
            return self.close(c, out);
        }
        if matches!(self.open.last(), Some(false)) {
            self.separate(out);
        }
        match c {
            '[' | '{' if self.open.len() == DEPTH_MAX => PythonScanStatus::Invalid,
            '[' | '{' => {
                out(c.encode_utf8(&mut [0; 4]));
                self.open.push(c == '{');
                self.has_members.push(false);
                self.go(if c == '{' {
                    PythonValueState::Key
                } else {
                    PythonValueState::Value { may_close: true }
                })
            }
            '"' | '\'' => self.text(c, false, out),
            c if c.is_ascii_alphanumeric() || c == '-' => {
                self.go(PythonValueState::Word(String::from(c)))
            }
            _ => PythonScanStatus::Invalid,
        }
    }

    /// Begins a string with the quote `quote`.
    fn text(&mut self, quote: char, is_key: bool, out: &mut dyn FnMut(&str)) -> PythonScanStatus {
        out("\"");
        self.go(PythonValueState::Text { text: PythonStringParser::new(quote), is_key })
    }

    /// Emits the comma before a member of the innermost list or dictionary, unless the member is the first
    /// one.
    fn separate(&mut self, out: &mut dyn FnMut(&str)) {
        if let Some(has_members) = self.has_members.last_mut()
            && std::mem::replace(has_members, true)
        {
            out(", ");
        }
    }

    fn close(&mut self, c: char, out: &mut dyn FnMut(&str)) -> PythonScanStatus {
        if self.open.pop() != Some(c == '}') {
            return PythonScanStatus::Invalid;
        }
        self.has_members.pop();
        out(c.encode_utf8(&mut [0; 4]));
        self.ended()
    }

    /// Handles the end of the whole literal, or of a value inside a container.
    fn ended(&mut self) -> PythonScanStatus {
        if self.open.is_empty() {
            return PythonScanStatus::Done;
        }
        self.go(PythonValueState::Next)
    }
}

/// Returns the JSON of a number or a constant.
fn word_json(word: &str) -> Option<&str> {
    match word {
        "True" | "true" => Some("true"),
        "False" | "false" => Some("false"),
        "None" | "null" => Some("null"),
        number => is_json(number).then_some(number),
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use serde_json::{Value, json};

    fn translated(literal: &str) -> Option<Value> {
        let (mut value, mut json) = (PythonValueParser::default(), String::new());
        let mut last = PythonScanStatus::Continues;
        for c in literal.chars().chain([')']) {
            if last == PythonScanStatus::Done {
                break;
            }
            last = value.push(c, &mut |part| json.push_str(part));
            if last == PythonScanStatus::Invalid {
                return None;
            }
        }
        assert_ne!(last, PythonScanStatus::Continues, "{literal}");
        Some(serde_json::from_str(&json).unwrap())
    }

    #[test]
    fn python_literals_become_json() {
        for (literal, expected) in [
            ("1", json!(1)),
            ("-2.5e3", json!(-2500.0)),
            ("True", json!(true)),
            ("None", json!(null)),
            ("'it\\'s \"x\"\\n'", json!("it's \"x\"\n")),
            ("\"a\\d\\x41\\u00e9\\U0001F600\\101\"", json!("a\\dAé😀A")),
            ("'\\ud83d\\ude00 \\ud83d'", json!("😀 \u{fffd}")),
            ("[]", json!([])),
            ("[1, [True, 'x'],]", json!([1, [true, "x"]])),
            ("{'a': {\"b\": None}, 'c': [],}", json!({"a": {"b": null}, "c": []})),
            ("{\"a\": false, \"b\": null}", json!({"a": false, "b": null})),
        ] {
            assert_eq!(translated(literal), Some(expected), "{literal}");
        }
        for bad in ["x", "1__0", "{1: 2}", "[1}", "{'a' 1}", "(1, 2)", "[,]", "+1", "{'a': }"] {
            assert_eq!(translated(bad), None, "{bad}");
        }
    }
}
