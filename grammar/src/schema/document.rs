//! Index of a schema document, used to find the schema to which a `$ref` refers.
//!
//! A reference is a URI. The part before `#` identifies the document, or a part of it by `$id`. The fragment
//! is a JSON pointer or the name of an anchor. A reference to another document is an error, because schemas
//! are not fetched.

use super::keywords::{DATA_KEYWORDS, NAMING_KEYWORDS};
use super::uri;
use serde_json::{Map, Value};
use std::collections::HashMap;

/// Maximum number of characters of a reference shown in an error message.
const REFERENCE_SHOWN: usize = 120;
/// Maximum length of a base URI in bytes. An `$id` that would exceed this length is ignored.
const BASE_BYTES_MAX: usize = 2_048;

/// Schema to which a reference refers.
#[derive(Debug, Clone)]
pub(super) struct SchemaRefTarget<'a> {
    /// JSON pointer tokens (member names and indices) from the document root to the schema.
    pub(super) tokens: Vec<String>,
    /// Value of the schema.
    pub(super) value: &'a Value,
    /// URI against which references inside the schema are resolved.
    pub(super) base: String,
}

/// Schema document, with an index of its subschemas that have an `$id` or an anchor.
pub(super) struct SchemaDocument<'a> {
    root: &'a Value,
    /// For the URI of each subschema with an `$id`, the location of the subschema.
    parts: HashMap<String, Vec<String>>,
    /// For each anchor, its location. The key is the URI of the enclosing subschema with an `$id`, `#`, and
    /// the anchor name.
    anchors: HashMap<String, Vec<String>>,
    /// An anchor defined by two schemas; `None` if all anchors are unique.
    duplicate_anchor: Option<String>,
}

impl<'a> SchemaDocument<'a> {
    /// Indexes the document `root`.
    pub(super) fn of(root: &'a Value) -> Self {
        let parts = HashMap::from([(String::new(), Vec::new())]);
        let anchors = HashMap::new();
        let mut document = Self { root, parts, anchors, duplicate_anchor: None };
        document.index_schema(root, "", &mut Vec::new());
        document
    }

    /// Returns the root of the document.
    pub(super) fn root(&self) -> SchemaRefTarget<'a> {
        let base = base_inside(self.root, "");
        SchemaRefTarget { tokens: Vec::new(), value: self.root, base }
    }

    fn index_schema(&mut self, schema: &Value, base: &str, tokens: &mut Vec<String>) {
        match schema {
            Value::Array(list) => {
                for (index, item) in list.iter().enumerate() {
                    tokens.push(index.to_string());
                    self.index_schema(item, base, tokens);
                    tokens.pop();
                }
            }
            Value::Object(members) => {
                let base = self.index_names(members, base, tokens);
                self.index_members(members, &base, tokens);
            }
            _ => {}
        }
    }

    /// Indexes `$id`, `$anchor` and their older forms. Returns the base URI for references inside the schema.
    fn index_names(
        &mut self,
        members: &Map<String, Value>,
        base: &str,
        tokens: &[String],
    ) -> String {
        let text = |keyword: &str| members.get(keyword).and_then(Value::as_str);
        let inside = base_of_members(members, base);
        if inside != base {
            self.parts.entry(inside.clone()).or_insert_with(|| tokens.to_vec());
        }
        if let Some(id) = text("id").filter(|id| base.len() + id.len() <= BASE_BYTES_MAX) {
            self.index_draft_04_id(id, base, tokens);
        }
        if let Some(fragment) = text("$id").and_then(|id| id.strip_prefix('#')) {
            self.add_anchor(&inside, fragment, tokens);
        }
        for keyword in ["$anchor", "$dynamicAnchor"] {
            if let Some(name) = text(keyword) {
                self.add_anchor(&inside, name, tokens);
            }
        }
        inside
    }

    /// Indexes `id`, which names a schema in draft-04. Here it does not change the base URI, because later
    /// drafts use `id` for other purposes.
    fn index_draft_04_id(&mut self, id: &str, base: &str, tokens: &[String]) {
        let named = uri::resolve(base, id);
        if named.fragment.is_empty() {
            self.parts.entry(named.document).or_insert_with(|| tokens.to_vec());
        } else {
            self.add_anchor(&named.document, named.fragment, tokens);
        }
    }

    fn add_anchor(&mut self, document: &str, name: &str, tokens: &[String]) {
        let key = format!("{document}#{name}");
        match self.anchors.get(&key) {
            Some(other) if other != tokens => self.duplicate_anchor = Some(key),
            Some(_) => {}
            None => drop(self.anchors.insert(key, tokens.to_vec())),
        }
    }

    fn index_members(
        &mut self,
        members: &Map<String, Value>,
        base: &str,
        tokens: &mut Vec<String>,
    ) {
        for (keyword, value) in members {
            if DATA_KEYWORDS.contains(&keyword.as_str()) {
                continue;
            }
            tokens.push(keyword.clone());
            match value {
                Value::Object(named) if NAMING_KEYWORDS.contains(&keyword.as_str()) => {
                    for (name, schema) in named {
                        tokens.push(name.clone());
                        self.index_schema(schema, base, tokens);
                        tokens.pop();
                    }
                }
                _ => self.index_schema(value, base, tokens),
            }
            tokens.pop();
        }
    }

    /// Returns the schema to which `reference` refers; `base` is the base URI of the schema that contains the
    /// reference.
    ///
    /// Errors: a message for the client.
    pub(super) fn resolve(
        &self,
        base: &str,
        reference: &str,
    ) -> Result<SchemaRefTarget<'a>, String> {
        let shown: String = reference.chars().take(REFERENCE_SHOWN).collect();
        let uri = uri::resolve(base, reference);
        let Some(part) = self.parts.get(&uri.document) else {
            return Err(format!(
                "$ref \"{shown}\" names another document: references must point into the schema"
            ));
        };
        let decoded = uri::percent_decoded(uri.fragment);
        let fragments = decoded.as_deref().into_iter().chain([uri.fragment]);
        let mut found =
            fragments.filter_map(|fragment| self.at_fragment(&uri.document, part, fragment));
        let found = found.next().ok_or_else(|| format!("$ref \"{shown}\" names no schema"))?;
        let key = format!("{}#{}", uri.document, uri.fragment);
        if self.duplicate_anchor.as_ref() == Some(&key) {
            return Err(format!("$ref \"{shown}\" names more than one schema"));
        }
        Ok(found)
    }

    /// Returns the schema to which the fragment of a reference refers. `part` is the location of the
    /// subschema (with an `$id`) to which the rest of the reference refers.
    fn at_fragment(
        &self,
        document: &str,
        part: &[String],
        fragment: &str,
    ) -> Option<SchemaRefTarget<'a>> {
        if !fragment.is_empty() && !fragment.starts_with('/') {
            return self.at(self.anchors.get(&format!("{document}#{fragment}"))?);
        }
        let pointer = uri::pointer_tokens(fragment)?;
        // Schema generators that set `$id` in nested schemas often resolve pointers from the document root,
        // so the root is tried too.
        let from_part = self.at(&[part, &pointer].concat());
        from_part.or_else(|| self.at(&pointer)).or_else(|| {
            let is_root = fragment == "/";
            is_root.then(|| self.root())
        })
    }

    /// Returns the schema at a location; a schema is an object or a boolean.
    fn at(&self, tokens: &[String]) -> Option<SchemaRefTarget<'a>> {
        let mut target = self.root();
        for token in tokens {
            target.value = match target.value {
                Value::Object(members) => members.get(token)?,
                Value::Array(list) => list.get(array_index(token)?)?,
                _ => return None,
            };
            target.base = base_inside(target.value, &target.base);
        }
        let is_schema = target.value.is_object() || target.value.is_boolean();
        is_schema.then(|| SchemaRefTarget { tokens: tokens.to_vec(), ..target })
    }
}

/// Parses an array index in a JSON pointer; leading zeros are invalid.
fn array_index(token: &str) -> Option<usize> {
    let index = token.parse().ok()?;
    (usize::to_string(&index) == token).then_some(index)
}

/// Returns the base URI inside a schema; `base` is the base URI outside of it.
pub(super) fn base_inside(schema: &Value, base: &str) -> String {
    schema.as_object().map_or_else(|| base.to_owned(), |members| base_of_members(members, base))
}

fn base_of_members(members: &Map<String, Value>, base: &str) -> String {
    match members.get("$id").and_then(Value::as_str) {
        Some(id) if !id.starts_with('#') && base.len() + id.len() <= BASE_BYTES_MAX => {
            uri::resolve(base, id).document
        }
        _ => base.to_owned(),
    }
}
