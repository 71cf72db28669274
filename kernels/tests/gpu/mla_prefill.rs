//! Non-absorbed MLA prefill is compared with the CPU. No bit of the results may depend on the other rows of
//! the batch, or on the windows of heads and keys that are up-projected at a time.

use std::sync::Arc;

use std::ops::Range;

use device::gpu::HalfDtype;
use device::{Buffer, DType};
use kernels::gpu::GpuBackend;
use kernels::{
    AttentionMetadata, BatchRowLengths, BatchUpperBounds, HostMat, KernelBackend, MlaAttention,
    MlaAttentionArgs, MlaKvLayout, MlaUpProjections, PackedMatrixGroup,
};

use crate::device_pair::{CpuGpuMatrix, CpuGpuPair, bytes_of, on_cpu, pairs, rounded, tolerance};
use crate::support::{RandomNumbers, S, devices_of, error};

/// Number of heads, kv_lora_rank, qk_rope_head_dim, qk_nope_head_dim, v_head_dim, and tokens per block.
type MlaPrefillSizes = [usize; 6];

/// Number of queries and context length of each row.
type MlaPrefillRowLengths<'a> = &'a [(usize, usize)];

/// Rows with one token, without keys, with a few tokens, one below and exactly at the number of tokens that
/// selects the non-absorbed form, with a cached prefix, with padding, and with several tiles and steps.
const MIXED: MlaPrefillRowLengths<'static> = &[
    (1, 300),
    (1, 0),
    (LONG - 1, LONG + 4),
    (LONG, LONG),
    (5, 70),
    (LONG, 0),
    (300, 515),
    (3, 130),
];
const LONG: usize = BatchUpperBounds::MLA_PREFILL_TOKENS;

/// Rows and random inputs of a prefill batch, in host memory.
struct MlaPrefillCase<'a> {
    sizes: MlaPrefillSizes,
    rows: MlaPrefillRowLengths<'a>,
    dtype: DType,
    pool: Vec<f32>,
    q: Vec<f32>,
    keys: Vec<f32>,
    values: Vec<f32>,
}

impl<'a> MlaPrefillCase<'a> {
    fn new(
        mut numbers: RandomNumbers,
        sizes: MlaPrefillSizes,
        rows: MlaPrefillRowLengths<'a>,
        dtype: DType,
    ) -> Self {
        let [heads, kv_lora_rank, rope_dim, nope_dim, value_dim, block_tokens] = sizes;
        let tokens: usize = rows.iter().map(|row| row.0).sum();
        let blocks: usize = rows.iter().map(|row| row.1.div_ceil(block_tokens)).sum();
        let mut weights = |n: usize| -> Vec<f32> {
            let one = |x: f32| rounded(x / 8.0, dtype);
            numbers.reals::<f32>(heads * n * kv_lora_rank).into_iter().map(one).collect()
        };
        let (keys, values) = (weights(nope_dim), weights(value_dim));
        let pool = numbers.reals((blocks + 1) * block_tokens * (kv_lora_rank + rope_dim));
        let q = numbers.reals(tokens * heads * (nope_dim + rope_dim));
        Self { sizes, rows, dtype, pool, q, keys, values }
    }

    /// Returns the block table of each row in random order; block 0 is unused.
    fn tables(&self) -> Vec<Vec<i32>> {
        let block_tokens = self.sizes[5];
        let blocks: usize = self.rows.iter().map(|row| row.1.div_ceil(block_tokens)).sum();
        let mut order = (0..blocks).map(|i| (i * 7919 + 3) % blocks).map(|i| i as i32 + 1);
        let of_row = |row: &(usize, usize)| -> Vec<i32> {
            order.by_ref().take(row.1.div_ceil(block_tokens)).collect()
        };
        self.rows.iter().map(of_row).collect()
    }

    /// Returns the KV pool, with NaN after each row's context, as previous requests may leave it.
    fn pool_matrix(&self, pair: &CpuGpuPair) -> CpuGpuMatrix {
        let [_, kv_lora_rank, rope_dim, .., block_tokens] = self.sizes;
        let (width, mut pool) = (kv_lora_rank + rope_dim, self.pool.clone());
        pool[..block_tokens * width].fill(f32::NAN);
        for (row, table) in self.rows.iter().zip(self.tables()) {
            let used_rows = row.1 % block_tokens;
            if let Some(&last) = table.last().filter(|_| used_rows != 0) {
                let first = last as usize * block_tokens;
                pool[(first + used_rows) * width..(first + block_tokens) * width].fill(f32::NAN);
            }
        }
        pair.put_as(self.dtype, &pool, pool.len() / width, width)
    }
}

/// Returns W_UK, its transpose and W_UV of all heads, packed on a device.
fn pack_heads(
    case: &MlaPrefillCase<'_>,
    device: &KernelBackend,
    dtype: DType,
) -> [PackedMatrixGroup; 3] {
    let [heads, kv_lora_rank, _, nope_dim, value_dim, _] = case.sizes;
    let pack = |all: &[f32], n: usize, k: usize| {
        let bytes: Vec<Vec<u8>> = all.chunks_exact(n * k).map(bytes_of).collect();
        let view = |bytes| vec![HostMat::new(bytes, DType::F32, n, k).unwrap()];
        let views: Vec<_> = bytes.iter().map(|bytes| view(bytes)).collect();
        assert_eq!(views.len(), heads);
        device.pack_row_major(&views, dtype).unwrap()
    };
    let transpose = |key: &[f32]| -> Vec<f32> {
        (0..kv_lora_rank).flat_map(|c| key.iter().skip(c).step_by(kv_lora_rank).copied()).collect()
    };
    let transposed: Vec<f32> =
        case.keys.chunks_exact(nope_dim * kv_lora_rank).flat_map(transpose).collect();
    [
        pack(&case.keys, nope_dim, kv_lora_rank),
        pack(&transposed, kv_lora_rank, nope_dim),
        pack(&case.values, value_dim, kv_lora_rank),
    ]
}

/// Returns the outputs of the rows `rows` as a separate batch: on the GPU, and also on the CPU if `with_cpu`.
fn outputs(
    pair: &CpuGpuPair,
    case: &MlaPrefillCase<'_>,
    of: Range<usize>,
    with_cpu: bool,
) -> [Vec<f32>; 2] {
    let [heads, kv_lora_rank, rope_dim, nope_dim, value_dim, block_tokens] = case.sizes;
    let (rows, query) = (&case.rows[of.clone()], heads * (nope_dim + rope_dim));
    let ends: Vec<i32> = std::iter::once(0)
        .chain(rows.iter().scan(0, |end, row| {
            *end += row.0 as i32;
            Some(*end)
        }))
        .collect();
    let query_count = ends[rows.len()] as usize;
    let before: usize = case.rows[..of.start].iter().map(|row| row.0).sum();
    let tables = case.tables();
    let width = tables.iter().map(Vec::len).max().unwrap().max(1);
    let table = |row: &Vec<i32>| {
        let mut row = row.clone();
        row.resize(width, i32::MAX);
        row
    };
    let tables: Vec<i32> = tables.iter().flat_map(table).collect();
    let seq_slots: Vec<i32> = of.map(|row| row as i32).collect();
    let lens: Vec<i32> = rows.iter().map(|row| row.1 as i32).collect();
    let pool = case.pool_matrix(pair);
    let q = &case.q[before * query..][..query_count * query];
    let q = pair.put_as(case.dtype, q, query_count, query);
    let metadata = [
        pair.put(&ends, 1, ends.len()),
        pair.put(&lens, 1, lens.len()),
        pair.put(&tables, tables.len() / width, width),
        pair.put(&seq_slots, 1, seq_slots.len()),
    ];
    let mut o = pair.poisoned(case.dtype, query_count, heads * value_dim);
    let layers = 1;
    let blocks = case.pool.len() / (block_tokens * (kv_lora_rank + rope_dim));
    for at in 0..=usize::from(with_cpu) {
        let dtype = [case.dtype, on_cpu(case.dtype)][at];
        let view: fn(&CpuGpuMatrix) -> device::MatRef<'_> =
            [CpuGpuMatrix::gpu, CpuGpuMatrix::cpu][at];
        let device = &pair.backends()[at];
        let layout = MlaKvLayout { layers, blocks, block_tokens, kv_lora_rank, rope_dim, dtype };
        let [key, transposed, values] = pack_heads(case, device, dtype);
        let args = MlaAttentionArgs {
            q: view(&q),
            rows: AttentionMetadata {
                cu_q: view(&metadata[0]),
                context_lens: view(&metadata[1]),
                block_tables: view(&metadata[2]),
                table_rows: Some(view(&metadata[3])),
                bounds: BatchUpperBounds::of(
                    rows.iter().map(|&(tokens, context)| BatchRowLengths { tokens, context }),
                    1,
                ),
            },
            heads: MlaUpProjections {
                w_uk: &key,
                w_uk_t: (dtype != DType::F32).then_some(&transposed),
                w_uv: &values,
            },
            layer: 0,
            scale: 0.2,
            first_position: 0,
        };
        let pool: &Buffer = [&pool.gpu, &pool.cpu][at];
        let out = if at == 0 { o.gpu_mut() } else { o.cpu_mut() };
        device.launch(&S, MlaAttention { o: out, pool, layout: &layout, args: &args }).unwrap();
    }
    pair.read_floats(&o)
}

/// Compares all rows with the CPU, and each row in the batch with the same row alone.
pub(crate) fn check(
    pair: &CpuGpuPair,
    sizes: MlaPrefillSizes,
    rows: MlaPrefillRowLengths<'_>,
    dtype: DType,
) {
    let case = MlaPrefillCase::new(pair.numbers(sizes[0] as u64), sizes, rows, dtype);
    let what = format!("{sizes:?} {dtype:?}");
    let [got, expected] = outputs(pair, &case, 0..rows.len(), true);
    let mut at = 0;
    for (i, (tokens, context)) in rows.iter().enumerate() {
        let own = at..at + tokens * sizes[0] * sizes[4];
        at = own.end;
        let error = error(&got[own.clone()], &expected[own.clone()]);
        assert!(error <= 3.0 * tolerance(dtype), "{what}: {tokens} at {context}: {error}");
        let [single_row, _] = outputs(pair, &case, i..i + 1, false);
        assert!(single_row == got[own], "{what}: {tokens} at {context}: single row differs");
    }
}

/// Returns the GPUs under test with a memory limit of `bytes` for up-projected keys and values (`None` = the
/// absorbed form is used). All of them use the same random numbers.
pub(crate) fn with_bytes(bytes: Option<usize>) -> Vec<CpuGpuPair> {
    let limited = |gpu: Arc<GpuBackend>| {
        let gpu = Arc::into_inner(gpu).unwrap().with_mla_prefill_bytes(bytes);
        CpuGpuPair::new(Arc::new(gpu))
    };
    devices_of(HalfDtype::BF16).into_iter().map(limited).collect()
}

#[test]
fn mla_prefill_agrees_with_the_cpu() {
    for pair in &pairs() {
        check(pair, [2, 128, 64, 64, 64, 16], MIXED, DType::BF16);
        check(pair, [1, 256, 128, 64, 128, 64], &[(260, 300)], DType::BF16);
        check(pair, [3, 128, 64, 128, 128, 32], &[(1, 20), (300, 420)], DType::BF16);
    }
}

#[test]
fn mla_prefill_windows_change_no_bit() {
    let sizes = [3, 128, 64, 64, 64, 16];
    // Memory limits with which all heads are up-projected at once; two heads, then the third; one head at a
    // time in windows of several steps; and one head at a time in windows of one step.
    let all_bytes = [1 << 28, 1 << 20, 700 << 10, 1];
    let pairs_by_limit = all_bytes.map(|bytes| with_bytes(Some(bytes)));
    for i in 0..pairs_by_limit[0].len() {
        let numbers = || pairs_by_limit[0][i].numbers(1);
        let case = || MlaPrefillCase::new(numbers(), sizes, MIXED, DType::BF16);
        let [whole, _] = outputs(&pairs_by_limit[0][i], &case(), 0..MIXED.len(), false);
        for (pairs, bytes) in pairs_by_limit.iter().zip(all_bytes).skip(1) {
            let [windowed, _] = outputs(&pairs[i], &case(), 0..MIXED.len(), false);
            assert!(windowed == whole, "{bytes} bytes per window: other bits");
        }
    }
}

/// Checks from which number of tokens the non-absorbed form is used. The form is recognised by its bits: the
/// non-absorbed form rounds keys and values, the absorbed form does not.
#[test]
fn mla_prefill_starts_at_its_token_threshold() {
    let (non_absorbed, absorbed) = (pairs(), with_bytes(None));
    for (non_absorbed, absorbed) in non_absorbed.iter().zip(&absorbed) {
        let sizes = [2, 128, 64, 64, 64, 16];
        let case = || MlaPrefillCase::new(non_absorbed.numbers(2), sizes, MIXED, DType::BF16);
        let [non_absorbed, _] = outputs(non_absorbed, &case(), 0..MIXED.len(), false);
        let [absorbed, _] = outputs(absorbed, &case(), 0..MIXED.len(), false);
        let mut at = 0;
        for (tokens, context) in MIXED {
            let own = at..at + tokens * sizes[0] * sizes[4];
            at = own.end;
            let equal = non_absorbed[own.clone()] == absorbed[own];
            let short = *tokens < LONG || *context == 0;
            assert_eq!(equal, short, "{tokens} tokens at {context}");
        }
    }
}
