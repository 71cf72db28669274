//! Completes the truncated arguments of a tool call, so that a later request can contain the call.

use super::partial_arguments::partial_arguments;
use crate::large_integers::parse_object;
use serde_json::{Map, Value};

/// Parses the text of a JSON object that may be truncated: an open string ends at the end of the text, and
/// open objects and lists are closed. If the result is not a valid object, only the complete members are
/// returned.
///
/// The object can be passed to chat templates that take tool call arguments as an object. Large integers keep
/// all digits: they are in the form used for template values.
pub fn closed_arguments(text: &str) -> Map<String, Value> {
    if let Ok(members) = parse_object(text) {
        return members;
    }
    let scan = UnclosedJson::of(text);
    let closed = scan.string_end.and_then(|end| {
        let written = without_half_pair(&text[..end]).chars();
        let closed: String = written.chain(['"']).chain(scan.closings.into_iter().rev()).collect();
        parse_object(&closed).ok()
    });
    closed.unwrap_or_else(|| parse_object(&partial_arguments(text)).unwrap_or_default())
}

/// Length of an escape such as `\ud83d` in bytes.
const ESCAPE_BYTES: usize = 6;

/// Removes the escape of a leading surrogate at the end of a text: without the trailing surrogate it is not a
/// character.
fn without_half_pair(text: &str) -> &str {
    let start = text.len().saturating_sub(ESCAPE_BYTES);
    let is_half = text.get(start..).is_some_and(|escape| {
        let escape = escape.to_ascii_lowercase();
        ["\\ud8", "\\ud9", "\\uda", "\\udb"].iter().any(|half| escape.starts_with(half))
    });
    if is_half { &text[..start] } else { text }
}

/// Open parts at the end of a truncated JSON text.
struct UnclosedJson {
    /// Closing brackets of the open objects and lists, outermost first.
    closings: Vec<char>,
    /// Byte position after the last complete character of an open string.
    string_end: Option<usize>,
}

impl UnclosedJson {
    fn of(text: &str) -> Self {
        let mut closings = Vec::new();
        let (mut in_string, mut escape) = (false, None);
        for (at, c) in text.char_indices() {
            match (escape, c) {
                (Some(start), _) if !ends_escape(&text[start..at + c.len_utf8()]) => {}
                (Some(_), _) => escape = None,
                (None, '\\') if in_string => escape = Some(at),
                (None, '"') => in_string = !in_string,
                (None, '{') if !in_string => closings.push('}'),
                (None, '[') if !in_string => closings.push(']'),
                (None, '}' | ']') if !in_string => {
                    closings.pop();
                }
                (None, _) => {}
            }
        }
        let string_end = in_string.then(|| escape.unwrap_or(text.len()));
        Self { closings, string_end }
    }
}

/// Whether `escape`, which begins with a backslash, is a complete escape sequence.
fn ends_escape(escape: &str) -> bool {
    match escape.as_bytes() {
        [_] => false,
        [_, b'u', ..] => escape.len() >= ESCAPE_BYTES,
        _ => true,
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use serde_json::json;

    #[test]
    fn open_strings_and_containers_are_closed() {
        for (text, expected) in [
            ("{\"text\": \"abc", json!({"text": "abc"})),
            ("{\"text\": \"", json!({"text": ""})),
            ("{\"a\": [1, {\"b\": \"c", json!({"a": [1, {"b": "c"}]})),
            ("{\"a\": \"x\\", json!({"a": "x"})),
            ("{\"a\": \"x\\\\", json!({"a": "x\\"})),
            ("{\"a\": \"x\\u00e", json!({"a": "x"})),
            ("{\"a\": \"x\\u00e9", json!({"a": "xé"})),
            ("{\"a\": \"x\\ud83d", json!({"a": "x"})),
            ("{\"a\": \"x\\ud83d\\ud8", json!({"a": "x"})),
            ("{\"a\": \"brackets ]}{[\\\"", json!({"a": "brackets ]}{[\""})),
            ("{\"a\": \"é", json!({"a": "é"})),
        ] {
            assert_eq!(Value::Object(closed_arguments(text)), expected, "{text}");
        }
    }

    #[test]
    fn other_cuts_keep_the_complete_members() {
        for (text, expected) in [
            ("{\"a\": 1, \"b", json!({"a": 1})),
            ("{\"a\": 1, \"b\":", json!({"a": 1})),
            ("{\"a\": 1, \"b\": tr", json!({"a": 1})),
            ("{\"a\": [1, 2", json!({"a": [1, 2]})),
            ("{", json!({})),
            ("{'a': 1}", json!({})),
            ("{\"a\": 1}", json!({"a": 1})),
            ("{\"a\": 1}}", json!({"a": 1})),
        ] {
            assert_eq!(Value::Object(closed_arguments(text)), expected, "{text}");
        }
    }

    /// Every prefix of valid arguments is accepted; a longer prefix never gives a shorter string.
    #[test]
    fn every_prefix_gives_an_object() {
        let text = "{\"path\": \"a\\n\\u00e9\\ud83d\\ude00\", \"list\": [1.5e3, true, {\"k\": null}], \"z\": \"é\"}";
        let mut longest = 0;
        for end in (1..=text.len()).filter(|&end| text.is_char_boundary(end)) {
            let arguments = closed_arguments(&text[..end]);
            let written = arguments.get("path").map_or(0, |path| path.as_str().unwrap().len());
            assert!(written >= longest, "{}", &text[..end]);
            longest = written;
        }
        assert_eq!(longest, "a\né😀".len());
    }
}
