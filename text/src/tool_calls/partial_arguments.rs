//! Closes the arguments of a truncated tool call after the last complete value.

use super::json_scanner::{JsonScanStatus, JsonScanner};

/// Returns a valid JSON object for the text of a JSON object that may be truncated. A member with an
/// incomplete string, number or constant is omitted; an incomplete list or object keeps its complete values.
/// The text of each value is copied unchanged, so numbers keep all digits.
///
/// Anthropic's clients parse partial tool input in the same way (jiter's `partial_mode`, in Python's
/// `anthropic` 2.12).
pub fn partial_arguments(truncated: &str) -> String {
    let complete = &truncated[..complete_prefix_bytes(truncated)];
    let mut json = JsonScanner::default();
    for c in complete.chars() {
        json.push(c);
    }
    let text: String = complete.chars().chain(json.closings()).collect();
    if text.trim_start().starts_with('{') { text } else { "{}".to_owned() }
}

/// Returns the length in bytes of the longest prefix that is complete except for closing brackets of objects
/// and lists.
fn complete_prefix_bytes(truncated: &str) -> usize {
    let (mut json, mut complete) = (JsonScanner::default(), 0);
    for (at, c) in truncated.char_indices() {
        let number = json.number();
        let scan = json.push(c);
        // The end of a number is known only at the next character, which is not part of the number.
        if number == Some(true) && json.number().is_none() {
            complete = at;
        }
        if scan == JsonScanStatus::Done || scan == JsonScanStatus::Continues && json.may_close() {
            complete = at + c.len_utf8();
        }
        if scan != JsonScanStatus::Continues {
            return complete;
        }
    }
    if json.number() == Some(true) { truncated.len() } else { complete }
}

#[cfg(test)]
mod tests {
    use super::*;
    use serde_json::{Value, json};

    #[test]
    fn complete_members_are_parsed() {
        for (truncated, expected) in [
            ("", json!({})),
            ("{", json!({})),
            ("{\"a", json!({})),
            ("{\"a\":", json!({})),
            ("{\"a\": \"x", json!({})),
            ("{\"a\": \"x\"", json!({"a": "x"})),
            ("{\"a\": \"x\", ", json!({"a": "x"})),
            ("{\"a\": \"x\", \"b\": \"y\\", json!({"a": "x"})),
            ("{\"a\": 12", json!({"a": 12})),
            ("{\"a\": 12, \"b\": -", json!({"a": 12})),
            ("{\"a\": 1, \"b\": 1.", json!({"a": 1})),
            ("{\"a\": [1, 20, 3e", json!({"a": [1, 20]})),
            ("{\"a\": tru", json!({})),
            ("{\"a\": [", json!({"a": []})),
            ("{\"a\": {\"b\": 1, \"c\": [1, 2", json!({"a": {"b": 1, "c": [1, 2]}})),
            ("{\"a\": 1, \"b\": [{\"c\": \"d\"}, {\"e\"", json!({"a": 1, "b": [{"c": "d"}, {}]})),
            ("{\"a\": \"é\"}", json!({"a": "é"})),
            ("none", json!({})),
        ] {
            let parsed: Value = serde_json::from_str(&partial_arguments(truncated)).unwrap();
            assert_eq!(parsed, expected, "{truncated}");
        }
    }
}
