//! Fused MoE decode for few choices, where launch latency dominates: every block sorts the choices (and
//! routes, with few tokens) redundantly, and the epilogue of the second GEMM is the weighted sum.

use device::gpu::{KernelLaunch, KernelSource};
use device::{DType, DeviceError, DeviceStream, MatMut, MatRef};

use super::expert_load::ExpertCounterPtrs;
use super::moe_grouped_gemm_tma::{GroupedGemmTile, TILE_MEDIUM, TILE_SMALL, is_fp8, scales_from};
use crate::gpu::GpuBackend;
use crate::{ExpertWeights, RouterLogits, TopKRoutes};

static FUSED_DECODE: KernelSource = kernel_source!("moe_fused_decode/moe_fused_decode.hip");

/// Rows of W per strip.
const STRIP_LINES: usize = 16;
/// Rows of x of the smallest tile.
const LOW_ROWS: usize = 16;
/// Maximum choices that a block sorts.
const MAX_CHOICES: usize = 64;

/// Source of the expert choices.
#[derive(Debug, Clone, Copy)]
pub(super) enum RoutingSource<'a> {
    /// A routing kernel computed the choices before.
    Precomputed(&'a TopKRoutes<'a>),
    /// Every block computes the routing from router logits; one block increments the expert load counters.
    InKernel(&'a RouterLogits<'a>, ExpertCounterPtrs),
}

/// Returns the tile for `rows` rows of x and `strips` strips of W per block. With fp8 weights the time of a
/// stage does not depend on how much of the tile is used, so the tile is chosen to fit.
fn tile_of(experts: &ExpertWeights<'_>, rows: usize, strips: usize) -> GroupedGemmTile {
    if experts.down.dtype() != DType::F8E4M3 {
        return TILE_SMALL;
    }
    let rows = if rows <= LOW_ROWS { LOW_ROWS } else { MAX_CHOICES };
    let lines =
        if strips * STRIP_LINES <= TILE_SMALL.lines { TILE_SMALL.lines } else { TILE_MEDIUM.lines };
    GroupedGemmTile { rows, lines }
}

/// Whether the fused kernel supports `choices` choices.
pub(super) fn fits_fused_decode(experts: &ExpertWeights<'_>, choices: usize) -> bool {
    experts.gate_up.is_tma_packed() && choices <= MAX_CHOICES
}

impl GpuBackend {
    /// Computes the expert MLPs `y` of `x` if `fits_fused_decode` is true, for checked shapes.
    pub(super) fn fused_decode_mlp(
        &self,
        s: &DeviceStream,
        y: &mut MatMut<'_>,
        x: MatRef<'_>,
        chosen: RoutingSource<'_>,
        experts: &ExpertWeights<'_>,
    ) -> Result<(), DeviceError> {
        let none = std::ptr::null();
        let (top_k, routes, scores, counters) = match chosen {
            RoutingSource::Precomputed(r) => {
                let routes = [r.experts.as_ptr(), r.weights.as_ptr(), none];
                (r.experts.cols(), routes, [0; 4], ExpertCounterPtrs::NONE)
            }
            RoutingSource::InKernel(c, counters) => {
                let (stride, all) = (c.logits.stride(), c.logits.cols());
                let sizes = [stride, all, usize::from(c.normalise), c.shared];
                (c.top_k + c.shared, [none, none, c.logits.as_ptr()], sizes, counters)
            }
        };
        let (choices, inner) = (x.rows() * top_k, experts.down.k());
        let between = self.scratch(s, choices * inner * x.dtype().bytes())?;
        let here = u32::from(matches!(chosen, RoutingSource::InKernel(..)));
        let fp8 = is_fp8(experts.down);
        for gated in [true, false] {
            // The first GEMM distributes the strips of all choices over blocks; in the second a block has the
            // same strips of all experts.
            let strips = experts.gate_up.n() / STRIP_LINES * choices;
            let tile = if gated {
                tile_of(experts, x.rows(), strips.div_ceil(self.multiprocessors() as usize))
            } else {
                tile_of(experts, choices, choices)
            };
            let defines = [
                ("GATED", u32::from(gated)),
                ("ROUTES", here),
                ("MANY", u32::from(tile.lines != TILE_SMALL.lines)),
                ("TILE_ROWS", tile.rows as u32),
                ("FP8", fp8),
            ];
            let kernel = self.kernel(&FUSED_DECODE, "moe_fused_decode", &defines)?;
            let (out, from, strides, group) = if gated {
                (between, x.as_ptr(), [x.stride(), inner], experts.gate_up)
            } else {
                (y.as_mut_ptr(), between.cast_const(), [inner, y.stride()], experts.down)
            };
            let launch = self.launch_on_all_sms(kernel, tile, group.dtype());
            let launch = launch.arg_ptr(out).arg_ptr(from).arg_ptr(group.as_ptr());
            let launch = routes.into_iter().fold(launch, KernelLaunch::arg_ptr);
            let sizes = [choices, experts.first, group.len(), group.n(), group.k()];
            let sizes = scores.into_iter().chain(sizes).chain(strides).chain([top_k]);
            let launch = sizes.fold(launch, |launch, size| launch.u32(size as u32));
            let launch = scales_from(launch, group, 0);
            // SAFETY: all shapes were checked; the arguments match the kernel parameters.
            unsafe { counters.args(launch).overlaps_predecessor().launch(self, s)? };
        }
        Ok(())
    }
}
