//! Routing against the CPU.

use kernels::{Driver, ExpertGroups, GroupScore, Kernels, Mat, MatMut, RouteRule, RouterScore};

use crate::support::{Array, Numbers, S, devices, oracle};

#[test]
fn routing_agrees_with_the_cpu() {
    let cpu = oracle();
    for (tokens, count, k) in
        [(2, 4, 3), (5, 128, 8), (3, 60, 4), (1, 1, 1), (2, 257, 16), (1, 1024, 8)]
    {
        let mut numbers = Numbers::fresh(count as u64);
        // Coarse enough for equals among the chosen.
        let coarse = |x: f32| (x * 24.0).round() / 4.0;
        let logits: Vec<f32> = (0..tokens * count).map(|_| coarse(numbers.float())).collect();
        for normalise in [false, true] {
            let (mut experts, mut weights) = (vec![0i32; tokens * k], vec![0.0f32; tokens * k]);
            let chosen = MatMut::of(&mut experts, tokens, k).unwrap();
            let shares = MatMut::of(&mut weights, tokens, k).unwrap();
            let scores = Mat::of(&logits, tokens, count).unwrap();
            cpu.moe_route_softmax(&S, chosen, shares, scores, normalise).unwrap();
            for device in devices() {
                let scores = Array::of(&device, &logits, tokens, count);
                let mut chosen = Array::<i32>::poisoned(&device, tokens, k);
                let mut shares = Array::<f32>::poisoned(&device, tokens, k);
                let out = (chosen.mat_mut(), shares.mat_mut());
                device.moe_route_softmax(&S, out.0, out.1, scores.mat(), normalise).unwrap();
                assert_eq!(chosen.read(&device), experts, "{} {count} experts", device.name());
                for (got, expected) in shares.read(&device).iter().zip(&weights) {
                    assert!((got - expected).abs() <= 2e-6 * expected, "{got} {expected}");
                }
            }
        }
    }
}

#[test]
fn strange_scores_still_choose_experts_that_exist() {
    let (count, k) = (60, 4);
    for device in devices() {
        for strange in [f32::NAN, f32::INFINITY, f32::NEG_INFINITY] {
            let scores = Array::row(&device, &vec![strange; count]);
            let mut chosen = Array::<i32>::poisoned(&device, 1, k);
            let mut shares = Array::<f32>::poisoned(&device, 1, k);
            let out = (chosen.mat_mut(), shares.mat_mut());
            device.moe_route_softmax(&S, out.0, out.1, scores.mat(), true).unwrap();
            assert_eq!(chosen.read(&device), [0, 1, 2, 3]);
        }
    }
}

/// Logits of a token whose choices, and those of groups, are not close: which of two equals is larger depends on rounding.
fn clear_logits(numbers: &mut Numbers, bias: &[f32], groups: usize) -> Vec<f32> {
    const GAP: f32 = 1e-5;
    let apart = |mut values: Vec<f32>| {
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
        if apart(choices.clone()) && apart(scores) && apart(logits.clone()) {
            return logits;
        }
    }
}

#[test]
fn any_rule_agrees_with_the_cpu() {
    let cpu = oracle();
    for (tokens, count, groups, k) in [(3, 8, 4, 2), (2, 24, 3, 6), (1, 60, 1, 4), (2, 64, 8, 8)] {
        let mut numbers = Numbers::fresh(count as u64);
        let bias: Vec<f32> = (0..count).map(|_| numbers.float() / 4.0).collect();
        let logits: Vec<f32> =
            (0..tokens).flat_map(|_| clear_logits(&mut numbers, &bias, groups)).collect();
        for (score, by, corrected, normalise) in [
            (RouterScore::Sigmoid, GroupScore::TwoLargest, true, true),
            (RouterScore::Sigmoid, GroupScore::TwoLargest, true, false),
            (RouterScore::Softmax, GroupScore::Largest, false, false),
        ] {
            let kept = groups.div_ceil(2);
            let groups = (groups > 1).then_some(ExpertGroups { count: groups, kept, by });
            let rule = RouteRule { score, bias: None, groups, normalise, scale: 2.5 };
            let (mut experts, mut weights) = (vec![0i32; tokens * k], vec![0f32; tokens * k]);
            let chosen = MatMut::of(&mut experts, tokens, k).unwrap();
            let shares = MatMut::of(&mut weights, tokens, k).unwrap();
            let added = corrected.then(|| Mat::of(&bias, 1, count).unwrap());
            let scores = Mat::of(&logits, tokens, count).unwrap();
            cpu.moe_route(&S, chosen, shares, scores, &RouteRule { bias: added, ..rule }).unwrap();
            for device in devices() {
                let scores = Array::of(&device, &logits, tokens, count);
                let added = Array::row(&device, &bias);
                let rule = RouteRule { bias: corrected.then(|| added.mat()), ..rule };
                let mut chosen = Array::<i32>::poisoned(&device, tokens, k);
                let mut shares = Array::<f32>::poisoned(&device, tokens, k);
                let out = (chosen.mat_mut(), shares.mat_mut());
                device.moe_route(&S, out.0, out.1, scores.mat(), &rule).unwrap();
                assert_eq!(chosen.read(&device), experts, "{} {rule:?}", device.name());
                for (got, expected) in shares.read(&device).iter().zip(&weights) {
                    assert!((got - expected).abs() <= 4e-6 * expected, "{got} {expected}");
                }
            }
        }
    }
}
