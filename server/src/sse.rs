//! Streaming reply of a generation as SSE events: chunks, keep-alive comments, errors and the end of the
//! stream.

use super::api_error::ApiError;
use super::openai::choice::{ChoiceDelta, ChoiceFinishReason, StopMatch};
use super::openai::generation::RequestGeneration;
use bytes::{BufMut, Bytes, BytesMut};
use http_body::{Body, Frame};
use std::convert::Infallible;
use std::future::Future;
use std::io::Write;
use std::pin::Pin;
use std::task::{Context, Poll};
use std::time::Duration;
use tokio::time::{Instant, Sleep, sleep_until};

/// Initial capacity in bytes of the buffer in which SSE events are written.
const BUFFER_BYTES: usize = 2_048;

/// Writes the SSE events of a streaming reply in the format of one API.
pub(crate) trait SseEventWriter: Send + Unpin {
    /// Appends the SSE events of one delta.
    fn delta(
        &mut self,
        choice: u32,
        delta: &ChoiceDelta,
        generation: &RequestGeneration,
        out: &mut BytesMut,
    );

    /// Appends the SSE events after the last delta.
    fn end(&mut self, generation: &RequestGeneration, out: &mut BytesMut);

    /// Appends the SSE event of an error that occurred after the first byte of the reply was sent.
    fn fail(&mut self, error: &ApiError, out: &mut BytesMut) {
        out.put_slice(b"data: ");
        out.put_slice(error.body().as_bytes());
        out.put_slice(b"\n\n");
    }

    /// Returns the bytes that end the stream: `[DONE]`, unless the API has no such event.
    fn stream_terminator(&self) -> &'static [u8] {
        b"data: [DONE]\n\n"
    }

    /// Returns an SSE comment, which keeps the connection of an idle stream open.
    fn keep_alive_bytes(&self) -> &'static [u8] {
        b": keep-alive\n\n"
    }
}

/// Body of a streaming reply. Dropping it aborts the request.
pub(crate) struct SseBody<W> {
    generation: RequestGeneration,
    writer: W,
    out: BytesMut,
    state: SseBodyState,
    keep_alive: Option<KeepAliveTimer>,
}

#[derive(Debug, PartialEq, Eq)]
enum SseBodyState {
    Open,
    Done,
}

/// Keep-alive timer of a stream. It is reset only when it fires, so that writing a token needs no timer
/// operation.
struct KeepAliveTimer {
    interval: Duration,
    last_write: Instant,
    timer: Pin<Box<Sleep>>,
}

impl<W: SseEventWriter> SseBody<W> {
    /// Creates a body. Whenever nothing is written for `keep_alive` (zero = never), the body sends an SSE
    /// comment.
    pub(crate) fn new(generation: RequestGeneration, writer: W, keep_alive: Duration) -> Self {
        let keep_alive = (!keep_alive.is_zero()).then(|| {
            let now = Instant::now();
            let timer = Box::pin(sleep_until(now + keep_alive));
            KeepAliveTimer { interval: keep_alive, last_write: now, timer }
        });
        let out = BytesMut::with_capacity(BUFFER_BYTES);
        Self { generation, writer, out, state: SseBodyState::Open, keep_alive }
    }

    /// Writes the deltas received so far, and the end of the stream if the generation has ended.
    fn write_events(&mut self) {
        let (writer, out) = (&mut self.writer, &mut self.out);
        self.generation.drain(|choice, delta, all| writer.delta(choice, delta, all, out));
        if !self.generation.has_ended() {
            return;
        }
        match self.generation.take_request_error() {
            Some(error) => writer.fail(&error, out),
            None => writer.end(&self.generation, out),
        }
        out.put_slice(writer.stream_terminator());
        self.state = SseBodyState::Done;
    }
}

impl<W: SseEventWriter> Body for SseBody<W> {
    type Data = Bytes;
    type Error = Infallible;

    fn poll_frame(
        self: Pin<&mut Self>,
        cx: &mut Context<'_>,
    ) -> Poll<Option<Result<Frame<Bytes>, Infallible>>> {
        let this = self.get_mut();
        if this.state == SseBodyState::Done {
            return Poll::Ready(None);
        }
        while this.generation.poll_events(cx).is_ready() {
            this.write_events();
            if !this.out.is_empty() {
                if let Some(keep_alive) = &mut this.keep_alive {
                    keep_alive.last_write = Instant::now();
                }
                return Poll::Ready(Some(Ok(Frame::data(this.out.split().freeze()))));
            }
        }
        let due = this.keep_alive.as_mut().map(|keep_alive| keep_alive.poll(cx));
        if due == Some(Poll::Ready(())) {
            let comment = Bytes::from_static(this.writer.keep_alive_bytes());
            return Poll::Ready(Some(Ok(Frame::data(comment))));
        }
        Poll::Pending
    }

    fn is_end_stream(&self) -> bool {
        self.state == SseBodyState::Done
    }
}

impl KeepAliveTimer {
    /// Ready if nothing has been written for one keep-alive interval.
    fn poll(&mut self, cx: &mut Context<'_>) -> Poll<()> {
        while self.timer.as_mut().poll(cx).is_ready() {
            let now = Instant::now();
            let due = self.last_write + self.interval;
            let is_idle = due <= now;
            if is_idle {
                self.last_write = now;
            }
            self.timer.as_mut().reset(self.last_write + self.interval);
            if is_idle {
                return Poll::Ready(());
            }
        }
        Poll::Pending
    }
}

/// Appends `text` with the escapes needed inside a JSON string.
pub(crate) fn escape(text: &str, out: &mut BytesMut) {
    const HEX: &[u8; 16] = b"0123456789abcdef";
    let bytes = text.as_bytes();
    let mut from = 0;
    for (at, &byte) in bytes.iter().enumerate() {
        let short = match byte {
            b'"' => b'"',
            b'\\' => b'\\',
            b'\n' => b'n',
            b'\r' => b'r',
            b'\t' => b't',
            0..=0x1f => 0,
            _ => continue,
        };
        out.put_slice(&bytes[from..at]);
        from = at + 1;
        if short == 0 {
            let low = HEX[usize::from(byte & 15)];
            out.put_slice(&[b'\\', b'u', b'0', b'0', b'0' + (byte >> 4), low]);
        } else {
            out.put_slice(&[b'\\', short]);
        }
    }
    out.put_slice(&bytes[from..]);
}

/// Appends the fields `finish_reason` and `stop_reason`.
pub(crate) fn write_end(end: Option<&ChoiceFinishReason>, out: &mut BytesMut) {
    let Some(end) = end else {
        return out.put_slice(b",\"finish_reason\":null,\"stop_reason\":null");
    };
    let _ = write!(out.writer(), ",\"finish_reason\":\"{}\",\"stop_reason\":", end.name());
    match end {
        ChoiceFinishReason::Stop(StopMatch::Id(id))
        | ChoiceFinishReason::Calls(StopMatch::Id(id)) => {
            let _ = write!(out.writer(), "{id}");
        }
        ChoiceFinishReason::Stop(StopMatch::Text(text))
        | ChoiceFinishReason::Calls(StopMatch::Text(text)) => {
            out.put_u8(b'"');
            escape(text, out);
            out.put_u8(b'"');
        }
        _ => out.put_slice(b"null"),
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn escaped_text_round_trips() {
        let text: String =
            (0..0x30).filter_map(char::from_u32).chain("é\u{2028}\"\\x".chars()).collect();
        let mut out = BytesMut::new();
        out.put_u8(b'"');
        escape(&text, &mut out);
        out.put_u8(b'"');
        assert_eq!(serde_json::from_slice::<String>(&out).unwrap(), text);
    }
}
