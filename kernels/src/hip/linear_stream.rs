//! Some rows against weights that the copy engine streams to products of warpgroups, on NVIDIA sm_90a: shapes and
//! launches of `linear_stream`.

use super::check::check_size;
use super::device::HipDevice;
use super::gemm::{sizes, wide};
use super::launch::Launch;
use super::source::Source;
use super::tensor_map::Boxed;
use crate::{Around, DType, DeviceError, Mat, MatMut, Packed, Stream};

static STREAM: Source = Source {
    name: "linear_stream/linear_stream.hip",
    text: include_str!("../../csrc/linear_stream/linear_stream.hip"),
};

const KERNEL: &str = "linear";
/// Rows that a warpgroup multiplies.
const GROUP_ROWS: usize = 64;
/// Rows up to which it is taken: fewer than 17 are for `skinny`.
const MOST_ROWS: usize = 128;
/// Columns of a stage.
const COLUMNS: usize = 64;
/// Rows of `W` that a block may take at a time: widths of products in dev/wgmma.h.
const WIDTHS: [usize; 8] = [16, 32, 48, 64, 80, 96, 128, 192];
/// Stages that barriers are kept for, and without which nothing moves: one is read while the next arrives.
const MOST_STAGES: usize = 16;
const LEAST_STAGES: usize = 2;
/// Shared memory for barriers, and what aligning the ring takes.
const FIXED_BYTES: usize = (2 * MOST_STAGES + 2) * 8 + 1024;
/// Stages that a block must have for blocks to share the columns of a tile.
const SHARED_STAGES: usize = 4;
/// Rows of `W` below which four blocks share a tile rather than two: rows of x would cost more than `W`.
const NARROW: usize = 64;
/// One of so many multiprocessors has too few neighbours left for a cluster of four.
const LONELY: usize = 11;

/// A launch of the kernel.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
struct Shape {
    /// Rows of `W` of a block at a time.
    width: usize,
    /// Blocks that share a tile's columns.
    splits: usize,
    /// Rows of x that there is room for.
    rows: usize,
    blocks: usize,
    shared_bytes: usize,
}

/// Sizes of a product; `gated`: half of the rows of `W` are of gates.
#[derive(Debug, Clone, Copy)]
struct Product {
    rows: usize,
    n: usize,
    k: usize,
    gated: bool,
}

impl HipDevice {
    /// Whether `rows` rows of `dtype` stream the weights through shared memory once.
    pub(super) fn streams_rows(&self, rows: usize, dtype: DType, w: &Packed) -> bool {
        let half = dtype == self.half() && w.dtype() == self.half();
        // With gates it takes the most memory.
        let product = Product { rows, n: w.n(), k: w.k(), gated: true };
        half && self.multiplies_in_groups()
            && product.fits()
            && product.shape(self.limits()).is_some()
    }

    /// As `Kernels::linear_around`, where `streams_rows`.
    pub(super) fn stream_rows(
        &self,
        s: &Stream,
        y: MatMut<'_>,
        x: Mat<'_>,
        w: &Packed,
        around: &Around<'_>,
    ) -> Result<(), DeviceError> {
        let Some((norm, eps)) = around.norm else {
            return self.launch_rows(s, y, x, (x.as_ptr(), x.stride()), w, around);
        };
        let normed = self.scratch(s, x.rows() * x.cols() * x.dtype().bytes())?;
        self.norm_to(s, (normed, x.cols()), x, norm, eps)?;
        self.launch_rows(s, y, x, (normed, x.cols()), w, around)
    }

    /// `x`, with the address and the stride of the rows to read.
    fn launch_rows(
        &self,
        s: &Stream,
        mut y: MatMut<'_>,
        x: Mat<'_>,
        (from, stride): (*const u8, usize),
        w: &Packed,
        around: &Around<'_>,
    ) -> Result<(), DeviceError> {
        check_size(KERNEL, "odd values between rows of y", y.stride() % 2, 0)?;
        check_size(KERNEL, "alignment of y", y.as_mut_ptr().addr() % (2 * y.dtype().bytes()), 0)?;
        let product = Product { rows: x.rows(), n: w.n(), k: w.k(), gated: around.silu_mul };
        let shape = product.shape(self.limits()).ok_or(DeviceError::Shape {
            kernel: KERNEL,
            what: "bytes of shared memory",
            got: self.shared_bytes() as usize,
            expected: product.bytes(WIDTHS[0], 1, LEAST_STAGES),
        })?;
        let defines = [
            ("OUT_F32", self.act_f32(KERNEL, y.dtype())?),
            ("GATED", u32::from(around.silu_mul)),
            ("RESIDUAL", u32::from(around.add)),
            ("ROWS", shape.rows as u32),
            ("TILE", shape.width as u32),
            ("SPLITS", shape.splits as u32),
        ];
        let kernel = self.kernel(&STREAM, "linear_stream", &defines)?;
        let box_rows = if around.silu_mul { shape.width / 2 } else { shape.width };
        let (rows, columns) = (x.rows(), w.k());
        let x_map =
            self.boxes_of(&Boxed { matrix: from, rows, columns, stride, box_rows: rows })?;
        let matrix = w.as_ptr();
        let w_map =
            self.boxes_of(&Boxed { matrix, rows: w.n(), columns, stride: columns, box_rows })?;
        let threads = (shape.rows / GROUP_ROWS * 128 + 32) as u32;
        let (grid, y_stride) = ((shape.blocks as u32, 1, 1), y.stride() as u32);
        let launch = Launch::new(kernel, grid, threads, shape.shared_bytes as u32)
            .in_clusters(shape.splits as u32)
            .out(&mut y)
            .arg_ptr(from)
            .arg_ptr(w.as_ptr())
            .arg_or_null(around.bias);
        let launch = sizes(launch, (x.rows(), stride), w, y_stride);
        let launch = launch.record(&x_map.0).record(&w_map.0);
        // SAFETY: the caller compared all shapes; rows are aligned to 16 bytes.
        unsafe { launch.overlaps_predecessor().go(self, s) }
    }

    /// Whether the kernel may read `x` and write `y` as they lie.
    pub(super) fn lies_right(x: Mat<'_>, y: &mut MatMut<'_>) -> bool {
        let pairs = y.as_mut_ptr().addr().is_multiple_of(2 * y.dtype().bytes());
        wide(x) && pairs && y.stride().is_multiple_of(2)
    }

    fn limits(&self) -> (usize, usize) {
        (self.multiprocessors() as usize, self.shared_bytes() as usize)
    }
}

impl Product {
    fn fits(&self) -> bool {
        (1..=MOST_ROWS).contains(&self.rows)
            && self.n.is_multiple_of(16)
            && self.k.is_multiple_of(COLUMNS)
            && self.k > 0
    }

    fn outputs(&self) -> usize {
        if self.gated { self.n / 2 } else { self.n }
    }

    /// Rows of x in a stage.
    fn room(&self) -> usize {
        self.rows.next_multiple_of(GROUP_ROWS)
    }

    /// Shared memory with so many stages.
    fn bytes(&self, width: usize, splits: usize, stages: usize) -> usize {
        let halves = if self.gated { 2 } else { 1 };
        let pieces = (width / halves / 8).div_ceil(splits) * halves;
        let sums = if splits > 1 { splits * pieces * self.room() * 32 } else { 0 };
        FIXED_BYTES + sums + stages * (width + self.room()) * COLUMNS * 2
    }

    /// A tile for each cluster of two or four blocks if all of them run at once, else for each block: rows of x cost as
    /// much to fetch as so many rows of `W`. By sizes of the matrix alone, because a row's sums have one order. `None`
    /// where there are more tiles than blocks, or no room.
    fn shape(&self, (processors, limit): (usize, usize)) -> Option<Shape> {
        let halves = if self.gated { 2 } else { 1 };
        let widths = WIDTHS.iter().copied().filter(|w| w.is_multiple_of(8 * halves));
        let tiles = |width: usize| self.outputs().div_ceil(width / halves);
        let clusters = |splits| match splits {
            4 => processors / 4 - processors / (4 * LONELY),
            _ => processors / splits,
        };
        let width = |splits, most| {
            let long = splits == 1 || self.k / COLUMNS >= splits * SHARED_STAGES;
            let fits = |w: &usize| *w <= most && tiles(*w) <= clusters(splits);
            widths.clone().filter(|_| long).find(fits).map(|w| (w, splits))
        };
        let (two, four) = (width(2, 96), width(4, 80));
        let narrow = |&(w, _): &(usize, usize)| w < NARROW;
        let shared = if two.as_ref().is_none_or(narrow) { four.or(two) } else { two };
        let (width, splits) = shared.or_else(|| width(1, 192))?;
        let most = (self.k / COLUMNS).div_ceil(splits).clamp(LEAST_STAGES, MOST_STAGES);
        let fitting = |stages: &usize| self.bytes(width, splits, *stages) <= limit;
        let stages = (LEAST_STAGES..=most).rev().find(fitting)?;
        Some(Shape {
            width,
            splits,
            rows: self.room(),
            blocks: tiles(width) * splits,
            shared_bytes: self.bytes(width, splits, stages),
        })
    }
}
