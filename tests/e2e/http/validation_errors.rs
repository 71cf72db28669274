//! Every validation error of request fields: status, reason, and parameter name.

use crate::http_client::{HttpClient, HttpReply, get, post};
use crate::test_server::{ServerSetup, TestServer};
use serde_json::{Value, json};
use server::ServerOptions;

/// An invalid request: the fields added to a valid body, and the expected `param` and `reason` of the error.
type ValidationCase = (Value, &'static str, &'static str);

const VALUE: &str = "invalid_value";
const FIELD: &str = "unsupported_field";
const LONG: &str = "context_length_exceeded";
const GRAMMAR: &str = "invalid_grammar";

/// Returns invalid requests for the fields that `/v1/completions` and `/v1/chat/completions` have in common.
fn shared() -> Vec<ValidationCase> {
    [lengths_and_sampling(), stops_and_biases(), delivery_and_routing(), unsupported()].concat()
}

fn lengths_and_sampling() -> Vec<ValidationCase> {
    vec![
        (json!({"model": 7}), "model", VALUE),
        (json!({"max_tokens": 0}), "max_tokens", VALUE),
        (json!({"max_tokens": -1}), "max_tokens", VALUE),
        (json!({"max_tokens": "8"}), "max_tokens", VALUE),
        (json!({"max_tokens": 1.5}), "max_tokens", VALUE),
        (json!({"max_completion_tokens": 0}), "max_completion_tokens", VALUE),
        (json!({"n": 5.5}), "n", VALUE),
        (json!({"n": -1.0}), "n", VALUE),
        (json!({"max_tokens": u64::MAX}), "max_tokens", VALUE),
        (json!({"min_tokens": 9, "max_tokens": 8}), "min_tokens", VALUE),
        // A `min_tokens` of 4097 is invalid even if the request sets no `max_tokens`, because the default
        // maximum applies.
        (json!({"min_tokens": 4097}), "min_tokens", VALUE),
        (json!({"temperature": -0.1}), "temperature", VALUE),
        (json!({"temperature": 2.1}), "temperature", VALUE),
        (json!({"temperature": true}), "temperature", VALUE),
        (json!({"top_p": 0}), "top_p", VALUE),
        (json!({"top_p": 1.01}), "top_p", VALUE),
        (json!({"min_p": 1.5}), "min_p", VALUE),
        (json!({"top_k": -2}), "top_k", VALUE),
        (json!({"presence_penalty": 2.5}), "presence_penalty", VALUE),
        (json!({"frequency_penalty": -2.5}), "frequency_penalty", VALUE),
        (json!({"repetition_penalty": 0}), "repetition_penalty", VALUE),
        (json!({"seed": 1e30}), "seed", VALUE),
        (json!({"n": 0}), "n", VALUE),
        (json!({"n": 129}), "n", VALUE),
    ]
}

fn stops_and_biases() -> Vec<ValidationCase> {
    let long = "x".repeat(300);
    vec![
        (json!({"stop": 7}), "stop", VALUE),
        (json!({"stop": ["", "a"]}), "stop[0]", VALUE),
        (json!({"stop": [1]}), "stop[0]", VALUE),
        (json!({"stop": vec!["a"; 17]}), "stop", VALUE),
        (json!({"stop": [long]}), "stop[0]", VALUE),
        (json!({"stop_token_ids": [320]}), "stop_token_ids[0]", VALUE),
        (json!({"stop_token_ids": vec![1; 129]}), "stop_token_ids", VALUE),
        (json!({"ignore_eos": 1}), "ignore_eos", VALUE),
        (json!({"skip_special_tokens": "no"}), "skip_special_tokens", VALUE),
        (json!({"logit_bias": {"320": 1}}), "logit_bias", VALUE),
        (json!({"logit_bias": {"a": 1}}), "logit_bias", VALUE),
        (json!({"logit_bias": {"7": "x"}}), "logit_bias.7", VALUE),
        (json!({"logit_bias": {"7": 1, "07": 1}}), "logit_bias", VALUE),
        (json!({"logit_bias": []}), "logit_bias", VALUE),
        (json!({"allowed_token_ids": []}), "allowed_token_ids", VALUE),
        (json!({"allowed_token_ids": [-1]}), "allowed_token_ids[0]", VALUE),
        (json!({"bad_words": [""]}), "bad_words[0]", VALUE),
    ]
}

fn delivery_and_routing() -> Vec<ValidationCase> {
    vec![
        (json!({"prompt_logprobs": 21}), "prompt_logprobs", VALUE),
        (json!({"prompt_logprobs": -1}), "prompt_logprobs", VALUE),
        (json!({"prompt_logprobs": 1, "stream": true}), "prompt_logprobs", VALUE),
        (json!({"stream_options": {"include_usage": true}}), "stream_options", VALUE),
        (
            json!({"stream": true, "stream_options": {"include_usage": 1}}),
            "stream_options.include_usage",
            VALUE,
        ),
        (json!({"stream": "yes"}), "stream", VALUE),
        (json!({"stream_interval": 0}), "stream_interval", VALUE),
        (json!({"truncate_prompt_tokens": 0}), "truncate_prompt_tokens", VALUE),
        (json!({"truncate_prompt_tokens": -2}), "truncate_prompt_tokens", VALUE),
        (json!({"truncation_side": "middle"}), "truncation_side", VALUE),
        (json!({"cache_salt": ""}), "cache_salt", VALUE),
        (json!({"cache_salt": "a/b"}), "cache_salt", VALUE),
        (json!({"cache_salt": "a", "extra_key": "b"}), "extra_key", VALUE),
        (json!({"extra_key": "a/b"}), "extra_key", VALUE),
        (json!({"extra_key": 1}), "extra_key", VALUE),
        (json!({"rid": "sp ace"}), "rid", VALUE),
        (json!({"request_id": 7}), "request_id", VALUE),
        (json!({"session_id": ""}), "session_id", VALUE),
        (json!({"stop_token_ids": [1.5]}), "stop_token_ids[0]", VALUE),
        (json!({"request_id": "sp ace"}), "request_id", VALUE),
        (json!({"priority": 1}), "priority", VALUE),
        (json!({"data_parallel_rank": 1}), "data_parallel_rank", VALUE),
        (json!({"return_token_ids": 1}), "return_token_ids", VALUE),
    ]
}

fn unsupported() -> Vec<ValidationCase> {
    vec![
        (json!({"use_beam_search": true}), "use_beam_search", FIELD),
        (json!({"n": 2, "best_of": 3}), "best_of", FIELD),
        (json!({"prompt_embeds": "AAAA"}), "prompt_embeds", FIELD),
        (json!({"guided_json": {}}), "guided_json", FIELD),
        (json!({"guided_whatever": 1}), "guided_whatever", FIELD),
        (json!({"structured_outputs": {"regex": "a", "x": 1}}), "structured_outputs.x", FIELD),
        (
            json!({"structured_outputs": {"structural_tag": {}}}),
            "structured_outputs.structural_tag.structures",
            FIELD,
        ),
        (json!({"structured_outputs": {}}), "structured_outputs", VALUE),
        (json!({"regex": "(a+"}), "regex", GRAMMAR),
        (json!({"json_schema": "{\"not\": {}}"}), "json_schema", GRAMMAR),
        (json!({"ebnf": "x"}), "ebnf", FIELD),
        (json!({"response_format": {"type": "grammar"}}), "response_format.type", FIELD),
        (
            json!({"response_format": {"type": "json_object", "strict": true}}),
            "response_format.strict",
            FIELD,
        ),
        (json!({"response_format": {}}), "response_format.type", VALUE),
        (json!({"kv_transfer_params": {}}), "kv_transfer_params", FIELD),
        (json!({"thinking_token_budget": 5}), "thinking_token_budget", FIELD),
    ]
}

fn check(reply: &HttpReply, status: u16, param: &Value, reason: &str, what: &str) {
    let body = reply.json();
    assert_eq!(reply.status, status, "{what}: {body}");
    let error = &body["error"];
    assert_eq!(
        (&error["param"], error["reason"].as_str()),
        (param, Some(reason)),
        "{what}: {body}"
    );
    if reason == LONG {
        assert_eq!(error["code"], reason, "{what}");
    } else {
        assert_eq!(error["code"], status, "{what}");
    }
    assert!(error["type"].as_str().is_some_and(|kind| kind.ends_with("Error")), "{what}");
    let message = error["message"].as_str().unwrap();
    assert!(!message.is_empty() && !message.contains("src/") && !message.contains("panicked"));
    // The message must name the parameter, because many clients show the message only. Messages about the
    // context length have the text of OpenAI's API.
    let starts_as_openai =
        message.starts_with("This model's maximum context length is 4096 tokens. ");
    assert_eq!(starts_as_openai, reason == LONG, "{what}: {message}");
    assert!(
        starts_as_openai || message.contains(param.as_str().unwrap_or_default()),
        "{what}: {message}"
    );
}

fn assert_rejected(client: &mut HttpClient, path: &str, base: &Value, cases: Vec<ValidationCase>) {
    for (extra, param, reason) in cases {
        let mut body = base.clone();
        body.as_object_mut().unwrap().extend(extra.as_object().unwrap().clone());
        let reply = client.post(path, &body);
        let param = Value::from(Some(param).filter(|p| !p.is_empty()));
        check(&reply, 400, &param, reason, &extra.to_string());
    }
}

#[test]
fn completion_fields_are_validated() {
    let server = TestServer::start(&ServerSetup::default());
    let mut client = HttpClient::connect(server.address);
    let base = json!({"prompt": "hello"});
    assert_rejected(&mut client, "/v1/completions", &base, shared());
    let cases = vec![
        (json!({"prompt": null}), "prompt", VALUE),
        (json!({"prompt": ""}), "prompt", VALUE),
        (json!({"prompt": []}), "prompt", VALUE),
        (json!({"prompt": [""]}), "prompt[0]", VALUE),
        (json!({"prompt": [[]]}), "prompt[0]", VALUE),
        (json!({"prompt": {}}), "prompt", VALUE),
        (json!({"prompt": 5}), "prompt", VALUE),
        (json!({"prompt": [1, "a"]}), "prompt[1]", VALUE),
        (json!({"prompt": [1.5]}), "prompt[0]", VALUE),
        (json!({"prompt": ["a", [1]]}), "prompt", VALUE),
        (json!({"prompt": [1, 320]}), "prompt[1]", VALUE),
        (json!({"prompt": [1, -1]}), "prompt[1]", VALUE),
        (json!({"prompt": [[1], [2, 999]]}), "prompt[1][1]", VALUE),
        (json!({"prompt": vec!["a"; 257]}), "prompt", VALUE),
        (json!({"prompt": vec!["a"; 100], "n": 3}), "n", VALUE),
        (json!({"prompt": vec![65; 4096]}), "prompt", LONG),
        (json!({"max_tokens": 5000}), "prompt", LONG),
        (json!({"suffix": "end"}), "suffix", FIELD),
        (json!({"logprobs": 21}), "logprobs", VALUE),
        (json!({"logprobs": -1}), "logprobs", VALUE),
        (json!({"logprobs": true}), "logprobs", VALUE),
        (json!({"echo": 1}), "echo", VALUE),
    ];
    assert_rejected(&mut client, "/v1/completions", &base, cases);
    let twice = br#"{"prompt":"a","seed":1,"seed":2}"#;
    client.send("POST", "/v1/completions", "", twice);
    check(&client.read().unwrap(), 400, &json!("seed"), VALUE, "twice");
    client.send("POST", "/v1/completions", "", br#"{"prompt":"a","temperature":NaN}"#);
    check(&client.read().unwrap(), 400, &json!("temperature"), VALUE, "NaN");
    client.send("POST", "/v1/completions", "", b"{\"prompt\":\"\xff\xfe\"}");
    check(&client.read().unwrap(), 400, &json!("prompt"), VALUE, "bad UTF-8");
    client.send(
        "POST",
        "/v1/completions",
        "",
        &[b"{\"prompt\":", &b"["[..].repeat(200)[..]].concat(),
    );
    assert_eq!(client.read().unwrap().status, 400, "depth");
    client.send("POST", "/v1/completions", "X-data-parallel-rank: 4\r\n", br#"{"prompt":"a"}"#);
    check(&client.read().unwrap(), 400, &json!("data_parallel_rank"), VALUE, "rank header");
}

#[test]
fn chat_fields_are_validated() {
    let server = TestServer::start(&ServerSetup::default());
    let mut client = HttpClient::connect(server.address);
    let user = json!({"role": "user", "content": "hello"});
    let base = json!({"messages": [user]});
    assert_rejected(&mut client, "/v1/chat/completions", &base, shared());
    let image = json!({"type": "image_url", "image_url": {"url": "http://x"}});
    let cases = vec![
        (json!({"max_tokens": 5000}), "messages", LONG),
        (json!({"max_completion_tokens": 5000}), "messages", LONG),
        (json!({"messages": null}), "messages", VALUE),
        (json!({"messages": []}), "messages", VALUE),
        (json!({"messages": "hi"}), "messages", VALUE),
        (json!({"messages": [7]}), "messages", VALUE),
        (json!({"messages": [user, "x"]}), "messages[1]", VALUE),
        (json!({"messages": [{"content": "x"}]}), "messages[0].role", VALUE),
        (json!({"messages": [{"role": "user"}]}), "messages[0].content", VALUE),
        (json!({"messages": [{"role": "user", "content": 3}]}), "messages[0].content", VALUE),
        (
            json!({"messages": [{"role": "user", "content": [image]}]}),
            "messages[0].content[0]",
            "unsupported_content",
        ),
        (
            json!({"messages": [{"role": "user", "content": [{"type": "text"}]}]}),
            "messages[0].content[0].text",
            VALUE,
        ),
        (json!({"messages": [{"role": "function", "content": "x"}]}), "messages[0].role", FIELD),
        (
            json!({"messages": [{"role": "assistant", "tool_calls": [{}]}]}),
            "messages[0].tool_calls[0].function",
            VALUE,
        ),
        (json!({"messages": vec![user.clone(); 4097]}), "messages", VALUE),
        (json!({"tools": [{"type": "function"}]}), "tools[0].function", VALUE),
        (json!({"tool_choice": "required"}), "tool_choice", VALUE),
        (json!({"logprobs": 1}), "logprobs", VALUE),
        (json!({"top_logprobs": 2}), "top_logprobs", VALUE),
        (json!({"logprobs": true, "top_logprobs": 21}), "top_logprobs", VALUE),
        (
            json!({"add_generation_prompt": true, "continue_final_message": true}),
            "continue_final_message",
            VALUE,
        ),
        (json!({"chat_template": "{{ 1 }}"}), "chat_template", FIELD),
        (json!({"suffix": "end"}), "suffix", FIELD),
        (json!({"chat_template_kwargs": {"messages": 1}}), "chat_template_kwargs.messages", VALUE),
        (json!({"chat_template_kwargs": {"a": "x".repeat(17_000)}}), "chat_template_kwargs", VALUE),
        (json!({"chat_template_kwargs": {"a": vec![1; 3_000]}}), "chat_template_kwargs", VALUE),
        (json!({"chat_template_kwargs": {"a": vec![""; 9_000]}}), "chat_template_kwargs", VALUE),
        (json!({"documents": [1]}), "documents", VALUE),
        (json!({"reasoning_effort": "huge"}), "reasoning_effort", VALUE),
    ];
    assert_rejected(&mut client, "/v1/chat/completions", &base, cases);
    let fine = json!({"messages": [user], "max_tokens": 2, "tools": [], "tool_choice": "none",
        "response_format": {"type": "text"}, "user": "me", "best_of": 1, "temperature": null});
    let reply = client.post("/v1/chat/completions", &fine);
    assert_eq!((reply.status, reply.header("x-hadron-ignored-fields")), (200, Some("user")));
}

#[test]
fn integral_floats_are_accepted_as_integers() {
    let server = TestServer::start(&ServerSetup::default());
    let mut client = HttpClient::connect(server.address);
    let whole =
        json!({"prompt": [65], "max_tokens": 3, "n": 2, "seed": 5, "stop_token_ids": [7, 8]});
    let pointed =
        br#"{"prompt":[65.0],"max_tokens":3.0,"n":2e0,"seed":50.0e-1,"stop_token_ids":[7.0,8]}"#;
    client.send("POST", "/v1/completions", "", pointed);
    let reply = client.read().unwrap();
    assert_eq!(reply.status, 200, "{}", reply.json());
    assert_eq!(client.post("/v1/completions", &whole).json()["choices"], reply.json()["choices"]);
}

#[test]
fn other_endpoints_name_fields_in_errors() {
    let server = TestServer::start(&ServerSetup::default());
    let mut client = HttpClient::connect(server.address);
    let base = json!({"input": "hello"});
    let cases = vec![
        (json!({"max_output_tokens": 5000}), "input", LONG),
        (json!({"max_output_tokens": 2.5}), "max_output_tokens", VALUE),
        (json!({"min_tokens": 9, "max_output_tokens": 8}), "min_tokens", VALUE),
    ];
    assert_rejected(&mut client, "/v1/responses", &base, cases);
}

#[test]
fn routes_models_and_strictness() {
    let options = ServerOptions { strict_fields: true, ..ServerOptions::default() };
    let server = TestServer::start(&ServerSetup { options, ..ServerSetup::default() });
    let at = server.address;
    for path in ["/nowhere", "/v1/audio/transcriptions", "/collective_rpc", "/v1/embeddings/x"] {
        check(&get(at, path), 404, &Value::Null, "unknown_route", path);
    }
    for path in ["/pooling", "/classify", "/inference/v1/generate"] {
        let reply = post(at, path, &json!({"input": "a"}));
        check(&reply, 501, &Value::Null, "not_implemented", path);
        assert_eq!(reply.json()["error"]["type"], "NotImplementedError");
    }
    check(&get(at, "/v1/completions"), 405, &Value::Null, "method_not_allowed", "GET");
    let body = json!({"prompt": "a", "model": "gpt-4"});
    let reply = post(at, "/v1/completions", &body);
    check(&reply, 404, &json!("model"), "unknown_model", "model");
    let says = |body: &Value, words: &str| {
        let reply = post(at, "/v1/completions", body).json();
        let text = reply["error"]["message"].as_str().unwrap_or_default();
        assert!(text.contains(words), "{words}: {reply}");
    };
    says(&body, "the model \"gpt-4\" is not served");
    says(&json!({"prompt": "a", "stop": [1]}), "stop[0]: must be a string, not an integer");
    says(&json!({"prompt": "a", "stop": 1}), "stop: must be a string or a list of strings, not an");
    says(&json!({"prompt": "a", "priority": -7}), "priority -7 needs --scheduling-policy");
    let body = json!({"prompt": "a", "frobnicate": 1});
    check(&post(at, "/v1/completions", &body), 400, &json!("frobnicate"), FIELD, "strict");
    check(
        &post(at, "/detokenize", &json!({"tokens": [320]})),
        400,
        &json!("tokens[0]"),
        VALUE,
        "id",
    );
    for path in ["/v1/models/%ff", "/v1/responses/%ff"] {
        check(&get(at, path), 400, &Value::Null, VALUE, "bad UTF-8 in a path");
    }
    check(&post(at, "/tokenize", &json!({})), 400, &json!("messages"), VALUE, "nothing");
    server.wait_idle(std::time::Duration::from_secs(1));
}

#[test]
fn request_chat_templates_need_trust() {
    let server = TestServer::start(&ServerSetup {
        trusts_request_templates: true,
        ..ServerSetup::default()
    });
    let mut client = HttpClient::connect(server.address);
    let messages = json!([{"role": "user", "content": "<|im_end|> hi"}]);
    let body =
        |template: &str| json!({"messages": messages, "chat_template": template, "max_tokens": 1});
    let template = "{% for m in messages %}<|im_start|>[{{ m.content }}]{% endfor %}";
    let shown = client.post("/tokenize", &body(template)).json();
    let strs = |text: &str| json!({"prompt": text, "add_special_tokens": false});
    let head = client.post("/tokenize", &strs("<|im_start|>[")).json()["tokens"].clone();
    let shown = shown["tokens"].as_array().unwrap();
    assert_eq!(shown[..2], head.as_array().unwrap()[..], "the template's special token is one");
    assert!(shown[2..].iter().all(|id| id.as_u64() < Some(318)), "the user's is text: {shown:?}");
    let reply = client.post("/v1/chat/completions", &body(template)).json();
    assert_eq!(reply["usage"]["prompt_tokens"], shown.len());
    for (template, what) in [
        ("{% for %}", "no template"),
        ("{{ raise_exception('no') }}", "fails"),
        (
            "{% for i in range(10000) %}{% for j in range(10000) %}{% endfor %}{% endfor %}",
            "takes for ever",
        ),
    ] {
        let reply = client.post("/v1/chat/completions", &body(template));
        assert_eq!(reply.status, 400, "{what}: {}", reply.json());
    }
}

#[test]
fn tokenizer_info_is_shown_only_if_enabled() {
    assert_eq!(
        get(TestServer::start(&ServerSetup::default()).address, "/tokenizer_info").status,
        404
    );
    let options = ServerOptions { tokenizer_info: true, ..ServerOptions::default() };
    let server = TestServer::start(&ServerSetup {
        options,
        template: Some("{{ messages }}"),
        ..ServerSetup::default()
    });
    let info = get(server.address, "/tokenizer_info").json();
    assert_eq!(info["eos_token"]["content"], "<|im_end|>");
    assert_eq!(info["tokenizer_class"], "PreTrainedTokenizerFast");
    assert_eq!(info["chat_template"], "{{ messages }}", "the one in force");
}
