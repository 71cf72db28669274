//! Tests of JSON Schema keywords with the grammar engine. Each table row in `docs/structured-output.md` has a
//! test case here, and each test case has a table row.

mod enforced_keywords;

use super::normalise;
use crate::compile::{GrammarCompiler, GrammarError};
use crate::constraint::OutputConstraint;
use crate::tests::{accepts, compile_with, json_spec, vocabulary};
use enforced_keywords::{array_cases, format_cases, object_cases, reference_cases, value_cases};
use serde_json::{Value, json};
use std::collections::BTreeSet;

const PAGE: &str = include_str!("../../../docs/structured-output.md");

/// Schema, with texts that its grammar accepts and texts that it rejects.
struct SchemaTestCase {
    /// Keywords covered by the case, as written in the documentation page.
    keywords: &'static [&'static str],
    schema: Value,
    accepted: &'static [&'static str],
    rejected: &'static [&'static str],
}

fn case(
    keywords: &'static [&'static str],
    schema: Value,
    accepted: &'static [&'static str],
    rejected: &'static [&'static str],
) -> SchemaTestCase {
    SchemaTestCase { keywords, schema, accepted, rejected }
}

fn error(compiler: &GrammarCompiler, schema: &Value) -> String {
    let constraint = OutputConstraint::new(json_spec(schema.clone()), "test");
    match compile_with(compiler, &constraint) {
        Err(GrammarError::Invalid(message)) => message,
        other => panic!("{schema}: {other:?}"),
    }
}

fn check(cases: &[SchemaTestCase]) {
    let compiler = GrammarCompiler::new(vocabulary()).unwrap();
    for SchemaTestCase { schema, accepted, rejected, .. } in cases {
        let constraint = OutputConstraint::new(json_spec(schema.clone()), "test");
        let compiled = compile_with(&compiler, &constraint)
            .unwrap_or_else(|error| panic!("{schema}: {error}"));
        for text in *accepted {
            assert!(accepts(&compiled, text), "{schema} must accept {text}");
        }
        for text in *rejected {
            assert!(!accepts(&compiled, text), "{schema} must not accept {text}");
        }
    }
}

/// Returns the words in backticks in the first column of the table under a heading of the documentation page.
fn documented(heading: &str) -> BTreeSet<&'static str> {
    let section = PAGE.split_once(&format!("\n### {heading}\n")).expect(heading).1;
    let section = section.split("\n#").next().unwrap_or_default();
    let rows = section.lines().filter(|line| line.starts_with("| `"));
    rows.flat_map(|row| row.split('|').nth(1).unwrap_or_default().split('`').skip(1).step_by(2))
        .collect()
}

fn shown(cases: &[SchemaTestCase]) -> BTreeSet<&'static str> {
    cases.iter().flat_map(|case| case.keywords.iter().copied()).collect()
}

#[test]
fn enforced_keywords_are_those_of_the_page() {
    let cases: Vec<SchemaTestCase> =
        [reference_cases(), value_cases(), array_cases(), object_cases()]
            .into_iter()
            .flatten()
            .collect();
    assert_eq!(shown(&cases), documented("Enforced keywords"));
    check(&cases);
}

#[test]
fn enforced_formats_are_those_of_the_page() {
    let cases = format_cases();
    assert_eq!(shown(&cases), documented("Enforced formats"));
    assert_eq!(shown(&cases), super::keywords::ENFORCED_FORMATS.into_iter().collect());
    check(&cases);
}

/// Keywords that are accepted and not enforced.
static ANNOTATIONS: [&str; 19] = [
    "$schema",
    "$comment",
    "$vocabulary",
    "title",
    "description",
    "default",
    "example",
    "examples",
    "deprecated",
    "readOnly",
    "writeOnly",
    "contentEncoding",
    "contentMediaType",
    "contentSchema",
    "discriminator",
    "externalDocs",
    "xml",
    "x-order",
    "format",
];

#[test]
fn annotations_are_accepted_and_not_enforced() {
    let values = [json!("x"), json!({"const": 1}), json!([1]), Value::Null];
    let keyword_case = |(at, keywords): (usize, &'static [&'static str])| {
        let value = if keywords == ["format"] { json!("int64") } else { values[at % 4].clone() };
        let schema = json!({"type": "string", keywords[0]: value});
        case(keywords, schema, &[r#""x y""#], &["1"])
    };
    let cases: Vec<SchemaTestCase> = ANNOTATIONS.chunks(1).enumerate().map(keyword_case).collect();
    assert_eq!(shown(&cases), documented("Accepted and not enforced"));
    check(&cases);
}

#[test]
fn keywords_that_cannot_be_enforced_are_rejected_by_name() {
    let compiler = GrammarCompiler::new(vocabulary()).unwrap();
    let cases = [
        ("not", json!({"not": {"type": "string"}})),
        ("if", json!({"if": {"const": 1}, "then": {"type": "integer"}})),
        ("uniqueItems", json!({"type": "array", "uniqueItems": true})),
        ("contains", json!({"type": "array", "contains": {"const": 1}})),
        (
            "unevaluatedItems",
            json!({"allOf": [{"prefixItems": [true]}], "unevaluatedItems": false}),
        ),
        (
            "unevaluatedProperties",
            json!({"allOf": [{"properties": {"a": true}}], "unevaluatedProperties": false}),
        ),
        ("propertyNames", json!({"properties": {"a": true}, "propertyNames": {"pattern": "a"}})),
        ("oneOf", json!({"oneOf": [{"minimum": 1}, {"maximum": 5}]})),
        ("$ref", json!({"$ref": "https://example.org/a.json"})),
        ("x-guidance", json!({"x-guidance": {"lenient": true}})),
    ];
    for (keyword, schema) in &cases {
        let message = error(&compiler, schema);
        assert!(message.contains(keyword), "{schema}: {message}");
    }
    let names: BTreeSet<&str> = cases.iter().map(|(keyword, _)| *keyword).collect();
    assert_eq!(names, documented("Rejected keywords"));
}

#[test]
fn references_are_uri_fragments_with_pointers() {
    for (reference, key) in [
        ("#/$defs/a~1b", "a/b"),
        ("#/$defs/a~0b", "a~b"),
        ("#/$defs/a%20b", "a b"),
        ("#/$defs/a b", "a b"),
        ("#/$defs/Box%3CInt%3E", "Box<Int>"),
        ("#/$defs/Box<Int>", "Box<Int>"),
        ("#/$defs/Box%3CInt%3E", "Box%3CInt%3E"),
        ("#/$defs/gr%C3%B6%C3%9Fe", "größe"),
        ("#/%24defs/plain", "plain"),
        ("#/$defs/", ""),
    ] {
        check(&[case(
            &[],
            json!({"$ref": reference, "$defs": {key: {"const": 7}}}),
            &["7"],
            &["8"],
        )]);
    }
    let openapi =
        json!({"$ref": "#/paths/~1x/get/200", "paths": {"/x": {"get": {"200": {"const": 7}}}}});
    check(&[case(&[], openapi, &["7"], &["8"])]);
}

#[test]
fn references_that_name_no_schema_are_rejected() {
    let compiler = GrammarCompiler::new(vocabulary()).unwrap();
    for reference in [
        "#/nowhere",
        "#nowhere",
        "other.json",
        "http://127.0.0.1:1/schema#/$defs/a",
        "#/$defs/a/const",
        "#/$defs/a/enum/00",
        "#/$defs/%zz",
        "#/$defs/a~2",
    ] {
        let message = error(&compiler, &json!({"$ref": reference, "$defs": {"a": {"enum": [{}]}}}));
        assert!(message.contains(reference), "{message}");
    }
    for schema in [
        json!({"$ref": "#"}),
        json!({"$ref": "#/$defs/a", "$defs": {"a": {"$ref": "#/$defs/b"}, "b": {"$ref": "#/$defs/a"}}}),
    ] {
        assert!(error(&compiler, &schema).contains("refers only to itself"), "{schema}");
    }
    let twice = json!({"$ref": "#a", "$defs": {"x": {"$anchor": "a"}, "y": {"$anchor": "a"}}});
    assert!(error(&compiler, &twice).contains("more than one schema"));
}

#[test]
fn malformed_keywords_name_their_location() {
    let compiler = GrammarCompiler::new(vocabulary()).unwrap();
    for (schema, location) in [
        (json!({"properties": {"a/b": 1}}), "#/properties/a~1b"),
        (json!({"anyOf": {}}), "anyOf must be a list of schemas, at #/anyOf"),
        (json!({"required": true}), "required must be a list of property names"),
        (json!({"items": [1]}), "#/items/0"),
        (json!({"$ref": 1}), "$ref must be a string"),
        (json!({"properties": []}), "properties must be an object"),
    ] {
        let message = error(&compiler, &schema);
        assert!(message.contains(location), "{schema}: {message}");
    }
    let nulls =
        json!({"type": "integer", "enum": null, "$ref": null, "items": null, "required": null});
    check(&[case(&[], nulls, &["1"], &["null"])]);
}

#[test]
fn property_order_is_that_of_the_schema() {
    let schema = json!({"title": "x", "required": ["b", "a"], "properties": {"b": {"$ref": "#/$defs/v"},
        "a": {"type": "integer"}}, "$defs": {"v": {"const": 1}}, "type": "object"});
    let expected = json!({"required": ["b", "a"], "properties": {"b": {"$ref": "#/$defs/v_1"},
        "a": {"type": "integer"}}, "type": "object", "$defs": {"v_1": {"const": 1}}});
    assert_eq!(normalise(&schema).unwrap().to_string(), expected.to_string());
}

#[test]
fn work_is_bounded_by_the_written_document() {
    // Each schema in the chain is referenced, so it is written as a definition that contains all schemas
    // nested in it.
    let mut chain = json!({"enum": (0..4_000).collect::<Vec<_>>()});
    for _ in 0..50 {
        chain = json!({"properties": {"a": chain}});
    }
    let pointers =
        (0..50).map(|depth| json!({"$ref": format!("#{}", "/properties/a".repeat(depth + 1))}));
    chain["anyOf"] = Value::from(pointers.collect::<Vec<_>>());
    let message = normalise(&chain).unwrap_err().to_string();
    assert!(message.contains("with its references resolved"), "{message}");
    let names: Vec<String> = (0..2_000).map(|name| format!("n{name}")).collect();
    let values: Vec<String> = (0..2_000).map(|value| format!("v{value}")).collect();
    let wide = json!({"propertyNames": {"enum": names}, "additionalProperties": {"enum": values}});
    assert!(normalise(&wide).unwrap().to_string().len() < 200_000);
}
