//! Routing against the CPU.

use kernels::{Driver, Kernels, Mat, MatMut};

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
