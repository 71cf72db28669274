//! Selects the candidates of a rank from its vocabulary shard.

use super::candidate_layout::CandidateLayout;
use super::rank_candidates::{RankCandidates, ShardLogprobs, TokenCandidate};
use crate::cpu::sample::row::{
    RankedToken, RowScratch, SamplingCutoff, argmax_of_chunks, edit, gumbel_argmax, top_k_tokens,
};
use crate::cpu::sample::rules::{DrawParams, SampleRequest, SamplingRules, TokenChoice};
use crate::cpu::sample::vector;

/// Selects candidates from the raw logits of a shard that begins with id `first`.
pub(super) fn local_candidates(
    raw: &[f32],
    first: usize,
    row: &SampleRequest<'_>,
    shape: &CandidateLayout,
    scratch: &mut RowScratch,
) -> RankCandidates {
    if raw.is_empty() {
        return RankCandidates::default();
    }
    if !vector::maxima(raw, scratch.maxima_for(raw)) {
        return RankCandidates { non_finite: true, ..RankCandidates::default() };
    }
    let report = shape.top.map(|top| report(raw, first, top, scratch)).unwrap_or_default();
    let brought = match &row.pick {
        TokenChoice::Known(id) => known(raw, first, *id),
        TokenChoice::Sample(rules) => {
            let mut l = std::mem::take(&mut scratch.edited);
            let brought = choice_candidates((raw, first), rules, shape, &mut l, scratch);
            scratch.edited = l;
            brought
        }
    };
    RankCandidates { report, ..brought }
}

fn known(raw: &[f32], first: usize, id: u32) -> RankCandidates {
    match raw.get((id as usize).wrapping_sub(first)) {
        Some(&value) => {
            RankCandidates::single(TokenCandidate { at: RankedToken { id, value }, raw: value })
        }
        None => RankCandidates::default(), // In the shard of another rank.
    }
}

/// Computes the report on the raw logits; `scratch` has the chunk maxima of `raw`.
fn report(raw: &[f32], first: usize, top: usize, scratch: &mut RowScratch) -> ShardLogprobs {
    let max = argmax_of_chunks(raw, &scratch.maxima).value;
    let sum = vector::exp_sum(raw, max);
    let top = top_k_tokens(raw, top, scratch).iter();
    ShardLogprobs {
        max,
        sum,
        top: top.map(|at| RankedToken { id: at.id + first as u32, ..*at }).collect(),
    }
}

/// Selects the candidates for sampling; `scratch` has the chunk maxima of `raw`.
fn choice_candidates(
    (raw, first): (&[f32], usize),
    rules: &SamplingRules<'_>,
    shape: &CandidateLayout,
    l: &mut Vec<f32>,
    scratch: &mut RowScratch,
) -> RankCandidates {
    let candidate = |at: &RankedToken| TokenCandidate {
        at: RankedToken { id: at.id + first as u32, ..*at },
        raw: raw[at.id as usize],
    };
    let edited = rules.edits.change_anything();
    if edited {
        edit(l, raw, first, &rules.edits);
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
    if !shape.ordered {
        return RankCandidates::single(candidate(&gumbel_argmax(
            (l, first),
            draw,
            best,
            SamplingCutoff::NONE,
            &scratch.maxima,
        )));
    }
    top_candidates(l, best, draw, shape, scratch, candidate)
}

/// Returns the top ids of the shard, in order, that min-p may keep; `scratch` has the chunk maxima of `l`.
fn top_candidates(
    l: &[f32],
    best: RankedToken,
    draw: &DrawParams,
    shape: &CandidateLayout,
    scratch: &mut RowScratch,
    candidate: impl Fn(&RankedToken) -> TokenCandidate,
) -> RankCandidates {
    let masked = best.value == f32::NEG_INFINITY;
    let mass = if shape.mass && !masked { vector::exp_sum(l, best.value) } else { 0.0 };
    let floor = draw.min_p_floor(best.value);
    let found = top_k_tokens(l, shape.candidates + 1, scratch);
    let found = &found[..found.partition_point(|at| at.value >= floor)];
    RankCandidates {
        more: found.len() > shape.candidates,
        candidates: found.iter().take(shape.candidates).map(candidate).collect(),
        mass,
        ..RankCandidates::default()
    }
}
