//! SGLang's native routes, vLLM's render routes and `/docs` over real sockets.

use crate::http_client::{HttpReply, get, post};
use crate::test_server::{ServerSetup, TestServer};
use serde_json::{Value, json};
use std::time::{Duration, Instant};

fn generate(server: &TestServer, body: &Value) -> Value {
    let reply = post(server.address, "/generate", body);
    assert_eq!(reply.status, 200, "{body}: {}", String::from_utf8_lossy(&reply.body));
    reply.json()
}

fn param(reply: &HttpReply) -> String {
    reply.json()["error"]["param"].as_str().unwrap_or_default().to_owned()
}

#[test]
fn generate_returns_the_output_of_a_completion() {
    let server = TestServer::start(&ServerSetup::default());
    let sampling = json!({"max_new_tokens": 6, "temperature": 0, "ignore_eos": true});
    let reply =
        generate(&server, &json!({"text": "abc", "rid": "r1", "sampling_params": sampling}));
    let completion = json!({"prompt": "abc", "max_tokens": 6, "temperature": 0, "ignore_eos": true,
        "return_token_ids": true});
    let completion = post(server.address, "/v1/completions", &completion).json();
    let choice = &completion["choices"][0];
    assert_eq!((&reply["text"], &reply["output_ids"]), (&choice["text"], &choice["token_ids"]));
    let meta = &reply["meta_info"];
    assert_eq!(meta["id"], "r1");
    assert_eq!(meta["finish_reason"], json!({"type": "length", "length": 6}));
    assert_eq!(meta["prompt_tokens"], completion["usage"]["prompt_tokens"]);
    assert_eq!(meta["completion_tokens"], 6);
    assert!(meta["e2e_latency"].as_f64().unwrap() > 0.0 && reply.get("index").is_none());
    let ids = json!({"input_ids": choice["prompt_token_ids"], "sampling_params": sampling});
    assert_eq!(generate(&server, &ids)["text"], reply["text"]);
    let stop = json!({"text": "abc", "sampling_params": {"regex": "x+y", "stop": "y", "no_stop_trim": true}});
    let reply = generate(&server, &stop);
    assert!(reply["text"].as_str().unwrap().ends_with('y'), "{reply}");
    assert_eq!(reply["meta_info"]["finish_reason"], json!({"type": "stop", "matched": "y"}));
}

#[test]
fn generate_streams_the_whole_output_so_far() {
    let server = TestServer::start(&ServerSetup::default());
    let mut body = json!({"text": ["abc", "de"], "sampling_params": {"max_new_tokens": 5, "temperature": 0,
        "ignore_eos": true}});
    let unary = generate(&server, &body);
    assert_eq!(unary.as_array().map(Vec::len), Some(2));
    body["stream"] = json!(true);
    let reply = post(server.address, "/generate", &body);
    assert!(String::from_utf8_lossy(&reply.body).ends_with("data: [DONE]\n\n"));
    let mut last = vec![Value::Null; 2];
    for event in reply.events() {
        let index = event["index"].as_u64().unwrap() as usize;
        let text = event["text"].as_str().unwrap();
        assert!(text.starts_with(last[index]["text"].as_str().unwrap_or_default()), "{event}");
        last[index] = event;
    }
    for (streamed, unary) in last.iter().zip(unary.as_array().unwrap()) {
        for field in ["text", "output_ids"] {
            assert_eq!(streamed[field], unary[field]);
        }
        let finish = |output: &Value| output["meta_info"]["finish_reason"].clone();
        assert_eq!(finish(streamed), finish(unary));
    }
}

#[test]
fn generate_returns_logprobs_of_prompt_and_output() {
    let server = TestServer::start(&ServerSetup::default());
    let body = json!({"text": "abcd", "return_logprob": true, "logprob_start_len": 0, "top_logprobs_num": 2,
        "return_text_in_logprobs": true, "sampling_params": {"max_new_tokens": 3, "ignore_eos": true}});
    let reply = generate(&server, &body);
    let meta = &reply["meta_info"];
    let list = |name: &str| meta[name].as_array().unwrap_or_else(|| panic!("{name}: {reply}"));
    let prompt_tokens = meta["prompt_tokens"].as_u64().unwrap() as usize;
    assert_eq!(list("input_token_logprobs").len(), prompt_tokens);
    assert_eq!(list("input_token_logprobs")[0][0], Value::Null);
    assert!(list("input_token_logprobs")[1][0].as_f64().unwrap() <= 0.0);
    assert_eq!(list("output_token_logprobs").len(), 3);
    for (row, id) in
        list("output_token_logprobs").iter().zip(reply["output_ids"].as_array().unwrap())
    {
        assert!(row[0].is_f64() && row[1] == *id && row[2].is_string(), "{row}");
    }
    assert!(list("output_top_logprobs").iter().all(|row| row.as_array().unwrap().len() >= 2));
    let outputs_only =
        json!({"text": "abcd", "return_logprob": true, "sampling_params": {"max_new_tokens": 1}});
    let reply = generate(&server, &outputs_only);
    assert_eq!(reply["meta_info"]["input_token_logprobs"], json!([]));
    assert!(reply["meta_info"].get("output_top_logprobs").is_none());
}

#[test]
fn generate_rejects_by_the_names_of_its_fields() {
    let server = TestServer::start(&ServerSetup { max_model_len: 64, ..ServerSetup::default() });
    for (body, field) in [
        (json!({"sampling_params": {}}), "text"),
        (json!({"text": ""}), "text"),
        (
            json!({"text": "x", "sampling_params": {"temperature": -1}}),
            "sampling_params.temperature",
        ),
        (json!({"text": "x", "sampling_params": {"max_new_tokens": 4_000}}), "text"),
        (json!({"text": "x", "sampling_params": {"ebnf": "a"}}), "sampling_params.ebnf"),
        (json!({"text": "x", "lora_path": "a"}), "lora_path"),
    ] {
        let reply = post(server.address, "/generate", &body);
        assert_eq!((reply.status, param(&reply).as_str()), (400, field), "{body}");
    }
    let unknown = json!({"text": "x", "conversation_id": "a", "sampling_params": {"max_new_tokens": 1, "what": 1}});
    let reply = post(server.address, "/generate", &unknown);
    assert_eq!(
        reply.header("x-hadron-ignored-fields"),
        Some("conversation_id, sampling_params.what")
    );
}

#[test]
fn model_and_server_info_have_the_names_of_sglang() {
    let server = TestServer::start(&ServerSetup::default());
    let info = get(server.address, "/get_model_info").json();
    assert_eq!(info, get(server.address, "/model_info").json());
    assert_eq!((&info["is_generation"], info["model_path"].is_string()), (&json!(true), true));
    let info = get(server.address, "/get_server_info");
    assert_eq!((info.status, info.json()), (200, get(server.address, "/server_info").json()));
}

#[test]
fn health_generate_runs_the_engine() {
    let server = TestServer::start(&ServerSetup::default());
    let generated = || -> u64 {
        server.client().replica_stats().iter().map(|stats| stats.generated_tokens_total).sum()
    };
    let before = generated();
    assert_eq!(get(server.address, "/health_generate").status, 200);
    // The statistics of a step may be published after its tokens.
    let replied_at = Instant::now();
    while generated() <= before {
        assert!(replied_at.elapsed() < Duration::from_secs(20), "no token was generated");
        std::thread::sleep(Duration::from_millis(1));
    }
    let failing = TestServer::start(&ServerSetup { fails_at: Some(1), ..ServerSetup::default() });
    let reply = get(failing.address, "/health_generate");
    assert!(reply.status >= 500, "{}", reply.status);
}

#[test]
fn render_returns_token_ids_without_generating() {
    let server = TestServer::start(&ServerSetup::default());
    let messages = json!([{"role": "user", "content": "hi"}]);
    let chat = json!({"messages": messages, "max_tokens": 3, "temperature": 0.5, "stop": "x"});
    let rendered = post(server.address, "/v1/chat/completions/render", &chat).json();
    let tokens = post(server.address, "/tokenize", &json!({"messages": messages})).json();
    assert_eq!(rendered["token_ids"], tokens["tokens"]);
    assert!(rendered["request_id"].as_str().unwrap().starts_with("chatcmpl-"));
    let sampling = &rendered["sampling_params"];
    assert_eq!(
        (&sampling["max_tokens"], &sampling["temperature"], &sampling["stop"]),
        (&json!(3), &json!(0.5), &json!(["x"]))
    );
    let text = json!({"prompt": ["a", "bc"], "max_tokens": 2});
    let rendered = post(server.address, "/v1/completions/render", &text).json();
    for (object, prompt) in rendered.as_array().unwrap().iter().zip(["a", "bc"]) {
        let tokens = post(server.address, "/tokenize", &json!({"prompt": prompt})).json();
        assert_eq!(object["token_ids"], tokens["tokens"]);
    }
    let reply = post(server.address, "/v1/chat/completions/render", &json!({"messages": 1}));
    assert_eq!((reply.status, param(&reply).as_str()), (400, "messages"));
    assert_eq!(server.client().requests_in_flight(), 0);
}

#[test]
fn docs_page_is_static() {
    let server = TestServer::start(&ServerSetup::default());
    let reply = get(server.address, "/docs");
    let page = String::from_utf8_lossy(&reply.body).into_owned();
    assert_eq!(reply.header("content-type"), Some("text/html; charset=utf-8"));
    assert!(page.contains("<code>/v1/chat/completions</code>") && !page.contains("<script"));
}
