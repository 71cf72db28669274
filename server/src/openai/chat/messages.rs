//! Parses conversations: messages and the other inputs of the chat template. `/tokenize` also uses this code.

use super::chat_message;
use crate::api_error::ApiError;
use crate::ignored_parts::IgnoredRequestParts;
use crate::request_fields::{RequestFields, wrong_type};
use crate::strict_json::JsonValue;
use serde_json::{Map, Value, json};
use text::{ChatInput, TEMPLATE_BYTES_MAX, closed_arguments};

/// Maximum number of messages in a conversation.
pub(crate) const MESSAGES_MAX: usize = 4_096;
/// Maximum number of content parts in a message.
pub(crate) const PARTS_MAX: usize = 4_096;
const KWARGS_MAX: usize = 32;
/// Maximum size of all template variables of a request, in bytes of JSON text.
const KWARGS_BYTES_MAX: usize = 16_384;
const DOCUMENTS_MAX: usize = 64;
/// Template variables that only the server sets; requests must not override them.
const RESERVED_TEMPLATE_VARIABLES: &[&str] = &[
    "add_generation_prompt",
    "bos_token",
    "chat_template",
    "continue_final_message",
    "conversation",
    "documents",
    "eos_token",
    "messages",
    "pad_token",
    "raise_exception",
    "return_assistant_tokens_mask",
    "return_dict",
    "return_tensors",
    "strftime_now",
    "tokenize",
    "tools",
    "unk_token",
];
/// Types of text parts in message content, in OpenAI's APIs.
pub(crate) const TEXT_PARTS: &[&str] = &["text", "input_text", "output_text"];
/// Types of text parts in the content of assistant messages.
pub(super) const ASSISTANT_PARTS: &[&str] = &["text", "input_text", "output_text", REFUSAL];
/// Type of a content part in which the assistant refuses a request, and its member with the text.
pub(super) const REFUSAL: &str = "refusal";
const REASONING_EFFORTS: &[&str] = &["none", "minimal", "low", "medium", "high", "xhigh", "max"];

/// Parses `messages` and all other fields that are inputs of the chat template.
///
/// Errors: HTTP status 400; the error names the invalid field.
pub(crate) fn take(fields: &mut RequestFields) -> Result<ChatInput, ApiError> {
    let template = fields.string("chat_template", TEMPLATE_BYTES_MAX)?;
    let continue_final_message = fields.bool("continue_final_message")?.unwrap_or(false);
    let requested = fields.bool("add_generation_prompt")?;
    if continue_final_message && requested == Some(true) {
        let message = "add_generation_prompt and continue_final_message are mutually exclusive";
        return Err(ApiError::invalid("continue_final_message", message));
    }
    Ok(ChatInput {
        template,
        messages: messages(fields)?,
        tools: Value::Null,
        documents: documents(fields)?,
        add_generation_prompt: requested.unwrap_or(!continue_final_message),
        continue_final_message,
        kwargs: kwargs(fields)?,
    })
}

/// Returns the text of the last message if it is an assistant message, else an empty string.
pub(crate) fn last_assistant_text(messages: &Value) -> String {
    let last = messages.as_array().and_then(|list| list.last());
    let last = last.filter(|message| message["role"] == "assistant");
    match last.map(|message| &message["content"]) {
        Some(Value::String(text)) => text.clone(),
        Some(Value::Array(parts)) => {
            let texts = parts.iter().filter_map(|part| part["text"].as_str());
            texts.collect::<Vec<&str>>().join("\n")
        }
        _ => String::new(),
    }
}

/// Returns the number of tool calls in all messages.
pub(crate) fn tool_call_count(messages: &Value) -> u32 {
    let messages = messages.as_array().into_iter().flatten();
    let calls = messages.filter_map(|message| message["tool_calls"].as_array());
    calls.map(|calls| calls.len() as u32).sum()
}

fn messages(fields: &mut RequestFields) -> Result<Value, ApiError> {
    let list = list(fields, "messages", MESSAGES_MAX)?;
    let one_message = |(index, value)| chat_message::parse(format!("messages[{index}]"), value);
    list.into_iter().enumerate().map(one_message).collect()
}

/// Returns the list in field `name` (the messages), which has 1 to `len_max` entries that are not parsed yet.
pub(crate) fn list(
    fields: &mut RequestFields,
    name: &str,
    len_max: usize,
) -> Result<Vec<JsonValue>, ApiError> {
    match fields.required(name)? {
        JsonValue::List(list) if (1..=len_max).contains(&list.len()) => Ok(list),
        JsonValue::List(list) => {
            let message = format!("must have 1 to {len_max} entries, got {}", list.len());
            Err(ApiError::invalid(fields.path(name), message))
        }
        other => Err(wrong_type(fields.path(name), "a list of objects", &other)),
    }
}

/// Parses the arguments of a tool call: a JSON object, usually given as text. The text may be truncated,
/// because clients send back calls from outputs that ended at `max_tokens`.
pub(crate) fn arguments(path: &str, value: Option<JsonValue>) -> Result<Value, ApiError> {
    let value = match value {
        None => return Ok(json!({})),
        Some(JsonValue::Str(text)) if text.trim().is_empty() => return Ok(json!({})),
        Some(JsonValue::Str(text)) if text.trim_start().starts_with('{') => {
            Value::Object(closed_arguments(&text))
        }
        Some(object @ JsonValue::Object(_)) => object.into_template_value(),
        Some(_) => return Err(ApiError::invalid(path, "must be a JSON object")),
    };
    Ok(value)
}

/// Parses a string, or text parts that are joined by line breaks; `kinds` are the accepted part types. Values
/// without effect are added to `hints`.
pub(crate) fn text_of(
    hints: &IgnoredRequestParts,
    path: &str,
    value: JsonValue,
    kinds: &[&str],
) -> Result<String, ApiError> {
    match value {
        JsonValue::Str(text) => Ok(text),
        JsonValue::List(parts) if parts.len() <= PARTS_MAX => {
            let part = |(index, value)| part(hints, format!("{path}[{index}]"), value, kinds);
            let texts = parts.into_iter().enumerate().map(part);
            Ok(texts.collect::<Result<Vec<_>, _>>()?.join("\n"))
        }
        JsonValue::List(parts) => {
            let message = format!("at most {PARTS_MAX} parts, got {}", parts.len());
            Err(ApiError::invalid(path, message))
        }
        other => Err(wrong_type(path.to_owned(), "a string or a list of parts", &other)),
    }
}

/// Parses a text part, which may be a plain string; `kinds` are the accepted part types.
pub(super) fn part(
    hints: &IgnoredRequestParts,
    path: String,
    value: JsonValue,
    kinds: &[&str],
) -> Result<String, ApiError> {
    if let JsonValue::Str(text) = value {
        return Ok(text);
    }
    let mut fields = RequestFields::nested_in(hints, path, value)?;
    // Parts of earlier outputs have these fields.
    fields.omit(&["annotations", "logprobs"]);
    let kind = fields.required_string("type")?;
    if !kinds.contains(&kind.as_str()) {
        reject_media(&kind, fields.own_path())?;
        let message = "only text parts are supported";
        return Err(ApiError::bad_request("unsupported_content", fields.path("type"), message));
    }
    fields.required_string(if kind == REFUSAL { REFUSAL } else { "text" })
}

/// Rejects a content part or an input item of type `kind` at `path` that contains an image, audio, a video or a
/// file.
pub(crate) fn reject_media(kind: &str, path: &str) -> Result<(), ApiError> {
    let media = match kind {
        "image" | "image_url" | "input_image" | "image_pil" | "image_embeds" => "images are",
        "audio" | "audio_url" | "input_audio" | "audio_embeds" => "audio is",
        "video" | "video_url" | "input_video" => "videos are",
        "file" | "input_file" | "file_url" => "files are",
        _ => return Ok(()),
    };
    let message = format!("{media} not supported by this model, which reads text only");
    Err(ApiError::bad_request("unsupported_content", path, message))
}

fn documents(fields: &mut RequestFields) -> Result<Value, ApiError> {
    match fields.take("documents") {
        None => Ok(Value::Null),
        Some(JsonValue::List(list)) if list.len() <= DOCUMENTS_MAX => {
            if let Some(invalid) =
                list.iter().position(|item| !matches!(item, JsonValue::Object(_)))
            {
                let path = format!("documents[{invalid}]");
                return Err(wrong_type(path, "an object", &list[invalid]));
            }
            Ok(JsonValue::List(list).into_template_value())
        }
        Some(JsonValue::List(list)) => {
            let message = format!("at most {DOCUMENTS_MAX} documents, got {}", list.len());
            Err(ApiError::invalid("documents", message))
        }
        Some(other) => Err(wrong_type("documents".to_owned(), "a list of objects", &other)),
    }
}

/// Parses the reasoning effort in field `name`.
pub(crate) fn effort(fields: &mut RequestFields, name: &str) -> Result<Option<String>, ApiError> {
    let path = fields.path(name);
    let effort = fields.string(name, 32)?;
    if effort.as_ref().is_some_and(|effort| !REASONING_EFFORTS.contains(&effort.as_str())) {
        let message = format!("must be one of {}", REASONING_EFFORTS.join(", "));
        return Err(ApiError::invalid(path, message));
    }
    Ok(effort)
}

/// Returns the approximate length of a value as JSON text, or a number above `limit` if the length exceeds
/// `limit`. An escaped character counts as one.
fn json_bytes(value: &JsonValue, limit: usize) -> usize {
    let sum = |sizes: &mut dyn Iterator<Item = usize>| {
        let mut total = 2;
        for size in sizes {
            total += size + 1;
            if total > limit {
                break;
            }
        }
        total
    };
    match value {
        JsonValue::Str(text) => text.len() + 2,
        JsonValue::LargeInt(digits) => digits.len(),
        JsonValue::Ints(list) => list.len() * 8 + 2,
        JsonValue::List(list) => sum(&mut list.iter().map(|one| json_bytes(one, limit))),
        JsonValue::Object(pairs) => {
            sum(&mut pairs.iter().map(|(key, value)| key.len() + 3 + json_bytes(value, limit)))
        }
        _ => 8,
    }
}

/// Parses the template variables of a request: `reasoning_effort` and `chat_template_kwargs`.
pub(crate) fn kwargs(fields: &mut RequestFields) -> Result<Map<String, Value>, ApiError> {
    const NAME: &str = "chat_template_kwargs";
    let mut kwargs = Map::new();
    if let Some(effort) = effort(fields, "reasoning_effort")? {
        kwargs.insert("reasoning_effort".to_owned(), Value::String(effort));
    }
    let pairs = match fields.take(NAME) {
        None => return Ok(kwargs),
        Some(JsonValue::Object(pairs)) => pairs,
        Some(other) => return Err(wrong_type(NAME.to_owned(), "an object", &other)),
    };
    if pairs.len() > KWARGS_MAX {
        let message = format!("at most {KWARGS_MAX} keys, got {}", pairs.len());
        return Err(ApiError::invalid(NAME, message));
    }
    let mut bytes = 0;
    for (key, value) in pairs {
        if RESERVED_TEMPLATE_VARIABLES.contains(&key.as_str()) {
            return Err(ApiError::invalid(format!("{NAME}.{key}"), "this name is reserved"));
        }
        bytes += key.len() + json_bytes(&value, KWARGS_BYTES_MAX);
        if bytes > KWARGS_BYTES_MAX {
            let message = format!("at most {KWARGS_BYTES_MAX} bytes in all");
            return Err(ApiError::invalid(NAME, message));
        }
        kwargs.insert(key, value.into_template_value());
    }
    Ok(kwargs)
}
