//! EP dispatch of tokens to experts on other ranks, against the CPU.

use device::{DeviceDriver, MatMut, MatRef, bf16};
use kernels::{ExpertParallelLayout, ExpertPlacementLookup, MoeCombine, TokenDispatch};

use crate::support::{DeviceArray, GpuRealElement, RandomNumbers, S, devices, oracle};

/// Choices of `k` among `count` experts; a few are −1.
fn choices(numbers: &mut RandomNumbers, rows: usize, k: usize, count: usize) -> Vec<i32> {
    let choice = |numbers: &mut RandomNumbers| match numbers.below(9) {
        0 => -1,
        _ => numbers.below(count) as i32,
    };
    (0..rows * k).map(|_| choice(numbers)).collect()
}

#[test]
fn tokens_are_sorted_by_the_ranks_of_their_experts() {
    let cpu = oracle();
    // Tokens, choices per token, experts per rank, ranks, ranks with the same tokens, and this rank's index
    // among them.
    let cases = [
        (1, 2, 4, 2, 1, 0),
        (5, 8, 16, 8, 1, 0),
        (70, 3, 2, 3, 2, 1),
        (1500, 2, 3, 2, 1, 0),
        (9, 4, 1, 64, 1, 0),
        (0, 2, 4, 2, 1, 0),
    ];
    for (t, k, each, size, stride, offset) in cases {
        let spread = ExpertParallelLayout {
            experts_per_rank: each,
            ranks: size,
            rank_stride: stride,
            rank_offset: offset,
        };
        let mut numbers = RandomNumbers::fresh(t as u64);
        // Includes two expert ids out of range.
        let experts = choices(&mut numbers, t, k, each * size * stride + 2);
        let [mut tokens, mut places] = [(); 2].map(|()| vec![-1i32; size * t]);
        let mut counts = vec![-1i32; size];
        let listed = MatMut::of(&mut tokens, 1, size * t).unwrap();
        let (at, sums) = (MatMut::of(&mut places, t, size), MatMut::of(&mut counts, 1, size));
        let chosen = MatRef::of(&experts, t, k).unwrap();
        cpu.launch(
            &S,
            TokenDispatch {
                tokens: listed,
                token_rows: at.unwrap(),
                counts: sums.unwrap(),
                experts: chosen,
                layout: &spread,
            },
        )
        .unwrap();
        let sent: i32 = counts.iter().sum();
        // A single token is often sent to no rank; many tokens never are.
        assert!(sent > 0 || t < 5, "nobody is sent anywhere");
        for device in devices() {
            let chosen = DeviceArray::of(&device, &experts, t, k);
            let mut listed = DeviceArray::<i32>::poisoned(&device, 1, size * t);
            let mut at = DeviceArray::<i32>::poisoned(&device, t, size);
            let mut sums = DeviceArray::<i32>::poisoned(&device, 1, size);
            let out = (listed.mat_mut(), at.mat_mut(), sums.mat_mut());
            device
                .launch(
                    &S,
                    TokenDispatch {
                        tokens: out.0,
                        token_rows: out.1,
                        counts: out.2,
                        experts: chosen.mat(),
                        layout: &spread,
                    },
                )
                .unwrap();
            let name = format!("{} {t} tokens, {spread:?}", device.name());
            assert_eq!(sums.read(&device), counts, "{name}");
            assert_eq!(at.read(&device), places, "{name}");
            let sent = sent as usize;
            assert_eq!(listed.read(&device)[..sent], tokens[..sent], "{name}");
        }
    }
}

#[test]
fn more_ranks_than_bits_are_refused() {
    let spread =
        ExpertParallelLayout { experts_per_rank: 1, ranks: 65, rank_stride: 1, rank_offset: 0 };
    for device in devices() {
        let chosen = DeviceArray::of(&device, &[0i32], 1, 1);
        let [mut listed, mut at, mut sums] =
            [(); 3].map(|()| DeviceArray::<i32>::poisoned(&device, 1, 65));
        let out = (listed.mat_mut(), at.mat_mut(), sums.mat_mut());
        let refused = device.launch(
            &S,
            TokenDispatch {
                tokens: out.0,
                token_rows: out.1,
                counts: out.2,
                experts: chosen.mat(),
                layout: &spread,
            },
        );
        let refused = refused.unwrap_err().to_string();
        assert!(refused.contains("ranks") && refused.contains("65"), "{refused}");
    }
}

fn combine_sums<T: GpuRealElement>() {
    let cpu = oracle();
    for (rows, cols, sums, m) in [(7, 45, 5, 3), (40, 64, 33, 2), (3, 2056, 2, 8), (1, 8, 3, 1)] {
        let mut numbers = RandomNumbers::fresh(cols as u64);
        let x = numbers.reals::<T>(rows * cols);
        let places = choices(&mut numbers, sums, m, rows);
        let mut expected = vec![T::of(9.0); sums * cols];
        let (y, from) = (MatMut::of(&mut expected, sums, cols), MatRef::of(&x, rows, cols));
        let named = MatRef::of(&places, sums, m).unwrap();
        cpu.launch(&S, MoeCombine { y: y.unwrap(), x: from.unwrap(), token_rows: named }).unwrap();
        for device in devices() {
            let from = DeviceArray::of(&device, &x, rows, cols);
            // An index out of range is an error on the CPU; a device skips it.
            let beyond: Vec<i32> =
                places.iter().map(|&row| if row < 0 { rows as i32 + 4 } else { row }).collect();
            for named in [&places, &beyond] {
                let named = DeviceArray::of(&device, named, sums, m);
                let mut y = DeviceArray::<T>::poisoned(&device, sums, cols);
                device
                    .launch(&S, MoeCombine { y: y.mat_mut(), x: from.mat(), token_rows: named.mat() })
                    .unwrap();
                assert_eq!(y.read(&device), expected, "{} {cols} columns", device.name());
            }
        }
    }
}

#[test]
fn combine_matches_the_cpu() {
    combine_sums::<f32>();
    combine_sums::<bf16>();
}

#[test]
fn expert_replica_choice_matches_the_cpu() {
    let cpu = oracle();
    // Three replicas of expert 0, one of expert 1, two of expert 2.
    let places = [3, 0, 4, 5, 1, 2, -1, -1, 2, 1, 3, -1];
    let (t, k) = (300, 2);
    let mut numbers = RandomNumbers::fresh(3);
    let positions: Vec<i32> = (0..t).map(|_| numbers.below(5000) as i32).collect();
    let asked: Vec<i32> = (0..9).map(|_| numbers.below(t) as i32).collect();
    let chosen: Vec<i32> = (0..t * k).map(|_| numbers.below(3) as i32).collect();
    for tokens in [None, Some(&asked)] {
        let rows = tokens.map_or(t, Vec::len);
        let mut expected = chosen[..rows * k].to_vec();
        let experts = MatMut::of(&mut expected, rows, k).unwrap();
        let listed = tokens.map(|tokens| MatRef::of(tokens, 1, rows).unwrap());
        let (at, of) = (MatRef::of(&positions, 1, t).unwrap(), MatRef::of(&places, 3, 4).unwrap());
        cpu.launch(
            &S,
            ExpertPlacementLookup { experts, positions: at, tokens: listed, placement: of },
        )
        .unwrap();
        for device in devices() {
            let mut experts = DeviceArray::of(&device, &chosen[..rows * k], rows, k);
            let listed = tokens.map(|tokens| DeviceArray::row(&device, tokens));
            let (at, of) =
                (DeviceArray::row(&device, &positions), DeviceArray::of(&device, &places, 3, 4));
            let listed = listed.as_ref().map(DeviceArray::mat);
            device
                .launch(
                    &S,
                    ExpertPlacementLookup {
                        experts: experts.mat_mut(),
                        positions: at.mat(),
                        tokens: listed,
                        placement: of.mat(),
                    },
                )
                .unwrap();
            assert_eq!(experts.read(&device), expected, "{}", device.name());
        }
    }
    for device in devices() {
        // A token and experts that do not exist: they map to −1.
        let mut experts = DeviceArray::of(&device, &[0i32, -1, 3, 1], 2, 2);
        let (at, of) =
            (DeviceArray::row(&device, &[7i32]), DeviceArray::of(&device, &places, 3, 4));
        let listed = DeviceArray::row(&device, &[0i32, 1]);
        let listed = Some(listed.mat());
        device
            .launch(
                &S,
                ExpertPlacementLookup {
                    experts: experts.mat_mut(),
                    positions: at.mat(),
                    tokens: listed,
                    placement: of.mat(),
                },
            )
            .unwrap();
        assert_eq!(experts.read(&device), [4, -1, -1, -1]);
    }
}
