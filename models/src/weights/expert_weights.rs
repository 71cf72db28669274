//! Experts of a layer: routed experts of this rank, and shared experts fused after them where possible.

use super::source::HostShard;
use super::{WeightSource, WeightStore, Weights};
use crate::ModelLoadError;
use crate::config::{MoeConfig, ScaleGrid};
use crate::expert_placement::LayerPlacement;
use crate::sharding::{ParallelRanks, UnevenSplit};
use crate::weight_table::TensorSpec;
use ops::{DType, HostMat, OpError, Ops, PackedExperts, Tensor};
use protocol::ExpertPlacement;

const PROJECTIONS: [&str; 3] = ["gate_proj", "up_proj", "down_proj"];

/// Gate and up projections of each expert, and down projection of each expert.
pub(super) type ExpertMatrices<'a> = (Vec<Vec<HostMat<'a>>>, Vec<Vec<HostMat<'a>>>);

impl Weights<'_> {
    /// Loads this rank's experts of layer `layer`: `experts.{e}.{gate,up}_proj` stacked, and
    /// `experts.{e}.down_proj`. If [`Weights::can_fuse_shared`] and the device allow it, `shared_experts` are
    /// fused after them, and are also packed as an MLP of their own if the device cannot compute fused shared
    /// experts separately.
    pub fn experts(&self, layer: usize, moe: &MoeConfig) -> Result<PackedExperts, ModelLoadError> {
        let WeightStore { config, ranks, placement, .. } = &*self.store;
        let refused = |error| self.split("experts.*", error);
        let own = local_experts(ranks, *placement, layer, moe.experts).map_err(refused)?;
        let may_join = self.can_fuse_shared(moe);
        let names = |e: usize| PROJECTIONS.map(|p| format!("experts.{e}.{p}.weight"));
        for e in (0..moe.experts).filter(|e| !own.experts.contains(e)) {
            for name in names(e) {
                self.skip(&name);
            }
        }
        let take = |names: [String; 3]| -> Result<[HostShard<'_>; 3], ModelLoadError> {
            let [gate, up, down] = names;
            Ok([self.part(gate)?, self.part(up)?, self.part(down)?])
        };
        let of_rank = own.experts.iter().map(|&e| take(names(e)));
        let parts = of_rank.collect::<Result<Vec<_>, _>>()?;
        let failed = |e| self.device("experts.*", e);
        let (gate_up, down) = matrices(&parts, 1).map_err(failed)?;
        let (ops, layers) = (&self.store.ops, config.sparse_layers());
        let joins = may_join && ops.packs_shared_experts(layers, &gate_up, &down);
        let common = joins.then(|| PROJECTIONS.map(|p| format!("shared_experts.{p}.weight")));
        let common = common.map(take).transpose()?;
        let at = (own.first, layers);
        let packed = match &common {
            Some(common) => pack_with_shared(ops, at, (gate_up, down), (common, moe.shared())),
            None => ops.pack_experts(at, &gate_up, &down),
        };
        let packed = packed.map_err(failed)?;
        let fp8 = parts.iter().flatten().any(HostShard::is_fp8);
        if fp8 && packed.dtype() != DType::F8E4M3 {
            let (layer, dtype) = (&self.path, packed.dtype());
            tracing::info!(layer, ?dtype, "fp8 experts are kept dequantised on this device");
        }
        Ok(packed)
    }

    /// Whether shared experts may be fused after the routed experts: only if every rank has a part of every
    /// expert. With expert parallelism, an expert placement or DP attention, shared experts are computed on
    /// the rank of the token, and routing must not include them.
    fn can_fuse_shared(&self, moe: &MoeConfig) -> bool {
        let WeightStore { ranks, placement, source, left, .. } = &*self.store;
        let everywhere = ranks.ep.size == 1 && placement.is_none();
        let left = left.borrow();
        let alike = |p: &&str| {
            let [one, shared] = ["experts.0", "shared_experts"]
                .map(|of| left.get(&self.name(format_args!("{of}.{p}.weight"))));
            one.zip(shared).is_some_and(|pair| same_storage(source, moe, pair))
        };
        everywhere && moe.shared() > 0 && PROJECTIONS.iter().all(alike)
    }

    /// Table of the copies of each of `count` experts of a layer, if there is an expert placement.
    pub fn expert_placement(
        &self,
        layer: usize,
        count: usize,
    ) -> Result<Option<Tensor>, ModelLoadError> {
        let Some(places) = LayerPlacement::of_layer(self.store.placement, layer) else {
            return Ok(None);
        };
        let (places, cols) = places.table(count);
        let places = self.store.ops.upload_placement(&places, cols);
        places.map(Some).map_err(|e| self.device("places", e))
    }
}

/// Packs routed experts, followed by `count` shared experts.
fn pack_with_shared(
    ops: &Ops,
    at: (usize, usize),
    (mut gate_up, mut down): ExpertMatrices<'_>,
    (common, count): (&[HostShard<'_>; 3], usize),
) -> Result<PackedExperts, OpError> {
    let (shared_gate_up, shared_down) = matrices(std::slice::from_ref(common), count)?;
    gate_up.extend(shared_gate_up);
    down.extend(shared_down);
    let packed = ops.pack_experts(at, &gate_up, &down)?.with_shared(count);
    if packed.shared_linears().is_some() {
        return Ok(packed);
    }
    let [gate, up, down] = common;
    let gate_up = ops.pack_linear(&[gate.matrix()?, up.matrix()?], None)?;
    Ok(packed.with_separate_shared([gate_up, ops.pack_linear(&[down.matrix()?], None)?]))
}

/// Whether a projection of the shared experts is stored like that of a routed expert: both without fp8, or
/// both in fp8 with block scales and no block that spans two shared experts.
pub(super) fn same_storage(
    source: &WeightSource,
    moe: &MoeConfig,
    (one, shared): (&TensorSpec, &TensorSpec),
) -> bool {
    if !source.is_fp8(shared) {
        return !source.is_fp8(one);
    }
    let blocks = shared.scales.as_ref().is_some_and(|scales| scales.grid == ScaleGrid::Blocks);
    let [each, _] = ScaleGrid::Blocks.each(moe.intermediate);
    let whole = moe.shared() == 1 || moe.intermediate.is_multiple_of(each);
    source.is_fp8(one) && blocks && whole
}

/// Matrices of gate, up and down projections; each projection contains `count` experts of equal width.
pub(super) fn matrices<'a>(
    parts: &'a [[HostShard<'_>; 3]],
    count: usize,
) -> Result<ExpertMatrices<'a>, OpError> {
    let (mut gate_up, mut downs) = (Vec::new(), Vec::new());
    for [gate, up, down] in parts {
        let (gate, up, down) = (gate.matrix()?, up.matrix()?, down.matrix()?);
        let width = down.cols() / count;
        for first in (0..count).map(|i| i * width) {
            gate_up.push(vec![gate.row_range(first, width), up.row_range(first, width)]);
            downs.push(vec![down.column_range(first, width)]);
        }
    }
    Ok((gate_up, downs))
}

/// Experts of a layer on this rank, in the order of physical experts.
pub(super) struct LocalExperts {
    /// Index of the first physical expert.
    first: usize,
    pub(super) experts: Vec<usize>,
}

pub(super) fn local_experts(
    ranks: &ParallelRanks,
    placement: Option<&ExpertPlacement>,
    layer: usize,
    count: usize,
) -> Result<LocalExperts, UnevenSplit> {
    let Some(places) = LayerPlacement::of_layer(placement, layer) else {
        let own = ranks.experts(count)?;
        return Ok(LocalExperts { first: own.start, experts: own.collect() });
    };
    let own = places.of_rank(ranks.ep);
    Ok(LocalExperts { first: own.start, experts: places.experts(own) })
}
