//! What all ranks together know about a row.

use super::rank_candidates::{RankCandidates, TokenCandidate};
use crate::cpu::sample::philox::noise;
use crate::cpu::sample::row::{RankedToken, order, top_p_index};
use crate::cpu::sample::rules::{
    DrawParams, SampleError, SampleRequest, SamplingRules, TokenChoice,
};
use std::cmp::Ordering;

/// The token of a row.
#[derive(Debug, Clone, PartialEq)]
pub(super) struct MergedToken {
    pub(super) token: u32,
    /// Its raw logit.
    pub(super) raw: f32,
    /// `ln Σ exp l` over the raw logits, and the likeliest ids in order, if asked for.
    pub(super) report: Option<(f32, Vec<RankedToken>)>,
}

/// `None` = it depends on ids that no rank has named.
///
/// # Panics
/// If a known id lies outside the vocabulary.
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

/// The candidate that wins.
fn choose(
    rules: &SamplingRules<'_>,
    vocab: usize,
    ranks: &[RankCandidates],
    named: &[TokenCandidate],
) -> Option<TokenCandidate> {
    let cut = rules.draw.as_ref().filter(|draw| draw.top_k_of(vocab).is_some() || draw.filters());
    let Some(draw) = cut else { return Some(named[0]) }; // Noise is in the values of the candidates.
    let places: Vec<RankedToken> = named.iter().map(|candidate| candidate.at).collect();
    let kept = &named[..kept_count(draw, vocab, ranks, &places)?];
    let noisy = |c: &TokenCandidate| {
        let value = c.at.value + noise(draw.key, c.at.id, draw.position);
        RankedToken { value, ..c.at }
    };
    kept.iter().min_by(|a, b| order(&noisy(a), &noisy(b))).copied()
}

/// How many of `named`, in order, the cuts keep.
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
    // Ids that nobody named come behind the certain ones.
    let complete = above < certain || !ranks.iter().any(|rank| rank.more);
    if draw.top_p >= 1.0 {
        return complete.then_some(above);
    }
    let total = match complete {
        true => None, // That of the candidates.
        false if draw.min_p > 0.0 => return None,
        false => Some(mass(ranks, best)),
    };
    let sure = &named[..above.min(certain)];
    let last = top_p_index(sure, best, draw.top_p, 0.0, total);
    last.map(|last| last + 1).or(complete.then_some(above))
}

/// How many of the named ids have no unnamed one before them.
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
