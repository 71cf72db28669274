//! Sizes, scratch memory and kernel selection for one launch of expert MLPs.

use device::gpu::{KernelDefine, KernelLaunch};
use device::{DType, DeviceError, DeviceStream, MatRef};

use super::gemm::has_16_byte_rows;
use super::{fp8, moe_grouped_gemm_tma};
use crate::gate_activation::gated_product_defines;
use crate::gpu::GpuBackend;
use crate::{ExpertWeights, PackedMatrixGroup, TopKRoutes};

pub(super) const KERNEL: &str = "moe_mlp";
/// Size in bytes of an `ExpertSegment` (moe/segment.h), which describes successive routed pairs of one expert
/// that one block processes.
const SEGMENT_BYTES: usize = 16;
/// Maximum number of routed pairs (of token and expert) that one block sorts; several blocks sort more pairs.
pub(super) const ALIGN_PAIRS: usize = 4096;
/// Maximum average number of routed pairs per expert for which the small-M kernels are used.
const SMALL_M_PAIRS: usize = 8;
/// Minimum average number of routed pairs per expert for which the TMA kernel uses `TILE_MEDIUM`, which has
/// twice as many rows of W as `TILE_SMALL`. fp8 and MXFP4 never use `TILE_SMALL`.
const WIDE_TILE_PAIRS: usize = 4;
/// Minimum average number of routed pairs per expert for which the TMA kernel uses `TILE_LARGE`, which has
/// more rows of x.
const LARGE_TILE_PAIRS: usize = 17;
/// Minimum average number of routed pairs per expert for which the grouped GEMM without TMA uses tiles of 128
/// rows of x; with fewer pairs it uses 64 rows.
const TALL_TILE_PAIRS: usize = 96;
/// Maximum number of routed pairs (rows of x) per segment of the fp8 grouped GEMM; must match `TILE` in
/// fp8_gemm/tile.h.
const FP8_TILE_ROWS: usize = 64;
/// Maximum number of routed pairs (rows of x) per segment of the small-M kernels.
pub(super) const SMALL_M_ROWS: usize = 16;

/// Operands, sizes and scratch memory of one launch of expert MLPs.
pub(super) struct MoeLaunchArgs<'a> {
    pub(super) x: MatRef<'a>,
    pub(super) routes: &'a TopKRoutes<'a>,
    pub(super) experts: &'a ExpertWeights<'a>,
    pub(super) routed_pairs: usize,
    pub(super) hidden: usize,
    pub(super) inner: usize,
    pub(super) order: *mut u8,
    pub(super) segments: *mut u8,
    /// Number of routed pairs of each expert in each part of the routed pairs; one block sorts one part.
    pub(super) counts: *mut u8,
    /// Activations between the two GEMMs, `[routed_pairs, intermediate_size]`.
    pub(super) activations: *mut u8,
    /// Expert outputs, `[routed_pairs, hidden_size]`.
    pub(super) out: *mut u8,
    /// fp8-quantised inputs of a GEMM and their scales, if the kernel quantises inputs.
    pub(super) quantized: [*mut u8; 2],
    pub(super) kernel: MoeKernel,
    act_f32: u32,
}

/// Shape of the input matrix of one of the two GEMMs.
#[derive(Debug, Clone, Copy)]
struct GemmInputShape {
    rows: usize,
    cols: usize,
}

/// Kernel that computes both GEMMs of the expert MLPs.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(super) enum MoeKernel {
    SmallM,
    /// Grouped GEMM with tiles of this many rows of x.
    GroupedGemm(usize),
    /// Grouped GEMM with TMA-packed weights.
    GroupedGemmTma(moe_grouped_gemm_tma::GroupedGemmTile),
    /// Small-M GEMM with fp8 weights and 16-bit inputs (W8A16).
    Fp8SmallM,
    /// Grouped GEMM with fp8 weights and fp8-quantised inputs (W8A8).
    Fp8GroupedGemm,
    Plain,
}

impl GpuBackend {
    pub(super) fn moe_call<'a>(
        &self,
        s: &DeviceStream,
        x: MatRef<'a>,
        routes: &'a TopKRoutes<'a>,
        experts: &'a ExpertWeights<'a>,
    ) -> Result<MoeLaunchArgs<'a>, DeviceError> {
        let (hidden, inner) = (x.cols(), experts.down.k());
        let act_f32 = self.act_f32(KERNEL, x.dtype())?;
        let routed_pairs = routes.experts.rows() * routes.experts.cols();
        let projections = [(experts.gate_up, hidden, true), (experts.down, inner, false)];
        let small_m_fits = projections.into_iter().all(|(group, k, gated)| match group.dtype() {
            DType::F8E4M3 => self.fp8_strips(SMALL_M_ROWS, group.n(), k, 1).is_some(),
            _ => self.small_m_strips(SMALL_M_ROWS, group.n(), k, 1, gated).is_some(),
        });
        let kernel = choose_kernel(x, experts, routed_pairs, small_m_fits);
        let padded = |bytes: usize| bytes.next_multiple_of(256);
        let (value_count, scale_count) = kernel.quantized_input_size([
            GemmInputShape { rows: x.rows(), cols: hidden },
            GemmInputShape { rows: routed_pairs, cols: inner },
        ]);
        let sizes = [
            padded(routed_pairs * 4),
            padded(kernel.max_segments(routed_pairs, experts.down.len()) * SEGMENT_BYTES),
            padded(routed_pairs * inner * x.dtype().bytes()),
            padded(routed_pairs * hidden * kernel.out_type(x.dtype()).bytes()),
            padded(routed_pairs.div_ceil(ALIGN_PAIRS) * experts.down.len() * 4),
            padded(value_count),
            padded(scale_count * 4),
        ];
        let order = self.scratch(s, sizes.iter().sum())?;
        // SAFETY: the address is inside the scratch memory allocated above.
        let at = |n: usize| unsafe { order.add(sizes[..n].iter().sum()) };
        let (segments, activations, out, counts) = (at(1), at(2), at(3), at(4));
        let quantized = [at(5), at(6)];
        Ok(MoeLaunchArgs {
            x,
            routes,
            experts,
            routed_pairs,
            hidden,
            inner,
            order,
            segments,
            counts,
            activations,
            out,
            quantized,
            kernel,
            act_f32,
        })
    }
}

impl MoeLaunchArgs<'_> {
    pub(super) fn act(&self) -> [KernelDefine; 1] {
        [("ACT_F32", self.act_f32)]
    }

    pub(super) fn combine_defines(&self) -> [KernelDefine; 2] {
        let [act] = self.act();
        [act, ("OUT_HALF", u32::from(self.out_type() != DType::F32))]
    }

    /// Returns the defines of the first GEMM (gate and up, followed by the activation) or of the second one
    /// (down).
    pub(super) fn gate_defines(&self, first: bool) -> [KernelDefine; 4] {
        gated_product_defines(first.then_some(self.experts.activation))
    }

    /// Returns the defines of a GEMM over row-major 16-bit weights or MXFP4. `BIASED` and `WEIGHTS_MXFP4` are
    /// defined only for experts with biases and in MXFP4, so that other experts use one compiled variant.
    pub(super) fn gemm_defines(&self, first: bool) -> Vec<KernelDefine> {
        let biased = self.bias(first).map(|_| ("BIASED", 1));
        let is_mxfp4 = self.gemm_weights(first).0.is_mxfp4();
        let mxfp4 = is_mxfp4.then_some(("WEIGHTS_MXFP4", 1));
        self.gate_defines(first).into_iter().chain(biased).chain(mxfp4).collect()
    }

    /// Returns the biases of a projection of all experts, f32 `[experts, outputs]`, or `None` if there are none.
    pub(super) fn bias(&self, first: bool) -> Option<MatRef<'_>> {
        if first { self.experts.gate_up_bias } else { self.experts.down_bias }
    }

    /// Appends the argument of kernels with the define `BIASED`, if the projection has biases.
    pub(super) fn append_bias(&self, launch: KernelLaunch, first: bool) -> KernelLaunch {
        match self.bias(first) {
            Some(bias) => launch.arg(bias),
            None => launch,
        }
    }

    /// Returns the element type of the expert outputs.
    pub(super) fn out_type(&self) -> DType {
        self.kernel.out_type(self.x.dtype())
    }

    pub(super) fn top_k(&self) -> usize {
        self.routes.experts.cols()
    }

    pub(super) fn max_segments(&self) -> usize {
        self.kernel.max_segments(self.routed_pairs, self.experts.down.len())
    }

    /// Returns an upper bound of the number of experts on this rank that at least one token selects.
    pub(super) fn max_active_experts(&self) -> usize {
        self.routed_pairs.min(self.experts.down.len())
    }

    /// Returns the weights and the number of inputs of the first GEMM (gate and up) or of the second one
    /// (down).
    pub(super) fn gemm_weights(&self, first: bool) -> (&PackedMatrixGroup, usize) {
        if first { (self.experts.gate_up, self.hidden) } else { (self.experts.down, self.inner) }
    }

    /// Returns the input rows of the first GEMM (x) or of the second GEMM (activations).
    pub(super) fn inputs(&self, first: bool) -> MatRef<'_> {
        let (dtype, inner) = (self.x.dtype(), self.inner);
        if first {
            return self.x;
        }
        // SAFETY: the activations in scratch memory have this shape, and only launched kernels write to them.
        unsafe { MatRef::from_raw(self.activations, dtype, self.routed_pairs, inner, inner) }
    }

    /// Appends the arguments that all grouped GEMM kernels share.
    pub(super) fn gemm_args(&self, launch: KernelLaunch, first: bool) -> KernelLaunch {
        let (group, k) = self.gemm_weights(first);
        let (y, y_stride) =
            if first { (self.activations, self.inner) } else { (self.out, self.hidden) };
        let x = self.inputs(first);
        let (from, x_stride) = match self.kernel {
            MoeKernel::Fp8GroupedGemm => (self.quantized[0].cast_const(), k),
            _ => (x.as_ptr(), x.stride()),
        };
        launch
            .arg_ptr(y)
            .arg_ptr(from)
            .arg_ptr(group.as_ptr())
            .arg_ptr(self.order)
            .arg_ptr(self.segments)
            .u32(group.n() as u32)
            .u32(k as u32)
            .u32(x_stride as u32)
            .u32(y_stride as u32)
            .u32(self.top_k() as u32)
    }
}

impl MoeKernel {
    pub(super) fn segment_rows(self) -> usize {
        match self {
            Self::SmallM | Self::Fp8SmallM => SMALL_M_ROWS,
            Self::GroupedGemm(rows) => rows,
            Self::GroupedGemmTma(tile) => tile.rows,
            Self::Fp8GroupedGemm => FP8_TILE_ROWS,
            Self::Plain => 1,
        }
    }

    /// Returns the output type of the second GEMM, where `x` is the type of the inputs of the MLP.
    fn out_type(self, x: DType) -> DType {
        if matches!(self, Self::GroupedGemmTma(tile) if tile != moe_grouped_gemm_tma::TILE_SMALL) {
            x
        } else {
            DType::F32
        }
    }

    /// Whether blocks prefetch weights before routing is complete. If so, every expert has at least one
    /// segment, even if no token selected it.
    pub(super) fn prefetches_weights(self) -> bool {
        self == Self::GroupedGemmTma(moe_grouped_gemm_tma::TILE_MEDIUM)
    }

    /// Returns the number of fp8 values and the number of scales for which scratch memory is needed if the
    /// kernel quantises its inputs: for each, the larger of the numbers for the two GEMMs. Both are 0 if the
    /// kernel does not quantise its inputs.
    fn quantized_input_size(self, inputs: [GemmInputShape; 2]) -> (usize, usize) {
        if self != Self::Fp8GroupedGemm {
            return (0, 0);
        }
        let [values, activation_values] = inputs.map(|shape| shape.rows * shape.cols);
        let [scales, activation_scales] =
            inputs.map(|shape| shape.rows * shape.cols.div_ceil(fp8::BLOCK));
        (values.max(activation_values), scales.max(activation_scales))
    }

    /// Returns an upper bound of the number of segments for any distribution of routed pairs over experts:
    /// all full segments, and one partial segment per expert.
    pub(super) fn max_segments(self, routed_pairs: usize, experts: usize) -> usize {
        let last = if self.prefetches_weights() { experts } else { experts.min(routed_pairs) };
        routed_pairs / self.segment_rows() + last
    }
}

/// Selects the tile of the TMA kernel for 16-bit weights; `for_weights` adapts the tile to other formats.
fn tma_tile(pairs_per_expert: usize) -> moe_grouped_gemm_tma::GroupedGemmTile {
    match pairs_per_expert {
        pairs if pairs < WIDE_TILE_PAIRS => moe_grouped_gemm_tma::TILE_SMALL,
        pairs if pairs < LARGE_TILE_PAIRS => moe_grouped_gemm_tma::TILE_MEDIUM,
        _ => moe_grouped_gemm_tma::TILE_LARGE,
    }
}

/// Selects the kernel by the average number of routed pairs per expert, pairs of shared experts included.
/// `small_m_fits`: the rows of a small-M segment fit into shared memory.
fn choose_kernel(
    x: MatRef<'_>,
    experts: &ExpertWeights<'_>,
    routed_pairs: usize,
    small_m_fits: bool,
) -> MoeKernel {
    let pairs_per_expert = routed_pairs / experts.down.len().max(1);
    if experts.gate_up.is_tma_packed() {
        let weights = moe_grouped_gemm_tma::TmaWeights::of(experts.gate_up);
        let tile = tma_tile(pairs_per_expert).for_weights(weights);
        return MoeKernel::GroupedGemmTma(tile);
    }
    if experts.gate_up.dtype() == DType::F8E4M3 {
        return if pairs_per_expert <= SMALL_M_PAIRS && small_m_fits {
            MoeKernel::Fp8SmallM
        } else {
            MoeKernel::Fp8GroupedGemm
        };
    }
    let has_16_byte_columns = x.cols().is_multiple_of(8) && experts.down.k().is_multiple_of(8);
    if x.dtype() == DType::F32 || !has_16_byte_columns || !has_16_byte_rows(x) {
        return MoeKernel::Plain;
    }
    match pairs_per_expert {
        pairs if pairs <= SMALL_M_PAIRS && small_m_fits => MoeKernel::SmallM,
        pairs if pairs < TALL_TILE_PAIRS => MoeKernel::GroupedGemm(64),
        _ => MoeKernel::GroupedGemm(128),
    }
}
