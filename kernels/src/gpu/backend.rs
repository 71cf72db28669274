//! `GpuBackend`: a GPU with its kernels.

use std::ops::Deref;
use std::sync::{Arc, Mutex, MutexGuard, PoisonError};

use device::gpu::{GpuConfig, GpuDevice};
use device::{DType, DeviceError, DeviceStream};

use super::HEADERS;
use super::fp8;
use super::weight_loader::WeightLoader;
use crate::{GpuKernel, HostMat};

/// Maximum bytes of up-projected keys and values of non-absorbed MLA unless
/// [`GpuBackend::with_mla_prefill_bytes`] sets another value.
const MLA_PREFILL_BYTES: usize = 256 << 20;

/// A GPU with its kernels. Dereferences to [`GpuDevice`].
#[derive(Debug)]
pub struct GpuBackend {
    device: Arc<GpuDevice>,
    /// Maximum bytes of up-projected keys and values that non-absorbed MLA prefill stores at a time; `None`
    /// disables non-absorbed MLA.
    pub(super) mla_prefill_bytes: Option<usize>,
    /// The weight loader: created when the first weight matrix is packed, dropped by `finish_loading`;
    /// otherwise `None`.
    loader: Mutex<Option<WeightLoader>>,
}

impl Deref for GpuBackend {
    type Target = GpuDevice;

    fn deref(&self) -> &GpuDevice {
        &self.device
    }
}

impl GpuBackend {
    /// Loads the CUDA or HIP libraries and opens the GPU.
    ///
    /// Errors: those of [`GpuDevice::open`].
    pub fn open(config: &GpuConfig) -> Result<Self, DeviceError> {
        Ok(Self {
            device: Arc::new(GpuDevice::open(config, HEADERS)?),
            mla_prefill_bytes: Some(MLA_PREFILL_BYTES),
            loader: Mutex::default(),
        })
    }

    /// Sets the maximum bytes of up-projected keys and values that non-absorbed MLA stores at a time for rows
    /// of many tokens. `None`: all rows use absorbed MLA.
    #[must_use]
    pub fn with_mla_prefill_bytes(mut self, bytes: Option<usize>) -> Self {
        self.mla_prefill_bytes = bytes;
        self
    }

    /// Returns the GPU device, from which communicators and peer memory are created.
    #[must_use]
    pub fn device(&self) -> &Arc<GpuDevice> {
        &self.device
    }

    /// Launches an op on stream `s`.
    ///
    /// Errors: the errors of the op `op`, such as unsupported shapes or types.
    pub fn launch<O: GpuKernel>(&self, s: &DeviceStream, op: O) -> Result<(), DeviceError> {
        op.launch(self, s)
    }

    /// Frees the threads and the pinned memory of the weight loader. The next load creates them again.
    pub fn finish_loading(&self) {
        drop(self.loader().take());
    }

    pub(super) fn loader(&self) -> MutexGuard<'_, Option<WeightLoader>> {
        self.loader.lock().unwrap_or_else(PoisonError::into_inner)
    }

    /// Implements [`KernelBackend::experts_dtype`](crate::KernelBackend::experts_dtype).
    pub(crate) fn experts_dtype(
        &self,
        gate_up: &[Vec<HostMat<'_>>],
        down: &[Vec<HostMat<'_>>],
        layers: usize,
        dtype: DType,
    ) -> DType {
        let keeps = dtype == self.half_dtype()
            && fp8::fp8_experts_block_shape(gate_up, true).is_some()
            && fp8::fp8_experts_block_shape(down, false).is_some();
        let widens = || self.dequantizes_experts(gate_up, down, layers);
        if keeps && !widens() { DType::F8E4M3 } else { dtype }
    }
}
