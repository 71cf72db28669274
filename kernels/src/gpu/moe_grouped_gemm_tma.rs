//! Experts on NVIDIA sm_90a: weights in the order in which the copy engine streams them to products of warpgroups, and
//! the products that read them.

use device::gpu::{KernelFunction, KernelLaunch, KernelSource};
use device::{DType, DeviceError, DeviceStream};

use super::moe_call::MoeCall;
use crate::gpu::GpuBackend;
use crate::{PackedGroup, PackedScales};

static PACK: KernelSource = kernel_source!("moe_weight_pack/moe_weight_pack.hip");
static GROUPED_GEMM_TMA: KernelSource =
    kernel_source!("moe_grouped_gemm_tma/moe_grouped_gemm_tma.hip");

/// Threads of a block: eight waves multiply, one copies weights, two gather rows.
const THREADS: u32 = 11 * 32;
/// Threads of a block that brings weights into their order, a piece of 16 bytes each.
const PACK_THREADS: u32 = 256;
/// Bytes of a line of weights in a stage.
const LINE_BYTES: usize = 128;
/// Weights of a piece, times their bytes.
const VECTOR_BYTES: usize = 16;
/// Rows whose scales are one: those of a strip.
const MIN_UNIT: usize = 16;
/// Stages without which nothing moves: one is read while the next arrives.
const MIN_STAGES: usize = 2;
/// Stages that barriers are kept for, at most.
const MAX_STAGES: usize = 12;
/// Shared memory beside the stages: barriers, what routing, sorting and blending need, what aligning the ring takes.
const FIXED_BYTES: usize = 11 << 10;
/// And for scales of fp8.
const SCALES_BYTES: usize = 1 << 10;
/// Scratch memory that weights pass through on their way to their order.
const REPACK_SCRATCH_BYTES: usize = 64 << 20;

/// Rows of a segment and lines of weights that a block multiplies at a time.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(super) struct GroupedGemmTile {
    pub(super) rows: usize,
    pub(super) lines: usize,
}

/// While reading weights is all the time there is.
pub(super) const TILE_SMALL: GroupedGemmTile = GroupedGemmTile { rows: 64, lines: 128 };
/// The same, from some tokens on: more of the weights are on their way, and blocks begin with them before routing is over.
pub(super) const TILE_MEDIUM: GroupedGemmTile = GroupedGemmTile { rows: 32, lines: 256 };
/// From some hundred tokens on.
pub(super) const TILE_LARGE: GroupedGemmTile = GroupedGemmTile { rows: 128, lines: 256 };

impl GroupedGemmTile {
    /// The same for weights of this type. In fp8 never few lines, in whose time a stage is not multiplied (3.1 TB/s for 4.2 on an H200), and
    /// fewer of many rows: what columns sum up to is kept beside the sums until it takes its scale.
    pub(super) fn for_dtype(self, weights: DType) -> Self {
        match self {
            TILE_LARGE if weights == DType::F8E4M3 => Self { rows: 64, ..TILE_LARGE },
            TILE_SMALL if weights == DType::F8E4M3 => TILE_MEDIUM,
            _ => self,
        }
    }

    /// Stages that `limit` bytes of shared memory hold.
    fn stages(self, limit: usize, weights: DType) -> usize {
        let scales = if weights == DType::F8E4M3 { SCALES_BYTES } else { 0 };
        (limit.saturating_sub(FIXED_BYTES + scales) / self.stage_bytes(weights)).min(MAX_STAGES)
    }

    /// Lines of weights, and rows of 16-bit inputs.
    fn stage_bytes(self, weights: DType) -> usize {
        self.lines * LINE_BYTES + self.rows * columns(weights) * 2
    }
}

/// Weights of a line in a stage, and what sizes must be multiples of.
fn columns(weights: DType) -> usize {
    LINE_BYTES / weights.bytes()
}

impl GpuBackend {
    /// Whether experts of type `weights`, the 16-bit one or fp8, of so many inputs and outputs, gates not counted, are streamed.
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

    /// `group` as moe/tma_layout.h orders it, where its products are streamed; `gated`: the second half of its outputs
    /// are gated by the first.
    pub(super) fn pack_for_tma(
        &self,
        group: PackedGroup,
        gated: bool,
    ) -> Result<PackedGroup, DeviceError> {
        let outputs = if gated { group.n() / 2 } else { group.n() };
        let known = [self.half_dtype(), DType::F8E4M3].contains(&group.dtype());
        let units = group.scales().is_none_or(|scales| scales.rows.is_multiple_of(MIN_UNIT));
        if !known || !units || !self.supports_grouped_gemm_tma(group.dtype(), outputs, group.k()) {
            return Ok(group);
        }
        let bytes = group.n() * group.k() * group.dtype().bytes();
        let at_once = (REPACK_SCRATCH_BYTES / bytes.max(1)).clamp(1, group.len().max(1));
        let s = DeviceStream::default();
        let passage = self.scratch(&s, at_once * bytes)?;
        for first in (0..group.len()).step_by(at_once) {
            let experts = at_once.min(group.len() - first);
            // SAFETY: an expert of the group.
            let weights = unsafe { group.as_ptr().add(first * bytes) }.cast_mut();
            let pack =
                self.pack_launch("moe_weight_pack", (passage, weights), &group, experts, gated)?;
            let unpack =
                self.pack_launch("moe_weight_unpack", (weights, passage), &group, experts, gated)?;
            // SAFETY: both hold that many experts; nobody uses the group before it is handed out.
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
        (to, from): (*mut u8, *const u8),
        group: &PackedGroup,
        experts: usize,
        gated: bool,
    ) -> Result<KernelLaunch, DeviceError> {
        let (n, k) = (group.n(), group.k());
        let defines = [("GATED", u32::from(gated)), ("FP8", is_fp8(group))];
        let kernel = self.kernel(&PACK, kernel, &defines)?;
        let pieces = n * k * group.dtype().bytes() / VECTOR_BYTES;
        let grid = (pieces.div_ceil(PACK_THREADS as usize) as u32, experts as u32, 1);
        let launch = KernelLaunch::new(kernel, grid, PACK_THREADS, 0).arg_ptr(to).arg_ptr(from);
        Ok(launch.u32(n as u32).u32(k as u32))
    }

    /// One product of tokens that `moe_align` has sorted.
    pub(super) fn grouped_gemm_tma_product(
        &self,
        s: &DeviceStream,
        call: &MoeCall<'_>,
        tile: GroupedGemmTile,
        first: bool,
    ) -> Result<(), DeviceError> {
        let (group, _) = call.product(first);
        let defines = [
            ("GATED", u32::from(first)),
            ("MANY", u32::from(tile != TILE_SMALL)),
            ("TILE_ROWS", tile.rows as u32),
            ("FP8", is_fp8(group)),
        ];
        let kernel = self.kernel(&GROUPED_GEMM_TMA, "moe_grouped_gemm_tma", &defines)?;
        let launch = self.launch_on_all_sms(kernel, tile, group.dtype());
        let early =
            if call.kernel.prefetches_weights_early() { call.experts.down.len() } else { 0 };
        let launch = scales_from(call.product_args(launch, first).u32(early as u32), group, 0);
        // SAFETY: the shapes were compared; scratch memory has the sizes of the call.
        unsafe { launch.overlaps_predecessor().launch(self, s) }
    }

    /// A launch with all shared memory.
    pub(super) fn launch_on_all_sms(
        &self,
        kernel: KernelFunction,
        tile: GroupedGemmTile,
        weights: DType,
    ) -> KernelLaunch {
        let stages = tile.stages(self.shared_bytes() as usize, weights);
        let shared_bytes = 1024 + stages * tile.stage_bytes(weights);
        KernelLaunch::new(kernel, (self.multiprocessors(), 1, 1), THREADS, shared_bytes as u32)
    }
}

/// `-DFP8` of kernels that read `group`.
pub(super) fn is_fp8(group: &PackedGroup) -> u32 {
    u32::from(group.dtype() == DType::F8E4M3)
}

/// With the scales of matrices from `first` on as further arguments; of others than fp8 none is looked at.
pub(super) fn scales_from(launch: KernelLaunch, group: &PackedGroup, first: usize) -> KernelLaunch {
    let Some(PackedScales { buffer, rows, stride }) = group.scales() else {
        return launch.arg_ptr(std::ptr::null()).u32(0).u32(0);
    };
    let of_matrix = group.n() / rows * stride * size_of::<f32>();
    // SAFETY: the buffer has the scales of all matrices.
    let from = unsafe { buffer.as_ptr().add(first * of_matrix) };
    launch.arg_ptr(from).u32(*rows as u32).u32(*stride as u32)
}
