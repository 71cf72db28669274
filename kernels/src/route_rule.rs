//! Routing rules of mixture-of-experts (MoE) routers: how experts are selected from router logits.

use device::{DType, DeviceError, MatMut, MatRef, check_at_least, check_dtype, check_size};

const KERNEL: &str = "moe_route";

/// Routing rule of an MoE router. Routing weights are computed from the scores without `bias`.
#[derive(Debug, Clone, Copy)]
pub struct RouterRuleArgs<'a> {
    /// Function that maps logits to scores.
    pub score: RouterScoreFunction,
    /// Score correction bias (`e_score_correction_bias`), added to the scores for the selection of experts
    /// only; f32 `[experts]`.
    pub bias: Option<MatRef<'a>>,
    /// Group-limited routing; `None` = experts are selected from all groups.
    pub groups: Option<ExpertGroups>,
    /// Whether the routing weights of a token are divided by their sum.
    pub renormalise: bool,
    /// Routed scaling factor: the weights are multiplied by it, after renormalisation.
    pub scale: f32,
    /// Number of shared experts, whose indices follow those of the routed experts: every token is routed to
    /// them with weight 1, in the last output columns.
    pub shared: usize,
}

/// Function that maps router logits to scores.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum RouterScoreFunction {
    /// Softmax of the logits over all experts.
    Softmax,
    /// Sigmoid of each logit.
    Sigmoid,
}

/// Group-limited routing (DeepSeek): experts form groups of equal size; a token first selects groups, then
/// experts inside the selected groups.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct ExpertGroups {
    /// Number of groups; divides the number of experts.
    pub count: usize,
    /// Number of groups selected per token.
    pub topk_group: usize,
    /// How the score of a group is computed.
    pub score: GroupScoreFunction,
}

/// Score of a group, computed from the scores of its experts.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum GroupScoreFunction {
    /// Largest score of an expert in the group.
    Largest,
    /// Sum of the two largest scores of experts in the group.
    Top2Sum,
}

impl RouterRuleArgs<'_> {
    /// Checks that shapes and types agree: `experts` i32 and `weights` f32 `[tokens, top_k + shared]`,
    /// `logits` f32 `[tokens, experts]`.
    pub(crate) fn check(
        &self,
        experts: &MatMut<'_>,
        weights: &MatMut<'_>,
        logits: MatRef<'_>,
    ) -> Result<(), DeviceError> {
        check_dtype(KERNEL, "logits", logits.dtype(), DType::F32)?;
        check_dtype(KERNEL, "experts", experts.dtype(), DType::I32)?;
        check_dtype(KERNEL, "weights", weights.dtype(), DType::F32)?;
        let mut selectable = logits.cols();
        check_size(KERNEL, "rows of experts", experts.rows(), logits.rows())?;
        check_size(KERNEL, "rows of weights", weights.rows(), logits.rows())?;
        check_size(KERNEL, "columns of weights", weights.cols(), experts.cols())?;
        check_at_least(KERNEL, "columns of experts", experts.cols(), self.shared)?;
        let k = experts.cols() - self.shared;
        if let Some(bias) = self.bias {
            check_dtype(KERNEL, "bias", bias.dtype(), DType::F32)?;
            check_size(KERNEL, "bias", bias.cols(), logits.cols())?;
        }
        if let Some(ExpertGroups { count, topk_group, score }) = self.groups {
            let experts_min = if score == GroupScoreFunction::Top2Sum { 2 } else { 1 };
            let group_size = logits.cols() / count.max(1);
            check_size(KERNEL, "experts in groups", count * group_size, logits.cols())?;
            check_size(KERNEL, "experts of a group", group_size.min(experts_min), experts_min)?;
            check_size(KERNEL, "topk_group", topk_group.clamp(1, count.max(1)), topk_group)?;
            selectable = topk_group * group_size;
        }
        check_size(KERNEL, "experts per token", k.min(selectable), k)
    }
}
