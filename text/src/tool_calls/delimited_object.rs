//! Translates an object in the delimited syntax to JSON character by character: `{key:value,…}` with unquoted keys,
//! strings between two delimiters, numbers, `true`, `false`, `null`, objects and lists. Any other value is
//! translated to a string.

use super::json_escape::escape;
use super::marker_scanner::MarkerScanner;
use super::schema_types::{is_json, quoted};
use super::tagged_calls::NAME_MAX;

/// Maximum nesting depth of lists and objects, as in `serde_json`.
const DEPTH_MAX: usize = 127;
/// Maximum number of bytes of a value without delimiters.
const WORD_MAX: usize = 512;

/// State of an object after the next character.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(super) enum DelimitedScanStatus {
    /// The object continues.
    Continues,
    /// The object is complete with this character.
    Done,
    /// The text is not an object.
    Invalid,
}

#[derive(Debug, Clone)]
enum DelimitedObjectState {
    /// Inside a key or before it.
    Key {
        text: String,
        /// Whether the position is between two delimiters.
        is_delimited: bool,
    },
    /// A value must follow. With `may_close` the list may also end here.
    Value { may_close: bool },
    /// Inside a value without delimiters, such as a number.
    Word(String),
    /// In a string.
    Text,
    /// After a value: a comma or the closing bracket must follow.
    Next,
}

/// Open list or object.
#[derive(Debug, Clone, Copy)]
struct OpenContainer {
    is_object: bool,
    /// Whether the container has a member, so that a comma precedes the next member.
    has_members: bool,
}

/// Parser of one object in the delimited syntax, which it translates to JSON.
#[derive(Debug, Clone)]
pub(super) struct DelimitedObjectParser {
    delimiter: &'static str,
    scanner: MarkerScanner,
    state: DelimitedObjectState,
    /// Open containers, outermost first.
    open: Vec<OpenContainer>,
}

impl DelimitedObjectParser {
    /// Creates a parser for an object, starting after its `{`; the string `delimiter` encloses strings.
    pub(super) fn new(delimiter: &'static str, out: &mut dyn FnMut(&str)) -> Self {
        let (scanner, open) = (MarkerScanner::default(), Vec::new());
        let state = DelimitedObjectState::Next;
        let mut parser = Self { delimiter, scanner, state, open };
        parser.enter(true, out);
        parser
    }

    /// Processes the next character and passes the JSON text to `out`.
    pub(super) fn push(&mut self, c: char, out: &mut dyn FnMut(&str)) -> DelimitedScanStatus {
        let mut released = String::new();
        let found = self.scanner.push(c, &[self.delimiter], |c| released.push(c));
        for c in released.chars() {
            let status = self.plain(c, out);
            if status != DelimitedScanStatus::Continues {
                return status;
            }
        }
        if found.is_some() { self.delimiter(out) } else { DelimitedScanStatus::Continues }
    }

    /// Processes a delimiter.
    fn delimiter(&mut self, out: &mut dyn FnMut(&str)) -> DelimitedScanStatus {
        match &mut self.state {
            DelimitedObjectState::Text => {
                out("\"");
                self.go(DelimitedObjectState::Next)
            }
            DelimitedObjectState::Value { .. } => {
                self.member(out);
                out("\"");
                self.go(DelimitedObjectState::Text)
            }
            DelimitedObjectState::Key { text, is_delimited }
                if *is_delimited || text.is_empty() =>
            {
                *is_delimited = !*is_delimited;
                DelimitedScanStatus::Continues
            }
            _ => DelimitedScanStatus::Invalid,
        }
    }

    /// Processes a character that is not part of a delimiter.
    fn plain(&mut self, c: char, out: &mut dyn FnMut(&str)) -> DelimitedScanStatus {
        match &mut self.state {
            DelimitedObjectState::Text => escape(c, out),
            DelimitedObjectState::Key { .. } => return self.key(c, out),
            DelimitedObjectState::Value { .. } | DelimitedObjectState::Next
                if c.is_ascii_whitespace() => {}
            DelimitedObjectState::Value { may_close } => {
                let may_close = *may_close;
                return self.begin_value(c, may_close, out);
            }
            DelimitedObjectState::Word(word) if matches!(c, ',' | '}' | ']') => {
                out(&word_json(word));
                return self.next(c, out);
            }
            DelimitedObjectState::Word(word) => {
                word.push(c);
                if word.len() > WORD_MAX {
                    return DelimitedScanStatus::Invalid;
                }
            }
            DelimitedObjectState::Next => return self.next(c, out),
        }
        DelimitedScanStatus::Continues
    }

    /// Processes the first character of a value that is not a string, or the bracket that ends the list
    /// instead if `may_close`.
    fn begin_value(
        &mut self,
        c: char,
        may_close: bool,
        out: &mut dyn FnMut(&str),
    ) -> DelimitedScanStatus {
        match c {
            '{' | '[' => {
                self.member(out);
                self.enter(c == '{', out)
            }
            ']' if may_close => self.leave(c, out),
            ',' | '}' | ']' | ':' => DelimitedScanStatus::Invalid,
            _ => {
                self.member(out);
                self.go(DelimitedObjectState::Word(String::from(c)))
            }
        }
    }

    /// Processes a character of a key.
    fn key(&mut self, c: char, out: &mut dyn FnMut(&str)) -> DelimitedScanStatus {
        let DelimitedObjectState::Key { text, is_delimited } = &mut self.state else {
            return DelimitedScanStatus::Invalid;
        };
        match c {
            _ if *is_delimited => text.push(c),
            c if c.is_ascii_whitespace() && text.is_empty() => {}
            '}' if text.is_empty() => return self.leave(c, out),
            ':' => {
                let key = quoted(text.trim());
                let has_members = self
                    .open
                    .last_mut()
                    .is_some_and(|open| std::mem::replace(&mut open.has_members, true));
                out(if has_members { ", " } else { "" });
                out(&key);
                out(": ");
                return self.go(DelimitedObjectState::Value { may_close: false });
            }
            '{' | '}' | '[' | ']' | ',' | '\n' => return DelimitedScanStatus::Invalid,
            c => text.push(c),
        }
        if text.len() > NAME_MAX {
            return DelimitedScanStatus::Invalid;
        }
        DelimitedScanStatus::Continues
    }

    /// Begins a list item by writing its comma if needed; object members begin with their keys instead.
    fn member(&mut self, out: &mut dyn FnMut(&str)) {
        if let Some(open) = self.open.last_mut().filter(|open| !open.is_object)
            && std::mem::replace(&mut open.has_members, true)
        {
            out(", ");
        }
    }

    fn enter(&mut self, is_object: bool, out: &mut dyn FnMut(&str)) -> DelimitedScanStatus {
        if self.open.len() == DEPTH_MAX {
            return DelimitedScanStatus::Invalid;
        }
        out(if is_object { "{" } else { "[" });
        self.open.push(OpenContainer { is_object, has_members: false });
        self.go(first_state(is_object))
    }

    /// Processes the character after a value.
    fn next(&mut self, c: char, out: &mut dyn FnMut(&str)) -> DelimitedScanStatus {
        let is_object = self.open.last().is_some_and(|open| open.is_object);
        match c {
            ',' => self.go(first_state(is_object)),
            '}' | ']' => self.leave(c, out),
            _ => DelimitedScanStatus::Invalid,
        }
    }

    /// Ends the innermost list or object with the bracket `c`.
    fn leave(&mut self, c: char, out: &mut dyn FnMut(&str)) -> DelimitedScanStatus {
        match self.open.pop() {
            Some(open) if open.is_object == (c == '}') => out(c.encode_utf8(&mut [0; 4])),
            _ => return DelimitedScanStatus::Invalid,
        }
        if self.open.is_empty() {
            return DelimitedScanStatus::Done;
        }
        self.go(DelimitedObjectState::Next)
    }

    fn go(&mut self, state: DelimitedObjectState) -> DelimitedScanStatus {
        self.state = state;
        DelimitedScanStatus::Continues
    }
}

/// Returns the state at the start of a list or an object, which is also the state after a comma.
fn first_state(is_object: bool) -> DelimitedObjectState {
    if is_object {
        DelimitedObjectState::Key { text: String::new(), is_delimited: false }
    } else {
        DelimitedObjectState::Value { may_close: true }
    }
}

/// Returns the JSON text of a value without delimiters.
fn word_json(word: &str) -> String {
    let word = word.trim();
    let is_number = word.starts_with(|c: char| c == '-' || c.is_ascii_digit()) && is_json(word);
    match word.to_ascii_lowercase().as_str() {
        "null" | "none" | "nil" => "null".to_owned(),
        boolean @ ("true" | "false") => boolean.to_owned(),
        _ if is_number => word.to_owned(),
        _ => quoted(word),
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use serde_json::{Value, json};

    fn translated(text: &str) -> Option<Value> {
        let mut out = String::new();
        let mut chars = text.chars();
        assert_eq!(chars.next(), Some('{'));
        let mut parser = DelimitedObjectParser::new("<escape>", &mut |part| out.push_str(part));
        for c in chars.by_ref() {
            match parser.push(c, &mut |part| out.push_str(part)) {
                DelimitedScanStatus::Continues => {}
                DelimitedScanStatus::Done if chars.next().is_none() => {
                    return Some(
                        serde_json::from_str(&out).unwrap_or_else(|e| panic!("{e} {out}")),
                    );
                }
                _ => return None,
            }
        }
        None
    }

    #[test]
    fn objects_are_written_as_json() {
        for (text, expected) in [
            ("{}", json!({})),
            (
                "{ city:<escape>Köln \"a\"\n{,}<escape>,days:3}",
                json!({"city": "Köln \"a\"\n{,}", "days": 3}),
            ),
            (
                "{a:true,b:False,c:null,d:-1.5e3}",
                json!({"a": true, "b": false, "c": null, "d": -1.5e3}),
            ),
            (
                "{a:{b:[1,<escape>x<escape>,[],{}]},c:[]}",
                json!({"a": {"b": [1, "x", [], {}]}, "c": []}),
            ),
            ("{a:some text <b>,b:2 }", json!({"a": "some text <b>", "b": 2})),
            ("{<escape>a:b<escape>:1,}", json!({"a:b": 1})),
        ] {
            assert_eq!(translated(text), Some(expected), "{text}");
        }
    }

    #[test]
    fn invalid_objects_are_rejected() {
        for text in [
            "{a}",
            "{a:}",
            "{a:1]",
            "{a:[1}",
            "{a:1<escape>x<escape>}",
            "{a:<escape>x}",
            "{a:1,,b:2}",
        ] {
            assert_eq!(translated(text), None, "{text}");
        }
    }
}
