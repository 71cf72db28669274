//! Converts argument values that a model writes as plain text (not JSON) to the types of the tool's schema.
//!
//! Text that cannot be parsed as one of these types becomes a JSON string, so that the client receives the
//! model's text.

use super::tool_definition::ToolDefinition;
use serde_json::Value as Json;
use std::collections::HashMap;
use std::sync::Arc;

/// Maximum number of schemas and `enum` values visited to determine the types of one argument, because
/// `$ref` references may be cyclic.
const SCHEMAS_VISITED_MAX: u32 = 128;
/// Maximum number of bytes of a value that is not a plain string; such a value is held back until its end.
const BUFFER_MAX: usize = 64 << 10;

/// Set of JSON types that a tool's schema allows for a value.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Default)]
pub(super) struct SchemaTypes {
    text: bool,
    integer: bool,
    number: bool,
    boolean: bool,
    null: bool,
    /// Whether arrays and objects are allowed.
    compound: bool,
}

impl SchemaTypes {
    /// Returns the set that contains strings only.
    pub(super) fn text() -> Self {
        Self { text: true, ..Self::default() }
    }

    /// Returns the types of property `key` of an object schema; a property without types is a string.
    pub(super) fn of(schema: &Json, key: &str) -> Self {
        let mut types = Self::default();
        let mut left = SCHEMAS_VISITED_MAX;
        types.add(schema, &schema["properties"][key], &mut left);
        if types == Self::default() { Self::text() } else { types }
    }

    /// Adds the types that `schema` allows. `root` is the schema in which `$ref` references are resolved, and
    /// `left` the number of schemas that may still be visited.
    fn add(&mut self, root: &Json, schema: &Json, left: &mut u32) {
        let Some(remaining) = left.checked_sub(1) else { return };
        *left = remaining;
        let pointer = schema["$ref"].as_str().and_then(|text| text.strip_prefix('#'));
        if let Some(target) = pointer.and_then(|pointer| root.pointer(pointer)) {
            self.add(root, target, left);
        }
        match &schema["type"] {
            Json::String(name) => self.add_name(name),
            Json::Array(names) => {
                names.iter().filter_map(Json::as_str).for_each(|n| self.add_name(n));
            }
            _ => {}
        }
        let listed = schema["enum"].as_array().into_iter().flatten();
        for value in listed.chain(schema.get("const")).take(*left as usize) {
            *left -= 1;
            self.add_name(match value {
                Json::Null => "null",
                Json::Bool(_) => "boolean",
                Json::Number(n) if n.is_f64() => "number",
                Json::Number(_) => "integer",
                Json::String(_) => "string",
                Json::Array(_) | Json::Object(_) => "object",
            });
        }
        let choices = ["anyOf", "oneOf", "allOf"].into_iter().filter_map(|k| schema[k].as_array());
        choices.flatten().for_each(|choice| self.add(root, choice, left));
    }

    fn add_name(&mut self, name: &str) {
        match name {
            "string" => self.text = true,
            "integer" => self.integer = true,
            "number" => self.number = true,
            "boolean" => self.boolean = true,
            "null" => self.null = true,
            "array" | "object" => self.compound = true,
            _ => {}
        }
    }

    /// Parses `text` as a value of one of these types; if this fails, returns it as a string.
    fn read(self, text: &str) -> Json {
        let trimmed = text.trim();
        let is = |name: &str| trimmed.eq_ignore_ascii_case(name);
        let value = if self.null && (is("null") || is("none")) {
            Some(Json::Null)
        } else if self.boolean && (is("true") || is("false")) {
            Some(Json::Bool(is("true")))
        } else if trimmed.starts_with(|c: char| c.is_ascii_digit() || matches!(c, '-' | '[' | '{'))
        {
            serde_json::from_str(trimmed).ok().filter(|value| match value {
                Json::Number(n) => self.number || self.integer && !n.is_f64(),
                _ => self.compound,
            })
        } else {
            None
        };
        value.unwrap_or_else(|| Json::from(text))
    }
}

/// Formats `text` as a JSON string.
pub(super) fn quoted(text: &str) -> String {
    serde_json::to_string(text).unwrap_or_default()
}

/// Types of the arguments of each tool, determined once per argument: a schema may be long, and an argument
/// may occur often.
#[derive(Debug, Clone)]
pub(super) struct ArgumentTypeCache {
    tools: Arc<[ToolDefinition]>,
    /// Types by tool index and argument name.
    by_member: HashMap<usize, HashMap<String, SchemaTypes>>,
}

impl ArgumentTypeCache {
    pub(super) fn new(tools: Arc<[ToolDefinition]>) -> Self {
        Self { tools, by_member: HashMap::new() }
    }

    /// Returns the index of the tool with the name `function`.
    pub(super) fn tool(&self, function: &str) -> Option<usize> {
        self.tools.iter().position(|tool| tool.name == function)
    }

    /// Returns the types of argument `key` of a tool; arguments of an unknown function are strings.
    pub(super) fn types(&mut self, tool: Option<usize>, key: &str) -> SchemaTypes {
        let Some(index) = tool else { return SchemaTypes::text() };
        let cache = self.by_member.entry(index).or_default();
        if let Some(types) = cache.get(key) {
            return *types;
        }
        let schema = &self.tools[index].parameters;
        let types = SchemaTypes::of(schema, key);
        // Arguments that are not in the schema are resolved quickly and may have any name, so their types are
        // not cached.
        if schema["properties"].get(key).is_some() {
            cache.insert(key.to_owned(), types);
        }
        types
    }
}

/// Parser of one argument value. Plain strings are emitted while they are generated.
#[derive(Debug, Clone)]
pub(super) struct ArgumentValueParser {
    types: SchemaTypes,
    text: String,
    started: bool,
    /// Whether the first character was read. A line break directly after the opening tag is syntax and not
    /// part of the value, and so is a line break directly before the closing tag.
    skipped: bool,
    line_break: bool,
}

impl ArgumentValueParser {
    pub(super) fn new(types: SchemaTypes) -> Self {
        let text = String::new();
        Self { types, text, started: false, skipped: false, line_break: false }
    }

    /// Processes the next character; returns false if the value is too long.
    pub(super) fn push(&mut self, c: char, mut out: impl FnMut(&str)) -> bool {
        if !std::mem::replace(&mut self.skipped, true) && c == '\n' {
            return true;
        }
        if std::mem::replace(&mut self.line_break, c == '\n') {
            self.add('\n', &mut out);
        }
        if c != '\n' {
            self.add(c, &mut out);
        }
        self.text.len() <= BUFFER_MAX
    }

    /// Ends the value: emits what has not been emitted yet.
    pub(super) fn finish(&mut self, mut out: impl FnMut(&str)) {
        if self.types != SchemaTypes::text() {
            return match self.types.read(&self.text) {
                Json::String(text) => out(&quoted(&text)),
                value => out(&value.to_string()),
            };
        }
        out(if self.started { "\"" } else { "\"\"" });
    }

    fn add(&mut self, c: char, out: &mut impl FnMut(&str)) {
        if self.types != SchemaTypes::text() {
            return self.text.push(c);
        }
        if !std::mem::replace(&mut self.started, true) {
            out("\"");
        }
        match c {
            '"' => out("\\\""),
            '\\' => out("\\\\"),
            '\n' => out("\\n"),
            '\r' => out("\\r"),
            '\t' => out("\\t"),
            '\0'..='\x1f' => out(&format!("\\u{:04x}", u32::from(c))),
            c => out(c.encode_utf8(&mut [0; 4])),
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use serde_json::json;

    #[test]
    fn values_are_coerced_to_schema_types() {
        let schema = json!({"properties": {
            "i": {"type": "integer"}, "n": {"type": "number"}, "b": {"type": "boolean"},
            "s": {"type": "string"}, "o": {"type": "object"}, "m": {"type": ["string", "null"]},
            "a": {"anyOf": [{"type": "array"}, {"type": "null"}]}, "e": {"enum": [1, "x"]},
            "r": {"$ref": "#/$defs/count"},
        }, "$defs": {"count": {"type": "integer"}, "loop": {"$ref": "#/$defs/loop"}}});
        let read = |key: &str, text: &str| {
            let mut value = ArgumentValueParser::new(SchemaTypes::of(&schema, key));
            let mut out = String::new();
            assert!(text.chars().all(|c| value.push(c, |s| out.push_str(s))));
            value.finish(|s| out.push_str(s));
            serde_json::from_str::<Json>(&out).unwrap()
        };
        assert_eq!(read("i", "\n7\n"), json!(7));
        assert_eq!(read("i", "7.5"), json!("7.5"));
        assert_eq!(read("n", "7.5"), json!(7.5));
        assert_eq!(read("b", "True"), json!(true));
        assert_eq!(read("s", "\ntrue \"x\"\n\n"), json!("true \"x\"\n"));
        assert_eq!(read("s", ""), json!(""));
        assert_eq!(read("o", "\n{\"a\": [1]}\n"), json!({"a": [1]}));
        assert_eq!(read("o", "{broken"), json!("{broken"));
        assert_eq!(read("m", "null"), json!(null));
        assert_eq!(read("m", "12"), json!("12"));
        assert_eq!(read("a", "[1]"), json!([1]));
        assert_eq!(read("e", "1"), json!(1));
        assert_eq!(read("r", "1"), json!(1));
        assert_eq!(read("unknown", "1"), json!("1"));
    }
}
