//! fp8 KV cache: keys and values that one GPU kernel writes and other kernels read match the CPU's.

use device::{DType, DeviceDriver, MatRef};
use kernels::{
    AttentionKeyRange, AttentionMetadata, BatchUpperBounds, KvCacheScales, KvLayout, KvTileOrder,
    PagedAttention, PagedAttentionArgs, QkNormRopeArgs, QkNormRopeKvWrite, RopeCosSin,
};

use crate::device_pair::{CpuGpuMatrix, CpuGpuPair, pairs, tolerance};
use crate::support::S;

/// Number of query heads, number of KV heads, head dimension, and tokens per block.
type Fp8HeadShape = (usize, usize, usize, usize);

/// Scales by which keys and values are divided before they are stored.
const SCALES: [f32; 2] = [0.25, 0.5];

/// Number of tokens in the KV cache. A row attends to the first `context` tokens, and its queries are the
/// last of these tokens.
const TOKENS: usize = 390;
/// Prefill rows: number of queries and context length of each row.
const PREFILLS: [(usize, usize); 5] = [(21, TOKENS), (3, 3), (66, 300), (1, 129), (64, 128)];
/// Decode rows: number of queries (1) and context length of each row.
const DECODES: [(usize, usize); 4] = [(1, TOKENS), (1, 37), (1, 192), (1, 1)];

pub(crate) fn check(pair: &CpuGpuPair, heads: Fp8HeadShape, dtype: DType, decode: bool) {
    check_keys(pair, heads, dtype, decode, AttentionKeyRange::default());
}

fn check_keys(
    pair: &CpuGpuPair,
    heads: Fp8HeadShape,
    dtype: DType,
    decode: bool,
    keys: AttentionKeyRange,
) {
    let (query_heads, kv_heads, head_dim, block_tokens) = heads;
    let mut numbers = pair.numbers((query_heads * head_dim) as u64);
    let blocks = TOKENS.div_ceil(block_tokens);
    let layout = |order| {
        let dtype = DType::F8E4M3;
        KvLayout { layers: 2, blocks, block_tokens, kv_heads, head_dim, dtype, order }
    };
    let layouts = [layout(KvTileOrder::RowMajor), layout(KvTileOrder::LaneInterleaved)];
    let mut pools =
        [pair.gpu.alloc(layouts[0].bytes()).unwrap(), pair.cpu.alloc(layouts[1].bytes()).unwrap()];
    // Fills the pool with NaN, as previous requests may leave it.
    let stale = vec![0x7f; layouts[0].bytes()];
    pair.gpu.upload(&mut pools[0], 0, &stale).unwrap();
    pair.cpu.upload(&mut pools[1], 0, &stale).unwrap();

    let table: Vec<i32> = (0..blocks).map(|b| ((b * 7 + 3) % blocks) as i32).collect();
    let slot = |t: usize| table[t / block_tokens] as usize * block_tokens + t % block_tokens;
    let slots: Vec<i64> = (0..TOKENS).map(|t| slot(t) as i64).collect();
    let positions: Vec<i32> = (0..TOKENS as i32).collect();
    let (width, half) = ((query_heads + 2 * kv_heads) * head_dim, head_dim / 2);
    let qkv = pair.random(&mut numbers, dtype, TOKENS, width);
    let [cos, sin] = [0; 2].map(|_| pair.random(&mut numbers, DType::F32, TOKENS, half));
    let (slots, positions) = (pair.put(&slots, 1, TOKENS), pair.put(&positions, 1, TOKENS));
    let mut q = pair.poisoned(dtype, TOKENS, query_heads * head_dim);
    let each: &[(usize, usize)] = if decode { &DECODES } else { &PREFILLS };
    let count = each.len();
    let mut ends = vec![0];
    ends.extend(each.iter().scan(0, |end, row| {
        *end += row.0 as i32;
        Some(*end)
    }));
    let queries = ends[count] as usize;
    let lens: Vec<i32> = each.iter().map(|row| row.1 as i32).collect();
    let rows = [
        pair.put(&ends, 1, count + 1),
        pair.put(&lens, 1, count),
        pair.put(&table.repeat(count), count, blocks),
    ];
    let mut o = pair.poisoned(dtype, queries, query_heads * head_dim);
    for at in 0..2 {
        let view: fn(&CpuGpuMatrix) -> MatRef<'_> = [CpuGpuMatrix::gpu, CpuGpuMatrix::cpu][at];
        let device = &pair.backends()[at];
        let args = QkNormRopeArgs {
            qkv: view(&qkv),
            q_norm: None,
            k_norm: None,
            eps: 0.0,
            rope: RopeCosSin { cos: view(&cos), sin: view(&sin) },
            positions: view(&positions),
            slots: view(&slots),
            heads: query_heads,
            layer: 1,
            kv_scales: KvCacheScales::Layer { key: SCALES[0], value: SCALES[1] },
        };
        let out = if at == 0 { q.gpu_mut() } else { q.cpu_mut() };
        device
            .launch(
                &S,
                QkNormRopeKvWrite {
                    q: out,
                    pool: &mut pools[at],
                    layout: &layouts[at],
                    args: &args,
                },
            )
            .unwrap();
        let step = AttentionMetadata {
            cu_q: view(&rows[0]),
            context_lens: view(&rows[1]),
            block_tables: view(&rows[2]),
            table_rows: None,
            bounds: BatchUpperBounds {
                decode_rows: if decode { count } else { 0 },
                max_rows_per_request: 1,
                max_query_len: each.iter().map(|row| row.0).max().unwrap(),
                max_context_len: TOKENS,
                ..BatchUpperBounds::default()
            },
        };
        let scale = SCALES[0] * (head_dim as f32).powf(-0.5);
        let q = view(&q).rows_from(TOKENS - queries, queries);
        let args = PagedAttentionArgs {
            q,
            rows: step,
            heads: query_heads,
            layer: 1,
            scale,
            keys,
            sinks: None,
        };
        let out = if at == 0 { o.gpu_mut() } else { o.cpu_mut() };
        device
            .launch(
                &S,
                PagedAttention { o: out, pool: &pools[at], layout: &layouts[at], args: &args },
            )
            .unwrap();
    }
    // A key halfway between two fp8 numbers may be rounded to either.
    pair.check(&format!("{heads:?} {dtype:?} decode: {decode}"), &o, 2.0 * tolerance(DType::BF16));
}

#[test]
fn attention_over_fp8_agrees_with_the_cpu() {
    for pair in &pairs() {
        for decode in [true, false] {
            check(pair, (4, 2, 128, 16), DType::BF16, decode);
            check(pair, (8, 1, 64, 32), DType::BF16, decode);
            check(pair, (16, 1, 128, 16), DType::BF16, decode);
            check(pair, (4, 2, 256, 16), DType::BF16, decode);
            check(pair, (8, 1, 512, 32), DType::BF16, decode);
            let keys = AttentionKeyRange { first_position: 0, window: Some(100) };
            check_keys(pair, (4, 2, 128, 16), DType::BF16, decode, keys);
            check_keys(pair, (4, 2, 256, 16), DType::BF16, decode, keys);
            check(pair, (4, 2, 48, 6), DType::BF16, decode);
            check(pair, (2, 1, 80, 16), DType::F32, decode);
        }
    }
}
