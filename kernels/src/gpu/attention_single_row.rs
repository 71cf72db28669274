//! Launches of `attention_single_row`: decode attention (GQA) for short contexts, where one thread block cluster
//! per row and KV head also computes QK norm, RoPE and the KV write.

use device::gpu::{KernelLaunch, KernelSource};
use device::{DeviceError, DeviceStream, MatMut, MatRef};

use super::attention::{LOG2_E, RECORD_EXTRA_FLOATS, TILE};
use super::attention_heads::{append_key_range, key_range_defines, max_keys_read};
use super::rope_attention::sources;
use crate::gpu::GpuBackend;
use crate::{AttentionKeyRange, AttentionMetadata, BatchUpperBounds, KvLayout, QkNormRopeArgs};

static ATTENTION_SINGLE_ROW: KernelSource =
    kernel_source!("attention_single_row/attention_single_row.hip");

/// Number of blocks per thread block cluster; must match `BLOCKS` in attention_single_row.hip.
const BLOCKS: usize = 8;
/// Maximum number of query heads per KV head for which a block has four warps; with more query heads it has
/// eight. A smaller block uses fewer registers, so that blocks of other kernels fit on the same SM.
const FOUR_WARPS_GROUP: usize = 2;
/// Maximum number of output columns (query heads × head size) for which the next kernel, a GEMM, is launched
/// early: up to this size the blocks of the GEMM fit on the SMs together with the blocks of this kernel.
const EARLY_LAUNCH_COLUMNS: usize = 2048;
/// Shared memory, in bytes, of the barrier on which the first block of a cluster waits for the partial
/// results of all its blocks.
const BARRIER_BYTES: usize = 128;
/// Static shared memory of the kernel in bytes: the key and value of the new token.
const STATIC_BYTES: usize = 512;
/// Maximum number of ring-buffer stages (K/V tiles that are being loaded) per warp: `STAGES` if a block has
/// four warps, `EIGHT_WARP_STAGES` if it has eight.
const STAGES: usize = 3;
const EIGHT_WARP_STAGES: usize = 2;

/// One layer of the KV pool: address of its first byte, and layout of the pool.
#[derive(Debug, Clone, Copy)]
pub(super) struct KvLayerPtr<'a> {
    pub(super) address: *mut u8,
    pub(super) layout: &'a KvLayout,
}

/// Arguments of the single-row kernel, as in [`RopeAttention`](crate::RopeAttention).
#[derive(Debug, Clone, Copy)]
pub(super) struct SingleRowAttention<'a> {
    pub(super) layer: KvLayerPtr<'a>,
    pub(super) qk: &'a QkNormRopeArgs<'a>,
    pub(super) rows: &'a AttentionMetadata<'a>,
    pub(super) scale: f32,
    pub(super) keys: AttentionKeyRange,
    pub(super) sinks: Option<MatRef<'a>>,
}

impl GpuBackend {
    /// Whether [`RopeAttention`](crate::RopeAttention) uses the single-row kernel for `rows`; `RopeAttention`
    /// must support these rows.
    pub(super) fn fits_single_row(
        &self,
        rows: &AttentionMetadata<'_>,
        keys: AttentionKeyRange,
    ) -> bool {
        let keys_read = max_keys_read(rows.bounds.max_context_len, keys);
        self.has_warpgroups() && keys_read <= BatchUpperBounds::SHORT_CONTEXT
    }

    /// Launches `attention_single_row` for the op [`RopeAttention`](crate::RopeAttention); the caller has
    /// checked the shapes.
    pub(super) fn attend_single_row(
        &self,
        s: &DeviceStream,
        mut o: MatMut<'_>,
        args: &SingleRowAttention<'_>,
    ) -> Result<(), DeviceError> {
        let SingleRowAttention { layer, qk, rows, scale, keys, sinks } = *args;
        let layout = layer.layout;
        let (kv_heads, dim, group) = (layout.kv_heads, layout.head_dim, qk.heads / layout.kv_heads);
        let warps = if group <= FOUR_WARPS_GROUP { 4 } else { 8 };
        let fixed_bytes =
            BARRIER_BYTES + (BLOCKS + warps) * group * (dim + RECORD_EXTRA_FLOATS) * 4;
        let stage_bytes = warps * 2 * TILE * dim * layout.dtype.bytes();
        let capacity = (self.shared_bytes() as usize).saturating_sub(fixed_bytes + STATIC_BYTES);
        let max_stages = if warps == 8 { EIGHT_WARP_STAGES } else { STAGES };
        let stages = (capacity / stage_bytes).clamp(1, max_stages);
        let mut defines = vec![
            ("HEAD_DIM", dim as u32),
            ("BLOCK_TOKENS", layout.block_tokens as u32),
            ("HEAD_GROUP", group as u32),
            ("TEAM_WARPS", warps as u32),
            ("STAGES", stages as u32),
            ("EARLY_LAUNCH", u32::from(qk.heads * dim <= EARLY_LAUNCH_COLUMNS)),
        ];
        defines.extend(key_range_defines(keys, sinks.is_some()));
        let kernel = self.kernel(&ATTENTION_SINGLE_ROW, "attention_single_row", &defines)?;
        let blocks = (BLOCKS * rows.len() * kv_heads) as u32;
        let threads = warps as u32 * self.warp_size();
        let shared_bytes = (fixed_bytes + stages * stage_bytes) as u32;
        let launch = KernelLaunch::new(kernel, [blocks, 1, 1], threads, shared_bytes)
            .in_clusters(BLOCKS as u32)
            .overlaps_predecessor()
            .out(&mut o)
            .arg_ptr(layer.address);
        let launch = sources(launch, qk, rows)
            .u32(kv_heads as u32)
            .u32(rows.block_tables.stride() as u32)
            .u32(qk.qkv.stride() as u32)
            .u32(o.stride() as u32)
            .f32(scale * LOG2_E)
            .f32(qk.eps);
        let launch = append_key_range(launch, keys, sinks);
        // SAFETY: the shapes were checked; the caller guarantees positions, slots, context lengths and block
        // tables.
        unsafe { launch.launch(self, s) }
    }
}
