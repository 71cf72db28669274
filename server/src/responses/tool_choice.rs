//! Parses `tool_choice` of a Responses request: a keyword, one tool, or a list of allowed tools.

use super::tool_names::function_name;
use super::tools::ResponsesToolsBuilder;
use crate::api_error::ApiError;
use crate::openai::chat::tool_choice::{ChosenToolName, ToolChoice, ToolSelection};
use crate::request_fields::RequestFields;
use crate::strict_json::JsonValue;
use serde_json::{Value, json};

const NAME: &str = "tool_choice";

/// Tool choice of a Responses request.
pub(super) struct ResponsesToolChoice {
    pub(super) selection: ToolSelection,
    /// Value repeated in the response object.
    pub(super) echoed: Value,
}

impl ResponsesToolChoice {
    /// Parses the tool choice of a request whose parsed tools are `list`.
    ///
    /// Errors: HTTP status 400 if the choice is invalid, or names a tool that was skipped or is missing.
    pub(super) fn take(
        fields: &mut RequestFields,
        list: &ResponsesToolsBuilder,
    ) -> Result<Self, ApiError> {
        let (value, echoed) = match fields.take(NAME) {
            None => (JsonValue::Str("auto".to_owned()), json!("auto")),
            Some(value) => (value.clone(), value.into_template_value()),
        };
        let selection = match value {
            JsonValue::Str(keyword) => {
                ToolSelection::of(ToolChoice::from_keyword(&keyword, NAME.to_owned())?)
            }
            value => selected(fields.nested(NAME.to_owned(), value)?, list)?,
        };
        Ok(Self { selection, echoed })
    }
}

/// Parses a tool choice given as an object.
fn selected(
    mut choice: RequestFields,
    list: &ResponsesToolsBuilder,
) -> Result<ToolSelection, ApiError> {
    let kind = choice.required_string("type")?;
    let name_of = |fields: &mut RequestFields, kind: &str| named_function(fields, kind, list);
    if kind == "allowed_tools" {
        let is_skipped = |kind: &str| list.skipped_types.iter().any(|skipped| skipped == kind);
        return ToolSelection::allowed(&mut choice, &list.definitions, is_skipped, name_of);
    }
    let Some(chosen) = name_of(&mut choice, &kind)? else {
        let message = "must be function, custom or allowed_tools";
        return Err(ApiError::unsupported(choice.path("type"), message));
    };
    Ok(ToolSelection::of(ToolChoice::Named(chosen.name)))
}

/// Returns the function name of the tool described by `fields`. `kind` is the tool type; `None` if the type
/// is unknown.
fn named_function(
    fields: &mut RequestFields,
    kind: &str,
    list: &ResponsesToolsBuilder,
) -> Result<Option<ChosenToolName>, ApiError> {
    match kind {
        "function" | "custom" => {
            let namespace = fields.string("namespace", 256)?;
            let name = fields.required_string("name")?;
            let name = function_name(namespace.as_deref(), &name);
            Ok(Some(ChosenToolName { name, path: fields.path("name") }))
        }
        kind if list.skipped_types.iter().any(|skipped| skipped == kind) => {
            let message = "names a tool that this server does not run";
            Err(ApiError::unsupported(fields.path("type"), message))
        }
        _ => Ok(None),
    }
}
