//! Replies of text completions, whole and in chunks.

use super::convert;
use crate::engine_client::Ticket;
use crate::server::app::{App, Serving};
use crate::server::error::ApiError;
use crate::server::fields::Fields;
use crate::server::openai::choice::Delta;
use crate::server::openai::chunk_frame::ChunkFrame;
use crate::server::openai::collect::{Whole, collect, stop_reason};
use crate::server::openai::exchange::{Endpoint, FromHeaders, Prepared, ReplyHead};
use crate::server::openai::generation::Generation;
use crate::server::openai::logprobs::{self, Spelling, TextOffsets};
use crate::server::openai::params::StreamOptions;
use crate::server::openai::usage::Usage;
use crate::server::sse::{ChunkWriter, escape, write_end};
use crate::text::Tokenizer;
use bytes::{BufMut, BytesMut};
use protocol::{Token, TokenLogprobs};
use serde_json::{Value, json};
use std::io::Write;
use std::sync::Arc;

/// A prompt as the reply repeats it.
pub(super) struct Echo {
    pub(super) text: String,
    pub(super) ids: Vec<Token>,
}

/// Everything a reply needs besides tokens.
pub(super) struct Reply {
    pub(super) head: ReplyHead,
    pub(super) tokenizer: Arc<Tokenizer>,
    pub(super) spelling: Spelling,
    pub(super) logprobs: bool,
    pub(super) prompt_logprobs: bool,
    pub(super) echo: bool,
    pub(super) return_token_ids: bool,
    /// One per prompt, if the reply repeats prompts or their ids.
    pub(super) echoes: Vec<Echo>,
    pub(super) n: usize,
    pub(super) stream_options: StreamOptions,
}

impl Endpoint for Reply {
    type Chunks = Chunks;

    fn prepare(
        app: &Arc<App>,
        serving: &Arc<Serving>,
        fields: Fields,
        headers: &FromHeaders,
        ticket: Ticket,
    ) -> Result<Prepared<Self>, ApiError> {
        convert::prepare(app, serving, fields, headers, ticket)
    }

    fn chunks(self) -> Chunks {
        Chunks::new(self)
    }

    async fn collect(self, generation: Generation) -> Result<String, ApiError> {
        let (wholes, generation) = collect(generation).await?;
        let mut usage = BytesMut::new();
        generation.usage().write(&mut usage);
        let ReplyHead { id, created, model, fingerprint } = &self.head;
        let reply = json!({
            "id": id,
            "object": "text_completion",
            "created": created,
            "model": model,
            "system_fingerprint": fingerprint,
            "usage": serde_json::from_slice::<Value>(&usage).unwrap_or_default(),
        });
        let mut text = reply.to_string();
        text.pop(); // Choices follow one by one: of all log-probabilities only the text is kept.
        text.push_str(",\"choices\":[");
        for (index, whole) in wholes.into_iter().enumerate() {
            if index > 0 {
                text.push(',');
            }
            self.append_choice(index, &whole, &generation, &mut text);
        }
        text.push_str("]}");
        Ok(text)
    }
}

impl Reply {
    fn append_choice(
        &self,
        index: usize,
        whole: &Whole,
        generation: &Generation,
        out: &mut String,
    ) {
        let echo = self.echoes.get(index / self.n);
        let mut text = String::new();
        if let (Some(echo), true) = (echo, self.echo) {
            text.push_str(&echo.text);
        }
        text.push_str(&whole.text);
        let prompt_logprobs = generation.prompt_logprobs(index);
        let mut choice = json!({
            "index": index,
            "text": text,
            "logprobs": Value::Null,
            "finish_reason": whole.end.name(),
            "stop_reason": stop_reason(&whole.end),
        });
        if self.logprobs {
            let prompt_ids = echo.filter(|_| self.echo).map_or(&[][..], |e| &e.ids);
            let mut offsets = TextOffsets { chars: 0 };
            let entries = echoed_and_new(prompt_ids, prompt_logprobs, &whole.logprobs);
            choice["logprobs"] =
                logprobs::text(&self.tokenizer, self.spelling, &mut offsets, entries);
        }
        if let (Some(echo), true) = (echo, self.return_token_ids) {
            choice["token_ids"] = json!(whole.tokens);
            choice["prompt_token_ids"] = json!(echo.ids);
        }
        out.push_str(&choice.to_string());
        if self.prompt_logprobs {
            logprobs::append_prompt(&self.tokenizer, self.spelling, prompt_logprobs, out);
        }
    }
}

/// Entries of an echoed prompt, whose first token has none, and of the output behind it.
fn echoed_and_new<'a>(
    prompt_ids: &'a [Token],
    of_prompt: &'a [TokenLogprobs],
    of_output: &'a [TokenLogprobs],
) -> impl Iterator<Item = (Token, Option<&'a TokenLogprobs>)> {
    let of_prompt = std::iter::once(None).chain(of_prompt.iter().map(Some));
    let echoed = prompt_ids.iter().copied().zip(of_prompt);
    echoed.chain(of_output.iter().map(|entry| (entry.token, Some(entry))))
}

/// Writes the chunks of a stream.
pub(super) struct Chunks {
    reply: Reply,
    frame: ChunkFrame,
    offsets: Vec<TextOffsets>,
}

impl Chunks {
    fn new(reply: Reply) -> Self {
        let frame = ChunkFrame::new(&reply.head, "text_completion", reply.stream_options);
        Self { reply, frame, offsets: Vec::new() }
    }

    /// Whether this is the first delta of a choice.
    fn begins(&mut self, choice: usize) -> bool {
        if self.offsets.len() <= choice {
            self.offsets.resize(choice + 1, TextOffsets { chars: 0 });
        }
        self.frame.begins(choice)
    }
}

impl ChunkWriter for Chunks {
    fn delta(&mut self, choice: u32, delta: &Delta, all: &Generation, out: &mut BytesMut) {
        let index = choice as usize;
        let begins = self.begins(index);
        let reply = &self.reply;
        let echo = reply.echoes.get(index / reply.n).filter(|_| begins);
        let echoed = echo.filter(|_| reply.echo).map_or("", |echo| echo.text.as_str());
        let ids = reply.return_token_ids && (!delta.tokens.is_empty() || echo.is_some());
        let with_echo = echo.is_some_and(|_| reply.echo);
        let with_logprobs = reply.logprobs && (with_echo || !delta.logprobs.is_empty());
        let ends = delta.textless || delta.end.is_some();
        let says = !delta.text.is_empty() || !echoed.is_empty() || ends;
        if !says && !ids && !with_logprobs {
            return;
        }
        self.frame.open(choice, out);
        out.put_slice(b"\"text\":\"");
        escape(echoed, out);
        escape(&delta.text, out);
        out.put_slice(b"\",\"logprobs\":");
        if with_logprobs {
            let prompt_ids = echo.filter(|_| reply.echo).map_or(&[][..], |e| &e.ids);
            let of_prompt = all.prompt_logprobs(index);
            let entries = echoed_and_new(prompt_ids, of_prompt, &delta.logprobs);
            let offsets = &mut self.offsets[index];
            let value = logprobs::text(&reply.tokenizer, reply.spelling, offsets, entries);
            let _ = write!(out.writer(), "{value}");
        } else {
            out.put_slice(b"null");
        }
        write_end(delta.end.as_ref(), out);
        if ids {
            let _ = write!(out.writer(), ",\"token_ids\":{}", json!(delta.tokens));
            if let Some(echo) = echo {
                let _ = write!(out.writer(), ",\"prompt_token_ids\":{}", json!(echo.ids));
            }
        }
        out.put_slice(b"}]");
        self.frame.close(all, out);
    }

    fn end(&mut self, usage: &Usage, out: &mut BytesMut) {
        self.frame.usage(usage, out);
    }
}
