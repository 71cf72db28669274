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
    /// Starts the threads of the pool.
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

    /// Runs an op. A CPU has one stream: the op has completed when `launch` returns.
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
    /// Errors: shapes differ, or allocation fails.
    pub fn pack_group(
        &self,
        matrices: &[Vec<HostMat<'_>>],
        dtype: DType,
        _gated: bool,
    ) -> Result<PackedGroup, DeviceError> {
        let packed = matrices.iter().map(|parts| self.pack(parts, dtype));
        PackedGroup::from_separate(packed.collect::<Result<_, _>>()?)
    }

    /// Padded copies of inputs with rows that would alias in the cache. One thread owns a backend, so the
    /// lock is never contended.
    pub(super) fn padded_rows(&self) -> &Mutex<Option<Buffer>> {
        &self.padded_rows
    }

    /// Scratch buffers of expert MLPs. One thread owns a backend, so the lock is never contended.
    pub(super) fn moe_workspace(&self) -> &Mutex<MoeWorkspace> {
        &self.moe_workspace
    }

    pub(super) fn sampler(&self) -> &CpuSampler {
        &self.sampler
    }
}

/// Instantiates a call generic over the element type for the activation types.
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
