//! Texts in a Lark grammar: literals, and terminals of free text that ends where a marker begins.
//!
//! A lexer reads the longest match. Free text and the marker that ends it are therefore one terminal, which matches
//! up to the first marker.

use serde_json::Value;

/// Terminal of all texts.
pub const ANY: &str = "/(?s:.*)/";
/// Terminal of all texts that are not empty.
pub(super) const SOME: &str = "/(?s:.+)/";

/// Formats `text` as a Lark string literal.
pub fn literal(text: &str) -> String {
    // Lark's strings are those of JSON, except that they contain no U+007F.
    Value::from(text).to_string().replace('\u{7f}', "\\u007f")
}

/// Formats texts as alternatives in parentheses.
pub(super) fn one_of(texts: &[String]) -> String {
    let literals: Vec<String> = texts.iter().map(|text| literal(text)).collect();
    format!("({})", literals.join(" | "))
}

/// Returns the terminal of the texts that contain none of `texts`.
pub fn without(texts: &[String]) -> String {
    if texts.is_empty() {
        return ANY.to_owned();
    }
    format!("({ANY} & ~({ANY} {} {ANY}))", one_of(texts))
}

/// Returns the terminal of the texts that end with the first of `ends` in them and contain none of `excluded`
/// before.
pub fn up_to(ends: &[String], excluded: &[String]) -> String {
    let all: Vec<String> = ends.iter().chain(excluded).cloned().collect();
    let earlier = format!("~({ANY} {} {SOME})", one_of(&all));
    format!("({} {} & {earlier})", without(&all), one_of(ends))
}
