//! Non-absorbed MLA for rows of many tokens: keys and values of the whole context are up-projected (expanded)
//! from compressed KV, for as many heads and keys at a time as scratch memory allows, and MHA flash attention
//! reads them.

use device::gpu::{KernelLaunch, KernelSource, TensorMap, TmaMatrix};
use device::{DeviceError, DeviceStream, MatMut, MatRef};

use super::attention::{LOG2_E, TILE};
use super::gemm::{GemmWeightRows, has_16_byte_rows};
use super::launch_limits::LaunchLimits;
use super::mla_prefill_plan::{MlaPrefillTiling, MlaTilingInputs, STEP_KEYS};
use crate::gpu::GpuBackend;
use crate::{BatchUpperBounds, MlaAttentionArgs, MlaKvLayout, PackedMatrixGroup};

static GATHER: KernelSource = kernel_source!("mla_gather_kv/mla_gather_kv.hip");
static PREFILL: KernelSource = kernel_source!("mla_prefill/mla_prefill.hip");

/// Number of keys per block of the kernel that gathers compressed KV rows from the KV pool.
const GATHER_ROWS: usize = 32;
/// Number of threads per block of the gather kernel and of the attention kernel without WGMMA, and number of
/// threads in the two consumer warpgroups of the WGMMA kernel.
const THREADS: u32 = 256;
/// Number of threads per block of the WGMMA kernel: two consumer warpgroups, and a producer warpgroup of
/// which one warp loads.
const WARPGROUP_THREADS: u32 = 384;
/// Number of query tokens per tile and of keys per step of the WGMMA kernel.
const WARPGROUP_TILE: usize = 128;
/// Number of stages for key tiles, and of stages for value tiles, of the WGMMA kernel.
const WARPGROUP_STAGES: usize = 2;
/// Number of channels per WGMMA operand panel.
const PANEL: usize = 64;
/// Alignment of WGMMA operand panels in shared memory, in bytes.
const PANEL_ALIGNMENT: usize = 1024;
/// Static shared memory per block of the WGMMA kernel, in bytes.
const STATIC_BYTES: usize = 1024;
/// Number of keys that the kernel without WGMMA copies to shared memory per step.
const COPY_KEYS: usize = 64;
/// Minimum number of (token tile, head) pairs per SM if the work is divided into windows of some heads and
/// all keys; a window is what one launch processes. With fewer pairs, windows have all heads and some keys
/// instead.
const TILES_PER_SM: usize = 2;

/// Arguments that all launches of non-absorbed MLA share, the selected kernel variant, and the numbers of
/// heads and keys that are up-projected at a time.
pub(super) struct MlaPrefillLaunchArgs<'a> {
    args: &'a MlaAttentionArgs<'a>,
    layout: &'a MlaKvLayout,
    /// Address of the first byte of the layer in the KV pool.
    pool: *const u8,
    kernel: MlaPrefillKernel,
    sizes: MlaTilingInputs,
    plan: MlaPrefillTiling,
}

/// Kernel that computes the attention over the up-projected keys and values of non-absorbed MLA.
enum MlaPrefillKernel {
    Warps { stages: usize },
    Warpgroups,
}

/// Expanded keys and values of a window in scratch memory. There is one row per key position: the key
/// channels without RoPE of all heads, the values of all heads, then the compressed KV row copied from the
/// pool.
struct ExpandedKv {
    at: *mut u8,
    carry_over: *mut u8,
    /// First column of the values, first column of the compressed KV row, and row stride, in elements.
    values: usize,
    compressed_kv: usize,
    stride: usize,
}

/// A window: the heads and keys whose compressed KV is up-projected (expanded) and then attended to at a
/// time.
#[derive(Clone, Copy)]
struct KvExpansionWindow {
    first_head: usize,
    heads: usize,
    first_key: usize,
    keys: usize,
}

impl MlaPrefillLaunchArgs<'_> {
    /// Returns the size of the scratch memory in bytes: expanded keys and values of one window, and the
    /// softmax state that is carried over between key windows.
    pub(super) fn scratch_bytes(&self) -> usize {
        if self.has_rows() { self.sizes.scratch_bytes(self.plan) } else { 0 }
    }

    /// Whether the step may have rows of at least `BatchUpperBounds::MLA_PREFILL_TOKENS` tokens.
    fn has_rows(&self) -> bool {
        self.args.rows.bounds.max_query_len >= BatchUpperBounds::MLA_PREFILL_TOKENS
    }

    /// Returns `qk_head_dim`: the number of channels of a query and of a key.
    fn qk_head_dim(&self) -> usize {
        self.args.heads.w_uk.n() + self.layout.rope_dim
    }

    /// Returns the number of decode rows, which come first and are computed by absorbed attention.
    fn first_row(&self) -> usize {
        first_row(self.args)
    }
}

fn first_row(args: &MlaAttentionArgs<'_>) -> usize {
    args.rows.bounds.decode_rows.min(args.rows.len())
}

/// Returns an upper bound of the number of keys of all MLA prefill rows, each row padded to a multiple of
/// `STEP_KEYS` keys.
fn padded_keys(args: &MlaAttentionArgs<'_>) -> usize {
    let first = first_row(args);
    let tokens = args.q.rows().saturating_sub(first);
    let rows = (args.rows.len() - first).min(tokens / BatchUpperBounds::MLA_PREFILL_TOKENS);
    let filled = args.rows.bounds.mla_prefill_keys + rows * (STEP_KEYS - 1);
    (filled / STEP_KEYS).max(1) * STEP_KEYS
}

impl GpuBackend {
    /// Returns the plan of non-absorbed MLA; `None` if it is disabled or the sizes are unsupported.
    pub(super) fn plan_mla_prefill<'a>(
        &self,
        layout: &'a MlaKvLayout,
        pool: *const u8,
        args: &'a MlaAttentionArgs<'a>,
        o: &MatMut<'_>,
    ) -> Option<MlaPrefillLaunchArgs<'a>> {
        let bytes = self.mla_prefill_bytes?;
        let (key, value) = (args.heads.w_uk.n(), args.heads.w_uv.n());
        let fits = args.first_position == 0
            && (key > 0 && key.is_multiple_of(PANEL))
            && (layout.rope_dim > 0 && layout.rope_dim.is_multiple_of(PANEL))
            && matches!(value, 64 | 128)
            && has_16_byte_rows(args.q)
            && has_16_byte_rows(o.as_ref());
        let capacity = self.shared_bytes() as usize;
        let fits_warpgroups =
            warpgroup_shared_bytes(key + layout.rope_dim, value) + STATIC_BYTES <= capacity;
        let kernel = if fits_warpgroups && self.has_large_m_kernel() {
            MlaPrefillKernel::Warpgroups
        } else {
            let max_stages = if self.warp_size() == 32 { 2 } else { 1 };
            let stage_bytes = warp_shared_bytes(self.launch_limits(), key + layout.rope_dim, value);
            let stages = (capacity / stage_bytes).min(max_stages);
            MlaPrefillKernel::Warps { stages }
        };
        if !fits || matches!(kernel, MlaPrefillKernel::Warps { stages: 0 }) {
            return None;
        }
        let tile = self.tokens_of_block(&kernel);
        let sizes = MlaTilingInputs {
            bytes,
            keys: padded_keys(args),
            heads: args.heads.w_uk.len(),
            row_bytes: layout.width() * 2,
            head_bytes: (key + value) * 2,
            tiles: args.q.rows() / tile + args.rows.len() - first_row(args),
            carry_over_bytes: (tile * value + 4 * THREADS as usize) * 4,
            min_tiles: TILES_PER_SM * self.multiprocessors() as usize,
        };
        Some(MlaPrefillLaunchArgs { args, layout, pool, kernel, plan: sizes.plan(), sizes })
    }

    /// Computes the attention of the rows of at least `BatchUpperBounds::MLA_PREFILL_TOKENS` tokens.
    pub(super) fn attend_mla_non_absorbed(
        &self,
        s: &DeviceStream,
        o: &mut MatMut<'_>,
        call: &MlaPrefillLaunchArgs<'_>,
    ) -> Result<(), DeviceError> {
        if !call.has_rows() || o.rows() == 0 {
            return Ok(());
        }
        let MlaPrefillLaunchArgs { args, layout, sizes, plan, .. } = call;
        let (key, value, heads) = (args.heads.w_uk.n(), args.heads.w_uv.n(), sizes.heads);
        let at = self.scratch(s, call.scratch_bytes())?;
        let (values, compressed_kv) = (plan.heads * key, plan.heads * (key + value));
        let stride = compressed_kv + layout.width();
        // SAFETY: the address is at most one past the expanded rows; if there is carry-over state it is in
        // the same scratch allocation.
        let carry_over = unsafe { at.add(plan.keys * stride * 2) };
        let expanded = ExpandedKv { at, carry_over, values, compressed_kv, stride };
        for first_head in (0..heads).step_by(plan.heads) {
            for first_key in (0..sizes.keys).step_by(plan.keys) {
                let window = KvExpansionWindow {
                    first_head,
                    heads: plan.heads.min(heads - first_head),
                    first_key,
                    keys: plan.keys.min(sizes.keys - first_key),
                };
                // If all keys fit into one window, the gathered compressed KV is reused for the windows of
                // the other heads.
                if first_head == 0 || plan.keys < sizes.keys {
                    self.gather_compressed_kv(s, call, &expanded, window)?;
                }
                self.up_project_kv(s, call, args.heads.w_uk, 0, &expanded, window)?;
                self.up_project_kv(s, call, args.heads.w_uv, values, &expanded, window)?;
                self.attend_expanded_kv(s, o, call, &expanded, window)?;
            }
        }
        Ok(())
    }

    /// Returns the number of query tokens per tile.
    fn tokens_of_block(&self, kernel: &MlaPrefillKernel) -> usize {
        match kernel {
            MlaPrefillKernel::Warpgroups => WARPGROUP_TILE,
            MlaPrefillKernel::Warps { .. } => (THREADS / self.warp_size()) as usize * TILE,
        }
    }

    /// Gathers the compressed KV rows of the keys of `window` from the pool into the expanded rows.
    fn gather_compressed_kv(
        &self,
        s: &DeviceStream,
        call: &MlaPrefillLaunchArgs<'_>,
        expanded: &ExpandedKv,
        window: KvExpansionWindow,
    ) -> Result<(), DeviceError> {
        let (layout, rows) = (call.layout, &call.args.rows);
        let defines =
            [("WIDTH", layout.width() as u32), ("BLOCK_TOKENS", layout.block_tokens as u32)];
        let kernel = self.kernel(&GATHER, "mla_gather_kv", &defines)?;
        let launch =
            KernelLaunch::new(kernel, [(window.keys / GATHER_ROWS) as u32, 1, 1], THREADS, 0)
                .overlaps_predecessor()
                // SAFETY: the address is a column of the expanded rows.
                .arg_ptr(unsafe { expanded.at.add(expanded.compressed_kv * 2) })
                .arg_ptr(call.pool)
                .arg(rows.cu_q)
                .arg(rows.context_lens)
                .arg(rows.block_tables)
                .arg_or_null(rows.table_rows)
                .u32(call.first_row() as u32)
                .u32((rows.len() - call.first_row()) as u32)
                .u32(BatchUpperBounds::MLA_PREFILL_TOKENS as u32)
                .u32(window.first_key as u32)
                .u32(rows.block_tables.stride() as u32)
                .u32(expanded.stride as u32);
        // SAFETY: scratch memory is large enough for all rows of the window; the caller guarantees context
        // lengths and block tables.
        unsafe { launch.launch(self, s) }
    }

    /// Up-projects compressed KV by `weights` (W_UK or W_UV) to the keys or values of the heads of `window`,
    /// written from column `column` of the expanded rows on. Uses GEMM kernels in which the result of a row
    /// does not depend on the number of rows.
    fn up_project_kv(
        &self,
        s: &DeviceStream,
        call: &MlaPrefillLaunchArgs<'_>,
        weights: &PackedMatrixGroup,
        column: usize,
        expanded: &ExpandedKv,
        window: KvExpansionWindow,
    ) -> Result<(), DeviceError> {
        let (k, dtype) = (weights.k(), call.layout.dtype);
        let (n, first_output) = (window.heads * weights.n(), window.first_head * weights.n());
        // SAFETY: the weights are rows of the stacked matrices; the inputs and outputs are disjoint columns
        // of the expanded rows, which no other view uses meanwhile.
        let (w, x, y) = unsafe {
            let w = GemmWeightRows { address: weights.as_ptr().add(first_output * k * 2), n, k };
            let x = expanded.at.add(expanded.compressed_kv * 2);
            let y = expanded.at.add(column * 2);
            (
                w,
                MatRef::from_raw(x, dtype, window.keys, k, expanded.stride),
                MatMut::from_raw(y, dtype, window.keys, n, expanded.stride),
            )
        };
        if self.has_large_m_kernel() {
            return self.gemm_large_m(s, y, x, w, None);
        }
        self.gemm_tiled(s, y, x, w, None)
    }

    /// Computes the attention over the expanded keys and values of `window`.
    fn attend_expanded_kv(
        &self,
        s: &DeviceStream,
        o: &mut MatMut<'_>,
        call: &MlaPrefillLaunchArgs<'_>,
        expanded: &ExpandedKv,
        window: KvExpansionWindow,
    ) -> Result<(), DeviceError> {
        let (args, layout, tokens) = (call.args, call.layout, o.rows());
        let rows = &args.rows;
        let (query, value) = (call.qk_head_dim(), args.heads.w_uv.n());
        let (q_stride, o_stride) = (args.q.stride(), o.stride());
        let (first, count) = (call.first_row(), rows.len() - call.first_row());
        // SAFETY: the addresses are those of the columns of head `window.first_head`, which is inside the
        // rows of `q` and `o`.
        let (q, o) = unsafe {
            let q = args.q.as_ptr().add(window.first_head * query * 2);
            (q, o.as_mut_ptr().add(window.first_head * value * 2))
        };
        let [q_map, kv_map] = match call.kernel {
            MlaPrefillKernel::Warps { .. } => [TensorMap::NONE; 2],
            MlaPrefillKernel::Warpgroups => {
                let boxed = |matrix, rows, columns, stride| {
                    self.encode_tensor_map(&TmaMatrix {
                        matrix,
                        rows,
                        columns,
                        stride,
                        box_rows: WARPGROUP_TILE,
                    })
                };
                let kv_columns = expanded.stride;
                [
                    boxed(q, tokens, window.heads * query, q_stride)?,
                    boxed(expanded.at.cast_const(), window.keys, kv_columns, expanded.stride)?,
                ]
            }
        };
        let launch = self.prefill_launch(call, window)?.arg_ptr(o).arg_ptr(expanded.carry_over);
        let launch = launch.arg_ptr(self.counters(s, 1)?).arg_ptr(q).arg_ptr(expanded.at);
        let launch = launch.arg_words(&q_map.0).arg_words(&kv_map.0);
        let launch = launch.arg(rows.cu_q).arg(rows.context_lens).overlaps_predecessor();
        let rope_column = expanded.compressed_kv + layout.kv_lora_rank;
        let scalars = [
            first,
            count,
            BatchUpperBounds::MLA_PREFILL_TOKENS,
            window.first_key,
            window.keys,
            tokens,
            window.heads,
        ];
        let strides = [expanded.values, rope_column, expanded.stride, q_stride, o_stride];
        let launch = scalars.into_iter().chain(strides).fold(launch, |l, n| l.u32(n as u32));
        // SAFETY: the shapes were checked; the caller guarantees context lengths; scratch memory has the size
        // of the plan.
        unsafe { launch.f32(args.scale * LOG2_E).launch(self, s) }
    }

    /// Returns the launch of the attention kernel for the heads and keys of `window`, without arguments.
    fn prefill_launch(
        &self,
        call: &MlaPrefillLaunchArgs<'_>,
        window: KvExpansionWindow,
    ) -> Result<KernelLaunch, DeviceError> {
        let (args, tile) = (call.args, self.tokens_of_block(&call.kernel));
        let (key, value) = (args.heads.w_uk.n(), args.heads.w_uv.n());
        let kernel_define = match call.kernel {
            MlaPrefillKernel::Warpgroups => ("WGMMA", 1),
            MlaPrefillKernel::Warps { stages } => ("STAGES", stages as u32),
        };
        let defines = [
            ("QK_NOPE_HEAD_DIM", key as u32),
            ("QK_ROPE_HEAD_DIM", call.layout.rope_dim as u32),
            ("VALUE", value as u32),
            kernel_define,
        ];
        let kernel = self.kernel(&PREFILL, "mla_prefill", &defines)?;
        let (rows, first) = (args.rows.len(), call.first_row());
        Ok(match call.kernel {
            MlaPrefillKernel::Warpgroups => {
                let tiles = (args.q.rows() / tile + rows - first) * window.heads;
                let blocks = tiles.min(self.multiprocessors() as usize) as u32;
                let shared_bytes = warpgroup_shared_bytes(call.qk_head_dim(), value) as u32;
                KernelLaunch::new(kernel, [blocks, 1, 1], WARPGROUP_THREADS, shared_bytes)
            }
            MlaPrefillKernel::Warps { stages } => {
                let tiles = args.rows.bounds.max_query_len.div_ceil(tile) as u32;
                let grid = [tiles, window.heads as u32, (rows - first) as u32];
                let stage_bytes =
                    warp_shared_bytes(self.launch_limits(), call.qk_head_dim(), value);
                KernelLaunch::new(kernel, grid, THREADS, (stages * stage_bytes) as u32)
            }
        })
    }
}

/// Returns the dynamic shared memory of the WGMMA kernel in bytes: queries, stages for keys and values, and
/// outputs of 64 channels.
const fn warpgroup_shared_bytes(query: usize, value: usize) -> usize {
    let row_bytes = (1 + WARPGROUP_STAGES) * query + WARPGROUP_STAGES * value + PANEL;
    row_bytes * 2 * WARPGROUP_TILE + PANEL_ALIGNMENT
}

/// Returns the dynamic shared memory of the kernel without WGMMA in bytes, per stage.
fn warp_shared_bytes(limits: LaunchLimits, query: usize, value: usize) -> usize {
    COPY_KEYS * ((query + value) * 2 + limits.kv_padding_bytes(value, 2))
}
