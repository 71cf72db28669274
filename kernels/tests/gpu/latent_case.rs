//! One case of latent attention: what is written to the pools of both devices, what rows ask of them, what comes out.

use crate::latent::{Rows, Sizes};
use crate::pair::{Pair, Twin, on_cpu, rounded, tolerance};
use crate::support::{Numbers, S, error};
use kernels::{
    BatchRows, Buffer, DType, Driver, HostMat, Kernels, LatentAttention, LatentHeads, LatentLayout,
    LatentWrite, Mat, MatMut, PackedGroup, Rope, RowBounds,
};

/// Rows over one context, as long as the longest of them needs, and the heads that look at it.
pub(crate) struct Case<'a> {
    pair: &'a Pair,
    sizes: Sizes,
    dtype: DType,
    asking: Rows<'a>,
    /// Of the pools on the GPU and on the CPU.
    layouts: [LatentLayout; 2],
    latents: Latents,
    weights: Weights,
    asked: Asked,
    results: Results,
}

/// What is written: one token more than anybody sees, which is kept nowhere.
struct Latents {
    kv: Twin,
    norm: Twin,
    cos: Twin,
    sin: Twin,
    positions: Twin,
    slots: Twin,
}

/// Of each head, `[channels, latent]` in f32.
struct Weights {
    keys: Vec<Vec<u8>>,
    values: Vec<Vec<u8>>,
}

/// The weights as a device has them.
struct Packed {
    key: PackedGroup,
    transposed: PackedGroup,
    value: PackedGroup,
}

/// What rows ask.
struct Asked {
    /// Of all tokens; those of the rows are the last.
    q: Twin,
    /// Where each row's queries begin, and behind them the number of all.
    ends: Vec<i32>,
    cu_q: Twin,
    context_lens: Twin,
    block_tables: Twin,
    seats: Twin,
    bounds: RowBounds,
    /// The first position that is seen.
    first: usize,
}

struct Results {
    o: Twin,
    /// Of rows that are taken one by one, by the GPU.
    apart: Twin,
    /// Of the first row without others, by the GPU.
    alone: Twin,
}

impl<'a> Case<'a> {
    /// Rows of requests on these seats, up to `successive` of each, which see what stands from `first` on.
    pub(crate) fn drawn(
        pair: &'a Pair,
        sizes: Sizes,
        (asking, decode_rows): (Rows<'a>, usize),
        dtype: DType,
        (first, seats, successive): (usize, &[i32], usize),
    ) -> Self {
        let [heads, latent, rotary, unturned, value, block_tokens] = sizes;
        let tokens = asking.iter().map(|row| row.1).max().unwrap();
        let numbers = &mut pair.numbers((heads * latent) as u64);
        let blocks = tokens.div_ceil(block_tokens) + 1;
        let layout = LatentLayout { layers: 2, blocks, block_tokens, latent, rotary, dtype };
        let table: Vec<i32> = (0..blocks).map(|b| ((b * 7919 + 3) % blocks) as i32).collect();
        let latents = Latents::drawn(pair, numbers, &layout, (tokens, &table));
        let q = pair.random(numbers, dtype, tokens + 1, heads * (unturned + rotary));
        let mut weights = |n: usize| -> Vec<Vec<u8>> {
            let mut real = || rounded(numbers.float() / 8.0, dtype).to_le_bytes();
            (0..heads).map(|_| (0..n * latent).flat_map(|_| real()).collect()).collect()
        };
        let weights = Weights { keys: weights(unturned), values: weights(value) };
        let exact = RowBounds::of(asking.iter().copied(), successive);
        let bounds = RowBounds { decode_rows, longest_q: 5, ..exact };
        let asked = Asked::of(pair, q, asking, (&table, seats), (bounds, first));
        let queries = asked.queries();
        let [o, apart, alone] =
            [queries, queries, 1].map(|rows| pair.poisoned(dtype, rows, heads * value));
        let results = Results { o, apart, alone };
        let layouts = [layout, LatentLayout { dtype: on_cpu(dtype), ..layout }];
        Self { pair, sizes, dtype, asking, layouts, latents, weights, asked, results }
    }

    /// Answers all rows on both devices, and on the GPU also one by one, and the first without the others.
    pub(crate) fn run(&mut self) {
        let (pair, [gpu, cpu]) = (self.pair, self.layouts);
        let (pool, packed) = self.written(&pair.gpu, (Twin::gpu, Twin::gpu_mut), &gpu);
        let all = self.asked.args(Twin::gpu, packed.heads(gpu.dtype));
        let Results { o, apart, alone } = &mut self.results;
        for (out, args) in [(&mut *o, all), (apart, one_by_one(&all)), (alone, first_alone(&all))] {
            pair.gpu.latent_attention(&S, out.gpu_mut(), (&pool, &gpu), &args).unwrap();
        }
        let (pool, packed) = self.written(&pair.cpu, (Twin::cpu, Twin::cpu_mut), &cpu);
        let all = self.asked.args(Twin::cpu, packed.heads(cpu.dtype));
        let o = self.results.o.cpu_mut();
        pair.cpu.latent_attention(&S, o, (&pool, &cpu), &all).unwrap();
    }

    /// A pool with all latents, and the weights, on a device; queries are turned.
    fn written<D: Driver + Kernels>(
        &mut self,
        device: &D,
        (view, view_mut): (View, ViewMut),
        layout: &LatentLayout,
    ) -> (Buffer, Packed) {
        let mut pool = device.alloc(layout.bytes()).unwrap();
        // An earlier owner left NaN everywhere.
        device.upload(&mut pool, 0, &vec![0xff; layout.bytes()]).unwrap();
        let args = self.latents.args(view, self.sizes[0]);
        let q = view_mut(&mut self.asked.q);
        device.latent_write(&S, q, (&mut pool, layout), &args).unwrap();
        let packed = self.weights.packed(device, &self.sizes, layout.dtype);
        (pool, packed)
    }

    /// Fails where the devices differ, or the ways in which the GPU was asked.
    pub(crate) fn check(&self) {
        let Self { pair, sizes, dtype, .. } = self;
        let [heads, _, rotary, _, value, _] = *sizes;
        let what = format!("{sizes:?} {dtype:?}");
        pair.check(&format!("{what} queries"), &self.asked.q, tolerance(*dtype));
        let [got, expected] = pair.read_floats(&self.results.o);
        let [alone, _] = pair.read_floats(&self.results.alone);
        let [apart, _] = pair.read_floats(&self.results.apart);
        // Warpgroups, which there are where waves are narrow, cut contexts by all that are in the step.
        let in_groups = pair.gpu.wave() == 32 && *dtype != DType::F32 && rotary.is_multiple_of(64);
        let differ = [error(&apart, &got), error(&alone, &got[..heads * value])];
        let most = if in_groups { tolerance(*dtype) } else { 0.0 };
        assert!(
            differ.iter().all(|by| *by <= most),
            "{what}: one by one, the first alone: {differ:?}"
        );
        let ends = self.asked.ends.windows(2);
        for (own, row) in ends.zip(self.asking).filter(|(_, row)| row.1 == 0) {
            let own = own[0] as usize * heads * value..own[1] as usize * heads * value;
            assert!(got[own].iter().all(|y| *y == 0.0), "{what}: {row:?} sees nothing");
        }
        // In f32 and of long rows the CPU makes keys and values and rounds these.
        let error = error(&got, &expected);
        assert!(error <= 3.0 * tolerance(*dtype), "{what}: {error}");
    }
}

type View = fn(&Twin) -> Mat<'_>;
type ViewMut = fn(&mut Twin) -> MatMut<'_>;

impl Latents {
    /// Of `tokens` tokens in the blocks of `table`.
    fn drawn(
        pair: &Pair,
        numbers: &mut Numbers,
        layout: &LatentLayout,
        (tokens, table): (usize, &[i32]),
    ) -> Self {
        let LatentLayout { latent, rotary, block_tokens, dtype, .. } = *layout;
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

    fn args(&self, view: View, heads: usize) -> LatentWrite<'_> {
        LatentWrite {
            kv: view(&self.kv),
            norm: view(&self.norm),
            eps: 1e-6,
            rope: Rope { cos: view(&self.cos), sin: view(&self.sin) },
            positions: view(&self.positions),
            slots: view(&self.slots),
            heads,
            layer: 1,
        }
    }
}

impl Weights {
    fn packed(&self, device: &dyn Kernels, sizes: &Sizes, dtype: DType) -> Packed {
        let [_, latent, _, unturned, value, _] = *sizes;
        let turned: Vec<Vec<u8>> = self.keys.iter().map(|key| transposed(key, latent)).collect();
        let pack = |all: &[Vec<u8>], n: usize, k: usize| {
            let view = |bytes| vec![HostMat::new(bytes, DType::F32, n, k).unwrap()];
            let views: Vec<_> = all.iter().map(|bytes| view(bytes)).collect();
            device.pack_heads(&views, dtype).unwrap()
        };
        Packed {
            key: pack(&self.keys, unturned, latent),
            transposed: pack(&turned, latent, unturned),
            value: pack(&self.values, value, latent),
        }
    }
}

impl Packed {
    fn heads(&self, dtype: DType) -> LatentHeads<'_> {
        let key_transposed = (dtype != DType::F32).then_some(&self.transposed);
        LatentHeads { key: &self.key, key_transposed, value: &self.value }
    }
}

/// `[n, k]` of four bytes to `[k, n]`.
fn transposed(x: &[u8], k: usize) -> Vec<u8> {
    let words = x.as_chunks::<4>().0;
    (0..k).flat_map(|c| words.iter().skip(c).step_by(k)).flatten().copied().collect()
}

impl Asked {
    fn of(
        pair: &Pair,
        q: Twin,
        asking: Rows<'_>,
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
            seats: pair.put(seats, 1, seats.len()),
            ends,
            bounds,
            first,
        }
    }

    /// Of all rows together.
    fn queries(&self) -> usize {
        self.ends[self.ends.len() - 1] as usize
    }

    fn args<'a>(&'a self, view: View, heads: LatentHeads<'a>) -> LatentAttention<'a> {
        let (q, queries) = (view(&self.q), self.queries());
        LatentAttention {
            q: q.rows_from(q.rows() - queries, queries),
            rows: BatchRows {
                cu_q: view(&self.cu_q),
                context_lens: view(&self.context_lens),
                block_tables: view(&self.block_tables),
                table_rows: Some(view(&self.seats)),
                bounds: self.bounds,
            },
            heads,
            layer: 1,
            scale: 0.2,
            first: self.first,
        }
    }
}

/// The same, no two rows together.
fn one_by_one<'a>(all: &LatentAttention<'a>) -> LatentAttention<'a> {
    let bounds = RowBounds { successive: 1, ..all.rows.bounds };
    LatentAttention { rows: BatchRows { bounds, ..all.rows }, ..*all }
}

/// The first row and nothing else.
fn first_alone<'a>(all: &LatentAttention<'a>) -> LatentAttention<'a> {
    let bounds = all.rows.bounds;
    let decode_rows = bounds.decode_rows.min(1);
    let rows = BatchRows {
        cu_q: all.rows.cu_q.columns(0, 2),
        context_lens: all.rows.context_lens.columns(0, 1),
        table_rows: all.rows.table_rows.map(|seats| seats.columns(0, 1)),
        bounds: RowBounds { decode_rows, short_tokens: 1, ..bounds },
        ..all.rows
    };
    LatentAttention { q: all.q.rows_from(0, 1), rows, ..*all }
}
