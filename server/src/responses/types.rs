//! Parses and validates the fields of a Responses request.

use super::compaction::take_threshold;
use super::request_context::ResponsesRequestContext;
use super::service_fields::{self, no_logprobs};
use super::stored_context::StoredContextReader;
use super::text_format::{self, ResponseTextConfig};
use super::tool_names::ToolNameMap;
use super::tools::{self, ResponsesTools};
use crate::api_error::ApiError;
use crate::app::ServingContext;
use crate::compaction_threshold::CompactionThreshold;
use crate::openai::chat::messages;
use crate::openai::chat::types::ChatCompletionRequest;
use crate::openai::params::CompletionParams;
use crate::openai::thinking_budget;
use crate::request_fields::{RequestFields, wrong_type};
use crate::strict_json::JsonValue;
use grammar::{GrammarSpec, OutputConstraint};
use serde_json::{Map, Value, json};
use text::ChatInput;

const METADATA_MAX: usize = 16;
const METADATA_KEY_MAX: usize = 64;
const METADATA_BYTES_MAX: usize = 512;

/// Validated Responses request.
pub(super) struct ResponsesRequest {
    pub(super) request: ChatCompletionRequest,
    /// Conversation without instructions, stored so that later requests can continue it.
    pub(super) history: Vec<Value>,
    /// Id of the response that the request continues.
    pub(super) previous: Option<String>,
    /// Id of the conversation that the response continues and extends.
    pub(super) conversation: Option<String>,
    /// Input items of the request; empty if they are not stored.
    pub(super) input: Vec<Value>,
    /// Request fields that the response object repeats.
    pub(super) echoed_fields: Map<String, Value>,
    pub(super) tool_names: ToolNameMap,
    /// Threshold above which the request is rejected, because conversations are not summarised.
    pub(super) compaction: Option<CompactionThreshold>,
    /// Whether the oldest messages are dropped if the prompt does not fit into the context length.
    pub(super) truncates: bool,
    pub(super) store: bool,
    pub(super) background: bool,
}

/// Options of a response: its metadata, and how it is generated, stored and truncated.
struct ResponseOptions {
    metadata: Value,
    store: bool,
    background: bool,
    truncates: bool,
}

/// Parses all fields of a Responses request. `stored` reads the stored objects that the request continues or
/// refers to.
///
/// Errors: HTTP status 400 with the name of the invalid field; 404 for an object that is not stored.
pub(super) fn take(
    fields: &mut RequestFields,
    serving: &ServingContext,
    stored: &mut StoredContextReader<'_>,
) -> Result<ResponsesRequest, ApiError> {
    let mut echoed_fields = Map::new();
    reject_unsupported(fields)?;
    service_fields::take(fields)?;
    let compaction = take_threshold(fields)?;
    let delivery = ResponseOptions::take(fields)?;
    delivery.echo(&mut echoed_fields);
    let ResponseTextConfig { constraint, echoed } = ResponseTextConfig::take(fields)?;
    echoed_fields.insert("text".to_owned(), echoed);
    let ResponsesTools { mut tools, names: tool_names } = tools::take(fields, &mut echoed_fields)?;
    let kwargs = kwargs(fields, &mut echoed_fields)?;
    let ResponsesRequestContext {
        instructions,
        previous,
        conversation,
        input: input_items,
        history,
    } = ResponsesRequestContext::take(fields, stored, delivery.store, &mut echoed_fields)?;
    let constraint = text_format::apply(constraint, &tools, serving)?;
    // A grammar that combines an output format with tool calls also enforces the schemas of strict tools.
    let covers_messages =
        matches!(&constraint, Some(OutputConstraint { spec: GrammarSpec::Lark(_), .. }));
    if covers_messages {
        tools.strict_paths.clear();
    }
    let params = completion_params(fields, serving, constraint, &mut echoed_fields)?;
    let thinking = thinking_budget::RequestedThinkingBudget::take(fields)?;
    let instructions = instructions.map(|text| json!({"role": "system", "content": text}));
    let messages = instructions.into_iter().chain(history.iter().cloned()).collect();
    let input = ChatInput { messages, add_generation_prompt: true, kwargs, ..ChatInput::default() };
    let request = ChatCompletionRequest {
        params,
        input,
        tools,
        logprobs: None,
        thinking,
        add_special_tokens: false,
        prompt_field: "input",
        effort_field: "reasoning.effort",
        covers_messages,
    };
    let ResponseOptions { store, background, truncates, .. } = delivery;
    Ok(ResponsesRequest {
        request,
        history,
        previous,
        conversation,
        input: input_items,
        echoed_fields,
        tool_names,
        compaction,
        truncates,
        store,
        background,
    })
}

impl ResponseOptions {
    fn take(fields: &mut RequestFields) -> Result<Self, ApiError> {
        let metadata = take_metadata(fields)?;
        let store = fields.bool("store")?.unwrap_or(true);
        let background = background(fields, store)?;
        Ok(Self { metadata, store, background, truncates: truncation(fields)? })
    }

    /// Adds these values to the fields that the response object repeats.
    fn echo(&self, echoed_fields: &mut Map<String, Value>) {
        echoed_fields.extend([
            ("background".to_owned(), json!(self.background)),
            ("metadata".to_owned(), self.metadata.clone()),
            ("store".to_owned(), json!(self.store)),
            ("truncation".to_owned(), json!(if self.truncates { "auto" } else { "disabled" })),
        ]);
    }
}

/// Parses the output limits and the fields shared with other endpoints.
fn completion_params(
    fields: &mut RequestFields,
    serving: &ServingContext,
    constraint: Option<OutputConstraint>,
    echoed_fields: &mut Map<String, Value>,
) -> Result<CompletionParams, ApiError> {
    let max_tokens = fields.int("max_output_tokens", 1..=i64::from(u32::MAX))?;
    // `max_tool_calls` limits only tools that run on the server; this server runs none, so the value has no
    // effect.
    let max_tool_calls = fields.int("max_tool_calls", 1..=i64::MAX)?;
    if max_tool_calls.is_some() {
        fields.accept_without_effect("max_tool_calls".to_owned());
    }
    let (bounds, defaults) = (&serving.field_bounds, &serving.sampling_defaults);
    let mut params = CompletionParams::take(fields, bounds, defaults)?;
    params.check_single()?;
    params.max_tokens = max_tokens.map(|count| count as u32);
    params.max_tokens_field = "max_output_tokens";
    params.check_min_tokens()?;
    params.add_constraint(constraint)?;
    echoed_fields.extend([
        ("max_output_tokens".to_owned(), json!(max_tokens)),
        ("max_tool_calls".to_owned(), json!(max_tool_calls)),
        ("temperature".to_owned(), json!(params.sampling.temperature)),
        ("top_logprobs".to_owned(), json!(0)),
        ("top_p".to_owned(), json!(params.sampling.top_p)),
    ]);
    Ok(params)
}

/// Rejects unsupported fields.
fn reject_unsupported(fields: &mut RequestFields) -> Result<(), ApiError> {
    if fields.take("prompt").is_some() {
        return Err(ApiError::unsupported("prompt", "is not supported by this server"));
    }
    if fields.int("top_logprobs", 0..=20)?.unwrap_or(0) != 0 {
        return Err(no_logprobs("top_logprobs"));
    }
    Ok(())
}

/// Parses `truncation`: whether the oldest messages are dropped if the prompt does not fit into the context
/// length.
fn truncation(fields: &mut RequestFields) -> Result<bool, ApiError> {
    match fields.string("truncation", 64)?.as_deref() {
        None | Some("disabled") => Ok(false),
        Some("auto") => Ok(true),
        Some(_) => Err(ApiError::invalid("truncation", "must be auto or disabled")),
    }
}

/// Parses `background`: whether the reply is sent immediately and the response is generated afterwards.
fn background(fields: &mut RequestFields, store: bool) -> Result<bool, ApiError> {
    let background = fields.bool("background")?.unwrap_or(false);
    if background && !store {
        return Err(ApiError::invalid("background", "needs store: the response is fetched later"));
    }
    Ok(background)
}

/// Parses `metadata`: up to 16 short strings, which the response object repeats.
pub(crate) fn take_metadata(fields: &mut RequestFields) -> Result<Value, ApiError> {
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

/// Parses the template variables of a Responses request, and `reasoning`.
fn kwargs(
    fields: &mut RequestFields,
    echoed_fields: &mut Map<String, Value>,
) -> Result<Map<String, Value>, ApiError> {
    const SUMMARIES: [&str; 3] = ["auto", "concise", "detailed"];
    let mut kwargs = messages::kwargs(fields)?;
    let (mut effort, mut summary) = (None, None);
    if let Some(value) = fields.take("reasoning") {
        let mut reasoning = fields.nested("reasoning".to_owned(), value)?;
        effort = messages::effort(&mut reasoning, "effort")?;
        // Reasoning is returned in full, so no summary is generated.
        summary = reasoning.accept_keyword("summary", &SUMMARIES)?;
        reasoning.accept_keyword("generate_summary", &SUMMARIES)?;
    }
    if let Some(effort) = &effort {
        kwargs.insert("reasoning_effort".to_owned(), Value::from(effort.as_str()));
    }
    echoed_fields.insert("reasoning".to_owned(), json!({"effort": effort, "summary": summary}));
    Ok(kwargs)
}
