//! Products of many rows by warpgroups on NVIDIA sm_90a: with `silu_mul` behind them, and where there is no
//! matrix library.

use super::device::HipDevice;
use super::gemm::{Lines, sizes, wide};
use super::launch::Launch;
use super::source::Source;
use super::tensor_map::{BOX_ROWS, Boxed};
use crate::{DType, DeviceError, Mat, MatMut, Packed, Stream};

static MANY: Source = Source {
    name: "linear_many/linear_many.hip",
    text: include_str!("../../csrc/linear_many/linear_many.hip"),
};

/// Threads of a block: a wave fetches, eight multiply.
const THREADS: u32 = 12 * 32;
/// Blocks that share lines of W.
const CLUSTER: usize = 2;
/// Rows of a cluster's tile.
const TILE_ROWS: usize = 256;
/// Lines of W of a tile: half of them gates with `silu_mul`.
const TILE_LINES: usize = 256;
/// Rows, and lines, of a box.
const HALF: usize = 128;
/// Columns of a step.
const COLUMNS: usize = 64;
/// Four stages, the outputs under way, barriers, and what aligning takes.
const SHARED_BYTES: u32 = 226 << 10;
/// Rows from which what is not stored between product and `silu_mul` shows; with fewer the library is as fast.
const ROWS: usize = 2048;

impl HipDevice {
    /// Whether `rows` rows of `dtype` fill this GPU with tiles.
    pub(super) fn fits_many(&self, rows: usize, dtype: DType, w: &Packed) -> bool {
        let half = dtype == self.half() && w.dtype() == self.half();
        let whole = w.k().is_multiple_of(COLUMNS) && w.n().is_multiple_of(16) && w.k() != 0;
        let tiles = rows.div_ceil(TILE_ROWS) * w.n().div_ceil(TILE_LINES);
        half && whole
            && rows >= ROWS
            && self.has_room_for_many()
            && fills(tiles, self.multiprocessors() as usize / CLUSTER)
    }

    /// Whether this GPU has warpgroups and what a block of them needs.
    pub(super) fn has_room_for_many(&self) -> bool {
        self.shared_bytes() >= SHARED_BYTES && self.multiplies_in_groups()
    }

    /// Whether the copy engine reaches the rows of both.
    pub(super) fn reaches(&self, y: &MatMut<'_>, x: Mat<'_>) -> bool {
        y.dtype() == self.half() && wide(x) && wide(y.as_ref())
    }

    /// `y = x Wᵀ`, or with `gated` `silu(gate) · up` of it, in the 16-bit type; shapes have been checked, rows of x and y
    /// are `wide`. A row has the same bits in any company.
    pub(super) fn many(
        &self,
        s: &Stream,
        mut y: MatMut<'_>,
        x: Mat<'_>,
        w: Lines,
        gated: bool,
    ) -> Result<(), DeviceError> {
        let kernel = self.kernel(&MANY, "linear_many", &[("GATED", u32::from(gated))])?;
        let (rows, y_stride, outputs) = (x.rows(), y.stride(), y.cols());
        let boxed = |matrix, rows, columns, stride, box_rows| {
            self.boxes_of(&Boxed { matrix, rows, columns, stride, box_rows })
        };
        let y_map = boxed(y.as_mut_ptr().cast_const(), rows, outputs, y_stride, BOX_ROWS)?;
        let x_map = boxed(x.as_ptr(), rows, w.k, x.stride(), HALF)?;
        let w_map = boxed(w.at, w.n, w.k, w.k, HALF)?;
        let launch =
            Launch::new(kernel, (self.many_blocks(rows, w.n), 1, 1), THREADS, SHARED_BYTES)
                .out(&mut y)
                .arg(x)
                .arg_ptr(w.at)
                .record(&y_map.0)
                .record(&x_map.0)
                .record(&w_map.0);
        let launch = sizes(launch, (rows, x.stride()), w, y_stride as u32);
        // SAFETY: the caller compared the shapes; rows begin on 16 bytes.
        unsafe { launch.overlaps_predecessor().go(self, s) }
    }

    fn many_blocks(&self, rows: usize, lines: usize) -> u32 {
        let tiles = rows.div_ceil(TILE_ROWS) * lines.div_ceil(TILE_LINES);
        (tiles.min(self.multiprocessors() as usize / CLUSTER) * CLUSTER) as u32
    }
}

/// Whether so many tiles keep nine clusters of ten busy.
fn fills(tiles: usize, clusters: usize) -> bool {
    clusters != 0 && tiles * 10 >= tiles.div_ceil(clusters) * clusters * 9
}

#[cfg(test)]
mod tests {
    use super::fills;

    #[test]
    fn a_last_round_of_few_tiles_is_no_fill() {
        for (tiles, clusters, wanted) in
            [(384, 66, true), (66, 66, true), (67, 66, false), (60, 66, true), (40, 66, false)]
        {
            assert_eq!(fills(tiles, clusters), wanted, "{tiles} tiles, {clusters} clusters");
        }
        assert!(!fills(5, 0));
    }
}
