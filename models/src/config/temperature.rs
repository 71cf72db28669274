//! Attention temperature: factors by which queries are multiplied; the factor of a query depends on its
//! position.

use super::json_fields::JsonFields;
use super::{ModelArchitecture, ModelConfigError};

/// Attention temperature of Llama 4 and Ministral 3 (transformers `get_llama_4_attn_scale` in
/// `modeling_ministral3.py`): queries at position `p` are multiplied by `1 + beta · ln(1 + ⌊p / interval⌋)`.
#[derive(Debug, Clone, Copy, PartialEq)]
pub struct AttentionTemperatureConfig {
    /// Coefficient of the logarithm in the factor (`llama_4_scaling_beta`).
    pub beta: f64,
    /// Number of positions with the same factor (`original_max_position_embeddings`).
    pub interval: f64,
}

/// Field of the RoPE settings that contains `beta`.
pub(super) const BETA: &str = "llama_4_scaling_beta";

impl AttentionTemperatureConfig {
    /// Reads the attention temperature from the RoPE settings `rope`; returns `None` if the architecture has
    /// no attention temperature or if `beta` is 0.
    pub(super) fn read(
        fields: &JsonFields,
        architecture: ModelArchitecture,
        rope: Option<&JsonFields>,
    ) -> Result<Option<Self>, ModelConfigError> {
        const INTERVAL: &str = "original_max_position_embeddings";
        let Some(rope) = rope.filter(|_| architecture.text_traits(fields).has_temperature) else {
            return Ok(None);
        };
        match rope.number_or_none(BETA)? {
            None => Err(rope.missing(BETA)),
            Some(beta) if beta < 0.0 => Err(rope.unsupported(BETA, "0 and numbers above 0 are")),
            Some(0.0) => Ok(None),
            Some(beta) => {
                let interval = rope.positive_or_none(INTERVAL)?;
                let interval = interval.or(fields.positive_or_none(INTERVAL)?);
                Ok(Some(Self { beta, interval: interval.ok_or_else(|| rope.missing(INTERVAL))? }))
            }
        }
    }

    /// Factor by which queries at `position` are multiplied, computed in f32 as in transformers.
    #[must_use]
    pub fn factor(&self, position: usize) -> f32 {
        let interval = (position as f32 / self.interval as f32).floor();
        1.0 + self.beta as f32 * (1.0 + interval).ln()
    }
}
