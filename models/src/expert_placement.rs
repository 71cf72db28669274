//! Expert placement (EPLB map), which the operator supplies: the logical expert of every physical expert of
//! each layer. Each rank has a consecutive range of the physical experts; all ranges have the same length.
//! Frequently selected experts may have several copies.
//!
//! If an expert has several copies, the position of a token in its request selects the copy. The selection
//! therefore does not depend on the batch or on chunked prefill, and each copy receives about the same number
//! of tokens.
//!
//! The placement has one row per layer: rows for the decoder layers, then rows for the MTP modules. If an MTP
//! module has no row, each of its experts has one copy, in ascending order of experts.

use crate::ModelConfig;
use crate::sharding::ParallelRank;
use protocol::ExpertPlacement;
use std::ops::Range;

/// Error of an expert placement that does not fit the model or the ranks.
#[derive(Debug, Clone, PartialEq, Eq, thiserror::Error)]
pub enum ExpertPlacementError {
    /// The model runs without expert parallelism, where every rank has a slice of each expert.
    #[error("an expert placement needs expert parallelism over several ranks")]
    NotExpertParallel,
    /// The placement has the wrong number of layers.
    #[error("the placement has {got} layers, the model {expected}{}", mtp_hint(*mtp_modules))]
    Layers {
        /// Number of layers in the placement.
        got: usize,
        /// Number of layers of the model.
        expected: usize,
        /// Number of MTP modules of the model, for which the placement may have rows after the rows of the
        /// decoder layers.
        mtp_modules: usize,
    },
    /// The placement has no row for an MTP module, and the experts of this module cannot be split evenly over
    /// the ranks.
    #[error(
        "the placement has no row for the MTP module, and {experts} experts cannot be split over {ranks} ranks"
    )]
    MtpExperts {
        /// Number of experts of the MTP module.
        experts: usize,
        /// Number of ranks over which the experts must be split.
        ranks: usize,
    },
    /// Ranks would have different numbers of physical experts.
    #[error(
        "layer {layer}: {physical_experts} physical experts cannot be split over {ranks} ranks"
    )]
    Uneven {
        /// Index of the layer.
        layer: usize,
        /// Number of physical experts of the layer.
        physical_experts: usize,
        /// Number of ranks over which the physical experts must be split.
        ranks: usize,
    },
    /// The placement names an expert that the model does not have.
    #[error(
        "layer {layer}: physical expert {physical_expert} is a copy of expert {expert}, the model has {experts}"
    )]
    Unknown {
        /// Index of the layer in the placement.
        layer: usize,
        /// Index of the physical expert, from 0.
        physical_expert: usize,
        /// Logical expert that the placement assigns to the physical expert.
        expert: usize,
        /// Number of experts of the layer.
        experts: usize,
    },
    /// No physical expert is a copy of this expert, so its tokens could not be routed.
    #[error("layer {layer}: expert {expert} has no physical expert")]
    Missing {
        /// Index of the layer.
        layer: usize,
        /// Logical expert without a physical expert.
        expert: usize,
    },
    /// An expert has two copies on the same rank; a second copy there does not balance the load.
    #[error("layer {layer}: expert {expert} has two copies on rank {rank}")]
    DuplicateCopy {
        /// Index of the layer.
        layer: usize,
        /// Logical expert with two copies on one rank.
        expert: usize,
        /// Rank that has both copies of the expert.
        rank: usize,
    },
}

/// Returns the end of an error message about the number of layers: the number of MTP modules. The text is
/// empty if the model has no MTP modules.
fn mtp_hint(modules: usize) -> String {
    if modules == 0 { String::new() } else { format!(", and {modules} in MTP modules") }
}

/// Checks that every expert of every MoE layer has at least one physical expert, and that all ranks have
/// equal numbers of physical experts. Rows of dense layers are ignored.
pub fn check_placement(
    placement: &ExpertPlacement,
    config: &ModelConfig,
    ranks: usize,
) -> Result<(), ExpertPlacementError> {
    if ranks < 2 {
        return Err(ExpertPlacementError::NotExpertParallel);
    }
    let (got, expected) = (placement.layers.len(), config.layers);
    let mtp_modules = config.mtp_layers;
    if got != expected && got != expected + mtp_modules {
        return Err(ExpertPlacementError::Layers { got, expected, mtp_modules });
    }
    let without_row = (got..config.kv_layers()).find_map(|layer| config.moe_at(layer));
    if let Some(moe) = without_row.filter(|moe| !moe.experts.is_multiple_of(ranks)) {
        return Err(ExpertPlacementError::MtpExperts { experts: moe.experts, ranks });
    }
    for (layer, row) in placement.layers.iter().enumerate() {
        if let Some(moe) = config.moe_at(layer) {
            check_layer(layer, row, moe.experts, ranks)?;
        }
    }
    Ok(())
}

fn check_layer(
    layer: usize,
    row: &[u16],
    experts: usize,
    ranks: usize,
) -> Result<(), ExpertPlacementError> {
    if !row.len().is_multiple_of(ranks) {
        return Err(ExpertPlacementError::Uneven { layer, physical_experts: row.len(), ranks });
    }
    let per_rank = row.len() / ranks;
    let mut last_ranks = vec![None; experts]; // Last rank found with a copy of each expert.
    for (physical_expert, &expert) in row.iter().enumerate() {
        let (expert, rank) = (usize::from(expert), physical_expert / per_rank);
        let Some(last_rank) = last_ranks.get_mut(expert) else {
            return Err(ExpertPlacementError::Unknown { layer, physical_expert, expert, experts });
        };
        if last_rank.replace(rank) == Some(rank) {
            return Err(ExpertPlacementError::DuplicateCopy { layer, expert, rank });
        }
    }
    match last_ranks.iter().position(Option::is_none) {
        Some(expert) => Err(ExpertPlacementError::Missing { layer, expert }),
        None => Ok(()),
    }
}

/// Expert placement of one layer: the logical expert of each physical expert.
#[derive(Debug, Clone, Copy)]
pub(crate) struct LayerExpertPlacement<'a>(&'a [u16]);

impl<'a> LayerExpertPlacement<'a> {
    /// Returns the placement of layer `layer` from a checked placement; `None` if there is no placement, or
    /// none for this layer.
    pub(crate) fn of_layer(placement: Option<&'a ExpertPlacement>, layer: usize) -> Option<Self> {
        placement?.layers.get(layer).map(|row| Self(row))
    }

    /// Range of the physical experts that rank `rank` computes.
    pub(crate) fn of_rank(self, rank: ParallelRank) -> Range<usize> {
        let per_rank = self.0.len() / rank.size;
        rank.rank * per_rank..(rank.rank + 1) * per_rank
    }

    /// Returns the logical expert of each physical expert in a range.
    pub(crate) fn experts(self, physical_experts: Range<usize>) -> Vec<usize> {
        self.0[physical_experts].iter().map(|&expert| usize::from(expert)).collect()
    }

    /// Returns a table with one row per logical expert, and its number of columns. A row contains the number
    /// of physical experts of the logical expert, then the indices of these physical experts in ascending
    /// order. Rows are padded with -1 to the same length.
    pub(crate) fn table(self, experts: usize) -> (Vec<i32>, usize) {
        let mut copies = vec![Vec::new(); experts];
        for (physical_expert, &expert) in (0_i32..).zip(self.0) {
            copies[usize::from(expert)].push(physical_expert);
        }
        let max_copies = copies.iter().map(Vec::len).max().unwrap_or(0);
        let row = |own: Vec<i32>| {
            let padding = max_copies - own.len();
            let count = own.len() as i32;
            std::iter::once(count).chain(own).chain(std::iter::repeat_n(-1, padding))
        };
        (copies.into_iter().flat_map(row).collect(), 1 + max_copies)
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::weight_table::tests::tiny;

    fn check(layers: Vec<Vec<u16>>, ranks: usize) -> String {
        // The model has 2 layers: the first has a dense MLP, the second has 4 experts.
        let config = tiny("Qwen3MoeForCausalLM");
        let placement = ExpertPlacement { layers };
        check_placement(&placement, &config, ranks).map_or_else(|e| e.to_string(), |()| "ok".into())
    }

    #[test]
    fn invalid_placement_is_rejected_by_layer_and_expert() {
        assert_eq!(check(vec![vec![], vec![3, 0, 1, 2]], 2), "ok");
        assert_eq!(check(vec![vec![9, 9, 9], vec![3, 0, 1, 3, 2, 0]], 2), "ok");
        let cases = [
            (vec![vec![]], 2, "the placement has 1 layers, the model 2"),
            (
                vec![vec![], vec![0, 1, 2, 3, 0]],
                2,
                "layer 1: 5 physical experts cannot be split over 2 ranks",
            ),
            (
                vec![vec![], vec![0, 1, 2, 4]],
                2,
                "layer 1: physical expert 3 is a copy of expert 4, the model has 4",
            ),
            (vec![vec![], vec![0, 1, 2, 0]], 2, "layer 1: expert 3 has no physical expert"),
            (vec![vec![], vec![]], 2, "layer 1: expert 0 has no physical expert"),
            (vec![vec![], vec![0, 1, 0, 2, 3, 1]], 2, "layer 1: expert 0 has two copies on rank 0"),
            (
                vec![vec![], vec![0, 1, 2, 3]],
                1,
                "an expert placement needs expert parallelism over several ranks",
            ),
        ];
        for (layers, ranks, expected) in cases {
            assert_eq!(check(layers, ranks), expected);
        }
    }

    #[test]
    fn mtp_module_has_its_own_placement_row_or_none() {
        let mut config = tiny("Qwen3MoeForCausalLM");
        config.mtp_layers = 1;
        let experts = config.moe.as_ref().unwrap().experts as u16;
        let row: Vec<u16> = (0..experts).chain(0..experts).collect();
        let check = |config: &ModelConfig, rows: usize, ranks: usize| {
            let placement = ExpertPlacement { layers: vec![row.clone(); rows] };
            check_placement(&placement, config, ranks).map_err(|e| e.to_string())
        };
        let (layers, mtp_modules) = (config.layers, config.mtp_layers);
        assert_eq!((mtp_modules, check(&config, layers, 2)), (1, Ok(())));
        assert_eq!(check(&config, layers + 1, 2), Ok(()));
        let wrong_layers = |got| {
            Err(format!("the placement has {got} layers, the model {layers}, and 1 in MTP modules"))
        };
        assert_eq!(check(&config, layers + 2, 2), wrong_layers(layers + 2));
        assert_eq!(check(&config, layers - 1, 2), wrong_layers(layers - 1));
        // With more ranks than experts, an MTP module without a placement row cannot be split. This is an
        // error only if the module is loaded.
        let ranks = usize::from(2 * experts);
        assert_eq!(check(&config, layers, ranks), Ok(()));
        config.load_mtp = true;
        assert_eq!(check(&config, layers + 1, ranks), Ok(()));
        let expected = format!(
            "the placement has no row for the MTP module, and {experts} experts cannot be split over {ranks} ranks"
        );
        assert_eq!(check(&config, layers, ranks), Err(expected));
    }

    #[test]
    fn replicas_are_listed_by_expert() {
        let placement = ExpertPlacement { layers: vec![vec![3, 0, 1, 3, 2, 0]] };
        assert!(LayerExpertPlacement::of_layer(Some(&placement), 1).is_none());
        let row = LayerExpertPlacement::of_layer(Some(&placement), 0).unwrap();
        let rank = |rank| row.of_rank(ParallelRank { rank, size: 2 });
        assert_eq!((rank(0), rank(1)), (0..3, 3..6));
        assert_eq!(row.experts(rank(1)), [3, 2, 0]);
        let (table, width) = row.table(4);
        assert_eq!(width, 3);
        assert_eq!(table, [2, 1, 5, 1, 2, -1, 1, 4, -1, 2, 0, 3]);
    }
}
