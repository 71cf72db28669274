//! Values of a conversation that the chat template does not show or that no grammar enforces. They are listed
//! in the reply header of ignored fields and counted.

use super::types::ChatCompletionRequest;
use crate::api_error::ApiError;
use crate::app::{AppState, ServingContext};
use crate::ignored_parts::IgnoredRequestParts;
use crate::request_fields::printable;
use std::borrow::Cow;

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
    let mut hints = IgnoredRequestParts::default();
    for name in hidden_fields(serving, request) {
        // Agents send an effort and template variables for every model, so strict servers accept them too.
        if name == "reasoning_effort" {
            hints.add(request.effort_field);
            continue;
        }
        if name.starts_with("chat_template_kwargs.") {
            hints.add(printable(&name));
            continue;
        }
        let name = name.replacen("messages", request.prompt_field, 1);
        if app.options.strict_fields {
            return Err(ApiError::unsupported(name, "the chat template does not show it"));
        }
        hints.add(name);
    }
    if !enforces_strict_tools(serving, request) {
        request.tools.strict_paths.iter().for_each(|path| hints.add(path.as_str()));
    }
    serving.metrics.http.ignored(hints.count());
    ignored.extend(hints.names().iter().cloned());
    Ok(())
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

/// Returns the names of fields in the request that the model's chat template does not show. A template sent
/// in the request is not inspected.
fn hidden_fields(
    serving: &ServingContext,
    request: &ChatCompletionRequest,
) -> Vec<Cow<'static, str>> {
    let has_tools = !request.tools.definitions.is_empty();
    let template = serving.template.as_ref();
    template.map_or_else(Vec::new, |template| template.hidden_fields(&request.input, has_tools))
}
