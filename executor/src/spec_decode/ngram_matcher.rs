//! N-gram lookup (prompt lookup decoding) in the tokens of a request.
//!
//! Source: Saxena, Prompt Lookup Decoding, 2023. The matcher searches the request for an earlier occurrence
//! of its newest tokens; the tokens after that occurrence are the draft tokens. No model pass is needed. The
//! method works well if outputs repeat the prompt.

use protocol::Token;

/// N-gram matcher with bounds for the length of a match.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) struct NgramMatcher {
    /// Minimum length of a match in tokens, at least 1.
    pub(crate) min: usize,
    /// Maximum length of a match in tokens; longer matches count as this length.
    pub(crate) max: usize,
}

impl NgramMatcher {
    /// Returns up to `max_drafts` draft tokens that continue `tokens`: the tokens after the longest earlier
    /// occurrence of the newest tokens. Among occurrences of equal length, the newest one with at least
    /// `max_drafts` following tokens is used; if there is none, the oldest occurrence is used.
    pub(crate) fn propose(self, tokens: &[Token], max_drafts: usize) -> &[Token] {
        let mut found = (0, tokens.len()); // Length of the best match, and the index after its end.
        for end in (1..tokens.len()).rev() {
            let length = self.matching_suffix_len(&tokens[..end], tokens);
            let more = length == found.0 && tokens.len() - found.1 < max_drafts;
            if length >= self.min && (length > found.0 || more) {
                found = (length, end);
            }
            if found.0 == self.max && tokens.len() - found.1 >= max_drafts {
                break; // No later iteration can find a better match.
            }
        }
        &tokens[found.1..tokens.len().min(found.1 + max_drafts)]
    }

    /// Returns the length of the common suffix of `a` and `b`, at most `max`.
    fn matching_suffix_len(self, a: &[Token], b: &[Token]) -> usize {
        let pairs = a.iter().rev().zip(b.iter().rev());
        pairs.take(self.max).take_while(|(a, b)| a == b).count()
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    const NGRAM: NgramMatcher = NgramMatcher { min: 2, max: 4 };

    #[test]
    fn continuation_of_longest_match_is_proposed() {
        // The suffix `7 8` occurs twice before, the suffix `6 7 8` once.
        let tokens = [6, 7, 8, 1, 2, 7, 8, 3, 4, 6, 7, 8];
        assert_eq!(NGRAM.propose(&tokens, 3), [1, 2, 7]);
        assert_eq!(NGRAM.propose(&tokens[1..], 3), [3, 4, 6], "the newest of equal matches");
        assert_eq!(NGRAM.propose(&tokens, 0), [0; 0]);
    }

    #[test]
    fn short_match_proposes_nothing() {
        assert_eq!(NGRAM.propose(&[1, 2, 3, 4, 9, 3], 4), [0; 0], "one token");
        assert_eq!(NGRAM.propose(&[1, 2, 3], 4), [0; 0]);
        assert_eq!(NGRAM.propose(&[5], 4), [0; 0]);
        assert_eq!(NGRAM.propose(&[], 4), [0; 0]);
        assert_eq!(NgramMatcher { min: 1, max: 1 }.propose(&[1, 2, 3, 4, 9, 3], 4), [4, 9, 3]);
    }

    #[test]
    fn match_length_is_bounded() {
        // The older occurrence of `2 3 4 5` would match five tokens (`1 2 3 4 5`), but at most four tokens
        // are compared.
        let tokens = [1, 2, 3, 4, 5, 8, 9, 2, 3, 4, 5, 6, 1, 2, 3, 4, 5];
        assert_eq!(NGRAM.propose(&tokens, 2), [6, 1]);
    }

    #[test]
    fn repeating_loop_proposes_earlier_tokens() {
        let tokens = [9, 1, 2, 1, 2, 1, 2];
        assert_eq!(NGRAM.propose(&tokens, 2), [1, 2]);
        assert_eq!(NGRAM.propose(&tokens, 4), [1, 2], "no match has four tokens after it");
        let tokens = [7; 12];
        assert_eq!(NGRAM.propose(&tokens, 3), [7; 3]);
    }

    #[test]
    fn proposals_match_naive_search() {
        let mut x = 1_u32;
        let mut draw = |below: u32| {
            x = x.wrapping_mul(1_664_525).wrapping_add(1_013_904_223);
            (x >> 16) % below
        };
        for _ in 0..3000 {
            let ids = 2 + draw(4);
            let tokens: Vec<Token> = (0..draw(40)).map(|_| draw(ids)).collect();
            let min = 1 + draw(3) as usize;
            let ngram = NgramMatcher { min, max: min + draw(3) as usize };
            let max_drafts = 1 + draw(5) as usize;
            let end_of = |len: usize| {
                let suffix = &tokens[tokens.len().checked_sub(len)?..];
                let ends = (len..tokens.len()).filter(|&end| &tokens[end - len..end] == suffix);
                let ends: Vec<usize> = ends.collect();
                let enough = ends.iter().rev().find(|&&end| tokens.len() - end >= max_drafts);
                enough.or(ends.first()).copied()
            };
            let end = (ngram.min..=ngram.max).rev().find_map(end_of).unwrap_or(tokens.len());
            let expected = &tokens[end..tokens.len().min(end + max_drafts)];
            assert_eq!(
                ngram.propose(&tokens, max_drafts),
                expected,
                "{tokens:?}, {ngram:?}, {max_drafts}"
            );
        }
    }
}
