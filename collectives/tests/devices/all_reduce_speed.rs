//! Benchmarks of all-reduces between two GPUs, which compare the one-shot kernel with NCCL or RCCL.

use std::time::Instant;

use collectives::{AllReduceNormArgs, CollectiveBackend};
use device::{DType, DeviceDriver, bf16};
use kernels::AddRmsNorm;

use super::{DeviceTestRank, S, ranks_with_one_shot_limit};

/// Measures a chain of `CHAIN` calls of `launch`, after warm-up calls. Returns the time per launch in
/// microseconds: first launched eagerly, then replayed from a captured graph.
fn time(rank: &DeviceTestRank, mut launch: impl FnMut()) -> [f64; 2] {
    const CHAIN: usize = 20;
    let each = |since: Instant| since.elapsed().as_secs_f64() * 1e6 / CHAIN as f64;
    (0..3).for_each(|_| launch());
    rank.group.barrier(&S).unwrap();
    let started = Instant::now();
    (0..CHAIN).for_each(|_| launch());
    rank.device.synchronize(&S).unwrap();
    let launched = each(started);
    rank.device.begin_capture(&S).unwrap();
    (0..CHAIN).for_each(|_| launch());
    let graph = rank.device.end_capture(&S).unwrap();
    let mut replays: Vec<f64> = (0..10)
        .map(|_| {
            rank.group.barrier(&S).unwrap();
            let started = Instant::now();
            rank.device.replay(&S, &graph).unwrap();
            rank.device.synchronize(&S).unwrap();
            each(started)
        })
        .collect();
    rank.group.barrier(&S).unwrap();
    replays.sort_by(f64::total_cmp);
    [launched, replays[replays.len() / 2]]
}

/// Size limit of one-shot all-reduces in this benchmark, in bytes. Up to this size, the benchmark compares
/// the one-shot kernel with NCCL or RCCL.
const MEASURED_BYTES: usize = 1 << 20;

/// Measures all-reduces of 2 KiB to 64 MiB, eager and replayed, with the one-shot kernel and with NCCL or
/// RCCL. Reports microseconds per launch, and GB/s.
#[test]
#[ignore = "measures two GPUs: `just ranks-speed`"]
fn all_reduce_speed() {
    let measure = |rank: DeviceTestRank| {
        let mut x = rank.matrix::<f32>(1, (64 << 20) / 4, |_, _| 0);
        let kib = (1..17).map(|power| 1_usize << power);
        let mut table = Vec::new();
        for count in kib.map(|kib| kib * 1024 / 2) {
            if rank.group.uses_one_shot_all_reduce(1, 8, DType::BF16)
                && !rank.group.uses_one_shot_all_reduce(1, count, DType::BF16)
            {
                break;
            }
            table.push(time(&rank, || {
                let x = x.mat_mut(DType::BF16, 1, count).unwrap();
                rank.group.all_reduce(&S, x).unwrap();
            }));
        }
        table
    };
    let up_to = |bytes| ranks_with_one_shot_limit("speed", bytes, measure).swap_remove(0);
    let (library, one_shot) = (up_to(0), up_to(MEASURED_BYTES));
    println!("{:>10} {:>24} {:>24} {:>10}", "KiB", "library: eager, graph", "one-shot", "GB/s");
    for (i, [launched, replayed]) in library.iter().enumerate() {
        let kib = 2 << i;
        let one_shot = one_shot.get(i);
        let best = one_shot.map_or(*replayed, |times| times[1].min(*replayed));
        let one_shot =
            one_shot.map_or(String::new(), |times| format!("{:.1}, {:.1}", times[0], times[1]));
        let rate = f64::from(kib) * 1024.0 / best / 1e3;
        println!(
            "{kib:10} {:>24} {one_shot:>24} {rate:10.1}",
            format!("{launched:.1}, {replayed:.1}")
        );
    }
}

/// Measures an all-reduce followed by the residual addition and the RMS norm, with rows of 4,096 bf16
/// elements, in a captured graph. Reports microseconds for three variants: NCCL or RCCL and a norm kernel,
/// the one-shot kernel and a norm kernel, and the fused kernel.
#[test]
#[ignore = "measures two GPUs: `just ranks-speed`"]
fn all_reduce_norm_speed() {
    const COLS: usize = 4096;
    let rows = [1, 2, 4, 8, 16, 32, 64, MEASURED_BYTES / COLS / 2];
    let measure = |rank: DeviceTestRank| {
        let [mut delta, mut x, mut y] =
            [(); 3].map(|()| rank.matrix::<bf16>(rows[7], COLS, |_, _| 0));
        let weight = rank.matrix::<bf16>(1, COLS, |_, _| 1);
        let weight = weight.mat(DType::BF16, 1, COLS).unwrap();
        let mut table = Vec::new();
        for rows in rows {
            let mut norm = |fused: bool| {
                let [y, x] = [&mut y, &mut x].map(|x| x.mat_mut(DType::BF16, rows, COLS));
                let (y, x) = (y.unwrap(), x.unwrap());
                if !fused {
                    let sum = delta.mat_mut(DType::BF16, rows, COLS).unwrap();
                    rank.group.all_reduce(&S, sum).unwrap();
                }
                let delta = delta.mat(DType::BF16, rows, COLS).unwrap();
                if fused {
                    let args = AllReduceNormArgs { y, x, delta, weight, eps: 1e-5 };
                    rank.group.all_reduce_norm(&S, args).unwrap();
                } else {
                    let op = AddRmsNorm { y, x, delta, weight, eps: 1e-5 };
                    rank.device.launch(&S, op).unwrap();
                }
            };
            let separate = time(&rank, || norm(false))[1];
            let fuses = rank.group.fuses_all_reduce_norm(rows, COLS, DType::BF16);
            let fused = if fuses { time(&rank, || norm(true))[1] } else { f64::NAN };
            table.push([separate, fused]);
        }
        table
    };
    let up_to = |bytes| ranks_with_one_shot_limit("speed", bytes, measure).swap_remove(0);
    let (library, one_shot) = (up_to(0), up_to(MEASURED_BYTES));
    println!("{:>6} {:>10} {:>10} {:>10}", "rows", "library", "one-shot", "fused");
    for ((rows, [library, _]), [one_shot, fused]) in rows.iter().zip(library).zip(one_shot) {
        println!("{rows:6} {library:10.2} {one_shot:10.2} {fused:10.2}");
    }
}
