//! Buffered form of a non-streamed reply: text and log-probabilities, which are serialised as the client
//! reads them.

use super::logprobs::{ChoiceLogprobs, ListForm, ListWriter, TokenNames};
use crate::piece_body::{PieceWriter, body_of};
use axum::body::Body;
use bytes::{BufMut, Bytes, BytesMut};
use engine::QueuedBytes;
use protocol::{Token, TokenLogprobs};
use std::collections::VecDeque;
use std::mem;
use std::sync::Arc;

/// Log-probabilities of one choice, kept until they are serialised.
#[derive(Debug, Default)]
pub(crate) struct KeptLogprobs {
    /// Token ids of the prompt, if it is listed before the output.
    pub echoed: Arc<[Token]>,
    /// Entries of the prompt. The first prompt token has none.
    pub prompt: Vec<TokenLogprobs>,
    /// Entries of the output.
    pub output: Vec<TokenLogprobs>,
}

/// Part of a reply.
#[derive(Debug)]
enum Part {
    Text(Bytes),
    Lists { writer: ListWriter, kept: Arc<KeptLogprobs> },
}

/// Reply built in order. Each part is freed once it is written.
#[derive(Debug)]
pub(crate) struct ReplyParts {
    /// Text after the last list.
    pub text: BytesMut,
    names: TokenNames,
    parts: VecDeque<Part>,
}

impl ReplyParts {
    /// Creates an empty reply.
    pub(crate) fn new(names: TokenNames) -> Self {
        Self { text: BytesMut::new(), names, parts: VecDeque::new() }
    }

    /// Appends lists of log-probabilities.
    pub(crate) fn list(&mut self, form: ListForm, kept: &Arc<KeptLogprobs>) {
        self.end_text();
        let writer = ListWriter::new(form, 0);
        self.parts.push_back(Part::Lists { writer, kept: Arc::clone(kept) });
    }

    /// Returns the body of the response; `held`: memory reservation of the request, released when the body is
    /// dropped.
    pub(crate) fn into_body(mut self, held: QueuedBytes) -> Body {
        if self.parts.is_empty() {
            return Body::from(self.text.freeze());
        }
        self.end_text();
        body_of(self, held)
    }

    fn end_text(&mut self) {
        self.parts.push_back(Part::Text(mem::take(&mut self.text).freeze()));
    }
}

impl PieceWriter for ReplyParts {
    fn write(&mut self, bytes: usize, out: &mut BytesMut) -> bool {
        let end = out.len() + bytes;
        while out.len() < end {
            let goes_on = match self.parts.front_mut() {
                None => return false,
                Some(Part::Text(text)) => {
                    let most = text.len().min(end - out.len());
                    out.put_slice(&text.split_to(most));
                    !text.is_empty()
                }
                Some(Part::Lists { writer, kept }) => {
                    let KeptLogprobs { echoed, prompt, output } = &**kept;
                    writer.step(&self.names, ChoiceLogprobs { echoed, prompt, output }, out)
                }
            };
            if !goes_on {
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

    impl ReplyParts {
        /// Returns the whole text, written in pieces of about `bytes` bytes.
        pub(in crate::openai) fn into_text(mut self, bytes: usize) -> String {
            self.end_text();
            let mut out = BytesMut::new();
            while self.write(bytes, &mut out) {}
            String::from_utf8(out.to_vec()).unwrap()
        }
    }

    fn reply(tokens: usize) -> ReplyParts {
        let mut reply = ReplyParts::new(names(TokenFormat::Text));
        let output = entries(tokens, 20);
        let kept = Arc::new(KeptLogprobs { output, ..KeptLogprobs::default() });
        for form in [ListForm::Chat, ListForm::Text] {
            reply.text.put_slice(b"some text, ");
            reply.list(form, &kept);
        }
        reply.text.put_slice(b"and the end");
        reply
    }

    fn admission() -> Arc<AdmissionController> {
        AdmissionController::new(AdmissionLimits { requests: 1, prefill_tokens: 1, bytes: 10 })
    }

    #[test]
    fn pieces_of_any_size_make_the_same_text() {
        let whole = reply(40).into_text(1 << 20);
        assert_eq!(reply(40).into_text(1), whole);
        assert_eq!(reply(40).into_text(1_000), whole);
    }

    #[test]
    fn what_is_held_counts_until_the_body_is_gone() {
        let admission = admission();
        let mut held = admission.queue_body();
        held.grow(10).unwrap();
        let mut body = reply(200).into_body(held);
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
    fn short_replies_have_a_length() {
        let body = reply(2).into_body(admission().queue_body());
        let length = body.size_hint().exact();
        let text = body.collect().now_or_never().unwrap().unwrap().to_bytes();
        assert_eq!(length, Some(text.len() as u64));
        let mut plain = ReplyParts::new(names(TokenFormat::Text));
        plain.text.put_slice(b"{}");
        assert_eq!(plain.into_body(admission().queue_body()).size_hint().exact(), Some(2));
    }
}
