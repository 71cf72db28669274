//! Absorbed MLA on tensor cores: W_UK projects queries to the space of the compressed KV, attention computes
//! weighted means of compressed KV rows of the pool, and W_UV of each head projects the means to outputs.

use device::gpu::{KernelLaunch, KernelSource, TensorMap};
use device::{DeviceError, DeviceStream, MatMut};

use super::attention::LOG2_E;
use super::attention_splits::{KvSplitSize, max_splits};
use super::gemm::has_16_byte_rows;
use crate::gpu::GpuBackend;
use crate::{BatchUpperBounds, MlaAttentionArgs, MlaKvLayout, PackedMatrixGroup};

static HEAD_GEMM: KernelSource = kernel_source!("mla_head_gemm/mla_head_gemm.hip");
static DECODE: KernelSource = kernel_source!("mla_decode/mla_decode.hip");
static DECODE_WGMMA: KernelSource = kernel_source!("mla_decode_wgmma/mla_decode_wgmma.hip");

/// Number of heads per block, and of keys per warp and step, of the kernel without WGMMA.
const TILE: usize = 16;
/// Number of heads per block, and of keys per step, of the WGMMA kernel.
const WARPGROUP_TILE: usize = 64;
/// Number of threads per block of the WGMMA kernel: two consumer warpgroups and one producer warpgroup.
const WARPGROUP_THREADS: u32 = 384;
/// Number of ring-buffer stages of the WGMMA kernel. More stages do not fit, because the shared memory of a
/// block also has the queries.
const WARPGROUP_STAGES: usize = 2;
/// Row size and alignment, in bytes, of the panels in shared memory that WGMMA reads (64 columns of 16-bit
/// elements).
const PANEL_ROW: usize = 128;
const PANEL_ALIGNMENT: usize = 1024;
/// Maximum `kv_lora_rank` that absorbed MLA supports on tensor cores, limited by registers per warp.
const MAX_KV_LORA_RANK: usize = 512;
/// Number of padding elements per KV row in the shared memory of the kernel without WGMMA; with warps of 32 and of 64
/// lanes.
const ROW_PADDING: usize = 8;
const WAVEFRONT64_ROW_PADDING: usize = 16;
/// Maximum number of ring-buffer stages per block of the kernel without WGMMA.
const MAX_STAGES: usize = 3;
/// Static shared memory per block of the kernel without WGMMA, in bytes; with warps of 32 and of 64 lanes.
const STATIC_BYTES: usize = 7 << 10;
const WAVEFRONT64_STATIC_BYTES: usize = 8 << 10;
/// Maximum number of tokens per block on GPUs with wavefronts of 64 lanes; each token is processed by its own
/// wavefronts. There are not enough registers for four tokens per block, or for two tokens per block on GPUs
/// with warps of 32 lanes.
const WAVEFRONT64_TOKENS: usize = 2;
/// Shared memory of the barriers of the WGMMA kernel, which precede the panels, in bytes.
const BARRIER_BYTES: usize = 128;
/// Static shared memory per block of the WGMMA kernel, in bytes.
const WARPGROUP_STATIC_BYTES: usize = 1 << 10;
/// Number of f32 values in a split's partial result in addition to its weighted sum of compressed KV.
const RECORD_EXTRA_FLOATS: usize = 16;
/// Number of threads per block of `mla_head_gemm`, and of rows that a block processes at a time.
const HEAD_GEMM_THREADS: u32 = 128;
const HEAD_GEMM_ROWS: usize = 16;
/// Number of resident `mla_head_gemm` blocks per SM. Rows are divided among at most that many blocks, because
/// each block reads the whole matrix of its head.
const HEAD_GEMM_BLOCKS: usize = 4;

/// Value of the limit on successive tokens of a request for launches without splits: larger than the number
/// of tokens of any row, so that it does not limit them.
const ANY_TOKEN_COUNT: usize = 1 << 20;

/// Split sizes of the kernel without WGMMA; must match `split_keys` in mla_decode.hip.
const SPLITS: &[KvSplitSize] = &[
    KvSplitSize::new(2048, 256),
    KvSplitSize::new(8192, 512),
    KvSplitSize::new(32768, 1024),
    KvSplitSize::new(usize::MAX, 4096),
];

/// Maximum number of rows for which the kernel without WGMMA (16 heads per block) is faster than the WGMMA
/// kernel, if there are more heads than `WARPGROUP_TILE`. On an H200, 128 heads of one row take 37 µs
/// (without WGMMA) and 59 µs (with WGMMA) with 1,088 keys, 59 and 93 µs with 8,192 keys; 128 heads of 16 rows
/// take 428 and 184 µs.
const FEW_ROWS_MAX: usize = 2;
/// Number of partial results for which scratch memory is allocated, for each block of the WGMMA kernel and
/// each token that the block processes together with others; it limits the number of splits. Batches with
/// mixed context lengths are fastest with up to 10 splits per block.
const RUN_RECORDS: usize = 12;
/// Minimum number of keys per split of the WGMMA kernel; must match 2^`SHORTEST` in
/// mla_decode_wgmma/split_length.h.
const MIN_WARPGROUP_SPLIT_KEYS: usize = 256;

/// Arguments that all launches of absorbed MLA share, and the chosen kernel.
pub(super) struct MlaDecodeLaunchArgs<'a> {
    args: &'a MlaAttentionArgs<'a>,
    layout: &'a MlaKvLayout,
    /// Address of the first byte of the layer in the KV pool.
    pool: *const u8,
    w_uk_t: &'a PackedMatrixGroup,
    /// Whether rows of at least `BatchUpperBounds::MLA_PREFILL_TOKENS` tokens are skipped, because non-absorbed MLA
    /// computes them.
    short_rows_only: bool,
    kernel: MlaDecodeKernel,
}

/// Kernel that computes the attention between the W_UK and W_UV projections of absorbed MLA.
enum MlaDecodeKernel {
    /// Kernel without WGMMA, in which each warp processes its own keys; it has `stages` ring-buffer stages of
    /// `step_bytes` bytes, and the lengths of its splits are divided by `split_divisor`.
    Warps { stages: usize, step_bytes: usize, split_divisor: usize },
    /// Kernel with WGMMA and TMA. The list of splits of all rows is divided into at most `runs` contiguous
    /// parts, one per block.
    Warpgroups { pool: TensorMap, runs: usize },
}

impl MlaDecodeLaunchArgs<'_> {
    /// Returns the number of successive tokens of a request that a block processes together, at most
    /// `max_tokens`.
    fn tokens_per_block(&self, max_tokens: usize, warp_size: u32) -> usize {
        match self.kernel {
            MlaDecodeKernel::Warps { .. } if warp_size != 64 || self.args.first_position > 0 => 1,
            MlaDecodeKernel::Warps { .. } => max_tokens.clamp(1, WAVEFRONT64_TOKENS),
            MlaDecodeKernel::Warpgroups { .. } => {
                max_tokens.clamp(1, (WARPGROUP_TILE / self.args.heads.w_uk.len()).max(1))
            }
        }
    }

    /// Returns the number of heads per block.
    fn heads_per_block(&self) -> usize {
        match self.kernel {
            MlaDecodeKernel::Warps { .. } => TILE,
            MlaDecodeKernel::Warpgroups { .. } => WARPGROUP_TILE,
        }
    }

    /// Returns the number of tokens of the step up to and including the last token that absorbed attention
    /// may process.
    fn tokens(&self) -> usize {
        let (bounds, all) = (&self.args.rows.bounds, self.args.q.rows());
        let short = bounds.mla_decode_tokens.max(bounds.decode_rows);
        if self.short_rows_only { short.min(all) } else { all }
    }

    /// Returns the number of decode rows (one token each), which precede all other rows.
    fn decode_rows(&self) -> usize {
        self.args.rows.bounds.decode_rows.min(self.args.rows.len())
    }

    /// Returns the size of the scratch memory in bytes: absorbed queries, and partial results of splits.
    pub(super) fn scratch_bytes(&self) -> usize {
        let (heads, kv_lora_rank) = (self.args.heads.w_uk.len(), self.layout.kv_lora_rank);
        let record_bytes =
            heads.min(self.heads_per_block()) * (kv_lora_rank + RECORD_EXTRA_FLOATS) * 4;
        let records = self.records() * heads.div_ceil(self.heads_per_block());
        self.tokens() * heads * kv_lora_rank * 2 + records * record_bytes
    }

    /// Returns the maximum number of splits of a decode row.
    fn splits(&self) -> usize {
        let longest = self.args.rows.bounds.max_context_len;
        match self.kernel {
            MlaDecodeKernel::Warps { split_divisor, .. } => {
                max_splits(longest, SPLITS, split_divisor)
            }
            MlaDecodeKernel::Warpgroups { .. } => longest.div_ceil(MIN_WARPGROUP_SPLIT_KEYS).max(1),
        }
    }

    /// Returns the maximum number of partial results of all decode rows together, per tile of
    /// `heads_per_block` heads.
    fn records(&self) -> usize {
        let (rows, splits) = (self.decode_rows(), self.splits());
        match self.kernel {
            MlaDecodeKernel::Warps { .. } => rows * splits,
            MlaDecodeKernel::Warpgroups { runs, .. } => {
                let records_per_run = RUN_RECORDS
                    * self.tokens_per_block(self.args.rows.bounds.max_rows_per_request, 0);
                (rows * splits).min(rows + runs * records_per_run)
            }
        }
    }
}

/// 16-bit rows of several heads on the device: address of the first row, and strides in elements between
/// heads and between rows.
struct HeadStridedRows<P> {
    address: P,
    head_stride: usize,
    row_stride: usize,
}

/// Scratch memory of absorbed MLA: absorbed queries, which are later overwritten by the weighted means, and
/// partial results of splits.
#[derive(Clone, Copy)]
struct MlaDecodeScratch {
    absorbed_q: *mut u8,
    partial: *mut u8,
}

/// Rows that one launch of the attention kernel processes.
#[derive(Clone, Copy)]
enum MlaDecodeRows {
    /// The first `rows` rows, which have one token each; the keys of a row are divided into splits.
    Splits { rows: usize },
    /// Every token of the rows `first..end`, without splits.
    EachToken { first: usize, end: usize },
}

impl GpuBackend {
    /// Returns the plan of absorbed MLA on tensor cores; `None` if the sizes are unsupported.
    /// `short_rows_only`: only rows of fewer than `BatchUpperBounds::MLA_PREFILL_TOKENS` tokens are computed.
    pub(super) fn plan_mla_decode<'a>(
        &self,
        layout: &'a MlaKvLayout,
        pool: *const u8,
        args: &'a MlaAttentionArgs<'a>,
        short_rows_only: bool,
    ) -> Result<Option<MlaDecodeLaunchArgs<'a>>, DeviceError> {
        let MlaKvLayout { kv_lora_rank, rope_dim, block_tokens, dtype, .. } = *layout;
        let (key, value) = (args.heads.w_uk.n(), args.heads.w_uv.n());
        let fits = dtype == self.half_dtype()
            && [128, 256, MAX_KV_LORA_RANK].contains(&kv_lora_rank)
            && rope_dim.is_multiple_of(32)
            && block_tokens.is_multiple_of(TILE)
            && (key > 0 && key.is_multiple_of(32) && key <= MAX_KV_LORA_RANK)
            && value.is_multiple_of(TILE)
            && has_16_byte_rows(args.q);
        let Some(w_uk_t) = args.heads.w_uk_t.filter(|_| fits) else { return Ok(None) };
        let kernel = if args.first_position == 0 && self.uses_warpgroup_decode(layout, args) {
            let pool = self.tensor_map(pool, layout.blocks * block_tokens, layout.width())?;
            let tiles = args.heads.w_uk.len().div_ceil(WARPGROUP_TILE);
            MlaDecodeKernel::Warpgroups {
                pool,
                runs: (self.multiprocessors() as usize / tiles).max(1),
            }
        } else {
            let (tiles, max_stages, padding) = if self.warp_size() == 64 {
                (2, 1, WAVEFRONT64_ROW_PADDING)
            } else {
                (4, MAX_STAGES, ROW_PADDING)
            };
            let step_bytes = tiles * TILE * (layout.width() + padding) * 2;
            let capacity = (self.shared_bytes() as usize).saturating_sub(self.mla_static_bytes());
            match (capacity / step_bytes).min(max_stages) {
                0 => return Ok(None),
                stages => MlaDecodeKernel::Warps {
                    stages,
                    step_bytes,
                    split_divisor: self.launch_limits().split_divisor(),
                },
            }
        };
        Ok(Some(MlaDecodeLaunchArgs { args, layout, pool, w_uk_t, short_rows_only, kernel }))
    }

    /// Whether the WGMMA kernel is used: it fits into shared memory, KV rows are a whole number of panels,
    /// and there are enough rows. With few rows the kernel without WGMMA is faster, because its blocks
    /// process fewer heads each, so that there are more blocks.
    fn uses_warpgroup_decode(&self, layout: &MlaKvLayout, args: &MlaAttentionArgs<'_>) -> bool {
        let rows = args.rows.len();
        let is_few_rows = args.heads.w_uk.len() > WARPGROUP_TILE
            && rows <= FEW_ROWS_MAX
            && rows == args.rows.bounds.decode_rows;
        !is_few_rows
            && self.has_wgmma_tma()
            && layout.rope_dim.is_multiple_of(PANEL_ROW / 2)
            && warpgroup_shared_bytes(layout) + WARPGROUP_STATIC_BYTES
                <= self.shared_bytes() as usize
    }

    /// Computes absorbed MLA of all rows, or only of rows with fewer than `BatchUpperBounds::MLA_PREFILL_TOKENS`
    /// tokens.
    pub(super) fn attend_mla_absorbed(
        &self,
        s: &DeviceStream,
        o: &mut MatMut<'_>,
        call: &MlaDecodeLaunchArgs<'_>,
    ) -> Result<(), DeviceError> {
        let (args, kv_lora_rank, tokens) = (call.args, call.layout.kv_lora_rank, call.tokens());
        if tokens == 0 {
            return Ok(()); // All rows use prefill, or this replica is idle in lockstep.
        }
        let (heads, rows, splits) = (args.heads.w_uk.len(), call.decode_rows(), call.splits());
        let (tiles, row_stride) = (heads.div_ceil(call.heads_per_block()), heads * kv_lora_rank);
        // The weighted means of the compressed KV overwrite the absorbed queries.
        let absorbed_q = self.scratch(s, call.scratch_bytes())?;
        // SAFETY: the address is in the same scratch allocation, after the absorbed queries.
        let partial = unsafe { absorbed_q.add(tokens * row_stride * 2) };
        let scratch = MlaDecodeScratch { absorbed_q, partial };
        let qk_head_dim = call.w_uk_t.k() + call.layout.rope_dim;
        let q = HeadStridedRows {
            address: args.q.as_ptr(),
            head_stride: qk_head_dim,
            row_stride: args.q.stride(),
        };
        let absorbed_rows =
            HeadStridedRows { address: absorbed_q, head_stride: kv_lora_rank, row_stride };
        self.head_gemm(s, call, &absorbed_rows, &q, call.w_uk_t)?;
        if rows > 0 {
            // Blocks that process different head tiles process the same parts of the list of splits, so the
            // number of parts is the number of resident blocks divided by the number of head tiles.
            let runs = (self.decode_blocks(call) / tiles).clamp(1, rows * splits);
            let grid = [runs as u32, tiles as u32, 1];
            let decode_rows = MlaDecodeRows::Splits { rows };
            self.decode_attention(s, call, scratch, grid, decode_rows)?;
        }
        if rows < tokens {
            let runs =
                (tokens - rows).div_ceil(call.tokens_per_block(ANY_TOKEN_COUNT, self.warp_size()));
            let blocks = match call.kernel {
                MlaDecodeKernel::Warps { .. } => runs,
                MlaDecodeKernel::Warpgroups { .. } => {
                    (self.decode_blocks(call) / tiles).clamp(1, runs.max(1))
                }
            };
            let grid = [blocks as u32, tiles as u32, 1];
            let other_rows = MlaDecodeRows::EachToken { first: rows, end: args.rows.len() };
            self.decode_attention(s, call, scratch, grid, other_rows)?;
        }
        let averages = HeadStridedRows {
            address: absorbed_q.cast_const(),
            head_stride: kv_lora_rank,
            row_stride,
        };
        let (w_uv, o_stride) = (args.heads.w_uv, o.stride());
        let o = HeadStridedRows {
            address: o.as_mut_ptr(),
            head_stride: w_uv.n(),
            row_stride: o_stride,
        };
        self.head_gemm(s, call, &o, &averages, w_uv)
    }

    /// Returns the static shared memory per block of the kernel without WGMMA, in bytes.
    fn mla_static_bytes(&self) -> usize {
        if self.warp_size() == 64 { WAVEFRONT64_STATIC_BYTES } else { STATIC_BYTES }
    }

    /// Returns the number of warps per token of a block of the kernel without WGMMA. On GPUs with wavefronts of 64
    /// lanes, two wavefronts share the channels of 16 keys only if one of them does not have the registers for all.
    fn warps_per_token(&self, layout: &MlaKvLayout) -> usize {
        match self.warp_size() {
            64 if layout.kv_lora_rank < MAX_KV_LORA_RANK => 2,
            64 => 4,
            _ => 8,
        }
    }

    /// Returns the number of attention blocks for decode rows that are resident on the device at a time.
    fn decode_blocks(&self, call: &MlaDecodeLaunchArgs<'_>) -> usize {
        match call.kernel {
            MlaDecodeKernel::Warps { stages, step_bytes, .. } => {
                let max_tokens = call.args.rows.bounds.max_rows_per_request.max(1);
                let tokens = call.tokens_per_block(max_tokens, self.warp_size());
                let block_bytes = stages * step_bytes + self.mla_static_bytes();
                let warps = tokens * self.warps_per_token(call.layout);
                self.launch_limits().mla_decode_blocks(block_bytes, warps)
            }
            MlaDecodeKernel::Warpgroups { .. } => self.multiprocessors() as usize,
        }
    }

    /// Launches the attention kernel, which replaces the absorbed queries in `scratch` by weighted means of
    /// the compressed KV, for all heads.
    fn decode_attention(
        &self,
        s: &DeviceStream,
        call: &MlaDecodeLaunchArgs<'_>,
        scratch: MlaDecodeScratch,
        grid: [u32; 3],
        decode_rows: MlaDecodeRows,
    ) -> Result<(), DeviceError> {
        let args = call.args;
        let heads = args.heads.w_uk.len();
        let (first, rows, max_tokens) = match decode_rows {
            MlaDecodeRows::Splits { rows } => {
                (0, rows, args.rows.bounds.max_rows_per_request.max(1))
            }
            MlaDecodeRows::EachToken { first, end } => (first, end, ANY_TOKEN_COUNT),
        };
        let each_token = matches!(decode_rows, MlaDecodeRows::EachToken { .. });
        let arrival_counters = self.counters(s, rows * heads.div_ceil(call.heads_per_block()))?;
        let tokens_per_block = call.tokens_per_block(max_tokens, self.warp_size());
        let launch = self.decode_launch(call, grid, each_token, tokens_per_block)?;
        let launch = launch
            .overlaps_predecessor()
            .arg_ptr(scratch.absorbed_q)
            .arg_ptr(scratch.partial)
            .arg_ptr(arrival_counters)
            .arg_ptr(scratch.absorbed_q)
            .arg(args.q)
            .arg_ptr(call.pool);
        let launch = match &call.kernel {
            MlaDecodeKernel::Warps { .. } => launch,
            MlaDecodeKernel::Warpgroups { pool, .. } => launch.arg_words(&pool.0),
        };
        let launch = launch
            .arg(args.rows.cu_q)
            .arg(args.rows.context_lens)
            .arg(args.rows.block_tables)
            .arg_or_null(args.rows.table_rows)
            .u32(rows as u32)
            .u32(heads as u32)
            .u32((call.w_uk_t.k() + call.layout.rope_dim) as u32)
            .u32(args.rows.block_tables.stride() as u32);
        let launch = match &call.kernel {
            MlaDecodeKernel::Warps { .. } => launch.u32(first as u32),
            MlaDecodeKernel::Warpgroups { .. } => {
                launch.u32(call.records() as u32).u32(first as u32).u32(tokens_per_block as u32)
            }
        };
        let launch = launch.u32(args.q.stride() as u32).f32(args.scale * LOG2_E);
        // SAFETY: the shapes were checked; the caller guarantees context lengths and block tables; scratch
        // memory and counters cover all rows, heads and splits.
        unsafe { launch.launch(self, s) }
    }

    /// Returns the launch of the attention kernel without arguments. The kernel processes one token at a time
    /// (`each_token`), or `tokens_per_block` successive decode rows at a time.
    fn decode_launch(
        &self,
        call: &MlaDecodeLaunchArgs<'_>,
        grid: [u32; 3],
        each_token: bool,
        tokens_per_block: usize,
    ) -> Result<KernelLaunch, DeviceError> {
        let layout = call.layout;
        // `LONG_ROW` is only defined in launches that skip rows of many tokens, which non-absorbed MLA
        // computes.
        let skips_long_rows = each_token && call.short_rows_only;
        let kv_lora_rank = ("KV_LORA_RANK", layout.kv_lora_rank as u32);
        let rope_dim = ("QK_ROPE_HEAD_DIM", layout.rope_dim as u32);
        let block = ("BLOCK_TOKENS", layout.block_tokens as u32);
        let has_splits = !each_token;
        let each_token = ("EACH_TOKEN", u32::from(each_token));
        let long = ("LONG_ROW", BatchUpperBounds::MLA_PREFILL_TOKENS as u32);
        match &call.kernel {
            MlaDecodeKernel::Warps { stages, step_bytes, split_divisor } => {
                let ring_stages = ("STAGES", *stages as u32);
                let first_position = ("FIRST_POSITION", call.args.first_position as u32);
                let tokens = ("TOKENS_PER_BLOCK", tokens_per_block as u32);
                let divisor = *split_divisor;
                let mut defines = vec![
                    kv_lora_rank,
                    rope_dim,
                    block,
                    ring_stages,
                    each_token,
                    first_position,
                    tokens,
                ];
                defines.extend(skips_long_rows.then_some(long));
                let is_divided = has_splits && divisor > 1;
                defines.extend(is_divided.then_some(("SPLIT_DIVISOR", divisor as u32)));
                let kernel = self.kernel(&DECODE, "mla_decode", &defines)?;
                let warps = (tokens_per_block * self.warps_per_token(layout)) as u32;
                let shared_bytes = (stages * step_bytes) as u32;
                Ok(KernelLaunch::new(kernel, grid, warps * self.warp_size(), shared_bytes))
            }
            MlaDecodeKernel::Warpgroups { .. } => {
                let defines = [kv_lora_rank, rope_dim, block, each_token, long];
                let defines = &defines[..defines.len() - usize::from(!skips_long_rows)];
                let kernel = self.kernel(&DECODE_WGMMA, "mla_decode_wgmma", defines)?;
                Ok(KernelLaunch::new(
                    kernel,
                    grid,
                    WARPGROUP_THREADS,
                    warpgroup_shared_bytes(layout) as u32,
                ))
            }
        }
    }

    /// Computes `y[t, h] = W_h x[t, h]`, where `W_h` is the matrix of head `h`, for each head and each token
    /// `t` that absorbed attention may process.
    fn head_gemm(
        &self,
        s: &DeviceStream,
        call: &MlaDecodeLaunchArgs<'_>,
        y: &HeadStridedRows<*mut u8>,
        x: &HeadStridedRows<*const u8>,
        w: &PackedMatrixGroup,
    ) -> Result<(), DeviceError> {
        let (rows, tokens) = (&call.args.rows, call.tokens());
        let skips_long_rows = call.short_rows_only
            && rows.bounds.max_query_len >= BatchUpperBounds::MLA_PREFILL_TOKENS;
        let long = ("LONG_ROW", BatchUpperBounds::MLA_PREFILL_TOKENS as u32);
        let defines = [("INPUTS", w.k() as u32), ("OUTPUTS", w.n() as u32), long];
        let defines = &defines[..defines.len() - usize::from(!skips_long_rows)];
        let kernel = self.kernel(&HEAD_GEMM, "mla_head_gemm", defines)?;
        let strips_per_warp = match w.k() / 32 {
            16.. => 1,
            8.. => 2,
            _ => 4,
        };
        let strip_rows = if self.warp_size() == 64 { 16 } else { 8 };
        let strips = strips_per_warp * (HEAD_GEMM_THREADS / self.warp_size()) as usize;
        let blocks = (w.n() / strip_rows).div_ceil(strips);
        let max_blocks = HEAD_GEMM_BLOCKS * self.multiprocessors() as usize;
        let row_blocks =
            (max_blocks / (blocks * w.len())).clamp(1, tokens.div_ceil(HEAD_GEMM_ROWS));
        let block_tokens = tokens.div_ceil(row_blocks).next_multiple_of(HEAD_GEMM_ROWS);
        let grid = [blocks as u32, w.len() as u32, tokens.div_ceil(block_tokens) as u32];
        let launch = KernelLaunch::new(kernel, grid, HEAD_GEMM_THREADS, 0)
            .overlaps_predecessor()
            .arg_ptr(y.address)
            .arg_ptr(x.address)
            .arg_ptr(w.as_ptr())
            .arg(rows.cu_q)
            .u32(rows.len() as u32)
            .u32(tokens as u32)
            .u32(block_tokens as u32)
            .u32(x.head_stride as u32)
            .u32(x.row_stride as u32)
            .u32(y.row_stride as u32);
        // SAFETY: the columns of all heads are inside the rows of `x` and `y`, whose shapes were checked.
        unsafe { launch.launch(self, s) }
    }
}

/// Returns the dynamic shared memory of the WGMMA kernel in bytes: queries, ring-buffer stages, and a panel
/// of probabilities.
const fn warpgroup_shared_bytes(layout: &MlaKvLayout) -> usize {
    let panel = WARPGROUP_TILE * PANEL_ROW;
    let operand = layout.width() * 2 / PANEL_ROW * panel;
    BARRIER_BYTES + (1 + WARPGROUP_STAGES) * operand + panel + PANEL_ALIGNMENT
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn mla_decode_splits_are_bounded() {
        for longest in [1, 256, 1024, 1025, 2048, 2049, 8192, 8193, 32_768, 32_769, 131_072] {
            for divisor in [1, 2] {
                let keys = |context: usize| {
                    let split = SPLITS.iter().find(|split| context <= split.max_context_len);
                    split.unwrap().keys_with(divisor)
                };
                let splits = |context: usize| context.div_ceil(keys(context));
                let expected = (1..=longest).map(splits).max();
                assert_eq!(max_splits(longest, SPLITS, divisor), expected.unwrap(), "{longest}");
            }
        }
    }
}
