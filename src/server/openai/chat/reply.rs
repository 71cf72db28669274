//! Replies of chat completions, whole and in chunks.

use super::convert;
use crate::engine_client::Ticket;
use crate::server::app::{App, Serving};
use crate::server::error::ApiError;
use crate::server::fields::Fields;
use crate::server::openai::choice::Delta;
use crate::server::openai::collect::{Whole, collect, stop_reason};
use crate::server::openai::exchange::{Endpoint, FromHeaders, Prepared, ReplyHead};
use crate::server::openai::generation::Generation;
use crate::server::openai::logprobs::{self, Spelling};
use crate::server::openai::params::StreamOptions;
use crate::server::openai::usage::Usage;
use crate::server::sse::{ChunkWriter, escape, write_end};
use crate::text::Tokenizer;
use bytes::{BufMut, BytesMut};
use protocol::Token;
use serde_json::{Value, json};
use std::io::Write;
use std::sync::Arc;

/// Everything a reply needs besides tokens.
pub(super) struct Reply {
    pub(super) head: ReplyHead,
    pub(super) tokenizer: Arc<Tokenizer>,
    pub(super) spelling: Spelling,
    pub(super) logprobs: bool,
    pub(super) prompt_logprobs: bool,
    /// The last message of the assistant, if it shall be repeated.
    pub(super) echo: String,
    /// Ids of the prompt, if ids were asked for.
    pub(super) prompt_ids: Option<Vec<Token>>,
    pub(super) stream_options: StreamOptions,
}

impl Endpoint for Reply {
    type Chunks = Chunks;

    fn prepare(
        app: &App,
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
        let choice = |(index, whole): (usize, &Whole)| self.choice(index, whole);
        let choices: Vec<Value> = wholes.iter().enumerate().map(choice).collect();
        let mut usage = BytesMut::new();
        generation.usage().write(&mut usage);
        let ReplyHead { id, created, model, fingerprint } = &self.head;
        let mut reply = json!({
            "id": id,
            "object": "chat.completion",
            "created": created,
            "model": model,
            "system_fingerprint": fingerprint,
            "choices": choices,
            "usage": serde_json::from_slice::<Value>(&usage).unwrap_or_default(),
        });
        if self.prompt_logprobs {
            let entries = generation.prompt_logprobs(0);
            reply["prompt_logprobs"] = logprobs::prompt(&self.tokenizer, self.spelling, entries);
        }
        if let Some(ids) = &self.prompt_ids {
            reply["prompt_token_ids"] = json!(ids);
        }
        Ok(reply.to_string())
    }
}

impl Reply {
    fn choice(&self, index: usize, whole: &Whole) -> Value {
        let mut choice = json!({
            "index": index,
            "message": {"role": "assistant", "content": format!("{}{}", self.echo, whole.text)},
            "logprobs": Value::Null,
            "finish_reason": whole.end.name(),
            "stop_reason": stop_reason(&whole.end),
        });
        if self.logprobs {
            choice["logprobs"] = logprobs::chat(&self.tokenizer, self.spelling, &whole.logprobs);
        }
        if self.prompt_ids.is_some() {
            choice["token_ids"] = json!(whole.tokens);
        }
        choice
    }
}

/// Writes the chunks of a stream. The part of a chunk that never changes is written once.
pub(super) struct Chunks {
    reply: Reply,
    /// Up to and including `"choices":[`.
    head: Vec<u8>,
    begun: Vec<bool>,
}

impl Chunks {
    fn new(reply: Reply) -> Self {
        let ReplyHead { id, created, model, fingerprint } = &reply.head;
        let mut head = BytesMut::from(&b"data: {\"id\":\""[..]);
        escape(id, &mut head);
        // Writing to memory cannot fail.
        let _ = write!(
            (&mut head).writer(),
            "\",\"object\":\"chat.completion.chunk\",\"created\":{created},\"model\":{},\
             \"system_fingerprint\":\"{fingerprint}\",\"choices\":[",
            json!(model)
        );
        Self { reply, head: head.to_vec(), begun: Vec::new() }
    }

    /// The role chunk, once per choice, with the echo if there is one.
    fn begin(&mut self, choice: u32, all: &Generation, out: &mut BytesMut) {
        let index = choice as usize;
        if self.begun.len() <= index {
            self.begun.resize(index + 1, false);
        }
        if std::mem::replace(&mut self.begun[index], true) {
            return;
        }
        out.put_slice(&self.head);
        let _ = write!(
            out.writer(),
            "{{\"index\":{choice},\"delta\":{{\"role\":\"assistant\",\"content\":\""
        );
        escape(&self.reply.echo, out);
        out.put_slice(b"\"},\"logprobs\":null,\"finish_reason\":null}]");
        if let Some(ids) = &self.reply.prompt_ids {
            let _ = write!(out.writer(), ",\"prompt_token_ids\":{}", json!(ids));
        }
        self.close(all, out);
    }

    fn close(&self, all: &Generation, out: &mut BytesMut) {
        if self.reply.stream_options.continuous_usage {
            out.put_slice(b",\"usage\":");
            all.usage().write(out);
        }
        out.put_slice(b"}\n\n");
    }
}

impl ChunkWriter for Chunks {
    fn delta(&mut self, choice: u32, delta: &Delta, all: &Generation, out: &mut BytesMut) {
        self.begin(choice, all, out);
        let reply = &self.reply;
        let ids = reply.prompt_ids.is_some() && !delta.tokens.is_empty();
        let with_logprobs = reply.logprobs && !delta.logprobs.is_empty();
        let says = !delta.text.is_empty() || delta.textless || delta.end.is_some();
        if !says && !ids && !with_logprobs {
            return;
        }
        out.put_slice(&self.head);
        let _ = write!(out.writer(), "{{\"index\":{choice},\"delta\":{{");
        if !delta.text.is_empty() {
            out.put_slice(b"\"content\":\"");
            escape(&delta.text, out);
            out.put_u8(b'"');
        }
        out.put_slice(b"},\"logprobs\":");
        if with_logprobs {
            let value = logprobs::chat(&reply.tokenizer, reply.spelling, &delta.logprobs);
            let _ = write!(out.writer(), "{value}");
        } else {
            out.put_slice(b"null");
        }
        write_end(delta.end.as_ref(), out);
        if ids {
            let _ = write!(out.writer(), ",\"token_ids\":{}", json!(delta.tokens));
        }
        out.put_slice(b"}]");
        self.close(all, out);
    }

    fn end(&mut self, usage: &Usage, out: &mut BytesMut) {
        if self.reply.stream_options.include_usage {
            out.put_slice(&self.head);
            out.put_slice(b"],\"usage\":");
            usage.write(out);
            out.put_slice(b"}\n\n");
        }
    }
}
