//! Tests with published DeepSeek configurations, and with unsupported or inconsistent variants of them.

use super::*;

use ops::GroupScoreFunction;
use serde_json::{Value, json};

/// `config.json` of DeepSeek-V3, without the fields that do not change the arithmetic.
const V3: &str = r#"{
        "architectures": ["DeepseekV3ForCausalLM"], "attention_bias": false, "bos_token_id": 0,
        "eos_token_id": 1, "ep_size": 1, "first_k_dense_replace": 3, "hidden_act": "silu",
        "hidden_size": 7168, "intermediate_size": 18432, "kv_lora_rank": 512,
        "max_position_embeddings": 163840, "moe_intermediate_size": 2048, "moe_layer_freq": 1,
        "n_group": 8, "n_routed_experts": 256, "n_shared_experts": 1, "norm_topk_prob": true,
        "num_attention_heads": 128, "num_experts_per_tok": 8, "num_hidden_layers": 61,
        "num_key_value_heads": 128, "num_nextn_predict_layers": 1, "q_lora_rank": 1536,
        "qk_nope_head_dim": 128, "qk_rope_head_dim": 64, "rms_norm_eps": 1e-6,
        "rope_scaling": {"beta_fast": 32, "beta_slow": 1, "factor": 40, "mscale": 1.0,
            "mscale_all_dim": 1.0, "original_max_position_embeddings": 4096, "type": "yarn"},
        "rope_theta": 10000, "routed_scaling_factor": 2.5, "scoring_func": "sigmoid",
        "tie_word_embeddings": false, "topk_group": 4, "topk_method": "noaux_tc",
        "torch_dtype": "bfloat16", "v_head_dim": 128, "vocab_size": 129280,
        "quantization_config": {"activation_scheme": "dynamic", "fmt": "e4m3",
            "quant_method": "fp8", "weight_block_size": [128, 128]}
    }"#;

fn v3() -> Value {
    serde_json::from_str(V3).unwrap()
}

/// Returns the `config.json` of DeepSeek-V2-Lite, made from `V3` by replacing the fields that differ.
fn v2_lite() -> Value {
    let changes = json!({
        "architectures": ["DeepseekV2ForCausalLM"], "first_k_dense_replace": 1,
        "hidden_size": 2048, "intermediate_size": 10944, "moe_intermediate_size": 1408,
        "n_group": 1, "n_routed_experts": 64, "n_shared_experts": 2, "norm_topk_prob": false,
        "num_attention_heads": 16, "num_experts_per_tok": 6, "num_hidden_layers": 27,
        "num_key_value_heads": 16, "num_nextn_predict_layers": null, "q_lora_rank": null,
        "routed_scaling_factor": 1.0, "scoring_func": "softmax", "topk_group": 1,
        "topk_method": "greedy", "vocab_size": 102_400, "quantization_config": null
    });
    with(v3(), &changes)
}

fn with(mut base: Value, changes: &Value) -> Value {
    for (field, value) in changes.as_object().unwrap() {
        base[field] = value.clone();
    }
    base
}

fn parse(value: &Value) -> Result<ModelConfig, ModelConfigError> {
    ModelConfig::from_json(Path::new("config.json"), &value.to_string())
}

#[test]
fn published_configs_are_read() {
    let config = parse(&v3()).unwrap();
    let mla = MlaConfig {
        q_lora_rank: Some(1536),
        kv_lora_rank: 512,
        qk_nope_head_dim: 128,
        qk_rope_head_dim: 64,
        v_head_dim: 128,
    };
    assert_eq!((config.mla, config.mtp_layers), (Some(mla), 1));
    assert_eq!((config.head_dim, config.rotary(), config.value_dim()), (192, 64, 128));
    let moe = config.moe_at(3).unwrap();
    assert!(config.moe_at(2).is_none() && config.moe_at(60).is_some());
    let groups = ExpertGroups { count: 8, topk_group: 4, score: GroupScoreFunction::Top2Sum };
    assert_eq!(
        (moe.score, moe.has_correction_bias, moe.expert_groups),
        (RouterScoreFunction::Sigmoid, true, Some(groups))
    );
    assert_eq!((moe.norm_topk_prob, moe.scale, moe.shared_intermediate), (true, 2.5, 2048));
    let RopeScaling::Yarn { attention_factor, all_dim_gain, .. } = config.rope.scaling else {
        panic!("{:?}", config.rope)
    };
    // The softmax scale of DeepSeek-V2-Lite is `192^-1/2 · all_dim_gain²` = 0.135234, where 192 = 128 + 64 is
    // the head size.
    assert!((attention_factor - 1.0).abs() < 1e-12 && (all_dim_gain - 1.36889).abs() < 1e-5);

    let lite = parse(&v2_lite()).unwrap();
    let moe = lite.moe_at(1).unwrap();
    assert_eq!(lite.mla.and_then(|mla| mla.q_lora_rank), None);
    assert_eq!(
        (moe.score, moe.has_correction_bias, moe.expert_groups),
        (RouterScoreFunction::Softmax, false, None)
    );
    assert_eq!((moe.norm_topk_prob, moe.shared_intermediate, lite.mtp_layers), (false, 2816, 0));
}

#[test]
fn unsupported_deepseek_options_are_rejected() {
    for (base, field, value) in [
        (v3(), "scoring_func", json!("softmax")),
        (v3(), "topk_method", json!("greedy")),
        (v3(), "moe_layer_freq", json!(2)),
        (v3(), "rope_interleave", json!(false)),
        (v3(), "attention_bias", json!(true)),
        (v3(), "num_key_value_heads", json!(8)),
        (v3(), "n_group", json!(7)),
        (v3(), "topk_group", json!(9)),
        (v3(), "num_experts_per_tok", json!(129)), // The four selected groups have 128 experts in total.
        (v3(), "qk_rope_head_dim", json!(63)),
        (v3(), "kv_lora_rank", Value::Null),
        (v2_lite(), "norm_topk_prob", json!(true)),
        (v2_lite(), "topk_method", json!("noaux_tc")),
    ] {
        let error = parse(&with(base, &json!({ field: value }))).unwrap_err().to_string();
        assert!(error.contains(field), "{field}: {error}");
    }
}
