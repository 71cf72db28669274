//! How a router's logits become choices of experts.

use device::{DType, DeviceError, MatMut, MatRef, check_at_least, check_dtype, check_size};

const KERNEL: &str = "moe_route";

/// The rule of a router. Weights always come from the scores themselves, never from what is added for the choice.
#[derive(Debug, Clone, Copy)]
pub struct RouterRuleArgs<'a> {
    /// From logits to scores.
    pub score: RouterScore,
    /// Added to the scores for the choice alone; f32 `[E]`.
    pub bias: Option<MatRef<'a>>,
    /// Experts that are chosen by groups first.
    pub groups: Option<ExpertGroups>,
    /// Whether a token's weights are divided by their sum.
    pub normalise: bool,
    /// What weights are multiplied by at the end.
    pub scale: f32,
    /// Experts `E..E + shared`, which every token goes to with weight 1: the last columns of what is chosen.
    pub shared: usize,
}

/// What a router makes of its logits.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum RouterScore {
    /// Softmax over all experts.
    Softmax,
    /// Sigmoid of each.
    Sigmoid,
}

/// Experts in equal groups, of which a token chooses some before it chooses experts inside them.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct ExpertGroups {
    /// Groups; they divide the experts.
    pub count: usize,
    /// Groups that a token chooses from.
    pub topk_group: usize,
    /// What groups are chosen by.
    pub score: GroupScore,
}

/// The score of a group, from those of its experts.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum GroupScore {
    /// The largest.
    Largest,
    /// The sum of the two largest.
    TwoLargest,
}

impl RouterRuleArgs<'_> {
    /// Refuses what does not fit: `experts` i32 and `weights` f32 `[T, k + shared]`, `logits` f32 `[T, E]`.
    pub(crate) fn check(
        &self,
        experts: &MatMut<'_>,
        weights: &MatMut<'_>,
        logits: MatRef<'_>,
    ) -> Result<(), DeviceError> {
        check_dtype(KERNEL, "logits", logits.dtype(), DType::F32)?;
        check_dtype(KERNEL, "experts", experts.dtype(), DType::I32)?;
        check_dtype(KERNEL, "weights", weights.dtype(), DType::F32)?;
        let mut choices = logits.cols();
        check_size(KERNEL, "rows of experts", experts.rows(), logits.rows())?;
        check_size(KERNEL, "rows of weights", weights.rows(), logits.rows())?;
        check_size(KERNEL, "columns of weights", weights.cols(), experts.cols())?;
        check_at_least(KERNEL, "columns of experts", experts.cols(), self.shared)?;
        let k = experts.cols() - self.shared;
        if let Some(bias) = self.bias {
            check_dtype(KERNEL, "bias", bias.dtype(), DType::F32)?;
            check_size(KERNEL, "bias", bias.cols(), logits.cols())?;
        }
        if let Some(ExpertGroups { count, topk_group: kept, score: by }) = self.groups {
            let least = if by == GroupScore::TwoLargest { 2 } else { 1 };
            let each = logits.cols() / count.max(1);
            check_size(KERNEL, "experts in groups", count * each, logits.cols())?;
            check_size(KERNEL, "experts of a group", each.min(least), least)?;
            check_size(KERNEL, "groups kept", kept.clamp(1, count.max(1)), kept)?;
            choices = kept * each;
        }
        check_size(KERNEL, "choices", k.min(choices), k)
    }
}
