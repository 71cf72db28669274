//! MLA on the CPU: the absorbed and the non-absorbed form against the formula in f64, for rows with few and
//! with many tokens, with random block tables.

use device::{DeviceDriver, DeviceError, DeviceStream, MatMut, MatRef};
use kernels::cpu::CpuBackend;
use kernels::{
    AttentionMetadata, BatchUpperBounds, HostMat, MlaAttention, MlaAttentionArgs, MlaKvLayout,
    MlaPrologue, MlaPrologueArgs, MlaUpProjections, PackedMatrixGroup, RopeCosSin,
};

use crate::support::{CpuTestFloat, SeededNumbers, bytes_of, cast, devices, error};

const S: DeviceStream = DeviceStream(0);
const POSITIONS: usize = 256;
const EPS: f32 = 1e-6;
const SCALE: f32 = 0.3;
/// Cases: number of heads, kv_lora_rank, qk_rope_head_dim, qk_nope_head_dim, and v_head_dim.
const SIZES: [[usize; 5]; 3] = [[4, 32, 8, 16, 16], [3, 48, 2, 10, 6], [2, 144, 16, 24, 40]];
/// Number of queries and context length of each row. In bf16 the first rows are short enough for the absorbed
/// form.
const ROWS: [(usize, usize); 5] = [(1, 130), (16, 100), (3, 3), (17, 65), (70, 200)];
const BLOCK_TOKENS: usize = 6;

/// Returns the number of queries of row `row` of `ROWS` if positions before `first` are masked; 0 if the row
/// would have a query at a masked position.
fn queries(row: usize, first: usize) -> usize {
    let (row_queries, context) = ROWS[row];
    if context - row_queries < first { 0 } else { row_queries }
}

/// Inputs and weights of an MLA case, all exact in bf16 and f16.
struct MlaConformanceCase {
    sizes: [usize; 5],
    /// Compressed KV of each row: `[context, kv_lora_rank + qk_rope_head_dim]`.
    kv: Vec<Vec<f32>>,
    /// Queries of each row: `[context, heads * (qk_nope_head_dim + qk_rope_head_dim)]`.
    q: Vec<Vec<f32>>,
    tables: Vec<Vec<i32>>,
    norm: Vec<f32>,
    cos: Vec<f32>,
    sin: Vec<f32>,
    /// W_UK of each head: `[qk_nope_head_dim, kv_lora_rank]`.
    keys: Vec<Vec<f32>>,
    /// W_UV of each head: `[v_head_dim, kv_lora_rank]`.
    values: Vec<Vec<f32>>,
}

impl MlaConformanceCase {
    fn new(seed: u64, sizes: [usize; 5]) -> Self {
        let [heads, kv_lora_rank, rope_dim, nope_dim, value_dim] = sizes;
        let mut numbers = SeededNumbers::new(seed);
        let mut of = |width: usize| -> Vec<Vec<f32>> {
            ROWS.iter().map(|(_, context)| numbers.floats(context * width)).collect()
        };
        let (kv, q) = (of(kv_lora_rank + rope_dim), of(heads * (nope_dim + rope_dim)));
        let mut free: Vec<i32> = (0..Self::blocks() as i32).collect();
        let mut take = || free.swap_remove(numbers.below(free.len()));
        let tables = ROWS
            .iter()
            .map(|(_, context)| (0..context.div_ceil(BLOCK_TOKENS)).map(|_| take()).collect())
            .collect();
        let half = POSITIONS * rope_dim / 2;
        let norm = numbers.floats(kv_lora_rank).iter().map(|w| 1.0 + w / 4.0).collect();
        let (cos, sin) = (numbers.floats(half), numbers.floats(half));
        let mut matrices =
            |n: usize| (0..heads).map(|_| numbers.floats(n * kv_lora_rank)).collect::<Vec<_>>();
        let (keys, values) = (matrices(nope_dim), matrices(value_dim));
        Self { sizes, kv, q, tables, norm, cos, sin, keys, values }
    }

    fn blocks() -> usize {
        ROWS.iter().map(|(_, context)| context.div_ceil(BLOCK_TOKENS)).sum::<usize>() + 2
    }

    fn rope<T: CpuTestFloat>(&self, x: &mut [f64], position: usize) {
        let half = self.sizes[2] / 2;
        for (i, pair) in x.as_chunks_mut::<2>().0.iter_mut().enumerate() {
            let (c, s) = (self.cos[position * half + i], self.sin[position * half + i]);
            let [a, b] = *pair;
            *pair = [a * f64::from(c) - b * f64::from(s), b * f64::from(c) + a * f64::from(s)]
                .map(round::<T>);
        }
    }

    /// Returns the compressed KV that the kernel writes to the pool for a position, after norm and RoPE.
    fn written_kv<T: CpuTestFloat>(&self, row: usize, position: usize) -> Vec<f64> {
        let (kv_lora_rank, width) = (self.sizes[1], self.sizes[1] + self.sizes[2]);
        let raw = &self.kv[row][position * width..][..width];
        let mut x: Vec<f64> = raw.iter().map(|x| f64::from(*x)).collect();
        let mean = x[..kv_lora_rank].iter().map(|x| x * x).sum::<f64>() / kv_lora_rank as f64;
        let scale = 1.0 / (mean + f64::from(EPS)).sqrt();
        for (x, w) in x.iter_mut().zip(&self.norm) {
            *x = round::<T>(round::<T>(*x * scale) * round::<T>(f64::from(*w)));
        }
        self.rope::<T>(&mut x[kv_lora_rank..], position);
        x
    }

    /// Returns the attention outputs of all queries of a row, computed in f64 by the formula: `[queries,
    /// heads * v_head_dim]`.
    fn expected<T: CpuTestFloat>(&self, row: usize, first: usize) -> Vec<f64> {
        let [heads, kv_lora_rank, rope_dim, nope_dim, value_dim] = self.sizes;
        let (row_queries, context) = (queries(row, first), ROWS[row].1);
        let kv_rows: Vec<Vec<f64>> = (0..context).map(|p| self.written_kv::<T>(row, p)).collect();
        let product = |w: &[f32], x: &[f64]| -> Vec<f64> {
            let row = |w: &[f32]| w.iter().zip(x).map(|(w, x)| f64::from(*w) * x).sum();
            w.chunks(kv_lora_rank).map(row).collect()
        };
        let per_position = |w: &[f32]| -> Vec<Vec<f64>> {
            kv_rows.iter().map(|x| product(w, &x[..kv_lora_rank])).collect()
        };
        let mut out = vec![0.0; row_queries * heads * value_dim];
        for head in 0..heads {
            let (keys, values) = (per_position(&self.keys[head]), per_position(&self.values[head]));
            for query in 0..row_queries {
                let position = context - row_queries + query;
                let width = nope_dim + rope_dim;
                let q = &self.q[row][position * heads * width + head * width..][..width];
                let mut q: Vec<f64> = q.iter().map(|x| f64::from(*x)).collect();
                self.rope::<T>(&mut q[nope_dim..], position);
                let score = |p: usize| -> f64 {
                    let key = keys[p].iter().chain(&kv_rows[p][kv_lora_rank..]);
                    key.zip(&q).map(|(k, q)| k * q).sum::<f64>() * f64::from(SCALE)
                };
                let weights: Vec<f64> = (first..=position).map(score).collect();
                let largest = weights.iter().copied().fold(f64::NEG_INFINITY, f64::max);
                let weights: Vec<f64> = weights.iter().map(|s| (s - largest).exp()).collect();
                let total: f64 = weights.iter().sum();
                let y = &mut out[query * heads * value_dim + head * value_dim..][..value_dim];
                for (weight, values) in weights.iter().zip(&values[first..]) {
                    for (y, v) in y.iter_mut().zip(values) {
                        *y += weight / total * v;
                    }
                }
            }
        }
        out
    }

    /// Runs the kernels: writes the whole context of every row to the pool, then computes attention for the
    /// last queries of all rows in one call.
    fn outputs<T: CpuTestFloat>(
        &self,
        device: &CpuBackend,
        absorbs: bool,
        first: usize,
    ) -> Vec<Vec<T>> {
        self.try_outputs(device, absorbs, first, first).unwrap()
    }

    /// Returns the attention outputs of all rows, or the error of the kernel. The positions before `first`
    /// are masked; row `row` has `queries(row, query_first)` queries.
    fn try_outputs<T: CpuTestFloat>(
        &self,
        device: &CpuBackend,
        absorbs: bool,
        first: usize,
        query_first: usize,
    ) -> Result<Vec<Vec<T>>, DeviceError> {
        let [heads, kv_lora_rank, rope_dim, nope_dim, value_dim] = self.sizes;
        let layout = MlaKvLayout {
            layers: 2,
            blocks: Self::blocks(),
            block_tokens: BLOCK_TOKENS,
            kv_lora_rank,
            rope_dim,
            dtype: T::DTYPE,
        };
        let mut pool = device.alloc(layout.bytes()).unwrap();
        // Fills the pool with NaN, as previous requests may leave it.
        device.upload(&mut pool, 0, &vec![0xff; layout.bytes()]).unwrap();
        let (mut q, mut cu_q) = (Vec::<T>::new(), vec![0i32]);
        for (row, (_, context)) in ROWS.into_iter().enumerate() {
            let row_queries = queries(row, query_first);
            let rotated_q = self.store::<T>(device, &mut pool, &layout, row);
            q.extend(&rotated_q[(context - row_queries) * heads * (nope_dim + rope_dim)..]);
            cu_q.push(cu_q[row] + row_queries as i32);
        }
        let group = |all: &[Vec<f32>], n: usize, k: usize| pack::<T>(device, all, n, k);
        let transposed_keys: Vec<Vec<f32>> =
            self.keys.iter().map(|w| transposed(w, kv_lora_rank)).collect();
        let key = group(&self.keys, nope_dim, kv_lora_rank);
        let key_transposed = absorbs.then(|| group(&transposed_keys, kv_lora_rank, nope_dim));
        let values = group(&self.values, value_dim, kv_lora_rank);
        let width = self.tables.iter().map(Vec::len).max().unwrap();
        let padded = |table: &Vec<i32>| {
            table.iter().copied().chain(std::iter::repeat(-1)).take(width).collect::<Vec<_>>()
        };
        let tables: Vec<i32> = self.tables.iter().flat_map(padded).collect();
        let lens = ROWS.map(|(_, context)| context as i32);
        let tokens = cu_q[ROWS.len()] as usize;
        let rows = AttentionMetadata {
            cu_q: MatRef::of(&cu_q, 1, cu_q.len()).unwrap(),
            context_lens: MatRef::of(&lens, 1, lens.len()).unwrap(),
            block_tables: MatRef::of(&tables, ROWS.len(), width).unwrap(),
            table_rows: None,
            bounds: BatchUpperBounds::of_any(tokens, ROWS.len(), width * BLOCK_TOKENS),
        };
        let args = MlaAttentionArgs {
            q: MatRef::of(&q, tokens, heads * (nope_dim + rope_dim)).unwrap(),
            rows,
            heads: MlaUpProjections { w_uk: &key, w_uk_t: key_transposed.as_ref(), w_uv: &values },
            layer: 1,
            scale: SCALE,
            first_position: first,
        };
        let mut out = vec![T::of(f32::NAN); tokens * heads * value_dim];
        let o = MatMut::of(&mut out, tokens, heads * value_dim).unwrap();
        device.launch(&S, MlaAttention { o, pool: &pool, layout: &layout, args: &args })?;
        let of_row = |row: usize| {
            let width = heads * value_dim;
            out[cu_q[row] as usize * width..cu_q[row + 1] as usize * width].to_vec()
        };
        Ok((0..ROWS.len()).map(of_row).collect())
    }

    /// Writes a row's context to the pool and returns its queries with RoPE applied.
    fn store<T: CpuTestFloat>(
        &self,
        device: &CpuBackend,
        pool: &mut device::Buffer,
        layout: &MlaKvLayout,
        row: usize,
    ) -> Vec<T> {
        let [heads, kv_lora_rank, rope_dim, nope_dim, _] = self.sizes;
        let context = ROWS[row].1;
        let (kv, mut q) = (cast::<T>(&self.kv[row]), cast::<T>(&self.q[row]));
        let positions: Vec<i32> = (0..context as i32).collect();
        let slot = |p: usize| {
            i64::from(self.tables[row][p / BLOCK_TOKENS]) * BLOCK_TOKENS as i64
                + (p % BLOCK_TOKENS) as i64
        };
        let slots: Vec<i64> = (0..context).map(slot).collect();
        let norm = cast::<T>(&self.norm);
        let width = heads * (nope_dim + rope_dim);
        let args = MlaPrologueArgs {
            kv: MatRef::of(&kv, context, kv_lora_rank + rope_dim).unwrap(),
            norm: MatRef::of(&norm, 1, kv_lora_rank).unwrap(),
            eps: EPS,
            rope: RopeCosSin {
                cos: MatRef::of(&self.cos, POSITIONS, rope_dim / 2).unwrap(),
                sin: MatRef::of(&self.sin, POSITIONS, rope_dim / 2).unwrap(),
            },
            positions: MatRef::of(&positions, 1, context).unwrap(),
            slots: MatRef::of(&slots, 1, context).unwrap(),
            heads,
            layer: 1,
        };
        let out = MatMut::of(&mut q, context, width).unwrap();
        device.launch(&S, MlaPrologue { q: out, pool, layout, args: &args }).unwrap();
        q
    }
}

fn round<T: CpuTestFloat>(x: f64) -> f64 {
    f64::from(T::of(x as f32).value())
}

fn pack<T: CpuTestFloat>(
    device: &CpuBackend,
    all: &[Vec<f32>],
    n: usize,
    k: usize,
) -> PackedMatrixGroup {
    let bytes: Vec<Vec<u8>> = all.iter().map(|w| bytes_of(w)).collect();
    let view = |b| vec![HostMat::new(b, device::DType::F32, n, k).unwrap()];
    let views: Vec<_> = bytes.iter().map(|b| view(b)).collect();
    device.pack_group(&views, T::DTYPE, false).unwrap()
}

fn transposed(w: &[f32], cols: usize) -> Vec<f32> {
    let rows = w.len() / cols;
    (0..w.len()).map(|i| w[i % rows * cols + i / rows]).collect()
}

fn check<T: CpuTestFloat>(absorbs: bool, tolerance: f64) {
    for (seed, sizes) in SIZES.into_iter().enumerate() {
        let case = MlaConformanceCase::new(seed as u64 + 1, sizes);
        for first in [0, 1, 65] {
            let rows = 0..ROWS.len();
            let expected: Vec<Vec<f64>> = rows.map(|row| case.expected::<T>(row, first)).collect();
            for device in devices(3) {
                for (row, output) in case.outputs::<T>(&device, absorbs, first).iter().enumerate() {
                    let off = error(output, &expected[row]);
                    let what = (device.name(), sizes, ROWS[row], absorbs, first);
                    assert!(off <= tolerance, "{what:?}: {off}");
                }
            }
        }
    }
}

#[test]
fn non_absorbed_mla_matches_the_formula() {
    check::<f32>(false, 2e-5);
    check::<device::bf16>(false, 3e-2);
    check::<device::f16>(false, 3e-2 / 8.0);
}

#[test]
fn absorbed_mla_matches_the_formula() {
    check::<f32>(true, 2e-5);
    check::<device::bf16>(true, 3e-2);
    check::<device::f16>(true, 3e-2 / 8.0);
}

/// A query before the first visible position is an error: the third row has queries from position 0 on.
#[test]
fn mla_skips_queries_before_the_first_position() {
    assert_eq!((0..ROWS.len()).map(|row| queries(row, 1)).collect::<Vec<_>>(), [1, 16, 0, 17, 70]);
    let case = MlaConformanceCase::new(1, SIZES[0]);
    let error = case.try_outputs::<f32>(&devices(1)[0], false, 1, 0).unwrap_err().to_string();
    assert!(error.contains("first position"), "{error}");
}

/// A token with slot −1 is not written to the KV pool, and invalid shapes and slots are rejected before any
/// byte is written.
#[test]
fn mla_kv_write_skips_negative_slots() {
    let device = &devices(1)[0];
    let layout = MlaKvLayout {
        layers: 1,
        blocks: 1,
        block_tokens: 2,
        kv_lora_rank: 4,
        rope_dim: 2,
        dtype: device::DType::F32,
    };
    let mut pool = device.alloc(layout.bytes()).unwrap();
    let (kv, norm, positions) = ([1f32; 6], [1f32; 4], [0i32]);
    let (cos, sin) = ([1f32], [0f32]);
    let mut run = |slot: i64, heads: usize| {
        let slots = [slot];
        let args = MlaPrologueArgs {
            kv: MatRef::of(&kv, 1, 6).unwrap(),
            norm: MatRef::of(&norm, 1, 4).unwrap(),
            eps: EPS,
            rope: RopeCosSin {
                cos: MatRef::of(&cos, 1, 1).unwrap(),
                sin: MatRef::of(&sin, 1, 1).unwrap(),
            },
            positions: MatRef::of(&positions, 1, 1).unwrap(),
            slots: MatRef::of(&slots, 1, 1).unwrap(),
            heads,
            layer: 0,
        };
        let mut q = [0f32; 8];
        let q = MatMut::of(&mut q, 1, 8).unwrap();
        let done =
            device.launch(&S, MlaPrologue { q, pool: &mut pool, layout: &layout, args: &args });
        let mut bytes = vec![0; layout.bytes()];
        device.download(&S, &pool, 0, &mut bytes).unwrap();
        (done.is_ok(), bytes.iter().any(|b| *b != 0))
    };
    assert_eq!(run(-1, 2), (true, false));
    assert_eq!(run(2, 2), (false, false));
    assert_eq!(run(0, 3), (false, false));
    assert_eq!(run(1, 2), (true, true));
}
