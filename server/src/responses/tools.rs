//! Parses the tools of a Responses request. Functions, custom tools and the tools of namespaces become
//! functions that the model can call. Tools of other types run on OpenAI's servers or need a model trained
//! for them; they are skipped.

use super::tool_choice::ResponsesToolChoice;
use super::tool_names::{CalledTool, ToolNameMap, function_name};
use crate::api_error::ApiError;
use crate::openai::chat::custom_tools::{CustomTool, CustomToolFormat, CustomToolNames, joined};
use crate::openai::chat::tools::{self, ParsedFunction, RequestTools, ToolChoice};
use crate::request_fields::RequestFields;
use serde_json::{Map, Value, json};
use text::ToolDefinition;

/// Maximum total number of functions in all namespaces.
const FUNCTIONS_MAX: usize = 512;

/// Validated tools of a Responses request.
pub(super) struct ResponsesTools {
    /// Functions that the model may call, and the tool choice.
    pub(super) tools: RequestTools,
    /// For each function, the tool that the response names for a call of the function.
    pub(super) names: ToolNameMap,
}

/// Tools parsed so far.
#[derive(Default)]
pub(super) struct ResponsesToolsBuilder {
    pub(super) definitions: Vec<ToolDefinition>,
    /// Types of the tools that the model cannot call and that were skipped.
    pub(super) skipped_types: Vec<String>,
    template_tools: Vec<Value>,
    names: ToolNameMap,
    strict_paths: Vec<String>,
}

/// Parses `tools`, `tool_choice` and `parallel_tool_calls`, and adds them to the response object.
///
/// Errors: HTTP status 400; the error names the invalid field.
pub(super) fn take(
    fields: &mut RequestFields,
    echoed_fields: &mut Map<String, Value>,
) -> Result<ResponsesTools, ApiError> {
    let (mut list, mut echoed_tools) = (ResponsesToolsBuilder::default(), Vec::new());
    for (index, item) in tools::list(fields)?.into_iter().enumerate() {
        echoed_tools.push(item.clone().into_template_value());
        list.tool(fields.nested(format!("tools[{index}]"), item)?)?;
    }
    let ResponsesToolChoice { selection, echoed } = ResponsesToolChoice::take(fields, &list)?;
    selection.retain(&mut list.definitions, &mut list.template_tools);
    let parallel = fields.bool("parallel_tool_calls")?.unwrap_or(true);
    let parsed = list.build(selection.choice, parallel);
    parsed.tools.check("tool_choice")?;
    echoed_fields.extend([
        ("parallel_tool_calls".to_owned(), json!(parallel)),
        ("tool_choice".to_owned(), echoed),
        ("tools".to_owned(), Value::Array(echoed_tools)),
    ]);
    Ok(parsed)
}

impl ResponsesToolsBuilder {
    /// Combines the tools with the tool choice and the value of `parallel_tool_calls`.
    fn build(self, choice: ToolChoice, parallel: bool) -> ResponsesTools {
        let Self { definitions, template_tools, names, strict_paths, .. } = self;
        let template_value =
            if template_tools.is_empty() { Value::Null } else { Value::Array(template_tools) };
        let tools = RequestTools {
            definitions: definitions.into(),
            template_value,
            choice,
            parallel,
            custom: CustomToolNames::default(),
            strict_paths,
        };
        ResponsesTools { tools, names }
    }

    fn tool(&mut self, mut item: RequestFields) -> Result<(), ApiError> {
        let path = item.path("type");
        match item.string("type", 64)?.as_deref() {
            Some("function") => self.function(&mut item, None, None),
            Some("custom") => self.custom(&mut item, None, None),
            Some("namespace") => self.namespace(item),
            Some(other) => {
                self.skipped_types.push(other.to_owned());
                item.accept_whole();
                Ok(())
            }
            None => Err(ApiError::invalid(path, "is missing")),
        }
    }

    /// Parses the tools of a namespace. The namespace description is prepended to the description of its
    /// first tool, because chat templates do not support namespaces.
    fn namespace(&mut self, mut item: RequestFields) -> Result<(), ApiError> {
        let name = tools::function(&mut item, "parameters")?.tool.name;
        let description = item.string("description", usize::MAX)?.filter(|text| !text.is_empty());
        let mut preface = description.map(|text| format!("Functions {name}__*: {text}"));
        let path = item.path("tools");
        for (index, value) in tools::list(&mut item)?.into_iter().enumerate() {
            let mut tool = item.nested(format!("{path}[{index}]"), value)?;
            let type_path = tool.path("type");
            match tool.string("type", 64)?.as_deref() {
                Some("function") => self.function(&mut tool, Some(&name), preface.take())?,
                Some("custom") => self.custom(&mut tool, Some(&name), preface.take())?,
                Some(other) => {
                    self.skipped_types.push(other.to_owned());
                    tool.accept_whole();
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
        let mut function = tools::function(item, "parameters")?;
        let tool = &mut function.tool;
        tool.is_strict = item.bool("strict")?.unwrap_or(false);
        self.strict_paths.extend(tool.is_strict.then(|| item.path("strict")));
        let description = item.string("description", usize::MAX)?;
        let called = CalledTool {
            namespace: namespace.map(str::to_owned),
            name: tool.name.clone(),
            is_custom: false,
        };
        let description = joined([preface, description]);
        self.add(called, function, description, &item.path("name"))
    }

    fn custom(
        &mut self,
        item: &mut RequestFields,
        namespace: Option<&str>,
        preface: Option<String>,
    ) -> Result<(), ApiError> {
        let path = item.path("name");
        let CustomTool { name, parameters, description, format } = CustomTool::take(item)?;
        let is_strict = CustomToolFormat::enforced(format, &mut self.strict_paths, item.hints());
        let template_schema = parameters.clone();
        let tool = ToolDefinition { name: name.clone(), parameters, is_strict };
        let function = ParsedFunction { tool, template_schema };
        let called = CalledTool { namespace: namespace.map(str::to_owned), name, is_custom: true };
        self.add(called, function, joined([preface, description]), &path)
    }

    fn add(
        &mut self,
        called: CalledTool,
        function: ParsedFunction,
        description: Option<String>,
        path: &str,
    ) -> Result<(), ApiError> {
        if self.definitions.len() == FUNCTIONS_MAX {
            let message = format!("at most {FUNCTIONS_MAX} functions, over all namespaces");
            return Err(ApiError::invalid("tools", message));
        }
        let ParsedFunction { mut tool, template_schema } = function;
        tool.name = function_name(called.namespace.as_deref(), &called.name);
        tools::check_unique(&self.definitions, &tool.name, path.to_owned())?;
        self.template_tools.push(tools::template_tool(&tool.name, description, template_schema));
        self.definitions.push(tool);
        self.names.insert(called);
        Ok(())
    }
}
