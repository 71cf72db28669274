//! Tile kernels in intrinsics for AVX-512-BF16, AVX-512 and AVX2.
//!
//! Loops over the rows and registers of a tile have constant bounds, so that the compiler unrolls them and
//! keeps the sums in registers.

use std::arch::x86_64::{
    __m256, __m512, __m512bh, __m512i, _MM_HINT_T1, _mm_prefetch, _mm512_dpbf16_ps,
    _mm512_loadu_ps, _mm512_loadu_si512, _mm512_set1_epi32, _mm512_setzero_ps, _mm512_storeu_ps,
};

use super::simd::SimdVector;
use super::{CpuCachePrefetch, HALF, TILE_ROWS, TileKernel, TileOperands, by_rows};

pub(super) const BF16: [TileKernel; TILE_ROWS] = by_rows!(bf16);
pub(super) const F32_16: [TileKernel; TILE_ROWS] = by_rows!(f32_16);
pub(super) const BF16_WIDENED_16: [TileKernel; TILE_ROWS] = by_rows!(bf16_widened_16);
pub(super) const F16_16: [TileKernel; TILE_ROWS] = by_rows!(f16_16);
pub(super) const F32_8: [TileKernel; TILE_ROWS] = by_rows!(f32_8);
pub(super) const BF16_WIDENED_8: [TileKernel; TILE_ROWS] = by_rows!(bf16_widened_8);
pub(super) const F16_8: [TileKernel; TILE_ROWS] = by_rows!(f16_8);

const LINE: usize = 64;
/// Bytes of one step of a row of `a`: an f32, or a pair of bf16.
const STEP_BYTES: usize = 4;

#[target_feature(enable = "avx512f,avx512bw,avx512vl,avx512dq,avx512bf16")]
unsafe fn bf16<const M: usize>(o: &TileOperands<'_>) {
    // SAFETY: the caller guarantees the operands and the instruction set.
    unsafe {
        match o.prefetch {
            CpuCachePrefetch::Nothing => bf16_prefetched::<M, 0>(o, std::ptr::null()),
            CpuCachePrefetch::OneLine(next) => bf16_prefetched::<M, 1>(o, next),
            CpuCachePrefetch::TwoLines(next) => bf16_prefetched::<M, 2>(o, next),
        }
    }
}

/// Computes the product of one tile by paired bf16 dot products, and prefetches `LINES` cache lines per step
/// from address `next` on.
#[inline]
#[target_feature(enable = "avx512f,avx512bw,avx512vl,avx512dq,avx512bf16")]
unsafe fn bf16_prefetched<const M: usize, const LINES: usize>(
    o: &TileOperands<'_>,
    next: *const u8,
) {
    // SAFETY: the caller guarantees the operands and the instruction set; a prefetch may use any address.
    unsafe {
        let mut sums = [[_mm512_setzero_ps(); 2]; M];
        if o.accumulate {
            for (r, [low, high]) in sums.iter_mut().enumerate() {
                *low = _mm512_loadu_ps(o.c.add(r * o.c_stride));
                *high = _mm512_loadu_ps(o.c.add(r * o.c_stride + HALF));
            }
        }
        let mut a = o.a;
        for segment in o.b {
            for step in 0..segment.steps {
                let line = |b: *const u8| _mm512_loadu_si512(b.add(step * o.b_stride).cast());
                let b = segment.start.map(|b| as_pairs(line(b)));
                for line in 0..LINES {
                    let line = next.wrapping_add((step * LINES + line) * LINE);
                    _mm_prefetch::<_MM_HINT_T1>(line.cast());
                }
                for (r, [low, high]) in sums.iter_mut().enumerate() {
                    let pair = a.add(r * o.a_stride + step * 4).cast::<i32>().read_unaligned();
                    let a = as_pairs(_mm512_set1_epi32(pair));
                    *low = _mm512_dpbf16_ps(*low, a, b[0]);
                    *high = _mm512_dpbf16_ps(*high, a, b[1]);
                }
            }
            a = a.add(segment.steps * 4);
        }
        for (r, [low, high]) in sums.iter().enumerate() {
            _mm512_storeu_ps(o.c.add(r * o.c_stride), *low);
            _mm512_storeu_ps(o.c.add(r * o.c_stride + HALF), *high);
        }
    }
}

#[inline]
#[target_feature(enable = "avx512f")]
fn as_pairs(x: __m512i) -> __m512bh {
    // SAFETY: both types are 64 plain bytes.
    unsafe { std::mem::transmute(x) }
}

#[target_feature(enable = "avx512f,avx512bw,avx512vl,avx512dq")]
unsafe fn f32_16<const M: usize>(o: &TileOperands<'_>) {
    // SAFETY: the caller guarantees the operands; the instruction set is enabled here.
    unsafe { tile::<__m512, F32ElementLoader, M, 2>(o, 0, 0) }
}

#[target_feature(enable = "avx512f,avx512bw,avx512vl,avx512dq")]
unsafe fn bf16_widened_16<const M: usize>(o: &TileOperands<'_>) {
    // SAFETY: the caller guarantees the operands; the instruction set is enabled here.
    unsafe { tile::<__m512, Bf16PairLoader, M, 2>(o, 0, 0) }
}

#[target_feature(enable = "avx512f,avx512bw,avx512vl,avx512dq")]
unsafe fn f16_16<const M: usize>(o: &TileOperands<'_>) {
    // SAFETY: the caller guarantees the operands; the instruction set is enabled here.
    unsafe { tile::<__m512, F16ElementLoader, M, 2>(o, 0, 0) }
}

#[target_feature(enable = "avx2,fma")]
unsafe fn f32_8<const M: usize>(o: &TileOperands<'_>) {
    // SAFETY: the caller guarantees the operands; the instruction set is enabled here.
    unsafe { tile_avx2::<F32ElementLoader, M>(o) }
}

#[target_feature(enable = "avx2,fma")]
unsafe fn bf16_widened_8<const M: usize>(o: &TileOperands<'_>) {
    // SAFETY: the caller guarantees the operands; the instruction set is enabled here.
    unsafe { tile_avx2::<Bf16PairLoader, M>(o) }
}

#[target_feature(enable = "avx2,fma,f16c")]
unsafe fn f16_8<const M: usize>(o: &TileOperands<'_>) {
    // SAFETY: the caller guarantees the operands; the instruction set is enabled here.
    unsafe { tile_avx2::<F16ElementLoader, M>(o) }
}

/// Computes the product of one tile on AVX2, which has 16 registers: 4 rows of half the columns (two
/// registers per row) at a time.
#[inline(always)]
unsafe fn tile_avx2<S: TileElementLoader, const M: usize>(o: &TileOperands<'_>) {
    for half in 0..2 {
        let mut r = 0;
        while r < M {
            // SAFETY: rows `[r, r + 4)`, or row `r`, are among the `M` rows; otherwise by the caller's
            // contract.
            unsafe {
                if M - r >= 4 {
                    tile::<__m256, S, 4, 2>(o, r, half * HALF);
                    r += 4;
                } else {
                    tile::<__m256, S, 1, 2>(o, r, half * HALF);
                    r += 1;
                }
            }
        }
    }
}

/// The element types of a tile kernel, and how it loads one step: one f32 of `a` and `b`, a bf16 pair as two
/// f32, or an f32 of `a` and an f16 of `b`.
trait TileElementLoader {
    /// Bytes of one column of one step of `b`: an f32, a pair of bf16, or one f16.
    const COLUMN_BYTES: usize = 4;
    /// Number of multiply-adds per accumulator and step: 2 for bf16 pairs, otherwise 1.
    const DEPTH: usize;
    unsafe fn a(from: *const u8, step: usize) -> [f32; 2];
    unsafe fn b<V: SimdVector>(from: *const u8) -> [V; 2];
}

/// Loads f32 elements of `a` and `b`.
struct F32ElementLoader;
/// Loads f32 elements of `a` and f16 elements of `b`.
struct F16ElementLoader;
/// Loads pairs of bf16 elements of `a` and `b`.
struct Bf16PairLoader;

impl TileElementLoader for F32ElementLoader {
    const DEPTH: usize = 1;
    #[inline(always)]
    unsafe fn a(from: *const u8, step: usize) -> [f32; 2] {
        // SAFETY: the caller guarantees the extent of `a`.
        [unsafe { *from.cast::<f32>().add(step) }, 0.0]
    }
    #[inline(always)]
    unsafe fn b<V: SimdVector>(from: *const u8) -> [V; 2] {
        // SAFETY: the caller guarantees the extent of `b`.
        unsafe { [V::load(from.cast()), V::zero()] }
    }
}

impl TileElementLoader for F16ElementLoader {
    const COLUMN_BYTES: usize = 2;
    const DEPTH: usize = 1;
    #[inline(always)]
    unsafe fn a(from: *const u8, step: usize) -> [f32; 2] {
        // SAFETY: the caller guarantees the extent of `a`.
        unsafe { F32ElementLoader::a(from, step) }
    }
    #[inline(always)]
    unsafe fn b<V: SimdVector>(from: *const u8) -> [V; 2] {
        // SAFETY: the caller guarantees the extent of `b`.
        unsafe { [V::load_f16(from), V::zero()] }
    }
}

impl TileElementLoader for Bf16PairLoader {
    const DEPTH: usize = 2;
    #[inline(always)]
    unsafe fn a(from: *const u8, step: usize) -> [f32; 2] {
        // SAFETY: the caller guarantees the extent of `a`.
        let pair = unsafe { from.cast::<u32>().add(step).read_unaligned() };
        [f32::from_bits(pair << 16), f32::from_bits(pair & 0xffff_0000)]
    }
    #[inline(always)]
    unsafe fn b<V: SimdVector>(from: *const u8) -> [V; 2] {
        // SAFETY: the caller guarantees the extent of `b`.
        unsafe { V::load_bf16_pairs(from) }
    }
}

/// Computes rows `[row, row + M)` of a tile, for the columns of `R` registers from column `column` on.
#[inline(always)]
unsafe fn tile<V: SimdVector, S: TileElementLoader, const M: usize, const R: usize>(
    o: &TileOperands<'_>,
    row: usize,
    column: usize,
) {
    // SAFETY: the caller guarantees the operands and the instruction set.
    unsafe {
        let mut sums = [[V::zero(); R]; M];
        let column_of = |i: usize| column + i * V::LANES;
        let c = |r: usize, i: usize| o.c.add((row + r) * o.c_stride + column_of(i));
        if o.accumulate {
            for (r, sums) in sums.iter_mut().enumerate() {
                for (i, sum) in sums.iter_mut().enumerate() {
                    *sum = V::load(c(r, i));
                }
            }
        }
        let mut a = o.a.add(row * o.a_stride);
        for segment in o.b {
            let from: [*const u8; R] = std::array::from_fn(|i| {
                segment.start[column_of(i) / HALF].add(column_of(i) % HALF * S::COLUMN_BYTES)
            });
            for step in 0..segment.steps {
                // Written as a loop instead of a closure: with overflow checks enabled, the compiler does not
                // inline the closure, and then does not inline the intrinsics in it.
                let mut b = [[V::zero(); 2]; R];
                for (b, from) in b.iter_mut().zip(&from) {
                    *b = S::b::<V>(from.add(step * o.b_stride));
                }
                for (r, sums) in sums.iter_mut().enumerate() {
                    let a = S::a(a.add(r * o.a_stride), step);
                    for (depth, &a) in a.iter().enumerate().take(S::DEPTH) {
                        let a = V::splat(a);
                        for (sum, b) in sums.iter_mut().zip(&b) {
                            *sum = sum.mul_add(a, b[depth]);
                        }
                    }
                }
            }
            a = a.add(segment.steps * STEP_BYTES);
        }
        for (r, sums) in sums.iter().enumerate() {
            for (i, sum) in sums.iter().enumerate() {
                sum.store(c(r, i));
            }
        }
    }
}
