//! Parses the tools of a request: functions and custom tools.

use super::custom_tools::{CustomTool, CustomToolFormat, CustomToolNames};
pub(crate) use super::tool_choice::ToolChoice;
use super::tool_choice::{ChosenToolName, ToolSelection};
use crate::api_error::ApiError;
use crate::ignored_parts::IgnoredRequestParts;
use crate::request_fields::{RequestFields, wrong_type};
use crate::strict_json::JsonValue;
use serde_json::{Map, Value, json};
use std::collections::HashSet;
use std::sync::Arc;
use text::ToolDefinition;

const TOOLS_MAX: usize = 128;
/// Maximum length of a function name in bytes.
const NAME_MAX: usize = 128;

/// Validated tools of a request.
#[derive(Debug, Clone, Default)]
pub(crate) struct RequestTools {
    /// Tool definitions, from which the tool call parser and the grammar are built.
    pub definitions: Arc<[ToolDefinition]>,
    /// Tools in the form that is passed to the chat template; null if the request has no field `tools`.
    pub template_value: Value,
    /// `tool_choice` of the request.
    pub choice: ToolChoice,
    /// Whether an output may contain more than one call (`parallel_tool_calls`).
    pub parallel: bool,
    /// Names of the tools whose calls chat completions report as custom tool calls.
    pub custom: CustomToolNames,
    /// Paths of the fields that make tools strict. They have no effect if no grammar constrains the calls.
    pub strict_paths: Vec<String>,
}

/// Tools parsed so far.
#[derive(Default)]
struct ChatToolList {
    definitions: Vec<ToolDefinition>,
    template_tools: Vec<Value>,
    custom: HashSet<String>,
    strict_paths: Vec<String>,
}

impl RequestTools {
    /// Parses `tools`, `tool_choice` and `parallel_tool_calls`; rejects the deprecated `functions` and
    /// `function_call`.
    ///
    /// Errors: HTTP status 400; the error names the invalid field.
    pub(crate) fn take(fields: &mut RequestFields) -> Result<Self, ApiError> {
        reject_deprecated_fields(fields)?;
        let is_given = fields.contains("tools");
        let mut list = ChatToolList::default();
        for (index, item) in self::list(fields)?.into_iter().enumerate() {
            list.add(format!("tools[{index}]"), item, fields.hints())?;
        }
        let selection = ToolSelection::take(fields, &list.definitions)?;
        selection.retain(&mut list.definitions, &mut list.template_tools);
        let ChatToolList { definitions, template_tools, custom, strict_paths } = list;
        let template_value = if is_given { Value::Array(template_tools) } else { Value::Null };
        let tools = Self {
            definitions: definitions.into(),
            template_value,
            choice: selection.choice,
            parallel: fields.bool("parallel_tool_calls")?.unwrap_or(true),
            custom: CustomToolNames::new(custom),
            strict_paths,
        };
        tools.check("tool_choice")?;
        Ok(tools)
    }

    /// Checks that the tool choice is possible with these tools; `field` is the name of the tool choice field
    /// in errors.
    pub(crate) fn check(&self, field: &str) -> Result<(), ApiError> {
        match &self.choice {
            ToolChoice::None | ToolChoice::Auto => Ok(()),
            _ if self.definitions.is_empty() => {
                let message = "requires a tool call, but tools is empty";
                Err(ApiError::invalid(field, message))
            }
            ToolChoice::Named(name) if !self.definitions.iter().any(|tool| tool.name == *name) => {
                let message = "names a function that is not in tools";
                Err(ApiError::invalid(field, message))
            }
            ToolChoice::Required | ToolChoice::Named(_) => Ok(()),
        }
    }

    /// Whether tool calls are parsed from the output.
    pub(crate) fn parses_tool_calls(&self) -> bool {
        !self.definitions.is_empty() && self.choice != ToolChoice::None
    }

    /// Returns the tools that the model may call under this tool choice.
    pub(crate) fn callable(&self) -> impl Iterator<Item = &ToolDefinition> {
        let named = |tool: &&ToolDefinition| match &self.choice {
            ToolChoice::Named(name) => tool.name == *name,
            _ => true,
        };
        self.definitions.iter().filter(named)
    }

    /// Rejects tool schemas with the key `x-guidance`, which sets options of the grammar compiler, because
    /// one of these options lets outputs deviate from the schema.
    pub(crate) fn check_schemas(&self) -> Result<(), ApiError> {
        let has_guidance = |tool: &ToolDefinition| {
            let schema = &tool.parameters;
            let mut properties = schema["properties"].as_object().into_iter().flatten();
            schema.get("x-guidance").is_some()
                || properties.any(|(_, property)| property.get("x-guidance").is_some())
        };
        match self.definitions.iter().position(has_guidance) {
            None => Ok(()),
            Some(index) => {
                let message = "its schema must not have the keyword x-guidance";
                Err(ApiError::invalid(format!("tools[{index}]"), message))
            }
        }
    }

    /// Whether a tool that the model may call is strict.
    pub(crate) fn has_strict(&self) -> bool {
        self.parses_tool_calls() && self.callable().any(|tool| tool.is_strict)
    }

    /// Whether the model must call a tool.
    pub(crate) fn must_call(&self) -> bool {
        matches!(self.choice, ToolChoice::Required | ToolChoice::Named(_))
    }
}

/// Rejects the deprecated fields `functions` and `function_call`, unless their value has no effect.
fn reject_deprecated_fields(fields: &mut RequestFields) -> Result<(), ApiError> {
    for (old, new) in [("functions", "tools"), ("function_call", "tool_choice")] {
        match fields.take(old) {
            None => {}
            Some(JsonValue::List(list)) if list.is_empty() => {}
            Some(JsonValue::Str(choice)) if choice == "none" || choice == "auto" => {}
            Some(_) => {
                let message = format!("is no longer supported; use {new}");
                return Err(ApiError::unsupported(fields.path(old), message));
            }
        }
    }
    Ok(())
}

/// Returns the list in field `tools`, with at most `TOOLS_MAX` entries; an empty list if the field is absent.
pub(crate) fn list(fields: &mut RequestFields) -> Result<Vec<JsonValue>, ApiError> {
    let path = fields.path("tools");
    fields.take("tools").map_or(Ok(Vec::new()), |value| entries(path, value))
}

fn entries(path: String, value: JsonValue) -> Result<Vec<JsonValue>, ApiError> {
    match value {
        JsonValue::List(list) if list.len() <= TOOLS_MAX => Ok(list),
        JsonValue::List(list) => {
            let message = format!("at most {TOOLS_MAX} tools, got {}", list.len());
            Err(ApiError::invalid(path, message))
        }
        other => Err(wrong_type(path, "a list of objects", &other)),
    }
}

/// Rejects a tool name that occurs more than once in a request.
pub(crate) fn check_unique(
    tools: &[ToolDefinition],
    name: &str,
    path: String,
) -> Result<(), ApiError> {
    if tools.iter().any(|tool| tool.name == name) {
        return Err(ApiError::invalid(path, "duplicate tool name"));
    }
    Ok(())
}

/// Definition of a function, and the JSON schema of its arguments as a value for chat templates.
pub(crate) struct ParsedFunction {
    pub(crate) tool: ToolDefinition,
    pub(crate) template_schema: Value,
}

/// Parses the definition of a function: its name, and the JSON schema of its arguments in field `schema`.
///
/// Errors: HTTP status 400; the error names the invalid field.
pub(crate) fn function(
    fields: &mut RequestFields,
    schema: &str,
) -> Result<ParsedFunction, ApiError> {
    let path = fields.path("name");
    let name = fields.string("name", NAME_MAX)?;
    let Some(name) = name.filter(|name| is_name(name)) else {
        let message = format!("must be 1 to {NAME_MAX} bytes out of letters, digits and _ - . : /");
        return Err(ApiError::invalid(path, message));
    };
    let path = fields.path(schema);
    let (parameters, template_schema) = match fields.take(schema) {
        None => {
            let any = json!({"type": "object", "properties": {}});
            (any.clone(), any)
        }
        Some(object @ JsonValue::Object(_)) => {
            (object.clone().into_value(), object.into_template_value())
        }
        Some(other) => return Err(wrong_type(path, "a JSON schema", &other)),
    };
    if parameters.get("type").is_some_and(|kind| kind != "object") {
        return Err(ApiError::invalid(path, "must be the schema of an object"));
    }
    let tool = ToolDefinition { name, parameters, is_strict: false };
    Ok(ParsedFunction { tool, template_schema })
}

/// Formats a tool in the form that chat templates expect.
pub(crate) fn template_tool(name: &str, description: Option<String>, schema: Value) -> Value {
    let mut function = Map::new();
    function.insert("name".to_owned(), Value::from(name));
    if let Some(text) = description {
        function.insert("description".to_owned(), Value::from(text));
    }
    function.insert("parameters".to_owned(), schema);
    json!({"type": "function", "function": function})
}

/// Whether a name is unambiguous in every tool call syntax: it contains no quotes, brackets, spaces or parts
/// of markers.
fn is_name(name: &str) -> bool {
    let fits = |c: char| c.is_alphanumeric() || "_-.:/".contains(c);
    (1..=NAME_MAX).contains(&name.len()) && name.chars().all(fits)
}

impl ChatToolList {
    fn add(
        &mut self,
        path: String,
        item: JsonValue,
        hints: &IgnoredRequestParts,
    ) -> Result<(), ApiError> {
        let sent = item.clone();
        let mut item = RequestFields::nested_in(hints, path, item)?;
        let path = item.path("type");
        match item.string("type", 64)?.as_deref() {
            Some("function") => {
                let mut inner = member(&mut item, "function")?;
                let mut tool = function(&mut inner, "parameters")?.tool;
                inner.string("description", usize::MAX)?;
                tool.is_strict = inner.bool("strict")?.unwrap_or(false);
                self.strict_paths.extend(tool.is_strict.then(|| inner.path("strict")));
                // Templates print whole tool definitions, so the function is passed exactly as the client
                // sent it.
                inner.omit_rest();
                item.omit_rest();
                self.push(tool, sent.into_template_value(), &inner)
            }
            Some("custom") => self.add_custom(member(&mut item, "custom")?),
            Some(_) => Err(ApiError::unsupported(path, "must be function or custom")),
            None => Err(ApiError::invalid(path, "is missing")),
        }
    }

    fn add_custom(&mut self, mut fields: RequestFields) -> Result<(), ApiError> {
        let CustomTool { name, parameters, description, format } = CustomTool::take(&mut fields)?;
        let is_strict = CustomToolFormat::enforced(format, &mut self.strict_paths, fields.hints());
        let template_tool = template_tool(&name, description, parameters.clone());
        let tool = ToolDefinition { name, parameters, is_strict };
        self.custom.insert(tool.name.clone());
        self.push(tool, template_tool, &fields)
    }

    fn push(
        &mut self,
        tool: ToolDefinition,
        template_tool: Value,
        fields: &RequestFields,
    ) -> Result<(), ApiError> {
        check_unique(&self.definitions, &tool.name, fields.path("name"))?;
        self.definitions.push(tool);
        self.template_tools.push(template_tool);
        Ok(())
    }
}

/// Removes and returns the member `name` of a tool, which must be an object.
fn member(item: &mut RequestFields, name: &str) -> Result<RequestFields, ApiError> {
    let value = item.required(name)?;
    item.nested(item.path(name), value)
}

/// Parses a tool name in the form of chat completions: `name` is inside an object whose key is the tool type
/// `kind`. `None` = the type is unknown.
pub(super) fn named_tool(
    fields: &mut RequestFields,
    kind: &str,
) -> Result<Option<ChosenToolName>, ApiError> {
    if !matches!(kind, "function" | "custom") {
        return Ok(None);
    }
    let mut inner = member(fields, kind)?;
    let path = inner.path("name");
    match inner.string("name", NAME_MAX)? {
        Some(name) => Ok(Some(ChosenToolName { name, path })),
        None => Err(ApiError::invalid(path, "is missing")),
    }
}

/// Parses a tool choice object that contains the `name` of a function.
pub(crate) fn named_function(fields: &mut RequestFields) -> Result<ToolChoice, ApiError> {
    let path = fields.path("name");
    let name = fields.string("name", NAME_MAX)?;
    name.map(ToolChoice::Named).ok_or_else(|| ApiError::invalid(path, "is missing"))
}

#[cfg(test)]
mod tests;
