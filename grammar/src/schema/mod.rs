//! Normalises JSON schemas of all drafts for the grammar engine.
//!
//! The engine (llguidance) supports a part of draft 2020-12, resolves only references that are plain paths,
//! and ignores or rejects everything else. The normaliser writes a new document that contains only keywords
//! enforced by the engine: each referenced schema becomes a definition, keywords of older drafts and of
//! OpenAPI are converted to their current form, and annotations and unknown keywords are omitted. A keyword
//! that cannot be enforced causes an error that names the keyword and its location. The written document
//! never accepts more than the original schema.
//!
//! `docs/structured-output.md` lists the keywords; tests check that list.

mod conjunction;
mod document;
mod item_keywords;
mod keywords;
mod object_keywords;
#[cfg(test)]
mod tests;
mod uri;

use super::compile::GrammarError;
use conjunction::{
    add_bound, add_combination, add_conjunct, is_annotation_format, types, without_duplicates,
};
use document::{SchemaDocument, SchemaRefTarget, base_inside};
use serde_json::{Map, Value, json};
use std::collections::{HashMap, HashSet};

/// Maximum number of schemas in a normalised document. A schema nested in several referenced schemas is
/// written once for each of them.
const SCHEMAS_MAX: usize = 32_768;
/// Maximum size of a normalised document in bytes.
const WRITTEN_BYTES_MAX: usize = 4 * super::limits::TEXT_BYTES_MAX;
/// Maximum number of characters in a definition's name that are taken from the schema.
const NAME_CHARS_MAX: usize = 40;
/// Maximum number of characters of a location shown in an error message.
const LOCATION_SHOWN: usize = 120;

/// Returns the normal form of a schema.
///
/// Errors: a reference refers to no schema in the document, or a keyword cannot be enforced.
pub(super) fn normalise(document: &Value) -> Result<Value, GrammarError> {
    let document = SchemaDocument::of(document);
    let root = document.root();
    let mut normaliser = SchemaNormaliser::new(&document);
    let mut written = normaliser.target(&root)?;
    while let Some(target) = normaliser.pending.pop() {
        let definition = normaliser.target(&target)?;
        let name = normaliser.names[&target.tokens].clone();
        normaliser.definitions.insert(name, definition);
    }
    if let (false, Value::Object(members)) = (normaliser.definitions.is_empty(), &mut written) {
        members.insert("$defs".to_owned(), Value::Object(normaliser.definitions));
    }
    let bytes = written.to_string().len();
    if bytes > WRITTEN_BYTES_MAX {
        return Err(GrammarError::Invalid(format!(
            "the schema has {bytes} bytes with its references resolved, the limit is {WRITTEN_BYTES_MAX}"
        )));
    }
    Ok(written)
}

/// Writes the normal form of one schema document.
struct SchemaNormaliser<'a> {
    document: &'a SchemaDocument<'a>,
    /// Names of the definitions, by location of the referenced schema.
    names: HashMap<Vec<String>, String>,
    /// Referenced schemas that have not been normalised yet.
    pending: Vec<SchemaRefTarget<'a>>,
    definitions: Map<String, Value>,
    /// Number of definition names assigned so far.
    name_count: usize,
    /// Number of schemas in the normalised document so far.
    schemas: usize,
    /// Location of the schema that is being normalised, as JSON pointer tokens.
    location: Vec<String>,
    /// Base URI of the schema that is being normalised.
    base: String,
}

impl<'a> SchemaNormaliser<'a> {
    fn new(document: &'a SchemaDocument<'a>) -> Self {
        Self {
            document,
            names: HashMap::new(),
            pending: Vec::new(),
            definitions: Map::new(),
            name_count: 0,
            schemas: 0,
            location: Vec::new(),
            base: String::new(),
        }
    }

    /// Returns the normal form of the referenced schema `target`.
    fn target(&mut self, target: &SchemaRefTarget<'_>) -> Result<Value, GrammarError> {
        self.location.clone_from(&target.tokens);
        self.base.clone_from(&target.base);
        self.schema(target.value)
    }

    /// Creates the error for a rejected schema at the current location.
    fn rejected(&self, message: &str) -> GrammarError {
        let tokens: Vec<String> = self.location.iter().map(|t| uri::escaped_token(t)).collect();
        let path = if tokens.is_empty() { String::new() } else { format!("/{}", tokens.join("/")) };
        let shown: String = path.chars().take(LOCATION_SHOWN).collect();
        GrammarError::Invalid(format!("{message}, at #{shown}"))
    }

    /// Creates the error for a keyword that cannot be enforced.
    fn unenforceable(&self, keyword: &str) -> GrammarError {
        self.rejected(&format!("{keyword} cannot be enforced"))
    }

    /// Runs `work` with the current location extended by the JSON pointer token `token`.
    fn inside<T>(&mut self, token: &str, work: impl FnOnce(&mut Self) -> T) -> T {
        self.location.push(token.to_owned());
        let result = work(self);
        self.location.pop();
        result
    }

    fn schema(&mut self, schema: &Value) -> Result<Value, GrammarError> {
        self.schemas += 1;
        if self.schemas > SCHEMAS_MAX {
            return Err(GrammarError::Invalid(format!(
                "the schema has more than {SCHEMAS_MAX} parts with its references resolved"
            )));
        }
        match schema {
            Value::Bool(_) => Ok(schema.clone()),
            Value::Object(members) => {
                let inner = base_inside(schema, &self.base);
                let outer = std::mem::replace(&mut self.base, inner);
                let written = self.members(members);
                self.base = outer;
                written
            }
            _ => Err(self.rejected("a schema must be an object or a boolean")),
        }
    }

    fn members(&mut self, schema: &Map<String, Value>) -> Result<Value, GrammarError> {
        let mut written = Map::new();
        for (keyword, value) in keywords::assertions(schema) {
            self.inside(keyword, |normaliser| {
                normaliser.keyword(keyword, value, schema, &mut written)
            })?;
        }
        if let Some(names) = schema.get("propertyNames").filter(|names| !names.is_null()) {
            self.constrain_names(names, &mut written)?;
        }
        Ok(Value::Object(written))
    }

    /// Writes the normal form of one keyword of `schema`.
    fn keyword(
        &mut self,
        keyword: &str,
        value: &Value,
        schema: &Map<String, Value>,
        written: &mut Map<String, Value>,
    ) -> Result<(), GrammarError> {
        match keyword {
            _ if keywords::COPIED_KEYWORDS.contains(&keyword) => {
                written.insert(keyword.to_owned(), value.clone());
            }
            "$ref" | "$dynamicRef" | "$recursiveRef" => {
                let reference = json!({"$ref": self.reference(value)?});
                add_conjunct(written, reference);
            }
            "allOf" | "anyOf" | "oneOf" => {
                let schemas = self.list(keyword, value)?;
                add_combination(written, keyword, schemas);
            }
            "enum" => drop(written.insert(keyword.to_owned(), without_duplicates(value))),
            "type" => drop(written.insert(keyword.to_owned(), types(value, schema))),
            "format" if !is_annotation_format(value) => {
                written.insert(keyword.to_owned(), value.clone());
            }
            "nullable" | "format" | "then" | "else" => {}
            "if" if !schema.contains_key("then") && !schema.contains_key("else") => {}
            "not" => self.negation(value, written)?,
            "minimum" | "maximum" | "exclusiveMinimum" | "exclusiveMaximum" => {
                add_bound(keyword, value, schema, written);
            }
            "items" | "prefixItems" | "additionalItems" | "unevaluatedItems" | "contains"
            | "minContains" | "maxContains" | "uniqueItems" => {
                self.item_keyword(keyword, value, schema, written)?;
            }
            "properties"
            | "patternProperties"
            | "additionalProperties"
            | "unevaluatedProperties"
            | "propertyNames"
            | "required"
            | "dependencies"
            | "dependentRequired"
            | "dependentSchemas" => {
                self.object_keyword(keyword, value, schema, written)?;
            }
            _ => return Err(self.unenforceable(keyword)),
        }
        Ok(())
    }

    fn list(&mut self, keyword: &str, value: &Value) -> Result<Vec<Value>, GrammarError> {
        let Some(list) = value.as_array() else {
            return Err(self.rejected(&format!("{keyword} must be a list of schemas")));
        };
        let indexed = list.iter().enumerate();
        indexed.map(|(at, schema)| self.inside(&at.to_string(), |n| n.schema(schema))).collect()
    }

    /// Writes `not` if the engine can enforce the complement of the negated schema: a schema that accepts
    /// everything or nothing, or one that only requires a single property.
    fn negation(
        &mut self,
        negated: &Value,
        written: &mut Map<String, Value>,
    ) -> Result<(), GrammarError> {
        let required = match negated {
            Value::Bool(false) => return Ok(()),
            Value::Bool(true) => None,
            Value::Object(members) => {
                let mut assertions = keywords::assertions(members);
                match (assertions.next(), assertions.next()) {
                    (None, _) => None,
                    (Some(("required", Value::Array(names))), None) if names.len() == 1 => {
                        names[0].as_str()
                    }
                    _ => return Err(self.unenforceable("not")),
                }
            }
            _ => return Err(self.unenforceable("not")),
        };
        add_conjunct(
            written,
            required.map_or(
                Value::Bool(false),
                |name| json!({"type": "object", "properties": {name: false}}),
            ),
        );
        Ok(())
    }

    /// Returns a reference to the definition for the schema to which a `$ref` refers.
    fn reference(&mut self, reference: &Value) -> Result<String, GrammarError> {
        let Some(reference) = reference.as_str() else {
            return Err(self.rejected("$ref must be a string"));
        };
        let target = self.followed(reference)?;
        if target.tokens.is_empty() {
            return Ok("#".to_owned());
        }
        if let Some(name) = self.names.get(&target.tokens) {
            return Ok(format!("#/$defs/{name}"));
        }
        let name = self.new_name(target.tokens.last().map_or("", String::as_str));
        self.names.insert(target.tokens.clone(), name.clone());
        self.pending.push(target);
        Ok(format!("#/$defs/{name}"))
    }

    /// Returns the schema to which a reference refers. References to schemas that consist only of a `$ref`
    /// are followed.
    fn followed(&self, reference: &str) -> Result<SchemaRefTarget<'a>, GrammarError> {
        let resolve = |base: &str, reference: &str| {
            self.document.resolve(base, reference).map_err(|message| self.rejected(&message))
        };
        let mut target = resolve(&self.base, reference)?;
        let mut seen = HashSet::new();
        while let Some(next) = only_reference(target.value) {
            if !seen.insert(target.tokens.clone()) {
                return Err(self.rejected("$ref refers only to itself"));
            }
            target = resolve(&target.base, next)?;
        }
        Ok(target)
    }

    /// Adds a normalised schema as a definition, and returns a schema that consists of a `$ref` to this
    /// definition. A schema `true` or `false` is returned unchanged.
    fn shared(&mut self, written: Value) -> Value {
        if matches!(&written, Value::Bool(_)) {
            return written;
        }
        let name = self.new_name("shared");
        let reference = json!({"$ref": format!("#/$defs/{name}")});
        self.definitions.insert(name, written);
        reference
    }

    /// Returns an unused definition name that contains the alphanumeric characters of `wanted`.
    fn new_name(&mut self, wanted: &str) -> String {
        let is_plain = |c: &char| c.is_ascii_alphanumeric() || *c == '_';
        let plain: String = wanted.chars().filter(is_plain).take(NAME_CHARS_MAX).collect();
        self.name_count += 1;
        format!("{plain}_{}", self.name_count)
    }
}

/// Returns the `$ref` of a schema that consists only of a `$ref`; `None` for other schemas.
fn only_reference(schema: &Value) -> Option<&str> {
    let mut assertions = keywords::assertions(schema.as_object()?);
    match (assertions.next(), assertions.next()) {
        (Some(("$ref", Value::String(reference))), None) => Some(reference),
        _ => None,
    }
}
