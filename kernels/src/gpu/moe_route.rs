//! GPU launches of MoE routing by softmax and top-k.

use device::gpu::{KernelFunction, KernelLaunch, KernelSource};
use device::{
    DType, DeviceError, DeviceStream, MatMut, MatRef, check_at_most, check_dense, check_dtype,
    check_size,
};

use super::expert_load::ExpertCounterPtrs;
use crate::gpu::GpuBackend;
use crate::{GpuKernel, SoftmaxRouterArgs, SoftmaxRouting};

static MOE_ROUTE: KernelSource = kernel_source!("moe_route/moe_route.hip");

const KERNEL: &str = "moe_route_softmax";
/// Maximum number of experts; `MAX_EXPERTS` of moe_route/moe_route.h.
const MAX_EXPERTS: usize = 1024;
/// Number of threads per block of routing by softmax; a warp routes a token.
const SOFTMAX_THREADS: u32 = 128;

/// Prepares a launch of routing by a rule: one thread block per token, one thread per expert. `outputs` are
/// the experts and the weights of each token, `[tokens, experts per token]`; `logits` are f32 `[tokens,
/// experts]`.
pub(super) fn route_launch(
    gpu: &GpuBackend,
    kernel: KernelFunction,
    outputs: [&mut MatMut<'_>; 2],
    logits: MatRef<'_>,
) -> KernelLaunch {
    let threads = logits.cols().next_multiple_of(gpu.warp_size() as usize) as u32;
    let [experts, weights] = outputs;
    KernelLaunch::new(kernel, [logits.rows() as u32, 1, 1], threads, 0)
        .overlaps_predecessor()
        .out(experts)
        .out(weights)
        .arg(logits)
        .u32(logits.stride() as u32)
}

impl GpuKernel for SoftmaxRouting<'_, '_> {
    fn launch(self, gpu: &GpuBackend, s: &DeviceStream) -> Result<(), DeviceError> {
        let Self { mut experts, mut weights, router, load } = self;
        let SoftmaxRouterArgs { logits, top_k: k, renormalise, shared } = *router;
        let counters = ExpertCounterPtrs::of(load, KERNEL, logits)?;
        check_dtype(KERNEL, "logits", logits.dtype(), DType::F32)?;
        check_dtype(KERNEL, "experts", experts.dtype(), DType::I32)?;
        check_dtype(KERNEL, "weights", weights.dtype(), DType::F32)?;
        check_size(KERNEL, "rows of experts", experts.rows(), logits.rows())?;
        check_size(KERNEL, "rows of weights", weights.rows(), logits.rows())?;
        check_size(KERNEL, "columns of weights", weights.cols(), experts.cols())?;
        check_size(KERNEL, "columns of experts", experts.cols(), k + shared)?;
        let count = logits.cols();
        check_at_most(KERNEL, "top_k", k, count)?;
        check_at_most(KERNEL, "experts", count, MAX_EXPERTS)?;
        check_dense(KERNEL, "experts", experts.as_ref())?;
        check_dense(KERNEL, "weights", weights.as_ref())?;
        let kernel = gpu.kernel(&MOE_ROUTE, KERNEL, &[])?;
        let tokens_per_block = SOFTMAX_THREADS / gpu.warp_size();
        let grid = [(logits.rows() as u32).div_ceil(tokens_per_block), 1, 1];
        let launch = KernelLaunch::new(kernel, grid, SOFTMAX_THREADS, 0)
            .overlaps_predecessor()
            .out(&mut experts)
            .out(&mut weights)
            .arg(logits)
            .u32(logits.stride() as u32)
            .u32(count as u32)
            .u32(k as u32)
            .u32(shared as u32)
            .u32(u32::from(renormalise))
            .u32(logits.rows() as u32);
        // SAFETY: the shapes were checked; the arguments match the kernel parameters.
        unsafe { counters.args(launch).launch(gpu, s) }
    }
}
