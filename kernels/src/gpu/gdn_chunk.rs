//! GPU launches of the gated delta rule in chunks, for rows of many tokens.

use device::gpu::{KernelDefine, KernelLaunch, KernelSource};
use device::{DeviceError, DeviceStream};

use super::gemm::has_16_byte_rows;
use super::recurrent::{row_args, state_ptr};
use crate::gpu::GpuBackend;
use crate::{GatedDeltaRule, RecurrentStateLayout};

pub(super) const RECURRENT_TOKENS: usize = GatedDeltaRule::RECURRENT_TOKENS;

static GDN_CHUNK: KernelSource = kernel_source!("gdn_chunk/gdn_chunk.hip");

/// Number of tokens per chunk.
const CHUNK: usize = 64;
/// Number of tiles of 16 x 16 tokens on and below the diagonal of a chunk.
const PAIRS: usize = 10;
/// Bytes of a tile of 16 x 16 values of 16 bits.
const TILE_BYTES: usize = 512;
/// Bytes of the factors of a chunk; `KeyFactors` and `QueryFactors` of gdn_chunk/chunk.h.
const FACTOR_BYTES: usize = (3 * CHUNK + 4) * 4;
/// Bytes of the record of a chunk and value head; `ChunkRecord` of gdn_chunk/chunk.h.
const RECORD_BYTES: usize = 2 * PAIRS * TILE_BYTES + FACTOR_BYTES;
/// Number of warps per block of the kernel that prepares the chunks.
const PREPARE_WARPS: u32 = 4;
/// Maximum number of rows that are computed at the same time; later rows follow in the same blocks.
const MAX_CONCURRENT_ROWS: usize = 8;

/// Properties of a GPU that the plan depends on.
#[derive(Debug, Clone, Copy)]
struct ChunkGpuLimits {
    warp_size: u32,
    multiprocessors: usize,
    /// Maximum shared memory of a block in bytes.
    shared_bytes: usize,
}

impl ChunkGpuLimits {
    fn of(gpu: &GpuBackend) -> Self {
        Self {
            warp_size: gpu.warp_size(),
            multiprocessors: gpu.multiprocessors() as usize,
            shared_bytes: gpu.shared_bytes() as usize,
        }
    }
}

/// Number of warps of a block that update a state, with 16 value columns each.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
struct ColumnWarps(usize);

impl ColumnWarps {
    fn columns(self) -> usize {
        16 * self.0
    }

    /// Shared memory of a block in bytes; `WalkShared` of gdn_chunk/walk.h. With warps of 64 lanes, tiles are not copied, and
    /// there is one stage.
    fn shared_bytes(self, warp_size: u32, key_dim: usize) -> usize {
        let (stages, tiles) = if warp_size == 64 { (1, 0) } else { (2, 2 * PAIRS) };
        let row_bytes = 2 * (key_dim + 8);
        let rows = CHUNK * (2 * row_bytes + 2 * (self.columns() + 8));
        let exchange = 2 * self.0 * (key_dim + CHUNK) / 16 * TILE_BYTES;
        stages * (rows + tiles * TILE_BYTES + FACTOR_BYTES) + exchange
    }

    /// Whether the kernel of this width takes states of the shape `layout`.
    fn fits(self, gpu: ChunkGpuLimits, layout: &RecurrentStateLayout) -> bool {
        self.shared_bytes(gpu.warp_size, layout.key_dim) <= gpu.shared_bytes
            && layout.value_dim.is_multiple_of(self.columns())
    }
}

/// Grid and block width of the kernel that updates the states.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
struct ChunkPlan {
    /// Number of rows that are computed at the same time.
    concurrent_rows: usize,
    warps: ColumnWarps,
}

impl ChunkPlan {
    /// Returns the plan for `chunked_rows` rows of more than [`RECURRENT_TOKENS`] tokens: blocks of two warps if the blocks of
    /// all concurrent rows are resident at once, one per SM; otherwise blocks of four, if they fit. `None` = there are no such
    /// rows, or no kernel takes the states.
    fn choose(
        gpu: ChunkGpuLimits,
        layout: &RecurrentStateLayout,
        chunked_rows: usize,
    ) -> Option<Self> {
        let (narrow, wide) = (ColumnWarps(2), ColumnWarps(4));
        let concurrent_rows = chunked_rows.min(MAX_CONCURRENT_ROWS);
        let blocks = layout.value_channels() / narrow.columns() * concurrent_rows;
        let prefers_wide = blocks > gpu.multiprocessors && wide.fits(gpu, layout);
        let warps = if prefers_wide { wide } else { narrow };
        (concurrent_rows > 0 && warps.fits(gpu, layout)).then_some(Self { concurrent_rows, warps })
    }
}

/// The gated delta rule of the rows of more than [`RECURRENT_TOKENS`] tokens.
pub(super) struct ChunkedRule {
    /// Upper bound of the number of records per value head.
    records: usize,
    plan: ChunkPlan,
}

impl ChunkedRule {
    /// Returns `None` if no row has more than [`RECURRENT_TOKENS`] tokens, or no kernel takes the shapes.
    pub(super) fn choose(gpu: &GpuBackend, op: &GatedDeltaRule<'_>) -> Option<Self> {
        let takes_shapes = op.qkv.dtype() == gpu.half_dtype()
            && matches!(op.layout.key_dim, 64 | 128)
            && has_16_byte_rows(op.qkv)
            && has_16_byte_rows(op.o.as_ref());
        if !takes_shapes || op.rows.max_row_len <= RECURRENT_TOKENS {
            return None;
        }
        let plan = ChunkPlan::choose(ChunkGpuLimits::of(gpu), op.layout, op.rows.chunked_rows)?;
        Some(Self { records: op.o.rows() / CHUNK + op.rows.rows(), plan })
    }

    pub(super) fn launch(
        &self,
        gpu: &GpuBackend,
        s: &DeviceStream,
        op: GatedDeltaRule<'_>,
    ) -> Result<(), DeviceError> {
        let heads = op.layout.value_heads;
        let records = gpu.scratch(s, self.records * heads * RECORD_BYTES)?;
        self.prepare(gpu, s, &op, records)?;
        self.walk(gpu, s, op, records)
    }

    fn defines(&self, layout: &RecurrentStateLayout) -> [KernelDefine; 2] {
        [("KEY_DIM", layout.key_dim as u32), ("COLUMN_WARPS", self.plan.warps.0 as u32)]
    }

    fn prepare(
        &self,
        gpu: &GpuBackend,
        s: &DeviceStream,
        op: &GatedDeltaRule<'_>,
        records: *mut u8,
    ) -> Result<(), DeviceError> {
        let kernel = gpu.kernel(&GDN_CHUNK, "gdn_chunk_prepare", &self.defines(op.layout))?;
        let grid = [self.records as u32, op.layout.value_heads as u32, 1];
        let launch = KernelLaunch::new(kernel, grid, PREPARE_WARPS * gpu.warp_size(), 0)
            .overlaps_predecessor()
            .arg_ptr(records)
            .arg(op.qkv)
            .arg(op.beta)
            .arg(op.decay)
            .arg(op.a_log)
            .arg(op.dt_bias)
            .arg(op.rows.cu_q)
            .u32(op.rows.rows() as u32)
            .u32(op.layout.key_heads as u32)
            .u32(op.layout.value_heads as u32)
            .u32(op.qkv.stride() as u32)
            .u32(op.beta.stride() as u32)
            .u32(op.decay.stride() as u32);
        // SAFETY: the shapes were checked; there is a record for each chunk and value head; the arguments match the kernel
        // parameters.
        unsafe { launch.launch(gpu, s) }
    }

    fn walk(
        &self,
        gpu: &GpuBackend,
        s: &DeviceStream,
        op: GatedDeltaRule<'_>,
        records: *mut u8,
    ) -> Result<(), DeviceError> {
        let GatedDeltaRule { mut o, qkv, pool, layout, layer, rows, .. } = op;
        let kernel = gpu.kernel(&GDN_CHUNK, "gdn_chunk_walk", &self.defines(layout))?;
        let ChunkPlan { concurrent_rows, warps } = self.plan;
        let blocks_per_row = layout.value_channels() / warps.columns();
        let grid = [blocks_per_row as u32, concurrent_rows as u32, 1];
        let threads = 2 * warps.0 as u32 * gpu.warp_size();
        let shared_bytes = warps.shared_bytes(gpu.warp_size(), layout.key_dim) as u32;
        let launch = KernelLaunch::new(kernel, grid, threads, shared_bytes)
            .overlaps_predecessor()
            .out(&mut o)
            .arg_ptr(records)
            .arg(qkv)
            .arg_ptr(state_ptr(pool, layout, layer, 0));
        let launch = row_args(launch, &rows)
            .u32(rows.rows() as u32)
            .u32(layout.key_heads as u32)
            .u32(layout.value_heads as u32)
            .u32(layout.value_dim as u32)
            .u32(o.stride() as u32)
            .u32(qkv.stride() as u32)
            .arg_words(&[(layout.bytes_per_layer() / size_of::<f32>()) as u64]);
        // SAFETY: the shapes were checked; the host checked the staged rows and state slots; the arguments match the kernel
        // parameters.
        unsafe { launch.launch(gpu, s) }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    /// States of Qwen3-Next on one rank.
    const LAYOUT: RecurrentStateLayout = RecurrentStateLayout {
        layers: 1,
        slots: 1,
        key_heads: 16,
        value_heads: 32,
        key_dim: 128,
        value_dim: 128,
        conv_width: 4,
    };
    const H200: ChunkGpuLimits =
        ChunkGpuLimits { warp_size: 32, multiprocessors: 132, shared_bytes: 227 << 10 };

    #[test]
    fn block_width_depends_on_prefill_rows_only() {
        let plan = |rows| ChunkPlan::choose(H200, &LAYOUT, rows);
        let of =
            |concurrent_rows, warps| Some(ChunkPlan { concurrent_rows, warps: ColumnWarps(warps) });
        // One prompt has 128 narrow blocks, however many decode rows the step has.
        assert_eq!(plan(1), of(1, 2));
        assert_eq!(plan(2), of(2, 4));
        assert_eq!(plan(100), of(8, 4));
        assert_eq!(plan(0), None);
    }

    #[test]
    fn blocks_are_narrow_where_wide_ones_do_not_fit() {
        let small = ChunkGpuLimits { shared_bytes: 64 << 10, warp_size: 64, ..H200 };
        let plan = ChunkPlan::choose(small, &LAYOUT, 8).unwrap();
        assert_eq!(plan.warps, ColumnWarps(2));
        let narrow = RecurrentStateLayout { value_dim: 32, ..LAYOUT };
        assert_eq!(ChunkPlan::choose(H200, &narrow, 8).unwrap().warps, ColumnWarps(2));
        let tiny = ChunkGpuLimits { shared_bytes: 16 << 10, ..H200 };
        assert_eq!(ChunkPlan::choose(tiny, &LAYOUT, 8), None);
    }
}
