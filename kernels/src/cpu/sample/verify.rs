//! Verification of draft tokens on the CPU: how many draft tokens of a row are accepted, and the token after
//! them.
//!
//! The output distribution equals that of decoding without draft tokens, whatever the draft tokens are. For
//! each position, `p` is the distribution that results from the sampling parameters of the request, with the
//! draft tokens before the position as context:
//!
//! - Deterministic draft token (greedy, or copied from the prompt): a token is sampled from `p` with the
//!   noise of the position, as without draft tokens. The draft token is accepted if it equals the sampled
//!   token; otherwise the sampled token replaces it. So the output of a request is identical with and without
//!   draft tokens, token by token.
//! - Draft token sampled from a distribution `q`: accepted with probability `min(1, p / q)` (rejection
//!   sampling); if it is rejected, a token is sampled from `max(p − q, 0)`, normalised (Leviathan et al.,
//!   Fast Inference from Transformers via Speculative Decoding, 2023; Chen et al., Accelerating Large
//!   Language Model Decoding with Speculative Sampling, 2023). The resampled token differs from the draft
//!   token, since `max(p − q, 0)` is 0 for a rejected token.
//!
//! The token after the last draft token is sampled from `p`. All noise depends on the position, so neither
//! the number of draft tokens nor earlier acceptances change a result.

use std::cmp::Ordering;

use device::MatRef;

use super::philox::{DRAW_ACCEPT, DRAW_RESIDUAL, gumbel, unit, word};
use super::row::{
    RankedToken, RowScratch, SamplingCutoff, apply_filters, greedy_token, gumbel_argmax, order,
    sample_token,
};
use super::rules::{RandomSamplingParams, SampleError, SamplingRules};
use super::vector;

/// A draft token to verify, and the distribution that it was sampled from.
#[derive(Debug, Clone, Copy)]
pub(crate) struct DraftToken<'a> {
    /// Token id.
    pub(crate) id: u32,
    /// Proposal distribution `q` that the draft token was sampled from: one probability per token id. `None`
    /// = the draft token was not sampled (deterministic).
    pub(crate) proposal: Option<&'a [f32]>,
}

/// Returns the tokens of a row: the accepted draft tokens, then one more token. For `k` draft tokens,
/// `logits` f32 `[k + 1, vocab_size]` are the logits after the last known token, then after each draft token;
/// `rules` are the sampling parameters and logit edits of these positions, computed as if the preceding draft
/// tokens were part of the output.
///
/// Errors: sampling fails at a position before which all draft tokens were accepted.
pub(crate) fn verify_rows(
    logits: MatRef<'_>,
    rules: &[SamplingRules<'_>],
    drafts: &[DraftToken<'_>],
    scratch: &mut RowScratch,
) -> Result<Vec<u32>, SampleError> {
    verify_by(logits, rules, drafts, residual, scratch)
}

/// Unnormalised probability `p − q` of token `id` for resampling after a rejected draft token.
fn residual(p: &[f32], q: &[f32], id: usize) -> f32 {
    p[id] - q[id]
}

fn verify_by(
    logits: MatRef<'_>,
    rules: &[SamplingRules<'_>],
    drafts: &[DraftToken<'_>],
    residual: impl Fn(&[f32], &[f32], usize) -> f32 + Copy,
    scratch: &mut RowScratch,
) -> Result<Vec<u32>, SampleError> {
    let mut tokens = Vec::with_capacity(rules.len());
    for (i, rules) in rules.iter().enumerate() {
        let (raw, draft) = (logits.row::<f32>(i), drafts.get(i));
        let token = match (draft, &rules.draw) {
            (Some(&DraftToken { id, proposal: Some(q) }), Some(draw)) => {
                let mut l = std::mem::take(&mut scratch.edited);
                let token = greedy_token(raw, rules, &mut l, scratch)
                    .map(|_| accept_or_resample(&mut l, draw, id, q, residual, scratch));
                scratch.edited = l;
                token?
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

/// Returns the draft token `id`, sampled from `q`, if it is accepted; otherwise a resampled token. `l` has
/// the edited logits.
fn accept_or_resample(
    l: &mut [f32],
    draw: &RandomSamplingParams,
    id: u32,
    q: &[f32],
    residual: impl Fn(&[f32], &[f32], usize) -> f32,
    scratch: &mut RowScratch,
) -> u32 {
    let (best, cutoff) = apply_filters(l, draw, scratch);
    probabilities(l, best, cutoff, &mut scratch.masses);
    let (p, at) = (&scratch.masses[..], id as usize);
    if unit(word(draw.key, DRAW_ACCEPT, 0, draw.position)) * q[at] < p[at] {
        return id;
    }
    let mut resampled: Option<RankedToken> = None;
    for id in 0..p.len() {
        let mass = residual(p, q, id);
        if mass > 0.0 {
            let id = id as u32;
            let noise = gumbel(word(draw.key, DRAW_RESIDUAL, id, draw.position));
            let candidate = RankedToken { id, value: mass.ln() + noise };
            if resampled.is_none_or(|best| order(&candidate, &best) == Ordering::Less) {
                resampled = Some(candidate);
            }
        }
    }
    // If `p` equals `q` up to rounding, no token has a positive `p − q`: the token is then sampled from `p`.
    resampled.unwrap_or_else(|| gumbel_argmax(l, 0, draw, best, cutoff, &scratch.maxima)).id
}

/// Writes to `p` the probability with which each token is sampled, given the scaled logits `l`.
fn probabilities(l: &[f32], best: RankedToken, cutoff: SamplingCutoff, p: &mut Vec<f32>) {
    let mass = |(id, &x): (u32, &f32)| {
        if cutoff.keeps(id, x) { vector::exp(x - best.value) } else { 0.0 }
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
