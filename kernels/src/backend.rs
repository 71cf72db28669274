//! `KernelBackend`: a device (CPU or GPU) and the kernels that run on it.

use std::ops::Deref;
use std::sync::Arc;

use device::{DType, DeviceDriver, DeviceError, DeviceStream};

use crate::cpu::CpuBackend;
use crate::gpu::GpuBackend;
use crate::{
    CpuKernel, GpuKernel, HostMat, KvTileOrder, PackedMatrix, PackedMatrixGroup,
    VocabParallelSupport, VocabShard,
};

/// A device and its kernels. Clones share the device. Dereferences to [`DeviceDriver`], which allocates
/// memory and manages streams and graphs.
#[derive(Debug, Clone)]
pub enum KernelBackend {
    /// The host processor.
    Cpu(Arc<CpuBackend>),
    /// A GPU.
    Gpu(Arc<GpuBackend>),
}

impl From<CpuBackend> for KernelBackend {
    fn from(cpu: CpuBackend) -> Self {
        Self::Cpu(Arc::new(cpu))
    }
}

impl From<Arc<CpuBackend>> for KernelBackend {
    fn from(cpu: Arc<CpuBackend>) -> Self {
        Self::Cpu(cpu)
    }
}

impl From<Arc<GpuBackend>> for KernelBackend {
    fn from(gpu: Arc<GpuBackend>) -> Self {
        Self::Gpu(gpu)
    }
}

impl From<GpuBackend> for KernelBackend {
    fn from(gpu: GpuBackend) -> Self {
        Self::Gpu(Arc::new(gpu))
    }
}

impl Deref for KernelBackend {
    type Target = dyn DeviceDriver;

    fn deref(&self) -> &Self::Target {
        match self {
            Self::Cpu(cpu) => &***cpu,
            Self::Gpu(gpu) => &***gpu,
        }
    }
}

impl KernelBackend {
    /// Launches an op on stream `s`.
    ///
    /// Errors: the errors of the op `op`, such as unsupported shapes or types.
    pub fn launch<O: CpuKernel + GpuKernel>(
        &self,
        s: &DeviceStream,
        op: O,
    ) -> Result<(), DeviceError> {
        match self {
            Self::Cpu(cpu) => op.run(cpu),
            Self::Gpu(gpu) => op.launch(gpu, s),
        }
    }

    /// Returns the GPU backend; `None` on a CPU.
    #[must_use]
    pub fn gpu(&self) -> Option<&Arc<GpuBackend>> {
        match self {
            Self::Cpu(_) => None,
            Self::Gpu(gpu) => Some(gpu),
        }
    }

    /// Frees the threads and the pinned memory of the GPU weight loader. The next load allocates them again.
    pub fn finish_loading(&self) {
        if let Self::Gpu(gpu) = self {
            gpu.finish_loading();
        }
    }

    /// Whether the kernels support activations, weights, keys and values of type `dtype`.
    #[must_use]
    pub fn supports_dtype(&self, dtype: DType) -> bool {
        match self {
            Self::Cpu(_) => matches!(dtype, DType::F32 | DType::BF16 | DType::F16),
            Self::Gpu(gpu) => dtype == DType::F32 || dtype == gpu.half_dtype(),
        }
    }

    /// Element order of keys and values in a KV block on this device.
    #[must_use]
    pub fn kv_order(&self) -> KvTileOrder {
        match self {
            Self::Cpu(_) => KvTileOrder::LaneInterleaved,
            Self::Gpu(_) => KvTileOrder::RowMajor,
        }
    }

    /// Factor by which an FP8 value on this device is multiplied to have the range of OCP e4m3: 2 on GPUs with FNUZ e4m3,
    /// where the bits of an OCP number represent half of its value, else 1.
    #[must_use]
    pub fn fp8_range_factor(&self) -> f32 {
        match self {
            Self::Cpu(_) => 1.0,
            Self::Gpu(gpu) => gpu.fp8_range_factor(),
        }
    }

    /// Returns which logits rows vocab-parallel sampling supports on this device. The result is equal on all
    /// ranks.
    #[must_use]
    pub fn vocab_parallel_support(&self, shard: &VocabShard) -> VocabParallelSupport {
        match self {
            Self::Cpu(_) => VocabParallelSupport::AllRules,
            Self::Gpu(_) => GpuBackend::vocab_parallel_support_of(shard),
        }
    }

    /// Stacks the matrices `parts` by rows and packs them as one weight matrix, in the memory layout of the
    /// device, for inputs of type `dtype`. The packed weights have type `dtype`, or fp8 with scales if the
    /// parts are fp8 and the device multiplies fp8. All parts have the same number of columns.
    ///
    /// Errors: the numbers of columns differ, or allocation fails.
    pub fn pack(&self, parts: &[HostMat<'_>], dtype: DType) -> Result<PackedMatrix, DeviceError> {
        match self {
            Self::Cpu(cpu) => cpu.pack(parts, dtype),
            Self::Gpu(gpu) => gpu.pack(parts, dtype),
        }
    }

    /// Packs matrices of the same shape that are used together (the experts of a layer) in the memory layout
    /// of the device. Each matrix is given as a list of matrices to be stacked by rows. `dtype` is the type
    /// of the inputs, or fp8 if [`experts_dtype`](Self::experts_dtype) returned fp8. `gated`: the matrices
    /// are gate and up projections, gate rows first.
    ///
    /// Errors: shapes differ, or allocation fails.
    pub fn pack_group(
        &self,
        matrices: &[Vec<HostMat<'_>>],
        dtype: DType,
        gated: bool,
    ) -> Result<PackedMatrixGroup, DeviceError> {
        match self {
            Self::Cpu(cpu) => cpu.pack_group(matrices, dtype, gated),
            Self::Gpu(gpu) => gpu.pack_group(matrices, dtype, gated),
        }
    }

    /// Packs matrices of the same shape as [`pack_group`](Self::pack_group) does, but row-major on GPUs: the
    /// up-projections of MLA, one matrix per head, and experts with biases.
    ///
    /// Errors: shapes differ, or allocation fails.
    pub fn pack_row_major(
        &self,
        matrices: &[Vec<HostMat<'_>>],
        dtype: DType,
    ) -> Result<PackedMatrixGroup, DeviceError> {
        match self {
            Self::Cpu(cpu) => cpu.pack_group(matrices, dtype, false),
            Self::Gpu(gpu) => gpu.pack_row_major(matrices, dtype),
        }
    }

    /// Packs the gate-up and the down projections of experts of a checkpoint in MXFP4. GPUs store them in MXFP4, in
    /// tiles for TMA where both projections permit it, if that represents all elements exactly; otherwise as
    /// [`pack_row_major`](Self::pack_row_major) does.
    ///
    /// Errors: shapes differ, or allocation fails.
    pub fn pack_mxfp4_experts(
        &self,
        gate_up: &[Vec<HostMat<'_>>],
        down: &[Vec<HostMat<'_>>],
        dtype: DType,
    ) -> Result<[PackedMatrixGroup; 2], DeviceError> {
        match self {
            Self::Cpu(cpu) => {
                Ok([cpu.pack_group(gate_up, dtype, false)?, cpu.pack_group(down, dtype, false)?])
            }
            Self::Gpu(gpu) => gpu.pack_mxfp4_experts(gate_up, down, dtype),
        }
    }

    /// Returns the type in which to pack the experts of a model with `layers` MoE layers, given the gate-up
    /// and down projections of one layer and inputs of type `dtype`. The type is fp8 if both projections are
    /// stored in fp8 with a scale block shape that the device supports, and experts dequantised to `dtype`
    /// would not be faster or would not fit in memory; otherwise it is `dtype`.
    #[must_use]
    pub fn experts_dtype(
        &self,
        gate_up: &[Vec<HostMat<'_>>],
        down: &[Vec<HostMat<'_>>],
        layers: usize,
        dtype: DType,
    ) -> DType {
        match self {
            Self::Cpu(_) => dtype,
            Self::Gpu(gpu) => gpu.experts_dtype(gate_up, down, layers, dtype),
        }
    }
}
