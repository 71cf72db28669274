//! The softmax of a key tile in AVX-512 intrinsics. The version without intrinsics (`softmax.rs`) would take
//! a third of all attention time, because the compiler does not vectorise its reductions.
//!
//! The algorithm is that of `softmax.rs`, with fused multiply-adds and hardware scaling by powers of two.

use std::arch::x86_64::{
    __m512, __mmask16, _MM_FROUND_NO_EXC, _MM_FROUND_TO_NEAREST_INT, _mm256_storeu_si256,
    _mm512_add_epi32, _mm512_add_ps, _mm512_and_si512, _mm512_castps_si512, _mm512_castsi512_ps,
    _mm512_cvtepi32_epi16, _mm512_cvtph_ps, _mm512_cvtps_ph, _mm512_fmadd_ps, _mm512_fnmadd_ps,
    _mm512_loadu_ps, _mm512_mask_mul_ps, _mm512_max_ps, _mm512_mul_ps, _mm512_reduce_add_ps,
    _mm512_reduce_max_ps, _mm512_roundscale_ps, _mm512_scalef_ps, _mm512_set1_epi32,
    _mm512_set1_ps, _mm512_setzero_ps, _mm512_slli_epi32, _mm512_srli_epi32, _mm512_storeu_ps,
    _mm512_sub_ps,
};

use std::ops::Range;

use device::{DType, FloatElement};

use super::KEY_TILE;
use super::softmax::{KeyTileSoftmax, RunningSoftmax};

const LANES: usize = 16;
const VECTORS: usize = KEY_TILE / LANES;

/// Computes the softmax of one key tile for all queries.
#[target_feature(enable = "avx512f,avx512bw,avx512vl,avx512dq")]
pub(super) fn run<T: FloatElement>(tile: KeyTileSoftmax<'_, T>) {
    let outs = tile.out.chunks_exact_mut(tile.out_stride);
    let rows = tile.scores.iter().zip(tile.probabilities).zip(tile.running).zip(outs);
    let bounds = tile.hidden.iter().zip(tile.visible);
    for ((((scores, probabilities), running), out), (&hidden, &visible)) in rows.zip(bounds) {
        if visible <= hidden {
            *probabilities = [T::MatmulOperand::store(0.0); KEY_TILE];
            continue;
        }
        let masked = mask(scores, hidden..visible, tile.scale);
        let [a, b, c, d] = masked;
        let largest = _mm512_reduce_max_ps(_mm512_max_ps(_mm512_max_ps(a, b), _mm512_max_ps(c, d)));
        let max = largest.max(running.max);
        let mut sums = _mm512_setzero_ps();
        for (i, score) in masked.into_iter().enumerate() {
            let weight = exp(_mm512_sub_ps(score, _mm512_set1_ps(max)));
            let to = &mut probabilities[i * LANES..(i + 1) * LANES];
            sums = _mm512_add_ps(sums, store::<T>(to, weight));
        }
        let rescale = first_lane(exp(_mm512_set1_ps(running.max - max)));
        let sum = running.sum * rescale + _mm512_reduce_add_ps(sums);
        *running = RunningSoftmax { max, sum };
        if rescale != 1.0 {
            rescale_output(out, rescale);
        }
    }
}

/// Returns the scores times `scale`. Keys outside `visible` are masked with −∞.
#[inline]
#[target_feature(enable = "avx512f")]
fn mask(scores: &[f32; KEY_TILE], visible: Range<usize>, scale: f32) -> [__m512; VECTORS] {
    let mut masked = [_mm512_set1_ps(f32::NEG_INFINITY); VECTORS];
    for (i, masked) in masked.iter_mut().enumerate() {
        let [hidden, seen] = [visible.start, visible.end]
            .map(|end| (1u32 << end.saturating_sub(i * LANES).min(LANES)) - 1);
        let visible_lanes = (seen & !hidden) as __mmask16;
        // SAFETY: reads 16 scores from index `16 i` on; `scores` has 64.
        let x = unsafe { _mm512_loadu_ps(scores.as_ptr().add(i * LANES)) };
        *masked = _mm512_mask_mul_ps(*masked, visible_lanes, x, _mm512_set1_ps(scale));
    }
    masked
}

/// `e^x` for `x ≤ 0`; 0 for −∞. Evaluates the polynomial of `maths::exp`.
#[inline]
#[target_feature(enable = "avx512f")]
fn exp(x: __m512) -> __m512 {
    const NEAREST: i32 = _MM_FROUND_TO_NEAREST_INT | _MM_FROUND_NO_EXC;
    let c = |x: f32| _mm512_set1_ps(x);
    // Arguments are clamped at −110, because −∞ would give ∞ − ∞ = NaN below, and e^−110 is already 0 in f32.
    // With `x` as the second operand, the max instruction propagates NaN.
    let x = _mm512_max_ps(c(-110.0), x);
    let n = _mm512_roundscale_ps::<NEAREST>(_mm512_mul_ps(x, c(std::f32::consts::LOG2_E)));
    let r = _mm512_fnmadd_ps(n, c(0.693_359_4), x);
    let r = _mm512_fnmadd_ps(n, c(-2.121_944_4e-4), r);
    let mut p = c(1.987_569_1e-4);
    for term in [1.398_2e-3, 8.333_452e-3, 4.166_579_6e-2, 1.666_666_5e-1, 0.5, 1.0, 1.0] {
        p = _mm512_fmadd_ps(p, r, c(term));
    }
    _mm512_scalef_ps(p, n)
}

/// Rounds 16 softmax weights to `T`, stores them in the operand type of the matrix product, and returns the
/// rounded weights.
#[inline]
#[target_feature(enable = "avx512f,avx512vl")]
fn store<T: FloatElement>(to: &mut [T::MatmulOperand], weight: __m512) -> __m512 {
    assert_eq!(to.len(), LANES);
    if T::DTYPE == DType::BF16 {
        // Rounds to the nearest bf16, ties to even. Weights are at most 1, so the carry cannot overflow the
        // exponent, and NaNs from arithmetic stay NaN after the carry.
        let bits = _mm512_castps_si512(weight);
        let odd = _mm512_and_si512(_mm512_srli_epi32::<16>(bits), _mm512_set1_epi32(1));
        let half = _mm512_add_epi32(odd, _mm512_set1_epi32(0x7fff));
        let rounded = _mm512_srli_epi32::<16>(_mm512_add_epi32(bits, half));
        // SAFETY: `to` has 16 elements of two bytes.
        unsafe { _mm256_storeu_si256(to.as_mut_ptr().cast(), _mm512_cvtepi32_epi16(rounded)) };
        _mm512_castsi512_ps(_mm512_slli_epi32::<16>(rounded))
    } else {
        let rounded = if T::DTYPE == DType::F16 {
            _mm512_cvtph_ps(_mm512_cvtps_ph::<_MM_FROUND_TO_NEAREST_INT>(weight))
        } else {
            weight
        };
        // SAFETY: `to` has 16 elements of four bytes.
        unsafe { _mm512_storeu_ps(to.as_mut_ptr().cast(), rounded) };
        rounded
    }
}

#[inline]
#[target_feature(enable = "avx512f")]
fn rescale_output(out: &mut [f32], rescale: f32) {
    for chunk in out.as_chunks_mut::<LANES>().0 {
        // SAFETY: a chunk is 16 f32.
        unsafe {
            let x = _mm512_loadu_ps(chunk.as_ptr());
            _mm512_storeu_ps(chunk.as_mut_ptr(), _mm512_mul_ps(x, _mm512_set1_ps(rescale)));
        }
    }
}

#[inline]
#[target_feature(enable = "avx512f")]
fn first_lane(x: __m512) -> f32 {
    std::arch::x86_64::_mm512_cvtss_f32(x)
}
