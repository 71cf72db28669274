//! `y = x Wᵀ + bias` over packed weights.
//!
//! Work is divided by panels of 32 output columns, never along `K`: every output element is one sum in
//! ascending `k`, computed by one thread. A panel is read from memory once: while it meets the rows,
//! the next one is fetched into the second-level cache, so that memory and arithmetic overlap.

use super::device::{CpuDevice, check_dtype, check_size, for_float};
use super::product::{Ahead, HALF, Operands, Products, Segment, TILE_COLUMNS, TILE_ROWS};
use super::row_kernel::{RowKernel, dispatch};
use super::share::Rows;
use crate::dtype::Float;
use crate::{DType, DeviceError, Element, Mat, MatMut, PANEL_COLUMNS, Packed};

const KERNEL: &str = "linear";
const _: () = assert!(PANEL_COLUMNS == TILE_COLUMNS);

/// Sums of one tile.
#[repr(align(64))]
struct Tile([[f32; TILE_COLUMNS]; TILE_ROWS]);

impl CpuDevice {
    pub(super) fn linear_rows(
        &self,
        mut y: MatMut<'_>,
        x: Mat<'_>,
        w: &Packed,
        bias: Option<Mat<'_>>,
    ) -> Result<(), DeviceError> {
        check_size(KERNEL, "rows", y.rows(), x.rows())?;
        check_size(KERNEL, "inputs", x.cols(), w.k())?;
        check_size(KERNEL, "outputs", y.cols(), w.n())?;
        if let Some(bias) = bias {
            check_size(KERNEL, "bias", bias.cols(), w.n())?;
            check_dtype(KERNEL, "bias", bias.dtype(), DType::F32)?;
        }
        let bias = bias.map(|b| b.row::<f32>(0));
        if x.dtype() == DType::BF16 && w.dtype() == DType::F32 {
            // A router computes in f32 from f32-upcast inputs.
            let wide: Vec<f32> =
                (0..x.rows()).flat_map(|r| x.row::<half::bf16>(r)).map(|v| v.load()).collect();
            let wide = Mat::of(&wide, x.rows(), x.cols())?;
            return self.linear_of_type(&mut y, wide, w, bias);
        }
        check_dtype(KERNEL, "input", x.dtype(), w.dtype())?;
        self.linear_of_type(&mut y, x, w, bias)
    }

    fn linear_of_type(
        &self,
        y: &mut MatMut<'_>,
        x: Mat<'_>,
        w: &Packed,
        bias: Option<&[f32]>,
    ) -> Result<(), DeviceError> {
        for_float!(KERNEL, y.dtype(), T => {
            let out = Rows::<T>::new(y);
            let job = Linear { x, w, bias, out, isa: self.isa() };
            self.threads().split(w.panels(), 1, 2, &|panels| job.run(panels));
        });
        Ok(())
    }
}

struct Linear<'a, T> {
    x: Mat<'a>,
    w: &'a Packed,
    bias: Option<&'a [f32]>,
    out: Rows<T>,
    isa: super::Isa,
}

impl<T: Float + Element> Linear<'_, T> {
    /// Computes the columns of some panels for all rows.
    fn run(&self, panels: std::ops::Range<usize>) {
        let products = Products::new(self.isa, self.w.dtype());
        let (rows, pair) = (self.x.rows(), self.w.dtype() == DType::BF16);
        let steps = if pair { self.w.k() / 2 } else { self.w.k() };
        let tiles = rows.div_ceil(TILE_ROWS);
        let mut sums = Tile([[0.0; TILE_COLUMNS]; TILE_ROWS]);
        for p in panels.clone() {
            let panel = self.w.panel(p);
            let next = if p + 1 < panels.end { self.w.panel(p + 1) } else { panel };
            for tile in 0..tiles {
                // Rows are spread evenly: 16 are two tiles of 8, not 12 and 4.
                let (from, to) = (rows * tile / tiles, rows * (tile + 1) / tiles);
                let operands = Operands {
                    a: self.x.row_ptr(from),
                    a_stride: self.x.stride() * self.x.dtype().bytes(),
                    b: &[Segment { start: [panel, panel.wrapping_add(HALF * 4)], steps }],
                    b_stride: TILE_COLUMNS * 4,
                    c: sums.0.as_mut_ptr().cast(),
                    c_stride: TILE_COLUMNS,
                    resume: false,
                    ahead: ahead(next, steps, rows, (tile, tiles)),
                };
                // SAFETY: the panel holds `steps` lines of 32 columns, `x` rows of as many inputs,
                // `sums` a full tile; the device checked its instruction set.
                unsafe { products.run(to - from, &operands) };
                self.store(&sums, from..to, p);
            }
        }
    }

    fn store(&self, sums: &Tile, rows: std::ops::Range<usize>, panel: usize) {
        let from = panel * TILE_COLUMNS;
        let cols = TILE_COLUMNS.min(self.w.n() - from);
        let bias = self.bias.map(|b| &b[from..from + cols]);
        dispatch(self.isa, Store { out: &self.out, sums, rows, from, cols, bias });
    }
}

/// Rows up to which a product waits for memory, not for arithmetic. The hardware fetches one stream
/// ahead by itself then, and being told costs it 5 % of the bandwidth (measured on Zen 4).
const MEMORY_BOUND_ROWS: usize = 8;

/// The part of the next panel that one of the row tiles fetches: a panel has two lines a step.
fn ahead(next: *const u8, steps: usize, rows: usize, (tile, tiles): (usize, usize)) -> Ahead {
    match (tiles, tile) {
        _ if rows <= MEMORY_BOUND_ROWS => Ahead::Nothing,
        (1, _) => Ahead::TwoLines(next),
        (_, 0) => Ahead::OneLine(next),
        (_, 1) => Ahead::OneLine(next.wrapping_add(steps * 64)),
        _ => Ahead::Nothing,
    }
}

struct Store<'a, T> {
    out: &'a Rows<T>,
    sums: &'a Tile,
    rows: std::ops::Range<usize>,
    from: usize,
    cols: usize,
    bias: Option<&'a [f32]>,
}

impl<T: Float> RowKernel for Store<'_, T> {
    #[inline(always)]
    fn run(self) {
        for (r, sums) in self.rows.zip(&self.sums.0) {
            // SAFETY: each panel's columns belong to one thread.
            let y = unsafe { self.out.part(r, self.from, self.cols) };
            match (self.bias, y.as_chunks_mut::<TILE_COLUMNS>()) {
                (None, ([whole], [])) => {
                    for (y, s) in whole.iter_mut().zip(sums) {
                        *y = T::store(*s);
                    }
                }
                (bias, _) => {
                    for (j, (y, s)) in y.iter_mut().zip(sums).enumerate() {
                        *y = T::store(bias.map_or(*s, |b| s + b[j]));
                    }
                }
            }
        }
    }
}
