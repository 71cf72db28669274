//! Attention of a lone row with a short context, out of the projections: launches of `attention_single_row`.

use device::gpu::{KernelLaunch, KernelSource};
use device::{DeviceError, DeviceStream, MatMut};

use super::attention::{LOG2_E, RECORD_EXTRA_FLOATS, TILE};
use super::rope_attention::sources;
use crate::gpu::GpuBackend;
use crate::{AttentionMetadata, KvLayout, QkNormRopeArgs, RowBounds};

static ATTENTION_SINGLE_ROW: KernelSource =
    kernel_source!("attention_single_row/attention_single_row.hip");

/// Blocks of a cluster, as `BLOCKS` in attention_single_row.hip.
const BLOCKS: usize = 8;
/// Query heads of a KV head up to which four waves a block do. Fewer registers let other kernels lie beside.
const FOUR_WARPS_GROUP: usize = 2;
/// Values of all query heads up to which the product behind finds room beside this kernel.
const EARLY_LAUNCH_COLUMNS: usize = 2048;
/// Shared memory for the barrier.
const BARRIER_BYTES: usize = 128;
/// Shared memory that the kernel has beside what a launch asks for: the row's own key and value.
const STATIC_BYTES: usize = 512;
/// Tiles of keys and values that four waves have on their way at most, each, and that eight have: these take no more.
const STAGES: usize = 3;
const EIGHT_WARP_STAGES: usize = 2;

impl GpuBackend {
    /// Whether rows that fit `rope_attention` go this way.
    pub(super) fn fits_single_row(&self, rows: &AttentionMetadata<'_>) -> bool {
        self.has_warpgroups() && rows.bounds.max_context_len <= RowBounds::SHORT_CONTEXT
    }

    /// As [`RopeAttention`](crate::RopeAttention), for shapes that have been checked. `layer`: the layer's part of the pool.
    pub(super) fn attend_single_row(
        &self,
        s: &DeviceStream,
        mut o: MatMut<'_>,
        (layer, layout): (*mut u8, &KvLayout),
        qk: &QkNormRopeArgs<'_>,
        rows: &AttentionMetadata<'_>,
        scale: f32,
    ) -> Result<(), DeviceError> {
        let (kv_heads, dim, group) = (layout.kv_heads, layout.head_dim, qk.heads / layout.kv_heads);
        let waves = if group <= FOUR_WARPS_GROUP { 4 } else { 8 };
        let fixed = BARRIER_BYTES + (BLOCKS + waves) * group * (dim + RECORD_EXTRA_FLOATS) * 4;
        let stage_bytes = waves * 2 * TILE * dim * layout.dtype.bytes();
        let room = (self.shared_bytes() as usize).saturating_sub(fixed + STATIC_BYTES);
        let most = if waves == 8 { EIGHT_WARP_STAGES } else { STAGES };
        let stages = (room / stage_bytes).clamp(1, most);
        let defines = [
            ("HEAD_DIM", dim as u32),
            ("BLOCK_TOKENS", layout.block_tokens as u32),
            ("HEAD_GROUP", group as u32),
            ("TEAM_WARPS", waves as u32),
            ("STAGES", stages as u32),
            ("EARLY", u32::from(qk.heads * dim <= EARLY_LAUNCH_COLUMNS)),
        ];
        let kernel = self.kernel(&ATTENTION_SINGLE_ROW, "attention_single_row", &defines)?;
        let blocks = (BLOCKS * rows.len() * kv_heads) as u32;
        let threads = waves as u32 * self.warp_size();
        let shared_bytes = (fixed + stages * stage_bytes) as u32;
        let launch = KernelLaunch::new(kernel, (blocks, 1, 1), threads, shared_bytes)
            .in_clusters(BLOCKS as u32)
            .overlaps_predecessor()
            .out(&mut o)
            .arg_ptr(layer);
        let launch = sources(launch, qk, rows)
            .u32(kv_heads as u32)
            .u32(rows.block_tables.stride() as u32)
            .u32(qk.qkv.stride() as u32)
            .u32(o.stride() as u32)
            .f32(scale * LOG2_E)
            .f32(qk.eps);
        // SAFETY: shapes were compared; positions, slots, lengths and tables are the caller's promise.
        unsafe { launch.launch(self, s) }
    }
}
