//! The candidate tokens that a rank sends for a row, and their encoding as 32-bit words.
//!
//! The words are flags, the candidates, the probability mass of the shard, and the statistics of the shard
//! from which log-probabilities are computed. [`CandidateLayout`] defines which of these are present.

use super::candidate_layout::CandidateLayout;
use crate::cpu::sample::row::RankedToken;

/// A candidate token: its id with the value that it is ranked by, and its raw logit.
#[derive(Debug, Clone, Copy, PartialEq)]
pub(super) struct TokenCandidate {
    pub(super) ranked: RankedToken,
    pub(super) raw: f32,
}

/// Message of a rank for a row: candidate tokens, the probability mass of the shard, and the statistics of
/// the shard from which log-probabilities are computed.
#[derive(Debug, Clone, Default, PartialEq)]
pub(super) struct RankCandidates {
    /// Whether a logit of the shard is NaN or infinite.
    pub(super) non_finite: bool,
    /// Whether min-p may keep tokens of the shard after the last candidate.
    pub(super) has_more: bool,
    /// Candidate tokens, the most likely first.
    pub(super) candidates: Vec<TokenCandidate>,
    /// Probability mass of the shard relative to its first candidate: `Σ exp(value − value of the first
    /// candidate)` over all tokens of the shard.
    pub(super) mass: f64,
    pub(super) logprobs: ShardLogprobs,
}

/// Maximum, exponential sum and most likely tokens of the raw logits of a shard, for log-probabilities.
#[derive(Debug, Clone, PartialEq)]
pub(super) struct ShardLogprobs {
    /// Largest raw logit of the shard.
    pub(super) max: f32,
    /// `Σ exp(l − max)` over all raw logits `l` of the shard.
    pub(super) sum: f64,
    /// The most likely tokens of the shard in order, with their raw logits.
    pub(super) top: Vec<RankedToken>,
}

impl Default for ShardLogprobs {
    /// Returns the statistics of an empty vocabulary shard.
    fn default() -> Self {
        Self { max: f32::NEG_INFINITY, sum: 0.0, top: Vec::new() }
    }
}

/// Flag: a logit of the shard is NaN or infinite.
const NON_FINITE: u32 = 1;
/// Flag: min-p may keep tokens of the shard after the last candidate.
const HAS_MORE: u32 = 2;
/// Token id that fills unused candidate entries.
const NO_ID: u32 = u32::MAX;

impl RankCandidates {
    /// Returns the message of a rank for a row with the single candidate `candidate`.
    pub(super) fn single(candidate: TokenCandidate) -> Self {
        Self { candidates: vec![candidate], ..Self::default() }
    }

    /// Encodes the message as 32-bit words; `layout` defines which data the words contain.
    pub(super) fn words(&self, layout: &CandidateLayout) -> Vec<u32> {
        let flag = |on: bool, flag: u32| if on { flag } else { 0 };
        let mut words = vec![flag(self.non_finite, NON_FINITE) | flag(self.has_more, HAS_MORE)];
        for candidate in &self.candidates {
            words.extend([candidate.ranked.id, candidate.ranked.value.to_bits()]);
            words.extend(layout.raw.then_some(candidate.raw.to_bits()));
        }
        words.resize(1 + layout.candidates * layout.candidate_words(), NO_ID);
        if layout.mass {
            words.extend(f64_to_words(self.mass));
        }
        if layout.top.is_some() {
            words.push(self.logprobs.max.to_bits());
            words.extend(f64_to_words(self.logprobs.sum));
            words.extend(
                self.logprobs.top.iter().flat_map(|token| [token.id, token.value.to_bits()]),
            );
        }
        words.resize(layout.words(), NO_ID);
        words
    }

    /// Decodes the message of a rank from 32-bit words; `layout` defines which data the words contain.
    pub(super) fn of(words: &[u32], layout: &CandidateLayout) -> Self {
        let (flags, rest) = (words[0], &words[1..]);
        let candidate_words = layout.candidate_words();
        let (candidates, mut rest) = rest.split_at(layout.candidates * candidate_words);
        let candidates =
            candidates.chunks_exact(candidate_words).take_while(|words| words[0] != NO_ID);
        let mut decoded = Self {
            non_finite: flags & NON_FINITE != 0,
            has_more: flags & HAS_MORE != 0,
            candidates: candidates.map(candidate).collect(),
            ..Self::default()
        };
        if layout.mass {
            decoded.mass = f64_from_words(rest);
            rest = &rest[2..];
        }
        if layout.top.is_some() {
            let top = rest[3..].chunks_exact(2).take_while(|words| words[0] != NO_ID);
            let top = top.map(ranked_token).collect();
            decoded.logprobs = ShardLogprobs {
                max: f32::from_bits(rest[0]),
                sum: f64_from_words(&rest[1..]),
                top,
            };
        }
        decoded
    }
}

fn candidate(words: &[u32]) -> TokenCandidate {
    let ranked = ranked_token(words);
    TokenCandidate { ranked, raw: words.get(2).map_or(ranked.value, |raw| f32::from_bits(*raw)) }
}

fn ranked_token(words: &[u32]) -> RankedToken {
    RankedToken { id: words[0], value: f32::from_bits(words[1]) }
}

fn f64_to_words(x: f64) -> [u32; 2] {
    [x.to_bits() as u32, (x.to_bits() >> 32) as u32]
}

fn f64_from_words(words: &[u32]) -> f64 {
    f64::from_bits(u64::from(words[0]) | u64::from(words[1]) << 32)
}
