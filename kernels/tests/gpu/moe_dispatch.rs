//! Dispatch of tokens to the ranks of their experts (EP): the GPU's tables match the CPU's.

use device::{DeviceDriver, MatMut, MatRef, bf16};
use kernels::{ExpertParallelLayout, ExpertPlacementLookup, MoeCombine, MoeDispatchLayout};

use crate::support::{DeviceArray, GpuTestFloat, RandomNumbers, S, devices, oracle};

/// Returns random expert ids of `rows` tokens, `k` each, among `count` experts; a few are −1.
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
    // Number of tokens, experts per token, experts per rank, number of ranks, number of ranks that have the
    // same tokens, and index of this rank among the ranks with the same tokens.
    let cases = [
        (1, 2, 4, 2, 1, 0),
        (5, 8, 16, 8, 1, 0),
        (70, 3, 2, 3, 2, 1),
        (1500, 2, 3, 2, 1, 0),
        (9, 4, 1, 64, 1, 0),
        (0, 2, 4, 2, 1, 0),
    ];
    for (t, k, experts_per_rank, ranks, rank_stride, rank_offset) in cases {
        let layout = ExpertParallelLayout { experts_per_rank, ranks, rank_stride, rank_offset };
        let mut numbers = RandomNumbers::fresh(t as u64);
        // `+ 2`: some of the random expert ids are out of range, after the last expert of the last rank.
        let experts = choices(&mut numbers, t, k, experts_per_rank * ranks * rank_stride + 2);
        let [mut tokens, mut token_rows] = [(); 2].map(|()| vec![-1i32; ranks * t]);
        let mut counts = vec![-1i32; ranks];
        let listed = MatMut::of(&mut tokens, 1, ranks * t).unwrap();
        let (rows, sums) =
            (MatMut::of(&mut token_rows, t, ranks), MatMut::of(&mut counts, 1, ranks));
        let chosen = MatRef::of(&experts, t, k).unwrap();
        cpu.launch(
            &S,
            MoeDispatchLayout {
                tokens: listed,
                token_rows: rows.unwrap(),
                counts: sums.unwrap(),
                experts: chosen,
                layout: &layout,
            },
        )
        .unwrap();
        let sent: i32 = counts.iter().sum();
        // A few tokens may all have invalid expert ids, so that none is sent to a rank; of many tokens, some
        // are always sent.
        assert!(sent > 0 || t < 5, "no token is dispatched");
        for device in devices() {
            let chosen = DeviceArray::of(&device, &experts, t, k);
            let mut listed = DeviceArray::<i32>::poisoned(&device, 1, ranks * t);
            let mut rows = DeviceArray::<i32>::poisoned(&device, t, ranks);
            let mut sums = DeviceArray::<i32>::poisoned(&device, 1, ranks);
            device
                .launch(
                    &S,
                    MoeDispatchLayout {
                        tokens: listed.mat_mut(),
                        token_rows: rows.mat_mut(),
                        counts: sums.mat_mut(),
                        experts: chosen.mat(),
                        layout: &layout,
                    },
                )
                .unwrap();
            let name = format!("{} {t} tokens, {layout:?}", device.name());
            assert_eq!(sums.read(&device), counts, "{name}");
            assert_eq!(rows.read(&device), token_rows, "{name}");
            let sent = sent as usize;
            assert_eq!(listed.read(&device)[..sent], tokens[..sent], "{name}");
        }
    }
}

#[test]
fn dispatch_rejects_too_many_ranks() {
    let layout =
        ExpertParallelLayout { experts_per_rank: 1, ranks: 65, rank_stride: 1, rank_offset: 0 };
    for device in devices() {
        let chosen = DeviceArray::of(&device, &[0i32], 1, 1);
        let [mut listed, mut rows, mut sums] =
            [(); 3].map(|()| DeviceArray::<i32>::poisoned(&device, 1, 65));
        let result = device.launch(
            &S,
            MoeDispatchLayout {
                tokens: listed.mat_mut(),
                token_rows: rows.mat_mut(),
                counts: sums.mat_mut(),
                experts: chosen.mat(),
                layout: &layout,
            },
        );
        let error = result.unwrap_err().to_string();
        assert!(error.contains("ranks") && error.contains("65"), "{error}");
    }
}

fn check_combine<T: GpuTestFloat>() {
    let cpu = oracle();
    for (rows, cols, sums, m) in [(7, 45, 5, 3), (40, 64, 33, 2), (3, 2056, 2, 8), (1, 8, 3, 1)] {
        let mut numbers = RandomNumbers::fresh(cols as u64);
        let x = numbers.reals::<T>(rows * cols);
        let token_rows = choices(&mut numbers, sums, m, rows);
        let mut expected = vec![T::of(9.0); sums * cols];
        let (y, from) = (MatMut::of(&mut expected, sums, cols), MatRef::of(&x, rows, cols));
        let named = MatRef::of(&token_rows, sums, m).unwrap();
        cpu.launch(&S, MoeCombine { y: y.unwrap(), x: from.unwrap(), token_rows: named }).unwrap();
        for device in devices() {
            let from = DeviceArray::of(&device, &x, rows, cols);
            // A row index that is out of range is an error on the CPU; a GPU skips the row.
            let out_of_range: Vec<i32> =
                token_rows.iter().map(|&row| if row < 0 { rows as i32 + 4 } else { row }).collect();
            for named in [&token_rows, &out_of_range] {
                let named = DeviceArray::of(&device, named, sums, m);
                let mut y = DeviceArray::<T>::poisoned(&device, sums, cols);
                device
                    .launch(
                        &S,
                        MoeCombine { y: y.mat_mut(), x: from.mat(), token_rows: named.mat() },
                    )
                    .unwrap();
                assert_eq!(y.read(&device), expected, "{} {cols} columns", device.name());
            }
        }
    }
}

#[test]
fn combine_matches_the_cpu() {
    check_combine::<f32>();
    check_combine::<bf16>();
}

#[test]
fn expert_replica_choice_matches_the_cpu() {
    let cpu = oracle();
    // Expert placement, four numbers per expert: number of replicas (3, 1, 2), then their physical slots (−1
    // = unused entry).
    let placement = [3, 0, 4, 5, 1, 2, -1, -1, 2, 1, 3, -1];
    let (t, k) = (300, 2);
    let mut numbers = RandomNumbers::fresh(3);
    let positions: Vec<i32> = (0..t).map(|_| numbers.below(5000) as i32).collect();
    let token_indices: Vec<i32> = (0..9).map(|_| numbers.below(t) as i32).collect();
    let chosen: Vec<i32> = (0..t * k).map(|_| numbers.below(3) as i32).collect();
    for tokens in [None, Some(&token_indices)] {
        let rows = tokens.map_or(t, Vec::len);
        let mut expected = chosen[..rows * k].to_vec();
        let experts = MatMut::of(&mut expected, rows, k).unwrap();
        let listed = tokens.map(|tokens| MatRef::of(tokens, 1, rows).unwrap());
        let (at, of) =
            (MatRef::of(&positions, 1, t).unwrap(), MatRef::of(&placement, 3, 4).unwrap());
        cpu.launch(
            &S,
            ExpertPlacementLookup { experts, positions: at, tokens: listed, placement: of },
        )
        .unwrap();
        for device in devices() {
            let mut experts = DeviceArray::of(&device, &chosen[..rows * k], rows, k);
            let listed = tokens.map(|tokens| DeviceArray::row(&device, tokens));
            let (at, of) =
                (DeviceArray::row(&device, &positions), DeviceArray::of(&device, &placement, 3, 4));
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
        // A token index or an expert id that does not exist maps to −1.
        let mut experts = DeviceArray::of(&device, &[0i32, -1, 3, 1], 2, 2);
        let (at, of) =
            (DeviceArray::row(&device, &[7i32]), DeviceArray::of(&device, &placement, 3, 4));
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
