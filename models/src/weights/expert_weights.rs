//! Loading of the experts of a layer: the routed experts on this rank, and the shared experts if they are stored
//! and distributed like the routed experts.

use super::source::HostWeightShard;
use super::{WeightSource, WeightStore, Weights};
use crate::ModelLoadError;
use crate::config::{CheckpointScaleGranularity, MoeConfig, QuantizationConfig};
use crate::expert_placement::LayerExpertPlacement;
use crate::sharding::{ParallelRanks, UnevenSplitError};
use crate::weight_table::TensorSpec;
use ops::{
    DType, ExpertBiases, ExpertMatrices, HostMat, OpError, PackedExperts, SharedExpertMatrices,
    Tensor,
};
use protocol::ExpertPlacement;

const PROJECTIONS: [&str; 3] = ["gate_proj", "up_proj", "down_proj"];

impl Weights<'_> {
    /// Loads this rank's routed experts of layer `layer`: `experts.{e}.gate_proj` and `up_proj` stacked, and
    /// `experts.{e}.down_proj`. Also loads the shared experts if they are stored and distributed like the routed
    /// experts. The output of each routed expert is multiplied by its entry of `factors`; `None` = all are 1.
    pub fn experts(
        &self,
        layer: usize,
        moe: &MoeConfig,
        factors: Option<&[f32]>,
    ) -> Result<PackedExperts, ModelLoadError> {
        let WeightStore { ranks, placement, .. } = &*self.store;
        let split_error = |error| self.split("experts.*", error);
        let own = local_experts(ranks, *placement, layer, moe.experts).map_err(split_error)?;
        let is_uniform = self.has_uniform_experts(moe);
        self.skip_remote_experts(&own, moe);
        let take = |&e: &usize| -> Result<_, ModelLoadError> {
            let [gate, up, down] = self.take_projections(&format!("experts.{e}"))?;
            let factor = factors.and_then(|factors| factors.get(e)).copied().unwrap_or(1.0);
            Ok([gate, up, down.with_outputs_scaled(factor)])
        };
        let parts = own.experts.iter().map(take).collect::<Result<Vec<_>, _>>()?;
        let shared = is_uniform.then(|| self.take_projections("shared_experts")).transpose()?;
        let packed = match &shared {
            Some(shared) => self.pack_with_shared(&parts, shared, moe),
            None => self.pack_routed(&own, &parts, moe),
        }?;
        let is_fp8 = parts.iter().flatten().any(HostWeightShard::is_fp8);
        if is_fp8 && packed.dtype() != DType::F8E4M3 {
            let (layer, element_bytes) = (&self.path, packed.dtype().bytes());
            tracing::info!(layer, element_bytes, "fp8 experts are dequantised on this device");
        }
        Ok(packed)
    }

    /// Packs the routed experts `own`, which have the projections `parts`.
    fn pack_routed(
        &self,
        own: &LocalExperts,
        parts: &[[HostWeightShard<'_>; 3]],
        moe: &MoeConfig,
    ) -> Result<PackedExperts, ModelLoadError> {
        let WeightStore { ops, config, .. } = &*self.store;
        let device_error = |e| self.device("experts.*", e);
        let ExpertMatrices { gate_up, down } = matrices(parts, 1).map_err(device_error)?;
        let packed = if moe.has_biases {
            let biases = self.expert_biases(own)?;
            let is_mxfp4 = config.quantization.as_ref().is_some_and(QuantizationConfig::has_mxfp4);
            ops.pack_biased_experts(own.first, &gate_up, &down, moe.activation, biases, is_mxfp4)
        } else {
            ops.pack_experts(own.first, config.sparse_layers(), &gate_up, &down, moe.activation)
        };
        packed.map_err(device_error)
    }

    /// Packs all routed experts, which have the projections `routed`, and the shared experts.
    fn pack_with_shared(
        &self,
        routed: &[[HostWeightShard<'_>; 3]],
        shared: &[HostWeightShard<'_>; 3],
        moe: &MoeConfig,
    ) -> Result<PackedExperts, ModelLoadError> {
        let WeightStore { ops, config, .. } = &*self.store;
        let pack = || {
            let shared =
                SharedExpertMatrices { mlp: mlp_matrices(shared)?, count: moe.shared_experts() };
            let routed = matrices(routed, 1)?;
            ops.pack_experts_with_shared(config.sparse_layers(), routed, &shared, moe.activation)
        };
        pack().map_err(|e| self.device("experts.*", e))
    }

    /// Marks the weights of experts that are only on other ranks as loaded, so that `finish` does not report
    /// them as unused.
    fn skip_remote_experts(&self, own: &LocalExperts, moe: &MoeConfig) {
        let kinds: &[&str] = if moe.has_biases { &["weight", "bias"] } else { &["weight"] };
        for e in (0..moe.experts).filter(|e| !own.experts.contains(e)) {
            for (projection, kind) in
                PROJECTIONS.iter().flat_map(|p| kinds.iter().map(move |k| (p, k)))
            {
                self.skip(format_args!("experts.{e}.{projection}.{kind}"));
            }
        }
    }

    /// Loads the biases of the experts on this rank: this rank's channels of gate and up, and the bias of the
    /// outputs, which is zero on all ranks but one if experts are split.
    fn expert_biases(&self, own: &LocalExperts) -> Result<ExpertBiases, ModelLoadError> {
        let (mut gate_up, mut down) = (Vec::new(), Vec::new());
        let hidden = self.store.config.hidden;
        for e in &own.experts {
            for projection in ["gate_proj", "up_proj"] {
                gate_up.extend(self.host_vector(&format!("experts.{e}.{projection}.bias"))?);
            }
            let values = self.host_vector(&format!("experts.{e}.down_proj.bias"))?;
            down.extend(if values.is_empty() { vec![0.0; hidden] } else { values });
        }
        let experts = own.experts.len();
        let ops = &self.store.ops;
        let upload = |values: &[f32]| -> Result<Tensor, OpError> {
            let bytes: Vec<u8> = values.iter().flat_map(|v| v.to_le_bytes()).collect();
            let cols = values.len() / experts.max(1);
            ops.upload(&[HostMat::new(&bytes, DType::F32, experts, cols)?], DType::F32)
        };
        let biases = || Ok(ExpertBiases { gate_up: upload(&gate_up)?, down: upload(&down)? });
        biases().map_err(|e| self.device("experts.*.bias", e))
    }

    /// Loads this rank's parts of the gate, up and down projections of the module `mlp`.
    fn take_projections(&self, mlp: &str) -> Result<[HostWeightShard<'_>; 3], ModelLoadError> {
        let [gate, up, down] = projection_names(mlp);
        Ok([self.take(gate)?, self.take(up)?, self.take(down)?])
    }

    /// Whether there are shared experts that are stored and distributed like the routed experts, so that both can
    /// be packed together. With expert parallelism, an expert placement or data-parallel attention, a rank has
    /// some routed experts and a part of every shared expert instead.
    fn has_uniform_experts(&self, moe: &MoeConfig) -> bool {
        let WeightStore { ranks, placement, source, untaken, .. } = &*self.store;
        let has_all_experts = ranks.ep.size == 1 && placement.is_none();
        let untaken = untaken.borrow();
        let is_alike = |p: &&str| {
            let [routed, shared] = ["experts.0", "shared_experts"]
                .map(|of| untaken.get(&self.name(format_args!("{of}.{p}.weight"))));
            routed.zip(shared).is_some_and(|(r, s)| same_storage(source, moe, r, s))
        };
        has_all_experts && moe.shared_experts() > 0 && PROJECTIONS.iter().all(is_alike)
    }

    /// Loads a table with the physical experts of each of the `count` logical experts of layer `layer`;
    /// `None` without an expert placement.
    pub fn expert_placement(
        &self,
        layer: usize,
        count: usize,
    ) -> Result<Option<Tensor>, ModelLoadError> {
        let Some(placement) = LayerExpertPlacement::of_layer(self.store.placement, layer) else {
            return Ok(None);
        };
        let (table, cols) = placement.table(count);
        let table = self.store.ops.upload_placement(&table, cols);
        table.map(Some).map_err(|e| self.device("expert placement", e))
    }
}

/// Names of the gate, up and down projections of the module `mlp`.
fn projection_names(mlp: &str) -> [String; 3] {
    PROJECTIONS.map(|projection| format!("{mlp}.{projection}.weight"))
}

/// Whether routed and shared experts can be packed together for one projection. This is possible if both are
/// not in fp8; if both are in fp8 with one scale per matrix; or if both are in fp8 with block scales and no
/// block contains weights of two shared experts.
pub(super) fn same_storage(
    source: &WeightSource,
    moe: &MoeConfig,
    routed: &TensorSpec,
    shared: &TensorSpec,
) -> bool {
    if !source.is_fp8(shared) {
        return !source.is_fp8(routed);
    }
    let [shared, routed_format] =
        [shared, routed].map(|spec| spec.scales.as_ref().map(|s| s.format));
    let can_pack = match shared.map(|format| format.scales) {
        Some(CheckpointScaleGranularity::Tensor) => true,
        Some(grid @ CheckpointScaleGranularity::Blocks) => {
            let [block_rows, _] = grid.block_shape(routed.matrix());
            moe.shared_experts() == 1 || moe.intermediate.is_multiple_of(block_rows)
        }
        Some(CheckpointScaleGranularity::Channels | CheckpointScaleGranularity::Mxfp4) | None => {
            false
        }
    };
    source.is_fp8(routed) && shared == routed_format && can_pack
}

/// Returns the gate, up and down projections as matrices of single experts. Each stored projection contains
/// `count` experts of equal width.
pub(super) fn matrices<'a>(
    parts: &'a [[HostWeightShard<'_>; 3]],
    count: usize,
) -> Result<ExpertMatrices<'a>, OpError> {
    let mlps = parts.iter().map(mlp_matrices).collect::<Result<Vec<_>, _>>()?;
    Ok(ExpertMatrices::split(&mlps, count))
}

fn mlp_matrices<'a>(mlp: &'a [HostWeightShard<'_>; 3]) -> Result<[HostMat<'a>; 3], OpError> {
    let [gate, up, down] = mlp;
    Ok([gate.matrix()?, up.matrix()?, down.matrix()?])
}

/// Logical experts on this rank, in the order of the physical experts.
pub(super) struct LocalExperts {
    /// Index of this rank's first physical expert.
    first: usize,
    pub(super) experts: Vec<usize>,
}

pub(super) fn local_experts(
    ranks: &ParallelRanks,
    placement: Option<&ExpertPlacement>,
    layer: usize,
    count: usize,
) -> Result<LocalExperts, UnevenSplitError> {
    let Some(placement) = LayerExpertPlacement::of_layer(placement, layer) else {
        let own = ranks.experts(count)?;
        return Ok(LocalExperts { first: own.start, experts: own.collect() });
    };
    let own = placement.of_rank(ranks.ep);
    Ok(LocalExperts { first: own.start, experts: placement.experts(own) })
}
