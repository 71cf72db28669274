//! Matches stop strings on text while it is generated.
//!
//! There is one Knuth-Morris-Pratt automaton per stop string, so each byte costs amortised constant time. The
//! match that *ends* first is used; of several matches with the same end, the longest is used. So the result
//! does not depend on how the text is split into chunks.

use std::sync::Arc;

/// Stop strings of one request, compiled once and shared by its choices.
#[derive(Debug, Clone, Default)]
pub struct StopStrings {
    patterns: Arc<[StopPattern]>,
    include: bool,
}

/// Stop string with its failure function for Knuth-Morris-Pratt search.
#[derive(Debug)]
struct StopPattern {
    text: String,
    /// Failure function of Knuth-Morris-Pratt. `failure[i]`: length of the longest proper prefix of
    /// `text[..=i]` that is also its suffix.
    failure: Vec<u32>,
}

impl StopStrings {
    /// Compiles `stops`; empty strings are ignored. With `include` (`include_stop_str_in_output`), the output
    /// ends after the matched stop string, otherwise before it.
    pub fn new<S: AsRef<str>>(stops: &[S], include: bool) -> Self {
        let patterns =
            stops.iter().map(AsRef::as_ref).filter(|s| !s.is_empty()).map(StopPattern::new);
        Self { patterns: patterns.collect(), include }
    }

    /// Whether there are no stop strings.
    pub fn is_empty(&self) -> bool {
        self.patterns.is_empty()
    }

    /// Returns a matcher at the start of a text.
    pub fn matcher(&self) -> StopMatcher {
        StopMatcher {
            states: vec![0; self.patterns.len()],
            set: self.clone(),
            held_back: String::new(),
            done: false,
        }
    }
}

impl StopPattern {
    fn new(text: &str) -> Self {
        let bytes = text.as_bytes();
        let mut failure = vec![0_u32; bytes.len()];
        let mut border = 0_usize;
        for i in 1..bytes.len() {
            while border > 0 && bytes[i] != bytes[border] {
                border = failure[border - 1] as usize;
            }
            border += usize::from(bytes[i] == bytes[border]);
            failure[i] = border as u32;
        }
        Self { text: text.to_owned(), failure }
    }

    /// Returns the number of matched bytes of this stop string after `byte`, given that `matched` bytes were
    /// matched before `byte`.
    fn step(&self, mut matched: usize, byte: u8) -> usize {
        let bytes = self.text.as_bytes();
        while matched > 0 && bytes[matched] != byte {
            matched = self.failure[matched - 1] as usize;
        }
        matched + usize::from(bytes[matched] == byte)
    }
}

/// Matches the text of one choice and holds back the longest suffix that may begin a stop string.
#[derive(Debug, Clone)]
pub struct StopMatcher {
    set: StopStrings,
    /// Number of bytes matched so far, per stop string; always less than the length of the stop string.
    states: Vec<usize>,
    /// Text read but not emitted, because it is a proper prefix of some stop string.
    held_back: String,
    done: bool,
}

impl StopMatcher {
    /// Matches more text and appends to `out` the part that can no longer belong to a stop string.
    ///
    /// Returns the stop string that was matched, if any. The text ends at the match: the rest of `text` is
    /// dropped, and later calls append nothing.
    pub fn push(&mut self, text: &str, out: &mut String) -> Option<&str> {
        if self.done {
            return None;
        }
        if self.set.is_empty() {
            out.push_str(text);
            return None;
        }
        let held_back_before = self.held_back.len();
        for (at, &byte) in text.as_bytes().iter().enumerate() {
            let Some(index) = self.step(byte) else { continue };
            self.done = true;
            self.held_back.push_str(&text[..=at]);
            let stop = &self.set.patterns[index].text;
            let end = held_back_before + at + 1;
            let keep = if self.set.include { end } else { end - stop.len() };
            out.push_str(&self.held_back[..keep]);
            self.held_back.clear();
            return Some(stop);
        }
        self.held_back.push_str(text);
        let pending_len = self.states.iter().copied().max().unwrap_or(0);
        // A match starts at the first byte of a UTF-8 character, so `final_len` is a character boundary.
        let final_len = self.held_back.len() - pending_len;
        out.push_str(&self.held_back[..final_len]);
        self.held_back.drain(..final_len);
        None
    }

    /// Appends text in which stop strings are not matched (below `min_tokens`). The text is emitted
    /// immediately, and no later match includes any of it.
    pub fn push_unmatched(&mut self, text: &str, out: &mut String) {
        if self.done {
            return;
        }
        out.push_str(&self.held_back);
        out.push_str(text);
        self.held_back.clear();
        self.states.fill(0);
    }

    /// Ends the text without a stop string: appends the text held back to `out`.
    pub fn finish(&mut self, out: &mut String) {
        out.push_str(&self.held_back);
        self.held_back.clear();
        self.done = true;
    }

    /// Whether text is held back because it may be the beginning of a stop string.
    pub fn has_pending(&self) -> bool {
        !self.held_back.is_empty()
    }

    /// Advances the automaton of every stop string by one byte. Returns the index of the stop string that
    /// ends with this byte; if several do, the longest one.
    fn step(&mut self, byte: u8) -> Option<usize> {
        let mut hit: Option<usize> = None;
        for (index, pattern) in self.set.patterns.iter().enumerate() {
            let matched = pattern.step(self.states[index], byte);
            self.states[index] = matched;
            let longer = hit.is_none_or(|h| self.set.patterns[h].text.len() < matched);
            if matched == pattern.text.len() && longer {
                hit = Some(index);
            }
        }
        hit
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use proptest::prelude::*;

    fn run(stops: &[&str], include: bool, chunks: &[&str]) -> (String, Option<String>) {
        let mut matcher = StopStrings::new(stops, include).matcher();
        let mut out = String::new();
        for chunk in chunks {
            if let Some(stop) = matcher.push(chunk, &mut out) {
                return (out, Some(stop.to_owned()));
            }
        }
        matcher.finish(&mut out);
        (out, None)
    }

    #[test]
    fn stop_string_is_trimmed_or_included() {
        let found = |text: &str, stop: &str| (text.to_owned(), Some(stop.to_owned()));
        assert_eq!(run(&["END"], false, &["abcE", "ND", "x"]), found("abc", "END"));
        assert_eq!(run(&["END"], true, &["abcE", "NDtail"]), found("abcEND", "END"));
        assert_eq!(run(&["ab", "b"], false, &["xab"]), found("x", "ab"));
        assert_eq!(run(&["abc", "b"], false, &["xabc"]), found("xa", "b"));
        assert_eq!(run(&["END"], false, &["abcEN"]), ("abcEN".to_owned(), None));
    }

    #[test]
    fn holds_back_only_possible_stop_prefixes() {
        let mut matcher = StopStrings::new(&["aab"], false).matcher();
        let mut out = String::new();
        assert_eq!(matcher.push("xaaa", &mut out), None);
        assert_eq!(out, "xa");
        assert!(matcher.has_pending());
        matcher.push_unmatched("b!", &mut out);
        assert_eq!(out, "xaaab!");
    }

    proptest! {
        #[test]
        fn stop_matching_is_chunking_invariant(
            text in "[abé]{0,40}",
            stops in prop::collection::vec("[abé]{1,4}", 0..4),
            include: bool,
            cuts in prop::collection::vec(0_usize..41, 0..6),
        ) {
            let stops: Vec<&str> = stops.iter().map(String::as_str).collect();
            let whole = run(&stops, include, &[&text]);
            let mut cuts: Vec<usize> =
                cuts.into_iter().filter(|&c| text.is_char_boundary(c)).collect();
            cuts.sort_unstable();
            cuts.push(text.len());
            let mut from = 0;
            let chunks: Vec<&str> =
                cuts.iter().map(|&to| &text[std::mem::replace(&mut from, to)..to]).collect();
            prop_assert_eq!(&run(&stops, include, &chunks), &whole);
            let first = stops.iter().filter_map(|s| text.find(s).map(|at| at + s.len())).min();
            prop_assert_eq!(first.is_some(), whole.1.is_some());
            if let (Some(end), Some(stop)) = (first, &whole.1) {
                let keep = if include { end } else { end - stop.len() };
                prop_assert_eq!(&whole.0, &text[..keep]);
            } else {
                prop_assert_eq!(&whole.0, &text);
            }
        }
    }
}
