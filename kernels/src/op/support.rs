//! `supports` functions of fused ops: whether a device has a fused kernel for given shapes. The crate `ops`
//! decides whether to launch a supported fused op.

use device::DType;

use crate::{
    AttentionMetadata, ExpertWeights, FusedLinear, FusedMoe, HostMat, KernelBackend, KvLayout,
    PackedMatrix, PrologueLinear, QkNormRopeArgs, RopeAttention, SoftmaxRouterArgs,
};

impl FusedLinear<'_> {
    /// Whether the device has a fused kernel for [`FusedLinear`] with `rows` input rows of type `dtype` and
    /// weights `w` that supports all ops of `LinearFusion`.
    #[must_use]
    pub fn supports(backend: &KernelBackend, rows: usize, dtype: DType, w: &PackedMatrix) -> bool {
        match backend {
            KernelBackend::Cpu(_) => false,
            KernelBackend::Gpu(gpu) => {
                gpu.fits_small_m(rows, dtype, w) || gpu.fits_medium_m(rows, dtype, w)
            }
        }
    }

    /// Whether the device has a fused kernel for [`FusedLinear`] with `rows` input rows of type `dtype` and
    /// weights `w`, if the gate activation is the only fused op.
    #[must_use]
    pub fn supports_gate(
        backend: &KernelBackend,
        rows: usize,
        dtype: DType,
        w: &PackedMatrix,
    ) -> bool {
        let large = match backend {
            KernelBackend::Cpu(_) => false,
            KernelBackend::Gpu(gpu) => gpu.fits_large_m(rows, dtype, w),
        };
        large || Self::supports(backend, rows, dtype, w)
    }
}

impl PrologueLinear<'_> {
    /// Whether the device has a kernel for [`PrologueLinear`] with `rows` rows of type `dtype` and weights
    /// `w`.
    #[must_use]
    pub fn supports(backend: &KernelBackend, rows: usize, dtype: DType, w: &PackedMatrix) -> bool {
        match backend {
            KernelBackend::Cpu(_) => false,
            KernelBackend::Gpu(gpu) => gpu.fuses_fp8_prologue(rows, dtype, w),
        }
    }
}

impl RopeAttention<'_> {
    /// Whether the device has a kernel for [`RopeAttention`] with these rows and this KV layout.
    #[must_use]
    pub fn supports(
        backend: &KernelBackend,
        qk: &QkNormRopeArgs<'_>,
        rows: &AttentionMetadata<'_>,
        layout: &KvLayout,
    ) -> bool {
        match backend {
            KernelBackend::Cpu(_) => false,
            KernelBackend::Gpu(gpu) => gpu.fits_rope_attention(qk, rows, layout),
        }
    }
}

impl FusedMoe<'_, '_> {
    /// Whether the device has a kernel for [`FusedMoe`] with these tokens and experts.
    #[must_use]
    pub fn supports(
        backend: &KernelBackend,
        router: &SoftmaxRouterArgs<'_>,
        experts: &ExpertWeights<'_>,
    ) -> bool {
        match backend {
            KernelBackend::Cpu(_) => false,
            KernelBackend::Gpu(_) => crate::gpu::fits_routed_decode(router, experts),
        }
    }
}

impl KernelBackend {
    /// Whether the GPU runs expert MLPs with these projections, packed in type
    /// [`experts_dtype`](Self::experts_dtype), as an fp8 grouped GEMM with tiles loaded by the tensor memory
    /// accelerator (TMA).
    #[must_use]
    pub fn has_fp8_tma_experts(
        &self,
        gate_up: &[Vec<HostMat<'_>>],
        down: &[Vec<HostMat<'_>>],
        layers: usize,
        dtype: DType,
    ) -> bool {
        match self {
            Self::Cpu(_) => false,
            Self::Gpu(gpu) => {
                gpu.experts_dtype(gate_up, down, layers, dtype) == DType::F8E4M3
                    && gpu.supports_tma_in(DType::F8E4M3, gate_up, down)
            }
        }
    }
}
