//! Tests of model families with ops that other families do not use: multipliers, layers without RoPE, partial
//! rotary embedding, interleaved RoPE, gated shared experts, gated delta nets, sandwich norms, sliding windows, and attention sinks
//! with biased experts.

use std::path::Path;

use executor::ExecutorConfig;
use models::ModelConfig;
use protocol::ModelDtype;

use super::{
    GeneratedTokens, SchedulerHarness, assert_close, assert_within, config, on_emulator, play,
    warp_sizes, with_few_slots,
};

const NEAR_BF16: f32 = 0.05;

fn model(dtype: ModelDtype, fields: &str) -> ExecutorConfig {
    // Gemma 4 reads the base of RoPE by layer type only.
    let is_gemma4 = fields.contains("Gemma4");
    let rope = if is_gemma4 { "" } else { r#""rope_theta": 10000.0,"# };
    let text = format!(
        r#"{{"vocab_size": 384, "hidden_size": 64, "num_hidden_layers": 2, "num_attention_heads": 4,
        "num_key_value_heads": 2, "head_dim": 64, "intermediate_size": 96,
        "rms_norm_eps": 1e-6, {rope} "max_position_embeddings": 512, {fields}}}"#
    );
    let model = ModelConfig::from_json(Path::new("config.json"), &text).unwrap();
    ExecutorConfig { model, ..config(dtype, 2) }
}

fn check(name: &str, fields: &str) {
    let run =
        |of: ExecutorConfig| -> Vec<GeneratedTokens> { play(&mut SchedulerHarness::with(of)) };
    for dtype in [ModelDtype::Float32, ModelDtype::Bfloat16] {
        let of = || model(dtype, fields);
        let expected = run(with_few_slots(of()));
        for warp_size in warp_sizes() {
            let what = format!("{name}, {dtype:?}, warp size {warp_size}");
            let replayed = run(on_emulator(warp_size, of(), false));
            if dtype == ModelDtype::Bfloat16 {
                assert_within(&replayed, &expected, NEAR_BF16, &what);
                continue;
            }
            let launched = run(on_emulator(warp_size, of(), true));
            assert_close(&launched, &expected, &what);
            assert_eq!(replayed, launched, "{what}: replay equals eager");
        }
    }
}

#[test]
fn multipliers_match_the_cpu() {
    if !crate::is_selected_by_cursor(0, crate::SHARDS) {
        return;
    }
    check(
        "granite",
        r#""architectures": ["GraniteForCausalLM"], "embedding_multiplier": 2.0, "residual_multiplier": 0.22,
        "attention_multiplier": 0.0625, "logits_scaling": 1.5"#,
    );
}

#[test]
fn layers_without_rope_match_the_cpu() {
    if !crate::is_selected_by_cursor(1, crate::SHARDS) {
        return;
    }
    check("smollm3", r#""architectures": ["SmolLM3ForCausalLM"], "no_rope_layers": [1, 0]"#);
}

#[test]
fn full_qk_norm_and_output_norms_match_the_cpu() {
    if !crate::is_selected_by_cursor(2, crate::SHARDS) {
        return;
    }
    check("olmo2", r#""architectures": ["Olmo2ForCausalLM"]"#);
}

#[test]
fn attention_temperature_matches_the_cpu() {
    if !crate::is_selected_by_cursor(3, crate::SHARDS) {
        return;
    }
    check(
        "ministral3",
        r#""architectures": ["Ministral3ForCausalLM"], "rope_parameters": {"rope_type": "yarn", "factor": 8.0,
        "original_max_position_embeddings": 8, "mscale": 1.0, "mscale_all_dim": 1.0, "llama_4_scaling_beta": 0.5}"#,
    );
}

#[test]
fn partial_rotary_matches_the_cpu() {
    if !crate::is_selected_by_cursor(0, crate::SHARDS) {
        return;
    }
    check("phi3", r#""architectures": ["Phi3ForCausalLM"], "partial_rotary_factor": 0.75"#);
}

#[test]
fn sandwich_norms_match_the_cpu() {
    if !crate::is_selected_by_cursor(1, crate::SHARDS) {
        return;
    }
    check("glm4", r#""architectures": ["Glm4ForCausalLM"], "partial_rotary_factor": 0.5"#);
}

#[test]
fn windows_match_the_cpu() {
    if !crate::is_selected_by_cursor(2, crate::SHARDS) {
        return;
    }
    check(
        "gemma3",
        r#""architectures": ["Gemma3ForCausalLM"], "sliding_window": 4, "sliding_window_pattern": 2,
        "rope_local_base_freq": 100.0, "query_pre_attn_scalar": 168, "final_logit_softcapping": 5.0,
        "tie_word_embeddings": false"#,
    );
}

#[test]
fn two_head_sizes_match_the_cpu() {
    if !crate::is_selected_by_cursor(3, crate::SHARDS) {
        return;
    }
    check(
        "gemma4",
        r#""architectures": ["Gemma4ForCausalLM"], "sliding_window": 4, "global_head_dim": 512,
        "num_global_key_value_heads": 1, "attention_k_eq_v": true, "hidden_size_per_layer_input": 0,
        "layer_types": ["sliding_attention", "full_attention"], "final_logit_softcapping": 5.0,
        "enable_moe_block": true, "num_experts": 5, "top_k_experts": 2, "moe_intermediate_size": 64"#,
    );
}

#[test]
fn shared_keys_and_layer_inputs_match_the_cpu() {
    if !crate::is_selected_by_cursor(0, crate::SHARDS) {
        return;
    }
    check(
        "gemma4 with inputs",
        r#""architectures": ["Gemma4ForCausalLM"], "sliding_window": 4, "global_head_dim": 32,
        "num_hidden_layers": 3, "num_kv_shared_layers": 1, "use_double_wide_mlp": true,
        "hidden_size_per_layer_input": 40, "vocab_size_per_layer_input": 384,
        "layer_types": ["sliding_attention", "full_attention", "full_attention"],
        "tie_word_embeddings": false"#,
    );
}

#[test]
fn sinks_and_biased_mxfp4_experts_match_the_cpu() {
    if !crate::is_selected_by_cursor(1, crate::SHARDS) {
        return;
    }
    check(
        "gpt_oss",
        r#""architectures": ["GptOssForCausalLM"], "sliding_window": 4, "num_local_experts": 5,
        "num_experts_per_tok": 2, "quantization_config": {"quant_method": "mxfp4"}"#,
    );
}

#[test]
fn gated_delta_nets_match_the_cpu() {
    if !crate::is_selected_by_cursor(2, crate::SHARDS) {
        return;
    }
    check(
        "qwen3_next",
        r#""architectures": ["Qwen3NextForCausalLM"], "linear_num_key_heads": 2, "linear_num_value_heads": 4,
        "linear_key_head_dim": 32, "linear_value_head_dim": 24, "num_experts": 8, "num_experts_per_tok": 2,
        "moe_intermediate_size": 64, "shared_expert_intermediate_size": 96,
        "layer_types": ["linear_attention", "full_attention"]"#,
    );
}

#[test]
fn gated_shared_experts_match_the_cpu() {
    if !crate::is_selected_by_cursor(3, crate::SHARDS) {
        return;
    }
    check(
        "qwen2_moe",
        r#""architectures": ["Qwen2MoeForCausalLM"], "num_experts": 8, "num_experts_per_tok": 2,
        "moe_intermediate_size": 64, "shared_expert_intermediate_size": 96, "norm_topk_prob": true"#,
    );
}
