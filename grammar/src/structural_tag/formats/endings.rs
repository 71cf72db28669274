//! Texts at which the formats of a structural tag end.

use serde_json::{Value, json};

/// Returns the constant text of the format `next` if it ends the free text at the end of `element`, the
/// format before it.
pub(super) fn ending_constant<'a>(element: &Value, next: &'a Value) -> Option<&'a str> {
    let is_end = next["type"] == "const_string" && ends_free(element);
    next["value"].as_str().filter(|text| is_end && !text.is_empty())
}

/// Whether a format may end with free text.
pub(super) fn ends_free(format: &Value) -> bool {
    let any = |list: &Value, last: bool| {
        let list = list.as_array().map(Vec::as_slice).unwrap_or_default();
        let considered = if last { &list[list.len().saturating_sub(1)..] } else { list };
        considered.iter().any(ends_free)
    };
    match format["type"].as_str() {
        Some("any_text" | "dispatch") => true,
        Some("triggered_tags") => {
            // If no tag is required, the whole format may be free text.
            format["stop_after_first"] != true || format["at_least_one"] != true
        }
        Some("tag") => {
            let has_end = format["end"] != "" && format["end"] != json!([]);
            !has_end && ends_free(&format["content"])
        }
        Some("sequence") => any(&format["elements"], true),
        Some("or") => any(&format["elements"], false),
        _ => false,
    }
}
