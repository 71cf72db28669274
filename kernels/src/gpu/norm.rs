//! GPU launches of RMS norm, also fused with the addition to the residual stream and with fp8 quantisation.

use device::gpu::{KernelDefine, KernelLaunch, KernelSource};
use device::{DType, DeviceError, DeviceStream, MatMut, MatRef};

use super::fp8::QuantizedRows;
use crate::gpu::GpuBackend;
use crate::{AddRmsNorm, GpuKernel, RmsNorm};

static NORM: KernelSource = kernel_source!("norm/norm.hip");

const KERNEL: &str = "rms_norm";
/// Maximum number of threads per block of the norm kernels; a block computes one row.
const MAX_THREADS: usize = 512;

impl GpuBackend {
    /// Writes the RMS norm of `x` to address `y`, with row stride `y_stride` in elements; the caller has
    /// checked the shapes.
    pub(super) fn norm_to(
        &self,
        s: &DeviceStream,
        y: *mut u8,
        y_stride: usize,
        x: MatRef<'_>,
        w: MatRef<'_>,
        eps: f32,
    ) -> Result<(), DeviceError> {
        let defines =
            [("ACT_F32", self.act_f32(KERNEL, x.dtype())?), norm_f32(w.dtype(), x.dtype())];
        let kernel = self.kernel(&NORM, "rms_norm", &defines)?;
        let launch =
            KernelLaunch::new(kernel, [x.rows() as u32, 1, 1], self.norm_threads(x.cols()), 0)
                .overlaps_predecessor()
                .arg_ptr(y)
                .arg(x)
                .arg(w)
                .u32(x.cols() as u32)
                .u32(y_stride as u32)
                .u32(x.stride() as u32)
                .f32(eps);
        // SAFETY: the shapes were checked; the arguments match the kernel parameters.
        unsafe { launch.launch(self, s) }
    }

    /// Adds `delta` to `x` and writes the RMS norm of the sum, quantised to fp8, to `to`; the caller has
    /// checked the shapes.
    pub(super) fn add_norm_fp8(
        &self,
        s: &DeviceStream,
        to: &QuantizedRows,
        mut x: MatMut<'_>,
        delta: MatRef<'_>,
        norm: MatRef<'_>,
        eps: f32,
    ) -> Result<(), DeviceError> {
        let threads = self.norm_threads(x.cols());
        let eights_per_thread = x.cols().div_ceil(8 * threads as usize).next_power_of_two();
        let defines = [
            ("ACT_F32", 0),
            ("FP8", 1),
            ("THREAD_EIGHTS", eights_per_thread as u32),
            ("SCALING", to.scaling.define()),
            norm_f32(norm.dtype(), x.dtype()),
        ];
        let kernel = self.kernel(&NORM, "add_rms_norm_fp8", &defines)?;
        let launch = KernelLaunch::new(kernel, [to.padded as u32, 1, 1], threads, 0)
            .overlaps_predecessor()
            .arg_ptr(to.x)
            .arg_ptr(to.scales)
            .out(&mut x)
            .arg(delta)
            .arg(norm)
            .u32(to.rows as u32)
            .u32(x.cols() as u32)
            .u32(x.stride() as u32)
            .u32(delta.stride() as u32)
            .u32(to.padded as u32)
            .f32(eps)
            .f32(to.scaling.static_scale().unwrap_or_default());
        // SAFETY: the shapes were checked; the arguments match the kernel parameters.
        unsafe { launch.launch(self, s) }
    }

    /// Returns the number of threads per row: one per eight columns, or above 2048 columns one per sixteen
    /// columns or more. It depends on the number of columns only.
    pub(super) fn norm_threads(&self, cols: usize) -> u32 {
        let eights = cols.div_ceil(8);
        let threads = if eights <= 256 { eights } else { eights.div_ceil(2) };
        threads.next_multiple_of(self.warp_size() as usize).min(MAX_THREADS) as u32
    }
}

/// Returns the define of norm/norm.h for weights that are f32 while the activations are not.
pub(super) fn norm_f32(weight: DType, activations: DType) -> KernelDefine {
    ("NORM_F32", u32::from(weight == DType::F32 && activations != DType::F32))
}

impl GpuKernel for AddRmsNorm<'_> {
    fn launch(self, gpu: &GpuBackend, s: &DeviceStream) -> Result<(), DeviceError> {
        self.check()?;
        let Self { mut y, mut x, delta, weight: w, eps } = self;
        let defines =
            [("ACT_F32", gpu.act_f32(KERNEL, x.dtype())?), norm_f32(w.dtype(), x.dtype())];
        let kernel = gpu.kernel(&NORM, "add_rms_norm", &defines)?;
        let launch =
            KernelLaunch::new(kernel, [x.rows() as u32, 1, 1], gpu.norm_threads(x.cols()), 0)
                .overlaps_predecessor()
                .out(&mut y)
                .out(&mut x)
                .arg(delta)
                .arg(w)
                .u32(x.cols() as u32)
                .u32(y.stride() as u32)
                .u32(x.stride() as u32)
                .u32(delta.stride() as u32)
                .f32(eps);
        // SAFETY: the shapes were checked; the arguments match the kernel parameters.
        unsafe { launch.launch(gpu, s) }
    }
}

impl GpuKernel for RmsNorm<'_> {
    fn launch(self, gpu: &GpuBackend, s: &DeviceStream) -> Result<(), DeviceError> {
        self.check()?;
        let Self { mut y, x, weight: w, eps } = self;
        let y_stride = y.stride();
        gpu.norm_to(s, y.as_mut_ptr(), y_stride, x, w, eps)
    }
}
