//! Normalises array keywords.

use super::SchemaNormaliser;
use super::keywords::assertions;
use crate::compile::GrammarError;
use serde_json::{Map, Value};

/// Keywords that apply further schemas to the same value. If one of them is present, `unevaluatedItems` and
/// `unevaluatedProperties` are rejected, because the items and properties that these schemas evaluate are
/// not determined.
const APPLICATORS: [&str; 12] = [
    "$ref",
    "$dynamicRef",
    "$recursiveRef",
    "allOf",
    "anyOf",
    "oneOf",
    "if",
    "then",
    "else",
    "dependencies",
    "dependentSchemas",
    "not",
];

/// Whether `schema` contains keywords that apply further schemas to the same value.
pub(super) fn has_applicators(schema: &Map<String, Value>) -> bool {
    assertions(schema).any(|(keyword, _)| APPLICATORS.contains(&keyword))
}

/// Whether a schema accepts every value.
pub(super) fn accepts_everything(schema: &Value) -> bool {
    match schema {
        Value::Bool(accepts) => *accepts,
        Value::Object(members) => assertions(members).next().is_none(),
        _ => false,
    }
}

impl SchemaNormaliser<'_> {
    /// Writes the normal form of one array keyword.
    pub(super) fn item_keyword(
        &mut self,
        keyword: &str,
        value: &Value,
        schema: &Map<String, Value>,
        written: &mut Map<String, Value>,
    ) -> Result<(), GrammarError> {
        let is_tuple = schema.get("items").is_some_and(Value::is_array);
        match keyword {
            // Before draft 2020-12, a list in `items` had the meaning of `prefixItems`.
            "items" if is_tuple && schema.contains_key("prefixItems") => {
                return Err(self.rejected("items must be a schema if prefixItems is given"));
            }
            "items" if is_tuple => {
                let schemas = self.list("items", value)?;
                written.insert("prefixItems".to_owned(), Value::Array(schemas));
            }
            "additionalItems" if is_tuple => {
                drop(written.insert("items".to_owned(), self.schema(value)?));
            }
            "prefixItems" => {
                let schemas = self.list("prefixItems", value)?;
                written.insert(keyword.to_owned(), Value::Array(schemas));
            }
            "items" => drop(written.insert(keyword.to_owned(), self.schema(value)?)),
            "unevaluatedItems" if accepts_everything(value) => {}
            "unevaluatedItems" if has_applicators(schema) => {
                return Err(self.unenforceable(keyword));
            }
            "unevaluatedItems" => {
                if !schema.contains_key("items") {
                    written.insert("items".to_owned(), self.schema(value)?);
                } else if is_tuple && !schema.contains_key("additionalItems") {
                    return Err(self.unenforceable(keyword));
                }
            }
            "contains" if !is_vacuous_contains(schema) => return Err(self.unenforceable(keyword)),
            "uniqueItems" if value != &Value::Bool(false) && !has_at_most_one_item(schema) => {
                return Err(self.unenforceable(keyword));
            }
            // The remaining keywords have no effect alone: `additionalItems` needs a list in `items`;
            // `minContains` and `maxContains` need `contains`.
            _ => {}
        }
        Ok(())
    }
}

/// Whether `contains` accepts every array: no item has to match, and any number of items may match.
fn is_vacuous_contains(schema: &Map<String, Value>) -> bool {
    schema.get("minContains").and_then(Value::as_f64) == Some(0.0)
        && !schema.contains_key("maxContains")
}

fn has_at_most_one_item(schema: &Map<String, Value>) -> bool {
    schema.get("maxItems").and_then(Value::as_f64).is_some_and(|count| count <= 1.0)
}
