//! Sampling of a token from one whole row of logits: logit edits, filters (min-p, top-k, top-p), Gumbel noise
//! and log-probabilities.

use std::cmp::Ordering;

use crate::cpu::sample::rules::{
    LogitEdits, RandomSamplingParams, RowLogprobs, SampleError, SamplingRules,
};

use super::philox::{LANES, gumbel, highest_word};
use super::vector::{self, CHUNK, ThresholdMass};

/// A token id and the value that it is ranked by: its logit, or its logit with noise.
#[derive(Debug, Clone, Copy, PartialEq)]
pub(super) struct RankedToken {
    pub(super) id: u32,
    pub(super) value: f32,
}

/// The last token that the filters keep, in the token order of [`rules`](super::rules): larger logit first,
/// lower id first among equals.
#[derive(Debug, Clone, Copy)]
pub(super) struct SamplingCutoff {
    value: f32,
    id: u32,
}

impl SamplingCutoff {
    /// Keeps all tokens that are not masked.
    pub(super) const KEEP_ALL: Self = Self { value: f32::MIN, id: u32::MAX };

    /// Whether the filters keep token `id` with logit `value`.
    pub(super) fn keeps(self, id: u32, value: f32) -> bool {
        value > self.value || (value == self.value && id <= self.id)
    }
}

/// Scratch memory for sampling one row, reused for later rows.
#[derive(Debug, Default)]
pub(crate) struct RowScratch {
    pub(super) maxima: Vec<f32>,
    /// Copy of `maxima` (the largest logit of each chunk), reordered to find the k-th largest.
    chunk_maxima: Vec<f32>,
    ranked: Vec<RankedToken>,
    pub(super) masses: Vec<f32>,
    pub(super) edited: Vec<f32>,
}

impl RowScratch {
    pub(super) fn maxima_for(&mut self, l: &[f32]) -> &mut [f32] {
        self.maxima.resize(l.len().div_ceil(CHUNK), f32::NEG_INFINITY);
        &mut self.maxima
    }
}

/// Samples a token from logits `raw` with the sampling parameters of one request; `raw` is not changed.
pub(crate) fn sample_token(
    raw: &[f32],
    rules: &SamplingRules<'_>,
    scratch: &mut RowScratch,
) -> Result<u32, SampleError> {
    let mut l = std::mem::take(&mut scratch.edited);
    let token = sample_with_buffer(raw, rules, &mut l, scratch);
    scratch.edited = l;
    token
}

fn sample_with_buffer(
    raw: &[f32],
    rules: &SamplingRules<'_>,
    l: &mut Vec<f32>,
    scratch: &mut RowScratch,
) -> Result<u32, SampleError> {
    let best = greedy_token(raw, rules, l, scratch)?;
    let Some(draw) = &rules.draw else { return Ok(best.id) };
    let (best, cutoff) = apply_filters(l, draw, scratch);
    Ok(gumbel_argmax(l, 0, draw, best, cutoff, &scratch.maxima).id)
}

/// Returns the most likely token after the logit edits. If a token is to be sampled at random, the edited
/// logits are in `l` afterwards.
pub(super) fn greedy_token(
    raw: &[f32],
    rules: &SamplingRules<'_>,
    l: &mut Vec<f32>,
    scratch: &mut RowScratch,
) -> Result<RankedToken, SampleError> {
    if raw.is_empty() || !vector::maxima(raw, scratch.maxima_for(raw)) {
        return Err(SampleError::NonFinite);
    }
    let edited = rules.edits.change_anything();
    if edited {
        edit(l, raw, 0, &rules.edits);
        vector::maxima(l, scratch.maxima_for(l));
    }
    let best = argmax_of_chunks(if edited { l } else { raw }, &scratch.maxima);
    if best.value == f32::NEG_INFINITY {
        return Err(SampleError::AllMasked);
    }
    if !edited && rules.draw.is_some() {
        l.clear();
        l.extend_from_slice(raw);
    }
    Ok(best)
}

/// Writes logits `raw` with `edits` applied to `l`; `raw[0]` is the logit of token id `first_id`.
pub(super) fn edit(l: &mut Vec<f32>, raw: &[f32], first_id: usize, edits: &LogitEdits<'_>) {
    let index = |id: u32| (id as usize).wrapping_sub(first_id); // Out of range for ids before `first_id`.
    l.clear();
    if let Some(allowed) = edits.allowed {
        l.resize(raw.len(), f32::NEG_INFINITY);
        for &id in allowed {
            if let Some(&x) = raw.get(index(id)) {
                l[index(id)] = x;
            }
        }
    } else {
        l.extend_from_slice(raw);
    }
    for &id in edits.banned {
        change(l, index(id), |_| f32::NEG_INFINITY);
    }
    for &(id, bias) in edits.bias {
        change(l, index(id), |x| x + bias);
    }
    for seen in edits.seen {
        change(l, index(seen.id), |x| penalise(x, seen.count, edits));
    }
}

fn change(l: &mut [f32], at: usize, new: impl Fn(f32) -> f32) {
    if let Some(x) = l.get_mut(at) {
        *x = new(*x);
    }
}

fn penalise(x: f32, count: u32, edits: &LogitEdits<'_>) -> f32 {
    let x = if x > 0.0 { x / edits.repetition } else { x * edits.repetition };
    if count == 0 { x } else { x - edits.frequency * count as f32 - edits.presence }
}

/// Divides the logits `l` by the temperature and applies min-p, top-k and top-p. Returns the most likely
/// token and the last token that the filters keep. At least one logit must be finite. `scratch` has the chunk
/// maxima of the scaled logits afterwards.
pub(super) fn apply_filters(
    l: &mut [f32],
    draw: &RandomSamplingParams,
    scratch: &mut RowScratch,
) -> (RankedToken, SamplingCutoff) {
    vector::scale(l, draw.temperature.recip(), scratch.maxima_for(l));
    let best = argmax_of_chunks(l, &scratch.maxima);
    let mut cutoff =
        SamplingCutoff { value: draw.min_p_floor(best.value), ..SamplingCutoff::KEEP_ALL };
    if draw.top_k_of(l.len()).is_some() {
        cutoff = top_k_cutoff(l, draw, cutoff, scratch);
    } else if draw.top_p < 1.0 {
        cutoff = top_p_cutoff(l, draw.top_p, best, cutoff, scratch);
    }
    (best, cutoff)
}

/// Computes the log-probability and the rank of token `id` in a row of logits, and the `top` most likely
/// tokens with their log-probabilities.
///
/// # Panics
/// If `id` is outside the row.
pub(crate) fn logprobs(
    raw: &[f32],
    id: u32,
    top: usize,
    scratch: &mut RowScratch,
) -> Result<RowLogprobs, SampleError> {
    if !vector::maxima(raw, scratch.maxima_for(raw)) {
        return Err(SampleError::NonFinite);
    }
    let best = argmax_of_chunks(raw, &scratch.maxima).value;
    let sum = best + vector::exp_sum(raw, best).ln() as f32;
    let top = top_k_tokens(raw, top, scratch).iter().map(|r| (r.id, r.value - sum)).collect();
    let rank = vector::count_before(raw, raw[id as usize], id as usize) as u32 + 1;
    Ok(RowLogprobs { logprob: raw[id as usize] - sum, rank, top })
}

/// Returns the `k` most likely tokens in order, or all unmasked tokens if fewer. `scratch` must have the
/// chunk maxima of `l`.
///
/// The k-th largest chunk maximum is a lower bound of the k-th largest logit, so for a small `k` few logits
/// are read.
pub(super) fn top_k_tokens<'a>(
    l: &[f32],
    k: usize,
    scratch: &'a mut RowScratch,
) -> &'a [RankedToken] {
    let RowScratch { maxima, chunk_maxima, ranked, .. } = scratch;
    let mut bound = f32::MIN;
    if k > 0 && k <= maxima.len() {
        chunk_maxima.clear();
        chunk_maxima.extend_from_slice(maxima);
        let (_, kth, _) = chunk_maxima.select_nth_unstable_by(k - 1, |a, b| b.total_cmp(a));
        bound = bound.max(*kth);
    }
    ranked.clear();
    for (c, chunk) in l.chunks(CHUNK).enumerate().filter(|&(c, _)| maxima[c] >= bound) {
        let first = (c * CHUNK) as u32;
        let kept = (first..).zip(chunk).filter(|&(_, &value)| value >= bound);
        ranked.extend(kept.map(|(id, &value)| RankedToken { id, value }));
    }
    if k == 0 {
        ranked.clear();
    } else if ranked.len() > k {
        ranked.select_nth_unstable_by(k - 1, order);
        ranked.truncate(k);
    }
    ranked.sort_unstable_by(order);
    ranked
}

#[expect(clippy::trivially_copy_pass_by_ref, reason = "signature of sort_unstable_by")]
pub(super) fn order(a: &RankedToken, b: &RankedToken) -> Ordering {
    b.value.partial_cmp(&a.value).unwrap_or(Ordering::Equal).then(a.id.cmp(&b.id))
}

pub(super) fn argmax_of_chunks(l: &[f32], maxima: &[f32]) -> RankedToken {
    let (mut at, mut value) = (0, f32::NEG_INFINITY);
    for (c, &max) in maxima.iter().enumerate() {
        if max > value {
            (at, value) = (c * CHUNK, max);
        }
    }
    let within = l[at..].iter().position(|&x| x == value).unwrap_or(0);
    RankedToken { id: (at + within) as u32, value }
}

/// Returns the last token that top-k and top-p keep, for requests with top-k: top-p applies to the tokens
/// that top-k keeps.
fn top_k_cutoff(
    l: &[f32],
    draw: &RandomSamplingParams,
    floor: SamplingCutoff,
    scratch: &mut RowScratch,
) -> SamplingCutoff {
    let kept = top_k_tokens(l, draw.top_k, scratch);
    let kept = &kept[..kept.partition_point(|r| r.value >= floor.value)];
    let last = if draw.top_p < 1.0 {
        top_p_index(kept, kept[0].value, draw.top_p, 0.0, None)
    } else {
        None
    };
    let last = last.unwrap_or(kept.len() - 1);
    SamplingCutoff { value: kept[last].value, id: kept[last].id }
}

/// Index of the first token of `kept` at which the cumulative mass reaches `top_p` of the total, where
/// `preceding_mass` is the mass of the tokens before `kept`; `None` if no token reaches it.
pub(super) fn top_p_index(
    kept: &[RankedToken],
    shift: f32,
    top_p: f32,
    preceding_mass: f64,
    total: Option<f64>,
) -> Option<usize> {
    let mass = |r: &RankedToken| f64::from(vector::exp(r.value - shift));
    let total = total.unwrap_or_else(|| kept.iter().map(mass).sum());
    let target_mass = total * f64::from(top_p);
    let mut sum = preceding_mass;
    kept.iter().position(|r| {
        sum += mass(r);
        sum >= target_mass
    })
}

/// Returns the last token that top-p keeps, for requests without top-k: top-p then applies to the whole row.
/// Computes all probabilities once, then narrows the range of probabilities that contains the cutoff until
/// sorting that range is cheap.
fn top_p_cutoff(
    l: &[f32],
    top_p: f32,
    best: RankedToken,
    floor: SamplingCutoff,
    scratch: &mut RowScratch,
) -> SamplingCutoff {
    const SORTED_MAX: usize = 1024;
    let RowScratch { ranked, masses, .. } = scratch;
    masses.resize(l.len(), 0.0);
    let total = vector::exp_masses(l, best.value, floor.value, masses);
    let target_mass = total * f64::from(top_p);
    // Narrows the range [low, high) that contains the mass of the last kept token. `low` and `high` are the
    // bits of f32 values; positive values have the same order as their bits.
    let (mut low, mut high) = (1_u32, f32::INFINITY.to_bits());
    let mut at_low = l.len(); // Number of masses at or above `low`.
    let mut at_high = ThresholdMass::default(); // Sum and number of the masses at or above `high`.
    while at_low - at_high.count > SORTED_MAX && high - low > 4 {
        let step = (high - low) / 4;
        let cuts = [low + step, low + 2 * step, low + 3 * step];
        let at_cuts = vector::mass_above(masses, cuts.map(f32::from_bits));
        for (&cut, &at_cut) in cuts.iter().zip(&at_cuts).rev() {
            if at_cut.mass >= target_mass {
                (low, at_low) = (cut, at_cut.count);
                break;
            }
            (high, at_high) = (cut, at_cut);
        }
    }
    ranked.clear();
    let band = f32::from_bits(low)..f32::from_bits(high);
    for (id, &value) in (0..).zip(l).filter(|&(id, _)| band.contains(&masses[id])) {
        ranked.push(RankedToken { id: id as u32, value });
    }
    ranked.sort_unstable_by(order);
    if ranked.is_empty() {
        return floor;
    }
    let last = top_p_index(ranked, best.value, top_p, at_high.mass, Some(total));
    let last = ranked[last.unwrap_or(ranked.len() - 1)];
    SamplingCutoff { value: last.value, id: last.id }
}

/// Returns the token with the largest sum `logit + noise` among the tokens up to `cutoff` (the lowest id
/// among equals), and that sum. `l[0]` is the logit of token id `first_id`, a multiple of [`CHUNK`]; the ids
/// of `best`, `cutoff` and the result are indices into `l`.
///
/// The result is exact, but most tokens cost only an integer comparison: Gumbel noise decreases with the
/// random word, so in each chunk only tokens with words up to a limit can exceed the best sum so far.
pub(super) fn gumbel_argmax(
    l: &[f32],
    first_id: usize,
    draw: &RandomSamplingParams,
    best: RankedToken,
    cutoff: SamplingCutoff,
    maxima: &[f32],
) -> RankedToken {
    let mut words = [[0; LANES]; 4];
    let mut winner = RankedToken { id: best.id, value: f32::NEG_INFINITY };
    let start = best.id as usize / CHUNK; // The most likely id gives a high bound early.
    for c in std::iter::once(start).chain((0..maxima.len()).filter(|&c| c != start)) {
        if maxima[c] < cutoff.value {
            continue;
        }
        let rounding = 3e-7 * (winner.value.abs() + maxima[c].abs());
        let Some(limit) = highest_word(winner.value - maxima[c] - rounding) else { continue };
        let at = c * CHUNK;
        if !vector::words_up_to(draw.key, first_id + at, draw.position, limit, &mut words) {
            continue;
        }
        for (offset, &x) in l[at..].iter().take(CHUNK).enumerate() {
            let (id, word) = ((at + offset) as u32, words[offset % 4][offset / 4]);
            if !cutoff.keeps(id, x) || word > limit {
                continue;
            }
            let candidate = RankedToken { id, value: x + gumbel(word) };
            if order(&candidate, &winner) == Ordering::Less {
                winner = candidate;
            }
        }
    }
    winner
}
