//! Normalises object keywords.

use super::item_keywords::{accepts_everything, has_applicators};
use super::keywords::assertions;
use super::{SchemaNormaliser, add_conjunct, without_duplicates};
use crate::compile::GrammarError;
use serde_json::{Map, Value, json};

/// Maximum number of properties in one dependency keyword. Each property doubles the size of the object's
/// grammar.
const DEPENDENTS_MAX: usize = 6;

const NAMES_KEYWORD: &str = "propertyNames";

/// Constraint that `propertyNames` puts on the property names of an object.
enum PropertyNameConstraint {
    /// Each property name must be one of these names.
    OneOf(Vec<String>),
    /// Each property name must match this regular expression.
    Matching(String),
}

impl SchemaNormaliser<'_> {
    /// Writes the normal form of one object keyword.
    pub(super) fn object_keyword(
        &mut self,
        keyword: &str,
        value: &Value,
        schema: &Map<String, Value>,
        written: &mut Map<String, Value>,
    ) -> Result<(), GrammarError> {
        let normalised = match keyword {
            "properties" | "patternProperties" => self.named_schemas(keyword, value)?,
            "additionalProperties" => self.schema(value)?,
            "required" => Value::from(self.names(keyword, value)?),
            "unevaluatedProperties" => {
                return self.unevaluated_properties(keyword, value, schema, written);
            }
            "dependencies" | "dependentRequired" | "dependentSchemas" => {
                return self.dependencies(keyword, value, written);
            }
            // `propertyNames` is written by `constrain_names` after all other keywords.
            _ => return Ok(()),
        };
        written.insert(keyword.to_owned(), normalised);
        Ok(())
    }

    /// Writes `unevaluatedProperties` as `additionalProperties`, which has the same meaning in a schema
    /// without applicators.
    fn unevaluated_properties(
        &mut self,
        keyword: &str,
        value: &Value,
        schema: &Map<String, Value>,
        written: &mut Map<String, Value>,
    ) -> Result<(), GrammarError> {
        if accepts_everything(value) {
            return Ok(());
        }
        if has_applicators(schema) {
            return Err(self.unenforceable(keyword));
        }
        if !schema.contains_key("additionalProperties") {
            written.insert("additionalProperties".to_owned(), self.schema(value)?);
        }
        Ok(())
    }

    fn named_schemas(&mut self, keyword: &str, value: &Value) -> Result<Value, GrammarError> {
        let Some(named) = value.as_object() else {
            return Err(self.rejected(&format!("{keyword} must be an object")));
        };
        let mut written = Map::new();
        for (name, schema) in named {
            let schema = self.inside(name, |normaliser| normaliser.schema(schema))?;
            written.insert(name.clone(), schema);
        }
        Ok(Value::Object(written))
    }

    /// Returns a list of property names without duplicates.
    fn names(&self, keyword: &str, value: &Value) -> Result<Vec<String>, GrammarError> {
        let not_names = || self.rejected(&format!("{keyword} must be a list of property names"));
        let Value::Array(list) = without_duplicates(value) else { return Err(not_names()) };
        let names = list.iter().map(|name| name.as_str().map(str::to_owned));
        names.collect::<Option<_>>().ok_or_else(not_names)
    }

    /// Writes dependency keywords as alternatives: the property is absent, or it is present and its
    /// dependent schema or dependent properties are required.
    fn dependencies(
        &mut self,
        keyword: &str,
        value: &Value,
        written: &mut Map<String, Value>,
    ) -> Result<(), GrammarError> {
        let Some(dependencies) = value.as_object() else {
            return Err(self.rejected(&format!("{keyword} must be an object")));
        };
        if dependencies.len() > DEPENDENTS_MAX {
            let count = dependencies.len();
            let message =
                format!("{keyword} has {count} properties, the limit is {DEPENDENTS_MAX}");
            return Err(self.rejected(&message));
        }
        for (name, dependent) in dependencies {
            let present = self.with_dependents(keyword, name, dependent)?;
            add_conjunct(written, json!({"anyOf": [{"properties": {name: false}}, present]}));
        }
        Ok(())
    }

    /// Returns the schema of the objects that have the property `name` and fulfil its dependency: the
    /// dependent schema or the dependent properties.
    fn with_dependents(
        &mut self,
        keyword: &str,
        name: &str,
        dependent: &Value,
    ) -> Result<Value, GrammarError> {
        let mut required = vec![name.to_owned()];
        let mut schema = None;
        if dependent.is_array() {
            required.extend(self.names(keyword, dependent)?);
        } else {
            schema = Some(self.inside(name, |normaliser| normaliser.schema(dependent))?);
        }
        let required = without_duplicates(&Value::from(required));
        let mut present = json!({"type": "object", "required": required});
        if let Some(schema) = schema {
            present["allOf"] = json!([schema]);
        }
        Ok(present)
    }

    /// Expresses `propertyNames` with other keywords in the written schema.
    ///
    /// Errors: the names cannot be expressed with other keywords.
    pub(super) fn constrain_names(
        &mut self,
        names: &Value,
        written: &mut Map<String, Value>,
    ) -> Result<(), GrammarError> {
        let Some(constraint) = self.name_constraint(names)? else { return Ok(()) };
        let object = |keyword: &str| written.get(keyword).and_then(Value::as_object);
        let properties = object("properties").cloned().unwrap_or_default();
        if object("patternProperties").is_some_and(|patterns| !patterns.is_empty()) {
            return Err(self.unenforceable(NAMES_KEYWORD));
        }
        let others = written.insert("additionalProperties".to_owned(), json!(false));
        let others = others.unwrap_or(Value::Bool(true));
        match constraint {
            PropertyNameConstraint::OneOf(names) => {
                let allowed = allowed_properties(properties, names, &self.shared(others));
                written.insert("properties".to_owned(), Value::Object(allowed));
            }
            PropertyNameConstraint::Matching(_) if !properties.is_empty() => {
                return Err(self.unenforceable(NAMES_KEYWORD));
            }
            PropertyNameConstraint::Matching(pattern) => {
                written.insert("patternProperties".to_owned(), json!({pattern: others}));
            }
        }
        Ok(())
    }

    /// Returns the constraint that a schema puts on property names; `None` if the schema accepts every name.
    fn name_constraint(
        &mut self,
        names: &Value,
    ) -> Result<Option<PropertyNameConstraint>, GrammarError> {
        let members = match names {
            Value::Bool(true) => return Ok(None),
            Value::Bool(false) => return Ok(Some(PropertyNameConstraint::OneOf(Vec::new()))),
            Value::Object(members) => members,
            _ => return Err(self.rejected("a schema must be an object or a boolean")),
        };
        let mut lengths = [None, None];
        let mut found = Vec::new();
        for (keyword, value) in assertions(members) {
            match (keyword, value) {
                ("type", Value::String(name)) if name == "string" => {}
                ("nullable", _) => {}
                ("format", format) if super::is_annotation_format(format) => {}
                ("$ref", Value::String(reference)) if assertions(members).count() == 1 => {
                    let target = self.followed(reference)?;
                    let outer = std::mem::replace(&mut self.base, target.base);
                    let constraint = self.name_constraint(target.value);
                    self.base = outer;
                    return constraint;
                }
                ("enum", Value::Array(list)) => {
                    found.push(PropertyNameConstraint::OneOf(texts(list)));
                }
                ("const", name) => found.push(PropertyNameConstraint::OneOf(texts([name]))),
                ("pattern", Value::String(pattern)) => {
                    found.push(PropertyNameConstraint::Matching(pattern.clone()));
                }
                ("minLength", Value::Number(length)) if length.is_u64() => {
                    lengths[0] = Some(length.to_string());
                }
                ("maxLength", Value::Number(length)) if length.is_u64() => {
                    lengths[1] = Some(length.to_string());
                }
                _ => return Err(self.unenforceable(NAMES_KEYWORD)),
            }
        }
        if lengths.iter().any(Option::is_some) {
            let [min, max] = lengths;
            let (min, max) = (min.unwrap_or_else(|| "0".to_owned()), max.unwrap_or_default());
            found.push(PropertyNameConstraint::Matching(format!("^[\\s\\S]{{{min},{max}}}$")));
        }
        match (found.pop(), found.pop()) {
            (constraint, None) => Ok(constraint),
            _ => Err(self.unenforceable(NAMES_KEYWORD)),
        }
    }
}

/// Returns the strings in `values`.
fn texts<'a>(values: impl IntoIterator<Item = &'a Value>) -> Vec<String> {
    values.into_iter().filter_map(Value::as_str).map(str::to_owned).collect()
}

/// Returns the properties of an object with the property names `names`: those of `properties`, and `others` for
/// the other names. All other properties are forbidden.
fn allowed_properties(
    properties: Map<String, Value>,
    names: Vec<String>,
    others: &Value,
) -> Map<String, Value> {
    let mut allowed = Map::new();
    for (name, schema) in properties {
        let is_allowed = names.contains(&name);
        allowed.insert(name, if is_allowed { schema } else { json!(false) });
    }
    for name in names {
        allowed.entry(name).or_insert_with(|| others.clone());
    }
    allowed
}
