//! GPU launches of decode attention (GQA) fused with query and key norm, RoPE and KV write. Short contexts use
//! `attention_single_row`, longer ones `attention_decode`.

use device::gpu::KernelLaunch;
use device::{Buffer, DType, DeviceError, DeviceStream, MatMut, check_dtype, check_size};

use super::attention::{
    BLOCKS_WITH_RING, DECODE, DecodeOccupancyInputs, LOG2_E, RECORD_EXTRA_FLOATS,
    SINGLE_ROW_RING_BYTES, TILE,
};
use super::attention_heads::{append_key_range, decode_warps, key_range_defines, max_keys_read};
use super::attention_single_row::{KvLayerPtr, SingleRowAttention};
use super::attention_splits::{SINGLE_ROW_SPLITS, max_splits};
use super::gemm::has_16_byte_rows;
use super::qk_rope;
use crate::gpu::GpuBackend;
use crate::op::{check_key_range, check_layer};
use crate::{AttentionMetadata, GpuKernel, KvLayout, QkNormRopeArgs, RopeAttention};

const KERNEL: &str = "rope_attention";
/// Maximum number of query heads per KV head for which the kernel can use keys as the rows (M) of its MMA.
const MAX_GROUP: usize = 8;

impl GpuBackend {
    /// Whether [`RopeAttention`] supports these rows and this KV layout.
    pub(crate) fn fits_rope_attention(
        &self,
        qk: &QkNormRopeArgs<'_>,
        rows: &AttentionMetadata<'_>,
        layout: &KvLayout,
    ) -> bool {
        let group = qk.heads / layout.kv_heads.max(1);
        self.warp_size() == 32
            && layout.dtype == self.half_dtype()
            && qk.qkv.dtype() == self.half_dtype()
            && matches!(layout.head_dim, 64 | 128)
            && layout.block_tokens.is_multiple_of(TILE)
            && (1..=MAX_GROUP).contains(&group)
            && 2 * qk.rope.cos.cols() == layout.head_dim
            && qk.q_norm.is_some() == qk.k_norm.is_some()
            && qk.norm_dtype().is_none_or(|dtype| dtype == self.half_dtype())
            && rows.bounds.decode_rows >= rows.len()
            && rows.len() == qk.qkv.rows()
            && has_16_byte_rows(qk.qkv)
    }
}

impl GpuKernel for RopeAttention<'_> {
    fn launch(self, gpu: &GpuBackend, s: &DeviceStream) -> Result<(), DeviceError> {
        let Self { mut o, pool: kv, layout, qk, rows, scale, keys, sinks } = self;
        check(&o, kv, layout, qk, rows)?;
        check_key_range(KERNEL, keys, sinks, qk.heads)?;
        check_size(KERNEL, "first position", keys.first_position, 0)?;
        if !gpu.fits_rope_attention(qk, rows, layout) || !has_16_byte_rows(o.as_ref()) {
            let dtype = qk.qkv.dtype();
            return Err(DeviceError::Unsupported { kernel: KERNEL, what: "projections", dtype });
        }
        if rows.is_empty() {
            return Ok(());
        }
        let layer_offset = layout.key_tile(qk.layer, 0, 0) * layout.dtype.bytes();
        // SAFETY: the layer is inside the pool, whose size was checked.
        let layer = unsafe { kv.as_mut_ptr().add(layer_offset) };
        if gpu.fits_single_row(rows, keys) {
            let layer = KvLayerPtr { address: layer, layout };
            return gpu.attend_single_row(
                s,
                o,
                &SingleRowAttention { layer, qk, rows, scale, keys, sinks },
            );
        }
        let (kv_heads, dim, group) = (layout.kv_heads, layout.head_dim, qk.heads / layout.kv_heads);
        let keys_read = max_keys_read(rows.bounds.max_context_len, keys);
        let splits = max_splits(keys_read, SINGLE_ROW_SPLITS, 1);
        let record_bytes = group * (dim + RECORD_EXTRA_FLOATS) * 4;
        let partial = gpu.scratch(s, rows.len() * kv_heads * splits * record_bytes)?;
        let arrival_counters = gpu.counters(s, rows.len() * kv_heads)?;
        let occupancy = gpu.decode_occupancy(&DecodeOccupancyInputs {
            row_bytes: dim * layout.dtype.bytes(),
            ring_bytes: SINGLE_ROW_RING_BYTES,
            group,
            record_bytes,
            max_blocks: BLOCKS_WITH_RING,
            head_dim: dim,
        });
        let mut defines = vec![
            ("HEAD_DIM", dim as u32),
            ("BLOCK_TOKENS", layout.block_tokens as u32),
            ("HEAD_GROUP", group as u32),
            ("KV_FP8", 0),
            ("STAGES", occupancy.stages as u32),
            ("FROM_QKV", 1),
        ];
        defines.extend(key_range_defines(keys, sinks.is_some()));
        let kernel = gpu.kernel(&DECODE, "attention_decode", &defines)?;
        let max_blocks = rows.len() * kv_heads * splits;
        let blocks = (occupancy.blocks * gpu.multiprocessors() as usize).min(max_blocks) as u32;
        let threads = decode_warps(dim) as u32 * gpu.warp_size();
        let launch =
            KernelLaunch::new(kernel, [blocks, 1, 1], threads, occupancy.shared_bytes as u32)
                .overlaps_predecessor()
                .out(&mut o)
                .arg_ptr(layer)
                .arg_ptr(partial)
                .arg_ptr(arrival_counters);
        let launch = sources(launch, qk, rows)
            .u32(rows.len() as u32)
            .u32(kv_heads as u32)
            .u32(rows.block_tables.stride() as u32)
            .u32(splits as u32)
            .u32(qk.qkv.stride() as u32)
            .u32(o.stride() as u32)
            .f32(scale * LOG2_E)
            .f32(qk.eps);
        let launch = append_key_range(launch, keys, sinks);
        // SAFETY: the shapes were checked; the caller guarantees positions, slots, context lengths and block
        // tables; scratch memory and counters cover all rows, KV heads and splits.
        unsafe { launch.launch(gpu, s) }
    }
}

/// Appends the input arguments that `attention_single_row` and `attention_decode` share: QKV projections,
/// norm weights, RoPE tables, and batch metadata.
pub(super) fn sources(
    launch: KernelLaunch,
    qk: &QkNormRopeArgs<'_>,
    rows: &AttentionMetadata<'_>,
) -> KernelLaunch {
    qk_rope::rope_inputs(launch, qk)
        .arg(rows.cu_q)
        .arg(rows.context_lens)
        .arg(rows.block_tables)
        .arg_or_null(rows.table_rows)
}

fn check(
    o: &MatMut<'_>,
    kv: &Buffer,
    layout: &KvLayout,
    qk: &QkNormRopeArgs<'_>,
    rows: &AttentionMetadata<'_>,
) -> Result<(), DeviceError> {
    check_layer(KERNEL, kv, layout, qk.layer)?;
    qk.check(KERNEL, o, layout)?;
    qk_rope::check_strides(KERNEL, o, layout, qk)?;
    check_size(KERNEL, "tokens", qk.qkv.rows(), rows.len())?;
    check_size(KERNEL, "cu_q", rows.cu_q.cols(), rows.len() + 1)?;
    if rows.table_rows.is_none() {
        check_size(KERNEL, "block_tables", rows.block_tables.rows(), rows.len())?;
    }
    let tables =
        [Some(rows.cu_q), Some(rows.context_lens), Some(rows.block_tables), rows.table_rows];
    for ids in tables.into_iter().flatten() {
        check_dtype(KERNEL, "rows", ids.dtype(), DType::I32)?;
    }
    if layout.kv_heads == 0 || !qk.heads.is_multiple_of(layout.kv_heads) {
        return check_size(KERNEL, "query heads", qk.heads, layout.kv_heads);
    }
    Ok(())
}
