//! Which experts a token goes to, by any rule.

use super::check::{check_at_most, check_dense, check_dtype, check_size};
use super::device::GpuDevice;
use super::expert_load::ExpertCounterPtrs;
use super::kernel_launch::KernelLaunch;
use super::kernel_source::KernelSource;
use crate::{
    DType, DeviceError, DeviceStream, ExpertLoadArgs, GroupScore, MatMut, MatRef, RouterRuleArgs,
    RouterScore,
};

static MOE_ROUTE: KernelSource = KernelSource {
    name: "moe_route_rule/moe_route_rule.hip",
    text: include_str!("../../csrc/moe_route_rule/moe_route_rule.hip"),
};

const KERNEL: &str = "moe_route";
/// Experts the kernel has shared memory for.
const MAX_EXPERTS: usize = 1024;

impl GpuDevice {
    pub(super) fn route(
        &self,
        s: &DeviceStream,
        mut experts: MatMut<'_>,
        mut weights: MatMut<'_>,
        logits: MatRef<'_>,
        rule: &RouterRuleArgs<'_>,
        count: Option<&mut ExpertLoadArgs<'_>>,
    ) -> Result<(), DeviceError> {
        check(&experts, &weights, logits, rule)?;
        let counters = ExpertCounterPtrs::of(count, KERNEL, logits)?;
        let (k, count) = (experts.cols() - rule.shared, logits.cols());
        let (groups, kept, by) =
            rule.groups.map_or((0, 0, GroupScore::Largest), |g| (g.count, g.topk_group, g.score));
        let threads = count.next_multiple_of(self.warp_size() as usize) as u32;
        let kernel = self.kernel(&MOE_ROUTE, KERNEL, &[])?;
        let launch = KernelLaunch::new(kernel, (logits.rows() as u32, 1, 1), threads, 0)
            .overlaps_predecessor()
            .out(&mut experts)
            .out(&mut weights)
            .arg(logits)
            .u32(logits.stride() as u32)
            .arg_or_null(rule.bias)
            .u32(count as u32)
            .u32(k as u32)
            .u32(rule.shared as u32)
            .u32(u32::from(rule.score == RouterScore::Sigmoid))
            .u32(groups as u32)
            .u32(kept as u32)
            .u32(u32::from(by == GroupScore::TwoLargest))
            .u32(u32::from(rule.normalise))
            .f32(rule.scale);
        // SAFETY: the shapes agree; the arguments are those of the kernel.
        unsafe { counters.args(launch).launch(self, s) }
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
