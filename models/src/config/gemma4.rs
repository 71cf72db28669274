//! Settings of Gemma 4 (transformers `configuration_gemma4.py`, `configuration_gemma4_unified.py`): default values of
//! absent fields, and settings that are rejected.

use super::json_fields::JsonFields;
use super::parse_config::{VOCAB_LIMIT, WIDTH_LIMIT};
use super::{ModelArchitecture, ModelConfigError, PerLayerInputConfig};
use serde_json::json;

const ROPE: &str = "rope_parameters";
const BIDIRECTIONAL: &str = "use_bidirectional_attention";
/// Number of channels of the per-layer inputs.
const PER_LAYER_CHANNELS: &str = "hidden_size_per_layer_input";
const PER_LAYER_VOCAB: &str = "vocab_size_per_layer_input";

/// Adds the default value of each field that is absent. A field with the value null keeps this value.
pub(super) fn with_defaults(fields: &JsonFields, architecture: ModelArchitecture) -> JsonFields {
    if !architecture.is_gemma4() {
        return fields.clone();
    }
    let is_unified = architecture == ModelArchitecture::Gemma4Unified;
    let [positions, window] = if is_unified { [262_144, 1024] } else { [131_072, 512] };
    let rope = json!({
        "sliding_attention": {"rope_type": "default", "rope_theta": 1e4},
        "full_attention": {"rope_type": "proportional", "partial_rotary_factor": 0.25, "rope_theta": 1e6},
    });
    let mut defaults = json!({
        "vocab_size": 262_144, "hidden_size": 2304, "intermediate_size": 9216, "num_hidden_layers": 30,
        "num_attention_heads": 8, "num_key_value_heads": 4, "head_dim": 256, "rms_norm_eps": 1e-6,
        "max_position_embeddings": positions, "bos_token_id": 2, "eos_token_id": 1,
        "sliding_window": window, "global_head_dim": 512,
    });
    if !is_unified {
        defaults["vocab_size_per_layer_input"] = json!(262_144);
        defaults[PER_LAYER_CHANNELS] = json!(256);
    }
    let is_absent = |name: &str| fields.value(name).is_none() && !fields.is_null(name);
    let defaults = defaults.as_object().into_iter().flatten();
    let added = defaults.filter(|(name, _)| is_absent(name));
    let added = added.map(|(name, value)| (name.clone(), value.clone()));
    // transformers replaces absent RoPE settings and null alike.
    let rope = fields.value(ROPE).is_none().then(|| (ROPE.to_owned(), rope));
    fields.clone().with(&added.chain(rope).collect())
}

/// Rejects settings of Gemma 4 that change the arithmetic and are not supported.
pub(super) fn reject_unsupported(
    fields: &JsonFields,
    architecture: ModelArchitecture,
) -> Result<(), ModelConfigError> {
    if !architecture.is_gemma4() {
        return Ok(());
    }
    for field in ["hidden_activation", "hidden_act"] {
        if fields.text(field)?.is_some_and(|found| found != "gelu_pytorch_tanh") {
            return Err(fields.unsupported(field, "only gelu_pytorch_tanh is"));
        }
    }
    // Between pictures, `vision` makes attention bidirectional; requests contain text only.
    if fields.text(BIDIRECTIONAL)?.is_some_and(|kind| kind != "vision") {
        return Err(fields.unsupported(BIDIRECTIONAL, "only null and vision are"));
    }
    let is_unified = architecture == ModelArchitecture::Gemma4Unified;
    if is_unified && has_per_layer_input(fields) {
        return Err(fields.unsupported(PER_LAYER_CHANNELS, "this architecture has no such inputs"));
    }
    if is_unified && fields.flag("enable_moe_block", false)? {
        return Err(fields.unsupported("enable_moe_block", "this architecture has no experts"));
    }
    let Some(rope) = fields.object(ROPE)? else { return Err(fields.missing(ROPE)) };
    for kind in ["full_attention", "sliding_attention"] {
        let Some(settings) = rope.object(kind)? else { return Err(rope.missing(kind)) };
        for field in ["rope_type", "rope_theta"] {
            if settings.value(field).is_none() {
                return Err(settings.missing(field));
            }
        }
    }
    Ok(())
}

fn has_per_layer_input(fields: &JsonFields) -> bool {
    fields.value(PER_LAYER_CHANNELS).is_some_and(|channels| channels.as_u64() != Some(0))
}

/// Reads the per-layer inputs; `None` if the model has none.
pub(super) fn per_layer_input(
    fields: &JsonFields,
    architecture: ModelArchitecture,
) -> Result<Option<PerLayerInputConfig>, ModelConfigError> {
    let channels = fields.count_or_none(PER_LAYER_CHANNELS, WIDTH_LIMIT);
    let channels = if architecture.is_gemma4() { channels?.unwrap_or(0) } else { 0 };
    if channels == 0 {
        return Ok(None);
    }
    let (vocab, all) =
        (fields.size(PER_LAYER_VOCAB, VOCAB_LIMIT)?, fields.size("vocab_size", VOCAB_LIMIT)?);
    if vocab < all {
        let detail = format!("{vocab} rows for a vocabulary of {all} (`vocab_size`)");
        return Err(fields.contradiction(PER_LAYER_VOCAB, detail));
    }
    Ok(Some(PerLayerInputConfig { channels, vocab }))
}
