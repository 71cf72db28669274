//! Scales of the keys and values in an FP8 KV cache.

use crate::{ModelConfig, ModelLoadError, Weights};
use ops::{DType, KvCacheScaling, Tensor};
use std::ops::Range;

/// Names under which checkpoints may store the key scales of a layer. `kv_scale` is a common scale of keys and
/// values.
const KEY_SCALES: [&str; 6] = [
    "k_proj.k_scale",
    "qkv_proj.k_scale",
    "attn.k_scale",
    "k_scale",
    "k_proj.output_scale",
    "kv_scale",
];
/// Names under which checkpoints may store the value scales of a layer.
const VALUE_SCALES: [&str; 6] = [
    "v_proj.v_scale",
    "qkv_proj.v_scale",
    "attn.v_scale",
    "v_scale",
    "v_proj.output_scale",
    "kv_scale",
];

/// Dequantisation scales of the FP8 KV cache of one layer, in the FP8 format of the device; 1 for other KV caches. Attention computes with the
/// stored keys and values: the softmax scale is multiplied by the largest key scale, and the columns of the
/// output projection by the value scale of their head.
#[derive(Debug)]
pub(crate) struct LayerKvScales {
    /// Largest key scale.
    key: f32,
    /// Value scales: one of the layer, or one per KV head of the model.
    values: Vec<f32>,
    /// Factors of the heads of this rank, if scales differ between heads: f32 `[query heads + 2 · KV heads]`.
    head_factors: Option<Tensor>,
}

impl LayerKvScales {
    /// Loads the scales of an attention layer. A layer without stored scales has the scale 1 (2 in FNUZ).
    pub(crate) fn load(config: &ModelConfig, w: &Weights<'_>) -> Result<Self, ModelLoadError> {
        let unit = Self { key: 1.0, values: vec![1.0], head_factors: None };
        if w.kv_dtype() != DType::F8E4M3 {
            return Ok(unit);
        }
        // Checkpoints have scales for OCP numbers up to 448, which FNUZ (up to 240) represents with twice the scale.
        let range = w.fp8_range_factor();
        let load = |names: &[&str]| -> Result<Vec<f32>, ModelLoadError> {
            let stored = w.head_scales(names, config.kv_heads)?.unwrap_or_else(|| vec![1.0]);
            Ok(stored.into_iter().map(|scale| scale * range).collect())
        };
        let (keys, values) = (load(&KEY_SCALES)?, load(&VALUE_SCALES)?);
        let key = keys.iter().copied().fold(0.0, f32::max);
        if keys.len() == 1 && values.len() == 1 {
            return Ok(Self { key, values, ..unit });
        }
        let ranks = w.ranks();
        let query_heads = ranks.query_heads(config).map_err(|e| w.split("q_proj", e))?;
        let kv_heads = ranks.kv_heads(config).map_err(|e| w.split("k_proj", e))?;
        let group = config.heads / config.kv_heads;
        let factors = factors(
            &HeadScales { keys: &keys, values: &values, largest_key: key },
            group,
            query_heads,
            kv_heads,
        );
        let head_factors = Some(w.device_vector("k_scale", &factors)?);
        Ok(Self { key, values, head_factors })
    }

    /// Factor of the softmax scale.
    pub(crate) fn softmax_factor(&self) -> f32 {
        self.key
    }

    /// Factors of the columns of the output projection: one of all columns, or one for the columns of each KV
    /// head.
    pub(crate) fn output_factors(&self) -> &[f32] {
        &self.values
    }

    /// Scaling of keys and values when they are stored.
    pub(crate) fn scaling(&self) -> KvCacheScaling<'_> {
        match &self.head_factors {
            Some(factors) => KvCacheScaling::Heads(factors),
            None => KvCacheScaling::Layer { key: self.key, value: self.values[0] },
        }
    }
}

/// Scales of the KV heads of a layer: one of all heads, or one per head.
struct HeadScales<'a> {
    keys: &'a [f32],
    values: &'a [f32],
    largest_key: f32,
}

/// Returns the factors of `query_heads`, then of the keys and of the values of `kv_heads`; `group` query heads
/// share a KV head.
fn factors(
    scales: &HeadScales<'_>,
    group: usize,
    query_heads: Range<usize>,
    kv_heads: Range<usize>,
) -> Vec<f32> {
    let of = |scales: &[f32], head: usize| scales[head.min(scales.len() - 1)];
    let queries = query_heads.map(|head| of(scales.keys, head / group) / scales.largest_key);
    let keys = kv_heads.clone().map(|head| 1.0 / of(scales.keys, head));
    let values = kv_heads.map(|head| 1.0 / of(scales.values, head));
    queries.chain(keys).chain(values).collect()
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn query_factors_make_up_for_key_scales() {
        let scales = HeadScales { keys: &[0.5, 2.0, 1.0, 4.0], values: &[0.25], largest_key: 4.0 };
        let found = factors(&scales, 2, 2..6, 1..3);
        assert_eq!(found, [0.5, 0.5, 0.25, 0.25, 0.5, 1.0, 4.0, 4.0]);
    }
}
