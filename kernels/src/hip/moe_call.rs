//! One call of the MLPs of experts: its sizes, its memory, and the way it goes.

use super::device::HipDevice;
use super::fp8;
use super::gemm::wide;
use super::launch::Launch;
use super::moe_stream;
use super::source::Define;
use crate::{DType, DeviceError, Experts, Mat, Packed, PackedGroup, Routes, Stream};

pub(super) const KERNEL: &str = "moe_mlp";
/// Bytes of a `Segment`.
const SEGMENT_BYTES: usize = 16;
/// Choices that a block sorts.
pub(super) const ALIGN_CHOICES: usize = 4096;
/// Choices per expert, on average, up to which weights are streamed for few rows.
const FEW_CHOICES: usize = 8;
/// Choices per expert from which streamed tiles have many lines; in fp8 they always have.
const SOME_CHOICES: usize = 4;
/// Choices per expert from which they have many rows, too.
const MANY_CHOICES: usize = 17;
/// Choices per expert from which tiles are high.
const HIGH_TILE_CHOICES: usize = 96;
/// Rows of a segment of weights in fp8 for many, as `TILE` in fp8_tile/tile.h.
const FP8_TILE_ROWS: usize = 64;
/// Rows of a segment for few.
pub(super) const FEW_ROWS: usize = 16;

/// Sizes and memory of one call.
pub(super) struct Call<'a> {
    pub(super) x: Mat<'a>,
    pub(super) routes: &'a Routes<'a>,
    pub(super) experts: &'a Experts<'a>,
    pub(super) choices: usize,
    pub(super) hidden: usize,
    pub(super) inner: usize,
    pub(super) order: *mut u8,
    pub(super) segments: *mut u8,
    /// How often parts of the choices name each expert.
    pub(super) counts: *mut u8,
    /// Activations between the products, `[choices, I]`.
    pub(super) between: *mut u8,
    /// What the experts say, `[choices, H]`.
    pub(super) out: *mut u8,
    /// Inputs of a product in fp8, if its way quantises them, and their scales.
    pub(super) quantised: [*mut u8; 2],
    pub(super) way: Way,
    act_f32: u32,
}

/// How the products are computed.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(super) enum Way {
    Few,
    /// Rows of a tile.
    Tile(usize),
    /// Weights in lines.
    Stream(moe_stream::Tile),
    /// Weights in fp8, inputs as they are.
    Fp8Few,
    /// Weights in fp8, inputs quantised.
    Fp8Tile,
    Plain,
}

impl HipDevice {
    pub(super) fn moe_call<'a>(
        &self,
        s: &Stream,
        x: Mat<'a>,
        routes: &'a Routes<'a>,
        experts: &'a Experts<'a>,
    ) -> Result<Call<'a>, DeviceError> {
        let (hidden, inner) = (x.cols(), experts.down.k());
        let act_f32 = self.act_f32(KERNEL, x.dtype())?;
        let choices = routes.experts.rows() * routes.experts.cols();
        let few = [(experts.gate_up, hidden, true), (experts.down, inner, false)];
        let few_fit = few.into_iter().all(|(group, k, gated)| match group.dtype() {
            DType::F8E4M3 => self.fp8_strips(FEW_ROWS, group.n(), k, 1).is_some(),
            _ => self.strips_of(FEW_ROWS, group.n(), k, 1, gated).is_some(),
        });
        let way = way(x, experts, choices, few_fit);
        let line = |bytes: usize| bytes.next_multiple_of(256);
        let (values, scales) = way.quantised((x.rows(), hidden), (choices, inner));
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
        Ok(Call {
            x,
            routes,
            experts,
            choices,
            hidden,
            inner,
            order,
            segments,
            counts,
            between,
            out,
            quantised,
            way,
            act_f32,
        })
    }
}

impl Call<'_> {
    pub(super) fn act(&self) -> [Define; 1] {
        [("ACT_F32", self.act_f32)]
    }

    pub(super) fn combine_defines(&self) -> [Define; 2] {
        let [act] = self.act();
        [act, ("OUT_HALF", u32::from(self.out_type() != DType::F32))]
    }

    /// What the experts say is of this type.
    pub(super) fn out_type(&self) -> DType {
        self.way.out_type(self.x.dtype())
    }

    pub(super) fn top_k(&self) -> usize {
        self.routes.experts.cols()
    }

    pub(super) fn most_segments(&self) -> usize {
        self.way.most_segments(self.choices, self.experts.down.len())
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
    pub(super) fn inputs(&self, first: bool) -> Mat<'_> {
        let (dtype, inner) = (self.x.dtype(), self.inner);
        if first {
            return self.x;
        }
        // SAFETY: scratch memory of this size, which only launches write.
        unsafe { Mat::from_raw(self.between, dtype, self.choices, inner, inner) }
    }

    /// Arguments of all grouped kernels.
    pub(super) fn product_args(&self, launch: Launch, first: bool) -> Launch {
        let (group, k) = self.product(first);
        let (y, y_stride) =
            if first { (self.between, self.inner) } else { (self.out, self.hidden) };
        let x = self.inputs(first);
        let (from, x_stride) = match self.way {
            Way::Fp8Tile => (self.quantised[0].cast_const(), k),
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

impl Way {
    pub(super) fn segment_rows(self) -> usize {
        match self {
            Self::Few | Self::Fp8Few => FEW_ROWS,
            Self::Tile(rows) => rows,
            Self::Stream(tile) => tile.rows,
            Self::Fp8Tile => FP8_TILE_ROWS,
            Self::Plain => 1,
        }
    }

    /// What the second product is rounded to, for inputs of type `x`.
    fn out_type(self, x: DType) -> DType {
        if matches!(self, Self::Stream(tile) if tile != moe_stream::FEW) { x } else { DType::F32 }
    }

    /// Whether blocks begin with weights before anybody has chosen; every expert then has a first segment.
    pub(super) fn begins_early(self) -> bool {
        self == Self::Stream(moe_stream::SOME)
    }

    /// Values and scales that the inputs of either product take, rows by columns, if they are quantised.
    fn quantised(self, x: (usize, usize), between: (usize, usize)) -> (usize, usize) {
        if self != Self::Fp8Tile {
            return (0, 0);
        }
        let scales = |(rows, cols): (usize, usize)| rows * cols.div_ceil(fp8::BLOCK);
        ((x.0 * x.1).max(between.0 * between.1), scales(x).max(scales(between)))
    }

    /// Segments of any distribution: a full one for every so many choices, and a last one for every expert.
    pub(super) fn most_segments(self, choices: usize, experts: usize) -> usize {
        let last = if self.begins_early() { experts } else { experts.min(choices) };
        choices / self.segment_rows() + last
    }
}

/// The one place that decides who computes experts that all tokens share, where they lie among others: see `takes_shared`. With the others
/// they cost no launch of their own, but their weights are read once for every segment of tokens; beside the others no wait (KERNELS.md).
pub(super) fn joins_shared(tokens: usize) -> bool {
    tokens <= FEW_ROWS
}

/// Where they are by themselves: on a stream of their own, which costs two gaps between launches. Behind other launches the weights of few rows are on
/// their way while these end, which is as good, but for fp8.
pub(super) fn runs_beside(tokens: usize, w: &Packed) -> bool {
    tokens > FEW_ROWS || w.dtype() == DType::F8E4M3
}

/// The one place that chooses. Choices that all tokens share count: the more rows, the higher the tiles. `few_fit`: shared memory holds the rows of a segment for few.
fn way(x: Mat<'_>, experts: &Experts<'_>, choices: usize, few_fit: bool) -> Way {
    let each = choices / experts.down.len().max(1);
    if experts.gate_up.is_lined() {
        let tile = match each {
            each if each < SOME_CHOICES => moe_stream::FEW,
            each if each < MANY_CHOICES => moe_stream::SOME,
            _ => moe_stream::MANY,
        };
        return Way::Stream(tile.of(experts.gate_up.dtype()));
    }
    if experts.gate_up.dtype() == DType::F8E4M3 {
        return if each <= FEW_CHOICES && few_fit { Way::Fp8Few } else { Way::Fp8Tile };
    }
    let multiples = x.cols().is_multiple_of(8) && experts.down.k().is_multiple_of(8);
    if x.dtype() == DType::F32 || !multiples || !wide(x) {
        return Way::Plain;
    }
    match each {
        each if each <= FEW_CHOICES && few_fit => Way::Few,
        each if each < HIGH_TILE_CHOICES => Way::Tile(64),
        _ => Way::Tile(128),
    }
}
