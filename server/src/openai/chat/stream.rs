//! Writes the chunks of streaming chat completions.

use super::ReasoningFieldNames;
use super::delta_parts::{ChatDeltaPart, CustomToolCallDecoders};
use super::reply::ChatCompletionReplyFormatter;
use crate::openai::choice::ChoiceDelta;
use crate::openai::generation::RequestGeneration;
use crate::openai::logprobs::{ChoiceLogprobs, LogprobListWriter, LogprobsFormat};
use crate::openai::stream_chunk::StreamChunkFields;
use crate::sse::{SseEventWriter, escape, write_end};
use bytes::{BufMut, BytesMut};
use serde_json::json;
use std::fmt;
use std::io::Write;
use text::OutputPiece;

/// Writes the chunks of a streaming reply.
pub(super) struct ChatChunkWriter {
    reply: ChatCompletionReplyFormatter,
    decoders: CustomToolCallDecoders,
    chunk_fields: StreamChunkFields,
}

impl ChatChunkWriter {
    pub(super) fn new(reply: ChatCompletionReplyFormatter) -> Self {
        let chunk_fields =
            StreamChunkFields::new(&reply.head, "chat.completion.chunk", reply.stream_options);
        Self { reply, decoders: CustomToolCallDecoders::default(), chunk_fields }
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

    /// Returns the parts of the output to send for `delta`.
    fn parts<'a>(&mut self, choice: u32, delta: &'a ChoiceDelta) -> Vec<ChatDeltaPart<'a>> {
        let Self { reply, decoders, .. } = self;
        let is_shown = |piece: &OutputPiece<'_>| {
            reply.reasoning.is_some() || !matches!(piece, OutputPiece::Reasoning(_))
        };
        let pieces = delta.pieces.iter().filter(is_shown);
        pieces.filter_map(|piece| decoders.part(choice, piece, &reply.custom_tools)).collect()
    }

    /// Writes the members of a chunk's `delta` object for one part of the output.
    fn write(&self, choice: u32, part: &ChatDeltaPart<'_>, out: &mut BytesMut) {
        match part {
            ChatDeltaPart::Reasoning(text) => {
                let names = self.reply.reasoning.map_or(&[][..], ReasoningFieldNames::names);
                for (i, name) in names.iter().enumerate() {
                    let comma = if i > 0 { "," } else { "" };
                    write_text(format_args!("{comma}\"{name}\":"), text, out);
                }
            }
            ChatDeltaPart::Content(text) => write_text(format_args!("\"content\":"), text, out),
            ChatDeltaPart::Call { index, name, is_custom } => {
                let id = self.reply.tool_call_ids.id(choice, *index, name);
                let (kind, member) =
                    if *is_custom { ("custom", "input") } else { ("function", "arguments") };
                let _ = write!(
                    out.writer(),
                    "\"tool_calls\":[{{\"index\":{index},\"id\":\"{id}\",\"type\":\"{kind}\",\
                     \"{kind}\":{{\"name\":{},\"{member}\":\"\"}}}}]",
                    json!(name)
                );
            }
            ChatDeltaPart::Arguments { index, text } => {
                write_call_text(*index, "function", "arguments", text, out);
            }
            ChatDeltaPart::Input { index, text } => {
                write_call_text(*index, "custom", "input", text, out);
            }
        }
    }

    fn open(&self, choice: u32, out: &mut BytesMut) {
        self.chunk_fields.open(choice, out);
        out.put_slice(b"\"delta\":{");
    }
}

/// Writes the next part `text` of the arguments or the input of a tool call. `kind`: type of the call;
/// `member`: name of the member with the text.
fn write_call_text(index: u32, kind: &str, member: &str, text: &str, out: &mut BytesMut) {
    let call = format_args!("\"tool_calls\":[{{\"index\":{index},\"{kind}\":{{\"{member}\":");
    write_text(call, text, out);
    out.put_slice(b"}}]");
}

/// Writes `head`, followed by `text` as a quoted JSON string.
fn write_text(head: fmt::Arguments<'_>, text: &str, out: &mut BytesMut) {
    // Writing to memory cannot fail, so the result is ignored.
    let _ = out.writer().write_fmt(head);
    out.put_u8(b'"');
    escape(text, out);
    out.put_u8(b'"');
}

impl SseEventWriter for ChatChunkWriter {
    fn delta(
        &mut self,
        choice: u32,
        delta: &ChoiceDelta,
        generation: &RequestGeneration,
        out: &mut BytesMut,
    ) {
        self.write_role_chunk(choice, generation, out);
        let parts = self.parts(choice, delta);
        let reply = &self.reply;
        let ids = reply.prompt_ids.is_some() && !delta.tokens.is_empty();
        let with_logprobs = reply.logprobs && !delta.logprobs.is_empty();
        let has_content = !parts.is_empty() || delta.has_textless_token || delta.end.is_some();
        if !has_content && !ids && !with_logprobs {
            return;
        }
        // The chunk of the last part contains the token ids and log-probabilities of all parts.
        let (last, earlier) = match parts.split_last() {
            Some((last, earlier)) => (Some(last), earlier),
            None => (None, &[][..]),
        };
        for part in earlier {
            self.open(choice, out);
            self.write(choice, part, out);
            out.put_slice(b"},\"logprobs\":null");
            write_end(None, out);
            out.put_slice(b"}]");
            self.chunk_fields.close(generation, out);
        }
        self.open(choice, out);
        if let Some(last) = last {
            self.write(choice, last, out);
        }
        out.put_slice(b"},\"logprobs\":");
        if with_logprobs {
            let output = ChoiceLogprobs { output: &delta.logprobs, ..ChoiceLogprobs::default() };
            LogprobListWriter::new(LogprobsFormat::Chat, 0).write(&self.reply.tokens, output, out);
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

    fn end(&mut self, generation: &RequestGeneration, out: &mut BytesMut) {
        self.chunk_fields.usage(generation, out);
    }
}
