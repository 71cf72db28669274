//! Non-streaming replies of chat completions.

use super::ReasoningFieldNames;
use super::convert;
use super::custom_input::CustomToolInputDecoder;
use super::custom_tools::CustomToolNames;
use super::stream::ChatChunkWriter;
use crate::api_error::ApiError;
use crate::openai::assistant_message::{AssistantMessage, ChatAssistantMessage, ToolCall};
use crate::openai::collect::{CollectedChoice, collect, put_end};
use crate::openai::endpoint::{
    EndpointRequest, InferenceEndpoint, ReplyMetadata, SubmittedRequest,
};
use crate::openai::generation::RequestGeneration;
use crate::openai::logprobs::{LogprobsFormat, TokenFormatter};
use crate::openai::params::StreamOptions;
use crate::openai::reply_parts::{BufferedLogprobs, BufferedReply};
use crate::openai::usage::UsageInfo;
use crate::request_ids::ToolCallIdGenerator;
use axum::body::Body;
use bytes::BufMut;
use protocol::Token;
use serde_json::{Value, json};
use std::io::Write as _;
use std::mem;
use std::sync::Arc;

/// Formats the reply to a chat completion request; contains all values that the reply needs in addition to
/// the generated tokens.
pub(super) struct ChatCompletionReplyFormatter {
    pub(super) head: ReplyMetadata,
    /// Formatter of the tokens in log-probabilities.
    pub(super) tokens: TokenFormatter,
    pub(super) logprobs: bool,
    pub(super) prompt_logprobs: bool,
    /// Text of the last assistant message if the reply echoes it, else empty.
    pub(super) echo: String,
    /// Token ids of the prompt, if `return_token_ids` is set.
    pub(super) prompt_ids: Option<Vec<Token>>,
    pub(super) stream_options: StreamOptions,
    /// Generator of tool call ids.
    pub(super) tool_call_ids: ToolCallIdGenerator,
    /// Tools whose calls are reported as calls of custom tools.
    pub(super) custom_tools: CustomToolNames,
    /// Names of the reply fields that contain reasoning; `None` = reasoning is omitted from the reply.
    pub(super) reasoning: Option<ReasoningFieldNames>,
}

impl InferenceEndpoint for ChatCompletionReplyFormatter {
    type StreamWriter = ChatChunkWriter;

    fn prepare(request: EndpointRequest<'_>) -> Result<SubmittedRequest<Self>, ApiError> {
        convert::prepare(request)
    }

    fn stream_writer(self) -> ChatChunkWriter {
        ChatChunkWriter::new(self)
    }

    async fn collect(self, generation: RequestGeneration) -> Result<Body, ApiError> {
        let (choices, generation) = collect(generation).await?;
        let mut reply = self.parts(choices, &generation.usage());
        reply.text.put_slice(generation.metrics_member().as_bytes());
        reply.text.put_u8(b'}');
        Ok(reply.into_body(generation.into_memory_reservation()))
    }
}

impl ChatCompletionReplyFormatter {
    /// Builds the reply without its closing brace.
    fn parts(self, mut choices: Vec<CollectedChoice>, usage: &UsageInfo) -> BufferedReply {
        // All choices have the same prompt, so the prompt log-probabilities are taken from the first choice.
        let prompt = choices.first_mut().map(|choice| mem::take(&mut choice.prompt_logprobs));
        let mut reply = BufferedReply::new(self.tokens.clone());
        self.head.open("chat.completion", &mut reply.text);
        reply.text.put_slice(b",\"choices\":[");
        for (index, choice) in (0..).zip(choices) {
            if index > 0 {
                reply.text.put_u8(b',');
            }
            self.add_choice(index, choice, &mut reply);
        }
        reply.text.put_slice(b"],\"usage\":");
        usage.write(&mut reply.text);
        if let Some(ids) = &self.prompt_ids {
            let _ = write!((&mut reply.text).writer(), ",\"prompt_token_ids\":{}", json!(ids));
        }
        if self.prompt_logprobs {
            reply.text.put_slice(b",\"prompt_logprobs\":");
            let prompt = prompt.unwrap_or_default();
            let buffered = BufferedLogprobs { prompt, ..BufferedLogprobs::default() };
            reply.list(LogprobsFormat::Prompt, &Arc::new(buffered));
        }
        reply
    }

    fn add_choice(&self, index: u32, choice: CollectedChoice, reply: &mut BufferedReply) {
        let message = AssistantMessage::of(&choice, index, &self.tool_call_ids).into_chat();
        let message = self.message(message);
        let CollectedChoice { logprobs, tokens, end, .. } = choice;
        // Writing to memory cannot fail, so the result is ignored.
        let _ = write!(
            (&mut reply.text).writer(),
            "{{\"index\":{index},\"message\":{message},\"logprobs\":"
        );
        if self.logprobs {
            let buffered = BufferedLogprobs { output: logprobs, ..BufferedLogprobs::default() };
            reply.list(LogprobsFormat::Chat, &Arc::new(buffered));
        } else {
            reply.text.put_slice(b"null");
        }
        put_end(&end, &mut reply.text);
        if self.prompt_ids.is_some() {
            let _ = write!((&mut reply.text).writer(), ",\"token_ids\":{}", json!(tokens));
        }
        reply.text.put_u8(b'}');
    }

    /// Builds the `message` object. `content` is null if the output is only reasoning or tool calls.
    fn message(&self, message: ChatAssistantMessage) -> Value {
        let ChatAssistantMessage { reasoning, content, calls } = message;
        let content = self.echo.clone() + &content;
        let has_content = !content.is_empty() || calls.is_empty() && reasoning.is_empty();
        let mut value = json!({"role": "assistant", "content": has_content.then_some(content)});
        let fields = self.reasoning.map_or(&[][..], ReasoningFieldNames::names);
        for field in fields.iter().filter(|_| !reasoning.is_empty()) {
            value[*field] = Value::from(reasoning.as_str());
        }
        if !calls.is_empty() {
            value["tool_calls"] = calls.iter().map(|call| self.call(call)).collect();
        }
        value
    }

    fn call(&self, ToolCall { id, name, arguments, .. }: &ToolCall) -> Value {
        if self.custom_tools.contains(name) {
            let input = CustomToolInputDecoder::decode(arguments);
            return json!({"id": id, "type": "custom", "custom": {"name": name, "input": input}});
        }
        json!({"id": id, "type": "function", "function": {"name": name, "arguments": arguments}})
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::openai::choice::{ChoiceFinishReason, StopMatch};
    use crate::openai::logprob_values::{chat, entries, names, prompt};
    use crate::openai::logprobs::{ChoiceLogprobs, TokenFormat};
    use text::{OutputPieces, ToolCallIdFormat};

    fn outputs(top: usize) -> Vec<CollectedChoice> {
        let output = |end| CollectedChoice {
            text: String::new(),
            pieces: OutputPieces::default(),
            tokens: vec![7, 300],
            logprobs: entries(3, top),
            prompt_logprobs: entries(5, top),
            end,
        };
        [ChoiceFinishReason::Length, ChoiceFinishReason::Stop(StopMatch::Text("\u{8}".to_owned()))]
            .map(output)
            .into()
    }

    fn reply(token_format: TokenFormat, all: bool) -> ChatCompletionReplyFormatter {
        let head = ReplyMetadata {
            id: "chatcmpl-1".to_owned(),
            created: 1,
            model: "a \"model\"".to_owned(),
            fingerprint: "fp".to_owned(),
        };
        ChatCompletionReplyFormatter {
            head,
            tokens: names(token_format),
            logprobs: true,
            prompt_logprobs: all,
            echo: "said\n".to_owned(),
            prompt_ids: all.then(|| vec![1, 2]),
            stream_options: StreamOptions::default(),
            tool_call_ids: ToolCallIdGenerator::new(1, ToolCallIdFormat::Long, 0),
            custom_tools: CustomToolNames::default(),
            reasoning: None,
        }
    }

    /// Builds the choice object that the reply must contain, as a JSON value.
    fn choice(
        reply: &ChatCompletionReplyFormatter,
        index: usize,
        output: &CollectedChoice,
    ) -> Value {
        let logprobs = ChoiceLogprobs { output: &output.logprobs, ..ChoiceLogprobs::default() };
        let mut choice = json!({
            "index": index,
            "message": {"role": "assistant", "content": "said\n"},
            "logprobs": chat(&reply.tokens, logprobs),
            "finish_reason": output.end.name(),
            "stop_reason": if index == 1 { json!("\u{8}") } else { Value::Null },
        });
        if reply.prompt_ids.is_some() {
            choice["token_ids"] = json!(output.tokens);
        }
        choice
    }

    #[test]
    fn reply_text_equals_serialised_values() {
        let usage = UsageInfo { prompt_tokens: 6, completion_tokens: 6, ..UsageInfo::default() };
        for (token_format, all, top) in [
            (TokenFormat::Text, false, 0),
            (TokenFormat::Text, true, 1),
            (TokenFormat::Id, true, 20),
        ] {
            let reply = reply(token_format, all);
            let outputs = outputs(top);
            let choices: Vec<Value> =
                outputs.iter().enumerate().map(|(i, output)| choice(&reply, i, output)).collect();
            let mut value = json!({
                "id": "chatcmpl-1",
                "object": "chat.completion",
                "created": 1,
                "model": reply.head.model,
                "system_fingerprint": "fp",
                "choices": choices,
                "usage": {"prompt_tokens": 6, "completion_tokens": 6, "total_tokens": 12},
            });
            if all {
                let prompt_logprobs = &outputs[0].prompt_logprobs;
                let prompt_logprobs =
                    ChoiceLogprobs { prompt: prompt_logprobs, ..ChoiceLogprobs::default() };
                value["prompt_token_ids"] = json!([1, 2]);
                value["prompt_logprobs"] = prompt(&reply.tokens, prompt_logprobs);
            }
            assert_eq!(reply.parts(outputs, &usage).into_text(500) + "}", value.to_string());
        }
    }
}
