//! Expert MLPs on GPUs: routed pairs (of token and expert) are sorted by expert on the device; two grouped
//! GEMMs and a weighted sum of the expert outputs follow.
//!
//! Every grid depends on the number of tokens only, so that all launches can be captured in a graph.

use device::gpu::{KernelLaunch, KernelSource};
use device::{
    DType, DeviceError, DeviceStream, MatMut, MatRef, check_at_most, check_dtype, check_size,
};

use super::expert_load::ExpertCounterPtrs;
use super::fp8;
use super::moe_call::{ALIGN_PAIRS, KERNEL, MoeKernel, MoeLaunchArgs};
use super::moe_fused_decode::{RoutingSource, fits_fused_decode};
use super::moe_grouped_gemm_tma::TmaWeights;
use crate::gpu::GpuBackend;
use crate::{
    ExpertMlp, ExpertWeights, FusedMoe, GpuKernel, HostMat, PackedMatrixGroup, SoftmaxRouterArgs,
    TopKRoutes,
};

static ALIGN: KernelSource = kernel_source!("moe_align/moe_align.hip");

/// Number of threads per block of `moe_combine`, which sums the expert outputs of each token.
const THREADS: u32 = 256;
/// Maximum number of threads per block of `moe_align`, which sorts the routed pairs by expert.
const ALIGN_THREADS: usize = 1024;
/// Maximum number of tokens that every block of the fused kernel routes itself. It covers a decode step of
/// one request; routing more tokens in every block takes longer than a separate launch.
const FUSED_ROUTING_TOKENS: usize = 2;
/// Maximum number of experts for routing in the fused kernel.
const FUSED_ROUTING_EXPERTS: usize = 256;
/// Maximum number of experts per token that `moe_combine` supports.
const MAX_TOP_K: usize = 64;

impl GpuBackend {
    /// Packs matrices of one shape; each matrix is given as a list of matrices to be stacked by rows. The
    /// result has the layout for TMA if the TMA kernel supports the matrices, otherwise it is row-major. fp8
    /// matrices stay fp8 with their scales if `dtype` is fp8; otherwise they are dequantised to `dtype`.
    pub fn pack_group(
        &self,
        matrices: &[Vec<HostMat<'_>>],
        dtype: DType,
        gated: bool,
    ) -> Result<PackedMatrixGroup, DeviceError> {
        let rows = |parts: &[HostMat<'_>]| parts.iter().map(HostMat::rows).sum::<usize>();
        for parts in matrices {
            check_size("pack_group", "rows", rows(parts), rows(&matrices[0]))?;
        }
        let parts: Vec<HostMat<'_>> = matrices.iter().flatten().copied().collect();
        if dtype == DType::F8E4M3 {
            let grid = fp8::fp8_experts_block_shape(matrices, gated);
            let (kernel, what) = ("pack_group", "shape of experts");
            let grid = grid.ok_or(DeviceError::Unsupported { kernel, what, dtype })?;
            let stack = PackedMatrixGroup::stacked(self.load_fp8(&parts, grid)?, matrices.len())?;
            return self.pack_for_tma(stack, gated);
        }
        let stack = PackedMatrixGroup::stacked(self.load_float(&parts, dtype)?, matrices.len())?;
        self.pack_for_tma(stack, gated)
    }

    /// Stacks matrices of one shape row-major in `dtype` (a floating-point type), without packing for TMA.
    pub fn pack_row_major(
        &self,
        matrices: &[Vec<HostMat<'_>>],
        dtype: DType,
    ) -> Result<PackedMatrixGroup, DeviceError> {
        let parts: Vec<HostMat<'_>> = matrices.iter().flatten().copied().collect();
        PackedMatrixGroup::stacked(self.load_float(&parts, dtype)?, matrices.len())
    }

    /// Packs the gate-up and the down projections of experts as [`pack_mxfp4`](Self::pack_mxfp4) does, and moves both to
    /// tiles for TMA if the TMA kernel supports both.
    pub fn pack_mxfp4_experts(
        &self,
        gate_up: &[Vec<HostMat<'_>>],
        down: &[Vec<HostMat<'_>>],
        dtype: DType,
    ) -> Result<[PackedMatrixGroup; 2], DeviceError> {
        let (gate_up, down) = (self.pack_mxfp4(gate_up, dtype)?, self.pack_mxfp4(down, dtype)?);
        let in_tiles = [&gate_up, &down].into_iter().all(|group| {
            let (weights, outputs) = (TmaWeights::Mxfp4, group.n());
            group.is_mxfp4() && self.supports_grouped_gemm_tma(weights, outputs, group.k())
        });
        if !in_tiles {
            return Ok([gate_up, down]);
        }
        Ok([self.tile_mxfp4(&gate_up, true)?, self.tile_mxfp4(&down, false)?])
    }

    /// Stacks matrices of one shape in MXFP4, whose elements kernels decode to `dtype`; as
    /// [`pack_row_major`](Self::pack_row_major) if MXFP4 does not represent all elements exactly or `dtype` is f32.
    pub fn pack_mxfp4(
        &self,
        matrices: &[Vec<HostMat<'_>>],
        dtype: DType,
    ) -> Result<PackedMatrixGroup, DeviceError> {
        let parts: Vec<HostMat<'_>> = matrices.iter().flatten().copied().collect();
        if dtype == self.half_dtype()
            && let Some(stack) = self.load_mxfp4(&parts, dtype)?
        {
            return Ok(PackedMatrixGroup::stacked(stack, matrices.len())?.into_mxfp4());
        }
        self.pack_row_major(matrices, dtype)
    }

    fn align(&self, s: &DeviceStream, call: &MoeLaunchArgs<'_>) -> Result<(), DeviceError> {
        let count = call.experts.down.len();
        let blocks = call.routed_pairs.div_ceil(ALIGN_PAIRS);
        let threads =
            (call.routed_pairs.div_ceil(8 * blocks)).next_multiple_of(256).min(ALIGN_THREADS);
        let launch = |name| -> Result<KernelLaunch, DeviceError> {
            let kernel = self.kernel(&ALIGN, name, &call.combine_defines())?;
            let grid = [blocks as u32, 1, 1];
            Ok(KernelLaunch::new(kernel, grid, threads as u32, (count * 4) as u32)
                .overlaps_predecessor())
        };
        let arguments = |launch: KernelLaunch| {
            let launch = launch.arg(call.routes.experts).u32(call.routed_pairs as u32);
            launch.u32(call.experts.first_expert as u32).u32(count as u32)
        };
        let mut counts = std::ptr::null_mut();
        if blocks > 1 {
            counts = call.counts;
            // SAFETY: the array of counts in scratch memory has an entry for every block and expert.
            unsafe { arguments(launch("moe_count")?.arg_ptr(counts)).launch(self, s)? };
        }
        let align = launch("moe_align")?.arg_ptr(call.order).arg_ptr(call.segments).arg_ptr(counts);
        let align = arguments(align)
            .u32(call.kernel.segment_rows() as u32)
            .u32(call.max_segments() as u32)
            .u32(u32::from(call.kernel.prefetches_weights()));
        // SAFETY: scratch memory is large enough for all routed pairs and segments.
        unsafe { align.launch(self, s) }
    }

    fn combine(
        &self,
        s: &DeviceStream,
        y: &mut MatMut<'_>,
        call: &MoeLaunchArgs<'_>,
    ) -> Result<(), DeviceError> {
        let kernel = self.kernel(&ALIGN, "moe_combine", &call.combine_defines())?;
        let width = 16 / call.out_type().bytes();
        let grid = [y.rows() as u32, call.hidden.div_ceil(width * THREADS as usize) as u32, 1];
        let y_stride = y.stride() as u32;
        let launch = KernelLaunch::new(kernel, grid, THREADS, 0)
            .out(y)
            .arg_ptr(call.out)
            .arg(call.routes.experts)
            .arg(call.routes.weights)
            .u32(call.hidden as u32)
            .u32(call.top_k() as u32)
            .u32(call.experts.first_expert as u32)
            .u32(call.experts.down.len() as u32)
            .u32(y_stride);
        // SAFETY: the shapes were checked; scratch memory was allocated for the sizes of `call`.
        unsafe { launch.overlaps_predecessor().launch(self, s) }
    }
}

impl GpuKernel for ExpertMlp<'_> {
    fn launch(self, gpu: &GpuBackend, s: &DeviceStream) -> Result<(), DeviceError> {
        let Self { mut y, x, routes, experts } = self;
        check(gpu.half_dtype(), &y, x, experts)?;
        check_routes(x, routes)?;
        if x.rows() == 0 {
            return Ok(());
        }
        if fits_fused_decode(experts, routes.experts.rows() * routes.experts.cols()) {
            return gpu.fused_decode_mlp(s, &mut y, x, RoutingSource::Precomputed(routes), experts);
        }
        let call = gpu.moe_call(s, x, routes, experts)?;
        if call.kernel != MoeKernel::Plain {
            gpu.align(s, &call)?;
        }
        for first in [true, false] {
            match call.kernel {
                MoeKernel::Plain => gpu.moe_gemm_plain(s, &call, first)?,
                MoeKernel::SmallM => gpu.moe_gemm_small_m(s, &call, first)?,
                MoeKernel::GroupedGemm(rows) => gpu.moe_grouped_gemm(s, &call, rows, first)?,
                MoeKernel::GroupedGemmTma(tile) => {
                    gpu.moe_grouped_gemm_tma(s, &call, tile, first)?;
                }
                MoeKernel::Fp8SmallM => gpu.moe_gemm_fp8_small_m(s, &call, first)?,
                MoeKernel::Fp8GroupedGemm => gpu.moe_grouped_gemm_fp8(s, &call, first)?,
            }
        }
        gpu.combine(s, &mut y, &call)
    }
}

/// Whether the fused decode kernel can compute the routing and the expert MLPs of these tokens.
pub(crate) fn fits_routed_decode(
    router: &SoftmaxRouterArgs<'_>,
    experts: &ExpertWeights<'_>,
) -> bool {
    let (tokens, all) = (router.logits.rows(), router.logits.cols());
    fits_fused_decode(experts, tokens * (router.top_k + router.shared))
        && (1..=FUSED_ROUTING_TOKENS).contains(&tokens)
        && all <= FUSED_ROUTING_EXPERTS
}

impl GpuKernel for FusedMoe<'_, '_> {
    fn launch(self, gpu: &GpuBackend, s: &DeviceStream) -> Result<(), DeviceError> {
        let Self { mut y, x, router, experts, load } = self;
        if !fits_routed_decode(router, experts) {
            let (what, dtype) = ("routed decode of these sizes", x.dtype());
            return Err(DeviceError::Unsupported { kernel: KERNEL, what, dtype });
        }
        let (tokens, all) = (router.logits.rows(), router.logits.cols());
        check(gpu.half_dtype(), &y, x, experts)?;
        check_dtype(KERNEL, "logits", router.logits.dtype(), DType::F32)?;
        check_size(KERNEL, "rows of logits", tokens, x.rows())?;
        check_at_most(KERNEL, "top_k", router.top_k, all)?;
        let counters = ExpertCounterPtrs::of(load, KERNEL, router.logits)?;
        gpu.fused_decode_mlp(s, &mut y, x, RoutingSource::InKernel(router, counters), experts)
    }
}

fn check_routes(x: MatRef<'_>, routes: &TopKRoutes<'_>) -> Result<(), DeviceError> {
    check_size(KERNEL, "rows of experts", routes.experts.rows(), x.rows())?;
    check_size(KERNEL, "rows of weights", routes.weights.rows(), x.rows())?;
    check_size(KERNEL, "columns of weights", routes.weights.cols(), routes.experts.cols())?;
    check_at_most(KERNEL, "top_k", routes.experts.cols(), MAX_TOP_K)?;
    check_dtype(KERNEL, "experts", routes.experts.dtype(), DType::I32)?;
    check_dtype(KERNEL, "weights", routes.weights.dtype(), DType::F32)
}

fn check(
    half: DType,
    y: &MatMut<'_>,
    x: MatRef<'_>,
    experts: &ExpertWeights<'_>,
) -> Result<(), DeviceError> {
    let (gate_up, down) = (experts.gate_up, experts.down);
    check_size(KERNEL, "rows", y.rows(), x.rows())?;
    check_size(KERNEL, "columns", y.cols(), x.cols())?;
    check_size(KERNEL, "columns", x.cols(), x.cols().next_multiple_of(4))?;
    let weights = if gate_up.dtype() == DType::F8E4M3 { DType::F8E4M3 } else { x.dtype() };
    if weights != x.dtype() {
        check_dtype(KERNEL, "input", x.dtype(), half)?;
    }
    let is_mxfp4 = gate_up.is_mxfp4() || down.is_mxfp4();
    if gate_up.is_tma_packed() || is_mxfp4 || weights != x.dtype() {
        check_size(KERNEL, "row stride", x.stride(), x.stride().next_multiple_of(8))?;
        check_size(KERNEL, "alignment of x", x.as_ptr().addr() % 16, 0)?;
    }
    check_dtype(KERNEL, "output", y.dtype(), x.dtype())?;
    check_size(KERNEL, "down projections", down.len(), gate_up.len())?;
    let [down_packed, gate_up_packed] =
        [down, gate_up].map(|group| usize::from(group.is_tma_packed()));
    check_size(KERNEL, "TMA packing of down projections", down_packed, gate_up_packed)?;
    check_size(KERNEL, "inputs of gate_up", gate_up.k(), x.cols())?;
    check_size(KERNEL, "outputs of gate_up", gate_up.n(), 2 * down.k())?;
    check_size(KERNEL, "outputs of down", down.n(), x.cols())?;
    experts.check_biases(KERNEL)?;
    let without_biases = gate_up.is_tma_packed() && !is_mxfp4 || weights != x.dtype();
    if experts.has_biases() && without_biases {
        let (what, dtype) = ("biases of experts with this weight layout", gate_up.dtype());
        return Err(DeviceError::Unsupported { kernel: KERNEL, what, dtype });
    }
    check_dtype(KERNEL, "type of gate_up", gate_up.dtype(), weights)?;
    check_dtype(KERNEL, "type of down", down.dtype(), weights)
}
