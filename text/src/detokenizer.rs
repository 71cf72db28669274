//! Ids to text, one id at a time.
//!
//! Each token costs time proportional to its own bytes. Text given out is always valid UTF-8: an
//! unfinished character waits for the next token, and shows as U+FFFD only once it is known to be
//! broken. `Tokenizer::decode` runs this same machine, so deltas concatenate to it exactly.
//!
//! Equal to the decoders of Hugging Face `tokenizers` 0.22 but for one case, which they can only
//! decide at the end of a run: a run of byte-fallback tokens that is partly valid shows its valid
//! characters here, where they replace every byte of the run.

use std::sync::Arc;

use protocol::Token;

use super::token_table::{InvalidBytes, LeadingSpace, TokenKind};
use super::tokenizer::Tokenizer;

/// How ids are shown.
///
/// `spaces_between_special_tokens` has no member: none of the supported decoders puts spaces
/// between tokens, so both of its values give the same text (as in vLLM with fast tokenizers).
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct DetokenizeOptions {
    /// Special tokens (end of text and the like) contribute nothing.
    pub skip_special_tokens: bool,
    /// The ids continue a prompt, so the rules for the start of a text (a dropped leading space)
    /// do not apply.
    pub continues: bool,
}

impl Default for DetokenizeOptions {
    /// What a completion shows: a continuation without special tokens.
    fn default() -> Self {
        Self { skip_special_tokens: true, continues: true }
    }
}

/// The state between two tokens of one text.
#[derive(Debug, Clone)]
pub struct Detokenizer {
    tokenizer: Arc<Tokenizer>,
    state: DetokenizerState,
}

impl Detokenizer {
    /// A detokeniser before its first id.
    pub fn new(tokenizer: Arc<Tokenizer>, options: DetokenizeOptions) -> Self {
        Self { tokenizer, state: DetokenizerState::new(options) }
    }

    /// The same, but these special tokens show.
    #[must_use]
    pub fn with_visible_special(mut self, kept: Arc<[Token]>) -> Self {
        self.state.visible_special = kept;
        self
    }

    /// Takes the next id and appends the text that is now certain. Ids outside the vocabulary
    /// contribute nothing.
    pub fn push(&mut self, token: Token, out: &mut String) {
        self.state.push(&self.tokenizer, token, out);
    }

    /// Whether the bytes of an unfinished character are held back.
    pub fn is_holding(&self) -> bool {
        !self.state.pending.is_empty()
    }

    /// The ids have ended: appends a replacement for an unfinished character, if any.
    pub fn finish(&mut self, out: &mut String) {
        self.state.finish(&self.tokenizer, out);
    }
}

/// The detokeniser without its tokenizer.
#[derive(Debug, Clone)]
pub(super) struct DetokenizerState {
    skip_special_tokens: bool,
    /// Special tokens that show all the same.
    visible_special: Arc<[Token]>,
    /// No token has contributed yet and this is the start of a text.
    at_start: bool,
    /// Leading spaces already dropped, of those that may be.
    spaces_dropped: usize,
    /// An incomplete character, at most 3 bytes between calls.
    pending: Vec<u8>,
}

impl DetokenizerState {
    pub(super) fn new(options: DetokenizeOptions) -> Self {
        Self {
            skip_special_tokens: options.skip_special_tokens,
            visible_special: Arc::default(),
            at_start: !options.continues,
            spaces_dropped: 0,
            pending: Vec::new(),
        }
    }

    pub(super) fn push(&mut self, tokenizer: &Tokenizer, token: Token, out: &mut String) {
        let vocabulary = &tokenizer.token_table;
        let kind = vocabulary.kind(token);
        let skipped = kind == TokenKind::Special && self.skip_special_tokens;
        if kind == TokenKind::Unassigned || (skipped && !self.visible_special.contains(&token)) {
            return;
        }
        let mut bytes = vocabulary.bytes(token);
        let kept: Vec<u8>;
        if self.at_start {
            kept = self.strip_start(vocabulary.leading, bytes);
            bytes = &kept;
        }
        let run_ends = vocabulary.invalid == InvalidBytes::PerByte && kind != TokenKind::Byte;
        if run_ends && !self.pending.is_empty() {
            self.flush(vocabulary.invalid, out);
        }
        if self.pending.is_empty() {
            self.append_valid(bytes, vocabulary.invalid, out);
        } else {
            let mut joined = std::mem::take(&mut self.pending);
            joined.extend_from_slice(bytes);
            self.append_valid(&joined, vocabulary.invalid, out);
        }
    }

    pub(super) fn finish(&mut self, tokenizer: &Tokenizer, out: &mut String) {
        self.flush(tokenizer.token_table.invalid, out);
    }

    /// Applies the rule for the start of a text to the next token's bytes.
    fn strip_start(&mut self, leading: LeadingSpace, bytes: &[u8]) -> Vec<u8> {
        match leading {
            LeadingSpace::Keep => {
                self.at_start = false;
                bytes.to_vec()
            }
            LeadingSpace::StripToken => {
                self.at_start = false;
                bytes.iter().copied().filter(|&b| b != b' ').collect()
            }
            LeadingSpace::StripText(limit) => {
                let left = limit - self.spaces_dropped;
                let spaces = bytes.iter().take(left).take_while(|&&b| b == b' ').count();
                self.spaces_dropped += spaces;
                self.at_start = spaces == bytes.len() && self.spaces_dropped < limit;
                bytes[spaces..].to_vec()
            }
        }
    }

    /// Appends the valid part of `bytes`; an unfinished character at their end becomes `pending`.
    fn append_valid(&mut self, mut bytes: &[u8], invalid: InvalidBytes, out: &mut String) {
        loop {
            match std::str::from_utf8(bytes) {
                Ok(text) => {
                    out.push_str(text);
                    return;
                }
                Err(error) => {
                    let (valid, rest) = bytes.split_at(error.valid_up_to());
                    out.push_str(&String::from_utf8_lossy(valid)); // Valid: borrowed as it is.
                    let Some(broken) = error.error_len() else {
                        self.pending.extend_from_slice(rest);
                        return;
                    };
                    replace(broken, invalid, out);
                    bytes = &rest[broken..];
                }
            }
        }
    }

    fn flush(&mut self, invalid: InvalidBytes, out: &mut String) {
        if !self.pending.is_empty() {
            replace(self.pending.len(), invalid, out);
            self.pending.clear();
        }
    }
}

/// Shows one invalid sequence of so many bytes.
fn replace(bytes: usize, invalid: InvalidBytes, out: &mut String) {
    let marks = if invalid == InvalidBytes::PerByte { bytes } else { 1 };
    out.extend(std::iter::repeat_n(char::REPLACEMENT_CHARACTER, marks));
}
