//! Where a long text can be cut so that its parts, tokenised one after the other, give the tokens of the whole.
//!
//! The tokenizer library keeps over a hundred bytes for each byte of a text until it is done. Window by window that is
//! bounded. A cut must be a border of two pre-tokens that no text behind the window can move. The pre-tokenizers known
//! here are alternatives of a few runs of characters; no run holds two of letters, digits, white space and punctuation.
//! Most patterns take three digits at most for one pre-token.
//! So a pre-token that begins before the cut is decided by the characters up to the `CHANGES_MIN`th change of class
//! behind it.

use super::token_count_bound::is_stable;
use protocol::Token;
use serde_json::Value;
use tokenizers::AddedToken;

/// Bytes of a text that are tokenised at a time, if it can be cut.
pub(super) const WINDOW_BYTES: usize = 64 << 10;
/// Changes of class between a cut and the end of its window: more than the runs of any alternative.
const CHANGES_MIN: u32 = 16;
/// Bytes between a cut and the end of its window, beyond the longest added token.
const MARGIN_BYTES: usize = 1 << 10;

/// Patterns of pre-tokenizers that decide as said above.
const KNOWN_PATTERNS: [&str; 8] = [
    // GPT-2.
    r"'s|'t|'re|'ve|'m|'ll|'d| ?\p{L}+| ?\p{N}+| ?[^\s\p{L}\p{N}]+|\s+(?!\S)|\s+",
    // Qwen 2 and 3.
    r"(?i:'s|'t|'re|'ve|'m|'ll|'d)|[^\r\n\p{L}\p{N}]?\p{L}+|\p{N}| ?[^\s\p{L}\p{N}]+[\r\n]*|\s*[\r\n]+|\s+(?!\S)|\s+",
    // Llama 3.
    r"(?i:'s|'t|'re|'ve|'m|'ll|'d)|[^\r\n\p{L}\p{N}]?\p{L}+|\p{N}{1,3}| ?[^\s\p{L}\p{N}]+[\r\n]*|\s*[\r\n]+|\s+(?!\S)|\s+",
    // DeepSeek V3, in three steps.
    r"\p{N}{1,3}",
    "[一-龥\u{3040}-ゟ゠-ヿ]+",
    "[!\"#$%&'()*+,\\-./:;<=>?@\\[\\\\\\]^_`{|}~][A-Za-z]+|[^\\r\\n\\p{L}\\p{P}\\p{S}]?[\\p{L}\\p{M}]+| ?[\\p{P}\\p{S}]+[\\r\\n]*|\\s*[\\r\\n]+|\\s+(?!\\S)|\\s+",
    // Mistral's Tekken.
    r"[^\r\n\p{L}\p{N}]?[\p{Lu}\p{Lt}\p{Lm}\p{Lo}\p{M}]*[\p{Ll}\p{Lm}\p{Lo}\p{M}]+|[^\r\n\p{L}\p{N}]?[\p{Lu}\p{Lt}\p{Lm}\p{Lo}\p{M}]+[\p{Ll}\p{Lm}\p{Lo}\p{M}]*|\p{N}| ?[^\s\p{L}\p{N}]+[\r\n/]*|\s*[\r\n/]+|\s+(?!\S)|\s+",
    // The one of the unit tests, of the same kind.
    r"\p{N}| ?\p{L}+| ?[^\s\p{L}\p{N}]+|\s*[\r\n]+|\s+(?!\S)|\s+",
];

/// What decides where texts of one tokenizer are cut.
#[derive(Debug)]
pub(super) struct WindowCutRules {
    /// The normaliser composes characters (NFC): both sides of a cut must be left as they are.
    composes: bool,
    /// No pattern takes more than three digits at a time.
    few_digits: bool,
    margin: usize,
}

impl WindowCutRules {
    /// `None` if nothing certain is known about borders of this tokenizer's pre-tokens.
    pub(super) fn new(json: &Value, added: &[(Token, AddedToken)]) -> Option<Self> {
        let composes = match json["normalizer"]["type"].as_str() {
            None if json["normalizer"].is_null() => false,
            Some("NFC") => true,
            _ => return None,
        };
        let is_plain = |token: &AddedToken| {
            !token.lstrip && !token.rstrip && !token.single_word && !token.normalized
        };
        let decides = splits_by_known_patterns(&json["pre_tokenizer"])
            && json["model"]["type"] == "BPE"
            && json["model"]["dropout"].is_null()
            && added.iter().all(|(_, token)| is_plain(token));
        let longest = added.iter().map(|(_, token)| token.content.len()).max().unwrap_or(0);
        let few_digits = !takes_runs_of_digits(&json["pre_tokenizer"]);
        decides.then_some(Self { composes, few_digits, margin: longest + MARGIN_BYTES })
    }

    /// The last of these borders, ascending bytes of `window`, at which the text can be cut.
    pub(super) fn last_safe_cut(&self, window: &str, borders: &[usize]) -> Option<usize> {
        let last =
            stable_prefix_end(window, self.few_digits)?.min(window.len().checked_sub(self.margin)?);
        let behind = borders.partition_point(|border| *border <= last);
        borders[..behind]
            .iter()
            .rev()
            .copied()
            .find(|&border| border > 0 && (!self.composes || is_stable_border(window, border)))
    }
}

/// Whether the steps before the model are the known ones, without a space put in front of the text.
fn splits_by_known_patterns(step: &Value) -> bool {
    match step["type"].as_str() {
        Some("ByteLevel") => step["add_prefix_space"] == false,
        Some("Split") => {
            let pattern = step["pattern"]["Regex"].as_str();
            step["behavior"] == "Isolated"
                && step["invert"] == false
                && pattern.is_some_and(|pattern| KNOWN_PATTERNS.contains(&pattern))
        }
        Some("Sequence") => {
            let steps = step["pretokenizers"].as_array();
            steps.is_some_and(|steps| {
                steps.iter().all(splits_by_known_patterns)
                    && steps.iter().any(|step| step["type"] == "ByteLevel")
            })
        }
        _ => false,
    }
}

/// Whether a step takes any number of digits for one pre-token.
fn takes_runs_of_digits(step: &Value) -> bool {
    match step["type"].as_str() {
        // Its own pattern is GPT-2's.
        Some("ByteLevel") => step["use_regex"] != false,
        Some("Split") => step["pattern"]["Regex"].as_str().is_none_or(|it| it.contains(r"\p{N}+")),
        _ => step["pretokenizers"].as_array().is_none_or(|it| it.iter().any(takes_runs_of_digits)),
    }
}

/// Classes of which no run of a known pattern holds two.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
enum CutCharacterClass {
    Letter,
    Digit,
    Space,
    Punctuation,
}

/// The class of a character, where it is beyond doubt.
fn class_of(c: char) -> Option<CutCharacterClass> {
    match c {
        'a'..='z' | 'A'..='Z' | '\u{4e00}'..='\u{9fa5}' | '\u{ac00}'..='\u{d7a3}' => {
            Some(CutCharacterClass::Letter)
        }
        '0'..='9' => Some(CutCharacterClass::Digit),
        ' ' | '\n' | '\r' | '\t' => Some(CutCharacterClass::Space),
        // A slash may end with a line in one pattern.
        '!'..='.' | ':'..='@' | '\u{3001}' | '\u{3002}' | '\u{ff0c}' => {
            Some(CutCharacterClass::Punctuation)
        }
        _ => None,
    }
}

/// The byte behind which a window has just enough changes of class; where `few_digits` are taken at a time, more than
/// these in a row are as good as a change.
fn stable_prefix_end(window: &str, few_digits: bool) -> Option<usize> {
    /// One more than a pre-token has.
    const DIGITS: u32 = 4;
    let (mut changes, mut class, mut digits) = (0, None, 0);
    for (at, c) in window.char_indices().rev() {
        let Some(next) = class_of(c) else {
            digits = 0;
            continue;
        };
        digits = if next == CutCharacterClass::Digit { digits + 1 } else { 0 };
        if class.is_some_and(|class| class != next) || few_digits && digits == DIGITS {
            (changes, digits) = (changes + 1, 0);
        }
        class = Some(next);
        if changes == CHANGES_MIN {
            return Some(at);
        }
    }
    None
}

fn is_stable_border(window: &str, border: usize) -> bool {
    let Some((before, behind)) = window.split_at_checked(border) else { return false };
    before.chars().next_back().is_none_or(is_stable) && behind.chars().next().is_none_or(is_stable)
}
