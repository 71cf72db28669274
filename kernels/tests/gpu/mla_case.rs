//! One MLA test case on both devices: inputs of the KV write, queries, and results.

use device::{Buffer, DType, MatMut, MatRef};
use kernels::{
    AttentionMetadata, BatchRowLengths, BatchUpperBounds, HostMat, KernelBackend, MlaAttention,
    MlaAttentionArgs, MlaKvLayout, MlaPrologue, MlaPrologueArgs, MlaUpProjections,
    PackedMatrixGroup, RopeCosSin,
};

use crate::device_pair::{CpuGpuMatrix, CpuGpuPair, on_cpu, rounded, tolerance};
use crate::mla::{MlaRowLengths, MlaSizes, MlaStepRows};
use crate::support::{RandomNumbers, S, error};

/// Rows that all attend to prefixes of one context, which is as long as the longest row, and the weights of
/// all heads.
pub(crate) struct MlaCase<'a> {
    pair: &'a CpuGpuPair,
    sizes: MlaSizes,
    dtype: DType,
    rows: MlaRowLengths<'a>,
    /// Layouts of the pools on the GPU and on the CPU.
    layouts: [MlaKvLayout; 2],
    kv_inputs: MlaKvInputs,
    weights: MlaHeadMatrices,
    queries: MlaQueries,
    results: MlaResults,
}

/// Inputs of the KV write: the tokens of the context, and one token with slot −1, which is not stored.
struct MlaKvInputs {
    kv: CpuGpuMatrix,
    norm: CpuGpuMatrix,
    cos: CpuGpuMatrix,
    sin: CpuGpuMatrix,
    positions: CpuGpuMatrix,
    slots: CpuGpuMatrix,
}

/// W_UK and W_UV of each head in f32: `[qk_nope_head_dim or v_head_dim, kv_lora_rank]`.
struct MlaHeadMatrices {
    w_uk: Vec<Vec<u8>>,
    w_uv: Vec<Vec<u8>>,
}

/// W_UK, its transpose and W_UV of all heads, packed on a device.
#[expect(clippy::struct_field_names, reason = "the names of the literature")]
struct PackedMlaWeights {
    w_uk: PackedMatrixGroup,
    w_uk_t: PackedMatrixGroup,
    w_uv: PackedMatrixGroup,
}

/// Queries of the rows with the attention metadata.
struct MlaQueries {
    /// Queries of all tokens of the context; the rows of the step together use the last of these queries, as
    /// many as `count` returns.
    q: CpuGpuMatrix,
    /// Index of each row's first query, then the number of all queries.
    ends: Vec<i32>,
    cu_q: CpuGpuMatrix,
    context_lens: CpuGpuMatrix,
    block_tables: CpuGpuMatrix,
    seq_slots: CpuGpuMatrix,
    bounds: BatchUpperBounds,
    /// First visible position; earlier positions are masked for all queries.
    first_position: usize,
}

/// Attention outputs of a case: on both devices, and on the GPU also with each row processed separately.
struct MlaResults {
    o: CpuGpuMatrix,
    /// The GPU's result if each row is processed separately.
    separate_rows: CpuGpuMatrix,
    /// The GPU's result of the first row alone.
    single_row: CpuGpuMatrix,
}

impl<'a> MlaCase<'a> {
    /// Creates a case with random weights, contexts and queries.
    pub(crate) fn random(
        pair: &'a CpuGpuPair,
        sizes: MlaSizes,
        dtype: DType,
        step: &MlaStepRows<'a>,
    ) -> Self {
        let [heads, kv_lora_rank, rope_dim, nope_dim, value_dim, block_tokens] = sizes;
        let tokens = step.rows.iter().map(|row| row.1).max().unwrap();
        let numbers = &mut pair.numbers((heads * kv_lora_rank) as u64);
        let blocks = tokens.div_ceil(block_tokens) + 1;
        let layout = MlaKvLayout { layers: 2, blocks, block_tokens, kv_lora_rank, rope_dim, dtype };
        let table: Vec<i32> = (0..blocks).map(|b| ((b * 7919 + 3) % blocks) as i32).collect();
        let kv_inputs = MlaKvInputs::random(pair, numbers, &layout, tokens, &table);
        let q = pair.random(numbers, dtype, tokens + 1, heads * (nope_dim + rope_dim));
        let mut weights = |n: usize| -> Vec<Vec<u8>> {
            let mut real = || rounded(numbers.float() / 8.0, dtype).to_le_bytes();
            (0..heads).map(|_| (0..n * kv_lora_rank).flat_map(|_| real()).collect()).collect()
        };
        let weights = MlaHeadMatrices { w_uk: weights(nope_dim), w_uv: weights(value_dim) };
        let queries = MlaQueries::new(pair, q, step, &table);
        let count = queries.count();
        let [o, separate_rows, single_row] =
            [count, count, 1].map(|rows| pair.poisoned(dtype, rows, heads * value_dim));
        let results = MlaResults { o, separate_rows, single_row };
        let layouts = [layout, MlaKvLayout { dtype: on_cpu(dtype), ..layout }];
        Self { pair, sizes, dtype, rows: step.rows, layouts, kv_inputs, weights, queries, results }
    }

    /// Computes all rows on both devices; on the GPU also each row separately, and the first row alone.
    pub(crate) fn run(&mut self) {
        let (pair, [gpu, cpu]) = (self.pair, self.layouts);
        let backends = pair.backends();
        let (pool, packed) =
            self.write_pool(&backends[0], CpuGpuMatrix::gpu, CpuGpuMatrix::gpu_mut, &gpu);
        let all = self.queries.args(CpuGpuMatrix::gpu, packed.heads(gpu.dtype));
        let MlaResults { o, separate_rows, single_row } = &mut self.results;
        for (out, args) in [
            (&mut *o, all),
            (separate_rows, rows_separately(&all)),
            (single_row, first_row_only(&all)),
        ] {
            pair.gpu
                .launch(
                    &S,
                    MlaAttention { o: out.gpu_mut(), pool: &pool, layout: &gpu, args: &args },
                )
                .unwrap();
        }
        let (pool, packed) =
            self.write_pool(&backends[1], CpuGpuMatrix::cpu, CpuGpuMatrix::cpu_mut, &cpu);
        let all = self.queries.args(CpuGpuMatrix::cpu, packed.heads(cpu.dtype));
        let o = self.results.o.cpu_mut();
        pair.cpu.launch(&S, MlaAttention { o, pool: &pool, layout: &cpu, args: &all }).unwrap();
    }

    /// Writes all positions to a KV pool on one device and applies RoPE to the queries. Returns the pool and
    /// the packed weights.
    fn write_pool(
        &mut self,
        device: &KernelBackend,
        view: CpuGpuViewFn,
        view_mut: CpuGpuViewMutFn,
        layout: &MlaKvLayout,
    ) -> (Buffer, PackedMlaWeights) {
        let mut pool = device.alloc(layout.bytes()).unwrap();
        // Fills the pool with NaN, as previous requests may leave it.
        device.upload(&mut pool, 0, &vec![0xff; layout.bytes()]).unwrap();
        let args = self.kv_inputs.args(view, self.sizes[0]);
        let q = view_mut(&mut self.queries.q);
        device.launch(&S, MlaPrologue { q, pool: &mut pool, layout, args: &args }).unwrap();
        let packed = self.weights.packed(device, &self.sizes, layout.dtype);
        (pool, packed)
    }

    /// Panics if the GPU and CPU results differ, or if the GPU results of rows processed separately differ
    /// from the batch.
    pub(crate) fn check(&self) {
        let Self { pair, sizes, dtype, .. } = self;
        let [heads, _, rope_dim, _, value_dim, _] = *sizes;
        let what = format!("{sizes:?} {dtype:?}");
        pair.check(&format!("{what} queries"), &self.queries.q, tolerance(*dtype));
        let [got, expected] = pair.read_floats(&self.results.o);
        let [single_row, _] = pair.read_floats(&self.results.single_row);
        let [separate_rows, _] = pair.read_floats(&self.results.separate_rows);
        // WGMMA kernels (for warps of 32 lanes) choose the length of the key splits from all rows of the
        // step, so results of separate rows may differ slightly.
        let uses_wgmma =
            pair.gpu.warp_size() == 32 && *dtype != DType::F32 && rope_dim.is_multiple_of(64);
        let differences =
            [error(&separate_rows, &got), error(&single_row, &got[..heads * value_dim])];
        let max_difference = if uses_wgmma { tolerance(*dtype) } else { 0.0 };
        assert!(
            differences.iter().all(|difference| *difference <= max_difference),
            "{what}: separate rows, single first row: {differences:?}"
        );
        let ends = self.queries.ends.windows(2);
        for (own, row) in ends.zip(self.rows).filter(|(_, row)| row.1 == 0) {
            let own = own[0] as usize * heads * value_dim..own[1] as usize * heads * value_dim;
            assert!(
                got[own].iter().all(|y| *y == 0.0),
                "{what}: {row:?} has no keys, but a non-zero output"
            );
        }
        // The CPU uses the non-absorbed form in f32 and for long rows, and then rounds keys and values.
        let error = error(&got, &expected);
        assert!(error <= 3.0 * tolerance(*dtype), "{what}: {error}");
    }
}

/// Returns a view of a matrix on one of the two devices, for reading.
type CpuGpuViewFn = fn(&CpuGpuMatrix) -> MatRef<'_>;
/// Returns a view of a matrix on one of the two devices, for writing.
type CpuGpuViewMutFn = fn(&mut CpuGpuMatrix) -> MatMut<'_>;

impl MlaKvInputs {
    /// Returns random inputs of `tokens` tokens, with the slots that the block table `table` assigns.
    fn random(
        pair: &CpuGpuPair,
        numbers: &mut RandomNumbers,
        layout: &MlaKvLayout,
        tokens: usize,
        table: &[i32],
    ) -> Self {
        let MlaKvLayout { kv_lora_rank, rope_dim, block_tokens, dtype, .. } = *layout;
        let slot = |t: usize| table[t / block_tokens] as usize * block_tokens + t % block_tokens;
        let slots: Vec<i64> = (0..tokens).map(|t| slot(t) as i64).chain([-1]).collect();
        let rows = slots.len();
        let positions: Vec<i32> = (0..rows as i32).collect();
        Self {
            slots: pair.put(&slots, 1, rows),
            positions: pair.put(&positions, 1, rows),
            kv: pair.random(numbers, dtype, rows, kv_lora_rank + rope_dim),
            norm: pair.random(numbers, dtype, 1, kv_lora_rank),
            cos: pair.random(numbers, DType::F32, rows, rope_dim / 2),
            sin: pair.random(numbers, DType::F32, rows, rope_dim / 2),
        }
    }

    fn args(&self, view: CpuGpuViewFn, heads: usize) -> MlaPrologueArgs<'_> {
        MlaPrologueArgs {
            kv: view(&self.kv),
            norm: view(&self.norm),
            eps: 1e-6,
            rope: RopeCosSin { cos: view(&self.cos), sin: view(&self.sin) },
            positions: view(&self.positions),
            slots: view(&self.slots),
            heads,
            layer: 1,
        }
    }
}

impl MlaHeadMatrices {
    fn packed(&self, device: &KernelBackend, sizes: &MlaSizes, dtype: DType) -> PackedMlaWeights {
        let [_, kv_lora_rank, _, nope_dim, value_dim, _] = *sizes;
        let w_uk_t: Vec<Vec<u8>> =
            self.w_uk.iter().map(|key| transposed(key, kv_lora_rank)).collect();
        let pack = |all: &[Vec<u8>], n: usize, k: usize| {
            let view = |bytes| vec![HostMat::new(bytes, DType::F32, n, k).unwrap()];
            let views: Vec<_> = all.iter().map(|bytes| view(bytes)).collect();
            device.pack_row_major(&views, dtype).unwrap()
        };
        PackedMlaWeights {
            w_uk: pack(&self.w_uk, nope_dim, kv_lora_rank),
            w_uk_t: pack(&w_uk_t, kv_lora_rank, nope_dim),
            w_uv: pack(&self.w_uv, value_dim, kv_lora_rank),
        }
    }
}

impl PackedMlaWeights {
    fn heads(&self, dtype: DType) -> MlaUpProjections<'_> {
        let key_transposed = (dtype != DType::F32).then_some(&self.w_uk_t);
        MlaUpProjections { w_uk: &self.w_uk, w_uk_t: key_transposed, w_uv: &self.w_uv }
    }
}

/// Transposes a matrix `[n, k]` of four-byte elements to `[k, n]`.
fn transposed(x: &[u8], k: usize) -> Vec<u8> {
    let words = x.as_chunks::<4>().0;
    (0..k).flat_map(|c| words.iter().skip(c).step_by(k)).flatten().copied().collect()
}

impl MlaQueries {
    fn new(pair: &CpuGpuPair, q: CpuGpuMatrix, step: &MlaStepRows<'_>, table: &[i32]) -> Self {
        let rows = step.rows.len();
        let exact = BatchUpperBounds::of(
            step.rows.iter().map(|&(tokens, context)| BatchRowLengths { tokens, context }),
            step.max_rows_per_request,
        );
        let bounds = BatchUpperBounds { decode_rows: step.decode_rows, max_query_len: 5, ..exact };
        let mut ends = vec![0i32];
        for (queries, _) in step.rows {
            ends.push(ends[ends.len() - 1] + *queries as i32);
        }
        let lens: Vec<i32> = step.rows.iter().map(|row| row.1 as i32).collect();
        Self {
            q,
            cu_q: pair.put(&ends, 1, rows + 1),
            context_lens: pair.put(&lens, 1, rows),
            block_tables: pair.put(&table.repeat(rows), rows, table.len()),
            seq_slots: pair.put(step.seq_slots, 1, step.seq_slots.len()),
            ends,
            bounds,
            first_position: step.first_position,
        }
    }

    /// Returns the total number of queries of all rows.
    fn count(&self) -> usize {
        self.ends[self.ends.len() - 1] as usize
    }

    fn args<'a>(&'a self, view: CpuGpuViewFn, heads: MlaUpProjections<'a>) -> MlaAttentionArgs<'a> {
        let (q, queries) = (view(&self.q), self.count());
        MlaAttentionArgs {
            q: q.rows_from(q.rows() - queries, queries),
            rows: AttentionMetadata {
                cu_q: view(&self.cu_q),
                context_lens: view(&self.context_lens),
                block_tables: view(&self.block_tables),
                table_rows: Some(view(&self.seq_slots)),
                bounds: self.bounds,
            },
            heads,
            layer: 1,
            scale: 0.2,
            first_position: self.first_position,
        }
    }
}

/// Returns the arguments of the attention kernel, changed to process every row separately.
fn rows_separately<'a>(all: &MlaAttentionArgs<'a>) -> MlaAttentionArgs<'a> {
    let bounds = BatchUpperBounds { max_rows_per_request: 1, ..all.rows.bounds };
    MlaAttentionArgs { rows: AttentionMetadata { bounds, ..all.rows }, ..*all }
}

/// Returns the arguments of the attention kernel for the first row only.
fn first_row_only<'a>(all: &MlaAttentionArgs<'a>) -> MlaAttentionArgs<'a> {
    let bounds = all.rows.bounds;
    let decode_rows = bounds.decode_rows.min(1);
    let rows = AttentionMetadata {
        cu_q: all.rows.cu_q.columns(0, 2),
        context_lens: all.rows.context_lens.columns(0, 1),
        table_rows: all.rows.table_rows.map(|slots| slots.columns(0, 1)),
        bounds: BatchUpperBounds { decode_rows, mla_decode_tokens: 1, ..bounds },
        ..all.rows
    };
    MlaAttentionArgs { q: all.q.rows_from(0, 1), rows, ..*all }
}
