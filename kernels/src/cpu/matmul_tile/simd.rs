//! A trait of SIMD registers of f32 lanes, so that a tile kernel is written once for AVX2 and AVX-512.
//!
//! All functions are inlined into kernels that enable the instruction set; no other code calls them.

use std::arch::x86_64::{
    __m256, __m512, _mm_loadu_si128, _mm256_and_si256, _mm256_castsi256_ps, _mm256_cvtph_ps,
    _mm256_fmadd_ps, _mm256_loadu_ps, _mm256_loadu_si256, _mm256_set1_epi32, _mm256_set1_ps,
    _mm256_setzero_ps, _mm256_slli_epi32, _mm256_storeu_ps, _mm512_and_si512, _mm512_castsi512_ps,
    _mm512_cvtph_ps, _mm512_fmadd_ps, _mm512_loadu_ps, _mm512_loadu_si512, _mm512_set1_epi32,
    _mm512_set1_ps, _mm512_setzero_ps, _mm512_slli_epi32, _mm512_storeu_ps,
};

/// A SIMD register of f32 lanes.
///
/// # Safety
/// Callers have enabled the instruction set, and pointers are valid for `LANES` elements.
pub(super) unsafe trait SimdVector: Copy {
    /// Number of f32 lanes per register.
    const LANES: usize;
    /// Returns a register with zeros.
    unsafe fn zero() -> Self;
    /// Loads consecutive elements.
    unsafe fn load(from: *const f32) -> Self;
    /// Copies one element to every lane.
    unsafe fn splat(x: f32) -> Self;
    /// `self + x · y`, rounded once.
    unsafe fn mul_add(self, x: Self, y: Self) -> Self;
    /// Stores consecutive elements.
    unsafe fn store(self, to: *mut f32);
    /// Loads consecutive f16 as f32.
    unsafe fn load_f16(from: *const u8) -> Self;
    /// Loads `LANES` pairs of bf16 as f32: returns the even elements and the odd elements.
    unsafe fn load_bf16_pairs(from: *const u8) -> [Self; 2];
}

/// Mask of the upper half of a 32-bit word with a pair of bf16. It gives the second bf16 as an f32, because
/// the upper 16 bits of an f32 are the bf16 of the same value.
const ODD: i32 = -65536;

// SAFETY: AVX-512F intrinsics; the caller has enabled the instruction set.
unsafe impl SimdVector for __m512 {
    const LANES: usize = 16;
    #[inline(always)]
    unsafe fn zero() -> Self {
        // SAFETY: the caller guarantees the instruction set and valid pointers, as `SimdVector` requires.
        unsafe { _mm512_setzero_ps() }
    }
    #[inline(always)]
    unsafe fn load(from: *const f32) -> Self {
        // SAFETY: the caller guarantees the instruction set and valid pointers, as `SimdVector` requires.
        unsafe { _mm512_loadu_ps(from) }
    }
    #[inline(always)]
    unsafe fn splat(x: f32) -> Self {
        // SAFETY: the caller guarantees the instruction set and valid pointers, as `SimdVector` requires.
        unsafe { _mm512_set1_ps(x) }
    }
    #[inline(always)]
    unsafe fn mul_add(self, x: Self, y: Self) -> Self {
        // SAFETY: the caller guarantees the instruction set and valid pointers, as `SimdVector` requires.
        unsafe { _mm512_fmadd_ps(x, y, self) }
    }
    #[inline(always)]
    unsafe fn store(self, to: *mut f32) {
        // SAFETY: the caller guarantees the instruction set and valid pointers, as `SimdVector` requires.
        unsafe { _mm512_storeu_ps(to, self) }
    }
    #[inline(always)]
    unsafe fn load_f16(from: *const u8) -> Self {
        // SAFETY: the caller guarantees the instruction set and valid pointers, as `SimdVector` requires.
        unsafe { _mm512_cvtph_ps(_mm256_loadu_si256(from.cast())) }
    }
    #[inline(always)]
    unsafe fn load_bf16_pairs(from: *const u8) -> [Self; 2] {
        // SAFETY: the caller guarantees the instruction set and valid pointers, as `SimdVector` requires.
        unsafe {
            let pairs = _mm512_loadu_si512(from.cast());
            let odd = _mm512_and_si512(pairs, _mm512_set1_epi32(ODD));
            [_mm512_castsi512_ps(_mm512_slli_epi32::<16>(pairs)), _mm512_castsi512_ps(odd)]
        }
    }
}

// SAFETY: AVX2, FMA and F16C intrinsics; the caller has enabled the instruction sets.
unsafe impl SimdVector for __m256 {
    const LANES: usize = 8;
    #[inline(always)]
    unsafe fn zero() -> Self {
        // SAFETY: the caller guarantees the instruction set and valid pointers, as `SimdVector` requires.
        unsafe { _mm256_setzero_ps() }
    }
    #[inline(always)]
    unsafe fn load(from: *const f32) -> Self {
        // SAFETY: the caller guarantees the instruction set and valid pointers, as `SimdVector` requires.
        unsafe { _mm256_loadu_ps(from) }
    }
    #[inline(always)]
    unsafe fn splat(x: f32) -> Self {
        // SAFETY: the caller guarantees the instruction set and valid pointers, as `SimdVector` requires.
        unsafe { _mm256_set1_ps(x) }
    }
    #[inline(always)]
    unsafe fn mul_add(self, x: Self, y: Self) -> Self {
        // SAFETY: the caller guarantees the instruction set and valid pointers, as `SimdVector` requires.
        unsafe { _mm256_fmadd_ps(x, y, self) }
    }
    #[inline(always)]
    unsafe fn store(self, to: *mut f32) {
        // SAFETY: the caller guarantees the instruction set and valid pointers, as `SimdVector` requires.
        unsafe { _mm256_storeu_ps(to, self) }
    }
    #[inline(always)]
    unsafe fn load_f16(from: *const u8) -> Self {
        // SAFETY: the caller guarantees the instruction set and valid pointers, as `SimdVector` requires.
        unsafe { _mm256_cvtph_ps(_mm_loadu_si128(from.cast())) }
    }
    #[inline(always)]
    unsafe fn load_bf16_pairs(from: *const u8) -> [Self; 2] {
        // SAFETY: the caller guarantees the instruction set and valid pointers, as `SimdVector` requires.
        unsafe {
            let pairs = _mm256_loadu_si256(from.cast());
            let odd = _mm256_and_si256(pairs, _mm256_set1_epi32(ODD));
            [_mm256_castsi256_ps(_mm256_slli_epi32::<16>(pairs)), _mm256_castsi256_ps(odd)]
        }
    }
}
