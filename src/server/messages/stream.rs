//! The event sequence of a streamed message: `message_start`, blocks, `message_delta`, `message_stop`.

use super::error;
use super::reply::{Block, Reply, UsageBody, stop};
use crate::server::error::ApiError;
use crate::server::openai::choice::{Delta, End};
use crate::server::openai::generation::Generation;
use crate::server::openai::usage::Usage;
use crate::server::sse::ChunkWriter;
use crate::text::Piece;
use bytes::{BufMut, BytesMut};
use serde::Serialize;
use serde_json::{Value, json};
use std::io::Write;

/// Writes the events.
pub(super) struct Events {
    reply: Reply,
    begun: bool,
    /// Index of the block that is open, or of the next one.
    index: u32,
    open: Option<Kind>,
    end: Option<End>,
}

/// Kind of a block.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
enum Kind {
    Thinking,
    Text,
    ToolUse,
}

/// What a block has become longer by.
#[derive(Serialize)]
#[serde(tag = "type")]
enum Part<'a> {
    #[serde(rename = "thinking_delta")]
    Thinking { thinking: &'a str },
    #[serde(rename = "text_delta")]
    Text { text: &'a str },
    #[serde(rename = "input_json_delta")]
    InputJson { partial_json: &'a str },
}

/// One event; its name is its type.
#[derive(Serialize)]
#[serde(tag = "type", rename_all = "snake_case")]
enum Event<'a> {
    MessageStart { message: super::reply::MessageBody<'a> },
    Ping,
    ContentBlockStart { index: u32, content_block: Block },
    ContentBlockDelta { index: u32, delta: Part<'a> },
    ContentBlockStop { index: u32 },
    MessageDelta { delta: Value, usage: UsageBody },
    MessageStop,
}

impl Event<'_> {
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

    /// Appends the event. Neither writing to memory nor giving it a JSON form can fail.
    fn write(&self, out: &mut BytesMut) {
        let _ = write!(out.writer(), "event: {}\ndata: ", self.name());
        let _ = serde_json::to_writer(out.writer(), self);
        out.put_slice(b"\n\n");
    }
}

impl Events {
    pub(super) fn new(reply: Reply) -> Self {
        Self { reply, begun: false, index: 0, open: None, end: None }
    }

    fn close(&mut self, out: &mut BytesMut) {
        if self.open.take().is_some() {
            Event::ContentBlockStop { index: self.index }.write(out);
            self.index += 1;
        }
    }

    /// Makes sure that a block of this kind is open.
    fn enter(&mut self, kind: Kind, content_block: Block, out: &mut BytesMut) {
        if self.open != Some(kind) || kind == Kind::ToolUse {
            self.close(out);
            Event::ContentBlockStart { index: self.index, content_block }.write(out);
            self.open = Some(kind);
        }
    }

    fn piece(&mut self, piece: Piece<'_>, out: &mut BytesMut) {
        let delta = match piece {
            Piece::Reasoning(text) => {
                let block = Block::Thinking { thinking: String::new(), signature: "" };
                self.enter(Kind::Thinking, block, out);
                Part::Thinking { thinking: text }
            }
            Piece::Content(text) => {
                self.enter(Kind::Text, Block::Text { text: String::new() }, out);
                Part::Text { text }
            }
            Piece::Call { index, name, .. } => {
                let (id, name) = (self.reply.names.id(0, index), name.to_owned());
                let block = Block::ToolUse { id, name, input: json!({}) };
                return self.enter(Kind::ToolUse, block, out);
            }
            Piece::Arguments { text, .. } => Part::InputJson { partial_json: text },
            Piece::End { .. } | Piece::Broken { .. } => return self.close(out),
        };
        Event::ContentBlockDelta { index: self.index, delta }.write(out);
    }
}

impl ChunkWriter for Events {
    fn delta(&mut self, _: u32, delta: &Delta, all: &Generation, out: &mut BytesMut) {
        if !std::mem::replace(&mut self.begun, true) {
            let mut usage = all.usage();
            usage.completion_tokens = 0;
            let message = self.reply.body(Vec::new(), None, &usage);
            Event::MessageStart { message }.write(out);
            Event::Ping.write(out);
        }
        for piece in delta.pieces.iter() {
            self.piece(piece, out);
        }
        if let Some(end) = &delta.end {
            self.end = Some(end.clone());
        }
    }

    fn end(&mut self, usage: &Usage, out: &mut BytesMut) {
        self.close(out);
        let (reason, sequence) = self.end.as_ref().map_or((None, None), stop);
        let delta = json!({"stop_reason": reason, "stop_sequence": sequence});
        Event::MessageDelta { delta, usage: usage.into() }.write(out);
        Event::MessageStop.write(out);
    }

    fn fail(&mut self, error: &ApiError, out: &mut BytesMut) {
        let _ = write!(out.writer(), "event: error\ndata: {}\n\n", error::body(error));
    }

    fn last(&self) -> &'static [u8] {
        b""
    }

    fn sign_of_life(&self) -> &'static [u8] {
        b"event: ping\ndata: {\"type\":\"ping\"}\n\n"
    }
}
