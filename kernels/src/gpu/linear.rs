//! Linear layers `y = x Wᵀ + bias` on GPUs, and kernel selection. BLASLt is cuBLASLt on NVIDIA and hipBLASLt
//! on AMD.
//!
//! | W | rows of x | kernel |
//! |---|---|---|
//! | fp8 | any | see `fp8` |
//! | 16-bit | ≤ 16 | `gemm_small_m`: reads the weights once, supports fusion |
//! | 16-bit or f32, at most 4 rows of `W` | > 16 (16-bit), any (f32) | `linear_plain` |
//! | 16-bit | ≤ 128, on sm_90a, few tiles of `W` | `gemm_medium_m`: loads weights before its inputs are ready |
//! | 16-bit | ≥ 2048, with a gate activation, on sm_90a | `gemm_large_m`: WGMMA |
//! | 16-bit | other | BLASLt; without it a built-in kernel |
//! | f32 | ≤ 64, or f32 inputs | built-in: a row of an f32 model has the same result in every batch |
//! | f32 | > 64, 16-bit inputs | BLASLt in f32 if y is f32, else built-in |
//!
//! A built-in kernel computes every GEMM for which the heuristic of BLASLt returns no algorithm.

use device::gpu::{
    Fp8Scaling, GemmOperands, GemmProblem, GpuError, HEURISTIC, KernelLaunch, KernelSource,
    blas_data_type,
};
use device::{DType, DeviceError, DeviceStream, MatMut, MatRef};
use hip_runtime_sys::BlasDataType;

use super::gemm::check_16_byte_rows;
use crate::gpu::GpuBackend;
use crate::{GpuKernel, Linear, PackedMatrix};

static CAST: KernelSource = kernel_source!("cast/cast.hip");

const KERNEL: &str = "linear";
/// Maximum number of rows of `x` for which f32 weights use a built-in kernel instead of BLASLt.
const F32_ROWS: usize = 64;

/// Maximum number of rows of `W` for which the built-in GEMM `linear_plain` replaces BLASLt. cuBLASLt takes 557 µs for one
/// row of `W`, 8,192 rows of `x` and 2,048 columns on an H200; reading `x` takes 8 µs.
const FEW_OUTPUTS: usize = 4;

/// Implementation that computes a linear layer: BLASLt or a built-in kernel.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
enum LinearBackend {
    BlasLt,
    Builtin,
}

impl GpuBackend {
    fn linear_blaslt(&self, s: &DeviceStream, op: Linear<'_>) -> Result<(), DeviceError> {
        let Linear { mut y, x, weight: w, bias } = op;
        let Some(blaslt) = self.blaslt() else {
            return Err(GpuError::NoKernel { kernel: KERNEL }.into());
        };
        let mut problem = GemmProblem {
            m: x.rows(),
            n: w.n(),
            k: w.k(),
            x_stride: x.stride(),
            y_stride: y.stride(),
            input: blas_data_type(KERNEL, w.dtype())?,
            output: blas_data_type(KERNEL, y.dtype())?,
            scaling: Fp8Scaling::None,
            bias: bias.is_some(),
            aligned: true,
        };
        let mut operands = GemmOperands {
            y: y.as_mut_ptr(),
            x: x.as_ptr(),
            w: w.as_ptr(),
            bias: bias.map_or(std::ptr::null(), |b| b.as_ptr()),
            scales: [std::ptr::null(); 2],
        };
        // BLASLt requires that `x` has the type of `W`, and the bias that of `y`: an operand of another type
        // is first converted in scratch memory. Only one of them ever needs it: `x` is converted if `W` is
        // f32; then `y` is f32 as well, and so is every bias.
        if x.dtype() != w.dtype() {
            let converted = self.scratch(s, x.rows() * x.cols() * w.dtype().bytes())?;
            self.cast(s, converted, w.dtype(), x)?;
            (operands.x, problem.x_stride) = (converted, x.cols());
        } else if let Some(bias) = bias.filter(|b| b.dtype() != y.dtype()) {
            let converted = self.scratch(s, bias.cols() * y.dtype().bytes())?;
            self.cast(s, converted, y.dtype(), bias)?;
            operands.bias = converted;
        }
        problem.aligned = is_aligned(&problem, &operands);
        // SAFETY: `check` compared the shapes.
        unsafe { blaslt.multiply(self.runtime(), s, &problem, operands) }?;
        self.runtime().launched(s, "blaslt_gemm")
    }

    /// Writes `x`, converted to `dtype`, contiguously to `to`, which must be large enough for all elements.
    pub(super) fn cast(
        &self,
        s: &DeviceStream,
        to: *mut u8,
        dtype: DType,
        x: MatRef<'_>,
    ) -> Result<(), DeviceError> {
        self.cast_to(s, to, x.cols(), dtype, x)
    }

    /// Copies `x` to `y`, with conversion of the element type.
    pub(super) fn copy_all(
        &self,
        s: &DeviceStream,
        mut y: MatMut<'_>,
        x: MatRef<'_>,
    ) -> Result<(), DeviceError> {
        self.cast_to(s, y.as_mut_ptr(), y.stride(), y.dtype(), x)
    }

    fn cast_to(
        &self,
        s: &DeviceStream,
        to: *mut u8,
        stride: usize,
        dtype: DType,
        x: MatRef<'_>,
    ) -> Result<(), DeviceError> {
        let defines = [
            ("FROM_F32", self.act_f32(KERNEL, x.dtype())?),
            ("TO_F32", self.act_f32(KERNEL, dtype)?),
        ];
        let kernel = self.kernel(&CAST, "cast_rows", &defines)?;
        let grid = [x.rows() as u32, x.cols().div_ceil(1024) as u32, 1];
        let launch = KernelLaunch::new(kernel, grid, 256, 0)
            .overlaps_predecessor()
            .arg_ptr(to)
            .arg(x)
            .u32(x.cols() as u32)
            .u32(stride as u32)
            .u32(x.stride() as u32);
        // SAFETY: the caller guarantees `to`; the arguments match the kernel parameters.
        unsafe { launch.launch(self, s) }
    }
}

impl GpuKernel for Linear<'_> {
    fn launch(self, gpu: &GpuBackend, s: &DeviceStream) -> Result<(), DeviceError> {
        let Self { y, x, weight: w, bias } = self;
        check(gpu.half_dtype(), &y, x, w, bias)?;
        if y.rows() == 0 || y.cols() == 0 {
            return Ok(());
        }
        if w.dtype() == DType::F8E4M3 {
            check_16_byte_rows(x)?;
            return gpu.fp8_linear(s, Linear { y, x, weight: w, bias });
        }
        let mut y = y;
        let uses_builtin_gemm = gpu.fits_small_m(x.rows(), x.dtype(), w)
            || (gpu.fits_medium_m(x.rows(), x.dtype(), w)
                && GpuBackend::is_layout_supported(x, &mut y));
        if !uses_builtin_gemm && w.n() <= FEW_OUTPUTS {
            return gpu.gemm_plain(s, Linear { y, x, weight: w, bias });
        }
        let blaslt = !uses_builtin_gemm && gpu.blaslt().is_some();
        if choose_backend(x.rows(), x.dtype(), w.dtype(), y.dtype(), blaslt)
            == LinearBackend::BlasLt
        {
            match gpu.linear_blaslt(s, Linear { y: y.reborrow(), x, weight: w, bias }) {
                Err(DeviceError::Gpu(GpuError::Blas { call: HEURISTIC, .. })) => {}
                result => return result,
            }
        }
        gpu.linear_without_blas(s, Linear { y, x, weight: w, bias })
    }
}

/// Chooses between BLASLt and the built-in kernels. `blaslt`: BLASLt is available.
fn choose_backend(
    rows: usize,
    input: DType,
    weight: DType,
    output: DType,
    blaslt: bool,
) -> LinearBackend {
    match (weight, output) {
        _ if !blaslt || input == DType::F32 => LinearBackend::Builtin,
        (DType::F32, DType::F32) if rows > F32_ROWS => LinearBackend::BlasLt,
        (DType::F32, _) => LinearBackend::Builtin,
        _ => LinearBackend::BlasLt,
    }
}

fn check(
    half: DType,
    y: &MatMut<'_>,
    x: MatRef<'_>,
    w: &PackedMatrix,
    bias: Option<MatRef<'_>>,
) -> Result<(), DeviceError> {
    let size = |what, got: usize, expected: usize| {
        let error = DeviceError::Shape { kernel: KERNEL, what, got, expected };
        if got == expected { Ok(()) } else { Err(error) }
    };
    size("rows", y.rows(), x.rows())?;
    size("inputs", x.cols(), w.k())?;
    size("outputs", y.cols(), w.n())?;
    if let Some(bias) = bias {
        size("bias", bias.cols(), w.n())?;
        if bias.dtype() != DType::F32 {
            return Err(DeviceError::Unsupported {
                kernel: KERNEL,
                what: "bias",
                dtype: bias.dtype(),
            });
        }
    }
    let is_supported = match (x.dtype(), w.dtype()) {
        (DType::F32, w) => w == DType::F32,
        (x, DType::F8E4M3) => x == half && w.scales().is_some(),
        (x, w) => x == half && (w == half || w == DType::F32),
    };
    if !is_supported {
        return Err(DeviceError::Unsupported { kernel: KERNEL, what: "input", dtype: x.dtype() });
    }
    if y.dtype() != DType::F32 && y.dtype() != x.dtype() {
        return Err(DeviceError::Unsupported { kernel: KERNEL, what: "output", dtype: y.dtype() });
    }
    Ok(())
}

fn aligned(address: *const u8) -> bool {
    address.addr().is_multiple_of(16)
}

/// Whether addresses and row strides of all operands of a GEMM are multiples of 16 bytes.
fn is_aligned(problem: &GemmProblem, operands: &GemmOperands) -> bool {
    let bytes = |t: BlasDataType| if t == BlasDataType::F32 { 4 } else { 2 };
    let strides = [
        problem.k * bytes(problem.input),
        problem.x_stride * bytes(problem.input),
        problem.y_stride * bytes(problem.output),
    ];
    let addresses = [operands.x, operands.w, operands.y.cast_const()];
    strides.iter().all(|s| s.is_multiple_of(16)) && addresses.iter().all(|a| aligned(*a))
}
