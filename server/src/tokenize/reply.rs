//! Replies of `/tokenize` and `/detokenize`, serialised in pieces while the client reads them.
//!
//! Only the token ids (four bytes each) are kept in memory; the complete reply text would take ten times as
//! much memory.

use crate::piece_body::IncrementalBodyWriter;
use crate::sse::escape;
use bytes::{BufMut, BytesMut};
use protocol::Token;
use std::io::Write as _;
use std::sync::Arc;
use text::{DetokenizeOptions, Detokenizer, Tokenizer};

/// Position in the `/tokenize` reply that is being written.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
enum TokenizeReplyState {
    Head,
    Ids(usize),
    TokenStrs(usize),
    Done,
}

/// Writes the `/tokenize` reply: `{"count", "max_model_len", "tokens", "token_strs"}`.
pub(super) struct TokenizeReplyWriter {
    pub(super) ids: Vec<Token>,
    pub(super) max_model_len: u32,
    /// Tokenizer for `token_strs`, the vocabulary spelling of each token; `None` unless the request sets
    /// `return_token_strs`.
    pub(super) token_strs_tokenizer: Option<Arc<Tokenizer>>,
    state: TokenizeReplyState,
}

impl TokenizeReplyWriter {
    pub(super) fn new(
        ids: Vec<Token>,
        max_model_len: u32,
        token_strs_tokenizer: Option<Arc<Tokenizer>>,
    ) -> Self {
        Self { ids, max_model_len, token_strs_tokenizer, state: TokenizeReplyState::Head }
    }

    fn write_next(&mut self, out: &mut BytesMut) {
        let separate = |index: usize, out: &mut BytesMut| {
            if index > 0 {
                out.put_u8(b',');
            }
        };
        self.state = match self.state {
            TokenizeReplyState::Head => {
                let (count, max_model_len) = (self.ids.len(), self.max_model_len);
                let head =
                    format!("{{\"count\":{count},\"max_model_len\":{max_model_len},\"tokens\":[");
                out.put_slice(head.as_bytes());
                TokenizeReplyState::Ids(0)
            }
            TokenizeReplyState::Ids(index) => match self.ids.get(index) {
                Some(id) => {
                    separate(index, out);
                    // Writing to memory cannot fail, so the result is ignored.
                    let _ = write!(out.writer(), "{id}");
                    TokenizeReplyState::Ids(index + 1)
                }
                None if self.token_strs_tokenizer.is_some() => {
                    out.put_slice(b"],\"token_strs\":[");
                    TokenizeReplyState::TokenStrs(0)
                }
                None => {
                    out.put_slice(b"],\"token_strs\":null}");
                    TokenizeReplyState::Done
                }
            },
            TokenizeReplyState::TokenStrs(index) => {
                if let (Some(id), Some(tokenizer)) =
                    (self.ids.get(index), &self.token_strs_tokenizer)
                {
                    separate(index, out);
                    out.put_u8(b'"');
                    escape(&tokenizer.token_string(*id).unwrap_or_default(), out);
                    out.put_u8(b'"');
                    TokenizeReplyState::TokenStrs(index + 1)
                } else {
                    out.put_slice(b"]}");
                    TokenizeReplyState::Done
                }
            }
            TokenizeReplyState::Done => TokenizeReplyState::Done,
        };
    }
}

impl IncrementalBodyWriter for TokenizeReplyWriter {
    fn write(&mut self, bytes: usize, out: &mut BytesMut) -> bool {
        let end = out.len() + bytes;
        while out.len() < end && self.state != TokenizeReplyState::Done {
            self.write_next(out);
        }
        self.state != TokenizeReplyState::Done
    }
}

/// Writes the `/detokenize` reply: `{"prompt"}` with the text of the token ids.
pub(super) struct DetokenizeReplyWriter {
    ids: std::vec::IntoIter<Token>,
    detokenizer: Detokenizer,
    has_started: bool,
    text: String,
}

impl DetokenizeReplyWriter {
    pub(super) fn new(ids: Vec<Token>, tokenizer: Arc<Tokenizer>) -> Self {
        let options = DetokenizeOptions { skip_special_tokens: false, continues: false };
        let detokenizer = Detokenizer::new(tokenizer, options);
        Self { ids: ids.into_iter(), detokenizer, has_started: false, text: String::new() }
    }
}

impl IncrementalBodyWriter for DetokenizeReplyWriter {
    fn write(&mut self, bytes: usize, out: &mut BytesMut) -> bool {
        if !std::mem::replace(&mut self.has_started, true) {
            out.put_slice(b"{\"prompt\":\"");
        }
        let end = out.len() + bytes;
        while out.len() < end {
            self.text.clear();
            let Some(id) = self.ids.next() else {
                self.detokenizer.finish(&mut self.text);
                escape(&self.text, out);
                out.put_slice(b"\"}");
                return false;
            };
            self.detokenizer.push(id, &mut self.text);
            escape(&self.text, out);
        }
        true
    }
}
