//! Launch shapes of `fp8_gemm_small_m` with streamed weights: strips, slabs, shared memory.

use super::BLOCK;

/// Consumer warps; must match `COMPUTE_WARPS` in fp8_gemm_small_m/share.h.
pub(super) const COMPUTE_WARPS: usize = 8;
/// Columns per slab: small, because no load overlaps the MMAs of the last slab of a launch. Determines the
/// summation order.
pub(super) const SLAB: usize = 512;
/// Maximum strips per pass of a block, limited by registers.
const STREAMED_STRIPS: usize = 6;
/// Shared memory for barriers, sums of squares, row maxima and factors, in bytes.
const FIXED_BYTES: usize = 34 * 8 + (2 * COMPUTE_WARPS + 1) * 16 * 4;
/// Maximum bytes of x that stay resident in shared memory.
const RESIDENT_X_BYTES: usize = 40 << 10;

/// Sizes of a GEMM.
#[derive(Debug, Clone, Copy)]
pub(super) struct Fp8SmallMProblem {
    pub(super) rows: usize,
    /// Number of rows of `W`; for a gated GEMM gate and up rows.
    pub(super) n: usize,
    pub(super) k: usize,
    pub(super) gated: bool,
    pub(super) channels: bool,
}

/// Launch shape with streamed weights.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(super) struct Fp8SmallMLaunch {
    pub(super) strips: usize,
    pub(super) streams_x: bool,
    pub(super) blocks: usize,
    pub(super) shared_bytes: usize,
    /// Whether all slabs of a block fit into shared memory at once.
    pub(super) all_slabs_resident: bool,
}

impl Fp8SmallMProblem {
    /// Returns the outputs per strip, and the rows of `W` per output.
    fn width(&self) -> (usize, usize) {
        if self.gated { (4, 2) } else { (8, 1) }
    }

    fn strips(&self) -> usize {
        let (width, halves) = self.width();
        (self.n / halves).div_ceil(width)
    }

    /// Returns the row stride of resident x in shared memory, in bytes; must match `x_line` in
    /// fp8_gemm_small_m/share.h.
    fn x_line(&self) -> usize {
        (self.k * 2).next_multiple_of(128) + 16
    }

    /// Returns the shared memory in bytes with `stages` slabs of `strips` strips per pass, for `share` strips
    /// per block.
    pub(super) fn bytes(
        &self,
        (strips, share): (usize, usize),
        x_slabs: bool,
        stages: usize,
    ) -> usize {
        let sums = COMPUTE_WARPS * strips * 8 * self.rows * 4;
        let scales = (share * self.width().1 * self.k.div_ceil(BLOCK)).next_multiple_of(4) * 4;
        let kept = if x_slabs { 0 } else { self.rows * self.x_line() };
        let x = if x_slabs { self.rows * (SLAB * 2 + 16) } else { 0 };
        let stage = strips * 8 * (SLAB + 64) + x;
        FIXED_BYTES + sums + if self.channels { 0 } else { scales } + kept + stages * stage
    }

    /// Chooses the largest number of strips per pass that leaves room for slabs in flight. x can be loaded
    /// slab by slab only if its rows are prepared.
    pub(super) fn choose_launch(
        &self,
        prepared: bool,
        limits: (usize, usize),
    ) -> Option<Fp8SmallMLaunch> {
        let share = self.strips().div_ceil(self.strips().min(limits.0));
        let most = share.min(STREAMED_STRIPS);
        let large = prepared && self.rows * self.x_line() > RESIDENT_X_BYTES;
        let once = |strips| large && strips >= share;
        let kept =
            (1..=most).rev().find_map(|n| self.launch_with_stages((n, share), once(n), 2, limits));
        let slabs = || {
            (1..=most).rev().find_map(|n| self.launch_with_stages((n, share), prepared, 2, limits))
        };
        kept.or_else(slabs).or_else(|| self.launch_with_stages((1, share), prepared, 1, limits))
    }

    /// Returns the launch shape with at least `least` slabs in shared memory (or all slabs, if there are
    /// fewer); `None` if they do not fit.
    fn launch_with_stages(
        &self,
        (strips, share): (usize, usize),
        x_slabs: bool,
        least: usize,
        limits: (usize, usize),
    ) -> Option<Fp8SmallMLaunch> {
        let items = share.div_ceil(strips) * self.k.div_ceil(SLAB);
        let bytes = |stages: usize| self.bytes((strips, share), x_slabs, stages);
        let stages = (1..=items.min(16)).rev().find(|stages| bytes(*stages) <= limits.1)?;
        let blocks = self.strips().min(limits.0);
        let whole = stages == items;
        let shape = Fp8SmallMLaunch {
            strips,
            streams_x: x_slabs,
            blocks,
            shared_bytes: bytes(stages),
            all_slabs_resident: whole,
        };
        (stages >= items.min(least)).then_some(shape)
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn fp8_small_m_keeps_slabs_in_flight() {
        let limits = (132, 232_448);
        for (n, k, gated) in [(6144, 4096, false), (24576, 4096, true), (4096, 12288, false)] {
            for rows in [1, 4, 8, 16] {
                let product = Fp8SmallMProblem { rows, n, k, gated, channels: false };
                let shape = product.choose_launch(rows > 4, limits).unwrap();
                let share = product.strips().div_ceil(shape.blocks);
                let two = product.bytes((shape.strips, share), shape.streams_x, 2);
                assert!(two <= shape.shared_bytes && shape.shared_bytes <= limits.1, "{product:?}");
            }
        }
    }
}
