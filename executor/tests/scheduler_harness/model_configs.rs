//! Configurations of executors with small models and synthetic weights.

use super::request_tables::BLOCK;
use executor::{DeviceEnvironment, ExecutorConfig, KvCacheSize, ModelDtype};
use models::ModelConfig;
use protocol::{Epoch, ExecutorSettings, ExpertPlacement, ParallelConfig, Rank};
use std::path::{Path, PathBuf};

pub(crate) const VOCAB: u32 = 384;
/// Number of blocks of the KV pool.
const BLOCKS: u32 = 512;

/// Returns a dense model of 3 layers with synthetic weights.
pub(crate) fn config(dtype: ModelDtype, threads: u32) -> ExecutorConfig {
    let text = r#"{
        "architectures": ["Qwen3ForCausalLM"], "model_type": "qwen3", "vocab_size": 384,
        "hidden_size": 64, "num_hidden_layers": 3, "num_attention_heads": 4,
        "num_key_value_heads": 2, "head_dim": 64, "intermediate_size": 160, "hidden_act": "silu",
        "rms_norm_eps": 1e-6, "rope_theta": 10000.0, "max_position_embeddings": 512,
        "tie_word_embeddings": true, "attention_bias": false, "torch_dtype": "bfloat16"
    }"#;
    let model = ModelConfig::from_json(Path::new("config.json"), text).unwrap();
    let (settings, environment) = (settings(dtype, threads), DeviceEnvironment::default());
    ExecutorConfig { model, draft: None, manifest: 0, environment, settings }
}

/// Returns an MoE model with the same sizes as the model of `config`, with 8 experts in all layers except the
/// first.
pub(crate) fn moe_model(dtype: ModelDtype) -> ExecutorConfig {
    let text = r#"{
        "architectures": ["Qwen3MoeForCausalLM"], "model_type": "qwen3_moe", "vocab_size": 384,
        "hidden_size": 64, "num_hidden_layers": 3, "num_attention_heads": 4,
        "num_key_value_heads": 2, "head_dim": 64, "intermediate_size": 160, "hidden_act": "silu",
        "rms_norm_eps": 1e-6, "rope_theta": 10000.0, "max_position_embeddings": 512,
        "num_experts": 8, "num_experts_per_tok": 2, "moe_intermediate_size": 48,
        "norm_topk_prob": true, "mlp_only_layers": [0], "decoder_sparse_step": 1,
        "tie_word_embeddings": false, "attention_bias": false, "torch_dtype": "bfloat16"
    }"#;
    let model = ModelConfig::from_json(Path::new("config.json"), text).unwrap();
    ExecutorConfig { model, ..config(dtype, 1) }
}

/// Returns a model with sandwich norms, in which every second layer has a sliding window of 10 tokens, which is
/// shorter than a KV block.
pub(crate) fn window_model(dtype: ModelDtype) -> ExecutorConfig {
    let text = r#"{
        "architectures": ["Gemma3ForCausalLM"], "model_type": "gemma3_text", "vocab_size": 384,
        "hidden_size": 64, "num_hidden_layers": 3, "num_attention_heads": 4,
        "num_key_value_heads": 2, "head_dim": 64, "intermediate_size": 160,
        "max_position_embeddings": 512, "sliding_window": 10, "sliding_window_pattern": 2,
        "tie_word_embeddings": false, "torch_dtype": "bfloat16"
    }"#;
    let model = ModelConfig::from_json(Path::new("config.json"), text).unwrap();
    ExecutorConfig { model, ..config(dtype, 1) }
}

/// Returns a model whose layers without a window have KV heads of half the size of the others, and whose last layer reads
/// the keys and values of an earlier layer.
pub(crate) fn two_head_sizes_model(dtype: ModelDtype) -> ExecutorConfig {
    let text = r#"{
        "architectures": ["Gemma4ForCausalLM"], "model_type": "gemma4_text", "vocab_size": 384,
        "hidden_size": 64, "num_hidden_layers": 5, "num_attention_heads": 4,
        "num_key_value_heads": 2, "head_dim": 64, "global_head_dim": 32, "intermediate_size": 160,
        "attention_k_eq_v": true, "num_kv_shared_layers": 1, "hidden_size_per_layer_input": 0,
        "max_position_embeddings": 512, "sliding_window": 10, "layer_types": ["sliding_attention",
        "full_attention", "sliding_attention", "full_attention", "full_attention"],
        "tie_word_embeddings": false, "torch_dtype": "bfloat16"
    }"#;
    let model = ModelConfig::from_json(Path::new("config.json"), text).unwrap();
    let mut config = config(dtype, 1);
    // Each position has a block in three groups.
    config.settings.kv_cache_size = KvCacheSize::Blocks(2 * BLOCKS);
    ExecutorConfig { model, ..config }
}

/// Returns a model with gated delta nets in the first and the last layer.
pub(crate) fn recurrent_model(dtype: ModelDtype) -> ExecutorConfig {
    let text = r#"{
        "architectures": ["Qwen3_5ForCausalLM"], "model_type": "qwen3_5_text", "vocab_size": 384,
        "hidden_size": 64, "num_hidden_layers": 3, "num_attention_heads": 4,
        "num_key_value_heads": 2, "head_dim": 64, "intermediate_size": 160, "hidden_act": "silu",
        "rms_norm_eps": 1e-6, "rope_theta": 10000.0, "max_position_embeddings": 512,
        "linear_num_key_heads": 2, "linear_num_value_heads": 4, "linear_key_head_dim": 32,
        "linear_value_head_dim": 24, "linear_conv_kernel_dim": 4,
        "layer_types": ["linear_attention", "full_attention", "linear_attention"],
        "tie_word_embeddings": true, "torch_dtype": "bfloat16"
    }"#;
    let model = ModelConfig::from_json(Path::new("config.json"), text).unwrap();
    ExecutorConfig { model, ..config(dtype, 2) }
}

/// Returns an MLA model with 8 experts in all layers except the first.
pub(crate) fn mla_model(dtype: ModelDtype) -> ExecutorConfig {
    let text = r#"{
        "architectures": ["DeepseekV3ForCausalLM"], "model_type": "deepseek_v3", "vocab_size": 384,
        "hidden_size": 64, "num_hidden_layers": 3, "num_attention_heads": 4,
        "intermediate_size": 96, "rms_norm_eps": 1e-6, "rope_theta": 10000.0,
        "max_position_embeddings": 512, "q_lora_rank": 32, "kv_lora_rank": 32,
        "qk_nope_head_dim": 16, "qk_rope_head_dim": 8, "v_head_dim": 16, "n_routed_experts": 8,
        "num_experts_per_tok": 2, "moe_intermediate_size": 32, "first_k_dense_replace": 1,
        "n_shared_experts": 1, "n_group": 4, "topk_group": 2, "routed_scaling_factor": 2.5,
        "norm_topk_prob": true, "hidden_act": "silu", "torch_dtype": "bfloat16"
    }"#;
    let model = ModelConfig::from_json(Path::new("config.json"), text).unwrap();
    ExecutorConfig { model, ..config(dtype, 1) }
}

/// Splits a model over `tp_size` ranks, with expert parallelism if `experts`.
pub(crate) fn shared(mut config: ExecutorConfig, tp_size: u16, experts: bool) -> ExecutorConfig {
    config.settings.parallel = ParallelConfig { tp_size, dp_size: 1, expert_parallel: experts };
    config
}

/// Adds an expert placement (EPLB map) in which experts are out of order and some are replicated on both
/// ranks.
pub(crate) fn with_expert_placement(mut config: ExecutorConfig) -> ExecutorConfig {
    let layers = vec![
        Vec::new(), // Layer 0 is dense.
        vec![3, 0, 1, 7, 2, 5, 4, 6, 3, 0, 1, 7],
        vec![6, 0, 1, 7, 4, 5, 3, 2],
    ];
    config.settings.expert_placement = Some(ExpertPlacement { layers });
    config
}

/// Adds an expert placement that includes the layer of the MTP module.
pub(crate) fn with_all_experts_placed(config: ExecutorConfig) -> ExecutorConfig {
    let mut config = with_expert_placement(config);
    let layers = &mut config.settings.expert_placement.as_mut().unwrap().layers;
    layers.push(vec![5, 0, 1, 6, 2, 7, 4, 3, 0, 5]);
    config
}

fn settings(dtype: ModelDtype, threads: u32) -> ExecutorSettings {
    ExecutorSettings {
        model_dir: PathBuf::new(),
        draft_model_dir: None,
        config_overrides: None,
        synth_seed: Some(5),
        device: protocol::DeviceKind::Cpu,
        gpus: Vec::new(),
        libraries: None,
        kernel_cache: None,
        dtype,
        kv_cache_dtype: executor::KvCacheDtype::Auto,
        threads: Some(threads),
        block_tokens: BLOCK as u32,
        max_model_len: 256,
        kv_tokens_min: 256,
        max_num_seqs: 40,
        tokens_per_step: 1024,
        kv_cache_size: KvCacheSize::Blocks(BLOCKS),
        memory_utilization: 0.9,
        graph_capture: protocol::GraphCaptureConfig::default(),
        speculative: None,
        max_logprobs: u32::MAX,
        profile_dir: None,
        epoch: Epoch(1),
        rank: Rank(0),
        parallel: ParallelConfig::default(),
        ranks_on_host: 1,
        expert_placement: None,
        one_shot_all_reduce: true,
        host_address: None,
        rendezvous: None,
    }
}
