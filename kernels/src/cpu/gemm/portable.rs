//! Plain Rust tiles: the reference of the vector paths.

use super::Tile;
use crate::dtype::{Float, bf16};
use crate::{DType, Mat, PANEL_COLUMNS, Packed};

/// `sums[r] = x[r] · panel` for the rows of `x`, at most a tile of them.
pub(super) fn tile(sums: &mut Tile, x: Mat<'_>, w: &Packed, panel: usize) {
    let len = PANEL_COLUMNS * w.k();
    for (r, sums) in sums.iter_mut().enumerate().take(x.rows()) {
        // SAFETY: a panel is `len` initialised elements of the packed matrix, which is borrowed.
        unsafe {
            if w.dtype() == DType::BF16 {
                let panel = std::slice::from_raw_parts(w.panel(panel).cast::<bf16>(), len);
                row_of_pairs(sums, x.row(r), panel);
            } else {
                let panel = std::slice::from_raw_parts(w.panel(panel).cast::<f32>(), len);
                row(sums, x.row(r), panel);
            }
        }
    }
}

fn row(sums: &mut [f32; PANEL_COLUMNS], x: &[f32], panel: &[f32]) {
    let mut acc = [0.0; PANEL_COLUMNS];
    for (x, line) in x.iter().zip(panel.as_chunks::<PANEL_COLUMNS>().0) {
        for (a, w) in acc.iter_mut().zip(line) {
            *a += x * w;
        }
    }
    *sums = acc;
}

fn row_of_pairs(sums: &mut [f32; PANEL_COLUMNS], x: &[bf16], panel: &[bf16]) {
    let mut acc = [0.0; PANEL_COLUMNS];
    let lines = panel.as_chunks::<{ 2 * PANEL_COLUMNS }>().0;
    for (x, line) in x.as_chunks::<2>().0.iter().zip(lines) {
        let [even, odd] = x.map(Float::load);
        for (a, w) in acc.iter_mut().zip(line.as_chunks::<2>().0) {
            *a += even * w[0].load();
            *a += odd * w[1].load();
        }
    }
    *sums = acc;
}
