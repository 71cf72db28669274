//! Buffers a non-streaming reply as text and log-probabilities. Log-probabilities are serialised only while
//! the client reads the reply, because their JSON text is larger than the values.

use super::logprobs::{ChoiceLogprobs, LogprobListWriter, LogprobsFormat, TokenFormatter};
use crate::piece_body::{IncrementalBodyWriter, body_of};
use axum::body::Body;
use bytes::{BufMut, Bytes, BytesMut};
use engine::QueuedBytesPermit;
use protocol::{Token, TokenLogprobs};
use std::collections::VecDeque;
use std::mem;
use std::sync::Arc;

/// Log-probabilities of one choice, stored until they are serialised.
#[derive(Debug, Default)]
pub(crate) struct BufferedLogprobs {
    /// Token ids of the prompt if its tokens are listed before the output (`echo`), else empty.
    pub echoed: Arc<[Token]>,
    /// Entries of the prompt tokens from the second token on; the first token has no log-probability.
    pub prompt: Vec<TokenLogprobs>,
    /// Entries of the output tokens.
    pub output: Vec<TokenLogprobs>,
}

/// Part of a buffered reply.
#[derive(Debug)]
enum BufferedReplyPart {
    Text(Bytes),
    Lists { writer: LogprobListWriter, buffered: Arc<BufferedLogprobs> },
}

/// Reply that is built in order, and then serialised in pieces while the client reads it. The memory of
/// each part (text or log-probabilities) is freed once the part is serialised.
#[derive(Debug)]
pub(crate) struct BufferedReply {
    /// Text after the last list of log-probabilities.
    pub text: BytesMut,
    names: TokenFormatter,
    parts: VecDeque<BufferedReplyPart>,
}

impl BufferedReply {
    /// Creates an empty reply; `names` formats the tokens.
    pub(crate) fn new(names: TokenFormatter) -> Self {
        Self { text: BytesMut::new(), names, parts: VecDeque::new() }
    }

    /// Appends log-probabilities in the JSON form `format`.
    pub(crate) fn list(&mut self, format: LogprobsFormat, buffered: &Arc<BufferedLogprobs>) {
        self.end_text();
        let writer = LogprobListWriter::new(format, 0);
        self.parts.push_back(BufferedReplyPart::Lists { writer, buffered: Arc::clone(buffered) });
    }

    /// Returns the response body, which holds the request's `memory_reservation` until the body is dropped.
    pub(crate) fn into_body(mut self, memory_reservation: QueuedBytesPermit) -> Body {
        if self.parts.is_empty() {
            return Body::from(self.text.freeze());
        }
        self.end_text();
        body_of(self, memory_reservation)
    }

    fn end_text(&mut self) {
        self.parts.push_back(BufferedReplyPart::Text(mem::take(&mut self.text).freeze()));
    }
}

impl IncrementalBodyWriter for BufferedReply {
    fn write(&mut self, bytes: usize, out: &mut BytesMut) -> bool {
        let end = out.len() + bytes;
        while out.len() < end {
            let continues = match self.parts.front_mut() {
                None => return false,
                Some(BufferedReplyPart::Text(text)) => {
                    let len = text.len().min(end - out.len());
                    out.put_slice(&text.split_to(len));
                    !text.is_empty()
                }
                Some(BufferedReplyPart::Lists { writer, buffered }) => {
                    let BufferedLogprobs { echoed, prompt, output } = &**buffered;
                    writer.step(&self.names, ChoiceLogprobs { echoed, prompt, output }, out)
                }
            };
            if !continues {
                self.parts.pop_front();
            }
        }
        !self.parts.is_empty()
    }
}

#[cfg(test)]
mod tests {
    use super::super::logprob_values::{entries, names};
    use super::super::logprobs::TokenFormat;
    use super::*;
    use engine::{AdmissionController, AdmissionLimits};
    use futures::FutureExt;
    use http_body::Body as _;
    use http_body_util::BodyExt;

    impl BufferedReply {
        /// Returns the whole reply text, serialised in pieces of about `bytes` bytes.
        pub(in crate::openai) fn into_text(mut self, bytes: usize) -> String {
            self.end_text();
            let mut out = BytesMut::new();
            while self.write(bytes, &mut out) {}
            String::from_utf8(out.to_vec()).unwrap()
        }
    }

    fn reply(tokens: usize) -> BufferedReply {
        let mut reply = BufferedReply::new(names(TokenFormat::Text));
        let output = entries(tokens, 20);
        let buffered = Arc::new(BufferedLogprobs { output, ..BufferedLogprobs::default() });
        for format in [LogprobsFormat::Chat, LogprobsFormat::Text] {
            reply.text.put_slice(b"some text, ");
            reply.list(format, &buffered);
        }
        reply.text.put_slice(b"and the end");
        reply
    }

    fn admission() -> Arc<AdmissionController> {
        AdmissionController::new(AdmissionLimits { requests: 1, prefill_tokens: 1, bytes: 10 })
    }

    #[test]
    fn text_is_independent_of_piece_size() {
        let whole = reply(40).into_text(1 << 20);
        assert_eq!(reply(40).into_text(1), whole);
        assert_eq!(reply(40).into_text(1_000), whole);
    }

    #[test]
    fn memory_is_reserved_until_body_is_dropped() {
        let admission = admission();
        let mut memory_reservation = admission.queue_body();
        memory_reservation.grow(10).unwrap();
        let mut body = reply(200).into_body(memory_reservation);
        assert_eq!(body.size_hint().exact(), None);
        let mut text = Vec::new();
        while let Some(frame) = body.frame().now_or_never().unwrap() {
            assert!(admission.queue_body().grow(1).is_err());
            text.extend(frame.unwrap().into_data().unwrap());
        }
        assert_eq!(String::from_utf8(text).unwrap(), reply(200).into_text(1 << 30));
        drop(body);
        admission.queue_body().grow(10).unwrap();
    }

    #[test]
    fn short_replies_have_content_length() {
        let body = reply(2).into_body(admission().queue_body());
        let length = body.size_hint().exact();
        let text = body.collect().now_or_never().unwrap().unwrap().to_bytes();
        assert_eq!(length, Some(text.len() as u64));
        let mut plain = BufferedReply::new(names(TokenFormat::Text));
        plain.text.put_slice(b"{}");
        assert_eq!(plain.into_body(admission().queue_body()).size_hint().exact(), Some(2));
    }
}
