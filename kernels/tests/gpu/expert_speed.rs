//! Times of a layer's experts inside a captured graph, and the memory bandwidth that they achieve, by weight
//! type and number of tokens. The results are printed, not checked.

use device::{DType, bf16};
use kernels::{ExpertMlp, ExpertWeights, GateActivation, HostMat, TopKRoutes};

use crate::device_pair::{CpuGpuPair, pairs};
use crate::matrix_speed::{microseconds, report};
use crate::moe::{ExpertSizes, expert_sizes};
use crate::support::{DeviceArray, S};

/// MoE layer of a model.
struct ExpertLayerSpec {
    model: &'static str,
    sizes: ExpertSizes,
    /// Dtype of the weights.
    dtype: DType,
}

const fn layer(model: &'static str, sizes: ExpertSizes, dtype: DType) -> ExpertLayerSpec {
    ExpertLayerSpec { model, sizes, dtype }
}

const LAYERS: [ExpertLayerSpec; 6] = [
    layer("Qwen3.5-35B-A3B", expert_sizes(2048, 512, 256, 8), DType::F8E4M3),
    layer("Qwen3-30B-A3B", expert_sizes(2048, 768, 128, 8), DType::BF16),
    layer("Qwen3-30B-A3B", expert_sizes(2048, 768, 128, 8), DType::F8E4M3),
    layer("V3, EP 8", expert_sizes(7168, 256, 256, 8), DType::F8E4M3),
    layer("V3, 32 experts", expert_sizes(7168, 2048, 32, 1), DType::F8E4M3),
    layer("V3", expert_sizes(7168, 2048, 256, 8), DType::F8E4M3),
];

#[test]
#[ignore = "measures a GPU: `just gpu-speed`"]
fn expert_speed() {
    for pair in &pairs() {
        for layer in &LAYERS {
            measure(pair, layer);
        }
    }
}

fn measure(pair: &CpuGpuPair, &ExpertLayerSpec { model, sizes, dtype }: &ExpertLayerSpec) {
    let ExpertSizes { hidden, inner, count, top_k } = sizes;
    let bytes = vec![0x3cu8; 2 * inner * hidden * dtype.bytes()];
    let scales = vec![1e-3f32; (2 * inner / 128) * (hidden / 128)];
    let group = |n: usize, k: usize, gated| {
        let mat = HostMat::new(&bytes[..n * k * dtype.bytes()], dtype, n, k).unwrap();
        let mat = match dtype {
            DType::F8E4M3 => mat.scaled(&scales[..n / 128 * (k / 128)], [128; 2]).unwrap(),
            _ => mat,
        };
        pair.gpu.pack_group(&vec![vec![mat]; count], dtype, gated).unwrap()
    };
    let (gate_up, down) = (group(2 * inner, hidden, true), group(hidden, inner, false));
    let experts = ExpertWeights::unbiased(0, &gate_up, &down);
    let what = format!("{model}, {dtype:?}");
    times(pair, &what, &experts, top_k, 3 * hidden * inner * dtype.bytes());
}

/// Measures the experts of gpt-oss-20b: biases, a clamped activation, and weights in MXFP4 or dequantised.
#[test]
#[ignore = "measures a GPU: `just gpu-speed`"]
fn mxfp4_expert_speed() {
    let (hidden, inner, count, top_k) = (2880, 2880, 32, 4);
    let bytes = bf16::ONE.to_bits().to_le_bytes().repeat(2 * inner * hidden);
    let biases = vec![0f32; count * 2 * inner];
    for pair in &pairs() {
        let gate_up_bias = DeviceArray::of(&pair.gpu, &biases, count, 2 * inner);
        let down_bias = DeviceArray::of(&pair.gpu, &biases[..count * hidden], count, hidden);
        let matrices = |n: usize, k: usize| {
            vec![vec![HostMat::new(&bytes[..n * k * 2], DType::BF16, n, k).unwrap()]; count]
        };
        let [gate_up, down] = [matrices(2 * inner, hidden), matrices(hidden, inner)];
        let dtype = DType::BF16;
        for (layout, [gate_up, down]) in [
            ("MXFP4", pair.gpu.pack_mxfp4_experts(&gate_up, &down, dtype).unwrap()),
            ("MXFP4 rows", [&gate_up, &down].map(|m| pair.gpu.pack_mxfp4(m, dtype).unwrap())),
            ("BF16", [&gate_up, &down].map(|m| pair.gpu.pack_row_major(m, dtype).unwrap())),
        ] {
            let experts = ExpertWeights {
                activation: GateActivation::ClampedSilu { alpha: 1.702, limit: 7.0 },
                gate_up_bias: Some(gate_up_bias.mat()),
                down_bias: Some(down_bias.mat()),
                ..ExpertWeights::unbiased(0, &gate_up, &down)
            };
            let what = format!("gpt-oss-20b, {layout}");
            times(pair, &what, &experts, top_k, (gate_up.bytes() + down.bytes()) / count);
        }
    }
}

/// Prints the times of a layer's experts by number of tokens. `expert_bytes`: size of the weights of an expert.
fn times(
    pair: &CpuGpuPair,
    name: &str,
    experts: &ExpertWeights<'_>,
    top_k: usize,
    expert_bytes: usize,
) {
    let (hidden, inner, count) = (experts.down.n(), experts.down.k(), experts.down.len());
    let mut numbers = pair.numbers(4);
    for tokens in [1, 2, 4, 8, 16, 64, 256, 1024, 8192] {
        let x = pair.put(&vec![bf16::ONE; tokens * hidden], tokens, hidden);
        let mut y = pair.poisoned(pair.gpu.half_dtype(), tokens, hidden);
        let mut chosen = Vec::new();
        for _ in 0..tokens {
            let first = numbers.below(count);
            let step = 1 + 2 * numbers.below(count / 2);
            chosen.extend((0..top_k).map(|j| ((first + j * step) % count) as i32));
        }
        let busy: std::collections::BTreeSet<i32> = chosen.iter().copied().collect();
        let chosen = pair.put(&chosen, tokens, top_k);
        let weights = pair.put(&vec![0.125f32; tokens * top_k], tokens, top_k);
        let routes = TopKRoutes { experts: chosen.gpu(), weights: weights.gpu() };
        let time = microseconds(pair, 8, |_| {
            pair.gpu
                .launch(&S, ExpertMlp { y: y.gpu_mut(), x: x.gpu(), routes: &routes, experts })
                .unwrap();
        });
        let tflops = (6 * tokens * top_k * hidden * inner) as f64 / time / 1e6;
        let what = format!("{name}, {tokens} tokens, {tflops:.0} TFLOP/s");
        report(&what, time, busy.len() * expert_bytes);
    }
}
