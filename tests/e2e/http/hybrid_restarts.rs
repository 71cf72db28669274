//! Executor processes that are killed in mid-stream, for a model with recurrent states and for a model with sliding
//! windows: the stream's text is that of an undisturbed stream, and prefix hits after the restart are those of a server with
//! an empty KV cache.

use super::executor_process::{executor, finish, is_ready, send, stream_of, wait_until};
use super::parallel_ranks::{metric, start, synth};
use super::server_process::ServerProcess;
use crate::http_client::post;
use serde_json::{Value, json};
use std::net::SocketAddr;
use std::time::Duration;

/// Number of tokens of the stream whose executor is killed: enough steps that it has not ended when the kill is seen.
const STREAM_TOKENS: u32 = 700;
const TOKENS_GENERATED: &str = "vllm:generation_tokens_total{engine=\"0\",model_name=\"m\"}";

const SERVER_FLAGS: &[&str] = &[
    "--executor",
    "process",
    "--served-model-name",
    "m",
    "--num-gpu-blocks-override",
    "400",
    "--max-num-batched-tokens",
    "48",
    "--state-checkpoint-interval-tokens",
    "64",
];

/// A checkpoint of a model of four layers, of which the last has attention and the others are gated delta nets.
fn recurrent_model() -> tempfile::TempDir {
    synth(&json!({
        "architectures": ["Qwen3_5ForCausalLM"], "model_type": "qwen3_5_text", "vocab_size": 272,
        "hidden_size": 64, "num_hidden_layers": 4, "num_attention_heads": 4, "head_dim": 32,
        "num_key_value_heads": 2, "intermediate_size": 96, "rms_norm_eps": 1e-6,
        "rope_theta": 10000.0, "max_position_embeddings": 2048, "linear_num_key_heads": 2,
        "linear_num_value_heads": 4, "linear_key_head_dim": 16, "linear_value_head_dim": 16,
        "bos_token_id": 1, "eos_token_id": 2
    }))
}

/// A checkpoint of a model of four layers, of which every second one has a sliding window of 40 tokens.
fn window_model() -> tempfile::TempDir {
    synth(&json!({
        "architectures": ["Gemma3ForCausalLM"], "model_type": "gemma3_text", "vocab_size": 272,
        "hidden_size": 64, "num_hidden_layers": 4, "num_attention_heads": 4, "head_dim": 32,
        "num_key_value_heads": 2, "intermediate_size": 96, "max_position_embeddings": 2048,
        "sliding_window": 40, "sliding_window_pattern": 2, "bos_token_id": 1, "eos_token_id": 2
    }))
}

/// Token ids of prompt number `which`. Prompts with equal numbers begin with the same tokens.
fn prompt(which: u32, len: u32) -> Vec<u32> {
    (0..len).map(|i| 3 + (i * i * 7 + which * 31) % 250).collect()
}

/// Output of a completion, and the number of cached prompt tokens.
#[derive(Debug, PartialEq)]
struct RestartProbeOutput {
    ids: Vec<u32>,
    cached: u64,
}

/// Completes a prompt. The random sampling with a fixed seed shows each token that is computed from wrong states.
fn complete(at: SocketAddr, prompt: &[u32], max_tokens: u32) -> RestartProbeOutput {
    let body = json!({"prompt": prompt, "max_tokens": max_tokens, "ignore_eos": true, "seed": 7,
                      "temperature": 1, "return_token_ids": true});
    let reply = post(at, "/v1/completions", &body).json();
    let ids = reply["choices"][0]["token_ids"].as_array().unwrap_or_else(|| panic!("{reply}"));
    let ids: Vec<u32> = ids.iter().map(|id| id.as_u64().unwrap() as u32).collect();
    assert_eq!(ids.len(), max_tokens as usize, "{reply}");
    let cached = reply["usage"]["prompt_tokens_details"]["cached_tokens"].as_u64();
    RestartProbeOutput { ids, cached: cached.unwrap_or_else(|| panic!("{reply}")) }
}

/// Completes a prompt twice, a longer prompt that begins with it, and a shorter one; returns the results.
fn complete_related_prompts(at: SocketAddr) -> Vec<RestartProbeOutput> {
    [200, 200, 290, 130].map(|len| complete(at, &prompt(1, len), 30)).into()
}

/// Streams a completion and kills the executor while it generates; returns the text of the stream.
fn killed_stream(process: &ServerProcess, body: &Value) -> String {
    let at = process.address;
    let generated = || metric(at, TOKENS_GENERATED) as u32;
    let (before, former) = (generated(), executor(process));
    let stream = stream_of(at, body);
    wait_until(Duration::from_secs(20), "tokens", || generated() > before + 100);
    send(former, "-KILL");
    wait_until(Duration::from_secs(4), "the failure", || !is_ready(at));
    let lost = before + STREAM_TOKENS - generated();
    assert!(lost > 0, "the stream has ended before the executor was killed");
    let (text, end) = finish(stream);
    assert_eq!(end, "length");
    assert_ne!(executor(process), former);
    text
}

/// Kills the executor of a model. `hits` are the numbers of cached tokens of `complete_related_prompts` with an empty cache,
/// and of a prompt that continues the stream. All outputs must be those of a server without prefix caching.
fn check_killed_executor(model: &tempfile::TempDir, hits: [u64; 5]) {
    let folder = model.path().join("model").to_str().unwrap().to_owned();
    let serve = |flags: &[&str]| start(&[&[folder.as_str()], SERVER_FLAGS, flags].concat());
    let streamed = prompt(2, 150);
    let body = json!({"prompt": streamed, "max_tokens": STREAM_TOKENS, "ignore_eos": true, "seed": 7,
                      "temperature": 1, "stream": true});
    let cold = serve(&["--no-enable-prefix-caching"]);
    let output = complete(cold.address, &streamed, STREAM_TOKENS).ids;
    let continued = [&streamed[..], &output[..], &prompt(3, 20)].concat();
    let outputs = |at| {
        let mut outputs = complete_related_prompts(at);
        outputs.push(complete(at, &continued, 30));
        outputs
    };
    let mut expected = outputs(cold.address);
    let (undisturbed, _) = finish(stream_of(cold.address, &body));
    drop(cold);

    let process = serve(&[]);
    for (output, cached) in expected.iter_mut().zip(hits) {
        output.cached = cached;
    }
    assert_eq!(complete_related_prompts(process.address), expected[..4], "before the kill");
    let text = killed_stream(&process, &body);
    assert!(text == undisturbed, "differs from an undisturbed stream:\n{text}\n{undisturbed}");
    assert_eq!(outputs(process.address), expected, "after the kill");
}

#[test]
fn killed_executor_of_recurrent_model_changes_no_text() {
    // Checkpoints: at the last block boundary of a prompt, at multiples of 64 in prompts, and every 64 tokens after
    // position 144 in the output of the stream. The row at 848 samples the last token and makes none.
    check_killed_executor(&recurrent_model(), [0, 192, 192, 128, 784]);
}

#[test]
fn killed_executor_of_window_model_changes_no_text() {
    // A prefix hit ends at a block boundary: before the last of the 849 computed positions of the stream.
    check_killed_executor(&window_model(), [0, 192, 192, 128, 848]);
}
