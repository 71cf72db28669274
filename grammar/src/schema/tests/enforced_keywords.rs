//! Schemas with the keywords that are enforced, and texts that they accept and reject.

use super::*;

pub(super) fn reference_cases() -> Vec<SchemaTestCase> {
    let tree = json!({"type": "object", "properties": {"next": {"$ref": "#"}}, "additionalProperties": false});
    let items = json!({"$id": "https://example.org/list.json", "type": "array", "items": {"$ref": "item.json"},
        "$defs": {"it": {"$id": "item.json", "enum": [1, 2], "$defs": {"unused": {"not": {"type": "null"}}}}}});
    let named = json!({"items": {"$ref": "#one"}, "type": "array", "$defs": {"x": {"$anchor": "one", "const": 1}}});
    let old_name = json!({"items": {"$ref": "#one"}, "type": "array", "definitions": {"x": {"id": "#one", "const": 1}}});
    let place = json!({"properties": {"a": {"type": "integer"}, "b": {"$ref": "#/properties/a"}},
        "required": ["a", "b"], "type": "object"});
    let list = json!({"anyOf": [{"const": 1}, {"type": "array", "items": {"$ref": "#/anyOf/0"}}]});
    let recursive = json!({"type": "array", "items": {"$recursiveRef": "#"}});
    let dynamic = json!({"$ref": "#/$defs/list", "$defs": {"list": {"$dynamicAnchor": "node", "type": "array",
        "items": {"$dynamicRef": "#node"}}}});
    vec![
        case(&["$ref"], tree, &["{}", r#"{"next":{"next":{}}}"#], &[r#"{"next":1}"#]),
        case(&["$ref"], place, &[r#"{"a":1,"b":2}"#], &[r#"{"a":1,"b":"x"}"#]),
        case(&["$ref"], list, &["1", "[1,1]"], &["[2]", "[[1]]"]),
        case(&["$id", "$defs"], items, &["[1,2]"], &["[3]"]),
        case(&["$anchor", "$defs"], named, &["[1]"], &["[2]"]),
        case(&["id", "definitions"], old_name, &["[1]"], &["[2]"]),
        case(&["$recursiveRef"], recursive, &["[[],[[]]]"], &["[1]"]),
        case(&["$dynamicRef", "$dynamicAnchor"], dynamic, &["[[],[[]]]"], &["[1]"]),
    ]
}

pub(super) fn value_cases() -> Vec<SchemaTestCase> {
    vec![
        case(&["type"], json!({"type": ["string", "null", "null"]}), &["null", r#""x""#], &["1"]),
        case(&["type"], json!({"type": ["integer", "number"]}), &["1", "1.5"], &["null"]),
        case(&["const"], json!({"const": {"a": [1, null]}}), &[r#"{"a":[1,null]}"#], &["1", "{}"]),
        case(&["const"], json!({"const": null}), &["null"], &["1", ""]),
        case(
            &["enum"],
            json!({"enum": ["a\"é", 1.5, true, null, {"a": []}, 1.5]}),
            &["\"a\\\"é\"", "1.5", "true", "null", r#"{"a":[]}"#],
            &["false", "2", r#""b""#],
        ),
        case(
            &["nullable"],
            json!({"type": "integer", "nullable": true}),
            &["1", "null"],
            &["\"\""],
        ),
        case(&["nullable"], json!({"type": "integer", "nullable": false}), &["1"], &["null"]),
        case(&["allOf"], json!({"allOf": [{"minimum": 2}, {"type": "integer"}]}), &["2"], &["1"]),
        case(&["anyOf"], json!({"anyOf": [{"const": 1}, {"const": 2}]}), &["1", "2"], &["3"]),
        case(
            &["oneOf"],
            json!({"oneOf": [{"type": "string"}, {"type": "integer"}]}),
            &["1", r#""x""#],
            &["null"],
        ),
        case(
            &["not"],
            json!({"type": "object", "additionalProperties": {"const": 1}, "not": {"required": ["a"]}}),
            &["{}", r#"{"b":1}"#],
            &[r#"{"a":1}"#],
        ),
        case(
            &["not"],
            json!({"type": "object", "properties": {"a": {"not": {}}, "b": {"not": false}}}),
            &["{}", r#"{"b":1}"#],
            &[r#"{"a":1}"#],
        ),
        case(&["minimum"], json!({"type": "integer", "minimum": 3}), &["3"], &["2"]),
        case(&["maximum"], json!({"type": "integer", "maximum": 3}), &["3"], &["4"]),
        case(
            &["exclusiveMinimum"],
            json!({"type": "integer", "minimum": 3, "exclusiveMinimum": true}),
            &["4"],
            &["3"],
        ),
        case(
            &["exclusiveMaximum"],
            json!({"type": "integer", "maximum": 3, "exclusiveMaximum": true}),
            &["2"],
            &["3"],
        ),
        case(
            &["exclusiveMinimum", "exclusiveMaximum"],
            json!({"type": "integer", "exclusiveMinimum": 1, "exclusiveMaximum": 3}),
            &["2"],
            &["1", "3"],
        ),
        case(
            &["exclusiveMinimum"],
            json!({"type": "integer", "minimum": 3, "exclusiveMinimum": false}),
            &["3"],
            &["2"],
        ),
        case(&["multipleOf"], json!({"type": "integer", "multipleOf": 3}), &["6"], &["7"]),
        case(&["minLength"], json!({"type": "string", "minLength": 2}), &[r#""éa""#], &[r#""a""#]),
        case(&["maxLength"], json!({"type": "string", "maxLength": 1}), &[r#""a""#], &[r#""ab""#]),
        case(
            &["pattern"],
            json!({"type": "string", "pattern": "^a+$"}),
            &[r#""aa""#],
            &[r#""ab""#],
        ),
    ]
}

pub(super) fn array_cases() -> Vec<SchemaTestCase> {
    let tuple = json!({"type": "array", "prefixItems": [{"const": 1}], "items": {"const": 2}});
    let old_tuple =
        json!({"type": "array", "items": [{"const": 1}], "additionalItems": {"const": 2}});
    vec![
        case(
            &["items"],
            json!({"type": "array", "items": {"const": 1}}),
            &["[]", "[1,1]"],
            &["[2]"],
        ),
        case(&["items", "prefixItems"], tuple, &["[1,2,2]", "[1]"], &["[2]", "[1,1]"]),
        case(&["items", "additionalItems"], old_tuple, &["[1,2,2]"], &["[2]", "[1,1]"]),
        case(
            &["items"],
            json!({"type": "array", "items": [{"const": 1}], "additionalItems": false}),
            &["[]", "[1]"],
            &["[1,1]"],
        ),
        case(&["minItems"], json!({"type": "array", "minItems": 1}), &["[1]"], &["[]"]),
        case(&["maxItems"], json!({"type": "array", "maxItems": 1}), &["[1]"], &["[1,1]"]),
        case(
            &["unevaluatedItems"],
            json!({"type": "array", "prefixItems": [true], "unevaluatedItems": false}),
            &["[1]"],
            &["[1,1]"],
        ),
        case(
            &["uniqueItems"],
            json!({"type": "array", "items": {"const": 1}, "uniqueItems": false}),
            &["[1,1]"],
            &["[2]"],
        ),
        case(
            &["uniqueItems"],
            json!({"type": "array", "uniqueItems": true, "maxItems": 1}),
            &["[1]"],
            &["[1,1]"],
        ),
        case(
            &["contains", "minContains"],
            json!({"type": "array", "contains": {"const": 1}, "minContains": 0}),
            &["[]", "[2]"],
            &["1"],
        ),
    ]
}

pub(super) fn object_cases() -> Vec<SchemaTestCase> {
    let closed = |members: Value| {
        let mut schema = json!({"type": "object", "additionalProperties": false});
        schema.as_object_mut().unwrap().extend(members.as_object().unwrap().clone());
        schema
    };
    let pair = json!({"a": {"const": 1}, "b": {"const": 2}});
    vec![
        case(
            &["properties", "additionalProperties", "required"],
            closed(json!({"properties": pair, "required": ["a", "a"]})),
            &[r#"{"a":1}"#, r#"{"a":1,"b":2}"#],
            &["{}", r#"{"b":2}"#, r#"{"a":1,"c":3}"#],
        ),
        case(
            &["patternProperties"],
            closed(json!({"patternProperties": {"^x": {"const": 1}}})),
            &[r#"{"xy":1}"#],
            &[r#"{"xy":2}"#, r#"{"a":1}"#],
        ),
        case(
            &["minProperties"],
            json!({"type": "object", "minProperties": 1}),
            &[r#"{"a":1}"#],
            &["{}"],
        ),
        case(
            &["maxProperties"],
            json!({"type": "object", "maxProperties": 1}),
            &["{}", r#"{"a":1}"#],
            &[r#"{"a":1,"b":1}"#],
        ),
        case(
            &["dependentRequired"],
            closed(json!({"properties": pair, "dependentRequired": {"a": ["b"]}})),
            &["{}", r#"{"b":2}"#, r#"{"a":1,"b":2}"#],
            &[r#"{"a":1}"#],
        ),
        case(
            &["dependentSchemas"],
            closed(json!({"properties": pair, "dependentSchemas": {"a": {"required": ["b"]}}})),
            &["{}", r#"{"b":2}"#, r#"{"a":1,"b":2}"#],
            &[r#"{"a":1}"#],
        ),
        case(
            &["dependencies"],
            closed(
                json!({"properties": pair, "dependencies": {"a": ["b"], "b": {"required": ["a"]}}}),
            ),
            &["{}", r#"{"a":1,"b":2}"#],
            &[r#"{"a":1}"#, r#"{"b":2}"#],
        ),
        case(
            &["unevaluatedProperties"],
            json!({"type": "object", "properties": pair, "unevaluatedProperties": false}),
            &[r#"{"a":1,"b":2}"#],
            &[r#"{"c":1}"#],
        ),
        case(
            &["propertyNames"],
            json!({"type": "object", "propertyNames": {"$ref": "#/$defs/name"},
                "additionalProperties": {"const": 1}, "$defs": {"name": {"enum": ["a", "b"]}}}),
            &["{}", r#"{"a":1,"b":1}"#],
            &[r#"{"c":1}"#, r#"{"a":2}"#],
        ),
        case(
            &["propertyNames"],
            json!({"type": "object", "propertyNames": {"pattern": "^x"}}),
            &[r#"{"xy":2}"#],
            &[r#"{"a":1}"#],
        ),
        case(
            &["propertyNames"],
            json!({"type": "object", "propertyNames": {"type": "string", "maxLength": 2}}),
            &[r#"{"ab":2}"#],
            &[r#"{"abc":1}"#],
        ),
        case(
            &["propertyNames"],
            json!({"type": "object", "propertyNames": {"type": "string"}}),
            &[r#"{"abc":1}"#],
            &["1"],
        ),
    ]
}

/// Returns a case for each enforced format, with a valid text; `x y` is invalid in all formats.
pub(super) fn format_cases() -> Vec<SchemaTestCase> {
    let examples: [(&'static [&'static str], &'static [&'static str]); 10] = [
        (&["date-time"], &[r#""2024-02-29T23:59:60Z""#]),
        (&["time"], &[r#""23:59:59+01:00""#]),
        (&["date"], &[r#""2024-02-29""#]),
        (&["duration"], &[r#""P3DT12H""#]),
        (&["email"], &[r#""a.b@example.org""#]),
        (&["hostname"], &[r#""example.org""#]),
        (&["ipv4"], &[r#""127.0.0.1""#]),
        (&["ipv6"], &[r#""::1""#]),
        (&["uuid"], &[r#""123e4567-e89b-12d3-a456-426614174000""#]),
        (&["uri"], &[r#""https://example.org/a?b=c#d""#]),
    ];
    let all = examples.into_iter().map(|(format, accepted)| {
        let schema = json!({"type": "string", "format": format[0]});
        case(format, schema, accepted, &[r#""x y""#])
    });
    all.collect()
}
