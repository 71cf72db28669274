//! Times of GEMMs, attention and experts inside a captured graph, and the memory bandwidth that they achieve.
//! Successive launches use different copies of the weights, so that the weights are not cached. The results
//! are printed, not checked.

use std::time::Instant;

use device::{DType, DeviceDriver};
use kernels::{
    AttentionMetadata, BatchRowLengths, BatchUpperBounds, FusedLinear, GateActivation, KvLayout,
    KvTileOrder, LinearFusion, PackedMatrix, PagedAttention, PagedAttentionArgs,
};

use crate::device_pair::{CpuGpuPair, pairs};
use crate::support::S;

/// Number of bytes that exceeds every GPU's caches.
const UNCACHED: usize = 512 << 20;

/// Returns the microseconds per launch of `launch(i)`, for `count` dependent launches in one graph.
pub(crate) fn microseconds(pair: &CpuGpuPair, count: usize, mut launch: impl FnMut(usize)) -> f64 {
    launch(0);
    pair.gpu.synchronize(&S).unwrap();
    pair.gpu.begin_capture(&S).unwrap();
    (0..count).for_each(&mut launch);
    let graph = pair.gpu.end_capture(&S).unwrap();
    pair.gpu.replay(&S, &graph).unwrap();
    pair.gpu.synchronize(&S).unwrap();
    let (replays, start) = (20, Instant::now());
    (0..replays).for_each(|_| pair.gpu.replay(&S, &graph).unwrap());
    pair.gpu.synchronize(&S).unwrap();
    start.elapsed().as_secs_f64() * 1e6 / (replays * count) as f64
}

pub(crate) fn report(what: &str, time_us: f64, bytes: usize) {
    println!("{what:48} {time_us:9.2} us {:7.3} TB/s", bytes as f64 / time_us / 1e6);
}

#[test]
#[ignore = "measures a GPU: `just gpu-speed`"]
fn matrix_speed() {
    for pair in &pairs() {
        for (n, k) in [(4096, 1024), (1024, 2048), (6144, 1024), (1024, 3072), (151_936, 1024)] {
            products(pair, n, k, &[1, 4, 8, 16]);
        }
        for (n, k) in [(6144, 4096), (4096, 4096), (24_576, 4096), (4096, 12_288)] {
            products(pair, n, k, &[1, 8]);
        }
        decodes(pair);
        prefills(pair);
    }
}

/// Returns copies of a weight matrix, at most 64. Their total size exceeds every GPU's caches, so that a
/// launch does not find its weights cached.
fn copies(pair: &CpuGpuPair, n: usize, k: usize) -> Vec<PackedMatrix> {
    let weights = pair.numbers(1).reals::<f32>(n * k);
    let count = UNCACHED.div_ceil(n * k * 2).clamp(2, 64);
    let bytes = crate::device_pair::bytes_of(&weights);
    let part = [kernels::HostMat::new(&bytes, DType::F32, n, k).unwrap()];
    (0..count).map(|_| pair.gpu.pack(&part, DType::BF16).unwrap()).collect()
}

fn products(pair: &CpuGpuPair, n: usize, k: usize, rows: &[usize]) {
    let weights = copies(pair, n, k);
    let mut numbers = pair.numbers(2);
    for &m in rows {
        let x = pair.random(&mut numbers, DType::BF16, m, k);
        let norm = pair.random(&mut numbers, DType::BF16, 1, k);
        let plain = LinearFusion::default();
        let normed = LinearFusion { norm: Some((norm.gpu(), 1e-6)), ..plain };
        let gated = LinearFusion { gate: Some(GateActivation::Silu), ..normed };
        for (name, around) in [("", plain), (" norm", normed), (" norm silu", gated)] {
            if !FusedLinear::supports(&pair.backends()[0], m, DType::BF16, &weights[0]) {
                continue;
            }
            let outputs = if around.gate.is_some() { n / 2 } else { n };
            let mut y = pair.poisoned(DType::BF16, m, outputs);
            let time = microseconds(pair, weights.len(), |i| {
                let w = &weights[i];
                pair.gpu
                    .launch(
                        &S,
                        FusedLinear { y: y.gpu_mut(), x: x.gpu(), weight: w, fusion: &around },
                    )
                    .unwrap();
            });
            report(&format!("{m} x {n} x {k}{name}"), time, n * k * 2);
        }
    }
}

/// Times attention of rows with draft tokens: each token as a separate request, and the tokens of a request
/// together.
#[test]
#[ignore = "measures a GPU: `just gpu-speed`"]
fn drafts_speed() {
    for pair in &pairs() {
        for (heads, kv_heads) in [(16, 8), (32, 8), (32, 4)] {
            for (requests, tokens) in [(1, 2), (1, 4), (16, 4), (64, 2), (64, 4), (64, 5)] {
                for max_rows_per_request in [1, tokens] {
                    let workload = AttentionWorkload {
                        heads,
                        kv_heads,
                        requests,
                        rows_per_request: tokens,
                        max_rows_per_request,
                        q: 1,
                        context: 1160,
                    };
                    measure_attention(pair, &workload);
                }
            }
        }
    }
}

/// One attention step with the head counts of Qwen3-0.6B, 8B or 30B-A3B.
struct AttentionWorkload {
    heads: usize,
    kv_heads: usize,
    requests: usize,
    /// Number of rows, of `q` tokens each, per request.
    rows_per_request: usize,
    /// `max_rows_per_request` of the launch: up to this number of rows of a request are processed together.
    max_rows_per_request: usize,
    q: usize,
    context: usize,
}

/// Measures attention with one row per request.
fn attention(
    pair: &CpuGpuPair,
    heads: usize,
    kv_heads: usize,
    requests: usize,
    q: usize,
    context: usize,
) {
    let (rows_per_request, max_rows_per_request) = (1, 1);
    measure_attention(
        pair,
        &AttentionWorkload {
            heads,
            kv_heads,
            requests,
            rows_per_request,
            max_rows_per_request,
            q,
            context,
        },
    );
}

fn measure_attention(pair: &CpuGpuPair, workload: &AttentionWorkload) {
    let &AttentionWorkload { heads, kv_heads, requests, q, context, .. } = workload;
    let (tokens, together) = (workload.rows_per_request, workload.max_rows_per_request);
    let rows = requests * tokens;
    let (dim, block_tokens, layers) = (128, 16, 2);
    let width = (context + tokens - 1).div_ceil(block_tokens);
    let (blocks, order) = (requests * width, KvTileOrder::RowMajor);
    let head_dim = dim;
    let dtype = DType::BF16;
    let layout = KvLayout { layers, blocks, block_tokens, kv_heads, head_dim, dtype, order };
    let pool = pair.gpu.alloc(layout.bytes()).unwrap();
    let mut numbers = pair.numbers(3);
    let queries = pair.random(&mut numbers, dtype, rows * q, heads * dim);
    let mut o = pair.poisoned(dtype, rows * q, heads * dim);
    let cu_q = pair.put(&(0..=rows).map(|r| (r * q) as i32).collect::<Vec<_>>(), 1, rows + 1);
    let by_row = |of: &dyn Fn(usize) -> usize| (0..rows).map(|r| of(r) as i32).collect::<Vec<_>>();
    let contexts = pair.put(&by_row(&|r| context + r % tokens), 1, rows);
    let seq_slots = pair.put(&by_row(&|r| r / tokens), 1, rows);
    let tables: Vec<i32> = (0..blocks as i32).map(|i| (i * 7919) % blocks as i32).collect();
    let tables = pair.put(&tables, requests, width);
    let bounds = BatchUpperBounds::of(
        std::iter::repeat_n(BatchRowLengths { tokens: q, context: context + tokens - 1 }, rows),
        together,
    );
    let (context_lens, block_tables) = (contexts.gpu(), tables.gpu());
    let table_rows = Some(seq_slots.gpu());
    let step =
        AttentionMetadata { cu_q: cu_q.gpu(), context_lens, block_tables, table_rows, bounds };
    let time = microseconds(pair, 8, |i| {
        let args = PagedAttentionArgs {
            q: queries.gpu(),
            rows: step,
            heads,
            layer: i % 2,
            scale: 0.088,
            keys: kernels::AttentionKeyRange::default(),
            sinks: None,
        };
        pair.gpu
            .launch(
                &S,
                PagedAttention { o: o.gpu_mut(), pool: &pool, layout: &layout, args: &args },
            )
            .unwrap();
    });
    let seen = q * (2 * context - q + 1) / 2;
    let tflops = (4 * rows * seen * heads * dim) as f64 / time / 1e6;
    let per_request = format!("{tokens} tokens, {together} together");
    let per_request = if tokens == 1 { format!("{q}") } else { per_request };
    let what = format!("{heads}/{kv_heads}, {requests} x {per_request} at {context}");
    let what = format!("attention {what}, {tflops:.0} TFLOP/s");
    report(&what, time, requests * context * kv_heads * dim * 4);
}

fn decodes(pair: &CpuGpuPair) {
    for (heads, kv_heads) in [(16, 8), (32, 8), (32, 4)] {
        for (rows, context) in [(1, 1024), (1, 16_384), (64, 1152), (256, 1152)] {
            attention(pair, heads, kv_heads, rows, 1, context);
        }
    }
}

fn prefills(pair: &CpuGpuPair) {
    for (heads, kv_heads) in [(16, 8), (32, 8)] {
        for (rows, q, context) in [(1, 1024, 1024), (8, 1024, 1024), (1, 2048, 16_384)] {
            attention(pair, heads, kv_heads, rows, q, context);
        }
    }
}
