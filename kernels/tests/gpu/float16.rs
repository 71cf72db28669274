//! GPUs that compute in f16: every kernel with variants for a 16-bit type matches the CPU, which computes in
//! f32 from values that are exact in f16.

use device::gpu::HalfDtype;
use device::{DType, f16};
use kernels::{
    AddRmsNorm, BatchUpperBounds, GateActivation, GatedActivation, HostMat, Linear, RmsNorm,
    TensorAdd,
};

use crate::device_pair::{CpuGpuPair, bytes_of, f16_pairs, pairs, tolerance};
use crate::fp8::ScaleGranularity;
use crate::mla::{LONG, SHORT};
use crate::support::{S, devices_of};
use crate::{
    attention, fp8, gemm_large_m, kv_fp8, linear, mla, mla_prefill, moe, moe_fp8, rope_attention,
};

const F16: DType = DType::F16;

/// The sum of any f16 value and a value of any magnitude is rounded once, also if the sum is inexact,
/// subnormal or overflows.
#[test]
fn sums_round_to_nearest_even() {
    let all: Vec<f16> = (0..=u16::MAX).map(f16::from_bits).collect();
    for pair in &f16_pairs() {
        let mut numbers = pair.numbers(1);
        let mut rhs = vec![f16::ZERO; all.len()];
        for _ in 0..3 {
            let sums: Vec<f16> =
                all.iter().zip(&rhs).map(|(a, b)| f16::from_f32(a.to_f32() + b.to_f32())).collect();
            let (a, b) = (pair.put(&all, 64, 1024), pair.put(&rhs, 64, 1024));
            let mut y = pair.poisoned(F16, 64, 1024);
            pair.gpu.launch(&S, TensorAdd { y: y.gpu_mut(), a: a.gpu(), b: b.gpu() }).unwrap();
            for ((got, sum), (a, b)) in
                pair.read_gpu::<f16>(&y).iter().zip(&sums).zip(all.iter().zip(&rhs))
            {
                let same = got.to_bits() == sum.to_bits() || (got.is_nan() && sum.is_nan());
                assert!(same, "{a:e} + {b:e} is {got:e}, not {sum:e}");
            }
            rhs.fill_with(|| f16::from_bits(numbers.bits() as u16));
        }
    }
}

#[test]
fn row_kernels_agree_with_the_cpu() {
    for pair in &f16_pairs() {
        for (rows, cols) in [(3, 1000), (2, 4096), (5, 33)] {
            let mut numbers = pair.numbers(cols as u64);
            let [x, delta] = [0; 2].map(|_| pair.random(&mut numbers, F16, rows, cols));
            let norm = pair.random(&mut numbers, F16, 1, cols);
            let mut stream = pair.random(&mut numbers, F16, rows, cols);
            let mut y = pair.poisoned(F16, rows, cols);
            pair.gpu
                .launch(&S, RmsNorm { y: y.gpu_mut(), x: x.gpu(), weight: norm.gpu(), eps: 1e-5 })
                .unwrap();
            pair.cpu
                .launch(&S, RmsNorm { y: y.cpu_mut(), x: x.cpu(), weight: norm.cpu(), eps: 1e-5 })
                .unwrap();
            pair.check("rms_norm", &y, tolerance(F16));
            let (to, sum) = (y.gpu_mut(), stream.gpu_mut());
            pair.gpu
                .launch(
                    &S,
                    AddRmsNorm { y: to, x: sum, delta: delta.gpu(), weight: norm.gpu(), eps: 1e-5 },
                )
                .unwrap();
            let (to, sum) = (y.cpu_mut(), stream.cpu_mut());
            pair.cpu
                .launch(
                    &S,
                    AddRmsNorm { y: to, x: sum, delta: delta.cpu(), weight: norm.cpu(), eps: 1e-5 },
                )
                .unwrap();
            pair.check("add_rms_norm", &y, tolerance(F16));
            pair.check("its sum", &stream, tolerance(F16));
            let both = pair.random(&mut numbers, F16, rows, 2 * cols);
            let activation = GateActivation::Silu;
            let op = GatedActivation { y: y.gpu_mut(), x: both.gpu(), activation };
            pair.gpu.launch(&S, op).unwrap();
            let op = GatedActivation { y: y.cpu_mut(), x: both.cpu(), activation };
            pair.cpu.launch(&S, op).unwrap();
            pair.check("gated_activation", &y, tolerance(F16));
        }
    }
}

#[test]
fn products_agree_with_the_cpu() {
    let router = [F16, DType::F32, DType::F32];
    for pair in &f16_pairs() {
        for ((m, n, k), types) in [
            ((3, 100, 1032), [F16; 3]),
            ((9, 40, 2592), [F16, F16, DType::F32]),
            ((17, 130, 40), [F16; 3]),
            ((100, 72, 96), [F16, F16, DType::F32]),
            ((6, 30, 34), [F16; 3]),
            ((6, 30, 34), router),
        ] {
            linear::check_product(pair, m, n, k, types, m != 17);
        }
        linear::check_fused_linear(pair, 72, 264, &[1, 16]);
        if linear::streams(pair) {
            linear::check_product(pair, 64, 80, 1152, [F16; 3], false);
            linear::check_fused_linear(pair, 48, 512, &[17]);
        }
        if gemm_large_m::has_kernel(pair) {
            gemm_large_m::check(pair, 64);
        }
    }
}

#[test]
fn attention_agrees_with_the_cpu() {
    for pair in &f16_pairs() {
        attention::check(pair, (4, 2, 128, 16), F16, &[(1, 1), (1, 129), (1, 300)]);
        attention::check(pair, (8, 1, 64, 32), F16, &[(1, 33), (1, 128)]);
        attention::check(pair, (8, 2, 128, 16), F16, &[(37, 37), (5, 100), (2, 16)]);
        for dim in [256, 512] {
            attention::check(pair, (2, 1, dim, 16), F16, &[(1, 40), (37, 137)]);
        }
        attention::check(pair, (4, 2, 48, 6), F16, &[(1, 9), (7, 20)]);
        for decode in [true, false] {
            kv_fp8::check(pair, (4, 2, 128, 16), F16, decode);
        }
    }
    for device in devices_of(HalfDtype::F16).iter().filter(|device| device.warp_size() == 32) {
        rope_attention::check::<f16>(device, (4, 2, 128, 16), &[1, 16, 0, 257], true);
        rope_attention::check::<f16>(
            device,
            (2, 1, 64, 16),
            &[BatchUpperBounds::SHORT_CONTEXT],
            true,
        );
    }
}

#[test]
fn mla_agrees_with_the_cpu() {
    for pair in &f16_pairs() {
        mla::check(pair, [2, 96, 16, 24, 40, 16], SHORT, 2, F16);
        mla::check(pair, [17, 128, 32, 32, 48, 32], LONG, 4, F16);
        mla_prefill::check(pair, [1, 128, 64, 64, 64, 16], &[(1, 40), (257, 300)], F16);
    }
}

#[test]
fn experts_agree_with_the_cpu() {
    for pair in &f16_pairs() {
        moe::check(pair, moe::expert_sizes(136, 72, 4, 3), F16, 10); // Few rows use the small-M kernel.
        moe::check(pair, moe::expert_sizes(72, 40, 3, 2), F16, 50); // These rows use tiles of 64 rows.
        moe::check(pair, moe::expert_sizes(36, 20, 5, 2), F16, 7); // Rows of these sizes do not permit 16-byte loads.
        // The weights of experts of these sizes are streamed by bulk copies (TMA), if the GPU supports these.
        moe::check(pair, moe::expert_sizes(192, 64, 40, 4), F16, 9);
        moe::check(pair, moe::expert_sizes(128, 192, 20, 8), F16, 9);
        moe::check(pair, moe::expert_sizes(128, 192, 20, 8), F16, 20);
        moe::check(pair, moe::expert_sizes(64, 64, 3, 2), F16, 150);
        moe_fp8::check_small_m(pair, moe::expert_sizes(192, 64, 5, 3), 10);
        moe_fp8::check_grouped_gemm::<f16>(pair, moe::expert_sizes(192, 128, 3, 2), 30);
    }
}

#[test]
fn products_with_fp8_weights_agree_with_the_cpu() {
    for pair in &f16_pairs() {
        fp8::check_small_m(pair, 3, 112, 192, ScaleGranularity::Blocks);
        fp8::check_small_m(pair, 16, 16, 1024, ScaleGranularity::Channels);
        fp8::check_large_m::<f16>(pair, 17, 48, 64, ScaleGranularity::Channels);
        fp8::check_large_m::<f16>(pair, 70, 80, 320, ScaleGranularity::Blocks);
    }
}

/// A kernel compiled for one 16-bit type is rejected for the other type, whose bits it would misinterpret.
#[test]
fn other_half_dtype_is_rejected() {
    let check_rejected = |pair: &CpuGpuPair, other: DType| {
        let x = pair.zeros(other, 2, 64);
        let mut y = pair.zeros(other, 2, 64);
        let bytes = bytes_of(&[0f32; 64 * 64]);
        let parts = [HostMat::new(&bytes, DType::F32, 64, 64).unwrap()];
        let f32_w = pair.gpu.pack(&parts, DType::F32).unwrap();
        let own_w = pair.gpu.pack(&parts, pair.gpu.half_dtype()).unwrap();
        let errors = [
            pair.gpu.pack(&parts, other).err(),
            pair.gpu.launch(&S, TensorAdd { y: y.gpu_mut(), a: x.gpu(), b: x.gpu() }).err(),
            pair.gpu
                .launch(
                    &S,
                    RmsNorm {
                        y: y.gpu_mut(),
                        x: x.gpu(),
                        weight: x.gpu().rows_from(0, 1),
                        eps: 1e-5,
                    },
                )
                .err(),
            pair.gpu
                .launch(&S, Linear { y: y.gpu_mut(), x: x.gpu(), weight: &f32_w, bias: None })
                .err(),
            pair.gpu
                .launch(&S, Linear { y: y.gpu_mut(), x: x.gpu(), weight: &own_w, bias: None })
                .err(),
        ];
        for error in errors {
            let error = error.expect("rejected").to_string();
            assert!(error.contains(&format!("{other:?}")), "{error}");
        }
    };
    for pair in &pairs() {
        check_rejected(pair, F16);
    }
    for pair in &f16_pairs() {
        check_rejected(pair, DType::BF16);
    }
}
