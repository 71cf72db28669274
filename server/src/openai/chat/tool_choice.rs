//! Parses `tool_choice`: a keyword, one tool, or a list of allowed tools.

use super::tools::named_tool;
use crate::api_error::ApiError;
use crate::request_fields::{RequestFields, wrong_type};
use crate::strict_json::JsonValue;
use serde_json::Value;
use text::ToolDefinition;

const NAME: &str = "tool_choice";
const ALLOWED: &str = "allowed_tools";
/// Maximum number of allowed tools.
const ALLOWED_MAX: usize = 512;

/// Value of `tool_choice`: whether the model must, may or must not call tools.
#[derive(Debug, Clone, PartialEq, Eq, Default)]
pub(crate) enum ToolChoice {
    /// The model must not call tools; text that looks like a tool call is content.
    None,
    /// The model may call tools.
    #[default]
    Auto,
    /// The model must call at least one tool.
    Required,
    /// The model must call this function.
    Named(String),
}

/// Name of the tool that a request selects in `tool_choice`.
pub(crate) struct ChosenToolName {
    /// Name of the function.
    pub(crate) name: String,
    /// Path of the field with the name.
    pub(crate) path: String,
}

/// Tool choice of a request, and the tools that the choice allows.
#[derive(Debug, Default)]
pub(crate) struct ToolSelection {
    pub(crate) choice: ToolChoice,
    /// Names of the functions that the model may call; `None` = all functions of the request.
    pub(crate) allowed: Option<Vec<String>>,
}

/// Removes the member `tools` of a list of allowed tools.
fn tool_list(fields: &mut RequestFields) -> Result<Vec<JsonValue>, ApiError> {
    match fields.required("tools")? {
        JsonValue::List(list) if list.len() <= ALLOWED_MAX => Ok(list),
        JsonValue::List(_) => {
            let message = format!("at most {ALLOWED_MAX} tools");
            Err(ApiError::invalid(fields.path("tools"), message))
        }
        other => Err(wrong_type(fields.path("tools"), "a list of objects", &other)),
    }
}

impl ToolSelection {
    /// Parses the tool choice of a chat completion request.
    ///
    /// Errors: HTTP status 400; the error names the invalid field.
    pub(super) fn take(
        fields: &mut RequestFields,
        tools: &[ToolDefinition],
    ) -> Result<Self, ApiError> {
        let value = match fields.take(NAME) {
            None => return Ok(Self::default()),
            Some(JsonValue::Str(keyword)) => {
                return Ok(Self::of(ToolChoice::from_keyword(&keyword, NAME.to_owned())?));
            }
            Some(value) => value,
        };
        let mut choice = fields.nested(NAME.to_owned(), value)?;
        let path = choice.path("type");
        let kind = choice.required_string("type")?;
        if kind == ALLOWED {
            let value = choice.required(ALLOWED)?;
            let mut allowed = choice.nested(choice.path(ALLOWED), value)?;
            return Self::allowed(&mut allowed, tools, |_| false, named_tool);
        }
        match named_tool(&mut choice, &kind)? {
            Some(chosen) => Ok(Self::of(ToolChoice::Named(chosen.name))),
            None => Err(ApiError::unsupported(path, "must be function, custom or allowed_tools")),
        }
    }

    /// Creates a selection that allows all tools.
    pub(crate) fn of(choice: ToolChoice) -> Self {
        Self { choice, allowed: None }
    }

    /// Parses the members `mode` and `tools` of a list of allowed tools. Entries whose type `is_skipped` are
    /// recorded as having no effect. `name_of` parses a tool entry of the given type and returns the function
    /// name; `None` = the type is unknown.
    pub(crate) fn allowed(
        fields: &mut RequestFields,
        tools: &[ToolDefinition],
        is_skipped: impl Fn(&str) -> bool,
        name_of: impl Fn(&mut RequestFields, &str) -> Result<Option<ChosenToolName>, ApiError>,
    ) -> Result<Self, ApiError> {
        let choice = match fields.required_string("mode")?.as_str() {
            "auto" => ToolChoice::Auto,
            "required" => ToolChoice::Required,
            _ => return Err(ApiError::invalid(fields.path("mode"), "must be auto or required")),
        };
        let path = fields.path("tools");
        let list = tool_list(fields)?;
        let one = |(index, value)| {
            let mut tool = fields.nested(format!("{path}[{index}]"), value)?;
            let kind = tool.required_string("type")?;
            if is_skipped(&kind) {
                tool.accept_whole();
                return Ok(None);
            }
            let Some(ChosenToolName { name, path }) = name_of(&mut tool, &kind)? else {
                let message = "must be function or custom";
                return Err(ApiError::unsupported(tool.path("type"), message));
            };
            if tools.iter().all(|definition| definition.name != name) {
                let message = "names a tool that is not in tools";
                return Err(ApiError::invalid(path, message));
            }
            Ok(Some(name))
        };
        let names = list.into_iter().enumerate().map(one).filter_map(Result::transpose);
        Ok(Self { choice, allowed: Some(names.collect::<Result<_, _>>()?) })
    }

    /// Removes the tools that are not allowed. `template_tools` contains the chat template forms of `tools`,
    /// in the same order.
    pub(crate) fn retain(&self, tools: &mut Vec<ToolDefinition>, template_tools: &mut Vec<Value>) {
        let Some(allowed) = &self.allowed else { return };
        let is_allowed = |tool: &ToolDefinition| allowed.contains(&tool.name);
        let mut kept = tools.iter().map(is_allowed).collect::<Vec<bool>>().into_iter();
        template_tools.retain(|_| kept.next().unwrap_or(false));
        tools.retain(is_allowed);
    }
}

impl ToolChoice {
    /// Parses a tool choice given as a string: `none`, `auto` or `required`.
    pub(crate) fn from_keyword(keyword: &str, path: String) -> Result<Self, ApiError> {
        match keyword {
            "none" => Ok(Self::None),
            "auto" => Ok(Self::Auto),
            "required" => Ok(Self::Required),
            _ => {
                let message = "must be none, auto, required, or name a function";
                Err(ApiError::invalid(path, message))
            }
        }
    }
}
