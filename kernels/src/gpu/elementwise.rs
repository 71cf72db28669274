//! GPU launches of elementwise ops and of the QK norm over all heads: SiLU-and-multiply, addition, logit softcap, scaling, addition of gated rows.

use device::gpu::{KernelLaunch, KernelSource};
use device::{DType, DeviceError, DeviceStream, MatRef};

use super::fp8::QuantizedRows;
use crate::gpu::GpuBackend;
use crate::{
    GpuKernel, LogitSoftcap, QkChannelCounts, QkFullNorm, QkSquareSums, QueryTemperatureScaling,
    SigmoidGatedAdd, SiluMul, TensorAdd, TensorScalarMul,
};

static ELEMENTWISE: KernelSource = kernel_source!("elementwise/elementwise.hip");
static ELEMENTWISE_SCALE: KernelSource = kernel_source!("elementwise_scale/elementwise_scale.hip");
static QK_NORM: KernelSource = kernel_source!("qk_norm/qk_norm.hip");

/// Number of columns per block: eight per thread.
const BLOCK_COLUMNS: usize = 8 * THREADS as usize;
/// Number of threads per block.
const THREADS: u32 = 128;

/// Number of threads per block of the kernel that computes sums of squares. It is constant, so the order of
/// additions does not depend on the batch.
const SUM_THREADS: u32 = 256;

impl GpuBackend {
    /// Computes `silu(gate) · up` of `x` and quantises the result to fp8; the caller has checked the shapes.
    pub(super) fn silu_mul_fp8(
        &self,
        s: &DeviceStream,
        to: &QuantizedRows,
        x: MatRef<'_>,
    ) -> Result<(), DeviceError> {
        let cols = x.cols() / 2;
        let defines = [("ACT_F32", 0), ("FP8", 1), ("SCALING", to.scaling.define())];
        let kernel = self.kernel(&ELEMENTWISE, "silu_mul_fp8", &defines)?;
        let blocks = (to.padded * blocks_per_row(cols)) as u32;
        let launch = KernelLaunch::new(kernel, [blocks, 1, 1], THREADS, 0)
            .overlaps_predecessor()
            .arg_ptr(to.x)
            .arg_ptr(to.scales)
            .arg(x)
            .u32(to.rows as u32)
            .u32(cols as u32)
            .u32(blocks_per_row(cols) as u32)
            .u32(x.stride() as u32)
            .u32(to.padded as u32);
        // SAFETY: the shapes were checked; the arguments match the kernel parameters.
        unsafe { launch.launch(self, s) }
    }

    /// Prepares a launch of elementwise kernel `symbol` with `blocks_per_row(cols)` blocks per row.
    fn elementwise_launch(
        &self,
        kernel: &'static str,
        symbol: &'static str,
        dtype: DType,
        rows: usize,
        cols: usize,
    ) -> Result<KernelLaunch, DeviceError> {
        let source = match symbol {
            "elementwise_scale" | "elementwise_gated_add" => &ELEMENTWISE_SCALE,
            _ => &ELEMENTWISE,
        };
        let function = self.kernel(source, symbol, &[("ACT_F32", self.act_f32(kernel, dtype)?)])?;
        let blocks = (rows * blocks_per_row(cols)) as u32;
        Ok(KernelLaunch::new(function, [blocks, 1, 1], THREADS, 0).overlaps_predecessor())
    }
}

impl GpuKernel for TensorAdd<'_> {
    fn launch(self, gpu: &GpuBackend, s: &DeviceStream) -> Result<(), DeviceError> {
        const KERNEL: &str = "add";
        self.check()?;
        let Self { mut y, a, b } = self;
        let launch = gpu
            .elementwise_launch(KERNEL, "add_rows", a.dtype(), y.rows(), y.cols())?
            .out(&mut y)
            .arg(a)
            .arg(b)
            .u32(y.cols() as u32)
            .u32(blocks_per_row(y.cols()) as u32)
            .u32(y.stride() as u32)
            .u32(a.stride() as u32)
            .u32(b.stride() as u32);
        // SAFETY: the shapes were checked; the arguments match the kernel parameters.
        unsafe { launch.launch(gpu, s) }
    }
}

impl GpuKernel for LogitSoftcap<'_> {
    fn launch(self, gpu: &GpuBackend, s: &DeviceStream) -> Result<(), DeviceError> {
        let Self { mut x, cap } = self;
        let launch = gpu
            .elementwise_launch("softcap", "elementwise_softcap", x.dtype(), x.rows(), x.cols())?
            .out(&mut x)
            .u32(x.cols() as u32)
            .u32(blocks_per_row(x.cols()) as u32)
            .u32(x.stride() as u32)
            .f32(cap);
        // SAFETY: the kernel accesses one matrix of these sizes; the arguments match the kernel parameters.
        unsafe { launch.launch(gpu, s) }
    }
}

impl GpuKernel for TensorScalarMul<'_> {
    fn launch(self, gpu: &GpuBackend, s: &DeviceStream) -> Result<(), DeviceError> {
        let Self { mut x, factor } = self;
        let launch = gpu
            .elementwise_launch("scale", "elementwise_scale", x.dtype(), x.rows(), x.cols())?
            .out(&mut x)
            .u32(x.cols() as u32)
            .u32(blocks_per_row(x.cols()) as u32)
            .u32(x.stride() as u32)
            .f32(factor);
        // SAFETY: the kernel accesses one matrix of these sizes; the arguments match the kernel parameters.
        unsafe { launch.launch(gpu, s) }
    }
}

impl GpuKernel for SigmoidGatedAdd<'_> {
    fn launch(self, gpu: &GpuBackend, s: &DeviceStream) -> Result<(), DeviceError> {
        self.check()?;
        let Self { mut y, x, gate } = self;
        let launch = gpu
            .elementwise_launch(
                "gated_add",
                "elementwise_gated_add",
                y.dtype(),
                y.rows(),
                y.cols(),
            )?
            .out(&mut y)
            .arg(x)
            .arg(gate)
            .u32(y.cols() as u32)
            .u32(blocks_per_row(y.cols()) as u32)
            .u32(y.stride() as u32)
            .u32(x.stride() as u32)
            .u32(gate.stride() as u32);
        // SAFETY: the shapes were checked; the arguments match the kernel parameters.
        unsafe { launch.launch(gpu, s) }
    }
}

impl GpuKernel for SiluMul<'_> {
    fn launch(self, gpu: &GpuBackend, s: &DeviceStream) -> Result<(), DeviceError> {
        const KERNEL: &str = "silu_mul";
        self.check()?;
        let Self { mut y, x } = self;
        let launch = gpu
            .elementwise_launch(KERNEL, "silu_mul_rows", x.dtype(), y.rows(), y.cols())?
            .out(&mut y)
            .arg(x)
            .u32(y.cols() as u32)
            .u32(blocks_per_row(y.cols()) as u32)
            .u32(y.stride() as u32)
            .u32(x.stride() as u32);
        // SAFETY: the shapes were checked; the arguments match the kernel parameters.
        unsafe { launch.launch(gpu, s) }
    }
}

impl GpuBackend {
    /// Prepares a launch of `symbol` with `blocks` blocks of `threads` threads.
    fn qk_norm_launch(
        &self,
        symbol: &'static str,
        dtype: DType,
        blocks: usize,
        threads: u32,
    ) -> Result<KernelLaunch, DeviceError> {
        let defines = [("ACT_F32", self.act_f32(symbol, dtype)?)];
        let function = self.kernel(&QK_NORM, symbol, &defines)?;
        Ok(KernelLaunch::new(function, [blocks as u32, 1, 1], threads, 0).overlaps_predecessor())
    }
}

impl GpuKernel for QkSquareSums<'_> {
    fn launch(self, gpu: &GpuBackend, s: &DeviceStream) -> Result<(), DeviceError> {
        self.check()?;
        let Self { mut sums, qkv, channels } = self;
        let blocks = 2 * qkv.rows();
        let launch = gpu
            .qk_norm_launch("qk_square_sums", qkv.dtype(), blocks, SUM_THREADS)?
            .out(&mut sums)
            .arg(qkv)
            .u32(channels.query as u32)
            .u32(channels.key as u32)
            .u32(qkv.stride() as u32);
        // SAFETY: the shapes were checked; the arguments match the kernel parameters.
        unsafe { launch.launch(gpu, s) }
    }
}

impl GpuKernel for QkFullNorm<'_> {
    fn launch(self, gpu: &GpuBackend, s: &DeviceStream) -> Result<(), DeviceError> {
        self.check()?;
        let Self { mut qkv, sums, weight, channels, ranks, eps } = self;
        let QkChannelCounts { query, key } = channels;
        let parts = blocks_per_row(query + key);
        let launch = gpu
            .qk_norm_launch("qk_full_norm", qkv.dtype(), qkv.rows() * parts, THREADS)?
            .out(&mut qkv)
            .arg(sums)
            .arg(weight)
            .u32(query as u32)
            .u32((query + key) as u32)
            .u32(parts as u32)
            .u32(qkv.stride() as u32)
            .f32((query * ranks) as f32)
            .f32((key * ranks) as f32)
            .f32(eps);
        // SAFETY: the shapes were checked; the arguments match the kernel parameters.
        unsafe { launch.launch(gpu, s) }
    }
}

impl GpuKernel for QueryTemperatureScaling<'_> {
    fn launch(self, gpu: &GpuBackend, s: &DeviceStream) -> Result<(), DeviceError> {
        self.check()?;
        let Self { mut qkv, factors, positions, query } = self;
        let parts = blocks_per_row(query);
        let launch = gpu
            .qk_norm_launch("qk_temperature", qkv.dtype(), qkv.rows() * parts, THREADS)?
            .out(&mut qkv)
            .arg(factors)
            .arg(positions)
            .u32(query as u32)
            .u32(parts as u32)
            .u32(qkv.stride() as u32);
        // SAFETY: the shapes were checked, and the host checked the staged positions; the arguments match the
        // kernel parameters.
        unsafe { launch.launch(gpu, s) }
    }
}

/// Returns the number of blocks of an elementwise kernel for each row of `cols` columns.
fn blocks_per_row(cols: usize) -> usize {
    cols.div_ceil(BLOCK_COLUMNS)
}
