//! `/v1/messages`: the Anthropic API, implemented on top of the chat completions code.

use crate::http_client::{HttpClient, HttpReply};
use crate::test_server::{ServerSetup, TestServer};
use serde_json::{Value, json};
use server::{ApiKeys, ServerOptions};
use text::{ReasoningFamily, ToolCallSyntax, partial_arguments};

const PATH: &str = "/v1/messages";
const SCRIPT: &str = "<think>hm</think>I look.\n<tool_call>\n{\"name\": \"weather\", \
    \"arguments\": {\"city\": \"Köln\"}}\n</tool_call>";

fn start() -> TestServer {
    let parsers = (Some(ToolCallSyntax::HERMES), Some(ReasoningFamily::QWEN3));
    TestServer::start(&ServerSetup {
        scripted_output: Some(SCRIPT),
        parsers,
        ..ServerSetup::default()
    })
}

fn body(extra: &Value) -> Value {
    let schema = json!({"type": "object", "properties": {"city": {"type": "string"}}});
    let mut body = json!({"model": "tiny", "max_tokens": 300, "system": "be brief",
        "messages": [{"role": "user", "content": "hi"}],
        "tools": [{"name": "weather", "description": "tells", "input_schema": schema}]});
    body.as_object_mut().unwrap().extend(extra.as_object().unwrap().clone());
    body
}

/// SSE events of a stream, each with its event name.
pub(super) fn events(reply: &HttpReply) -> Vec<(String, Value)> {
    let text = std::str::from_utf8(&reply.body).unwrap();
    let event = |block: &str| {
        let (name, data) = block.split_once('\n').unwrap();
        let name = name.strip_prefix("event: ").unwrap().to_owned();
        (name, serde_json::from_str(data.strip_prefix("data: ").unwrap()).unwrap())
    };
    text.split_terminator("\n\n").map(event).collect()
}

#[test]
fn message_blocks_are_equal_unary_and_streamed() {
    let server = start();
    let mut client = HttpClient::connect(server.address);
    let reply = client.post(PATH, &body(&json!({}))).json();
    assert_eq!((&reply["type"], &reply["role"]), (&json!("message"), &json!("assistant")));
    assert!(reply["id"].as_str().unwrap().starts_with("msg_"));
    let blocks = reply["content"].as_array().unwrap();
    assert_eq!(blocks[0], json!({"type": "thinking", "thinking": "hm", "signature": ""}));
    assert_eq!(blocks[1], json!({"type": "text", "text": "I look."}));
    assert_eq!(
        (&blocks[2]["name"], &blocks[2]["input"]),
        (&json!("weather"), &json!({"city": "Köln"}))
    );
    assert_eq!(
        (&reply["stop_reason"], &reply["stop_sequence"]),
        (&json!("tool_use"), &Value::Null)
    );
    let usage = &reply["usage"];
    assert!(usage["input_tokens"].as_u64().unwrap() > 5);
    assert_eq!(usage["output_tokens"], SCRIPT.len() + 1);

    let streamed = events(&client.post(PATH, &body(&json!({"stream": true}))));
    for (name, event) in &streamed {
        assert_eq!(event["type"], *name);
    }
    let mut names: Vec<&str> = streamed.iter().map(|(name, _)| name.as_str()).collect();
    names.dedup();
    let block = ["content_block_start", "content_block_delta", "content_block_stop"];
    let expected = [&["message_start", "ping"][..], &block, &block, &block];
    let expected = [expected.concat(), vec!["message_delta", "message_stop"]].concat();
    assert_eq!(names, expected);
    let part = |key: &str| -> String {
        streamed.iter().filter_map(|(_, event)| event["delta"][key].as_str()).collect()
    };
    assert_eq!((part("thinking"), part("text")), ("hm".to_owned(), "I look.".to_owned()));
    assert_eq!(part("partial_json"), "{\"city\": \"Köln\"}");
    assert_eq!(part("stop_reason"), "tool_use");
    server.wait_idle(std::time::Duration::from_secs(1));
}

/// Output with text before, between and after tool calls.
pub(super) const TEXT_AROUND_CALLS: &str = "First.\n<tool_call>\n{\"name\": \"weather\", \
    \"arguments\": {\"city\": \"Köln\"}}\n</tool_call>\nThen.\n<tool_call>\n{\"name\": \"weather\", \
    \"arguments\": {}}\n</tool_call>\nDone.";

/// Returns the content blocks of a stream, without ids.
fn streamed_blocks<'a>(events: impl Iterator<Item = &'a Value>) -> Vec<Value> {
    let mut blocks: Vec<Value> = Vec::new();
    let mut input = String::new();
    for event in events {
        match event["type"].as_str().unwrap() {
            "content_block_start" => blocks.push(event["content_block"].clone()),
            "content_block_delta" => {
                let delta = &event["delta"];
                input += delta["partial_json"].as_str().unwrap_or_default();
                if let Some(more) = delta["text"].as_str() {
                    let text = &mut blocks.last_mut().unwrap()["text"];
                    *text = json!(text.as_str().unwrap().to_owned() + more);
                }
            }
            "content_block_stop" if !input.is_empty() => {
                let parsed: Value = serde_json::from_str(&std::mem::take(&mut input)).unwrap();
                blocks.last_mut().unwrap()["input"] = parsed;
            }
            _ => {}
        }
    }
    without_block_ids(blocks)
}

fn without_block_ids(mut blocks: Vec<Value>) -> Vec<Value> {
    for block in &mut blocks {
        block.as_object_mut().unwrap().remove("id");
    }
    blocks
}

#[test]
fn text_around_tool_uses_keeps_its_place() {
    let parsers = (Some(ToolCallSyntax::HERMES), None);
    let scripted_output = Some(TEXT_AROUND_CALLS);
    let server =
        TestServer::start(&ServerSetup { scripted_output, parsers, ..ServerSetup::default() });
    let mut client = HttpClient::connect(server.address);
    let whole = client.post(PATH, &body(&json!({}))).json();
    let blocks = without_block_ids(whole["content"].as_array().unwrap().clone());
    let kinds: Vec<&str> = blocks.iter().map(|block| block["type"].as_str().unwrap()).collect();
    assert_eq!(kinds, ["text", "tool_use", "text", "tool_use", "text"], "{blocks:?}");
    let streamed = events(&client.post(PATH, &body(&json!({"stream": true}))));
    assert_eq!(streamed_blocks(streamed.iter().map(|(_, event)| event)), blocks);
}

#[test]
fn stops_lengths_and_counts() {
    let server = start();
    let mut client = HttpClient::connect(server.address);
    let stopped = client.post(PATH, &body(&json!({"stop_sequences": ["look"]}))).json();
    assert_eq!(stopped["stop_reason"], "stop_sequence");
    assert_eq!(stopped["stop_sequence"], "look");
    assert_eq!(stopped["content"][1]["text"], "I ");
    let cut = client.post(PATH, &body(&json!({"max_tokens": 3}))).json();
    assert_eq!(cut["stop_reason"], "max_tokens");
    let count = client.post("/v1/messages/count_tokens", &body(&json!({}))).json();
    assert_eq!(
        count["input_tokens"],
        cut["usage"]["input_tokens"].as_u64().unwrap()
            + cut["usage"]["cache_read_input_tokens"].as_u64().unwrap()
    );
}

/// A unary reply and the joined deltas of a stream contain the same tool input.
#[test]
fn truncated_tool_use_is_equal_unary_and_streamed() {
    const SCRIPT: &str = "<tool_call>\n{\"name\": \"weather\", \"arguments\": \
        {\"city\": \"Köln\", \"days\": [1, 2], \"note\": \"long\"}}\n</tool_call>";
    let parsers = (Some(ToolCallSyntax::HERMES), None);
    let server = TestServer::start(&ServerSetup {
        scripted_output: Some(SCRIPT),
        parsers,
        ..ServerSetup::default()
    });
    let mut client = HttpClient::connect(server.address);
    // With this `max_tokens`, the output ends inside a string of the tool input, because each byte is one
    // token.
    let max_tokens = SCRIPT.find("ng\"}}").unwrap();
    let whole = client.post(PATH, &body(&json!({"max_tokens": max_tokens}))).json();
    assert_eq!(whole["stop_reason"], "max_tokens");
    let block = &whole["content"][0];
    assert_eq!((&block["type"], &block["name"]), (&json!("tool_use"), &json!("weather")));
    assert_eq!(block["input"], json!({"city": "Köln", "days": [1, 2]}));
    let asked = body(&json!({"max_tokens": max_tokens, "stream": true}));
    let streamed = events(&client.post(PATH, &asked));
    let parts = streamed.iter().filter_map(|(_, event)| event["delta"]["partial_json"].as_str());
    let parts: String = parts.collect();
    assert_eq!(parts, "{\"city\": \"Köln\", \"days\": [1, 2], \"note\": \"lo");
    let parsed: Value = serde_json::from_str(&partial_arguments(&parts)).unwrap();
    assert_eq!(parsed, block["input"]);
}

#[test]
fn blocks_reach_the_template() {
    const TEMPLATE: &str = "{% for m in messages %}<{{ m.role }}>{{ m.content }}\
        {{ m.reasoning_content }}{% for c in m.tool_calls or [] %}{{ c.function.arguments.city }}\
        {% endfor %}{{ m.tool_call_id }}{% endfor %}{% if add_generation_prompt %}>{% endif %}";
    let setup = ServerSetup {
        scripted_output: Some("x"),
        template: Some(TEMPLATE),
        ..ServerSetup::default()
    };
    let server = TestServer::start(&setup);
    let mut client = HttpClient::connect(server.address);
    let messages = json!([
        {"role": "user", "content": [{"type": "text", "text": "a"}, {"type": "text", "text": "b"}]},
        {"role": "assistant", "content": [
            {"type": "thinking", "thinking": "hm", "signature": ""},
            {"type": "text", "text": "I look."},
            {"type": "tool_use", "id": "t1", "name": "weather", "input": {"city": "Bonn"}}]},
        {"role": "user", "content": [
            {"type": "tool_result", "tool_use_id": "t1", "content": [{"type": "text", "text": "rain"}]},
            {"type": "text", "text": "and?"}]},
    ]);
    let system = json!([{"type": "text", "text": "S", "cache_control": {"type": "ephemeral"}}]);
    let expected = "<system>S<user>a\nb<assistant>I look.hmBonn<tool>raint1<user>and?>";
    let asked = body(&json!({"messages": messages, "system": system}));
    let count = client.post("/v1/messages/count_tokens", &asked).json();
    let ids = client.post("/tokenize", &json!({"prompt": expected, "add_special_tokens": false}));
    assert_eq!(count["input_tokens"], ids.json()["count"]);
    // The output continues the last assistant message.
    let begun = json!([{"role": "user", "content": "a"}, {"role": "assistant", "content": "The"}]);
    let asked = body(&json!({"messages": begun, "system": "S"}));
    let count = client.post("/v1/messages/count_tokens", &asked).json();
    let text = json!({"prompt": "<system>S<user>a<assistant>The", "add_special_tokens": false});
    assert_eq!(count["input_tokens"], client.post("/tokenize", &text).json()["count"]);
}

#[test]
fn output_follows_its_json_schema() {
    let server = TestServer::start(&ServerSetup::default());
    let mut client = HttpClient::connect(server.address);
    let schema = json!({"type": "object", "properties": {"a": {"enum": ["yes", "no"]}},
        "required": ["a"], "additionalProperties": false});
    let format = json!({"type": "json_schema", "schema": schema});
    let config = json!({"effort": "max", "format": format});
    let asked = body(&json!({"tools": null, "output_config": config}));
    let reply = client.post(PATH, &asked).json();
    let text = reply["content"][0]["text"].as_str().unwrap_or_else(|| panic!("{reply}"));
    let answer: Value = serde_json::from_str(text).unwrap();
    assert!(answer["a"] == "yes" || answer["a"] == "no", "{reply}");
    let twice = json!({"tools": null, "output_config": config, "regex": "a"});
    let reply = client.post(PATH, &body(&twice));
    assert_eq!(reply.status, 400);
    let told = reply.json()["error"]["message"].clone();
    assert!(
        told.as_str().unwrap().contains("the request already has another constraint"),
        "{told}"
    );
}

#[test]
fn errors_have_anthropic_shape() {
    let bare = json!({"type": "json_schema"});
    let server = start();
    let mut client = HttpClient::connect(server.address);
    let image = json!([{"role": "user", "content": [{"type": "image", "source": {}}]}]);
    let result = json!([{"role": "assistant", "content": [{"type": "tool_result"}]}]);
    let cases = [
        (json!({"max_tokens": null}), "max_tokens"),
        (json!({"messages": []}), "messages"),
        (json!({"messages": image}), "messages[0].content[0]"),
        (json!({"messages": result}), "messages[0].content[0]"),
        (json!({"messages": [{"role": "tool", "content": "x"}]}), "messages[0].role"),
        (json!({"thinking": {"type": "enabled", "budget_tokens": -9}}), "thinking.budget_tokens"),
        (json!({"thinking": {"type": "disabled", "budget_tokens": 9}}), "thinking.budget_tokens"),
        (json!({"tools": [{"type": "bash", "name": "bash"}]}), "tools[0].type"),
        (json!({"tool_choice": {"type": "tool", "name": "other"}}), "tool_choice"),
        (json!({"temperature": 1.1}), "temperature"),
        (json!({"stop_sequences": vec!["x"; 129]}), "stop_sequences"),
        (json!({"stop_sequences": ["x".repeat(1_025)]}), "stop_sequences[0]"),
        (json!({"n": 2}), "n"),
        (json!({"thread": {"type": "create"}}), "thread"),
        (json!({"output_config": {"effort": "utmost"}}), "output_config.effort"),
        (json!({"output_config": {"format": {"type": "text"}}}), "output_config.format.type"),
        (json!({"output_config": {"format": bare}}), "output_config.format.schema"),
    ];
    for (extra, field) in cases {
        let reply = client.post(PATH, &body(&extra));
        assert_eq!(reply.status, 400, "{extra}");
        let error = reply.json();
        assert_eq!(
            (&error["type"], &error["error"]["type"]),
            (&json!("error"), &json!("invalid_request_error"))
        );
        let message = error["error"]["message"].as_str().unwrap();
        assert!(message.starts_with(&format!("{field}: ")), "{extra}: {message}");
    }
    let unknown = client.post(PATH, &body(&json!({"model": "gpt"})));
    assert_eq!(
        (unknown.status, &unknown.json()["error"]["type"]),
        (404, &json!("not_found_error"))
    );
}

/// The limits of Anthropic's API are not those of OpenAI's API.
#[test]
fn limits_are_those_of_anthropic() {
    let server = start();
    let mut client = HttpClient::connect(server.address);
    let turn = |index: usize| json!({"role": if index.is_multiple_of(2) { "user" } else { "assistant" }, "content": "a"});
    let messages = |count: usize| (0..count).map(turn).collect::<Value>();
    let many = client.post("/v1/messages/count_tokens", &json!({"messages": messages(5_001)}));
    assert_eq!(many.status, 200, "{}", many.json());
    assert!(many.json()["input_tokens"].as_u64().unwrap() > 5_000);
    let too_many = client.post(PATH, &body(&json!({"messages": messages(100_001)})));
    assert_eq!(too_many.status, 400);
    let mut stops: Vec<String> = (0..127).map(|index| format!("stop{index}")).collect();
    stops.push("look".to_owned());
    let stopped = client.post(PATH, &body(&json!({"stop_sequences": stops, "temperature": 1})));
    assert_eq!(stopped.json()["stop_sequence"], "look");
    let chat = json!({"messages": messages(1), "temperature": 2, "max_tokens": 1});
    assert_eq!(client.post("/v1/chat/completions", &chat).status, 200);
}

#[test]
fn early_errors_have_anthropic_shape() {
    let options = ServerOptions { api_keys: ApiKeys::new(["one"], []), ..ServerOptions::default() };
    let server = TestServer::start(&ServerSetup {
        options,
        body_bytes_max: 1_000,
        ..ServerSetup::default()
    });
    let key = "x-api-key: one\r\n";
    let many: String =
        (0..70).flat_map(|i| ["X-".into(), i.to_string(), ": 1\r\n".into()]).collect();
    let cases = [
        ("POST", PATH, "", 2, 401, "authentication_error"),
        ("POST", PATH, "x-api-key: two\r\n", 2, 401, "authentication_error"),
        ("POST", "/v1/messages/count_tokens", "", 2, 401, "authentication_error"),
        ("GET", PATH, key, 0, 405, "invalid_request_error"),
        ("POST", "/v1/messages/batches", key, 2, 404, "not_found_error"),
        ("POST", PATH, key, 2_000, 413, "request_too_large"),
        (
            "POST",
            PATH,
            "x-api-key: one\r\nContent-Type: text/plain\r\n",
            2,
            415,
            "invalid_request_error",
        ),
        ("POST", PATH, &many, 2, 431, "invalid_request_error"),
        ("POST", PATH, key, 1, 400, "invalid_request_error"),
    ];
    for (method, path, headers, bytes, status, kind) in cases {
        let mut client = HttpClient::connect(server.address);
        client.send(method, path, headers, &b"{}".repeat(1_000)[..bytes]);
        let reply = client.read().unwrap();
        let error = reply.json();
        assert_eq!(reply.status, status, "{method} {path} {headers:.40}: {error}");
        assert_eq!(error["type"], "error", "{error}");
        assert_eq!(error["error"]["type"], kind, "{error}");
        assert!(!error["error"]["message"].as_str().unwrap().is_empty(), "{error}");
        assert_eq!(error["error"].as_object().unwrap().len(), 2, "{error}");
    }
    // A request head that the HTTP library cannot parse gets an error in Anthropic's format.
    let mut client = HttpClient::connect(server.address);
    let head = format!("POST {PATH} HTTP/1.1\r\nno colon\r\n\r\n");
    client.send_raw(head.as_bytes()).unwrap();
    let error = client.read().unwrap().json();
    assert_eq!(
        (&error["type"], &error["error"]["type"]),
        (&json!("error"), &json!("invalid_request_error"))
    );
    // Paths that only start with `/v1/messages` get errors in OpenAI's format.
    let mut client = HttpClient::connect(server.address);
    client.send("GET", "/v1/messagesx", key, b"");
    assert_eq!(client.read().unwrap().json()["error"]["reason"], "unknown_route");
}
