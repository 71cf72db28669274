//! GPU launch that converts the arrays of a step of a foreign host.

use device::gpu::{KernelLaunch, KernelSource};
use device::{DType, DeviceError, DeviceStream, MatRef};

use crate::gpu::GpuBackend;
use crate::{ForeignStepPreparation, GpuKernel};

static FOREIGN_STEP: KernelSource = kernel_source!("prepare/foreign_step.hip");

const THREADS: usize = 256;

impl GpuKernel for ForeignStepPreparation<'_> {
    fn launch(mut self, gpu: &GpuBackend, s: &DeviceStream) -> Result<(), DeviceError> {
        self.check()?;
        let host = self.host;
        let (tokens, rows) = (host.ids.cols(), host.context_lens.cols());
        let blocks = tokens.max(rows + 1).div_ceil(THREADS);
        let is_wide = |x: MatRef<'_>| u32::from(x.dtype() == DType::I64);
        let kernel = gpu.kernel(&FOREIGN_STEP, "prepare_foreign_step", &[])?;
        // Not overlapped with its predecessor, which is a kernel or a copy of the host.
        let launch = KernelLaunch::new(kernel, [blocks as u32, 1, 1], THREADS as u32, 0)
            .out(&mut self.step.ids)
            .out(&mut self.step.positions)
            .out(&mut self.step.slots)
            .out(&mut self.step.cu_q)
            .out(&mut self.step.context_lens)
            .arg(host.ids)
            .arg(host.positions)
            .arg(host.slots)
            .arg_or_null(host.row_starts)
            .arg(host.context_lens)
            .u32(tokens as u32)
            .u32(rows as u32)
            .u32(is_wide(host.ids))
            .u32(is_wide(host.positions))
            .u32(is_wide(host.context_lens));
        // SAFETY: `check` compared the lengths and the types of the arrays.
        unsafe { launch.launch(gpu, s) }
    }
}
