//! Experts for a handful of choices, where every launch counts: blocks sort, and with few tokens route, for
//! themselves, and the second product ends in the weighted sum.

use super::device::HipDevice;
use super::expert_count::Counters;
use super::launch::Launch;
use super::moe_stream::{FEW, SOME, Tile, is_fp8, scales_from};
use super::source::Source;
use crate::{DType, DeviceError, Experts, Mat, MatMut, Routes, Scores, Stream};

static LITTLE: Source = Source {
    name: "moe_little/moe_little.hip",
    text: include_str!("../../csrc/moe_little/moe_little.hip"),
};

/// Lines of a strip.
const STRIP_LINES: usize = 16;
/// Rows of a low tile.
const LOW_ROWS: usize = 16;
/// Choices that a block sorts for itself.
const MOST_CHOICES: usize = 64;

/// Who chooses.
#[derive(Debug, Clone, Copy)]
pub(super) enum Chosen<'a> {
    /// `moe_route_softmax` did.
    Before(&'a Routes<'a>),
    /// Every block does, and one of them counts.
    Here(&'a Scores<'a>, Counters),
}

/// What a block multiplies at a time, of so many rows and strips of lines. In fp8 a stage takes its time whatever of it is used.
fn tile_of(experts: &Experts<'_>, rows: usize, strips: usize) -> Tile {
    if experts.down.dtype() != DType::F8E4M3 {
        return FEW;
    }
    let rows = if rows <= LOW_ROWS { LOW_ROWS } else { MOST_CHOICES };
    let lines = if strips * STRIP_LINES <= FEW.lines { FEW.lines } else { SOME.lines };
    Tile { rows, lines }
}

/// Whether so many choices go this way.
pub(super) fn takes_little(experts: &Experts<'_>, choices: usize) -> bool {
    experts.gate_up.is_lined() && choices <= MOST_CHOICES
}

impl HipDevice {
    /// `y` of `x` and choices that `takes_little`, all of which have been checked.
    pub(super) fn little_mlp(
        &self,
        s: &Stream,
        y: &mut MatMut<'_>,
        x: Mat<'_>,
        chosen: Chosen<'_>,
        experts: &Experts<'_>,
    ) -> Result<(), DeviceError> {
        let none = std::ptr::null();
        let (top_k, routes, scores, counters) = match chosen {
            Chosen::Before(r) => {
                let routes = [r.experts.as_ptr(), r.weights.as_ptr(), none];
                (r.experts.cols(), routes, [0; 4], Counters::NONE)
            }
            Chosen::Here(c, counters) => {
                let (stride, all) = (c.logits.stride(), c.logits.cols());
                let sizes = [stride, all, usize::from(c.normalise), c.shared];
                (c.top_k + c.shared, [none, none, c.logits.as_ptr()], sizes, counters)
            }
        };
        let (choices, inner) = (x.rows() * top_k, experts.down.k());
        let between = self.scratch(s, choices * inner * x.dtype().bytes())?;
        let here = u32::from(matches!(chosen, Chosen::Here(..)));
        let fp8 = is_fp8(experts.down);
        for gated in [true, false] {
            // The first product divides all strips among blocks, in the second a block has those of all experts.
            let strips = experts.gate_up.n() / STRIP_LINES * choices;
            let tile = if gated {
                tile_of(experts, x.rows(), strips.div_ceil(self.multiprocessors() as usize))
            } else {
                tile_of(experts, choices, choices)
            };
            let defines = [
                ("GATED", u32::from(gated)),
                ("ROUTES", here),
                ("MANY", u32::from(tile.lines != FEW.lines)),
                ("TILE_ROWS", tile.rows as u32),
                ("FP8", fp8),
            ];
            let kernel = self.kernel(&LITTLE, "moe_little", &defines)?;
            let (out, from, strides, group) = if gated {
                (between, x.as_ptr(), [x.stride(), inner], experts.gate_up)
            } else {
                (y.as_mut_ptr(), between.cast_const(), [inner, y.stride()], experts.down)
            };
            let launch = self.on_every_multiprocessor(kernel, tile, group.dtype());
            let launch = launch.arg_ptr(out).arg_ptr(from).arg_ptr(group.as_ptr());
            let launch = routes.into_iter().fold(launch, Launch::arg_ptr);
            let sizes = [choices, experts.first, group.len(), group.n(), group.k()];
            let sizes = scores.into_iter().chain(sizes).chain(strides).chain([top_k]);
            let launch = sizes.fold(launch, |launch, size| launch.u32(size as u32));
            let launch = scales_from(launch, group, 0);
            // SAFETY: all shapes were compared; the arguments are those of the kernel.
            unsafe { counters.args(launch).overlaps_predecessor().go(self, s)? };
        }
        Ok(())
    }
}
