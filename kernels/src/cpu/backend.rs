//! `CpuBackend`: the host processor with its kernels and their scratch memory.

use std::ops::Deref;
use std::sync::Mutex;

use device::{Buffer, CpuConfig, CpuDevice, DType, DeviceError, DeviceStream};

use super::moe::MoeWorkspace;
use super::sample::CpuSampler;
use crate::{CpuKernel, HostMat, PackedMatrixGroup};

/// The host processor with its kernels and their scratch memory. Dereferences to [`CpuDevice`].
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
    /// Creates the CPU device and starts the threads of its pool.
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

    /// Runs an op. A CPU has a single stream: the op has completed when `launch` returns.
    ///
    /// Errors: the errors of the op `op`, such as unsupported shapes or types.
    pub fn launch<O: CpuKernel>(&self, _: &DeviceStream, op: O) -> Result<(), DeviceError> {
        op.run(self)
    }

    /// Runs an op; returns when it has completed.
    ///
    /// Errors: the errors of the op `op`, such as unsupported shapes or types.
    pub fn run<O: CpuKernel>(&self, op: O) -> Result<(), DeviceError> {
        op.run(self)
    }

    /// Packs matrices of one shape. Each matrix is given as a list of matrices to be stacked by rows. CPUs do
    /// not interleave gate rows with up rows, so `_gated` has no effect.
    ///
    /// Errors: shapes differ, or allocation fails.
    pub fn pack_group(
        &self,
        matrices: &[Vec<HostMat<'_>>],
        dtype: DType,
        _gated: bool,
    ) -> Result<PackedMatrixGroup, DeviceError> {
        let packed = matrices.iter().map(|parts| self.pack(parts, dtype));
        PackedMatrixGroup::from_separate(packed.collect::<Result<_, _>>()?)
    }

    /// Buffer for a padded copy of the input of a linear layer, used if its rows would map to the same cache
    /// sets. Only the thread that owns the backend locks it, so the lock is never contended.
    pub(super) fn padded_rows(&self) -> &Mutex<Option<Buffer>> {
        &self.padded_rows
    }

    /// Scratch buffers of expert MLPs. Only the thread that owns the backend locks them, so the lock is never
    /// contended.
    pub(super) fn moe_workspace(&self) -> &Mutex<MoeWorkspace> {
        &self.moe_workspace
    }

    pub(super) fn sampler(&self) -> &CpuSampler {
        &self.sampler
    }
}

/// Matches on the activation type (f32, bf16 or f16) and evaluates an expression that is generic over it.
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
