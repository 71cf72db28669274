//! Linear layer on the CPU, `y = x Wᵀ + bias` with packed weights.
//!
//! The weights are divided among threads by panels (32 outputs each), never by inputs: every output element
//! is one sum over ascending inputs, computed by one thread. A panel is read from memory once. While it is
//! multiplied by the rows of `x`, the next panel is prefetched into the L2 cache, so that memory access and
//! arithmetic overlap.

use std::ops::Range;
use std::sync::PoisonError;

use device::{
    Buffer, DType, DeviceDriver, DeviceElement, DeviceError, FloatElement, MatRef, bf16,
    check_dtype, check_size, f16,
};

use super::backend::for_float;
use super::elementwise::min_rows;
use super::matmul_tile::{
    CpuCachePrefetch, HALF, OperandSegment, TILE_COLUMNS, TILE_ROWS, TileKernels, TileOperands,
    column_bytes,
};
use super::row_kernel::{RowConversion, RowKernel, dispatch};
use super::shared_rows::SharedRows;
use crate::cpu::CpuBackend;
use crate::{CpuKernel, Linear, PANEL_COLUMNS, PackedMatrix};

const KERNEL: &str = "linear";
const _: () = assert!(PANEL_COLUMNS == TILE_COLUMNS);

/// f32 accumulators of one output tile.
#[repr(align(64))]
struct OutputTile([[f32; TILE_COLUMNS]; TILE_ROWS]);

impl CpuKernel for Linear<'_> {
    fn run(self, cpu: &CpuBackend) -> Result<(), DeviceError> {
        let Self { mut y, x, weight: w, bias } = self;
        check_size(KERNEL, "rows", y.rows(), x.rows())?;
        check_size(KERNEL, "inputs", x.cols(), w.k())?;
        check_size(KERNEL, "outputs", y.cols(), w.n())?;
        if let Some(bias) = bias {
            check_size(KERNEL, "bias", bias.cols(), w.n())?;
            check_dtype(KERNEL, "bias", bias.dtype(), DType::F32)?;
        }
        let bias = bias.map(|b| b.row::<f32>(0));
        // Inputs have the type of the weights, except in the router of an MoE layer: it may have f32 weights
        // and 16-bit inputs.
        if w.dtype() != DType::F32 || !matches!(x.dtype(), DType::BF16 | DType::F16) {
            check_dtype(KERNEL, "input", x.dtype(), w.dtype())?;
        }
        let mut padded_input = cpu.padded_rows().lock().unwrap_or_else(PoisonError::into_inner);
        let x = match (x.dtype(), w.dtype()) {
            (DType::BF16, DType::F32) => cpu.widen_rows::<bf16>(&mut padded_input, x)?,
            (DType::F16, _) => cpu.widen_rows::<f16>(&mut padded_input, x)?,
            _ => cpu.pad_rows(&mut padded_input, x)?,
        };
        for_float!(KERNEL, y.dtype(), T => {
            let out = SharedRows::<T>::new(&mut y);
            let job = CpuLinearArgs { x, w, bias, out, isa: cpu.isa() };
            cpu.threads().split(w.panels(), 1, 2, &|panels| job.run(panels));
        });
        Ok(())
    }
}

/// If the row stride in bytes is a multiple of this, all rows of a tile map to one set of the L1 cache (64
/// sets of 64-byte lines) and evict each other; the product then runs at an eighth of its speed.
const CACHE_ALIAS_BYTES: usize = 4096;
/// Maximum number of rows at which the product is memory-bound and software prefetching is off: the hardware
/// prefetcher follows the single stream of weights, and software prefetches cost 5 % of the bandwidth (Zen
/// 4).
const MEMORY_BOUND_ROWS: usize = 4;
/// Distance in bytes between the weights in use and the weights that are prefetched, if all rows fit in one
/// tile. Panels are contiguous in memory. A shorter distance does not cover the latency; a longer one costs
/// bandwidth if the product is memory-bound.
const PREFETCH_BYTES: usize = 8192;

/// Size of a cache line in bytes.
const CACHE_LINE: usize = 64;

/// Returns a buffer of at least `bytes` bytes: `buffer` if it is large enough, otherwise a new one.
fn scratch_buffer<'a>(
    device: &CpuBackend,
    buffer: &'a mut Option<Buffer>,
    bytes: usize,
) -> Result<&'a mut Buffer, DeviceError> {
    match buffer.take().filter(|b| b.bytes() >= bytes) {
        Some(enough) => Ok(buffer.insert(enough)),
        None => Ok(buffer.insert(device.alloc(bytes.next_power_of_two())?)),
    }
}

impl CpuBackend {
    /// Converts `x` to f32 in `buffer`. The row stride is increased by one cache line if the rows would
    /// otherwise map to the same cache sets.
    fn widen_rows<'a, T: FloatElement>(
        &self,
        buffer: &'a mut Option<Buffer>,
        x: MatRef<'_>,
    ) -> Result<MatRef<'a>, DeviceError> {
        let (rows, cols) = (x.rows(), x.cols());
        let aliases = rows > TILE_ROWS && (cols * 4).is_multiple_of(CACHE_ALIAS_BYTES);
        let stride = cols + if aliases { CACHE_LINE / 4 } else { 0 };
        let buffer = scratch_buffer(self, buffer, rows * stride * 4)?;
        let mut to = buffer.mat_mut(DType::F32, rows, stride)?;
        let (isa, out) = (self.isa(), SharedRows::<f32>::new(&mut to));
        self.threads().split(rows, 1, min_rows(cols), &|range| {
            for r in range {
                // SAFETY: each row belongs to one thread.
                let to = unsafe { out.part(r, 0, cols) };
                dispatch(isa, RowConversion { to, from: x.row::<T>(r) });
            }
        });
        Ok(buffer.mat_strided(DType::F32, rows, cols, stride))
    }

    /// Returns `x`; if its rows would map to the same cache sets, returns a copy of `x` whose row stride is
    /// larger by one cache line.
    fn pad_rows<'a>(
        &self,
        buffer: &'a mut Option<Buffer>,
        x: MatRef<'a>,
    ) -> Result<MatRef<'a>, DeviceError> {
        let row_bytes = x.cols() * x.dtype().bytes();
        if x.rows() <= TILE_ROWS
            || !(x.stride() * x.dtype().bytes()).is_multiple_of(CACHE_ALIAS_BYTES)
        {
            return Ok(x);
        }
        let stride = row_bytes.next_multiple_of(CACHE_LINE) + CACHE_LINE;
        let buffer = scratch_buffer(self, buffer, stride * x.rows())?;
        let mut to = buffer.mat_mut(DType::BF16, x.rows(), stride / 2)?;
        let out = SharedRows::<bf16>::new(&mut to);
        self.threads().split(x.rows(), 1, min_rows(row_bytes / 2), &|range| {
            for r in range {
                // SAFETY: each row belongs to one thread; rows of `x` are `row_bytes` long.
                unsafe {
                    let to = out.row(r).as_mut_ptr().cast::<u8>();
                    to.copy_from_nonoverlapping(x.row_ptr(r), row_bytes);
                }
            }
        });
        Ok(buffer.mat_strided(x.dtype(), x.rows(), x.cols(), stride / x.dtype().bytes()))
    }
}

/// Arguments of one launch of a linear layer, shared by all threads.
struct CpuLinearArgs<'a, T> {
    x: MatRef<'a>,
    w: &'a PackedMatrix,
    bias: Option<&'a [f32]>,
    out: SharedRows<T>,
    isa: device::CpuIsa,
}

impl<T: FloatElement + DeviceElement> CpuLinearArgs<'_, T> {
    /// Computes, for all rows of `x`, the outputs of the weight panels `panels` (32 outputs each).
    fn run(&self, panels: Range<usize>) {
        let tile_kernels = TileKernels::new(self.isa, self.w.dtype());
        let (rows, pair) = (self.x.rows(), self.w.dtype() == DType::BF16);
        let steps = if pair { self.w.k() / 2 } else { self.w.k() };
        let tiles = rows.div_ceil(TILE_ROWS);
        let column = column_bytes(self.w.dtype());
        let mut sums = OutputTile([[0.0; TILE_COLUMNS]; TILE_ROWS]);
        for p in panels.clone() {
            let panel = self.w.panel(p);
            let start = [panel, panel.wrapping_add(HALF * column)];
            for tile in 0..tiles {
                let tile_rows = rows_of_tile(rows, tile, tiles);
                let operands = TileOperands {
                    a: self.x.row_ptr(tile_rows.start),
                    a_stride: self.x.stride() * self.x.dtype().bytes(),
                    b: &[OperandSegment { start, steps }],
                    b_stride: TILE_COLUMNS * column,
                    c: sums.0.as_mut_ptr().cast(),
                    c_stride: TILE_COLUMNS,
                    accumulate: false,
                    prefetch: self.prefetch_hint(p, &panels, tile, tiles),
                };
                // SAFETY: the panel has `steps` lines of 32 columns, `x` has rows of as many inputs, `sums`
                // is a full tile; the device checked its instruction set.
                unsafe { tile_kernels.run(tile_rows.len(), &operands) };
                self.store(&sums, tile_rows, p);
            }
        }
    }

    /// Returns the memory to prefetch while tile `tile` (of `tiles` tiles of rows of `x`) is multiplied by
    /// `panel`. A single tile prefetches at a fixed distance; otherwise the first two tiles prefetch half of
    /// the next panel each, which has two cache lines per step.
    fn prefetch_hint(
        &self,
        panel: usize,
        panels: &Range<usize>,
        tile: usize,
        tiles: usize,
    ) -> CpuCachePrefetch {
        if self.x.rows() <= MEMORY_BOUND_ROWS {
            return CpuCachePrefetch::Nothing;
        }
        let next = self.w.panel((panel + 1).min(panels.end - 1));
        match tile {
            0 if tiles == 1 => {
                CpuCachePrefetch::TwoLines(self.w.panel(panel).wrapping_add(PREFETCH_BYTES))
            }
            0 => CpuCachePrefetch::OneLine(next),
            1 => CpuCachePrefetch::OneLine(next.wrapping_add(self.w.panel_bytes() / 2)),
            _ => CpuCachePrefetch::Nothing,
        }
    }

    fn store(&self, sums: &OutputTile, rows: Range<usize>, panel: usize) {
        let from = panel * TILE_COLUMNS;
        let cols = TILE_COLUMNS.min(self.w.n() - from);
        let bias = self.bias.map(|b| &b[from..from + cols]);
        dispatch(self.isa, OutputTileStore { out: &self.out, sums, rows, from, cols, bias });
    }
}

/// Returns the rows of tile `tile`. The rows are spread evenly over tiles of up to 12 rows: 16 rows become
/// tiles of 8 and 8, not of 12 and 4.
#[inline]
fn rows_of_tile(rows: usize, tile: usize, tiles: usize) -> Range<usize> {
    rows * tile / tiles..rows * (tile + 1) / tiles
}

/// Row kernel: adds the bias to an output tile and writes the tile to the output.
struct OutputTileStore<'a, T> {
    out: &'a SharedRows<T>,
    sums: &'a OutputTile,
    rows: Range<usize>,
    from: usize,
    cols: usize,
    bias: Option<&'a [f32]>,
}

impl<T: FloatElement> RowKernel for OutputTileStore<'_, T> {
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
