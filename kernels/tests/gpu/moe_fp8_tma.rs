//! fp8 experts streamed by bulk copies (TMA), which do not quantise inputs for any number of rows, against
//! the CPU, which dequantises the weights. GPUs without WGMMA have no such kernels, so the tests skip them.

use device::DType;
use kernels::{FusedMoe, SoftmaxRouterArgs};

use crate::device_pair::{CpuGpuPair, pairs, tolerance};
use crate::fp8::ScaleGranularity;
use crate::moe::{ExpertSizes, expert_sizes};
use crate::moe_fp8::{MoeFp8Case, check_batch_invariance, check_small_m, stored, stored_with};
use crate::support::{RandomNumbers, S};

/// Bits of the fp8 NaN without the sign.
const NAN: u8 = 0x7f;

pub(crate) fn streams(pair: &CpuGpuPair) -> bool {
    pair.gpu.warp_size() == 32 && ["sm_90a", "emulated"].contains(&pair.gpu.arch())
}

/// Compares GPU and CPU for few (token, expert) pairs in total, for few and for many pairs per expert, and
/// for experts whose weight rows are divided among thread blocks.
#[test]
fn fp8_grouped_gemm_tma_agrees_with_the_cpu() {
    for pair in pairs().iter().filter(|pair| streams(pair)) {
        check_small_m(pair, expert_sizes(128, 128, 6, 2), 1);
        check_small_m(pair, expert_sizes(256, 128, 9, 3), 20);
        check_small_m(pair, expert_sizes(384, 256, 17, 3), 30);
        check_small_m(pair, expert_sizes(128, 384, 9, 2), 40);
        check_small_m(pair, expert_sizes(128, 256, 3, 2), 150);
    }
}

/// Experts with one scale per projection are packed with block scales, all of the same value.
#[test]
fn fp8_tma_experts_with_one_scale_agree_with_the_cpu() {
    for pair in pairs().iter().filter(|pair| streams(pair)) {
        for (sizes, tokens) in
            [(expert_sizes(256, 128, 9, 3), 1), (expert_sizes(384, 256, 5, 2), 40)]
        {
            let mut numbers = pair.numbers(8);
            let stored = stored_with(&mut numbers, sizes, ScaleGranularity::Tensor);
            let case = MoeFp8Case::of(pair, &mut numbers, sizes, tokens, stored);
            let x = pair.random(&mut numbers, pair.gpu.half_dtype(), tokens, sizes.hidden);
            let y = case.run(pair, &x, 0, true);
            pair.check(&format!("{sizes:?}"), &y, 2.0 * tolerance(pair.gpu.half_dtype()));
        }
    }
}

/// The output of a token has the same bits alone and in a batch that uses the same kernel.
#[test]
fn fp8_tma_tokens_are_batch_invariant() {
    for pair in pairs().iter().filter(|pair| streams(pair)) {
        check_batch_invariance(pair, expert_sizes(256, 128, 5, 2), 6, 1);
        check_batch_invariance(pair, expert_sizes(128, 256, 3, 2), 100, 70);
    }
}

/// Routing fused with the experts gives the same bits as separate launches, also at the maximum of shared
/// memory use.
#[test]
fn fused_routing_changes_no_bit() {
    for pair in pairs().iter().filter(|pair| streams(pair)) {
        for (tokens, top_k) in [(1, 1), (1, 8), (2, 6)] {
            let (sizes, mut numbers) = (expert_sizes(256, 128, 13, top_k), pair.numbers(6));
            let stored = stored(&mut numbers, sizes);
            let mut case = MoeFp8Case::of(pair, &mut numbers, sizes, tokens, stored);
            let x = pair.random(&mut numbers, pair.gpu.half_dtype(), tokens, sizes.hidden);
            let logits: Vec<f32> = (0..tokens * sizes.count).map(|_| numbers.float()).collect();
            let logits = pair.put(&logits, tokens, sizes.count);
            let scores =
                SoftmaxRouterArgs { logits: logits.gpu(), top_k, renormalise: true, shared: 0 };
            let mut y = pair.poisoned(pair.gpu.half_dtype(), tokens, sizes.hidden);
            let (out, experts) = (y.gpu_mut(), case.experts());
            assert!(FusedMoe::supports(&pair.backends()[0], &scores, &experts));
            let (x_gpu, experts) = (x.gpu(), &experts);
            let op = FusedMoe { y: out, x: x_gpu, router: &scores, experts, load: None };
            pair.gpu.launch(&S, op).unwrap();
            case.route(pair, &scores, tokens);
            let [separate, _] = pair.read_floats(&case.run(pair, &x, 0, false));
            let [fused, _] = pair.read_floats(&y);
            assert_eq!(fused, separate, "{tokens} tokens of {top_k}");
        }
    }
}

/// Creates a case in which the weight at index `at` of each matrix has the bits `of(at)`; random if `of(at)`
/// is `None`.
fn with_bits(
    pair: &CpuGpuPair,
    numbers: &mut RandomNumbers,
    sizes: ExpertSizes,
    tokens: usize,
    of: impl Fn(usize) -> Option<u8>,
) -> MoeFp8Case {
    let mut stored = stored(numbers, sizes);
    for weights in stored.iter_mut().flatten() {
        for (at, bits) in weights.bytes_mut().iter_mut().enumerate() {
            *bits = of(at).unwrap_or(*bits);
        }
    }
    MoeFp8Case::of(pair, numbers, sizes, tokens, stored)
}

/// Experts with every fp8 number except NaN as weights, subnormals included, agree with the CPU.
#[test]
fn every_number_is_exact() {
    for pair in pairs().iter().filter(|pair| streams(pair)) {
        for tokens in [3, 90] {
            let (sizes, mut numbers) = (expert_sizes(128, 128, 3, 2), pair.numbers(8));
            let number = |at: usize| {
                // Every fourth row has only the smallest numbers, so that the errors of small numbers are not
                // hidden by large numbers.
                let (row, all) = (at / 128, at % 254);
                let bits = if row % 4 == 0 { at % 16 } else { all } as u8;
                let sign = (at / 3 % 2) as u8 * 0x80;
                Some(if bits < NAN { bits | sign } else { (bits - NAN) | 0x80 })
            };
            let case = with_bits(pair, &mut numbers, sizes, tokens, number);
            let x = pair.random(&mut numbers, pair.gpu.half_dtype(), tokens, sizes.hidden);
            let y = case.run(pair, &x, 0, true);
            pair.check(&format!("{tokens} tokens"), &y, 2.0 * tolerance(DType::BF16));
        }
    }
}

/// Tokens of an expert with a NaN weight give NaN, and other tokens are not affected.
#[test]
fn nan_stays_nan() {
    for pair in pairs().iter().filter(|pair| streams(pair)) {
        for (tokens, nan) in [(4, NAN), (80, NAN | 0x80)] {
            let (sizes, mut numbers) = (expert_sizes(128, 128, 3, 1), pair.numbers(9));
            let one_nan = |at: usize| (at == 77).then_some(nan);
            let case = with_bits(pair, &mut numbers, sizes, tokens, one_nan);
            let x = pair.random(&mut numbers, pair.gpu.half_dtype(), tokens, sizes.hidden);
            let [y, _] = pair.read_floats(&case.run(pair, &x, 0, false));
            for (t, row) in y.chunks(sizes.hidden).enumerate() {
                // A token whose expert is on another rank gets no contribution, so no NaN.
                assert_eq!(row[0].is_nan(), case.is_here(t), "token {t} of {tokens}");
            }
        }
    }
}
