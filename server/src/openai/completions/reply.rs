//! Replies of text completions, non-streaming and streaming.

use super::convert;
use crate::api_error::ApiError;
use crate::openai::choice::ChoiceDelta;
use crate::openai::collect::{CollectedChoice, collect, put_end};
use crate::openai::endpoint::{
    EndpointRequest, InferenceEndpoint, ReplyMetadata, SubmittedRequest,
};
use crate::openai::generation::RequestGeneration;
use crate::openai::logprobs::{ChoiceLogprobs, LogprobListWriter, LogprobsFormat, TokenFormatter};
use crate::openai::params::StreamOptions;
use crate::openai::reply_parts::{BufferedLogprobs, BufferedReply};
use crate::openai::stream_chunk::StreamChunkFields;
use crate::openai::usage::UsageInfo;
use crate::sse::{SseEventWriter, escape, write_end};
use axum::body::Body;
use bytes::{BufMut, BytesMut};
use protocol::Token;
use serde_json::json;
use std::io::Write;
use std::sync::Arc;

/// Text and token ids of a prompt, for a reply that repeats the prompt.
pub(super) struct EchoedPrompt {
    pub(super) text: String,
    pub(super) ids: Arc<[Token]>,
}

/// Formats the reply to a text completion request; contains all values that the reply needs in addition to
/// the generated tokens.
pub(super) struct CompletionReplyFormatter {
    pub(super) head: ReplyMetadata,
    /// Formatter of the tokens in log-probabilities.
    pub(super) tokens: TokenFormatter,
    pub(super) logprobs: bool,
    pub(super) prompt_logprobs: bool,
    pub(super) echo: bool,
    pub(super) return_token_ids: bool,
    /// Text and token ids of each prompt if the reply repeats them, else empty.
    pub(super) echoes: Vec<EchoedPrompt>,
    pub(super) n: usize,
    pub(super) stream_options: StreamOptions,
}

impl InferenceEndpoint for CompletionReplyFormatter {
    type StreamWriter = CompletionChunkWriter;

    fn prepare(request: EndpointRequest<'_>) -> Result<SubmittedRequest<Self>, ApiError> {
        convert::prepare(request)
    }

    fn stream_writer(self) -> CompletionChunkWriter {
        CompletionChunkWriter::new(self)
    }

    async fn collect(self, generation: RequestGeneration) -> Result<Body, ApiError> {
        let (choices, generation) = collect(generation).await?;
        let mut reply = self.parts(choices, &generation.usage());
        reply.text.put_slice(generation.metrics_member().as_bytes());
        reply.text.put_u8(b'}');
        Ok(reply.into_body(generation.into_memory_reservation()))
    }
}

impl CompletionReplyFormatter {
    /// Builds the reply without its closing brace.
    fn parts(self, choices: Vec<CollectedChoice>, usage: &UsageInfo) -> BufferedReply {
        let mut reply = BufferedReply::new(self.tokens.clone());
        self.head.open("text_completion", &mut reply.text);
        reply.text.put_slice(b",\"usage\":");
        usage.write(&mut reply.text);
        reply.text.put_slice(b",\"choices\":[");
        for (index, choice) in choices.into_iter().enumerate() {
            if index > 0 {
                reply.text.put_u8(b',');
            }
            self.add_choice(index, choice, &mut reply);
        }
        reply.text.put_u8(b']');
        reply
    }

    fn add_choice(&self, index: usize, choice: CollectedChoice, reply: &mut BufferedReply) {
        let CollectedChoice {
            text, tokens, logprobs: output, prompt_logprobs: prompt, end, ..
        } = choice;
        let echo = self.echoes.get(index / self.n);
        let echoed_prompt = echo.filter(|_| self.echo);
        let text = echoed_prompt.map_or("", |echo| &echo.text).to_owned() + &text;
        // Writing to memory cannot fail, so the result is ignored.
        let _ = write!(
            (&mut reply.text).writer(),
            "{{\"index\":{index},\"text\":{},\"logprobs\":",
            json!(text)
        );
        let echoed = echoed_prompt.map(|echo| Arc::clone(&echo.ids)).unwrap_or_default();
        let buffered = Arc::new(BufferedLogprobs { echoed, prompt, output });
        if self.logprobs {
            reply.list(LogprobsFormat::Text, &buffered);
        } else {
            reply.text.put_slice(b"null");
        }
        put_end(&end, &mut reply.text);
        if let (Some(echo), true) = (echo, self.return_token_ids) {
            put_token_ids(&tokens, &echo.ids, &mut reply.text);
        }
        if self.prompt_logprobs {
            reply.text.put_slice(b",\"prompt_logprobs\":");
            reply.list(LogprobsFormat::Prompt, &buffered);
        }
        reply.text.put_u8(b'}');
    }
}

/// Appends the token ids of an output and of its prompt to a choice object.
fn put_token_ids(tokens: &[Token], prompt: &[Token], out: &mut BytesMut) {
    let (ids, prompt_ids) = (json!(tokens), json!(prompt));
    // Writing to memory cannot fail, so the result is ignored.
    let _ = write!(out.writer(), ",\"token_ids\":{ids},\"prompt_token_ids\":{prompt_ids}");
}

/// Writes the chunks of a streaming text completion.
pub(super) struct CompletionChunkWriter {
    reply: CompletionReplyFormatter,
    chunk_fields: StreamChunkFields,
    /// `text_offset` of the next token of each choice: number of characters of the choice's tokens listed so
    /// far.
    shown_chars: Vec<usize>,
}

impl CompletionChunkWriter {
    fn new(reply: CompletionReplyFormatter) -> Self {
        let chunk_fields =
            StreamChunkFields::new(&reply.head, "text_completion", reply.stream_options);
        Self { reply, chunk_fields, shown_chars: Vec::new() }
    }

    /// Whether the next delta is the first delta of this choice; later calls for the choice return false.
    fn is_first_delta(&mut self, choice: usize) -> bool {
        if self.shown_chars.len() <= choice {
            self.shown_chars.resize(choice + 1, 0);
        }
        self.chunk_fields.is_first_chunk(choice)
    }
}

impl SseEventWriter for CompletionChunkWriter {
    fn delta(
        &mut self,
        choice: u32,
        delta: &ChoiceDelta,
        generation: &RequestGeneration,
        out: &mut BytesMut,
    ) {
        let index = choice as usize;
        let is_first = self.is_first_delta(index);
        let reply = &self.reply;
        let echo = reply.echoes.get(index / reply.n).filter(|_| is_first);
        let echoed = echo.filter(|_| reply.echo).map_or("", |echo| echo.text.as_str());
        let ids = reply.return_token_ids && (!delta.tokens.is_empty() || echo.is_some());
        let with_echo = echo.is_some_and(|_| reply.echo);
        let with_logprobs = reply.logprobs && (with_echo || !delta.logprobs.is_empty());
        let ends = delta.has_textless_token || delta.end.is_some();
        let has_content = !delta.text.is_empty() || !echoed.is_empty() || ends;
        if !has_content && !ids && !with_logprobs {
            return;
        }
        self.chunk_fields.open(choice, out);
        out.put_slice(b"\"text\":\"");
        escape(echoed, out);
        escape(&delta.text, out);
        out.put_slice(b"\",\"logprobs\":");
        if with_logprobs {
            let echoed = echo.filter(|_| reply.echo).map_or(&[][..], |e| &e.ids);
            let (prompt, output) = (generation.prompt_logprobs(index), &delta.logprobs[..]);
            let lists = LogprobListWriter::new(LogprobsFormat::Text, self.shown_chars[index]);
            let logprobs = ChoiceLogprobs { echoed, prompt, output };
            self.shown_chars[index] = lists.write(&reply.tokens, logprobs, out);
        } else {
            out.put_slice(b"null");
        }
        write_end(delta.end.as_ref(), out);
        if ids {
            let _ = write!(out.writer(), ",\"token_ids\":{}", json!(delta.tokens));
            if let Some(echo) = echo {
                let _ = write!(out.writer(), ",\"prompt_token_ids\":{}", json!(*echo.ids));
            }
        }
        out.put_slice(b"}]");
        self.chunk_fields.close(generation, out);
    }

    fn end(&mut self, generation: &RequestGeneration, out: &mut BytesMut) {
        self.chunk_fields.usage(generation, out);
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::openai::choice::{ChoiceFinishReason, StopMatch};
    use crate::openai::logprob_values::{entries, names, prompt, text};
    use crate::openai::logprobs::TokenFormat;
    use serde_json::Value;
    use text::OutputPieces;

    const PROMPT: usize = 4;

    fn outputs(top: usize) -> Vec<CollectedChoice> {
        let ends = [
            ChoiceFinishReason::Length,
            ChoiceFinishReason::Stop(StopMatch::Eos),
            ChoiceFinishReason::Stop(StopMatch::Id(300)),
            ChoiceFinishReason::Stop(StopMatch::Text("\u{8}\"é".to_owned())),
        ];
        let output = |end| CollectedChoice {
            text: "a \"text\"\n\u{c}".to_owned(),
            pieces: OutputPieces::default(),
            tokens: vec![7, 300],
            logprobs: entries(2, top),
            prompt_logprobs: entries(PROMPT - 1, top),
            end,
        };
        ends.into_iter().map(output).collect()
    }

    fn reply(token_format: TokenFormat, all: bool) -> CompletionReplyFormatter {
        let echo =
            |text: &str| EchoedPrompt { text: text.to_owned(), ids: (40..).take(PROMPT).collect() };
        let head = ReplyMetadata {
            id: "cmpl-\"x\"".to_owned(),
            created: 1,
            model: "a \\ model".to_owned(),
            fingerprint: "fp".to_owned(),
        };
        CompletionReplyFormatter {
            head,
            tokens: names(token_format),
            logprobs: true,
            prompt_logprobs: all,
            echo: all,
            return_token_ids: all,
            echoes: if all { vec![echo("one"), echo("two")] } else { Vec::new() },
            n: 2,
            stream_options: StreamOptions::default(),
        }
    }

    /// Builds the choice object that the reply must contain, as a JSON value.
    fn choice(reply: &CompletionReplyFormatter, index: usize, output: &CollectedChoice) -> Value {
        let echo = reply.echoes.get(index / 2);
        let logprobs = ChoiceLogprobs {
            echoed: echo.map_or(&[][..], |echo| &echo.ids),
            prompt: &output.prompt_logprobs,
            output: &output.logprobs,
        };
        let mut choice = json!({
            "index": index,
            "text": echo.map_or("", |echo| &echo.text).to_owned() + &output.text,
            "logprobs": text(&reply.tokens, logprobs),
            "finish_reason": output.end.name(),
            "stop_reason": Value::Null,
        });
        match &output.end {
            ChoiceFinishReason::Stop(StopMatch::Id(id)) => choice["stop_reason"] = json!(id),
            ChoiceFinishReason::Stop(StopMatch::Text(text)) => choice["stop_reason"] = json!(text),
            _ => {}
        }
        if let Some(echo) = echo {
            choice["token_ids"] = json!(output.tokens);
            choice["prompt_token_ids"] = json!(*echo.ids);
            choice["prompt_logprobs"] = prompt(&reply.tokens, logprobs);
        }
        choice
    }

    #[test]
    fn reply_text_equals_serialised_values() {
        let usage = UsageInfo { prompt_tokens: 8, completion_tokens: 8, ..UsageInfo::default() };
        for (token_format, all, top) in [
            (TokenFormat::Text, false, 0),
            (TokenFormat::Text, false, 20),
            (TokenFormat::Text, true, 1),
            (TokenFormat::Id, true, 20),
        ] {
            let reply = reply(token_format, all);
            let outputs = outputs(top);
            let choices: Vec<Value> =
                outputs.iter().enumerate().map(|(i, output)| choice(&reply, i, output)).collect();
            let value = json!({
                "id": reply.head.id,
                "object": "text_completion",
                "created": 1,
                "model": reply.head.model,
                "system_fingerprint": "fp",
                "usage": {"prompt_tokens": 8, "completion_tokens": 8, "total_tokens": 16},
                "choices": choices,
            });
            assert_eq!(reply.parts(outputs, &usage).into_text(500) + "}", value.to_string());
        }
    }

    #[test]
    fn logprobs_are_null_if_not_requested() {
        let reply = CompletionReplyFormatter { logprobs: false, ..reply(TokenFormat::Text, false) };
        let text = reply.parts(outputs(1), &UsageInfo::default()).into_text(500) + "}";
        let value: Value = serde_json::from_str(&text).unwrap();
        assert_eq!(value["choices"][3]["logprobs"], Value::Null);
        assert_eq!(value.to_string(), text);
    }
}
