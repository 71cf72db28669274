//! Sizes of latent attention.

use super::fields::Fields;
use super::read::WIDTH_LIMIT;
use super::{Architecture, ConfigError, LatentConfig};

/// Of the DeepSeek families; `None` elsewhere.
pub(super) fn latent(
    fields: &Fields,
    architecture: Architecture,
) -> Result<Option<LatentConfig>, ConfigError> {
    if !matches!(architecture, Architecture::DeepseekV2 | Architecture::DeepseekV3) {
        return Ok(None);
    }
    if !fields.flag("rope_interleave", true)? {
        return Err(fields.unsupported("rope_interleave", "only neighbouring channels turn"));
    }
    let size = |field| fields.size(field, WIDTH_LIMIT);
    let latent = LatentConfig {
        query: fields.size_or_none("q_lora_rank", WIDTH_LIMIT)?,
        key_value: size("kv_lora_rank")?,
        unturned: size("qk_nope_head_dim")?,
        turned: size("qk_rope_head_dim")?,
        value: size("v_head_dim")?,
    };
    // Pairs of channels turn, and bf16 products take inputs in pairs.
    for (field, got) in [
        ("kv_lora_rank", latent.key_value),
        ("qk_nope_head_dim", latent.unturned),
        ("qk_rope_head_dim", latent.turned),
        ("v_head_dim", latent.value),
    ] {
        if !got.is_multiple_of(2) {
            return Err(fields.contradiction(field, format!("{got} channels; kernels take pairs")));
        }
    }
    Ok(Some(latent))
}
