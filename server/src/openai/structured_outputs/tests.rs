//! Tests of the structured output fields.

use super::*;

fn take_from(body: &str) -> Result<Option<OutputConstraint>, ApiError> {
    take(&mut RequestFields::of_body(JsonValue::parse(body.as_bytes())?)?)
}

fn found(body: &str) -> (String, GrammarSpec) {
    let constraint = take_from(body).unwrap().expect("a constraint");
    (constraint.param, constraint.spec)
}

fn rejected(body: &str) -> (String, &'static str) {
    let error = take_from(body).expect_err("must be rejected");
    (error.param.unwrap_or_default(), error.reason)
}

/// Returns request bodies that constrain the output to the JSON schema `schema`, one for each alias.
fn schema_requests(schema: &str) -> [String; 4] {
    let text = serde_json::to_string(schema).unwrap();
    [
        format!(
            r#"{{"response_format":{{"type":"json_schema","json_schema":{{"name":"n","strict":true,"schema":{schema}}}}}}}"#
        ),
        format!(r#"{{"structured_outputs":{{"json":{schema}}}}}"#),
        format!(r#"{{"structured_outputs":{{"json":{text}}}}}"#),
        format!(r#"{{"json_schema":{text}}}"#),
    ]
}

#[test]
fn every_alias_gives_the_same_constraint() {
    assert_eq!(take_from(r#"{"response_format":{"type":"text"}}"#).unwrap(), None);
    assert_eq!(take_from(r#"{"structured_outputs":null}"#).unwrap(), None);
    let absent = r#"{"response_format":{"type":"text","json_schema":null,"what":null}}"#;
    assert_eq!(take_from(absent).unwrap(), None);
    let any = GrammarSpec::Json {
        schema: serde_json::json!({"type": "integer"}),
        whitespace: JsonWhitespace::Any,
    };
    for body in schema_requests(r#"{"type":"integer"}"#) {
        assert_eq!(found(&body).1, any, "{body}");
    }
    let (param, spec) = found(r#"{"structured_outputs":{"choice":["a","b"]}}"#);
    assert_eq!(
        (param.as_str(), spec),
        ("structured_outputs.choice", GrammarSpec::Choice(vec!["a".into(), "b".into()]))
    );
    assert_eq!(found(r#"{"regex":"a+"}"#), ("regex".into(), GrammarSpec::Regex("a+".into())));
    let (_, spec) =
        found(r#"{"structured_outputs":{"json_object":true,"disable_any_whitespace":true}}"#);
    assert_eq!(spec, GrammarSpec::json_object(JsonWhitespace::None));
}

#[test]
fn structural_tags_are_objects_or_text() {
    let tag = r#"{"type":"structural_tag","format":{"type":"const_string","value":"a"}}"#;
    let text = serde_json::to_string(tag).unwrap();
    let expected = found(&format!(r#"{{"response_format":{tag}}}"#)).1;
    assert!(matches!(&expected, GrammarSpec::Lark(grammar) if grammar.contains("\"a\"")));
    for tag in [tag, &text] {
        let (param, spec) =
            found(&format!(r#"{{"structured_outputs":{{"structural_tag":{tag}}}}}"#));
        assert_eq!((param.as_str(), &spec), ("structured_outputs.structural_tag", &expected));
    }
}

#[test]
fn additional_properties_are_forbidden_by_default() {
    let body = r#"{"structured_outputs":{"disable_additional_properties":true,
        "json":{"properties":{"a":{"properties":{},"additionalProperties":{"type":"null"}}}}}}"#;
    let GrammarSpec::Json { schema, .. } = found(body).1 else { panic!("a schema") };
    assert_eq!(schema["additionalProperties"], false);
    assert_eq!(schema["properties"]["a"]["additionalProperties"]["type"], "null");
}

#[test]
fn validation_errors_name_the_key() {
    let cases = [
        (r#"{"response_format":{"type":"structural_tag"}}"#, "response_format.structures"),
        (
            r#"{"response_format":{"type":"structural_tag","format":{"type":"any_tokens"}}}"#,
            "response_format.format.type",
        ),
        (r#"{"response_format":{"type":"grammar"}}"#, "response_format.type"),
        (r#"{"response_format":{"type":"json_object","strict":true}}"#, "response_format.strict"),
        (r#"{"response_format":{"type":"json_schema"}}"#, "response_format.json_schema"),
        (
            r#"{"response_format":{"type":"json_schema","json_schema":{"name":"x"}}}"#,
            "response_format.json_schema.schema",
        ),
        (r#"{"structured_outputs":{}}"#, "structured_outputs"),
        (r#"{"structured_outputs":{"regex":"a","choice":["b"]}}"#, "structured_outputs"),
        (
            r#"{"structured_outputs":{"regex":"a","whitespace_pattern":" "}}"#,
            "structured_outputs.whitespace_pattern",
        ),
        (
            r#"{"structured_outputs":{"structural_tag":{}}}"#,
            "structured_outputs.structural_tag.structures",
        ),
        (r#"{"structured_outputs":{"structural_tag":"{"}}"#, "structured_outputs.structural_tag"),
        (r#"{"structured_outputs":{"regex":"a","backend":"x"}}"#, "structured_outputs.backend"),
        (r#"{"structured_outputs":{"json":"{"}}"#, "structured_outputs.json"),
        (r#"{"structured_outputs":{"choice":[]}}"#, "structured_outputs.choice"),
        (r#"{"regex":"a","response_format":{"type":"json_object"}}"#, "regex"),
    ];
    for (body, param) in cases {
        assert_eq!(rejected(body).0, param, "{body}");
    }
}
