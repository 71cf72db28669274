//! Correct kernels give correct results in every order of warps and lanes, for both warp sizes.

use crate::gpu::{EmulatedGpu, KernelArg, LaunchShape};
use crate::injected_bugs::{ATTENTION, AttentionBugCase, ROWS, WARPS};

const SEEDS: [u64; 7] = [0, 1, 2, 3, 4, 7, 9];

/// Returns pseudo-random values, equal in every call.
pub(crate) fn values(n: usize) -> Vec<f32> {
    let mut state = 0x2545_f491_4f6c_dd1d_u64;
    let next = || {
        state ^= state << 13;
        state ^= state >> 7;
        state ^= state << 17;
        (state >> 40) as f32 / (1u64 << 24) as f32 - 0.5
    };
    std::iter::repeat_with(next).take(n).collect()
}

fn near(got: &[f32], want: &[f64], tolerance: f64) {
    assert_eq!(got.len(), want.len());
    for (i, (got, want)) in got.iter().zip(want).enumerate() {
        // A NaN makes the comparison false, so the test fails.
        assert!((f64::from(*got) - want).abs() <= tolerance, "{i}: {got} for {want}");
    }
}

#[test]
fn sums_and_norms_are_right_in_every_order() {
    let gpu = EmulatedGpu::open();
    let (rows, cols) = (5, 777);
    let x = values(rows * cols);
    let input = gpu.upload(&x);
    let sums: Vec<f64> = x.chunks(cols).map(|r| r.iter().map(|v| f64::from(*v)).sum()).collect();
    for (wave, _) in WARPS {
        let [row_sum, norm] = gpu.kernels(ROWS, &[wave], ["row_sum", "norm_scaled"]);
        let mut first = None;
        for (seed, threads) in SEEDS.into_iter().flat_map(|s| [(s, 64), (s, 256), (s, 1024)]) {
            gpu.seed(seed);
            let y = gpu.alloc(rows * 4);
            let shape = LaunchShape(rows as u32, threads, 0);
            gpu.launch(
                row_sum,
                shape,
                &[KernelArg::At(y), KernelArg::At(input), KernelArg::U32(cols as u32)],
            );
            near(&gpu.download::<f32>(y), &sums, 1e-4);
            gpu.free(y);
            let z = gpu.alloc(rows * cols * 4);
            let args = [
                KernelArg::At(z),
                KernelArg::At(input),
                KernelArg::U32(cols as u32),
                KernelArg::F32(1e-6),
            ];
            gpu.launch(norm, shape, &args);
            let got = gpu.download::<f32>(z);
            assert!(got.chunks(cols).all(|r| r.iter().fold(0f32, |m, v| m.max(v.abs())) == 1.0));
            if threads == 256 {
                let bits: Vec<u32> = got.iter().map(|v| v.to_bits()).collect();
                assert_eq!(*first.get_or_insert(bits.clone()), bits, "an order changed a result");
            }
        }
    }
}

#[test]
fn launch_covers_each_thread_once_on_any_host_threads() {
    let gpu = EmulatedGpu::open();
    let n = 100_000;
    let (a, b) = (values(n), values(2 * n).split_off(n));
    let (left, right, y) = (gpu.upload(&a), gpu.upload(&b), gpu.alloc(4 * n));
    let [product, count_threads] = gpu.kernels(ROWS, &[], ["product", "count_threads"]);
    let args =
        [KernelArg::At(y), KernelArg::At(left), KernelArg::At(right), KernelArg::U32(n as u32)];
    gpu.launch(product, LaunchShape(200, 256, 0), &args);
    let want: Vec<f64> = a.iter().zip(&b).map(|(a, b)| f64::from(a * b)).collect();
    near(&gpu.download::<f32>(y), &want, 0.0);

    let count = gpu.upload(&[0u32; 3]);
    gpu.launch(count_threads, LaunchShape(100, 192, 0), &[KernelArg::At(count)]);
    assert_eq!(gpu.download::<u32>(count), [19_200, 100, 38_400]);
}

#[test]
fn blocks_that_wait_for_each_other_all_run() {
    let gpu = EmulatedGpu::open();
    let token = gpu.upload(&[0u32]);
    let kernel = gpu.kernel(ROWS, &[], "hand_on");
    gpu.launch(kernel, LaunchShape(9, 64, 0), &[KernelArg::At(token)]);
    assert_eq!(gpu.download::<u32>(token), [9]);
}

#[test]
fn paged_attention_is_right_in_every_order() {
    let gpu = EmulatedGpu::open();
    for (wave, waves) in WARPS {
        let kernel = gpu.kernel(ATTENTION, &[wave], "paged_attention");
        let case = AttentionBugCase::new(&gpu);
        for seed in SEEDS {
            gpu.seed(seed);
            assert!(case.error(&gpu, kernel, waves) < 1e-4);
        }
    }
}
