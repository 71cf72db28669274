//! Parses and validates the fields of a Responses request.

use super::convert::{InputItemConverter, conversation};
use crate::api_error::ApiError;
use crate::openai::chat::messages;
use crate::openai::chat::tools::{self, RequestTools, ToolChoice};
use crate::openai::chat::types::ChatCompletionRequest;
use crate::openai::params::{CompletionParams, FieldBounds, SamplingDefaults};
use crate::openai::thinking_budget;
use crate::request_fields::{RequestFields, wrong_type};
use crate::strict_json::JsonValue;
use grammar::{GrammarSpec, JsonWhitespace, OutputConstraint};
use serde_json::{Map, Value, json};
use text::{ChatInput, ToolDefinition};

const METADATA_MAX: usize = 16;
const METADATA_KEY_MAX: usize = 64;
const METADATA_BYTES_MAX: usize = 512;

/// Validated Responses request.
pub(super) struct ResponsesRequest {
    pub(super) request: ChatCompletionRequest,
    /// Conversation without instructions, stored so that later requests can continue it.
    pub(super) history: Vec<Value>,
    /// Fields of the response object that repeat the request.
    pub(super) echoed_fields: Map<String, Value>,
    pub(super) store: bool,
    pub(super) background: bool,
}

/// Parses all fields of a Responses request. `stored_history` returns the conversation of a stored response
/// that the caller may continue.
///
/// Errors: HTTP status 400 with the name of the invalid field; 404 for a response that is not stored.
pub(super) fn take(
    fields: &mut RequestFields,
    bounds: &FieldBounds,
    defaults: &SamplingDefaults,
    stored_history: impl Fn(&str) -> Option<Vec<Value>>,
) -> Result<ResponsesRequest, ApiError> {
    reject_unsupported(fields)?;
    let mut echoed_fields = Map::new();
    let metadata = metadata(fields)?;
    let store = fields.bool("store")?.unwrap_or(true);
    let background = background(fields, store)?;
    let (constraint, format) = format(fields)?;
    let (tools, echoed_tools) = take_tools(fields)?;
    let kwargs = kwargs(fields, &mut echoed_fields)?;
    let max_tokens = fields.int("max_output_tokens", 1..=i64::from(u32::MAX))?;

    let previous = fields.string("previous_response_id", 256)?;
    let instructions = fields.string("instructions", usize::MAX)?;
    let mut history = match &previous {
        None => Vec::new(),
        Some(id) => {
            stored_history(id).ok_or_else(|| previous_response_not_found("previous_response_id"))?
        }
    };
    InputItemConverter::new(&mut history).input(fields.take("input"))?;

    let mut params = CompletionParams::take(fields, bounds, defaults)?;
    params.check_single()?;
    let thinking = thinking_budget::RequestedThinkingBudget::take(fields)?;
    params.max_tokens = max_tokens.map(|count| count as u32);
    params.max_tokens_field = "max_output_tokens";
    params.check_min_tokens()?;
    params.add_constraint(constraint)?;
    echoed_fields.extend([
        ("background".to_owned(), json!(background)),
        ("instructions".to_owned(), json!(instructions)),
        ("max_output_tokens".to_owned(), json!(max_tokens)),
        ("metadata".to_owned(), metadata),
        ("parallel_tool_calls".to_owned(), json!(tools.parallel)),
        ("previous_response_id".to_owned(), json!(previous)),
        ("store".to_owned(), json!(store)),
        ("temperature".to_owned(), json!(params.sampling.temperature)),
        ("text".to_owned(), json!({"format": format})),
        ("tool_choice".to_owned(), echoed_tool_choice(&tools.choice)),
        ("tools".to_owned(), echoed_tools),
        ("top_p".to_owned(), json!(params.sampling.top_p)),
        ("truncation".to_owned(), json!("disabled")),
    ]);
    let messages = conversation(instructions.as_deref(), &history);
    let input = ChatInput { messages, add_generation_prompt: true, kwargs, ..ChatInput::default() };
    let request = ChatCompletionRequest {
        params,
        input,
        tools,
        logprobs: None,
        thinking,
        add_special_tokens: false,
        prompt_field: "input",
    };
    Ok(ResponsesRequest { request, history, echoed_fields, store, background })
}

/// Creates the 404 error: the response with the id in `field` is not stored.
fn previous_response_not_found(field: &str) -> ApiError {
    let message = "no response with this id is stored: it was never stored, or was evicted";
    let error = ApiError::new(axum::http::StatusCode::NOT_FOUND, "unknown_response", message);
    ApiError { param: Some(field.to_owned()), ..error }
}

/// Rejects unsupported fields, and accepts fields that have no effect.
fn reject_unsupported(fields: &mut RequestFields) -> Result<(), ApiError> {
    for name in ["prompt", "conversation", "max_tool_calls", "context_management"] {
        if fields.take(name).is_some() {
            return Err(ApiError::unsupported(name, "is not supported by this server"));
        }
    }
    if fields.int("top_logprobs", 0..=20)?.unwrap_or(0) != 0 {
        let message = "log-probabilities are supported by /v1/chat/completions only";
        return Err(ApiError::unsupported("top_logprobs", message));
    }
    for name in fields.strings("include", 256, 16)?.unwrap_or_default() {
        // Reasoning is always returned as plain text, so the encrypted form is accepted and omitted.
        if name != "reasoning.encrypted_content" {
            return Err(ApiError::unsupported("include", "value is not supported"));
        }
    }
    match fields.string("truncation", 64)?.as_deref() {
        None | Some("disabled") => {}
        Some(_) => return Err(ApiError::unsupported("truncation", "must be disabled")),
    }
    if let Some(value) = fields.take("stream_options") {
        RequestFields::of("stream_options".to_owned(), value)?.bool("include_obfuscation")?;
    }
    for ignored in ["prompt_cache_key", "prompt_cache_retention"] {
        fields.take(ignored);
    }
    Ok(())
}

/// Parses `background`: whether the reply is sent at once and the response is generated afterwards.
fn background(fields: &mut RequestFields, store: bool) -> Result<bool, ApiError> {
    let background = fields.bool("background")?.unwrap_or(false);
    if background && !store {
        return Err(ApiError::invalid("background", "needs store: the response is fetched later"));
    }
    Ok(background)
}

/// Parses `metadata`: up to 16 short strings, which the response object repeats.
fn metadata(fields: &mut RequestFields) -> Result<Value, ApiError> {
    let pairs = match fields.take("metadata") {
        None => return Ok(json!({})),
        Some(JsonValue::Object(pairs)) if pairs.len() <= METADATA_MAX => pairs,
        Some(JsonValue::Object(_)) => {
            return Err(ApiError::invalid("metadata", format!("at most {METADATA_MAX} keys")));
        }
        Some(other) => return Err(wrong_type("metadata".to_owned(), "an object", &other)),
    };
    let is_valid = |(key, value): &(String, JsonValue)| {
        let short = |text: &String| text.len() <= METADATA_BYTES_MAX;
        key.len() <= METADATA_KEY_MAX && matches!(value, JsonValue::Str(text) if short(text))
    };
    if !pairs.iter().all(is_valid) {
        let message = format!(
            "keys of at most {METADATA_KEY_MAX} bytes and strings of at most {METADATA_BYTES_MAX}"
        );
        return Err(ApiError::invalid("metadata", message));
    }
    Ok(JsonValue::Object(pairs).into_value())
}

/// Parses the template variables of a Responses request.
fn kwargs(
    fields: &mut RequestFields,
    echoed_fields: &mut Map<String, Value>,
) -> Result<Map<String, Value>, ApiError> {
    let mut kwargs = messages::kwargs(fields)?;
    let mut effort = None;
    if let Some(value) = fields.take("reasoning") {
        let mut reasoning = RequestFields::of("reasoning".to_owned(), value)?;
        effort = messages::effort(&mut reasoning, "effort")?;
        for name in ["summary", "generate_summary"] {
            match reasoning.string(name, 64)?.as_deref() {
                None | Some("auto") => {}
                Some(_) => {
                    let message = "reasoning summaries are not supported";
                    return Err(ApiError::unsupported(reasoning.path(name), message));
                }
            }
        }
    }
    if let Some(effort) = &effort {
        kwargs.insert("reasoning_effort".to_owned(), Value::from(effort.as_str()));
    }
    echoed_fields.insert("reasoning".to_owned(), json!({"effort": effort, "summary": null}));
    Ok(kwargs)
}

/// Parses `text.format`; returns the output constraint and the value that the response object repeats.
fn format(fields: &mut RequestFields) -> Result<(Option<OutputConstraint>, Value), ApiError> {
    let plain = json!({"type": "text"});
    let Some(value) = fields.take("text") else { return Ok((None, plain)) };
    let mut text = RequestFields::of("text".to_owned(), value)?;
    match text.string("verbosity", 64)?.as_deref() {
        None | Some("medium") => {}
        Some(_) => return Err(ApiError::unsupported("text.verbosity", "must be medium")),
    }
    let Some(value) = text.take("format") else { return Ok((None, plain)) };
    let echoed_format = value.clone().into_value();
    let mut format = RequestFields::of("text.format".to_owned(), value)?;
    let spec = match format.string("type", 64)?.as_deref() {
        Some("text") => return Ok((None, plain)),
        Some("json_object") => GrammarSpec::json_object(JsonWhitespace::Any),
        Some("json_schema") => match format.take("schema") {
            Some(JsonValue::Object(pairs)) => GrammarSpec::Json {
                schema: JsonValue::Object(pairs).into_value(),
                whitespace: JsonWhitespace::Any,
            },
            _ => return Err(ApiError::invalid("text.format.schema", "must be a JSON schema")),
        },
        _ => {
            let message = "must be text, json_object or json_schema";
            return Err(ApiError::invalid("text.format.type", message));
        }
    };
    Ok((Some(OutputConstraint::new(spec, "text.format")), echoed_format))
}

/// Parses `tool_choice`: a keyword, or the function that must be called.
fn take_tool_choice(fields: &mut RequestFields) -> Result<ToolChoice, ApiError> {
    const NAME: &str = "tool_choice";
    match fields.take(NAME) {
        None => Ok(ToolChoice::Auto),
        Some(JsonValue::Str(keyword)) => tools::choice_from_keyword(&keyword, NAME.to_owned()),
        Some(value) => {
            let mut choice = RequestFields::of(NAME.to_owned(), value)?;
            tools::check_kind(&mut choice)?;
            tools::named_function(&mut choice)
        }
    }
}

/// Parses the tools of a request; returns them and the value that the response object repeats.
fn take_tools(fields: &mut RequestFields) -> Result<(RequestTools, Value), ApiError> {
    let mut definitions: Vec<ToolDefinition> = Vec::new();
    let (mut template_tools, mut echoed_tools) = (Vec::new(), Vec::new());
    for (index, item) in tools::list(fields)?.into_iter().enumerate() {
        echoed_tools.push(item.clone().into_value());
        let mut item = RequestFields::of(format!("tools[{index}]"), item)?;
        tools::check_kind(&mut item)?;
        let tool = tools::function(&mut item, "parameters")?;
        tools::check_unique(&definitions, &tool.name, item.path("name"))?;
        template_tools.push(tools::template_tool(&tool, item.string("description", usize::MAX)?));
        definitions.push(tool);
    }
    let choice = take_tool_choice(fields)?;
    let parallel = fields.bool("parallel_tool_calls")?.unwrap_or(true);
    let template_tools =
        if template_tools.is_empty() { Value::Null } else { Value::Array(template_tools) };
    let tools = RequestTools {
        definitions: definitions.into(),
        template_value: template_tools,
        choice,
        parallel,
    };
    tools.check("tool_choice")?;
    Ok((tools, Value::Array(echoed_tools)))
}

fn echoed_tool_choice(choice: &ToolChoice) -> Value {
    match choice {
        ToolChoice::None => json!("none"),
        ToolChoice::Auto => json!("auto"),
        ToolChoice::Required => json!("required"),
        ToolChoice::Named(name) => json!({"type": "function", "name": name}),
    }
}
