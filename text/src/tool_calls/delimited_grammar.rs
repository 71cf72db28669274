//! Grammar of the arguments of a call in the delimited syntax. The syntax is not JSON, so each subschema of the
//! tool's schema becomes a separate rule.

mod lists;

use super::call_grammar::{CallGrammarError, CallGrammarWriter};
use super::call_parameters::{CallParameters, SchemaBudget, call_variants_of};
use super::delimited_calls::DelimitedCallSyntax;
use super::delimited_constants::constant_text;
use super::schema_refs::{extracted, target};
use super::schema_types::JsonTypeSet;
use super::text_language::{SchemaTerminalBuilder, intersection};
use super::tool_definition::ToolDefinition;
use grammar::TEXT_BYTES_MAX;
use grammar::lark_text::{literal, without};
use serde_json::{Value, json};
use std::collections::HashMap;

/// Maximum number of subschemas in the schema of a tool.
const SCHEMAS_MAX: usize = 1_024;
/// Maximum nesting depth of `$ref` references and combined schemas (`allOf`, `anyOf`, `oneOf`).
const DEPTH_MAX: usize = 16;
/// Keywords that restrict lists and objects.
const COMPOUND_KEYWORDS: &[&str] = &[
    "type",
    "properties",
    "required",
    "additionalProperties",
    "items",
    "prefixItems",
    "enum",
    "const",
    "anyOf",
    "oneOf",
    "allOf",
    "$ref",
];

/// Builds the right-hand side of the rule for the arguments of tool `index`.
///
/// Errors: this syntax cannot represent the arguments of the tool as its schema requires.
pub(super) fn delimited_arguments(
    syntax: &'static DelimitedCallSyntax,
    index: usize,
    tool: &ToolDefinition,
    writer: &mut CallGrammarWriter<'_>,
) -> Result<String, CallGrammarError> {
    let (names, budget) = (HashMap::new(), SchemaBudget::new());
    let mut schemas =
        DelimitedSchemaConverter { syntax, index, tool, writer, names, chains: 0, budget };
    schemas.object(&tool.parameters)
}

/// Builds the right-hand side of a rule that accepts any arguments.
pub(super) fn any_object(
    syntax: &'static DelimitedCallSyntax,
    writer: &mut CallGrammarWriter<'_>,
) -> String {
    let text = text_terminal("ANY_TEXT", &without(&[syntax.delimiter.to_owned()]), syntax, writer);
    writer.json_rule("any_scalar", &json!({"type": ["number", "boolean", "null"]}));
    writer.rule("ANY_KEY", "/[^<>{}\\x5b\\x5d:,|\"\\s]{1,64}:/");
    writer.rule("any_list", "\"[\" (any_value (\",\" any_value)*)? \"]\"");
    writer.rule("any_value", &format!("{text} | any_scalar | any_list | any_object"));
    writer.rule("any_object", "\"{\" (ANY_KEY any_value (\",\" ANY_KEY any_value)*)? \"}\"");
    "any_object".to_owned()
}

/// Adds the terminal `name` for a string with its delimiters; `language` defines the allowed texts of the
/// string. Returns the Lark expression of the string.
fn text_terminal(
    name: &str,
    language: &str,
    syntax: &DelimitedCallSyntax,
    writer: &mut CallGrammarWriter<'_>,
) -> String {
    let end = writer.split(syntax.delimiter);
    writer.rule(name, &format!("({language}) {}", literal(&end.plain)));
    format!("{} {name} {}", writer.text(syntax.delimiter), end.rest)
}

/// Converts the schema of one tool, with its subschemas, to grammar rules in the delimited syntax.
struct DelimitedSchemaConverter<'a, 'b> {
    syntax: &'static DelimitedCallSyntax,
    index: usize,
    tool: &'a ToolDefinition,
    writer: &'a mut CallGrammarWriter<'b>,
    /// Rule name of each subschema, by the JSON text of the subschema; `None` = the subschema accepts no
    /// value.
    names: HashMap<String, Option<String>>,
    /// Number of objects whose member rules have been added; it makes the rule names unique.
    chains: usize,
    budget: SchemaBudget,
}

impl DelimitedSchemaConverter<'_, '_> {
    fn unsupported(&self, keyword: &'static str) -> CallGrammarError {
        CallGrammarError::UnsupportedKeyword { tool: self.tool.name.clone(), keyword }
    }

    /// Returns the name of the rule for the values that `schema` accepts; `None` if `schema` accepts no
    /// value.
    fn value(&mut self, schema: &Value) -> Result<Option<String>, CallGrammarError> {
        let key = schema.to_string();
        if let Some(known) = self.names.get(&key) {
            return Ok(known.clone());
        }
        if self.names.len() == SCHEMAS_MAX {
            return Err(self.unsupported("$ref"));
        }
        self.writer.check_length()?;
        let name = format!("value_{}_{}", self.index, self.names.len());
        self.names.insert(key.clone(), Some(name.clone()));
        let mut alternatives = Vec::new();
        alternatives.extend(self.text(schema, &name)?);
        alternatives.extend(self.scalar(schema, &name));
        alternatives.extend(self.compound(schema, DEPTH_MAX)?);
        if alternatives.is_empty() {
            self.names.insert(key, None);
            return Ok(None);
        }
        self.writer.rule(&name, &alternatives.join(" | "));
        Ok(Some(name))
    }

    fn text(&mut self, schema: &Value, name: &str) -> Result<Option<String>, CallGrammarError> {
        let language = SchemaTerminalBuilder::new(&self.tool.parameters).of(schema);
        let language = language.map_err(|keyword| self.unsupported(keyword))?;
        Ok(language.map(|language| {
            let conjuncts = [language, without(&[self.syntax.delimiter.to_owned()])];
            let terminal = name.to_uppercase();
            text_terminal(&terminal, &intersection(&conjuncts), self.syntax, self.writer)
        }))
    }

    /// Adds a rule for the numbers, booleans and nulls that `schema` accepts; they are written as in JSON.
    /// Returns the name of the rule; `None` if `schema` accepts no such value.
    fn scalar(&mut self, schema: &Value, name: &str) -> Option<String> {
        if *schema == Value::Bool(false) {
            return None;
        }
        let types = JsonTypeSet::of_value(&self.tool.parameters, schema);
        let mut names = types.names_except_text();
        names.retain(|name| !matches!(*name, "array" | "object"));
        if names.is_empty() {
            return None;
        }
        let rule = format!("json_{name}");
        let part = extracted(&self.tool.parameters, &json!({"type": names, "allOf": [schema]}));
        self.writer.json_rule(&rule, &part);
        Some(rule)
    }

    /// Returns the Lark alternatives for the lists and objects that `schema` accepts.
    fn compound(&mut self, schema: &Value, depth: usize) -> Result<Vec<String>, CallGrammarError> {
        let depth = depth.checked_sub(1).filter(|_| self.budget.spend(1));
        let Some(depth) = depth else { return Err(self.unsupported("$ref")) };
        let types = JsonTypeSet::of_value(&self.tool.parameters, schema);
        if !types.allows_compound() || *schema == Value::Bool(false) {
            return Ok(Vec::new());
        }
        if let Some(values) = constants(schema) {
            return Ok(self.compound_constants(&values));
        }
        let combined = ["$ref", "allOf", "anyOf", "oneOf"]
            .into_iter()
            .filter(|key| schema.get(*key).is_some());
        let combined: Vec<&'static str> = combined.collect();
        let others = COMPOUND_KEYWORDS
            .iter()
            .filter(|key| !combined.contains(key) && **key != "type" && schema.get(**key).is_some())
            .count();
        match combined[..] {
            [] => self.own_compound(schema),
            [keyword] if others == 0 => self.combination(schema, keyword, depth),
            // Several schemas for one object can be combined; several schemas for one list cannot.
            [keyword, ..] if allows(schema, "array") => Err(self.unsupported(keyword)),
            _ => self.object(schema).map(|object| vec![object]),
        }
    }

    /// Returns the Lark alternatives for the lists and objects in `values`.
    fn compound_constants(&mut self, values: &[Value]) -> Vec<String> {
        let compound = values.iter().filter(|value| value.is_array() || value.is_object());
        compound.map(|value| self.writer.text(&constant_text(self.syntax, value))).collect()
    }

    /// Returns the Lark alternatives for the lists and objects of a schema that consists of a single
    /// combination keyword.
    fn combination(
        &mut self,
        schema: &Value,
        keyword: &'static str,
        depth: usize,
    ) -> Result<Vec<String>, CallGrammarError> {
        if keyword == "$ref" {
            let target = target(&self.tool.parameters, schema);
            let target = target.ok_or_else(|| self.unsupported("$ref"))?;
            return self.compound(target, depth);
        }
        let choices = schema[keyword].as_array().map(Vec::as_slice).unwrap_or_default();
        if keyword == "allOf" && choices.len() > 1 {
            return Err(self.unsupported("allOf"));
        }
        let (mut written, mut bytes) = (Vec::new(), 0);
        for choice in choices {
            let one = self.compound(choice, depth)?;
            // `oneOf` rejects a value that several alternatives accept.
            if keyword == "oneOf" && !one.is_empty() && !written.is_empty() {
                return Err(self.unsupported("oneOf"));
            }
            bytes += one.iter().map(String::len).sum::<usize>();
            if bytes > TEXT_BYTES_MAX {
                return Err(CallGrammarError::TooLong);
            }
            written.extend(one);
        }
        Ok(written)
    }

    /// Returns the Lark alternatives for the lists and objects that `schema` itself describes, without its
    /// combination keywords (`allOf`, `anyOf`, `oneOf`).
    fn own_compound(&mut self, schema: &Value) -> Result<Vec<String>, CallGrammarError> {
        let mut alternatives = Vec::new();
        if allows(schema, "array") {
            alternatives.extend(self.list(schema)?);
        }
        if allows(schema, "object") {
            alternatives.push(self.object(schema)?);
        }
        Ok(alternatives)
    }

    /// Returns the Lark expression of the objects that `schema` accepts.
    fn object(&mut self, schema: &Value) -> Result<String, CallGrammarError> {
        let mut alternatives = Vec::new();
        for variant in call_variants_of(self.tool, schema, &self.budget)? {
            alternatives.push(self.members(&variant)?);
        }
        Ok(format!("\"{{\" ({}) \"}}\"", alternatives.join(" | ")))
    }

    /// Adds the rules for the members of an object and returns the name of the first rule. Each member has
    /// two rules, because a comma precedes every member except the first one.
    fn members(&mut self, variant: &CallParameters) -> Result<String, CallGrammarError> {
        let chain = format!("{}_{}", self.index, self.chains);
        self.chains += 1;
        let is_writable = |key: &str| {
            !key.is_empty() && key.chars().all(|c| c.is_alphanumeric() || "_-.$@/".contains(c))
        };
        let mut count = 0;
        for parameter in &variant.parameters {
            let key = &parameter.key;
            let value = if is_writable(key) { self.value(&parameter.schema)? } else { None };
            let Some(value) = value else {
                if parameter.is_required {
                    let (tool, key) = (self.tool.name.clone(), key.clone());
                    return Err(CallGrammarError::UnsupportedKey { tool, key });
                }
                continue;
            };
            let (key, next) = (literal(&format!("{key}:")), count + 1);
            for (name, comma) in [("first", ""), ("more", "\",\" ")] {
                let skip = if parameter.is_required {
                    String::new()
                } else {
                    format!(" | {name}_{chain}_{next}")
                };
                let body = format!("{comma}{key} {value} more_{chain}_{next}{skip}");
                self.writer.rule(&format!("{name}_{chain}_{count}"), &body);
            }
            count = next;
        }
        for name in ["first", "more"] {
            self.writer.rule(&format!("{name}_{chain}_{count}"), "\"\"");
        }
        Ok(format!("first_{chain}_0"))
    }
}

/// Returns the values listed in `enum` or `const`.
fn constants(schema: &Value) -> Option<Vec<Value>> {
    let listed = schema["enum"].as_array().cloned();
    listed.or_else(|| schema.get("const").map(|value| vec![value.clone()]))
}

/// Whether the `type` of `schema`, if it has one, contains `name`.
fn allows(schema: &Value, name: &str) -> bool {
    match &schema["type"] {
        Value::Null => true,
        Value::Array(names) => names.iter().any(|one| one == name),
        one => one == name,
    }
}
