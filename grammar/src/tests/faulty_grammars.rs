//! Grammars with errors of all kinds that the grammar library reports, and the messages for them.

use super::*;
use crate::error_message::library_texts;

/// JSON schemas, as JSON.
const SCHEMAS: &[&str] = &[
    r#"{"type": "text"}"#,
    r#"{"type": 5}"#,
    r#"{"type": ["string", 5]}"#,
    r#"{"enum": 5}"#,
    r#"{"allOf": 5}"#,
    r#"{"anyOf": []}"#,
    r#"{"oneOf": [{"type": "string"}, {"minLength": 2}]}"#,
    r#"{"$ref": 5}"#,
    r##"{"$ref": "#/nowhere"}"##,
    r##"{"$ref": "#/$defs/a", "$defs": {"a": {"$ref": "#/$defs/a", "minLength": 1}}}"##,
    r#"{"$ref": "other.json"}"#,
    r#"{"properties": 5}"#,
    r#"{"properties": {"a": 5}}"#,
    r#"{"required": 5}"#,
    r#"{"required": [5]}"#,
    r#"{"minimum": "a"}"#,
    r#"{"minimum": 5, "maximum": 4, "type": "integer"}"#,
    r#"{"exclusiveMinimum": 1, "exclusiveMaximum": 1, "type": "number"}"#,
    r#"{"multipleOf": -1}"#,
    r#"{"multipleOf": "a"}"#,
    r#"{"type": "string", "pattern": "("}"#,
    r#"{"type": "string", "pattern": "(?=a)"}"#,
    r#"{"type": "string", "pattern": "(a)\\1"}"#,
    r#"{"type": "string", "pattern": "[z-a]"}"#,
    r#"{"type": "string", "pattern": "a{5,2}"}"#,
    r#"{"type": "string", "pattern": "\\p{Nothing}"}"#,
    r#"{"type": "string", "pattern": "a", "minLength": 9, "maxLength": 10}"#,
    r#"{"type": "string", "minLength": 5, "maxLength": 4}"#,
    r#"{"type": "string", "minLength": 5000000000000}"#,
    r#"{"type": "string", "format": "no-such-format"}"#,
    r#"{"type": "array", "minItems": 5, "maxItems": 4}"#,
    r#"{"type": "array", "prefixItems": 5}"#,
    r#"{"type": "array", "items": false, "minItems": 2}"#,
    r#"{"type": "array", "uniqueItems": true}"#,
    r#"{"type": "object", "minProperties": 5, "maxProperties": 4}"#,
    r#"{"type": "object", "minProperties": 5, "properties": {"a": {}}, "additionalProperties": false}"#,
    r#"{"type": "object", "properties": {"a": false}, "required": ["a"]}"#,
    r#"{"type": "object", "patternProperties": {"a": {}, "[ab]": {}}}"#,
    r#"{"type": "object", "patternProperties": {"(": {}}}"#,
    r#"{"not": {"type": "string"}}"#,
    r#"{"const": 1, "type": "string"}"#,
    r#"{"unknown keyword <script>": 1}"#,
];

const REGEXES: &[&str] = &[
    "(",
    ")",
    "[",
    "[z-a]",
    "a{2,1}",
    "*",
    "a**b{",
    r"\",
    r"\q",
    r"\x{110000}",
    r"\xZZ",
    "(?P<a>.)(?P<a>.)",
    "(?P<>a)",
    "(?P<1>a)",
    "(?z)",
    "(?-)",
    "(?i",
    r"\1",
    "(?=a)b",
    "(?<!a)b",
    r"\p{Nothing}",
    r"\b{x}",
    "(?-u:\\xff)",
    "[[:nothing:]]",
    r"[\b-a]",
    "a{99999999999}",
    "((((a{1000}){1000}){1000}){1000})",
];

const LARK_GRAMMARS: &[&str] = &[
    "",
    "start",
    "start:",
    "start: missing",
    "start: \"a",
    "start: /(/",
    "start: /a/l",
    "start: A\nA: A",
    "start: A\nA: \"b\"..\"a\"",
    "start: A\nA: \"bc\"..\"d\"",
    "start: a\na: a",
    "start: \"a\"~-1",
    "start: \"a\"{3,1}",
    "begin: \"a\"",
    "start: \"a\"\nstart: \"b\"",
    "%import nothing.HERE\nstart: HERE",
    "%declare",
    "%override start: \"a\"",
    "start: <[5-3]>",
    "start: <[^*]>",
    "start: <|no_such_token|>",
    "start: %json {",
    "start: %json {\"type\": 5}",
    "start: %json {\"unknown\": 5}",
    "start: A\nA: %json {}",
    "start: %regex {}",
    "start: %lark {",
    "start: @other",
    "start[stop=\"a\", suffix=\"b\"]: \"c\"",
    "start[unknown=1]: \"c\"",
    "start.5: \"a\"",
    "start{a}: \"b\"",
    "start::_: \"a\"",
    "start: a::_\na: \"b\"",
    "start: \u{7f}",
    "%llguidance {\"no_such_option\": 1}\nstart: \"a\"",
    "start: \"a\" & \"b\"",
    "start: ((((((((((\"a\"))))))))))~0..999999999",
    "start: (",
    "start: )",
    "start: \"a\" |",
    "start: \"\\q\"",
];

fn faulty_specs() -> impl Iterator<Item = GrammarSpec> {
    let schemas = SCHEMAS.iter().map(|text| json_spec(serde_json::from_str(text).unwrap()));
    let regexes = REGEXES.iter().map(|text| GrammarSpec::Regex((*text).to_owned()));
    let grammars = LARK_GRAMMARS.iter().map(|text| GrammarSpec::Lark((*text).to_owned()));
    schemas.chain(regexes).chain(grammars)
}

#[test]
fn rejections_contain_no_text_of_the_library() {
    let compiler = GrammarCompiler::new(vocabulary()).unwrap();
    let (mut rejected, mut unnamed) = (0, Vec::new());
    for spec in faulty_specs() {
        let constraint = OutputConstraint::new(spec.clone(), "test").of_client_text();
        let Err(error) = compile_with(&compiler, &constraint) else { continue };
        let message = error.to_string();
        let words =
            ["regex parse", "regex_syntax", "llguidance", "derivre", ".rs", "panic", "error: "];
        let leaked = words.into_iter().chain(library_texts()).find(|text| message.contains(text));
        // Messages about schemas that are not passed to the library end with the place in the schema.
        assert!(leaked.is_none() || message.contains(", at #"), "{spec:?}: {leaked:?}: {message}");
        rejected += 1;
        if let GrammarError::Failed { detail } = error {
            unnamed.push(format!("{spec:?}: {detail}"));
        }
    }
    assert!(rejected > 80, "only {rejected} are rejected");
    assert!(unnamed.is_empty(), "errors without a message:\n{}", unnamed.join("\n"));
}

#[test]
fn positions_are_those_of_the_client_text() {
    let compiler = GrammarCompiler::new(vocabulary()).unwrap();
    let message =
        |constraint: OutputConstraint| compiler.dry_run(&constraint).unwrap_err().to_string();
    let lark = || {
        let text = "start: a\n\na: \"x\" missing\n";
        OutputConstraint::new(GrammarSpec::Lark(text.to_owned()), "test")
    };
    assert_eq!(message(lark().of_client_text()), "line 3, column 4: `missing` is not defined");
    assert_eq!(message(lark()), "`missing` is not defined", "a text that the server has written");
    let regex = OutputConstraint::new(GrammarSpec::Regex("a(".to_owned()), "test");
    assert_eq!(message(regex), "a regular expression is invalid: a group is not closed");
}
