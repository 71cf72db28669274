//! Text part of multimodal models, whose fields are in `text_config`.
//!
//! Some fields of the text part, such as the data type and the quantisation format, are in the outermost
//! object of `config.json`. The fields of the vision part are not read: requests with images are rejected.

use super::json_fields::JsonFields;
use super::{ModelArchitecture, ModelConfigError};

/// Name of the object in `config.json` that contains the fields of the text part.
const TEXT_CONFIG: &str = "text_config";
/// Objects that are read from the outermost object if `text_config` does not contain them.
const INHERITED_OBJECTS: &[&str] = &["quantization_config", "compression_config", "quantization"];
/// Token ids that are read from the outermost object if `text_config` does not contain them.
const INHERITED_TOKENS: &[&str] = &["bos_token_id", "eos_token_id"];
/// Field for which a value in the outermost object takes precedence over `text_config`.
const TIE: &str = "tie_word_embeddings";
/// Fields that may only be in `text_config`. In the outermost object they would have no effect.
const TEXT_ONLY: &[&str] = &[
    "max_position_embeddings",
    "rope_scaling",
    "rope_parameters",
    "rope_theta",
    "rope_local_base_freq",
    "sliding_window",
    "sliding_window_pattern",
    "layer_types",
    "query_pre_attn_scalar",
    "attn_logit_softcapping",
    "final_logit_softcapping",
    "use_bidirectional_attention",
    "attention_k_eq_v",
    "num_kv_shared_layers",
    "use_double_wide_mlp",
    "enable_moe_block",
    "hidden_size_per_layer_input",
    "per_layer_config",
    "global_head_dim",
    "num_global_key_value_heads",
    "top_k_experts",
    "vocab_size_per_layer_input",
];
/// Spellings of the data type. A value in the outermost object takes precedence over `text_config`.
const DTYPES: &[&str] = &["dtype", "torch_dtype"];

impl ModelArchitecture {
    /// Whether the architecture is multimodal; only the text part of such a model is served.
    #[must_use]
    pub const fn is_multimodal(self) -> bool {
        !self.traits().text_model_types.is_empty()
    }
}

/// Returns the fields of the text part; all fields if the architecture is not multimodal.
pub(super) fn text_fields(
    fields: &JsonFields,
    architecture: ModelArchitecture,
) -> Result<JsonFields, ModelConfigError> {
    let model_types = architecture.traits().text_model_types;
    if model_types.is_empty() {
        return Ok(fields.clone());
    }
    let text = fields.object(TEXT_CONFIG)?.ok_or_else(|| fields.missing(TEXT_CONFIG))?;
    if text.text("model_type")?.is_some_and(|found| !model_types.contains(&found)) {
        let types = model_types.join(" or ");
        let why = format!("this architecture has a text part of the type {types}");
        return Err(text.unsupported("model_type", &why));
    }
    for field in TEXT_ONLY {
        if fields.value(field).is_some() {
            let why = format!(
                "it belongs to {TEXT_CONFIG}; with --hf-overrides, to {TEXT_CONFIG}.{field}"
            );
            return Err(fields.unsupported(field, &why));
        }
    }
    check_shared_types(fields)?;
    check_shared_types(&text)?;
    let has_dtype = DTYPES.iter().any(|field| fields.value(field).is_some());
    let has_tie = fields.value(TIE).is_some();
    let inherited = INHERITED_OBJECTS.iter().chain(INHERITED_TOKENS);
    let outer = inherited.filter(|field| text.value(field).is_none());
    let outer = outer.chain(DTYPES.iter().filter(|_| has_dtype)).copied();
    let outer = outer.chain([TIE].into_iter().filter(|_| has_tie));
    let inherited: Vec<&str> = outer.collect();
    Ok(text.inheriting(fields, inherited))
}

/// Checks the types of the fields that the outermost object and `text_config` may both contain. A value of a wrong type is
/// an error even if the value of the other object takes precedence.
fn check_shared_types(object: &JsonFields) -> Result<(), ModelConfigError> {
    for field in INHERITED_OBJECTS {
        object.object(field)?;
    }
    for field in INHERITED_TOKENS {
        object.tokens(field)?;
    }
    for field in DTYPES {
        object.text(field)?;
    }
    object.flag(TIE, false).map(drop)
}
