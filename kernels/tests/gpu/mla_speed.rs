//! Times of MLA of DeepSeek-V2 and V3 inside a captured graph, including the GEMMs with W_UK and W_UV, and
//! the bandwidth at which compressed KV is read. The results are printed, not checked.

use std::collections::BTreeMap;
use std::time::Duration;

use device::{DType, DeviceDriver, bf16};
use kernels::{
    AttentionMetadata, BatchRowLengths, BatchUpperBounds, HostMat, MlaAttention, MlaAttentionArgs,
    MlaKvLayout, MlaUpProjections, PackedMatrixGroup,
};

use crate::device_pair::{CpuGpuMatrix, CpuGpuPair, pairs};
use crate::matrix_speed::{microseconds, report};
use crate::mla_prefill::with_bytes;
use crate::support::S;

const KV_LORA_RANK: usize = 512;
const ROPE_DIM: usize = 64;
/// `qk_nope_head_dim` and `v_head_dim`, which are equal.
const NOPE_DIM: usize = 128;
/// Number of layers in the KV pool; launch `i` reads layer `i % LAYERS`.
const LAYERS: usize = 2;
/// Maximum number of KV blocks in the pool, large enough that the pool exceeds the GPU's caches. Longer block
/// tables use blocks repeatedly.
const MAX_BLOCKS: usize = 1 << 16;

#[test]
#[ignore = "measures a GPU: `just gpu-speed`"]
fn mla_decode_speed() {
    for pair in &pairs() {
        for heads in [16, 128] {
            for (rows, q, context) in [
                (1, 1, 1088),
                (1, 1, 8192),
                (16, 1, 8192),
                (64, 1, 1088),
                (64, 1, 8192),
                (64, 1, 64),
                (256, 1, 1200),
            ] {
                attention(pair, heads, rows, q, context, "");
            }
            for (rows, captured_rows) in [(32, 32), (64, 64), (256, 256), (132, 256)] {
                for lengths in [ContextDistribution::Uniform, ContextDistribution::LogUniform] {
                    mixed(pair, heads, rows, captured_rows, lengths);
                }
            }
            // Rows with draft tokens: each token as a separate request, and the tokens of a request together.
            for (requests, tokens, context) in [
                (1, 2, 1088),
                (1, 4, 1088),
                (64, 2, 1088),
                (64, 4, 1088),
                (64, 2, 8100),
                (64, 4, 8100),
                (64, 5, 1088),
            ] {
                for together in [1, tokens] {
                    drafts(pair, heads, requests, tokens, together, context);
                }
            }
        }
    }
}

/// Times rows of many tokens in the non-absorbed and in the absorbed form.
#[test]
#[ignore = "measures a GPU: `just gpu-speed`"]
fn mla_prefill_speed() {
    for (non_absorbed, absorbed) in pairs().iter().zip(&with_bytes(None)) {
        for heads in [16, 128] {
            for (rows, q, context) in [
                (1, 128, 128),
                (1, 128, 1024),
                (1, 128, 8192),
                (1, 256, 256),
                (1, 256, 8192),
                (1, 512, 8192),
                (4, 512, 512),
                (1, 1024, 1024),
                (1, 2048, 2048),
                (1, 2048, 8192),
                (1, 2048, 32_768),
            ] {
                attention(non_absorbed, heads, rows, q, context, ", non-absorbed");
                attention(absorbed, heads, rows, q, context, ", absorbed");
            }
        }
    }
}

fn heads_of(pair: &CpuGpuPair, heads: usize, n: usize, k: usize) -> PackedMatrixGroup {
    let bytes = crate::device_pair::bytes_of(&pair.numbers(1).reals::<f32>(n * k));
    let part = || vec![HostMat::new(&bytes, DType::F32, n, k).unwrap()];
    pair.gpu.pack_row_major(&(0..heads).map(|_| part()).collect::<Vec<_>>(), DType::BF16).unwrap()
}

/// Measures `requests` requests of `tokens` one-token rows each. In the launch, `max_rows_per_request` is
/// `together`: up to this number of rows of a request are processed together.
fn drafts(
    pair: &CpuGpuPair,
    heads: usize,
    requests: usize,
    tokens: usize,
    together: usize,
    context: usize,
) {
    let rows = requests * tokens;
    let contexts = (0..rows).map(|row| (context + row % tokens) as i32).collect();
    let seq_slots = (0..rows).map(|row| (row / tokens) as i32).collect();
    let what = format!("{requests} requests of {tokens} tokens, {together} together");
    let workload = MlaWorkload {
        requests,
        q: 1,
        contexts,
        seq_slots,
        rows_per_request: together,
        label: what,
    };
    measure(pair, heads, &workload, context + tokens);
}

/// Distribution of the rows' context lengths.
#[derive(Debug, Clone, Copy)]
enum ContextDistribution {
    /// Context lengths are uniform up to 8,192 keys.
    Uniform,
    /// Context lengths are log-uniform from 16 to 32,768 keys.
    LogUniform,
}

/// Measures `rows` one-token rows with different context lengths, in mixed order, as in a graph captured for
/// `captured_rows` rows.
fn mixed(
    pair: &CpuGpuPair,
    heads: usize,
    rows: usize,
    captured_rows: usize,
    lengths: ContextDistribution,
) {
    let context = |i: usize| {
        let part = ((i * 37 % rows) as f64 + 0.5) / rows as f64;
        let keys = match lengths {
            ContextDistribution::Uniform => 8192.0 * part,
            ContextDistribution::LogUniform => 16.0 * (part * 11.0).exp2(),
        };
        keys.ceil() as i32
    };
    let contexts: Vec<i32> =
        (0..captured_rows).map(|i| if i < rows { context(i) } else { 0 }).collect();
    let seq_slots = (0..captured_rows as i32).collect();
    let longest = *contexts.iter().max().expect("at least one row") as usize;
    let what = format!("{rows} of {captured_rows} x 1, {lengths:?}");
    let workload = MlaWorkload {
        requests: captured_rows,
        q: 1,
        contexts,
        seq_slots,
        rows_per_request: 1,
        label: what,
    };
    measure(pair, heads, &workload, longest);
}

/// Measures `rows` rows of `q` tokens; `label` is appended to the report.
fn attention(
    pair: &CpuGpuPair,
    heads: usize,
    rows: usize,
    q: usize,
    context: usize,
    label: &'static str,
) {
    let (contexts, seq_slots) = (vec![context as i32; rows], (0..rows as i32).collect());
    let what = format!("{rows} x {q}{label}");
    let workload =
        MlaWorkload { requests: rows, q, contexts, seq_slots, rows_per_request: 1, label: what };
    measure(pair, heads, &workload, context);
}

/// Rows of one attention step, with `q` tokens each.
struct MlaWorkload {
    requests: usize,
    q: usize,
    contexts: Vec<i32>,
    seq_slots: Vec<i32>,
    rows_per_request: usize,
    label: String,
}

fn measure(pair: &CpuGpuPair, heads: usize, workload: &MlaWorkload, context: usize) {
    let (q, rows) = (workload.q, workload.contexts.len());
    let (block_tokens, dtype) = (16, DType::BF16);
    let width = context.div_ceil(block_tokens);
    let blocks = (workload.requests * width).min(MAX_BLOCKS);
    let layout = MlaKvLayout {
        layers: LAYERS,
        blocks,
        block_tokens,
        kv_lora_rank: KV_LORA_RANK,
        rope_dim: ROPE_DIM,
        dtype,
    };
    let mut pool = pair.gpu.alloc(layout.bytes()).unwrap();
    let piece: Vec<bf16> = pair.numbers(2).reals(layout.bytes_per_block());
    let piece = &crate::device_pair::bytes_of(&piece)[..layout.bytes_per_block()];
    for block in 0..blocks {
        pair.gpu.upload(&mut pool, block * piece.len(), piece).unwrap();
    }
    let queries = pair.random(&mut pair.numbers(3), dtype, rows * q, heads * (NOPE_DIM + ROPE_DIM));
    let mut o = pair.poisoned(dtype, rows * q, heads * NOPE_DIM);
    let cu_q = pair.put(&(0..=rows).map(|r| (r * q) as i32).collect::<Vec<_>>(), 1, rows + 1);
    let (contexts, seq_slots) =
        (pair.put(&workload.contexts, 1, rows), pair.put(&workload.seq_slots, 1, rows));
    let entries = workload.requests * width;
    let tables: Vec<i32> = (0..entries).map(|i| (i * 7919 % blocks) as i32).collect();
    let tables = pair.put(&tables, workload.requests, width);
    let bounds = BatchUpperBounds::of(
        std::iter::repeat_n(BatchRowLengths { tokens: q, context }, rows),
        workload.rows_per_request,
    );
    let step = AttentionMetadata {
        cu_q: cu_q.gpu(),
        context_lens: contexts.gpu(),
        block_tables: tables.gpu(),
        table_rows: Some(seq_slots.gpu()),
        bounds,
    };
    let [key, value] = [0; 2].map(|_| heads_of(pair, heads, NOPE_DIM, KV_LORA_RANK));
    let transposed = heads_of(pair, heads, KV_LORA_RANK, NOPE_DIM);
    let launch = |i: usize, o: &mut CpuGpuMatrix| {
        let heads = MlaUpProjections { w_uk: &key, w_uk_t: Some(&transposed), w_uv: &value };
        let layer = i % LAYERS;
        let (q, rows, scale) = (queries.gpu(), step, 0.07);
        let args = MlaAttentionArgs { q, rows, heads, layer, scale, first_position: 0 };
        pair.gpu
            .launch(&S, MlaAttention { o: o.gpu_mut(), pool: &pool, layout: &layout, args: &args })
            .unwrap();
    };
    let time = microseconds(pair, 8, |i| launch(i, &mut o));
    let seen = |context: i32| q * (2 * context as usize + 1).saturating_sub(q) / 2;
    let seen: usize = workload.contexts.iter().map(|context| seen(*context)).sum();
    // Counts the operations of the form in use: few queries use the absorbed form, many the non-absorbed
    // form.
    let channels = if q < BatchUpperBounds::MLA_PREFILL_TOKENS {
        2 * KV_LORA_RANK + ROPE_DIM
    } else {
        2 * NOPE_DIM + ROPE_DIM
    };
    let tflops = |time: f64| (2 * seen * heads * channels) as f64 / time / 1e6;
    let keys: usize = workload.contexts.iter().map(|context| *context as usize).sum();
    let bytes = keys * workload.requests / rows * (KV_LORA_RANK + ROPE_DIM) * 2;
    let all = tflops(time);
    report(
        &format!("MLA, {heads} heads, {} at {context}, {all:.0} TFLOP/s", workload.label),
        time,
        bytes,
    );
    if q > 1 {
        // Rows of this size take several launches, for groups of heads, so no single kernel is reported.
        return;
    }
    let (name, kernel_time) = slowest_kernel(pair, |i| launch(i, &mut o));
    let rate = tflops(kernel_time);
    report(&format!("  {name} alone, {rate:.0} TFLOP/s"), kernel_time, bytes);
}

/// Returns the name of the slowest kernel of a call and its median time, from GPU event timestamps. Pauses
/// first and makes few calls, because sustained computation lowers the GPU's clock.
fn slowest_kernel(pair: &CpuGpuPair, mut call: impl FnMut(usize)) -> (&'static str, f64) {
    const CALLS: usize = 9;
    std::thread::sleep(Duration::from_millis(200));
    let timestamps = pair.gpu.alloc_timestamps(2 + 8 * CALLS).unwrap();
    timestamps.record(&S, 0).unwrap();
    pair.gpu.begin_kernel_timestamps(&timestamps, 1);
    (0..CALLS).for_each(&mut call);
    let names = pair.gpu.end_kernel_timestamps();
    pair.gpu.synchronize(&S).unwrap();
    let mut times: BTreeMap<&'static str, Vec<i64>> = BTreeMap::new();
    for (i, name) in names.into_iter().enumerate() {
        times.entry(name).or_default().push(timestamps.elapsed_ns(i, i + 1).unwrap());
    }
    let median = |(name, mut times): (_, Vec<i64>)| {
        times.sort_unstable();
        (name, times[times.len() / 2] as f64 / 1e3)
    };
    let medians = times.into_iter().map(median);
    medians.max_by(|a, b| a.1.total_cmp(&b.1)).expect("at least one launch")
}
