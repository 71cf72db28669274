//! Selects the candidate tokens of a rank from its vocabulary shard.

use super::candidate_layout::CandidateLayout;
use super::rank_candidates::{RankCandidates, ShardLogprobs, TokenCandidate};
use crate::cpu::sample::row::{
    RankedToken, RowScratch, SamplingCutoff, argmax_of_chunks, edit, gumbel_argmax, top_k_tokens,
};
use crate::cpu::sample::rules::{
    RandomSamplingParams, SampleOrScore, SampleRequest, SamplingRules,
};
use crate::cpu::sample::vector;

/// Selects the candidate tokens of a row from the raw logits of a shard; `raw[0]` is the logit of token id
/// `first_id`.
pub(super) fn local_candidates(
    raw: &[f32],
    first_id: usize,
    request: &SampleRequest<'_>,
    layout: &CandidateLayout,
    scratch: &mut RowScratch,
) -> RankCandidates {
    if raw.is_empty() {
        return RankCandidates::default();
    }
    if !vector::maxima(raw, scratch.maxima_for(raw)) {
        return RankCandidates { non_finite: true, ..RankCandidates::default() };
    }
    let logprobs = layout.top.map(|top| shard_logprobs(raw, first_id, top, scratch));
    let candidates = match &request.choice {
        SampleOrScore::Score(id) => known_token(raw, first_id, *id),
        SampleOrScore::Sample(rules) => {
            let mut l = std::mem::take(&mut scratch.edited);
            let candidates = sampling_candidates(raw, first_id, rules, layout, &mut l, scratch);
            scratch.edited = l;
            candidates
        }
    };
    RankCandidates { logprobs: logprobs.unwrap_or_default(), ..candidates }
}

/// Returns the candidates of a row that only scores the known token `id`: this token if its id is in the
/// shard, otherwise no candidate.
fn known_token(raw: &[f32], first_id: usize, id: u32) -> RankCandidates {
    match raw.get((id as usize).wrapping_sub(first_id)) {
        Some(&value) => {
            RankCandidates::single(TokenCandidate { ranked: RankedToken { id, value }, raw: value })
        }
        None => RankCandidates::default(), // In the shard of another rank.
    }
}

/// Computes the maximum, the exponential sum and the `top` most likely tokens of the raw logits of the shard,
/// from which the log-probabilities of the row are computed. `scratch` must have the chunk maxima of `raw`.
fn shard_logprobs(
    raw: &[f32],
    first_id: usize,
    top: usize,
    scratch: &mut RowScratch,
) -> ShardLogprobs {
    let max = argmax_of_chunks(raw, &scratch.maxima).value;
    let sum = vector::exp_sum(raw, max);
    let top = top_k_tokens(raw, top, scratch).iter();
    ShardLogprobs {
        max,
        sum,
        top: top.map(|token| RankedToken { id: token.id + first_id as u32, ..*token }).collect(),
    }
}

/// Selects the candidates of a row for which a token is sampled. `scratch` must have the chunk maxima of
/// `raw`.
fn sampling_candidates(
    raw: &[f32],
    first_id: usize,
    rules: &SamplingRules<'_>,
    layout: &CandidateLayout,
    l: &mut Vec<f32>,
    scratch: &mut RowScratch,
) -> RankCandidates {
    let candidate = |token: &RankedToken| TokenCandidate {
        ranked: RankedToken { id: token.id + first_id as u32, ..*token },
        raw: raw[token.id as usize],
    };
    let edited = rules.edits.change_anything();
    if edited {
        edit(l, raw, first_id, &rules.edits);
        vector::maxima(l, scratch.maxima_for(l));
    }
    let Some(draw) = &rules.draw else {
        let best = argmax_of_chunks(if edited { l } else { raw }, &scratch.maxima);
        return RankCandidates::single(candidate(&best));
    };
    if !edited {
        l.clear();
        l.extend_from_slice(raw);
    }
    let l = &mut l[..];
    vector::scale(l, draw.temperature.recip(), scratch.maxima_for(l));
    let best = argmax_of_chunks(l, &scratch.maxima);
    if !layout.is_top_k {
        return RankCandidates::single(candidate(&gumbel_argmax(
            l,
            first_id,
            draw,
            best,
            SamplingCutoff::KEEP_ALL,
            &scratch.maxima,
        )));
    }
    top_candidates(l, best, draw, layout, scratch, candidate)
}

/// Returns the most likely tokens of the shard, in order, that min-p may keep. `scratch` must have the chunk
/// maxima of `l`.
fn top_candidates(
    l: &[f32],
    best: RankedToken,
    draw: &RandomSamplingParams,
    layout: &CandidateLayout,
    scratch: &mut RowScratch,
    candidate: impl Fn(&RankedToken) -> TokenCandidate,
) -> RankCandidates {
    let masked = best.value == f32::NEG_INFINITY;
    let mass = if layout.mass && !masked { vector::exp_sum(l, best.value) } else { 0.0 };
    let floor = draw.min_p_floor(best.value);
    let tokens = top_k_tokens(l, layout.candidates + 1, scratch);
    let tokens = &tokens[..tokens.partition_point(|token| token.value >= floor)];
    RankCandidates {
        has_more: tokens.len() > layout.candidates,
        candidates: tokens.iter().take(layout.candidates).map(candidate).collect(),
        mass,
        ..RankCandidates::default()
    }
}
