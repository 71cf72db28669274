//! Parses and validates the fields of an Anthropic Messages request.

use super::convert::AnthropicMessageConverter;
use crate::api_error::ApiError;
use crate::openai::chat::messages;
use crate::openai::chat::tools::{self, RequestTools, ToolChoice};
use crate::openai::chat::types::ChatCompletionRequest;
use crate::openai::params::{CompletionParams, FieldBounds, SamplingDefaults};
use crate::openai::thinking_budget;
use crate::request_fields::{RequestFields, wrong_type};
use crate::strict_json::JsonValue;
use grammar::{GrammarSpec, JsonWhitespace, OutputConstraint};
use serde_json::Value;
use text::{ChatInput, ToolDefinition};

/// Parsed fields that determine the prompt, the tools and the constraints on the output.
pub(super) struct AnthropicConversation {
    pub(super) input: ChatInput,
    pub(super) tools: RequestTools,
    /// Thinking budget: maximum number of reasoning tokens.
    pub(super) thinking: Option<thinking_budget::RequestedThinkingBudget>,
    /// Structured output constraint (`output_config`).
    pub(super) format: Option<OutputConstraint>,
}

/// Parses all fields of a Messages request.
///
/// Errors: HTTP status 400; the error names the invalid field.
pub(super) fn take(
    fields: &mut RequestFields,
    bounds: &FieldBounds,
    defaults: &SamplingDefaults,
) -> Result<ChatCompletionRequest, ApiError> {
    let Some(max_tokens) = fields.int("max_tokens", 1..=i64::from(u32::MAX))? else {
        return Err(ApiError::invalid("max_tokens", "is missing"));
    };
    let stops = fields.strings("stop_sequences", 256, 16)?;
    let AnthropicConversation { input, tools, thinking, format } =
        AnthropicConversation::take(fields)?;
    let mut params = CompletionParams::take(fields, bounds, defaults)?;
    params.check_single()?;
    params.add_constraint(format)?;
    params.max_tokens = Some(max_tokens as u32);
    params.check_min_tokens()?;
    params.stop.extend(stops.unwrap_or_default());
    Ok(ChatCompletionRequest {
        params,
        input,
        tools,
        logprobs: None,
        thinking,
        add_special_tokens: false,
        prompt_field: "messages",
    })
}

impl AnthropicConversation {
    /// Parses all fields that determine the prompt, the tools and the constraints on the output.
    pub(super) fn take(fields: &mut RequestFields) -> Result<Self, ApiError> {
        reject_unsupported(fields)?;
        let tools = take_tools(fields)?;
        let mut kwargs = messages::kwargs(fields)?;
        let (effort, format) = output_config(fields)?;
        kwargs.extend(effort.map(|effort| ("reasoning_effort".to_owned(), Value::from(effort))));
        let (thinking_enabled, budget) = thinking(fields)?;
        if let Some(thinking_enabled) = thinking_enabled {
            for name in ["enable_thinking", "thinking"] {
                kwargs.entry(name.to_owned()).or_insert(Value::Bool(thinking_enabled));
            }
        }
        let mut turns = AnthropicMessageConverter::default();
        if let Some(system) = fields.take("system") {
            turns.system("system", system)?;
        }
        for (index, message) in messages::list(fields, "messages")?.into_iter().enumerate() {
            turns.message(format!("messages[{index}]"), message)?;
        }
        // If the last message is an assistant message, the output continues it.
        let continues = turns.can_be_continued();
        let input = ChatInput {
            messages: turns.into_messages(),
            add_generation_prompt: !continues,
            continue_final_message: continues,
            kwargs,
            ..ChatInput::default()
        };
        let thinking = budget.or(thinking_budget::RequestedThinkingBudget::take(fields)?);
        Ok(Self { input, tools, thinking, format })
    }
}

/// Rejects fields of the Anthropic API that this server does not support.
fn reject_unsupported(fields: &mut RequestFields) -> Result<(), ApiError> {
    for name in ["container", "mcp_servers", "context_management", "output_format"] {
        if fields.take(name).is_some() {
            return Err(ApiError::unsupported(name, "is not supported by this server"));
        }
    }
    Ok(())
}

/// Parses `output_config`: the reasoning effort, and the JSON schema of the output.
fn output_config(
    fields: &mut RequestFields,
) -> Result<(Option<String>, Option<OutputConstraint>), ApiError> {
    const NAME: &str = "output_config";
    const SCHEMA: &str = "output_config.format.schema";
    let Some(value) = fields.take(NAME) else { return Ok((None, None)) };
    let mut config = RequestFields::of(NAME.to_owned(), value)?;
    let effort = messages::effort(&mut config, "effort")?;
    let path = config.path("format");
    let Some(value) = config.take("format") else { return Ok((effort, None)) };
    let mut format = RequestFields::of(path, value)?;
    if format.string("type", 64)?.as_deref() != Some("json_schema") {
        return Err(ApiError::invalid(format.path("type"), "must be json_schema"));
    }
    let schema = match format.required("schema")? {
        schema @ JsonValue::Object(_) => schema.into_value(),
        other => return Err(wrong_type(SCHEMA.to_owned(), "a JSON schema", &other)),
    };
    if let Some(key) = format.ignored_names().first() {
        return Err(ApiError::unsupported(format.path(key), "unknown key"));
    }
    let spec = GrammarSpec::Json { schema, whitespace: JsonWhitespace::Any };
    Ok((effort, Some(OutputConstraint::new(spec, SCHEMA))))
}

/// Parses `thinking`: whether the request enables or disables reasoning (if it does either), and its token
/// budget.
fn thinking(
    fields: &mut RequestFields,
) -> Result<(Option<bool>, Option<thinking_budget::RequestedThinkingBudget>), ApiError> {
    const BUDGET: &str = "thinking.budget_tokens";
    let Some(value) = fields.take("thinking") else { return Ok((None, None)) };
    let mut thinking = RequestFields::of("thinking".to_owned(), value)?;
    let budget = thinking_budget::RequestedThinkingBudget::take_named(
        &mut thinking,
        "budget_tokens",
        BUDGET,
    )?;
    match (thinking.string("type", 64)?.as_deref(), budget) {
        (Some("enabled" | "adaptive"), budget) => Ok((Some(true), budget)),
        (Some("disabled"), None) => Ok((Some(false), None)),
        (Some("disabled"), Some(_)) => {
            Err(ApiError::invalid(BUDGET, "does not apply if thinking is disabled"))
        }
        _ => Err(ApiError::invalid("thinking.type", "must be enabled, adaptive or disabled")),
    }
}

fn take_tools(fields: &mut RequestFields) -> Result<RequestTools, ApiError> {
    let mut definitions: Vec<ToolDefinition> = Vec::new();
    let mut template_tools = Vec::new();
    for (index, item) in tools::list(fields)?.into_iter().enumerate() {
        let mut item = RequestFields::of(format!("tools[{index}]"), item)?;
        match item.string("type", 64)?.as_deref() {
            None | Some("custom") => {}
            Some(_) => {
                let message = "only client tools are supported";
                return Err(ApiError::unsupported(item.path("type"), message));
            }
        }
        let tool = tools::function(&mut item, "input_schema")?;
        tools::check_unique(&definitions, &tool.name, item.path("name"))?;
        template_tools.push(tools::template_tool(&tool, item.string("description", usize::MAX)?));
        definitions.push(tool);
    }
    let (choice, parallel) = choice(fields)?;
    let template_tools =
        if template_tools.is_empty() { Value::Null } else { Value::Array(template_tools) };
    let tools = RequestTools {
        definitions: definitions.into(),
        template_value: template_tools,
        choice,
        parallel,
    };
    tools.check("tool_choice")?;
    Ok(tools)
}

/// Parses `tool_choice`; also returns whether parallel tool calls are allowed.
fn choice(fields: &mut RequestFields) -> Result<(ToolChoice, bool), ApiError> {
    let Some(value) = fields.take("tool_choice") else { return Ok((ToolChoice::Auto, true)) };
    let mut choice = RequestFields::of("tool_choice".to_owned(), value)?;
    let parallel = !choice.bool("disable_parallel_tool_use")?.unwrap_or(false);
    let choice = match choice.string("type", 64)?.as_deref() {
        Some("auto") => ToolChoice::Auto,
        Some("none") => ToolChoice::None,
        Some("any") => ToolChoice::Required,
        Some("tool") => tools::named_function(&mut choice)?,
        _ => return Err(ApiError::invalid("tool_choice.type", "must be auto, any, tool or none")),
    };
    Ok((choice, parallel))
}
