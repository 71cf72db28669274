//! Where experts lie, if an operator says so: places of each layer, in equal runs by rank, and hot experts in several.
//!
//! A token goes to one of an expert's copies by its own position in its request. So the same request takes the same
//! copies in any batch and any chunks, and copies share the load evenly.
//!
//! A row behind those of the model's layers is its draft layer's; without one that layer's experts lie each once, in order.

use crate::ModelConfig;
use crate::sharding::ParallelRank;
use protocol::ExpertPlacement;
use std::ops::Range;

/// A placement that does not fit the model or its ranks.
#[derive(Debug, Clone, PartialEq, Eq, thiserror::Error)]
pub enum PlacementError {
    /// Experts are not spread, so they lie on every rank.
    #[error("a placement of experts needs several ranks that hold experts whole")]
    NotExpertParallel,
    /// It is for another model.
    #[error("the placement has {got} layers, the model {expected}{}", drafting(*draft_layers))]
    Layers {
        /// Its layers.
        got: usize,
        /// Those of the model.
        expected: usize,
        /// Those that draft for it, which may have places, too.
        draft_layers: usize,
    },
    /// A draft layer's experts, which the file says nothing of, cannot be dealt out.
    #[error(
        "the placement has no row for the draft layer, whose {experts} experts cannot be split over {ranks} ranks"
    )]
    MtpExperts {
        /// Its experts.
        experts: usize,
        /// Ranks.
        ranks: usize,
    },
    /// Ranks would hold different numbers of experts.
    #[error("layer {layer}: {physical_experts} places cannot be split over {ranks} ranks")]
    Uneven {
        /// The layer.
        layer: usize,
        /// Its places.
        physical_experts: usize,
        /// Ranks.
        ranks: usize,
    },
    /// There is no such expert.
    #[error(
        "layer {layer}: place {physical_expert} is for expert {expert}, the model has {experts}"
    )]
    Unknown {
        /// The layer.
        layer: usize,
        /// The place, from 0.
        physical_expert: usize,
        /// Its expert.
        expert: usize,
        /// Experts of the layer.
        experts: usize,
    },
    /// Tokens would have nowhere to go.
    #[error("layer {layer}: expert {expert} has no place")]
    Missing {
        /// The layer.
        layer: usize,
        /// The expert.
        expert: usize,
    },
    /// A second copy beside the first helps nobody.
    #[error("layer {layer}: expert {expert} has two places on rank {rank}")]
    DuplicateCopy {
        /// The layer.
        layer: usize,
        /// The expert.
        expert: usize,
        /// The rank.
        rank: usize,
    },
}

/// What a refusal says of so many draft layers.
fn drafting(layers: usize) -> String {
    if layers == 0 { String::new() } else { format!(", and {layers} that may draft") }
}

/// Checks that every expert of every layer has a place, and each rank as many as the others. Rows of dense layers are
/// passed over.
pub fn check_placement(
    placement: &ExpertPlacement,
    config: &ModelConfig,
    ranks: usize,
) -> Result<(), PlacementError> {
    if ranks < 2 {
        return Err(PlacementError::NotExpertParallel);
    }
    let (got, expected) = (placement.layers.len(), config.layers);
    let draft_layers = config.mtp_layers;
    if got != expected && got != expected + draft_layers {
        return Err(PlacementError::Layers { got, expected, draft_layers });
    }
    let unplaced = (got..config.kv_layers()).find_map(|layer| config.moe_at(layer));
    if let Some(moe) = unplaced.filter(|moe| !moe.experts.is_multiple_of(ranks)) {
        return Err(PlacementError::MtpExperts { experts: moe.experts, ranks });
    }
    for (layer, places) in placement.layers.iter().enumerate() {
        if let Some(moe) = config.moe_at(layer) {
            check_layer(layer, places, moe.experts, ranks)?;
        }
    }
    Ok(())
}

fn check_layer(
    layer: usize,
    places: &[u16],
    experts: usize,
    ranks: usize,
) -> Result<(), PlacementError> {
    if !places.len().is_multiple_of(ranks) {
        return Err(PlacementError::Uneven { layer, physical_experts: places.len(), ranks });
    }
    let each = places.len() / ranks;
    let mut on = vec![None; experts]; // The last rank that an expert was found on.
    for (place, &expert) in places.iter().enumerate() {
        let (expert, rank) = (usize::from(expert), place / each);
        let Some(on) = on.get_mut(expert) else {
            return Err(PlacementError::Unknown { layer, physical_expert: place, expert, experts });
        };
        if on.replace(rank) == Some(rank) {
            return Err(PlacementError::DuplicateCopy { layer, expert, rank });
        }
    }
    match on.iter().position(Option::is_none) {
        Some(expert) => Err(PlacementError::Missing { layer, expert }),
        None => Ok(()),
    }
}

/// The experts of one layer as they lie.
#[derive(Debug, Clone, Copy)]
pub(crate) struct LayerPlacement<'a>(&'a [u16]);

impl<'a> LayerPlacement<'a> {
    /// Of layer `layer` by a placement that has been checked, if it says anything of that layer.
    pub(crate) fn of_layer(placement: Option<&'a ExpertPlacement>, layer: usize) -> Option<Self> {
        placement?.layers.get(layer).map(|places| Self(places))
    }

    /// The places of a rank.
    pub(crate) fn of_rank(self, rank: ParallelRank) -> Range<usize> {
        let each = self.0.len() / rank.size;
        rank.rank * each..(rank.rank + 1) * each
    }

    /// The experts that lie there, place by place.
    pub(crate) fn experts(self, places: Range<usize>) -> Vec<usize> {
        self.0[places].iter().map(|&expert| usize::from(expert)).collect()
    }

    /// For each of `experts` how many places it has, then these, ascending, padded to equal lengths.
    pub(crate) fn table(self, experts: usize) -> (Vec<i32>, usize) {
        let mut places = vec![Vec::new(); experts];
        for (place, &expert) in (0_i32..).zip(self.0) {
            places[usize::from(expert)].push(place);
        }
        let most = places.iter().map(Vec::len).max().unwrap_or(0);
        let row = |own: Vec<i32>| {
            let padding = most - own.len();
            let count = own.len() as i32;
            std::iter::once(count).chain(own).chain(std::iter::repeat_n(-1, padding))
        };
        (places.into_iter().flat_map(row).collect(), 1 + most)
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::weight_table::tests::tiny;

    fn check(layers: Vec<Vec<u16>>, ranks: usize) -> String {
        // 2 layers, the first of them dense, of 4 experts.
        let config = tiny("Qwen3MoeForCausalLM");
        let placement = ExpertPlacement { layers };
        check_placement(&placement, &config, ranks).map_or_else(|e| e.to_string(), |()| "ok".into())
    }

    #[test]
    fn invalid_placement_is_rejected_by_layer_and_expert() {
        assert_eq!(check(vec![vec![], vec![3, 0, 1, 2]], 2), "ok");
        assert_eq!(check(vec![vec![9, 9, 9], vec![3, 0, 1, 3, 2, 0]], 2), "ok");
        let refusals = [
            (vec![vec![]], 2, "the placement has 1 layers, the model 2"),
            (
                vec![vec![], vec![0, 1, 2, 3, 0]],
                2,
                "layer 1: 5 places cannot be split over 2 ranks",
            ),
            (
                vec![vec![], vec![0, 1, 2, 4]],
                2,
                "layer 1: place 3 is for expert 4, the model has 4",
            ),
            (vec![vec![], vec![0, 1, 2, 0]], 2, "layer 1: expert 3 has no place"),
            (vec![vec![], vec![]], 2, "layer 1: expert 0 has no place"),
            (vec![vec![], vec![0, 1, 0, 2, 3, 1]], 2, "layer 1: expert 0 has two places on rank 0"),
            (
                vec![vec![], vec![0, 1, 2, 3]],
                1,
                "a placement of experts needs several ranks that hold experts whole",
            ),
        ];
        for (layers, ranks, expected) in refusals {
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
        let (layers, drafts) = (config.layers, config.mtp_layers);
        assert_eq!((drafts, check(&config, layers, 2)), (1, Ok(())));
        assert_eq!(check(&config, layers + 1, 2), Ok(()));
        let refusal = |got| {
            Err(format!("the placement has {got} layers, the model {layers}, and 1 that may draft"))
        };
        assert_eq!(check(&config, layers + 2, 2), refusal(layers + 2));
        assert_eq!(check(&config, layers - 1, 2), refusal(layers - 1));
        // Only a layer that drafts needs its experts dealt out.
        let ranks = usize::from(2 * experts);
        assert_eq!(check(&config, layers, ranks), Ok(()));
        config.load_mtp = true;
        assert_eq!(check(&config, layers + 1, ranks), Ok(()));
        let refused = format!(
            "the placement has no row for the draft layer, whose {experts} experts cannot be split over {ranks} ranks"
        );
        assert_eq!(check(&config, layers, ranks), Err(refused));
    }

    #[test]
    fn replicas_are_listed_by_expert() {
        let placement = ExpertPlacement { layers: vec![vec![3, 0, 1, 3, 2, 0]] };
        assert!(LayerPlacement::of_layer(Some(&placement), 1).is_none());
        let places = LayerPlacement::of_layer(Some(&placement), 0).unwrap();
        let rank = |rank| places.of_rank(ParallelRank { rank, size: 2 });
        assert_eq!((rank(0), rank(1)), (0..3, 3..6));
        assert_eq!(places.experts(rank(1)), [3, 2, 0]);
        let (table, width) = places.table(4);
        assert_eq!(width, 3);
        assert_eq!(table, [2, 1, 5, 1, 2, -1, 1, 4, -1, 2, 0, 3]);
    }
}
