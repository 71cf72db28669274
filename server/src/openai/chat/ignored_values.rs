//! Values of a conversation that the chat template does not show or that no grammar enforces. They are listed
//! in the reply header of ignored fields and counted.

use super::types::ChatCompletionRequest;
use crate::api_error::ApiError;
use crate::app::{AppState, ServingContext};
use crate::ignored_parts::IgnoredRequestParts;
use crate::request_fields::printable;
use std::time::Instant;
use text::HiddenChatField;

/// Adds the names of request values without effect to `ignored`.
///
/// Errors: HTTP status 400 if `--strict-fields` is set and the chat template does not show a field other than
/// the reasoning effort and `chat_template_kwargs`.
pub(crate) fn report_ignored(
    app: &AppState,
    serving: &ServingContext,
    request: &ChatCompletionRequest,
    ignored: &mut Vec<String>,
) -> Result<(), ApiError> {
    let hints = IgnoredRequestParts::default();
    for field in hidden_fields(serving, request) {
        let name = name_of(&field, request);
        if app.options.strict_fields && !is_sent_to_every_model(&field) {
            return Err(ApiError::unsupported(name, "the chat template does not show it"));
        }
        if field == HiddenChatField::Tools {
            warn_of_hidden_tools(app);
        }
        hints.add(name);
    }
    if !enforces_strict_tools(serving, request) {
        request.tools.strict_paths.iter().for_each(|path| hints.add(path.as_str()));
    }
    serving.metrics.http.ignored(hints.count());
    ignored.extend(hints.names());
    Ok(())
}

fn warn_of_hidden_tools(app: &AppState) {
    let Some(suppressed) = app.hidden_tools.allow(Instant::now()) else { return };
    tracing::warn!(
        suppressed = (suppressed > 0).then_some(suppressed),
        "the request has tools, which the chat template does not show to the model"
    );
}

/// Whether a grammar enforces the schemas of strict tools: if calls are forced, or if a callable tool is
/// strict and the request has no other constraint.
pub(super) fn enforces_strict_tools(
    serving: &ServingContext,
    ChatCompletionRequest { tools, params, .. }: &ChatCompletionRequest,
) -> bool {
    let is_free = params.constraint.is_none() && tools.has_strict();
    tools.must_call() || is_free && serving.parsers.tool_call_syntax.is_some()
}

/// Returns the name of `field` in errors and headers of the request's API.
fn name_of(field: &HiddenChatField, request: &ChatCompletionRequest) -> String {
    match field {
        HiddenChatField::Tools => "tools".to_owned(),
        HiddenChatField::ToolCalls => format!("{}.tool_calls", request.prompt_field),
        HiddenChatField::Documents => "documents".to_owned(),
        HiddenChatField::ReasoningEffort => request.effort_field.to_owned(),
        HiddenChatField::TemplateVariable(name) => {
            printable(&format!("chat_template_kwargs.{name}"))
        }
    }
}

/// Whether agents send `field` whatever the model is; strict servers therefore accept it too.
fn is_sent_to_every_model(field: &HiddenChatField) -> bool {
    matches!(field, HiddenChatField::ReasoningEffort | HiddenChatField::TemplateVariable(_))
}

/// Returns the fields in the request that the model's chat template does not show. A template sent
/// in the request is not inspected.
fn hidden_fields(
    serving: &ServingContext,
    request: &ChatCompletionRequest,
) -> Vec<HiddenChatField> {
    let has_tools = !request.tools.definitions.is_empty();
    let template = serving.template.as_ref();
    template.map_or_else(Vec::new, |template| template.hidden_fields(&request.input, has_tools))
}
