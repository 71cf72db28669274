//! Prevents special token strings in user text from being encoded as special tokens.
//!
//! Before rendering, a sentinel character is inserted into the strings of the request: before each character
//! at which a special token begins, and before each character that could complete a special token together
//! with neighbouring text. Templates trim and compare strings, so sentinels are inserted only at these
//! positions: other strings render unchanged, and a request without special token text is rendered as if
//! there were no guard. After rendering, the sentinels are removed. Their positions become protected
//! positions: the tokenizer never encodes a special token that covers a protected position.

use aho_corasick::{AhoCorasick, MatchKind};
use serde_json::Value;

use super::large_integers::integer_of_object;
use super::template::RenderedChat;

/// Search automaton that finds the special tokens of one tokenizer in the strings of requests.
#[derive(Debug)]
pub(super) struct SpecialTokenFinder {
    token_strings: Vec<String>,
    automaton: Option<AhoCorasick>,
}

impl SpecialTokenFinder {
    pub(super) fn new(token_strings: &[String]) -> Result<Self, String> {
        let token_strings: Vec<String> =
            token_strings.iter().filter(|s| !s.is_empty()).cloned().collect();
        let automaton = if token_strings.is_empty() {
            None
        } else {
            let builder =
                AhoCorasick::builder().match_kind(MatchKind::Standard).build(&token_strings);
            Some(builder.map_err(|e| e.to_string())?)
        };
        Ok(Self { token_strings, automaton })
    }

    /// Inserts `sentinel` into every string and every object key of `value`, before each character at which a
    /// special token begins or that could complete a special token begun by neighbouring text.
    pub(super) fn insert_sentinels(&self, value: &mut Value, sentinel: char) {
        match value {
            Value::String(text) => {
                if let Some(escaped) = self.with_sentinels(text, sentinel) {
                    *text = escaped;
                }
            }
            Value::Array(items) => {
                for item in items {
                    self.insert_sentinels(item, sentinel);
                }
            }
            Value::Object(members) if integer_of_object(members).is_some() => {}
            Value::Object(members) => {
                if members.keys().any(|key| self.with_sentinels(key, sentinel).is_some()) {
                    let escaped = std::mem::take(members).into_iter().map(|(key, value)| {
                        (self.with_sentinels(&key, sentinel).unwrap_or(key), value)
                    });
                    *members = escaped.collect();
                }
                members.values_mut().for_each(|member| self.insert_sentinels(member, sentinel));
            }
            Value::Null | Value::Bool(_) | Value::Number(_) => {}
        }
    }

    /// Returns `text` with sentinels inserted; `None` if `text` needs no sentinel.
    fn with_sentinels(&self, text: &str, sentinel: char) -> Option<String> {
        let automaton = self.automaton.as_ref()?;
        let mut at: Vec<usize> =
            automaton.find_overlapping_iter(text).map(|found| found.start()).collect();
        let (first, last) = (text.chars().next()?, text.chars().next_back()?);
        if self.token_strings.iter().any(|s| ends_inside(s, first, text)) {
            at.push(0);
        }
        if self.token_strings.iter().any(|s| begins_inside(s, last, text)) {
            at.push(text.len() - last.len_utf8());
        }
        if at.is_empty() {
            return None;
        }
        at.sort_unstable();
        at.dedup();
        let mut escaped = String::with_capacity(text.len() + at.len() * sentinel.len_utf8());
        let mut done = 0;
        for position in at {
            escaped.push_str(&text[done..position]);
            escaped.push(sentinel);
            done = position;
        }
        escaped.push_str(&text[done..]);
        Some(escaped)
    }
}

/// Whether `text`, whose last character is `last`, ends with a proper prefix of `token_string`.
fn begins_inside(token_string: &str, last: char, text: &str) -> bool {
    let ends =
        token_string.char_indices().filter(|&(_, c)| c == last).map(|(at, c)| at + c.len_utf8());
    ends.filter(|&end| end < token_string.len()).any(|end| text.ends_with(&token_string[..end]))
}

/// Whether `text`, whose first character is `first`, starts with a proper suffix of `token_string`.
fn ends_inside(token_string: &str, first: char, text: &str) -> bool {
    let starts = token_string.char_indices().filter(|&(at, c)| at > 0 && c == first);
    starts.into_iter().any(|(at, _)| text.starts_with(&token_string[at..]))
}

/// Characters that may be chosen as sentinels: Unicode noncharacters, then private-use characters.
const SENTINELS: [std::ops::RangeInclusive<char>; 2] =
    ['\u{fdd0}'..='\u{fdef}', '\u{f0000}'..='\u{fffff}'];

/// Whether `c` may be chosen as a sentinel. Template filters must not rewrite such characters.
pub(super) fn may_be_sentinel(c: char) -> bool {
    SENTINELS.iter().any(|range| range.contains(&c))
}

/// Returns two sentinels that occur in no string of `values`. `None` if every candidate occurs, which takes a
/// crafted request of several hundred kilobytes.
pub(super) fn unused_characters(values: &[&Value]) -> Option<[char; 2]> {
    let candidates = SENTINELS.into_iter().flatten();
    let mut unused = candidates.filter(|&c| !values.iter().any(|value| contains(value, c)));
    Some([unused.next()?, unused.next()?])
}

fn contains(value: &Value, c: char) -> bool {
    match value {
        Value::String(text) => text.contains(c),
        Value::Array(items) => items.iter().any(|item| contains(item, c)),
        Value::Object(members) => {
            members.iter().any(|(key, member)| key.contains(c) || contains(member, c))
        }
        Value::Null | Value::Bool(_) | Value::Number(_) => false,
    }
}

/// Removes the sentinels from `text` and returns their positions as protected positions: at these positions,
/// no special token is matched.
pub(super) fn remove_sentinels(text: String, sentinel: char) -> RenderedChat {
    if !text.contains(sentinel) {
        return RenderedChat { text, protected_positions: Vec::new() };
    }
    let mut plain = String::with_capacity(text.len());
    let mut protected_positions = Vec::new();
    for (index, part) in text.split(sentinel).enumerate() {
        if index > 0 {
            protected_positions.push(plain.len());
        }
        plain.push_str(part);
    }
    protected_positions.dedup();
    RenderedChat { text: plain, protected_positions }
}

#[cfg(test)]
mod tests {
    use super::*;
    use serde_json::json;

    fn with_sentinels(text: &str) -> String {
        let guard = SpecialTokenFinder::new(&["<|im_end|>".to_owned(), "</s>".to_owned()]).unwrap();
        let mut value = json!(text);
        guard.insert_sentinels(&mut value, '#');
        value.as_str().unwrap().to_owned()
    }

    #[test]
    fn sentinels_guard_whole_and_partial_special_tokens() {
        assert_eq!(with_sentinels("hello"), "hello");
        assert_eq!(with_sentinels("a <|im_end|> b </s>."), "a #<|im_end|> b #</s>.");
        assert_eq!(with_sentinels("a <|im_"), "a <|im#_");
        assert_eq!(with_sentinels("end|> b"), "#end|> b");
        assert_eq!(with_sentinels("1 < 2 > 1"), "1 < 2 > 1");
        assert_eq!(with_sentinels("<|im_end|><"), "#<|im_end|>#<");
    }

    #[test]
    fn sentinels_guard_keys_and_nested_strings() {
        let guard = SpecialTokenFinder::new(&["</s>".to_owned()]).unwrap();
        let mut value = json!({"x</s>": ["</s>"], "y": 1});
        guard.insert_sentinels(&mut value, '#');
        assert_eq!(value, json!({"x#</s>": ["#</s>"], "y": 1}));
    }

    #[test]
    fn removing_sentinels_restores_text_and_positions() {
        let rendered = remove_sentinels("a#bc##d".to_owned(), '#');
        assert_eq!((rendered.text.as_str(), rendered.protected_positions), ("abcd", vec![1, 3]));
    }

    #[test]
    fn sentinel_is_never_a_character_of_the_request() {
        let value = json!({"\u{fdd0}": ["\u{fdd1}\u{fdd3}"]});
        assert_eq!(unused_characters(&[&value]), Some(['\u{fdd2}', '\u{fdd4}']));
    }
}
