//! Verifying drafts: which of the tokens guessed for a row stand, and what follows them.
//!
//! The tokens that come out are distributed as those of a run without drafts, whatever was guessed. Position by
//! position, `p` being what the request's rules make of the logits there, the drafts before it taken as said:
//!
//! - A draft that nothing but what is known decides (the likeliest id, a repetition of the prompt): a token is drawn from
//!   `p` with the noise of the position, as without drafts. The draft stands if it is that token; if not, that
//!   token does. So a request says the same with drafts and without, id by id.
//! - A draft drawn from `q` stands with probability `min(1, p / q)`; if it does not, a token is drawn from
//!   `max(p − q, 0)`, normalised (Leviathan et al., Fast Inference from Transformers via Speculative Decoding, 2023;
//!   Chen et al., Accelerating Large Language Model Decoding with Speculative Sampling, 2023). That one differs from the
//!   draft, since what is left of a rejected id is 0.
//!
//! Behind the last draft the token is drawn from `p` as ever. All noise is that of the position, so neither how many
//! drafts there were nor how many of them stood earlier decides anything.

use std::cmp::Ordering;

use device::MatRef;

use super::philox::{DRAW_ACCEPT, DRAW_RESIDUAL, gumbel, unit, word};
use super::row::{
    RankedToken, RowScratch, SamplingCutoff, apply_filters, greedy_token, gumbel_argmax, order,
    sample_token,
};
use super::rules::{DrawParams, SampleError, SamplingRules};
use super::vector;

/// A guess at a token.
#[derive(Debug, Clone, Copy)]
pub(crate) struct DraftToken<'a> {
    /// The guess.
    pub(crate) id: u32,
    /// The probabilities it was drawn from, one for each id; `None` = it was not drawn.
    pub(crate) proposal: Option<&'a [f32]>,
}

/// The tokens of a row: drafts that stand, then one more. `logits` f32 `[k + 1, V]` are those behind the last known
/// token and behind each of the `k` drafts, `rules` those of the positions, which count the drafts before them.
///
/// Errors: of the first position that yields no token, if all drafts before it stand.
pub(crate) fn verify_rows(
    logits: MatRef<'_>,
    rules: &[SamplingRules<'_>],
    drafts: &[DraftToken<'_>],
    scratch: &mut RowScratch,
) -> Result<Vec<u32>, SampleError> {
    verify_by(logits, rules, drafts, residual, scratch)
}

/// What is left of an id's probability `p` where drafts are drawn from `q`.
fn residual(p: &[f32], q: &[f32], id: usize) -> f32 {
    p[id] - q[id]
}

fn verify_by(
    logits: MatRef<'_>,
    rules: &[SamplingRules<'_>],
    drafts: &[DraftToken<'_>],
    left: impl Fn(&[f32], &[f32], usize) -> f32 + Copy,
    scratch: &mut RowScratch,
) -> Result<Vec<u32>, SampleError> {
    let mut tokens = Vec::with_capacity(rules.len());
    for (i, rules) in rules.iter().enumerate() {
        let (raw, draft) = (logits.row::<f32>(i), drafts.get(i));
        let token = match (draft, &rules.draw) {
            (Some(&DraftToken { id, proposal: Some(q) }), Some(draw)) => {
                let mut l = std::mem::take(&mut scratch.edited);
                let found = greedy_token(raw, rules, &mut l, scratch)
                    .map(|_| accept_or_resample(&mut l, draw, (id, q), left, scratch));
                scratch.edited = l;
                found?
            }
            _ => sample_token(raw, rules, scratch)?,
        };
        tokens.push(token);
        if draft.is_none_or(|draft| draft.id != token) {
            break;
        }
    }
    Ok(tokens)
}

/// The draft `id`, drawn from `q`, or the token that stands in for it. `l` holds the edited logits.
fn accept_or_resample(
    l: &mut [f32],
    draw: &DrawParams,
    (id, q): (u32, &[f32]),
    left: impl Fn(&[f32], &[f32], usize) -> f32,
    scratch: &mut RowScratch,
) -> u32 {
    let (best, edge) = apply_filters(l, draw, scratch);
    probabilities(l, best, edge, &mut scratch.masses);
    let (p, at) = (&scratch.masses[..], id as usize);
    if unit(word(draw.key, DRAW_ACCEPT, 0, draw.position)) * q[at] < p[at] {
        return id;
    }
    let mut instead: Option<RankedToken> = None;
    for id in 0..p.len() {
        let left = left(p, q, id);
        if left > 0.0 {
            let id = id as u32;
            let noise = gumbel(word(draw.key, DRAW_RESIDUAL, id, draw.position));
            let candidate = RankedToken { id, value: left.ln() + noise };
            if instead.is_none_or(|best| order(&candidate, &best) == Ordering::Less) {
                instead = Some(candidate);
            }
        }
    }
    // Nothing is left where p and q are the same but for rounding.
    let token = instead.unwrap_or_else(|| gumbel_argmax((l, 0), draw, best, edge, &scratch.maxima));
    token.id
}

/// What a draw from the scaled logits `l` makes of each id.
fn probabilities(l: &[f32], best: RankedToken, edge: SamplingCutoff, p: &mut Vec<f32>) {
    let mass = |(id, &x): (u32, &f32)| {
        if edge.keeps(id, x) { vector::exp(x - best.value) } else { 0.0 }
    };
    p.clear();
    p.extend((0..).zip(l).map(mass));
    let total: f64 = p.iter().map(|&mass| f64::from(mass)).sum();
    for mass in p {
        *mass = (f64::from(*mass) / total) as f32;
    }
}

#[cfg(test)]
mod tests;
