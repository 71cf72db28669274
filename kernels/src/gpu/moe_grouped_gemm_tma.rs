//! Grouped GEMM with bulk copies and WGMMA on NVIDIA sm_90a (`moe_grouped_gemm_tma`), and packing of expert
//! weights into the layout that it reads.

use device::gpu::{KernelDefine, KernelFunction, KernelLaunch, KernelSource};
use device::{DType, DeviceDriver, DeviceError, DeviceStream};

use super::moe_call::MoeLaunchArgs;
use super::mxfp4;
use crate::gpu::GpuBackend;
use crate::{PackedMatrix, PackedMatrixGroup, PackedScales};

static PACK: KernelSource = kernel_source!("moe_weight_pack/moe_weight_pack.hip");
static GROUPED_GEMM_TMA: KernelSource =
    kernel_source!("moe_grouped_gemm_tma/moe_grouped_gemm_tma.hip");

/// Number of threads per block that copy: one warp for weights, and two warps that gather rows of x.
const PRODUCER_THREADS: u32 = 3 * 32;
/// Number of threads of a warpgroup.
const WARPGROUP_THREADS: u32 = 4 * 32;
/// Number of threads per block of the packing kernels.
const PACK_THREADS: u32 = 256;
/// Bytes per row of W in a ring-buffer stage, except in MXFP4.
const ROW_BYTES: usize = 128;
/// Number of columns of MXFP4 weights per ring-buffer stage, which have 64 bytes of elements and 4 of scales.
const MXFP4_COLUMNS: usize = 128;
const MXFP4_ROW_BYTES: usize = 68;
/// Alignment in bytes of the inputs in a ring-buffer stage.
const PANEL_ALIGNMENT: usize = 1024;
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
/// Shared memory for the sums of a part of K, in bytes per row of W: eight rows of x in f32.
const PART_ROW_BYTES: usize = 32;
/// Maximum scratch memory for packing weights, in bytes.
const REPACK_SCRATCH_BYTES: usize = 64 << 20;

/// Format of the weights that the TMA kernels read.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(super) enum TmaWeights {
    /// The 16-bit type of the inputs.
    Half,
    /// fp8 with block scales.
    Fp8,
    Mxfp4,
}

impl TmaWeights {
    /// Returns the format of packed weights.
    pub(super) fn of(group: &PackedMatrixGroup) -> Self {
        if group.is_mxfp4() { Self::Mxfp4 } else { Self::of_dtype(group.dtype()) }
    }

    pub(super) fn of_dtype(dtype: DType) -> Self {
        if dtype == DType::F8E4M3 { Self::Fp8 } else { Self::Half }
    }

    /// Returns the define that selects the format; kernels of 16-bit weights have `FP8` = 0.
    pub(super) fn define(self) -> KernelDefine {
        match self {
            Self::Half => ("FP8", 0),
            Self::Fp8 => ("FP8", 1),
            Self::Mxfp4 => ("WEIGHTS_MXFP4", 1),
        }
    }

    /// Returns the number of weight columns per stage.
    fn columns(self) -> usize {
        match self {
            Self::Half => ROW_BYTES / 2,
            Self::Fp8 => ROW_BYTES,
            Self::Mxfp4 => MXFP4_COLUMNS,
        }
    }

    /// Returns the number of which inputs and outputs must be multiples. In MXFP4, the last stage is padded.
    fn granularity(self) -> usize {
        if self == Self::Mxfp4 { mxfp4::GROUP } else { self.columns() }
    }

    /// Returns the bytes of a row of W in a stage.
    fn row_bytes(self) -> usize {
        if self == Self::Mxfp4 { MXFP4_ROW_BYTES } else { ROW_BYTES }
    }
}

/// Tile that a block computes at a time: `rows` rows of x (of one segment) and `weight_rows` rows of W.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(super) struct GroupedGemmTile {
    pub(super) rows: usize,
    pub(super) weight_rows: usize,
    /// Number of parts of K that different warpgroups multiply.
    pub(super) k_parts: usize,
}

/// Tile for few tokens, where reading the weights determines the time.
pub(super) const TILE_SMALL: GroupedGemmTile = GroupedGemmTile::new(64, 128);
/// Tile for more tokens, where reading the weights still determines the time: more weight bytes are loaded at
/// a time, and blocks prefetch weights before routing is complete.
pub(super) const TILE_MEDIUM: GroupedGemmTile = GroupedGemmTile::new(32, 256);
/// Tile for several hundred tokens and more, where computation dominates.
pub(super) const TILE_LARGE: GroupedGemmTile = GroupedGemmTile::new(128, 256);

impl GroupedGemmTile {
    /// Returns a tile that multiplies all of K in every warpgroup.
    pub(super) const fn new(rows: usize, weight_rows: usize) -> Self {
        Self { rows, weight_rows, k_parts: 1 }
    }

    /// Returns the defines that select the tile.
    pub(super) fn defines(self) -> impl Iterator<Item = KernelDefine> {
        let parts = (self.k_parts > 1).then_some(("K_PARTS", self.k_parts as u32));
        [("WIDE_TILE", u32::from(self.is_wide())), ("TILE_ROWS", self.rows as u32)]
            .into_iter()
            .chain(parts)
    }

    fn is_wide(self) -> bool {
        self.weight_rows > TILE_SMALL.weight_rows
    }

    /// Returns the tile to use for weights in the format `weights`. Weights that are converted in registers do not
    /// use the small tile, because with it the MMAs of a stage take longer than its loads: fp8 weights are read at
    /// 3.1 instead of 4.2 TB/s on an H200. Their large tile has fewer rows of x, because registers are also needed
    /// for converted weights and, in fp8, for the unscaled sum of a scale block.
    pub(super) fn for_weights(self, weights: TmaWeights) -> Self {
        match self {
            TILE_LARGE if weights != TmaWeights::Half => Self { rows: 64, ..TILE_LARGE },
            TILE_SMALL if weights != TmaWeights::Half => TILE_MEDIUM,
            _ => self,
        }
    }

    /// Returns the number of stages that fit into `limit` bytes of shared memory.
    fn stages(self, limit: usize, weights: TmaWeights) -> usize {
        let scales = if weights == TmaWeights::Fp8 { SCALES_BYTES } else { 0 };
        let parts = (self.k_parts - 1) * self.weight_rows * PART_ROW_BYTES;
        let available = limit.saturating_sub(FIXED_BYTES + scales + parts);
        (available / self.stage_bytes(weights)).min(MAX_STAGES)
    }

    /// Returns the number of threads per block; must match `THREADS` in moe_grouped_gemm_tma/ring.h.
    fn threads(self, weights: TmaWeights) -> u32 {
        let takes_four = self.is_wide() || self.k_parts > 1;
        let warpgroups = if takes_four && weights == TmaWeights::Mxfp4 { 4 } else { 2 };
        warpgroups * WARPGROUP_THREADS + PRODUCER_THREADS
    }

    /// Returns the bytes of a stage: rows of weights, and rows of 16-bit inputs.
    fn stage_bytes(self, weights: TmaWeights) -> usize {
        let weight_bytes = self.weight_rows * weights.row_bytes();
        weight_bytes.next_multiple_of(PANEL_ALIGNMENT) + self.rows * weights.columns() * 2
    }
}

impl GpuBackend {
    /// Whether the TMA kernel supports experts in the format `weights` with `k` inputs and `outputs` outputs, gate
    /// rows not counted.
    pub(super) fn supports_grouped_gemm_tma(
        &self,
        weights: TmaWeights,
        outputs: usize,
        k: usize,
    ) -> bool {
        let granularity = weights.granularity();
        let multiples = [outputs, k].iter().all(|size| size.is_multiple_of(granularity));
        let fits = TILE_LARGE.for_weights(weights).stages(self.shared_bytes() as usize, weights)
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
            || !self.supports_grouped_gemm_tma(TmaWeights::of(&group), outputs, group.k())
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

    /// Returns a group in MXFP4 in tiles for TMA (moe/tma_mxfp4.h). The TMA kernel supports it, and its rows are in
    /// the layout of dev/mxfp4.h. `gated`: the matrices are gate and up projections, gate rows first.
    pub(super) fn tile_mxfp4(
        &self,
        group: &PackedMatrixGroup,
        gated: bool,
    ) -> Result<PackedMatrixGroup, DeviceError> {
        let (n, k, count) = (group.n(), group.k(), group.len());
        let blocks = k.div_ceil(MXFP4_COLUMNS);
        let mut buffer =
            self.weights().alloc(self.runtime(), count * n * blocks * MXFP4_ROW_BYTES)?;
        let defines = [("GATED", u32::from(gated)), TmaWeights::Mxfp4.define()];
        let kernel = self.kernel(&PACK, "moe_weight_pack", &defines)?;
        let grid = [(n * blocks).div_ceil(PACK_THREADS as usize) as u32, count as u32, 1];
        let launch = KernelLaunch::new(kernel, grid, PACK_THREADS, 0)
            .arg_ptr(buffer.as_mut_ptr())
            .arg_ptr(group.as_ptr());
        let s = DeviceStream::default();
        // SAFETY: the buffer has space for the tiles of all matrices; `group` is alive until they are written.
        unsafe { launch.u32(n as u32).u32(k as u32).launch(self, &s)? };
        self.synchronize(&s)?;
        let stack = PackedMatrix { buffer, dtype: group.dtype(), n: n * count, k, scales: None };
        PackedMatrixGroup::tma_mxfp4(stack, count)
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
        let defines = [("GATED", u32::from(gated)), TmaWeights::of(group).define()];
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
        let weights = TmaWeights::of(group);
        let mut defines = call.gate_defines(first).to_vec();
        defines.extend(tile.defines().chain([weights.define()]));
        defines.extend(call.bias(first).map(|_| ("BIASED", 1)));
        let kernel = self.kernel(&GROUPED_GEMM_TMA, "moe_grouped_gemm_tma", &defines)?;
        let launch = self.launch_on_all_sms(kernel, tile, weights);
        let prefetch_experts =
            if call.kernel.prefetches_weights() { call.experts.down.len() } else { 0 };
        let launch =
            scales_from(call.gemm_args(launch, first).u32(prefetch_experts as u32), group, 0);
        let launch = call.append_bias(launch, first);
        // SAFETY: the shapes were checked; scratch memory was allocated for the sizes of `call`.
        unsafe { launch.overlaps_predecessor().launch(self, s) }
    }

    /// Prepares a launch with one block per SM and as many stages as fit into shared memory.
    pub(super) fn launch_on_all_sms(
        &self,
        kernel: KernelFunction,
        tile: GroupedGemmTile,
        weights: TmaWeights,
    ) -> KernelLaunch {
        let stages = tile.stages(self.shared_bytes() as usize, weights);
        let shared_bytes = 1024 + stages * tile.stage_bytes(weights);
        let threads = tile.threads(weights);
        KernelLaunch::new(kernel, [self.multiprocessors(), 1, 1], threads, shared_bytes as u32)
    }
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
