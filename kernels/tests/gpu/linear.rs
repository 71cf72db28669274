//! Linear layers of the GPU: every kernel that `linear` may choose, with and without fused operations, and
//! batch invariance of rows.

use std::ops::Range;

use device::DType;
use kernels::{
    FusedLinear, GateActivation, GatedActivation, Linear, LinearFusion, PackedMatrix, RmsNorm,
    TensorAdd,
};

use crate::device_pair::{CpuGpuMatrix, CpuGpuPair, pairs, tolerance};
use crate::support::{RandomNumbers, S};

/// Returns random weights in (−1, 1) / √k, so that sums of `k` products stay near 1.
fn weights(numbers: &mut RandomNumbers, n: usize, k: usize) -> Vec<f32> {
    let scale = (k as f32).powf(-0.5);
    (0..n * k).map(|_| numbers.float() * scale).collect()
}

pub(crate) fn check_product(
    pair: &CpuGpuPair,
    m: usize,
    n: usize,
    k: usize,
    types: [DType; 3],
    bias: bool,
) {
    let mut numbers = pair.numbers((m * n + k) as u64);
    let [x_type, w_type, y_type] = types;
    let x = pair.random(&mut numbers, x_type, m, k);
    let [w, w_cpu] = pair.pack(&weights(&mut numbers, n, k), n, k, w_type);
    let bias = bias.then(|| pair.random(&mut numbers, DType::F32, 1, n));
    let mut y = pair.poisoned(y_type, m, n);
    let (on_gpu, on_cpu) =
        (bias.as_ref().map(CpuGpuMatrix::gpu), bias.as_ref().map(CpuGpuMatrix::cpu));
    pair.gpu.launch(&S, Linear { y: y.gpu_mut(), x: x.gpu(), weight: &w, bias: on_gpu }).unwrap();
    pair.cpu
        .launch(&S, Linear { y: y.cpu_mut(), x: x.cpu(), weight: &w_cpu, bias: on_cpu })
        .unwrap();
    pair.check(&format!("{m} x {n} x {k} {types:?}"), &y, tolerance(y_type));
}

#[test]
fn linear_agrees_with_the_cpu() {
    use DType::{BF16, F32};
    for pair in &pairs() {
        for (m, n, k) in [
            (1, 40, 64),
            (3, 100, 1032),
            (16, 24, 2056),
            (2, 1080, 96),
            (9, 40, 2592),
            (17, 130, 40),
            (100, 72, 96),
        ] {
            check_product(pair, m, n, k, [BF16; 3], m == 3);
            check_product(pair, m, n, k, [BF16, BF16, F32], m != 3);
        }
        // Few rows of `W`, as the gates of shared experts; the last has rows whose length is no multiple of 16 bytes.
        for (m, n, k) in [(20, 1, 64), (201, 1, 2056), (131, 4, 1032), (33, 2, 18)] {
            check_product(pair, m, n, k, [BF16; 3], m == 33);
            check_product(pair, m, n, k, [BF16, BF16, F32], m == 131);
        }
        // GEMMs with f32 weights (routers, f32 models), and rows whose length is no multiple of 16 bytes.
        for (m, n, k) in [(1, 128, 200), (6, 30, 34), (70, 515, 18)] {
            check_product(pair, m, n, k, [BF16, F32, F32], false);
            check_product(pair, m, n, k, [F32; 3], true);
            check_product(pair, m, n, k, [BF16; 3], true);
        }
    }
}

/// A norm fused before the GEMM, or an activation or addition fused after it, gives the results of separate
/// kernels.
#[test]
fn fused_linear_matches_separate_kernels() {
    for pair in &pairs() {
        for k in [264, 1312] {
            let w = check_fused_linear(pair, 72, k, &[1, 5, 16]);
            assert!(!FusedLinear::supports(&pair.backends()[0], 17, DType::BF16, &w));
            assert!(!FusedLinear::supports(&pair.backends()[0], 1, DType::F32, &w));
            let (mut y, x) = (pair.zeros(DType::BF16, 1, 72), pair.zeros(DType::BF16, 1, k));
            let norm = pair.zeros(DType::F32, 1, k);
            let fusion = LinearFusion { norm: Some((norm.gpu(), 1e-6)), ..Default::default() };
            let op = FusedLinear { y: y.gpu_mut(), x: x.gpu(), weight: &w, fusion: &fusion };
            let error = pair.gpu.launch(&S, op).unwrap_err().to_string();
            assert!(error.contains("norm"), "f32 weights are rejected: {error}");
        }
    }
}

/// Compares GPU and CPU for medium-M GEMMs whose weights are streamed by TMA to warpgroups. Covers tiles of
/// one thread block and tiles split over two and four thread blocks, a partial last tile, and more and fewer
/// columns (K) than the ring buffer holds.
#[test]
fn gemm_medium_m_agrees_with_the_cpu() {
    use DType::{BF16, F32};
    for pair in pairs().iter().filter(|pair| streams(pair)) {
        for (m, n, k) in [(17, 48, 128), (64, 80, 1152), (100, 48, 512), (33, 720, 64)] {
            check_product(pair, m, n, k, [BF16; 3], m != 64);
            check_product(pair, m, n, k, [BF16, BF16, F32], m == 64);
        }
        check_fused_linear(pair, 48, 512, &[17, 70]);
        check_fused_linear(pair, 112, 192, &[64]);
    }
}

pub(crate) fn streams(pair: &CpuGpuPair) -> bool {
    pair.gpu.arch() == "sm_90a" || (pair.gpu.arch() == "emulated" && pair.gpu.warp_size() == 32)
}

/// Activations to test with `m` rows: all for 5 and 17 rows, otherwise SiLU only, because the emulator compiles
/// every kernel again for each function.
pub(crate) fn gates(m: usize) -> Vec<GateActivation> {
    let clamped = GateActivation::ClampedSilu { alpha: 1.702, limit: 0.75 };
    let others = [GateActivation::GeluTanh, clamped];
    let others = others.into_iter().filter(|_| [5, 17].contains(&m));
    std::iter::once(GateActivation::Silu).chain(others).collect()
}

/// Checks the results of fused linear layers for these numbers of rows; returns the weights.
pub(crate) fn check_fused_linear(
    pair: &CpuGpuPair,
    n: usize,
    k: usize,
    rows: &[usize],
) -> PackedMatrix {
    let (eps, half) = (1e-6, pair.gpu.half_dtype());
    let mut numbers = pair.numbers(1);
    let [w, w_cpu] = pair.pack(&weights(&mut numbers, n, k), n, k, half);
    for &m in rows {
        assert!(FusedLinear::supports(&pair.backends()[0], m, half, &w));
        let x = pair.random(&mut numbers, half, m, k);
        let norm = pair.random(&mut numbers, half, 1, k);
        let bias = pair.random(&mut numbers, DType::F32, 1, n);
        let mut normed = pair.poisoned(half, m, k);
        pair.cpu
            .launch(&S, RmsNorm { y: normed.cpu_mut(), x: x.cpu(), weight: norm.cpu(), eps })
            .unwrap();
        let with_norm = LinearFusion { norm: Some((norm.gpu(), eps)), ..LinearFusion::default() };

        let mut both = pair.poisoned(half, m, n);
        pair.cpu
            .launch(
                &S,
                Linear {
                    y: both.cpu_mut(),
                    x: normed.cpu(),
                    weight: &w_cpu,
                    bias: Some(bias.cpu()),
                },
            )
            .unwrap();
        let fusion = LinearFusion { bias: Some(bias.gpu()), ..with_norm };
        pair.gpu
            .launch(&S, FusedLinear { y: both.gpu_mut(), x: x.gpu(), weight: &w, fusion: &fusion })
            .unwrap();
        pair.check("norm", &both, tolerance(half));

        for activation in gates(m) {
            let mut gated = pair.poisoned(half, m, n / 2);
            let op = GatedActivation { y: gated.cpu_mut(), x: both.cpu(), activation };
            pair.cpu.launch(&S, op).unwrap();
            let fusion = LinearFusion { gate: Some(activation), ..fusion };
            let (y, fusion) = (gated.gpu_mut(), &fusion);
            pair.gpu.launch(&S, FusedLinear { y, x: x.gpu(), weight: &w, fusion }).unwrap();
            pair.check(&format!("{activation:?}"), &gated, 2.0 * tolerance(half));
        }

        let mut stream = pair.random(&mut numbers, half, m, n);
        let mut sum = pair.poisoned(half, m, n);
        pair.cpu
            .launch(&S, Linear { y: both.cpu_mut(), x: x.cpu(), weight: &w_cpu, bias: None })
            .unwrap();
        pair.cpu
            .launch(&S, TensorAdd { y: sum.cpu_mut(), a: stream.cpu(), b: both.cpu() })
            .unwrap();
        let fusion = LinearFusion { add: true, ..LinearFusion::default() };
        pair.gpu
            .launch(
                &S,
                FusedLinear { y: stream.gpu_mut(), x: x.gpu(), weight: &w, fusion: &fusion },
            )
            .unwrap();
        std::mem::swap(&mut stream.gpu, &mut sum.gpu);
        pair.check("add", &sum, tolerance(half));
    }
    w
}

/// Rows have the same bits alone, in small and in large batches, with or without a fused norm.
#[test]
fn linear_rows_are_batch_invariant() {
    for pair in &pairs() {
        let few = [0..1, 7..8, 15..16, 3..5, 5..14];
        check_rows(pair, 48, 1160, false, 16, &few);
        check_rows(pair, 24, 2592, false, 16, &few);
        check_rows(pair, 24, 2592, true, 16, &few);
        if streams(pair) {
            check_rows(pair, 48, 576, false, 100, &[0..17, 13..77, 1..100]);
        }
    }
}

/// Checks that output rows have the same bits in a batch of `rows` rows and in smaller batches of the rows
/// `parts`.
fn check_rows(
    pair: &CpuGpuPair,
    n: usize,
    k: usize,
    normed: bool,
    rows: usize,
    parts: &[Range<usize>],
) {
    let eps = 1e-6;
    let mut numbers = pair.numbers(2);
    let values = numbers.reals::<device::bf16>(rows * k);
    let norm = pair.random(&mut numbers, DType::BF16, 1, k);
    let norm = normed.then(|| (norm.gpu(), eps));
    let [w, _] = pair.pack(&weights(&mut numbers, n, k), n, k, DType::BF16);
    if !FusedLinear::supports(&pair.backends()[0], rows, DType::BF16, &w) {
        return; // Such rows do not fit into this GPU's shared memory.
    }
    let product = |part: Range<usize>| {
        let m = part.len();
        let x = pair.put(&values[part.start * k..part.end * k], m, k);
        let mut y = pair.poisoned(DType::F32, m, n);
        let fusion = LinearFusion { norm, ..LinearFusion::default() };
        pair.gpu
            .launch(&S, FusedLinear { y: y.gpu_mut(), x: x.gpu(), weight: &w, fusion: &fusion })
            .unwrap();
        pair.read::<f32>(&y)[0].clone()
    };
    let all = product(0..rows);
    for part in parts {
        assert_eq!(product(part.clone()), all[part.start * n..part.end * n], "rows {part:?}");
    }
}
