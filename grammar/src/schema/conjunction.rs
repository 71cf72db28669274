//! Adds keywords to a written schema without replacing those that it has.

use super::keywords;
use serde_json::{Map, Value, json};
use std::collections::HashSet;

/// Adds `schema` to `written` as a further condition that a value must satisfy (`allOf`).
pub(super) fn add_conjunct(written: &mut Map<String, Value>, schema: Value) {
    match schema {
        Value::Object(mut members) if members.len() == 1 && !written.contains_key("$ref") => {
            if let Some(reference) = members.remove("$ref") {
                written.insert("$ref".to_owned(), reference);
                return;
            }
            add_combination(written, "allOf", vec![Value::Object(members)]);
        }
        schema => add_combination(written, "allOf", vec![schema]),
    }
}

/// Adds a list of schemas for `allOf`, `anyOf` or `oneOf`, even if the keyword has already been written.
pub(super) fn add_combination(
    written: &mut Map<String, Value>,
    keyword: &str,
    mut schemas: Vec<Value>,
) {
    match written.get_mut(keyword) {
        None => drop(written.insert(keyword.to_owned(), Value::Array(schemas))),
        Some(Value::Array(list)) if keyword == "allOf" => list.append(&mut schemas),
        Some(_) => add_conjunct(written, json!({keyword: schemas})),
    }
}

/// Returns a list with each value only at its first position.
pub(super) fn without_duplicates(value: &Value) -> Value {
    let Some(list) = value.as_array() else { return value.clone() };
    let mut seen = HashSet::new();
    Value::Array(list.iter().filter(|item| seen.insert(item.to_string())).cloned().collect())
}

/// Returns the value of `type`, with `null` added if OpenAPI's `nullable` allows it.
pub(super) fn types(value: &Value, schema: &Map<String, Value>) -> Value {
    let mut list = match value {
        Value::Array(list) => list.clone(),
        other => vec![other.clone()],
    };
    if schema.get("nullable") == Some(&Value::Bool(true)) {
        list.push(Value::from("null"));
    }
    if list.iter().any(|name| name == "number") {
        list.retain(|name| name != "integer");
    }
    match without_duplicates(&Value::Array(list)) {
        Value::Array(mut list) if list.len() == 1 => list.remove(0),
        list => list,
    }
}

pub(super) fn is_annotation_format(format: &Value) -> bool {
    format.as_str().is_some_and(|format| !keywords::ENFORCED_FORMATS.contains(&format))
}

/// Writes a numeric bound. In draft-04, `exclusiveMinimum` is a boolean that makes `minimum` exclusive.
pub(super) fn add_bound(
    keyword: &str,
    value: &Value,
    schema: &Map<String, Value>,
    written: &mut Map<String, Value>,
) {
    let exclusive = match keyword {
        "minimum" => "exclusiveMinimum",
        "maximum" => "exclusiveMaximum",
        _ if value.is_boolean() => return,
        _ => keyword,
    };
    let keyword = match schema.get(exclusive) {
        Some(Value::Bool(true)) => exclusive,
        _ => keyword,
    };
    written.insert(keyword.to_owned(), value.clone());
}
