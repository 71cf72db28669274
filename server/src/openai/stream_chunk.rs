//! Writes the fields shared by all chunks of a streaming completion: the fields before `choices`, and
//! `usage`.

use super::endpoint::ReplyMetadata;
use super::generation::RequestGeneration;
use super::params::StreamOptions;
use crate::sse::escape;
use bytes::{BufMut, BytesMut};
use serde_json::json;
use std::io::Write;

/// Fields shared by all chunks of a stream, and for each choice whether a chunk has been sent.
pub(super) struct StreamChunkFields {
    /// JSON text of each chunk up to and including `"choices":[`, with the prefix `data: `.
    head: Vec<u8>,
    options: StreamOptions,
    started: Vec<bool>,
}

impl StreamChunkFields {
    /// Serialises the fields before `choices`; `object` is the value of the field `object`.
    pub(super) fn new(head: &ReplyMetadata, object: &str, options: StreamOptions) -> Self {
        let ReplyMetadata { id, created, model, fingerprint } = head;
        let mut head = BytesMut::from(&b"data: {\"id\":\""[..]);
        escape(id, &mut head);
        // Writing to memory cannot fail, so the result is ignored.
        let _ = write!(
            (&mut head).writer(),
            "\",\"object\":\"{object}\",\"created\":{created},\"model\":{},\
             \"system_fingerprint\":\"{fingerprint}\",\"choices\":[",
            json!(model)
        );
        Self { head: head.to_vec(), options, started: Vec::new() }
    }

    /// Whether the next chunk is the first one of the choice; later calls for the same choice return false.
    pub(super) fn is_first_chunk(&mut self, choice: usize) -> bool {
        if self.started.len() <= choice {
            self.started.resize(choice + 1, false);
        }
        !std::mem::replace(&mut self.started[choice], true)
    }

    /// Begins a chunk of one choice; the fields of the choice follow.
    pub(super) fn open(&self, choice: u32, out: &mut BytesMut) {
        out.put_slice(&self.head);
        let _ = write!(out.writer(), "{{\"index\":{choice},");
    }

    /// Ends a chunk: writes `usage` if every chunk must contain it.
    pub(super) fn close(&self, generation: &RequestGeneration, out: &mut BytesMut) {
        if self.options.continuous_usage {
            out.put_slice(b",\"usage\":");
            generation.usage().write(out);
        }
        out.put_slice(b"}\n\n");
    }

    /// Writes the final chunk with usage, statistics and no choices, if usage was requested.
    pub(super) fn usage(&self, generation: &RequestGeneration, out: &mut BytesMut) {
        if self.options.include_usage {
            out.put_slice(&self.head);
            out.put_slice(b"],\"usage\":");
            generation.usage().write(out);
            out.put_slice(generation.metrics_member().as_bytes());
            out.put_slice(b"}\n\n");
        }
    }
}
