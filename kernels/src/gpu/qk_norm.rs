//! GPU launches of the QK norm over all heads and of the attention temperature.

use device::gpu::{KernelLaunch, KernelSource};
use device::{DType, DeviceError, DeviceStream};

use super::elementwise::{THREADS, blocks_per_row};
use crate::gpu::GpuBackend;
use crate::{GpuKernel, QkChannelCounts, QkFullNorm, QkSquareSums, QueryTemperatureScaling};

static QK_NORM: KernelSource = kernel_source!("qk_norm/qk_norm.hip");

/// Number of threads per block of the kernel that computes sums of squares. It is constant, so the order of
/// additions does not depend on the batch.
const SUM_THREADS: u32 = 256;

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
