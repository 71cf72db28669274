//! Loops over a whole row of logits, compiled once per instruction set from one source.

use super::philox::{LANES, chunk_words};

/// Number of token ids per chunk: those of 16 Philox counters with 4 random words each.
pub(super) const CHUNK: usize = 64;

/// Number of values that are summed in 16 f32 lanes before the partial sum is added to an f64 sum.
const SUMMED: usize = 256;

/// Sum and number of the probability masses at or above a threshold, in the search for the top-p cutoff.
#[derive(Clone, Copy, Default)]
pub(super) struct ThresholdMass {
    pub(super) mass: f64,
    pub(super) count: usize,
}

/// Compiles `body` for AVX-512, AVX2 and the baseline instruction set; the function selects one at run time.
macro_rules! per_isa {
    ($(#[$doc:meta])* fn $name:ident($($arg:ident: $ty:ty),*) -> $ret:ty $body:block) => {
        $(#[$doc])*
        pub(super) fn $name($($arg: $ty),*) -> $ret {
            #[inline(always)]
            fn body($($arg: $ty),*) -> $ret $body
            #[cfg(target_arch = "x86_64")]
            {
                #[target_feature(enable = "avx512f,avx512bw,avx512dq,avx512vl")]
                fn avx512($($arg: $ty),*) -> $ret { body($($arg),*) }
                #[target_feature(enable = "avx2")]
                fn avx2($($arg: $ty),*) -> $ret { body($($arg),*) }
                if is_x86_feature_detected!("avx512f")
                    && is_x86_feature_detected!("avx512bw")
                    && is_x86_feature_detected!("avx512dq")
                    && is_x86_feature_detected!("avx512vl")
                {
                    // SAFETY: the processor supports the features.
                    return unsafe { avx512($($arg),*) };
                }
                if is_x86_feature_detected!("avx2") {
                    // SAFETY: the processor supports the feature.
                    return unsafe { avx2($($arg),*) };
                }
            }
            body($($arg),*)
        }
    };
}

per_isa! {
    /// Writes the largest value of each chunk of `l` to `maxima`; returns `false` if a value is NaN or
    /// infinite.
    fn maxima(l: &[f32], maxima: &mut [f32]) -> bool {
        let (chunks, tail) = l.as_chunks::<CHUNK>();
        let mut non_finite = 0;
        for (chunk, max) in chunks.iter().zip(maxima.iter_mut()) {
            non_finite |= chunk_has_non_finite(chunk);
            *max = chunk_max(chunk);
        }
        if !tail.is_empty() {
            let mut chunk = [f32::NEG_INFINITY; CHUNK];
            chunk[..tail.len()].copy_from_slice(tail);
            maxima[chunks.len()] = chunk_max(&chunk);
            non_finite |= u32::from(tail.iter().any(|x| !x.is_finite()));
        }
        non_finite == 0
    }
}

per_isa! {
    /// Multiplies `l` by `factor` and writes the largest value of each chunk to `maxima`.
    fn scale(l: &mut [f32], factor: f32, maxima: &mut [f32]) -> () {
        let (chunks, tail) = l.as_chunks_mut::<CHUNK>();
        for (chunk, max) in chunks.iter_mut().zip(maxima.iter_mut()) {
            for x in chunk.iter_mut() {
                *x *= factor;
            }
            *max = chunk_max(chunk);
        }
        if !tail.is_empty() {
            let mut top = f32::NEG_INFINITY;
            for x in tail {
                *x *= factor;
                top = top.max(*x);
            }
            maxima[chunks.len()] = top;
        }
    }
}

per_isa! {
    /// `Σ exp(l − shift)`, where `shift` is at least the largest value of `l`.
    fn exp_sum(l: &[f32], shift: f32) -> f64 {
        l.chunks(SUMMED).map(|part| f64::from(lane_sum(part, |x| exp(x - shift)))).sum()
    }
}

per_isa! {
    /// Writes the unnormalised probability `exp(l − best)` of each token to `masses`, or 0 if its logit is
    /// below `floor`. Returns the sum of `masses`.
    fn exp_masses(l: &[f32], best: f32, floor: f32, masses: &mut [f32]) -> f64 {
        let mut total = 0.0;
        for (part, masses) in l.chunks(SUMMED).zip(masses.chunks_mut(SUMMED)) {
            for (&x, mass) in part.iter().zip(masses.iter_mut()) {
                *mass = if x >= floor { exp(x - best) } else { 0.0 };
            }
            total += f64::from(lane_sum(masses, |mass| mass));
        }
        total
    }
}

per_isa! {
    /// Returns the sum and number of the masses at or above each threshold in `cuts`.
    fn mass_above(masses: &[f32], cuts: [f32; 3]) -> [ThresholdMass; 3] {
        let mut at_cuts = [ThresholdMass::default(); 3];
        for part in masses.chunks(SUMMED) {
            for (at_cut, &cut) in at_cuts.iter_mut().zip(&cuts) {
                at_cut.mass += f64::from(lane_sum(part, |m| if m >= cut { m } else { 0.0 }));
                at_cut.count += part.iter().map(|&m| u32::from(m >= cut)).sum::<u32>() as usize;
            }
        }
        at_cuts
    }
}

per_isa! {
    /// Returns the number of tokens that rank before token `at`, which has logit `x`: tokens with a larger
    /// logit, and tokens with an equal logit and a lower id.
    fn count_before(l: &[f32], x: f32, at: usize) -> usize {
        let count = |part: &[f32], tie: bool| -> usize {
            let mut n = 0;
            for block in part.chunks(4096) {
                // The counters are 32 bits wide, like the logits, so that SIMD vectors of counters and of
                // logits have equal numbers of lanes.
                n += block.iter().map(|&y| u32::from(y > x || (tie && y == x))).sum::<u32>() as usize;
            }
            n
        };
        count(&l[..at], true) + count(&l[at..], false)
    }
}

per_isa! {
    /// Computes the random words of token ids `[first, first + 64)`; returns whether any of them is at most
    /// `limit`.
    fn words_up_to(key: u64, first: usize, position: u32, limit: u32, words: &mut [[u32; LANES]; 4]) -> bool {
        *words = chunk_words(key, first, position);
        let mut any = 0;
        for row in words.iter() {
            for &word in row {
                any |= u32::from(word <= limit);
            }
        }
        any != 0
    }
}

#[inline(always)]
fn chunk_has_non_finite(chunk: &[f32; CHUNK]) -> u32 {
    let mut non_finite = 0;
    for x in chunk {
        non_finite |= u32::from(x.to_bits() & 0x7FFF_FFFF >= 0x7F80_0000);
    }
    non_finite
}

#[inline(always)]
fn chunk_max(chunk: &[f32; CHUNK]) -> f32 {
    let mut lanes = [f32::NEG_INFINITY; 16];
    for part in chunk.as_chunks::<16>().0 {
        for (lane, &x) in lanes.iter_mut().zip(part) {
            *lane = if x > *lane { x } else { *lane };
        }
    }
    let mut max = lanes[0];
    for &lane in &lanes[1..] {
        max = if lane > max { lane } else { max };
    }
    max
}

#[inline(always)]
fn lane_sum(part: &[f32], term: impl Fn(f32) -> f32) -> f32 {
    let mut lanes = [0.0_f32; 16];
    let (full, tail) = part.as_chunks::<16>();
    for sixteen in full {
        for (lane, &x) in lanes.iter_mut().zip(sixteen) {
            *lane += term(x);
        }
    }
    for (lane, &x) in lanes.iter_mut().zip(tail) {
        *lane += term(x);
    }
    let mut width = 8;
    while width > 0 {
        for lane in 0..width {
            lanes[lane] += lanes[lane + width];
        }
        width /= 2;
    }
    lanes[0]
}

/// `exp(x)` for `x <= 0` within 2 units in the last place; 0 below −87.
///
/// Splits `x = n ln 2 + r` with `|r| <= ln 2 / 2`, evaluates the Cephes polynomial of `exp(r)`, and adds `n`
/// to the exponent bits of the result.
#[inline(always)]
pub(super) fn exp(x: f32) -> f32 {
    const ROUND: f32 = 12_582_912.0; // 1.5 * 2^23: adding it leaves the nearest integer in the low bits.
    const LN2_HIGH: f32 = 0.693_359_4;
    const LN2_LOW: f32 = -2.121_944_4e-4;
    let clamped = if x > -87.0 { x } else { -87.0 };
    let shifted = clamped * std::f32::consts::LOG2_E + ROUND;
    let n = shifted - ROUND;
    let r = (clamped - n * LN2_HIGH) - n * LN2_LOW;
    let mut p = 1.987_569_1e-4;
    p = p * r + 1.398_199_9e-3;
    p = p * r + 8.333_452e-3;
    p = p * r + 4.166_579_6e-2;
    p = p * r + 1.666_666_5e-1;
    p = p * r + 0.5;
    let y = p * r * r + r + 1.0;
    let exponent = shifted.to_bits().wrapping_sub(ROUND.to_bits()) << 23;
    let scaled = f32::from_bits(y.to_bits().wrapping_add(exponent));
    if x > -87.0 { scaled } else { 0.0 }
}
