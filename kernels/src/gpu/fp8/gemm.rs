//! More rows against weights in fp8: inputs are quantised first, then both are multiplied in fp8, by the
//! matrix library where it knows such scales, else by `fp8_gemm`.

use device::gpu::{Fp8Scaling, GemmOperands, GemmProblem, GpuError, KernelLaunch, blas_data_type};
use device::{DeviceError, DeviceStream, MatMut, MatRef};
use hip_runtime_sys::BlasDataType;

use super::{BLOCK, GEMM, KERNEL, QUANTIZE, THREADS, known};
use crate::gpu::GpuBackend;
use crate::{FusedLinear, Linear, LinearFusion, PackedMatrix, PackedScales};

/// Rows of x and of `W` in a tile, as `GEMM` in fp8_gemm.hip.
const TILE_SIDE: usize = 64;
/// The library takes multiples of it, of rows and of outputs; rows are padded.
const LIBRARY_UNIT: usize = 16;

/// Quantised inputs, padded to whole units of rows, in scratch memory.
pub(in super::super) struct QuantizedRows {
    /// `[padded, K]`.
    pub(in super::super) x: *mut u8,
    /// Blocks of columns outermost, `padded` between them; or one a row.
    pub(in super::super) scales: *mut u8,
    /// Rows that are real; those behind them are zeros.
    pub(in super::super) rows: usize,
    pub(in super::super) padded: usize,
    /// Scratch memory for the results of all rows; null where they go to their own place.
    out: *mut u8,
    /// Room for a bias.
    bias: *mut u8,
}

impl GpuBackend {
    /// `y = x Wᵀ + bias` for shapes that have been checked.
    pub(in super::super) fn fp8_linear(
        &self,
        s: &DeviceStream,
        op: Linear<'_>,
    ) -> Result<(), DeviceError> {
        let Linear { y, x, weight: w, bias } = op;
        if self.fits_fp8_small_m(x.rows(), x.dtype(), w) {
            return self.fp8_gemm_small_m(
                s,
                FusedLinear {
                    y,
                    x,
                    weight: w,
                    fusion: &LinearFusion { bias, ..LinearFusion::default() },
                },
            );
        }
        let to = self.quantized_input_scratch(s, x.rows(), &y, w)?;
        let channels = known(w)?.rows == 1;
        self.quantize_rows(s, [to.x, to.scales], x, to.padded, channels)?;
        self.fp8_product(s, y, &to, w, bias)
    }

    /// `y = x Wᵀ + bias` for x that lies there.
    pub(super) fn fp8_product(
        &self,
        s: &DeviceStream,
        mut y: MatMut<'_>,
        x: &QuantizedRows,
        w: &PackedMatrix,
        bias: Option<MatRef<'_>>,
    ) -> Result<(), DeviceError> {
        let scales = known(w)?;
        if let Some(scaling) = self.scaling(w, scales) {
            match self.fp8_library(s, y.reborrow(), x, (w, scales, scaling), bias) {
                // It does not take the product, or is too old to know such scales.
                Err(DeviceError::Gpu(GpuError::Blas { .. })) => {}
                result => return result,
            }
        }
        self.fp8_gemm(s, y, x, (w, scales), bias)
    }

    /// How the library must read the scales, if it can.
    fn scaling(&self, w: &PackedMatrix, scales: &PackedScales) -> Option<Fp8Scaling> {
        self.matrix_library().filter(|library| library.supports_fp8_scales())?;
        let units = w.n().is_multiple_of(LIBRARY_UNIT) && w.k().is_multiple_of(LIBRARY_UNIT);
        match scales.rows {
            _ if !units => None,
            1 => Some(Fp8Scaling::Vectors),
            BLOCK if w.k().is_multiple_of(BLOCK) => Some(Fp8Scaling::Blocks),
            _ => None,
        }
    }

    /// Scratch memory for `rows` rows of inputs.
    pub(super) fn quantized_input_scratch(
        &self,
        s: &DeviceStream,
        rows: usize,
        y: &MatMut<'_>,
        w: &PackedMatrix,
    ) -> Result<QuantizedRows, DeviceError> {
        let padded = rows.next_multiple_of(LIBRARY_UNIT);
        // Rows behind the last one are computed as well, in the result's own memory where that has room.
        let in_place = y.row_capacity() >= padded && y.stride() == w.n();
        let spare = if in_place { 0 } else { padded * w.n() * y.dtype().bytes() };
        let line = |bytes: usize| bytes.next_multiple_of(256);
        let per_row = if known(w)?.rows == 1 { 1 } else { w.k().div_ceil(BLOCK) };
        let sizes = [line(padded * w.k()), line(padded * per_row * 4), line(w.n() * 4)];
        let first = self.scratch(s, sizes.iter().sum::<usize>() + spare)?;
        // SAFETY: inside the scratch memory that was just asked for.
        let at = |n: usize| unsafe { first.add(sizes[..n].iter().sum()) };
        let out = if in_place { std::ptr::null_mut() } else { at(3) };
        Ok(QuantizedRows { x: first, scales: at(1), rows, padded, bias: at(2), out })
    }

    /// `x` and zeros up to `padded` rows, in fp8 with scales of blocks or of rows, to scratch memory for both.
    pub(super) fn quantize_rows(
        &self,
        s: &DeviceStream,
        [to, scales]: [*mut u8; 2],
        x: MatRef<'_>,
        padded: usize,
        channels: bool,
    ) -> Result<(), DeviceError> {
        let defines = [("CHANNELS", u32::from(channels))];
        let kernel = self.kernel(&QUANTIZE, "fp8_quantize_rows", &defines)?;
        let launch = KernelLaunch::new(kernel, (padded as u32, 1, 1), THREADS, 0)
            .arg_ptr(to)
            .arg_ptr(scales)
            .arg(x)
            .u32(x.rows() as u32)
            .u32(x.cols() as u32)
            .u32(x.stride() as u32)
            .u32(padded as u32);
        // SAFETY: scratch memory of these sizes; the caller compared the shapes.
        unsafe { launch.overlaps_predecessor().launch(self, s) }
    }

    fn fp8_library(
        &self,
        s: &DeviceStream,
        mut y: MatMut<'_>,
        x: &QuantizedRows,
        (w, scales, scaling): (&PackedMatrix, &PackedScales, Fp8Scaling),
        bias: Option<MatRef<'_>>,
    ) -> Result<(), DeviceError> {
        let Some(library) = self.matrix_library() else {
            return Err(GpuError::NoKernel { kernel: KERNEL }.into());
        };
        let whole = x.out.is_null();
        let product = GemmProblem {
            m: x.padded,
            n: w.n(),
            k: w.k(),
            strides: (w.k(), if whole { y.stride() } else { w.n() }),
            input: BlasDataType::E4M3,
            output: blas_data_type(KERNEL, y.dtype())?,
            scaling,
            bias: bias.is_some(),
            aligned: true,
        };
        if let Some(bias) = bias {
            self.cast(s, x.bias, y.dtype(), bias)?;
        }
        let operands = GemmOperands {
            y: if whole { y.as_mut_ptr() } else { x.out },
            x: x.x,
            w: w.as_ptr(),
            bias: x.bias,
            scales: [scales.buffer.as_ptr(), x.scales],
        };
        // SAFETY: the caller compared the shapes; rows behind the last one go to scratch memory.
        unsafe { library.multiply(self.runtime(), s, &product, operands) }?;
        self.runtime().launched(s, "library_product")?;
        if whole {
            return Ok(());
        }
        // SAFETY: the rows that were just computed, which lie behind each other.
        let rows = unsafe { MatRef::from_raw(x.out, y.dtype(), x.rows, w.n(), w.n()) };
        self.copy_all(s, y, rows)
    }

    fn fp8_gemm(
        &self,
        s: &DeviceStream,
        mut y: MatMut<'_>,
        x: &QuantizedRows,
        (w, scales): (&PackedMatrix, &PackedScales),
        bias: Option<MatRef<'_>>,
    ) -> Result<(), DeviceError> {
        let channels = scales.rows == 1;
        let defines =
            [("OUT_F32", self.act_f32(KERNEL, y.dtype())?), ("CHANNELS", u32::from(channels))];
        let kernel = self.kernel(&GEMM, "fp8_gemm", &defines)?;
        let grid = (w.n().div_ceil(TILE_SIDE) as u32, x.rows.div_ceil(TILE_SIDE) as u32, 1);
        let y_stride = y.stride() as u32;
        let launch = KernelLaunch::new(kernel, grid, THREADS, 0)
            .out(&mut y)
            .arg_ptr(x.x)
            .arg_ptr(x.scales)
            .arg_ptr(w.as_ptr())
            .arg_ptr(scales.buffer.as_ptr())
            .arg_or_null(bias)
            .u32(x.rows as u32)
            .u32(w.n() as u32)
            .u32(w.k() as u32)
            .u32(y_stride)
            .u32(x.padded as u32)
            .u32(scales.rows as u32)
            .u32(scales.stride as u32);
        // SAFETY: the caller compared the shapes; scratch memory has the sizes of `quantise`.
        unsafe { launch.overlaps_predecessor().launch(self, s) }
    }
}
