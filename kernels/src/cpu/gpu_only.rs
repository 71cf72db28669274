//! Fused ops that only GPUs support: on CPUs they return an error, and the crate `ops` launches the separate
//! ops instead.

use device::{DType, DeviceError};

use super::CpuBackend;
use crate::{CpuKernel, FusedLinear, FusedMoe, PrologueLinear, RopeAttention};

fn unsupported(kernel: &'static str, dtype: DType) -> Result<(), DeviceError> {
    Err(DeviceError::Unsupported { kernel, what: "input on a CPU", dtype })
}

impl CpuKernel for FusedLinear<'_> {
    fn run(self, _: &CpuBackend) -> Result<(), DeviceError> {
        unsupported("fused_linear", self.x.dtype())
    }
}

impl CpuKernel for PrologueLinear<'_> {
    fn run(self, _: &CpuBackend) -> Result<(), DeviceError> {
        unsupported("prologue_linear", self.y.dtype())
    }
}

impl CpuKernel for RopeAttention<'_> {
    fn run(self, _: &CpuBackend) -> Result<(), DeviceError> {
        unsupported("rope_attention", self.qk.qkv.dtype())
    }
}

impl CpuKernel for FusedMoe<'_, '_> {
    fn run(self, _: &CpuBackend) -> Result<(), DeviceError> {
        unsupported("routed_expert_mlp", self.x.dtype())
    }
}
