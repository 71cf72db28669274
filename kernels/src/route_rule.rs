//! How a router's logits become choices of experts.

use crate::Mat;

/// The rule of a router. Weights always come from the scores themselves, never from what is added for the choice.
#[derive(Debug, Clone, Copy)]
pub struct RouteRule<'a> {
    /// From logits to scores.
    pub score: RouterScore,
    /// Added to the scores for the choice alone; f32 `[E]`.
    pub bias: Option<Mat<'a>>,
    /// Experts that are chosen by groups first.
    pub groups: Option<ExpertGroups>,
    /// Whether a token's weights are divided by their sum.
    pub normalise: bool,
    /// What weights are multiplied by at the end.
    pub scale: f32,
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
    pub kept: usize,
    /// What groups are chosen by.
    pub by: GroupScore,
}

/// The score of a group, from those of its experts.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum GroupScore {
    /// The largest.
    Largest,
    /// The sum of the two largest.
    TwoLargest,
}
