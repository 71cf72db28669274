//! fp8 experts with block scales. Results for few rows are compared with the CPU, which dequantises the
//! weights; results for more rows are compared with reference sums over quantised inputs.

use device::{DType, DeviceDriver, bf16};
use kernels::{
    ActivationScaling, ExpertMlp, ExpertWeights, FusedLinear, GateActivation, HostMat, Linear,
    LinearFusion, PackedMatrixGroup, SoftmaxRouterArgs, SoftmaxRouting, TopKRoutes,
};

use crate::device_pair::{CpuGpuMatrix, CpuGpuPair, on_cpu, pairs, tolerance};
use crate::fp8::{Fp8Weights, ScaleGranularity, quantize_group};
use crate::moe::{ExpertSizes, expert_sizes};
use crate::support::{GpuTestFloat, RandomNumbers, S};

const BF16: DType = DType::BF16;

/// The fp8 experts of one layer as stored in checkpoints and as packed on both devices, and for some tokens
/// the expert ids and weights that a router chose.
pub(crate) struct MoeFp8Case {
    sizes: ExpertSizes,
    /// Gate, up and down projection of each expert.
    stored: Vec<[Fp8Weights; 3]>,
    gate_up: [PackedMatrixGroup; 2],
    down: [PackedMatrixGroup; 2],
    chosen: Vec<i32>,
    weights: Vec<f32>,
}

/// First expert of this rank; expert 0 is on another rank.
const FIRST: usize = 1;
/// Number of MoE layers that fit into the memory of no device in bf16, so that `experts_dtype` returns fp8.
const MANY_LAYERS: usize = 1 << 40;

impl MoeFp8Case {
    fn new(
        pair: &CpuGpuPair,
        numbers: &mut RandomNumbers,
        sizes: ExpertSizes,
        tokens: usize,
    ) -> Self {
        let stored = stored(numbers, sizes);
        Self::of(pair, numbers, sizes, tokens, stored)
    }

    /// Creates a case with the weights `stored` of the experts of this rank.
    pub(crate) fn of(
        pair: &CpuGpuPair,
        numbers: &mut RandomNumbers,
        sizes: ExpertSizes,
        tokens: usize,
        stored: Vec<[Fp8Weights; 3]>,
    ) -> Self {
        let ExpertSizes { count, top_k, .. } = sizes;
        let (gate_up, down) = projections(&stored);
        let half = pair.gpu.half_dtype();
        let packed_dtype = pair.backends()[0].experts_dtype(&gate_up, &down, MANY_LAYERS, half);
        assert_eq!(packed_dtype, DType::F8E4M3, "{sizes:?}");
        let widened = on_cpu(half);
        assert_eq!(
            pair.backends()[1].experts_dtype(&gate_up, &down, MANY_LAYERS, widened),
            widened
        );
        let pack = |matrices: &[Vec<HostMat<'_>>], gated| {
            let gpu = pair.gpu.pack_group(matrices, DType::F8E4M3, gated).unwrap();
            assert!(
                gpu.bytes() < 3 * gpu.len() * gpu.n() * gpu.k() / 2,
                "fp8 values and scales only"
            );
            [gpu, pair.cpu.pack_group(matrices, widened, gated).unwrap()]
        };
        let (gate_up, down) = (pack(&gate_up, true), pack(&down, false));
        let mut chosen = Vec::new();
        for _ in 0..tokens {
            let mut free: Vec<i32> = (0..count as i32).collect();
            chosen.extend((0..top_k).map(|_| free.swap_remove(numbers.below(free.len()))));
        }
        let weights = (0..tokens * top_k).map(|_| numbers.unit()).collect();
        Self { sizes, stored, gate_up, down, chosen, weights }
    }

    /// Computes the experts of tokens `[from, from + x.rows())` on the GPU, and also on the CPU if `on_cpu`.
    pub(crate) fn run(
        &self,
        pair: &CpuGpuPair,
        x: &CpuGpuMatrix,
        from: usize,
        on_cpu: bool,
    ) -> CpuGpuMatrix {
        let (tokens, top_k) = (x.gpu().rows(), self.sizes.top_k);
        let own = from * top_k..(from + tokens) * top_k;
        let chosen = pair.put(&self.chosen[own.clone()], tokens, top_k);
        let weights = pair.put(&self.weights[own], tokens, top_k);
        let mut y = pair.poisoned(pair.gpu.half_dtype(), tokens, self.sizes.hidden);
        let experts = |i: usize| ExpertWeights::unbiased(FIRST, &self.gate_up[i], &self.down[i]);
        let routes = TopKRoutes { experts: chosen.gpu(), weights: weights.gpu() };
        pair.gpu
            .launch(
                &S,
                ExpertMlp { y: y.gpu_mut(), x: x.gpu(), routes: &routes, experts: &experts(0) },
            )
            .unwrap();
        if on_cpu {
            let routes = TopKRoutes { experts: chosen.cpu(), weights: weights.cpu() };
            pair.cpu
                .launch(
                    &S,
                    ExpertMlp { y: y.cpu_mut(), x: x.cpu(), routes: &routes, experts: &experts(1) },
                )
                .unwrap();
        }
        y
    }

    /// Returns whether the first chosen expert of a token is on this rank.
    pub(crate) fn is_here(&self, token: usize) -> bool {
        self.chosen[token * self.sizes.top_k] >= FIRST as i32
    }

    /// Returns the experts of this rank, packed on the GPU.
    pub(crate) fn experts(&self) -> ExpertWeights<'_> {
        ExpertWeights::unbiased(FIRST, &self.gate_up[0], &self.down[0])
    }

    /// Replaces the chosen experts and their weights by the results of the router `scores`.
    pub(crate) fn route(
        &mut self,
        pair: &CpuGpuPair,
        scores: &SoftmaxRouterArgs<'_>,
        tokens: usize,
    ) {
        let mut chosen = pair.poisoned(DType::I32, tokens, scores.top_k);
        let mut weights = pair.poisoned(DType::F32, tokens, scores.top_k);
        let (out, out_weights) = (chosen.gpu_mut(), weights.gpu_mut());
        pair.gpu
            .launch(
                &S,
                SoftmaxRouting { experts: out, weights: out_weights, router: scores, load: None },
            )
            .unwrap();
        [self.chosen, _] = pair.read::<i32>(&chosen);
        [self.weights, _] = pair.read::<f32>(&weights);
    }

    /// Returns the expected outputs for a large batch, computed in f64 as the GPU computes them: every input
    /// is quantised.
    fn quantized<T: GpuTestFloat>(&self, x: &[T]) -> Vec<T> {
        let ExpertSizes { hidden, top_k, .. } = self.sizes;
        let wide: Vec<[Vec<Vec<f32>>; 3]> = self.stored.iter().map(each_row).collect();
        // The gate and up projections of all experts share one activation scaling; the down projections share
        // another.
        let scalings = [[0, 1].as_slice(), &[2]].map(|projections| {
            let of_expert = |expert: &[Fp8Weights; 3]| {
                let rule = |&i: &usize| expert[i].mat().activation_scaling();
                projections.iter().map(rule).collect::<Vec<_>>()
            };
            ActivationScaling::combined(self.stored.iter().flat_map(of_expert))
        });
        let mut y = Vec::new();
        for (t, x) in x.chunks(hidden).enumerate() {
            let x: Vec<f32> =
                x.chunks(128).flat_map(|block| quantize_group(block, scalings[0])).collect();
            let mut sum = vec![0.0; hidden];
            for choice in t * top_k..(t + 1) * top_k {
                let expert = (self.chosen[choice] as usize).checked_sub(FIRST);
                let Some([gate, up, down]) = expert.map(|expert| &wide[expert]) else { continue };
                let between: Vec<T> =
                    gate.iter().zip(up).map(|(g, u)| gated(dot(g, &x), dot(u, &x))).collect();
                let blocks = between.chunks(128);
                let between: Vec<f32> =
                    blocks.flat_map(|block| quantize_group(block, scalings[1])).collect();
                for (sum, row) in sum.iter_mut().zip(down) {
                    *sum += f64::from(self.weights[choice]) * dot(row, &between);
                }
            }
            y.extend(sum.into_iter().map(|sum| T::of(sum as f32)));
        }
        y
    }
}

pub(crate) fn stored(numbers: &mut RandomNumbers, sizes: ExpertSizes) -> Vec<[Fp8Weights; 3]> {
    stored_with(numbers, sizes, ScaleGranularity::Blocks)
}

pub(crate) fn stored_with(
    numbers: &mut RandomNumbers,
    ExpertSizes { hidden, inner, count, .. }: ExpertSizes,
    grid: ScaleGranularity,
) -> Vec<[Fp8Weights; 3]> {
    let mut random_weights = |n: usize, k: usize| Fp8Weights::new(numbers, n, k, grid);
    let shapes = [(inner, hidden), (inner, hidden), (hidden, inner)];
    (FIRST..count).map(|_| shapes.map(|(n, k)| random_weights(n, k))).collect()
}

/// Weight matrices of each expert, in the form that weight loaders pass to `pack`.
type ExpertProjections<'a> = Vec<Vec<HostMat<'a>>>;

fn projections(stored: &[[Fp8Weights; 3]]) -> (ExpertProjections<'_>, ExpertProjections<'_>) {
    let gate_up = stored.iter().map(|[gate, up, _]| vec![gate.mat(), up.mat()]).collect();
    (gate_up, stored.iter().map(|[_, _, down]| vec![down.mat()]).collect())
}

fn each_row(expert: &[Fp8Weights; 3]) -> [Vec<Vec<f32>>; 3] {
    [0, 1, 2].map(|i| {
        let mat = expert[i].mat();
        let row = |r| {
            let mut row = vec![0.0; mat.cols()];
            mat.read_row(r, &mut row);
            row
        };
        (0..mat.rows()).map(row).collect()
    })
}

fn dot(a: &[f32], b: &[f32]) -> f64 {
    a.iter().zip(b).map(|(a, b)| f64::from(*a) * f64::from(*b)).sum()
}

/// Returns silu(gate) · up, from sums that are rounded to the activation type.
fn gated<T: GpuTestFloat>(gate: f64, up: f64) -> T {
    let [gate, up] = [gate, up].map(|sum| T::of(sum as f32).value());
    T::of(gate / (1.0 + (-gate).exp()) * up)
}

#[test]
fn fp8_small_m_agrees_with_the_cpu() {
    for pair in &pairs() {
        check_small_m(pair, expert_sizes(64, 64, 6, 2), 1);
        check_small_m(pair, expert_sizes(192, 64, 5, 3), 10);
        // One scale per 64 outputs, because the 192 gate outputs are no multiple of 128; thread blocks end
        // inside the gate outputs.
        check_small_m(pair, expert_sizes(320, 192, 5, 2), 7);
    }
}

pub(crate) fn check_small_m(pair: &CpuGpuPair, sizes: ExpertSizes, tokens: usize) {
    let mut numbers = pair.numbers(tokens as u64);
    let case = MoeFp8Case::new(pair, &mut numbers, sizes, tokens);
    let half = pair.gpu.half_dtype();
    let x = pair.random(&mut numbers, half, tokens, sizes.hidden);
    let y = case.run(pair, &x, 0, true);
    pair.check(&format!("{sizes:?}, {tokens} tokens"), &y, 2.0 * tolerance(half));
}

#[test]
fn fp8_grouped_gemm_uses_quantized_inputs() {
    for pair in &pairs() {
        check_grouped_gemm::<bf16>(pair, expert_sizes(64, 64, 3, 2), 40);
        check_grouped_gemm::<bf16>(pair, expert_sizes(192, 128, 3, 2), 30);
        check_grouped_gemm::<bf16>(pair, expert_sizes(128, 192, 3, 3), 70); // More rows per expert than one segment has.
    }
}

/// Tests experts with one scale per projection, power-of-two activation scales, and static activation scales,
/// of which the maximum over all experts is used.
#[test]
fn fp8_grouped_gemm_applies_the_activation_scaling() {
    use ActivationScaling::{Dynamic, PowerOfTwo, Static};
    use ScaleGranularity::{Blocks, Tensor};
    let (sizes, tokens) = (expert_sizes(192, 128, 4, 2), 40);
    for pair in &pairs() {
        for (grid, scaling) in
            [(Tensor, Dynamic), (Blocks, PowerOfTwo), (Tensor, Static(0.5 / 448.0))]
        {
            let mut numbers = pair.numbers(9);
            let mut stored = stored_with(&mut numbers, sizes, grid);
            for (i, weights) in stored.iter_mut().flatten().enumerate() {
                weights.set_scaling(match scaling {
                    Static(scale) => Static(scale * [0.5, 1.0, 0.25][i / 3 % 3]),
                    scaling => scaling,
                });
            }
            let case = MoeFp8Case::of(pair, &mut numbers, sizes, tokens, stored);
            check_quantized::<bf16>(
                pair,
                &case,
                &mut numbers,
                tokens,
                &format!("{grid:?} {scaling:?}"),
            );
        }
    }
}

pub(crate) fn check_grouped_gemm<T: GpuTestFloat>(
    pair: &CpuGpuPair,
    sizes: ExpertSizes,
    tokens: usize,
) {
    let mut numbers = pair.numbers((tokens + sizes.inner) as u64);
    let case = MoeFp8Case::new(pair, &mut numbers, sizes, tokens);
    check_quantized::<T>(pair, &case, &mut numbers, tokens, &format!("{sizes:?}, {tokens} tokens"));
}

fn check_quantized<T: GpuTestFloat>(
    pair: &CpuGpuPair,
    case: &MoeFp8Case,
    numbers: &mut RandomNumbers,
    tokens: usize,
    what: &str,
) {
    let hidden = case.sizes.hidden;
    let values: Vec<T> = numbers.reals(tokens * hidden);
    let mut y = case.run(pair, &pair.put(&values, tokens, hidden), 0, false);
    let mut expected = pair.put(&case.quantized(&values), tokens, hidden);
    std::mem::swap(&mut expected.gpu, &mut y.gpu);
    pair.check(what, &expected, 2.0 * tolerance(T::DTYPE));
}

/// Compares the GPU with the reference results when all tokens choose the same experts, and when they choose
/// no expert of this rank.
#[test]
fn hot_and_idle_fp8_experts_match_references() {
    for pair in &pairs() {
        // Up to eight (token, expert) pairs per expert on average use the small-M kernel; with 20 tokens one
        // expert has two segments (parts of its rows that different thread blocks process).
        for (choices, tokens, small_m) in
            [([1, 2], 70, false), ([1, 0], 50, false), ([0, 0], 50, false), ([3, 0], 20, true)]
        {
            let (sizes, mut numbers) = (expert_sizes(64, 64, 10, 2), pair.numbers(3));
            let mut case = MoeFp8Case::new(pair, &mut numbers, sizes, tokens);
            case.chosen = choices.repeat(tokens);
            let what = format!("{tokens} tokens of {choices:?}");
            if small_m {
                let x = pair.random(&mut numbers, BF16, tokens, sizes.hidden);
                pair.check(&what, &case.run(pair, &x, 0, true), 2.0 * tolerance(BF16));
            } else {
                check_quantized::<bf16>(pair, &case, &mut numbers, tokens, &what);
            }
        }
    }
}

/// The last expert is a shared expert (weight 1, chosen by every token). Packed as a separate matrix, it
/// gives the same result as in the packed group of all experts.
#[test]
fn shared_expert_is_a_separate_matrix() {
    for pair in &pairs() {
        for tokens in [3, 16] {
            let (sizes, mut numbers) = (expert_sizes(192, 128, 6, 2), pair.numbers(7));
            let ExpertSizes { hidden, inner, count, top_k } = sizes;
            let mut case = MoeFp8Case::new(pair, &mut numbers, sizes, tokens);
            let x = pair.random(&mut numbers, BF16, tokens, hidden);
            for (chosen, weights) in
                case.chosen.chunks_mut(top_k).zip(case.weights.chunks_mut(top_k))
            {
                chosen.copy_from_slice(&[0, count as i32 - 1]);
                weights.copy_from_slice(&[0.5, 1.0]);
            }
            let y = case.run(pair, &x, 0, true);
            pair.check(&format!("{tokens} tokens, in the group"), &y, 2.0 * tolerance(BF16));
            let last = |group: &PackedMatrixGroup| group.matrix(group.len() - 1).unwrap();
            let (gate_up, down) = (last(&case.gate_up[0]), last(&case.down[0]));
            let mut separate = pair.poisoned(BF16, tokens, hidden);
            let mut between = pair.poisoned(BF16, tokens, inner);
            let gated =
                LinearFusion { gate: Some(GateActivation::Silu), ..LinearFusion::default() };
            pair.gpu
                .launch(
                    &S,
                    FusedLinear {
                        y: between.gpu_mut(),
                        x: x.gpu(),
                        weight: &gate_up,
                        fusion: &gated,
                    },
                )
                .unwrap();
            pair.gpu
                .launch(
                    &S,
                    Linear { y: separate.gpu_mut(), x: between.gpu(), weight: &down, bias: None },
                )
                .unwrap();
            let mut y = y;
            std::mem::swap(&mut separate.gpu, &mut y.gpu);
            pair.check(&format!("{tokens} tokens, separate"), &y, 2.0 * tolerance(BF16));
        }
    }
}

/// The output of a token has the same bits alone and in a batch that uses the same kernel.
#[test]
fn fp8_moe_tokens_are_batch_invariant() {
    for pair in &pairs() {
        check_batch_invariance(pair, expert_sizes(192, 64, 5, 2), 6, 1);
        check_batch_invariance(pair, expert_sizes(64, 128, 3, 2), 40, 30);
    }
}

/// Checks that the result of each token has the same bits in a batch of `tokens` tokens and in batches of
/// `some` consecutive tokens.
pub(crate) fn check_batch_invariance(
    pair: &CpuGpuPair,
    sizes: ExpertSizes,
    tokens: usize,
    some: usize,
) {
    let hidden = sizes.hidden;
    let mut numbers = pair.numbers(2);
    let case = MoeFp8Case::new(pair, &mut numbers, sizes, tokens);
    let values = numbers.reals::<bf16>(tokens * hidden);
    let whole = case.run(pair, &pair.put(&values, tokens, hidden), 0, false);
    let [all, _] = pair.read_floats(&whole);
    for first in (0..=tokens - some).step_by(some.div_ceil(6)) {
        let own = first * hidden..(first + some) * hidden;
        let x = pair.put(&values[own.clone()], some, hidden);
        let [part, _] = pair.read_floats(&case.run(pair, &x, first, false));
        assert_eq!(part, all[own], "{some} tokens from {first}");
    }
}

/// Weights with scales that the kernels do not support are dequantised when packed, and give the CPU's
/// results.
#[test]
fn unsupported_scales_are_dequantized() {
    for pair in &pairs() {
        let mut numbers = pair.numbers(4);
        for (hidden, inner, grid) in [
            (64, 96, ScaleGranularity::Blocks),
            (64, 64, ScaleGranularity::Channels),
            (64, 68, ScaleGranularity::Blocks),
        ] {
            let mut random_weights = |n: usize, k: usize| Fp8Weights::new(&mut numbers, n, k, grid);
            let stored = [[
                random_weights(inner, hidden),
                random_weights(inner, hidden),
                random_weights(hidden, inner),
            ]];
            let (gate_up, down) = projections(&stored);
            let what = format!("{hidden} x {inner} {grid:?}");
            assert_eq!(
                pair.backends()[0].experts_dtype(&gate_up, &down, MANY_LAYERS, BF16),
                BF16,
                "{what}"
            );
            let floats = pair.backends()[0].experts_dtype(&down, &down, MANY_LAYERS, DType::F32);
            assert_eq!(floats, DType::F32, "{what}");
            let rejected = [&gate_up, &down]
                .into_iter()
                .any(|group| pair.gpu.pack_group(group, DType::F8E4M3, false).is_err());
            assert!(rejected, "{what}");
        }
    }
}

/// Experts of sizes that WGMMA kernels support in bf16 but not in fp8 are dequantised, if they then fit into
/// memory.
#[test]
fn fp8_experts_dequantize_when_only_bf16_streams_and_fits() {
    for pair in &pairs() {
        let mut numbers = pair.numbers(5);
        let mut random_weights =
            |n: usize, k: usize| Fp8Weights::new(&mut numbers, n, k, ScaleGranularity::Blocks);
        for (hidden, inner) in [(128, 192), (192, 128), (256, 128)] {
            let stored = [[
                random_weights(inner, hidden),
                random_weights(inner, hidden),
                random_weights(hidden, inner),
            ]];
            let (gate_up, down) = projections(&stored);
            let dtype = |layers| pair.backends()[0].experts_dtype(&gate_up, &down, layers, BF16);
            let layer_bytes = 3 * hidden * inner * 2;
            let max_layers = pair.gpu.mem_info().total_bytes as usize / 2 / layer_bytes;
            let streams =
                pair.gpu.warp_size() == 32 && ["sm_90a", "emulated"].contains(&pair.gpu.arch());
            let whole = hidden % 128 + inner % 128 == 0;
            let fitting = if streams && !whole { BF16 } else { DType::F8E4M3 };
            assert_eq!(
                [dtype(1), dtype(max_layers), dtype(max_layers + 1)],
                [fitting, fitting, DType::F8E4M3]
            );
        }
    }
}
