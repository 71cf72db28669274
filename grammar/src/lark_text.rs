//! Text in Lark grammars: string literals, and terminals for free text that ends at a marker.
//!
//! A lexer takes the longest match. Therefore free text and its end marker are one terminal, which matches up
//! to the first marker.

use serde_json::Value;

/// Terminal that matches any text, including the empty text.
pub const ANY: &str = "/(?s:.*)/";
/// Terminal that matches any non-empty text.
pub(super) const SOME: &str = "/(?s:.+)/";

/// Formats `text` as a Lark string literal.
pub fn literal(text: &str) -> String {
    // Lark strings have JSON syntax, except that they must not contain U+007F unescaped.
    Value::from(text).to_string().replace('\u{7f}', "\\u007f")
}

/// Formats texts as a parenthesised list of alternatives.
pub(super) fn one_of(texts: &[String]) -> String {
    let literals: Vec<String> = texts.iter().map(|text| literal(text)).collect();
    format!("({})", literals.join(" | "))
}

/// Returns a terminal that matches texts containing none of `texts`.
pub fn without(texts: &[String]) -> String {
    if texts.is_empty() {
        return ANY.to_owned();
    }
    format!("({ANY} & ~({ANY} {} {ANY}))", one_of(texts))
}

/// Returns a terminal that matches text up to and including the first occurrence of one of `ends`, with none
/// of `excluded` before it.
pub fn up_to(ends: &[String], excluded: &[String]) -> String {
    let all: Vec<String> = ends.iter().chain(excluded).cloned().collect();
    let earlier = format!("~({ANY} {} {SOME})", one_of(&all));
    format!("({} {} & {earlier})", without(&all), one_of(ends))
}
