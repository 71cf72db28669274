//! Expert MLPs of the GPU: kernels that stream weights for few tokens, tiled kernels for many tokens, simple
//! kernels for shapes that these do not support, and experts on other ranks.

use device::{DType, MatRef, bf16};
use kernels::{
    ExpertLoadArgs, ExpertMlp, ExpertWeights, FusedMoe, GateActivation, HostMat, Linear,
    PackedMatrixGroup, SoftmaxRouterArgs, SoftmaxRouting, TopKRoutes,
};

use crate::device_pair::{CpuGpuMatrix, CpuGpuPair, bytes_of, on_cpu, pairs, rounded, tolerance};
use crate::support::{DeviceArray, RandomNumbers, S};

/// The experts of one layer on both devices, and for some tokens the expert ids and weights that a router
/// chose.
struct MoeCase {
    first: usize,
    gate_up: [PackedMatrixGroup; 2],
    down: [PackedMatrixGroup; 2],
    activation: GateActivation,
    /// Biases of the gate and up projections and of the down projections, f32 `[experts, outputs]`.
    biases: Option<[CpuGpuMatrix; 2]>,
    chosen: Vec<i32>,
    weights: Vec<f32>,
    top_k: usize,
}

/// Function that returns the weights of a matrix `[n, k]`, from random numbers, `n`, `k` and a type.
type WeightGenerator = fn(&mut RandomNumbers, usize, usize, DType) -> Vec<f32>;

/// Sizes of an MoE layer.
#[derive(Debug, Clone, Copy)]
pub(crate) struct ExpertSizes {
    pub(crate) hidden: usize,
    /// Width of each expert's MLP.
    pub(crate) inner: usize,
    /// Number of experts.
    pub(crate) count: usize,
    /// Experts per token.
    pub(crate) top_k: usize,
}

pub(crate) const fn expert_sizes(
    hidden: usize,
    inner: usize,
    count: usize,
    top_k: usize,
) -> ExpertSizes {
    ExpertSizes { hidden, inner, count, top_k }
}

impl MoeCase {
    /// Creates a case with random weights and random experts per token; expert 0 is on another rank.
    fn new(
        pair: &CpuGpuPair,
        numbers: &mut RandomNumbers,
        sizes: ExpertSizes,
        dtype: DType,
        tokens: usize,
    ) -> Self {
        Self::with_packing(pair, numbers, sizes, dtype, tokens, random_weights, |parts, gated| {
            pair.gpu.pack_group(parts, dtype, gated).unwrap()
        })
    }

    /// Creates a case with the biases and the activation of gpt-oss, whose weights MXFP4 represents exactly; `pack`
    /// packs the matrices of the GPU.
    fn mxfp4(
        pair: &CpuGpuPair,
        numbers: &mut RandomNumbers,
        sizes: ExpertSizes,
        tokens: usize,
        pack: impl Fn(&[Vec<HostMat<'_>>], bool) -> PackedMatrixGroup,
    ) -> Self {
        let (dtype, weights) = (DType::BF16, mxfp4_weights);
        let mut case = Self::with_packing(pair, numbers, sizes, dtype, tokens, weights, pack);
        case.add_biases(pair, numbers, sizes);
        case.activation = GateActivation::ClampedSilu { alpha: 1.702, limit: 7.0 };
        case
    }

    /// Creates a case whose experts have biases; the weights are row-major.
    fn biased(
        pair: &CpuGpuPair,
        numbers: &mut RandomNumbers,
        sizes: ExpertSizes,
        dtype: DType,
        tokens: usize,
    ) -> Self {
        let pack = |parts: &[Vec<HostMat<'_>>], _| pair.gpu.pack_row_major(parts, dtype).unwrap();
        let weights = random_weights;
        let mut case = Self::with_packing(pair, numbers, sizes, dtype, tokens, weights, pack);
        case.add_biases(pair, numbers, sizes);
        case
    }

    fn add_biases(&mut self, pair: &CpuGpuPair, numbers: &mut RandomNumbers, sizes: ExpertSizes) {
        let ExpertSizes { hidden, inner, count, .. } = sizes;
        let mut bias = |n: usize| {
            let values: Vec<f32> = (0..(count - 1) * n).map(|_| numbers.float()).collect();
            pair.put(&values, count - 1, n)
        };
        self.biases = Some([bias(2 * inner), bias(hidden)]);
    }

    /// Creates a case; `weights` returns the values of a matrix, and `pack` packs the matrices of the GPU.
    fn with_packing(
        pair: &CpuGpuPair,
        numbers: &mut RandomNumbers,
        ExpertSizes { hidden, inner, count, top_k }: ExpertSizes,
        dtype: DType,
        tokens: usize,
        weights: WeightGenerator,
        pack_for_gpu: impl Fn(&[Vec<HostMat<'_>>], bool) -> PackedMatrixGroup,
    ) -> Self {
        let first = 1;
        let mut pack = |n: usize, k: usize, gated: bool| {
            let bytes: Vec<Vec<u8>> =
                (first..count).map(|_| bytes_of(&weights(numbers, n, k, dtype))).collect();
            let parts: Vec<_> =
                bytes.iter().map(|b| vec![HostMat::new(b, DType::F32, n, k).unwrap()]).collect();
            [
                pack_for_gpu(&parts, gated),
                pair.cpu.pack_group(&parts, on_cpu(dtype), gated).unwrap(),
            ]
        };
        let (gate_up, down) = (pack(2 * inner, hidden, true), pack(hidden, inner, false));
        let mut chosen = Vec::new();
        for _ in 0..tokens {
            let mut free: Vec<i32> = (0..count as i32).collect();
            chosen.extend((0..top_k).map(|_| free.swap_remove(numbers.below(free.len()))));
        }
        let weights = (0..tokens * top_k).map(|_| numbers.unit()).collect();
        let activation = GateActivation::Silu;
        Self { first, gate_up, down, activation, biases: None, chosen, weights, top_k }
    }

    /// Computes the experts of tokens `[from, from + x.rows())` on both devices.
    fn run(&self, pair: &CpuGpuPair, x: &CpuGpuMatrix, from: usize) -> CpuGpuMatrix {
        let (tokens, hidden) = (x.gpu().rows(), x.gpu().cols());
        let own = from * self.top_k..(from + tokens) * self.top_k;
        let chosen = pair.put(&self.chosen[own.clone()], tokens, self.top_k);
        let weights = pair.put(&self.weights[own], tokens, self.top_k);
        let mut y = pair.poisoned(x.gpu().dtype(), tokens, hidden);
        let views: [fn(&CpuGpuMatrix) -> MatRef<'_>; 2] = [CpuGpuMatrix::gpu, CpuGpuMatrix::cpu];
        let experts = |i: usize| ExpertWeights {
            first_expert: self.first,
            gate_up: &self.gate_up[i],
            down: &self.down[i],
            activation: self.activation,
            gate_up_bias: self.biases.as_ref().map(|[bias, _]| views[i](bias)),
            down_bias: self.biases.as_ref().map(|[_, bias]| views[i](bias)),
        };
        let routes = TopKRoutes { experts: chosen.gpu(), weights: weights.gpu() };
        pair.gpu
            .launch(
                &S,
                ExpertMlp { y: y.gpu_mut(), x: x.gpu(), routes: &routes, experts: &experts(0) },
            )
            .unwrap();
        let routes = TopKRoutes { experts: chosen.cpu(), weights: weights.cpu() };
        pair.cpu
            .launch(
                &S,
                ExpertMlp { y: y.cpu_mut(), x: x.cpu(), routes: &routes, experts: &experts(1) },
            )
            .unwrap();
        y
    }
}

/// Returns random weights of a matrix `[n, k]`, rounded to `dtype`.
fn random_weights(numbers: &mut RandomNumbers, n: usize, k: usize, dtype: DType) -> Vec<f32> {
    let scale = (k as f32).powf(-0.5);
    (0..n * k).map(|_| rounded(numbers.float() * scale, dtype)).collect()
}

/// Returns random weights of a matrix `[n, k]` in MXFP4: E2M1 elements, with one power of two per 32 elements.
fn mxfp4_weights(numbers: &mut RandomNumbers, n: usize, k: usize, _: DType) -> Vec<f32> {
    const MAGNITUDES: [f32; 8] = [0.0, 0.5, 1.0, 1.5, 2.0, 3.0, 4.0, 6.0];
    let mut scale = 0.0;
    let mut weight = |i: usize| {
        if i.is_multiple_of(32) {
            scale = 2f32.powi(-7 + numbers.below(5) as i32);
        }
        let magnitude = MAGNITUDES[numbers.below(8)] * scale;
        if numbers.below(2) == 0 { magnitude } else { -magnitude }
    };
    (0..n * k).map(&mut weight).collect()
}

pub(crate) fn check(pair: &CpuGpuPair, sizes: ExpertSizes, dtype: DType, tokens: usize) {
    let mut numbers = pair.numbers(tokens as u64);
    let case = MoeCase::new(pair, &mut numbers, sizes, dtype, tokens);
    let x = pair.random(&mut numbers, dtype, tokens, sizes.hidden);
    let what = format!("{sizes:?} {dtype:?}, {tokens} tokens");
    pair.check(&what, &case.run(pair, &x, 0), 2.0 * tolerance(dtype));
}

#[test]
fn experts_agree_with_the_cpu() {
    for pair in &pairs() {
        check(pair, expert_sizes(136, 72, 6, 2), DType::BF16, 1);
        // Few rows, but some experts have more than one segment (rows of one expert that one thread block
        // processes).
        check(pair, expert_sizes(136, 72, 4, 3), DType::BF16, 10);
        check(pair, expert_sizes(72, 40, 3, 2), DType::BF16, 50); // These rows use tiles of 64 rows.
        check(pair, expert_sizes(40, 24, 3, 2), DType::BF16, 150); // These rows use tiles of 128 rows.
        check(pair, expert_sizes(36, 20, 5, 2), DType::BF16, 7); // Rows of these sizes do not permit 16-byte loads.
        // Weights are streamed by bulk copies (TMA), if supported. The kernel sorts the (token, expert) pairs
        // by expert, and the weight rows that a thread block processes may begin at any multiple of 16.
        check(pair, expert_sizes(64, 128, 6, 3), DType::BF16, 1);
        check(pair, expert_sizes(192, 64, 40, 4), DType::BF16, 9);
        check(pair, expert_sizes(128, 192, 20, 8), DType::BF16, 9); // Choices are sorted by a separate kernel.
        check(pair, expert_sizes(128, 192, 20, 8), DType::BF16, 20); // Weight loads start before routing has finished.
        check(pair, expert_sizes(64, 64, 3, 2), DType::BF16, 150); // These rows use large tiles.
    }
}

#[test]
fn biases_of_experts_agree_with_the_cpu() {
    for pair in &pairs() {
        for (sizes, dtype, tokens) in [
            (expert_sizes(64, 128, 6, 3), DType::BF16, 5),
            (expert_sizes(72, 40, 3, 2), DType::BF16, 50),
            (expert_sizes(72, 40, 3, 2), DType::BF16, 150),
            (expert_sizes(36, 20, 5, 2), DType::BF16, 7),
            (expert_sizes(36, 20, 5, 2), DType::F32, 7),
        ] {
            let mut numbers = pair.numbers(3);
            let mut case = MoeCase::biased(pair, &mut numbers, sizes, dtype, tokens);
            case.activation = GateActivation::ClampedSilu { alpha: 1.702, limit: 7.0 };
            let x = pair.random(&mut numbers, dtype, tokens, sizes.hidden);
            pair.check(&format!("{sizes:?}"), &case.run(pair, &x, 0), 2.0 * tolerance(dtype));
        }
    }
}

/// Experts in MXFP4 with few and with many tokens agree with the CPU. The grouped GEMM returns the bits that it
/// returns for the same weights in 16 bits.
#[test]
fn mxfp4_experts_agree_with_the_cpu() {
    for pair in &pairs() {
        for (sizes, tokens) in [
            (expert_sizes(64, 128, 6, 3), 5),
            (expert_sizes(160, 96, 4, 2), 3),
            (expert_sizes(96, 32, 3, 2), 50),
            (expert_sizes(160, 64, 3, 2), 150),
        ] {
            let packed = |is_mxfp4: bool| {
                let mut numbers = pair.numbers(7);
                let case = MoeCase::mxfp4(pair, &mut numbers, sizes, tokens, |parts, _| {
                    if is_mxfp4 {
                        return pair.gpu.pack_mxfp4(parts, DType::BF16).unwrap();
                    }
                    pair.gpu.pack_row_major(parts, DType::BF16).unwrap()
                });
                assert_eq!([case.gate_up[0].is_mxfp4(), case.down[0].is_mxfp4()], [is_mxfp4; 2]);
                let x = pair.random(&mut numbers, DType::BF16, tokens, sizes.hidden);
                case.run(pair, &x, 0)
            };
            let y = packed(true);
            pair.check(&format!("{sizes:?}"), &y, 2.0 * tolerance(DType::BF16));
            if tokens >= 50 {
                assert_eq!(pair.read_floats(&y)[0], pair.read_floats(&packed(false))[0]);
            }
        }
    }
}

/// Packs the matrices of one projection as the projections of MXFP4 experts are packed together: in tiles for TMA if
/// the GPU has WGMMA.
fn packed_mxfp4(pair: &CpuGpuPair, parts: &[Vec<HostMat<'_>>], gated: bool) -> PackedMatrixGroup {
    let [gate_up, down] = pair.gpu.pack_mxfp4_experts(parts, parts, DType::BF16).unwrap();
    if gated { gate_up } else { down }
}

/// Experts in MXFP4 agree with the CPU for few (token, expert) pairs in total, for few and for many pairs per expert,
/// with numbers of inputs that are no multiple of the 128 columns of a stage.
#[test]
fn packed_mxfp4_experts_agree_with_the_cpu() {
    for pair in &pairs() {
        for (sizes, tokens) in [
            (expert_sizes(160, 96, 6, 2), 1),
            (expert_sizes(128, 288, 9, 4), 11),
            (expert_sizes(288, 128, 40, 4), 16),
            (expert_sizes(96, 160, 9, 1), 40),
            (expert_sizes(96, 160, 9, 2), 40),
            (expert_sizes(160, 64, 3, 2), 150),
            (expert_sizes(2880, 96, 3, 2), 2),
            // Blocks with several passes, of experts whose tokens do not fit into one tile together; with 64 rows per tile.
            (expert_sizes(2880, 96, 5, 4), 16),
            (expert_sizes(2880, 96, 5, 2), 20),
            // Halves of K in the gate and up projection.
            (expert_sizes(64, 1440, 3, 2), 2),
        ] {
            let mut numbers = pair.numbers(9);
            let case = MoeCase::mxfp4(pair, &mut numbers, sizes, tokens, |parts, gated| {
                packed_mxfp4(pair, parts, gated)
            });
            assert_eq!([case.gate_up[0].is_mxfp4(), case.down[0].is_mxfp4()], [true; 2]);
            let x = pair.random(&mut numbers, DType::BF16, tokens, sizes.hidden);
            let what = format!("{sizes:?}, {tokens} tokens");
            pair.check(&what, &case.run(pair, &x, 0), 2.0 * tolerance(DType::BF16));
        }
    }
}

/// A token without an expert on this rank gets zeros, also if no token has one.
#[test]
fn packed_mxfp4_experts_of_other_ranks_give_zeros() {
    for pair in &pairs() {
        let (mut numbers, sizes) = (pair.numbers(12), expert_sizes(160, 96, 4, 2));
        let mut case = MoeCase::mxfp4(pair, &mut numbers, sizes, 3, |parts, gated| {
            packed_mxfp4(pair, parts, gated)
        });
        let x = pair.random(&mut numbers, DType::BF16, 3, sizes.hidden);
        for elsewhere in [2, 3] {
            // Expert 0 and experts from `sizes.count` on are on other ranks.
            let others = [0, sizes.count as i32].into_iter().cycle();
            case.chosen[..elsewhere * 2].iter_mut().zip(others).for_each(|(c, e)| *c = e);
            let y = case.run(pair, &x, 0);
            pair.check("experts of other ranks", &y, 2.0 * tolerance(DType::BF16));
        }
    }
}

/// A projection with 40 inputs has no MXFP4 groups; the other one then stays row-major, too.
#[test]
fn mxfp4_tiles_need_both_projections() {
    for pair in &pairs() {
        let (sizes, tokens, mut numbers) = (expert_sizes(64, 40, 4, 2), 5, pair.numbers(10));
        let bytes = bytes_of(&mxfp4_weights(&mut numbers, 80, 64, DType::BF16));
        let gate_up = [vec![HostMat::new(&bytes, DType::F32, 80, 64).unwrap()]];
        let down = [vec![HostMat::new(&bytes[..64 * 40 * 4], DType::F32, 64, 40).unwrap()]];
        let groups = pair.gpu.pack_mxfp4_experts(&gate_up, &down, DType::BF16).unwrap();
        assert_eq!(groups.map(|group| group.is_mxfp4()), [true, false]);
        let case = MoeCase::mxfp4(pair, &mut numbers, sizes, tokens, |parts, _| {
            pair.gpu.pack_mxfp4(parts, DType::BF16).unwrap()
        });
        let x = pair.random(&mut numbers, DType::BF16, tokens, sizes.hidden);
        pair.check("row-major", &case.run(pair, &x, 0), 2.0 * tolerance(DType::BF16));
    }
}

/// Weights that MXFP4 does not represent are packed in 16 bits.
#[test]
fn other_weights_are_not_packed_in_mxfp4() {
    let cases: [(usize, WeightGenerator); 2] = [(64, random_weights), (48, mxfp4_weights)];
    for pair in &pairs() {
        let mut numbers = pair.numbers(8);
        for (k, weights) in cases {
            let bytes = bytes_of(&weights(&mut numbers, 8, k, DType::BF16));
            let parts = [vec![HostMat::new(&bytes, DType::F32, 8, k).unwrap()]];
            let group = pair.gpu.pack_mxfp4(&parts, DType::BF16).unwrap();
            assert!(!group.is_mxfp4(), "{k} columns");
        }
    }
}

/// Every kernel computes the activation of the experts.
#[test]
fn expert_activations_agree_with_the_cpu() {
    let clamped = GateActivation::ClampedSilu { alpha: 1.702, limit: 0.75 };
    for pair in &pairs() {
        for (sizes, dtype, tokens, activation) in [
            (expert_sizes(136, 72, 6, 2), DType::BF16, 1, clamped),
            (expert_sizes(72, 40, 3, 2), DType::BF16, 50, clamped),
            (expert_sizes(36, 20, 5, 2), DType::BF16, 7, GateActivation::GeluTanh),
            (expert_sizes(36, 20, 5, 2), DType::F32, 7, clamped),
            (expert_sizes(64, 128, 6, 3), DType::BF16, 1, clamped),
            (expert_sizes(128, 192, 20, 8), DType::BF16, 20, GateActivation::GeluTanh),
        ] {
            let mut numbers = pair.numbers(tokens as u64);
            let case = MoeCase::new(pair, &mut numbers, sizes, dtype, tokens);
            let case = MoeCase { activation, ..case };
            let x = pair.random(&mut numbers, dtype, tokens, sizes.hidden);
            let what = format!("{sizes:?} {dtype:?}, {tokens} tokens, {activation:?}");
            pair.check(&what, &case.run(pair, &x, 0), 2.0 * tolerance(dtype));
        }
    }
}

/// Runs more tokens than the maximum grid size in y and z; a launch may contain the tokens of all DP
/// replicas.
#[test]
fn any_number_of_tokens() {
    for pair in &pairs() {
        check(pair, expert_sizes(8, 8, 2, 1), DType::F32, 66_000);
        check(pair, expert_sizes(16, 16, 2, 1), DType::BF16, 66_000);
    }
}

/// Compares GPU and CPU when all tokens choose the same experts, and when they choose no expert of this rank.
#[test]
fn hot_and_idle_experts_match_the_cpu() {
    for pair in &pairs() {
        let small_batches = [([1, 2], 70), ([1, 0], 40), ([0, 0], 40), ([0, 0], 3)];
        let large_batches = [([1, 59], 130), ([0, 30], 130), ([0, 0], 130)];
        for (choices, tokens) in small_batches.into_iter().chain(large_batches) {
            let (sizes, mut numbers) = (expert_sizes(64, 64, 60, 2), pair.numbers(3));
            let mut case = MoeCase::new(pair, &mut numbers, sizes, DType::BF16, tokens);
            case.chosen = choices.repeat(tokens);
            let x = pair.random(&mut numbers, DType::BF16, tokens, sizes.hidden);
            let what = format!("{tokens} tokens of {choices:?}");
            pair.check(&what, &case.run(pair, &x, 0), 2.0 * tolerance(DType::BF16));
        }
    }
}

/// Compares GPU and CPU for layers whose last experts are shared experts (weight 1, chosen by every token),
/// as in DeepSeek-V2-Lite and V3, for any number of tokens.
#[test]
fn shared_experts_agree_with_the_cpu() {
    for pair in &pairs() {
        for (count, top_k, shared, tokens) in [
            (66, 8, 2, &[1, 8, 9, 40, 160][..]),
            (257, 9, 1, &[1, 7, 8, 130]),
            (5, 3, 2, &[17, 300]),
        ] {
            for &tokens in tokens {
                let (sizes, mut numbers) = (expert_sizes(64, 64, count, top_k), pair.numbers(8));
                let mut case = MoeCase::new(pair, &mut numbers, sizes, DType::BF16, tokens);
                for t in 0..tokens {
                    let mut free: Vec<i32> = (0..(count - shared) as i32).collect();
                    let chosen = &mut case.chosen[t * top_k..(t + 1) * top_k];
                    for (j, expert) in chosen.iter_mut().enumerate() {
                        *expert = match j.checked_sub(top_k - shared) {
                            Some(which) => (count - shared + which) as i32,
                            None => free.swap_remove(numbers.below(free.len())),
                        };
                    }
                    case.weights[(t + 1) * top_k - shared..(t + 1) * top_k].fill(1.0);
                }
                let x = pair.random(&mut numbers, DType::BF16, tokens, sizes.hidden);
                let what = format!("{tokens} tokens of {count} experts, {shared} shared");
                pair.check(&what, &case.run(pair, &x, 0), 2.0 * tolerance(DType::BF16));
            }
        }
    }
}

/// A matrix of a packed group gives the results of the same matrix packed alone, unless the device stores
/// groups in another layout.
#[test]
fn group_member_equals_separate_matrix() {
    let (n, k, rows) = (128, 64, 5);
    for pair in &pairs() {
        let mut numbers = pair.numbers(9);
        let stored: Vec<Vec<u8>> = (0..3).map(|_| bytes_of(&numbers.reals::<f32>(n * k))).collect();
        let part = |b| vec![HostMat::new(b, DType::F32, n, k).unwrap()];
        let parts: Vec<_> = stored.iter().map(|b| part(b)).collect();
        for dtype in [DType::BF16, DType::F32] {
            let x = pair.random(&mut numbers, dtype, rows, k);
            let group = pair.gpu.pack_group(&parts, dtype, false).unwrap();
            let streams =
                ["sm_90a", "emulated"].contains(&pair.gpu.arch()) && pair.gpu.warp_size() == 32;
            let third = group.matrix(2);
            assert_eq!(third.is_none(), streams && dtype == DType::BF16);
            assert!(group.matrix(3).is_none());
            let Some(third) = third else { continue };
            drop(group); // The matrix keeps the memory of its group alive.
            let separate = pair.gpu.pack(&parts[2], dtype).unwrap();
            let [of_group, own] = [&*third, &separate].map(|w| {
                let mut y = pair.poisoned(dtype, rows, n);
                pair.gpu
                    .launch(&S, Linear { y: y.gpu_mut(), x: x.gpu(), weight: w, bias: None })
                    .unwrap();
                let [y, _] = pair.read_floats(&y);
                y
            });
            assert_eq!(of_group, own, "{dtype:?}");
        }
    }
}

/// Routing fused with the experts gives the same bits as routing and experts in separate launches.
#[test]
fn fused_routing_changes_no_bit() {
    for (pair, tokens, renormalise, shared) in
        pairs().iter().flat_map(|p| [(p, 1, true, 0), (p, 2, true, 2), (p, 2, false, 1)])
    {
        let (sizes, mut numbers) = (expert_sizes(64, 64, 21, 6), pair.numbers(6));
        let ExpertSizes { hidden, count: all, top_k: k, .. } = sizes;
        let (count, top_k) = (all - shared, k - shared);
        let mut case = MoeCase::new(pair, &mut numbers, sizes, DType::BF16, tokens);
        let x = pair.random(&mut numbers, DType::BF16, tokens, hidden);
        let coarse = |x: f32| (x * 24.0).round() / 4.0;
        let logits: Vec<f32> = (0..tokens * count).map(|_| coarse(numbers.float())).collect();
        let logits = pair.put(&logits, tokens, count);
        let mut chosen = pair.poisoned(DType::I32, tokens, k);
        let mut weights = pair.poisoned(DType::F32, tokens, k);
        let scores = SoftmaxRouterArgs { logits: logits.gpu(), top_k, renormalise, shared };
        let out = (chosen.gpu_mut(), weights.gpu_mut());
        pair.gpu
            .launch(
                &S,
                SoftmaxRouting { experts: out.0, weights: out.1, router: &scores, load: None },
            )
            .unwrap();
        [case.chosen, _] = pair.read::<i32>(&chosen);
        [case.weights, _] = pair.read::<f32>(&weights);
        let [separate, _] = pair.read_floats(&case.run(pair, &x, 0));
        let mut y = pair.poisoned(DType::BF16, tokens, hidden);
        let (gate_up, down) = (&case.gate_up[0], &case.down[0]);
        let (first_expert, activation) = (case.first, case.activation);
        let unbiased = ExpertWeights::unbiased(first_expert, gate_up, down);
        let experts = ExpertWeights { activation, ..unbiased };
        // The second token, if any, is padding, which the load counters do not count.
        let slots = DeviceArray::row(&pair.gpu, &[0i64, -1][..tokens]);
        let mut counted = DeviceArray::of(&pair.gpu, &vec![3i32; count], 1, count);
        let mut to =
            ExpertLoadArgs { tokens: counted.mat_mut(), layer: 0, slots: Some(slots.mat()) };
        let (x, to) = (x.gpu(), Some(&mut to));
        if FusedMoe::supports(&pair.backends()[0], &scores, &experts) {
            let op = FusedMoe { y: y.gpu_mut(), x, router: &scores, experts: &experts, load: to };
            pair.gpu.launch(&S, op).unwrap();
            let [fused, _] = pair.read_floats(&y);
            assert_eq!(fused, separate, "{tokens} tokens");
            let chosen = &case.chosen[..top_k];
            let expected = |e| 3 + i32::from(chosen.contains(&(e as i32)));
            let expected: Vec<i32> = (0..count).map(expected).collect();
            assert_eq!(counted.read(&pair.gpu), expected, "{tokens} tokens");
        }
    }
}

/// Runs more (token, expert) pairs than one thread block sorts; few of the pairs have experts of this rank.
#[test]
fn large_expert_alignment_uses_several_blocks() {
    for pair in &pairs() {
        let (sizes, tokens, mut numbers) = (expert_sizes(64, 64, 5, 4), 1100, pair.numbers(5));
        let mut case = MoeCase::new(pair, &mut numbers, sizes, DType::BF16, tokens);
        for chosen in case.chosen.chunks_mut(sizes.top_k) {
            chosen.fill(0);
            if numbers.below(8) == 0 {
                chosen[numbers.below(sizes.top_k)] = 1 + numbers.below(4) as i32;
            }
        }
        let x = pair.random(&mut numbers, DType::BF16, tokens, sizes.hidden);
        pair.check(
            "alignment in several blocks",
            &case.run(pair, &x, 0),
            2.0 * tolerance(DType::BF16),
        );
    }
}

/// The output of a token has the same bits alone and in a batch. Very large batches use another kernel, so
/// they are compared with other batches that use the same kernel.
#[test]
fn moe_tokens_are_batch_invariant() {
    for pair in &pairs() {
        check_batch_invariance(pair, expert_sizes(72, 40, 5, 2), 6, 1);
        check_batch_invariance(pair, expert_sizes(128, 64, 20, 8), 9, 1);
        check_batch_invariance(pair, expert_sizes(64, 64, 17, 4), 32, 17);
        check_batch_invariance(pair, expert_sizes(64, 64, 3, 2), 80, 70);
        let mut numbers = pair.numbers(2);
        let case =
            MoeCase::mxfp4(pair, &mut numbers, expert_sizes(160, 64, 5, 2), 6, |parts, _| {
                pair.gpu.pack_mxfp4(parts, DType::BF16).unwrap()
            });
        check_parts_of_batch(pair, &case, &mut numbers, 160, 6, 1);
        let mut cases =
            vec![(expert_sizes(160, 96, 9, 2), 6, 1), (expert_sizes(96, 160, 5, 2), 80, 70)];
        if crate::moe_fp8_tma::streams(pair) {
            // 13 rows per expert on average, or half as many: WGMMAs of other widths.
            cases.push((expert_sizes(96, 160, 9, 2), 60, 33));
        }
        for (sizes, tokens, some) in cases {
            let case = MoeCase::mxfp4(pair, &mut numbers, sizes, tokens, |parts, gated| {
                packed_mxfp4(pair, parts, gated)
            });
            check_parts_of_batch(pair, &case, &mut numbers, sizes.hidden, tokens, some);
        }
    }
}

/// Checks that the result of each token has the same bits in a batch of `tokens` tokens and in batches of
/// `some` consecutive tokens.
fn check_batch_invariance(pair: &CpuGpuPair, sizes: ExpertSizes, tokens: usize, some: usize) {
    let hidden = sizes.hidden;
    let mut numbers = pair.numbers(2);
    let case = MoeCase::new(pair, &mut numbers, sizes, DType::BF16, tokens);
    check_parts_of_batch(pair, &case, &mut numbers, hidden, tokens, some);
}

fn check_parts_of_batch(
    pair: &CpuGpuPair,
    case: &MoeCase,
    numbers: &mut RandomNumbers,
    hidden: usize,
    tokens: usize,
    some: usize,
) {
    let values = numbers.reals::<bf16>(tokens * hidden);
    let [all, _] = pair.read_floats(&case.run(pair, &pair.put(&values, tokens, hidden), 0));
    for first in (0..=tokens - some).step_by(some.div_ceil(8)) {
        let own = first * hidden..(first + some) * hidden;
        let x = pair.put(&values[own.clone()], some, hidden);
        let [part, _] = pair.read_floats(&case.run(pair, &x, first));
        assert_eq!(part, all[own], "{some} tokens from {first}");
    }
}
