//! The candidates of a rank for a row, and their encoding.
//!
//! A word of flags, the candidates, the mass of the shard, and the report on its raw logits, as
//! [`CandidateLayout`] defines.

use super::candidate_layout::CandidateLayout;
use crate::cpu::sample::row::RankedToken;

/// A token id with the value that it is ranked by, and its raw logit.
#[derive(Debug, Clone, Copy, PartialEq)]
pub(super) struct TokenCandidate {
    pub(super) at: RankedToken,
    pub(super) raw: f32,
}

/// Candidates of a rank for a row.
#[derive(Debug, Clone, Default, PartialEq)]
pub(super) struct RankCandidates {
    /// Whether a logit is NaN or infinite.
    pub(super) non_finite: bool,
    /// Whether min-p may keep ids after the last candidate.
    pub(super) more: bool,
    /// Candidates in order.
    pub(super) candidates: Vec<TokenCandidate>,
    /// `Σ exp(value − value of the first candidate)` over the shard.
    pub(super) mass: f64,
    pub(super) report: ShardLogprobs,
}

/// Raw logits of a shard, for log-probabilities.
#[derive(Debug, Clone, PartialEq)]
pub(super) struct ShardLogprobs {
    /// Largest logit.
    pub(super) max: f32,
    /// `Σ exp(l − max)`
    pub(super) sum: f64,
    /// Top ids in order.
    pub(super) top: Vec<RankedToken>,
}

impl Default for ShardLogprobs {
    /// Report of an empty shard.
    fn default() -> Self {
        Self { max: f32::NEG_INFINITY, sum: 0.0, top: Vec::new() }
    }
}

const NON_FINITE: u32 = 1;
const MORE: u32 = 2;
/// Id of an empty candidate entry.
const NO_ID: u32 = u32::MAX;

impl RankCandidates {
    /// Makes a result with one candidate.
    pub(super) fn single(candidate: TokenCandidate) -> Self {
        Self { candidates: vec![candidate], ..Self::default() }
    }

    /// Encodes the candidates in the words of `shape`.
    pub(super) fn words(&self, shape: &CandidateLayout) -> Vec<u32> {
        let mark = |on: bool, mark: u32| if on { mark } else { 0 };
        let mut words = vec![mark(self.non_finite, NON_FINITE) | mark(self.more, MORE)];
        for candidate in &self.candidates {
            words.extend([candidate.at.id, candidate.at.value.to_bits()]);
            words.extend(shape.raw.then_some(candidate.raw.to_bits()));
        }
        words.resize(1 + shape.candidates * shape.candidate_words(), NO_ID);
        if shape.mass {
            words.extend(halves(self.mass));
        }
        if shape.top.is_some() {
            words.push(self.report.max.to_bits());
            words.extend(halves(self.report.sum));
            words.extend(self.report.top.iter().flat_map(|at| [at.id, at.value.to_bits()]));
        }
        words.resize(shape.words(), NO_ID);
        words
    }

    /// Decodes the words of `shape`.
    pub(super) fn of(words: &[u32], shape: &CandidateLayout) -> Self {
        let (marks, rest) = (words[0], &words[1..]);
        let each = shape.candidate_words();
        let (candidates, mut rest) = rest.split_at(shape.candidates * each);
        let named = candidates.chunks_exact(each).take_while(|words| words[0] != NO_ID);
        let mut brought = Self {
            non_finite: marks & NON_FINITE != 0,
            more: marks & MORE != 0,
            candidates: named.map(candidate).collect(),
            ..Self::default()
        };
        if shape.mass {
            brought.mass = whole(rest);
            rest = &rest[2..];
        }
        if shape.top.is_some() {
            let listed = rest[3..].chunks_exact(2).take_while(|words| words[0] != NO_ID);
            let top = listed.map(ranked).collect();
            brought.report =
                ShardLogprobs { max: f32::from_bits(rest[0]), sum: whole(&rest[1..]), top };
        }
        brought
    }
}

fn candidate(words: &[u32]) -> TokenCandidate {
    let at = ranked(words);
    TokenCandidate { at, raw: words.get(2).map_or(at.value, |raw| f32::from_bits(*raw)) }
}

fn ranked(words: &[u32]) -> RankedToken {
    RankedToken { id: words[0], value: f32::from_bits(words[1]) }
}

fn halves(x: f64) -> [u32; 2] {
    [x.to_bits() as u32, (x.to_bits() >> 32) as u32]
}

fn whole(words: &[u32]) -> f64 {
    f64::from_bits(u64::from(words[0]) | u64::from(words[1]) << 32)
}
