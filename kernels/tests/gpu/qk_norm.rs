//! QK norm over all heads, attention temperature and norm of value heads of the GPU match the CPU.

use device::{DeviceDriver, MatMut, MatRef, bf16};
use kernels::{QkChannelCounts, QkFullNorm, QkSquareSums, QueryTemperatureScaling, ValueHeadNorm};

use crate::support::{
    DeviceArray, GpuTestFloat, RandomNumbers, S, devices, error, oracle, tolerance,
};

/// Tokens, query channels, key channels and value channels. In the last shape, rows are not aligned to 16 bytes.
const SHAPES: [[usize; 4]; 4] =
    [[1, 16, 16, 16], [3, 48, 16, 16], [2, 5120, 1024, 1024], [3, 20, 12, 1]];
const EPS: f32 = 1e-5;

fn norms<T: GpuTestFloat>() {
    let cpu = oracle();
    for [rows, query, key, value] in SHAPES {
        let (cols, channels) = (query + key + value, QkChannelCounts { query, key });
        let mut numbers = RandomNumbers::fresh(cols as u64);
        let x = numbers.reals::<T>(rows * cols);
        let w = numbers.reals::<T>(query + key);
        let mut expected_sums = vec![0f32; rows * 2];
        let mut expected = x.clone();
        let out = MatMut::of(&mut expected_sums, rows, 2).unwrap();
        let qkv = MatRef::of(&x, rows, cols).unwrap();
        cpu.launch(&S, QkSquareSums { sums: out, qkv, channels }).unwrap();
        let norm = QkFullNorm {
            qkv: MatMut::of(&mut expected, rows, cols).unwrap(),
            sums: MatRef::of(&expected_sums, rows, 2).unwrap(),
            weight: MatRef::of(&w, 1, query + key).unwrap(),
            channels,
            ranks: 2,
            eps: EPS,
        };
        cpu.launch(&S, norm).unwrap();
        for device in devices() {
            let name = format!("{} {rows} x {cols}", device.name());
            let run = |tokens: &[T]| {
                let rows = tokens.len() / cols;
                let mut qkv = DeviceArray::of(&device, tokens, rows, cols);
                let mut sums = DeviceArray::<f32>::poisoned(&device, rows, 2);
                let op = QkSquareSums { sums: sums.mat_mut(), qkv: qkv.mat(), channels };
                device.launch(&S, op).unwrap();
                let weight = DeviceArray::row(&device, &w);
                let op = QkFullNorm {
                    qkv: qkv.mat_mut(),
                    sums: sums.mat(),
                    weight: weight.mat(),
                    channels,
                    ranks: 2,
                    eps: EPS,
                };
                device.launch(&S, op).unwrap();
                (sums.read(&device), qkv.read(&device))
            };
            let (sums, qkv) = run(&x);
            let largest = expected_sums.iter().copied().fold(1.0, f32::max);
            let worst = sums.iter().zip(&expected_sums).map(|(a, b)| (a - b).abs() / largest);
            assert!(worst.fold(0.0, f32::max) < 1e-5, "{name}");
            assert!(error(&qkv, &expected) < tolerance::<T>(), "{name}");
            let (alone, token) = run(&x[..cols]);
            assert_eq!((&alone[..], &token[..]), (&sums[..2], &qkv[..cols]), "{name}: batch");
        }
    }
}

fn temperature<T: GpuTestFloat>() {
    let cpu = oracle();
    let factors: Vec<f32> = (0..40u8).map(|i| 1.0 + f32::from(i / 16) / 8.0).collect();
    for [rows, query, key, value] in SHAPES {
        let cols = query + key + value;
        let mut numbers = RandomNumbers::fresh(cols as u64 + 1);
        let x = numbers.reals::<T>(rows * cols);
        let positions: Vec<i32> = (0..rows).map(|_| numbers.below(40) as i32).collect();
        let mut expected = x.clone();
        let op = QueryTemperatureScaling {
            qkv: MatMut::of(&mut expected, rows, cols).unwrap(),
            factors: MatRef::of(&factors, 1, 40).unwrap(),
            positions: MatRef::of(&positions, 1, rows).unwrap(),
            query,
        };
        cpu.launch(&S, op).unwrap();
        for device in devices() {
            let mut qkv = DeviceArray::of(&device, &x, rows, cols);
            let (factors, positions) =
                (DeviceArray::row(&device, &factors), DeviceArray::row(&device, &positions));
            let op = QueryTemperatureScaling {
                qkv: qkv.mat_mut(),
                factors: factors.mat(),
                positions: positions.mat(),
                query,
            };
            device.launch(&S, op).unwrap();
            assert_eq!(qkv.read(&device), expected, "{} {rows} x {cols}", device.name());
        }
    }
}

/// Tokens, first value channel, heads, channels per head and further channels.
const VALUE_SHAPES: [[usize; 5]; 4] =
    [[1, 16, 1, 16, 0], [3, 1024, 4, 512, 8], [7, 96, 2, 256, 0], [2, 5, 3, 24, 1]];

fn value_heads<T: GpuTestFloat>() {
    let cpu = oracle();
    for [rows, first, heads, head_dim, further] in VALUE_SHAPES {
        let cols = first + heads * head_dim + further;
        let mut numbers = RandomNumbers::fresh(cols as u64 + 2);
        let x = numbers.reals::<T>(rows * cols);
        let mut expected = x.clone();
        let qkv = MatMut::of(&mut expected, rows, cols).unwrap();
        cpu.launch(&S, ValueHeadNorm { qkv, first, heads, head_dim, eps: EPS }).unwrap();
        for device in devices() {
            let name = format!("{} {rows} x {heads} x {head_dim}", device.name());
            let run = |tokens: &[T]| {
                let mut qkv = DeviceArray::of(&device, tokens, tokens.len() / cols, cols);
                let op = ValueHeadNorm { qkv: qkv.mat_mut(), first, heads, head_dim, eps: EPS };
                device.launch(&S, op).unwrap();
                qkv.read(&device)
            };
            let qkv = run(&x);
            assert!(error(&qkv, &expected) < tolerance::<T>(), "{name}");
            assert_eq!(run(&x[..cols]), qkv[..cols], "{name}: batch");
        }
    }
}

#[test]
fn value_head_norm_agrees_with_the_cpu() {
    value_heads::<f32>();
    value_heads::<bf16>();
}

#[test]
fn full_qk_norm_agrees_with_the_cpu() {
    norms::<f32>();
    norms::<bf16>();
}

#[test]
fn attention_temperature_agrees_with_the_cpu() {
    temperature::<f32>();
    temperature::<bf16>();
}
