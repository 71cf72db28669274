//! Experts on NVIDIA sm_90a: weights in the order in which the copy engine streams them to products of warpgroups, and
//! the products that read them.

use super::device::HipDevice;
use super::launch::Launch;
use super::module::Function;
use super::moe_call::Call;
use super::source::Source;
use crate::{DeviceError, PackedGroup, Stream};

static PACK: Source = Source {
    name: "moe_pack/moe_pack.hip",
    text: include_str!("../../csrc/moe_pack/moe_pack.hip"),
};
static STREAM: Source = Source {
    name: "moe_stream/moe_stream.hip",
    text: include_str!("../../csrc/moe_stream/moe_stream.hip"),
};

/// Threads of a block: eight waves multiply, one copies weights, two gather rows.
const THREADS: u32 = 11 * 32;
/// Threads of a block that brings weights into their order, a piece of eight each.
const PACK_THREADS: u32 = 256;
/// Columns of a stage, and what sizes must be multiples of.
const COLUMNS: usize = 64;
/// Stages without which nothing moves: one is read while the next arrives.
const LEAST_STAGES: usize = 2;
/// Stages that barriers are kept for.
const MOST_STAGES: usize = 12;
/// Shared memory beside the stages: barriers, what routing, sorting and blending need, what aligning the ring takes.
const FIXED_BYTES: usize = 11 << 10;
/// Scratch memory that weights pass through on their way to their order.
const PASSAGE_BYTES: usize = 64 << 20;

/// Rows of a segment and lines of weights that a block multiplies at a time.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(super) struct Tile {
    pub(super) rows: usize,
    lines: usize,
}

/// While reading weights is all the time there is.
pub(super) const FEW: Tile = Tile { rows: 64, lines: 128 };
/// The same, from some tokens on: more of the weights are on their way, and blocks begin with them before routing is over.
pub(super) const SOME: Tile = Tile { rows: 32, lines: 256 };
/// From some hundred tokens on.
pub(super) const MANY: Tile = Tile { rows: 128, lines: 256 };

impl Tile {
    /// Stages that `limit` bytes of shared memory hold.
    fn stages(self, limit: usize) -> usize {
        (limit.saturating_sub(FIXED_BYTES) / self.stage_bytes()).min(MOST_STAGES)
    }

    fn stage_bytes(self) -> usize {
        (self.rows + self.lines) * COLUMNS * 2
    }
}

impl HipDevice {
    /// Whether experts in the 16-bit type of so many inputs and outputs, gates not counted, are streamed.
    pub(super) fn streams_experts(&self, outputs: usize, k: usize) -> bool {
        let multiples = outputs.is_multiple_of(COLUMNS) && k.is_multiple_of(COLUMNS);
        let fits = MANY.stages(self.shared_bytes() as usize) >= LEAST_STAGES;
        multiples && fits && self.has_warpgroups()
    }

    /// `group` as moe/lines.h orders it, where its products are streamed; `gated`: the second half of its outputs
    /// are gated by the first.
    pub(super) fn in_lines(
        &self,
        group: PackedGroup,
        gated: bool,
    ) -> Result<PackedGroup, DeviceError> {
        let outputs = if gated { group.n() / 2 } else { group.n() };
        if group.dtype() != self.half() || !self.streams_experts(outputs, group.k()) {
            return Ok(group);
        }
        let bytes = group.n() * group.k() * 2;
        let at_once = (PASSAGE_BYTES / bytes.max(1)).clamp(1, group.len().max(1));
        let passage = self.scratch(at_once * bytes)?;
        for first in (0..group.len()).step_by(at_once) {
            let experts = at_once.min(group.len() - first);
            // SAFETY: an expert of the group.
            let weights = unsafe { group.as_ptr().add(first * bytes) }.cast_mut();
            self.launch_pack("moe_pack", passage, weights, &group, experts, gated)?;
            self.launch_pack("moe_unpack", weights, passage, &group, experts, gated)?;
        }
        Ok(group.lined())
    }

    fn launch_pack(
        &self,
        kernel: &'static str,
        to: *mut u8,
        from: *const u8,
        group: &PackedGroup,
        experts: usize,
        gated: bool,
    ) -> Result<(), DeviceError> {
        let (n, k) = (group.n(), group.k());
        let kernel = self.kernel(&PACK, kernel, &[("GATED", u32::from(gated))])?;
        let grid = ((n * k).div_ceil(8 * PACK_THREADS as usize) as u32, experts as u32, 1);
        let launch = Launch::new(kernel, grid, PACK_THREADS, 0).arg_ptr(to).arg_ptr(from);
        // SAFETY: both hold that many experts; nobody uses the group before it is handed out.
        unsafe { launch.u32(n as u32).u32(k as u32).go(self, &Stream::default()) }
    }

    /// One product of tokens that `moe_align` has sorted.
    pub(super) fn stream_product(
        &self,
        s: &Stream,
        call: &Call<'_>,
        tile: Tile,
        first: bool,
    ) -> Result<(), DeviceError> {
        let defines = [
            ("GATED", u32::from(first)),
            ("MANY", u32::from(tile != FEW)),
            ("TILE_ROWS", tile.rows as u32),
        ];
        let kernel = self.kernel(&STREAM, "moe_stream", &defines)?;
        let launch = call.product_args(self.on_every_multiprocessor(kernel, tile), first);
        let early = if call.way.begins_early() { call.experts.down.len() } else { 0 };
        let launch = launch.u32(early as u32);
        // SAFETY: the shapes were compared; scratch memory has the sizes of the call.
        unsafe { launch.overlaps_predecessor().go(self, s) }
    }

    /// A launch with all shared memory.
    pub(super) fn on_every_multiprocessor(&self, kernel: Function, tile: Tile) -> Launch {
        let shared_bytes = 1024 + tile.stages(self.shared_bytes() as usize) * tile.stage_bytes();
        Launch::new(kernel, (self.multiprocessors(), 1, 1), THREADS, shared_bytes as u32)
    }
}
