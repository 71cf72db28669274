//! Latent attention on matrix units, absorbed: queries are taken to the latents, means of latents are gathered from the pool, and
//! each head makes its value of its mean.

use super::attention::{DRIVER_BYTES, LOG2_E, most_splits};
use super::device::HipDevice;
use super::gemm::wide;
use super::launch::Launch;
use super::source::Source;
use super::tensor_map::TensorMap;
use crate::{DeviceError, LatentAttention, LatentLayout, MatMut, PackedGroup, RowBounds, Stream};

static HEADS: Source = Source {
    name: "latent_heads/latent_heads.hip",
    text: include_str!("../../csrc/latent_heads/latent_heads.hip"),
};
static DECODE: Source = Source {
    name: "latent_decode/latent_decode.hip",
    text: include_str!("../../csrc/latent_decode/latent_decode.hip"),
};
static GROUPS: Source = Source {
    name: "latent_groups/latent_groups.hip",
    text: include_str!("../../csrc/latent_groups/latent_groups.hip"),
};

/// Heads of a block, and keys of a wave in a step.
const TILE: usize = 16;
/// Heads of a block of warpgroups, and keys of a step.
const GROUPS_TILE: usize = 64;
/// Its threads: two warpgroups multiply, one fetches.
const GROUPS_THREADS: u32 = 384;
/// Steps in its ring, beside which the queries lie.
const GROUPS_STAGES: usize = 2;
/// Bytes of a row of what warpgroups multiply, and what such a matrix begins on.
const PANEL_ROW: usize = 128;
const PANEL_ALIGNMENT: usize = 1024;
/// Largest latent, for which a wave has registers.
const MOST_CHANNELS: usize = 512;
/// Spare elements behind each row of the pool in shared memory.
const PADDING: usize = 8;
/// Steps in a block's ring, at most.
const MOST_STAGES: usize = 3;
/// Shared memory of a block beside its ring: the kernel's static arrays.
const STATIC_BYTES: usize = 7 << 10;
/// Tokens of a block of waves of 64 lanes, at most, each of which has waves of its own. Four had no registers, and narrow waves have
/// none for two.
const WAVES_TOKENS: usize = 2;
/// Blocks that share a multiprocessor, at most.
const MOST_BLOCKS: usize = 2;
/// Its barriers, in front of its panels.
const MEETING_BYTES: usize = 128;
/// As `STATIC_BYTES`, of warpgroups.
const STATIC_BYTES_OF_GROUPS: usize = 1 << 10;
/// Floats of a record behind its sums of latents.
const RECORD_FACTS: usize = 16;
/// Threads of a block that multiplies by a head's matrix, and how many rows it takes at a time.
const HEADS_THREADS: u32 = 128;
const HEADS_ROWS: usize = 16;
/// Such blocks that a multiprocessor has at once: rows are divided among no more of them, since each one reads its matrix.
const HEADS_BLOCKS: usize = 4;

/// Tokens of rows of any number of them.
const ANY_NUMBER: usize = 1 << 20;

/// Contexts up to which a split has so many keys. The twin of `split_keys` in latent_decode.hip.
const SPLITS: &[(usize, usize)] = &[(2048, 256), (8192, 512), (32768, 1024), (usize::MAX, 4096)];

/// Rows of more heads than a block of warpgroups has that blocks of 16 heads are quicker with: on an H200 128 heads of one row take 37 and
/// 59 us with 1,088 keys, 59 and 93 with 8,192; those of 16 rows 428 and 184.
const LONE_ROWS: usize = 2;
/// Splits of a block that warpgroups have room for in memory, of each of the tokens that are taken together: they choose no shorter ones.
/// What batches whose contexts differ are quickest with is up to ten.
const RUN_RECORDS: usize = 12;
/// Keys of their splits, at least. The twin of `SHORTEST` in latent_groups/cut.h.
const SHORTEST_SPLIT: usize = 256;

/// What all launches share.
pub(super) struct Absorbed<'a> {
    args: &'a LatentAttention<'a>,
    layout: &'a LatentLayout,
    /// First byte of the layer.
    pool: *const u8,
    transposed: &'a PackedGroup,
    /// Rows of at least `RowBounds::LONG` tokens are somebody else's.
    short_alone: bool,
    by: By,
}

/// How means are gathered.
enum By {
    /// By waves, each with keys of its own: with so many steps in the ring.
    Waves { stages: usize, step_bytes: usize },
    /// By warpgroups, with so many runs of the list of splits at most.
    Groups { pool: TensorMap, runs: usize },
}

impl Absorbed<'_> {
    /// Tokens that a block takes together of `most` that may be, all with the same heads.
    fn together(&self, most: usize, wave: u32) -> usize {
        match self.by {
            By::Waves { .. } if wave != 64 || self.args.first > 0 => 1,
            By::Waves { .. } => most.clamp(1, WAVES_TOKENS),
            By::Groups { .. } => most.clamp(1, (GROUPS_TILE / self.args.heads.key.len()).max(1)),
        }
    }

    /// Heads of a block.
    fn tile(&self) -> usize {
        match self.by {
            By::Waves { .. } => TILE,
            By::Groups { .. } => GROUPS_TILE,
        }
    }

    /// Tokens up to the last one that is attended to.
    fn tokens(&self) -> usize {
        let (bounds, all) = (&self.args.rows.bounds, self.args.q.rows());
        let short = bounds.short_tokens.max(bounds.decode_rows);
        if self.short_alone { short.min(all) } else { all }
    }

    /// Rows of one token, in front.
    fn decode_rows(&self) -> usize {
        self.args.rows.bounds.decode_rows.min(self.args.rows.len())
    }

    /// Of taken queries, and of what splits leave.
    pub(super) fn scratch_bytes(&self) -> usize {
        let (heads, latent) = (self.args.heads.key.len(), self.layout.latent);
        let record_bytes = heads.min(self.tile()) * (latent + RECORD_FACTS) * 4;
        let records = self.records() * heads.div_ceil(self.tile());
        self.tokens() * heads * latent * 2 + records * record_bytes
    }

    /// Most splits of a row of one token.
    fn splits(&self) -> usize {
        let longest = self.args.rows.bounds.longest_context;
        match self.by {
            By::Waves { .. } => most_splits(longest, SPLITS),
            By::Groups { .. } => longest.div_ceil(SHORTEST_SPLIT).max(1),
        }
    }

    /// Most splits of all rows of one token, of each tile of heads.
    fn records(&self) -> usize {
        let (rows, splits) = (self.decode_rows(), self.splits());
        match self.by {
            By::Waves { .. } => rows * splits,
            By::Groups { runs, .. } => {
                let each = RUN_RECORDS * self.together(self.args.rows.bounds.successive, 0);
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

impl HipDevice {
    /// What attends on matrix units, if these sizes fit; `short_alone`: to rows of fewer than `RowBounds::LONG` tokens.
    pub(super) fn absorbed<'a>(
        &self,
        layout: &'a LatentLayout,
        pool: *const u8,
        args: &'a LatentAttention<'a>,
        short_alone: bool,
    ) -> Result<Option<Absorbed<'a>>, DeviceError> {
        let LatentLayout { latent, rotary, block_tokens, dtype, .. } = *layout;
        let (key, value) = (args.heads.key.n(), args.heads.value.n());
        let fits = dtype == self.half()
            && [128, 256, MOST_CHANNELS].contains(&latent)
            && rotary.is_multiple_of(32)
            && block_tokens.is_multiple_of(TILE)
            && (key > 0 && key.is_multiple_of(32) && key <= MOST_CHANNELS)
            && value.is_multiple_of(TILE)
            && wide(args.q);
        let Some(transposed) = args.heads.key_transposed.filter(|_| fits) else { return Ok(None) };
        let by = if args.first == 0 && self.gathers_in_groups(layout, args) {
            let pool = self.tensor_map(pool, layout.blocks * block_tokens, layout.width())?;
            let tiles = args.heads.key.len().div_ceil(GROUPS_TILE);
            By::Groups { pool, runs: (self.multiprocessors() as usize / tiles).max(1) }
        } else {
            let (tiles, most) = if self.wave() == 64 { (2, 1) } else { (4, MOST_STAGES) };
            let step_bytes = tiles * TILE * (layout.width() + PADDING) * 2;
            let room = (self.shared_bytes() as usize).saturating_sub(STATIC_BYTES);
            match (room / step_bytes).min(most) {
                0 => return Ok(None),
                stages => By::Waves { stages, step_bytes },
            }
        };
        Ok(Some(Absorbed { args, layout, pool, transposed, short_alone, by }))
    }

    /// Whether warpgroups gather means over such a pool: shared memory has room for them, its rows are whole panels, and rows are not so
    /// few that blocks of fewer heads, of which there are more, are done sooner.
    fn gathers_in_groups(&self, layout: &LatentLayout, args: &LatentAttention<'_>) -> bool {
        let rows = args.rows.len();
        let lone = args.heads.key.len() > GROUPS_TILE
            && rows <= LONE_ROWS
            && rows == args.rows.bounds.decode_rows;
        !lone
            && self.multiplies_in_groups()
            && layout.rotary.is_multiple_of(PANEL_ROW / 2)
            && groups_bytes(layout) + STATIC_BYTES_OF_GROUPS <= self.shared_bytes() as usize
    }

    /// Outputs of all rows, or of those of fewer than `RowBounds::LONG` tokens.
    pub(super) fn attend_absorbed(
        &self,
        s: &Stream,
        o: &mut MatMut<'_>,
        call: &Absorbed<'_>,
    ) -> Result<(), DeviceError> {
        let (args, latent, tokens) = (call.args, call.layout.latent, call.tokens());
        if tokens == 0 {
            return Ok(()); // All rows are long, or a replica keeps others company.
        }
        let (heads, rows, splits) = (args.heads.key.len(), call.decode_rows(), call.splits());
        let (tiles, stride) = (heads.div_ceil(call.tile()), heads * latent);
        // Means take the place of the queries they come from.
        let taken = self.scratch(s, call.scratch_bytes())?;
        // SAFETY: behind the taken queries, in the same scratch memory.
        let partial = unsafe { taken.add(tokens * stride * 2) };
        let turned = call.transposed.k() + call.layout.rotary;
        let q = HeadRows { at: args.q.as_ptr(), head: turned, stride: args.q.stride() };
        let latents = HeadRows { at: taken, head: latent, stride };
        self.multiply_heads(s, call, &latents, &q, (call.transposed, tokens))?;
        if rows > 0 {
            // Blocks of all heads take the same runs of the list of splits.
            let runs = (self.decode_blocks(call) / tiles).clamp(1, rows * splits);
            let grid = (runs as u32, tiles as u32, 1);
            self.gather_means(s, call, (taken, partial), grid, (0, rows, splits))?;
        }
        if rows < tokens {
            let runs = (tokens - rows).div_ceil(call.together(ANY_NUMBER, self.wave()));
            let blocks = match call.by {
                By::Waves { .. } => runs,
                By::Groups { .. } => (self.decode_blocks(call) / tiles).clamp(1, runs.max(1)),
            };
            let grid = (blocks as u32, tiles as u32, 1);
            let all = args.rows.len();
            self.gather_means(s, call, (taken, partial), grid, (rows, all, 0))?;
        }
        let means = HeadRows { at: taken.cast_const(), head: latent, stride };
        let (values, o_stride) = (args.heads.value, o.stride());
        let o = HeadRows { at: o.as_mut_ptr(), head: values.n(), stride: o_stride };
        self.multiply_heads(s, call, &o, &means, (values, tokens))
    }

    /// As many blocks as run at once.
    fn decode_blocks(&self, call: &Absorbed<'_>) -> usize {
        let each = match call.by {
            By::Waves { stages, step_bytes } => {
                let room = self.shared_bytes() as usize + DRIVER_BYTES;
                let block = stages * step_bytes + STATIC_BYTES + DRIVER_BYTES;
                (room / block).clamp(1, MOST_BLOCKS)
            }
            By::Groups { .. } => 1,
        };
        each * self.multiprocessors() as usize
    }

    /// Means of latents in place of `taken`, of all heads: of `rows` rows of one token, through `splits` splits at most; or, of
    /// none, of each token from `first` on.
    fn gather_means(
        &self,
        s: &Stream,
        call: &Absorbed<'_>,
        (taken, partial): (*mut u8, *mut u8),
        grid: (u32, u32, u32),
        (first, rows, splits): (usize, usize, usize),
    ) -> Result<(), DeviceError> {
        let args = call.args;
        let heads = args.heads.key.len();
        let arrived = self.counters(s, rows * heads.div_ceil(call.tile()))?;
        let most = if splits == 0 { ANY_NUMBER } else { args.rows.bounds.successive.max(1) };
        let together = call.together(most, self.wave());
        let launch = self.means_launch(call, grid, (splits == 0, together))?;
        let launch = launch
            .overlaps_predecessor()
            .arg_ptr(taken)
            .arg_ptr(partial)
            .arg_ptr(arrived)
            .arg_ptr(taken)
            .arg(args.q)
            .arg_ptr(call.pool);
        let launch = match &call.by {
            By::Waves { .. } => launch,
            By::Groups { pool, .. } => launch.record(&pool.0),
        };
        let launch = launch
            .arg(args.rows.cu_q)
            .arg(args.rows.context_lens)
            .arg(args.rows.block_tables)
            .arg_or_null(args.rows.table_rows)
            .u32(rows as u32)
            .u32(heads as u32)
            .u32((call.transposed.k() + call.layout.rotary) as u32)
            .u32(args.rows.block_tables.stride() as u32);
        let launch = match &call.by {
            By::Waves { .. } => launch.u32(first as u32),
            By::Groups { .. } => {
                launch.u32(call.records() as u32).u32(first as u32).u32(together as u32)
            }
        };
        let launch = launch.u32(args.q.stride() as u32).f32(args.scale * LOG2_E);
        // SAFETY: the shapes were compared; lengths and tables are the caller's promise; scratch and counters have the sizes
        // of rows, heads and splits.
        unsafe { launch.go(self, s) }
    }

    /// The kernel of `gather_means` without its arguments: of tokens each by itself, or of rows, so many of these together.
    fn means_launch(
        &self,
        call: &Absorbed<'_>,
        grid: (u32, u32, u32),
        (each, together): (bool, usize),
    ) -> Result<Launch, DeviceError> {
        let layout = call.layout;
        // What leaves nobody out has no define.
        let without = usize::from(!(each && call.short_alone));
        let latent = ("LATENT", layout.latent as u32);
        let rotary = ("ROTARY", layout.rotary as u32);
        let block = ("BLOCK_TOKENS", layout.block_tokens as u32);
        let each = ("EACH_TOKEN", u32::from(each));
        let long = ("LONG_ROW", RowBounds::LONG as u32);
        match &call.by {
            By::Waves { stages, step_bytes } => {
                let depth = ("STAGES", *stages as u32);
                let unseen = ("UNSEEN", call.args.first as u32);
                let at_once = ("TOGETHER", together as u32);
                let defines = [latent, rotary, block, depth, each, unseen, at_once, long];
                let defines = &defines[..defines.len() - without];
                let kernel = self.kernel(&DECODE, "latent_decode", defines)?;
                let tile_waves = if self.wave() == 64 { 2 } else { 8 };
                let threads = together as u32 * tile_waves * self.wave();
                Ok(Launch::new(kernel, grid, threads, (stages * step_bytes) as u32))
            }
            By::Groups { .. } => {
                let defines = [latent, rotary, block, each, long];
                let defines = &defines[..defines.len() - without];
                let kernel = self.kernel(&GROUPS, "latent_groups", defines)?;
                Ok(Launch::new(kernel, grid, GROUPS_THREADS, groups_bytes(layout) as u32))
            }
        }
    }

    /// `y[t, h] = W_h x[t, h]` for the first `tokens` tokens.
    fn multiply_heads(
        &self,
        s: &Stream,
        call: &Absorbed<'_>,
        y: &HeadRows<*mut u8>,
        x: &HeadRows<*const u8>,
        (w, tokens): (&PackedGroup, usize),
    ) -> Result<(), DeviceError> {
        let rows = &call.args.rows;
        let leaves_out = call.short_alone && rows.bounds.longest_q >= RowBounds::LONG;
        let long = ("LONG_ROW", RowBounds::LONG as u32);
        let defines = [("INPUTS", w.k() as u32), ("OUTPUTS", w.n() as u32), long];
        let defines = &defines[..defines.len() - usize::from(!leaves_out)];
        let kernel = self.kernel(&HEADS, "latent_heads", defines)?;
        let own = match w.k() / 32 {
            16.. => 1,
            8.. => 2,
            _ => 4,
        };
        let strip_rows = if self.wave() == 64 { 16 } else { 8 };
        let strips = own * (HEADS_THREADS / self.wave()) as usize;
        let blocks = (w.n() / strip_rows).div_ceil(strips);
        let at_once = HEADS_BLOCKS * self.multiprocessors() as usize;
        let parts = (at_once / (blocks * w.len())).clamp(1, tokens.div_ceil(HEADS_ROWS));
        let each = tokens.div_ceil(parts).next_multiple_of(HEADS_ROWS);
        let grid = (blocks as u32, w.len() as u32, tokens.div_ceil(each) as u32);
        let launch = Launch::new(kernel, grid, HEADS_THREADS, 0)
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
        unsafe { launch.go(self, s) }
    }
}

/// Shared memory of a block of warpgroups: queries, the steps in its ring, a panel of probabilities.
const fn groups_bytes(layout: &LatentLayout) -> usize {
    let panel = GROUPS_TILE * PANEL_ROW;
    let operand = layout.width() * 2 / PANEL_ROW * panel;
    MEETING_BYTES + (1 + GROUPS_STAGES) * operand + panel + PANEL_ALIGNMENT
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn no_context_has_more_splits_than_the_longest_allows() {
        for longest in [1, 256, 1024, 1025, 2048, 2049, 8192, 8193, 32_768, 32_769, 131_072] {
            let keys = |context: usize| SPLITS.iter().find(|(to, _)| context <= *to).unwrap().1;
            let most = (1..=longest).map(|context: usize| context.div_ceil(keys(context))).max();
            assert_eq!(most_splits(longest, SPLITS), most.unwrap(), "{longest}");
        }
    }
}
