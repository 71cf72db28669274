//! Constant factors of activations: embeddings, residual branches, attention scores and logits.

use super::gemma3::attention_multiplier;
use super::json_fields::JsonFields;
use super::{ModelArchitecture, ModelConfigError};
use half::{bf16, f16};
use ops::DType;

/// Constant factors by which a model multiplies activations (transformers `modeling_granite.py`,
/// `modeling_gemma3.py` and `modeling_gemma4.py`). Each is 1 for most architectures.
#[derive(Debug, Clone, Copy, PartialEq)]
pub struct ActivationMultipliers {
    /// Factor of token embeddings (`embedding_multiplier`).
    pub embedding: f32,
    /// Whether the factor of token embeddings is rounded to the dtype of the weights.
    pub rounds_embedding: bool,
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
        Self {
            embedding: 1.0,
            rounds_embedding: false,
            residual: 1.0,
            attention: None,
            logits: 1.0,
        }
    }
}

impl ActivationMultipliers {
    /// Factor of token embeddings, for weights of the type `dtype`.
    #[must_use]
    pub fn embedding_in(&self, dtype: DType) -> f32 {
        self.rounded_in(self.embedding, dtype)
    }

    /// Factor `factor` of other embeddings, for weights of the type `dtype`; it is rounded as that of token embeddings.
    #[must_use]
    pub fn rounded_in(&self, factor: f32, dtype: DType) -> f32 {
        match dtype {
            DType::BF16 if self.rounds_embedding => bf16::from_f32(factor).to_f32(),
            DType::F16 if self.rounds_embedding => f16::from_f32(factor).to_f32(),
            _ => factor,
        }
    }

    /// Reads the multipliers; returns the default values for architectures without multipliers. The embedding
    /// multiplier of Gemma 3 and Gemma 4 is the square root of the hidden size.
    pub(super) fn read(
        fields: &JsonFields,
        architecture: ModelArchitecture,
        hidden: usize,
    ) -> Result<Self, ModelConfigError> {
        if architecture.is_gemma3() {
            return Ok(Self {
                embedding: (hidden as f64).sqrt() as f32,
                rounds_embedding: true,
                attention: Some(attention_multiplier(fields)?),
                ..Self::default()
            });
        }
        if architecture.is_gemma4() {
            return Ok(Self {
                embedding: (hidden as f64).sqrt() as f32,
                rounds_embedding: true,
                attention: Some(1.0),
                ..Self::default()
            });
        }
        if !architecture.traits().has_multipliers {
            return Ok(Self::default());
        }
        let factor = |name| Ok(fields.positive_or_none(name)?.unwrap_or(1.0) as f32);
        Ok(Self {
            embedding: factor("embedding_multiplier")?,
            rounds_embedding: false,
            residual: factor("residual_multiplier")?,
            attention: Some(factor("attention_multiplier")?),
            logits: factor("logits_scaling")?,
        })
    }
}
