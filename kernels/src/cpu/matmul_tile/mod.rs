//! Matrix product of one tile of up to 12 rows by 32 columns: the inner loop of linear layers and attention.
//!
//! `c[r][j] = Σ_k a[r][k] · b[k][j]`, each sum in ascending `k` in one f32 accumulator, for any number of
//! rows: the result of a row does not depend on the other rows of its tile. Linear layers run it over packed
//! panels of weights, attention over the key and value tiles of the KV pool.
//!
//! A tile of 12 rows of 2 × 16 lanes has its accumulators in 24 of the 32 registers of AVX-512; two more
//! registers have the columns of `b`, and `a` is broadcast from memory.
//!
//! A step of the product is one `k` in f32 and f16, and two consecutive `k` in bf16, where `b` is `[j][k %
//! 2]`. AVX-512-BF16 multiplies and adds a bf16 pair per instruction; the other implementations convert to
//! f32 and add the even, then the odd product. For f16 the caller passes `a` in f32; `b` is converted to f32
//! when it is read.

mod portable;
#[cfg(target_arch = "x86_64")]
mod simd;
#[cfg(target_arch = "x86_64")]
mod x86;

use device::{CpuIsa, DType};

/// Maximum number of rows of a tile.
pub(super) const TILE_ROWS: usize = 12;
/// Number of columns of a tile. They are in two halves, which need not be adjacent in memory.
pub(super) const TILE_COLUMNS: usize = 32;
/// Number of columns of half a tile.
pub(super) const HALF: usize = 16;

/// Operands of the matrix product of one tile: `c = a b`, or `c += a b` if `accumulate` is true.
#[derive(Debug, Clone, Copy)]
pub(super) struct TileOperands<'a> {
    /// Address of row 0 of `a`, the left operand of the product.
    pub(super) a: *const u8,
    /// Bytes from one row of `a` to the next.
    pub(super) a_stride: usize,
    /// The right operand `b` as a list of segments, in ascending order of the summation index `k`.
    pub(super) b: &'a [OperandSegment],
    /// Distance in bytes between successive steps within a segment of `b`; a step is one `k`, or in bf16 two.
    pub(super) b_stride: usize,
    /// The result `c` of the product, `[rows][32]`.
    pub(super) c: *mut f32,
    /// Elements from one row of `c` to the next.
    pub(super) c_stride: usize,
    /// Whether the product is added to the contents of `c`.
    pub(super) accumulate: bool,
    /// Memory to prefetch into the L2 cache during the product, such as the weights of the next panel.
    pub(super) prefetch: CpuCachePrefetch,
}

/// A segment of the right operand `b` in which successive steps are equally far apart in memory, such as the
/// keys of one KV block.
#[derive(Debug, Clone, Copy)]
pub(super) struct OperandSegment {
    /// Addresses of columns 0 to 15 and of columns 16 to 31 of the first step.
    pub(super) start: [*const u8; 2],
    /// Number of steps; a step is one `k` (f32, f16) or a pair (bf16).
    pub(super) steps: usize,
}

/// Memory that is prefetched into the L2 cache of the CPU during a matrix product.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(super) enum CpuCachePrefetch {
    /// Nothing is prefetched.
    Nothing,
    /// From this address on, one 64-byte cache line per step is prefetched.
    OneLine(*const u8),
    /// From this address on, two 64-byte cache lines per step are prefetched.
    TwoLines(*const u8),
}

/// Bytes of one column of one step of `b`: an f32, a pair of bf16, or one f16.
pub(super) const fn column_bytes(dtype: DType) -> usize {
    match dtype {
        DType::F16 => 2,
        _ => 4,
    }
}

/// A function that computes the product of one tile for a fixed number of rows.
pub(super) type TileKernel = unsafe fn(&TileOperands<'_>);

/// Tile kernels of one instruction set and element type; entry `i` computes `i + 1` rows.
#[derive(Debug, Clone, Copy)]
pub(super) struct TileKernels([TileKernel; TILE_ROWS]);

impl TileKernels {
    /// Returns the tile kernels for `b` of type `dtype` (f32, bf16 or f16). `a` has the same type as `b`,
    /// except that `a` is f32 if `b` is f16.
    pub(super) fn new(isa: CpuIsa, dtype: DType) -> Self {
        Self(match (isa, dtype) {
            #[cfg(target_arch = "x86_64")]
            (CpuIsa::Avx512Bf16, DType::BF16) => x86::BF16,
            #[cfg(target_arch = "x86_64")]
            (CpuIsa::Avx512, DType::BF16) => x86::BF16_WIDENED_16,
            #[cfg(target_arch = "x86_64")]
            (CpuIsa::Avx512 | CpuIsa::Avx512Bf16, DType::F16) => x86::F16_16,
            #[cfg(target_arch = "x86_64")]
            (CpuIsa::Avx512 | CpuIsa::Avx512Bf16, _) => x86::F32_16,
            #[cfg(target_arch = "x86_64")]
            (CpuIsa::Avx2, DType::BF16) => x86::BF16_WIDENED_8,
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
    /// The extents of all operands are readable or writable, only this thread writes `c`, and the processor
    /// supports the instruction set of these kernels.
    pub(super) unsafe fn run(&self, rows: usize, operands: &TileOperands<'_>) {
        // SAFETY: the caller guarantees the operands and the instruction set.
        unsafe { self.0[rows - 1](operands) }
    }
}

/// Array of a tile kernel function, instantiated for each number of rows from 1 to 12.
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
