//! An MLA model (DeepSeek-V3) over HTTP: on one rank, on several ranks, and with prefix hits.

use super::parallel_ranks::{start, synth};
use super::server_process::command;
use crate::bounded_child::run_to_end;
use crate::http_client::post;
use serde_json::{Value, json};
use std::net::SocketAddr;

/// A checkpoint of an MLA model of four layers, of which the first is dense. It has 8 experts in 4 groups,
/// `kv_lora_rank` 32 and `qk_rope_head_dim` 8.
pub(super) fn model() -> tempfile::TempDir {
    model_with(0)
}

/// The checkpoint of `model` with `draft_layers` MTP modules in addition.
pub(super) fn model_with(draft_layers: u32) -> tempfile::TempDir {
    synth(&json!({
        "architectures": ["DeepseekV3ForCausalLM"], "model_type": "deepseek_v3", "vocab_size": 272,
        "hidden_size": 64, "num_hidden_layers": 4, "num_attention_heads": 4,
        "intermediate_size": 96, "rms_norm_eps": 1e-6, "rope_theta": 10000.0,
        "max_position_embeddings": 1024, "q_lora_rank": 32, "kv_lora_rank": 32,
        "qk_nope_head_dim": 16, "qk_rope_head_dim": 8, "v_head_dim": 16, "n_routed_experts": 8,
        "num_experts_per_tok": 2, "moe_intermediate_size": 32, "first_k_dense_replace": 1,
        "n_shared_experts": 1, "n_group": 4, "topk_group": 2, "routed_scaling_factor": 2.5,
        "norm_topk_prob": true, "bos_token_id": 1, "eos_token_id": 2,
        "num_nextn_predict_layers": draft_layers
    }))
}

/// Returns the output token ids for prompt number `which`, which has 70 tokens, and the number of cached
/// prompt tokens.
fn complete(at: SocketAddr, which: u32) -> (Value, Value) {
    let prompt: Vec<u32> = (0..70).map(|i| 3 + (i * i * 7 + which * 31) % 250).collect();
    let body = json!({"prompt": prompt, "max_tokens": 40, "ignore_eos": true, "seed": which,
                      "temperature": which % 2, "return_token_ids": true});
    let reply = post(at, "/v1/completions", &body).json();
    let ids = reply["choices"][0]["token_ids"].clone();
    assert_eq!(ids.as_array().map(Vec::len), Some(40), "{reply}");
    (ids, reply["usage"]["prompt_tokens_details"]["cached_tokens"].clone())
}

#[test]
fn mla_model_is_invariant_to_ranks_and_cache_hits() {
    let model = model();
    let folder = model.path().join("model").to_str().unwrap().to_owned();
    let sizes = ["--num-gpu-blocks-override", "256", "--max-num-batched-tokens", "48"];
    let serve = |flags: &[&str]| start(&[&[folder.as_str()], &sizes[..], flags].concat());
    let baseline = serve(&[]);
    let expected: Vec<Value> = (0..3).map(|which| complete(baseline.address, which).0).collect();
    assert_eq!(complete(baseline.address, 1), (expected[1].clone(), json!(64)));
    drop(baseline);
    for flags in [
        &["--tensor-parallel-size", "2"][..],
        &["--tensor-parallel-size", "2", "--enable-expert-parallel"],
        &["--data-parallel-size", "2", "--enable-expert-parallel"],
    ] {
        let process = serve(flags);
        for (which, expected) in expected.iter().enumerate() {
            assert_eq!(complete(process.address, which as u32).0, *expected, "{flags:?} {which}");
        }
    }
}

#[test]
fn unsupported_mla_kv_cache_dtype_is_rejected() {
    let model = model();
    let folder = model.path().join("model");
    let flags = [folder.to_str().unwrap(), "--kv-cache-dtype", "fp8"];
    let output = run_to_end(&mut command(&flags));
    let text = String::from_utf8(output.stderr).unwrap();
    assert_eq!(output.status.code(), Some(1), "{text}");
    assert!(text.contains("--kv-cache-dtype fp8 is not supported with MLA"), "{text}");
}
