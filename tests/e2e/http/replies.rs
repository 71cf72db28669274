//! Replies to valid requests: a streamed reply has the same content as a unary reply.

use crate::http_client::{HttpClient, get, post};
use crate::test_server::{ServerSetup, TestServer};
use serde_json::{Value, json};

fn completion(extra: &Value) -> Value {
    let mut body = json!({"prompt": "once upon a time", "max_tokens": 24, "seed": 7});
    body.as_object_mut().unwrap().extend(extra.as_object().unwrap().clone());
    body
}

/// Text of each choice, joined over all chunks of a stream, and the choice's finish reason.
fn joined(events: &[Value], text_of: impl Fn(&Value) -> Option<&str>) -> Vec<(String, String)> {
    let mut choices: Vec<(String, String)> = Vec::new();
    for choice in events.iter().flat_map(|e| e["choices"].as_array().unwrap()) {
        let index = choice["index"].as_u64().unwrap() as usize;
        choices.resize(choices.len().max(index + 1), Default::default());
        assert_eq!(choices[index].1, "", "nothing follows the end of a choice");
        choices[index].0 += text_of(choice).unwrap_or_default();
        choices[index].1 += choice["finish_reason"].as_str().unwrap_or_default();
    }
    choices
}

#[test]
fn completion_stream_equals_unary_reply() {
    let server = TestServer::start(&ServerSetup::default());
    let mut client = HttpClient::connect(server.address);
    let variants = [
        json!({}),
        json!({"n": 3, "temperature": 0.8}),
        json!({"temperature": 0, "stop": ["e", "a"]}),
        json!({"stop": ["qq"], "include_stop_str_in_output": true, "ignore_eos": true}),
        json!({"echo": true, "max_tokens": 200, "ignore_eos": true}),
        json!({"prompt": ["one", "two"], "n": 2}),
        json!({"prompt": [[72, 105], [72]], "skip_special_tokens": false}),
        json!({"prompt": [72, 105], "stop_token_ids": [97, 98, 99, 100, 101, 102, 103, 104]}),
        json!({"min_tokens": 24, "stop": ["a", "b", "c", "d", "e", "f"], "logprobs": 2}),
        json!({"logit_bias": {"65": 100.0}, "temperature": 0, "stream_interval": 5}),
    ];
    for variant in variants {
        let mut body = completion(&variant);
        let unary = client.post("/v1/completions", &body).json();
        body["stream"] = json!(true);
        body["stream_options"] = json!({"include_usage": true});
        let reply = client.post("/v1/completions", &body);
        assert_eq!(reply.status, 200, "{variant}: {}", String::from_utf8_lossy(&reply.body));
        assert_eq!(reply.header("content-type"), Some("text/event-stream"));
        assert_eq!(reply.header("cache-control"), Some("no-store"));
        let mut events = reply.events();
        let last = events.pop().unwrap();
        assert_eq!(last["choices"], json!([]));
        for key in ["prompt_tokens", "completion_tokens", "total_tokens"] {
            assert_eq!(last["usage"][key], unary["usage"][key], "{variant}");
        }
        let streamed = joined(&events, |choice| choice["text"].as_str());
        let whole: Vec<(String, String)> =
            unary["choices"].as_array().unwrap().iter().map(text_and_end).collect();
        assert_eq!(streamed, whole, "{variant}");
        for event in &events {
            assert!(event["id"].as_str().unwrap().starts_with("cmpl-"));
            assert_eq!(event["object"], "text_completion");
            assert_eq!(event["model"], "tiny");
        }
    }
    server.wait_idle(std::time::Duration::from_secs(1));
}

fn text_and_end(choice: &Value) -> (String, String) {
    let text = choice["text"].as_str().or(choice["message"]["content"].as_str()).unwrap();
    (text.to_owned(), choice["finish_reason"].as_str().unwrap().to_owned())
}

#[test]
fn chat_stream_equals_unary_reply() {
    let server = TestServer::start(&ServerSetup::default());
    let mut client = HttpClient::connect(server.address);
    let messages = json!([{"role": "system", "content": "be brief"},
        {"role": "user", "content": [{"type": "text", "text": "hello"}, {"type": "text", "text": "you"}]}]);
    for extra in [json!({}), json!({"n": 2}), json!({"logprobs": true, "top_logprobs": 3})] {
        let mut body = json!({"messages": messages, "max_tokens": 20, "seed": 3, "model": "tiny"});
        body.as_object_mut().unwrap().extend(extra.as_object().unwrap().clone());
        let unary = client.post("/v1/chat/completions", &body).json();
        assert_eq!(unary["object"], "chat.completion");
        body["stream"] = json!(true);
        let events = client.post("/v1/chat/completions", &body).events();
        let first = &events[0]["choices"][0];
        assert_eq!(first["delta"], json!({"role": "assistant", "content": ""}));
        let streamed = joined(&events, |choice| choice["delta"]["content"].as_str());
        let whole: Vec<(String, String)> =
            unary["choices"].as_array().unwrap().iter().map(text_and_end).collect();
        assert_eq!(streamed, whole);
        if extra["logprobs"] == true {
            let of = |choice: &Value| {
                choice["logprobs"]["content"].as_array().cloned().unwrap_or_default()
            };
            let joined: Vec<Value> = events.iter().flat_map(|e| of(&e["choices"][0])).collect();
            assert_eq!(Value::Array(joined.clone()), unary["choices"][0]["logprobs"]["content"]);
            let tokens = unary["usage"]["completion_tokens"].as_u64().unwrap() as usize;
            assert_eq!(joined.len(), tokens);
            assert!(joined.iter().all(|e| e["top_logprobs"].as_array().unwrap().len() == 3));
        }
    }
}

#[test]
fn usage_counts_cached_tokens() {
    let server = TestServer::start(&ServerSetup::default());
    let body = completion(&json!({"prompt": vec![65; 100], "max_tokens": 2}));
    let first = post(server.address, "/v1/completions", &body).json();
    let second = post(server.address, "/v1/completions", &body).json();
    assert_eq!(first["usage"]["prompt_tokens"], 100);
    let details = |cached: u32, created: u32| json!({"cached_tokens": cached, "created_cache_tokens": created});
    assert_eq!(first["usage"]["prompt_tokens_details"], details(0, 96));
    assert_eq!(second["usage"]["prompt_tokens_details"], details(96, 0));
    let salted = completion(&json!({"prompt": vec![65; 100], "max_tokens": 2, "cache_salt": "me"}));
    let third = post(server.address, "/v1/completions", &salted).json();
    assert_eq!(third["usage"]["prompt_tokens_details"], details(0, 96));
}

#[test]
fn echo_returns_prompt_logprobs() {
    let server = TestServer::start(&ServerSetup::default());
    let extra = json!({"prompt": [72, 105, 33], "echo": true, "max_tokens": 0, "logprobs": 1});
    let reply = post(server.address, "/v1/completions", &completion(&extra)).json();
    let choice = &reply["choices"][0];
    assert_eq!(choice["finish_reason"], "length");
    assert_eq!(reply["usage"]["completion_tokens"], 0);
    assert_eq!(choice["logprobs"]["tokens"].as_array().unwrap().len(), 3);
    assert_eq!(choice["logprobs"]["token_logprobs"][0], Value::Null);
    assert!(choice["logprobs"]["token_logprobs"][1].is_number());
    assert_eq!(choice["logprobs"]["text_offset"][1], 1);
    let extra = json!({"prompt": [72, 105, 33], "max_tokens": 1, "prompt_logprobs": 2});
    let reply = post(server.address, "/v1/completions", &completion(&extra)).json();
    let scored = reply["choices"][0]["prompt_logprobs"].as_array().unwrap();
    assert_eq!((scored.len(), &scored[0]), (3, &Value::Null));
    assert!(scored[1]["105"]["rank"].as_u64().unwrap() >= 1);
}

#[test]
fn request_ids_tokens_and_model_are_echoed() {
    let server = TestServer::start(&ServerSetup::default());
    let mut client = HttpClient::connect(server.address);
    let text = "hello, née\n<|im_end|>";
    let tokens =
        client.post("/tokenize", &json!({"prompt": text, "return_token_strs": true})).json();
    assert_eq!(tokens["count"], tokens["tokens"].as_array().unwrap().len());
    assert_eq!(
        tokens["token_strs"].as_array().unwrap().len(),
        tokens["count"].as_u64().unwrap() as usize
    );
    let back = client.post("/v1/detokenize", &json!({"tokens": tokens["tokens"]})).json();
    assert_eq!(back["prompt"], text);
    let chat = json!({"messages": [{"role": "user", "content": "hi"}]});
    assert!(client.post("/v1/tokenize", &chat).json()["count"].as_u64().unwrap() > 5);

    let models = get(server.address, "/v1/models").json();
    assert_eq!(models["data"][0]["id"], "tiny");
    assert_eq!(get(server.address, "/v1/models/org/alias").json()["id"], "org/alias");
    assert_eq!(get(server.address, "/v1/models/other").status, 404);

    let body =
        completion(&json!({"return_token_ids": true, "request_id": "mine", "frobnicate": 1}));
    let reply = client.post("/v1/completions", &body);
    assert_eq!(reply.header("x-hadron-ignored-fields"), Some("frobnicate"));
    assert_eq!(reply.header("x-request-id"), Some("mine"));
    let reply = reply.json();
    assert_eq!(reply["id"], "cmpl-mine");
    let choice = &reply["choices"][0];
    let produced = choice["token_ids"].as_array().unwrap().len() as u64;
    assert_eq!(reply["usage"]["completion_tokens"], produced);
    let asked = reply["usage"]["prompt_tokens"].as_u64().unwrap() as usize;
    assert_eq!(choice["prompt_token_ids"].as_array().unwrap().len(), asked);
}
