//! Parser of the `config.json` of EAGLE-3 draft models (arXiv 2503.01840): the fields that vLLM and SGLang
//! read.

use super::json_fields::JsonFields;
use super::parse_config::{LAYER_LIMIT, VOCAB_LIMIT, WIDTH_LIMIT};
use super::{ModelArchitecture, ModelConfigError};

/// Settings that an EAGLE-3 draft model has in addition to the settings of a Llama decoder layer.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct Eagle3Config {
    /// Hidden size of the target model.
    pub target_hidden: usize,
    /// Size of the draft vocabulary; `ModelConfig::vocab` is the size of the target vocabulary.
    pub vocab: usize,
    /// Ids of the target model's layers whose inputs are the auxiliary hidden states, ascending; `None` = the
    /// default of `aux_layers_for`. An id equal to the number of layers selects the input of the final norm.
    pub aux_layers: Option<[usize; 3]>,
    /// Whether each auxiliary hidden state has its own RMS norm before the projection `fc` (`fc_norm`).
    pub fc_norm: bool,
    /// Whether the residual stream of the decoder layer starts with the hidden state after its RMS norm.
    /// Otherwise it starts with the hidden state before the norm.
    pub norm_before_residual: bool,
    /// Whether the next draft pass takes the output of the final norm as its hidden state, instead of the
    /// residual stream before the final norm.
    pub norm_output: bool,
}

const AUX_LAYERS_FIELD: &str = "eagle_aux_hidden_state_layer_ids";

impl Eagle3Config {
    /// Reads the EAGLE-3 settings of a draft model with hidden size `hidden`; returns `None` for other
    /// architectures.
    pub(super) fn read(
        fields: &JsonFields,
        architecture: ModelArchitecture,
        hidden: usize,
    ) -> Result<Option<Self>, ModelConfigError> {
        if architecture != ModelArchitecture::LlamaEagle3 {
            return Ok(None);
        }
        reject_unsupported(fields)?;
        let vocab = fields.size("vocab_size", VOCAB_LIMIT)?;
        let draft_vocab = fields.size_or_none("draft_vocab_size", VOCAB_LIMIT)?.unwrap_or(vocab);
        if draft_vocab > vocab {
            let detail = format!("{draft_vocab} exceeds vocab_size {vocab}");
            return Err(fields.contradiction("draft_vocab_size", detail));
        }
        Ok(Some(Self {
            target_hidden: fields
                .size_or_none("target_hidden_size", WIDTH_LIMIT)?
                .unwrap_or(hidden),
            vocab: draft_vocab,
            aux_layers: aux_layers(fields)?,
            fc_norm: fields.flag("fc_norm", false)?,
            norm_before_residual: fields.flag("norm_before_residual", false)?,
            norm_output: fields.flag("norm_output", false)?,
        }))
    }

    /// Ids of the layers whose inputs are the auxiliary hidden states, in a target model of `layers` layers.
    /// Default: layer 2, the middle layer, and the third layer from the end.
    #[must_use]
    pub fn aux_layers_for(&self, layers: usize) -> [usize; 3] {
        let mut inputs = [2, layers / 2, layers.saturating_sub(3)];
        inputs.sort_unstable();
        self.aux_layers.unwrap_or(inputs)
    }
}

/// Rejects variants of EAGLE-3 that are not supported, such as several layers, a tied LM head or parallel
/// drafting.
fn reject_unsupported(fields: &JsonFields) -> Result<(), ModelConfigError> {
    const ONE_LAYER: &str = "an EAGLE-3 draft model has one layer";
    if fields.size("num_hidden_layers", LAYER_LIMIT)? != 1 {
        return Err(fields.unsupported("num_hidden_layers", ONE_LAYER));
    }
    if fields.flag("tie_word_embeddings", false)? {
        return Err(
            fields.unsupported("tie_word_embeddings", "the draft vocabulary has its own head")
        );
    }
    if fields.value("quantization_config").is_some() {
        let why = "draft models are supported in F32, BF16 and F16";
        return Err(fields.unsupported("quantization_config", why));
    }
    for (field, why) in [
        ("bias", "fc without bias is"),
        ("norm_before_fc", "only a norm per auxiliary hidden state (fc_norm) is"),
        ("parallel_drafting", "draft tokens are computed one after the other"),
    ] {
        if fields.flag(field, false)? {
            return Err(fields.unsupported(field, why));
        }
    }
    match fields.object("eagle_config")? {
        Some(nested) => reject_unsupported_inputs(&nested),
        None => Ok(()),
    }
}

/// Rejects settings in `eagle_config` that select unsupported inputs of the projection `fc`.
fn reject_unsupported_inputs(nested: &JsonFields) -> Result<(), ModelConfigError> {
    if !nested.flag("use_aux_hidden_state", true)? {
        let why = "auxiliary hidden states of three layers are required";
        return Err(nested.unsupported("use_aux_hidden_state", why));
    }
    if nested.flag("norm_before_fc", false)? {
        return Err(
            nested.unsupported("norm_before_fc", "only a norm per auxiliary hidden state is")
        );
    }
    Ok(())
}

/// Reads the ids of the auxiliary layers. An id in a field at the top level of `config.json` selects the
/// input of the layer, as in vLLM; an id in the object `eagle_config` selects the output of the layer, as in
/// SGLang.
fn aux_layers(fields: &JsonFields) -> Result<Option<[usize; 3]>, ModelConfigError> {
    let nested = fields.object("eagle_config")?;
    let (fields, offset) = match (fields.value(AUX_LAYERS_FIELD), &nested) {
        (None, Some(nested)) => (nested, 1),
        _ => (fields, 0),
    };
    let Some(value) = fields.value(AUX_LAYERS_FIELD) else { return Ok(None) };
    let invalid = || fields.wrong(AUX_LAYERS_FIELD, "three different layer ids", value);
    let id = |id: &serde_json::Value| id.as_u64().filter(|&id| id < LAYER_LIMIT);
    let ids: Option<Vec<u64>> = value.as_array().and_then(|ids| ids.iter().map(id).collect());
    let mut ids: [usize; 3] = ids
        .map(|ids| ids.into_iter().map(|id| id as usize + offset).collect::<Vec<_>>())
        .and_then(|ids| ids.try_into().ok())
        .ok_or_else(invalid)?;
    // The target model produces auxiliary hidden states in ascending order of layers, so the ids are sorted.
    ids.sort_unstable();
    if ids[0] == ids[1] || ids[1] == ids[2] { Err(invalid()) } else { Ok(Some(ids)) }
}

#[cfg(test)]
#[allow(clippy::needless_pass_by_value)] // Tests pass JSON literals by value.
mod tests {
    use crate::ModelConfig;
    use serde_json::{Value, json};
    use std::path::Path;

    fn read(members: Value) -> Result<ModelConfig, String> {
        let mut json = json!({
            "architectures": ["LlamaForCausalLMEagle3"], "vocab_size": 384, "draft_vocab_size": 96,
            "hidden_size": 64, "num_hidden_layers": 1, "num_attention_heads": 4,
            "num_key_value_heads": 2, "head_dim": 16, "intermediate_size": 96,
            "rms_norm_eps": 1e-6, "max_position_embeddings": 512
        });
        json.as_object_mut().unwrap().extend(members.as_object().unwrap().clone());
        let config = ModelConfig::from_json(Path::new("config.json"), &json.to_string());
        config.map_err(|error| error.to_string())
    }

    #[test]
    fn aux_layer_numbers_follow_the_checkpoint() {
        let layers = |members| read(members).unwrap().eagle.unwrap().aux_layers_for(36);
        assert_eq!(layers(json!({})), [2, 18, 33]);
        let top = json!({"eagle_aux_hidden_state_layer_ids": [33, 2, 18]});
        assert_eq!(layers(top), [2, 18, 33]);
        let nested = json!({"eagle_config": {"eagle_aux_hidden_state_layer_ids": [1, 17, 32]}});
        assert_eq!(layers(nested), [2, 18, 33]);
        let short = read(json!({})).unwrap().eagle.unwrap();
        assert_eq!((short.aux_layers_for(3), short.aux_layers_for(8)), ([0, 1, 2], [2, 4, 5]));
    }

    #[test]
    fn arithmetic_options_are_read_or_rejected() {
        let eagle = read(json!({})).unwrap().eagle.unwrap();
        assert_eq!((eagle.vocab, eagle.target_hidden), (96, 64));
        assert!(!eagle.norm_before_residual && !eagle.norm_output && !eagle.fc_norm);
        let all = json!({"target_hidden_size": 128, "norm_before_residual": true, "norm_output": true,
            "fc_norm": true, "draft_vocab_size": null});
        let eagle = read(all).unwrap().eagle.unwrap();
        assert_eq!((eagle.vocab, eagle.target_hidden), (384, 128));
        assert!(eagle.norm_before_residual && eagle.norm_output && eagle.fc_norm);
        for (members, field) in [
            (json!({"num_hidden_layers": 2}), "num_hidden_layers"),
            (json!({"tie_word_embeddings": true}), "tie_word_embeddings"),
            (json!({"draft_vocab_size": 385}), "draft_vocab_size"),
            (json!({"attention_bias": true}), "attention_bias"),
            (json!({"norm_before_fc": true}), "norm_before_fc"),
            (json!({"parallel_drafting": true}), "parallel_drafting"),
            (json!({"quantization_config": {"quant_method": "fp8"}}), "quantization_config"),
            (json!({"eagle_config": {"use_aux_hidden_state": false}}), "eagle_config.use_aux"),
            (json!({"eagle_aux_hidden_state_layer_ids": [2, 18]}), "three different layer ids"),
            (json!({"eagle_aux_hidden_state_layer_ids": [2, 18, 18]}), "three different layer ids"),
            (json!({"eagle_aux_hidden_state_layer_ids": [-1, 2, 18]}), "three different layer ids"),
        ] {
            let error = read(members.clone()).unwrap_err();
            assert!(error.contains(field), "{members}: {error}");
        }
    }
}
