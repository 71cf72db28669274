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
const ROW_LANES: usize = 8;

/// Number of warps of a block that update a state, with 16 value columns each.
#[derive(Debug, Clone, Copy)]
struct ColumnWarps(usize);

impl ColumnWarps {
    fn columns(self) -> usize {
        16 * self.0
    }

    /// Shared memory of a block in bytes; `WalkShared` of gdn_chunk/walk.h. With warps of 64 lanes, tiles are not copied, and
    /// there is one stage.
    fn shared_bytes(self, gpu: &GpuBackend, key_dim: usize) -> usize {
        let (stages, tiles) = if gpu.warp_size() == 64 { (1, 0) } else { (2, 2 * PAIRS) };
        let row_bytes = 2 * (key_dim + 8);
        let rows = CHUNK * (2 * row_bytes + 2 * (self.columns() + 8));
        let mail = 2 * self.0 * (key_dim + CHUNK) / 16 * TILE_BYTES;
        stages * (rows + tiles * TILE_BYTES + FACTOR_BYTES) + mail
    }

    /// Returns two warps if the blocks of all rows are resident at once, one per SM; more, if blocks with more columns fit.
    fn choose(gpu: &GpuBackend, layout: &RecurrentStateLayout, lanes: usize) -> Self {
        let (narrow, wide) = (Self(2), Self(4));
        let blocks = layout.value_channels() / narrow.columns() * lanes;
        let fits = wide.shared_bytes(gpu, layout.key_dim) <= gpu.shared_bytes() as usize
            && layout.value_dim.is_multiple_of(wide.columns());
        if fits && blocks > gpu.multiprocessors() as usize { wide } else { narrow }
    }
}

/// The gated delta rule of the rows of more than [`RECURRENT_TOKENS`] tokens.
pub(super) struct ChunkedRule {
    /// Upper bound of the number of records per value head.
    records: usize,
    /// Number of rows that are computed at the same time.
    lanes: usize,
    warps: ColumnWarps,
}

impl ChunkedRule {
    /// Returns `None` if no row has more than [`RECURRENT_TOKENS`] tokens, or no kernel takes the shapes.
    pub(super) fn choose(gpu: &GpuBackend, op: &GatedDeltaRule<'_>) -> Option<Self> {
        let layout = op.layout;
        let (tokens, rows) = (op.o.rows(), op.rows.rows());
        let lanes = rows.min(tokens / (RECURRENT_TOKENS + 1)).min(ROW_LANES);
        let warps = ColumnWarps::choose(gpu, layout, lanes);
        let takes_shapes = op.qkv.dtype() == gpu.half_dtype()
            && matches!(layout.key_dim, 64 | 128)
            && layout.value_dim.is_multiple_of(warps.columns())
            && warps.shared_bytes(gpu, layout.key_dim) <= gpu.shared_bytes() as usize
            && has_16_byte_rows(op.qkv)
            && has_16_byte_rows(op.o.as_ref());
        (op.rows.max_row_len > RECURRENT_TOKENS && lanes > 0 && takes_shapes).then_some(Self {
            records: tokens / CHUNK + rows,
            lanes,
            warps,
        })
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
        [("KEY_DIM", layout.key_dim as u32), ("COLUMN_WARPS", self.warps.0 as u32)]
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
        let grid = [(layout.value_channels() / self.warps.columns()) as u32, self.lanes as u32, 1];
        let threads = 2 * self.warps.0 as u32 * gpu.warp_size();
        let shared_bytes = self.warps.shared_bytes(gpu, layout.key_dim) as u32;
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
