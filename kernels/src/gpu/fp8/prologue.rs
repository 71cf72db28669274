//! fp8 GEMM for many rows with a fused prologue: the preceding op (norm or gated activation) quantises its own
//! output to fp8, so that no 16-bit output is written to memory and read again.

use device::{DType, DeviceError, DeviceStream, MatMut, check_dtype, check_size};

use super::super::gemm::check_16_byte_rows;
use super::gemm::QuantizedLinear;
use super::{BLOCK, KERNEL};
use crate::gpu::GpuBackend;
use crate::op::check_norm_dtype;
use crate::{
    ActivationScaling, GpuKernel, LinearPrologue, PackedMatrix, PackedScales, PrologueLinear,
};

/// Maximum number of columns of a row that a block of the norm kernel keeps in registers.
const NORMED_COLUMNS: usize = 16384;

impl GpuBackend {
    /// Whether [`PrologueLinear`](crate::PrologueLinear) supports `rows` rows of type `dtype` and weights
    /// `w`.
    pub(crate) fn fuses_fp8_prologue(&self, rows: usize, dtype: DType, w: &PackedMatrix) -> bool {
        // A thread block of the preceding op has the largest magnitude of a block of columns, but not of a whole
        // row: it can compute block scales, or use a static scale.
        let fuses = |scales: &PackedScales| match scales.activation_scaling {
            ActivationScaling::Static(_) => scales.rows == 1,
            ActivationScaling::Dynamic | ActivationScaling::PowerOfTwo => scales.rows > 1,
        };
        let blocks = w.scales().is_some_and(fuses) && w.k().is_multiple_of(BLOCK);
        let is_large_m =
            rows > 0 && dtype == self.half_dtype() && !self.fits_fp8_small_m(rows, dtype, w);
        blocks && is_large_m && w.k() <= NORMED_COLUMNS
    }
}

impl GpuKernel for PrologueLinear<'_> {
    fn launch(self, gpu: &GpuBackend, s: &DeviceStream) -> Result<(), DeviceError> {
        let Self { y, prologue, weight: w, bias } = self;
        check(gpu.half_dtype(), &y, &prologue, w)?;
        if !gpu.fuses_fp8_prologue(y.rows(), gpu.half_dtype(), w) {
            let (what, dtype) = ("weight", w.dtype());
            return Err(DeviceError::Unsupported { kernel: KERNEL, what, dtype });
        }
        let to = gpu.quantized_input_scratch(s, y.rows(), &y, w)?;
        match prologue {
            LinearPrologue::AddNorm { x, delta, norm, eps } => {
                gpu.add_norm_fp8(s, &to, x, delta, norm, eps)?;
            }
            LinearPrologue::Gated { x, activation } => {
                gpu.gated_activation_fp8(s, &to, x, activation)?;
            }
        }
        gpu.fp8_gemm_quantized(s, QuantizedLinear { y, x: &to, w, bias })
    }
}

fn check(
    half: DType,
    y: &MatMut<'_>,
    prologue: &LinearPrologue<'_>,
    w: &PackedMatrix,
) -> Result<(), DeviceError> {
    check_size(KERNEL, "rows", y.rows(), prologue.rows())?;
    check_size(KERNEL, "outputs", y.cols(), w.n())?;
    let inputs = match prologue {
        LinearPrologue::AddNorm { x, delta, norm, .. } => {
            check_size(KERNEL, "rows of the addend", delta.rows(), x.rows())?;
            check_size(KERNEL, "inputs", x.cols(), w.k())?;
            check_size(KERNEL, "norm", norm.cols(), w.k())?;
            check_norm_dtype(KERNEL, "norm", norm.dtype(), half)?;
            check_16_byte_rows(*norm)?;
            vec![x.as_ref(), *delta]
        }
        LinearPrologue::Gated { x, .. } => {
            check_size(KERNEL, "inputs", x.cols(), 2 * w.k())?;
            vec![*x]
        }
    };
    for x in inputs {
        check_dtype(KERNEL, "input", x.dtype(), half)?;
        check_16_byte_rows(x)?;
    }
    Ok(())
}
