//! Parses and validates the fields of a Responses request.

use super::accepted_hints::{AcceptedHints, no_logprobs};
use super::convert::InputItemConverter;
use super::stored_context::StoredContext;
use super::system_messages::conversation;
use super::tool_names::ToolNames;
use super::tools::{self, ResponsesTools};
use crate::api_error::ApiError;
use crate::app::ServingContext;
use crate::openai::chat::messages;
use crate::openai::chat::types::ChatCompletionRequest;
use crate::openai::params::CompletionParams;
use crate::openai::thinking_budget;
use crate::request_fields::{RequestFields, wrong_type};
use crate::strict_json::JsonValue;
use grammar::{GrammarSpec, JsonWhitespace, OutputConstraint};
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
    /// Fields of the response object that repeat the request.
    pub(super) echoed_fields: Map<String, Value>,
    pub(super) tool_names: ToolNames,
    /// Accepted parts of the request that have no effect.
    pub(super) hints: AcceptedHints,
    /// Whether old messages are dropped if the prompt does not fit into the context.
    pub(super) truncates: bool,
    pub(super) store: bool,
    pub(super) background: bool,
}

/// Values of `text`.
struct TextSettings {
    constraint: Option<OutputConstraint>,
    /// Value that the response object repeats.
    echoed: Value,
}

/// Parses all fields of a Responses request. `stored` are the responses that it may continue or refer to.
///
/// Errors: HTTP status 400 with the name of the invalid field; 404 for a response that is not stored.
pub(super) fn take(
    fields: &mut RequestFields,
    serving: &ServingContext,
    stored: &mut StoredContext<'_>,
) -> Result<ResponsesRequest, ApiError> {
    let mut hints = AcceptedHints::default();
    reject_unsupported(fields)?;
    hints.take_fields(fields)?;
    let mut echoed_fields = Map::new();
    let metadata = metadata(fields)?;
    let store = fields.bool("store")?.unwrap_or(true);
    let background = background(fields, store)?;
    let truncates = truncation(fields)?;
    let TextSettings { constraint, echoed: echoed_text } = text_settings(fields, &mut hints)?;
    let ResponsesTools { tools, names, echoed_tools, echoed_choice } =
        tools::take(fields, serving.parsers.tool_call_syntax, &mut hints)?;
    let kwargs = kwargs(fields, &mut hints, &mut echoed_fields)?;
    let max_tokens = fields.int("max_output_tokens", 1..=i64::from(u32::MAX))?;
    // It limits the calls of tools that run on the server, of which there are none.
    let max_tool_calls = fields.int("max_tool_calls", 1..=i64::MAX)?;

    let previous = fields.string("previous_response_id", 256)?;
    let instructions = fields.string("instructions", usize::MAX)?;
    let mut history = match &previous {
        None => Vec::new(),
        Some(id) => stored.history(id, "previous_response_id")?,
    };
    InputItemConverter::new(&mut history, stored, &mut hints).input(fields.take("input"))?;

    let params = completion_params(fields, serving, max_tokens, |params| {
        // The format applies to messages only, and a forced call leaves no message.
        params.add_constraint(constraint.filter(|_| !tools.must_call()))
    })?;
    let thinking = thinking_budget::RequestedThinkingBudget::take(fields)?;
    echoed_fields.extend([
        ("background".to_owned(), json!(background)),
        ("instructions".to_owned(), json!(instructions)),
        ("max_output_tokens".to_owned(), json!(max_tokens)),
        ("max_tool_calls".to_owned(), json!(max_tool_calls)),
        ("metadata".to_owned(), metadata),
        ("parallel_tool_calls".to_owned(), json!(tools.parallel)),
        ("previous_response_id".to_owned(), json!(previous)),
        ("store".to_owned(), json!(store)),
        ("temperature".to_owned(), json!(params.sampling.temperature)),
        ("text".to_owned(), echoed_text),
        ("tool_choice".to_owned(), echoed_choice),
        ("tools".to_owned(), echoed_tools),
        ("top_logprobs".to_owned(), json!(0)),
        ("top_p".to_owned(), json!(params.sampling.top_p)),
        ("truncation".to_owned(), json!(if truncates { "auto" } else { "disabled" })),
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
    Ok(ResponsesRequest {
        request,
        history,
        echoed_fields,
        tool_names: names,
        hints,
        truncates,
        store,
        background,
    })
}

/// Parses the fields that the Responses API shares with other endpoints. `constrain` adds the output
/// constraint.
fn completion_params(
    fields: &mut RequestFields,
    serving: &ServingContext,
    max_tokens: Option<i64>,
    constrain: impl FnOnce(&mut CompletionParams) -> Result<(), ApiError>,
) -> Result<CompletionParams, ApiError> {
    let (bounds, defaults) = (&serving.field_bounds, &serving.sampling_defaults);
    let mut params = CompletionParams::take(fields, bounds, defaults)?;
    params.check_single()?;
    params.max_tokens = max_tokens.map(|count| count as u32);
    params.max_tokens_field = "max_output_tokens";
    params.check_min_tokens()?;
    constrain(&mut params)?;
    Ok(params)
}

/// Rejects unsupported fields.
fn reject_unsupported(fields: &mut RequestFields) -> Result<(), ApiError> {
    for name in ["prompt", "conversation"] {
        if fields.take(name).is_some() {
            return Err(ApiError::unsupported(name, "is not supported by this server"));
        }
    }
    if fields.int("top_logprobs", 0..=20)?.unwrap_or(0) != 0 {
        return Err(no_logprobs("top_logprobs"));
    }
    Ok(())
}

/// Parses `truncation`: whether old messages are dropped if the prompt does not fit into the context.
fn truncation(fields: &mut RequestFields) -> Result<bool, ApiError> {
    match fields.string("truncation", 64)?.as_deref() {
        None | Some("disabled") => Ok(false),
        Some("auto") => Ok(true),
        Some(_) => Err(ApiError::invalid("truncation", "must be auto or disabled")),
    }
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

/// Parses the template variables of a Responses request, and `reasoning`.
fn kwargs(
    fields: &mut RequestFields,
    hints: &mut AcceptedHints,
    echoed_fields: &mut Map<String, Value>,
) -> Result<Map<String, Value>, ApiError> {
    const SUMMARIES: [&str; 3] = ["auto", "concise", "detailed"];
    let mut kwargs = messages::kwargs(fields)?;
    let (mut effort, mut summary) = (None, None);
    if let Some(value) = fields.take("reasoning") {
        let mut reasoning = RequestFields::of("reasoning".to_owned(), value)?;
        effort = messages::effort(&mut reasoning, "effort")?;
        // Reasoning is returned as it is, so there are no summaries.
        summary = hints.take_keyword(&mut reasoning, "summary", &SUMMARIES)?;
        hints.take_keyword(&mut reasoning, "generate_summary", &SUMMARIES)?;
        add_remaining(&reasoning, hints);
    }
    if let Some(effort) = &effort {
        kwargs.insert("reasoning_effort".to_owned(), Value::from(effort.as_str()));
    }
    echoed_fields.insert("reasoning".to_owned(), json!({"effort": effort, "summary": summary}));
    Ok(kwargs)
}

/// Adds the fields of an object that no code has parsed to the hints.
fn add_remaining(object: &RequestFields, hints: &mut AcceptedHints) {
    for name in object.ignored_names() {
        hints.add(object.path(&name));
    }
}

/// Parses `text`: the output format, and the verbosity, which has no effect.
fn text_settings(
    fields: &mut RequestFields,
    hints: &mut AcceptedHints,
) -> Result<TextSettings, ApiError> {
    let plain = json!({"type": "text"});
    let Some(value) = fields.take("text") else {
        return Ok(TextSettings { constraint: None, echoed: json!({"format": plain}) });
    };
    let mut text = RequestFields::of("text".to_owned(), value)?;
    let verbosity = hints.take_keyword(&mut text, "verbosity", &["low", "medium", "high"])?;
    let (constraint, format) = match text.take("format") {
        None => (None, plain),
        Some(value) => {
            let echoed = value.clone().into_value();
            (format(RequestFields::of("text.format".to_owned(), value)?)?, echoed)
        }
    };
    add_remaining(&text, hints);
    let mut echoed = json!({"format": format});
    if let Some(verbosity) = verbosity {
        echoed["verbosity"] = Value::from(verbosity);
    }
    Ok(TextSettings { constraint, echoed })
}

/// Parses `text.format`; returns the output constraint.
fn format(mut format: RequestFields) -> Result<Option<OutputConstraint>, ApiError> {
    let spec = match format.string("type", 64)?.as_deref() {
        Some("text") => return Ok(None),
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
    Ok(Some(OutputConstraint::new(spec, "text.format")))
}
