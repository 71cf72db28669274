//! Paged attention on GPUs. Decode rows use a split-KV flash decoding kernel, other rows a prefill flash
//! attention kernel over query tiles. Shapes that these kernels do not support use the reference kernel
//! `attention_plain`.

use device::gpu::{KernelDefine, KernelLaunch, KernelSource};
use device::{DType, DeviceError, DeviceStream, MatMut, check_at_most, check_size};

use super::attention_heads::{
    LARGE_HEAD, QueryHeadPartition, append_key_range, decode_warps, key_range_defines,
    max_keys_read, max_queries, window_argument,
};
use super::attention_splits::{SMALL_BATCH_ROWS, max_splits, split_sizes};
use super::gemm::has_16_byte_rows;
use super::launch_limits::DRIVER_BYTES;
use crate::gpu::GpuBackend;
use crate::{GpuKernel, KvLayout, PagedAttention, PagedAttentionArgs};

pub(super) static DECODE: KernelSource = kernel_source!("attention_decode/attention_decode.hip");
static PLAIN: KernelSource = kernel_source!("attention_plain/attention_plain.hip");

const KERNEL: &str = "paged_attention";
/// Maximum number of stages (K/V tiles) and maximum number of bytes of the ring buffer of a warp in shared
/// memory. With 1.5 times as many bytes, steps of many rows take longer, because loads of queries, block
/// tables and partial results are queued after more loads of keys. Single-row attention has a larger limit,
/// because no loads of other rows are queued.
const RING_TILES: usize = 3;
const RING_BYTES: usize = 16 << 10;
pub(super) const SINGLE_ROW_RING_BYTES: usize = 24 << 10;
/// Number of stages for which a ring buffer may have more than `RING_BYTES` bytes: heads of 256 and more channels need
/// them to load the next tile while a tile is multiplied.
const MIN_RING_TILES: usize = 2;
/// Maximum head size for which the decode kernel with an fp8 KV cache needs fewer registers.
const FP8_SMALL_HEAD: usize = 128;
/// Number of resident blocks per SM of the decode kernel with a ring buffer in shared memory, limited by
/// registers.
pub(super) const BLOCKS_WITH_RING: usize = 2;
/// Number of resident blocks per SM of the decode kernel with few queries per KV head and an fp8 KV cache;
/// this variant needs fewer registers.
const BLOCKS_WITH_FP8: usize = 3;
/// Shared memory of static arrays of the decode kernel per block, in bytes.
const STATIC_BYTES: usize = 768;
/// Further static shared memory of the decode kernel with warps of 32 lanes and heads of more than 256 channels, in bytes:
/// the queries of a block. Must match `own_query_vectors` in keys_first.h.
const LARGE_HEAD_QUERY_BYTES: usize = 16 << 10;
/// Maximum number of queries per KV head for which the decode kernel uses keys as the rows (M) of its MMA;
/// must match `KEYS_FIRST` in attention_decode.hip.
const KEYS_FIRST_GROUP: usize = 8;
/// Maximum number of queries for which the decode kernel has two buffers for the partial results of its warps; must
/// match `SETS` in merge_records.h.
const TWO_RECORD_SETS_GROUP: usize = 4;
/// Number of f32 values after the outputs in the partial result of a split: softmax maximum, sum and padding.
pub(super) const RECORD_EXTRA_FLOATS: usize = 4;
/// Number of keys, and also number of queries, in an MMA tile of a warp.
pub(super) const TILE: usize = 16;
/// Maximum head size that the reference kernel `attention_plain` supports.
const PLAIN_HEAD: usize = 512;
/// log2(e): kernels compute the softmax in base 2, so the host multiplies the factor of the scores by
/// log2(e).
pub(super) const LOG2_E: f32 = std::f32::consts::LOG2_E;

/// Sizes that determine how many blocks of the decode kernel are resident per SM.
pub(super) struct DecodeOccupancyInputs {
    /// Bytes of one key in the KV pool.
    pub(super) row_bytes: usize,
    /// Maximum bytes of the ring buffer of a warp.
    pub(super) ring_bytes: usize,
    /// Number of queries that a block processes together.
    pub(super) group: usize,
    /// Bytes of the partial attention result (outputs, softmax maximum and sum) of a warp.
    pub(super) record_bytes: usize,
    /// Maximum number of resident blocks per SM on NVIDIA GPUs, limited by registers.
    pub(super) max_blocks: usize,
    /// Channels of a head.
    pub(super) head_dim: usize,
}

/// Number of ring-buffer stages and shared memory (bytes) of a decode block, and number of resident blocks
/// per SM.
pub(super) struct DecodeOccupancy {
    pub(super) stages: usize,
    pub(super) shared_bytes: usize,
    pub(super) blocks: usize,
}

/// Arguments that the decode, prefill and reference (`attention_plain`) attention kernels share.
pub(super) struct AttentionLaunchArgs<'a> {
    pub(super) args: &'a PagedAttentionArgs<'a>,
    pub(super) layout: &'a KvLayout,
    /// Address of the first byte of this layer in the KV pool.
    pub(super) pool: *const u8,
    /// Number of query heads per KV head (GQA group size).
    group: usize,
    /// Query heads that a block of the decode or prefill kernel processes together.
    pub(super) partition: QueryHeadPartition,
}

impl GpuBackend {
    /// Launches decode attention for the first `rows` rows, which have one query each. A block processes
    /// successive tokens of one request (draft tokens) together.
    fn attend_decodes(
        &self,
        s: &DeviceStream,
        o: &mut MatMut<'_>,
        shape: &AttentionLaunchArgs<'_>,
        rows: usize,
    ) -> Result<(), DeviceError> {
        if rows == 0 {
            return Ok(());
        }
        let (head_groups, dim) = (shape.head_groups(), shape.layout.head_dim);
        let heads = shape.partition.heads;
        let rows_per_request = shape.args.rows.bounds.max_rows_per_request.clamp(1, rows);
        let divisor = self.launch_limits().split_divisor();
        let small_batch = rows.div_ceil(rows_per_request) <= SMALL_BATCH_ROWS * divisor;
        let split_sizes = split_sizes(dim, small_batch);
        let divisor = if small_batch { divisor } else { 1 };
        let max_context_len = shape.args.rows.bounds.max_context_len;
        let keys_read = max_keys_read(max_context_len, shape.args.keys);
        let splits = max_splits(keys_read, split_sizes, divisor);
        let tokens_per_block = rows_per_request.min(max_queries(dim) / heads);
        let token_bytes = heads * (dim + RECORD_EXTRA_FLOATS) * 4;
        let partial = self.scratch(s, rows * head_groups * splits * token_bytes)?;
        let arrival_counters = self.counters(s, rows * head_groups)?;
        let group = heads * tokens_per_block;
        let is_small_group_fp8 =
            shape.fp8() == 1 && group <= KEYS_FIRST_GROUP && dim <= FP8_SMALL_HEAD;
        let max_blocks = if is_small_group_fp8 { BLOCKS_WITH_FP8 } else { BLOCKS_WITH_RING };
        let row_bytes = dim * shape.layout.dtype.bytes();
        let record_bytes = token_bytes * tokens_per_block;
        let occupancy = self.decode_occupancy(&DecodeOccupancyInputs {
            row_bytes,
            ring_bytes: RING_BYTES.max(MIN_RING_TILES * 2 * TILE * row_bytes),
            group,
            record_bytes,
            max_blocks,
            head_dim: dim,
        });
        let mut defines = shape.defines();
        defines.push(("SMALL_BATCH", u32::from(small_batch)));
        defines.extend((divisor > 1).then_some(("SPLIT_DIVISOR", divisor as u32)));
        defines.push(("STAGES", occupancy.stages as u32));
        defines.push(("TOKENS_PER_BLOCK", tokens_per_block as u32));
        // `FIRST_POSITION` is defined only if the first positions are masked, so that all launches without
        // masked positions use one compiled variant.
        let first_position = shape.args.keys.first_position as u32;
        defines.extend((first_position > 0).then_some(("FIRST_POSITION", first_position)));
        let kernel = self.kernel(&DECODE, "attention_decode", &defines)?;
        // The grid has as many blocks as can be resident on the GPU: each processes an equal share of the
        // splits of all rows and KV heads.
        let blocks =
            (occupancy.blocks * self.multiprocessors() as usize).min(rows * head_groups * splits);
        let threads = decode_warps(dim) as u32 * self.warp_size();
        let o_stride = o.stride() as u32;
        let launch = KernelLaunch::new(
            kernel,
            [blocks as u32, 1, 1],
            threads,
            occupancy.shared_bytes as u32,
        )
        .out(o)
        .arg_ptr(partial)
        .arg_ptr(arrival_counters);
        let launch = shape.rows(launch.arg(shape.args.q).arg_ptr(shape.pool));
        let launch = launch.u32(rows as u32).u32(head_groups as u32).u32(shape.table_width());
        let launch = launch.u32(splits as u32).u32(rows_per_request as u32);
        let launch = shape.key_range(shape.strides(launch, o_stride)).overlaps_predecessor();
        // SAFETY: `check` compared the shapes; the caller guarantees context lengths and block tables;
        // scratch memory and counters cover all rows, KV heads and splits.
        unsafe { launch.launch(self, s) }
    }

    /// Returns the number of stages, the shared memory and the number of resident blocks of the decode
    /// kernel.
    pub(super) fn decode_occupancy(&self, sizes: &DecodeOccupancyInputs) -> DecodeOccupancy {
        let DecodeOccupancyInputs {
            row_bytes,
            ring_bytes,
            group,
            record_bytes,
            max_blocks,
            head_dim,
        } = *sizes;
        let warps = decode_warps(head_dim);
        let record_sets = if group <= TWO_RECORD_SETS_GROUP { 2 } else { 1 };
        let records = record_sets * warps * record_bytes;
        if self.warp_size() != 32 {
            let block_bytes = records + STATIC_BYTES;
            let blocks = self.launch_limits().decode_blocks(block_bytes, group, head_dim);
            return DecodeOccupancy { stages: 1, shared_bytes: records, blocks };
        }
        let stage_bytes = warps * 2 * TILE * row_bytes;
        let static_bytes =
            STATIC_BYTES + if head_dim > LARGE_HEAD { LARGE_HEAD_QUERY_BYTES } else { 0 };
        let capacity = self.shared_bytes() as usize;
        let max_stages = (ring_bytes * warps / stage_bytes).clamp(1, RING_TILES);
        let stages = (capacity.saturating_sub(records) / stage_bytes).clamp(1, max_stages);
        let shared_bytes = stages * stage_bytes + records;
        let blocks = (capacity + DRIVER_BYTES) / (shared_bytes + DRIVER_BYTES + static_bytes);
        DecodeOccupancy { stages, shared_bytes, blocks: blocks.clamp(1, max_blocks) }
    }

    fn attend_plain(
        &self,
        s: &DeviceStream,
        o: &mut MatMut<'_>,
        shape: &AttentionLaunchArgs<'_>,
    ) -> Result<(), DeviceError> {
        let layout = shape.layout;
        let defines = [
            ("ACT_F32", self.act_f32(KERNEL, shape.args.q.dtype())?),
            ("HEAD_DIM", layout.head_dim as u32),
            ("BLOCK_TOKENS", layout.block_tokens as u32),
            ("KV_FP8", shape.fp8()),
        ];
        let kernel = self.kernel(&PLAIN, "attention_plain", &defines)?;
        let grid = [o.rows() as u32, shape.args.heads as u32, 1];
        let o_stride = o.stride() as u32;
        let launch = KernelLaunch::new(kernel, grid, self.warp_size(), 0).out(o);
        let launch = shape.rows(launch.arg(shape.args.q).arg_ptr(shape.pool));
        let launch = launch.u32(shape.args.rows.len() as u32).u32(shape.group as u32);
        let launch = launch.u32(layout.kv_heads as u32).u32(shape.table_width());
        let keys = shape.args.keys;
        let window = keys.window.map_or(u32::MAX, window_argument);
        let launch = launch.u32(window).u32(keys.first_position as u32);
        let launch = launch.arg_or_null(shape.args.sinks);
        // SAFETY: `check` compared the shapes; the caller guarantees context lengths and block tables.
        unsafe { shape.strides(launch, o_stride).overlaps_predecessor().launch(self, s) }
    }
}

impl GpuKernel for PagedAttention<'_> {
    fn launch(self, gpu: &GpuBackend, s: &DeviceStream) -> Result<(), DeviceError> {
        self.check()?;
        let Self { mut o, pool: kv, layout, args } = self;
        check_limits(layout, args)?;
        let offset = layout.key_tile(args.layer, 0, 0) * layout.dtype.bytes();
        // SAFETY: `check` compared the pool with its layout, and the layer is inside the pool.
        let pool = unsafe { kv.as_ptr().add(offset) };
        let group = args.heads / layout.kv_heads;
        let partition = QueryHeadPartition::new(group, layout.head_dim);
        let shape = AttentionLaunchArgs { args, layout, pool, group, partition };
        let decode_rows = args.rows.bounds.decode_rows.min(args.rows.len());
        // The prefill kernel cannot mask the positions before `first_position`: steps that need it use the
        // reference kernel `attention_plain`.
        let masks_prefill_rows = args.keys.first_position > 0 && decode_rows < args.rows.len();
        if masks_prefill_rows || !shape.uses_tensor_cores(gpu.half_dtype(), &o) {
            return gpu.attend_plain(s, &mut o, &shape);
        }
        gpu.attend_decodes(s, &mut o, &shape, decode_rows)?;
        gpu.attend_prefills(s, &mut o, &shape, decode_rows)
    }
}

impl AttentionLaunchArgs<'_> {
    fn uses_tensor_cores(&self, half: DType, o: &MatMut<'_>) -> bool {
        self.args.q.dtype() == half
            && matches!(self.layout.head_dim, 64 | 128 | 256 | 512)
            && self.layout.block_tokens.is_multiple_of(TILE)
            && self.group > 0
            && has_16_byte_rows(self.args.q)
            && has_16_byte_rows(o.as_ref())
    }

    /// Returns the defines that the decode and prefill kernels share. Those of sharers, windows and sinks are set
    /// only where they are needed, so that other layers use one compiled variant.
    pub(super) fn defines(&self) -> Vec<KernelDefine> {
        let mut defines = vec![
            ("HEAD_DIM", self.layout.head_dim as u32),
            ("BLOCK_TOKENS", self.layout.block_tokens as u32),
            ("HEAD_GROUP", self.partition.heads as u32),
            ("KV_FP8", self.fp8()),
        ];
        let sharers = self.partition.sharers as u32;
        defines.extend((sharers > 1).then_some(("KV_SHARERS", sharers)));
        defines.extend(key_range_defines(self.args.keys, self.args.sinks.is_some()));
        defines
    }

    /// Number of groups of query heads that blocks process separately.
    pub(super) fn head_groups(&self) -> usize {
        self.layout.kv_heads * self.partition.sharers
    }

    /// Appends the arguments of the decode and prefill kernels that the defines of windows and sinks add.
    pub(super) fn key_range(&self, launch: KernelLaunch) -> KernelLaunch {
        append_key_range(launch, self.args.keys, self.args.sinks)
    }

    pub(super) fn fp8(&self) -> u32 {
        u32::from(self.layout.dtype == DType::F8E4M3)
    }

    pub(super) fn rows(&self, launch: KernelLaunch) -> KernelLaunch {
        let rows = &self.args.rows;
        let launch = launch.arg(rows.cu_q).arg(rows.context_lens).arg(rows.block_tables);
        launch.arg_or_null(rows.table_rows)
    }

    pub(super) fn table_width(&self) -> u32 {
        self.args.rows.block_tables.stride() as u32
    }

    /// Appends the last arguments of the decode, prefill and reference (`attention_plain`) attention kernels:
    /// row strides of queries and outputs, and the factor of the scores.
    pub(super) fn strides(&self, launch: KernelLaunch, o_stride: u32) -> KernelLaunch {
        launch.u32(self.args.q.stride() as u32).u32(o_stride).f32(self.args.scale * LOG2_E)
    }
}

fn check_limits(layout: &KvLayout, args: &PagedAttentionArgs<'_>) -> Result<(), DeviceError> {
    check_at_most(KERNEL, "head size", layout.head_dim, PLAIN_HEAD)?;
    check_at_most(KERNEL, "first position", args.keys.first_position, TILE)?;
    let rows = &args.rows;
    check_size(KERNEL, "cu_q", rows.cu_q.cols(), rows.len() + 1)?;
    if rows.table_rows.is_none() {
        check_size(KERNEL, "block_tables", rows.block_tables.rows(), rows.len())?;
    }
    Ok(())
}
