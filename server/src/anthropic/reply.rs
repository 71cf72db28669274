//! Non-streaming replies of the Anthropic Messages API.

use super::context_edits::AppliedContextEdits;
use super::stream::AnthropicEventWriter;
use super::types::{self, AnthropicRequest};
use crate::api_error::ApiError;
use crate::openai::assistant_message::{AssistantMessage, AssistantMessagePart};
use crate::openai::chat::generation_start::{StartedGeneration, start};
use crate::openai::chat::ignored_values::report_ignored;
use crate::openai::choice::{ChoiceFinishReason, StopMatch};
use crate::openai::collect::{CollectedChoice, body_of, collect_one};
use crate::openai::endpoint::{
    EndpointRequest, InferenceEndpoint, SubmittedRequest, ignored_fields,
};
use crate::openai::generation::RequestGeneration;
use crate::openai::usage::UsageInfo;
use crate::request_ids::ToolCallIdGenerator;
use axum::body::Body;
use serde::Serialize;
use serde_json::Value;
use serde_json::value::RawValue;
use text::partial_arguments;

/// Formats the reply to a Messages request; contains all values that the reply needs in addition to the
/// generated tokens.
pub(super) struct AnthropicReplyFormatter {
    pub(super) id: String,
    pub(super) model: String,
    pub(super) tool_call_ids: ToolCallIdGenerator,
    /// Context edits that were applied to the prompt; `None` = the request has no `context_management`.
    pub(super) context_edits: Option<AppliedContextEdits>,
}

/// JSON form of the complete message in a non-streaming reply.
#[derive(Serialize)]
pub(super) struct AnthropicMessage<'a> {
    id: &'a str,
    r#type: &'static str,
    role: &'static str,
    model: &'a str,
    content: Vec<ContentBlock>,
    stop_reason: Option<&'static str>,
    stop_sequence: Option<&'a str>,
    usage: AnthropicUsage,
    #[serde(skip_serializing_if = "Option::is_none")]
    context_management: Option<&'a AppliedContextEdits>,
}

/// JSON form of a content block of a message.
#[derive(Serialize)]
#[serde(tag = "type", rename_all = "snake_case")]
pub(super) enum ContentBlock {
    Thinking { thinking: String, signature: &'static str },
    Text { text: String },
    ToolUse { id: String, name: String, input: Box<RawValue> },
}

/// `usage` object: token counts. `input_tokens` excludes the tokens that were found in the prefix cache.
#[derive(Serialize, Clone, Copy)]
pub(super) struct AnthropicUsage {
    #[serde(rename = "input_tokens")]
    input: u64,
    #[serde(rename = "cache_read_input_tokens")]
    cache_read: u64,
    #[serde(rename = "cache_creation_input_tokens")]
    cache_creation: u64,
    #[serde(rename = "output_tokens")]
    output: u64,
}

impl From<&UsageInfo> for AnthropicUsage {
    fn from(usage: &UsageInfo) -> Self {
        Self {
            input: usage.prompt_tokens.saturating_sub(usage.cached_tokens),
            cache_read: usage.cached_tokens,
            // In Anthropic's API, this is the number of tokens billed for writing to the prompt cache. This
            // server bills nothing, so the number is 0.
            cache_creation: 0,
            output: usage.completion_tokens,
        }
    }
}

/// Returns the values of `stop_reason` and `stop_sequence`.
pub(super) fn stop(end: &ChoiceFinishReason) -> (Option<&'static str>, Option<&str>) {
    match end {
        ChoiceFinishReason::Stop(StopMatch::Text(text)) => (Some("stop_sequence"), Some(text)),
        ChoiceFinishReason::Stop(_) => (Some("end_turn"), None),
        ChoiceFinishReason::Calls(_) => (Some("tool_use"), None),
        ChoiceFinishReason::Length => (Some("max_tokens"), None),
        ChoiceFinishReason::Abort(_)
        | ChoiceFinishReason::Error(_)
        | ChoiceFinishReason::Rejected(_) => (None, None),
    }
}

/// Returns the `input` of a tool call as the generated JSON text, unparsed, so that numbers keep all their
/// digits. Incomplete values of truncated arguments are left out.
pub(super) fn tool_input(arguments: &str) -> Box<RawValue> {
    let text = partial_arguments(arguments);
    // `RawValue` accepts escapes that are not characters, such as an unpaired surrogate; clients reject such
    // JSON, so it is replaced by `{}`.
    let is_valid = serde_json::from_str::<Value>(&text).is_ok();
    let text = if is_valid { text } else { "{}".to_owned() };
    RawValue::from_string(text).unwrap_or_else(|_| RawValue::NULL.to_owned())
}

impl AnthropicReplyFormatter {
    pub(super) fn body<'a>(
        &'a self,
        content: Vec<ContentBlock>,
        end: Option<&'a ChoiceFinishReason>,
        usage: &UsageInfo,
    ) -> AnthropicMessage<'a> {
        let (stop_reason, stop_sequence) = end.map_or((None, None), stop);
        AnthropicMessage {
            id: &self.id,
            r#type: "message",
            role: "assistant",
            model: &self.model,
            content,
            stop_reason,
            stop_sequence,
            usage: usage.into(),
            context_management: end.and(self.context_edits.as_ref()),
        }
    }

    fn blocks(&self, choice: &CollectedChoice) -> Vec<ContentBlock> {
        let message = AssistantMessage::of(choice, 0, &self.tool_call_ids);
        let block = |part| match part {
            AssistantMessagePart::Reasoning(thinking) => {
                ContentBlock::Thinking { thinking, signature: "" }
            }
            AssistantMessagePart::Content(text) => ContentBlock::Text { text },
            AssistantMessagePart::Call(call) => {
                // If the output ended inside a call, `input` contains only its complete arguments. Clients get
                // the same value when they parse the streamed reply.
                let input = tool_input(&call.arguments);
                ContentBlock::ToolUse { id: call.id, name: call.name, input }
            }
        };
        message.parts.into_iter().map(block).collect()
    }
}

impl InferenceEndpoint for AnthropicReplyFormatter {
    type StreamWriter = AnthropicEventWriter;

    fn prepare(request: EndpointRequest<'_>) -> Result<SubmittedRequest<Self>, ApiError> {
        let EndpointRequest { app, serving, mut fields, headers, permit } = request;
        let AnthropicRequest { request, context_edits } = types::take(&mut fields, app, serving)?;
        let mut ignored = ignored_fields(app, &fields)?;
        report_ignored(app, serving, &request, &mut ignored)?;
        let started = start(app, serving, request, headers, permit)?;
        let StartedGeneration { generation, model, request_id, params, tool_call_ids, .. } =
            started;
        let id = format!("msg_{request_id}");
        let reply = Self { id, model, tool_call_ids, context_edits };
        Ok(SubmittedRequest { generation, reply, stream: params.stream, request_id, ignored })
    }

    fn stream_writer(self) -> AnthropicEventWriter {
        AnthropicEventWriter::new(self)
    }

    async fn collect(self, generation: RequestGeneration) -> Result<Body, ApiError> {
        let (choice, generation) = collect_one(generation).await?;
        let body = self.body(self.blocks(&choice), Some(&choice.end), &generation.usage());
        body_of(&body).map(Body::from)
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn tool_input_is_an_object_that_clients_can_parse() {
        assert_eq!(
            tool_input("{\"a\": 123456789012345678901}").get(),
            "{\"a\": 123456789012345678901}"
        );
        for arguments in ["", "[1]", "{\"a\": \"\\ud83d\"}"] {
            assert_eq!(tool_input(arguments).get(), "{}", "{arguments}");
        }
    }
}
