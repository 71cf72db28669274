//! Converts an argument value that a model writes as plain text to JSON. Plain strings are emitted while they
//! are generated; other values are held back until their end.

use super::json_escape::escape;
use super::json_scanner::{JsonScanStatus, JsonScanner};
use super::schema_types::JsonTypeSet;

/// Maximum number of bytes of a value that is not a plain string; such a value is held back until its end.
const BUFFER_MAX: usize = 64 << 10;

/// Parser of one argument value.
#[derive(Debug, Clone)]
pub(super) struct ArgumentValueParser {
    types: JsonTypeSet,
    text: String,
    started: bool,
    /// Whether a line break directly after the opening tag and a line break directly before the closing tag
    /// are syntax and not part of the value.
    is_wrapped: bool,
    /// Whether the first character of the value has been read.
    skipped: bool,
    /// Whether a line break is held back, because it may be the one before the closing tag.
    line_break: bool,
    /// Whether a value that begins like a list or an object is guaranteed to be valid JSON.
    is_exact: bool,
    /// Scanner of the value's list or object; set only if `is_exact` and the list or object has not ended.
    json: Option<JsonScanner>,
}

impl ArgumentValueParser {
    /// Creates a parser of a value. With `is_exact`, a list or object is guaranteed to be valid JSON, so text
    /// in its strings is never interpreted as a tag.
    pub(super) fn new(types: JsonTypeSet, is_wrapped: bool, is_exact: bool) -> Self {
        Self {
            types,
            text: String::new(),
            started: false,
            is_wrapped,
            skipped: false,
            line_break: false,
            is_exact,
            json: None,
        }
    }

    /// Whether the position is inside a list or an object, so that the next character belongs to the value.
    pub(super) fn is_inside_json(&self) -> bool {
        self.json.is_some()
    }

    /// Processes the next character; returns false if the value is too long.
    pub(super) fn push(&mut self, c: char, mut out: impl FnMut(&str)) -> bool {
        let is_first = !std::mem::replace(&mut self.skipped, true);
        if is_first && c == '\n' && self.is_wrapped {
            return true;
        }
        if std::mem::take(&mut self.line_break) {
            self.add('\n', &mut out);
        }
        self.line_break = c == '\n' && self.is_wrapped;
        if !self.line_break {
            self.add(c, &mut out);
        }
        self.text.len() <= BUFFER_MAX
    }

    /// Ends the value: emits the part of the value that is still held back.
    pub(super) fn finish(&mut self, mut out: impl FnMut(&str)) {
        if self.types != JsonTypeSet::text() {
            return out(&self.types.json_text(&self.text));
        }
        out(if self.started { "\"" } else { "\"\"" });
    }

    fn add(&mut self, c: char, out: &mut impl FnMut(&str)) {
        if self.types != JsonTypeSet::text() {
            return self.add_typed(c);
        }
        if !std::mem::replace(&mut self.started, true) {
            out("\"");
        }
        escape(c, out);
    }

    fn add_typed(&mut self, c: char) {
        let begins = self.is_exact && self.text.is_empty() && matches!(c, '{' | '[');
        if begins && self.types.allows_compound() {
            self.json = Some(JsonScanner::default());
        }
        self.text.push(c);
        if let Some(json) = &mut self.json
            && json.push(c) != JsonScanStatus::Continues
        {
            self.json = None;
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use serde_json::{Value, json};

    fn read(types: JsonTypeSet, text: &str) -> Value {
        let mut value = ArgumentValueParser::new(types, true, false);
        let mut out = String::new();
        assert!(text.chars().all(|c| value.push(c, |s| out.push_str(s))));
        value.finish(|s| out.push_str(s));
        serde_json::from_str(&out).unwrap()
    }

    #[test]
    fn values_are_coerced_to_schema_types() {
        let schema = json!({"properties": {
            "i": {"type": "integer"}, "n": {"type": "number"}, "b": {"type": "boolean"},
            "s": {"type": "string"}, "o": {"type": "object"}, "m": {"type": ["string", "null"]},
            "a": {"anyOf": [{"type": "array"}, {"type": "null"}]}, "e": {"enum": [1, "x"]},
            "r": {"$ref": "#/$defs/count"}, "l": {"$ref": "#/$defs/loop"},
            "both": {"allOf": [{"type": ["integer", "null"]}, {"type": ["integer", "string"]}]},
        }, "$defs": {"count": {"type": "integer"}, "loop": {"$ref": "#/$defs/loop"}}});
        let read = |key: &str, text: &str| read(JsonTypeSet::of(&schema, key), text);
        assert_eq!(read("i", "\n7\n"), json!(7));
        assert_eq!(read("i", "7.5"), json!("7.5"));
        assert_eq!(read("n", "7.5"), json!(7.5));
        assert_eq!(read("b", "True"), json!(true));
        assert_eq!(read("s", "\ntrue \"x\"\n\n"), json!("true \"x\"\n"));
        assert_eq!(read("s", ""), json!(""));
        assert_eq!(read("o", "\n{\"a\": [1]}\n"), json!({"a": [1]}));
        assert_eq!(read("o", "{broken"), json!("{broken"));
        assert_eq!(read("m", "null"), json!(null));
        assert_eq!(read("m", "12"), json!("12"));
        assert_eq!(read("a", "[1]"), json!([1]));
        assert_eq!(read("e", "1"), json!(1));
        assert_eq!(read("r", "1"), json!(1));
        assert_eq!(read("l", "1"), json!("1"));
        assert_eq!(read("both", "null"), json!("null"));
        assert_eq!(read("both", "1"), json!(1));
        assert_eq!(read("unknown", "1"), json!("1"));
    }

    #[test]
    fn long_integers_keep_their_digits() {
        let types = JsonTypeSet::of(&json!({"properties": {"i": {"type": "integer"}}}), "i");
        assert_eq!(
            types.json_text(" 123456789012345678901234567890 "),
            "123456789012345678901234567890"
        );
        assert_eq!(types.json_text("1e3"), "\"1e3\"");
    }
}
