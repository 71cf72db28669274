//! QK norm over all heads, attention temperature and norm of value heads on the CPU, compared with f64.

use device::{DeviceDriver, DeviceStream, MatMut, MatRef, bf16, f16};
use kernels::{
    KvCacheScales, KvLayout, KvTileOrder, QkChannelCounts, QkFullNorm, QkNormRopeArgs,
    QkNormRopeKvWrite, QkSquareSums, QueryTemperatureScaling, RmsNorm, RopeCosSin, ValueHeadNorm,
};

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

fn value_heads<T: CpuTestFloat>() {
    for [rows, first, heads, dim, further] in [[1, 16, 1, 16, 0], [3, 32, 2, 512, 8]] {
        let cols = first + heads * dim + further;
        let x = cast::<T>(&SeededNumbers::new(cols as u64).floats(rows * cols));
        let mut expected: Vec<f64> = x.iter().map(|x| f64::from(x.value())).collect();
        for row in expected.chunks_mut(cols) {
            for head in row[first..first + heads * dim].chunks_mut(dim) {
                let squares: f64 = head.iter().map(|x| x * x).sum();
                let scale = 1.0 / (squares / dim as f64 + f64::from(EPS)).sqrt();
                for x in head.iter_mut() {
                    *x *= scale;
                }
            }
        }
        for device in devices(2) {
            let mut qkv = x.clone();
            let values = MatMut::of(&mut qkv, rows, cols).unwrap();
            let op = ValueHeadNorm { qkv: values, first, heads, head_dim: dim, eps: EPS };
            device.launch(&S, op).unwrap();
            assert!(error(&qkv, &expected) < tolerance::<T>());
            let untouched =
                |row: &[T]| -> Vec<f32> { row[..first].iter().map(|x| x.value()).collect() };
            assert_eq!(untouched(&qkv), untouched(&x));
        }
    }
}

#[test]
fn value_head_norm_beyond_the_row_is_rejected() {
    let mut short = [0f32; 32];
    let qkv = MatMut::of(&mut short, 1, 32).unwrap();
    let op = ValueHeadNorm { qkv, first: 16, heads: 2, head_dim: 16, eps: EPS };
    let error = devices(1)[0].launch(&S, op).unwrap_err().to_string();
    assert!(error.contains("channels"), "{error}");
}

#[test]
fn value_head_norm_is_correct() {
    value_heads::<f32>();
    value_heads::<bf16>();
    value_heads::<f16>();
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

/// Query and key norms with f32 weights give the bits of `RmsNorm` with these weights. The rotation is by 0.
fn head_norms<T: CpuTestFloat>() {
    let (tokens, heads, dim) = (3, 2, 16);
    let (width, columns) = (heads * dim, (heads + 2) * dim);
    let order = KvTileOrder::LaneInterleaved;
    let layout = KvLayout {
        layers: 1,
        blocks: 1,
        block_tokens: 16,
        kv_heads: 1,
        head_dim: dim,
        dtype: T::DTYPE,
        order,
    };
    let mut numbers = SeededNumbers::new(3);
    let x = cast::<T>(&numbers.floats(tokens * columns));
    let [weight, half_weight] = [numbers.floats(dim), numbers.floats(dim)];
    let half_weight = cast::<bf16>(&half_weight);
    let (cos, sin) = (vec![1f32; 8 * dim / 2], vec![0f32; 8 * dim / 2]);
    let weight = MatRef::of(&weight, 1, dim).unwrap();
    for device in devices(1) {
        let mut pool = device.alloc(layout.bytes()).unwrap();
        let mut run = |k_norm: MatRef<'_>| {
            let args = QkNormRopeArgs {
                qkv: MatRef::of(&x, tokens, columns).unwrap(),
                q_norm: Some(weight),
                k_norm: Some(k_norm),
                eps: EPS,
                rope: RopeCosSin {
                    cos: MatRef::of(&cos, 8, dim / 2).unwrap(),
                    sin: MatRef::of(&sin, 8, dim / 2).unwrap(),
                },
                positions: MatRef::of(&[0, 1, 2], 1, tokens).unwrap(),
                slots: MatRef::of(&[0i64, 1, 2], 1, tokens).unwrap(),
                heads,
                layer: 0,
                kv_scales: KvCacheScales::UNIT,
            };
            let mut q = vec![T::of(0.0); tokens * width];
            let out = MatMut::of(&mut q, tokens, width).unwrap();
            let pool = &mut pool;
            let op = QkNormRopeKvWrite { q: out, pool, layout: &layout, args: &args };
            device.launch(&S, op).map(|()| q)
        };
        let q = run(weight).unwrap();
        let queries: Vec<T> = x.chunks(columns).flat_map(|row| row[..width].to_vec()).collect();
        let mut expected = vec![T::of(0.0); tokens * width];
        let y = MatMut::of(&mut expected, tokens * heads, dim).unwrap();
        let x = MatRef::of(&queries, tokens * heads, dim).unwrap();
        device.launch(&S, RmsNorm { y, x, weight, eps: EPS }).unwrap();
        assert_eq!(q, expected);
        let error = run(MatRef::of(&half_weight, 1, dim).unwrap()).unwrap_err().to_string();
        assert!(error.contains("norm weight"), "{error}");
    }
}

#[test]
fn f32_head_norms_equal_rms_norms() {
    head_norms::<f32>();
    head_norms::<bf16>();
    head_norms::<f16>();
}
