//! The softmax of a key tile in AVX-512 intrinsics. The version without intrinsics (`softmax.rs`) would take
//! a third of all attention time, because the compiler does not vectorise its reductions.
//!
//! The algorithm is that of `softmax.rs`, with fused multiply-adds and hardware scaling by powers of two.

use std::arch::x86_64::{
    __m512, __m512i, __mmask16, _MM_FROUND_NO_EXC, _MM_FROUND_TO_NEAREST_INT, _mm512_add_epi32,
    _mm512_add_ps, _mm512_and_si512, _mm512_castps_si512, _mm512_castsi512_ps, _mm512_cvtph_ps,
    _mm512_cvtps_ph, _mm512_fmadd_ps, _mm512_fnmadd_ps, _mm512_loadu_ps, _mm512_loadu_si512,
    _mm512_mask_mul_ps, _mm512_max_ps, _mm512_mul_ps, _mm512_permutex2var_epi16,
    _mm512_reduce_add_ps, _mm512_reduce_max_ps, _mm512_roundscale_ps, _mm512_scalef_ps,
    _mm512_set1_epi32, _mm512_set1_ps, _mm512_setzero_ps, _mm512_srli_epi32, _mm512_storeu_ps,
    _mm512_storeu_si512, _mm512_sub_ps,
};

use std::ops::Range;

use device::{DType, FloatElement};

use super::super::matmul_tile::TILE_ROWS;
use super::KEY_TILE;
use super::softmax::{KeyTileSoftmax, RunningSoftmax};

const LANES: usize = 16;
const VECTORS: usize = KEY_TILE / LANES;

// The rescale factors of all rows of a tile are computed in one vector.
const _: () = assert!(TILE_ROWS <= LANES);

/// Computes the softmax of one key tile for all queries.
#[target_feature(enable = "avx512f,avx512bw,avx512vl,avx512dq")]
pub(super) fn run<T: FloatElement>(tile: KeyTileSoftmax<'_, T>) {
    let visible: [u64; TILE_ROWS] = std::array::from_fn(|i| {
        if i < tile.scores.len() { visible_keys(tile.hidden[i]..tile.visible[i]) } else { 0 }
    });
    let maxima = updated_maxima(&tile, &visible);
    let rescales = rescale_factors(tile.running, &maxima);
    let outs = tile.out.chunks_exact_mut(tile.out_stride);
    let rows = tile.scores.iter().zip(tile.probabilities).zip(tile.running).zip(outs);
    for (i, (((scores, probabilities), running), out)) in rows.enumerate() {
        if visible[i] == 0 {
            *probabilities = [T::MatmulOperand::store(0.0); KEY_TILE];
            continue;
        }
        let (max, rescale) = (maxima[i], rescales[i]);
        let weights = mask(scores, visible[i], tile.scale)
            .map(|score| exp(_mm512_sub_ps(score, _mm512_set1_ps(max))));
        let sum =
            running.sum * rescale + _mm512_reduce_add_ps(store_row::<T>(probabilities, weights));
        *running = RunningSoftmax { max, sum };
        if rescale != 1.0 {
            rescale_output(out, rescale);
        }
    }
}

/// Returns the keys of a key tile that a query attends to, one bit per key.
fn visible_keys(keys: Range<usize>) -> u64 {
    if keys.is_empty() { 0 } else { u64::MAX >> (KEY_TILE - keys.end) & u64::MAX << keys.start }
}

/// Returns the running maxima including the scores of the key tile. Rows without visible
/// keys keep their running maximum.
#[inline]
#[target_feature(enable = "avx512f")]
fn updated_maxima<T: FloatElement>(
    tile: &KeyTileSoftmax<'_, T>,
    visible: &[u64; TILE_ROWS],
) -> [f32; TILE_ROWS] {
    let mut maxima = [f32::NEG_INFINITY; TILE_ROWS];
    let rows = tile.scores.iter().zip(tile.running.iter()).zip(visible);
    for (max, ((scores, running), &visible)) in maxima.iter_mut().zip(rows) {
        let [a, b, c, d] = mask(scores, visible, tile.scale);
        let largest = _mm512_reduce_max_ps(_mm512_max_ps(_mm512_max_ps(a, b), _mm512_max_ps(c, d)));
        *max = largest.max(running.max);
    }
    maxima
}

/// Returns `exp(running maximum − updated maximum)` of each row; NaN, which is not used, for rows that have not seen a key.
#[inline]
#[target_feature(enable = "avx512f")]
fn rescale_factors(running: &[RunningSoftmax], maxima: &[f32; TILE_ROWS]) -> [f32; LANES] {
    let mut falls = [0.0; LANES];
    for ((fall, running), max) in falls.iter_mut().zip(running).zip(maxima) {
        *fall = running.max - max;
    }
    let mut rescales = [0.0; LANES];
    // SAFETY: both arrays have 16 f32.
    unsafe {
        let factors = exp(_mm512_loadu_ps(falls.as_ptr()));
        _mm512_storeu_ps(rescales.as_mut_ptr(), factors);
    }
    rescales
}

/// Returns the scores times `scale`. Keys whose bit in `visible` is not set are masked with −∞.
#[inline]
#[target_feature(enable = "avx512f")]
fn mask(scores: &[f32; KEY_TILE], visible: u64, scale: f32) -> [__m512; VECTORS] {
    let mut masked = [_mm512_set1_ps(f32::NEG_INFINITY); VECTORS];
    for (i, masked) in masked.iter_mut().enumerate() {
        let visible_lanes = (visible >> (i * LANES)) as __mmask16;
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

/// Rounds the softmax weights of one query to `T`, stores them in the operand type of the matrix product, and
/// returns the sum of the rounded weights in each lane.
#[inline]
#[target_feature(enable = "avx512f,avx512bw,avx512vl")]
fn store_row<T: FloatElement>(
    to: &mut [T::MatmulOperand; KEY_TILE],
    weights: [__m512; VECTORS],
) -> __m512 {
    let mut sums = _mm512_setzero_ps();
    if T::DTYPE == DType::BF16 {
        for (i, &[low, high]) in weights.as_chunks().0.iter().enumerate() {
            let (low, high) = (round_to_bf16(low), round_to_bf16(high));
            sums = _mm512_add_ps(_mm512_add_ps(sums, low), high);
            let packed = pack_bf16(low, high);
            // SAFETY: writes 32 elements of two bytes from index `32 i` on; `to` has 64.
            unsafe { _mm512_storeu_si512(to.as_mut_ptr().add(2 * i * LANES).cast(), packed) };
        }
        return sums;
    }
    for (i, weight) in weights.into_iter().enumerate() {
        let rounded = if T::DTYPE == DType::F16 {
            _mm512_cvtph_ps(_mm512_cvtps_ph::<_MM_FROUND_TO_NEAREST_INT>(weight))
        } else {
            weight
        };
        // SAFETY: writes 16 elements of four bytes from index `16 i` on; `to` has 64.
        unsafe { _mm512_storeu_ps(to.as_mut_ptr().add(i * LANES).cast(), rounded) };
        sums = _mm512_add_ps(sums, rounded);
    }
    sums
}

/// Rounds to the nearest bf16, ties to even. Weights are at most 1, so the carry cannot overflow the exponent,
/// and NaNs from arithmetic stay NaN after the carry.
#[inline]
#[target_feature(enable = "avx512f")]
fn round_to_bf16(weight: __m512) -> __m512 {
    let bits = _mm512_castps_si512(weight);
    let odd = _mm512_and_si512(_mm512_srli_epi32::<16>(bits), _mm512_set1_epi32(1));
    let half = _mm512_add_epi32(odd, _mm512_set1_epi32(0x7fff));
    let upper = _mm512_set1_epi32(0xffff_0000u32.cast_signed());
    _mm512_castsi512_ps(_mm512_and_si512(_mm512_add_epi32(bits, half), upper))
}

/// Returns the upper halves of the 32-bit elements: those of `low`, then those of `high`.
#[inline]
#[target_feature(enable = "avx512f,avx512bw")]
fn pack_bf16(low: __m512, high: __m512) -> __m512i {
    const UPPER_HALVES: [u16; 2 * LANES] = {
        let mut halves = [0; 2 * LANES];
        let mut i = 0;
        while i < halves.len() {
            halves[i] = 2 * i as u16 + 1;
            i += 1;
        }
        halves
    };
    // SAFETY: the array has 64 bytes.
    let halves = unsafe { _mm512_loadu_si512(UPPER_HALVES.as_ptr().cast()) };
    _mm512_permutex2var_epi16(_mm512_castps_si512(low), halves, _mm512_castps_si512(high))
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
