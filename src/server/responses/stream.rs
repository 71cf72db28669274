//! The typed events of a streamed response, numbered from 0.

use super::items::{Content, Item, Status};
use super::reply::{Reply, ResponseBody, State, state};
use crate::server::error::ApiError;
use crate::server::openai::choice::Delta;
use crate::server::openai::generation::Generation;
use crate::server::openai::usage::Usage;
use crate::server::sse::ChunkWriter;
use crate::text::Piece;
use bytes::{BufMut, BytesMut};
use serde::Serialize;
use std::io::Write;

/// Writes the events and puts the items together.
pub(super) struct Events {
    reply: Reply,
    begun: bool,
    number: u64,
    /// Finished items.
    output: Vec<Item>,
    open: Option<Item>,
    state: State,
}

/// What an event says besides its type and number.
#[derive(Serialize)]
#[serde(untagged)]
enum Said<'a> {
    Response {
        response: Box<ResponseBody<'a>>,
    },
    Item {
        output_index: usize,
        item: &'a Item,
    },
    Part {
        item_id: &'a str,
        output_index: usize,
        content_index: u32,
        part: Content,
    },
    TextDelta {
        item_id: &'a str,
        output_index: usize,
        content_index: u32,
        delta: &'a str,
        #[serde(skip_serializing_if = "Option::is_none")]
        logprobs: Option<[(); 0]>,
    },
    TextDone {
        item_id: &'a str,
        output_index: usize,
        content_index: u32,
        text: &'a str,
        #[serde(skip_serializing_if = "Option::is_none")]
        logprobs: Option<[(); 0]>,
    },
    ArgumentsDelta {
        item_id: &'a str,
        output_index: usize,
        delta: &'a str,
    },
    ArgumentsDone {
        item_id: &'a str,
        output_index: usize,
        name: &'a str,
        arguments: &'a str,
    },
}

#[derive(Serialize)]
struct Event<'a> {
    r#type: &'a str,
    sequence_number: u64,
    #[serde(flatten)]
    said: Said<'a>,
}

/// Appends one event. Neither writing to memory nor giving it a JSON form can fail.
fn write(kind: &str, number: &mut u64, said: Said<'_>, out: &mut BytesMut) {
    let _ = write!(out.writer(), "event: {kind}\ndata: ");
    let event = Event { r#type: kind, sequence_number: *number, said };
    let _ = serde_json::to_writer(out.writer(), &event);
    out.put_slice(b"\n\n");
    *number += 1;
}

impl Events {
    pub(super) fn new(reply: Reply) -> Self {
        let (output, open, state) = (Vec::new(), None, State::Completed);
        Self { reply, begun: false, number: 0, output, open, state }
    }

    fn whole(&mut self, kind: &str, state: State, usage: Option<&Usage>, out: &mut BytesMut) {
        let response = Box::new(self.reply.body(state, &self.output, usage));
        write(kind, &mut self.number, Said::Response { response }, out);
    }

    fn piece(&mut self, piece: Piece<'_>, out: &mut BytesMut) {
        match piece {
            Piece::Reasoning(text) | Piece::Content(text) => {
                self.enter_text(matches!(piece, Piece::Reasoning(_)), out);
                self.text(text, out);
            }
            Piece::Call { index, name, .. } => {
                self.close(Status::Completed, out);
                let item = Item::FunctionCall {
                    id: self.reply.names.call(self.output.len()),
                    call_id: self.reply.names.calls.id(0, index),
                    name: name.to_owned(),
                    arguments: String::new(),
                    status: Status::InProgress,
                };
                self.add(item, out);
            }
            Piece::Arguments { text, .. } => {
                let (output_index, number) = (self.output.len(), &mut self.number);
                if let Some(Item::FunctionCall { id, arguments, .. }) = &mut self.open {
                    arguments.push_str(text);
                    let said = Said::ArgumentsDelta { item_id: id, output_index, delta: text };
                    write("response.function_call_arguments.delta", number, said, out);
                }
            }
            Piece::End { .. } => self.close(Status::Completed, out),
            Piece::Broken { .. } => self.close(Status::Incomplete, out),
        }
    }

    fn add(&mut self, item: Item, out: &mut BytesMut) {
        let said = Said::Item { output_index: self.output.len(), item: &item };
        write("response.output_item.added", &mut self.number, said, out);
        self.open = Some(item);
    }

    /// Makes sure that reasoning or a message is open.
    fn enter_text(&mut self, reasoning: bool, out: &mut BytesMut) {
        match (&self.open, reasoning) {
            (Some(Item::Reasoning { .. }), true) | (Some(Item::Message { .. }), false) => return,
            _ => self.close(Status::Completed, out),
        }
        let place = self.output.len();
        let (item, part) = if reasoning {
            let (id, content) = (self.reply.names.reasoning(place), Vec::new());
            let item = Item::Reasoning { id, summary: [], content, status: Status::InProgress };
            (item, Content::ReasoningText { text: String::new() })
        } else {
            let id = self.reply.names.message(place);
            let status = Status::InProgress;
            let item = Item::Message { id, role: "assistant", content: Vec::new(), status };
            (item, Content::output(String::new()))
        };
        self.add(item, out);
        let number = &mut self.number;
        if let Some(Item::Reasoning { id, content, .. } | Item::Message { id, content, .. }) =
            &mut self.open
        {
            content.push(part.clone());
            let said = Said::Part { item_id: id, output_index: place, content_index: 0, part };
            write("response.content_part.added", number, said, out);
        }
    }

    fn text(&mut self, delta: &str, out: &mut BytesMut) {
        let (output_index, number) = (self.output.len(), &mut self.number);
        let Some(Item::Reasoning { id, content, .. } | Item::Message { id, content, .. }) =
            &mut self.open
        else {
            return;
        };
        let (kind, logprobs) = match content.first_mut() {
            Some(Content::OutputText { text, .. }) => {
                text.push_str(delta);
                ("response.output_text.delta", Some([]))
            }
            Some(Content::ReasoningText { text }) => {
                text.push_str(delta);
                ("response.reasoning_text.delta", None)
            }
            None => return,
        };
        let (item_id, content_index) = (id.as_str(), 0);
        let said = Said::TextDelta { item_id, output_index, content_index, delta, logprobs };
        write(kind, number, said, out);
    }

    /// Ends the item that is open.
    fn close(&mut self, as_status: Status, out: &mut BytesMut) {
        let Some(mut item) = self.open.take() else { return };
        let (output_index, content_index, number) = (self.output.len(), 0, &mut self.number);
        match &mut item {
            Item::Reasoning { id, content, status, .. }
            | Item::Message { id, content, status, .. } => {
                *status = as_status;
                let item_id = id.as_str();
                for part in content {
                    let (kind, text, logprobs) = match part {
                        Content::OutputText { text, .. } => ("output_text", text, Some([])),
                        Content::ReasoningText { text } => ("reasoning_text", text, None),
                    };
                    let kind = format!("response.{kind}.done");
                    let said =
                        Said::TextDone { item_id, output_index, content_index, text, logprobs };
                    write(&kind, number, said, out);
                    let part = part.clone();
                    let said = Said::Part { item_id, output_index, content_index, part };
                    write("response.content_part.done", number, said, out);
                }
            }
            Item::FunctionCall { id, name, arguments, status, .. } => {
                *status = as_status;
                let said = Said::ArgumentsDone { item_id: id, output_index, name, arguments };
                write("response.function_call_arguments.done", number, said, out);
            }
        }
        write("response.output_item.done", number, Said::Item { output_index, item: &item }, out);
        self.output.push(item);
    }
}

impl ChunkWriter for Events {
    fn delta(&mut self, _: u32, delta: &Delta, _: &Generation, out: &mut BytesMut) {
        if !std::mem::replace(&mut self.begun, true) {
            self.whole("response.created", State::InProgress, None, out);
            self.whole("response.in_progress", State::InProgress, None, out);
        }
        for piece in delta.pieces.iter() {
            self.piece(piece, out);
        }
        if let Some(end) = &delta.end {
            self.state = state(end);
        }
    }

    fn end(&mut self, usage: &Usage, out: &mut BytesMut) {
        let cut = self.state == State::Incomplete;
        if self.open.is_none() && self.output.is_empty() {
            // An answer without a word is still a message.
            self.enter_text(false, out);
        }
        self.close(if cut { Status::Incomplete } else { Status::Completed }, out);
        let kind = match self.state {
            State::Incomplete => "response.incomplete",
            State::Failed => "response.failed",
            _ => "response.completed",
        };
        self.whole(kind, self.state, Some(usage), out);
        let body = self.reply.body(self.state, &self.output, Some(usage));
        if let Ok(body) = serde_json::to_string(&body) {
            self.reply.keep(&body, &self.output);
        }
    }

    fn fail(&mut self, error: &ApiError, out: &mut BytesMut) {
        let response = Box::new(self.reply.failed(error, &self.output));
        write("response.failed", &mut self.number, Said::Response { response }, out);
    }

    fn last(&self) -> &'static [u8] {
        b""
    }
}
