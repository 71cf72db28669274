//! Incremental detokenizer: converts token ids to text, one id at a time.
//!
//! Each token costs time proportional to its own bytes. Emitted text is always valid UTF-8: an incomplete
//! character is held back until the next token, and emitted as U+FFFD only once it is known to be invalid.
//! `Tokenizer::decode` runs the same code, so deltas concatenate to its result exactly.
//!
//! The text equals that of the decoders of Hugging Face `tokenizers` 0.22 except for one case, which they can
//! decide only at the end of a run of byte-fallback tokens: if such a run is partly valid UTF-8, its valid
//! characters are emitted here, while `tokenizers` replaces every byte of the run.

use std::sync::Arc;

use protocol::Token;

use super::token_table::{InvalidUtf8Replacement, LeadingSpaceRule, TokenKind};
use super::tokenizer::Tokenizer;

/// Options of a detokenizer.
///
/// `spaces_between_special_tokens` has no field: none of the supported decoders puts spaces between tokens,
/// so both of its values give the same text (as in vLLM with fast tokenizers).
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct DetokenizeOptions {
    /// Whether special tokens (EOS and the like) are omitted from the text.
    pub skip_special_tokens: bool,
    /// Whether the text continues a prompt. Then the rules for the start of a text (a leading space is
    /// stripped) do not apply.
    pub continues: bool,
}

impl Default for DetokenizeOptions {
    /// Returns the options for generated text: special tokens are omitted, and the text continues a prompt.
    fn default() -> Self {
        Self { skip_special_tokens: true, continues: true }
    }
}

/// Converts the token ids of one text to text, one id at a time.
#[derive(Debug, Clone)]
pub struct Detokenizer {
    tokenizer: Arc<Tokenizer>,
    state: DetokenizerState,
}

impl Detokenizer {
    /// Creates a detokenizer for a new text.
    pub fn new(tokenizer: Arc<Tokenizer>, options: DetokenizeOptions) -> Self {
        Self { tokenizer, state: DetokenizerState::new(options) }
    }

    /// Keeps the tokens `visible_special` in the text although `skip_special_tokens` is set.
    #[must_use]
    pub fn with_visible_special(mut self, visible_special: Arc<[Token]>) -> Self {
        self.state.visible_special = visible_special;
        self
    }

    /// Processes the next token id and appends to `out` the text that can no longer change. Ids outside the
    /// vocabulary produce no text.
    pub fn push(&mut self, token: Token, out: &mut String) {
        self.state.push(&self.tokenizer, token, out);
    }

    /// Whether the bytes of an incomplete UTF-8 character are held back.
    pub fn has_pending(&self) -> bool {
        !self.state.pending.is_empty()
    }

    /// Ends the text: appends U+FFFD for an incomplete character, if any.
    pub fn finish(&mut self, out: &mut String) {
        self.state.finish(&self.tokenizer, out);
    }
}

/// State of a detokenizer between two tokens; the tokenizer is passed to each call.
#[derive(Debug, Clone)]
pub(super) struct DetokenizerState {
    skip_special_tokens: bool,
    /// Special tokens that are kept in the text although `skip_special_tokens` is set.
    visible_special: Arc<[Token]>,
    /// Whether leading spaces may still be stripped (`LeadingSpaceRule`): the text continues no prompt and no
    /// text has been emitted so far.
    at_start: bool,
    /// Number of leading spaces stripped so far.
    spaces_dropped: usize,
    /// Bytes of an incomplete character, at most 3 between calls.
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
        let stripped: Vec<u8>;
        if self.at_start {
            stripped = self.strip_start(vocabulary.leading, bytes);
            bytes = &stripped;
        }
        let run_ends =
            vocabulary.invalid == InvalidUtf8Replacement::PerByte && kind != TokenKind::Byte;
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

    /// Removes the spaces at the start of the text that the rule `leading` requires to be removed. `bytes`
    /// are the bytes of the next token; returns the remaining bytes.
    fn strip_start(&mut self, leading: LeadingSpaceRule, bytes: &[u8]) -> Vec<u8> {
        match leading {
            LeadingSpaceRule::Keep => {
                self.at_start = false;
                bytes.to_vec()
            }
            LeadingSpaceRule::StripToken => {
                self.at_start = false;
                bytes.iter().copied().filter(|&b| b != b' ').collect()
            }
            LeadingSpaceRule::StripText(limit) => {
                let left = limit - self.spaces_dropped;
                let spaces = bytes.iter().take(left).take_while(|&&b| b == b' ').count();
                self.spaces_dropped += spaces;
                self.at_start = spaces == bytes.len() && self.spaces_dropped < limit;
                bytes[spaces..].to_vec()
            }
        }
    }

    /// Appends the valid UTF-8 of `bytes` to `out`; an incomplete character at their end is added to
    /// `pending`.
    fn append_valid(
        &mut self,
        mut bytes: &[u8],
        invalid: InvalidUtf8Replacement,
        out: &mut String,
    ) {
        loop {
            match std::str::from_utf8(bytes) {
                Ok(text) => {
                    out.push_str(text);
                    return;
                }
                Err(error) => {
                    let (valid, rest) = bytes.split_at(error.valid_up_to());
                    out.push_str(&String::from_utf8_lossy(valid)); // Valid UTF-8: nothing is replaced.
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

    fn flush(&mut self, invalid: InvalidUtf8Replacement, out: &mut String) {
        if !self.pending.is_empty() {
            replace(self.pending.len(), invalid, out);
            self.pending.clear();
        }
    }
}

/// Appends the replacement for one invalid UTF-8 sequence of `bytes` bytes: one U+FFFD for the whole sequence
/// or one per byte, as `invalid` defines.
fn replace(bytes: usize, invalid: InvalidUtf8Replacement, out: &mut String) {
    let count = if invalid == InvalidUtf8Replacement::PerByte { bytes } else { 1 };
    out.extend(std::iter::repeat_n(char::REPLACEMENT_CHARACTER, count));
}
