//! Parses and validates the fields of an Anthropic Messages request.

use super::context_edits::{AppliedContextEdits, RequestedContextEdits};
use super::convert::AnthropicMessageConverter;
use super::tool_use_clearing::PromptTokenCounter;
use super::{service_fields, tools};
use crate::api_error::ApiError;
use crate::app::{AppState, ServingContext};
use crate::openai::chat::generation_start::{prompt_token_count, render};
use crate::openai::chat::messages;
use crate::openai::chat::tools::RequestTools;
use crate::openai::chat::types::ChatCompletionRequest;
use crate::openai::params::CompletionParams;
use crate::openai::thinking_budget;
use crate::request_fields::{RequestFields, wrong_type};
use crate::strict_json::JsonValue;
use grammar::{GrammarSpec, JsonWhitespace, OutputConstraint};
use serde_json::Value;
use text::ChatInput;

/// Maximum number of messages, as in Anthropic's API. The number of JSON values of a body has a lower limit.
const MESSAGES_MAX: usize = 100_000;
/// Limits of stop sequences: number of bytes, and number of sequences. Anthropic's API documents none.
const STOP_BYTES_MAX: usize = 1_024;
const STOPS_MAX: usize = 128;

/// Parsed parameters that determine the prompt, the tools and the output constraint.
pub(super) struct AnthropicPromptParams {
    pub(super) input: ChatInput,
    pub(super) tools: RequestTools,
    /// Thinking budget: maximum number of reasoning tokens.
    pub(super) thinking: Option<thinking_budget::RequestedThinkingBudget>,
    /// Structured output constraint (`output_config`).
    pub(super) format: Option<OutputConstraint>,
    /// Context edits that were applied to the messages; `None` = the request has no `context_management`.
    pub(super) context_edits: Option<AppliedContextEdits>,
    /// Requested context edits.
    requested_edits: Option<RequestedContextEdits>,
}

/// Validated Messages request.
pub(super) struct AnthropicRequest {
    pub(super) request: ChatCompletionRequest,
    /// Context edits that were applied to the messages; `None` = the request has no `context_management`.
    pub(super) context_edits: Option<AppliedContextEdits>,
}

/// Counts the tokens of a prompt by rendering and tokenising it.
struct RenderedTokenCounter<'a> {
    serving: &'a ServingContext,
    /// Inputs of the chat template except for messages and tools.
    input: &'a ChatInput,
    tools: &'a Value,
}

impl RenderedTokenCounter<'_> {
    fn with_messages(&self, messages: &Value) -> ChatInput {
        ChatInput { messages: messages.clone(), tools: self.tools.clone(), ..self.input.clone() }
    }
}

impl PromptTokenCounter for RenderedTokenCounter<'_> {
    fn count_up_to(&self, messages: &Value, maximum: usize) -> Result<Option<usize>, ApiError> {
        prompt_token_count(self.serving, self.with_messages(messages), maximum, "messages")
    }

    fn count(&self, messages: &Value) -> Result<usize, ApiError> {
        let prompt = render(self.serving, self.with_messages(messages), false, "messages")?;
        Ok(prompt.ids.len())
    }
}

/// Parses all fields of a Messages request, and applies its context edits.
///
/// Errors: HTTP status 400; the error names the invalid field.
pub(super) fn take(
    fields: &mut RequestFields,
    app: &AppState,
    serving: &ServingContext,
) -> Result<AnthropicRequest, ApiError> {
    let Some(max_tokens) = fields.int("max_tokens", 1..=i64::from(u32::MAX))? else {
        return Err(ApiError::invalid("max_tokens", "is missing"));
    };
    let stops = fields.strings("stop_sequences", STOP_BYTES_MAX, STOPS_MAX)?;
    let params = AnthropicPromptParams::take(fields, app, serving)?;
    params.check_compaction(serving)?;
    let AnthropicPromptParams { input, tools, thinking, format, context_edits, .. } = params;
    let mut params = constrained_params(fields, serving, format)?;
    params.max_tokens = Some(max_tokens as u32);
    params.check_min_tokens()?;
    params.stop.extend(stops.unwrap_or_default());
    let request = ChatCompletionRequest {
        params,
        input,
        tools,
        logprobs: None,
        thinking,
        add_special_tokens: false,
        prompt_field: "messages",
        effort_field: "output_config.effort",
        covers_messages: false,
    };
    Ok(AnthropicRequest { request, context_edits })
}

/// Parses the sampling parameters of a Messages request, whose output format is `format`.
fn constrained_params(
    fields: &mut RequestFields,
    serving: &ServingContext,
    format: Option<OutputConstraint>,
) -> Result<CompletionParams, ApiError> {
    // The range of Anthropic's API; that of OpenAI's API is wider.
    let temperature = fields.float("temperature", 0.0..=1.0, false)?;
    let mut params =
        CompletionParams::take(fields, &serving.field_bounds, &serving.sampling_defaults)?;
    params.sampling.temperature = temperature.unwrap_or(params.sampling.temperature);
    params.check_single()?;
    params.add_constraint(format)?;
    Ok(params)
}

impl AnthropicPromptParams {
    /// Parses all fields that determine the prompt, the tools and the output constraint.
    pub(super) fn take(
        fields: &mut RequestFields,
        app: &AppState,
        serving: &ServingContext,
    ) -> Result<Self, ApiError> {
        service_fields::take(fields)?;
        let edits = RequestedContextEdits::take(fields)?;
        let tools = tools::take(fields)?;
        let mut kwargs = messages::kwargs(fields)?;
        let (effort, format) = output_config(fields)?;
        let (thinking_enabled, budget) = thinking(fields)?;
        if let Some(thinking_enabled) = thinking_enabled {
            let (template, has_tools) = (serving.template.as_ref(), !tools.definitions.is_empty());
            let is_read = |name: &&str| template.is_some_and(|t| t.reads_variable(name, has_tools));
            let mut is_ignored = true;
            for name in ["enable_thinking", "thinking"].into_iter().filter(is_read) {
                kwargs.entry(name.to_owned()).or_insert(Value::Bool(thinking_enabled));
                is_ignored = false;
            }
            if is_ignored && !thinking_enabled && serving.parsers.reasoning.is_some() {
                fields.accept_without_effect("thinking.type".to_owned());
            }
        }
        let mut converter = AnthropicMessageConverter::new(fields.hints());
        if let Some(system) = fields.take("system") {
            converter.system("system", system)?;
        }
        converter.messages(messages::list(fields, "messages", MESSAGES_MAX)?)?;
        let conversation = converter.finish(|| app.shows_inline_system(serving));
        // If the last message is an assistant message, the output continues it.
        let continues = conversation.can_be_continued();
        let effort = conversation.effort.or(effort);
        kwargs.extend(effort.map(|effort| ("reasoning_effort".to_owned(), Value::from(effort))));
        let mut input = ChatInput {
            messages: Value::Array(conversation.messages),
            add_generation_prompt: !continues,
            continue_final_message: continues,
            kwargs,
            ..ChatInput::default()
        };
        let edited = edits.as_ref().map(|edits| edit_messages(edits, &mut input, &tools, serving));
        let context_edits = edited.transpose()?;
        // Some agents set a thinking budget for every model. If the model has no reasoning parser, the
        // budget is accepted but has no effect.
        let (budget, unused) = match serving.parsers.reasoning {
            Some(_) => (budget, None),
            None => (None, budget),
        };
        if let Some(unused) = unused {
            fields.accept_without_effect(unused.param.to_owned());
        }
        let thinking = budget.or(thinking_budget::RequestedThinkingBudget::take(fields)?);
        let requested_edits = edits;
        Ok(Self { input, tools, thinking, format, context_edits, requested_edits })
    }

    /// Checks that no edit would replace the conversation by a summary.
    ///
    /// Errors: HTTP status 400 with the name of the edit; an error of the chat template.
    fn check_compaction(&self, serving: &ServingContext) -> Result<(), ApiError> {
        let Some(edits) = &self.requested_edits else { return Ok(()) };
        let tools = &self.tools.template_value;
        let prompt = RenderedTokenCounter { serving, input: &self.input, tools };
        let context = serving.field_bounds.max_model_len as usize;
        edits.check_compaction(&self.input.messages, &prompt, context)
    }
}

/// Applies context edits to the messages of `input`.
///
/// Errors: an error of the chat template.
fn edit_messages(
    edits: &RequestedContextEdits,
    input: &mut ChatInput,
    tools: &RequestTools,
    serving: &ServingContext,
) -> Result<AppliedContextEdits, ApiError> {
    let mut messages = input.messages.take();
    let prompt = RenderedTokenCounter { serving, input, tools: &tools.template_value };
    let applied = edits.apply(&mut messages, &prompt)?;
    input.messages = messages;
    Ok(applied)
}

/// Parses `output_config`: the reasoning effort, and the JSON schema of the output. The schema may also be in
/// `output_format`, its name before `output_config` existed.
fn output_config(
    fields: &mut RequestFields,
) -> Result<(Option<String>, Option<OutputConstraint>), ApiError> {
    const NAME: &str = "output_config";
    const OLD_NAME: &str = "output_format";
    let (mut effort, mut format) = (None, None);
    if let Some(value) = fields.take(NAME) {
        let mut config = fields.nested(NAME.to_owned(), value)?;
        effort = messages::effort(&mut config, "effort")?;
        let path = config.path("format");
        format = config.take("format").map(|value| json_schema(path, value)).transpose()?;
    }
    let old = fields.take(OLD_NAME);
    let old = old.map(|value| json_schema(OLD_NAME.to_owned(), value)).transpose()?;
    if format.is_some() && old.is_some() {
        let message = "output_config.format sets the format too: give only one of them";
        return Err(ApiError::invalid(OLD_NAME, message));
    }
    Ok((effort, format.or(old)))
}

/// Parses an output format, which must be a JSON schema.
fn json_schema(path: String, value: JsonValue) -> Result<OutputConstraint, ApiError> {
    let mut format = RequestFields::of(path, value)?;
    if format.string("type", 64)?.as_deref() != Some("json_schema") {
        return Err(ApiError::invalid(format.path("type"), "must be json_schema"));
    }
    let schema_path = format.path("schema");
    let schema = match format.required("schema")? {
        schema @ JsonValue::Object(_) => schema.into_value(),
        other => return Err(wrong_type(schema_path, "a JSON schema", &other)),
    };
    if let Some(key) = format.ignored_names().first() {
        return Err(ApiError::unsupported(format.path(key), "unknown key"));
    }
    let spec = GrammarSpec::Json { schema, whitespace: JsonWhitespace::Any };
    Ok(OutputConstraint::new(spec, &schema_path))
}

/// Parses `thinking`: returns whether reasoning is enabled or disabled (`None` = not specified), and the
/// token budget.
fn thinking(
    fields: &mut RequestFields,
) -> Result<(Option<bool>, Option<thinking_budget::RequestedThinkingBudget>), ApiError> {
    const BUDGET: &str = "thinking.budget_tokens";
    let Some(value) = fields.take("thinking") else { return Ok((None, None)) };
    let mut thinking = fields.nested("thinking".to_owned(), value)?;
    let budget = thinking_budget::RequestedThinkingBudget::take_named(
        &mut thinking,
        "budget_tokens",
        BUDGET,
    )?;
    let kind = thinking.string("type", 64)?;
    match (kind.as_deref(), budget) {
        (Some("enabled" | "adaptive"), budget) => Ok((Some(true), budget)),
        (Some("disabled"), None) => Ok((Some(false), None)),
        (Some("disabled"), Some(_)) => {
            Err(ApiError::invalid(BUDGET, "does not apply if thinking is disabled"))
        }
        _ => Err(ApiError::invalid("thinking.type", "must be enabled, adaptive or disabled")),
    }
}
