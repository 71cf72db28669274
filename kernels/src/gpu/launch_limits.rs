//! Properties of a GPU from which launch shapes are computed, and the number of thread blocks that are resident
//! per SM (NVIDIA) or compute unit (AMD) at a time.
//!
//! On NVIDIA GPUs the numbers are constants that were measured on an H200. On AMD GPUs the numbers are
//! computed from the shared memory (LDS) of a compute unit and from the register use of the kernels; they
//! have not been measured on an AMD GPU.

use super::GpuBackend;

/// Properties of the GPU from which launch shapes are computed.
#[derive(Debug, Clone, Copy)]
pub(super) struct LaunchLimits {
    /// Number of lanes of a warp (NVIDIA) or wavefront (AMD).
    pub(super) warp_size: usize,
    /// Number of SMs or compute units.
    pub(super) multiprocessors: usize,
    /// Maximum shared memory per thread block, in bytes. On AMD it is also the shared memory of a compute unit.
    pub(super) shared_bytes: usize,
}

/// Shared memory per block that the driver of an NVIDIA GPU reserves, in bytes.
pub(super) const DRIVER_BYTES: usize = 1024;
/// Number of blocks per SM or compute unit among which the small-M GEMMs divide weights. Every block reads x,
/// so more blocks read x more often.
const GEMM_BLOCKS: usize = 2;
/// Maximum number of resident blocks of the absorbed MLA kernel without WGMMA. On AMD its waves take up to half of the
/// registers of a SIMD, so that `MLA_WAVES` of them are resident on a compute unit.
const MLA_BLOCKS: usize = 2;
const MLA_WAVES: usize = 8;
/// Number of SMs of an H200, on which the lengths of KV splits were measured.
const SPLIT_MULTIPROCESSORS: usize = 132;
/// Maximum divisor of the lengths of KV splits. Not measured on an AMD GPU.
const MAX_SPLIT_DIVISOR: usize = 2;

impl GpuBackend {
    /// Returns the properties of the GPU from which launch shapes are computed.
    pub(super) fn launch_limits(&self) -> LaunchLimits {
        LaunchLimits {
            warp_size: self.warp_size() as usize,
            multiprocessors: self.multiprocessors() as usize,
            shared_bytes: self.shared_bytes() as usize,
        }
    }
}

/// Maximum number of resident blocks of decode attention on AMD GPUs, limited by registers. A block has one wave per
/// SIMD, which takes a quarter of its registers for heads of up to `SMALL_HEAD` channels or up to `SMALL_GROUP` queries
/// per block, half of them for heads of `LARGE_HEAD` channels, and a third of them otherwise. Larger heads take all
/// registers of a SIMD; their blocks have two waves.
const DECODE_BLOCKS_SMALL: usize = 4;
const DECODE_BLOCKS: usize = 3;
const DECODE_BLOCKS_LARGE: usize = 2;
const SMALL_GROUP: usize = 4;
const SMALL_HEAD: usize = 64;
const LARGE_HEAD: usize = 256;

impl LaunchLimits {
    fn is_amd(self) -> bool {
        self.warp_size == 64
    }

    /// Returns the divisor of the lengths of KV splits for small batches of decode attention and for MLA decode: 2 with
    /// about twice the SMs or compute units of an H200, else 1. Define `SPLIT_DIVISOR` of the decode kernels.
    pub(super) fn split_divisor(self) -> usize {
        let nearest = (self.multiprocessors + SPLIT_MULTIPROCESSORS / 2) / SPLIT_MULTIPROCESSORS;
        nearest.clamp(1, MAX_SPLIT_DIVISOR)
    }

    /// Number of elements after each row of x in the shared memory of a small-M GEMM without streamed weights;
    /// must match `X_PADDING` in gemm_small_m/strips.h and fp8_gemm_small_m/strips.h.
    pub(super) fn x_row_padding(self) -> usize {
        if self.is_amd() { 16 } else { 32 }
    }

    /// Number of bytes after a key and after its value in the shared memory of the prefill kernels without WGMMA,
    /// for values of `value_dim` channels; must match `KEY_PADDING` and `VALUE_PADDING` in attention/warp.h.
    pub(super) fn kv_padding_bytes(self, value_dim: usize, element_bytes: usize) -> usize {
        if !self.is_amd() {
            return 64 + 16;
        }
        let lane_bytes = value_dim / 16 * element_bytes;
        16 * element_bytes + if lane_bytes >= 16 { 0 } else { 4 * lane_bytes }
    }

    /// Returns the number of blocks with `block_bytes` bytes of shared memory each that fit on a compute unit
    /// at a time, at least 1 and at most `max`.
    fn blocks_in_shared(self, block_bytes: usize, max: usize) -> usize {
        (self.shared_bytes / block_bytes.max(1)).clamp(1, max)
    }

    /// Returns the number of blocks among which a small-M GEMM divides its weights, if a block uses at least
    /// `block_bytes` bytes of shared memory. With more blocks than are resident at a time, x would be read
    /// more often, and each block would process fewer weight rows.
    pub(super) fn gemm_small_m_blocks(self, block_bytes: usize) -> usize {
        let blocks = if self.is_amd() {
            self.blocks_in_shared(block_bytes, GEMM_BLOCKS)
        } else {
            GEMM_BLOCKS
        };
        blocks * self.multiprocessors
    }

    /// Number of resident blocks per compute unit of decode attention without a ring buffer, which uses
    /// `block_bytes` bytes of shared memory and processes `group` queries of `head_dim` channels together.
    pub(super) fn decode_blocks(self, block_bytes: usize, group: usize, head_dim: usize) -> usize {
        let max = if head_dim >= LARGE_HEAD {
            DECODE_BLOCKS_LARGE
        } else if head_dim <= SMALL_HEAD || group <= SMALL_GROUP {
            DECODE_BLOCKS_SMALL
        } else {
            DECODE_BLOCKS
        };
        self.blocks_in_shared(block_bytes, max)
    }

    /// Number of resident blocks on the device of the absorbed MLA kernel without WGMMA, which uses `block_bytes`
    /// bytes of shared memory and has `warps` warps per block.
    pub(super) fn mla_decode_blocks(self, block_bytes: usize, warps: usize) -> usize {
        let blocks = if self.is_amd() {
            self.blocks_in_shared(block_bytes, (MLA_WAVES / warps).clamp(1, MLA_BLOCKS))
        } else {
            let capacity = self.shared_bytes + DRIVER_BYTES;
            (capacity / (block_bytes + DRIVER_BYTES)).clamp(1, MLA_BLOCKS)
        };
        blocks * self.multiprocessors
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    const H200: LaunchLimits =
        LaunchLimits { warp_size: 32, multiprocessors: 132, shared_bytes: 232_448 };
    const MI300X: LaunchLimits =
        LaunchLimits { warp_size: 64, multiprocessors: 304, shared_bytes: 64 << 10 };
    const MI300A: LaunchLimits = LaunchLimits { multiprocessors: 228, ..MI300X };
    const MI325X: LaunchLimits = MI300X;
    const MI350X: LaunchLimits = MI355X;
    const MI355X: LaunchLimits =
        LaunchLimits { warp_size: 64, multiprocessors: 256, shared_bytes: 160 << 10 };
    /// Shared memory in bytes of a block of absorbed MLA with KV rows of 576 elements, on GPUs with
    /// wavefronts of 64 lanes: one ring-buffer stage of two tiles of 16 keys.
    const MLA_BYTES: usize = 2 * 16 * (576 + 8) * 2 + (7 << 10);

    /// Cards with about twice the compute units of an H200 get splits of half the length.
    #[test]
    fn kv_splits_follow_the_compute_units() {
        let of = |multiprocessors| LaunchLimits { multiprocessors, ..H200 }.split_divisor();
        assert_eq!([8, 132, 197, 198, 228, 256, 304, 608].map(of), [1, 1, 1, 2, 2, 2, 2, 2]);
    }

    /// The launch shapes for an H200 were chosen by measurements. They must stay the same when launch shapes
    /// of other GPUs change.
    #[test]
    fn h200_launches_keep_the_measured_block_counts() {
        for block_bytes in [1, 8 << 10, 64 << 10, 200 << 10] {
            assert_eq!(H200.gemm_small_m_blocks(block_bytes), 264);
        }
        for (stages, blocks) in [(1, 264), (2, 132), (3, 132)] {
            let step_bytes = 4 * 16 * (576 + 8) * 2;
            let block_bytes = stages * step_bytes + (7 << 10);
            assert_eq!(H200.mla_decode_blocks(block_bytes, 8), blocks, "{stages}");
        }
    }

    #[test]
    fn amd_blocks_follow_compute_units_and_lds() {
        // With one row of x of 4096 columns, two blocks fit into 64 KB of shared memory; with four rows, a
        // block takes more than half of it.
        let x = |rows: usize| rows * (4096 + MI300X.x_row_padding()) * 2;
        for (card, units, of_four_rows) in [
            (MI300X, 304, 1),
            (MI300A, 228, 1),
            (MI325X, 304, 1),
            (MI350X, 256, 2),
            (MI355X, 256, 2),
        ] {
            assert_eq!(card.gemm_small_m_blocks(x(1)), 2 * units);
            assert_eq!(card.gemm_small_m_blocks(x(4)), of_four_rows * units);
            assert_eq!(card.decode_blocks(4 << 10, 16, 64), 4);
            assert_eq!(card.decode_blocks(4 << 10, 4, 128), 4);
            assert_eq!(card.decode_blocks(4 << 10, 8, 128), 3);
            assert_eq!(card.decode_blocks(4 << 10, 4, 256), 2);
            assert_eq!(card.decode_blocks(33 << 10, 8, 512), of_four_rows);
            assert_eq!(card.mla_decode_blocks(MLA_BYTES, 4), of_four_rows * units);
            assert_eq!(card.mla_decode_blocks(MLA_BYTES, 8), units, "two waves per SIMD");
        }
        assert_eq!(MI300X.decode_blocks(40 << 10, 4, 128), 1, "limited by the LDS of 64 KB");
        assert_eq!(MI355X.decode_blocks(40 << 10, 4, 128), 4);
    }
    /// The kernels have the same numbers; with other ones, they access shared memory beyond that of the launch.
    #[test]
    fn paddings_are_those_of_the_kernels() {
        assert_eq!((MI300X.x_row_padding(), H200.x_row_padding()), (16, 32));
        for (value_dim, element_bytes, amd) in [
            (64, 2, 64),
            (128, 2, 32),
            (256, 2, 32),
            (512, 2, 32),
            (64, 1, 32),
            (128, 1, 48),
            (256, 1, 16),
        ] {
            assert_eq!(H200.kv_padding_bytes(value_dim, element_bytes), 80);
            assert_eq!(MI300X.kv_padding_bytes(value_dim, element_bytes), amd, "{value_dim}");
        }
    }
}
