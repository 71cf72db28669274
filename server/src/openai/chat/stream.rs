//! Writes the chunks of streaming chat completions.

use super::ReasoningField;
use super::reply::ChatCompletionReply;
use crate::openai::choice::ChoiceDelta;
use crate::openai::generation::RequestGeneration;
use crate::openai::logprobs::{ChoiceLogprobs, LogprobListWriter, LogprobsFormat};
use crate::openai::stream_chunk::StreamChunkFields;
use crate::openai::usage::UsageInfo;
use crate::sse::{ChunkWriter, escape, write_end};
use bytes::{BufMut, BytesMut};
use serde_json::json;
use std::io::Write;
use text::OutputPiece;

/// Writes the chunks of a streaming reply.
pub(super) struct ChatChunkWriter {
    reply: ChatCompletionReply,
    chunk_fields: StreamChunkFields,
}

impl ChatChunkWriter {
    pub(super) fn new(reply: ChatCompletionReply) -> Self {
        let chunk_fields =
            StreamChunkFields::new(&reply.head, "chat.completion.chunk", reply.stream_options);
        Self { reply, chunk_fields }
    }

    /// Writes the first chunk of a choice, which contains the role and the echoed message if there is one.
    fn write_role_chunk(
        &mut self,
        choice: u32,
        generation: &RequestGeneration,
        out: &mut BytesMut,
    ) {
        if !self.chunk_fields.is_first_chunk(choice as usize) {
            return;
        }
        self.open(choice, out);
        out.put_slice(b"\"role\":\"assistant\",\"content\":\"");
        escape(&self.reply.echo, out);
        out.put_slice(b"\"},\"logprobs\":null,\"finish_reason\":null}]");
        if let Some(ids) = &self.reply.prompt_ids {
            let _ = write!(out.writer(), ",\"prompt_token_ids\":{}", json!(ids));
        }
        self.chunk_fields.close(generation, out);
    }

    /// Whether a piece of the output is sent in a chunk. For a malformed call nothing more is sent: its
    /// earlier chunks cannot be retracted.
    fn is_streamed(&self, piece: &OutputPiece<'_>) -> bool {
        match piece {
            OutputPiece::Reasoning(_) => self.reply.reasoning.is_some(),
            OutputPiece::Content(_) | OutputPiece::Call { .. } | OutputPiece::Arguments { .. } => {
                true
            }
            OutputPiece::End { .. } | OutputPiece::Broken { .. } => false,
        }
    }

    /// Writes the members of a chunk's `delta` object for one piece of the output.
    fn write(&self, choice: u32, piece: OutputPiece<'_>, out: &mut BytesMut) {
        match piece {
            OutputPiece::Reasoning(text) => {
                let names = self.reply.reasoning.map_or(&[][..], ReasoningField::names);
                for (i, name) in names.iter().enumerate() {
                    let comma = if i > 0 { "," } else { "" };
                    let _ = write!(out.writer(), "{comma}\"{name}\":\"");
                    escape(text, out);
                    out.put_u8(b'"');
                }
            }
            OutputPiece::Content(text) => {
                out.put_slice(b"\"content\":\"");
                escape(text, out);
                out.put_u8(b'"');
            }
            OutputPiece::Call { index, name, .. } => {
                let id = self.reply.tool_call_ids.id(choice, index, name);
                let _ = write!(
                    out.writer(),
                    "\"tool_calls\":[{{\"index\":{index},\"id\":\"{id}\",\"type\":\"function\",\
                     \"function\":{{\"name\":{},\"arguments\":\"\"}}}}]",
                    json!(name)
                );
            }
            OutputPiece::Arguments { index, text } => {
                let _ = write!(
                    out.writer(),
                    "\"tool_calls\":[{{\"index\":{index},\"function\":{{\"arguments\":\""
                );
                escape(text, out);
                out.put_slice(b"\"}}]");
            }
            OutputPiece::End { .. } | OutputPiece::Broken { .. } => {}
        }
    }

    fn open(&self, choice: u32, out: &mut BytesMut) {
        self.chunk_fields.open(choice, out);
        out.put_slice(b"\"delta\":{");
    }
}

impl ChunkWriter for ChatChunkWriter {
    fn delta(
        &mut self,
        choice: u32,
        delta: &ChoiceDelta,
        generation: &RequestGeneration,
        out: &mut BytesMut,
    ) {
        self.write_role_chunk(choice, generation, out);
        let reply = &self.reply;
        let ids = reply.prompt_ids.is_some() && !delta.tokens.is_empty();
        let with_logprobs = reply.logprobs && !delta.logprobs.is_empty();
        let mut shown = delta.pieces.iter().filter(|piece| self.is_streamed(piece)).peekable();
        let has_content = shown.peek().is_some() || delta.has_textless_token || delta.end.is_some();
        if !has_content && !ids && !with_logprobs {
            return;
        }
        // Token ids and log-probabilities of all pieces are sent in the chunk of the last piece.
        let mut piece = shown.next();
        while let (Some(earlier), Some(_)) = (piece, shown.peek()) {
            self.open(choice, out);
            self.write(choice, earlier, out);
            out.put_slice(b"},\"logprobs\":null");
            write_end(None, out);
            out.put_slice(b"}]");
            self.chunk_fields.close(generation, out);
            piece = shown.next();
        }
        self.open(choice, out);
        if let Some(last) = piece {
            self.write(choice, last, out);
        }
        out.put_slice(b"},\"logprobs\":");
        if with_logprobs {
            let output = ChoiceLogprobs { output: &delta.logprobs, ..ChoiceLogprobs::default() };
            LogprobListWriter::new(LogprobsFormat::Chat, 0).write(&reply.tokens, output, out);
        } else {
            out.put_slice(b"null");
        }
        write_end(delta.end.as_ref(), out);
        if ids {
            let _ = write!(out.writer(), ",\"token_ids\":{}", json!(delta.tokens));
        }
        out.put_slice(b"}]");
        self.chunk_fields.close(generation, out);
    }

    fn end(&mut self, usage: &UsageInfo, out: &mut BytesMut) {
        self.chunk_fields.usage(usage, out);
    }
}
