//! `y = x Wᵀ + bias`, and who computes it.
//!
//! | W | rows | by |
//! |---|---|---|
//! | fp8 | any | see `fp8` |
//! | bf16 | ≤ 16 | our own: it reads the weights once, and takes the neighbours along |
//! | bf16 | ≤ 128, on sm_90a, few tiles of `W` | our own: its weights come while the predecessor ends |
//! | bf16 | ≥ 2048, with `silu_mul` | our own by warpgroups, where there are any |
//! | bf16 | more | the matrix library; without one our own |
//! | f32 | ≤ 64, or f32 inputs | our own: a row of an f32 model has one result in every batch |
//! | f32 | more, of bf16 | the matrix library in f32, if y is f32; else our own |
//!
//! What the library does not take, ours does.

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
/// Rows up to which an f32 product is not worth the library.
const F32_ROWS: usize = 64;

/// Who computes a product.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
enum LinearBackend {
    Library,
    Builtin,
}

impl GpuBackend {
    fn linear_library(&self, s: &DeviceStream, op: Linear<'_>) -> Result<(), DeviceError> {
        let Linear { mut y, x, weight: w, bias } = op;
        let Some(library) = self.matrix_library() else {
            return Err(GpuError::NoKernel { kernel: KERNEL }.into());
        };
        let mut product = GemmProblem {
            m: x.rows(),
            n: w.n(),
            k: w.k(),
            strides: (x.stride(), y.stride()),
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
        // Scratch holds x, or the bias, in the type that the library wants: never both, because with an f32
        // weight the result, and so the bias, is f32.
        if x.dtype() != w.dtype() {
            let to = self.scratch(s, x.rows() * x.cols() * w.dtype().bytes())?;
            self.cast(s, to, w.dtype(), x)?;
            (operands.x, product.strides.0) = (to, x.cols());
        } else if let Some(bias) = bias.filter(|b| b.dtype() != y.dtype()) {
            let to = self.scratch(s, bias.cols() * y.dtype().bytes())?;
            self.cast(s, to, y.dtype(), bias)?;
            operands.bias = to;
        }
        product.aligned = is_aligned(&product, &operands);
        // SAFETY: `linear_rows` compared the shapes.
        unsafe { library.multiply(self.runtime(), s, &product, operands) }?;
        self.runtime().launched(s, "library_product")
    }

    /// Writes `x` without gaps to `to`, which is as large as that takes.
    pub(super) fn cast(
        &self,
        s: &DeviceStream,
        to: *mut u8,
        dtype: DType,
        x: MatRef<'_>,
    ) -> Result<(), DeviceError> {
        self.cast_to(s, (to, x.cols()), dtype, x)
    }

    /// Copies rows.
    pub(super) fn copy_all(
        &self,
        s: &DeviceStream,
        mut y: MatMut<'_>,
        x: MatRef<'_>,
    ) -> Result<(), DeviceError> {
        self.cast_to(s, (y.as_mut_ptr(), y.stride()), y.dtype(), x)
    }

    fn cast_to(
        &self,
        s: &DeviceStream,
        (to, stride): (*mut u8, usize),
        dtype: DType,
        x: MatRef<'_>,
    ) -> Result<(), DeviceError> {
        let defines = [
            ("FROM_F32", self.act_f32(KERNEL, x.dtype())?),
            ("TO_F32", self.act_f32(KERNEL, dtype)?),
        ];
        let kernel = self.kernel(&CAST, "cast_rows", &defines)?;
        let grid = (x.rows() as u32, x.cols().div_ceil(1024) as u32, 1);
        let launch = KernelLaunch::new(kernel, grid, 256, 0)
            .overlaps_predecessor()
            .arg_ptr(to)
            .arg(x)
            .u32(x.cols() as u32)
            .u32(stride as u32)
            .u32(x.stride() as u32);
        // SAFETY: the caller vouches for `to`; the arguments are those of the kernel.
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
        let few = gpu.fits_small_m(x.rows(), x.dtype(), w)
            || (gpu.fits_medium_m(x.rows(), x.dtype(), w)
                && GpuBackend::is_layout_supported(x, &mut y));
        let library = !few && gpu.matrix_library().is_some();
        if choose_backend(x.rows(), x.dtype(), w.dtype(), y.dtype(), library)
            == LinearBackend::Library
        {
            match gpu.linear_library(s, Linear { y: y.reborrow(), x, weight: w, bias }) {
                Err(DeviceError::Gpu(GpuError::Blas { call: HEURISTIC, .. })) => {}
                result => return result,
            }
        }
        gpu.linear_without_blas(s, Linear { y, x, weight: w, bias })
    }
}

/// The one place that chooses.
fn choose_backend(
    rows: usize,
    input: DType,
    weight: DType,
    output: DType,
    library: bool,
) -> LinearBackend {
    match (weight, output) {
        _ if !library || input == DType::F32 => LinearBackend::Builtin,
        (DType::F32, DType::F32) if rows > F32_ROWS => LinearBackend::Library,
        (DType::F32, _) => LinearBackend::Builtin,
        _ => LinearBackend::Library,
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
    let known = match (x.dtype(), w.dtype()) {
        (DType::F32, w) => w == DType::F32,
        (x, DType::F8E4M3) => x == half && w.scales().is_some(),
        (x, w) => x == half && (w == half || w == DType::F32),
    };
    if !known {
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

/// Whether the library may load 16 bytes at a time.
fn is_aligned(product: &GemmProblem, operands: &GemmOperands) -> bool {
    let bytes = |t: BlasDataType| if t == BlasDataType::F32 { 4 } else { 2 };
    let (x_stride, y_stride) = product.strides;
    let strides = [
        product.k * bytes(product.input),
        x_stride * bytes(product.input),
        y_stride * bytes(product.output),
    ];
    let addresses = [operands.x, operands.w, operands.y.cast_const()];
    strides.iter().all(|s| s.is_multiple_of(16)) && addresses.iter().all(|a| aligned(*a))
}
