//! Latent attention of rows of many tokens, expanded: keys and values of all that they see are made of latents, of as many heads and
//! keys at a time as there is memory for, and ordinary attention reads them.

use super::attention::{LOG2_E, TILE};
use super::device::HipDevice;
use super::gemm::{Lines, wide};
use super::latent_plan::{Need, Plan, STEP_KEYS};
use super::launch::Launch;
use super::source::Source;
use super::tensor_map::{Boxed, TensorMap};
use crate::{
    DeviceError, LatentAttention, LatentLayout, Mat, MatMut, PackedGroup, RowBounds, Stream,
};

static GATHER: Source = Source {
    name: "latent_gather/latent_gather.hip",
    text: include_str!("../../csrc/latent_gather/latent_gather.hip"),
};
static PREFILL: Source = Source {
    name: "latent_prefill/latent_prefill.hip",
    text: include_str!("../../csrc/latent_prefill/latent_prefill.hip"),
};

/// Keys that a block gathers.
const GATHERED: usize = 32;
/// Threads of a block that gathers, of one of waves, and of those of warpgroups that multiply.
const THREADS: u32 = 256;
/// Threads of a block of warpgroups: one wave fetches.
const GROUPS_THREADS: u32 = 384;
/// Tokens of a tile of warpgroups, and keys.
const GROUPS_TILE: usize = 128;
/// Its tiles of keys, and of values.
const GROUPS_STAGES: usize = 2;
/// Channels of a panel.
const PANEL: usize = 64;
/// What panels begin on.
const PANEL_ALIGNMENT: usize = 1024;
/// Shared memory of such a block beside what its launch asks for.
const STATIC_BYTES: usize = 1024;
/// Keys that waves copy at a time, and spare elements behind each key and value.
const COPIED: usize = 64;
const PADDING: usize = 32 + 8;
/// Tiles of tokens and heads, for each multiprocessor, from which on heads may be divided instead of keys.
const FILLED: usize = 2;

/// What all launches share.
pub(super) struct Expanded<'a> {
    args: &'a LatentAttention<'a>,
    layout: &'a LatentLayout,
    /// First byte of the layer.
    pool: *const u8,
    by: By,
    need: Need,
    plan: Plan,
}

/// How keys are attended to.
enum By {
    Waves { stages: usize },
    Groups,
}

/// Keys and values of a window in scratch memory: rows of unturned channels of all heads' keys, values of all heads, then the
/// row of the pool.
struct Made {
    at: *mut u8,
    carried: *mut u8,
    /// Columns where values, and rows of the pool, begin; of all.
    values: usize,
    latents: usize,
    stride: usize,
}

/// Heads and keys of a launch.
#[derive(Clone, Copy)]
struct Part {
    first_head: usize,
    heads: usize,
    first_key: usize,
    keys: usize,
}

impl Expanded<'_> {
    /// Bytes of what is made, and carried, at a time.
    pub(super) fn scratch_bytes(&self) -> usize {
        if self.has_rows() { self.need.scratch_bytes(self.plan) } else { 0 }
    }

    /// Whether any row may be long.
    fn has_rows(&self) -> bool {
        self.args.rows.bounds.longest_q >= RowBounds::LONG
    }

    /// Channels of a query and of a key.
    fn query(&self) -> usize {
        self.args.heads.key.n() + self.layout.rotary
    }

    /// Rows of one token, in front, which are somebody else's.
    fn first_row(&self) -> usize {
        first_row(self.args)
    }
}

fn first_row(args: &LatentAttention<'_>) -> usize {
    args.rows.bounds.decode_rows.min(args.rows.len())
}

/// Keys of all long rows at most, each row's filled up to whole steps.
fn keys_of(args: &LatentAttention<'_>) -> usize {
    let first = first_row(args);
    let tokens = args.q.rows().saturating_sub(first);
    let rows = (args.rows.len() - first).min(tokens / RowBounds::LONG);
    let filled = args.rows.bounds.long_keys + rows * (STEP_KEYS - 1);
    (filled / STEP_KEYS).max(1) * STEP_KEYS
}

impl HipDevice {
    /// What makes keys and values for long rows, if these sizes fit.
    pub(super) fn expanded<'a>(
        &self,
        layout: &'a LatentLayout,
        pool: *const u8,
        args: &'a LatentAttention<'a>,
        o: &MatMut<'_>,
    ) -> Option<Expanded<'a>> {
        let bytes = self.expanded_bytes?;
        let (key, value) = (args.heads.key.n(), args.heads.value.n());
        let fits = args.first == 0
            && (key > 0 && key.is_multiple_of(PANEL))
            && (layout.rotary > 0 && layout.rotary.is_multiple_of(PANEL))
            && matches!(value, 64 | 128)
            && wide(args.q)
            && wide(o.as_ref());
        let room = self.shared_bytes() as usize;
        let groups = groups_bytes(key + layout.rotary, value) + STATIC_BYTES <= room;
        let by = if groups && self.has_room_for_many() {
            By::Groups
        } else {
            let most = if self.wave() == 32 { 2 } else { 1 };
            let stages = (room / waves_bytes(key + layout.rotary, value)).min(most);
            By::Waves { stages }
        };
        if !fits || matches!(by, By::Waves { stages: 0 }) {
            return None;
        }
        let tile = self.tokens_of_block(&by);
        let need = Need {
            bytes,
            keys: keys_of(args),
            heads: args.heads.key.len(),
            row_bytes: layout.width() * 2,
            head_bytes: (key + value) * 2,
            tiles: args.q.rows() / tile + args.rows.len() - first_row(args),
            carried_bytes: (tile * value + 4 * THREADS as usize) * 4,
            busy: FILLED * self.multiprocessors() as usize,
        };
        Some(Expanded { args, layout, pool, by, plan: need.plan(), need })
    }

    /// Outputs of the rows of at least `RowBounds::LONG` tokens.
    pub(super) fn attend_expanded(
        &self,
        s: &Stream,
        o: &mut MatMut<'_>,
        call: &Expanded<'_>,
    ) -> Result<(), DeviceError> {
        if !call.has_rows() || o.rows() == 0 {
            return Ok(());
        }
        let Expanded { args, layout, need, plan, .. } = call;
        let (key, value, heads) = (args.heads.key.n(), args.heads.value.n(), need.heads);
        let at = self.scratch(s, call.scratch_bytes())?;
        let (values, latents) = (plan.heads * key, plan.heads * (key + value));
        let stride = latents + layout.width();
        // SAFETY: behind the rows, in the same scratch memory if anything is carried.
        let carried = unsafe { at.add(plan.keys * stride * 2) };
        let made = Made { at, carried, values, latents, stride };
        for first_head in (0..heads).step_by(plan.heads) {
            for first_key in (0..need.keys).step_by(plan.keys) {
                let part = Part {
                    first_head,
                    heads: plan.heads.min(heads - first_head),
                    first_key,
                    keys: plan.keys.min(need.keys - first_key),
                };
                // What is gathered stays while other heads look at it.
                if first_head == 0 || plan.keys < need.keys {
                    self.gather_latents(s, call, &made, part)?;
                }
                self.make_of_latents(s, (call, args.heads.key, 0), &made, part)?;
                self.make_of_latents(s, (call, args.heads.value, values), &made, part)?;
                self.attend_made(s, o, call, &made, part)?;
            }
        }
        Ok(())
    }

    /// Tokens of a block's tile.
    fn tokens_of_block(&self, by: &By) -> usize {
        match by {
            By::Groups => GROUPS_TILE,
            By::Waves { .. } => (THREADS / self.wave()) as usize * TILE,
        }
    }

    /// Brings the window's rows of the pool together.
    fn gather_latents(
        &self,
        s: &Stream,
        call: &Expanded<'_>,
        made: &Made,
        part: Part,
    ) -> Result<(), DeviceError> {
        let (layout, rows) = (call.layout, &call.args.rows);
        let defines =
            [("WIDTH", layout.width() as u32), ("BLOCK_TOKENS", layout.block_tokens as u32)];
        let kernel = self.kernel(&GATHER, "latent_gather", &defines)?;
        let launch = Launch::new(kernel, ((part.keys / GATHERED) as u32, 1, 1), THREADS, 0)
            .overlaps_predecessor()
            // SAFETY: a column of the made rows.
            .arg_ptr(unsafe { made.at.add(made.latents * 2) })
            .arg_ptr(call.pool)
            .arg(rows.cu_q)
            .arg(rows.context_lens)
            .arg(rows.block_tables)
            .arg_or_null(rows.table_rows)
            .u32(call.first_row() as u32)
            .u32((rows.len() - call.first_row()) as u32)
            .u32(RowBounds::LONG as u32)
            .u32(part.first_key as u32)
            .u32(rows.block_tables.stride() as u32)
            .u32(made.stride as u32);
        // SAFETY: scratch has the window's rows; lengths and tables are the caller's promise.
        unsafe { launch.go(self, s) }
    }

    /// Keys or values of the window, of the part's heads, from column `column` of the made rows on: by kernels whose bits for a row do not depend
    /// on how many rows there are.
    fn make_of_latents(
        &self,
        s: &Stream,
        (call, of, column): (&Expanded<'_>, &PackedGroup, usize),
        made: &Made,
        part: Part,
    ) -> Result<(), DeviceError> {
        let (k, dtype) = (of.k(), call.layout.dtype);
        let (n, before) = (part.heads * of.n(), part.first_head * of.n());
        // SAFETY: rows of a stack of matrices; columns of the made rows, which nobody else holds meanwhile.
        let (w, x, y) = unsafe {
            let w = Lines { at: of.as_ptr().add(before * k * 2), n, k };
            let x = made.at.add(made.latents * 2);
            let y = made.at.add(column * 2);
            (
                w,
                Mat::from_raw(x, dtype, part.keys, k, made.stride),
                MatMut::from_raw(y, dtype, part.keys, n, made.stride),
            )
        };
        if self.has_room_for_many() {
            return self.many(s, y, x, w, false);
        }
        self.tiles(s, y, x, w, None)
    }

    /// Attention to the window's keys and values of the part's heads.
    fn attend_made(
        &self,
        s: &Stream,
        o: &mut MatMut<'_>,
        call: &Expanded<'_>,
        made: &Made,
        part: Part,
    ) -> Result<(), DeviceError> {
        let (args, layout, tokens) = (call.args, call.layout, o.rows());
        let rows = &args.rows;
        let (query, value) = (call.query(), args.heads.value.n());
        let (q_stride, o_stride) = (args.q.stride(), o.stride());
        let (first, count) = (call.first_row(), rows.len() - call.first_row());
        // SAFETY: columns of the part's first head.
        let (q, o) = unsafe {
            let q = args.q.as_ptr().add(part.first_head * query * 2);
            (q, o.as_mut_ptr().add(part.first_head * value * 2))
        };
        let [q_map, kv_map] = match call.by {
            By::Waves { .. } => [TensorMap::NONE; 2],
            By::Groups => {
                let boxed = |matrix, rows, columns, stride| {
                    self.boxes_of(&Boxed { matrix, rows, columns, stride, box_rows: GROUPS_TILE })
                };
                let kv_columns = made.stride;
                [
                    boxed(q, tokens, part.heads * query, q_stride)?,
                    boxed(made.at.cast_const(), part.keys, kv_columns, made.stride)?,
                ]
            }
        };
        let launch = self.prefill_launch(call, part)?.arg_ptr(o).arg_ptr(made.carried);
        let launch = launch.arg_ptr(self.counters(s, 1)?).arg_ptr(q).arg_ptr(made.at);
        let launch = launch.record(&q_map.0).record(&kv_map.0);
        let launch = launch.arg(rows.cu_q).arg(rows.context_lens).overlaps_predecessor();
        let turned = made.latents + layout.latent;
        let numbers =
            [first, count, RowBounds::LONG, part.first_key, part.keys, tokens, part.heads];
        let strides = [made.values, turned, made.stride, q_stride, o_stride];
        let launch = numbers.into_iter().chain(strides).fold(launch, |l, n| l.u32(n as u32));
        // SAFETY: the shapes were compared; lengths are the caller's promise; scratch has the sizes of the plan.
        unsafe { launch.f32(args.scale * LOG2_E).go(self, s) }
    }

    /// The kernel and its grid.
    fn prefill_launch(&self, call: &Expanded<'_>, part: Part) -> Result<Launch, DeviceError> {
        let (args, tile) = (call.args, self.tokens_of_block(&call.by));
        let (key, value) = (args.heads.key.n(), args.heads.value.n());
        let how = match call.by {
            By::Groups => ("GROUPS", 1),
            By::Waves { stages } => ("STAGES", stages as u32),
        };
        let defines = [
            ("UNTURNED", key as u32),
            ("ROTARY", call.layout.rotary as u32),
            ("VALUE", value as u32),
            how,
        ];
        let kernel = self.kernel(&PREFILL, "latent_prefill", &defines)?;
        let (rows, first) = (args.rows.len(), call.first_row());
        Ok(match call.by {
            By::Groups => {
                let tiles = (args.q.rows() / tile + rows - first) * part.heads;
                let blocks = tiles.min(self.multiprocessors() as usize) as u32;
                let shared_bytes = groups_bytes(call.query(), value) as u32;
                Launch::new(kernel, (blocks, 1, 1), GROUPS_THREADS, shared_bytes)
            }
            By::Waves { stages } => {
                let tiles = args.rows.bounds.longest_q.div_ceil(tile) as u32;
                let grid = (tiles, part.heads as u32, (rows - first) as u32);
                let shared_bytes = stages * waves_bytes(call.query(), value);
                Launch::new(kernel, grid, THREADS, shared_bytes as u32)
            }
        })
    }
}

/// Shared memory of a block of warpgroups: queries, the steps on their way, outputs of 64 channels.
const fn groups_bytes(query: usize, value: usize) -> usize {
    let row_bytes = (1 + GROUPS_STAGES) * query + GROUPS_STAGES * value + PANEL;
    row_bytes * 2 * GROUPS_TILE + PANEL_ALIGNMENT
}

/// That of a block of waves, for a run of keys and values on its way.
const fn waves_bytes(query: usize, value: usize) -> usize {
    COPIED * (query + value + PADDING) * 2
}
