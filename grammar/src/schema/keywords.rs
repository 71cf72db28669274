//! JSON Schema keywords, classified by how they are processed.

use serde_json::{Map, Value};

/// Keywords whose values are data, not schemas.
pub(super) const DATA_KEYWORDS: [&str; 5] = ["const", "enum", "default", "examples", "example"];

/// Keywords whose members are schemas with user-defined names.
pub(super) const NAMING_KEYWORDS: [&str; 6] =
    ["properties", "patternProperties", "$defs", "definitions", "dependentSchemas", "dependencies"];

/// Keywords copied unchanged, which the grammar engine enforces with the value in the request.
pub(super) const COPIED_KEYWORDS: [&str; 9] = [
    "const",
    "pattern",
    "minLength",
    "maxLength",
    "minItems",
    "maxItems",
    "minProperties",
    "maxProperties",
    "multipleOf",
];

/// Keywords that are rewritten for the grammar engine, or rejected if their value cannot be enforced.
pub(super) const REWRITTEN_KEYWORDS: [&str; 36] = [
    "$ref",
    "$dynamicRef",
    "$recursiveRef",
    "allOf",
    "anyOf",
    "oneOf",
    "not",
    "if",
    "then",
    "else",
    "enum",
    "type",
    "nullable",
    "format",
    "properties",
    "patternProperties",
    "additionalProperties",
    "unevaluatedProperties",
    "propertyNames",
    "required",
    "dependencies",
    "dependentRequired",
    "dependentSchemas",
    "items",
    "prefixItems",
    "additionalItems",
    "unevaluatedItems",
    "contains",
    "minContains",
    "maxContains",
    "uniqueItems",
    "minimum",
    "maximum",
    "exclusiveMinimum",
    "exclusiveMaximum",
    "x-guidance",
];

/// Enforced values of `format`. All other formats are annotations.
pub(super) const ENFORCED_FORMATS: [&str; 10] =
    ["date-time", "time", "date", "duration", "email", "hostname", "ipv4", "ipv6", "uuid", "uri"];

/// Whether a keyword can affect which values a schema accepts. All other keywords are annotations or unknown.
pub(super) fn is_assertion(keyword: &str) -> bool {
    COPIED_KEYWORDS.contains(&keyword) || REWRITTEN_KEYWORDS.contains(&keyword)
}

/// Returns the members of a schema that can affect which values it accepts. A keyword with the value `null`
/// counts as absent, except `const`.
pub(super) fn assertions(schema: &Map<String, Value>) -> impl Iterator<Item = (&str, &Value)> {
    let members = schema.iter().map(|(keyword, value)| (keyword.as_str(), value));
    members.filter(|(keyword, value)| {
        is_assertion(keyword) && (!value.is_null() || *keyword == "const")
    })
}
