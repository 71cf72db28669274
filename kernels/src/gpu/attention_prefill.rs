//! Launches of `attention_prefill`: prefill flash attention over query tiles, for rows with any number of queries.

use device::gpu::{KernelDefine, KernelLaunch, KernelSource, TensorMap};
use device::{DeviceError, DeviceStream, MatMut};

use super::attention::{AttentionLaunchArgs, TILE};
use crate::gpu::GpuBackend;

static PREFILL: KernelSource = kernel_source!("attention_prefill/attention_prefill.hip");

/// Number of threads per block of the prefill kernel without WGMMA.
const THREADS: u32 = 256;
/// Maximum head size for which a warp of 32 lanes of the prefill kernel without WGMMA has all channels of its queries;
/// two warps share the channels of larger heads. Must match `CHANNEL_WARPS` in attention/warp.h.
const WARP_HEAD: usize = 256;
/// Number of threads per block of the WGMMA prefill kernel: one producer and two consumer warpgroups.
const WARPGROUP_THREADS: u32 = 384;
/// Alignment of WGMMA operands in shared memory, in bytes.
const PANEL_ALIGNMENT: usize = 1024;
/// Number of pipeline stages of keys, and of values, of the WGMMA prefill kernel.
const WARPGROUP_STAGES: usize = 2;

/// Grid and shared memory of a prefill launch, and the define that selects the kernel variant.
struct PrefillGrid {
    define: KernelDefine,
    blocks: [u32; 3],
    threads: u32,
    shared_bytes: u32,
}

impl GpuBackend {
    /// Launches prefill attention for the rows from index `first` on, which may have any number of queries.
    pub(super) fn attend_prefills(
        &self,
        s: &DeviceStream,
        o: &mut MatMut<'_>,
        shape: &AttentionLaunchArgs<'_>,
        first: usize,
    ) -> Result<(), DeviceError> {
        let rows = shape.args.rows.len() - first;
        if rows == 0 {
            return Ok(());
        }
        let work_counter = self.counters(s, 1)?;
        let layout = shape.layout;
        let tile = WarpgroupTile::new(layout.head_dim, shape.fp8() == 1);
        let tile = tile.filter(|_| self.has_wgmma_tma());
        let grid = match &tile {
            Some(tile) => self.warpgroup_grid(o.rows(), rows, tile, shape),
            None => self.warp_grid(rows, shape),
        };
        let map = if tile.is_some() && layout.dtype == self.half_dtype() {
            let pool_rows = layout.blocks * layout.kv_heads * 2 * layout.block_tokens;
            self.tensor_map(shape.pool, pool_rows, layout.head_dim)?
        } else {
            TensorMap::NONE
        };
        let mut defines = shape.defines();
        defines.push(grid.define);
        let kernel = self.kernel(&PREFILL, "attention_prefill", &defines)?;
        let o_stride = o.stride() as u32;
        let launch = KernelLaunch::new(kernel, grid.blocks, grid.threads, grid.shared_bytes).out(o);
        let launch =
            launch.arg_ptr(work_counter).arg(shape.args.q).arg_ptr(shape.pool).arg_words(&map.0);
        let launch = shape.rows(launch).u32(first as u32).u32(rows as u32);
        let launch = launch.u32(shape.head_groups() as u32).u32(shape.table_width());
        let launch = shape.key_range(shape.strides(launch, o_stride));
        // SAFETY: `check` compared the shapes; the caller guarantees context lengths and block tables.
        unsafe { launch.overlaps_predecessor().launch(self, s) }
    }

    /// Whether the GPU and its driver support WGMMA and TMA (`dev/wgmma.h`, `dev/tensor_map.h`).
    pub(super) fn has_wgmma_tma(&self) -> bool {
        let maps = self.runtime().driver.tensor_map_encode.is_some() || self.arch() == "emulated";
        maps && self.has_warpgroups()
    }

    /// Returns the grid of the WGMMA prefill kernel: persistent blocks, at most one per SM, for the query
    /// tiles of `tokens` tokens in `rows` rows.
    fn warpgroup_grid(
        &self,
        tokens: usize,
        rows: usize,
        tile: &WarpgroupTile,
        shape: &AttentionLaunchArgs<'_>,
    ) -> PrefillGrid {
        let tiles = tokens * shape.partition.heads / tile.pairs + rows;
        let blocks = (tiles * shape.head_groups()).min(self.multiprocessors() as usize) as u32;
        let shared_bytes = tile.shared_bytes() as u32;
        let blocks = [blocks, 1, 1];
        PrefillGrid { define: ("WGMMA", 1), blocks, threads: WARPGROUP_THREADS, shared_bytes }
    }

    /// Returns the grid of the prefill kernel without WGMMA: a block processes 16 (query, head) pairs per
    /// warp. Every row gets as many blocks as the longest row needs.
    fn warp_grid(&self, rows: usize, shape: &AttentionLaunchArgs<'_>) -> PrefillGrid {
        let (dim, element_bytes) = (shape.layout.head_dim, shape.layout.dtype.bytes());
        let channel_warps = if self.warp_size() == 32 && dim > WARP_HEAD { 2 } else { 1 };
        let warps = (THREADS / self.warp_size()) as usize / channel_warps;
        let pairs = shape.args.rows.bounds.max_query_len * shape.partition.heads;
        let tiles = pairs.div_ceil(warps * TILE);
        let padding_bytes = self.launch_limits().kv_padding_bytes(dim, element_bytes);
        let row_bytes = 2 * dim * element_bytes + padding_bytes; // A key and its value.
        let stage_bytes = (step_keys(dim, self.warp_size()) * row_bytes) as u32;
        let stages =
            if self.warp_size() == 32 && 2 * stage_bytes <= self.shared_bytes() { 2 } else { 1 };
        let blocks = [tiles as u32, shape.head_groups() as u32, rows as u32];
        let shared_bytes = stages * stage_bytes;
        PrefillGrid { define: ("STAGES", stages), blocks, threads: THREADS, shared_bytes }
    }
}

/// Sizes of the WGMMA prefill kernel for a head size; must match `TILE_PAIRS` and `TILE` in tile_schedule.h.
#[derive(Debug, Clone, Copy)]
struct WarpgroupTile {
    head_dim: usize,
    is_fp8: bool,
    /// (Query, head) pairs per tile.
    pairs: usize,
    /// Keys per step.
    step_keys: usize,
}

impl WarpgroupTile {
    /// Returns the sizes for heads of `head_dim` channels, and for an fp8 KV cache or one of the 16-bit type; `None` if
    /// the operands would exceed the shared memory of a block.
    fn new(head_dim: usize, is_fp8: bool) -> Option<Self> {
        let (pairs, step_keys) = match head_dim {
            ..=128 => (128, 128),
            129..=256 => (128, 64),
            _ if is_fp8 => return None,
            _ => (64, 32),
        };
        Some(Self { head_dim, is_fp8, pairs, step_keys })
    }

    /// Returns the shared memory of a block in bytes; must match `GROUPS_SHARED` in warpgroups.h.
    fn shared_bytes(&self) -> usize {
        let &Self { head_dim, is_fp8, pairs, step_keys } = self;
        let is_small = head_dim <= 128;
        let query_stages = if is_small && !is_fp8 { 2 } else { 1 };
        let output_stages = usize::from(is_small);
        let rows = pairs * (query_stages + output_stages) + 2 * WARPGROUP_STAGES * step_keys;
        // Keys and values in fp8 are copied to a buffer before their conversion.
        let fp8_rows = if is_fp8 { 2 * step_keys } else { 0 };
        // Two warpgroups that divide the channels add their partial scores.
        let partial_score_bytes = if head_dim > 256 { 4 * pairs * step_keys * 4 } else { 0 };
        rows * head_dim * 2 + fp8_rows * head_dim + partial_score_bytes + PANEL_ALIGNMENT
    }
}

/// Returns the number of keys per copy step of the prefill kernel without WGMMA; must match `STEP` in warps.h.
fn step_keys(head_dim: usize, warp_size: u32) -> usize {
    match head_dim {
        ..=128 => 64,
        129..=256 => 32,
        _ if warp_size == 32 => 32,
        _ => 16,
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    /// Shared memory of a block on an H200, without the static arrays of the kernel.
    const H200_BYTES: usize = 232_448 - 1536;

    #[test]
    fn warpgroup_blocks_fit_into_the_shared_memory_of_an_h200() {
        let bytes = |dim, fp8| WarpgroupTile::new(dim, fp8).map(|tile| tile.shared_bytes());
        assert_eq!(bytes(128, false), Some(7 * 128 * 128 * 2 + 1024));
        assert_eq!(bytes(128, true), bytes(128, false));
        assert_eq!(bytes(512, true), None);
        for (head_dim, is_fp8) in [(64, true), (256, false), (256, true), (512, false)] {
            assert!(bytes(head_dim, is_fp8).unwrap() <= H200_BYTES, "{head_dim}");
        }
    }
}
