//! Grammar of a call that is written as tags: the parameters of the schema in order, each with a value that
//! the output parser converts to JSON that the schema accepts.
//!
//! A string is written as plain text. It must not contain a text that ends the value. If the schema also
//! allows other types, the string must not look like a value of one of those types.

use super::call_grammar::{
    CallGrammarError, CallGrammarWriter, CallWrapperText, SpecialTokenSplit,
};
use super::call_parameters::{CallParameter, call_variants};
use super::schema_refs::extracted;
use super::schema_types::JsonTypeSet;
use super::tag_syntax::{TagSyntax, ValueConversion};
use super::tagged_calls::NAME_MAX;
use super::text_language::{SchemaTerminalBuilder, accepts_constant, intersection, regex_literal};
use super::tool_definition::ToolDefinition;
use grammar::lark_text::literal;
use serde_json::{Value, json};

/// Builds the right-hand side of the rule for the parameters of a call.
///
/// Errors: this syntax cannot represent the arguments of the tool as its schema requires.
pub(super) fn tagged_parameters(
    syntax: &TagSyntax,
    index: usize,
    tool: &ToolDefinition,
    writer: &mut CallGrammarWriter<'_>,
) -> Result<String, CallGrammarError> {
    let mut alternatives = Vec::new();
    for (variant_index, variant) in call_variants(tool)?.iter().enumerate() {
        let mut parameters = Vec::new();
        for (at, parameter) in variant.parameters.iter().enumerate() {
            writer.check_length()?;
            let rule = format!("value_{index}_{variant_index}_{at}");
            let written = if is_writable(syntax, &parameter.key) {
                TaggedParameter { syntax, tool, parameter, rule }.write(writer)?
            } else {
                None
            };
            let optional = if parameter.is_required { "" } else { "?" };
            match written {
                Some(written) => parameters.push(format!("({written}){optional}")),
                None if !parameter.is_required => {}
                None => {
                    let (tool, key) = (tool.name.clone(), parameter.key.clone());
                    return Err(CallGrammarError::UnsupportedKey { tool, key });
                }
            }
        }
        if parameters.is_empty() {
            parameters.push("\"\"".to_owned());
        }
        alternatives.push(parameters.join(" "));
    }
    Ok(alternatives.join(" | "))
}

/// Returns the text of a call before and after its parameters.
pub(super) fn call_tags(syntax: &TagSyntax, name: &str) -> CallWrapperText {
    let TagSyntax { call, line_break, .. } = syntax;
    let wrapper = syntax.wrapper.filter(|_| syntax.wraps_each_call);
    // If the name is ended only by a line break or by another tag, `name_end` is empty after trimming.
    let name_end = syntax.name_ends[0].trim();
    let mut head = format!("{}{name}{name_end}{line_break}", call.open);
    let mut tail = call.close.to_owned();
    if let Some(tags) = wrapper {
        head.insert_str(0, &format!("{}{line_break}", tags.open));
        tail = format!("{tail}{line_break}{}", tags.close);
    }
    CallWrapperText { head, infix: String::new(), tail }
}

/// Builds the right-hand side of a rule that accepts any parameters.
pub(super) fn any_parameters(syntax: &TagSyntax, writer: &mut CallGrammarWriter<'_>) -> String {
    let SpecialTokenSplit { plain, rest } = writer.split(syntax.key_end);
    writer.rule("ANY_KEY", &format!("/[^<>\"\\n]{{1,64}}/ {}", literal(&plain)));
    let line_break = if syntax.wraps_values { "\n" } else { "" };
    let gap = syntax.value_gap;
    let openings: Vec<String> = match syntax.value_openings {
        [] => vec![writer.text(&format!("{gap}{line_break}"))],
        openings => openings
            .iter()
            .map(|opening| writer.text(&format!("{gap}{}{line_break}", opening.text)))
            .collect(),
    };
    let ends: Vec<String> = syntax.value_ends.iter().map(|&end| end.to_owned()).collect();
    let value = writer.text_up_to("ANY_VALUE", &ends[0], &ends[1..]);
    let (open, line_break) = (writer.text(syntax.parameter_open), writer.text(syntax.line_break));
    let openings = openings.join(" | ");
    let openings = if openings.is_empty() { String::new() } else { format!("({openings})") };
    format!("({open} ANY_KEY {rest} {openings} {value} {line_break})*")
}

/// Whether the output parser returns the parameter key `key` unchanged when it parses a call with this
/// parameter.
fn is_writable(syntax: &TagSyntax, key: &str) -> bool {
    let fits = !key.is_empty() && key.len() <= NAME_MAX && key.trim() == key;
    fits && !key.contains(['<', '\n']) && !key.contains(syntax.key_end)
}

/// One parameter of a tool, for which grammar rules in a tag syntax are written.
struct TaggedParameter<'a> {
    syntax: &'a TagSyntax,
    tool: &'a ToolDefinition,
    parameter: &'a CallParameter,
    /// Name of the grammar rule for the parameter's value.
    rule: String,
}

impl TaggedParameter<'_> {
    /// Adds the rules for the value and returns the Lark expression of the parameter; `None` if the schema
    /// accepts no value that the syntax can express.
    fn write(
        &self,
        writer: &mut CallGrammarWriter<'_>,
    ) -> Result<Option<String>, CallGrammarError> {
        let syntax = self.syntax;
        let key = &self.parameter.key;
        let head = format!("{}{key}{}{}", syntax.parameter_open, syntax.key_end, syntax.value_gap);
        let types = JsonTypeSet::of(&self.tool.parameters, key);
        let opening = |form| syntax.value_openings.iter().find(|opening| opening.form == form);
        let mut alternatives = Vec::new();
        if let (Some(text), Some(json)) =
            (opening(ValueConversion::Text), opening(ValueConversion::Json))
        {
            // In this syntax, the tag itself states whether the value is a string.
            if let Some(value) = self.text_value(JsonTypeSet::text(), types, writer)? {
                alternatives
                    .push(format!("{} {value}", writer.text(&format!("{head}{}", text.text))));
            }
            if let Some(value) = self.json_value(&types.names_except_text(), types, writer) {
                alternatives
                    .push(format!("{} {value}", writer.text(&format!("{head}{}", json.text))));
            }
            return Ok(Some(alternatives.join(" | ")).filter(|written| !written.is_empty()));
        }
        let opening = syntax.value_openings.first().map_or("", |opening| opening.text);
        let line_break = if syntax.wraps_values { "\n" } else { "" };
        let head = writer.text(&format!("{head}{opening}{line_break}"));
        let mut names = types.names_except_text();
        if types.allows_text() {
            // `true`, `false` and `null` are part of the string terminal, because the lexer could not
            // distinguish them from strings that begin with the same characters.
            names.retain(|name| !matches!(*name, "boolean" | "null"));
        }
        alternatives.extend(self.text_value(types, types, writer)?);
        alternatives.extend(self.json_value(&names, types, writer));
        let values = Some(alternatives.join(" | ")).filter(|values| !values.is_empty());
        Ok(values.map(|values| format!("{head} ({values})")))
    }

    /// Text after a value.
    fn end(&self) -> String {
        let line_break = if self.syntax.wraps_values { "\n" } else { "" };
        format!("{line_break}{}{}", self.syntax.value_ends[0], self.syntax.line_break)
    }

    /// Adds the terminal for a string and, if `types` allow them, for the constants `true`, `false` and
    /// `null`. Returns the Lark expression of the value; `None` if no string is allowed.
    fn text_value(
        &self,
        types: JsonTypeSet,
        allowed: JsonTypeSet,
        writer: &mut CallGrammarWriter<'_>,
    ) -> Result<Option<String>, CallGrammarError> {
        if !allowed.allows_text() {
            return Ok(None);
        }
        let (root, schema) = (&self.tool.parameters, &self.parameter.schema);
        let language = SchemaTerminalBuilder::new(root).of(schema).map_err(|keyword| {
            CallGrammarError::UnsupportedKeyword { tool: self.tool.name.clone(), keyword }
        })?;
        let mut alternatives = Vec::new();
        if let Some(language) = language {
            let mut conjuncts = vec![language, format!("~{}", self.ends())];
            conjuncts.extend(other_types(types).into_iter().map(|other| format!("~{other}")));
            alternatives.push(intersection(&conjuncts));
        }
        let constants = [json!(null), json!(true), json!(false)];
        let is_constant = |value: &&Value| {
            (if value.is_null() { types.allows_null() } else { types.allows_booleans() })
                && accepts_constant(root, schema, value)
        };
        alternatives.extend(constants.iter().filter(is_constant).map(|v| literal(&v.to_string())));
        if alternatives.is_empty() {
            return Ok(None);
        }
        let SpecialTokenSplit { plain, rest } = writer.split(&self.end());
        let terminal = self.rule.to_uppercase();
        let body = alternatives.join(" | ");
        if plain.is_empty() {
            // The terminal is restricted to non-empty text, because a Lark terminal must not match the empty
            // string.
            writer.rule(&terminal, &format!("({body}) & /(?s:.+)/"));
            let optional = if accepts_constant(root, schema, &json!("")) { "?" } else { "" };
            return Ok(Some(format!("{terminal}{optional} {rest}")));
        }
        writer.rule(&terminal, &format!("({body}) {}", literal(&plain)));
        Ok(Some(format!("{terminal} {rest}")))
    }

    /// Adds the rule for a value that has one of the types `names` and is written as JSON. Returns the Lark
    /// expression of the value; `None` if `names` is empty.
    fn json_value(
        &self,
        names: &[&'static str],
        types: JsonTypeSet,
        writer: &mut CallGrammarWriter<'_>,
    ) -> Option<String> {
        if names.is_empty() {
            return None;
        }
        let schema = &self.parameter.schema;
        let is_typed = schema.get("type").is_some() && !types.allows_text();
        let schema =
            if is_typed { schema.clone() } else { json!({"type": names, "allOf": [schema]}) };
        let rule = format!("json_{}", self.rule);
        writer.json_rule(&rule, &extracted(&self.tool.parameters, &schema));
        Some(format!("{rule} {}", writer.text(&self.end())))
    }

    /// Returns the terminal of all texts that contain an end of the value.
    fn ends(&self) -> String {
        let ends: Vec<String> =
            self.syntax.value_ends.iter().map(|end| regex_literal(end)).collect();
        format!("/(?s:.*)(?:{})(?s:.*)/", ends.join("|"))
    }
}

/// Returns the terminals of all texts that the output parser would convert to a non-string type.
fn other_types(types: JsonTypeSet) -> Vec<&'static str> {
    let mut terminals = Vec::new();
    if types.allows_null() {
        terminals.push("/(?i:\\s*(?:null|none)\\s*)/");
    }
    if types.allows_booleans() {
        terminals.push("/(?i:\\s*(?:true|false)\\s*)/");
    }
    if types.allows_numbers() {
        terminals.push("/\\s*[-0-9](?s:.*)/");
    }
    if types.allows_compound() {
        terminals.push("/\\s*[\\x5b\\x7b](?s:.*)/");
    }
    terminals
}
