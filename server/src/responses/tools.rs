//! Parses the tools of a Responses request. Functions, custom tools and the tools of namespaces become
//! functions of the model. Tools of other types run on OpenAI's servers or need a model that knows them; they
//! are skipped.

use super::accepted_hints::AcceptedHints;
use super::tool_choice::ToolSelection;
use super::tool_names::{CalledTool, ToolNames, function_name};
use crate::api_error::ApiError;
use crate::openai::chat::tools::{self, RequestTools};
use crate::request_fields::{RequestFields, wrong_type};
use crate::strict_json::JsonValue;
use grammar::TEXT_BYTES_MAX;
use serde_json::{Map, Value, json};
use text::{ToolCallSyntax, ToolDefinition};

/// Maximum number of functions, over all namespaces.
const FUNCTIONS_MAX: usize = 512;
/// Name of the only parameter of the function of a custom tool.
pub(super) const INPUT: &str = "input";

/// Validated tools of a Responses request.
pub(super) struct ResponsesTools {
    /// Functions that the model may call, and the tool choice.
    pub(super) tools: RequestTools,
    /// Tools that calls of these functions are reported for.
    pub(super) names: ToolNames,
}

/// Grammar of the input of a custom tool, which only a forced call may enforce.
struct CustomToolFormat {
    path: String,
    is_regex: bool,
}

/// Tools parsed so far.
#[derive(Default)]
pub(super) struct ToolList {
    pub(super) definitions: Vec<ToolDefinition>,
    /// Types of the skipped tools.
    pub(super) skipped_types: Vec<String>,
    template_tools: Vec<Value>,
    names: ToolNames,
    formats: Vec<CustomToolFormat>,
}

/// Parses `tools`, `tool_choice` and `parallel_tool_calls`, and adds them to the fields of the response
/// object. `syntax` is the tool call syntax of the model.
///
/// Errors: HTTP status 400; the error names the invalid field.
pub(super) fn take(
    fields: &mut RequestFields,
    syntax: Option<ToolCallSyntax>,
    hints: &mut AcceptedHints,
    echoed_fields: &mut Map<String, Value>,
) -> Result<ResponsesTools, ApiError> {
    let (mut list, mut echoed_tools) = (ToolList::default(), Vec::new());
    for (index, item) in tools::list(fields)?.into_iter().enumerate() {
        echoed_tools.push(item.clone().into_value());
        list.tool(RequestFields::of(format!("tools[{index}]"), item)?, hints)?;
    }
    let selection = ToolSelection::take(fields, &list)?;
    list.retain(selection.allowed.as_deref());
    let parallel = fields.bool("parallel_tool_calls")?.unwrap_or(true);
    let ToolList { definitions, template_tools, names, formats, .. } = list;
    let template_value =
        if template_tools.is_empty() { Value::Null } else { Value::Array(template_tools) };
    let definitions = definitions.into();
    let tools = RequestTools { definitions, template_value, choice: selection.choice, parallel };
    tools.check("tool_choice")?;
    // Only a forced call is constrained. Qwen3-Coder's syntax has no JSON strings, to which the pattern of
    // the schema could apply.
    let enforces_regex = tools.must_call() && syntax != Some(ToolCallSyntax::Qwen3Coder);
    for format in formats {
        if !(format.is_regex && enforces_regex) {
            hints.add(format.path);
        }
    }
    echoed_fields.extend([
        ("parallel_tool_calls".to_owned(), json!(parallel)),
        ("tool_choice".to_owned(), selection.echoed),
        ("tools".to_owned(), Value::Array(echoed_tools)),
    ]);
    Ok(ResponsesTools { tools, names })
}

impl ToolList {
    fn tool(&mut self, mut item: RequestFields, hints: &mut AcceptedHints) -> Result<(), ApiError> {
        let path = item.path("type");
        match item.string("type", 64)?.as_deref() {
            Some("function") => self.function(&mut item, None, None),
            Some("custom") => self.custom(&mut item, None, None),
            Some("namespace") => self.namespace(item, hints),
            Some(other) => {
                self.skipped_types.push(other.to_owned());
                hints.add(path.trim_end_matches(".type"));
                Ok(())
            }
            None => Err(ApiError::invalid(path, "is missing")),
        }
    }

    /// Parses the tools of a namespace. The description of the namespace is added to that of its first tool,
    /// because chat templates have no place for it.
    fn namespace(
        &mut self,
        mut item: RequestFields,
        hints: &mut AcceptedHints,
    ) -> Result<(), ApiError> {
        let name = tools::function(&mut item, "parameters")?.name;
        let description = item.string("description", usize::MAX)?.filter(|text| !text.is_empty());
        let mut preface = description.map(|text| format!("Functions {name}__*: {text}"));
        let path = item.path("tools");
        for (index, value) in tools::list(&mut item)?.into_iter().enumerate() {
            let mut tool = RequestFields::of(format!("{path}[{index}]"), value)?;
            let type_path = tool.path("type");
            match tool.string("type", 64)?.as_deref() {
                Some("function") => self.function(&mut tool, Some(&name), preface.take())?,
                Some("custom") => self.custom(&mut tool, Some(&name), preface.take())?,
                Some(other) => {
                    self.skipped_types.push(other.to_owned());
                    hints.add(format!("{path}[{index}]"));
                }
                None => return Err(ApiError::invalid(type_path, "is missing")),
            }
        }
        Ok(())
    }

    fn function(
        &mut self,
        item: &mut RequestFields,
        namespace: Option<&str>,
        preface: Option<String>,
    ) -> Result<(), ApiError> {
        let tool = tools::function(item, "parameters")?;
        let description = item.string("description", usize::MAX)?;
        let called = CalledTool {
            namespace: namespace.map(str::to_owned),
            name: tool.name,
            is_custom: false,
        };
        let description = joined([preface, description]);
        self.add(called, tool.parameters, description, &item.path("name"))
    }

    fn custom(
        &mut self,
        item: &mut RequestFields,
        namespace: Option<&str>,
        preface: Option<String>,
    ) -> Result<(), ApiError> {
        // A custom tool has no parameters; the name is parsed as that of a function.
        let name = tools::function(item, "parameters")?.name;
        let description = item.string("description", usize::MAX)?;
        let mut input = json!({"type": "string"});
        let mut rule = None;
        if let Some(value) = item.take("format") {
            let mut format = RequestFields::of(item.path("format"), value)?;
            if let Some(grammar) = CustomGrammar::take(&mut format)? {
                if grammar.is_regex {
                    input["pattern"] = Value::from(format!("^(?:{})$", grammar.definition));
                }
                rule = Some(grammar.description());
                let is_regex = grammar.is_regex;
                self.formats.push(CustomToolFormat { path: item.path("format"), is_regex });
            }
        }
        let parameters = json!({"type": "object", "properties": {INPUT: input},
            "required": [INPUT], "additionalProperties": false});
        let called = CalledTool { namespace: namespace.map(str::to_owned), name, is_custom: true };
        let description = joined([preface, description, rule]);
        self.add(called, parameters, description, &item.path("name"))
    }

    fn add(
        &mut self,
        called: CalledTool,
        parameters: Value,
        description: Option<String>,
        path: &str,
    ) -> Result<(), ApiError> {
        if self.definitions.len() == FUNCTIONS_MAX {
            let message = format!("at most {FUNCTIONS_MAX} functions, over all namespaces");
            return Err(ApiError::invalid("tools", message));
        }
        let name = function_name(called.namespace.as_deref(), &called.name);
        tools::check_unique(&self.definitions, &name, path.to_owned())?;
        let tool = ToolDefinition { name, parameters };
        self.template_tools.push(tools::template_tool(&tool, description));
        self.definitions.push(tool);
        self.names.insert(called);
        Ok(())
    }

    /// Drops the functions that are not in `allowed`; `None` = all functions are allowed.
    fn retain(&mut self, allowed: Option<&[String]>) {
        let Some(allowed) = allowed else { return };
        let is_allowed = |name: &str| allowed.iter().any(|other| other == name);
        self.template_tools
            .retain(|tool| tool["function"]["name"].as_str().is_some_and(is_allowed));
        self.definitions.retain(|tool| is_allowed(&tool.name));
    }
}

/// Grammar that the input of a custom tool must match.
struct CustomGrammar {
    is_regex: bool,
    definition: String,
}

impl CustomGrammar {
    /// Parses the `format` of a custom tool; `None` = any text.
    fn take(format: &mut RequestFields) -> Result<Option<Self>, ApiError> {
        let path = format.path("type");
        match format.string("type", 64)?.as_deref() {
            Some("text") => return Ok(None),
            Some("grammar") => {}
            Some(_) => return Err(ApiError::unsupported(path, "must be text or grammar")),
            None => return Err(ApiError::invalid(path, "is missing")),
        }
        let path = format.path("syntax");
        let is_regex = match format.required("syntax")? {
            JsonValue::Str(syntax) if syntax == "regex" => true,
            JsonValue::Str(syntax) if syntax == "lark" => false,
            JsonValue::Str(_) => return Err(ApiError::invalid(path, "must be lark or regex")),
            other => return Err(wrong_type(path, "a string", &other)),
        };
        let path = format.path("definition");
        let definition = format.string("definition", TEXT_BYTES_MAX)?;
        let definition = definition.ok_or_else(|| ApiError::invalid(path, "is missing"))?;
        Ok(Some(Self { is_regex, definition }))
    }

    /// Returns the rule for the model: without a constraint, it follows the grammar only if it knows it.
    fn description(&self) -> String {
        let syntax = if self.is_regex { "regular expression" } else { "Lark grammar" };
        format!("The value of `{INPUT}` must match this {syntax}:\n{}", self.definition)
    }
}

/// Joins the parts of a description by empty lines.
fn joined<const N: usize>(parts: [Option<String>; N]) -> Option<String> {
    let parts: Vec<String> = parts.into_iter().flatten().collect();
    (!parts.is_empty()).then(|| parts.join("\n\n"))
}
