//! Fused MoE decode for few routed pairs (of token and expert), where launch latency dominates: every block
//! sorts the routed pairs itself, and with few tokens also routes them. The epilogue of the second GEMM
//! computes the weighted sum of the expert outputs.

use device::gpu::{KernelLaunch, KernelSource};
use device::{DeviceError, DeviceStream, MatMut, MatRef};

use super::expert_load::ExpertCounterPtrs;
use super::moe_grouped_gemm_tma::{
    GroupedGemmTile, TILE_MEDIUM, TILE_SMALL, TmaWeights, scales_from,
};
use crate::gate_activation::gated_product_defines;
use crate::gpu::GpuBackend;
use crate::{ExpertWeights, SoftmaxRouterArgs, TopKRoutes};

static FUSED_DECODE: KernelSource = kernel_source!("moe_fused_decode/moe_fused_decode.hip");

/// Number of rows of W per strip. A strip is the smallest range of rows that a block processes.
const STRIP_ROWS: usize = 16;
/// Number of rows of x in the smallest tile.
const MIN_TILE_ROWS: usize = 16;
/// Maximum number of routed pairs of a launch: every block sorts all of them itself.
const MAX_ROUTED_PAIRS: usize = 64;

/// How the fused kernel gets the selected experts and the routing weights.
#[derive(Debug, Clone, Copy)]
pub(super) enum RoutingSource<'a> {
    /// A routing kernel has computed the routes.
    Precomputed(&'a TopKRoutes<'a>),
    /// Every block computes the routes from router logits; one block increments the expert load counters.
    InKernel(&'a SoftmaxRouterArgs<'a>, ExpertCounterPtrs),
}

/// Returns the tile for `rows` rows of x and `strips` strips of W per block. With weights that are converted in
/// registers, unused tile rows take as much time as used rows, so the smallest sufficient tile is selected.
fn tile_of(weights: TmaWeights, rows: usize, strips: usize) -> GroupedGemmTile {
    if weights == TmaWeights::Half {
        return TILE_SMALL;
    }
    let rows = if rows <= MIN_TILE_ROWS { MIN_TILE_ROWS } else { MAX_ROUTED_PAIRS };
    let weight_rows = if strips * STRIP_ROWS <= TILE_SMALL.weight_rows {
        TILE_SMALL.weight_rows
    } else {
        TILE_MEDIUM.weight_rows
    };
    GroupedGemmTile { rows, weight_rows }
}

/// Whether the fused kernel supports `routed_pairs` routed pairs of these experts.
pub(super) fn fits_fused_decode(experts: &ExpertWeights<'_>, routed_pairs: usize) -> bool {
    experts.gate_up.is_tma_packed() && routed_pairs <= MAX_ROUTED_PAIRS
}

impl GpuBackend {
    /// Computes the expert MLPs `y` of `x`. `fits_fused_decode` must be true, and the caller has checked the
    /// shapes.
    pub(super) fn fused_decode_mlp(
        &self,
        s: &DeviceStream,
        y: &mut MatMut<'_>,
        x: MatRef<'_>,
        source: RoutingSource<'_>,
        experts: &ExpertWeights<'_>,
    ) -> Result<(), DeviceError> {
        let null = std::ptr::null();
        let (top_k, routes, scores, counters) = match source {
            RoutingSource::Precomputed(r) => {
                let routes = [r.experts.as_ptr(), r.weights.as_ptr(), null];
                (r.experts.cols(), routes, [0; 4], ExpertCounterPtrs::NONE)
            }
            RoutingSource::InKernel(c, counters) => {
                let (stride, all) = (c.logits.stride(), c.logits.cols());
                let sizes = [stride, all, usize::from(c.renormalise), c.shared];
                (c.top_k + c.shared, [null, null, c.logits.as_ptr()], sizes, counters)
            }
        };
        let (routed_pairs, inner) = (x.rows() * top_k, experts.down.k());
        let activations = self.scratch(s, routed_pairs * inner * x.dtype().bytes())?;
        let routes_in_kernel = u32::from(matches!(source, RoutingSource::InKernel(..)));
        let weights = TmaWeights::of(experts.down);
        for first in [true, false] {
            // The first GEMM divides the strips of all routed pairs among the blocks; in the second GEMM a
            // block has the same strips of all experts.
            let strips = experts.gate_up.n() / STRIP_ROWS * routed_pairs;
            let tile = if first {
                tile_of(weights, x.rows(), strips.div_ceil(self.multiprocessors() as usize))
            } else {
                tile_of(weights, routed_pairs, routed_pairs)
            };
            let activation = first.then_some(experts.activation);
            let bias = if first { experts.gate_up_bias } else { experts.down_bias };
            let tile_defines = [
                ("ROUTES", routes_in_kernel),
                ("WIDE_TILE", u32::from(tile.weight_rows != TILE_SMALL.weight_rows)),
                ("TILE_ROWS", tile.rows as u32),
                weights.define(),
            ];
            let mut defines = [&gated_product_defines(activation)[..], &tile_defines].concat();
            defines.extend(bias.map(|_| ("BIASED", 1)));
            let kernel = self.kernel(&FUSED_DECODE, "moe_fused_decode", &defines)?;
            let (out, from, strides, group) = if first {
                (activations, x.as_ptr(), [x.stride(), inner], experts.gate_up)
            } else {
                (y.as_mut_ptr(), activations.cast_const(), [inner, y.stride()], experts.down)
            };
            let launch = self.launch_on_all_sms(kernel, tile, weights);
            let launch = launch.arg_ptr(out).arg_ptr(from).arg_ptr(group.as_ptr());
            let launch = routes.into_iter().fold(launch, KernelLaunch::arg_ptr);
            let sizes = [routed_pairs, experts.first_expert, group.len(), group.n(), group.k()];
            let sizes = scores.into_iter().chain(sizes).chain(strides).chain([top_k]);
            let launch = sizes.fold(launch, |launch, size| launch.u32(size as u32));
            let launch = scales_from(launch, group, 0);
            let launch = counters.args(launch);
            let launch = if let Some(bias) = bias { launch.arg(bias) } else { launch };
            // SAFETY: all shapes were checked; the arguments match the kernel parameters.
            unsafe { launch.overlaps_predecessor().launch(self, s)? };
        }
        Ok(())
    }
}
