//! Parser of the dimensions of multi-head latent attention (MLA) in `config.json`.

use super::json_fields::JsonFields;
use super::parse_config::WIDTH_LIMIT;
use super::{MlaConfig, ModelArchitecture, ModelConfigError};

/// Reads the MLA dimensions of DeepSeek models; returns `None` for other architectures.
pub(super) fn mla(
    fields: &JsonFields,
    architecture: ModelArchitecture,
) -> Result<Option<MlaConfig>, ModelConfigError> {
    if !matches!(architecture, ModelArchitecture::DeepseekV2 | ModelArchitecture::DeepseekV3) {
        return Ok(None);
    }
    if !fields.flag("rope_interleave", true)? {
        return Err(fields.unsupported("rope_interleave", "RoPE rotates adjacent channels"));
    }
    let size = |field| fields.size(field, WIDTH_LIMIT);
    let config = MlaConfig {
        q_lora_rank: fields.size_or_none("q_lora_rank", WIDTH_LIMIT)?,
        kv_lora_rank: size("kv_lora_rank")?,
        qk_nope_head_dim: size("qk_nope_head_dim")?,
        qk_rope_head_dim: size("qk_rope_head_dim")?,
        v_head_dim: size("v_head_dim")?,
    };
    reject_odd_dims(fields, &config)?;
    Ok(Some(config))
}

/// Rejects odd dimensions: RoPE rotates pairs of channels, and bf16 dot products read two elements at a time.
fn reject_odd_dims(fields: &JsonFields, config: &MlaConfig) -> Result<(), ModelConfigError> {
    for (field, got) in [
        ("kv_lora_rank", config.kv_lora_rank),
        ("qk_nope_head_dim", config.qk_nope_head_dim),
        ("qk_rope_head_dim", config.qk_rope_head_dim),
        ("v_head_dim", config.v_head_dim),
    ] {
        if !got.is_multiple_of(2) {
            return Err(
                fields.contradiction(field, format!("{got} channels; kernels need an even number"))
            );
        }
    }
    Ok(())
}
