//! Constant factors of activations: embeddings, residual branches, attention scores and logits.

use super::json_fields::JsonFields;
use super::{ModelArchitecture, ModelConfigError};

/// Constant factors by which a model multiplies activations (transformers `modeling_granite.py`). Each is 1 for most
/// architectures.
#[derive(Debug, Clone, Copy, PartialEq)]
pub struct ActivationMultipliers {
    /// Factor of token embeddings (`embedding_multiplier`).
    pub embedding: f32,
    /// Factor of the outputs of attention and of the MLP before they are added to the residual stream
    /// (`residual_multiplier`).
    pub residual: f32,
    /// Factor of the dot products of queries and keys (`attention_multiplier`); `None` = `1 / √head_dim`.
    pub attention: Option<f32>,
    /// Divisor of logits (`logits_scaling`).
    pub logits: f32,
}

impl Default for ActivationMultipliers {
    fn default() -> Self {
        Self { embedding: 1.0, residual: 1.0, attention: None, logits: 1.0 }
    }
}

impl ActivationMultipliers {
    /// Reads the multipliers; returns the default values for architectures without multipliers.
    pub(super) fn read(
        fields: &JsonFields,
        architecture: ModelArchitecture,
    ) -> Result<Self, ModelConfigError> {
        let is_granite = matches!(
            architecture,
            ModelArchitecture::Granite | ModelArchitecture::GraniteMoeHybrid
        );
        if !is_granite {
            return Ok(Self::default());
        }
        let factor = |name| Ok(fields.positive_or_none(name)?.unwrap_or(1.0) as f32);
        Ok(Self {
            embedding: factor("embedding_multiplier")?,
            residual: factor("residual_multiplier")?,
            attention: Some(factor("attention_multiplier")?),
            logits: factor("logits_scaling")?,
        })
    }
}
