//! Merges the candidate tokens that all ranks sent for a row, and selects the token of the row.

use super::rank_candidates::{RankCandidates, TokenCandidate};
use crate::cpu::sample::philox::noise;
use crate::cpu::sample::row::{RankedToken, order, top_p_index};
use crate::cpu::sample::rules::{
    RandomSamplingParams, SampleError, SampleOrScore, SampleRequest, SamplingRules,
};
use std::cmp::Ordering;

/// Token of a row, selected from the candidates of all ranks.
#[derive(Debug, Clone, PartialEq)]
pub(super) struct MergedToken {
    pub(super) token: u32,
    /// Raw logit of the token.
    pub(super) raw: f32,
    /// Log-sum-exp and most likely tokens of the row, if log-probabilities are requested.
    pub(super) logprobs: Option<MergedLogprobs>,
}

/// Log-sum-exp and most likely tokens of a whole row, for log-probabilities.
#[derive(Debug, Clone, PartialEq)]
pub(super) struct MergedLogprobs {
    /// `ln Σ exp l` over all raw logits `l` of the row.
    pub(super) log_sum: f32,
    /// The most likely tokens in order, with their raw logits.
    pub(super) top: Vec<RankedToken>,
}

/// Selects the token of a row from the candidates of all ranks. `None` = the result depends on tokens that
/// are not candidates.
///
/// # Panics
/// If a known token id is outside the vocabulary.
pub(super) fn merge(
    request: &SampleRequest<'_>,
    vocab: usize,
    ranks: &[RankCandidates],
) -> Option<Result<MergedToken, SampleError>> {
    if ranks.iter().any(|rank| rank.non_finite) {
        return Some(Err(SampleError::NonFinite));
    }
    let mut candidates: Vec<TokenCandidate> =
        ranks.iter().flat_map(|rank| &rank.candidates).copied().collect();
    candidates.sort_unstable_by(|a, b| order(&a.ranked, &b.ranked));
    let chosen = match &request.choice {
        SampleOrScore::Score(_) => candidates[0],
        SampleOrScore::Sample(_) if candidates.first().is_none_or(is_masked) => {
            return Some(Err(SampleError::AllMasked));
        }
        SampleOrScore::Sample(rules) => choose(rules, vocab, ranks, &candidates)?,
    };
    let logprobs = request.logprobs.map(|top| merged_logprobs(top, ranks));
    Some(Ok(MergedToken { token: chosen.ranked.id, raw: chosen.raw, logprobs }))
}

fn is_masked(best: &TokenCandidate) -> bool {
    best.ranked.value == f32::NEG_INFINITY
}

/// Returns the candidate that is sampled; `None` if the sampled token depends on tokens that are not
/// candidates.
fn choose(
    rules: &SamplingRules<'_>,
    vocab: usize,
    ranks: &[RankCandidates],
    candidates: &[TokenCandidate],
) -> Option<TokenCandidate> {
    let filtered =
        rules.draw.as_ref().filter(|draw| draw.top_k_of(vocab).is_some() || draw.filters());
    // Without filters the first candidate is the sampled token: candidates are sorted by the logit (greedy),
    // or by the sum of logit and Gumbel noise.
    let Some(draw) = filtered else { return Some(candidates[0]) };
    let ranked: Vec<RankedToken> = candidates.iter().map(|candidate| candidate.ranked).collect();
    let kept = &candidates[..kept_count(draw, vocab, ranks, &ranked)?];
    let noisy = |c: &TokenCandidate| {
        let value = c.ranked.value + noise(draw.key, c.ranked.id, draw.position);
        RankedToken { value, ..c.ranked }
    };
    kept.iter().min_by(|a, b| order(&noisy(a), &noisy(b))).copied()
}

/// Number of candidates that the filters keep, in descending order of probability; `None` if this number
/// depends on tokens that are not candidates.
fn kept_count(
    draw: &RandomSamplingParams,
    vocab: usize,
    ranks: &[RankCandidates],
    candidates: &[RankedToken],
) -> Option<usize> {
    let best = candidates[0].value;
    let floor = draw.min_p_floor(best);
    let above = candidates.partition_point(|token| token.value >= floor);
    if let Some(k) = draw.top_k_of(vocab) {
        return Some(top_p_count(draw, &candidates[..above.min(k)], best));
    }
    let decided = decided_count(ranks, candidates);
    // Tokens that are no candidates come after the first `decided` candidates in the token order. So `above`
    // is exact if it is below `decided`, or if no rank has further tokens that min-p may keep.
    let complete = above < decided || !ranks.iter().any(|rank| rank.has_more);
    if draw.top_p >= 1.0 {
        return complete.then_some(above);
    }
    let total = match complete {
        true => None, // The candidates have the whole mass.
        false if draw.min_p > 0.0 => return None,
        false => Some(mass(ranks, best)),
    };
    let kept = &candidates[..above.min(decided)];
    let last = top_p_index(kept, best, draw.top_p, 0.0, total);
    last.map(|last| last + 1).or(complete.then_some(above))
}

/// Number of tokens that top-p keeps of `kept`, the tokens that top-k and min-p keep. `best`: value of the
/// most likely candidate.
fn top_p_count(draw: &RandomSamplingParams, kept: &[RankedToken], best: f32) -> usize {
    let last = (draw.top_p < 1.0).then(|| top_p_index(kept, best, draw.top_p, 0.0, None)).flatten();
    last.map_or(kept.len(), |last| last + 1)
}

/// Number of candidates that are certain to be the most likely tokens of the vocabulary, in order: tokens
/// that are no candidates come after them.
fn decided_count(ranks: &[RankCandidates], candidates: &[RankedToken]) -> usize {
    let last = |rank: &RankCandidates| rank.candidates.last().map(|last| last.ranked);
    let ends = ranks.iter().filter(|rank| rank.has_more).filter_map(last);
    let Some(end) = ends.min_by(order) else { return candidates.len() };
    candidates.partition_point(|token| order(token, &end) != Ordering::Greater)
}

/// Returns the probability mass `Σ exp(value − best)` of the whole vocabulary, computed from the masses of
/// the shards that the ranks sent.
fn mass(ranks: &[RankCandidates], best: f32) -> f64 {
    let of = |rank: &RankCandidates| {
        let first = rank.candidates.first().map_or(f32::NEG_INFINITY, |first| first.ranked.value);
        rank.mass * f64::from(first - best).exp()
    };
    ranks.iter().map(of).sum()
}

fn merged_logprobs(top: usize, ranks: &[RankCandidates]) -> MergedLogprobs {
    let max = ranks.iter().map(|rank| rank.logprobs.max).fold(f32::NEG_INFINITY, f32::max);
    let sum = |rank: &RankCandidates| rank.logprobs.sum * f64::from(rank.logprobs.max - max).exp();
    let sum: f64 = ranks.iter().map(sum).sum();
    let mut top_tokens: Vec<RankedToken> =
        ranks.iter().flat_map(|rank| &rank.logprobs.top).copied().collect();
    top_tokens.sort_unstable_by(order);
    top_tokens.truncate(top);
    MergedLogprobs { log_sum: max + sum.ln() as f32, top: top_tokens }
}
