//! QK norm over all heads and attention temperature on the CPU, compared with f64.

use device::{DeviceStream, MatMut, MatRef, bf16, f16};
use kernels::{QkChannelCounts, QkFullNorm, QkSquareSums, QueryTemperatureScaling};

use crate::support::{CpuTestFloat, SeededNumbers, cast, devices, error, tolerance};

const S: DeviceStream = DeviceStream(0);
/// Tokens, query channels, key channels and value channels.
const SHAPES: [[usize; 4]; 3] = [[1, 16, 16, 16], [3, 48, 16, 16], [2, 5120, 1024, 1024]];
const EPS: f32 = 1e-5;
const RANKS: usize = 2;

fn norms<T: CpuTestFloat>() {
    for [rows, query, key, value] in SHAPES {
        let (cols, channels) = (query + key + value, QkChannelCounts { query, key });
        let mut numbers = SeededNumbers::new(cols as u64);
        let x = cast::<T>(&numbers.floats(rows * cols));
        let w = cast::<T>(&numbers.floats(query + key));
        let square = |x: &T| f64::from(x.value()).powi(2);
        let mut expected_sums = Vec::new();
        let mut expected = Vec::new();
        for row in x.chunks(cols) {
            let (q, rest) = row.split_at(query);
            let parts = [(q, &w[..query]), (&rest[..key], &w[query..])];
            for (part, weight) in parts {
                let sum: f64 = part.iter().map(square).sum();
                expected_sums.push(sum);
                // The mean over all ranks: both ranks have equal inputs, so the sum of squares doubles.
                let mean = 2.0 * sum / (RANKS * part.len()) as f64;
                let scale = 1.0 / (mean + f64::from(EPS)).sqrt();
                let normed = |(x, w): (&T, &T)| f64::from(w.value()) * f64::from(x.value()) * scale;
                expected.extend(part.iter().zip(weight).map(normed));
            }
            expected.extend(rest[key..].iter().map(|x| f64::from(x.value())));
        }
        for device in devices(2) {
            let mut sums = vec![0f32; rows * 2];
            let (out, qkv) = (MatMut::of(&mut sums, rows, 2), MatRef::of(&x, rows, cols));
            let op = QkSquareSums { sums: out.unwrap(), qkv: qkv.unwrap(), channels };
            device.launch(&S, op).unwrap();
            let worst =
                sums.iter().zip(&expected_sums).map(|(a, b)| (f64::from(*a) / b - 1.0).abs());
            assert!(worst.fold(0.0, f64::max) < 1e-5);
            let sums: Vec<f32> = sums.iter().map(|sum| 2.0 * sum).collect();
            let mut qkv = x.clone();
            let op = QkFullNorm {
                qkv: MatMut::of(&mut qkv, rows, cols).unwrap(),
                sums: MatRef::of(&sums, rows, 2).unwrap(),
                weight: MatRef::of(&w, 1, query + key).unwrap(),
                channels,
                ranks: RANKS,
                eps: EPS,
            };
            device.launch(&S, op).unwrap();
            assert!(error(&qkv, &expected) < tolerance::<T>());
        }
    }
}

fn temperature<T: CpuTestFloat>() {
    let factors: Vec<f32> = (0..40u8).map(|i| 1.0 + f32::from(i / 16) / 8.0).collect();
    for [rows, query, key, value] in SHAPES {
        let cols = query + key + value;
        let mut numbers = SeededNumbers::new(cols as u64 + 1);
        let x = cast::<T>(&numbers.floats(rows * cols));
        let positions: Vec<i32> = (0..rows).map(|_| numbers.below(40) as i32).collect();
        let factor = |i: usize| {
            let is_query = i % cols < query;
            if is_query { factors[positions[i / cols] as usize] } else { 1.0 }
        };
        let expected: Vec<f64> =
            (0..x.len()).map(|i| f64::from(x[i].value()) * f64::from(factor(i))).collect();
        for device in devices(2) {
            let mut qkv = x.clone();
            let op = QueryTemperatureScaling {
                qkv: MatMut::of(&mut qkv, rows, cols).unwrap(),
                factors: MatRef::of(&factors, 1, 40).unwrap(),
                positions: MatRef::of(&positions, 1, rows).unwrap(),
                query,
            };
            device.launch(&S, op).unwrap();
            assert!(error(&qkv, &expected) < tolerance::<T>());
        }
    }
}

#[test]
fn full_qk_norm_is_correct() {
    norms::<f32>();
    norms::<bf16>();
    norms::<f16>();
}

#[test]
fn attention_temperature_is_correct() {
    temperature::<f32>();
    temperature::<bf16>();
    temperature::<f16>();
}

#[test]
fn full_qk_norm_rejects_wrong_shapes() {
    let device = &devices(1)[0];
    let (x, w, sums) = ([0f32; 48], [0f32; 32], [0f32; 2]);
    let norm = |weights: usize, query: usize, ranks: usize| {
        let mut qkv = x;
        let op = QkFullNorm {
            qkv: MatMut::of(&mut qkv, 1, 48).unwrap(),
            sums: MatRef::of(&sums, 1, 2).unwrap(),
            weight: MatRef::of(&w[..weights], 1, weights).unwrap(),
            channels: QkChannelCounts { query, key: 16 },
            ranks,
            eps: EPS,
        };
        device.launch(&S, op)
    };
    assert!(norm(32, 16, 1).is_ok());
    for (weights, query, ranks, what) in
        [(16, 16, 1, "weights"), (32, 48, 1, "columns of qkv"), (32, 16, 0, "ranks")]
    {
        let error = norm(weights, query, ranks).unwrap_err().to_string();
        assert!(error.contains(what), "{error}");
    }
}
