//! Cuts a long text into windows that are tokenised one after the other and give the same tokens as the whole
//! text.
//!
//! The `tokenizers` crate allocates over a hundred bytes per byte of a text until the text is tokenised;
//! tokenising window by window bounds this memory. A cut must be a boundary between two pre-tokens that no
//! text after the window can move. The patterns of the supported pre-tokenizers are alternatives of a few
//! character runs; no run contains two of the classes letters, digits, white space and punctuation. Most
//! patterns take at most three digits per pre-token. So a pre-token that begins before the cut is determined
//! by the characters up to the `CHANGES_MIN`th change of character class after the cut.

use super::added_tokens::IdentifiedAddedToken;
use super::pre_tokenizer_patterns as patterns;
use super::token_count_bound::is_stable;
use serde_json::Value;
use tokenizers::AddedToken;

/// Size in bytes of a window, the part of a long text that is tokenised separately. A window that contains no
/// safe cut position is enlarged.
pub(super) const WINDOW_BYTES: usize = 64 << 10;
/// Minimum number of changes of character class (letter, digit, space, punctuation) between a cut and the end
/// of its window: more than any alternative of a supported pre-tokenizer pattern contains.
const CHANGES_MIN: u32 = 16;
/// Minimum number of bytes between a cut and the end of its window, in addition to the longest added token.
const MARGIN_BYTES: usize = 1 << 10;

/// Pre-tokenizer patterns for which texts can be cut into windows; the module documentation explains why.
const KNOWN_PATTERNS: [&str; 11] = [
    patterns::GPT2,
    patterns::QWEN2,
    patterns::QWEN3_5,
    patterns::LLAMA3,
    patterns::O200K,
    patterns::KIMI,
    patterns::TEKKEN,
    // DeepSeek V3, which splits in three steps.
    r"\p{N}{1,3}",
    patterns::DEEPSEEK_HAN_KANA,
    patterns::DEEPSEEK_WORDS,
    // Pattern used by the unit tests, built from the same kind of alternatives.
    r"\p{N}| ?\p{L}+| ?[^\s\p{L}\p{N}]+|\s*[\r\n]+|\s+(?!\S)|\s+",
];

/// Rules that determine where the texts of one tokenizer are cut into windows.
#[derive(Debug)]
pub(super) struct WindowBoundaryRules {
    /// Whether the normaliser composes characters (NFC). If so, a cut requires that NFC leaves the characters
    /// on both sides of the cut unchanged.
    composes: bool,
    /// Whether every pattern takes at most three digits per pre-token.
    bounded_digit_runs: bool,
    margin: usize,
}

impl WindowBoundaryRules {
    /// Determines the rules from `tokenizer.json`; `None` if its pre-token boundaries cannot be predicted
    /// with certainty.
    pub(super) fn new(json: &Value, added: &[IdentifiedAddedToken]) -> Option<Self> {
        let normalizer = &json["normalizer"];
        let has_no_step = normalizer["normalizers"].as_array().is_some_and(Vec::is_empty);
        let composes = match normalizer["type"].as_str() {
            None if normalizer.is_null() => false,
            Some("Sequence") if has_no_step => false,
            Some("NFC") => true,
            _ => return None,
        };
        // Without a normaliser, the added tokens that are matched after normalisation are matched in the
        // original text, too.
        let is_plain = |token: &AddedToken| {
            let is_in_text = !token.normalized || !composes;
            !token.lstrip && !token.rstrip && !token.single_word && is_in_text
        };
        let is_supported = splits_by_known_patterns(&json["pre_tokenizer"])
            && json["model"]["type"] == "BPE"
            && json["model"]["dropout"].is_null()
            && added.iter().all(|added| is_plain(&added.token));
        let longest = added.iter().map(|added| added.token.content.len()).max().unwrap_or(0);
        let bounded_digit_runs = !takes_runs_of_digits(&json["pre_tokenizer"]);
        is_supported.then_some(Self {
            composes,
            bounded_digit_runs,
            margin: longest + MARGIN_BYTES,
        })
    }

    /// Returns the last position at which `window`, a part of a long text, can be cut. `borders` are the byte
    /// positions of the pre-token boundaries, in ascending order.
    pub(super) fn last_safe_cut(&self, window: &str, borders: &[usize]) -> Option<usize> {
        let last = stable_prefix_end(window, self.bounded_digit_runs)?
            .min(window.len().checked_sub(self.margin)?);
        let candidates = borders.partition_point(|border| *border <= last);
        borders[..candidates]
            .iter()
            .rev()
            .copied()
            .find(|&border| border > 0 && (!self.composes || is_stable_border(window, border)))
    }
}

/// Whether a pre-tokenizer step is supported: it splits by a known pattern and adds no space before the text.
fn splits_by_known_patterns(step: &Value) -> bool {
    match step["type"].as_str() {
        Some("ByteLevel") => step["add_prefix_space"] == false,
        Some("Split") => {
            step["behavior"] == "Isolated"
                && step["invert"] == false
                && step["pattern"]["Regex"].as_str().is_some_and(is_known_pattern)
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

/// Whether `pattern` is a known pattern. Line breaks in `pattern` are escape sequences, or literal characters
/// as in DeepSeek's files.
fn is_known_pattern(pattern: &str) -> bool {
    let escaped = pattern.replace('\r', r"\r").replace('\n', r"\n");
    KNOWN_PATTERNS.contains(&escaped.as_str())
}

/// Whether a pre-tokenizer step takes any number of digits as one pre-token.
fn takes_runs_of_digits(step: &Value) -> bool {
    match step["type"].as_str() {
        // `ByteLevel` splits by GPT-2's pattern.
        Some("ByteLevel") => step["use_regex"] != false,
        Some("Split") => step["pattern"]["Regex"].as_str().is_none_or(|it| it.contains(r"\p{N}+")),
        _ => step["pretokenizers"].as_array().is_none_or(|it| it.iter().any(takes_runs_of_digits)),
    }
}

/// Character classes: no run of a supported pre-tokenizer pattern contains characters of two classes.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
enum PreTokenCharClass {
    Letter,
    Digit,
    Space,
    Punctuation,
}

/// Returns the class of `c`; `None` if the class differs between patterns.
fn class_of(c: char) -> Option<PreTokenCharClass> {
    match c {
        'a'..='z' | 'A'..='Z' | '\u{4e00}'..='\u{9fa5}' | '\u{ac00}'..='\u{d7a3}' => {
            Some(PreTokenCharClass::Letter)
        }
        '0'..='9' => Some(PreTokenCharClass::Digit),
        ' ' | '\n' | '\r' | '\t' => Some(PreTokenCharClass::Space),
        // `/` has no class, because in one pattern a pre-token can end with a run of line breaks and slashes.
        '!'..='.' | ':'..='@' | '\u{3001}' | '\u{3002}' | '\u{ff0c}' => {
            Some(PreTokenCharClass::Punctuation)
        }
        _ => None,
    }
}

/// Returns the last byte position in `window` that is followed by `CHANGES_MIN` changes of character class.
/// With `bounded_digit_runs`, four digits in a row count as a change too.
fn stable_prefix_end(window: &str, bounded_digit_runs: bool) -> Option<usize> {
    /// Maximum number of digits in one pre-token, plus one.
    const DIGITS: u32 = 4;
    let (mut changes, mut class, mut digits) = (0, None, 0);
    for (at, c) in window.char_indices().rev() {
        let Some(next) = class_of(c) else {
            digits = 0;
            continue;
        };
        digits = if next == PreTokenCharClass::Digit { digits + 1 } else { 0 };
        if class.is_some_and(|class| class != next) || bounded_digit_runs && digits == DIGITS {
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
    let Some((before, after)) = window.split_at_checked(border) else { return false };
    before.chars().next_back().is_none_or(is_stable) && after.chars().next().is_none_or(is_stable)
}
