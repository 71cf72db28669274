//! MoE routing of the GPU matches the CPU.

use device::{DeviceDriver, MatMut, MatRef};
use kernels::{
    ExpertGroups, ExpertLoadArgs, GroupScoreFunction, GroupedTopKRouting, RouterRuleArgs,
    RouterScoreFunction, SoftmaxRouterArgs, SoftmaxRouting,
};

use crate::support::{DeviceArray, RandomNumbers, S, devices, oracle};

/// Returns load counters of two layers with previous counts, and KV slots of the tokens, of which some are
/// padding (−1).
fn counters(tokens: usize, count: usize) -> (Vec<i32>, Vec<i64>) {
    let slots = (0..tokens as i64).map(|t| if t % 3 == 2 { -1 } else { t }).collect();
    ((0..2 * count as i32).collect(), slots)
}

#[test]
fn routing_agrees_with_the_cpu() {
    let cpu = oracle();
    // Cases include DeepSeek-V2-Lite, Qwen3-Next, more shared experts than threads, and more chosen experts than lanes.
    for (tokens, count, top_k, shared) in [
        (2, 4, 3, 1),
        (5, 128, 8, 0),
        (3, 64, 6, 2),
        (3, 60, 4, 0),
        (1, 1, 1, 80),
        (2, 257, 16, 1),
        (1, 1024, 8, 0),
        (9, 512, 10, 0),
        (3, 200, 70, 1),
    ] {
        let k = top_k + shared;
        let mut numbers = RandomNumbers::fresh(count as u64);
        // Logits are multiples of 1/4, so that some of the chosen experts have equal logits.
        let coarse = |x: f32| (x * 24.0).round() / 4.0;
        let logits: Vec<f32> = (0..tokens * count).map(|_| coarse(numbers.float())).collect();
        for renormalise in [false, true] {
            let (mut experts, mut weights) = (vec![0i32; tokens * k], vec![0.0f32; tokens * k]);
            let chosen = MatMut::of(&mut experts, tokens, k).unwrap();
            let shares = MatMut::of(&mut weights, tokens, k).unwrap();
            let logits_of = MatRef::of(&logits, tokens, count).unwrap();
            let scores = SoftmaxRouterArgs { logits: logits_of, top_k, renormalise, shared };
            let (before, slots) = counters(tokens, count);
            let mut counted = before.clone();
            let mut to = ExpertLoadArgs {
                tokens: MatMut::of(&mut counted, 2, count).unwrap(),
                layer: 1,
                slots: Some(MatRef::of(&slots, 1, tokens).unwrap()),
            };
            cpu.launch(
                &S,
                SoftmaxRouting {
                    experts: chosen,
                    weights: shares,
                    router: &scores,
                    load: Some(&mut to),
                },
            )
            .unwrap();
            let choices = counted.iter().sum::<i32>() - before.iter().sum::<i32>();
            assert_eq!(choices as usize, (tokens - tokens / 3) * top_k);
            for (chosen, shares) in experts.chunks(k).zip(weights.chunks(k)) {
                let shared_experts = count as i32..(count + shared) as i32;
                assert!(chosen[top_k..].iter().copied().eq(shared_experts));
                assert!(shares[top_k..].iter().all(|share| *share == 1.0));
            }
            for device in devices() {
                let logits = DeviceArray::of(&device, &logits, tokens, count);
                let scores = SoftmaxRouterArgs { logits: logits.mat(), ..scores };
                let mut chosen = DeviceArray::<i32>::poisoned(&device, tokens, k);
                let mut shares = DeviceArray::<f32>::poisoned(&device, tokens, k);
                let out = (chosen.mat_mut(), shares.mat_mut());
                let mut numbers = DeviceArray::of(&device, &before, 2, count);
                let slots = DeviceArray::row(&device, &slots);
                let mut to = ExpertLoadArgs {
                    tokens: numbers.mat_mut(),
                    layer: 1,
                    slots: Some(slots.mat()),
                };
                device
                    .launch(
                        &S,
                        SoftmaxRouting {
                            experts: out.0,
                            weights: out.1,
                            router: &scores,
                            load: Some(&mut to),
                        },
                    )
                    .unwrap();
                assert_eq!(chosen.read(&device), experts, "{} {count} experts", device.name());
                assert_eq!(numbers.read(&device), counted, "{} {count} experts", device.name());
                for (got, expected) in shares.read(&device).iter().zip(&weights) {
                    assert!((got - expected).abs() <= 4e-6 * expected, "{got} {expected}");
                }
            }
        }
    }
}

#[test]
fn non_finite_logits_route_to_existing_experts() {
    let (count, k) = (60, 4);
    for device in devices() {
        for strange in [f32::NAN, f32::INFINITY, f32::NEG_INFINITY] {
            let scores = DeviceArray::row(&device, &vec![strange; count]);
            let mut chosen = DeviceArray::<i32>::poisoned(&device, 1, k);
            let mut shares = DeviceArray::<f32>::poisoned(&device, 1, k);
            let out = (chosen.mat_mut(), shares.mat_mut());
            let scores =
                SoftmaxRouterArgs { logits: scores.mat(), top_k: k, renormalise: true, shared: 0 };
            device
                .launch(
                    &S,
                    SoftmaxRouting { experts: out.0, weights: out.1, router: &scores, load: None },
                )
                .unwrap();
            assert_eq!(chosen.read(&device), [0, 1, 2, 3]);
        }
    }
}

/// Returns logits of a token whose chosen experts and groups have clearly separated scores: the order of
/// nearly equal scores would depend on rounding.
fn clear_logits(numbers: &mut RandomNumbers, bias: &[f32], groups: usize) -> Vec<f32> {
    const GAP: f32 = 1e-5;
    let separated = |mut values: Vec<f32>| {
        values.sort_by(f32::total_cmp);
        values.windows(2).all(|pair| pair[1] - pair[0] > GAP)
    };
    loop {
        let mut fine = || 4.0 * (numbers.float() + numbers.float() / 256.0);
        let logits: Vec<f32> = bias.iter().map(|_| fine()).collect();
        let sigmoid = |l: &f32| 1.0 / (1.0 + (-l).exp());
        let choices: Vec<f32> = logits.iter().zip(bias).map(|(l, b)| sigmoid(l) + b).collect();
        let of_group = |group: &[f32]| {
            let mut best = group.to_vec();
            best.sort_by(f32::total_cmp);
            best.iter().rev().take(2).sum::<f32>()
        };
        let scores = choices.chunks(bias.len() / groups).map(of_group).collect();
        if separated(choices.clone()) && separated(scores) && separated(logits.clone()) {
            return logits;
        }
    }
}

#[test]
fn any_rule_agrees_with_the_cpu() {
    let cpu = oracle();
    // The last case has the sizes of DeepSeek-V3.
    for (tokens, count, groups, top_k, shared) in
        [(3, 8, 4, 2, 1), (2, 24, 3, 6, 2), (1, 60, 1, 4, 0), (2, 64, 8, 8, 0), (2, 256, 8, 8, 1)]
    {
        let k = top_k + shared;
        let mut numbers = RandomNumbers::fresh(count as u64);
        let bias: Vec<f32> = (0..count).map(|_| numbers.float() / 4.0).collect();
        let logits: Vec<f32> =
            (0..tokens).flat_map(|_| clear_logits(&mut numbers, &bias, groups)).collect();
        for (score, by, corrected, renormalise) in [
            (RouterScoreFunction::Sigmoid, GroupScoreFunction::Top2Sum, true, true),
            (RouterScoreFunction::Sigmoid, GroupScoreFunction::Top2Sum, true, false),
            (RouterScoreFunction::Softmax, GroupScoreFunction::Largest, false, false),
        ] {
            let topk_group = groups.div_ceil(2);
            let groups =
                (groups > 1).then_some(ExpertGroups { count: groups, topk_group, score: by });
            let rule =
                RouterRuleArgs { score, bias: None, groups, renormalise, scale: 2.5, shared };
            let (mut experts, mut weights) = (vec![0i32; tokens * k], vec![0f32; tokens * k]);
            let chosen = MatMut::of(&mut experts, tokens, k).unwrap();
            let shares = MatMut::of(&mut weights, tokens, k).unwrap();
            let added = corrected.then(|| MatRef::of(&bias, 1, count).unwrap());
            let scores = MatRef::of(&logits, tokens, count).unwrap();
            let (before, _) = counters(tokens, count);
            let mut counted = before.clone();
            let tokens_of = MatMut::of(&mut counted, 2, count).unwrap();
            let mut to = ExpertLoadArgs { tokens: tokens_of, layer: 0, slots: None };
            let cpu_rule = RouterRuleArgs { bias: added, ..rule };
            cpu.launch(
                &S,
                GroupedTopKRouting {
                    experts: chosen,
                    weights: shares,
                    logits: scores,
                    rule: &cpu_rule,
                    load: Some(&mut to),
                },
            )
            .unwrap();
            for device in devices() {
                let scores = DeviceArray::of(&device, &logits, tokens, count);
                let added = DeviceArray::row(&device, &bias);
                let rule = RouterRuleArgs { bias: corrected.then(|| added.mat()), ..rule };
                let mut chosen = DeviceArray::<i32>::poisoned(&device, tokens, k);
                let mut shares = DeviceArray::<f32>::poisoned(&device, tokens, k);
                let out = (chosen.mat_mut(), shares.mat_mut());
                let mut numbers = DeviceArray::of(&device, &before, 2, count);
                let mut to = ExpertLoadArgs { tokens: numbers.mat_mut(), layer: 0, slots: None };
                device
                    .launch(
                        &S,
                        GroupedTopKRouting {
                            experts: out.0,
                            weights: out.1,
                            logits: scores.mat(),
                            rule: &rule,
                            load: Some(&mut to),
                        },
                    )
                    .unwrap();
                assert_eq!(numbers.read(&device), counted, "{} {rule:?}", device.name());
                assert_eq!(chosen.read(&device), experts, "{} {rule:?}", device.name());
                for (got, expected) in shares.read(&device).iter().zip(&weights) {
                    assert!((got - expected).abs() <= 4e-6 * expected, "{got} {expected}");
                }
            }
        }
    }
}
