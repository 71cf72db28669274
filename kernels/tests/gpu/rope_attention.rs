//! Decode attention fused with Q/K norm, RoPE and the KV write. The results equal the results of the two
//! separate kernels: the KV pool has the same bits, and the outputs have the same bits where the fused and
//! the separate kernels use the same splits.

use device::{DeviceDriver, bf16};
use kernels::gpu::GpuBackend;
use kernels::{
    AttentionKeyRange, AttentionMetadata, BatchRowLengths, BatchUpperBounds, KvCacheScales,
    KvLayout, KvTileOrder, PagedAttention, PagedAttentionArgs, QkNormRopeArgs, QkNormRopeKvWrite,
    RopeAttention, RopeCosSin,
};

use crate::support::{DeviceArray, GpuTestFloat, RandomNumbers, S, devices, error, tolerance};

/// Number of query heads, number of KV heads, head dimension, and tokens per block.
type RopeHeadShape = (usize, usize, usize, usize);

const LAYERS: usize = 2;
const SCALE: f32 = 0.11;
/// Maximum context length at which each warp has at most one tile in the fused and in the separate kernels,
/// so that both merge partial results in the same order.
const WHOLE: usize = 64;

/// Rows of one token each with their context lengths, and their inputs and KV pool.
struct RopeAttentionCase<T> {
    heads: RopeHeadShape,
    contexts: Vec<usize>,
    layout: KvLayout,
    qkv: Vec<T>,
    pool: Vec<T>,
    norms: Option<[Vec<T>; 2]>,
    angles: Vec<f32>,
    tables: Vec<i32>,
    width: usize,
    slots: Vec<i64>,
    keys: AttentionKeyRange,
    /// Sinks of the query heads; `None` = no sinks.
    sinks: Option<Vec<f32>>,
}

impl<T: GpuTestFloat> RopeAttentionCase<T> {
    fn new(heads: RopeHeadShape, contexts: &[usize], normed: bool) -> Self {
        let (query_heads, kv_heads, head_dim, block_tokens) = heads;
        let mut numbers = RandomNumbers::fresh((query_heads + contexts.len()) as u64);
        let width = contexts.iter().map(|c| c.div_ceil(block_tokens)).max().unwrap() + 1;
        let blocks = contexts.len() * width;
        let (layers, dtype, order) = (LAYERS, T::DTYPE, KvTileOrder::RowMajor);
        let layout = KvLayout { layers, blocks, block_tokens, kv_heads, head_dim, dtype, order };
        let mut tables: Vec<i32> = (0..blocks as i32).collect();
        for i in (1..blocks).rev() {
            tables.swap(i, numbers.below(i + 1));
        }
        let mut pool = numbers.reals::<T>(layout.bytes() / dtype.bytes());
        let mut slots = Vec::new();
        for (row, &context) in contexts.iter().enumerate() {
            let Some(position) = context.checked_sub(1) else {
                slots.push(-1);
                continue;
            };
            let block = tables[row * width + position / block_tokens] as usize;
            let t = position % block_tokens;
            slots.push((block * block_tokens + t) as i64);
            // The position that the kernel writes and later positions contain NaN, as a previous request may
            // leave it, and must not be read.
            for (head, d) in (0..kv_heads).flat_map(|h| (0..head_dim).map(move |d| (h, d))) {
                for t in t..block_tokens {
                    pool[layout.key_tile(1, block, head) + layout.key(t, d)] = T::of(f32::NAN);
                    pool[layout.value_tile(1, block, head) + layout.value(t, d)] = T::of(f32::NAN);
                }
            }
        }
        let columns = (query_heads + 2 * kv_heads) * head_dim;
        let positions = contexts.iter().max().unwrap() + 1;
        let mut norm = || numbers.reals::<T>(head_dim);
        let norms = normed.then(|| [norm(), norm()]);
        Self {
            heads,
            contexts: contexts.to_vec(),
            layout,
            qkv: numbers.reals(contexts.len() * columns),
            pool,
            norms,
            angles: (0..positions * head_dim / 2).map(|_| 3.0 * numbers.float()).collect(),
            tables,
            width,
            slots,
            keys: AttentionKeyRange::default(),
            sinks: None,
        }
    }

    /// Limits the keys to a window, with sinks, and frees the blocks before the window of each row.
    fn with_window(mut self, window: usize) -> Self {
        self.keys.window = Some(window);
        self.sinks = Some((0..self.heads.0).map(|head| head as f32 - 2.0).collect());
        for (row, context) in self.contexts.iter().enumerate() {
            let unused = self.keys.first_key(context.saturating_sub(1)) / self.layout.block_tokens;
            self.tables[row * self.width..][..unused].fill(i32::MAX);
        }
        self
    }

    /// Returns the case with row `r` only; it keeps the block tables of all rows.
    fn single_row(&self, r: usize) -> Self {
        let columns = self.qkv.len() / self.contexts.len();
        Self {
            heads: self.heads,
            contexts: vec![self.contexts[r]],
            layout: self.layout,
            qkv: self.qkv[r * columns..(r + 1) * columns].to_vec(),
            pool: self.pool.clone(),
            norms: self.norms.clone(),
            angles: self.angles.clone(),
            tables: self.tables[r * self.width..(r + 1) * self.width].to_vec(),
            width: self.width,
            slots: vec![self.slots[r]],
            keys: self.keys,
            sinks: self.sinks.clone(),
        }
    }

    /// Returns the context length of the longest row.
    fn longest(&self) -> usize {
        *self.contexts.iter().max().unwrap()
    }

    /// Returns the outputs and the pool after one fused launch for contexts up to `fused_limit`, or after two
    /// separate launches if `fused_limit` is `None`.
    fn run(&self, device: &GpuBackend, fused_limit: Option<usize>) -> (Vec<T>, Vec<T>) {
        let (heads, kv_heads, dim, _) = self.heads;
        let rows = self.contexts.len();
        let mut pool = DeviceArray::of(device, &self.pool, 1, self.pool.len());
        let qkv = DeviceArray::of(device, &self.qkv, rows, (heads + 2 * kv_heads) * dim);
        let norms = self.norms.as_ref().map(|n| n.each_ref().map(|n| DeviceArray::row(device, n)));
        let positions = self.angles.len() / (dim / 2);
        let table = |f: fn(f32) -> f32| self.angles.iter().map(|a| f(*a)).collect::<Vec<_>>();
        let cos = DeviceArray::of(device, &table(f32::cos), positions, dim / 2);
        let sin = DeviceArray::of(device, &table(f32::sin), positions, dim / 2);
        let position: Vec<i32> = self.contexts.iter().map(|c| c.saturating_sub(1) as i32).collect();
        let position = DeviceArray::row(device, &position);
        let slots = DeviceArray::row(device, &self.slots);
        let cu_q = DeviceArray::row(device, &(0..=rows as i32).collect::<Vec<_>>());
        let contexts: Vec<i32> = self.contexts.iter().map(|c| *c as i32).collect();
        let longest_context = fused_limit.unwrap_or(self.longest());
        let contexts = DeviceArray::row(device, &contexts);
        let tables = DeviceArray::of(device, &self.tables, rows, self.width);
        let qk = QkNormRopeArgs {
            qkv: qkv.mat(),
            q_norm: norms.as_ref().map(|n| n[0].mat()),
            k_norm: norms.as_ref().map(|n| n[1].mat()),
            eps: 1e-6,
            rope: RopeCosSin { cos: cos.mat(), sin: sin.mat() },
            positions: position.mat(),
            slots: slots.mat(),
            heads,
            layer: 1,
            kv_scales: KvCacheScales::UNIT,
        };
        let batch = AttentionMetadata {
            cu_q: cu_q.mat(),
            context_lens: contexts.mat(),
            block_tables: tables.mat(),
            table_rows: None,
            bounds: BatchUpperBounds::of(
                std::iter::repeat_n(BatchRowLengths { tokens: 1, context: longest_context }, rows),
                1,
            ),
        };
        let sinks = self.sinks.as_ref().map(|sinks| DeviceArray::row(device, sinks));
        let sinks = sinks.as_ref().map(DeviceArray::mat);
        let mut o = DeviceArray::<T>::poisoned(device, rows, heads * dim);
        let kv = (&mut pool.buffer, &self.layout);
        if fused_limit.is_some() {
            device
                .launch(
                    &S,
                    RopeAttention {
                        o: o.mat_mut(),
                        pool: kv.0,
                        layout: kv.1,
                        qk: &qk,
                        rows: &batch,
                        scale: SCALE,
                        keys: self.keys,
                        sinks,
                    },
                )
                .unwrap();
        } else {
            let mut q = DeviceArray::<T>::poisoned(device, rows, heads * dim);
            device
                .launch(
                    &S,
                    QkNormRopeKvWrite { q: q.mat_mut(), pool: kv.0, layout: kv.1, args: &qk },
                )
                .unwrap();
            let args = PagedAttentionArgs {
                q: q.mat(),
                rows: batch,
                heads,
                layer: 1,
                scale: SCALE,
                keys: self.keys,
                sinks,
            };
            device
                .launch(
                    &S,
                    PagedAttention {
                        o: o.mat_mut(),
                        pool: &pool.buffer,
                        layout: &self.layout,
                        args: &args,
                    },
                )
                .unwrap();
        }
        device.synchronize(&S).unwrap();
        (o.read(device), pool.read(device))
    }
}

fn bits<T: GpuTestFloat>(values: &[T]) -> Vec<u8> {
    values.iter().flat_map(|v| v.bytes()).collect()
}

pub(crate) fn check<T: GpuTestFloat>(
    device: &GpuBackend,
    heads: RopeHeadShape,
    contexts: &[usize],
    normed: bool,
) {
    check_case(device, &RopeAttentionCase::<T>::new(heads, contexts, normed));
}

fn check_case<T: GpuTestFloat>(device: &GpuBackend, case: &RopeAttentionCase<T>) {
    let (heads, contexts) = (case.heads, &case.contexts);
    let what = format!("{} {heads:?} {contexts:?}", device.name());
    let (o_separate, pool_separate) = case.run(device, None);
    // Tests the kernel for short contexts and the kernel for contexts of any length.
    for longest in [case.longest(), BatchUpperBounds::SHORT_CONTEXT + 1] {
        let what = format!("{what} of up to {longest}");
        let (o, pool) = case.run(device, Some(longest));
        assert!(o.iter().all(|x| x.value().is_finite()), "{what}");
        assert!(bits(&pool) == bits(&pool_separate), "{what}: pool");
        for (r, &context) in contexts.iter().enumerate() {
            let (single_row, _) = case.single_row(r).run(device, Some(longest));
            let row = r * single_row.len()..(r + 1) * single_row.len();
            assert!(bits(&single_row) == bits(&o[row.clone()]), "{what}: single row {r}");
            let (fused, separate) = (&o[row.clone()], &o_separate[row]);
            assert!(context > WHOLE || bits(fused) == bits(separate), "{what}: row {r}, fused");
            let off = error(fused, separate);
            assert!(off < tolerance::<T>(), "{what}: row {r}, fused: error {off}");
        }
    }
}

#[test]
fn fused_rope_attention_matches_two_launches() {
    // There is no fused kernel for warps of 64 lanes.
    for device in devices().into_iter().filter(|d| d.warp_size() == 32) {
        // The token that is written is the first or last one of a tile, of a KV block, or of a split of the
        // keys; one row is padding.
        check::<bf16>(&device, (4, 2, 128, 16), &[1, 16, 0, 17, 257], true);
        check::<bf16>(&device, (8, 1, 64, 32), &[64, 256, 128], true);
        check::<bf16>(&device, (2, 2, 128, 48), &[50], false);
        check::<bf16>(&device, (14, 2, 64, 16), &[33, 12], false);
        check::<bf16>(&device, (4, 1, 128, 16), &[300], true);
        // Contexts with several tiles of keys per warp, and more tiles than the ring buffer has stages.
        check::<bf16>(&device, (2, 1, 64, 16), &[530, BatchUpperBounds::SHORT_CONTEXT], true);
        check::<bf16>(&device, (4, 1, 64, 32), &[1100], true);
    }
}

#[test]
fn fused_rope_attention_has_windows_and_sinks() {
    for device in devices().into_iter().filter(|d| d.warp_size() == 32) {
        for (heads, contexts, window) in [
            ((8, 1, 64, 64), &[1, 128, 129, 0, 300][..], 128),
            ((4, 2, 128, 16), &[40, 16, 33, 1200], 20),
        ] {
            let case = RopeAttentionCase::<bf16>::new(heads, contexts, window == 20);
            check_case(&device, &case.with_window(window));
        }
    }
}
