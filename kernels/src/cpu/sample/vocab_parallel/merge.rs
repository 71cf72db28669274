//! Merges the candidates of all ranks for a row.

use super::rank_candidates::{RankCandidates, TokenCandidate};
use crate::cpu::sample::philox::noise;
use crate::cpu::sample::row::{RankedToken, order, top_p_index};
use crate::cpu::sample::rules::{
    DrawParams, SampleError, SampleRequest, SamplingRules, TokenChoice,
};
use std::cmp::Ordering;

/// Merged token of a row.
#[derive(Debug, Clone, PartialEq)]
pub(super) struct MergedToken {
    pub(super) token: u32,
    /// Raw logit of the token.
    pub(super) raw: f32,
    /// `ln Σ exp l` over the raw logits, and the top ids in order, if requested.
    pub(super) report: Option<(f32, Vec<RankedToken>)>,
}

/// Merges the candidates of a row. `None` = the result depends on ids that are no candidates.
///
/// # Panics
/// If a known id is outside the vocabulary.
pub(super) fn merge(
    row: &SampleRequest<'_>,
    vocab: usize,
    ranks: &[RankCandidates],
) -> Option<Result<MergedToken, SampleError>> {
    if ranks.iter().any(|rank| rank.non_finite) {
        return Some(Err(SampleError::NonFinite));
    }
    let mut named: Vec<TokenCandidate> =
        ranks.iter().flat_map(|rank| &rank.candidates).copied().collect();
    named.sort_unstable_by(|a, b| order(&a.at, &b.at));
    let chosen = match &row.pick {
        TokenChoice::Known(_) => named[0],
        TokenChoice::Sample(_) if named.first().is_none_or(is_masked) => {
            return Some(Err(SampleError::AllMasked));
        }
        TokenChoice::Sample(rules) => choose(rules, vocab, ranks, &named)?,
    };
    let report = row.logprobs.map(|top| report(top, ranks));
    Some(Ok(MergedToken { token: chosen.at.id, raw: chosen.raw, report }))
}

fn is_masked(best: &TokenCandidate) -> bool {
    best.at.value == f32::NEG_INFINITY
}

/// Returns the winning candidate.
fn choose(
    rules: &SamplingRules<'_>,
    vocab: usize,
    ranks: &[RankCandidates],
    named: &[TokenCandidate],
) -> Option<TokenCandidate> {
    let cut = rules.draw.as_ref().filter(|draw| draw.top_k_of(vocab).is_some() || draw.filters());
    let Some(draw) = cut else { return Some(named[0]) }; // The values of the candidates include the noise.
    let places: Vec<RankedToken> = named.iter().map(|candidate| candidate.at).collect();
    let kept = &named[..kept_count(draw, vocab, ranks, &places)?];
    let noisy = |c: &TokenCandidate| {
        let value = c.at.value + noise(draw.key, c.at.id, draw.position);
        RankedToken { value, ..c.at }
    };
    kept.iter().min_by(|a, b| order(&noisy(a), &noisy(b))).copied()
}

/// Number of candidates in `named`, in order, that the filters keep.
fn kept_count(
    draw: &DrawParams,
    vocab: usize,
    ranks: &[RankCandidates],
    named: &[RankedToken],
) -> Option<usize> {
    let best = named[0].value;
    let floor = draw.min_p_floor(best);
    let above = named.partition_point(|at| at.value >= floor);
    if let Some(k) = draw.top_k_of(vocab) {
        let most = above.min(k);
        let all = (draw.top_p < 1.0)
            .then(|| top_p_index(&named[..most], best, draw.top_p, 0.0, None))
            .flatten();
        return Some(all.map_or(most, |last| last + 1));
    }
    let certain = decided_count(ranks, named);
    // Ids that are no candidates come after the decided ones.
    let complete = above < certain || !ranks.iter().any(|rank| rank.more);
    if draw.top_p >= 1.0 {
        return complete.then_some(above);
    }
    let total = match complete {
        true => None, // The candidates have the whole mass.
        false if draw.min_p > 0.0 => return None,
        false => Some(mass(ranks, best)),
    };
    let sure = &named[..above.min(certain)];
    let last = top_p_index(sure, best, draw.top_p, 0.0, total);
    last.map(|last| last + 1).or(complete.then_some(above))
}

/// Number of leading candidates, in order, that no other id can precede.
fn decided_count(ranks: &[RankCandidates], named: &[RankedToken]) -> usize {
    let last = |rank: &RankCandidates| rank.candidates.last().map(|last| last.at);
    let ends = ranks.iter().filter(|rank| rank.more).filter_map(last);
    let Some(end) = ends.min_by(order) else { return named.len() };
    named.partition_point(|at| order(at, &end) != Ordering::Greater)
}

/// `Σ exp(value − best)` over all ids.
fn mass(ranks: &[RankCandidates], best: f32) -> f64 {
    let of = |rank: &RankCandidates| {
        let first = rank.candidates.first().map_or(f32::NEG_INFINITY, |first| first.at.value);
        rank.mass * f64::from(first - best).exp()
    };
    ranks.iter().map(of).sum()
}

fn report(top: usize, ranks: &[RankCandidates]) -> (f32, Vec<RankedToken>) {
    let max = ranks.iter().map(|rank| rank.report.max).fold(f32::NEG_INFINITY, f32::max);
    let sum = |rank: &RankCandidates| rank.report.sum * f64::from(rank.report.max - max).exp();
    let sum: f64 = ranks.iter().map(sum).sum();
    let mut likeliest: Vec<RankedToken> =
        ranks.iter().flat_map(|rank| &rank.report.top).copied().collect();
    likeliest.sort_unstable_by(order);
    likeliest.truncate(top);
    (max + sum.ln() as f32, likeliest)
}
