//! Writes a streaming response as SSE events with sequence numbers from 0.

use super::events::{ResponseEventBody, write};
use super::items::{OutputItemContent, OutputItemStatus, ResponseOutputItem};
use super::reply::{ResponseStatus, ResponsesReplyFormatter, state};
use crate::api_error::ApiError;
use crate::openai::chat::custom_input::CustomToolInputDecoder;
use crate::openai::choice::ChoiceDelta;
use crate::openai::generation::RequestGeneration;
use crate::openai::usage::UsageInfo;
use crate::sse::SseEventWriter;
use bytes::BytesMut;
use std::mem;
use text::OutputPiece;

/// Writes the SSE events of a streaming response and builds its output items.
pub(super) struct ResponsesEventWriter {
    reply: ResponsesReplyFormatter,
    started: bool,
    number: u64,
    /// Output items whose events have all been written.
    output: Vec<ResponseOutputItem>,
    open: Option<ResponseOutputItem>,
    /// Decoder for the arguments of the custom tool call in progress.
    input_decoder: CustomToolInputDecoder,
    state: ResponseStatus,
}

impl ResponsesEventWriter {
    pub(super) fn new(reply: ResponsesReplyFormatter) -> Self {
        let (output, open, state) = (Vec::new(), None, ResponseStatus::Completed);
        let input_decoder = CustomToolInputDecoder::default();
        Self { reply, started: false, number: 0, output, open, input_decoder, state }
    }

    fn write_response_event(
        &mut self,
        kind: &str,
        state: ResponseStatus,
        usage: Option<&UsageInfo>,
        out: &mut BytesMut,
    ) {
        let response = Box::new(self.reply.body(state, &self.output, usage));
        write(kind, &mut self.number, ResponseEventBody::Response { response }, out);
    }

    /// Writes the SSE events for one piece of the parsed output (reasoning, content or part of a tool
    /// call).
    fn piece(&mut self, piece: OutputPiece<'_>, out: &mut BytesMut) {
        match piece {
            OutputPiece::Reasoning(text) | OutputPiece::Content(text) => {
                self.enter_text(matches!(piece, OutputPiece::Reasoning(_)), out);
                self.text(text, out);
            }
            OutputPiece::Call { index, name, .. } => {
                self.close(OutputItemStatus::Completed, out);
                self.input_decoder = CustomToolInputDecoder::default();
                let item_ids = &self.reply.item_ids;
                let call_id = item_ids.tool_call_ids.id(0, index, name);
                let (at, status) = (self.output.len(), OutputItemStatus::InProgress);
                let item = item_ids.call(at, call_id, name, String::new(), status);
                self.add(item, out);
            }
            OutputPiece::Arguments { text, .. } => self.arguments(text, out),
            OutputPiece::End { .. } => self.close(OutputItemStatus::Completed, out),
            OutputPiece::Broken { .. } => self.close(OutputItemStatus::Incomplete, out),
        }
    }

    fn add(&mut self, item: ResponseOutputItem, out: &mut BytesMut) {
        let body = ResponseEventBody::Item { output_index: self.output.len(), item: &item };
        write("response.output_item.added", &mut self.number, body, out);
        self.open = Some(item);
    }

    /// Starts a reasoning item or a message item, unless an item of the same kind is in progress.
    fn enter_text(&mut self, reasoning: bool, out: &mut BytesMut) {
        match (&self.open, reasoning) {
            (Some(ResponseOutputItem::Reasoning { .. }), true)
            | (Some(ResponseOutputItem::Message { .. }), false) => return,
            _ => self.close(OutputItemStatus::Completed, out),
        }
        let (output_index, status) = (self.output.len(), OutputItemStatus::InProgress);
        let content = Vec::new();
        let (item, part) = if reasoning {
            let id = self.reply.item_ids.reasoning(output_index);
            let item = ResponseOutputItem::Reasoning { id, summary: [], content, status };
            (item, OutputItemContent::ReasoningText { text: String::new() })
        } else {
            let id = self.reply.item_ids.message(output_index);
            let item = ResponseOutputItem::Message { id, role: "assistant", content, status };
            (item, OutputItemContent::output(String::new()))
        };
        self.add(item, out);
        let number = &mut self.number;
        if let Some(
            ResponseOutputItem::Reasoning { id, content, .. }
            | ResponseOutputItem::Message { id, content, .. },
        ) = &mut self.open
        {
            content.push(part.clone());
            let body =
                ResponseEventBody::Part { item_id: id, output_index, content_index: 0, part };
            write("response.content_part.added", number, body, out);
        }
    }

    /// Appends `delta` to the arguments of the tool call in progress.
    fn arguments(&mut self, delta: &str, out: &mut BytesMut) {
        let (output_index, number) = (self.output.len(), &mut self.number);
        match &mut self.open {
            Some(ResponseOutputItem::FunctionCall { id, arguments, .. }) => {
                arguments.push_str(delta);
                let body = ResponseEventBody::CallDelta { item_id: id, output_index, delta };
                write("response.function_call_arguments.delta", number, body, out);
            }
            Some(ResponseOutputItem::CustomToolCall { .. }) => {
                let text = self.input_decoder.push(delta);
                self.input(&text, out);
            }
            _ => {}
        }
    }

    /// Appends `delta` to the input of the custom tool call in progress.
    fn input(&mut self, delta: &str, out: &mut BytesMut) {
        let output_index = self.output.len();
        let Some(ResponseOutputItem::CustomToolCall { id, input, .. }) = &mut self.open else {
            return;
        };
        if !delta.is_empty() {
            input.push_str(delta);
            let body = ResponseEventBody::CallDelta { item_id: id, output_index, delta };
            write("response.custom_tool_call_input.delta", &mut self.number, body, out);
        }
    }

    /// Appends `delta` to the text of the reasoning item or message item in progress.
    fn text(&mut self, delta: &str, out: &mut BytesMut) {
        let (output_index, number) = (self.output.len(), &mut self.number);
        let Some(
            ResponseOutputItem::Reasoning { id, content, .. }
            | ResponseOutputItem::Message { id, content, .. },
        ) = &mut self.open
        else {
            return;
        };
        let (kind, logprobs) = match content.first_mut() {
            Some(OutputItemContent::OutputText { text, .. }) => {
                text.push_str(delta);
                ("response.output_text.delta", Some([]))
            }
            Some(OutputItemContent::ReasoningText { text }) => {
                text.push_str(delta);
                ("response.reasoning_text.delta", None)
            }
            None => return,
        };
        let (item_id, content_index) = (id.as_str(), 0);
        let body =
            ResponseEventBody::TextDelta { item_id, output_index, content_index, delta, logprobs };
        write(kind, number, body, out);
    }

    /// Ends the output item in progress and sets its status to `as_status`.
    fn close(&mut self, as_status: OutputItemStatus, out: &mut BytesMut) {
        let rest = mem::take(&mut self.input_decoder).finish();
        self.input(&rest, out);
        let Some(mut item) = self.open.take() else { return };
        let (output_index, content_index, number) = (self.output.len(), 0, &mut self.number);
        match &mut item {
            ResponseOutputItem::Reasoning { id, content, status, .. }
            | ResponseOutputItem::Message { id, content, status, .. } => {
                *status = as_status;
                let item_id = id.as_str();
                for part in content {
                    let (kind, body) = part_done(item_id, output_index, part);
                    write(kind, number, body, out);
                    let part = part.clone();
                    let body =
                        ResponseEventBody::Part { item_id, output_index, content_index, part };
                    write("response.content_part.done", number, body, out);
                }
            }
            ResponseOutputItem::FunctionCall { id, name, arguments, status, .. } => {
                *status = as_status;
                let body =
                    ResponseEventBody::ArgumentsDone { item_id: id, output_index, name, arguments };
                write("response.function_call_arguments.done", number, body, out);
            }
            ResponseOutputItem::CustomToolCall { id, input, status, .. } => {
                *status = as_status;
                let body = ResponseEventBody::InputDone { item_id: id, output_index, input };
                write("response.custom_tool_call_input.done", number, body, out);
            }
        }
        write(
            "response.output_item.done",
            number,
            ResponseEventBody::Item { output_index, item: &item },
            out,
        );
        self.output.push(item);
    }
}

/// Returns the type and body of the event for the end of a content part's text.
fn part_done<'a>(
    item_id: &'a str,
    output_index: usize,
    part: &'a OutputItemContent,
) -> (&'static str, ResponseEventBody<'a>) {
    let (kind, text, logprobs) = match part {
        OutputItemContent::OutputText { text, .. } => ("response.output_text.done", text, Some([])),
        OutputItemContent::ReasoningText { text } => ("response.reasoning_text.done", text, None),
    };
    let content_index = 0;
    (kind, ResponseEventBody::TextDone { item_id, output_index, content_index, text, logprobs })
}

impl SseEventWriter for ResponsesEventWriter {
    fn delta(&mut self, _: u32, delta: &ChoiceDelta, _: &RequestGeneration, out: &mut BytesMut) {
        if !mem::replace(&mut self.started, true) {
            self.write_response_event("response.created", ResponseStatus::InProgress, None, out);
            self.write_response_event(
                "response.in_progress",
                ResponseStatus::InProgress,
                None,
                out,
            );
        }
        for piece in delta.pieces.iter() {
            self.piece(piece, out);
        }
        if let Some(end) = &delta.end {
            self.state = state(end);
        }
    }

    fn end(&mut self, generation: &RequestGeneration, out: &mut BytesMut) {
        let usage = &generation.usage();
        let is_incomplete = self.state == ResponseStatus::Incomplete;
        if self.open.is_none() && self.output.is_empty() {
            // A response with an empty output still contains one message item.
            self.enter_text(false, out);
        }
        self.close(
            if is_incomplete { OutputItemStatus::Incomplete } else { OutputItemStatus::Completed },
            out,
        );
        let kind = match self.state {
            ResponseStatus::Incomplete => "response.incomplete",
            ResponseStatus::Failed => "response.failed",
            _ => "response.completed",
        };
        self.write_response_event(kind, self.state, Some(usage), out);
        let body = self.reply.body(self.state, &self.output, Some(usage));
        if let Ok(body) = serde_json::to_string(&body) {
            self.reply.store_response(&body, &self.output);
        }
        if self.state != ResponseStatus::Failed {
            self.reply.extend_conversation(&self.output);
        }
    }

    fn fail(&mut self, error: &ApiError, out: &mut BytesMut) {
        let response = Box::new(self.reply.failed(error, &self.output));
        write("response.failed", &mut self.number, ResponseEventBody::Response { response }, out);
    }

    fn stream_terminator(&self) -> &'static [u8] {
        b""
    }
}
