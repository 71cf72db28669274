//! Products of many rows by warpgroups on NVIDIA sm_90a: with `silu_mul` behind them, and where there is no
//! matrix library.

use device::gpu::{BOX_ROWS, KernelLaunch, KernelSource, TiledMatrix};
use device::{DType, DeviceError, DeviceStream, MatMut, MatRef};

use super::gemm::{WeightRows, has_16_byte_rows, sizes};
use crate::PackedMatrix;
use crate::gpu::GpuBackend;

static GEMM_LARGE_M: KernelSource = kernel_source!("gemm_large_m/gemm_large_m.hip");

/// Threads of a block: a wave fetches, eight multiply.
const THREADS: u32 = 12 * 32;
/// Blocks that share lines of W.
const CLUSTER: usize = 2;
/// Rows of a cluster's tile.
const TILE_ROWS: usize = 256;
/// Lines of W of a tile: half of them gates with `silu_mul`.
const TILE_COLUMNS: usize = 256;
/// Rows, and lines, of a box.
const HALF: usize = 128;
/// Columns of a step.
const COLUMNS: usize = 64;
/// Four stages, the outputs under way, barriers, and what aligning takes.
const SHARED_BYTES: u32 = 226 << 10;
/// Rows from which what is not stored between product and `silu_mul` shows; with fewer the library is as fast.
const MIN_ROWS: usize = 2048;

impl GpuBackend {
    /// Whether `rows` rows of `dtype` fill this GPU with tiles.
    pub(crate) fn fits_large_m(&self, rows: usize, dtype: DType, w: &PackedMatrix) -> bool {
        let half = dtype == self.half_dtype() && w.dtype() == self.half_dtype();
        let whole = w.k().is_multiple_of(COLUMNS) && w.n().is_multiple_of(16) && w.k() != 0;
        let tiles = rows.div_ceil(TILE_ROWS) * w.n().div_ceil(TILE_COLUMNS);
        half && whole
            && rows >= MIN_ROWS
            && self.has_large_m_kernel()
            && fills_device(tiles, self.multiprocessors() as usize / CLUSTER)
    }

    /// Whether this GPU has warpgroups and what a block of them needs.
    pub(super) fn has_large_m_kernel(&self) -> bool {
        self.shared_bytes() >= SHARED_BYTES && self.has_wgmma_tma()
    }

    /// Whether the copy engine reaches the rows of both.
    pub(super) fn is_tma_aligned(&self, y: &MatMut<'_>, x: MatRef<'_>) -> bool {
        y.dtype() == self.half_dtype() && has_16_byte_rows(x) && has_16_byte_rows(y.as_ref())
    }

    /// `y = x Wᵀ`, or with `gated` `silu(gate) · up` of it, in the 16-bit type; shapes have been checked, rows of x and y
    /// are `wide`. A row has the same bits in any company.
    pub(super) fn gemm_large_m(
        &self,
        s: &DeviceStream,
        mut y: MatMut<'_>,
        x: MatRef<'_>,
        w: WeightRows,
        gated: bool,
    ) -> Result<(), DeviceError> {
        let kernel = self.kernel(&GEMM_LARGE_M, "gemm_large_m", &[("GATED", u32::from(gated))])?;
        let (rows, y_stride, outputs) = (x.rows(), y.stride(), y.cols());
        let boxed = |matrix, rows, columns, stride, box_rows| {
            self.encode_tensor_map(&TiledMatrix { matrix, rows, columns, stride, box_rows })
        };
        let y_map = boxed(y.as_mut_ptr().cast_const(), rows, outputs, y_stride, BOX_ROWS)?;
        let x_map = boxed(x.as_ptr(), rows, w.k, x.stride(), HALF)?;
        let w_map = boxed(w.at, w.n, w.k, w.k, HALF)?;
        let launch = KernelLaunch::new(
            kernel,
            (self.large_m_blocks(rows, w.n), 1, 1),
            THREADS,
            SHARED_BYTES,
        )
        .out(&mut y)
        .arg(x)
        .arg_ptr(w.at)
        .arg_words(&y_map.0)
        .arg_words(&x_map.0)
        .arg_words(&w_map.0);
        let launch = sizes(launch, (rows, x.stride()), w, y_stride as u32);
        // SAFETY: the caller compared the shapes; rows begin on 16 bytes.
        unsafe { launch.overlaps_predecessor().launch(self, s) }
    }

    fn large_m_blocks(&self, rows: usize, lines: usize) -> u32 {
        let tiles = rows.div_ceil(TILE_ROWS) * lines.div_ceil(TILE_COLUMNS);
        (tiles.min(self.multiprocessors() as usize / CLUSTER) * CLUSTER) as u32
    }
}

/// Whether so many tiles keep nine clusters of ten busy.
fn fills_device(tiles: usize, clusters: usize) -> bool {
    clusters != 0 && tiles * 10 >= tiles.div_ceil(clusters) * clusters * 9
}

#[cfg(test)]
mod tests {
    use super::fills_device;

    #[test]
    fn partial_last_wave_is_not_full() {
        for (tiles, clusters, wanted) in
            [(384, 66, true), (66, 66, true), (67, 66, false), (60, 66, true), (40, 66, false)]
        {
            assert_eq!(fills_device(tiles, clusters), wanted, "{tiles} tiles, {clusters} clusters");
        }
        assert!(!fills_device(5, 0));
    }
}
