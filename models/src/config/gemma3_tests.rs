//! Tests of the settings of Gemma 3.

use super::{ModelConfig, ModelHead, NormPlacement, NormWeightKind, RopeScaling};
use crate::synth::SynthDistribution;
use ops::DType;
use serde_json::{Value, json};
use std::path::Path;

const TEXT: &str = "Gemma3ForCausalLM";
const MULTIMODAL: &str = "Gemma3ForConditionalGeneration";

fn read(fields: &Value) -> Result<ModelConfig, String> {
    let config = ModelConfig::from_json(Path::new("config.json"), &fields.to_string());
    config.map_err(|error| error.to_string())
}

/// Reads a text model with 6 layers and the fields `more`.
fn text(more: &Value) -> Result<ModelConfig, String> {
    let mut fields = json!({"architectures": [TEXT], "num_hidden_layers": 6});
    fields.as_object_mut().unwrap().extend(more.as_object().unwrap().clone());
    read(&fields)
}

fn windowed_layers(more: &Value) -> Vec<usize> {
    let config = text(more).unwrap();
    (0..config.layers).filter(|&i| config.window_at(i).is_some()).collect()
}

fn assert_rejected(more: &Value, field: &str) {
    let error = text(more).unwrap_err();
    assert!(error.contains(&format!("`{field}`")), "{field}: {error}");
}

#[test]
fn published_4b_file_gets_the_defaults() {
    // Fields of `config.json` of google/gemma-3-4b-it.
    let part = json!({"hidden_size": 2560, "intermediate_size": 10240, "model_type": "gemma3_text",
        "num_hidden_layers": 34, "rope_scaling": {"factor": 8.0, "rope_type": "linear"},
        "sliding_window": 1024});
    let config = read(&json!({"architectures": [MULTIMODAL], "boi_token_index": 255_999,
        "eos_token_id": [1, 106], "image_token_index": 262_144, "mm_tokens_per_image": 256,
        "model_type": "gemma3", "torch_dtype": "bfloat16", "text_config": part,
        "vision_config": {"model_type": "siglip_vision_model"}}))
    .unwrap();
    assert_eq!(
        (config.vocab, config.heads, config.kv_heads, config.head_dim),
        (262_208, 8, 4, 256)
    );
    assert_eq!((config.max_positions, config.context_max()), (131_072, 131_072));
    assert_eq!((config.bos, &config.eos[..]), (Some(2), &[1, 106][..]));
    assert!(config.tied && config.qk_norm() && !config.qkv_bias && config.rms_eps == 1e-6);
    assert_eq!(config.softmax_scale(), 1.0 / 16.0);
    assert_eq!(config.logit_softcap, None);
    assert_eq!((config.window_at(4), config.window_at(5)), (Some(1024), None));
    assert_eq!((config.window_at(33), config.window_at(34)), (Some(1024), None));
    assert_eq!(config.rope.theta.to_bits(), 1e6f64.to_bits());
    assert_eq!(config.rope.scaling, RopeScaling::Linear { factor: 8.0 });
    let windowed = config.layer_attention.unwrap().rope.unwrap();
    assert_eq!(windowed.theta.to_bits(), 1e4f64.to_bits());
    assert_eq!(windowed.scaling, RopeScaling::Default);
}

#[test]
fn windowed_layers_follow_types_or_pattern() {
    assert_eq!(windowed_layers(&json!({})), [0, 1, 2, 3, 4]);
    assert_eq!(windowed_layers(&json!({"sliding_window_pattern": 2})), [0, 2, 4]);
    assert_eq!(windowed_layers(&json!({"sliding_window_pattern": 1})), [0usize; 0]);
    let mut types = vec!["full_attention"; 6];
    types[1] = "sliding_attention";
    let listed = json!({"layer_types": types, "_sliding_window_pattern": 6});
    assert_eq!(windowed_layers(&listed), [1]);
    // Without windowed layers, no window is needed.
    let full = json!({"layer_types": vec!["full_attention"; 6], "sliding_window": null});
    assert_eq!(text(&full).unwrap().layer_attention, None);
    assert_eq!(text(&json!({})).unwrap().window_at(0), Some(4096));
    types[1] = "chunked_attention";
    assert_rejected(&json!({"layer_types": types}), "layer_types[1]");
    assert_rejected(&json!({"layer_types": ["full_attention"]}), "layer_types");
    assert_rejected(&json!({"_sliding_window_pattern": 3}), "_sliding_window_pattern");
    assert_rejected(&json!({"sliding_window_pattern": 0}), "sliding_window_pattern");
    assert_rejected(&json!({"sliding_window": null}), "sliding_window");
    assert_rejected(&json!({"sliding_window": 0}), "sliding_window");
}

#[test]
fn both_rope_forms_are_equal() {
    let linear = json!({"rope_type": "linear", "factor": 8.0});
    let old = json!({"rope_theta": 5e5, "rope_local_base_freq": 2e4, "rope_scaling": linear});
    let new = json!({"rope_parameters": {
        "full_attention": {"rope_type": "linear", "factor": 8.0, "rope_theta": 5e5},
        "sliding_attention": {"rope_type": "default", "rope_theta": 2e4}}});
    let [old, new] = [old, new].map(|fields| text(&fields).unwrap());
    assert_eq!((&old.rope, &old.layer_attention), (&new.rope, &new.layer_attention));
    assert_eq!(old.rope.theta.to_bits(), 5e5f64.to_bits());
    let windowed = old.layer_attention.unwrap().rope.unwrap();
    assert_eq!(windowed.theta.to_bits(), 2e4f64.to_bits());
}

#[test]
fn unread_rope_settings_are_rejected() {
    let new = |settings: Value| json!({"rope_parameters": settings});
    for (fields, field) in [
        (new(json!({"rope_type": "linear", "factor": 8.0})), "rope_parameters.rope_type"),
        (
            new(json!({"sliding_attention": {"rope_type": "dynamic", "factor": 2.0}})),
            "rope_parameters.sliding_attention.rope_type",
        ),
        (
            new(json!({"full_attention": {"rope_theta": 1e5}, "sliding_attention": {}})),
            "rope_parameters.full_attention.rope_theta",
        ),
        (
            new(json!({"sliding_attention": {"rope_theta": 1e5}})),
            "rope_parameters.sliding_attention.rope_theta",
        ),
        (json!({"rope_scaling": {"type": "linear", "factor": 8.0}}), "rope_scaling.type"),
        (json!({"rope_global_base_freq": 1e6}), "rope_global_base_freq"),
    ] {
        let mut fields = fields;
        fields["rope_theta"] = json!(1e6);
        fields["rope_local_base_freq"] = json!(1e4);
        assert_rejected(&fields, field);
    }
    let llama = json!({"architectures": ["LlamaForCausalLM"], "rope_local_base_freq": 1e4,
        "vocab_size": 320, "hidden_size": 64, "num_hidden_layers": 2, "num_attention_heads": 4,
        "intermediate_size": 96, "rms_norm_eps": 1e-6, "max_position_embeddings": 512});
    assert!(read(&llama).unwrap_err().contains("rope_local_base_freq"));
}

#[test]
fn unsupported_arithmetic_is_rejected() {
    for (field, value) in [
        ("hidden_activation", json!("gelu")),
        ("hidden_act", json!("silu")),
        ("use_bidirectional_attention", json!(true)),
        ("use_bidirectional_attention", json!("all")),
        ("attn_logit_softcapping", json!(50.0)),
        ("final_logit_softcapping", json!(0.0)),
        ("query_pre_attn_scalar", json!(0)),
        ("is_causal", json!(false)),
        ("mlp_bias", json!(true)),
    ] {
        assert_rejected(&json!({ field: value }), field);
    }
    let part = |part: Value| json!({"architectures": [MULTIMODAL], "text_config": part});
    let capped = read(&part(json!({"final_logit_softcapping": 30.0}))).unwrap_err();
    assert!(capped.contains("`text_config.final_logit_softcapping`"), "{capped}");
    let mut outer = part(json!({}));
    assert!(read(&outer).is_ok());
    outer["layer_types"] = json!([]);
    assert!(read(&outer).unwrap_err().contains("`layer_types`"));
    let other = read(&part(json!({"model_type": "gemma2"}))).unwrap_err();
    assert!(other.contains("`text_config.model_type`"), "{other}");
}

#[test]
fn embedding_multiplier_is_rounded_to_the_weight_dtype() {
    let fields = json!({"hidden_size": 3072, "query_pre_attn_scalar": 168,
        "final_logit_softcapping": 30.0, "hidden_activation": "gelu_pytorch_tanh",
        "attention_bias": true, "tie_word_embeddings": false});
    let config = text(&fields).unwrap();
    // transformers `modeling_gemma3.py`: √3072 = 55.4256 becomes 55.5 in bf16.
    let factors = [DType::F32, DType::BF16, DType::F16].map(|d| config.multipliers.embedding_in(d));
    assert_eq!(factors, [55.425_625, 55.5, 55.437_5]);
    assert_eq!((config.softmax_scale(), config.logit_softcap), (0.077_151_68, Some(30.0)));
    assert!(config.qkv_bias && config.out_bias && !config.tied);
    let granite = json!({"architectures": ["GraniteForCausalLM"], "embedding_multiplier": 0.3,
        "vocab_size": 320, "hidden_size": 64, "num_hidden_layers": 2, "num_attention_heads": 4,
        "intermediate_size": 96, "rms_norm_eps": 1e-6, "max_position_embeddings": 512});
    assert_eq!(read(&granite).unwrap().multipliers.embedding_in(DType::BF16), 0.3);
}

#[test]
fn layers_have_zero_centred_sandwich_norms() {
    let config = text(&json!({})).unwrap();
    assert_eq!(config.norm_placement(), NormPlacement::Both);
    assert_eq!(config.norm_weights(), NormWeightKind::ZeroCentred);
    let specs = crate::weight_table::tensors(&config);
    let norms: Vec<_> = specs.iter().filter(|spec| spec.name.contains("norm.weight")).collect();
    assert_eq!(norms.len(), 1 + 6 * 6);
    assert!(norms.iter().all(|spec| spec.values == SynthDistribution::CentredNorm));
    assert!(norms.iter().any(|s| s.name == "model.layers.5.pre_feedforward_layernorm.weight"));
    assert!(specs.iter().all(|spec| spec.name != "lm_head.weight"));
}

#[test]
fn text_models_without_lm_head_have_names_of_their_own() {
    let head = |name: &str| {
        let fields = json!({"architectures": [name], "num_hidden_layers": 1});
        read(&fields).map(|config| config.head)
    };
    assert_eq!(head("Gemma3TextModel"), Ok(ModelHead::Absent));
    // `Gemma3Model` is multimodal.
    assert!(head("Gemma3Model").unwrap_err().contains("`architectures`"));
    assert!(head("Gemma3ForSequenceClassification").unwrap_err().contains("`architectures`"));
}
