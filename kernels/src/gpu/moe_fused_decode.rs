//! Fused MoE decode for few routed pairs (of token and expert), where launch latency dominates: every block
//! sorts the routed pairs itself, and with few tokens also routes them. The epilogue of the second GEMM
//! computes the weighted sum of the expert outputs.

use device::gpu::{KernelDefine, KernelLaunch, KernelSource};
use device::{DeviceError, DeviceStream, MatMut, MatRef};

use super::expert_load::ExpertCounterPtrs;
use super::moe_grouped_gemm_tma::{
    GroupedGemmTile, TILE_MEDIUM, TILE_SMALL, TmaWeights, scales_from,
};
use crate::gate_activation::gated_product_defines;
use crate::gpu::GpuBackend;
use crate::{ExpertWeights, PackedMatrixGroup, SoftmaxRouterArgs, TopKRoutes};

static FUSED_DECODE: KernelSource = kernel_source!("moe_fused_decode/moe_fused_decode.hip");

/// Number of rows of W per strip. A strip is the smallest range of rows that a block processes.
const STRIP_ROWS: usize = 16;
/// Number of rows of x in the smallest tile.
const MIN_TILE_ROWS: usize = 16;
/// Number of strips that four warpgroups multiply at a time, each all of K.
const MXFP4_STRIPS: usize = 16;
/// Maximum number of rows of x of which warpgroups multiply parts of K.
const MAX_PART_ROWS: usize = 8;
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
/// registers, unused tile rows take as much time as used rows, so the smallest sufficient tile is selected. With few
/// strips, which are one pass, the warpgroups of MXFP4 weights multiply parts of K.
fn tile_of(weights: TmaWeights, rows: usize, strips: usize) -> GroupedGemmTile {
    if weights == TmaWeights::Half {
        return TILE_SMALL;
    }
    let tile_rows = if rows <= MIN_TILE_ROWS { MIN_TILE_ROWS } else { MAX_ROUTED_PAIRS };
    if weights == TmaWeights::Mxfp4 && rows <= MAX_PART_ROWS && strips <= MXFP4_STRIPS / 2 {
        let k_parts = if strips <= MXFP4_STRIPS / 4 { 4 } else { 2 };
        let weight_rows = MXFP4_STRIPS / k_parts * STRIP_ROWS;
        return GroupedGemmTile { k_parts, ..GroupedGemmTile::new(tile_rows, weight_rows) };
    }
    let weight_rows = if strips * STRIP_ROWS <= TILE_SMALL.weight_rows {
        TILE_SMALL.weight_rows
    } else {
        TILE_MEDIUM.weight_rows
    };
    GroupedGemmTile::new(tile_rows, weight_rows)
}

/// Whether the fused kernel supports `routed_pairs` routed pairs of these experts.
pub(super) fn fits_fused_decode(experts: &ExpertWeights<'_>, routed_pairs: usize) -> bool {
    experts.gate_up.is_tma_packed() && routed_pairs <= MAX_ROUTED_PAIRS
}

/// Routing arguments of the fused kernel.
struct RoutingArgs {
    top_k: usize,
    /// Addresses of the selected experts, the routing weights and the router logits.
    routes: [*const u8; 3],
    /// Row stride of the logits, number of experts, whether weights are normalised, number of shared experts.
    sizes: [usize; 4],
    counters: ExpertCounterPtrs,
    in_kernel: bool,
}

impl RoutingArgs {
    fn of(source: RoutingSource<'_>) -> Self {
        let null = std::ptr::null();
        match source {
            RoutingSource::Precomputed(r) => Self {
                top_k: r.experts.cols(),
                routes: [r.experts.as_ptr(), r.weights.as_ptr(), null],
                sizes: [0; 4],
                counters: ExpertCounterPtrs::NONE,
                in_kernel: false,
            },
            RoutingSource::InKernel(c, counters) => Self {
                top_k: c.top_k + c.shared,
                routes: [null, null, c.logits.as_ptr()],
                sizes: [c.logits.stride(), c.logits.cols(), usize::from(c.renormalise), c.shared],
                counters,
                in_kernel: true,
            },
        }
    }
}

/// Memory with which blocks divide the down projection equally (moe_fused_decode/down_shares.h).
#[derive(Debug, Clone, Copy)]
struct EqualSharesMemory {
    /// Expert outputs, f32 `[routed_pairs, hidden_size]`.
    outputs: *mut u8,
    /// Number of finished experts of each strip.
    finished: *mut u8,
}

/// Operands, sizes and scratch memory of one launch of fused expert MLPs.
struct FusedDecodeCall<'a> {
    x: MatRef<'a>,
    experts: &'a ExpertWeights<'a>,
    routing: RoutingArgs,
    routed_pairs: usize,
    weights: TmaWeights,
    /// Activations between the two GEMMs, `[routed_pairs, intermediate_size]`.
    activations: *mut u8,
    /// `None`: every block of the down projection computes strips of all experts.
    shares: Option<EqualSharesMemory>,
}

impl FusedDecodeCall<'_> {
    fn group(&self, first: bool) -> &PackedMatrixGroup {
        if first { self.experts.gate_up } else { self.experts.down }
    }

    fn bias(&self, first: bool) -> Option<MatRef<'_>> {
        if first { self.experts.gate_up_bias } else { self.experts.down_bias }
    }

    fn shares(&self, first: bool) -> Option<EqualSharesMemory> {
        self.shares.filter(|_| !first)
    }

    /// Returns the tile of a GEMM on a GPU with `multiprocessors` multiprocessors.
    fn tile(&self, first: bool, multiprocessors: usize) -> GroupedGemmTile {
        let strips = self.group(first).n() / STRIP_ROWS * self.routed_pairs;
        let per_block = strips.div_ceil(multiprocessors);
        let (tokens, pairs) = (self.x.rows(), self.routed_pairs);
        match (first, self.shares) {
            (true, _) => tile_of(self.weights, tokens, per_block),
            // A pass has all routed pairs of an expert, at most one per token.
            (false, Some(_)) => {
                tile_of(self.weights, pairs.min(tokens.max(MIN_TILE_ROWS)), per_block)
            }
            (false, None) => tile_of(self.weights, pairs, pairs),
        }
    }

    fn defines(&self, first: bool, tile: GroupedGemmTile) -> Vec<KernelDefine> {
        let gate = gated_product_defines(first.then_some(self.experts.activation));
        let routes = [("ROUTES", u32::from(self.routing.in_kernel)), self.weights.define()];
        let biased = self.bias(first).map(|_| ("BIASED", 1));
        let shares = self.shares(first).map(|_| ("EQUAL_SHARES", 1));
        gate.into_iter().chain(routes).chain(tile.defines()).chain(biased).chain(shares).collect()
    }

    /// Appends the kernel arguments; `y` is the output of the down projection.
    fn args(&self, launch: KernelLaunch, y: &mut MatMut<'_>, first: bool) -> KernelLaunch {
        let (group, inner) = (self.group(first), self.experts.down.k());
        let launch = if first {
            launch.arg_ptr(self.activations).arg_ptr(self.x.as_ptr())
        } else {
            launch.arg_ptr(y.as_mut_ptr()).arg_ptr(self.activations.cast_const())
        };
        let strides = if first { [self.x.stride(), inner] } else { [inner, y.stride()] };
        let launch = launch.arg_ptr(group.as_ptr());
        let launch = self.routing.routes.into_iter().fold(launch, KernelLaunch::arg_ptr);
        let first_expert = self.experts.first_expert;
        let sizes = [self.routed_pairs, first_expert, group.len(), group.n(), group.k()];
        let sizes = self.routing.sizes.into_iter().chain(sizes).chain(strides);
        let launch = sizes.fold(launch, |launch, size| launch.u32(size as u32));
        let launch = scales_from(launch.u32(self.routing.top_k as u32), group, 0);
        let launch = self.routing.counters.args(launch);
        let launch = match self.shares(first) {
            Some(shares) => launch.arg_ptr(shares.outputs).arg_ptr(shares.finished),
            None => launch,
        };
        match self.bias(first) {
            Some(bias) => launch.arg(bias),
            None => launch,
        }
    }
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
        let call = self.fused_decode_call(s, x, RoutingArgs::of(source), experts)?;
        for first in [true, false] {
            let tile = call.tile(first, self.multiprocessors() as usize);
            let defines = call.defines(first, tile);
            let kernel = self.kernel(&FUSED_DECODE, "moe_fused_decode", &defines)?;
            let launch = call.args(self.launch_on_all_sms(kernel, tile, call.weights), y, first);
            // SAFETY: all shapes were checked; the arguments match the kernel parameters.
            unsafe { launch.overlaps_predecessor().launch(self, s)? };
        }
        Ok(())
    }

    /// Allocates the scratch memory of expert MLPs. MXFP4 weights take equal shares: the time of their down
    /// projection is that of the block with the most strips.
    fn fused_decode_call<'a>(
        &self,
        s: &DeviceStream,
        x: MatRef<'a>,
        routing: RoutingArgs,
        experts: &'a ExpertWeights<'a>,
    ) -> Result<FusedDecodeCall<'a>, DeviceError> {
        let (routed_pairs, inner, hidden) =
            (x.rows() * routing.top_k, experts.down.k(), experts.down.n());
        let weights = TmaWeights::of(experts.down);
        let has_shares = weights == TmaWeights::Mxfp4;
        let activation_bytes = (routed_pairs * inner * x.dtype().bytes()).next_multiple_of(256);
        let output_bytes = if has_shares { routed_pairs * hidden * size_of::<f32>() } else { 0 };
        let activations = self.scratch(s, activation_bytes + output_bytes)?;
        let shares = if has_shares {
            // SAFETY: the scratch memory has `output_bytes` bytes after the activations.
            let outputs = unsafe { activations.add(activation_bytes) };
            Some(EqualSharesMemory { outputs, finished: self.counters(s, hidden / STRIP_ROWS)? })
        } else {
            None
        };
        Ok(FusedDecodeCall { x, experts, routing, routed_pairs, weights, activations, shares })
    }
}
