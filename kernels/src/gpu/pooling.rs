//! GPU launch of the sums of hidden states.

use device::gpu::{KernelLaunch, KernelSource};
use device::{DeviceError, DeviceStream};

use crate::gpu::GpuBackend;
use crate::{GpuKernel, HiddenStateSum};

static POOLING: KernelSource = kernel_source!("pooling/pooling.hip");

/// Number of channels per block, one per thread.
const THREADS: u32 = 128;

impl GpuKernel for HiddenStateSum<'_> {
    fn launch(self, gpu: &GpuBackend, s: &DeviceStream) -> Result<(), DeviceError> {
        self.check()?;
        let Self { mut sums, x, cu_q, seq_slots, continues } = self;
        let defines = [("ACT_F32", gpu.act_f32(Self::KERNEL, x.dtype())?)];
        let kernel = gpu.kernel(&POOLING, Self::KERNEL, &defines)?;
        let (rows, cols, slots) = (seq_slots.cols() as u32, x.cols() as u32, sums.rows() as u32);
        let launch = KernelLaunch::new(kernel, [rows, cols.div_ceil(THREADS), 1], THREADS, 0)
            .overlaps_predecessor()
            .out(&mut sums)
            .arg(x)
            .arg(cu_q)
            .arg(seq_slots)
            .arg(continues)
            .u32(cols)
            .u32(sums.stride() as u32)
            .u32(x.stride() as u32)
            .u32(slots)
            .u32(x.rows() as u32);
        // SAFETY: the shapes were checked; the kernel skips rows and tokens out of range; the arguments match the
        // kernel parameters.
        unsafe { launch.launch(gpu, s) }
    }
}
