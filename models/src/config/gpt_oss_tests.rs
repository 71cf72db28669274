//! Tests of the settings of gpt-oss.

use super::{ModelConfig, NormWeightKind, RopeScaling};
use ops::GateActivation;
use serde_json::{Value, json};
use std::path::Path;

/// Reads the fields of `config.json` of openai/gpt-oss-20b, with the changes `more`.
fn read(more: &Value) -> Result<ModelConfig, String> {
    let mut fields = json!({"architectures": ["GptOssForCausalLM"], "attention_bias": true,
        "eos_token_id": 200_002, "experts_per_token": 4, "head_dim": 64, "hidden_act": "silu",
        "hidden_size": 2880, "initial_context_length": 4096, "intermediate_size": 2880,
        "layer_types": ["sliding_attention", "full_attention"], "max_position_embeddings": 131_072,
        "model_type": "gpt_oss", "num_attention_heads": 64, "num_experts_per_tok": 4,
        "num_hidden_layers": 2, "num_key_value_heads": 8, "num_local_experts": 32,
        "output_router_logits": false, "quantization_config": {"modules_to_not_convert":
            ["model.layers.*.self_attn", "model.layers.*.mlp.router", "model.embed_tokens", "lm_head"],
            "quant_method": "mxfp4"},
        "rms_norm_eps": 1e-5, "rope_scaling": {"beta_fast": 32.0, "beta_slow": 1.0, "factor": 32.0,
            "original_max_position_embeddings": 4096, "rope_type": "yarn", "truncate": false},
        "rope_theta": 150_000, "router_aux_loss_coef": 0.9, "sliding_window": 128, "swiglu_limit": 7.0,
        "tie_word_embeddings": false, "vocab_size": 201_088});
    fields.as_object_mut().unwrap().extend(more.as_object().unwrap().clone());
    let config = ModelConfig::from_json(Path::new("config.json"), &fields.to_string());
    config.map_err(|error| error.to_string())
}

#[test]
fn published_20b_file_is_read() {
    let config = read(&json!({})).unwrap();
    assert!(config.qkv_bias && config.out_bias && config.has_sinks() && !config.tied);
    assert_eq!(config.norm_weights(), NormWeightKind::Unrounded);
    assert_eq!((config.window_at(0), config.window_at(1)), (Some(128), None));
    assert_eq!((config.context_max(), config.head_dim), (131_072, 64));
    assert!(matches!(config.rope.scaling, RopeScaling::Yarn { .. }));
    let moe = config.moe.as_ref().unwrap();
    assert_eq!((moe.experts, moe.top_k, moe.intermediate), (32, 4, 2880));
    assert_eq!(moe.activation, GateActivation::ClampedSilu { alpha: 1.702, limit: 7.0 });
    assert!(moe.has_biases && moe.norm_topk_prob);
    let quantization = config.quantization.unwrap();
    let format = quantization.of_layer(&["model.layers.0.mlp.experts.3.down_proj"]).unwrap();
    assert!(!format.is_fp8());
    assert_eq!(quantization.of_layer(&["model.layers.0.self_attn.o_proj"]), None);
}

#[test]
fn absent_fields_have_the_defaults_of_transformers() {
    let null = json!({"rope_scaling": null, "rope_theta": null, "layer_types": null,
        "sliding_window": null});
    let error = read(&null).unwrap_err();
    assert!(error.contains("`sliding_window`"), "{error}");
    let mut fields = json!({"architectures": ["GptOssForCausalLM"], "num_hidden_layers": 3,
        "hidden_size": 64, "intermediate_size": 64, "vocab_size": 272, "num_attention_heads": 8,
        "num_local_experts": 4, "num_experts_per_tok": 2, "rms_norm_eps": 1e-5,
        "max_position_embeddings": 131_072});
    let parse = |fields: &Value| {
        ModelConfig::from_json(Path::new("config.json"), &fields.to_string()).unwrap()
    };
    let config = parse(&fields);
    assert_eq!((config.kv_heads, config.head_dim), (8, 64));
    assert_eq!([0, 1, 2].map(|i| config.window_at(i)), [Some(128), None, Some(128)]);
    assert_eq!(config.rope.theta.to_bits(), 150_000f64.to_bits());
    assert!(matches!(config.rope.scaling, RopeScaling::Yarn { factor: 32.0, .. }));
    assert!(config.qkv_bias && config.out_bias);
    fields["attention_bias"] = json!(false);
    assert!(!parse(&fields).qkv_bias);
}

#[test]
fn contradictions_of_gpt_oss_are_rejected() {
    for (more, field) in [
        (json!({"experts_per_token": 2}), "experts_per_token"),
        (json!({"swiglu_limit": -1.0}), "swiglu_limit"),
        (json!({"hidden_act": "gelu"}), "hidden_act"),
        (json!({"layer_types": ["sliding_attention"]}), "layer_types"),
        (json!({"quantization_config": {"quant_method": "mxfp4", "bits": 4}}), "bits"),
        (json!({"architectures": ["MixtralForCausalLM"], "attention_bias": false}), "quant_method"),
    ] {
        let error = read(&more).unwrap_err();
        assert!(error.contains(field), "{field}: {error}");
    }
}
