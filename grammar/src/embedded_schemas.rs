//! Finds the JSON schemas inside a Lark grammar and replaces them with the form that llguidance enforces.

use super::compile::GrammarError;
use super::llguidance_grammar::{ENGINE_OPTIONS, prepared_schema};
use super::{number_keywords, schema_cost};
use serde_json::Value;

const SCHEMA_KEYWORD: &str = "%json";
/// Keywords followed by a JSON value that is not a schema.
const VALUE_KEYWORDS: [&str; 2] = ["%llguidance", "%regex"];

/// Returns the grammar, with each JSON schema in it replaced by the form that llguidance enforces.
///
/// Errors: the errors of `prepared_schema`.
pub(super) fn prepared(grammar: &str) -> Result<String, GrammarError> {
    let mut prepared = String::with_capacity(grammar.len());
    let mut rest = grammar;
    while !rest.is_empty() {
        if let Some(after) = rest.strip_prefix(SCHEMA_KEYWORD) {
            prepared.push_str(SCHEMA_KEYWORD);
            let Some((schema, length)) = json_value(after) else {
                prepared.push_str(after); // The error of llguidance has the position.
                return Ok(prepared);
            };
            prepared.push(' ');
            prepared.push_str(&prepared_embedded(schema)?.to_string());
            rest = &after[length..];
            continue;
        }
        let length = lexeme_bytes(rest);
        prepared.push_str(&rest[..length]);
        rest = &rest[length..];
    }
    Ok(prepared)
}

/// Prepares a schema and keeps its llguidance options. A schema with the option `lenient`, which ignores
/// keywords that cannot be enforced, is not normalised.
fn prepared_embedded(mut schema: Value) -> Result<Value, GrammarError> {
    let options = schema.as_object_mut().and_then(|members| members.shift_remove(ENGINE_OPTIONS));
    let is_lenient = options.as_ref().is_some_and(|options| options["lenient"] == true);
    let mut prepared = if is_lenient {
        schema_cost::check(&schema)?;
        number_keywords::prepare(&mut schema)?;
        schema
    } else {
        prepared_schema(&schema)?
    };
    if let Some(options) = options {
        if prepared.is_boolean() {
            prepared = serde_json::json!({ "allOf": [prepared] });
        }
        prepared[ENGINE_OPTIONS] = options;
    }
    Ok(prepared)
}

/// Parses the JSON value at the start of `text`. Returns the value and its length, including leading
/// whitespace.
fn json_value(text: &str) -> Option<(Value, usize)> {
    let mut values = serde_json::Deserializer::from_str(text).into_iter();
    let value = values.next()?.ok()?;
    Some((value, values.byte_offset()))
}

/// Returns the length of the lexeme at the start of a grammar. Comments, strings, regular expressions and
/// special tokens are whole lexemes, because they may contain the text of a keyword; any other lexeme is a
/// single character.
fn lexeme_bytes(text: &str) -> usize {
    let until = |end: &str| text[1..].find(end).map_or(text.len(), |at| 1 + at);
    for keyword in VALUE_KEYWORDS {
        if let Some(after) = text.strip_prefix(keyword) {
            return keyword.len() + json_value(after).map_or(0, |(_, length)| length);
        }
    }
    match text.as_bytes() {
        [b'#', ..] | [b'/', b'/', ..] => until("\n"),
        [delimiter @ (b'"' | b'/'), ..] => delimited_bytes(text, *delimiter),
        [b'<', ..] => {
            let inside = text[1..].find(|c: char| c == '<' || c == '>' || c.is_whitespace());
            let end = inside.map_or(0, |at| 1 + at);
            if end > 1 && text[end..].starts_with('>') { end + 1 } else { 1 }
        }
        _ => text.chars().next().map_or(1, char::len_utf8),
    }
}

/// Returns the length of a delimited text up to and including its closing delimiter, which is the next
/// unescaped one.
fn delimited_bytes(text: &str, delimiter: u8) -> usize {
    let mut is_escaped = false;
    for (at, byte) in text.bytes().enumerate().skip(1) {
        match byte {
            _ if is_escaped => is_escaped = false,
            b'\\' => is_escaped = true,
            _ if byte == delimiter => return at + 1,
            _ => {}
        }
    }
    text.len()
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn schemas_of_a_grammar_are_prepared() {
        let grammar =
            "start: \"a\" b\nb: %json {\"items\": {\"multipleOf\": 7, \"title\": \"x\"}} \"c\"\n";
        let expected = "start: \"a\" b\nb: %json {\"items\":{\"multipleOf\":7}} \"c\"\n";
        assert_eq!(prepared(grammar).unwrap(), expected);
        let options =
            "start: %json {\"x-guidance\": {\"whitespace_flexible\": false}, \"title\": 1}";
        let expected = "start: %json {\"x-guidance\":{\"whitespace_flexible\":false}}";
        assert_eq!(prepared(options).unwrap(), expected);
        for schema in ["{\"uniqueItems\": true}", "{\"multipleOf\": 99991}"] {
            let two = format!("start: a b\na: %json {{}}\nb: %json {schema}\n");
            assert!(prepared(&two).is_err(), "{schema}");
        }
    }

    #[test]
    fn text_that_resembles_a_schema_is_kept() {
        for grammar in [
            "start: \"%json {\\\"not\\\": 1} \\\"\" /%json {\\/\"/",
            "start: \"a\" // %json {\"not\": 1}\n# %json {\"not\": 1}",
            "start: <|\"|> <%json> x\nx: \"é\"",
            "start: %regex {\"substring_chars\": \"%json {}\"}",
            "start: %json {\"a\": ",
            "start: \"unterminated %json {}",
            "start: a < b",
        ] {
            assert_eq!(prepared(grammar).unwrap(), grammar);
        }
    }
}
