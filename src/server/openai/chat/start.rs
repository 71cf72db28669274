//! From a checked conversation to a generation under way: what all chat endpoints do alike.

use super::messages::last_of_assistant;
use super::tools::Tools;
use super::types::ChatRequest;
use crate::engine_client::Ticket;
use crate::grammar::{Constraint, Form};
use crate::server::app::{App, Serving};
use crate::server::error::ApiError;
use crate::server::ids::CallNames;
use crate::server::openai::exchange::FromHeaders;
use crate::server::openai::generation::Generation;
use crate::server::openai::held::hold;
use crate::server::openai::params::Params;
use crate::server::openai::submit::{
    Extra, check_length, detokenizer, generate, text_error, truncate,
};
use crate::server::value_size::heap_bytes;
use crate::text::{
    Beginning, CallIds, CallSyntax, ChatInput, OutputParser, Reasoning, Rendered, TextError,
};
use protocol::Token;
use std::sync::Arc;

/// Bytes of a prompt's end that may tell whether the model is to think.
const OPENING_BYTES: usize = 64;

/// A conversation that is being answered.
pub struct Started {
    /// Its choices.
    pub generation: Generation,
    /// Name to answer with.
    pub model: String,
    /// The id under which the client finds the request.
    pub request_id: String,
    /// What was asked, for the reply.
    pub params: Params,
    /// Ids of the prompt.
    pub prompt: Vec<Token>,
    /// The last message, if it is to be repeated.
    pub echo: String,
    /// Ids of the calls.
    pub names: CallNames,
}

/// A rendered conversation.
pub struct Prompt {
    /// Its ids.
    pub ids: Vec<Token>,
    /// The end of its text.
    opening: String,
}

/// Renders, tokenises and submits.
///
/// Errors: 400 for what cannot be served, 404 for another model, 429 or 503 for load.
pub fn start(
    app: &App,
    serving: &Arc<Serving>,
    request: ChatRequest,
    headers: &FromHeaders,
    mut ticket: Ticket,
) -> Result<Started, ApiError> {
    let ChatRequest { mut params, mut input, tools, .. } = request;
    let ChatRequest { logprobs, thinking, add_special_tokens, prompt_field, .. } = request;
    let model = serving.check_model(params.model.as_deref())?;
    params.replica = headers.replica(params.replica, serving.bounds.replicas)?;
    let request_id = headers.name(&mut params, &app.random);
    let calls = serving.parsers.calls.filter(|_| tools.reads_calls());

    let held = tools.defined.iter().map(|tool| heap_bytes(&tool.parameters)).sum();
    hold(app, &mut ticket, held, "tools")?;
    let last = last_of_assistant(&input.messages);
    let echo = if params.echo { last.to_owned() } else { String::new() };
    let continued = input.continue_final_message.then(|| last.to_owned());
    input.tools = tools.shown.clone();
    let rendered = template(serving, input, prompt_field)?;
    check_length(serving, &rendered.text, params.truncate, prompt_field)?;
    let prompt = tokenise(serving, &rendered, add_special_tokens, prompt_field)?;
    let Prompt { mut ids, opening } = prompt;
    truncate(&mut ids, params.truncate);
    let reasoning = beginning(serving, continued.as_deref(), &opening);
    params.constraint = constraint(serving, params.constraint.take(), &tools, reasoning)?;
    let most = if tools.parallel { u32::MAX } else { 1 };
    let parser = OutputParser::new(reasoning, calls.map(|syntax| (syntax, &tools.defined, most)));
    let kept = serving.parsers.kept(calls.is_some());
    let reader = || (&parser, detokenizer(serving, &params, Some(&kept)));
    let begins = (reasoning, continued.as_deref());
    let thinking = thinking.map(|asked| asked.limit(serving, &params, begins, reader()));
    let thinking = thinking.transpose()?.flatten();
    let extra = Extra {
        logprobs,
        prompt_logprobs: params.prompt_logprobs,
        max_tokens_default: serving.defaults.max_tokens,
        prompt_field,
        parser: Some((&parser, &kept)),
        thinking: thinking.as_ref(),
    };
    let prompts = [ids];
    let generation = generate(app, serving, &params, &prompts, extra, ticket)?;
    let [prompt] = prompts;
    let names = CallNames::new(app.random.next_u64(), calls.map_or(CallIds::Long, CallSyntax::ids));
    Ok(Started { generation, model, request_id, params, prompt, echo, names })
}

/// What the output must be: what the request says, or calls, behind the reasoning if there is any.
///
/// Errors: 400 if there must be a call and something else, or nobody knows how calls are written.
fn constraint(
    serving: &Serving,
    asked: Option<Arc<Constraint>>,
    tools: &Tools,
    beginning: Option<Beginning>,
) -> Result<Option<Arc<Constraint>>, ApiError> {
    const FIELD: &str = "tool_choice";
    let constraint = match (asked, tools.must_call()) {
        (asked, false) => asked,
        (Some(other), true) => {
            let message = format!("a call cannot be forced together with {}", other.param);
            return Err(ApiError::invalid(FIELD, message));
        }
        (None, true) => {
            let Some(syntax) = serving.parsers.calls else {
                let message = "needs a server with --tool-call-parser";
                return Err(ApiError::unsupported(FIELD, message));
            };
            tools.check_schemas()?;
            let grammar = syntax.grammar(tools.callable(), tools.parallel, &serving.tokenizer);
            Some(Arc::new(Constraint::new(Form::Lark(grammar), FIELD)))
        }
    };
    let thinks = match beginning {
        Some(Beginning::Inside) => true,
        Some(Beginning::Open) => serving.parsers.opens_reasoning,
        Some(Beginning::Behind) | None => false,
    };
    let behind = |it: Arc<Constraint>| Arc::unwrap_or_clone(it).after(Reasoning::END).into();
    Ok(if thinks { constraint.map(behind) } else { constraint })
}

/// Where the output begins, if reasoning is told apart.
fn beginning(serving: &Serving, continued: Option<&str>, opening: &str) -> Option<Beginning> {
    let reasoning = serving.parsers.reasoning?;
    Some(match continued {
        Some(message) => reasoning.continues(message),
        None => reasoning.beginning(opening),
    })
}

/// Renders and tokenises a conversation of any length; `field` names it in refusals.
///
/// Errors: 400 `no_chat_template`, or what the template refuses.
pub fn render(
    serving: &Serving,
    input: ChatInput,
    add_special_tokens: bool,
    field: &str,
) -> Result<Prompt, ApiError> {
    tokenise(serving, &template(serving, input, field)?, add_special_tokens, field)
}

fn template(serving: &Serving, mut input: ChatInput, field: &str) -> Result<Rendered, ApiError> {
    for (name, value) in &serving.template_defaults {
        input.kwargs.entry(name.clone()).or_insert_with(|| value.clone());
    }
    if let Some(template) = input.template.take() {
        return render_own(serving, template, input, field);
    }
    let Some(template) = serving.template.as_ref() else {
        let message = "the model has no chat template; use /v1/completions";
        return Err(ApiError::bad_request("no_chat_template", field, message));
    };
    template.render(input).map_err(|error| text_error(&error, field))
}

/// Renders with the template of the request, if clients are trusted with them.
fn render_own(
    serving: &Serving,
    template: String,
    input: ChatInput,
    field: &str,
) -> Result<Rendered, ApiError> {
    const FIELD: &str = "chat_template";
    let Some(templates) = &serving.request_templates else {
        let message = "needs a server started with --trust-request-chat-template";
        return Err(ApiError::unsupported(FIELD, message));
    };
    templates.render(template, input, &serving.tokenizer).map_err(|error| {
        let at_fault = if matches!(error, TextError::NoTemplate(_)) { FIELD } else { field };
        text_error(&error, at_fault)
    })
}

fn tokenise(
    serving: &Serving,
    rendered: &Rendered,
    add_special_tokens: bool,
    field: &str,
) -> Result<Prompt, ApiError> {
    let tokenizer = &serving.tokenizer;
    let ids = tokenizer.encode_rendered(rendered);
    let mut ids = ids.map_err(|error| text_error(&error, field))?;
    let bos = tokenizer.bos_id().filter(|bos| add_special_tokens && ids.first() != Some(bos));
    if let Some(bos) = bos {
        ids.insert(0, bos);
    }
    let text = &rendered.text;
    let from = text.floor_char_boundary(text.len().saturating_sub(OPENING_BYTES));
    Ok(Prompt { ids, opening: text[from..].to_owned() })
}
