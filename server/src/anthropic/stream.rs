//! Event sequence of a streamed message: `message_start`, events of the content blocks, `message_delta`,
//! `message_stop`.

use super::context_edits::AppliedContextEdits;
use super::error;
use super::reply::{AnthropicReplyFormatter, AnthropicUsage, ContentBlock, stop, tool_input};
use crate::api_error::ApiError;
use crate::openai::choice::{ChoiceDelta, ChoiceFinishReason};
use crate::openai::generation::RequestGeneration;
use crate::sse::SseEventWriter;
use bytes::{BufMut, BytesMut};
use serde::Serialize;
use serde_json::{Value, json};
use std::io::Write;
use text::OutputPiece;

/// Writes the SSE events of a streamed message.
pub(super) struct AnthropicEventWriter {
    reply: AnthropicReplyFormatter,
    started: bool,
    /// Index of the content block in progress (started, not yet stopped), or of the next content block if
    /// none is in progress.
    index: u32,
    open: Option<ContentBlockKind>,
    end: Option<ChoiceFinishReason>,
}

/// Kind of the content block in progress (after `content_block_start`, before `content_block_stop`).
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
enum ContentBlockKind {
    Thinking,
    Text,
    ToolUse,
}

/// JSON form of the field `delta` in a `content_block_delta` event.
#[derive(Serialize)]
#[serde(tag = "type")]
enum ContentBlockDelta<'a> {
    #[serde(rename = "thinking_delta")]
    Thinking { thinking: &'a str },
    #[serde(rename = "text_delta")]
    Text { text: &'a str },
    #[serde(rename = "input_json_delta")]
    InputJson { partial_json: &'a str },
}

/// JSON form of one SSE event; the name of the event is its `type` field.
#[derive(Serialize)]
#[serde(tag = "type", rename_all = "snake_case")]
enum MessageStreamEvent<'a> {
    MessageStart {
        message: super::reply::AnthropicMessage<'a>,
    },
    Ping,
    ContentBlockStart {
        index: u32,
        content_block: ContentBlock,
    },
    ContentBlockDelta {
        index: u32,
        delta: ContentBlockDelta<'a>,
    },
    ContentBlockStop {
        index: u32,
    },
    MessageDelta {
        delta: Value,
        usage: AnthropicUsage,
        #[serde(skip_serializing_if = "Option::is_none")]
        context_management: Option<&'a AppliedContextEdits>,
    },
    MessageStop,
}

impl MessageStreamEvent<'_> {
    fn name(&self) -> &'static str {
        match self {
            Self::MessageStart { .. } => "message_start",
            Self::Ping => "ping",
            Self::ContentBlockStart { .. } => "content_block_start",
            Self::ContentBlockDelta { .. } => "content_block_delta",
            Self::ContentBlockStop { .. } => "content_block_stop",
            Self::MessageDelta { .. } => "message_delta",
            Self::MessageStop => "message_stop",
        }
    }

    /// Appends this event to `out`. Errors are ignored, because writing to memory and serialising these
    /// types cannot fail.
    fn write(&self, out: &mut BytesMut) {
        let _ = write!(out.writer(), "event: {}\ndata: ", self.name());
        let _ = serde_json::to_writer(out.writer(), self);
        out.put_slice(b"\n\n");
    }
}

impl AnthropicEventWriter {
    pub(super) fn new(reply: AnthropicReplyFormatter) -> Self {
        Self { reply, started: false, index: 0, open: None, end: None }
    }

    fn close(&mut self, out: &mut BytesMut) {
        if self.open.take().is_some() {
            MessageStreamEvent::ContentBlockStop { index: self.index }.write(out);
            self.index += 1;
        }
    }

    /// Starts a content block of kind `kind`, unless a block of this kind is in progress. Every tool use
    /// starts a new block.
    fn enter(&mut self, kind: ContentBlockKind, content_block: ContentBlock, out: &mut BytesMut) {
        if self.open != Some(kind) || kind == ContentBlockKind::ToolUse {
            self.close(out);
            MessageStreamEvent::ContentBlockStart { index: self.index, content_block }.write(out);
            self.open = Some(kind);
        }
    }

    fn piece(&mut self, piece: OutputPiece<'_>, out: &mut BytesMut) {
        let delta = match piece {
            OutputPiece::Reasoning(text) => {
                let block = ContentBlock::Thinking { thinking: String::new(), signature: "" };
                self.enter(ContentBlockKind::Thinking, block, out);
                ContentBlockDelta::Thinking { thinking: text }
            }
            OutputPiece::Content(text) => {
                self.enter(ContentBlockKind::Text, ContentBlock::Text { text: String::new() }, out);
                ContentBlockDelta::Text { text }
            }
            OutputPiece::Call { index, name, .. } => {
                let (id, name) = (self.reply.tool_call_ids.id(0, index, name), name.to_owned());
                let block = ContentBlock::ToolUse { id, name, input: tool_input("") };
                return self.enter(ContentBlockKind::ToolUse, block, out);
            }
            OutputPiece::Arguments { text, .. } => {
                ContentBlockDelta::InputJson { partial_json: text }
            }
            OutputPiece::End { .. } | OutputPiece::Broken { .. } => return self.close(out),
        };
        MessageStreamEvent::ContentBlockDelta { index: self.index, delta }.write(out);
    }
}

impl SseEventWriter for AnthropicEventWriter {
    fn delta(
        &mut self,
        _: u32,
        delta: &ChoiceDelta,
        generation: &RequestGeneration,
        out: &mut BytesMut,
    ) {
        if !std::mem::replace(&mut self.started, true) {
            let mut usage = generation.usage();
            usage.completion_tokens = 0;
            let message = self.reply.body(Vec::new(), None, &usage);
            MessageStreamEvent::MessageStart { message }.write(out);
            MessageStreamEvent::Ping.write(out);
        }
        for piece in delta.pieces.iter() {
            self.piece(piece, out);
        }
        if let Some(end) = &delta.end {
            self.end = Some(end.clone());
        }
    }

    fn end(&mut self, generation: &RequestGeneration, out: &mut BytesMut) {
        self.close(out);
        let (reason, sequence) = self.end.as_ref().map_or((None, None), stop);
        let delta = json!({"stop_reason": reason, "stop_sequence": sequence});
        let context_management = self.reply.context_edits.as_ref();
        let usage = (&generation.usage()).into();
        MessageStreamEvent::MessageDelta { delta, usage, context_management }.write(out);
        MessageStreamEvent::MessageStop.write(out);
    }

    fn fail(&mut self, error: &ApiError, out: &mut BytesMut) {
        let _ = write!(out.writer(), "event: error\ndata: {}\n\n", error::body(error));
    }

    fn stream_terminator(&self) -> &'static [u8] {
        b""
    }

    fn keep_alive_bytes(&self) -> &'static [u8] {
        b"event: ping\ndata: {\"type\":\"ping\"}\n\n"
    }
}
