//! Lower bound on the number of tokens of a text, computed from its bytes: a prompt that is too long is
//! rejected before it costs tokenisation time.
//!
//! If every byte of a text reaches the tokenizer's BPE model (byte-level, or with byte fallback; no earlier
//! step drops or joins text), each byte is covered by one token. So for any class of bytes, the number of
//! such bytes in the text, divided by the maximum number of such bytes in one token, is a lower bound on the
//! number of tokens. The largest bound over several byte classes is used: all bytes, letters and digits, and
//! each byte value separately. The class of all bytes alone would give a weak bound, because long runs of
//! spaces are single tokens.

use super::added_tokens::IdentifiedAddedToken;
use super::token_table::{InvalidUtf8Replacement, TokenTable, VocabularyString};
use serde_json::Value;

/// Computes a lower bound of a text's token count from the maximum byte counts of the tokenizer's tokens.
#[derive(Debug)]
pub(super) struct TokenCountBound {
    /// Maximum number of bytes in one token, per byte class: all bytes, letters and digits, each byte value.
    max_per_token: ByteClassCounts,
    /// Whether the normaliser composes characters (NFC), which changes the byte counts of some characters.
    composes: bool,
    /// Byte values that the normaliser or the pre-tokenizer replaces by other bytes.
    replaced: Vec<u8>,
}

/// Numbers of bytes per byte class: all bytes, letters and digits, each byte value.
#[derive(Debug, Clone)]
struct ByteClassCounts {
    all: u32,
    alphanumeric: u32,
    by_value: [u32; 256],
}

/// Effects of the normaliser and pre-tokenizer in `tokenizer.json` on the byte counts of a text.
#[derive(Default)]
struct PreBpeEffects {
    composes: bool,
    byte_level: bool,
    replaced: Vec<u8>,
}

impl TokenCountBound {
    /// Computes the maximum byte counts; `None` if no lower bound holds for this tokenizer.
    pub(super) fn new(
        json: &Value,
        tokens: &[Option<VocabularyString>],
        added: &[IdentifiedAddedToken],
        vocabulary: &TokenTable,
    ) -> Option<Self> {
        let mut steps = PreBpeEffects::default();
        steps.normalizer(&json["normalizer"])?;
        steps.pre_tokenizer(&json["pre_tokenizer"])?;
        let byte_level =
            steps.byte_level && vocabulary.invalid == InvalidUtf8Replacement::PerSequence;
        covers_every_byte(&json["model"], byte_level)?;
        // An added token that absorbs surrounding spaces covers an unlimited number of bytes.
        if added.iter().any(|added| added.token.lstrip || added.token.rstrip) {
            return None;
        }
        let mut max_per_token = ByteClassCounts::zero();
        for (id, token) in (0..).zip(tokens) {
            let Some(VocabularyString { text, .. }) = token else { continue };
            max_per_token.raise(vocabulary.bytes(id));
            if !byte_level || added.iter().any(|added| added.id == id) {
                max_per_token.raise(text.as_bytes());
            }
        }
        Some(Self { max_per_token, composes: steps.composes, replaced: steps.replaced })
    }

    /// Returns a lower bound on the number of tokens of `text`.
    pub(super) fn tokens(&self, text: &str) -> usize {
        let mut counts = if self.composes && !text.is_ascii() {
            counts_of_stable(text)
        } else {
            counts(text.as_bytes())
        };
        for byte in &self.replaced {
            counts[usize::from(*byte)] = 0;
        }
        let sum = |class: fn(&u8) -> bool| -> usize {
            (0..=u8::MAX).filter(class).map(|byte| counts[usize::from(byte)]).sum()
        };
        let class_bound = |count: usize, max_per_token: u32| match max_per_token {
            0 => 0,
            max_per_token => count.div_ceil(max_per_token as usize),
        };
        let by_value = counts.iter().zip(self.max_per_token.by_value);
        let by_value = by_value
            .map(|(&count, max_per_token)| class_bound(count, max_per_token))
            .max()
            .unwrap_or(0);
        by_value
            .max(class_bound(sum(|_| true), self.max_per_token.all))
            .max(class_bound(sum(u8::is_ascii_alphanumeric), self.max_per_token.alphanumeric))
    }
}

impl ByteClassCounts {
    fn zero() -> Self {
        Self { all: 0, alphanumeric: 0, by_value: [0; 256] }
    }

    /// Increases each maximum to the number of bytes of its byte class in `token`, if this number is greater.
    fn raise(&mut self, token: &[u8]) {
        self.all = self.all.max(token.len() as u32);
        let alphanumeric = token.iter().filter(|byte| byte.is_ascii_alphanumeric()).count() as u32;
        self.alphanumeric = self.alphanumeric.max(alphanumeric);
        for (max_per_token, count) in self.by_value.iter_mut().zip(counts(token)) {
            *max_per_token = (*max_per_token).max(count as u32);
        }
    }
}

impl PreBpeEffects {
    /// Records the effects of a normaliser step on the text; `None` if the step may drop or shorten text.
    fn normalizer(&mut self, step: &Value) -> Option<()> {
        match step["type"].as_str() {
            None if step.is_null() => {}
            Some("NFC") => self.composes = true,
            Some("Prepend") => {}
            Some("Replace") => {
                self.replaced.extend_from_slice(step["pattern"]["String"].as_str()?.as_bytes());
            }
            Some("Sequence") => {
                step["normalizers"].as_array()?.iter().try_for_each(|s| self.normalizer(s))?;
            }
            _ => return None,
        }
        Some(())
    }

    /// Records the effects of a pre-tokenizer step on the text; `None` if the step may drop or shorten text.
    fn pre_tokenizer(&mut self, step: &Value) -> Option<()> {
        match step["type"].as_str() {
            None if step.is_null() => {}
            Some("ByteLevel") => self.byte_level = true,
            Some("Split" | "Punctuation") if step["behavior"] != "Removed" => {}
            Some("Digits") => {}
            Some("Metaspace") => self.replaced.push(b' '),
            Some("Sequence") => {
                step["pretokenizers"].as_array()?.iter().try_for_each(|s| self.pre_tokenizer(s))?;
            }
            _ => return None,
        }
        Some(())
    }
}

/// Checks that the BPE model encodes every byte of a text: `None` if it may drop a byte, or encode several
/// unknown bytes as one token.
fn covers_every_byte(model: &Value, byte_level: bool) -> Option<()> {
    let plain = |name: &str| model[name].as_str().unwrap_or_default().is_empty();
    let vocabulary = model["vocab"].as_object()?;
    let fallback = model["byte_fallback"] == true;
    // The alphabet of byte-level BPE has 256 letters; each of them must be a token.
    let letters = vocabulary.keys().filter(|token| token.chars().count() == 1).count();
    let bytes = (0..=u8::MAX).all(|byte| vocabulary.contains_key(&format!("<0x{byte:02X}>")));
    let covers = (byte_level && letters >= 256) || (fallback && bytes);
    (model["type"] == "BPE"
        && covers
        && plain("continuing_subword_prefix")
        && plain("end_of_word_suffix"))
    .then_some(())
}

fn counts(bytes: &[u8]) -> [usize; 256] {
    let mut counts = [0; 256];
    for byte in bytes {
        counts[usize::from(*byte)] += 1;
    }
    counts
}

/// Counts, by byte value, the bytes of all characters that NFC leaves unchanged regardless of the
/// neighbouring characters.
fn counts_of_stable(text: &str) -> [usize; 256] {
    let mut counts = [0; 256];
    let mut chars = text.chars().peekable();
    while let Some(c) = chars.next() {
        if is_stable(c) && chars.peek().is_none_or(|next| is_stable(*next)) {
            for byte in c.encode_utf8(&mut [0; 4]).bytes() {
                counts[usize::from(byte)] += 1;
            }
        }
    }
    counts
}

/// Whether NFC leaves `c` unchanged, provided that the next character is stable too: `c` is a starter that
/// composes with no preceding character and is its own composition. Covers only the most common Unicode
/// blocks (Unicode 16, `NFC_Quick_Check` and `Canonical_Combining_Class`).
pub(super) fn is_stable(c: char) -> bool {
    matches!(c,
        '\0'..='\u{2ff}' | '\u{400}'..='\u{482}' | '\u{2010}'..='\u{2027}'
        | '\u{3001}'..='\u{3029}' | '\u{3041}'..='\u{3096}' | '\u{30a1}'..='\u{30fa}'
        | '\u{3400}'..='\u{4dbf}' | '\u{4e00}'..='\u{9fff}' | '\u{ac00}'..='\u{d7a3}'
        | '\u{ff01}'..='\u{ff5e}' | '\u{1f300}'..='\u{1f64f}')
}

#[cfg(test)]
mod tests {
    use super::*;
    use tokenizers::{NormalizedString, Normalizer as _, normalizers::NFC};

    #[test]
    fn stable_characters_are_unchanged_by_nfc() {
        for c in (0..=0x10_ffff).filter_map(char::from_u32).filter(|c| is_stable(*c)) {
            let text = format!("a{c}{c}\u{4e00}{c}");
            let mut normalized = NormalizedString::from(text.as_str());
            NFC.normalize(&mut normalized).unwrap();
            assert_eq!(normalized.get(), text, "U+{:04X}", u32::from(c));
        }
    }
}
