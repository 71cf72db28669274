//! MoE routing on the CPU: selects the experts of each token and computes their routing weights.

use device::{DeviceError, MatRef};

use super::maths::exp;
use crate::cpu::CpuBackend;
use crate::{
    CpuKernel, ExpertGroups, ExpertLoadArgs, GroupScoreFunction, GroupedTopKRouting,
    RouterRuleArgs, RouterScoreFunction, SoftmaxRouterArgs, SoftmaxRouting,
};

/// Added to the sum of the routing weights before the weights are divided by it: the sum is 0 if all sigmoids
/// are 0. As in transformers `modeling_deepseek_v3.py`.
const MIN_DIVISOR: f32 = 1e-20;

impl RouterRuleArgs<'_> {
    /// Returns the routing rule of softmax over all experts, followed by top-k.
    pub(super) const fn softmax(scores: &SoftmaxRouterArgs<'_>) -> Self {
        let (score, SoftmaxRouterArgs { renormalise, shared, .. }) =
            (RouterScoreFunction::Softmax, *scores);
        Self { score, bias: None, groups: None, renormalise, scale: 1.0, shared }
    }
}

impl CpuKernel for SoftmaxRouting<'_, '_> {
    fn run(self, cpu: &CpuBackend) -> Result<(), DeviceError> {
        let Self { experts, weights, router, load } = self;
        let rule = &RouterRuleArgs::softmax(router);
        cpu.run(GroupedTopKRouting { experts, weights, logits: router.logits, rule, load })
    }
}

impl CpuKernel for GroupedTopKRouting<'_, '_> {
    fn run(self, _cpu: &CpuBackend) -> Result<(), DeviceError> {
        let Self { mut experts, mut weights, logits, rule, load } = self;
        rule.check(&experts, &weights, logits)?;
        let bias = rule.bias.map(|bias| bias.row::<f32>(0));
        let k = experts.cols() - rule.shared;
        let mut scores = vec![0.0; logits.cols()];
        let mut choice = vec![0.0; logits.cols()];
        for t in 0..logits.rows() {
            match rule.score {
                RouterScoreFunction::Softmax => softmax(&mut scores, logits.row(t)),
                RouterScoreFunction::Sigmoid => sigmoid(&mut scores, logits.row(t)),
            }
            choice.copy_from_slice(&scores);
            for (c, b) in choice.iter_mut().zip(bias.unwrap_or_default()) {
                *c += b;
            }
            if let Some(groups) = &rule.groups {
                keep_top_groups(&mut choice, groups);
            }
            let (chosen, weight) = (experts.row_mut::<i32>(t), weights.row_mut::<f32>(t));
            let (chosen, shared_experts) = chosen.split_at_mut(k);
            let (weight, shared_weights) = weight.split_at_mut(k);
            for (i, e) in shared_experts.iter_mut().enumerate() {
                *e = (logits.cols() + i) as i32;
            }
            shared_weights.fill(1.0);
            for (e, w) in chosen.iter_mut().zip(weight.iter_mut()) {
                let best = first_largest(&choice);
                (*e, *w) = (best as i32, scores[best]);
                choice[best] = f32::NEG_INFINITY; // Exclude it from later choices.
            }
            if rule.renormalise {
                let sum: f32 = weight.iter().sum::<f32>() + MIN_DIVISOR;
                for w in weight.iter_mut() {
                    *w /= sum;
                }
            }
            for w in weight {
                *w *= rule.scale;
            }
        }
        match load {
            Some(load) => add_load(load, experts.as_ref(), k, logits),
            None => Ok(()),
        }
    }
}

/// Counts the routed experts of each token in the expert load counts of the layer. The first `k` experts of a
/// token are its routed experts; shared experts follow and are not counted. Padding tokens (KV slot −1) are
/// not counted.
fn add_load(
    load: &mut ExpertLoadArgs<'_>,
    experts: MatRef<'_>,
    k: usize,
    logits: MatRef<'_>,
) -> Result<(), DeviceError> {
    load.check("moe_route", logits)?;
    let slots = load.slots.map(|slots| slots.row::<i64>(0));
    let tokens = load.tokens.row_mut::<i32>(load.layer);
    for t in (0..experts.rows()).filter(|&t| slots.is_none_or(|slots| slots[t] >= 0)) {
        for &expert in &experts.row::<i32>(t)[..k] {
            tokens[expert as usize] = tokens[expert as usize].wrapping_add(1);
        }
    }
    Ok(())
}

/// Masks all experts outside the `topk_group` best groups.
fn keep_top_groups(choice: &mut [f32], groups: &ExpertGroups) {
    let group_size = choice.len() / groups.count;
    let score = |group: &[f32]| match groups.score {
        GroupScoreFunction::Largest => group[first_largest(group)],
        GroupScoreFunction::Top2Sum => {
            let best = first_largest(group);
            let others = group.iter().enumerate().filter(|(i, _)| *i != best).map(|(_, c)| *c);
            group[best] + others.fold(f32::NEG_INFINITY, f32::max)
        }
    };
    let mut scores: Vec<f32> = choice.chunks(group_size).map(score).collect();
    let mut kept = vec![false; groups.count];
    for _ in 0..groups.topk_group {
        let best = first_largest(&scores);
        scores[best] = f32::NEG_INFINITY;
        kept[best] = true;
    }
    for (group, _) in choice.chunks_mut(group_size).zip(kept).filter(|(_, kept)| !kept) {
        group.fill(f32::NEG_INFINITY);
    }
}

fn softmax(scores: &mut [f32], logits: &[f32]) {
    let max = logits.iter().copied().fold(f32::NEG_INFINITY, f32::max);
    let mut sum = 0.0;
    for (s, l) in scores.iter_mut().zip(logits) {
        *s = exp(l - max);
        sum += *s;
    }
    for s in scores {
        *s /= sum;
    }
}

fn sigmoid(scores: &mut [f32], logits: &[f32]) {
    for (s, l) in scores.iter_mut().zip(logits) {
        *s = 1.0 / (1.0 + exp(-l));
    }
}

/// Index of the largest score, the lowest index among equals.
fn first_largest(scores: &[f32]) -> usize {
    let mut best = 0;
    for (i, score) in scores.iter().enumerate() {
        if *score > scores[best] {
            best = i;
        }
    }
    best
}
