//! `CpuBackend`: the host processor with its kernels.

use std::ops::Deref;
use std::sync::Mutex;

use device::{Buffer, CpuConfig, CpuDevice, DType, DeviceError, DeviceStream};

use super::moe::MoeWorkspace;
use super::sample::CpuSampler;
use crate::{CpuKernel, HostMat, PackedGroup};

/// The host processor with its kernels.
#[derive(Debug)]
pub struct CpuBackend {
    device: CpuDevice,
    sampler: CpuSampler,
    moe_workspace: Mutex<MoeWorkspace>,
    padded_rows: Mutex<Option<Buffer>>,
}

impl Deref for CpuBackend {
    type Target = CpuDevice;

    fn deref(&self) -> &CpuDevice {
        &self.device
    }
}

impl CpuBackend {
    /// Starts the threads.
    ///
    /// Errors: those of [`CpuDevice::new`].
    pub fn new(config: CpuConfig) -> Result<Self, DeviceError> {
        let device = CpuDevice::new(config)?;
        Ok(Self {
            sampler: CpuSampler::new(device.threads().threads()),
            device,
            moe_workspace: Mutex::default(),
            padded_rows: Mutex::default(),
        })
    }

    /// Runs an op. There is one stream: an op ends before `launch` returns.
    ///
    /// Errors: those of the op.
    pub fn launch<O: CpuKernel>(&self, _: &DeviceStream, op: O) -> Result<(), DeviceError> {
        op.run(self)
    }

    /// Runs an op.
    ///
    /// Errors: those of the op.
    pub fn run<O: CpuKernel>(&self, op: O) -> Result<(), DeviceError> {
        op.run(self)
    }

    /// Packs matrices of one shape, each the stack of its parts. Gates are not interleaved on CPUs.
    ///
    /// Errors: shapes differ, or memory is short.
    pub fn pack_group(
        &self,
        matrices: &[Vec<HostMat<'_>>],
        dtype: DType,
        _gated: bool,
    ) -> Result<PackedGroup, DeviceError> {
        let packed = matrices.iter().map(|parts| self.pack(parts, dtype));
        PackedGroup::from_separate(packed.collect::<Result<_, _>>()?)
    }

    /// Copies of inputs whose rows would map to the same cache sets; one thread owns a backend, so never contended.
    pub(super) fn padded_rows(&self) -> &Mutex<Option<Buffer>> {
        &self.padded_rows
    }

    /// Memory of expert MLPs; never contended either.
    pub(super) fn moe_workspace(&self) -> &Mutex<MoeWorkspace> {
        &self.moe_workspace
    }

    pub(super) fn sampler(&self) -> &CpuSampler {
        &self.sampler
    }
}

/// Calls a method generic over the element type for the model types.
macro_rules! for_float {
    ($kernel:expr, $dtype:expr, $T:ident => $call:expr) => {
        match $dtype {
            device::DType::F32 => {
                type $T = f32;
                $call
            }
            device::DType::BF16 => {
                type $T = half::bf16;
                $call
            }
            device::DType::F16 => {
                type $T = half::f16;
                $call
            }
            dtype => {
                let (kernel, what) = ($kernel, "activation");
                return Err(device::DeviceError::Unsupported { kernel, what, dtype });
            }
        }
    };
}
pub(super) use for_float;
