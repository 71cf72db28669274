//! Sizes that differ between the layers of a model: KV heads and head size of the layers without a window, layers that
//! read the keys and values of an earlier layer, and the width of their MLPs (transformers `configuration_gemma4.py`).

use super::json_fields::JsonFields;
use super::parse_config::{LAYER_LIMIT, WIDTH_LIMIT};
use super::{ModelConfig, ModelConfigError};
use std::borrow::Cow;

const FULL_HEAD_DIM: &str = "global_head_dim";
const FULL_KV_HEADS: &str = "num_global_key_value_heads";
const SHARED_LAYERS: &str = "num_kv_shared_layers";
/// Settings by layer, as transformers writes them for a configuration in which layers differ.
const BY_LAYER: &str = "per_layer_config";

/// Sizes of the layers that differ from the sizes in [`ModelConfig`], which are those of the layers with a window and
/// keys and values of their own.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct LayerShapeConfig {
    /// Number of KV heads of the layers that attend to the whole context, over all ranks.
    pub full_kv_heads: usize,
    /// Number of channels per head in these layers.
    pub full_head_dim: usize,
    /// Whether the values of these layers are computed by the key projection (`attention_k_eq_v`).
    pub full_keys_as_values: bool,
    /// Number of layers, at the end of the model, that read the keys and values of the last earlier layer of their
    /// type.
    pub kv_shared_layers: usize,
    /// Factor of the intermediate size of the dense MLPs in layers that read the keys and values of another layer.
    pub shared_mlp_factor: usize,
}

/// Source of the keys and values of a layer.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum KvProjectionKind {
    /// One projection for keys and one for values.
    Separate,
    /// The key projection computes both: the values are the keys before their norm and RoPE.
    KeysAsValues,
    /// The layer reads the keys and values of an earlier layer, and has only queries of its own.
    Absent,
}

impl LayerShapeConfig {
    /// Reads the sizes of a model, of which all other settings have been read; `None` for other architectures.
    pub(super) fn read(
        fields: &JsonFields,
        config: &ModelConfig,
    ) -> Result<Option<Self>, ModelConfigError> {
        if !config.architecture.is_gemma4() {
            return Ok(None);
        }
        let full_keys_as_values = fields.flag("attention_k_eq_v", false)?;
        let kv_shared_layers = fields.count_or_none(SHARED_LAYERS, LAYER_LIMIT)?.unwrap_or(0);
        let is_wide = fields.flag("use_double_wide_mlp", false)?;
        let mut shapes = Self {
            full_kv_heads: config.kv_heads,
            full_head_dim: fields.size(FULL_HEAD_DIM, WIDTH_LIMIT)?,
            full_keys_as_values,
            kv_shared_layers,
            shared_mlp_factor: if is_wide { 2 } else { 1 },
        };
        // transformers reads the number of KV heads only together with `attention_k_eq_v`.
        match fields.size_or_none(FULL_KV_HEADS, WIDTH_LIMIT)? {
            Some(heads) if full_keys_as_values => shapes.full_kv_heads = heads,
            _ => {}
        }
        if let Some(by_layer) = fields.object(BY_LAYER)? {
            shapes.read_by_layer(&by_layer, config)?;
        }
        shapes.check(fields, config)?;
        Ok(Some(shapes))
    }

    /// Replaces the heads of the full layers by those that `by_layer` lists, which must be the same for all full
    /// layers; it may not list other layers.
    fn read_by_layer(
        &mut self,
        by_layer: &JsonFields,
        config: &ModelConfig,
    ) -> Result<(), ModelConfigError> {
        let mut listed = vec![false; config.layers];
        for name in by_layer.names() {
            let index = name.parse().ok().filter(|&i: &usize| i < config.layers);
            let (Some(i), Some(layer)) = (index, by_layer.object(name)?) else {
                return Err(by_layer.unsupported(name, "it is no layer of the model"));
            };
            if config.window_at(i).is_some() {
                return Err(by_layer.unsupported(name, "layers with a window have equal sizes"));
            }
            layer.reject_unknown(&["head_dim", "num_key_value_heads"])?;
            let dim = layer.size_or_none("head_dim", WIDTH_LIMIT)?.unwrap_or(config.head_dim);
            let heads = layer.size_or_none("num_key_value_heads", WIDTH_LIMIT)?;
            let heads = heads.unwrap_or(config.kv_heads);
            let differs = self.full_head_dim != dim || self.full_kv_heads != heads;
            if differs && listed.contains(&true) {
                return Err(by_layer.unsupported(name, "full layers have equal sizes"));
            }
            (self.full_head_dim, self.full_kv_heads) = (dim, heads);
            listed[i] = true;
        }
        let is_unlisted = |i: &usize| config.window_at(*i).is_none() && !listed[*i];
        let unlisted = (0..config.layers).find(is_unlisted);
        let unlisted = unlisted.filter(|_| listed.contains(&true));
        match unlisted {
            Some(i) => Err(by_layer.missing(&i.to_string())),
            None => Ok(()),
        }
    }

    /// Checks that the sizes fit the model.
    fn check(&self, fields: &JsonFields, config: &ModelConfig) -> Result<(), ModelConfigError> {
        let (heads, dim) = (self.full_kv_heads, self.full_head_dim);
        if !config.heads.is_multiple_of(heads) {
            let detail = format!("{heads} does not divide num_attention_heads {}", config.heads);
            return Err(fields.contradiction(FULL_KV_HEADS, detail));
        }
        if !dim.is_multiple_of(16) {
            let detail = format!("{dim} channels per head; kernels need a multiple of 16");
            return Err(fields.contradiction(FULL_HEAD_DIM, detail));
        }
        let own = config.layers.saturating_sub(self.kv_shared_layers);
        let has_source = |i: usize| (0..own).any(|source| is_alike(config, i, source));
        if (own..config.layers).all(has_source) && own > 0 {
            return Ok(());
        }
        let detail = format!("{own} earlier layers lack a layer of each type to share");
        Err(fields.contradiction(SHARED_LAYERS, detail))
    }
}

/// Whether two layers both have a window, or both have none.
fn is_alike(config: &ModelConfig, a: usize, b: usize) -> bool {
    config.window_at(a).is_some() == config.window_at(b).is_some()
}

impl ModelConfig {
    /// Returns the configuration in which the sizes are those of decoder layer `i`: KV heads, head size, source of the
    /// keys and values, and intermediate size.
    #[must_use]
    pub fn at_layer(&self, i: usize) -> Cow<'_, Self> {
        let Some(shapes) = &self.layer_shapes else { return Cow::Borrowed(self) };
        let mut config = self.clone();
        if self.window_at(i).is_none() {
            config.kv_heads = shapes.full_kv_heads;
            config.head_dim = shapes.full_head_dim;
            if shapes.full_keys_as_values {
                config.kv_projection = KvProjectionKind::KeysAsValues;
            }
        }
        if self.kv_source(i) != i {
            config.kv_projection = KvProjectionKind::Absent;
            config.intermediate *= shapes.shared_mlp_factor;
        }
        Cow::Owned(config)
    }

    /// Returns the layer whose keys and values decoder layer `i` reads: `i`, or an earlier layer of its type.
    #[must_use]
    pub fn kv_source(&self, i: usize) -> usize {
        let shared = self.layer_shapes.map_or(0, |shapes| shapes.kv_shared_layers);
        let own = self.layers - shared;
        if i < own || i >= self.layers {
            return i;
        }
        (0..own).rev().find(|&source| is_alike(self, i, source)).unwrap_or(i)
    }

    /// Returns the configuration in which the sizes are those of the layers that attend to the whole context.
    pub(crate) fn at_full_layers(&self) -> Cow<'_, Self> {
        let full = (0..self.layers).find(|&i| self.window_at(i).is_none());
        full.map_or(Cow::Borrowed(self), |i| self.at_layer(i))
    }
}
