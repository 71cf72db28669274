//! Settings of Gemma 3 (transformers `configuration_gemma3.py`): default values of absent fields, and settings
//! that are rejected.

use super::json_fields::JsonFields;
use super::{ModelArchitecture, ModelConfigError};

/// Divisor and factor of the logit softcap `cap · tanh(logit / cap)`.
const SOFTCAP: &str = "final_logit_softcapping";
/// Number whose inverse square root is the factor of the dot products of queries and keys.
const SCALAR: &str = "query_pre_attn_scalar";

/// Adds the default value of each field that is absent: published files of the larger models contain only some
/// fields. A field with the value null keeps this value.
pub(super) fn with_defaults(fields: &JsonFields, architecture: ModelArchitecture) -> JsonFields {
    if !architecture.is_gemma3() {
        return fields.clone();
    }
    let defaults = serde_json::json!({
        "vocab_size": 262_208, "hidden_size": 2304, "intermediate_size": 9216, "num_hidden_layers": 26,
        "num_attention_heads": 8, "num_key_value_heads": 4, "head_dim": 256, "rms_norm_eps": 1e-6,
        "max_position_embeddings": 131_072, "bos_token_id": 2, "eos_token_id": 1,
        SCALAR: 256, "sliding_window": 4096,
    });
    let is_absent = |name: &str| fields.value(name).is_none() && !fields.is_null(name);
    let defaults = defaults.as_object().into_iter().flatten();
    let added = defaults.filter(|(name, _)| is_absent(name));
    let added = added.map(|(name, value)| (name.clone(), value.clone())).collect();
    fields.clone().with(&added)
}

/// Rejects settings of Gemma 3 that change the arithmetic and are not supported.
pub(super) fn reject_unsupported(
    fields: &JsonFields,
    architecture: ModelArchitecture,
) -> Result<(), ModelConfigError> {
    if !architecture.is_gemma3() {
        return Ok(());
    }
    for field in ["hidden_activation", "hidden_act"] {
        if fields.text(field)?.is_some_and(|found| found != "gelu_pytorch_tanh") {
            return Err(fields.unsupported(field, "only gelu_pytorch_tanh is"));
        }
    }
    if fields.flag("use_bidirectional_attention", false)? {
        let why = "only causal attention is";
        return Err(fields.unsupported("use_bidirectional_attention", why));
    }
    const ATTENTION_CAP: &str = "attn_logit_softcapping";
    if fields.value(ATTENTION_CAP).is_some() {
        // transformers reads the field, but does not apply it; other engines do.
        return Err(fields.unsupported(ATTENTION_CAP, "attention scores are not capped"));
    }
    if architecture == ModelArchitecture::Gemma3Multimodal && fields.value(SOFTCAP).is_some() {
        let why = "transformers caps the logits of Gemma3ForCausalLM only";
        return Err(fields.unsupported(SOFTCAP, why));
    }
    Ok(())
}

/// Reads the logit softcap; `None` if logits are not capped.
pub(super) fn logit_softcap(
    fields: &JsonFields,
    architecture: ModelArchitecture,
) -> Result<Option<f32>, ModelConfigError> {
    if !architecture.is_gemma() {
        return Ok(None);
    }
    Ok(fields.positive_or_none(SOFTCAP)?.map(|cap| cap as f32))
}

/// Reads the factor of the dot products of queries and keys.
pub(super) fn attention_multiplier(fields: &JsonFields) -> Result<f32, ModelConfigError> {
    Ok(fields.positive(SCALAR)?.powf(-0.5) as f32)
}
