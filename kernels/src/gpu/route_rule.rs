//! GPU launches of MoE routing by a configurable rule (softmax or sigmoid scores, score correction bias,
//! expert groups).

use device::gpu::KernelSource;
use device::{
    DType, DeviceError, DeviceStream, MatMut, MatRef, check_at_most, check_dense, check_dtype,
    check_size,
};

use super::expert_load::ExpertCounterPtrs;
use super::moe_route::route_launch;
use crate::gpu::GpuBackend;
use crate::{
    GpuKernel, GroupScoreFunction, GroupedTopKRouting, RouterRuleArgs, RouterScoreFunction,
};

static MOE_ROUTE: KernelSource = kernel_source!("moe_route_rule/moe_route_rule.hip");

const KERNEL: &str = "moe_route";
/// Maximum number of experts, limited by the shared memory of the kernel.
const MAX_EXPERTS: usize = 1024;

impl GpuKernel for GroupedTopKRouting<'_, '_> {
    fn launch(self, gpu: &GpuBackend, s: &DeviceStream) -> Result<(), DeviceError> {
        let Self { mut experts, mut weights, logits, rule, load } = self;
        check(&experts, &weights, logits, rule)?;
        let counters = ExpertCounterPtrs::of(load, KERNEL, logits)?;
        let (k, count) = (experts.cols() - rule.shared, logits.cols());
        let (groups, topk_group, group_score) = rule
            .groups
            .map_or((0, 0, GroupScoreFunction::Largest), |g| (g.count, g.topk_group, g.score));
        let kernel = gpu.kernel(&MOE_ROUTE, KERNEL, &[])?;
        let launch = route_launch(gpu, kernel, [&mut experts, &mut weights], logits)
            .arg_or_null(rule.bias)
            .u32(count as u32)
            .u32(k as u32)
            .u32(rule.shared as u32)
            .u32(u32::from(rule.score == RouterScoreFunction::Sigmoid))
            .u32(groups as u32)
            .u32(topk_group as u32)
            .u32(u32::from(group_score == GroupScoreFunction::Top2Sum))
            .u32(u32::from(rule.renormalise))
            .f32(rule.scale);
        // SAFETY: the shapes were checked; the arguments match the kernel parameters.
        unsafe { counters.args(launch).launch(gpu, s) }
    }
}

fn check(
    experts: &MatMut<'_>,
    weights: &MatMut<'_>,
    logits: MatRef<'_>,
    rule: &RouterRuleArgs<'_>,
) -> Result<(), DeviceError> {
    rule.check(experts, weights, logits)?;
    check_dtype(KERNEL, "logits", logits.dtype(), DType::F32)?;
    check_size(KERNEL, "rows of experts", experts.rows(), logits.rows())?;
    check_at_most(KERNEL, "experts", logits.cols(), MAX_EXPERTS)?;
    check_dense(KERNEL, "experts", experts.as_ref())?;
    check_dense(KERNEL, "weights", weights.as_ref())
}
