//! Large-M GEMMs with WGMMA, without and with a fused gate activation: results, and batch invariance of rows.

use device::DType;
use kernels::{FusedLinear, GateActivation, GatedActivation, Linear, LinearFusion, PackedMatrix};

use crate::device_pair::{CpuGpuMatrix, CpuGpuPair, pairs, tolerance};
use crate::support::S;

/// Number of rows; the last row tile is partial.
const ROWS: usize = 2100;

/// Returns the number of weight rows (outputs per token) whose tiles fill the GPU; the last tile is partial.
/// It is smaller for larger K, because emulation is slow.
fn lines(pair: &CpuGpuPair, k: usize) -> usize {
    let clusters = pair.gpu.multiprocessors() as usize / 2;
    256 * (clusters - usize::from(k > 64)) - 112
}

pub(crate) fn has_kernel(pair: &CpuGpuPair) -> bool {
    pair.gpu.arch() == "sm_90a" || (pair.gpu.arch() == "emulated" && pair.gpu.warp_size() == 32)
}

fn weights(pair: &CpuGpuPair, k: usize) -> [PackedMatrix; 2] {
    let n = lines(pair, k);
    let scale = (k as f32).powf(-0.5);
    let values: Vec<f32> = pair.numbers(1).reals::<f32>(n * k).iter().map(|w| w * scale).collect();
    pair.pack(&values, n, k, pair.gpu.half_dtype())
}

#[test]
fn gemm_large_m_agrees_with_the_cpu() {
    for pair in pairs().iter().filter(|pair| has_kernel(pair)) {
        // The loop over K has fewer steps than the ring buffer has stages for K = 64, and more for K = 320.
        for k in [64, 320] {
            check(pair, k);
        }
    }
}

/// Compares the results without and with a fused gate activation with the results of the CPU.
pub(crate) fn check(pair: &CpuGpuPair, k: usize) {
    let half = pair.gpu.half_dtype();
    let [w, w_cpu] = weights(pair, k);
    assert!(FusedLinear::supports_gate(&pair.backends()[0], ROWS, half, &w));
    let x = pair.random(&mut pair.numbers(k as u64), half, ROWS, k);
    let mut both = pair.poisoned(half, ROWS, w.n());
    pair.cpu
        .launch(&S, Linear { y: both.cpu_mut(), x: x.cpu(), weight: &w_cpu, bias: None })
        .unwrap();
    pair.gpu
        .launch(
            &S,
            FusedLinear {
                y: both.gpu_mut(),
                x: x.gpu(),
                weight: &w,
                fusion: &LinearFusion::default(),
            },
        )
        .unwrap();
    pair.check(&format!("plain, {k} columns"), &both, tolerance(half));

    // The second function is compiled for one of the shapes only, because emulation is slow.
    let activation = if k == 64 { GateActivation::GeluTanh } else { GateActivation::Silu };
    let mut gated = pair.poisoned(half, ROWS, w.n() / 2);
    let op = GatedActivation { y: gated.cpu_mut(), x: both.cpu(), activation };
    pair.cpu.launch(&S, op).unwrap();
    let fusion = LinearFusion { gate: Some(activation), ..LinearFusion::default() };
    pair.gpu
        .launch(&S, FusedLinear { y: gated.gpu_mut(), x: x.gpu(), weight: &w, fusion: &fusion })
        .unwrap();
    pair.check(&format!("{activation:?}, {k} columns"), &gated, 2.0 * tolerance(half));
}

/// Output rows have the same bits in another batch, in which they are at other positions in a tile.
#[test]
fn gemm_large_m_rows_are_batch_invariant() {
    for pair in pairs().iter().filter(|pair| has_kernel(pair)) {
        let (k, skipped) = (128, 75);
        let [w, _] = weights(pair, k);
        let values = pair.numbers(3).reals::<device::bf16>((ROWS + skipped) * k);
        let product = |from: usize| {
            let x: CpuGpuMatrix = pair.put(&values[from * k..(from + ROWS) * k], ROWS, k);
            let mut y = pair.poisoned(DType::BF16, ROWS, w.n() / 2);
            let gate = Some(GateActivation::Silu);
            let fusion = LinearFusion { gate, ..LinearFusion::default() };
            pair.gpu
                .launch(&S, FusedLinear { y: y.gpu_mut(), x: x.gpu(), weight: &w, fusion: &fusion })
                .unwrap();
            pair.read::<device::bf16>(&y)[0].clone()
        };
        let (first, later) = (product(0), product(skipped));
        let row = w.n() / 2;
        assert_eq!(first[skipped * row..], later[..(ROWS - skipped) * row]);
    }
}

/// `FusedLinear` does not support gate activations with few rows or f32 inputs; with `ROWS` rows it supports no
/// norm, bias or addition.
#[test]
fn gemm_large_m_rejects_other_fusions() {
    for pair in pairs().iter().filter(|pair| has_kernel(pair)) {
        let k = 64;
        let [w, _] = weights(pair, k);
        assert!(!FusedLinear::supports_gate(&pair.backends()[0], 2047, DType::BF16, &w));
        assert!(!FusedLinear::supports_gate(&pair.backends()[0], ROWS, DType::F32, &w));
        assert!(!FusedLinear::supports(&pair.backends()[0], ROWS, DType::BF16, &w));
        let mut numbers = pair.numbers(4);
        let x = pair.random(&mut numbers, DType::BF16, ROWS, k);
        let bias = pair.random(&mut numbers, DType::F32, 1, w.n());
        let mut y = pair.poisoned(DType::BF16, ROWS, w.n());
        for fusion in [
            LinearFusion { bias: Some(bias.gpu()), ..LinearFusion::default() },
            LinearFusion { add: true, ..LinearFusion::default() },
        ] {
            pair.gpu
                .launch(&S, FusedLinear { y: y.gpu_mut(), x: x.gpu(), weight: &w, fusion: &fusion })
                .unwrap_err();
        }
    }
}
