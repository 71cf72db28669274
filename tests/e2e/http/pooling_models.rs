//! `--runner pooling` with real executors: results against HF transformers, prefix cache, ranks, a killed
//! executor, and flags.

use super::executor_process::{children_as, executor, is_ready, send, wait_until};
use super::parallel_ranks::{metric, synth};
use super::server_process::{ServerProcess, command};
use crate::bounded_child::run_to_end;
use crate::http_client::post;
use serde_json::{Value, json};
use std::fs;
use std::net::SocketAddr;
use std::path::Path;
use std::time::Duration;

/// Tolerance relative to the largest value of a vector; needed because f32 sums are computed in a different
/// order than in HF transformers.
const TOLERANCE: f64 = 2e-4;

const FLAGS: [&str; 8] = [
    "--dtype",
    "float32",
    "--max-model-len",
    "256",
    "--num-gpu-blocks-override",
    "64",
    "--served-model-name",
    "m",
];

/// Reads a golden file: results of HF transformers for a model with synthetic weights.
fn golden(name: &str) -> Value {
    let folder = Path::new(env!("CARGO_MANIFEST_DIR")).join("tests/data/golden/pooling");
    let text = fs::read_to_string(folder.join(format!("{name}.json"))).unwrap();
    serde_json::from_str(&text).unwrap()
}

/// Writes the checkpoint that a golden file describes to a temporary folder. `class` replaces `ForCausalLM`
/// in the architecture name.
fn checkpoint(golden: &Value, class: &str) -> tempfile::TempDir {
    let config = golden["config"].as_str().unwrap().replace("ForCausalLM", class);
    let mut config: Value = serde_json::from_str(&config).unwrap();
    config["num_labels"] = 1.into();
    synth(&config)
}

fn serve(folder: &tempfile::TempDir, flags: &[&str]) -> ServerProcess {
    serve_with("pooling", folder, flags)
}

fn serve_with(runner: &str, folder: &tempfile::TempDir, flags: &[&str]) -> ServerProcess {
    let model = folder.path().join("model").to_str().unwrap().to_owned();
    let selected = [model.as_str(), "--runner", runner];
    ServerProcess::start(&[&selected, &FLAGS[..], flags].concat())
}

fn embedding(at: SocketAddr, body: &Value) -> Vec<f64> {
    let reply = post(at, "/v1/embeddings", body).json();
    let list = reply["data"][0]["embedding"].as_array().unwrap_or_else(|| panic!("{reply}"));
    list.iter().map(|x| x.as_f64().unwrap()).collect()
}

fn numbers(list: &Value) -> Vec<f64> {
    list.as_array().unwrap().iter().map(|x| x.as_f64().unwrap()).collect()
}

/// Checks the embeddings of all prompts of a golden file against the vectors under the key `name`.
fn check_embeddings(at: SocketAddr, golden: &Value, name: &str) {
    for (len, expected) in
        golden["prompts"].as_array().unwrap().iter().zip(golden[name].as_array().unwrap())
    {
        let tokens = &golden["tokens"].as_array().unwrap()[..len.as_u64().unwrap() as usize];
        let raw = embedding(at, &json!({"input": tokens, "use_activation": false}));
        let expected = numbers(expected);
        let scale = expected.iter().fold(0.0f64, |most, x| most.max(x.abs()));
        assert_eq!(raw.len(), expected.len());
        for (found, expected) in raw.iter().zip(&expected) {
            assert!(
                (found - expected).abs() < TOLERANCE * scale,
                "{name} {len}: {found} {expected}"
            );
        }
        let unit = embedding(at, &json!({"input": tokens}));
        let norm = unit.iter().map(|x| x * x).sum::<f64>().sqrt();
        assert!((norm - 1.0).abs() < 1e-6, "{norm}");
    }
}

#[test]
fn embeddings_match_transformers() {
    for name in ["qwen3", "llama"] {
        let golden = golden(name);
        let folder = checkpoint(&golden, "ForCausalLM");
        check_embeddings(serve(&folder, &[]).address, &golden, "last");
        let mean = serve(&folder, &["--pooler-config", r#"{"pooling_type": "MEAN"}"#]);
        check_embeddings(mean.address, &golden, "mean");
        check_embeddings(
            serve(&folder, &["-tp", "1", "--max-num-batched-tokens", "16"]).address,
            &golden,
            "last",
        );
    }
}

#[test]
fn headless_checkpoint_has_embeddings_only() {
    let golden = golden("qwen3");
    let folder = checkpoint(&golden, "Model");
    let server = serve_with("auto", &folder, &[]);
    check_embeddings(server.address, &golden, "last");
    let rejected = run_to_end(&mut command(&[
        folder.path().join("model").to_str().unwrap(),
        "--port",
        "0",
        "--runner",
        "generate",
    ]));
    assert_eq!(rejected.status.code(), Some(1));
    let text = String::from_utf8_lossy(&rejected.stderr).into_owned();
    assert!(text.contains("--runner"), "{text}");
}

#[test]
fn prefix_hits_and_executor_restarts_keep_the_embedding() {
    let golden = golden("qwen3");
    let folder = checkpoint(&golden, "ForCausalLM");
    let server = serve(&folder, &["--executor", "process"]);
    let at = server.address;
    let body = json!({"input": golden["tokens"].as_array().unwrap()[..150]});
    let first = embedding(at, &body);
    assert_eq!(embedding(at, &body), first, "from the prefix cache");
    let hits = metric(at, "vllm:prefix_cache_hits_total{engine=\"0\",model_name=\"m\"}");
    assert!(hits >= 128.0, "{hits}");
    let former = executor(&server);
    send(former, "-KILL");
    wait_until(Duration::from_secs(30), "a new executor", || {
        is_ready(at) && children_as("executor", server.id()).iter().any(|&pid| pid != former)
    });
    assert_eq!(embedding(at, &body), first, "from a new executor");
}

#[test]
fn classifier_scores_pairs_the_same_on_two_ranks() {
    let folder = checkpoint(&golden("llama"), "ForSequenceClassification");
    let of = |flags: &[&str]| {
        let server = serve(&folder, flags);
        let body = json!({"query": "what", "documents": ["a b", "c d e", "f"]});
        let reply = post(server.address, "/rerank", &body).json();
        let results = reply["results"].as_array().unwrap_or_else(|| panic!("{reply}")).clone();
        let of =
            |result: &Value| (result["index"].clone(), result["relevance_score"].as_f64().unwrap());
        results.iter().map(of).collect::<Vec<_>>()
    };
    let one = of(&[]);
    assert!(one.iter().all(|(_, score)| (0.0..1.0).contains(score)), "{one:?}");
    for (one, two) in one.iter().zip(of(&["-tp", "2"])) {
        assert!(one.0 == two.0 && (one.1 - two.1).abs() < 1e-5, "{one:?} {two:?}");
    }
}

#[test]
fn two_token_reranker_compares_the_logits_of_its_tokens() {
    let folder = checkpoint(&golden("qwen3"), "ForCausalLM");
    let overrides = json!({"architectures": ["Qwen3ForSequenceClassification"],
        "classifier_from_token": ["n", "y"], "is_original_qwen3_reranker": true});
    let reranker = serve(&folder, &["--hf-overrides", &overrides.to_string()]);
    let body = json!({"text_1": "what", "text_2": "a b"});
    let reply = post(reranker.address, "/score", &body).json();
    let score = reply["data"][0]["score"].as_f64().unwrap_or_else(|| panic!("{reply}"));
    let generating = serve_with("generate", &folder, &["--max-logprobs", "300"]);
    let body = json!({"prompt": "whata b", "max_tokens": 1, "temperature": 0, "logprobs": 272});
    let reply = post(generating.address, "/v1/completions", &body).json();
    let logprobs = &reply["choices"][0]["logprobs"]["top_logprobs"][0];
    let of = |token: &str| logprobs[token].as_f64().unwrap_or_else(|| panic!("{reply}"));
    let expected = 1.0 / (1.0 + (of("n") - of("y")).exp());
    assert!((score - expected).abs() < 1e-5, "{score} {expected}");
}
