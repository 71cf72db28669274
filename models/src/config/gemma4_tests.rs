//! Tests of the settings of Gemma 4.

use super::{KvProjectionKind, ModelConfig, NormPlacement, NormWeightKind, RopeScaling};
use crate::weight_table::tensors;
use ops::{DType, GateActivation};
use serde_json::{Value, json};
use std::path::Path;

const TEXT: &str = "Gemma4ForCausalLM";
const MULTIMODAL: &str = "Gemma4ForConditionalGeneration";
const UNIFIED: &str = "Gemma4UnifiedForConditionalGeneration";

fn read(fields: &Value) -> Result<ModelConfig, String> {
    let config = ModelConfig::from_json(Path::new("config.json"), &fields.to_string());
    config.map_err(|error| error.to_string())
}

/// Reads a text model with 6 layers, without per-layer inputs, and the fields `more`.
fn text(more: &Value) -> Result<ModelConfig, String> {
    let mut fields =
        json!({"architectures": [TEXT], "num_hidden_layers": 6, "hidden_size_per_layer_input": 0});
    fields.as_object_mut().unwrap().extend(more.as_object().unwrap().clone());
    read(&fields)
}

fn assert_rejected(more: &Value, field: &str) {
    let error = text(more).unwrap_err();
    assert!(error.contains(&format!("`{field}`")), "{field}: {error}");
}

/// Sizes of layer `i`: KV heads, channels per head, intermediate size.
fn sizes(config: &ModelConfig, i: usize) -> [usize; 3] {
    let layer = config.at_layer(i);
    [layer.kv_heads, layer.head_dim, layer.intermediate]
}

#[test]
fn dense_model_has_two_kinds_of_heads() {
    let part = json!({"model_type": "gemma4_text", "hidden_size": 5376, "intermediate_size": 21504,
        "num_hidden_layers": 60, "num_attention_heads": 32, "num_key_value_heads": 16,
        "num_global_key_value_heads": 4, "attention_k_eq_v": true, "sliding_window": 1024,
        "hidden_size_per_layer_input": 0, "final_logit_softcapping": 30.0,
        "use_bidirectional_attention": "vision"});
    let config =
        read(&json!({"architectures": [MULTIMODAL], "model_type": "gemma4", "dtype": "bfloat16",
        "text_config": part, "vision_config": {"model_type": "gemma4_vision"}, "audio_config": null}))
        .unwrap();
    assert_eq!((config.vocab, config.heads), (262_144, 32));
    assert_eq!((sizes(&config, 0), sizes(&config, 5)), ([16, 256, 21504], [4, 512, 21504]));
    assert_eq!((config.window_at(4), config.window_at(5)), (Some(1024), None));
    assert_eq!(config.at_layer(4).kv_projection, KvProjectionKind::Separate);
    assert_eq!(config.at_layer(5).kv_projection, KvProjectionKind::KeysAsValues);
    assert!(config.tied && config.qk_norm() && config.value_norm() && config.has_layer_scalar());
    assert_eq!(config.at_layer(5).softmax_scale(), 1.0);
    assert_eq!((config.logit_softcap, config.rms_eps), (Some(30.0), 1e-6));
    assert_eq!(config.norm_weights(), NormWeightKind::Unrounded);
    assert_eq!(config.norm_placement(), NormPlacement::Both);
    assert_eq!(config.gate_activation(), GateActivation::GeluTanh);
    assert_eq!((config.bos, &config.eos[..]), (Some(2), &[1][..]));
    assert_eq!(config.multipliers.embedding_in(DType::BF16), 73.5); // √5376 = 73.32
    assert_eq!((&config.moe, config.per_layer_input), (&None, None));
    assert_eq!(config.rope.scaling, RopeScaling::Proportional { factor: 1.0, rotated: 0.25 });
    assert_eq!(config.at_full_layers().rotary_rows(), None, "pairs are half a head apart");
    assert_eq!(config.context_max(), 131_072);
    let windowed = config.layer_attention.unwrap().rope.unwrap();
    assert_eq!(
        (windowed.theta.to_bits(), windowed.scaling),
        (1e4f64.to_bits(), RopeScaling::Default)
    );
}

#[test]
fn last_layer_attends_to_the_whole_context() {
    let windowed = |more: &Value| -> Vec<usize> {
        let config = text(more).unwrap();
        (0..config.layers).filter(|&i| config.window_at(i).is_some()).collect()
    };
    assert_eq!(windowed(&json!({})), [0, 1, 2, 3, 4]);
    assert_eq!(windowed(&json!({"num_hidden_layers": 8})), [0, 1, 2, 3, 4, 6]);
    let types = vec!["sliding_attention"; 6];
    assert_eq!(windowed(&json!({"layer_types": types})), [0, 1, 2, 3, 4]);
    let full = json!({"layer_types": vec!["full_attention"; 6]});
    assert_eq!(sizes(&text(&full).unwrap(), 0), [4, 512, 9216]);
}

#[test]
fn heads_of_full_layers_follow_their_fields() {
    let full = |more: &Value| sizes(&text(more).unwrap(), 5);
    assert_eq!(full(&json!({"num_global_key_value_heads": 2})), [4, 512, 9216], "not read");
    let shared = json!({"num_global_key_value_heads": 2, "attention_k_eq_v": true});
    assert_eq!(full(&shared), [2, 512, 9216]);
    let by_layer = json!({"per_layer_config": {"05": {"head_dim": 128, "num_key_value_heads": 8}}});
    assert_eq!(full(&by_layer), [8, 128, 9216]);
    for (more, field) in [
        (json!({"per_layer_config": {"4": {"head_dim": 128}}}), "per_layer_config.4"),
        (json!({"per_layer_config": {"6": {"head_dim": 128}}}), "per_layer_config.6"),
        (
            json!({"per_layer_config": {"5": {"intermediate_size": 8}}}),
            "per_layer_config.5.intermediate_size",
        ),
        (
            json!({"num_hidden_layers": 12, "per_layer_config": {"5": {"head_dim": 128}}}),
            "per_layer_config.11",
        ),
        (json!({"global_head_dim": 500}), "global_head_dim"),
        (
            json!({"num_global_key_value_heads": 3, "attention_k_eq_v": true}),
            "num_global_key_value_heads",
        ),
    ] {
        assert_rejected(&more, field);
    }
}

#[test]
fn last_layers_share_keys_and_have_wide_mlps() {
    let more = json!({"num_hidden_layers": 12, "num_kv_shared_layers": 5, "use_double_wide_mlp": true,
        "hidden_size_per_layer_input": 256});
    let config = text(&more).unwrap();
    let sources: Vec<usize> = (0..12).map(|i| config.kv_source(i)).collect();
    assert_eq!(sources, [0, 1, 2, 3, 4, 5, 6, 6, 6, 6, 6, 5]);
    assert_eq!([sizes(&config, 6)[2], sizes(&config, 7)[2]], [9216, 2 * 9216]);
    assert_eq!(config.at_layer(11).kv_projection, KvProjectionKind::Absent);
    let names: Vec<String> = tensors(&config).into_iter().map(|spec| spec.name).collect();
    let has = |name: &str| names.iter().any(|found| found == name);
    assert!(has("model.layers.6.self_attn.k_norm.weight"));
    for name in ["k_proj", "v_proj", "k_norm"] {
        assert!(!has(&format!("model.layers.7.self_attn.{name}.weight")), "{name}");
    }
    assert!(has("model.layers.7.per_layer_input_gate.weight"));
    assert!(has("model.embed_tokens_per_layer.weight"));
    let per_layer = config.per_layer_input.unwrap();
    assert_eq!((per_layer.channels, per_layer.vocab), (256, 262_144));
    assert_rejected(&json!({"num_kv_shared_layers": 6}), "num_kv_shared_layers");
    let error = text(&json!({"num_kv_shared_layers": -1})).unwrap_err();
    assert!(error.contains("from 0 to 4096, found -1"), "{error}");
    assert_rejected(&json!({"num_kv_shared_layers": 1}), "num_kv_shared_layers");
}

#[test]
fn experts_are_beside_a_dense_mlp() {
    let more = json!({"enable_moe_block": true, "num_experts": 128, "top_k_experts": 8,
        "moe_intermediate_size": 704, "intermediate_size": 2112});
    let config = text(&more).unwrap();
    let moe = config.moe_at(0).unwrap();
    assert_eq!((moe.experts, moe.top_k, moe.intermediate), (128, 8, 704));
    assert!(moe.norm_topk_prob && moe.has_dense_mlp && moe.activation == GateActivation::GeluTanh);
    let names: Vec<String> = tensors(&config).into_iter().map(|spec| spec.name).collect();
    for name in ["mlp.gate_proj.weight", "mlp.gate.weight", "router.per_expert_scale"] {
        assert!(names.contains(&format!("model.layers.5.{name}")), "{name}");
    }
    assert_eq!(text(&json!({"num_experts": 8})).unwrap().moe, None, "the block is not enabled");
    let too_many = json!({"enable_moe_block": true, "num_experts": 4, "top_k_experts": 8});
    assert_rejected(&too_many, "top_k_experts");
    assert_rejected(&json!({"enable_moe_block": true}), "num_experts");
}

#[test]
fn per_layer_inputs_cover_the_vocabulary() {
    let inputs = |vocab: u32| json!({"hidden_size_per_layer_input": 256, "vocab_size": 300, "vocab_size_per_layer_input": vocab});
    assert_eq!(text(&inputs(300)).unwrap().per_layer_input.unwrap().vocab, 300);
    assert_rejected(&inputs(299), "vocab_size_per_layer_input");
}

#[test]
fn unified_models_have_neither_experts_nor_inputs() {
    let unified = |more: &Value| {
        let mut part = json!({"model_type": "gemma4_unified_text"});
        part.as_object_mut().unwrap().extend(more.as_object().unwrap().clone());
        read(&json!({"architectures": [UNIFIED], "text_config": part}))
    };
    let config = unified(&json!({})).unwrap();
    assert_eq!((config.max_positions, config.window_at(0)), (262_144, Some(1024)));
    assert_eq!(config.per_layer_input, None);
    for (more, field) in [
        (json!({"hidden_size_per_layer_input": 256}), "hidden_size_per_layer_input"),
        (json!({"enable_moe_block": true}), "enable_moe_block"),
    ] {
        let error = unified(&more).unwrap_err();
        assert!(error.contains(&format!("`text_config.{field}`")), "{error}");
    }
}

#[test]
fn settings_that_change_the_arithmetic_are_rejected() {
    let rope = |kind: &str, settings: Value| {
        let mut rope = json!({
            "full_attention": {"rope_type": "default", "rope_theta": 1e6},
            "sliding_attention": {"rope_type": "default", "rope_theta": 1e4}});
        rope[kind] = settings;
        json!({"rope_parameters": rope})
    };
    for (more, field) in [
        (json!({"use_bidirectional_attention": "all"}), "use_bidirectional_attention"),
        (json!({"hidden_activation": "silu"}), "hidden_activation"),
        (rope("full_attention", Value::Null), "rope_parameters.full_attention"),
        (
            rope("sliding_attention", json!({"rope_theta": 1e4})),
            "rope_parameters.sliding_attention.rope_type",
        ),
        (
            rope(
                "full_attention",
                json!({"rope_type": "abc", "rope_theta": 1e6, "partial_rotary_factor": 0.25}),
            ),
            "rope_parameters.full_attention.rope_type",
        ),
        (
            rope("full_attention", json!({"rope_type": "proportional"})),
            "rope_parameters.full_attention.rope_theta",
        ),
        (
            rope(
                "full_attention",
                json!({"rope_type": "default", "rope_theta": 1e6, "partial_rotary_factor": 0.25}),
            ),
            "rope_parameters.full_attention.partial_rotary_factor",
        ),
        (
            rope(
                "full_attention",
                json!({"rope_type": "proportional", "rope_theta": 1e6, "partial_rotary_factor": 2.0}),
            ),
            "rope_parameters.full_attention.partial_rotary_factor",
        ),
    ] {
        assert_rejected(&more, field);
    }
}
