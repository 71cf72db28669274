//! SSE events of a streaming response: their JSON form and sequence numbers.

use super::items::{OutputItemContent, ResponseOutputItem};
use super::reply::ResponseObject;
use bytes::{BufMut, BytesMut};
use serde::Serialize;
use std::io::Write;

/// JSON fields of an event, in addition to its type and sequence number.
#[derive(Serialize)]
#[serde(untagged)]
pub(super) enum ResponseEventBody<'a> {
    Response {
        response: Box<ResponseObject<'a>>,
    },
    Item {
        output_index: usize,
        item: &'a ResponseOutputItem,
    },
    Part {
        item_id: &'a str,
        output_index: usize,
        content_index: u32,
        part: OutputItemContent,
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
    /// Next part of a function's arguments or of a custom tool's input.
    CallDelta {
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
    InputDone {
        item_id: &'a str,
        output_index: usize,
        input: &'a str,
    },
}

#[derive(Serialize)]
struct ResponseStreamEvent<'a> {
    r#type: &'a str,
    sequence_number: u64,
    #[serde(flatten)]
    body: ResponseEventBody<'a>,
}

/// Appends one SSE event. Errors are ignored, because writing to memory and serialising these types cannot
/// fail.
pub(super) fn write(kind: &str, number: &mut u64, body: ResponseEventBody<'_>, out: &mut BytesMut) {
    let _ = write!(out.writer(), "event: {kind}\ndata: ");
    let event = ResponseStreamEvent { r#type: kind, sequence_number: *number, body };
    let _ = serde_json::to_writer(out.writer(), &event);
    out.put_slice(b"\n\n");
    *number += 1;
}
