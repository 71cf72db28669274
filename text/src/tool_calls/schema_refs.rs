//! Resolves `$ref` references in a tool's schema, and extracts a part of the schema together with all
//! definitions that its references need.

use serde_json::{Map, Value, json};
use std::borrow::Cow;

/// Keywords whose values are data, not schemas: a member `$ref` in them is not a reference.
const DATA_KEYWORDS: &[&str] = &["enum", "const", "default", "examples", "example"];

/// Returns the part of the schema `root` that the `$ref` of `schema` points to; `None` if there is no `$ref`,
/// or if it does not point into `root`.
pub(super) fn target<'a>(root: &'a Value, schema: &Value) -> Option<&'a Value> {
    let fragment = schema.get("$ref")?.as_str()?.strip_prefix('#')?;
    root.pointer(&percent_decoded(fragment)?)
}

/// Returns the part `schema` of the schema `root` as a standalone schema: every schema that it references,
/// directly or indirectly, is included as a definition. References that do not point into `root` are
/// unchanged, so that the grammar compiler rejects them.
pub(super) fn extracted(root: &Value, schema: &Value) -> Value {
    let mut references = Vec::new();
    let mut part = with_local_references(root, schema, &mut references);
    let mut definitions = Map::new();
    while let Some(reference) = references.get(definitions.len()).cloned() {
        let target = target(root, &json!({"$ref": reference})).unwrap_or(&Value::Null);
        let definition = with_local_references(root, target, &mut references);
        definitions.insert(definitions.len().to_string(), definition);
    }
    if let Value::Object(part) = &mut part {
        part.remove("definitions");
        part.remove("$defs");
        if !definitions.is_empty() {
            part.insert("$defs".to_owned(), Value::Object(definitions));
        }
    }
    part
}

/// Copies `schema` and replaces each reference by a reference to a numbered definition; `references[n]` is
/// the original reference of definition `n`.
fn with_local_references(root: &Value, schema: &Value, references: &mut Vec<String>) -> Value {
    match schema {
        Value::Array(parts) => {
            parts.iter().map(|part| with_local_references(root, part, references)).collect()
        }
        Value::Object(members) => {
            let member = |(key, value): (&String, &Value)| {
                let value = match value.as_str() {
                    Some(reference) if key == "$ref" && target(root, schema).is_some() => {
                        Value::from(format!("#/$defs/{}", number(reference, references)))
                    }
                    _ if DATA_KEYWORDS.contains(&key.as_str()) => value.clone(),
                    _ => with_local_references(root, value, references),
                };
                (key.clone(), value)
            };
            members.iter().map(member).collect()
        }
        other => other.clone(),
    }
}

fn number(reference: &str, references: &mut Vec<String>) -> usize {
    references.iter().position(|known| known == reference).unwrap_or_else(|| {
        references.push(reference.to_owned());
        references.len() - 1
    })
}

/// Decodes `%XX` in the fragment of a URI reference; `None` if the result is not UTF-8.
fn percent_decoded(fragment: &str) -> Option<Cow<'_, str>> {
    if !fragment.contains('%') {
        return Some(Cow::Borrowed(fragment));
    }
    let (mut bytes, mut rest) = (Vec::new(), fragment.as_bytes());
    while let Some((&byte, after)) = rest.split_first() {
        let hex =
            after.get(..2).filter(|_| byte == b'%').and_then(|hex| std::str::from_utf8(hex).ok());
        let decoded = hex.and_then(|hex| u8::from_str_radix(hex, 16).ok());
        bytes.push(decoded.unwrap_or(byte));
        rest = if decoded.is_some() { &after[2..] } else { after };
    }
    String::from_utf8(bytes).ok().map(Cow::Owned)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn references_of_an_extracted_schema_resolve() {
        let root = json!({
            "properties": {"a": {"$ref": "#/$defs/list"}, "b": {"type": "null"}},
            "$defs": {"list": {"items": {"$ref": "#/$defs/x~1y%20z"}, "default": {"$ref": "#/b"}},
                      "x/y z": {"anyOf": [{"$ref": "#/$defs/list"}, {"$ref": "#/properties/b"}]}},
        });
        let expected = json!({
            "$ref": "#/$defs/0",
            "$defs": {
                "0": {"items": {"$ref": "#/$defs/1"}, "default": {"$ref": "#/b"}},
                "1": {"anyOf": [{"$ref": "#/$defs/0"}, {"$ref": "#/$defs/2"}]},
                "2": {"type": "null"},
            },
        });
        assert_eq!(extracted(&root, &root["properties"]["a"]), expected);
        let outside = json!({"$ref": "https://example.org/schema"});
        assert_eq!(extracted(&root, &outside), outside);
        assert_eq!(target(&root, &outside), None);
        assert_eq!(target(&root, &json!({"$ref": "#"})), Some(&root));
    }
}
