//! Row-wise CPU kernels: embedding, norms, activations, additions, gathers, routing, expert dispatch and
//! experts.

use device::{DType, DeviceStream, MatMut, MatRef, bf16, f16};
use kernels::{
    AddRmsNorm, ExpertGroups, ExpertLoadArgs, ExpertMlp, ExpertParallelLayout,
    ExpertPlacementLookup, ExpertWeights, GateActivation, GatedActivation, GatedProduct,
    GroupScoreFunction, GroupedTopKRouting, HiddenStateSum, LogitSoftcap, MoeCombine,
    MoeDispatchLayout, PackedEmbedding, RmsNorm, RouterRuleArgs, RouterScoreFunction, RowGather,
    SigmoidGatedAdd, SoftmaxRouterArgs, SoftmaxRouting, TensorAdd, TensorScalarMul, TokenEmbedding,
    TopKRoutes,
};

use crate::support::{
    CpuTestFloat, SeededNumbers, bytes_of, cast, devices, error, host, tolerance,
};

const S: DeviceStream = DeviceStream(0);

/// Norms of `T` with weights of `W`. f32 weights are multiplied in f32 and the product is rounded once.
fn norms<T: CpuTestFloat, W: CpuTestFloat>() {
    let unrounded = W::DTYPE == DType::F32;
    for (rows, cols) in [(1, 1), (2, 17), (5, 96), (3, 1000)] {
        let mut numbers = SeededNumbers::new(cols as u64);
        let x = cast::<T>(&numbers.floats(rows * cols));
        let delta = cast::<T>(&numbers.floats(rows * cols));
        let w = cast::<W>(&numbers.floats(cols));
        let normed = |x: &[T]| -> Vec<f64> {
            x.chunks(cols)
                .flat_map(|row| {
                    let squares: f64 = row.iter().map(|x| f64::from(x.value()).powi(2)).sum();
                    let scale = 1.0 / (squares / cols as f64 + 1e-5).sqrt();
                    row.iter().zip(&w).map(move |(x, w)| {
                        let unit = f64::from(x.value()) * scale;
                        let rounded = f64::from(T::of(unit as f32).value());
                        f64::from(w.value()) * if unrounded { unit } else { rounded }
                    })
                })
                .collect()
        };
        let summed: Vec<T> =
            x.iter().zip(&delta).map(|(a, b)| T::of(a.value() + b.value())).collect();
        for device in devices(2) {
            let weight = MatRef::of(&w, 1, cols).unwrap();
            let mut y = vec![T::of(0.0); rows * cols];
            let out = MatMut::of(&mut y, rows, cols).unwrap();
            device
                .launch(
                    &S,
                    RmsNorm { y: out, x: MatRef::of(&x, rows, cols).unwrap(), weight, eps: 1e-5 },
                )
                .unwrap();
            assert!(error(&y, &normed(&x)) < tolerance::<T>());
            let is_nearest = |(y, exact): (&T, f64)| *y == T::of(exact as f32);
            let nearest = y.iter().zip(normed(&x)).filter(|pair| is_nearest(*pair)).count();
            if T::DTYPE != DType::F32 {
                assert!(nearest * 100 >= 99 * y.len(), "{nearest} of {} are rounded once", y.len());
            }
            let mut residual = x.clone();
            let out = MatMut::of(&mut y, rows, cols).unwrap();
            let stream = MatMut::of(&mut residual, rows, cols).unwrap();
            let delta = MatRef::of(&delta, rows, cols).unwrap();
            device.launch(&S, AddRmsNorm { y: out, x: stream, delta, weight, eps: 1e-5 }).unwrap();
            assert_eq!(residual, summed);
            assert!(error(&y, &normed(&summed)) < tolerance::<T>());
        }
    }
}

fn softcapped<T: CpuTestFloat>() {
    for (rows, cols, cap) in [(1, 1, 30.0f32), (3, 33, 5.0), (2, 9000, 50.0)] {
        let mut numbers = SeededNumbers::new(cols as u64 + 3);
        let x: Vec<f32> = numbers.floats(rows * cols).iter().map(|x| x * 90.0).collect();
        let x = cast::<T>(&x);
        let capped = |x: &T| f64::from(cap) * (f64::from(x.value()) / f64::from(cap)).tanh();
        let expected: Vec<f64> = x.iter().map(capped).collect();
        for device in devices(2) {
            let mut y = x.clone();
            let out = MatMut::of(&mut y, rows, cols).unwrap();
            device.launch(&S, LogitSoftcap { x: out, cap }).unwrap();
            assert!(error(&y, &expected) < tolerance::<T>());
        }
    }
}

fn scaled_and_gated<T: CpuTestFloat>() {
    for (rows, cols) in [(1, 1), (3, 33), (2, 9000)] {
        let mut numbers = SeededNumbers::new(cols as u64 + 5);
        let [x, y] = [(); 2].map(|()| cast::<T>(&numbers.floats(rows * cols)));
        let gate: Vec<f32> = numbers.floats(rows).iter().map(|gate| gate * 9.0).collect();
        let scaled: Vec<f64> = x.iter().map(|x| f64::from(x.value()) * 0.22).collect();
        let sum = |i: usize| {
            let share = 1.0 / (1.0 + f64::from(-gate[i / cols]).exp());
            f64::from(y[i].value()) + share * f64::from(x[i].value())
        };
        let sums: Vec<f64> = (0..rows * cols).map(sum).collect();
        for device in devices(2) {
            let mut out = x.clone();
            let mat = MatMut::of(&mut out, rows, cols).unwrap();
            device.launch(&S, TensorScalarMul { x: mat, factor: 0.22 }).unwrap();
            assert!(error(&out, &scaled) < tolerance::<T>());
            let mut out = y.clone();
            let mat = MatMut::of(&mut out, rows, cols).unwrap();
            let (x, gate) = (MatRef::of(&x, rows, cols), MatRef::of(&gate, rows, 1));
            let op = SigmoidGatedAdd { y: mat, x: x.unwrap(), gate: gate.unwrap() };
            device.launch(&S, op).unwrap();
            assert!(error(&out, &sums) < tolerance::<T>());
        }
    }
}

#[test]
fn scaling_and_gated_addition_are_correct() {
    scaled_and_gated::<f32>();
    scaled_and_gated::<bf16>();
    scaled_and_gated::<f16>();
}

#[test]
fn softcap_is_correct() {
    softcapped::<f32>();
    softcapped::<bf16>();
    softcapped::<f16>();
}

const GATES: [GateActivation; 3] = [
    GateActivation::Silu,
    GateActivation::GeluTanh,
    GateActivation::ClampedSilu { alpha: 1.702, limit: 3.5 },
];

/// The activation of gate and up in f64, as transformers computes it.
fn exact_activation(activation: GateActivation, gate: f64, up: f64) -> f64 {
    let sigmoid = |x: f64| 1.0 / (1.0 + (-x).exp());
    match activation {
        GateActivation::Silu => gate * sigmoid(gate) * up,
        GateActivation::GeluTanh => {
            let z = (2.0 / std::f64::consts::PI).sqrt() * (gate + 0.044_715 * gate.powi(3));
            0.5 * gate * (1.0 + z.tanh()) * up
        }
        GateActivation::ClampedSilu { alpha, limit } => {
            let limit = f64::from(limit);
            let (gate, up) = (gate.min(limit), up.clamp(-limit, limit));
            (up + 1.0) * gate * sigmoid(f64::from(alpha) * gate)
        }
    }
}

/// Infinite and NaN inputs give the limits of the functions, and NaN.
#[test]
fn activations_have_limits_and_keep_nan() {
    let clamped = GateActivation::ClampedSilu { alpha: 1.702, limit: 7.0 };
    for device in devices(1) {
        let run = |activation, gate: f32, up: f32| {
            let (x, mut y) = ([gate, up], [0f32]);
            let (out, x) = (MatMut::of(&mut y, 1, 1).unwrap(), MatRef::of(&x, 1, 2).unwrap());
            device.launch(&S, GatedActivation { y: out, x, activation }).unwrap();
            y[0]
        };
        for activation in GATES {
            assert!(run(activation, f32::NAN, 1.0).is_nan(), "{activation:?}");
            assert!(run(activation, 1.0, f32::NAN).is_nan(), "{activation:?}");
        }
        assert_eq!(run(GateActivation::GeluTanh, 1e30, 1.0), 1e30);
        assert_eq!(run(GateActivation::GeluTanh, -1e30, 1.0), 0.0);
        let greatest = 8.0 * exact_activation(GateActivation::Silu, 7.0 * 1.702, 1.0) / 1.702;
        for (gate, up) in [(7.0, 7.0), (8.0, 1e30), (f32::INFINITY, f32::INFINITY)] {
            let got = f64::from(run(clamped, gate, up));
            assert!((got - greatest).abs() < 1e-5, "{gate} {up}: {got}");
        }
        assert_eq!(run(clamped, 100.0, -1.0), 0.0, "up + 1 is 0");
    }
}

fn activations<T: CpuTestFloat>() {
    for (rows, cols) in [(1, 1), (3, 33), (2, 9000)] {
        let mut numbers = SeededNumbers::new(cols as u64 + 7);
        let x: Vec<f32> = numbers.floats(rows * 2 * cols).iter().map(|x| x * 8.0).collect();
        let x = cast::<T>(&x);
        let b = cast::<T>(&numbers.floats(rows * cols));
        for device in devices(2) {
            let mut y = vec![T::of(0.0); rows * cols];
            for activation in GATES {
                let expected: Vec<f64> = (0..rows * cols)
                    .map(|i| {
                        let row = &x[i / cols * 2 * cols..];
                        let [gate, up] = [i % cols, cols + i % cols].map(|c| row[c].value().into());
                        exact_activation(activation, gate, up)
                    })
                    .collect();
                let out = MatMut::of(&mut y, rows, cols).unwrap();
                let x = MatRef::of(&x, rows, 2 * cols).unwrap();
                device.launch(&S, GatedActivation { y: out, x, activation }).unwrap();
                let error = error(&y, &expected);
                assert!(error < tolerance::<T>(), "{activation:?}: {error:e}");
                let mut separate = vec![T::of(0.0); rows * cols];
                let out = MatMut::of(&mut separate, rows, cols).unwrap();
                let [gate, up] = [0, cols].map(|first| x.columns(first, cols));
                device.launch(&S, GatedProduct { y: out, gate, up, activation }).unwrap();
                assert!(separate.iter().zip(&y).all(|(a, b)| a.value() == b.value()));
            }
            let mut sum = vec![T::of(0.0); rows * cols];
            let out = MatMut::of(&mut sum, rows, cols).unwrap();
            let (left, right) = (MatRef::of(&y, rows, cols), MatRef::of(&b, rows, cols));
            device.launch(&S, TensorAdd { y: out, a: left.unwrap(), b: right.unwrap() }).unwrap();
            for ((s, a), b) in sum.iter().zip(&y).zip(&b) {
                assert_eq!(*s, T::of(a.value() + b.value()));
            }
        }
    }
}

fn lookups<T: CpuTestFloat>() {
    let (vocabulary, hidden) = (70, 34);
    let table = SeededNumbers::new(1).floats(vocabulary * hidden);
    let ids = [0i32, 69, 33, 5, 5, 70, -1, 31, 32];
    for device in devices(2) {
        for first in [0, 3] {
            let expected: Vec<T> = ids
                .iter()
                .flat_map(|&id| {
                    let row = usize::try_from(id - first as i32).ok().filter(|r| *r < vocabulary);
                    let at = |d: usize| row.map_or(0.0, |r| table[r * hidden + d]);
                    (0..hidden).map(move |d| T::of(at(d))).collect::<Vec<_>>()
                })
                .collect();
            let ids = MatRef::of(&ids, 1, ids.len()).unwrap();
            let mut y = vec![T::of(7.0); expected.len()];
            let plain = cast::<T>(&table);
            let plain = MatRef::of(&plain, vocabulary, hidden).unwrap();
            let out = MatMut::of(&mut y, ids.cols(), hidden).unwrap();
            device.launch(&S, TokenEmbedding { y: out, ids, table: plain, first }).unwrap();
            assert_eq!(y, expected);
            let bytes = bytes_of(&table);
            let packed = device.pack(&[host(&bytes, vocabulary, hidden)], T::DTYPE).unwrap();
            y.fill(T::of(7.0));
            let out = MatMut::of(&mut y, ids.cols(), hidden).unwrap();
            device.launch(&S, PackedEmbedding { y: out, ids, table: &packed, first }).unwrap();
            assert_eq!(y, expected, "the packed table holds the same rows");
        }
    }
}

#[test]
fn norms_agree_with_the_formula() {
    norms::<f32, f32>();
    norms::<bf16, bf16>();
    norms::<f16, f16>();
    norms::<bf16, f32>();
    norms::<f16, f32>();
}

#[test]
fn activations_and_sums_agree_with_the_formula() {
    activations::<f32>();
    activations::<bf16>();
    activations::<f16>();
}

#[test]
fn lookups_copy_rows() {
    lookups::<f32>();
    lookups::<bf16>();
    lookups::<f16>();
}

#[test]
fn row_gather_rejects_rows_out_of_range() {
    let x: Vec<f32> = (0..12).map(|i| i as f32).collect();
    let mut y = [0.0f32; 9];
    for device in devices(1) {
        let mut go = |rows: &[i32; 3]| {
            let out = MatMut::of(&mut y, 3, 3).unwrap();
            device.launch(
                &S,
                RowGather {
                    y: out,
                    x: MatRef::of(&x, 4, 3).unwrap(),
                    rows: MatRef::of(rows, 1, 3).unwrap(),
                },
            )
        };
        assert!(go(&[0, 4, 1]).is_err());
        assert!(go(&[0, -1, 1]).is_err());
        go(&[3, 0, 3]).unwrap();
        assert_eq!(y, [9.0, 10.0, 11.0, 0.0, 1.0, 2.0, 9.0, 10.0, 11.0]);
    }
}

fn one_row(array: &[i32]) -> MatRef<'_> {
    MatRef::of(array, 1, array.len()).unwrap()
}

/// Sums the hidden states of two sequences, once with one row per sequence and once with a sequence split
/// into two rows. The sequence slots contain sums of earlier sequences.
fn hidden_state_sums<T: CpuTestFloat>() {
    let (tokens, cols) = (9, 37);
    let x = cast::<T>(&SeededNumbers::new(11).floats(tokens * cols));
    let x = MatRef::of(&x, tokens, cols).unwrap();
    for device in devices(1) {
        let run = |sums: &mut [f32], cu_q: &[i32], seq_slots: &[i32], continues: &[i32]| {
            let op = HiddenStateSum {
                sums: MatMut::of(sums, 3, cols).unwrap(),
                x,
                cu_q: one_row(cu_q),
                seq_slots: one_row(seq_slots),
                continues: one_row(continues),
            };
            device.launch(&S, op)
        };
        let (mut whole, mut parts) = (vec![7.0; 3 * cols], vec![-3.0; 3 * cols]);
        run(&mut whole, &[0, 4, 9], &[2, 0], &[0, 0]).unwrap();
        run(&mut parts, &[4, 6], &[0], &[0]).unwrap();
        run(&mut parts, &[6, 9], &[0], &[1]).unwrap();
        run(&mut parts, &[0, 4], &[2], &[0]).unwrap();
        assert_eq!(whole[..cols], parts[..cols], "chunks change no bit");
        assert_eq!(whole[2 * cols..], parts[2 * cols..]);
        assert_eq!(whole[cols..2 * cols], vec![7.0; cols], "an unused slot");
        let exact = |c: usize| (4..9).map(|t| f64::from(x.row::<T>(t)[c].value())).sum::<f64>();
        let expected: Vec<f64> = (0..cols).map(exact).collect();
        assert!(error(&whole[..cols], &expected) < tolerance::<f32>());
        assert!(run(&mut whole, &[0, 1], &[3], &[0]).is_err(), "no such slot");
        assert!(run(&mut whole, &[0, 10], &[0], &[0]).is_err(), "no such token");
        assert!(run(&mut whole, &[0, 1, 2], &[0], &[0]).is_err(), "shapes disagree");
    }
}

#[test]
fn hidden_state_sums_do_not_depend_on_chunks() {
    hidden_state_sums::<f32>();
    hidden_state_sums::<bf16>();
    hidden_state_sums::<f16>();
}

#[test]
fn routing_takes_the_lower_index_among_equals() {
    let logits = [1.0f32, 3.0, 3.0, 2.0, /**/ 0.0, 0.0, 0.0, 0.0];
    for device in devices(1) {
        for renormalise in [false, true] {
            let (mut experts, mut weights) = ([0i32; 6], [0.0f32; 6]);
            let out = MatMut::of(&mut experts, 2, 3).unwrap();
            let out_weights = MatMut::of(&mut weights, 2, 3).unwrap();
            let logits = MatRef::of(&logits, 2, 4).unwrap();
            let scores = SoftmaxRouterArgs { logits, top_k: 3, renormalise, shared: 0 };
            device
                .launch(
                    &S,
                    SoftmaxRouting {
                        experts: out,
                        weights: out_weights,
                        router: &scores,
                        load: None,
                    },
                )
                .unwrap();
            assert_eq!(experts, [1, 2, 3, 0, 1, 2]);
            let sum: f32 = weights[3..].iter().sum();
            assert!((sum - if renormalise { 1.0 } else { 0.75 }).abs() < 1e-6);
            assert!(weights[0] == weights[1] && weights[1] > weights[2]);
        }
    }
}

/// Routes a token with grouped top-k. The six experts are in three groups of two, with the scores (0.9, 0.1),
/// (0.6, 0.5) and (0.8, 0.2).
#[test]
fn expert_groups_are_chosen_before_experts() {
    let scores = [0.9f32, 0.1, 0.6, 0.5, 0.8, 0.2];
    let odds = scores.map(|p| (p / (1.0 - p)).ln());
    let shares = scores.map(f32::ln);
    let bias = [0.3f32, 0.0, 0.0, 0.0, 0.0, 0.0];
    let plain = RouterRuleArgs {
        score: RouterScoreFunction::Sigmoid,
        bias: None,
        groups: None,
        renormalise: false,
        scale: 1.0,
        shared: 0,
    };
    let groups = |topk_group, score| Some(ExpertGroups { count: 3, topk_group, score });
    let two = GroupScoreFunction::Top2Sum;
    let corrected = Some(MatRef::of(&bias, 1, 6).unwrap());
    let shared = scores.iter().sum::<f32>();
    let softmax = RouterRuleArgs { score: RouterScoreFunction::Softmax, scale: shared, ..plain };
    // Router rule, logits, expected experts, expected weights.
    type RoutingTestCase<'a> = (RouterRuleArgs<'a>, [f32; 6], &'a [i32], &'a [f32]);
    let cases: [RoutingTestCase<'_>; 6] = [
        (plain, odds, &[0, 4, 2], &[0.9, 0.8, 0.6]),
        (RouterRuleArgs { groups: groups(1, two), ..plain }, odds, &[2, 3], &[0.6, 0.5]),
        // The bias affects which experts are chosen, but not their weights.
        (
            RouterRuleArgs { groups: groups(1, two), bias: corrected, ..plain },
            odds,
            &[0, 1],
            &[0.9, 0.1],
        ),
        (
            RouterRuleArgs { groups: groups(1, two), renormalise: true, scale: 2.2, ..plain },
            odds,
            &[2, 3],
            &[1.2, 1.0],
        ),
        (softmax, shares, &[0, 4, 2], &[0.9, 0.8, 0.6]),
        (
            RouterRuleArgs { groups: groups(2, GroupScoreFunction::Largest), ..softmax },
            shares,
            &[0, 4, 5],
            &[0.9, 0.8, 0.2],
        ),
    ];
    for device in devices(1) {
        for (rule, logits, wanted, weighed) in &cases {
            let k = wanted.len();
            let (mut experts, mut weights) = (vec![0i32; k], vec![0f32; k]);
            let out = MatMut::of(&mut experts, 1, k).unwrap();
            let out_weights = MatMut::of(&mut weights, 1, k).unwrap();
            let logits = MatRef::of(logits, 1, 6).unwrap();
            device
                .launch(
                    &S,
                    GroupedTopKRouting {
                        experts: out,
                        weights: out_weights,
                        logits,
                        rule,
                        load: None,
                    },
                )
                .unwrap();
            assert_eq!(experts, *wanted, "{rule:?}");
            let off = weights.iter().zip(*weighed).map(|(w, e)| (w - e).abs());
            assert!(off.fold(0.0, f32::max) < 1e-6, "{rule:?}: {weights:?}");
        }
        // Two shared experts are appended to the routed experts of the token; the load counters do not count
        // them.
        let rule = RouterRuleArgs { renormalise: true, scale: 1.7, shared: 2, ..plain };
        let (mut experts, mut weights, mut counted) = ([0i32; 4], [0f32; 4], [0i32; 6]);
        let (out, out_weights) =
            (MatMut::of(&mut experts, 1, 4).unwrap(), MatMut::of(&mut weights, 1, 4).unwrap());
        let tokens = MatMut::of(&mut counted, 1, 6).unwrap();
        let mut count = ExpertLoadArgs { tokens, layer: 0, slots: None };
        let logits = MatRef::of(&odds, 1, 6).unwrap();
        device
            .launch(
                &S,
                GroupedTopKRouting {
                    experts: out,
                    weights: out_weights,
                    logits,
                    rule: &rule,
                    load: Some(&mut count),
                },
            )
            .unwrap();
        assert_eq!((experts, counted), ([0, 4, 6, 7], [1, 0, 0, 0, 1, 0]));
        assert!(
            weights[..2].iter().zip([0.9, 0.8]).all(|(w, e): (&f32, f32)| (w - e).abs() < 1e-6)
        );
        assert_eq!(weights[2..], [1.0; 2]);
        // Selecting more experts per token than the selected groups contain is an error.
        let rule = RouterRuleArgs { groups: groups(1, two), ..plain };
        let (mut experts, mut weights) = ([0i32; 3], [0f32; 3]);
        let (out, out_weights) =
            (MatMut::of(&mut experts, 1, 3).unwrap(), MatMut::of(&mut weights, 1, 3).unwrap());
        let logits = MatRef::of(&odds, 1, 6).unwrap();
        assert!(
            device
                .launch(
                    &S,
                    GroupedTopKRouting {
                        experts: out,
                        weights: out_weights,
                        logits,
                        rule: &rule,
                        load: None
                    }
                )
                .is_err()
        );
    }
}

#[test]
fn tokens_choose_expert_replicas_by_position() {
    // Expert placement, four numbers per expert: number of replicas (3, 1, 2), then their physical slots (−1
    // = unused entry).
    let placement = [3, 0, 4, 5, 1, 2, -1, -1, 2, 1, 3, -1];
    let positions = [0, 1, 2, 3, 7];
    for device in devices(2) {
        let mut experts = [0, 2, 0, 2, 0, 1, 2, 0, 0, 2];
        let (placement, at) =
            (MatRef::of(&placement, 3, 4).unwrap(), MatRef::of(&positions, 1, 5).unwrap());
        let chosen = MatMut::of(&mut experts, 5, 2).unwrap();
        device
            .launch(
                &S,
                ExpertPlacementLookup { experts: chosen, positions: at, tokens: None, placement },
            )
            .unwrap();
        assert_eq!(experts, [0, 1, 4, 3, 5, 2, 3, 0, 4, 3]);
        let mut experts = [0, 2, 0, 2];
        let tokens = [4, 2];
        let tokens = |n: usize| Some(MatRef::of(&tokens[..n], 1, n).unwrap());
        let chosen = MatMut::of(&mut experts, 2, 2).unwrap();
        device
            .launch(
                &S,
                ExpertPlacementLookup {
                    experts: chosen,
                    positions: at,
                    tokens: tokens(2),
                    placement,
                },
            )
            .unwrap();
        assert_eq!(experts, [4, 3, 5, 1], "of the fifth token and the third");
        let one = MatRef::of(&positions[..1], 1, 1).unwrap();
        let mut experts = [0, 2];
        let chosen = MatMut::of(&mut experts, 1, 2).unwrap();
        let error = device
            .launch(
                &S,
                ExpertPlacementLookup {
                    experts: chosen,
                    positions: one,
                    tokens: tokens(1),
                    placement,
                },
            )
            .unwrap_err();
        assert!(error.to_string().contains("token"), "{error}");
        for unknown in [3, -1] {
            let mut experts = [0, unknown];
            let chosen = MatMut::of(&mut experts, 1, 2).unwrap();
            let at = MatRef::of(&positions[..1], 1, 1).unwrap();
            let error = device
                .launch(
                    &S,
                    ExpertPlacementLookup {
                        experts: chosen,
                        positions: at,
                        tokens: None,
                        placement,
                    },
                )
                .unwrap_err()
                .to_string();
            assert!(
                error.contains("eplb_map_experts") && error.contains(&unknown.to_string()),
                "{error}"
            );
        }
    }
}

#[test]
fn tokens_are_dispatched_once_per_target_rank() {
    // Two experts per rank. Of six ranks, ranks 1, 3 and 5 exchange tokens; the other ranks have the same
    // tokens as one of these.
    let layout =
        ExpertParallelLayout { experts_per_rank: 2, ranks: 3, rank_stride: 2, rank_offset: 1 };
    // Two experts per token. Their ranks: 0 and 1; 3 and 3; 5 and 1; none and 2; none and 5; both out of
    // range. Experts on ranks 0 and 2 are ignored.
    let experts = [1, 2, 6, 7, 11, 3, -1, 4, -1, 10, 12, 99];
    for device in devices(2) {
        let mut tokens = [-7; 18];
        let (mut token_rows, mut counts) = ([-7; 18], [-7; 3]);
        let mut dispatch = |experts: &[i32], t: usize, capacity: usize| {
            let tokens = MatMut::of(&mut tokens[..capacity], 1, capacity).unwrap();
            let token_rows = MatMut::of(&mut token_rows[..3 * t], t, 3).unwrap();
            let counts = MatMut::of(&mut counts, 1, 3).unwrap();
            let experts = MatRef::of(experts, t, 2).unwrap();
            device.launch(
                &S,
                MoeDispatchLayout { tokens, token_rows, counts, experts, layout: &layout },
            )
        };
        dispatch(&experts, 6, 18).unwrap();
        let error = dispatch(&experts, 6, 17).unwrap_err().to_string();
        assert!(error.contains("tokens") && error.contains("17"), "{error}");
        assert_eq!(counts, [2, 1, 2]);
        assert_eq!(tokens[..5], [0, 2, 1, 2, 4]);
        let expected = [0, -1, -1, -1, 2, -1, 1, -1, 3, -1, -1, -1, -1, -1, 4, -1, -1, -1];
        assert_eq!(token_rows, expected);
        let (mut tokens, mut token_rows, mut counts) = ([-7; 0], [-7; 0], [-7; 3]);
        let no_tokens = MatMut::of(&mut tokens, 1, 0).unwrap();
        let (no_rows, zero) = (MatMut::of(&mut token_rows, 0, 3), MatMut::of(&mut counts, 1, 3));
        let no_experts = MatRef::of(&[0_i32; 0], 0, 2).unwrap();
        device
            .launch(
                &S,
                MoeDispatchLayout {
                    tokens: no_tokens,
                    token_rows: no_rows.unwrap(),
                    counts: zero.unwrap(),
                    experts: no_experts,
                    layout: &layout,
                },
            )
            .unwrap();
        assert_eq!(counts, [0; 3], "no tokens");
    }
}

fn combine_sums<T: CpuTestFloat>() {
    let (rows, cols, sums) = (7, 45, 5);
    let x = cast::<T>(&SeededNumbers::new(3).floats(rows * cols));
    let token_rows = [0, -1, 6, -1, -1, -1, 3, 3, -1, -1, 5, 4, 2, 1, 0];
    let expected: Vec<T> = (0..sums * cols)
        .map(|i| {
            let named = token_rows[i / cols * 3..][..3].iter().filter(|&&row| row >= 0);
            T::of(named.fold(0.0, |sum, &row| sum + x[row as usize * cols + i % cols].value()))
        })
        .collect();
    for device in devices(2) {
        let mut y = vec![T::of(9.0); sums * cols];
        let mut sum = |token_rows: &[i32]| {
            let (x, token_rows) = (MatRef::of(&x, rows, cols), MatRef::of(token_rows, sums, 3));
            let y = MatMut::of(&mut y, sums, cols).unwrap();
            device.launch(&S, MoeCombine { y, x: x.unwrap(), token_rows: token_rows.unwrap() })
        };
        sum(&token_rows).unwrap();
        let beyond = token_rows.map(|row| if row == 6 { 7 } else { row });
        let error = sum(&beyond).unwrap_err().to_string();
        assert!(error.contains("moe_combine_ranks") && error.contains('7'), "{error}");
        assert_eq!(y, expected);
    }
}

#[test]
fn combine_sums_rows_in_the_given_order() {
    combine_sums::<f32>();
    combine_sums::<bf16>();
    combine_sums::<f16>();
}

/// Compares the expert MLPs with the formula, and a token's result in a batch with the result of the token
/// alone.
fn experts<T: CpuTestFloat>(activation: GateActivation, has_biases: bool) {
    let (tokens, hidden, inner, count, k) = (9usize, 34usize, 22usize, 5usize, 2usize);
    let mut numbers = SeededNumbers::new(21);
    let x = numbers.floats(tokens * hidden);
    let gate_up: Vec<Vec<f32>> = (0..count).map(|_| numbers.floats(2 * inner * hidden)).collect();
    let down: Vec<Vec<f32>> = (0..count).map(|_| numbers.floats(hidden * inner)).collect();
    let chosen: Vec<i32> = (0..tokens)
        .flat_map(|_| {
            let first = numbers.below(count);
            [first as i32, ((first + 1 + numbers.below(count - 1)) % count) as i32]
        })
        .collect();
    let weights: Vec<f32> = numbers.floats(tokens * k).iter().map(|w| w.abs()).collect();
    let mut bias = |n| if has_biases { numbers.floats(count * n) } else { vec![0.0; count * n] };
    let (gate_up_bias, down_bias) = (bias(2 * inner), bias(hidden));
    let first = 1; // Expert 0 is on another rank, so its contribution is missing.
    let mut expected = vec![0.0f64; tokens * hidden];
    for (i, (&e, &weight)) in chosen.iter().zip(&weights).enumerate() {
        let (t, Some(e)) = (i / k, usize::try_from(e).ok().filter(|e| *e >= first)) else {
            continue;
        };
        let dot = |w: &[f32], row: usize, x: &[f32]| -> f64 {
            let w = &w[row * x.len()..];
            x.iter().zip(w).map(|(x, w)| f64::from(*x) * f64::from(*w)).sum()
        };
        let row = &x[t * hidden..][..hidden];
        let round = |x: f64| f64::from(T::of(x as f32).value());
        let act: Vec<f32> = (0..inner)
            .map(|j| {
                let [gate, up] = [j, inner + j].map(|n| {
                    let bias = f64::from(gate_up_bias[e * 2 * inner + n]);
                    round(dot(&gate_up[e], n, row) + bias)
                });
                T::of(exact_activation(activation, gate, up) as f32).value()
            })
            .collect();
        for h in 0..hidden {
            let bias = f64::from(down_bias[e * hidden + h]);
            expected[t * hidden + h] += f64::from(weight) * (dot(&down[e], h, &act) + bias);
        }
    }
    let x = cast::<T>(&x);
    for device in devices(2) {
        let pack = |weights: &[Vec<f32>], rows: usize, cols: usize| {
            let bytes: Vec<_> = weights[first..].iter().map(|w| bytes_of(w)).collect();
            let parts: Vec<_> = bytes.iter().map(|b| vec![host(b, rows, cols)]).collect();
            device.pack_group(&parts, T::DTYPE, rows == 2 * inner).unwrap()
        };
        let (gate_up, down) = (pack(&gate_up, 2 * inner, hidden), pack(&down, hidden, inner));
        let bias_of = |bias, n| has_biases.then(|| MatRef::of(bias, count - first, n).unwrap());
        let experts = ExpertWeights {
            activation,
            gate_up_bias: bias_of(&gate_up_bias[first * 2 * inner..], 2 * inner),
            down_bias: bias_of(&down_bias[first * hidden..], hidden),
            ..ExpertWeights::unbiased(first, &gate_up, &down)
        };
        let run = |tokens: usize, x: &[T], chosen: &[i32], weights: &[f32]| {
            let mut y = vec![T::of(0.0); tokens * hidden];
            let routes = TopKRoutes {
                experts: MatRef::of(chosen, tokens, k).unwrap(),
                weights: MatRef::of(weights, tokens, k).unwrap(),
            };
            let out = MatMut::of(&mut y, tokens, hidden).unwrap();
            let x = MatRef::of(x, tokens, hidden).unwrap();
            device.launch(&S, ExpertMlp { y: out, x, routes: &routes, experts: &experts }).unwrap();
            y
        };
        let y = run(tokens, &x, &chosen, &weights);
        let worst = error(&y, &expected);
        assert!(worst < 2.0 * tolerance::<T>(), "{worst:e}");
        for t in 0..tokens {
            let own = t * k..(t + 1) * k;
            let row = &x[t * hidden..(t + 1) * hidden];
            let single_row = run(1, row, &chosen[own.clone()], &weights[own]);
            assert_eq!(single_row, y[t * hidden..(t + 1) * hidden]);
        }
    }
}

#[test]
fn experts_match_the_formula_and_are_batch_invariant() {
    for activation in GATES {
        for has_biases in [false, true] {
            experts::<f32>(activation, has_biases);
            experts::<bf16>(activation, has_biases);
            experts::<f16>(activation, has_biases);
        }
    }
    assert_eq!(DType::BF16.bytes(), 2);
}
