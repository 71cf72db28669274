//! Assignment of the layers with a KV cache to KV groups, and to layers of the KV pool.

use crate::ModelConfig;
use crate::sharding::ParallelRanks;
use protocol::KvKind;

/// Assignment of the layers of a model to KV groups.
///
/// All groups share one pool of blocks. A block has space for as many layers as the largest group has;
/// whichever group a block is allocated to stores its layers in it. The layers that attend to the whole context
/// are group 0, and the layers with a sliding window follow in groups of the same size, so that the blocks of
/// keys before the window can be freed. vLLM's hybrid KV cache manager forms groups by a similar rule
/// (`_get_kv_cache_groups_uniform_page_size`). If the layers without a window have keys and values of another size, several
/// layers of the smaller size take the place of one pool layer, so that a block has the same bytes for all groups. A layer
/// that reads the keys and values of an earlier layer has the place of that layer. Layers with recurrent state are a state group after these groups; they
/// have no blocks.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct KvGrouping {
    kinds: Vec<KvKind>,
    layers: Vec<KvLayerIndex>,
    pool_layers: usize,
    state_layers: usize,
    layers_per_slot: GroupLayersPerSlot,
}

/// Number of layers of a group whose keys and values have the bytes of one pool layer. The numbers differ if layers with
/// and without a window have KV heads of different sizes; otherwise both are 1.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct GroupLayersPerSlot {
    /// Layers of group 0.
    pub first: usize,
    /// Layers of the groups from 1 on.
    pub further: usize,
}

/// KV group and pool layer that have the keys and values, or the recurrent state, of a layer.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct KvLayerIndex {
    /// KV group, whose block tables the layer uses.
    pub group: usize,
    /// Layer of the KV pool, or of the state pool.
    pub layer: usize,
}

/// Maximum number of groups with a window; `BlockTableUpdate` numbers all groups with 8 bits.
const WINDOW_GROUPS_MAX: usize = 254;

/// If a model has fewer layers with a window than one per this number of other layers, all layers keep every
/// position: most of each block of a window group would be unused, and short requests would need twice the blocks.
const SPARSE_WINDOWS: usize = 3;

impl KvGrouping {
    /// Assigns all layers to one group that keeps every position.
    #[must_use]
    pub fn single(config: &ModelConfig) -> Self {
        let kind = if config.mla.is_some() { KvKind::Mla } else { KvKind::Full };
        let mut grouping = Self::one_group(config.kv_layers(), kind);
        let is_recurrent = |layer: &usize| config.is_recurrent(*layer);
        let (recurrent, with_keys): (Vec<usize>, Vec<usize>) =
            own_layers(config).partition(is_recurrent);
        for (group, layers) in [with_keys, recurrent].iter().enumerate() {
            for (index, &layer) in layers.iter().enumerate() {
                grouping.layers[layer] = KvLayerIndex { group, layer: index };
            }
        }
        grouping.state_layers = grouping.layers.iter().filter(|place| place.group > 0).count();
        grouping.pool_layers = own_layers(config).count() - grouping.state_layers;
        grouping.with_shared_layers(config)
    }

    /// Assigns all layers of a draft model to one group, whose block ids are those of group 0 of `target`.
    #[must_use]
    pub fn of_draft(config: &ModelConfig, target: &Self) -> Self {
        let step = target.layers_per_slot.first;
        let single = Self::single(config);
        Self {
            pool_layers: single.pool_layers.div_ceil(step),
            layers_per_slot: GroupLayersPerSlot { first: step, further: step },
            ..single
        }
    }

    /// Groups the layers of a model for requests of up to `max_positions` tokens. A window of this length has
    /// no effect, so its layers count as layers without a window.
    ///
    /// With `device_drafts`, a draft model, EAGLE-3 module or MTP module proposes draft tokens. It uses the
    /// block table of group 0 and reads every position; if all layers of the model have a window, the model
    /// then has one group that keeps every position, and no block is freed early. Layers of different sizes are never in
    /// one group; `ranks` determines their sizes on a rank.
    #[must_use]
    pub fn new(
        config: &ModelConfig,
        max_positions: usize,
        device_drafts: bool,
        ranks: &ParallelRanks,
    ) -> Self {
        let sizes_differ = config.layer_shapes.is_some();
        let has_effect = |window: &usize| *window < max_positions || sizes_differ;
        let window = |layer: usize| config.window_at(layer).filter(has_effect);
        let (windowed, full): (Vec<usize>, Vec<usize>) =
            own_layers(config).partition(|&layer| window(layer).is_some());
        let Some(tokens) = windowed.first().and_then(|&layer| window(layer)) else {
            return Self::single(config);
        };
        let kind = KvKind::Window { tokens: tokens as u32 };
        let is_mtp = |layer: &usize| *layer >= config.layers;
        if full.iter().all(is_mtp) {
            return if device_drafts {
                Self::single(config)
            } else {
                Self::one_group(config.kv_layers(), kind)
            };
        }
        if SPARSE_WINDOWS * windowed.len() < full.len() && !sizes_differ {
            return Self::single(config);
        }
        let layers_per_slot = GroupLayersPerSlot::of(config, ranks);
        let GroupLayersPerSlot { first, further } = layers_per_slot;
        let pool_layers = group_size(full.len().div_ceil(first), windowed.len().div_ceil(further));
        let mut grouping = Self {
            kinds: vec![KvKind::Full],
            layers: vec![KvLayerIndex { group: 0, layer: 0 }; config.kv_layers()],
            pool_layers,
            state_layers: 0,
            layers_per_slot,
        };
        for (index, layer) in full.into_iter().enumerate() {
            grouping.layers[layer].layer = index;
        }
        for layers in windowed.chunks(pool_layers * further) {
            let group = grouping.kinds.len();
            grouping.kinds.push(kind);
            for (index, &layer) in layers.iter().enumerate() {
                grouping.layers[layer] = KvLayerIndex { group, layer: index };
            }
        }
        grouping.with_shared_layers(config)
    }

    /// Gives layers that read the keys and values of another layer the place of that layer.
    fn with_shared_layers(mut self, config: &ModelConfig) -> Self {
        for layer in 0..config.kv_layers() {
            self.layers[layer] = self.layers[config.kv_source(layer)];
        }
        self
    }

    fn one_group(layers: usize, kind: KvKind) -> Self {
        Self {
            kinds: vec![kind],
            layers: (0..layers).map(|layer| KvLayerIndex { group: 0, layer }).collect(),
            pool_layers: layers,
            state_layers: 0,
            layers_per_slot: GroupLayersPerSlot { first: 1, further: 1 },
        }
    }

    /// Kind of each group that has blocks.
    #[must_use]
    pub fn kinds(&self) -> &[KvKind] {
        &self.kinds
    }

    /// Number of layers of the KV pool: the number of layers of the largest group.
    #[must_use]
    pub fn pool_layers(&self) -> usize {
        self.pool_layers
    }

    /// Number of layers of a group that take the place of one pool layer.
    #[must_use]
    pub fn layers_per_slot(&self) -> GroupLayersPerSlot {
        self.layers_per_slot
    }

    /// Number of layers with recurrent state. If there are such layers, they are the group after those of `kinds`.
    #[must_use]
    pub fn state_layers(&self) -> usize {
        self.state_layers
    }

    /// Returns the place of layer `layer`: a decoder layer, or an MTP module after the decoder layers.
    #[must_use]
    pub fn layer(&self, layer: usize) -> KvLayerIndex {
        self.layers[layer]
    }

    /// Returns the layers of group `group` that have keys and values, or a state, of their own, in ascending order.
    pub fn layers_of(&self, group: usize) -> impl Iterator<Item = usize> + '_ {
        let is_first = |layer: usize| !self.layers[..layer].contains(&self.layers[layer]);
        let of_group = move |layer: &usize| self.layers[*layer].group == group && is_first(*layer);
        (0..self.layers.len()).filter(of_group)
    }
}

impl GroupLayersPerSlot {
    /// Computes the numbers from the sizes of the keys on a rank. A pool layer has the least common multiple of the
    /// sizes.
    fn of(config: &ModelConfig, ranks: &ParallelRanks) -> Self {
        // If the heads cannot be split evenly, loading the weights fails.
        let channels =
            |config: &ModelConfig| (config.kv_heads / ranks.tp.size).max(1) * config.head_dim;
        let [full, windowed] = [channels(&config.at_full_layers()), channels(config)];
        let (mut a, mut b) = (full, windowed);
        while b > 0 {
            (a, b) = (b, a % b);
        }
        Self { first: windowed / a, further: full / a }
    }
}

/// Layers with keys and values, or a state, of their own: decoder layers and loaded MTP modules.
fn own_layers(config: &ModelConfig) -> impl Iterator<Item = usize> + '_ {
    (0..config.kv_layers()).filter(|&layer| config.kv_source(layer) == layer)
}

/// Number of layers per group of a model with `full` layers that keep every position and `windowed` layers with
/// a window. The smaller number leaves no layer of a block of group 0 unused. If the numbers are similar, the
/// larger one wastes less than one more group of windowed layers.
fn group_size(full: usize, windowed: usize) -> usize {
    let similar = 2 * windowed < 3 * full;
    let size = if similar { full.max(windowed) } else { full };
    size.max(windowed.div_ceil(WINDOW_GROUPS_MAX))
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::config::{GatedDeltaConfig, LayerAttentionConfig};
    use serde_json::json;
    use std::path::Path;

    const WINDOW: KvKind = KvKind::Window { tokens: 8 };

    /// Returns a model whose layer `i` has a window of 8 keys if character `i` of `layers` is `w`.
    fn config(layers: &str) -> ModelConfig {
        let json = json!({
            "architectures": ["LlamaForCausalLM"], "hidden_size": 64, "intermediate_size": 64,
            "num_hidden_layers": layers.len(), "num_attention_heads": 2, "vocab_size": 32,
            "rms_norm_eps": 1e-5, "max_position_embeddings": 64,
        });
        let config = ModelConfig::from_json(Path::new("config.json"), &json.to_string()).unwrap();
        let windowed = layers.chars().map(|layer| layer == 'w').collect();
        let attention = LayerAttentionConfig { window: 8, windowed, rope: None };
        ModelConfig { layer_attention: Some(attention), ..config }
    }

    #[test]
    fn windowed_layers_form_groups_of_equal_size() {
        for (layers, expected, pool_layers) in [
            ("wfwf", vec![vec![1, 3], vec![0, 2]], 2),
            ("wwfwwf", vec![vec![2, 5], vec![0, 1], vec![3, 4]], 2),
            ("wwfww", vec![vec![2], vec![0], vec![1], vec![3], vec![4]], 1),
            ("wffwwfww", vec![vec![1, 2, 5], vec![0, 3, 4], vec![6, 7]], 3),
            ("fwfwfww", vec![vec![0, 2, 4], vec![1, 3, 5, 6]], 4), // Similar numbers: one group.
            ("fffw", vec![vec![0, 1, 2], vec![3]], 3),
        ] {
            let grouping = KvGrouping::new(&config(layers), 64, true, &ParallelRanks::SINGLE);
            assert_eq!(grouping.pool_layers(), pool_layers, "{layers}");
            assert_eq!(grouping.kinds()[0], KvKind::Full);
            assert!(grouping.kinds()[1..].iter().all(|kind| *kind == WINDOW));
            let groups = 0..grouping.kinds().len();
            let of_groups: Vec<Vec<_>> =
                groups.map(|group| grouping.layers_of(group).collect()).collect();
            assert_eq!(of_groups, expected);
            for (group, layers) in of_groups.iter().enumerate() {
                for (layer, &of_model) in layers.iter().enumerate() {
                    assert_eq!(grouping.layer(of_model), KvLayerIndex { group, layer });
                }
            }
        }
    }

    #[test]
    fn layers_of_one_kind_form_one_group() {
        let kinds = |layers, max_positions, device_drafts| {
            let grouping = KvGrouping::new(
                &config(layers),
                max_positions,
                device_drafts,
                &ParallelRanks::SINGLE,
            );
            assert_eq!(grouping.pool_layers(), 3);
            grouping.kinds().to_vec()
        };
        assert_eq!(kinds("fff", 64, false), [KvKind::Full]);
        assert_eq!(kinds("www", 64, false), [WINDOW]);
        assert_eq!(kinds("www", 64, true), [KvKind::Full], "draft modules read every position");
        assert_eq!(kinds("wfw", 8, false), [KvKind::Full], "the window has no effect");
        let sparse = KvGrouping::new(&config("fffffffww"), 64, false, &ParallelRanks::SINGLE);
        assert_eq!((sparse.kinds(), sparse.pool_layers()), (&[KvKind::Full][..], 9));
        assert_eq!(KvGrouping::single(&config("wfw")).kinds(), [KvKind::Full]);
    }

    #[test]
    fn groups_are_numbered_with_8_bits() {
        let config = config(&format!("f{}", "w".repeat(600)));
        let grouping = KvGrouping::new(&config, 64, false, &ParallelRanks::SINGLE);
        assert_eq!((grouping.kinds().len(), grouping.pool_layers()), (201, 3));
    }

    /// Returns a model with the Gemma 4 layers `layers`: 4 KV heads of 16 channels in layers with a window, and 2 of 32 or,
    /// with `full_heads` 1, 1 of 32 in the others.
    fn gemma4(layers: &str, full_heads: usize, shared: usize) -> ModelConfig {
        let types = |layer| if layer == 'w' { "sliding_attention" } else { "full_attention" };
        let json = json!({
            "architectures": ["Gemma4ForCausalLM"], "hidden_size": 64, "intermediate_size": 64,
            "num_hidden_layers": layers.len(), "num_attention_heads": 4, "num_key_value_heads": 4,
            "head_dim": 16, "global_head_dim": 32, "num_global_key_value_heads": full_heads,
            "attention_k_eq_v": true, "num_kv_shared_layers": shared, "vocab_size": 32,
            "hidden_size_per_layer_input": 0, "max_position_embeddings": 64, "sliding_window": 8,
            "layer_types": layers.chars().map(types).collect::<Vec<_>>(),
        });
        ModelConfig::from_json(Path::new("config.json"), &json.to_string()).unwrap()
    }

    #[test]
    fn layers_of_different_sizes_fill_blocks_of_equal_bytes() {
        // A full layer with one head of 32 channels has half the bytes of a layer with a window.
        let grouping =
            KvGrouping::new(&gemma4("wfwfwwwf", 1, 0), 64, false, &ParallelRanks::SINGLE);
        assert_eq!(grouping.layers_per_slot(), GroupLayersPerSlot { first: 2, further: 1 });
        assert_eq!(grouping.pool_layers(), 2);
        let of_group = |group| grouping.layers_of(group).collect::<Vec<_>>();
        assert_eq!([of_group(0), of_group(1)], [vec![1, 3, 7], vec![0, 2]]);
        assert_eq!([of_group(2), of_group(3)], [vec![4, 5], vec![6]]);
        // On two ranks each full layer has one head of 32 channels, each other layer 2 of 16.
        let mut ranks = ParallelRanks::SINGLE;
        ranks.tp.size = 2;
        let grouping = KvGrouping::new(&gemma4("wfwfwwwf", 1, 0), 64, false, &ranks);
        assert_eq!(grouping.layers_per_slot(), GroupLayersPerSlot { first: 1, further: 1 });
        assert_eq!((grouping.pool_layers(), grouping.kinds().len()), (3, 3));
        let whole = KvGrouping::new(&gemma4("wf", 1, 0), 8, false, &ParallelRanks::SINGLE);
        assert_eq!(whole.kinds(), [KvKind::Full, WINDOW], "sizes differ");
    }

    #[test]
    fn layers_without_keys_have_the_place_of_their_source() {
        let grouping =
            KvGrouping::new(&gemma4("wfwfwwwf", 2, 4), 64, false, &ParallelRanks::SINGLE);
        assert_eq!(grouping.layers_per_slot(), GroupLayersPerSlot { first: 1, further: 1 });
        assert_eq!((grouping.pool_layers(), grouping.kinds().len()), (2, 2));
        let of_group = |group| grouping.layers_of(group).collect::<Vec<_>>();
        assert_eq!([of_group(0), of_group(1)], [vec![1, 3], vec![0, 2]]);
        for (layer, source) in [(4, 2), (5, 2), (6, 2), (7, 3)] {
            assert_eq!(grouping.layer(layer), grouping.layer(source));
        }
    }

    #[test]
    fn recurrent_layers_are_a_group_of_their_own() {
        let mut config = config("ffffffff");
        let layers = (0..8).map(|i| i % 4 != 3).collect();
        config.gated_delta = Some(GatedDeltaConfig {
            key_heads: 1,
            value_heads: 2,
            key_dim: 16,
            value_dim: 16,
            conv_width: 4,
            layers,
            grouped_rows: false,
        });
        let grouping = KvGrouping::new(&config, 64, false, &ParallelRanks::SINGLE);
        assert_eq!((grouping.kinds(), grouping.pool_layers()), (&[KvKind::Full][..], 2));
        assert_eq!(grouping.state_layers(), 6);
        let of_group = |group| grouping.layers_of(group).collect::<Vec<_>>();
        assert_eq!((of_group(0), of_group(1)), (vec![3, 7], vec![0, 1, 2, 4, 5, 6]));
        assert_eq!(grouping.layer(4), KvLayerIndex { group: 1, layer: 3 });
        assert_eq!(grouping.layer(7), KvLayerIndex { group: 0, layer: 1 });
    }
}
