//! JSON integers beyond 64 bits. `serde_json` reads them as floats and loses digits; Python, which rendered
//! the chat templates in training, prints all digits.
//!
//! Values for chat templates represent such an integer as an object with one reserved key. JSON text is
//! rewritten to this form before it is parsed.

use serde_json::{Map, Value};
use std::borrow::Cow;

/// Key of the object that represents an integer.
const KEY: &str = "\u{7f}integer";
/// Maximum number of digits, the same as Python's limit.
const DIGITS_MAX: usize = 4_300;

/// Returns an integer as a value for chat templates; `digits` has an optional sign.
pub fn template_integer(digits: &str) -> Value {
    if let Ok(number) = digits.parse::<i64>() {
        return Value::from(number);
    }
    match digits.parse::<u64>() {
        Ok(number) => Value::from(number),
        Err(_) => Value::Object(Map::from_iter([(KEY.to_owned(), Value::from(digits))])),
    }
}

/// Returns the digits of the integer that an object with the only member `key` represents; `None` for other
/// objects.
pub fn integer_of_member<'a>(key: &str, value: &'a str) -> Option<&'a str> {
    (key == KEY && is_large_integer(value)).then_some(value)
}

/// Returns the digits of the integer that an object represents; `None` for other objects.
pub fn integer_of_object(members: &Map<String, Value>) -> Option<&str> {
    match members.iter().next() {
        Some((key, Value::String(value))) if members.len() == 1 => integer_of_member(key, value),
        _ => None,
    }
}

/// Parses the text of a JSON object without loss of integer digits.
pub(crate) fn parse_object(json: &str) -> serde_json::Result<Map<String, Value>> {
    match mark_large_integers(json) {
        Cow::Borrowed(json) => serde_json::from_str(json),
        // A marked integer is nested one level deeper, which may exceed the parser's limit; then the original
        // text is parsed.
        Cow::Owned(marked) => serde_json::from_str(&marked).or_else(|_| serde_json::from_str(json)),
    }
}

/// In a JSON text, replaces each integer beyond 64 bits by the object that represents it, and -0 by 0,
/// because -0 is an integer in Python. All other text, including invalid JSON, is unchanged.
pub fn mark_large_integers(json: &str) -> Cow<'_, str> {
    let bytes = json.as_bytes();
    let mut out = String::new();
    let (mut at, mut copied) = (0, 0);
    while at < bytes.len() {
        let end = match bytes[at] {
            b'"' => string_end(bytes, at),
            b'-' | b'0'..=b'9' => number_end(bytes, at),
            _ => at + 1,
        };
        if let Some(marked) = marked_number(&bytes[at..end]) {
            out.push_str(&json[copied..at]);
            out.push_str(&marked);
            copied = end;
        }
        at = end;
    }
    if copied == 0 {
        return Cow::Borrowed(json);
    }
    out.push_str(&json[copied..]);
    Cow::Owned(out)
}

/// Returns the position after the string that begins at `start`.
fn string_end(bytes: &[u8], start: usize) -> usize {
    let mut at = start + 1;
    while at < bytes.len() && bytes[at] != b'"' {
        at += if bytes[at] == b'\\' { 2 } else { 1 };
    }
    (at + 1).min(bytes.len())
}

/// Returns the position after the number that begins at `start`.
fn number_end(bytes: &[u8], start: usize) -> usize {
    let is_part = |byte: &u8| byte.is_ascii_digit() || b"+-.eE".contains(byte);
    start + bytes[start..].iter().take_while(|byte| is_part(byte)).count()
}

/// Returns the replacement of a number in a JSON text; `None` if the number is unchanged.
fn marked_number(token: &[u8]) -> Option<String> {
    match str::from_utf8(token).ok()? {
        "-0" => Some("0".to_owned()),
        token if is_large_integer(token) => Some(format!("{{\"{KEY}\":\"{token}\"}}")),
        _ => None,
    }
}

/// Whether a text is a JSON integer that does not fit in 64 bits.
fn is_large_integer(text: &str) -> bool {
    let digits = text.strip_prefix('-').unwrap_or(text);
    (1..=DIGITS_MAX).contains(&digits.len())
        && !digits.starts_with('0')
        && digits.bytes().all(|byte| byte.is_ascii_digit())
        && text.parse::<i64>().is_err()
        && text.parse::<u64>().is_err()
}

#[cfg(test)]
mod tests {
    use super::*;
    use serde_json::json;

    #[test]
    fn large_integers_are_marked_outside_of_strings() {
        let mark = |digits: &str| format!("{{\"{KEY}\":\"{digits}\"}}");
        let large = "18446744073709551616";
        let (minus, ten) = ("-9223372036854775809", format!("1{}", "0".repeat(4_299)));
        for (json, expected) in [
            (format!("[{large},{minus} ]"), format!("[{},{} ]", mark(large), mark(minus))),
            (format!("{{\"a\":{ten}}}"), format!("{{\"a\":{}}}", mark(&ten))),
            ("[-0, 0, -0.0, -0e1]".to_owned(), "[0, 0, -0.0, -0e1]".to_owned()),
        ] {
            assert_eq!(mark_large_integers(&json), expected);
        }
        for json in [
            "[18446744073709551615, -9223372036854775808]".to_owned(),
            format!("[{large}.5, {large}e1, 0{large}, {large}-1]"),
            format!("{{\"{large}\": \"a\\\"{large}\", \"é\\\\\": \"{large}"),
            format!("1{ten}"),
            "\"\\".to_owned(),
        ] {
            assert_eq!(mark_large_integers(&json), json);
        }
    }

    #[test]
    fn objects_of_integers_are_recognised() {
        let large = template_integer("-123456789012345678901");
        let digits = |value: &Value| integer_of_object(value.as_object().unwrap()).map(str::len);
        assert_eq!(digits(&large), Some(22));
        assert_eq!(template_integer("18446744073709551615"), json!(u64::MAX));
        assert_eq!(template_integer("-7"), json!(-7));
        for other in [json!({}), json!({KEY: "7"}), json!({KEY: "x"}), json!({KEY: 1, "a": 2})] {
            assert_eq!(digits(&other), None, "{other}");
        }
    }

    #[test]
    fn deeply_nested_objects_are_parsed_without_marks() {
        let large = "123456789012345678901";
        let deep = format!("{{\"a\":{}{large}{}}}", "[".repeat(126), "]".repeat(126));
        assert!(parse_object(&deep).is_ok());
        let members = parse_object(&format!("{{\"a\": {large}}}")).unwrap();
        assert_eq!(members["a"], template_integer(large));
    }
}
