//! Non-streamed replies of chat completions.

use super::ReasoningField;
use super::convert;
use super::stream::ChatChunkWriter;
use crate::api_error::ApiError;
use crate::app::{AppState, ServingContext};
use crate::openai::assistant_message::{AssistantMessage, ToolCall};
use crate::openai::collect::{CollectedChoice, collect, put_end};
use crate::openai::endpoint::{CompletionEndpoint, HeaderFields, PreparedRequest, ReplyHead};
use crate::openai::generation::RequestGeneration;
use crate::openai::logprobs::{ListForm, TokenNames};
use crate::openai::params::StreamOptions;
use crate::openai::reply_parts::{KeptLogprobs, ReplyParts};
use crate::openai::usage::UsageInfo;
use crate::request_fields::RequestFields;
use crate::request_ids::ToolCallIds;
use axum::body::Body;
use bytes::BufMut;
use engine::AdmissionPermit;
use protocol::Token;
use serde_json::{Value, json};
use std::io::Write as _;
use std::mem;
use std::sync::Arc;

/// State of a reply apart from its tokens.
pub(super) struct ChatCompletionReply {
    pub(super) head: ReplyHead,
    /// Format of tokens in log-probabilities.
    pub(super) tokens: TokenNames,
    pub(super) logprobs: bool,
    pub(super) prompt_logprobs: bool,
    /// Last message of the assistant, if it is echoed.
    pub(super) echo: String,
    /// Token ids of the prompt, if `return_token_ids` is set.
    pub(super) prompt_ids: Option<Vec<Token>>,
    pub(super) stream_options: StreamOptions,
    /// Generator of tool call ids.
    pub(super) tool_call_ids: ToolCallIds,
    /// Reply fields that carry reasoning; `None` = reasoning is omitted.
    pub(super) reasoning: Option<ReasoningField>,
}

impl CompletionEndpoint for ChatCompletionReply {
    type StreamWriter = ChatChunkWriter;

    fn prepare(
        app: &Arc<AppState>,
        serving: &Arc<ServingContext>,
        fields: RequestFields,
        headers: &HeaderFields,
        ticket: AdmissionPermit,
    ) -> Result<PreparedRequest<Self>, ApiError> {
        convert::prepare(app, serving, fields, headers, ticket)
    }

    fn stream_writer(self) -> ChatChunkWriter {
        ChatChunkWriter::new(self)
    }

    async fn collect(self, generation: RequestGeneration) -> Result<Body, ApiError> {
        let (wholes, generation) = collect(generation).await?;
        let reply = self.parts(wholes, &generation.usage());
        Ok(reply.into_body(generation.into_held()))
    }
}

impl ChatCompletionReply {
    fn parts(self, mut wholes: Vec<CollectedChoice>, usage: &UsageInfo) -> ReplyParts {
        // All choices have the same prompt.
        let prompt = wholes.first_mut().map(|whole| mem::take(&mut whole.prompt_logprobs));
        let mut reply = ReplyParts::new(self.tokens.clone());
        self.head.open("chat.completion", &mut reply.text);
        reply.text.put_slice(b",\"choices\":[");
        for (index, whole) in (0..).zip(wholes) {
            if index > 0 {
                reply.text.put_u8(b',');
            }
            self.add_choice(index, whole, &mut reply);
        }
        reply.text.put_slice(b"],\"usage\":");
        usage.write(&mut reply.text);
        if let Some(ids) = &self.prompt_ids {
            let _ = write!((&mut reply.text).writer(), ",\"prompt_token_ids\":{}", json!(ids));
        }
        if self.prompt_logprobs {
            reply.text.put_slice(b",\"prompt_logprobs\":");
            let prompt = prompt.unwrap_or_default();
            let kept = KeptLogprobs { prompt, ..KeptLogprobs::default() };
            reply.list(ListForm::Prompt, &Arc::new(kept));
        }
        reply.text.put_u8(b'}');
        reply
    }

    fn add_choice(&self, index: u32, whole: CollectedChoice, reply: &mut ReplyParts) {
        let message = self.message(AssistantMessage::of(&whole, index, &self.tool_call_ids));
        let CollectedChoice { logprobs, tokens, end, .. } = whole;
        // Writing to memory cannot fail.
        let _ = write!(
            (&mut reply.text).writer(),
            "{{\"index\":{index},\"message\":{message},\"logprobs\":"
        );
        if self.logprobs {
            let kept = KeptLogprobs { output: logprobs, ..KeptLogprobs::default() };
            reply.list(ListForm::Chat, &Arc::new(kept));
        } else {
            reply.text.put_slice(b"null");
        }
        put_end(&end, &mut reply.text);
        if self.prompt_ids.is_some() {
            let _ = write!((&mut reply.text).writer(), ",\"token_ids\":{}", json!(tokens));
        }
        reply.text.put_u8(b'}');
    }

    /// Builds the `message` object. `content` is null if the output consists of reasoning or tool calls only.
    fn message(&self, message: AssistantMessage) -> Value {
        let AssistantMessage { reasoning, content, calls } = message;
        let content = self.echo.clone() + &content;
        let speaks = !content.is_empty() || calls.is_empty() && reasoning.is_empty();
        let mut value = json!({"role": "assistant", "content": speaks.then_some(content)});
        let fields = self.reasoning.map_or(&[][..], ReasoningField::names);
        for field in fields.iter().filter(|_| !reasoning.is_empty()) {
            value[*field] = Value::from(reasoning.as_str());
        }
        if !calls.is_empty() {
            value["tool_calls"] = calls.iter().map(call).collect();
        }
        value
    }
}

fn call(ToolCall { id, name, arguments, .. }: &ToolCall) -> Value {
    json!({"id": id, "type": "function", "function": {"name": name, "arguments": arguments}})
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::openai::choice::{ChoiceFinish, StopMatch};
    use crate::openai::logprob_values::{chat, entries, names, prompt};
    use crate::openai::logprobs::{ChoiceLogprobs, TokenFormat};
    use text::{OutputPieces, ToolCallIdFormat};

    fn wholes(top: usize) -> Vec<CollectedChoice> {
        let whole = |end| CollectedChoice {
            text: String::new(),
            pieces: OutputPieces::default(),
            tokens: vec![7, 300],
            logprobs: entries(3, top),
            prompt_logprobs: entries(5, top),
            end,
        };
        [ChoiceFinish::Length, ChoiceFinish::Stop(StopMatch::Text("\u{8}".to_owned()))]
            .map(whole)
            .into()
    }

    fn reply(spelling: TokenFormat, all: bool) -> ChatCompletionReply {
        let head = ReplyHead {
            id: "chatcmpl-1".to_owned(),
            created: 1,
            model: "a \"model\"".to_owned(),
            fingerprint: "fp".to_owned(),
        };
        ChatCompletionReply {
            head,
            tokens: names(spelling),
            logprobs: true,
            prompt_logprobs: all,
            echo: "said\n".to_owned(),
            prompt_ids: all.then(|| vec![1, 2]),
            stream_options: StreamOptions::default(),
            tool_call_ids: ToolCallIds::new(1, ToolCallIdFormat::Long),
            reasoning: None,
        }
    }

    /// Builds the expected choice as a JSON value.
    fn choice(reply: &ChatCompletionReply, index: usize, whole: &CollectedChoice) -> Value {
        let logprobs = ChoiceLogprobs { output: &whole.logprobs, ..ChoiceLogprobs::default() };
        let mut choice = json!({
            "index": index,
            "message": {"role": "assistant", "content": "said\n"},
            "logprobs": chat(&reply.tokens, logprobs),
            "finish_reason": whole.end.name(),
            "stop_reason": if index == 1 { json!("\u{8}") } else { Value::Null },
        });
        if reply.prompt_ids.is_some() {
            choice["token_ids"] = json!(whole.tokens);
        }
        choice
    }

    #[test]
    fn replies_read_as_if_they_were_built_as_values() {
        let usage = UsageInfo { prompt_tokens: 6, completion_tokens: 6, ..UsageInfo::default() };
        for (spelling, all, top) in [
            (TokenFormat::Text, false, 0),
            (TokenFormat::Text, true, 1),
            (TokenFormat::Id, true, 20),
        ] {
            let reply = reply(spelling, all);
            let wholes = wholes(top);
            let choices: Vec<Value> =
                wholes.iter().enumerate().map(|(i, whole)| choice(&reply, i, whole)).collect();
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
                let of_prompt = &wholes[0].prompt_logprobs;
                let of_prompt = ChoiceLogprobs { prompt: of_prompt, ..ChoiceLogprobs::default() };
                value["prompt_token_ids"] = json!([1, 2]);
                value["prompt_logprobs"] = prompt(&reply.tokens, of_prompt);
            }
            assert_eq!(reply.parts(wholes, &usage).into_text(500), value.to_string());
        }
    }
}
