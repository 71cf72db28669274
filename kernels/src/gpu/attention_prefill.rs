//! Launches of `attention_prefill`: prefill flash attention over query tiles, for rows with any number of queries.

use device::gpu::{KernelDefine, KernelLaunch, KernelSource, TensorMap};
use device::{DeviceError, DeviceStream, MatMut};

use super::attention::{AttentionLaunchArgs, TILE};
use crate::gpu::GpuBackend;

static PREFILL: KernelSource = kernel_source!("attention_prefill/attention_prefill.hip");

/// Number of threads per block of the prefill kernel without WGMMA.
const THREADS: u32 = 256;
/// Number of keys per copy step of the prefill kernel without WGMMA, for heads of up to `WARPGROUP_HEAD` channels
/// and for larger heads; must match `STEP` in warps.h.
const STEP_KEYS: usize = 64;
const LARGE_HEAD_STEP_KEYS: usize = 32;
/// Number of threads per block of the WGMMA prefill kernel: one producer and two consumer warpgroups.
const WARPGROUP_THREADS: u32 = 384;
/// Number of queries per tile and of keys per step of the WGMMA prefill kernel.
const WARPGROUP_TILE: usize = 128;
/// Number of 16-bit matrices of `WARPGROUP_TILE` rows in the shared memory of the WGMMA prefill kernel: one
/// of outputs, two of queries, two of keys and two of values. With an fp8 KV cache there is one of queries,
/// and the freed bytes stage fp8 keys and values before conversion.
const WARPGROUP_OPERANDS: usize = 7;
/// Alignment of WGMMA operands in shared memory, in bytes.
const PANEL_ALIGNMENT: usize = 1024;
/// Maximum head size of the WGMMA prefill kernel, limited by shared memory.
const WARPGROUP_HEAD: usize = 128;

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
        let uses_warpgroups = self.has_wgmma_tma() && layout.head_dim <= WARPGROUP_HEAD;
        let grid = if uses_warpgroups {
            self.warpgroup_grid(o.rows(), rows, shape)
        } else {
            self.warp_grid(rows, shape)
        };
        let map = if uses_warpgroups && layout.dtype == self.half_dtype() {
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
        shape: &AttentionLaunchArgs<'_>,
    ) -> PrefillGrid {
        let dim = shape.layout.head_dim;
        let tiles = tokens * shape.partition.heads / WARPGROUP_TILE + rows;
        let blocks = (tiles * shape.head_groups()).min(self.multiprocessors() as usize) as u32;
        let shared_bytes = (WARPGROUP_OPERANDS * WARPGROUP_TILE * dim * 2 + PANEL_ALIGNMENT) as u32;
        let blocks = [blocks, 1, 1];
        PrefillGrid { define: ("WGMMA", 1), blocks, threads: WARPGROUP_THREADS, shared_bytes }
    }

    /// Returns the grid of the prefill kernel without WGMMA: a block processes 16 (query, head) pairs per
    /// warp. Every row gets as many blocks as the longest row needs.
    fn warp_grid(&self, rows: usize, shape: &AttentionLaunchArgs<'_>) -> PrefillGrid {
        let warps = (THREADS / self.warp_size()) as usize;
        let pairs = shape.args.rows.bounds.max_query_len * shape.partition.heads;
        let tiles = pairs.div_ceil(warps * TILE);
        let (dim, element_bytes) = (shape.layout.head_dim, shape.layout.dtype.bytes());
        let padding_bytes = self.launch_limits().kv_padding_bytes(dim, element_bytes);
        let row_bytes = 2 * dim * element_bytes + padding_bytes; // A key and its value.
        let is_large = dim > WARPGROUP_HEAD;
        let step_keys = if is_large { LARGE_HEAD_STEP_KEYS } else { STEP_KEYS };
        let stage_bytes = (step_keys * row_bytes) as u32;
        let stages =
            if self.warp_size() == 32 && 2 * stage_bytes <= self.shared_bytes() { 2 } else { 1 };
        let blocks = [tiles as u32, shape.head_groups() as u32, rows as u32];
        let shared_bytes = stages * stage_bytes;
        PrefillGrid { define: ("STAGES", stages), blocks, threads: THREADS, shared_bytes }
    }
}
