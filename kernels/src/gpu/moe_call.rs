//! One call of the MLPs of experts: its sizes, its memory, and the way it goes.

use device::gpu::{KernelDefine, KernelLaunch};
use device::{DType, DeviceError, DeviceStream, MatRef};

use super::gemm::has_16_byte_rows;
use super::{fp8, moe_grouped_gemm_tma};
use crate::gpu::GpuBackend;
use crate::{ExpertWeights, PackedGroup, TopKRoutes};

pub(super) const KERNEL: &str = "moe_mlp";
/// Bytes of a `OperandSegment`.
const SEGMENT_BYTES: usize = 16;
/// Choices that a block sorts.
pub(super) const ALIGN_CHOICES: usize = 4096;
/// Choices per expert, on average, up to which weights are streamed for few rows.
const SMALL_M_CHOICES: usize = 8;
/// Choices per expert from which streamed tiles have many lines; in fp8 they always have.
const WIDE_TILE_CHOICES: usize = 4;
/// Choices per expert from which they have many rows, too.
const LARGE_TILE_CHOICES: usize = 17;
/// Choices per expert from which tiles are high.
const TALL_TILE_CHOICES: usize = 96;
/// Rows of a segment of weights in fp8 for many, as `TILE` in fp8_gemm/tile.h.
const FP8_TILE_ROWS: usize = 64;
/// Rows of a segment for few.
pub(super) const SMALL_M_ROWS: usize = 16;

/// Sizes and memory of one call.
pub(super) struct MoeCall<'a> {
    pub(super) x: MatRef<'a>,
    pub(super) routes: &'a TopKRoutes<'a>,
    pub(super) experts: &'a ExpertWeights<'a>,
    pub(super) choices: usize,
    pub(super) hidden: usize,
    pub(super) inner: usize,
    pub(super) order: *mut u8,
    pub(super) segments: *mut u8,
    /// How often parts of the choices name each expert.
    pub(super) counts: *mut u8,
    /// Activations between the products, `[choices, I]`.
    pub(super) activations: *mut u8,
    /// What the experts say, `[choices, H]`.
    pub(super) out: *mut u8,
    /// Inputs of a product in fp8, if its way quantises them, and their scales.
    pub(super) quantized: [*mut u8; 2],
    pub(super) kernel: MoeKernel,
    act_f32: u32,
}

/// How the products are computed.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(super) enum MoeKernel {
    SmallM,
    /// Rows of a tile.
    GroupedGemm(usize),
    /// Weights in lines.
    GroupedGemmTma(moe_grouped_gemm_tma::GroupedGemmTile),
    /// Weights in fp8, inputs as they are.
    Fp8SmallM,
    /// Weights in fp8, inputs quantised.
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
    ) -> Result<MoeCall<'a>, DeviceError> {
        let (hidden, inner) = (x.cols(), experts.down.k());
        let act_f32 = self.act_f32(KERNEL, x.dtype())?;
        let choices = routes.experts.rows() * routes.experts.cols();
        let few = [(experts.gate_up, hidden, true), (experts.down, inner, false)];
        let few_fit = few.into_iter().all(|(group, k, gated)| match group.dtype() {
            DType::F8E4M3 => self.fp8_strips(SMALL_M_ROWS, group.n(), k, 1).is_some(),
            _ => self.small_m_strips(SMALL_M_ROWS, group.n(), k, 1, gated).is_some(),
        });
        let way = choose_kernel(x, experts, choices, few_fit);
        let line = |bytes: usize| bytes.next_multiple_of(256);
        let (values, scales) = way.quantized_input_size((x.rows(), hidden), (choices, inner));
        let sizes = [
            line(choices * 4),
            line(way.most_segments(choices, experts.down.len()) * SEGMENT_BYTES),
            line(choices * inner * x.dtype().bytes()),
            line(choices * hidden * way.out_type(x.dtype()).bytes()),
            line(choices.div_ceil(ALIGN_CHOICES) * experts.down.len() * 4),
            line(values),
            line(scales * 4),
        ];
        let order = self.scratch(s, sizes.iter().sum())?;
        // SAFETY: inside the scratch memory that was just asked for.
        let at = |n: usize| unsafe { order.add(sizes[..n].iter().sum()) };
        let (segments, between, out, counts) = (at(1), at(2), at(3), at(4));
        let quantised = [at(5), at(6)];
        Ok(MoeCall {
            x,
            routes,
            experts,
            choices,
            hidden,
            inner,
            order,
            segments,
            counts,
            activations: between,
            out,
            quantized: quantised,
            kernel: way,
            act_f32,
        })
    }
}

impl MoeCall<'_> {
    pub(super) fn act(&self) -> [KernelDefine; 1] {
        [("ACT_F32", self.act_f32)]
    }

    pub(super) fn combine_defines(&self) -> [KernelDefine; 2] {
        let [act] = self.act();
        [act, ("OUT_HALF", u32::from(self.out_type() != DType::F32))]
    }

    /// What the experts say is of this type.
    pub(super) fn out_type(&self) -> DType {
        self.kernel.out_type(self.x.dtype())
    }

    pub(super) fn top_k(&self) -> usize {
        self.routes.experts.cols()
    }

    pub(super) fn most_segments(&self) -> usize {
        self.kernel.most_segments(self.choices, self.experts.down.len())
    }

    /// Experts that may have tokens.
    pub(super) fn busy_experts(&self) -> usize {
        self.choices.min(self.experts.down.len())
    }

    /// Weights and inputs of the first or the second product.
    pub(super) fn product(&self, first: bool) -> (&PackedGroup, usize) {
        if first { (self.experts.gate_up, self.hidden) } else { (self.experts.down, self.inner) }
    }

    /// Rows of x, or of what the first product made of them.
    pub(super) fn inputs(&self, first: bool) -> MatRef<'_> {
        let (dtype, inner) = (self.x.dtype(), self.inner);
        if first {
            return self.x;
        }
        // SAFETY: scratch memory of this size, which only launches write.
        unsafe { MatRef::from_raw(self.activations, dtype, self.choices, inner, inner) }
    }

    /// Arguments of all grouped kernels.
    pub(super) fn product_args(&self, launch: KernelLaunch, first: bool) -> KernelLaunch {
        let (group, k) = self.product(first);
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

    /// What the second product is rounded to, for inputs of type `x`.
    fn out_type(self, x: DType) -> DType {
        if matches!(self, Self::GroupedGemmTma(tile) if tile != moe_grouped_gemm_tma::TILE_SMALL) {
            x
        } else {
            DType::F32
        }
    }

    /// Whether blocks begin with weights before anybody has chosen; every expert then has a first segment.
    pub(super) fn prefetches_weights_early(self) -> bool {
        self == Self::GroupedGemmTma(moe_grouped_gemm_tma::TILE_MEDIUM)
    }

    /// Values and scales that the inputs of either product take, rows by columns, if they are quantised.
    fn quantized_input_size(self, x: (usize, usize), between: (usize, usize)) -> (usize, usize) {
        if self != Self::Fp8GroupedGemm {
            return (0, 0);
        }
        let scales = |(rows, cols): (usize, usize)| rows * cols.div_ceil(fp8::BLOCK);
        ((x.0 * x.1).max(between.0 * between.1), scales(x).max(scales(between)))
    }

    /// Segments of any distribution: a full one for every so many choices, and a last one for every expert.
    pub(super) fn most_segments(self, choices: usize, experts: usize) -> usize {
        let last = if self.prefetches_weights_early() { experts } else { experts.min(choices) };
        choices / self.segment_rows() + last
    }
}

/// The one place that chooses. Choices that all tokens share count: the more rows, the higher the tiles. `few_fit`: shared memory holds the rows of a segment for few.
fn choose_kernel(
    x: MatRef<'_>,
    experts: &ExpertWeights<'_>,
    choices: usize,
    few_fit: bool,
) -> MoeKernel {
    let each = choices / experts.down.len().max(1);
    if experts.gate_up.is_tma_packed() {
        let tile = match each {
            each if each < WIDE_TILE_CHOICES => moe_grouped_gemm_tma::TILE_SMALL,
            each if each < LARGE_TILE_CHOICES => moe_grouped_gemm_tma::TILE_MEDIUM,
            _ => moe_grouped_gemm_tma::TILE_LARGE,
        };
        return MoeKernel::GroupedGemmTma(tile.for_dtype(experts.gate_up.dtype()));
    }
    if experts.gate_up.dtype() == DType::F8E4M3 {
        return if each <= SMALL_M_CHOICES && few_fit {
            MoeKernel::Fp8SmallM
        } else {
            MoeKernel::Fp8GroupedGemm
        };
    }
    let multiples = x.cols().is_multiple_of(8) && experts.down.k().is_multiple_of(8);
    if x.dtype() == DType::F32 || !multiples || !has_16_byte_rows(x) {
        return MoeKernel::Plain;
    }
    match each {
        each if each <= SMALL_M_CHOICES && few_fit => MoeKernel::SmallM,
        each if each < TALL_TILE_CHOICES => MoeKernel::GroupedGemm(64),
        _ => MoeKernel::GroupedGemm(128),
    }
}
