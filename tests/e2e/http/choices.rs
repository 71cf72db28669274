//! Requests with several choices per prompt (`n`) that cannot all run at the same time.

use crate::http_client::{HttpReply, post};
use crate::test_server::{BLOCK_TOKENS, ServerSetup, TestServer};
use engine::AdmissionLimits;
use serde_json::{Value, json};
use std::time::Duration;

/// Length of every prompt in tokens.
const PROMPT: usize = 40;
/// Output length of every choice in tokens.
const OUTPUT: usize = 88;
/// Number of KV blocks of one complete choice.
const BLOCKS: u32 = (PROMPT + OUTPUT) as u32 / BLOCK_TOKENS;

fn body(n: usize, stream: bool) -> Value {
    let prompt: Vec<usize> = (0..PROMPT).map(|i| 65 + i % 50).collect();
    json!({"prompt": prompt, "n": n, "max_tokens": OUTPUT, "ignore_eos": true, "seed": 11,
        "temperature": 0.9, "return_token_ids": true, "stream": stream})
}

/// Output token ids of the `n` choices of a reply, one list per choice.
fn token_ids(reply: &HttpReply, n: usize, stream: bool) -> Vec<Vec<u64>> {
    let whole = if stream { reply.events() } else { vec![reply.json()] };
    let mut choices = vec![Vec::new(); n];
    for choice in whole.iter().flat_map(|part| part["choices"].as_array().unwrap()) {
        let index = choice["index"].as_u64().unwrap() as usize;
        let ids = choice["token_ids"].as_array().into_iter().flatten();
        choices[index].extend(ids.map(|id| id.as_u64().unwrap()));
    }
    choices
}

fn complete(server: &TestServer, n: usize, stream: bool) -> Vec<Vec<u64>> {
    let reply = post(server.address, "/v1/completions", &body(n, stream));
    assert_eq!(reply.status, 200, "n = {n}: {}", String::from_utf8_lossy(&reply.body));
    let choices = token_ids(&reply, n, stream);
    assert!(choices.iter().all(|ids| ids.len() == OUTPUT), "n = {n}, stream = {stream}");
    choices
}

/// Outputs of all choices on a server with one sequence slot and a large cache, where each choice runs alone.
fn baseline() -> Vec<Vec<u64>> {
    let server = TestServer::start(&ServerSetup { max_num_seqs: 1, ..ServerSetup::default() });
    let choices = complete(&server, 16, false);
    assert!((1..16).all(|i| choices[i] != choices[0]), "every choice has its own random numbers");
    choices
}

/// Sends a request for each number of choices in `counts`, streamed and not, and compares the outputs with
/// the outputs of choices that ran alone.
fn check_all(setup: &ServerSetup, counts: &[usize]) {
    let expected = baseline();
    let server = TestServer::start(setup);
    for &n in counts {
        for stream in [false, true] {
            let choices = complete(&server, n, stream);
            assert!(choices == expected[..n], "n = {n}, stream = {stream}: other tokens");
        }
    }
    server.wait_idle(Duration::from_secs(5));
}

#[test]
fn choices_beyond_the_cache_run_one_after_another() {
    let setup = ServerSetup {
        blocks: BLOCKS,
        max_model_len: BLOCKS * BLOCK_TOKENS,
        ..ServerSetup::default()
    };
    check_all(&setup, &[1, 2, 3, 16]);
}

#[test]
fn choices_beyond_max_num_seqs_wait_for_a_slot() {
    check_all(&ServerSetup { max_num_seqs: 4, ..ServerSetup::default() }, &[1, 3, 4, 5, 16]);
}

#[test]
fn choices_without_cached_prefix_fit_one_at_a_time() {
    // Requests with prompt log-probabilities do not use the prefix cache: every choice computes the whole
    // prompt.
    let (blocks, max_model_len) = (BLOCKS, BLOCKS * BLOCK_TOKENS);
    let server =
        TestServer::start(&ServerSetup { blocks, max_model_len, ..ServerSetup::default() });
    let mut several = body(5, false);
    several["prompt_logprobs"] = json!(0);
    let reply = post(server.address, "/v1/completions", &several);
    assert_eq!(reply.status, 200, "{}", String::from_utf8_lossy(&reply.body));
    assert!(token_ids(&reply, 5, false) == baseline()[..5]);
}

#[test]
fn choice_larger_than_the_cache_is_rejected() {
    let (blocks, max_model_len) = (BLOCKS, BLOCKS * BLOCK_TOKENS);
    let server =
        TestServer::start(&ServerSetup { blocks, max_model_len, ..ServerSetup::default() });
    for n in [1, 2, 16] {
        let mut longer = body(n, false);
        longer["max_tokens"] = json!(OUTPUT + 1);
        let reply = post(server.address, "/v1/completions", &longer);
        let error = &reply.json()["error"];
        let reason = error["reason"].as_str().unwrap();
        assert_eq!((reply.status, reason), (400, "context_length_exceeded"), "n = {n}");
    }
    assert_eq!(complete(&server, 2, false).len(), 2, "a token less fits");
}

#[test]
fn choices_beyond_the_queue_are_rejected_for_good() {
    let admission = AdmissionLimits { requests: 4, prefill_tokens: u64::MAX, bytes: 1 << 20 };
    let server = TestServer::start(&ServerSetup { admission, ..ServerSetup::default() });
    assert_eq!(complete(&server, 4, false).len(), 4);
    let two_prompts = json!({"prompt": ["a", "b"], "n": 3, "max_tokens": 1});
    for body in [body(5, false), body(5, true), two_prompts] {
        let reply = post(server.address, "/v1/completions", &body);
        let error = &reply.json()["error"];
        assert_eq!((reply.status, &error["param"]), (400, &json!("n")), "{error}");
        assert!(error["message"].as_str().unwrap().contains("queues at most 4"), "{error}");
    }
    server.wait_idle(Duration::from_secs(2));
}

#[test]
fn up_to_128_choices_share_few_sequence_slots() {
    let server = TestServer::start(&ServerSetup { max_num_seqs: 4, ..ServerSetup::default() });
    let messages = json!([{"role": "user", "content": "hi"}]);
    let chat = |n: u32| json!({"messages": messages, "max_tokens": 2, "n": n});
    let reply = post(server.address, "/v1/chat/completions", &chat(128));
    let choices = reply.json()["choices"].as_array().unwrap().clone();
    let indices: Vec<u64> =
        choices.iter().map(|choice| choice["index"].as_u64().unwrap()).collect();
    assert_eq!(indices, (0..128).collect::<Vec<u64>>());
    let reply = post(server.address, "/v1/chat/completions", &chat(129));
    assert_eq!((reply.status, &reply.json()["error"]["param"]), (400, &json!("n")));
}
