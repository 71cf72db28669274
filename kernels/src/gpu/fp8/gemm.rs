//! fp8 GEMM for more than 16 rows (W8A8): inputs are quantised, then multiplied by BLASLt (cuBLASLt or
//! hipBLASLt) if it supports the scales, otherwise by the kernel `fp8_gemm`.

use device::gpu::{Fp8Scaling, GemmOperands, GemmProblem, GpuError, KernelLaunch, blas_data_type};
use device::{Buffer, DeviceError, DeviceStream, MatMut, MatRef};
use hip_runtime_sys::BlasDataType;

use super::{BLOCK, GEMM, KERNEL, QUANTIZE, THREADS, weight_scales};
use crate::gpu::GpuBackend;
use crate::{ActivationScaling, FusedLinear, Linear, LinearFusion, PackedMatrix, PackedScales};

/// Number of rows of x and of `W` per tile of the kernel `fp8_gemm`; must match `TILE` in fp8_gemm/tile.h.
const TILE_ROWS: usize = 64;
/// BLASLt requires that the numbers of rows, inputs and outputs are multiples of this number. Rows are
/// padded; the GEMM kernel `fp8_gemm` is used if inputs or outputs are not a multiple.
const BLASLT_UNIT: usize = 16;
/// Maximum number of rows for which weights with one scale and static activation scales are multiplied with
/// block scales. On an H200, linear layers take 1.12 times as long with a scale per output at 64 rows; whole prefill steps
/// take 1.06 times as long at 199 tokens and 0.95 times at 865 (tests/bench/results/h200/speed.md).
const BLOCK_SCALED_ROWS: usize = 256;

/// fp8-quantised inputs of a GEMM in scratch memory, with rows padded to a multiple of `BLASLT_UNIT`.
pub(in super::super) struct QuantizedRows {
    /// fp8 values, `[padded, inputs]`.
    pub(in super::super) x: *mut u8,
    /// f32 scales: block scales `[inputs / 128, padded]`, or one scale per row. Static scales have the form of
    /// blocks, whose first row is also the form of one scale per row.
    pub(in super::super) scales: *mut u8,
    /// Number of input rows. Rows from this index on, up to `padded`, are zeros.
    pub(in super::super) rows: usize,
    pub(in super::super) padded: usize,
    /// Scratch memory for the outputs of all padded rows; null if the GEMM can write them to `y` directly.
    out: *mut u8,
    /// Scratch memory for a copy of the bias in the type of `y`, which BLASLt requires.
    bias: *mut u8,
    /// How the scales are computed from the inputs.
    pub(in super::super) scaling: ActivationScaling,
}

/// How the rows of a matrix are quantised to fp8: one scale per row or one per group of 128 columns, and how
/// scales are computed.
#[derive(Debug, Clone, Copy)]
pub(super) struct RowQuantizationScheme {
    /// Whether each row has a single scale; otherwise each group of 128 columns of a row has its own scale.
    pub(super) channels: bool,
    pub(super) scaling: ActivationScaling,
}

/// The scales with which BLASLt multiplies, in one of their forms.
#[derive(Clone, Copy)]
struct BlasLtScales<'a> {
    scaling: Fp8Scaling,
    /// f32 scales of the weights on the device.
    weights: &'a Buffer,
}

/// Operands of a linear layer with quantised inputs, `y = x Wᵀ + bias`.
pub(super) struct QuantizedLinear<'a> {
    /// Output, `[rows, outputs]`.
    pub(super) y: MatMut<'a>,
    /// Quantised inputs, `[rows, inputs]`.
    pub(super) x: &'a QuantizedRows,
    /// fp8 weights, `[outputs, inputs]`.
    pub(super) w: &'a PackedMatrix,
    /// Bias, f32 `[outputs]`.
    pub(super) bias: Option<MatRef<'a>>,
}

impl GpuBackend {
    /// Computes `y = x Wᵀ + bias` with fp8 weights; the caller has checked the shapes.
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
        let channels = weight_scales(w)?.rows == 1;
        let row_scales = RowQuantizationScheme { channels, scaling: to.scaling };
        self.quantize_rows(s, [to.x, to.scales], x, to.padded, row_scales)?;
        self.fp8_gemm_quantized(s, QuantizedLinear { y, x: &to, w, bias })
    }

    /// Computes `y = x Wᵀ + bias` for inputs that are already quantised.
    pub(super) fn fp8_gemm_quantized(
        &self,
        s: &DeviceStream,
        mut op: QuantizedLinear<'_>,
    ) -> Result<(), DeviceError> {
        for scales in self.blaslt_scales(op.w, op.x.padded)?.into_iter().flatten() {
            let attempt = QuantizedLinear { y: op.y.reborrow(), x: op.x, w: op.w, bias: op.bias };
            match self.fp8_blaslt(s, attempt, scales) {
                // BLASLt does not support the GEMM, or its version is too old for these scales: other scales
                // or `fp8_gemm` remain.
                Err(DeviceError::Gpu(GpuError::Blas { .. })) => {}
                result => return result,
            }
        }
        self.fp8_gemm(s, op)
    }

    /// Returns the scales with which BLASLt may multiply `rows` rows by `w`, fastest first.
    fn blaslt_scales<'a>(
        &self,
        w: &'a PackedMatrix,
        rows: usize,
    ) -> Result<[Option<BlasLtScales<'a>>; 2], DeviceError> {
        let scales = weight_scales(w)?;
        let blocks = scales.blocks.as_ref().filter(|_| rows <= BLOCK_SCALED_ROWS);
        let blocks = blocks.map(|weights| BlasLtScales { scaling: Fp8Scaling::Blocks, weights });
        let scaling = self.scaling(w, scales);
        let stored = scaling.map(|scaling| BlasLtScales { scaling, weights: &scales.buffer });
        Ok([blocks, stored])
    }

    /// Returns the scaling mode of BLASLt for the scales of `w`; `None` if BLASLt does not support them.
    fn scaling(&self, w: &PackedMatrix, scales: &PackedScales) -> Option<Fp8Scaling> {
        let blaslt = self.blaslt()?;
        let units = w.n().is_multiple_of(BLASLT_UNIT) && w.k().is_multiple_of(BLASLT_UNIT);
        let scaling = match scales.rows {
            _ if !units => None,
            1 => Some(Fp8Scaling::Vectors),
            BLOCK if w.k().is_multiple_of(BLOCK) => Some(Fp8Scaling::Blocks),
            _ => None,
        };
        scaling.filter(|&scaling| blaslt.supports_fp8_scaling(scaling))
    }

    /// Whether the fp8 format of this GPU is FNUZ; see `csrc/dev/fp8.h`.
    fn has_fnuz_fp8(&self) -> bool {
        self.arch() == "gfx942"
    }

    /// See `KernelBackend::fp8_range_factor`.
    pub(crate) fn fp8_range_factor(&self) -> f32 {
        if self.has_fnuz_fp8() { 2.0 } else { 1.0 }
    }

    /// Returns the fp8 format of this GPU.
    fn fp8_data_type(&self) -> BlasDataType {
        if self.has_fnuz_fp8() { BlasDataType::E4M3Fnuz } else { BlasDataType::E4M3 }
    }

    /// Allocates scratch memory for `rows` rows of quantised inputs, and for the outputs of these rows if `y`
    /// has no capacity for the padding rows.
    pub(super) fn quantized_input_scratch(
        &self,
        s: &DeviceStream,
        rows: usize,
        y: &MatMut<'_>,
        w: &PackedMatrix,
    ) -> Result<QuantizedRows, DeviceError> {
        let padded = rows.next_multiple_of(BLASLT_UNIT);
        // BLASLt computes padding rows as well: they can be written to `y` only if its row capacity suffices.
        let in_place = y.row_capacity() >= padded && y.stride() == w.n();
        let output_bytes = if in_place { 0 } else { padded * w.n() * y.dtype().bytes() };
        let padded_bytes = |bytes: usize| bytes.next_multiple_of(256);
        let w_scales = weight_scales(w)?;
        let scaling = w_scales.activation_scaling;
        let has_row_scales = w_scales.rows == 1 && scaling.static_scale().is_none();
        let per_row = if has_row_scales { 1 } else { w.k().div_ceil(BLOCK) };
        let sizes = [
            padded_bytes(padded * w.k()),
            padded_bytes(padded * per_row * 4),
            padded_bytes(w.n() * 4),
        ];
        let first = self.scratch(s, sizes.iter().sum::<usize>() + output_bytes)?;
        // SAFETY: the address is inside the scratch memory allocated above.
        let at = |n: usize| unsafe { first.add(sizes[..n].iter().sum()) };
        let out = if in_place { std::ptr::null_mut() } else { at(3) };
        Ok(QuantizedRows { x: first, scales: at(1), rows, padded, bias: at(2), out, scaling })
    }

    /// Quantises `x` to fp8 with `row_scales`, and pads it with zeros to `padded` rows; `to` and `scales` are
    /// scratch memory.
    pub(super) fn quantize_rows(
        &self,
        s: &DeviceStream,
        [to, scales]: [*mut u8; 2],
        x: MatRef<'_>,
        padded: usize,
        row_scales: RowQuantizationScheme,
    ) -> Result<(), DeviceError> {
        let RowQuantizationScheme { channels, scaling } = row_scales;
        let static_scale = scaling.static_scale();
        let channels = channels && static_scale.is_none();
        let defines = [("CHANNELS", u32::from(channels)), ("SCALING", scaling.define())];
        let symbol =
            if static_scale.is_some() { "fp8_quantize_rows_static" } else { "fp8_quantize_rows" };
        let kernel = self.kernel(&QUANTIZE, symbol, &defines)?;
        let mut launch = KernelLaunch::new(kernel, [padded as u32, 1, 1], THREADS, 0)
            .arg_ptr(to)
            .arg_ptr(scales)
            .arg(x)
            .u32(x.rows() as u32)
            .u32(x.cols() as u32)
            .u32(x.stride() as u32)
            .u32(padded as u32);
        if let Some(scale) = static_scale {
            launch = launch.f32(scale);
        }
        // SAFETY: scratch memory has these sizes; the caller checked the shapes.
        unsafe { launch.overlaps_predecessor().launch(self, s) }
    }

    fn fp8_blaslt(
        &self,
        s: &DeviceStream,
        op: QuantizedLinear<'_>,
        scales: BlasLtScales<'_>,
    ) -> Result<(), DeviceError> {
        let QuantizedLinear { mut y, x, w, bias } = op;
        let Some(blaslt) = self.blaslt() else {
            return Err(GpuError::NoKernel { kernel: KERNEL }.into());
        };
        let in_place = x.out.is_null();
        let problem = GemmProblem {
            m: x.padded,
            n: w.n(),
            k: w.k(),
            x_stride: w.k(),
            y_stride: if in_place { y.stride() } else { w.n() },
            input: self.fp8_data_type(),
            output: blas_data_type(KERNEL, y.dtype())?,
            scaling: scales.scaling,
            bias: bias.is_some(),
            aligned: true,
        };
        if let Some(bias) = bias {
            self.cast(s, x.bias, y.dtype(), bias)?;
        }
        let operands = GemmOperands {
            y: if in_place { y.as_mut_ptr() } else { x.out },
            x: x.x,
            w: w.as_ptr(),
            bias: x.bias,
            scales: [scales.weights.as_ptr(), x.scales],
        };
        // SAFETY: the caller checked the shapes; padding rows are within the row capacity of `y` or in
        // scratch memory.
        unsafe { blaslt.multiply(self.runtime(), s, &problem, operands) }?;
        self.runtime().launched(s, "blaslt_gemm")?;
        if in_place {
            return Ok(());
        }
        // SAFETY: the rows were computed above and are contiguous.
        let rows = unsafe { MatRef::from_raw(x.out, y.dtype(), x.rows, w.n(), w.n()) };
        self.copy_all(s, y, rows)
    }

    fn fp8_gemm(&self, s: &DeviceStream, op: QuantizedLinear<'_>) -> Result<(), DeviceError> {
        let QuantizedLinear { mut y, x, w, bias } = op;
        let scales = weight_scales(w)?;
        let channels = scales.rows == 1;
        let defines =
            [("OUT_F32", self.act_f32(KERNEL, y.dtype())?), ("CHANNELS", u32::from(channels))];
        let kernel = self.kernel(&GEMM, "fp8_gemm", &defines)?;
        let grid = [w.n().div_ceil(TILE_ROWS) as u32, x.rows.div_ceil(TILE_ROWS) as u32, 1];
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
        // SAFETY: the caller checked the shapes; scratch memory has the sizes of `quantized_input_scratch`.
        unsafe { launch.overlaps_predecessor().launch(self, s) }
    }
}
