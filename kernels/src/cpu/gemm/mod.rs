//! `y = x Wᵀ + bias` over packed weights.
//!
//! Work is divided by panels of 32 output columns, never along `K`: every output element is one sum in
//! ascending `k`, computed by one thread, whatever the number of rows, so a row's result is the same
//! alone and in any batch. A panel is read from memory once and meets all rows while it is in cache.

mod portable;

use super::device::{CpuDevice, check_dtype, check_size, for_float};
use super::share::Rows;
use crate::dtype::Float;
use crate::{DType, DeviceError, Mat, MatMut, PANEL_COLUMNS, Packed};

const KERNEL: &str = "linear";
/// Rows of a tile: 12 rows of two 16-lane sums each fill 24 of 32 vector registers.
const TILE_ROWS: usize = 12;

/// Sums of one tile.
type Tile = [[f32; PANEL_COLUMNS]; TILE_ROWS];

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
            return self.linear_rows_of(&mut y, wide, w, bias);
        }
        check_dtype(KERNEL, "input", x.dtype(), w.dtype())?;
        self.linear_rows_of(&mut y, x, w, bias)
    }

    fn linear_rows_of(
        &self,
        y: &mut MatMut<'_>,
        x: Mat<'_>,
        w: &Packed,
        bias: Option<&[f32]>,
    ) -> Result<(), DeviceError> {
        for_float!(KERNEL, y.dtype(), T => self.multiply::<T>(y, x, w, bias));
        Ok(())
    }

    fn multiply<T: Float>(&self, y: &mut MatMut<'_>, x: Mat<'_>, w: &Packed, bias: Option<&[f32]>) {
        let (rows, n) = (x.rows(), w.n());
        let out = Rows::<T>::new(y);
        self.threads().split(w.panels(), 1, 2, &|panels| {
            let mut sums: Tile = [[0.0; PANEL_COLUMNS]; TILE_ROWS];
            for p in panels {
                let from = p * PANEL_COLUMNS;
                let cols = PANEL_COLUMNS.min(n - from);
                for r in (0..rows).step_by(TILE_ROWS) {
                    let part = x.rows_from(r, TILE_ROWS.min(rows - r));
                    portable::tile(&mut sums, part, w, p);
                    for (i, sums) in sums.iter().enumerate().take(part.rows()) {
                        // SAFETY: each panel's columns belong to one thread.
                        let y = unsafe { out.part(r + i, from, cols) };
                        store(y, sums, bias.map(|b| &b[from..from + cols]));
                    }
                }
            }
        });
    }
}

fn store<T: Float>(y: &mut [T], sums: &[f32; PANEL_COLUMNS], bias: Option<&[f32]>) {
    match bias {
        Some(bias) => {
            for ((y, s), b) in y.iter_mut().zip(sums).zip(bias) {
                *y = T::store(s + b);
            }
        }
        None => {
            for (y, s) in y.iter_mut().zip(sums) {
                *y = T::store(*s);
            }
        }
    }
}
