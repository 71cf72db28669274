//! GPU launches of elementwise ops and of the QK norm over all heads: gated activation, addition, logit softcap, scaling, addition of gated rows.

use device::gpu::{KernelLaunch, KernelSource};
use device::{DType, DeviceError, DeviceStream, MatRef};

use super::fp8::QuantizedRows;
use crate::gpu::GpuBackend;
use crate::{
    GateActivation, GatedActivation, GatedProduct, GpuKernel, LogitSoftcap, QkChannelCounts,
    QkFullNorm, QkSquareSums, QueryTemperatureScaling, SigmoidGatedAdd, TensorAdd, TensorScalarMul,
    ValueHeadNorm,
};

static ELEMENTWISE: KernelSource = kernel_source!("elementwise/elementwise.hip");
static ELEMENTWISE_SCALE: KernelSource = kernel_source!("elementwise_scale/elementwise_scale.hip");
static QK_NORM: KernelSource = kernel_source!("qk_norm/qk_norm.hip");

/// An elementwise kernel: name of the op in errors, name of the device function, and source file.
struct ElementwiseKernel {
    op: &'static str,
    symbol: &'static str,
    source: &'static KernelSource,
}

static ADD: ElementwiseKernel =
    ElementwiseKernel { op: "add", symbol: "add_rows", source: &ELEMENTWISE };
static SOFTCAP: ElementwiseKernel =
    ElementwiseKernel { op: "softcap", symbol: "elementwise_softcap", source: &ELEMENTWISE };
static SCALE: ElementwiseKernel =
    ElementwiseKernel { op: "scale", symbol: "elementwise_scale", source: &ELEMENTWISE_SCALE };
static GATED_ADD: ElementwiseKernel = ElementwiseKernel {
    op: "gated_add",
    symbol: "elementwise_gated_add",
    source: &ELEMENTWISE_SCALE,
};

/// Number of columns per block: eight per thread.
const BLOCK_COLUMNS: usize = 8 * THREADS as usize;
/// Number of threads per block.
pub(super) const THREADS: u32 = 128;

/// Number of threads per block of the kernel that computes sums of squares. It is constant, so the order of
/// additions does not depend on the batch.
const SUM_THREADS: u32 = 256;

impl GpuBackend {
    /// Computes the activation of gate and up, which are the columns of `x`, and quantises the result to fp8;
    /// the caller has checked the shapes.
    pub(super) fn gated_activation_fp8(
        &self,
        s: &DeviceStream,
        to: &QuantizedRows,
        x: MatRef<'_>,
        activation: GateActivation,
    ) -> Result<(), DeviceError> {
        let cols = x.cols() / 2;
        let [gate, alpha, limit] = activation.defines();
        let scaling = ("SCALING", to.scaling.define());
        let defines = [("ACT_F32", 0), ("FP8", 1), scaling, gate, alpha, limit];
        let kernel = self.kernel(&ELEMENTWISE, "gated_activation_fp8", &defines)?;
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
            .u32(to.padded as u32)
            .f32(to.scaling.static_scale().unwrap_or_default());
        // SAFETY: the shapes were checked; the arguments match the kernel parameters.
        unsafe { launch.launch(self, s) }
    }

    /// Prepares a launch of an elementwise kernel with `blocks_per_row(cols)` blocks per row.
    fn elementwise_launch(
        &self,
        kernel: &ElementwiseKernel,
        dtype: DType,
        rows: usize,
        cols: usize,
    ) -> Result<KernelLaunch, DeviceError> {
        let defines = [("ACT_F32", self.act_f32(kernel.op, dtype)?)];
        let function = self.kernel(kernel.source, kernel.symbol, &defines)?;
        let blocks = (rows * blocks_per_row(cols)) as u32;
        Ok(KernelLaunch::new(function, [blocks, 1, 1], THREADS, 0).overlaps_predecessor())
    }
}

impl GpuKernel for TensorAdd<'_> {
    fn launch(self, gpu: &GpuBackend, s: &DeviceStream) -> Result<(), DeviceError> {
        self.check()?;
        let Self { mut y, a, b } = self;
        let launch = gpu
            .elementwise_launch(&ADD, a.dtype(), y.rows(), y.cols())?
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
            .elementwise_launch(&SOFTCAP, x.dtype(), x.rows(), x.cols())?
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
            .elementwise_launch(&SCALE, x.dtype(), x.rows(), x.cols())?
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
            .elementwise_launch(&GATED_ADD, y.dtype(), y.rows(), y.cols())?
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

impl GpuKernel for GatedActivation<'_> {
    fn launch(self, gpu: &GpuBackend, s: &DeviceStream) -> Result<(), DeviceError> {
        self.check()?;
        let Self { mut y, x, activation } = self;
        let act_f32 = gpu.act_f32("gated_activation", x.dtype())?;
        let [gate, alpha, limit] = activation.defines();
        let defines = [("ACT_F32", act_f32), gate, alpha, limit];
        let kernel = gpu.kernel(&ELEMENTWISE, "gated_activation_rows", &defines)?;
        let blocks = (y.rows() * blocks_per_row(y.cols())) as u32;
        let launch = KernelLaunch::new(kernel, [blocks, 1, 1], THREADS, 0)
            .overlaps_predecessor()
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

impl GpuKernel for GatedProduct<'_> {
    fn launch(self, gpu: &GpuBackend, s: &DeviceStream) -> Result<(), DeviceError> {
        self.check()?;
        let Self { mut y, gate, up, activation } = self;
        let act_f32 = gpu.act_f32(Self::KERNEL, y.dtype())?;
        let [function, alpha, limit] = activation.defines();
        let defines = [("ACT_F32", act_f32), function, alpha, limit];
        let kernel = gpu.kernel(&ELEMENTWISE, "gated_product_rows", &defines)?;
        let parts = blocks_per_row(y.cols());
        let blocks = (y.rows() * parts) as u32;
        let (cols, stride) = (y.cols() as u32, y.stride() as u32);
        let launch = KernelLaunch::new(kernel, [blocks, 1, 1], THREADS, 0)
            .overlaps_predecessor()
            .out(&mut y)
            .arg(gate)
            .arg(up)
            .u32(cols)
            .u32(parts as u32)
            .u32(stride)
            .u32(gate.stride() as u32)
            .u32(up.stride() as u32);
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

impl GpuKernel for ValueHeadNorm<'_> {
    fn launch(self, gpu: &GpuBackend, s: &DeviceStream) -> Result<(), DeviceError> {
        self.check()?;
        let Self { mut qkv, first, heads, head_dim, eps } = self;
        let warps = (THREADS / gpu.warp_size()) as usize;
        let blocks = (qkv.rows() * heads).div_ceil(warps);
        let (rows, stride) = (qkv.rows() as u32, qkv.stride() as u32);
        let launch = gpu
            .qk_norm_launch(Self::KERNEL, qkv.dtype(), blocks, THREADS)?
            .out(&mut qkv)
            .u32(rows)
            .u32(heads as u32)
            .u32(head_dim as u32)
            .u32(first as u32)
            .u32(stride)
            .f32(eps);
        // SAFETY: the shapes were checked; the arguments match the kernel parameters.
        unsafe { launch.launch(gpu, s) }
    }
}

/// Returns the number of blocks of an elementwise kernel for each row of `cols` columns.
pub(super) fn blocks_per_row(cols: usize) -> usize {
    cols.div_ceil(BLOCK_COLUMNS)
}
