//! A model with recurrent states (Qwen3-Next) over HTTP: on one rank, on several ranks, with draft tokens, and with prefix
//! hits, which end at checkpoints of the states.

use super::parallel_ranks::{start, synth};
use super::server_process::command;
use crate::bounded_child::run_to_end;
use crate::http_client::{HttpClient, post};
use serde_json::{Value, json};
use std::net::SocketAddr;

/// A checkpoint of a model of four layers, of which the last has attention and the others are gated delta nets.
fn model() -> tempfile::TempDir {
    synth(&json!({
        "architectures": ["Qwen3NextForCausalLM"], "model_type": "qwen3_next", "vocab_size": 272,
        "hidden_size": 64, "num_hidden_layers": 4, "num_attention_heads": 4, "head_dim": 32,
        "num_key_value_heads": 2, "intermediate_size": 96, "rms_norm_eps": 1e-6,
        "rope_theta": 10000.0, "max_position_embeddings": 1024, "linear_num_key_heads": 2,
        "linear_num_value_heads": 4, "linear_key_head_dim": 16, "linear_value_head_dim": 16,
        "num_experts": 8, "num_experts_per_tok": 2, "moe_intermediate_size": 32,
        "shared_expert_intermediate_size": 32, "bos_token_id": 1, "eos_token_id": 2
    }))
}

const NGRAM: &str = r#"{"method": "ngram", "num_speculative_tokens": 3}"#;
const MTP: &str = r#"{"method": "mtp", "num_speculative_tokens": 2}"#;

/// Output token ids of a completion, and the number of cached prompt tokens.
struct CachedCompletion {
    ids: Value,
    cached: Value,
}

/// Completes prompt number `which`, which has `len` tokens.
fn complete(at: SocketAddr, which: u32, len: u32) -> CachedCompletion {
    let prompt: Vec<u32> = (0..len).map(|i| 3 + (i * i * 7 + which * 31) % 250).collect();
    let body = json!({"prompt": prompt, "max_tokens": 40, "ignore_eos": true, "seed": which,
                      "temperature": which % 2, "return_token_ids": true});
    let reply = post(at, "/v1/completions", &body).json();
    let ids = reply["choices"][0]["token_ids"].clone();
    assert_eq!(ids.as_array().map(Vec::len), Some(40), "{reply}");
    let cached = reply["usage"]["prompt_tokens_details"]["cached_tokens"].clone();
    CachedCompletion { ids, cached }
}

#[test]
fn recurrent_model_is_invariant_to_ranks_drafts_hits() {
    let model = model();
    let folder = model.path().join("model").to_str().unwrap().to_owned();
    let sizes = ["--num-gpu-blocks-override", "256", "--max-num-batched-tokens", "48"];
    let serve = |flags: &[&str]| start(&[&[folder.as_str()], &sizes[..], flags].concat());
    let cold = serve(&["--no-enable-prefix-caching"]);
    let expected: Vec<Value> = (0..3).map(|which| complete(cold.address, which, 70).ids).collect();
    let longer = complete(cold.address, 1, 100).ids;
    drop(cold);
    for flags in [
        &[][..],
        &["--max-num-seqs", "1"],
        &["--tensor-parallel-size", "2"],
        &["--tensor-parallel-size", "2", "--enable-expert-parallel"],
        &["--data-parallel-size", "2", "--enable-expert-parallel"],
        &["--speculative-config", NGRAM],
        &["--speculative-config", MTP],
        &["--speculative-config", MTP, "--tensor-parallel-size", "2", "--enable-expert-parallel"],
    ] {
        let process = serve(flags);
        for (which, expected) in expected.iter().enumerate() {
            assert_eq!(complete(process.address, which as u32, 70).ids, *expected, "{flags:?}");
        }
        if flags.is_empty() || flags.len() == 2 && flags[0] == "--speculative-config" {
            let repeated = complete(process.address, 1, 70);
            assert_eq!((&repeated.ids, &repeated.cached), (&expected[1], &json!(64)));
            let CachedCompletion { ids, cached } = complete(process.address, 1, 100);
            assert_eq!((ids, cached), (longer.clone(), json!(64)));
        }
    }
}

fn debug_kv(at: SocketAddr) -> Value {
    let mut client = HttpClient::connect(at);
    client.send("GET", "/debug/kv", "Authorization: Bearer root\r\n", b"");
    client.read().unwrap().json()
}

/// Checkpoints at the interval of the flag, and in `/debug/kv`: a prompt whose beginning is shared hits the last
/// checkpoint before its end, or nothing if there are none.
#[test]
fn checkpoint_interval_limits_prefix_hits() {
    let model = model();
    let folder = model.path().join("model").to_str().unwrap().to_owned();
    let sizes = ["--num-gpu-blocks-override", "256", "--max-num-batched-tokens", "48"];
    for (interval, cached) in [("32", 64), ("0", 0)] {
        let flags = ["--state-checkpoint-interval-tokens", interval, "--admin-key", "root"];
        let process = start(&[&[folder.as_str()], &sizes[..], &flags].concat());
        complete(process.address, 1, 110);
        let kv = debug_kv(process.address);
        let slots = &kv["replicas"][0]["state_slots"];
        assert!(slots["checkpoints"].as_u64() > Some(0), "{kv}");
        assert_eq!(slots["in_use"], 0, "{kv}");
        // The beginning of the first prompt: longer than the checkpoint at 64, shorter than that at the end of the prompt.
        let shorter = complete(process.address, 1, 90);
        assert_eq!(shorter.cached, json!(cached), "{interval}");
        // Five blocks of 16 tokens are cached in the group with attention.
        let expected = json!([
            {"kind": "full_attention", "offered": 80, "hits": cached, "misses": 0},
            {"kind": "recurrent_state", "offered": cached, "hits": cached, "misses": 80 - cached},
        ]);
        let kv = debug_kv(process.address);
        assert_eq!(kv["replicas"][0]["prefix_hits_by_group"], expected, "{interval}");
    }
}

#[test]
fn recurrent_draft_model_is_rejected() {
    let model = model();
    let folder = model.path().join("model");
    let folder = folder.to_str().unwrap();
    let draft = json!({"method": "draft_model", "model": folder, "num_speculative_tokens": 2});
    let flags = [folder, "--speculative-config", &draft.to_string()];
    let output = run_to_end(&mut command(&flags));
    let text = String::from_utf8(output.stderr).unwrap();
    assert_eq!(output.status.code(), Some(1), "{text}");
    assert!(text.contains("Qwen3NextForCausalLM is not supported as draft model"), "{text}");
}
