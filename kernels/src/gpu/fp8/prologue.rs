//! fp8 GEMM for many rows with a fused prologue: the preceding op (norm or `silu_mul`) quantises its own
//! output to fp8, so that no 16-bit output is written to memory and read again.

use device::{DType, DeviceError, DeviceStream, MatMut, check_dtype, check_size};

use super::super::gemm::check_16_byte_rows;
use super::gemm::QuantizedLinear;
use super::{BLOCK, KERNEL};
use crate::gpu::GpuBackend;
use crate::{
    ActivationScaling, GpuKernel, LinearPrologue, PackedMatrix, PackedScales, PrologueLinear,
};

/// Maximum number of columns of a row that a block of the norm kernel keeps in registers.
const NORMED_COLUMNS: usize = 16384;

impl GpuBackend {
    /// Whether [`PrologueLinear`](crate::PrologueLinear) supports `rows` rows of type `dtype` and weights
    /// `w`.
    pub(crate) fn fuses_fp8_prologue(&self, rows: usize, dtype: DType, w: &PackedMatrix) -> bool {
        let is_static = |scales: &PackedScales| {
            matches!(scales.activation_scaling, ActivationScaling::Static(_))
        };
        let has_blocks = |scales: &PackedScales| scales.rows > 1 && !is_static(scales);
        let blocks = w.scales().is_some_and(has_blocks) && w.k().is_multiple_of(BLOCK);
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
            LinearPrologue::SiluMul(x) => gpu.silu_mul_fp8(s, &to, x)?,
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
            vec![x.as_ref(), *delta, *norm]
        }
        LinearPrologue::SiluMul(x) => {
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
