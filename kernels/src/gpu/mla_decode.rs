//! Latent attention on matrix units, absorbed: queries are taken to the latents, means of latents are gathered from the pool, and
//! each head makes its value of its mean.

use device::gpu::{KernelLaunch, KernelSource, TensorMap};
use device::{DeviceError, DeviceStream, MatMut};

use super::attention::{DRIVER_BYTES, LOG2_E, most_splits};
use super::gemm::has_16_byte_rows;
use crate::gpu::GpuBackend;
use crate::{MlaAttentionArgs, MlaKvLayout, PackedGroup, RowBounds};

static HEAD_GEMM: KernelSource = kernel_source!("mla_head_gemm/mla_head_gemm.hip");
static DECODE: KernelSource = kernel_source!("mla_decode/mla_decode.hip");
static DECODE_WGMMA: KernelSource = kernel_source!("mla_decode_wgmma/mla_decode_wgmma.hip");

/// Heads of a block, and keys of a wave in a step.
const TILE: usize = 16;
/// Heads of a block of warpgroups, and keys of a step.
const WARPGROUP_TILE: usize = 64;
/// Its threads: two warpgroups multiply, one fetches.
const WARPGROUP_THREADS: u32 = 384;
/// Steps in its ring, beside which the queries lie.
const WARPGROUP_STAGES: usize = 2;
/// Bytes of a row of what warpgroups multiply, and what such a matrix begins on.
const PANEL_ROW: usize = 128;
const PANEL_ALIGNMENT: usize = 1024;
/// Largest latent, for which a wave has registers.
const MAX_KV_LORA_RANK: usize = 512;
/// Spare elements behind each row of the pool in shared memory.
const PADDING: usize = 8;
/// Steps in a block's ring, at most.
const MAX_STAGES: usize = 3;
/// Shared memory of a block beside its ring: the kernel's static arrays.
const STATIC_BYTES: usize = 7 << 10;
/// Tokens of a block of waves of 64 lanes, at most, each of which has waves of its own. Four had no registers, and narrow waves have
/// none for two.
const WAVE64_TOKENS: usize = 2;
/// Blocks that share a multiprocessor, at most.
const MAX_BLOCKS: usize = 2;
/// Its barriers, in front of its panels.
const BARRIER_BYTES: usize = 128;
/// As `STATIC_BYTES`, of warpgroups.
const WARPGROUP_STATIC_BYTES: usize = 1 << 10;
/// Floats of a record behind its sums of latents.
const RECORD_EXTRA_FLOATS: usize = 16;
/// Threads of a block that multiplies by a head's matrix, and how many rows it takes at a time.
const HEAD_GEMM_THREADS: u32 = 128;
const HEAD_GEMM_ROWS: usize = 16;
/// Such blocks that a multiprocessor has at once: rows are divided among no more of them, since each one reads its matrix.
const HEAD_GEMM_BLOCKS: usize = 4;

/// Tokens of rows of any number of them.
const ANY_TOKEN_COUNT: usize = 1 << 20;

/// Contexts up to which a split has so many keys. The twin of `split_keys` in mla_decode.hip.
const SPLITS: &[(usize, usize)] = &[(2048, 256), (8192, 512), (32768, 1024), (usize::MAX, 4096)];

/// Rows of more heads than a block of warpgroups has that blocks of 16 heads are quicker with: on an H200 128 heads of one row take 37 and
/// 59 us with 1,088 keys, 59 and 93 with 8,192; those of 16 rows 428 and 184.
const FEW_ROWS_MAX: usize = 2;
/// Splits of a block that warpgroups have room for in memory, of each of the tokens that are taken together: they choose no shorter ones.
/// What batches whose contexts differ are quickest with is up to ten.
const RUN_RECORDS: usize = 12;
/// Keys of their splits, at least. The twin of `SHORTEST` in mla_decode_wgmma/split_length.h.
const MIN_SPLIT_KEYS: usize = 256;

/// What all launches share.
pub(super) struct MlaDecodeCall<'a> {
    args: &'a MlaAttentionArgs<'a>,
    layout: &'a MlaKvLayout,
    /// First byte of the layer.
    pool: *const u8,
    w_uk_t: &'a PackedGroup,
    /// Rows of at least `RowBounds::MLA_PREFILL_TOKENS` tokens are somebody else's.
    short_rows_only: bool,
    kernel: MlaDecodeKernel,
}

/// How means are gathered.
enum MlaDecodeKernel {
    /// By waves, each with keys of its own: with so many steps in the ring.
    Warps { stages: usize, step_bytes: usize },
    /// By warpgroups, with so many runs of the list of splits at most.
    Warpgroups { pool: TensorMap, runs: usize },
}

impl MlaDecodeCall<'_> {
    /// Tokens that a block takes together of `most` that may be, all with the same heads.
    fn tokens_per_block(&self, most: usize, wave: u32) -> usize {
        match self.kernel {
            MlaDecodeKernel::Warps { .. } if wave != 64 || self.args.first_position > 0 => 1,
            MlaDecodeKernel::Warps { .. } => most.clamp(1, WAVE64_TOKENS),
            MlaDecodeKernel::Warpgroups { .. } => {
                most.clamp(1, (WARPGROUP_TILE / self.args.heads.w_uk.len()).max(1))
            }
        }
    }

    /// Heads of a block.
    fn heads_per_block(&self) -> usize {
        match self.kernel {
            MlaDecodeKernel::Warps { .. } => TILE,
            MlaDecodeKernel::Warpgroups { .. } => WARPGROUP_TILE,
        }
    }

    /// Tokens up to the last one that is attended to.
    fn tokens(&self) -> usize {
        let (bounds, all) = (&self.args.rows.bounds, self.args.q.rows());
        let short = bounds.mla_decode_tokens.max(bounds.decode_rows);
        if self.short_rows_only { short.min(all) } else { all }
    }

    /// Rows of one token, in front.
    fn decode_rows(&self) -> usize {
        self.args.rows.bounds.decode_rows.min(self.args.rows.len())
    }

    /// Of taken queries, and of what splits leave.
    pub(super) fn scratch_bytes(&self) -> usize {
        let (heads, latent) = (self.args.heads.w_uk.len(), self.layout.kv_lora_rank);
        let record_bytes = heads.min(self.heads_per_block()) * (latent + RECORD_EXTRA_FLOATS) * 4;
        let records = self.records() * heads.div_ceil(self.heads_per_block());
        self.tokens() * heads * latent * 2 + records * record_bytes
    }

    /// Most splits of a row of one token.
    fn splits(&self) -> usize {
        let longest = self.args.rows.bounds.max_context_len;
        match self.kernel {
            MlaDecodeKernel::Warps { .. } => most_splits(longest, SPLITS),
            MlaDecodeKernel::Warpgroups { .. } => longest.div_ceil(MIN_SPLIT_KEYS).max(1),
        }
    }

    /// Most splits of all rows of one token, of each tile of heads.
    fn records(&self) -> usize {
        let (rows, splits) = (self.decode_rows(), self.splits());
        match self.kernel {
            MlaDecodeKernel::Warps { .. } => rows * splits,
            MlaDecodeKernel::Warpgroups { runs, .. } => {
                let each = RUN_RECORDS
                    * self.tokens_per_block(self.args.rows.bounds.max_rows_per_request, 0);
                (rows * splits).min(rows + runs * each)
            }
        }
    }
}

/// Rows of bf16 on the device: the first one, channels from head to head and from row to row.
struct HeadRows<P> {
    at: P,
    head: usize,
    stride: usize,
}

impl GpuBackend {
    /// What attends on matrix units, if these sizes fit; `short_alone`: to rows of fewer than `RowBounds::MLA_PREFILL_TOKENS` tokens.
    pub(super) fn plan_mla_decode<'a>(
        &self,
        layout: &'a MlaKvLayout,
        pool: *const u8,
        args: &'a MlaAttentionArgs<'a>,
        short_alone: bool,
    ) -> Result<Option<MlaDecodeCall<'a>>, DeviceError> {
        let MlaKvLayout { kv_lora_rank: latent, rope_dim: rotary, block_tokens, dtype, .. } =
            *layout;
        let (key, value) = (args.heads.w_uk.n(), args.heads.w_uv.n());
        let fits = dtype == self.half_dtype()
            && [128, 256, MAX_KV_LORA_RANK].contains(&latent)
            && rotary.is_multiple_of(32)
            && block_tokens.is_multiple_of(TILE)
            && (key > 0 && key.is_multiple_of(32) && key <= MAX_KV_LORA_RANK)
            && value.is_multiple_of(TILE)
            && has_16_byte_rows(args.q);
        let Some(transposed) = args.heads.w_uk_t.filter(|_| fits) else { return Ok(None) };
        let by = if args.first_position == 0 && self.uses_warpgroup_decode(layout, args) {
            let pool = self.tensor_map(pool, layout.blocks * block_tokens, layout.width())?;
            let tiles = args.heads.w_uk.len().div_ceil(WARPGROUP_TILE);
            MlaDecodeKernel::Warpgroups {
                pool,
                runs: (self.multiprocessors() as usize / tiles).max(1),
            }
        } else {
            let (tiles, most) = if self.warp_size() == 64 { (2, 1) } else { (4, MAX_STAGES) };
            let step_bytes = tiles * TILE * (layout.width() + PADDING) * 2;
            let room = (self.shared_bytes() as usize).saturating_sub(STATIC_BYTES);
            match (room / step_bytes).min(most) {
                0 => return Ok(None),
                stages => MlaDecodeKernel::Warps { stages, step_bytes },
            }
        };
        Ok(Some(MlaDecodeCall {
            args,
            layout,
            pool,
            w_uk_t: transposed,
            short_rows_only: short_alone,
            kernel: by,
        }))
    }

    /// Whether warpgroups gather means over such a pool: shared memory has room for them, its rows are whole panels, and rows are not so
    /// few that blocks of fewer heads, of which there are more, are done sooner.
    fn uses_warpgroup_decode(&self, layout: &MlaKvLayout, args: &MlaAttentionArgs<'_>) -> bool {
        let rows = args.rows.len();
        let lone = args.heads.w_uk.len() > WARPGROUP_TILE
            && rows <= FEW_ROWS_MAX
            && rows == args.rows.bounds.decode_rows;
        !lone
            && self.has_wgmma_tma()
            && layout.rope_dim.is_multiple_of(PANEL_ROW / 2)
            && warpgroup_shared_bytes(layout) + WARPGROUP_STATIC_BYTES
                <= self.shared_bytes() as usize
    }

    /// Outputs of all rows, or of those of fewer than `RowBounds::MLA_PREFILL_TOKENS` tokens.
    pub(super) fn attend_mla_absorbed(
        &self,
        s: &DeviceStream,
        o: &mut MatMut<'_>,
        call: &MlaDecodeCall<'_>,
    ) -> Result<(), DeviceError> {
        let (args, latent, tokens) = (call.args, call.layout.kv_lora_rank, call.tokens());
        if tokens == 0 {
            return Ok(()); // All rows are long, or a replica keeps others company.
        }
        let (heads, rows, splits) = (args.heads.w_uk.len(), call.decode_rows(), call.splits());
        let (tiles, stride) = (heads.div_ceil(call.heads_per_block()), heads * latent);
        // Means take the place of the queries they come from.
        let taken = self.scratch(s, call.scratch_bytes())?;
        // SAFETY: behind the taken queries, in the same scratch memory.
        let partial = unsafe { taken.add(tokens * stride * 2) };
        let turned = call.w_uk_t.k() + call.layout.rope_dim;
        let q = HeadRows { at: args.q.as_ptr(), head: turned, stride: args.q.stride() };
        let latents = HeadRows { at: taken, head: latent, stride };
        self.head_gemm(s, call, &latents, &q, (call.w_uk_t, tokens))?;
        if rows > 0 {
            // Blocks of all heads take the same runs of the list of splits.
            let runs = (self.decode_blocks(call) / tiles).clamp(1, rows * splits);
            let grid = (runs as u32, tiles as u32, 1);
            self.decode_attention(s, call, (taken, partial), grid, (0, rows, splits))?;
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
            let grid = (blocks as u32, tiles as u32, 1);
            let all = args.rows.len();
            self.decode_attention(s, call, (taken, partial), grid, (rows, all, 0))?;
        }
        let means = HeadRows { at: taken.cast_const(), head: latent, stride };
        let (values, o_stride) = (args.heads.w_uv, o.stride());
        let o = HeadRows { at: o.as_mut_ptr(), head: values.n(), stride: o_stride };
        self.head_gemm(s, call, &o, &means, (values, tokens))
    }

    /// As many blocks as run at once.
    fn decode_blocks(&self, call: &MlaDecodeCall<'_>) -> usize {
        let each = match call.kernel {
            MlaDecodeKernel::Warps { stages, step_bytes } => {
                let room = self.shared_bytes() as usize + DRIVER_BYTES;
                let block = stages * step_bytes + STATIC_BYTES + DRIVER_BYTES;
                (room / block).clamp(1, MAX_BLOCKS)
            }
            MlaDecodeKernel::Warpgroups { .. } => 1,
        };
        each * self.multiprocessors() as usize
    }

    /// Means of latents in place of `taken`, of all heads: of `rows` rows of one token, through `splits` splits at most; or, of
    /// none, of each token from `first` on.
    fn decode_attention(
        &self,
        s: &DeviceStream,
        call: &MlaDecodeCall<'_>,
        (taken, partial): (*mut u8, *mut u8),
        grid: (u32, u32, u32),
        (first, rows, splits): (usize, usize, usize),
    ) -> Result<(), DeviceError> {
        let args = call.args;
        let heads = args.heads.w_uk.len();
        let arrived = self.counters(s, rows * heads.div_ceil(call.heads_per_block()))?;
        let most = if splits == 0 {
            ANY_TOKEN_COUNT
        } else {
            args.rows.bounds.max_rows_per_request.max(1)
        };
        let together = call.tokens_per_block(most, self.warp_size());
        let launch = self.decode_launch(call, grid, (splits == 0, together))?;
        let launch = launch
            .overlaps_predecessor()
            .arg_ptr(taken)
            .arg_ptr(partial)
            .arg_ptr(arrived)
            .arg_ptr(taken)
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
                launch.u32(call.records() as u32).u32(first as u32).u32(together as u32)
            }
        };
        let launch = launch.u32(args.q.stride() as u32).f32(args.scale * LOG2_E);
        // SAFETY: the shapes were compared; lengths and tables are the caller's promise; scratch and counters have the sizes
        // of rows, heads and splits.
        unsafe { launch.launch(self, s) }
    }

    /// The kernel of `decode_attention` without its arguments: of tokens each by itself, or of rows, so many of these together.
    fn decode_launch(
        &self,
        call: &MlaDecodeCall<'_>,
        grid: (u32, u32, u32),
        (each, together): (bool, usize),
    ) -> Result<KernelLaunch, DeviceError> {
        let layout = call.layout;
        // What leaves nobody out has no define.
        let without = usize::from(!(each && call.short_rows_only));
        let latent = ("LATENT", layout.kv_lora_rank as u32);
        let rotary = ("ROTARY", layout.rope_dim as u32);
        let block = ("BLOCK_TOKENS", layout.block_tokens as u32);
        let each = ("EACH_TOKEN", u32::from(each));
        let long = ("LONG_ROW", RowBounds::MLA_PREFILL_TOKENS as u32);
        match &call.kernel {
            MlaDecodeKernel::Warps { stages, step_bytes } => {
                let depth = ("STAGES", *stages as u32);
                let unseen = ("UNSEEN", call.args.first_position as u32);
                let at_once = ("TOGETHER", together as u32);
                let defines = [latent, rotary, block, depth, each, unseen, at_once, long];
                let defines = &defines[..defines.len() - without];
                let kernel = self.kernel(&DECODE, "mla_decode", defines)?;
                let tile_waves = if self.warp_size() == 64 { 2 } else { 8 };
                let threads = together as u32 * tile_waves * self.warp_size();
                Ok(KernelLaunch::new(kernel, grid, threads, (stages * step_bytes) as u32))
            }
            MlaDecodeKernel::Warpgroups { .. } => {
                let defines = [latent, rotary, block, each, long];
                let defines = &defines[..defines.len() - without];
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

    /// `y[t, h] = W_h x[t, h]` for the first `tokens` tokens.
    fn head_gemm(
        &self,
        s: &DeviceStream,
        call: &MlaDecodeCall<'_>,
        y: &HeadRows<*mut u8>,
        x: &HeadRows<*const u8>,
        (w, tokens): (&PackedGroup, usize),
    ) -> Result<(), DeviceError> {
        let rows = &call.args.rows;
        let leaves_out =
            call.short_rows_only && rows.bounds.max_query_len >= RowBounds::MLA_PREFILL_TOKENS;
        let long = ("LONG_ROW", RowBounds::MLA_PREFILL_TOKENS as u32);
        let defines = [("INPUTS", w.k() as u32), ("OUTPUTS", w.n() as u32), long];
        let defines = &defines[..defines.len() - usize::from(!leaves_out)];
        let kernel = self.kernel(&HEAD_GEMM, "mla_head_gemm", defines)?;
        let own = match w.k() / 32 {
            16.. => 1,
            8.. => 2,
            _ => 4,
        };
        let strip_rows = if self.warp_size() == 64 { 16 } else { 8 };
        let strips = own * (HEAD_GEMM_THREADS / self.warp_size()) as usize;
        let blocks = (w.n() / strip_rows).div_ceil(strips);
        let at_once = HEAD_GEMM_BLOCKS * self.multiprocessors() as usize;
        let parts = (at_once / (blocks * w.len())).clamp(1, tokens.div_ceil(HEAD_GEMM_ROWS));
        let each = tokens.div_ceil(parts).next_multiple_of(HEAD_GEMM_ROWS);
        let grid = (blocks as u32, w.len() as u32, tokens.div_ceil(each) as u32);
        let launch = KernelLaunch::new(kernel, grid, HEAD_GEMM_THREADS, 0)
            .overlaps_predecessor()
            .arg_ptr(y.at)
            .arg_ptr(x.at)
            .arg_ptr(w.as_ptr())
            .arg(rows.cu_q)
            .u32(rows.len() as u32)
            .u32(tokens as u32)
            .u32(each as u32)
            .u32(x.head as u32)
            .u32(x.stride as u32)
            .u32(y.stride as u32);
        // SAFETY: all heads' columns lie inside the rows, whose shapes were compared.
        unsafe { launch.launch(self, s) }
    }
}

/// Shared memory of a block of warpgroups: queries, the steps in its ring, a panel of probabilities.
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
            let keys = |context: usize| SPLITS.iter().find(|(to, _)| context <= *to).unwrap().1;
            let most = (1..=longest).map(|context: usize| context.div_ceil(keys(context))).max();
            assert_eq!(most_splits(longest, SPLITS), most.unwrap(), "{longest}");
        }
    }
}
