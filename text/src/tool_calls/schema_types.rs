//! JSON types that a tool's schema allows for an argument. They determine how a value that a model writes as
//! plain text is converted.
//!
//! Text that cannot be parsed as one of these types becomes a JSON string, so that the client receives the
//! model's text.

use super::json_scanner::{JsonScanStatus, JsonScanner};
use super::schema_refs::target;
use super::tool_definition::ToolDefinition;
use serde_json::Value as Json;
use std::collections::HashMap;
use std::sync::Arc;

/// Maximum number of schemas visited to determine the types of one argument; needed because `$ref` references
/// may be cyclic.
const SCHEMAS_VISITED_MAX: u32 = 128;
/// Maximum number of values of one `enum` that are visited to determine the types of an argument.
const VALUES_VISITED_MAX: usize = 128;

/// Set of JSON types that a schema allows for a value. A number without a fraction is an integer.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(super) struct JsonTypeSet(u8);

const TEXT: u8 = 1;
const INTEGER: u8 = 2;
const FRACTION: u8 = 4;
const BOOLEAN: u8 = 8;
const NULL: u8 = 16;
/// Arrays and objects.
const COMPOUND: u8 = 32;
const ALL: u8 = 63;

/// Keywords that apply to only one type. A schema without `type` that has such a keyword is assumed to be of
/// this type.
const KEYWORD_TYPES: &[(&str, u8)] = &[
    ("properties", COMPOUND),
    ("additionalProperties", COMPOUND),
    ("items", COMPOUND),
    ("prefixItems", COMPOUND),
    ("minimum", INTEGER | FRACTION),
    ("maximum", INTEGER | FRACTION),
    ("multipleOf", INTEGER | FRACTION),
    ("pattern", TEXT),
    ("minLength", TEXT),
    ("maxLength", TEXT),
];

impl JsonTypeSet {
    /// Returns the set that contains strings only.
    pub(super) fn text() -> Self {
        Self(TEXT)
    }

    /// Returns the set of all types except strings.
    pub(super) fn json() -> Self {
        Self(ALL & !TEXT)
    }

    /// Returns the types of property `key` of an object schema; a property without any type is a string.
    pub(super) fn of(schema: &Json, key: &str) -> Self {
        let mut left = SCHEMAS_VISITED_MAX;
        let types = property_types(schema, schema, key, &mut left).unwrap_or(ALL);
        if types == ALL || types == 0 || left == 0 { Self::text() } else { Self(types) }
    }

    /// Returns the types that `schema` allows; `schema` is a part of the schema `root`.
    pub(super) fn of_value(root: &Json, schema: &Json) -> Self {
        Self(allowed_types(root, schema, &mut { SCHEMAS_VISITED_MAX }))
    }

    /// Whether strings are allowed.
    pub(super) fn allows_text(self) -> bool {
        self.0 & TEXT != 0
    }

    /// Whether arrays and objects are allowed.
    pub(super) fn allows_compound(self) -> bool {
        self.0 & COMPOUND != 0
    }

    /// Whether numbers are allowed.
    pub(super) fn allows_numbers(self) -> bool {
        self.0 & (INTEGER | FRACTION) != 0
    }

    /// Whether `true` and `false` are allowed.
    pub(super) fn allows_booleans(self) -> bool {
        self.0 & BOOLEAN != 0
    }

    /// Whether `null` is allowed.
    pub(super) fn allows_null(self) -> bool {
        self.0 & NULL != 0
    }

    /// Returns the names, as used in `type`, of all types in the set except strings.
    pub(super) fn names_except_text(self) -> Vec<&'static str> {
        let mut names = Vec::new();
        match self.0 & (INTEGER | FRACTION) {
            0 => {}
            INTEGER => names.push("integer"),
            _ => names.push("number"),
        }
        if self.allows_booleans() {
            names.push("boolean");
        }
        if self.allows_null() {
            names.push("null");
        }
        if self.allows_compound() {
            names.extend(["array", "object"]);
        }
        names
    }

    /// Converts `text` to JSON. If `text` is a value of a type in the set, returns this value; otherwise
    /// returns `text` as a JSON string.
    pub(super) fn json_text(self, text: &str) -> String {
        let trimmed = text.trim();
        let is = |name: &str| trimmed.eq_ignore_ascii_case(name);
        if self.allows_null() && (is("null") || is("none")) {
            "null".to_owned()
        } else if self.allows_booleans() && (is("true") || is("false")) {
            trimmed.to_ascii_lowercase()
        } else if self.allows_json(trimmed) {
            trimmed.to_owned()
        } else {
            quoted(text)
        }
    }

    /// Whether `text` is a number, an array or an object and its type is in the set.
    fn allows_json(self, text: &str) -> bool {
        let is_allowed = match text.as_bytes().first() {
            Some(b'[' | b'{') => self.allows_compound(),
            Some(b'-' | b'0'..=b'9') if self.0 & FRACTION != 0 => true,
            Some(b'-' | b'0'..=b'9') => self.0 & INTEGER != 0 && !text.contains(['.', 'e', 'E']),
            _ => false,
        };
        is_allowed && is_json(text)
    }
}

/// Whether `text` is one JSON value.
pub(super) fn is_json(text: &str) -> bool {
    let mut json = JsonScanner::default();
    let mut chars = text.chars();
    let last = chars.by_ref().map(|c| json.push(c)).find(|&s| s != JsonScanStatus::Continues);
    match last {
        Some(status) => status == JsonScanStatus::Done && chars.next().is_none(),
        None => json.number() == Some(true),
    }
}

/// Formats `text` as a JSON string.
pub(super) fn quoted(text: &str) -> String {
    serde_json::to_string(text).unwrap_or_default()
}

/// Returns the types of property `key` of `schema`, which is a part of the schema `root`; `None` if the
/// schema does not mention the property.
fn property_types(root: &Json, schema: &Json, key: &str, left: &mut u32) -> Option<u8> {
    *left = left.checked_sub(1)?;
    let additional = schema.get("additionalProperties").filter(|schema| schema.is_object());
    let own = schema["properties"].get(key).or(additional);
    let mut types = own.map(|own| allowed_types(root, own, left));
    let mut narrow = |more: Option<u8>| {
        types = match (types, more) {
            (Some(types), Some(more)) => Some(types & more),
            (types, more) => types.or(more),
        };
    };
    if let Some(target) = target(root, schema) {
        narrow(property_types(root, target, key, left));
    }
    for part in schema["allOf"].as_array().into_iter().flatten() {
        narrow(property_types(root, part, key, left));
    }
    for name in ["anyOf", "oneOf"] {
        let choices = schema[name].as_array().into_iter().flatten();
        let choices = choices.filter_map(|choice| property_types(root, choice, key, left));
        narrow(choices.reduce(|types, more| types | more));
    }
    types
}

/// Returns the types that the value of the keyword `type` names.
fn named_types(names: &Json) -> u8 {
    match names {
        Json::String(name) => named_type(name),
        Json::Array(names) => {
            names.iter().filter_map(Json::as_str).fold(0, |types, name| types | named_type(name))
        }
        _ => ALL,
    }
}

/// Returns the types that `schema` allows. `$ref` references are resolved in `root`; `left` is the number of
/// schemas that may still be visited.
fn allowed_types(root: &Json, schema: &Json, left: &mut u32) -> u8 {
    let Some(remaining) = left.checked_sub(1) else { return ALL };
    *left = remaining;
    let mut types = named_types(&schema["type"]);
    if let Some(values) = schema["enum"].as_array() {
        let values = values.iter().take(VALUES_VISITED_MAX);
        types &= values.fold(0, |types, value| types | value_type(value));
    }
    if let Some(value) = schema.get("const") {
        types &= value_type(value);
    }
    if let Some(target) = target(root, schema) {
        types &= allowed_types(root, target, left);
    }
    for part in schema["allOf"].as_array().into_iter().flatten() {
        types &= allowed_types(root, part, left);
    }
    for name in ["anyOf", "oneOf"] {
        if let Some(choices) = schema[name].as_array() {
            types &= choices.iter().fold(0, |types, part| types | allowed_types(root, part, left));
        }
    }
    if types == ALL {
        let keyword = KEYWORD_TYPES.iter().find(|(name, _)| schema.get(*name).is_some());
        types = keyword.map_or(ALL, |(_, types)| *types);
    }
    types
}

fn named_type(name: &str) -> u8 {
    match name {
        "string" => TEXT,
        "integer" => INTEGER,
        "number" => INTEGER | FRACTION,
        "boolean" => BOOLEAN,
        "null" => NULL,
        "array" | "object" => COMPOUND,
        _ => 0,
    }
}

fn value_type(value: &Json) -> u8 {
    match value {
        Json::Null => NULL,
        Json::Bool(_) => BOOLEAN,
        Json::Number(n) if n.is_f64() => INTEGER | FRACTION,
        Json::Number(_) => INTEGER,
        Json::String(_) => TEXT,
        Json::Array(_) | Json::Object(_) => COMPOUND,
    }
}

/// Cache of the argument types of each tool: a schema may be long and an argument may occur often, so the
/// types of each argument are determined only once.
#[derive(Debug, Clone)]
pub(super) struct ArgumentTypeCache {
    tools: Arc<[ToolDefinition]>,
    /// Types by tool index and argument name.
    by_member: HashMap<usize, HashMap<String, JsonTypeSet>>,
}

/// Maximum number of arguments of one tool whose types are cached.
const CACHED_MAX: usize = 1_024;

impl ArgumentTypeCache {
    pub(super) fn new(tools: Arc<[ToolDefinition]>) -> Self {
        Self { tools, by_member: HashMap::new() }
    }

    /// Returns the index of the tool with the name `function`.
    pub(super) fn tool(&self, function: &str) -> Option<usize> {
        self.tools.iter().position(|tool| tool.name == function)
    }

    /// Returns the types of argument `key` of a tool; all arguments of an unknown function are strings.
    pub(super) fn types(&mut self, tool: Option<usize>, key: &str) -> JsonTypeSet {
        let Some(index) = tool else { return JsonTypeSet::text() };
        let cache = self.by_member.entry(index).or_default();
        if let Some(types) = cache.get(key) {
            return *types;
        }
        let types = JsonTypeSet::of(&self.tools[index].parameters, key);
        if cache.len() < CACHED_MAX {
            cache.insert(key.to_owned(), types);
        }
        types
    }
}
