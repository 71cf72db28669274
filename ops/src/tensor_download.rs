//! Asynchronous copy of a float tensor to the host.

use device::{CopyInFlight, DType, PinnedBuffer};
use kernels::HostMat;

use crate::{OpError, Ops, Tensor};

/// Float tensor that is being copied to the host.
#[derive(Debug)]
pub struct TensorDownload {
    copy: CopyInFlight,
    dtype: DType,
    elements: usize,
}

/// Values of a tensor on the host, and the pinned memory that received them.
#[derive(Debug)]
pub struct DownloadedTensor {
    /// Values of all elements, row by row.
    pub values: Vec<f32>,
    /// Pinned memory, to be reused for another copy.
    pub memory: PinnedBuffer,
}

impl Ops {
    /// Starts the copy of a float tensor to `memory`, in stream order: the tensor may be dropped before the
    /// copy has completed. `memory` must have at least the bytes of the tensor.
    pub fn start_read(&self, x: &Tensor, memory: PinnedBuffer) -> Result<TensorDownload, OpError> {
        let (dtype, elements) = (x.dtype(), x.len());
        let bytes = elements * dtype.bytes();
        let copy = self.device.start_download(&self.stream, x.buffer(), memory, bytes)?;
        Ok(TensorDownload { copy, dtype, elements })
    }
}

impl TensorDownload {
    /// Waits for the copy and returns the values as f32.
    pub fn wait(self) -> Result<DownloadedTensor, OpError> {
        let memory = self.copy.wait()?;
        let bytes = &memory.bytes()[..self.elements * self.dtype.bytes()];
        let mut values = vec![0.0; self.elements];
        HostMat::new(bytes, self.dtype, 1, self.elements)?.read_row(0, &mut values);
        Ok(DownloadedTensor { values, memory })
    }
}
