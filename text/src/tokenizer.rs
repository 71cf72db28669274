//! Tokenizer of a model folder, loaded once and shared by all requests.
//!
//! There are two ways to encode text. `encode` recognises special tokens anywhere in the text; it is used for
//! raw completion prompts, as in every OpenAI-compatible server. `encode_rendered` recognises special tokens
//! only where the chat template placed them.

mod loading;

pub(super) use loading::{read_file, read_json};
use std::borrow::Cow;
use std::fmt::Write as _;

use protocol::Token;
use serde_json::Value;

use super::added_tokens::{AddedTokenMatcher, append_ids, pre_token_starts};
use super::detokenizer::{DetokenizeOptions, DetokenizerState};
use super::error::TextError;
use super::panic_guard::catch_panic;
use super::post_processor::PostProcessorTokens;
use super::template::RenderedChat;
use super::text_memory::{TextMemoryBudget, TextMemoryPermit};
use super::token_count_bound::TokenCountBound;
use super::token_table::{TokenKind, TokenTable};
use super::tokenizer_windows::{WINDOW_BYTES, WindowBoundaryRules};

/// Name of the `tokenizers` crate in panic errors. Version 0.22 panics, for example, if a post-processor
/// refers to an undefined token.
const LIBRARY_NAME: &str = "tokenizer library";

/// Factor by which a window (the part of a long text that is tokenised separately) is enlarged if it contains
/// no position at which the text can be cut.
const WINDOW_GROWTH: usize = 4;

/// Converts text to token ids and back, for one model.
#[derive(Debug)]
pub struct Tokenizer {
    inner: tokenizers::Tokenizer,
    added_tokens: AddedTokenMatcher,
    pub(super) token_table: TokenTable,
    /// Computes lower bounds on the number of tokens of a text; `None` if no lower bound is known for this
    /// tokenizer.
    length_bound: Option<TokenCountBound>,
    /// Rules for cutting long texts into windows (parts that are tokenised separately); `None` if long texts
    /// are tokenised as a whole.
    windows: Option<WindowBoundaryRules>,
    /// Tokens that the post-processor adds before and after a text; `None` if only the `tokenizers` crate can
    /// determine them.
    post_processor: Option<PostProcessorTokens>,
    /// Bytes of memory that tokenisation takes per byte of a text that cannot be cut into windows.
    bytes_per_byte: u64,
    /// Memory budget for texts that cannot be cut into windows (parts that are tokenised separately), and for
    /// chat templates sent in requests.
    memory: TextMemoryBudget,
    /// Special tokens (role, token string); a role is a template variable such as `bos_token`.
    special_tokens: Vec<(String, String)>,
    bos: Option<Token>,
    /// Value of `add_bos_token` for a Llama tokenizer class: whether BOS is added. It overrides the
    /// post-processor.
    add_bos: Option<bool>,
    eos_ids: Vec<Token>,
    /// Contents of `tokenizer_config.json`; null if there is none.
    config: Value,
}

impl Tokenizer {
    /// Sets the total memory budget, in bytes, for tokenising texts that cannot be cut into windows.
    #[must_use]
    pub fn with_memory(self, bytes: u64) -> Self {
        Self { memory: TextMemoryBudget::new(bytes), ..self }
    }

    /// Returns the memory budget shared by long texts and chat templates sent in requests.
    pub(super) fn memory(&self) -> &TextMemoryBudget {
        &self.memory
    }

    /// Encodes `text` and recognises special tokens in it. With `add_special_tokens`, the tokens that the
    /// model expects around a text (usually BOS) are added.
    ///
    /// Errors: the `tokenizers` crate fails; the text needs more memory than the total budget, or the memory
    /// does not become free in time.
    pub fn encode(&self, text: &str, add_special_tokens: bool) -> Result<Vec<Token>, TextError> {
        let mut ids = match &self.post_processor {
            Some(post_processor) if text.len() > WINDOW_BYTES => {
                let mut ids =
                    if add_special_tokens { post_processor.before.clone() } else { Vec::new() };
                self.encode_pieces(text, &[], &mut ids)?;
                ids.extend(post_processor.after.iter().filter(|_| add_special_tokens));
                ids
            }
            _ => self.encode_by_library(text, add_special_tokens)?,
        };
        if add_special_tokens {
            self.insert_bos(&mut ids);
        }
        Ok(ids)
    }

    /// Encodes a rendered chat: special tokens are recognised only where the template placed them; special
    /// token strings in user text are encoded as plain text.
    ///
    /// The result equals that of `encode(text, false)` if the messages contain no special token strings.
    pub fn encode_rendered(&self, rendered: &RenderedChat) -> Result<Vec<Token>, TextError> {
        let RenderedChat { text, protected_positions } = rendered;
        if protected_positions.is_empty() {
            return self.encode(text, false);
        }
        let mut ids = Vec::new();
        self.encode_pieces(text, protected_positions, &mut ids)?;
        Ok(ids)
    }

    fn encode_by_library(
        &self,
        text: &str,
        add_special_tokens: bool,
    ) -> Result<Vec<Token>, TextError> {
        let _share = self.memory_share_for(text.len())?;
        let encode = || self.inner.encode_fast(text, add_special_tokens);
        let encoding = catch_panic(LIBRARY_NAME, encode).map_err(TextError::Tokenizer)?;
        Ok(encoding.map_err(|e| failed(&e))?.get_ids().to_vec())
    }

    /// Appends the ids of `text` to `ids`, without the tokens that the post-processor adds around a text.
    fn encode_pieces(
        &self,
        text: &str,
        protected_positions: &[usize],
        ids: &mut Vec<Token>,
    ) -> Result<(), TextError> {
        if let Some(rules) = &self.windows {
            return self.encode_windows(rules, text, protected_positions, ids);
        }
        let _share = self.memory_share_for(text.len())?;
        let encode = || {
            let pieces = self.added_tokens.pre_tokenize(&self.inner, text, protected_positions)?;
            append_ids(&self.inner, &pieces, text.len(), ids)
        };
        catch_panic(LIBRARY_NAME, encode).map_err(TextError::Tokenizer)?.map_err(|e| failed(&e))
    }

    /// Appends the ids of `text` to `ids`, tokenising one window (part of the text) at a time. A window
    /// without a safe cut position is enlarged; the enlarged window acquires memory from the budget for long
    /// texts.
    fn encode_windows(
        &self,
        rules: &WindowBoundaryRules,
        text: &str,
        protected_positions: &[usize],
        ids: &mut Vec<Token>,
    ) -> Result<(), TextError> {
        let (mut start, mut size) = (0, WINDOW_BYTES);
        while start < text.len() {
            let end = text.floor_char_boundary(start.saturating_add(size));
            let window = &text[start..end];
            let window_positions = protected_positions
                [protected_positions.partition_point(|position| *position < start)..]
                .iter();
            let window_positions: Vec<usize> = window_positions
                .take_while(|position| **position < end)
                .map(|position| position - start)
                .collect();
            let _share = self.memory_share_for(window.len())?;
            let encode = || {
                let pieces =
                    self.added_tokens.pre_tokenize(&self.inner, window, &window_positions)?;
                let cut = if end == text.len() {
                    Some(window.len())
                } else {
                    rules.last_safe_cut(window, &pre_token_starts(&pieces))
                };
                if let Some(cut) = cut {
                    append_ids(&self.inner, &pieces, cut, ids)?;
                }
                Ok(cut)
            };
            let cut = catch_panic(LIBRARY_NAME, encode).map_err(TextError::Tokenizer)?;
            match cut.map_err(|e| failed(&e))? {
                Some(cut) => (start, size) = (start + cut, WINDOW_BYTES),
                None => size = size.saturating_mul(WINDOW_GROWTH),
            }
        }
        Ok(())
    }

    /// Acquires memory for tokenising `bytes` bytes at once. A window (part of a long text) of the regular
    /// size acquires no memory, because only a few windows are tokenised concurrently.
    fn memory_share_for(&self, bytes: usize) -> Result<Option<TextMemoryPermit<'_>>, TextError> {
        if bytes <= WINDOW_BYTES {
            return Ok(None);
        }
        self.memory.acquire(bytes as u64 * self.bytes_per_byte, bytes).map(Some)
    }

    /// Returns a lower bound on the number of tokens of `text` without tokenising it; 0 if no lower bound is
    /// known. The time is linear: 12 ms for 8 MiB, or 60 ms if the tokenizer composes characters (NFC) and
    /// the text is not all ASCII.
    pub fn min_token_count(&self, text: &str) -> usize {
        let bound = self.length_bound.as_ref().map_or(0, |bound| bound.tokens(text));
        bound.saturating_sub(1) // A BOS token spelt in the text may be removed.
    }

    /// Decodes `ids` to a complete text.
    pub fn decode(&self, ids: &[Token], skip_special_tokens: bool) -> String {
        let mut out = String::new();
        let mut state =
            DetokenizerState::new(DetokenizeOptions { skip_special_tokens, continues: false });
        for &id in ids {
            state.push(self, id, &mut out);
        }
        state.finish(self, &mut out);
        out
    }

    /// Returns the bytes of a token; empty for an unassigned id.
    pub fn token_bytes(&self, token: Token) -> &[u8] {
        self.token_table.bytes(token)
    }

    /// Returns the text of a single token in the form used for log-probabilities: bytes that are not valid
    /// UTF-8 are written as `bytes:\xE2\x80`, so that different tokens have different texts.
    pub fn token_text(&self, token: Token) -> Cow<'_, str> {
        let bytes = self.token_bytes(token);
        if let Ok(text) = std::str::from_utf8(bytes) {
            return Cow::Borrowed(text);
        }
        let mut text = String::from("bytes:");
        for byte in bytes {
            let _infallible = write!(text, "\\x{byte:02X}");
        }
        Cow::Owned(text)
    }

    /// Returns the string of a token in `tokenizer.json` (such as `Ġhello`); `None` if the id has no token.
    pub fn token_string(&self, token: Token) -> Option<String> {
        self.inner.id_to_token(token)
    }

    /// Returns the id of the token with the string `token_string` in `tokenizer.json`.
    pub fn token_id(&self, token_string: &str) -> Option<Token> {
        self.inner.token_to_id(token_string)
    }

    /// Returns the id of the added token `text`; special tokens are added tokens too.
    pub fn added_token_id(&self, text: &str) -> Option<Token> {
        self.added_tokens.id(text)
    }

    /// Whether `token` is omitted under `skip_special_tokens`.
    pub fn is_special(&self, token: Token) -> bool {
        self.token_table.kind(token) == TokenKind::Special
    }

    /// Returns the largest token id plus one. The embedding matrix of the model may have more rows.
    pub fn vocab_size(&self) -> usize {
        self.token_table.len()
    }

    /// Returns the contents of `tokenizer_config.json`; null if there is none.
    pub fn config(&self) -> &Value {
        &self.config
    }

    /// Returns the EOS token ids without duplicates: first the ids of the tokenizer, then the ids of the
    /// model.
    pub fn eos_ids(&self) -> &[Token] {
        &self.eos_ids
    }

    /// Returns the id of the BOS token, if the model has one.
    pub fn bos_id(&self) -> Option<Token> {
        self.bos
    }

    /// Returns the special tokens (role, token string); a role is a template variable (`bos_token`,
    /// `eos_token`, ...).
    pub fn special_tokens(&self) -> &[(String, String)] {
        &self.special_tokens
    }

    /// Returns the strings of the special tokens. Such a string in user text is not encoded as the special
    /// token.
    pub(super) fn special_token_strings(&self) -> &[String] {
        self.added_tokens.special_token_strings()
    }

    fn insert_bos(&self, ids: &mut Vec<Token>) {
        let Some(bos) = self.bos else { return };
        match self.add_bos {
            Some(true) if ids.first() != Some(&bos) => ids.insert(0, bos),
            Some(false) if ids.first() == Some(&bos) => {
                ids.remove(0);
            }
            _ => {}
        }
    }
}

fn failed(error: &tokenizers::Error) -> TextError {
    TextError::Tokenizer(error.to_string())
}
