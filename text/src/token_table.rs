//! Bytes of each token id, and the rules by which a sequence of token ids becomes text.
//!
//! The tables are built once from the `decoder` of `tokenizer.json`, so that the detokenizer never calls the
//! `tokenizers` crate. Two families cover the supported models: byte-level BPE, where a token is raw bytes,
//! and SentencePiece, where a token is text with `▁` for a space, or one byte `<0xNN>`. Any other decoder is
//! rejected at startup instead of approximated.

use super::byte_alphabet::byte_of;
use protocol::Token;
use serde_json::Value;

/// Kind of a token, which determines the text that it contributes.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(super) enum TokenKind {
    /// The id has no token: it is unused, or a padding row of the embedding matrix.
    Unassigned,
    /// Ordinary token: text or raw bytes.
    Plain,
    /// One byte `<0xNN>` of a run of byte-fallback tokens.
    Byte,
    /// Special token: omitted from the text under `skip_special_tokens`.
    Special,
}

/// Replacement of invalid UTF-8 by U+FFFD.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(super) enum InvalidUtf8Replacement {
    /// One U+FFFD per maximal invalid sequence, as byte-level decoders do.
    PerSequence,
    /// One U+FFFD per invalid byte, as byte-fallback decoders do.
    PerByte,
}

/// Rule for stripping spaces at the start of a text.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(super) enum LeadingSpaceRule {
    Keep,
    /// Up to this number of spaces at the start of the text are dropped (decoder step `Strip` after `Fuse`).
    StripText(usize),
    /// Every `▁` of the first token is dropped (decoder step `Metaspace`).
    StripToken,
}

/// Bytes and kind of every token id, in flat tables.
#[derive(Debug)]
pub(super) struct TokenTable {
    /// Bytes of all tokens, concatenated; token `id` has the bytes `bytes[end_offsets[id -
    /// 1]..end_offsets[id]]`.
    bytes: Vec<u8>,
    end_offsets: Vec<u32>,
    kinds: Vec<TokenKind>,
    pub(super) invalid: InvalidUtf8Replacement,
    pub(super) leading: LeadingSpaceRule,
}

/// String of a token in `tokenizer.json`.
#[derive(Debug, Clone)]
pub(super) struct VocabularyString {
    pub(super) text: String,
    pub(super) is_special: bool,
}

impl TokenTable {
    /// Builds the tables. `tokens[id]` is the string of the token `id`, if the id is assigned; `decoder` is the `decoder` member of `tokenizer.json`.
    pub(super) fn new(
        tokens: &[Option<VocabularyString>],
        decoder: &Value,
    ) -> Result<Self, String> {
        let rules = DecoderRules::read(decoder)?;
        let mut this = Self {
            bytes: Vec::new(),
            end_offsets: Vec::with_capacity(tokens.len()),
            kinds: Vec::with_capacity(tokens.len()),
            invalid: if rules.byte_level {
                InvalidUtf8Replacement::PerSequence
            } else {
                InvalidUtf8Replacement::PerByte
            },
            leading: rules.leading,
        };
        for token in tokens {
            let kind = match token {
                None => TokenKind::Unassigned,
                Some(VocabularyString { text, is_special }) => {
                    let byte = rules.append_token_bytes(text, &mut this.bytes);
                    match (is_special, byte) {
                        (true, _) => TokenKind::Special,
                        (false, true) => TokenKind::Byte,
                        (false, false) => TokenKind::Plain,
                    }
                }
            };
            this.kinds.push(kind);
            this.end_offsets.push(this.bytes.len() as u32);
        }
        Ok(this)
    }

    /// Returns the number of ids; ids are in `[0, len)`.
    pub(super) fn len(&self) -> usize {
        self.kinds.len()
    }

    pub(super) fn kind(&self, token: Token) -> TokenKind {
        self.kinds.get(token as usize).copied().unwrap_or(TokenKind::Unassigned)
    }

    /// Returns the bytes of a token; empty for an unassigned id.
    pub(super) fn bytes(&self, token: Token) -> &[u8] {
        let id = token as usize;
        let Some(&end) = self.end_offsets.get(id) else { return &[] };
        let start = id.checked_sub(1).map_or(0, |before| self.end_offsets[before]);
        &self.bytes[start as usize..end as usize]
    }
}

/// Rules read from the `decoder` member of `tokenizer.json`.
struct DecoderRules {
    byte_level: bool,
    byte_fallback: bool,
    /// Replacements (pattern, content) applied to each token, in order.
    replace: Vec<(String, String)>,
    leading: LeadingSpaceRule,
}

impl DecoderRules {
    fn read(decoder: &Value) -> Result<Self, String> {
        let mut rules = Self {
            byte_level: false,
            byte_fallback: false,
            replace: Vec::new(),
            leading: LeadingSpaceRule::Keep,
        };
        let steps = match decoder["type"].as_str() {
            Some("Sequence") => decoder["decoders"].as_array().cloned().unwrap_or_default(),
            Some(_) => vec![decoder.clone()],
            None => return Err("decoder: missing; it is required to detokenize".to_owned()),
        };
        let mut fused = false;
        for step in &steps {
            rules.step(step, &mut fused)?;
        }
        Ok(rules)
    }

    fn step(&mut self, step: &Value, fused: &mut bool) -> Result<(), String> {
        let kind = step["type"].as_str().unwrap_or("without a type");
        let text = |name: &str| step[name].as_str().map(str::to_owned);
        match kind {
            "ByteLevel" => self.byte_level = true,
            "ByteFallback" => self.byte_fallback = true,
            "Fuse" => *fused = true,
            "Replace" => {
                let from = step["pattern"]["String"].as_str().map(str::to_owned);
                let pair = from.zip(text("content"));
                self.replace.push(pair.ok_or("decoder Replace: pattern is not a string")?);
            }
            "Strip" => {
                let size = |name: &str| step[name].as_u64().unwrap_or(0) as usize;
                let spaces = text("content").as_deref() == Some(" ");
                if !*fused || !spaces || size("stop") != 0 {
                    return Err(
                        "decoder Strip: only leading spaces of the whole text are supported"
                            .to_owned(),
                    );
                }
                self.leading = LeadingSpaceRule::StripText(size("start"));
            }
            "Metaspace" => {
                let replacement = text("replacement").unwrap_or_else(|| "▁".to_owned());
                self.replace.push((replacement, " ".to_owned()));
                let no_prefix_space = step["prepend_scheme"].as_str() == Some("never")
                    || step["add_prefix_space"].as_bool() == Some(false);
                self.leading = if no_prefix_space {
                    LeadingSpaceRule::Keep
                } else {
                    LeadingSpaceRule::StripToken
                };
            }
            other => {
                return Err(format!(
                    "decoder {other}: not supported; supported: ByteLevel, ByteFallback, Fuse, \
                     Metaspace, Replace, Strip"
                ));
            }
        }
        Ok(())
    }

    /// Appends the bytes of `token` and returns whether it is a byte-fallback token.
    fn append_token_bytes(&self, token: &str, bytes: &mut Vec<u8>) -> bool {
        if self.byte_level {
            let start = bytes.len();
            for c in token.chars() {
                let Some(byte) = byte_of(c) else {
                    bytes.truncate(start);
                    bytes.extend_from_slice(token.as_bytes()); // An added token, stored as plain text.
                    return false;
                };
                bytes.push(byte);
            }
            return false;
        }
        if self.byte_fallback && token.len() == 6 {
            let digits = token.strip_prefix("<0x").and_then(|t| t.strip_suffix('>'));
            if let Some(byte) = digits.and_then(|d| u8::from_str_radix(d, 16).ok()) {
                bytes.push(byte);
                return true;
            }
        }
        let text = self.replace.iter().fold(token.to_owned(), |t, (from, to)| t.replace(from, to));
        bytes.extend_from_slice(text.as_bytes());
        false
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn unknown_decoder_is_rejected_by_name() {
        let error = TokenTable::new(&[], &serde_json::json!({"type": "CTC"})).unwrap_err();
        assert!(error.contains("CTC"), "{error}");
        assert!(TokenTable::new(&[], &Value::Null).is_err());
    }
}
