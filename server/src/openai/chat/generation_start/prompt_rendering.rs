//! Renders and tokenises the prompt of a chat request.

use crate::api_error::ApiError;
use crate::app::ServingContext;
use crate::openai::submit::text_error;
use protocol::Token;
use text::{ChatInput, RenderedChat, TextError};

/// Number of bytes at the end of the prompt that are inspected to determine whether the output starts inside
/// the reasoning.
const PROMPT_TAIL_BYTES: usize = 64;

/// Prompt of a conversation, rendered and tokenised.
pub(crate) struct RenderedPrompt {
    /// Token ids of the prompt.
    pub ids: Vec<Token>,
    /// Last bytes of the rendered prompt, which determine whether the output starts inside the reasoning.
    pub(super) prompt_tail: String,
}

/// Renders and tokenises a conversation without a length limit; `field` is the field name in errors.
///
/// Errors: HTTP status 400 with reason `no_chat_template`, or an error of the template.
pub(crate) fn render(
    serving: &ServingContext,
    input: ChatInput,
    add_special_tokens: bool,
    field: &str,
) -> Result<RenderedPrompt, ApiError> {
    tokenise(serving, &template(serving, input, field)?, add_special_tokens, field)
}

/// Returns the number of tokens in the prompt of a conversation; `None` if it has more than `tokens_max`. `field` is the
/// field name in errors.
///
/// Errors: the errors of `render`.
pub(crate) fn prompt_token_count(
    serving: &ServingContext,
    input: ChatInput,
    tokens_max: usize,
    field: &str,
) -> Result<Option<usize>, ApiError> {
    let rendered = template(serving, input, field)?;
    // The lower bound avoids tokenising a text that is far too long.
    if serving.tokenizer.min_token_count(&rendered.text) > tokens_max {
        return Ok(None);
    }
    let count = tokenise(serving, &rendered, false, field)?.ids.len();
    Ok(Some(count).filter(|&count| count <= tokens_max))
}

/// Renders a conversation to the text of its prompt. `field` is the field name in errors.
///
/// Errors: the errors of `render`.
pub(crate) fn render_text(
    serving: &ServingContext,
    input: ChatInput,
    field: &str,
) -> Result<String, ApiError> {
    template(serving, input, field).map(|rendered| rendered.text)
}

pub(super) fn template(
    serving: &ServingContext,
    mut input: ChatInput,
    field: &str,
) -> Result<RenderedChat, ApiError> {
    for (name, value) in &serving.template_defaults {
        input.kwargs.entry(name.clone()).or_insert_with(|| value.clone());
    }
    let is_own = |name: &String| serving.template.as_ref().is_some_and(|t| t.has_named(name));
    if let Some(template) = input.template.take_if(|template| !is_own(template)) {
        return render_request_template(serving, template, input, field);
    }
    let Some(template) = serving.template.as_ref() else {
        let message = "the model has no chat template; use /v1/completions";
        return Err(ApiError::bad_request("no_chat_template", field, message));
    };
    template.render(input).map_err(|error| text_error(&error, field))
}

/// Renders the conversation with the chat template of the request, if such templates are allowed.
fn render_request_template(
    serving: &ServingContext,
    template: String,
    input: ChatInput,
    field: &str,
) -> Result<RenderedChat, ApiError> {
    const FIELD: &str = "chat_template";
    let Some(templates) = &serving.request_templates else {
        let message = "needs --trust-request-chat-template";
        return Err(ApiError::unsupported(FIELD, message));
    };
    templates.render(template, input, &serving.tokenizer).map_err(|error| {
        let param =
            if matches!(error, TextError::InvalidRequestTemplate(_)) { FIELD } else { field };
        text_error(&error, param)
    })
}

pub(super) fn tokenise(
    serving: &ServingContext,
    rendered: &RenderedChat,
    add_special_tokens: bool,
    field: &str,
) -> Result<RenderedPrompt, ApiError> {
    let tokenizer = &serving.tokenizer;
    let ids = tokenizer.encode_rendered(rendered);
    let mut ids = ids.map_err(|error| text_error(&error, field))?;
    let bos = tokenizer.bos_id().filter(|bos| add_special_tokens && ids.first() != Some(bos));
    if let Some(bos) = bos {
        ids.insert(0, bos);
    }
    let text = &rendered.text;
    let from = text.floor_char_boundary(text.len().saturating_sub(PROMPT_TAIL_BYTES));
    Ok(RenderedPrompt { ids, prompt_tail: text[from..].to_owned() })
}
