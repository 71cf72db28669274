//! Custom tools, whose input is plain text. The model sees each custom tool as a function with one parameter,
//! `input`. Supported by chat completions and `/v1/responses`.

use super::tools;
use crate::api_error::ApiError;
use crate::ignored_parts::IgnoredRequestParts;
use crate::request_fields::{RequestFields, wrong_type};
use crate::strict_json::JsonValue;
use grammar::{TEXT_BYTES_MAX, lark_pattern};
use serde_json::{Value, json};
use std::collections::HashSet;
use std::sync::Arc;

/// Name of the only parameter of a custom tool's function.
pub(crate) const INPUT: &str = "input";

/// Validated custom tool.
pub(crate) struct CustomTool {
    pub(crate) name: String,
    /// JSON schema of the function's arguments.
    pub(crate) parameters: Value,
    /// Description of the tool, including a description of the input format.
    pub(crate) description: Option<String>,
    /// Grammar of the input; `None` = any text.
    pub(crate) format: Option<CustomToolFormat>,
}

/// Field `format` of a custom tool: its path, and whether the grammar in the field is enforced.
pub(crate) struct CustomToolFormat {
    /// Path of the field `format`, for the header of ignored fields.
    pub(crate) path: String,
    /// Whether the grammar is enforced, as a regular expression in the argument schema. Other grammars are
    /// only described to the model in the prompt.
    pub(crate) is_enforced: bool,
}

impl CustomToolFormat {
    /// Returns whether the format can be enforced. If so, the path of the format is added to
    /// `strict_paths`; otherwise to `hints`, the list of values without effect.
    pub(crate) fn enforced(
        format: Option<Self>,
        strict_paths: &mut Vec<String>,
        hints: &IgnoredRequestParts,
    ) -> bool {
        let Some(Self { path, is_enforced }) = format else { return false };
        if is_enforced {
            strict_paths.push(path);
        } else {
            hints.add(path);
        }
        is_enforced
    }
}

impl CustomTool {
    /// Parses the definition of a custom tool: its name, description and format.
    ///
    /// Errors: HTTP status 400; the error names the invalid field.
    pub(crate) fn take(fields: &mut RequestFields) -> Result<Self, ApiError> {
        // A custom tool has no parameters; its name is parsed like a function name.
        let name = tools::function(fields, "parameters")?.tool.name;
        let description = fields.string("description", usize::MAX)?;
        let (mut input, mut rule, mut format) = (json!({"type": "string"}), None, None);
        if let Some(value) = fields.take("format") {
            let path = fields.path("format");
            let grammar = CustomToolGrammar::take(&mut fields.nested(path.clone(), value)?)?;
            if let Some(grammar) = grammar {
                let pattern = grammar.pattern();
                let is_enforced = pattern.is_some();
                if let Some(pattern) = pattern {
                    input["pattern"] = Value::from(format!("^(?:{pattern})$"));
                }
                rule = Some(grammar.description());
                format = Some(CustomToolFormat { path, is_enforced });
            }
        }
        let parameters = json!({"type": "object", "properties": {INPUT: input},
            "required": [INPUT], "additionalProperties": false});
        Ok(Self { name, parameters, description: joined([description, rule]), format })
    }
}

/// Grammar in the field `format` of a custom tool, which the tool's input must match.
struct CustomToolGrammar {
    is_regex: bool,
    definition: String,
}

impl CustomToolGrammar {
    /// Parses the `format` of a custom tool; `None` = any text. In chat completions, the grammar's fields are
    /// inside an object `grammar`; this form is always accepted.
    fn take(format: &mut RequestFields) -> Result<Option<Self>, ApiError> {
        let path = format.path("type");
        match format.string("type", 64)?.as_deref() {
            Some("text") => return Ok(None),
            Some("grammar") => {}
            Some(_) => return Err(ApiError::unsupported(path, "must be text or grammar")),
            None => return Err(ApiError::invalid(path, "is missing")),
        }
        match format.take("grammar") {
            None => Self::members(format).map(Some),
            Some(value) => {
                let mut grammar = format.nested(format.path("grammar"), value)?;
                Self::members(&mut grammar).map(Some)
            }
        }
    }

    fn members(grammar: &mut RequestFields) -> Result<Self, ApiError> {
        let path = grammar.path("syntax");
        let is_regex = match grammar.required("syntax")? {
            JsonValue::Str(syntax) if syntax == "regex" => true,
            JsonValue::Str(syntax) if syntax == "lark" => false,
            JsonValue::Str(_) => return Err(ApiError::invalid(path, "must be lark or regex")),
            other => return Err(wrong_type(path, "a string", &other)),
        };
        let path = grammar.path("definition");
        let definition = grammar.string("definition", TEXT_BYTES_MAX)?;
        let definition = definition.ok_or_else(|| ApiError::invalid(path, "is missing"))?;
        Ok(Self { is_regex, definition })
    }

    /// Returns the grammar as a regular expression; `None` if the language is not regular.
    fn pattern(&self) -> Option<String> {
        if self.is_regex { Some(self.definition.clone()) } else { lark_pattern(&self.definition) }
    }

    /// Returns a description of the grammar for the prompt: where the grammar is not enforced, the model can
    /// follow it only if the prompt contains it.
    fn description(&self) -> String {
        let syntax = if self.is_regex { "regular expression" } else { "Lark grammar" };
        format!("The value of `{INPUT}` must match this {syntax}:\n{}", self.definition)
    }
}

/// Joins the parts of a description by empty lines.
pub(crate) fn joined<const N: usize>(parts: [Option<String>; N]) -> Option<String> {
    let parts: Vec<String> = parts.into_iter().flatten().collect();
    (!parts.is_empty()).then(|| parts.join("\n\n"))
}

/// Names of the custom tools of a request.
#[derive(Debug, Clone, Default)]
pub(crate) struct CustomToolNames {
    names: Arc<HashSet<String>>,
}

impl CustomToolNames {
    /// Creates the set of custom tools with the given names.
    pub(crate) fn new(names: HashSet<String>) -> Self {
        Self { names: names.into() }
    }

    /// Whether the tool `name` is a custom tool.
    pub(crate) fn contains(&self, name: &str) -> bool {
        self.names.contains(name)
    }
}
