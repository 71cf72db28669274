//! Paged attention on the CPU with online softmax (flash attention), for rows of any query length.
//!
//! Keys are read in tiles of 64 positions that begin at multiples of 64, and partial results are merged at
//! tile boundaries only. The causal mask sets the probability of keys after the position of a query to zero,
//! so these keys add nothing. A sliding window does the same for the keys before it. Therefore the result of a query never depends on its prefill chunk or on other
//! rows. Scores, maxima, sums and outputs are f32; probabilities are rounded to the activation type before
//! they are multiplied by the values, and summed after the rounding.
//!
//! A query tile has up to 12 (token, query head) pairs of one KV head (GQA), which share every loaded key.
//! Threads draw tiles from an atomic counter. Tiles are processed in reverse order: the last rows of a step
//! first, and within a row the last queries first, because they attend to the most keys. Starting with the
//! longest tiles lets all threads finish at about the same time.

mod head_kv_blocks;
mod query_tile;
mod softmax;
#[cfg(target_arch = "x86_64")]
mod softmax_x86;

use std::sync::atomic::{AtomicUsize, Ordering};

use device::{DType, DeviceError, FloatElement};

use self::query_tile::{QueryTile, TileScratch};
use super::backend::for_float;
use super::matmul_tile::{TILE_ROWS, TileKernels};
use super::shared_rows::SharedRows;
use crate::cpu::CpuBackend;
use crate::{CpuKernel, KvLayout, PagedAttention, PagedAttentionArgs};

const KERNEL: &str = "paged_attention";
/// Number of positions per key tile.
const KEY_TILE: usize = 64;
/// Minimum number of multiplications for multi-threading: below it, waking the other threads costs more time
/// than they save.
const MIN_MULTIPLICATIONS: usize = 1 << 17;

/// Arguments of one launch, shared by all of its query tiles.
struct CpuAttentionArgs<'a, T> {
    args: &'a PagedAttentionArgs<'a>,
    /// Layout of the KV pool, with `dtype` replaced by the activation type, to which fp8 keys and values are
    /// converted.
    layout: KvLayout,
    /// Whether keys and values are stored in fp8.
    fp8: bool,
    pool: *const u8,
    out: SharedRows<T>,
    tile_kernels: TileKernels,
    isa: device::CpuIsa,
    /// Number of query heads per KV head.
    group: usize,
    /// Prefix sums of the number of query tiles per KV head: entry `r` is the number of tiles of the rows
    /// before row `r`; the last entry is the number of tiles of all rows.
    tiles_before: Vec<usize>,
}

// SAFETY: the pool is only read while it is borrowed; tiles write disjoint parts of `out`.
unsafe impl<T> Sync for CpuAttentionArgs<'_, T> {}

impl CpuBackend {
    fn run_tiles<T: FloatElement>(&self, call: &CpuAttentionArgs<'_, T>) {
        let tiles = call.layout.kv_heads * call.tiles_per_head();
        let next = AtomicUsize::new(0);
        let worker = |_| {
            let mut scratch = TileScratch::new(&call.layout);
            loop {
                let index = next.fetch_add(1, Ordering::Relaxed);
                if index >= tiles {
                    return;
                }
                call.tile(index).run(call, &mut scratch);
            }
        };
        if call.multiplications() < MIN_MULTIPLICATIONS {
            worker(0);
        } else {
            self.threads().run(&worker);
        }
    }
}

impl CpuKernel for PagedAttention<'_> {
    fn run(self, cpu: &CpuBackend) -> Result<(), DeviceError> {
        self.check()?;
        let Self { mut o, pool: kv, layout, args } = self;
        args.rows.check(args.q.rows(), layout.blocks, layout.block_tokens, args.keys)?;
        let group = args.heads / layout.kv_heads;
        let fp8 = layout.dtype == DType::F8E4M3;
        let layout = KvLayout { dtype: args.q.dtype(), ..*layout };
        for row in (0..args.rows.len()).filter(|&row| args.rows.is_padding(row)) {
            let (from, to) = args.rows.tokens(row);
            for_float!(KERNEL, layout.dtype, T => {
                (from..to).for_each(|t| o.row_mut::<T>(t).fill(T::default()));
            });
        }
        for_float!(KERNEL, layout.dtype, T => cpu.run_tiles(&CpuAttentionArgs::<T> {
            args,
            layout,
            fp8,
            pool: kv.as_ptr(),
            out: SharedRows::new(&mut o),
            tile_kernels: TileKernels::new(cpu.isa(), layout.dtype),
            isa: cpu.isa(),
            group,
            tiles_before: tiles_before(args, group),
        }));
        Ok(())
    }
}

impl<T> CpuAttentionArgs<'_, T> {
    fn tiles_per_head(&self) -> usize {
        self.tiles_before.last().copied().unwrap_or(0)
    }

    /// Returns query tile `index` of the launch. The tiles of a KV head are consecutive, so that threads
    /// share its keys in the cache; within a KV head, tiles are in reverse order, the last queries first.
    fn tile(&self, index: usize) -> QueryTile {
        let per_head = self.tiles_per_head();
        let (head, tile) = (index / per_head, per_head - 1 - index % per_head);
        let row = self.tiles_before.partition_point(|&before| before <= tile) - 1;
        let (from, to) = self.args.rows.tokens(row);
        let pairs = (to - from) * self.group;
        let first = (tile - self.tiles_before[row]) * TILE_ROWS;
        QueryTile { row, head, first, pairs: TILE_ROWS.min(pairs - first) }
    }

    /// Returns the number of multiplications for the attention scores of the launch, at most; below
    /// `MIN_MULTIPLICATIONS` the launch is single-threaded.
    fn multiplications(&self) -> usize {
        let rows = 0..self.args.rows.len();
        let keys: usize = rows
            .map(|r| {
                let (from, to) = self.args.rows.tokens(r);
                let window = self.args.keys.window.unwrap_or(usize::MAX);
                (to - from) * self.args.rows.context(r).min(window)
            })
            .sum();
        keys * self.args.heads * self.layout.head_dim
    }
}

fn tiles_before(args: &PagedAttentionArgs<'_>, group: usize) -> Vec<usize> {
    let mut sum = 0;
    let rows = (0..args.rows.len()).map(|r| {
        let (from, to) = args.rows.tokens(r);
        let query_tokens = if args.rows.is_padding(r) { 0 } else { to - from };
        sum += (query_tokens * group).div_ceil(TILE_ROWS);
        sum
    });
    std::iter::once(0).chain(rows).collect()
}
