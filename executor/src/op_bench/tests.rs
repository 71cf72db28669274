//! Tests of the op benchmark with small models of each kind, on the CPU.

use super::*;
use std::collections::BTreeSet;
use std::path::Path;

fn config(model: &str) -> OpBenchConfig {
    OpBenchConfig {
        device: DeviceKind::Cpu,
        libraries: None,
        environment: DeviceEnvironment::default(),
        gpu: 0,
        kernel_cache: None,
        threads: Some(2),
        dtype: ModelDtype::Bfloat16,
        model: models::ModelConfig::from_json(Path::new("config.json"), model).unwrap(),
        tokens: vec![1, 3],
        context: 20,
        block_tokens: 4,
        repeats: 2,
        only: Vec::new(),
    }
}

fn run(config: OpBenchConfig) -> Vec<OpTiming> {
    let mut timings = Vec::new();
    OpBench::open(config).unwrap().run(&mut |timing| timings.push(timing)).unwrap();
    timings
}

const DENSE: &str = r#"{"model_type": "qwen3", "architectures": ["Qwen3ForCausalLM"], "vocab_size": 320,
    "hidden_size": 64, "num_hidden_layers": 2, "num_attention_heads": 4, "num_key_value_heads": 2,
    "head_dim": 32, "intermediate_size": 96, "hidden_act": "silu", "rms_norm_eps": 1e-6,
    "rope_theta": 10000.0, "max_position_embeddings": 64, "tie_word_embeddings": true,
    "attention_bias": false, "torch_dtype": "bfloat16"}"#;

fn experts() -> String {
    let moe = r#""model_type": "qwen3_moe", "architectures": ["Qwen3MoeForCausalLM"], "moe_intermediate_size": 32,
        "num_experts": 8, "num_experts_per_tok": 2, "norm_topk_prob": true, "decoder_sparse_step": 1,
        "mlp_only_layers": [], "#;
    DENSE.replace(r#""model_type": "qwen3", "architectures": ["Qwen3ForCausalLM"], "#, moe)
}

fn names(timings: &[OpTiming]) -> BTreeSet<&'static str> {
    timings.iter().map(|timing| timing.op).collect()
}

#[test]
fn dense_models_time_every_dense_op() {
    let timings = run(config(DENSE));
    let expected = [
        "embedding",
        "rms_norm",
        "add_rms_norm",
        "qkv_proj",
        "rope_kv_write",
        "attention_decode",
        "rope_attention_decode",
        "attention_prefill",
        "o_proj",
        "gate_up_silu",
        "silu_mul",
        "down_proj",
        "lm_head",
    ];
    assert_eq!(names(&timings), BTreeSet::from(expected));
    for timing in &timings {
        assert!(BENCH_OP_NAMES.contains(&timing.op), "{timing:?}");
        assert_eq!(timing.seconds.len(), 2, "{timing:?}");
        assert!(timing.seconds.iter().all(|s| *s > 0.0 && s.is_finite()), "{timing:?}");
        assert!(timing.bytes > 0, "{timing:?}");
    }
    let counts = |op| timings.iter().filter(|t| t.op == op).map(|t| t.tokens).collect::<Vec<_>>();
    assert_eq!((counts("qkv_proj"), counts("attention_prefill")), (vec![1, 3], vec![3]));
    let qkv = timings.iter().find(|t| t.op == "qkv_proj" && t.tokens == 3).unwrap();
    assert_eq!(qkv.flops, 2 * 3 * 64 * (4 + 2 + 2) * 32);
    assert_eq!(qkv.shape, "[3, 64] x [256, 64]");
}

#[test]
fn expert_models_time_router_and_experts() {
    let timings = run(config(&experts()));
    let names = names(&timings);
    assert!(["router", "route_top_k", "experts"].iter().all(|op| names.contains(op)), "{names:?}");
    assert!(!names.contains("gate_up_silu"), "no layer has a dense MLP");
    let one = timings.iter().find(|t| t.op == "experts" && t.tokens == 1).unwrap();
    assert_eq!(one.flops, 6 * 2 * 64 * 32);
}

#[test]
fn only_named_ops_are_timed() {
    let only = vec!["o_proj".to_owned(), "attention_decode".to_owned()];
    let timings = run(OpBenchConfig { only, tokens: vec![2], ..config(DENSE) });
    let ops: Vec<&str> = timings.iter().map(|t| t.op).collect();
    assert_eq!(ops, ["attention_decode", "o_proj"]);
}
