//! Products of many rows whose inputs are quantised by what makes them, so that nobody stores and reads them in 16 bits.

use super::super::check::{check_dtype, check_size};
use super::super::device::HipDevice;
use super::super::gemm::check_wide;
use super::{BLOCK, KERNEL};
use crate::{Before, DType, DeviceError, Mat, MatMut, Packed, Stream};

/// Inputs of which a block of the norm holds a row in registers.
const NORMED_COLUMNS: usize = 16384;

impl HipDevice {
    /// As `Kernels::joins`.
    pub(in super::super) fn joins_fp8(&self, rows: usize, dtype: DType, w: &Packed) -> bool {
        let blocks =
            w.scales().is_some_and(|scales| scales.rows > 1) && w.k().is_multiple_of(BLOCK);
        let many = rows > 0 && dtype == self.half() && !self.fits_fp8_few(rows, dtype, w);
        blocks && many && w.k() <= NORMED_COLUMNS
    }

    /// As `Kernels::linear_after`.
    pub(in super::super) fn fp8_after(
        &self,
        s: &Stream,
        y: MatMut<'_>,
        before: Before<'_>,
        w: &Packed,
        bias: Option<Mat<'_>>,
    ) -> Result<(), DeviceError> {
        check(self.half(), &y, &before, w)?;
        if !self.joins_fp8(y.rows(), self.half(), w) {
            let (what, dtype) = ("weight", w.dtype());
            return Err(DeviceError::Unsupported { kernel: KERNEL, what, dtype });
        }
        let to = self.room_for_inputs(s, y.rows(), &y, w)?;
        match before {
            Before::AddNorm { x, delta, norm, eps } => {
                self.add_norm_fp8(s, &to, x, delta, (norm, eps))?;
            }
            Before::SiluMul(x) => self.silu_mul_fp8(s, &to, x)?,
        }
        self.fp8_product(s, y, &to, w, bias)
    }
}

fn check(half: DType, y: &MatMut<'_>, before: &Before<'_>, w: &Packed) -> Result<(), DeviceError> {
    check_size(KERNEL, "rows", y.rows(), before.rows())?;
    check_size(KERNEL, "outputs", y.cols(), w.n())?;
    let inputs = match before {
        Before::AddNorm { x, delta, norm, .. } => {
            check_size(KERNEL, "rows of the addend", delta.rows(), x.rows())?;
            check_size(KERNEL, "inputs", x.cols(), w.k())?;
            check_size(KERNEL, "norm", norm.cols(), w.k())?;
            vec![x.as_ref(), *delta, *norm]
        }
        Before::SiluMul(x) => {
            check_size(KERNEL, "inputs", x.cols(), 2 * w.k())?;
            vec![*x]
        }
    };
    for x in inputs {
        check_dtype(KERNEL, "input", x.dtype(), half)?;
        check_wide(x)?;
    }
    Ok(())
}
