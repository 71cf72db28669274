//! Parses `tool_choice` of a Responses request: a keyword, one tool, or a list of allowed tools.

use super::tool_names::function_name;
use super::tools::ToolList;
use crate::api_error::ApiError;
use crate::openai::chat::tools::{self, ToolChoice};
use crate::request_fields::{RequestFields, wrong_type};
use crate::strict_json::JsonValue;
use serde_json::{Value, json};

const NAME: &str = "tool_choice";
/// Maximum number of allowed tools.
const ALLOWED_MAX: usize = 512;

/// Value of `tool_choice`.
pub(super) struct ToolSelection {
    pub(super) choice: ToolChoice,
    /// Names of the functions that the model may call; `None` = all functions of the request.
    pub(super) allowed: Option<Vec<String>>,
    /// Value that the response object repeats.
    pub(super) echoed: Value,
}

impl ToolSelection {
    /// Parses the tool choice of a request with the tools `list`.
    ///
    /// Errors: HTTP status 400 if the choice is invalid, or names a tool that is skipped or missing.
    pub(super) fn take(fields: &mut RequestFields, list: &ToolList) -> Result<Self, ApiError> {
        let (value, echoed) = match fields.take(NAME) {
            None => (JsonValue::Str("auto".to_owned()), json!("auto")),
            Some(value) => (value.clone(), value.into_value()),
        };
        if let JsonValue::Str(keyword) = &value {
            let choice = tools::choice_from_keyword(keyword, NAME.to_owned())?;
            return Ok(Self { choice, allowed: None, echoed });
        }
        let mut choice = RequestFields::of(NAME.to_owned(), value)?;
        let kind = choice.required_string("type")?;
        if kind == "allowed_tools" {
            let mode = match choice.required_string("mode")?.as_str() {
                "auto" => ToolChoice::Auto,
                "required" => ToolChoice::Required,
                _ => {
                    return Err(ApiError::invalid(choice.path("mode"), "must be auto or required"));
                }
            };
            let allowed = Some(allowed_functions(&mut choice, list)?);
            return Ok(Self { choice: mode, allowed, echoed });
        }
        let function = named_function(&mut choice, &kind, list)?;
        Ok(Self { choice: ToolChoice::Named(function), allowed: None, echoed })
    }
}

/// Parses the list of allowed tools.
fn allowed_functions(choice: &mut RequestFields, list: &ToolList) -> Result<Vec<String>, ApiError> {
    let path = choice.path("tools");
    let allowed = match choice.required("tools")? {
        JsonValue::List(allowed) if allowed.len() <= ALLOWED_MAX => allowed,
        JsonValue::List(_) => {
            return Err(ApiError::invalid(path, format!("at most {ALLOWED_MAX} tools")));
        }
        other => return Err(wrong_type(path, "a list of objects", &other)),
    };
    let one = |(index, value)| {
        let mut tool = RequestFields::of(format!("{path}[{index}]"), value)?;
        let kind = tool.required_string("type")?;
        let function = named_function(&mut tool, &kind, list)?;
        if list.definitions.iter().all(|definition| definition.name != function) {
            return Err(ApiError::invalid(tool.path("name"), "names a tool that is not in tools"));
        }
        Ok(function)
    };
    allowed.into_iter().enumerate().map(one).collect()
}

/// Returns the name of the function of the tool that `fields` name. `kind` is the type of the tool.
fn named_function(
    fields: &mut RequestFields,
    kind: &str,
    list: &ToolList,
) -> Result<String, ApiError> {
    match kind {
        "function" | "custom" => {
            let namespace = fields.string("namespace", 256)?;
            let name = fields.required_string("name")?;
            Ok(function_name(namespace.as_deref(), &name))
        }
        kind if list.skipped_types.iter().any(|skipped| skipped == kind) => {
            let message = "names a tool that this server does not run";
            Err(ApiError::unsupported(fields.path("type"), message))
        }
        _ => {
            let message = "must be function, custom or allowed_tools";
            Err(ApiError::unsupported(fields.path("type"), message))
        }
    }
}
