//! One MLA test case: inputs of the KV write on both devices, queries, and results.

use device::{Buffer, DType, MatMut, MatRef};
use kernels::{
    AttentionMetadata, HostMat, KernelBackend, MlaAttention, MlaAttentionArgs, MlaHeadWeights,
    MlaKvLayout, MlaKvWrite, MlaKvWriteArgs, PackedGroup, RopeCosSin, RowBounds,
};

use crate::device_pair::{DevicePair, TwinMatrix, on_cpu, rounded, tolerance};
use crate::mla::{MlaRows, MlaSizes};
use crate::support::{RandomNumbers, S, error};

/// Rows over one context, which has the length of the longest row's context, and all heads.
pub(crate) struct MlaCase<'a> {
    pair: &'a DevicePair,
    sizes: MlaSizes,
    dtype: DType,
    query_sets: MlaRows<'a>,
    /// Layouts of the pools on the GPU and on the CPU.
    layouts: [MlaKvLayout; 2],
    kv_inputs: MlaKvInputs,
    weights: MlaHeadMatrices,
    queries: MlaQueries,
    results: MlaResults,
}

/// Inputs of the KV write: one token more than any row attends to, which is not stored.
struct MlaKvInputs {
    kv: TwinMatrix,
    norm: TwinMatrix,
    cos: TwinMatrix,
    sin: TwinMatrix,
    positions: TwinMatrix,
    slots: TwinMatrix,
}

/// Per head, `[channels, kv_lora_rank]` in f32.
struct MlaHeadMatrices {
    w_uk: Vec<Vec<u8>>,
    w_uv: Vec<Vec<u8>>,
}

/// The weights packed on a device.
#[expect(clippy::struct_field_names, reason = "the names of the literature")]
struct PackedMlaWeights {
    w_uk: PackedGroup,
    w_uk_t: PackedGroup,
    w_uv: PackedGroup,
}

/// Queries of the rows, with their metadata.
struct MlaQueries {
    /// Queries of all tokens; the rows' queries are the last ones.
    q: TwinMatrix,
    /// Start of each row's queries, followed by their total number.
    ends: Vec<i32>,
    cu_q: TwinMatrix,
    context_lens: TwinMatrix,
    block_tables: TwinMatrix,
    seq_slots: TwinMatrix,
    bounds: RowBounds,
    /// First visible position.
    first_position: usize,
}

struct MlaResults {
    o: TwinMatrix,
    /// Result of rows processed separately, on the GPU.
    separate_rows: TwinMatrix,
    /// Result of the first row alone, on the GPU.
    single_rows: TwinMatrix,
}

impl<'a> MlaCase<'a> {
    /// Rows of requests in these sequence slots, up to `successive` rows each, which attend to positions from
    /// `first` on.
    pub(crate) fn drawn(
        pair: &'a DevicePair,
        sizes: MlaSizes,
        (asking, decode_rows): (MlaRows<'a>, usize),
        dtype: DType,
        (first, seats, successive): (usize, &[i32], usize),
    ) -> Self {
        let [heads, latent, rotary, unturned, value, block_tokens] = sizes;
        let tokens = asking.iter().map(|row| row.1).max().unwrap();
        let numbers = &mut pair.numbers((heads * latent) as u64);
        let blocks = tokens.div_ceil(block_tokens) + 1;
        let layout = MlaKvLayout {
            layers: 2,
            blocks,
            block_tokens,
            kv_lora_rank: latent,
            rope_dim: rotary,
            dtype,
        };
        let table: Vec<i32> = (0..blocks).map(|b| ((b * 7919 + 3) % blocks) as i32).collect();
        let latents = MlaKvInputs::drawn(pair, numbers, &layout, (tokens, &table));
        let q = pair.random(numbers, dtype, tokens + 1, heads * (unturned + rotary));
        let mut weights = |n: usize| -> Vec<Vec<u8>> {
            let mut real = || rounded(numbers.float() / 8.0, dtype).to_le_bytes();
            (0..heads).map(|_| (0..n * latent).flat_map(|_| real()).collect()).collect()
        };
        let weights = MlaHeadMatrices { w_uk: weights(unturned), w_uv: weights(value) };
        let exact = RowBounds::of(asking.iter().copied(), successive);
        let bounds = RowBounds { decode_rows, max_query_len: 5, ..exact };
        let asked = MlaQueries::of(pair, q, asking, (&table, seats), (bounds, first));
        let queries = asked.queries();
        let [o, apart, alone] =
            [queries, queries, 1].map(|rows| pair.poisoned(dtype, rows, heads * value));
        let results = MlaResults { o, separate_rows: apart, single_rows: alone };
        let layouts = [layout, MlaKvLayout { dtype: on_cpu(dtype), ..layout }];
        Self {
            pair,
            sizes,
            dtype,
            query_sets: asking,
            layouts,
            kv_inputs: latents,
            weights,
            queries: asked,
            results,
        }
    }

    /// Computes all rows on both devices, and on the GPU also each row separately, and the first row alone.
    pub(crate) fn run(&mut self) {
        let (pair, [gpu, cpu]) = (self.pair, self.layouts);
        let backends = pair.backends();
        let (pool, packed) =
            self.written(&backends[0], (TwinMatrix::gpu, TwinMatrix::gpu_mut), &gpu);
        let all = self.queries.args(TwinMatrix::gpu, packed.heads(gpu.dtype));
        let MlaResults { o, separate_rows: apart, single_rows: alone } = &mut self.results;
        for (out, args) in
            [(&mut *o, all), (apart, one_by_one(&all)), (alone, first_row_only(&all))]
        {
            pair.gpu
                .launch(
                    &S,
                    MlaAttention { o: out.gpu_mut(), pool: &pool, layout: &gpu, args: &args },
                )
                .unwrap();
        }
        let (pool, packed) =
            self.written(&backends[1], (TwinMatrix::cpu, TwinMatrix::cpu_mut), &cpu);
        let all = self.queries.args(TwinMatrix::cpu, packed.heads(cpu.dtype));
        let o = self.results.o.cpu_mut();
        pair.cpu.launch(&S, MlaAttention { o, pool: &pool, layout: &cpu, args: &all }).unwrap();
    }

    /// Returns a device's pool with all positions written, and its packed weights; applies RoPE to the
    /// queries.
    fn written(
        &mut self,
        device: &KernelBackend,
        (view, view_mut): (TwinView, TwinViewMut),
        layout: &MlaKvLayout,
    ) -> (Buffer, PackedMlaWeights) {
        let mut pool = device.alloc(layout.bytes()).unwrap();
        // NaN everywhere, as left by previous requests.
        device.upload(&mut pool, 0, &vec![0xff; layout.bytes()]).unwrap();
        let args = self.kv_inputs.args(view, self.sizes[0]);
        let q = view_mut(&mut self.queries.q);
        device.launch(&S, MlaKvWrite { q, pool: &mut pool, layout, args: &args }).unwrap();
        let packed = self.weights.packed(device, &self.sizes, layout.dtype);
        (pool, packed)
    }

    /// Fails if the devices' results differ, or those of the GPU's separate runs.
    pub(crate) fn check(&self) {
        let Self { pair, sizes, dtype, .. } = self;
        let [heads, _, rotary, _, value, _] = *sizes;
        let what = format!("{sizes:?} {dtype:?}");
        pair.check(&format!("{what} queries"), &self.queries.q, tolerance(*dtype));
        let [got, expected] = pair.read_floats(&self.results.o);
        let [alone, _] = pair.read_floats(&self.results.single_rows);
        let [apart, _] = pair.read_floats(&self.results.separate_rows);
        // WGMMA kernels (warps of 32 lanes) choose split lengths by all rows of the step.
        let in_groups =
            pair.gpu.warp_size() == 32 && *dtype != DType::F32 && rotary.is_multiple_of(64);
        let differ = [error(&apart, &got), error(&alone, &got[..heads * value])];
        let most = if in_groups { tolerance(*dtype) } else { 0.0 };
        assert!(
            differ.iter().all(|by| *by <= most),
            "{what}: one by one, the first alone: {differ:?}"
        );
        let ends = self.queries.ends.windows(2);
        for (own, row) in ends.zip(self.query_sets).filter(|(_, row)| row.1 == 0) {
            let own = own[0] as usize * heads * value..own[1] as usize * heads * value;
            assert!(got[own].iter().all(|y| *y == 0.0), "{what}: {row:?} sees nothing");
        }
        // In f32, and for long rows, the CPU uses the non-absorbed form and rounds keys and values.
        let error = error(&got, &expected);
        assert!(error <= 3.0 * tolerance(*dtype), "{what}: {error}");
    }
}

type TwinView = fn(&TwinMatrix) -> MatRef<'_>;
type TwinViewMut = fn(&mut TwinMatrix) -> MatMut<'_>;

impl MlaKvInputs {
    /// Inputs of `tokens` tokens in the blocks of `table`.
    fn drawn(
        pair: &DevicePair,
        numbers: &mut RandomNumbers,
        layout: &MlaKvLayout,
        (tokens, table): (usize, &[i32]),
    ) -> Self {
        let MlaKvLayout { kv_lora_rank: latent, rope_dim: rotary, block_tokens, dtype, .. } =
            *layout;
        let place = |t: usize| table[t / block_tokens] as usize * block_tokens + t % block_tokens;
        let slots: Vec<i64> = (0..tokens).map(|t| place(t) as i64).chain([-1]).collect();
        let written = slots.len();
        let positions: Vec<i32> = (0..written as i32).collect();
        Self {
            slots: pair.put(&slots, 1, written),
            positions: pair.put(&positions, 1, written),
            kv: pair.random(numbers, dtype, written, latent + rotary),
            norm: pair.random(numbers, dtype, 1, latent),
            cos: pair.random(numbers, DType::F32, written, rotary / 2),
            sin: pair.random(numbers, DType::F32, written, rotary / 2),
        }
    }

    fn args(&self, view: TwinView, heads: usize) -> MlaKvWriteArgs<'_> {
        MlaKvWriteArgs {
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
        let [_, latent, _, unturned, value, _] = *sizes;
        let turned: Vec<Vec<u8>> = self.w_uk.iter().map(|key| transposed(key, latent)).collect();
        let pack = |all: &[Vec<u8>], n: usize, k: usize| {
            let view = |bytes| vec![HostMat::new(bytes, DType::F32, n, k).unwrap()];
            let views: Vec<_> = all.iter().map(|bytes| view(bytes)).collect();
            device.pack_mla_heads(&views, dtype).unwrap()
        };
        PackedMlaWeights {
            w_uk: pack(&self.w_uk, unturned, latent),
            w_uk_t: pack(&turned, latent, unturned),
            w_uv: pack(&self.w_uv, value, latent),
        }
    }
}

impl PackedMlaWeights {
    fn heads(&self, dtype: DType) -> MlaHeadWeights<'_> {
        let key_transposed = (dtype != DType::F32).then_some(&self.w_uk_t);
        MlaHeadWeights { w_uk: &self.w_uk, w_uk_t: key_transposed, w_uv: &self.w_uv }
    }
}

/// Transposes `[n, k]` elements of four bytes to `[k, n]`.
fn transposed(x: &[u8], k: usize) -> Vec<u8> {
    let words = x.as_chunks::<4>().0;
    (0..k).flat_map(|c| words.iter().skip(c).step_by(k)).flatten().copied().collect()
}

impl MlaQueries {
    fn of(
        pair: &DevicePair,
        q: TwinMatrix,
        asking: MlaRows<'_>,
        (table, seats): (&[i32], &[i32]),
        (bounds, first): (RowBounds, usize),
    ) -> Self {
        let rows = asking.len();
        let mut ends = vec![0i32];
        for (queries, _) in asking {
            ends.push(ends[ends.len() - 1] + *queries as i32);
        }
        let lens: Vec<i32> = asking.iter().map(|row| row.1 as i32).collect();
        Self {
            q,
            cu_q: pair.put(&ends, 1, rows + 1),
            context_lens: pair.put(&lens, 1, rows),
            block_tables: pair.put(&table.repeat(rows), rows, table.len()),
            seq_slots: pair.put(seats, 1, seats.len()),
            ends,
            bounds,
            first_position: first,
        }
    }

    /// Number of queries of all rows.
    fn queries(&self) -> usize {
        self.ends[self.ends.len() - 1] as usize
    }

    fn args<'a>(&'a self, view: TwinView, heads: MlaHeadWeights<'a>) -> MlaAttentionArgs<'a> {
        let (q, queries) = (view(&self.q), self.queries());
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

/// The arguments with every row processed separately.
fn one_by_one<'a>(all: &MlaAttentionArgs<'a>) -> MlaAttentionArgs<'a> {
    let bounds = RowBounds { max_rows_per_request: 1, ..all.rows.bounds };
    MlaAttentionArgs { rows: AttentionMetadata { bounds, ..all.rows }, ..*all }
}

/// The arguments with the first row only.
fn first_row_only<'a>(all: &MlaAttentionArgs<'a>) -> MlaAttentionArgs<'a> {
    let bounds = all.rows.bounds;
    let decode_rows = bounds.decode_rows.min(1);
    let rows = AttentionMetadata {
        cu_q: all.rows.cu_q.columns(0, 2),
        context_lens: all.rows.context_lens.columns(0, 1),
        table_rows: all.rows.table_rows.map(|seats| seats.columns(0, 1)),
        bounds: RowBounds { decode_rows, mla_decode_tokens: 1, ..bounds },
        ..all.rows
    };
    MlaAttentionArgs { q: all.q.rows_from(0, 1), rows, ..*all }
}
