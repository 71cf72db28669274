//! A checkpoint with a NaN row in the embedding: requests with the token of this row fail, all other requests
//! succeed.

use super::parallel_ranks::metric;
use crate::http_client::{HttpReply, post};
use crate::random_schemas::write_model;
use crate::test_server::{ServerSetup, TestServer};
use serde_json::{Value, json};
use std::fs;
use std::path::Path;
use std::time::Duration;

/// Token id whose embedding row is NaN.
const BROKEN: usize = 97;
const HITS: &str = "vllm:prefix_cache_hits_total{engine=\"0\",model_name=\"tiny\"}";

/// Overwrites the row of token `BROKEN` in the embedding, which is f32 `[vocab_size, hidden_size]` in the
/// safetensors file.
fn break_row(file: &Path, hidden_size: usize) {
    let mut bytes = fs::read(file).unwrap();
    let header_len = u64::from_le_bytes(bytes[..8].try_into().unwrap()) as usize;
    let header: Value = serde_json::from_slice(&bytes[8..8 + header_len]).unwrap();
    let begin = header["model.embed_tokens.weight"]["data_offsets"][0].as_u64().unwrap() as usize;
    let row = 8 + header_len + begin + BROKEN * hidden_size * 4;
    bytes[row..row + hidden_size * 4].as_chunks_mut().0.fill(f32::NAN.to_le_bytes());
    fs::write(file, bytes).unwrap();
}

#[test]
fn nan_weights_fail_only_requests_that_use_them() {
    let folder = tempfile::tempdir().unwrap();
    let hidden_size = write_model(folder.path());
    let model = folder.path().join("model");
    break_row(&model.join("model.safetensors"), hidden_size);
    let server = TestServer::start(&ServerSetup {
        model: Some(model),
        max_model_len: 1_024,
        blocks: 256,
        ..ServerSetup::default()
    });
    let at = server.address;
    let ask = |first: usize, tokens: u32| {
        let prompt: Vec<usize> = (0..40).map(|at| if at == 0 { first } else { at }).collect();
        let body = json!({"prompt": prompt, "max_tokens": tokens, "temperature": 0,
            "ignore_eos": true, "logit_bias": {BROKEN.to_string(): -100}});
        post(at, "/v1/completions", &body)
    };
    let text = |reply: HttpReply| {
        assert_eq!(reply.status, 200, "{}", String::from_utf8_lossy(&reply.body));
        reply.json()["choices"][0]["text"].clone()
    };
    let expected = text(ask(5, 200));
    let hits = metric(at, HITS);
    std::thread::scope(|scope| {
        let concurrent_load = scope.spawn(|| text(ask(5, 200)));
        for _ in 0..8 {
            let reply = ask(BROKEN, 200);
            let reason = reply.json()["error"]["reason"].clone();
            assert_eq!((reply.status, reason), (500, json!("nan_logits")));
        }
        assert_eq!(concurrent_load.join().unwrap(), expected, "a request in the same steps");
    });
    assert_eq!(text(ask(5, 200)), expected, "a later request");
    assert_eq!(metric(at, HITS) - hits, 2.0 * 32.0, "two whole prompts were found, no broken one");
    server.wait_idle(Duration::from_secs(20));
}
