//! Grouped GEMM with bulk copies and WGMMA on NVIDIA sm_90a (`moe_grouped_gemm_tma`), and packing of expert
//! weights into the layout that it reads.

use device::gpu::{KernelFunction, KernelLaunch, KernelSource};
use device::{DType, DeviceError, DeviceStream};

use super::moe_call::MoeLaunchArgs;
use crate::gpu::GpuBackend;
use crate::{PackedMatrixGroup, PackedScales};

static PACK: KernelSource = kernel_source!("moe_weight_pack/moe_weight_pack.hip");
static GROUPED_GEMM_TMA: KernelSource =
    kernel_source!("moe_grouped_gemm_tma/moe_grouped_gemm_tma.hip");

/// Number of threads per block: eight consumer warps, one producer warp for weights, and two warps that
/// gather rows of x.
const THREADS: u32 = 11 * 32;
/// Number of threads per block of the packing kernels.
const PACK_THREADS: u32 = 256;
/// Bytes per row of W in a ring-buffer stage.
const ROW_BYTES: usize = 128;
/// Bytes that one thread of the packing kernels copies.
const VECTOR_BYTES: usize = 16;
/// Minimum number of rows of W per fp8 scale that the kernel supports: the 16 rows of a strip, for which the
/// kernel uses one scale.
const MIN_UNIT: usize = 16;
/// Minimum number of ring-buffer stages: one is consumed while the next is loaded.
const MIN_STAGES: usize = 2;
/// Maximum number of ring-buffer stages, for which the kernel has barriers.
const MAX_STAGES: usize = 12;
/// Shared memory in addition to the stages, in bytes: barriers, state of routing, sorting and combining, and
/// alignment of the ring buffer.
const FIXED_BYTES: usize = 11 << 10;
/// Shared memory for the fp8 scales of the weights in all ring-buffer stages, in bytes.
const SCALES_BYTES: usize = 1 << 10;
/// Maximum scratch memory for packing weights, in bytes.
const REPACK_SCRATCH_BYTES: usize = 64 << 20;

/// Tile that a block computes at a time: `rows` rows of x (of one segment) and `weight_rows` rows of W.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(super) struct GroupedGemmTile {
    pub(super) rows: usize,
    pub(super) weight_rows: usize,
}

/// Tile for few tokens, where reading the weights determines the time.
pub(super) const TILE_SMALL: GroupedGemmTile = GroupedGemmTile { rows: 64, weight_rows: 128 };
/// Tile for more tokens, where reading the weights still determines the time: more weight bytes are loaded at
/// a time, and blocks prefetch weights before routing is complete.
pub(super) const TILE_MEDIUM: GroupedGemmTile = GroupedGemmTile { rows: 32, weight_rows: 256 };
/// Tile for several hundred tokens and more, where computation dominates.
pub(super) const TILE_LARGE: GroupedGemmTile = GroupedGemmTile { rows: 128, weight_rows: 256 };

impl GroupedGemmTile {
    /// Returns the tile to use for weights of type `weights`. fp8 weights do not use the small tile, because
    /// with it the MMAs of a stage take longer than its loads: weights are read at 3.1 instead of 4.2 TB/s on
    /// an H200. In fp8 the large tile has fewer rows of x, because registers are also needed for the unscaled
    /// sum of a scale block.
    pub(super) fn for_dtype(self, weights: DType) -> Self {
        match self {
            TILE_LARGE if weights == DType::F8E4M3 => Self { rows: 64, ..TILE_LARGE },
            TILE_SMALL if weights == DType::F8E4M3 => TILE_MEDIUM,
            _ => self,
        }
    }

    /// Returns the number of stages that fit into `limit` bytes of shared memory.
    fn stages(self, limit: usize, weights: DType) -> usize {
        let scales = if weights == DType::F8E4M3 { SCALES_BYTES } else { 0 };
        (limit.saturating_sub(FIXED_BYTES + scales) / self.stage_bytes(weights)).min(MAX_STAGES)
    }

    /// Returns the bytes of a stage: rows of weights, and rows of 16-bit inputs.
    fn stage_bytes(self, weights: DType) -> usize {
        self.weight_rows * ROW_BYTES + self.rows * columns(weights) * 2
    }
}

/// Returns the number of weight columns per stage. The numbers of inputs and outputs must be multiples of it.
fn columns(weights: DType) -> usize {
    ROW_BYTES / weights.bytes()
}

impl GpuBackend {
    /// Whether the TMA kernel supports experts of type `weights` (the 16-bit type or fp8) with `k` inputs and
    /// `outputs` outputs, gate rows not counted.
    pub(super) fn supports_grouped_gemm_tma(
        &self,
        weights: DType,
        outputs: usize,
        k: usize,
    ) -> bool {
        let multiples = [outputs, k].iter().all(|size| size.is_multiple_of(columns(weights)));
        let fits = TILE_LARGE.for_dtype(weights).stages(self.shared_bytes() as usize, weights)
            >= MIN_STAGES;
        multiples && fits && self.has_warpgroups()
    }

    /// Packs `group` into the layout of moe/tma_layout.h if the TMA kernel supports it, otherwise returns it
    /// unchanged. `gated`: the matrices are gate and up projections, gate rows first.
    pub(super) fn pack_for_tma(
        &self,
        group: PackedMatrixGroup,
        gated: bool,
    ) -> Result<PackedMatrixGroup, DeviceError> {
        let outputs = if gated { group.n() / 2 } else { group.n() };
        let is_supported = [self.half_dtype(), DType::F8E4M3].contains(&group.dtype());
        let units = group.scales().is_none_or(|scales| scales.rows.is_multiple_of(MIN_UNIT));
        if !is_supported
            || !units
            || !self.supports_grouped_gemm_tma(group.dtype(), outputs, group.k())
        {
            return Ok(group);
        }
        let bytes = group.n() * group.k() * group.dtype().bytes();
        let batch = (REPACK_SCRATCH_BYTES / bytes.max(1)).clamp(1, group.len().max(1));
        let s = DeviceStream::default();
        let repack_scratch = self.scratch(&s, batch * bytes)?;
        for first in (0..group.len()).step_by(batch) {
            let experts = batch.min(group.len() - first);
            // SAFETY: the address is that of expert `first`, which is inside the group.
            let weights = unsafe { group.as_ptr().add(first * bytes) }.cast_mut();
            let pack = self.pack_launch(
                "moe_weight_pack",
                repack_scratch,
                weights,
                &group,
                experts,
                gated,
            )?;
            let unpack = self.pack_launch(
                "moe_weight_unpack",
                weights,
                repack_scratch,
                &group,
                experts,
                gated,
            )?;
            // SAFETY: source and destination are large enough for `experts` experts; the group is not used
            // before it is returned.
            unsafe {
                scales_from(pack, &group, first).launch(self, &s)?;
                unpack.launch(self, &s)?;
            }
        }
        Ok(group.into_tma_packed())
    }

    fn pack_launch(
        &self,
        kernel: &'static str,
        to: *mut u8,
        from: *const u8,
        group: &PackedMatrixGroup,
        experts: usize,
        gated: bool,
    ) -> Result<KernelLaunch, DeviceError> {
        let (n, k) = (group.n(), group.k());
        let defines = [("GATED", u32::from(gated)), ("FP8", is_fp8(group))];
        let kernel = self.kernel(&PACK, kernel, &defines)?;
        let vectors = n * k * group.dtype().bytes() / VECTOR_BYTES;
        let grid = [vectors.div_ceil(PACK_THREADS as usize) as u32, experts as u32, 1];
        let launch = KernelLaunch::new(kernel, grid, PACK_THREADS, 0).arg_ptr(to).arg_ptr(from);
        Ok(launch.u32(n as u32).u32(k as u32))
    }

    /// Launches the grouped GEMM for routed pairs that `moe_align` has sorted. `first`: true for the gate and
    /// up projection, false for the down projection.
    pub(super) fn moe_grouped_gemm_tma(
        &self,
        s: &DeviceStream,
        call: &MoeLaunchArgs<'_>,
        tile: GroupedGemmTile,
        first: bool,
    ) -> Result<(), DeviceError> {
        let (group, _) = call.gemm_weights(first);
        let [gated, gate, alpha, limit] = call.gate_defines(first);
        let defines = [
            gated,
            gate,
            alpha,
            limit,
            ("WIDE_TILE", u32::from(tile != TILE_SMALL)),
            ("TILE_ROWS", tile.rows as u32),
            ("FP8", is_fp8(group)),
        ];
        let kernel = self.kernel(&GROUPED_GEMM_TMA, "moe_grouped_gemm_tma", &defines)?;
        let launch = self.launch_on_all_sms(kernel, tile, group.dtype());
        let prefetch_experts =
            if call.kernel.prefetches_weights() { call.experts.down.len() } else { 0 };
        let launch =
            scales_from(call.gemm_args(launch, first).u32(prefetch_experts as u32), group, 0);
        // SAFETY: the shapes were checked; scratch memory was allocated for the sizes of `call`.
        unsafe { launch.overlaps_predecessor().launch(self, s) }
    }

    /// Prepares a launch with one block per SM and as many stages as fit into shared memory.
    pub(super) fn launch_on_all_sms(
        &self,
        kernel: KernelFunction,
        tile: GroupedGemmTile,
        weights: DType,
    ) -> KernelLaunch {
        let stages = tile.stages(self.shared_bytes() as usize, weights);
        let shared_bytes = 1024 + stages * tile.stage_bytes(weights);
        KernelLaunch::new(kernel, [self.multiprocessors(), 1, 1], THREADS, shared_bytes as u32)
    }
}

/// Returns the value of the define `FP8` for kernels that read `group`.
pub(super) fn is_fp8(group: &PackedMatrixGroup) -> u32 {
    u32::from(group.dtype() == DType::F8E4M3)
}

/// Appends the addresses and sizes of the scales, from matrix `first` on, to the kernel arguments; null if
/// the weights are not fp8.
pub(super) fn scales_from(
    launch: KernelLaunch,
    group: &PackedMatrixGroup,
    first: usize,
) -> KernelLaunch {
    let Some(PackedScales { buffer, rows, stride, .. }) = group.scales() else {
        return launch.arg_ptr(std::ptr::null()).u32(0).u32(0);
    };
    let matrix_bytes = group.n() / rows * stride * size_of::<f32>();
    // SAFETY: the buffer contains the scales of all matrices.
    let from = unsafe { buffer.as_ptr().add(first * matrix_bytes) };
    launch.arg_ptr(from).u32(*rows as u32).u32(*stride as u32)
}
