//! Launch shapes of `fp8_gemm_small_m` with streamed weights: strips (8 rows of `W` each) per pass over K,
//! number of blocks, shared memory.

use super::super::launch_limits::LaunchLimits;
use super::BLOCK;

/// Number of consumer warps; must match `COMPUTE_WARPS` in fp8_gemm_small_m/share.h.
pub(super) const COMPUTE_WARPS: usize = 8;
/// Number of columns (K) of `W` that one ring-buffer stage contains (a slab). It is small, because no load
/// overlaps the MMAs of the last slab of a launch. It determines the order of additions, so it must not
/// depend on the number of rows of x.
pub(super) const SLAB: usize = 512;
/// Maximum number of strips (8 rows of `W` each) that a block processes per pass over K, limited by
/// registers.
const STREAMED_STRIPS: usize = 6;
/// Shared memory of barriers, sums of squares, row maxima and scale factors, in bytes.
const FIXED_BYTES: usize = 34 * 8 + (2 * COMPUTE_WARPS + 1) * 16 * 4;
/// Maximum bytes of x for which all of x stays in shared memory for the whole launch. A larger x is loaded
/// slab by slab (`SLAB` columns at a time) if a separate launch has prepared it and each block reads it only
/// once.
const RESIDENT_X_BYTES: usize = 40 << 10;

/// Sizes of an fp8 small-M GEMM. `gated`: the output is the activation of gate and up; `channels`: one weight scale per
/// output instead of block scales.
#[derive(Debug, Clone, Copy)]
pub(super) struct Fp8SmallMProblem {
    pub(super) rows: usize,
    /// Number of rows of `W`, gate and up rows included.
    pub(super) n: usize,
    pub(super) k: usize,
    pub(super) gated: bool,
    pub(super) channels: bool,
}

/// Number of strips (8 rows of `W` each) that a block processes per pass over K, and in all of its passes.
#[derive(Debug, Clone, Copy)]
pub(super) struct StripsPerPass {
    pub(super) strips: usize,
    pub(super) strips_per_block: usize,
}

/// Launch shape of `fp8_gemm_small_m` with streamed weights: strips (8 rows of `W` each) per pass over K,
/// number of blocks and shared memory.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(super) struct Fp8SmallMLaunch {
    pub(super) strips: usize,
    pub(super) streams_x: bool,
    pub(super) blocks: usize,
    pub(super) shared_bytes: usize,
    /// Whether all slabs (ring-buffer stages of weights) that a block reads in the launch fit into shared
    /// memory at once.
    pub(super) all_slabs_resident: bool,
}

impl Fp8SmallMProblem {
    /// Returns the number of outputs per strip (8 rows of `W`), and the number of rows of `W` per output: 2
    /// (gate and up) if gated, otherwise 1.
    fn width(&self) -> (usize, usize) {
        if self.gated { (4, 2) } else { (8, 1) }
    }

    fn strips(&self) -> usize {
        let (width, halves) = self.width();
        (self.n / halves).div_ceil(width)
    }

    /// Returns the row stride of x in shared memory in bytes, for launches in which all of x stays in shared
    /// memory; must match `x_line` in fp8_gemm_small_m/share.h.
    fn x_row_stride_bytes(&self) -> usize {
        (self.k * 2).next_multiple_of(128) + 16
    }

    /// Returns the shared memory of a block in bytes if its ring buffer has `stages` stages. A stage has one
    /// slab: `SLAB` columns (K) of the strips of a pass, and with `x_slabs` the same columns of x.
    pub(super) fn bytes(&self, pass: StripsPerPass, x_slabs: bool, stages: usize) -> usize {
        let StripsPerPass { strips, strips_per_block } = pass;
        let sums = COMPUTE_WARPS * strips * 8 * self.rows * 4;
        let scales =
            (strips_per_block * self.width().1 * self.k.div_ceil(BLOCK)).next_multiple_of(4) * 4;
        let resident_x_bytes = if x_slabs { 0 } else { self.rows * self.x_row_stride_bytes() };
        let x = if x_slabs { self.rows * (SLAB * 2 + 16) } else { 0 };
        let stage = strips * 8 * (SLAB + 64) + x;
        FIXED_BYTES
            + sums
            + if self.channels { 0 } else { scales }
            + resident_x_bytes
            + stages * stage
    }

    /// Chooses the largest number of strips (8 rows of `W` each) per pass for which enough ring-buffer stages
    /// fit into shared memory. x can be loaded stage by stage only if a separate launch has prepared
    /// (normalised and scaled) its rows.
    pub(super) fn choose_launch(
        &self,
        prepared: bool,
        limits: LaunchLimits,
    ) -> Option<Fp8SmallMLaunch> {
        let strips_per_block = self.strips().div_ceil(self.strips().min(limits.multiprocessors));
        let max_strips = strips_per_block.min(STREAMED_STRIPS);
        let large = prepared && self.rows * self.x_row_stride_bytes() > RESIDENT_X_BYTES;
        let reads_x_once = |strips| large && strips >= strips_per_block;
        let pass = |strips| StripsPerPass { strips, strips_per_block };
        let resident = (1..=max_strips)
            .rev()
            .find_map(|n| self.launch_with_stages(pass(n), reads_x_once(n), 2, limits));
        let slabs = || {
            (1..=max_strips)
                .rev()
                .find_map(|n| self.launch_with_stages(pass(n), prepared, 2, limits))
        };
        resident.or_else(slabs).or_else(|| self.launch_with_stages(pass(1), prepared, 1, limits))
    }

    /// Returns the launch shape for a ring buffer of at least `min_stages` stages, or of as many stages as a
    /// block reads slabs if that is less; `None` if the ring buffer does not fit into shared memory.
    fn launch_with_stages(
        &self,
        pass: StripsPerPass,
        x_slabs: bool,
        min_stages: usize,
        limits: LaunchLimits,
    ) -> Option<Fp8SmallMLaunch> {
        let items = pass.strips_per_block.div_ceil(pass.strips) * self.k.div_ceil(SLAB);
        let bytes = |stages: usize| self.bytes(pass, x_slabs, stages);
        let stages =
            (1..=items.min(16)).rev().find(|stages| bytes(*stages) <= limits.shared_bytes)?;
        let blocks = self.strips().min(limits.multiprocessors);
        let all_slabs_resident = stages == items;
        let shape = Fp8SmallMLaunch {
            strips: pass.strips,
            streams_x: x_slabs,
            blocks,
            shared_bytes: bytes(stages),
            all_slabs_resident,
        };
        (stages >= items.min(min_stages)).then_some(shape)
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn fp8_small_m_keeps_slabs_in_flight() {
        let limits = LaunchLimits { warp_size: 32, multiprocessors: 132, shared_bytes: 232_448 };
        for (n, k, gated) in [(6144, 4096, false), (24576, 4096, true), (4096, 12288, false)] {
            for rows in [1, 4, 8, 16] {
                let problem = Fp8SmallMProblem { rows, n, k, gated, channels: false };
                let shape = problem.choose_launch(rows > 4, limits).unwrap();
                let strips_per_block = problem.strips().div_ceil(shape.blocks);
                let pass = StripsPerPass { strips: shape.strips, strips_per_block };
                let two_slabs = problem.bytes(pass, shape.streams_x, 2);
                let allowed = two_slabs..=limits.shared_bytes;
                assert!(allowed.contains(&shape.shared_bytes), "{problem:?}");
            }
        }
    }
}
