//! Submits a validated conversation to the engine, for all chat endpoints (OpenAI, Anthropic, Responses).

mod prompt_rendering;

use super::ignored_values::enforces_strict_tools;
use super::messages::{last_assistant_text, tool_call_count};
use super::reasoning_head::constraint_preamble;
use super::tools::RequestTools;
use super::types::ChatCompletionRequest;
use crate::api_error::ApiError;
use crate::app::{AppState, ServingContext};
use crate::json_heap_size::heap_bytes;
use crate::openai::endpoint::HeaderParams;
use crate::openai::generation::RequestGeneration;
use crate::openai::memory_reservation::reserve;
use crate::openai::params::CompletionParams;
use crate::openai::submit::{
    EndpointParams, detokenizer, reject_if_too_long, start_generation, truncate,
};
use crate::openai::thinking_budget::{OutputStartState, RequestedThinkingBudget};
use crate::request_ids::ToolCallIdGenerator;
use engine::AdmissionPermit;
use grammar::{GrammarSpec, OutputConstraint};
pub(crate) use prompt_rendering::{RenderedPrompt, prompt_token_count, render, render_text};
use prompt_rendering::{template, tokenise};
use protocol::Token;
use std::sync::Arc;
use text::{
    CallEnforcement, HarmonyConstraintScope, OutputParser, ReasoningFamily, ReasoningParserOptions,
    ReasoningStart, ToolCallIdFormat, ToolCallParserOptions, ToolCallSyntax,
};

/// Request field that forces tool calls.
const TOOL_CHOICE: &str = "tool_choice";
const TOOLS: &str = "tools";

/// Submitted request, with the values needed to format its reply.
pub(crate) struct StartedGeneration {
    /// Choices of the request, which receive the generated tokens.
    pub generation: RequestGeneration,
    /// Model name to report in the reply.
    pub model: String,
    /// Request id reported to the client.
    pub request_id: String,
    /// Request parameters that the reply format depends on.
    pub params: CompletionParams,
    /// Token ids of the prompt.
    pub prompt: Vec<Token>,
    /// Text of the last assistant message if the reply echoes it, else empty.
    pub echo: String,
    /// Generator of tool call ids.
    pub tool_call_ids: ToolCallIdGenerator,
}

/// Renders, tokenises and submits a conversation.
///
/// Errors: HTTP status 400 for an invalid or unsupported request, 404 for an unknown model, 429 or 503 for
/// overload.
pub(crate) fn start(
    app: &AppState,
    serving: &Arc<ServingContext>,
    request: ChatCompletionRequest,
    headers: &HeaderParams,
    mut permit: AdmissionPermit,
) -> Result<StartedGeneration, ApiError> {
    let enforcement = enforcement(serving, &request);
    let ChatCompletionRequest { mut params, mut input, tools, .. } = request;
    let ChatCompletionRequest { logprobs, thinking, add_special_tokens, prompt_field, .. } =
        request;
    let covers_messages = request.covers_messages;
    let model = serving.check_model(params.model.as_deref())?;
    params.replica = headers.replica(params.replica, serving.field_bounds.replicas)?;
    let request_id = headers.request_id(&mut params, &app.id_generator);
    let call_syntax = serving.parsers.tool_call_syntax.filter(|_| tools.parses_tool_calls());

    let required_bytes = tools.definitions.iter().map(|tool| heap_bytes(&tool.parameters)).sum();
    reserve(app, &mut permit, required_bytes, "tools")?;
    let earlier_calls = tool_call_count(&input.messages);
    let last = last_assistant_text(&input.messages);
    let echo = if params.echo { last.clone() } else { String::new() };
    let continued = input.continue_final_message.then_some(last);
    input.tools = tools.template_value.clone();
    let rendered = template(serving, input, prompt_field)?;
    reject_if_too_long(serving, &rendered.text, &params, prompt_field)?;
    let prompt = tokenise(serving, &rendered, add_special_tokens, prompt_field)?;
    let RenderedPrompt { mut ids, prompt_tail } = prompt;
    truncate(&mut ids, params.truncate);
    let reasoning = reasoning_start(serving, continued.as_deref(), &prompt_tail);
    let requested = params.constraint.take();
    params.constraint = constraint(serving, requested, covers_messages, &tools, reasoning)?;
    let call_options = call_syntax.map(|syntax| call_options(syntax, &tools, enforcement));
    let parser = output_parser(serving, call_options, reasoning);
    let visible_special = serving.parsers.visible_special(call_syntax.is_some());
    let output_start = OutputStartState { reasoning, continued: continued.as_deref() };
    let activate = |budget: RequestedThinkingBudget| {
        let detokenizer = detokenizer(serving, &params, Some(&visible_special));
        budget.activate(serving, output_start, &parser, detokenizer)
    };
    let thinking = thinking.map(activate).transpose()?.flatten();
    let extra = EndpointParams {
        logprobs,
        prompt_logprobs: params.prompt_logprobs,
        max_tokens_default: None,
        prompt_field,
        parser: Some((&parser, &visible_special)),
        thinking: thinking.as_ref(),
    };
    let prompts = [ids];
    let generation = start_generation(app, serving, &params, &prompts, extra, permit)?;
    let [prompt] = prompts;
    let tool_call_ids = ToolCallIdGenerator::new(
        app.id_generator.next_u64(),
        call_syntax.map_or(ToolCallIdFormat::Long, ToolCallSyntax::id_format),
        earlier_calls,
    );
    Ok(StartedGeneration { generation, model, request_id, params, prompt, echo, tool_call_ids })
}

/// Returns the options of the tool call parser: syntax, tools, maximum number of calls, and enforced schemas.
fn call_options(
    syntax: ToolCallSyntax,
    tools: &RequestTools,
    enforcement: CallEnforcement,
) -> ToolCallParserOptions<'_> {
    let max_calls = if tools.parallel { u32::MAX } else { 1 };
    ToolCallParserOptions { syntax, tools: &tools.definitions, max_calls, enforcement }
}

/// Creates the output parser for reasoning and tool calls.
fn output_parser(
    serving: &ServingContext,
    calls: Option<ToolCallParserOptions<'_>>,
    reasoning: Option<ReasoningStart>,
) -> OutputParser {
    let reasoning = serving.parsers.reasoning.zip(reasoning);
    let reasoning = reasoning.map(|(family, start)| ReasoningParserOptions { family, start });
    OutputParser::new(reasoning, calls)
}

/// Returns for which tools the grammar of the request enforces the argument schemas.
fn enforcement(serving: &ServingContext, request: &ChatCompletionRequest) -> CallEnforcement {
    match enforces_strict_tools(serving, request) {
        true if request.tools.must_call() => CallEnforcement::AllTools,
        true => CallEnforcement::StrictTools,
        false => CallEnforcement::None,
    }
}

/// Returns the constraint of the output after any reasoning: the requested constraint, or a tool call grammar
/// if tool calls are forced or a tool is strict.
///
/// Errors: HTTP status 400 if a forced tool call is impossible or combined with another constraint.
fn message_constraint(
    serving: &ServingContext,
    requested: Option<Arc<OutputConstraint>>,
    tools: &RequestTools,
) -> Result<Option<Arc<OutputConstraint>>, ApiError> {
    match (requested, tools.must_call()) {
        (Some(requested), false) => Ok(Some(requested)),
        (None, false) if !tools.has_strict() => Ok(None),
        (Some(other), true) => {
            let message = format!("a forced tool call cannot be combined with {}", other.param);
            Err(ApiError::invalid(TOOL_CHOICE, message))
        }
        (None, _) => Ok(tool_call_constraint(serving, tools)?.map(Arc::new)),
    }
}

/// Returns the output constraint: the requested constraint, or a tool call grammar if tool calls are forced
/// or a tool is strict. If the output starts with reasoning, the constraint applies after the reasoning.
/// `covers_messages` = the requested constraint covers answers and tool calls, with their headers.
///
/// Errors: HTTP status 400 if a forced tool call is impossible or combined with another constraint.
fn constraint(
    serving: &ServingContext,
    requested: Option<Arc<OutputConstraint>>,
    covers_messages: bool,
    tools: &RequestTools,
    reasoning_start: Option<ReasoningStart>,
) -> Result<Option<Arc<OutputConstraint>>, ApiError> {
    let has_calls = requested.is_none() || covers_messages;
    let constraint = message_constraint(serving, requested, tools)?;
    let (Some(family), Some(start)) = (serving.parsers.reasoning, reasoning_start) else {
        return Ok(constraint);
    };
    let Some(constraint) = constraint else { return Ok(None) };
    let scope = if has_calls {
        HarmonyConstraintScope::Messages
    } else {
        HarmonyConstraintScope::AnswerText
    };
    reject_call_in_answer(family, start, scope, &constraint.param)?;
    let opens_reasoning = serving.parsers.opens_reasoning;
    let head = constraint_preamble(&serving.tokenizer, family, start, opens_reasoning, scope);
    Ok(Some(match head {
        None => constraint,
        Some(head) => Arc::unwrap_or_clone(constraint).start_after(head).into(),
    }))
}

/// Rejects a grammar of tool calls in the harmony format if the output begins inside an answer: a call is a
/// message of its own.
fn reject_call_in_answer(
    family: ReasoningFamily,
    start: ReasoningStart,
    scope: HarmonyConstraintScope,
    param: &str,
) -> Result<(), ApiError> {
    let is_continued = family.is_harmony() && start == ReasoningStart::After;
    if !is_continued || scope == HarmonyConstraintScope::AnswerText {
        return Ok(());
    }
    let message = "needs a tool call, a message of its own, but the prompt ends inside an answer \
                   (continue_final_message)";
    Err(ApiError::unsupported(param, message))
}

/// Creates the tool call grammar; `None` if tool calls are neither forced nor parsed.
///
/// Errors: HTTP status 400 for forced calls without a tool call parser, or if a parameter schema is not
/// supported.
fn tool_call_constraint(
    serving: &ServingContext,
    tools: &RequestTools,
) -> Result<Option<OutputConstraint>, ApiError> {
    let is_forced = tools.must_call();
    let Some(syntax) = serving.parsers.tool_call_syntax else {
        let message = "needs --tool-call-parser";
        return if is_forced { Err(ApiError::unsupported(TOOL_CHOICE, message)) } else { Ok(None) };
    };
    tools.check_schemas()?;
    let (grammar, field) = if is_forced {
        (syntax.grammar(tools.callable(), tools.parallel, &serving.tokenizer), TOOL_CHOICE)
    } else {
        (syntax.free_grammar(tools.callable(), tools.parallel, &serving.tokenizer), TOOLS)
    };
    let grammar = grammar.map_err(|error| ApiError::unsupported(TOOLS, error.to_string()))?;
    Ok(Some(OutputConstraint::new(GrammarSpec::Lark(grammar), field)))
}

/// Returns the reasoning state at the start of the output; `None` if there is no reasoning parser.
fn reasoning_start(
    serving: &ServingContext,
    continued: Option<&str>,
    prompt_tail: &str,
) -> Option<ReasoningStart> {
    let reasoning = serving.parsers.reasoning?;
    Some(match continued {
        Some(message) => reasoning.start_after_message(message),
        None => reasoning.start_after_prompt(prompt_tail),
    })
}
