//! The inner loop of all matrix work: a tile of up to 12 rows by 32 columns.
//!
//! `c[r][j] = Σ_k a[r][k] · b[k][j]`, each sum in ascending `k` in one f32 accumulator, whatever the
//! number of rows: a row's result does not depend on the rows that share its tile. Linear layers run
//! it over packed panels, attention over the key and value tiles of the KV pool.
//!
//! 12 rows of 2 × 16 lanes are 24 accumulators of the 32 registers of AVX-512; two more hold the line
//! of `b`, and `a` is broadcast from memory.
//!
//! bf16 takes pairs: a step is two consecutive `k`, `b` holds `[j][k % 2]`. AVX-512-BF16 multiplies and
//! adds a pair per instruction; the other paths widen to f32 and add the even, then the odd product.
//! f16 takes one `k` a step as f32 does, and the same sums: `a` is f32 by then, `b` is widened as it is read.

mod portable;
#[cfg(target_arch = "x86_64")]
mod simd;
#[cfg(target_arch = "x86_64")]
mod x86;

use device::{CpuIsa, DType};

/// Most rows of a tile.
pub(super) const TILE_ROWS: usize = 12;
/// Columns of a tile, in two halves that may lie apart.
pub(super) const TILE_COLUMNS: usize = 32;
/// Columns of a half.
pub(super) const HALF: usize = 16;

/// One tile and where its operands lie.
#[derive(Debug, Clone, Copy)]
pub(super) struct TileOperands<'a> {
    /// Row 0 of `a`.
    pub(super) a: *const u8,
    /// Bytes between rows of `a`.
    pub(super) a_stride: usize,
    /// `b` in ascending `k`.
    pub(super) b: &'a [OperandSegment],
    /// Bytes between steps of a segment.
    pub(super) b_stride: usize,
    /// Sums `[rows][32]`.
    pub(super) c: *mut f32,
    /// Elements between rows of `c`.
    pub(super) c_stride: usize,
    /// Whether sums go on from what `c` holds.
    pub(super) accumulate: bool,
    /// What to fetch into the second-level cache meanwhile.
    pub(super) prefetch: CachePrefetch,
}

/// A part of `b` whose steps lie at equal distances.
#[derive(Debug, Clone, Copy)]
pub(super) struct OperandSegment {
    /// Columns `[0, 16)` and `[16, 32)` of its first step.
    pub(super) start: [*const u8; 2],
    /// Values of `k` (f32, f16) or pairs of them (bf16).
    pub(super) steps: usize,
}

/// Memory that will be needed soon: fetched line by line, so many lines a step.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(super) enum CachePrefetch {
    /// Nothing.
    Nothing,
    /// One 64-byte line per step.
    OneLine(*const u8),
    /// Two lines per step.
    TwoLines(*const u8),
}

/// Bytes of one column of one step of `b`: an f32, a pair of bf16, or one f16.
pub(super) const fn column_bytes(dtype: DType) -> usize {
    match dtype {
        DType::F16 => 2,
        _ => 4,
    }
}

/// Computes one tile of a fixed number of rows.
pub(super) type TileKernel = unsafe fn(&TileOperands<'_>);

/// Tile kernels of one instruction set and element type, by number of rows.
#[derive(Debug, Clone, Copy)]
pub(super) struct TileKernels([TileKernel; TILE_ROWS]);

impl TileKernels {
    /// Kernels for `b` of `dtype`, f32, bf16 or f16, and `a` of the same type, f32 for f16.
    pub(super) fn new(isa: CpuIsa, dtype: DType) -> Self {
        Self(match (isa, dtype) {
            #[cfg(target_arch = "x86_64")]
            (CpuIsa::Avx512Bf16, DType::BF16) => x86::BF16,
            #[cfg(target_arch = "x86_64")]
            (CpuIsa::Avx512, DType::BF16) => x86::WIDE_16,
            #[cfg(target_arch = "x86_64")]
            (CpuIsa::Avx512 | CpuIsa::Avx512Bf16, DType::F16) => x86::F16_16,
            #[cfg(target_arch = "x86_64")]
            (CpuIsa::Avx512 | CpuIsa::Avx512Bf16, _) => x86::F32_16,
            #[cfg(target_arch = "x86_64")]
            (CpuIsa::Avx2, DType::BF16) => x86::WIDE_8,
            #[cfg(target_arch = "x86_64")]
            (CpuIsa::Avx2, DType::F16) => x86::F16_8,
            #[cfg(target_arch = "x86_64")]
            (CpuIsa::Avx2, _) => x86::F32_8,
            (_, DType::BF16) => portable::BF16_KERNEL,
            (_, DType::F16) => portable::F16_KERNEL,
            _ => portable::F32_KERNEL,
        })
    }

    /// Computes a tile of `rows` rows.
    ///
    /// # Safety
    /// All that `operands` names can be read or written to its full extent, `c` by this thread alone,
    /// and the processor has the instruction set of these kernels.
    pub(super) unsafe fn run(&self, rows: usize, operands: &TileOperands<'_>) {
        // SAFETY: passed on.
        unsafe { self.0[rows - 1](operands) }
    }
}

/// Instances of a tile kernel for 1 to 12 rows.
macro_rules! by_rows {
    ($kernel:ident $(, $extra:ty)*) => {
        [
            $kernel::<1 $(, $extra)*>, $kernel::<2 $(, $extra)*>, $kernel::<3 $(, $extra)*>,
            $kernel::<4 $(, $extra)*>, $kernel::<5 $(, $extra)*>, $kernel::<6 $(, $extra)*>,
            $kernel::<7 $(, $extra)*>, $kernel::<8 $(, $extra)*>, $kernel::<9 $(, $extra)*>,
            $kernel::<10 $(, $extra)*>, $kernel::<11 $(, $extra)*>, $kernel::<12 $(, $extra)*>,
        ]
    };
}
use by_rows;
