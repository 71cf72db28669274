//! `/v1/responses`: output items, stream events, and stored responses.

use super::anthropic::TEXT_AROUND_CALLS;
use crate::http_client::{HttpClient, HttpReply};
use crate::test_server::{ServerSetup, TestServer};
use serde_json::{Value, json};
use server::{ApiKeys, ServerOptions};
use std::time::{Duration, Instant};
use text::{ReasoningFamily, ToolCallSyntax};

const PATH: &str = "/v1/responses";
const SCRIPT: &str = "<think>hm</think>I look.\n<tool_call>\n{\"name\": \"weather\", \
    \"arguments\": {\"city\": \"Köln\"}}\n</tool_call>";

fn setup(script: &'static str) -> ServerSetup {
    let parsers = (Some(ToolCallSyntax::HERMES), Some(ReasoningFamily::QWEN3));
    ServerSetup { scripted_output: Some(script), parsers, ..ServerSetup::default() }
}

fn body(extra: &Value) -> Value {
    let schema = json!({"type": "object", "properties": {"city": {"type": "string"}}});
    let mut body = json!({"model": "tiny", "input": "hi", "instructions": "be brief",
        "max_output_tokens": 300, "metadata": {"k": "v"},
        "tools": [{"type": "function", "name": "weather", "parameters": schema}]});
    body.as_object_mut().unwrap().extend(extra.as_object().unwrap().clone());
    body
}

pub(super) fn events(reply: &HttpReply) -> Vec<Value> {
    let text = std::str::from_utf8(&reply.body).unwrap();
    let event = |block: &str| {
        let (name, data) = block.split_once('\n').unwrap();
        let value: Value = serde_json::from_str(data.strip_prefix("data: ").unwrap()).unwrap();
        assert_eq!(name.strip_prefix("event: "), value["type"].as_str());
        value
    };
    text.split_terminator("\n\n").map(event).collect()
}

fn get(client: &mut HttpClient, id: &str) -> HttpReply {
    client.send("GET", &format!("{PATH}/{id}"), "", b"");
    client.read().unwrap()
}

/// The output items without their ids, which are new in each response.
pub(super) fn without_ids(mut output: Value) -> Value {
    for item in output.as_array_mut().unwrap() {
        item.as_object_mut().unwrap().retain(|key, _| key != "id" && key != "call_id");
    }
    output
}

#[test]
fn response_items_are_equal_unary_and_streamed() {
    let server = TestServer::start(&setup(SCRIPT));
    let mut client = HttpClient::connect(server.address);
    let reply = client.post(PATH, &body(&json!({}))).json();
    assert_eq!((&reply["object"], &reply["status"]), (&json!("response"), &json!("completed")));
    let text = json!({"type": "output_text", "text": "I look.", "annotations": [], "logprobs": []});
    let thought = json!({"type": "reasoning_text", "text": "hm"});
    let expected = json!([
        {"type": "reasoning", "summary": [], "content": [thought], "status": "completed"},
        {"type": "message", "role": "assistant", "content": [text], "status": "completed"},
        {"type": "function_call", "name": "weather", "arguments": "{\"city\": \"Köln\"}",
            "status": "completed"},
    ]);
    assert_eq!(without_ids(reply["output"].clone()), expected);
    assert_eq!(reply["metadata"], json!({"k": "v"}));
    assert_eq!(reply["usage"]["output_tokens"], SCRIPT.len() + 1);
    let kept = get(&mut client, reply["id"].as_str().unwrap());
    assert_eq!((kept.status, kept.json()), (200, reply));

    let streamed = events(&client.post(PATH, &body(&json!({"stream": true}))));
    let numbers: Vec<u64> =
        streamed.iter().map(|event| event["sequence_number"].as_u64().unwrap()).collect();
    assert!(numbers.iter().copied().eq(0..streamed.len() as u64));
    let mut kinds: Vec<&str> = streamed.iter().map(|e| e["type"].as_str().unwrap()).collect();
    kinds.dedup();
    let part = |kind: &'static str| {
        let text = ["delta", "done"].map(|end| format!("response.{kind}.{end}"));
        let before = ["response.output_item.added", "response.content_part.added"];
        let behind = ["response.content_part.done", "response.output_item.done"];
        [before.map(str::to_owned), text, behind.map(str::to_owned)].concat()
    };
    let call = [
        "output_item.added",
        "function_call_arguments.delta",
        "function_call_arguments.done",
        "output_item.done",
    ]
    .map(|kind| format!("response.{kind}"));
    let start = ["response.created", "response.in_progress"].map(str::to_owned);
    let expected_kinds = [
        &start[..],
        &part("reasoning_text"),
        &part("output_text"),
        &call,
        &["response.completed".to_owned()],
    ]
    .concat();
    assert_eq!(kinds, expected_kinds);
    let last = &streamed.last().unwrap()["response"];
    assert_eq!(without_ids(last["output"].clone()), expected);
    let message: String = streamed
        .iter()
        .filter(|e| e["type"] == "response.output_text.delta")
        .map(|e| e["delta"].as_str().unwrap())
        .collect();
    assert_eq!(message, "I look.");
    assert_eq!(get(&mut client, last["id"].as_str().unwrap()).json(), *last);

    let in_call = client.post(PATH, &body(&json!({"max_output_tokens": 85}))).json();
    assert_eq!(in_call["output"][2]["status"], "incomplete");
    let streamed = json!({"max_output_tokens": 85, "stream": true});
    let streamed = events(&client.post(PATH, &body(&streamed)));
    let last = &streamed.last().unwrap()["response"];
    assert_eq!(without_ids(last["output"].clone()), without_ids(in_call["output"].clone()));

    let cut = client.post(PATH, &body(&json!({"max_output_tokens": 19, "store": false}))).json();
    assert_eq!(cut["status"], "incomplete");
    assert_eq!(cut["incomplete_details"]["reason"], "max_output_tokens");
    assert_eq!(get(&mut client, cut["id"].as_str().unwrap()).status, 404);
}

#[test]
fn text_around_calls_keeps_its_place() {
    let server = TestServer::start(&setup(TEXT_AROUND_CALLS));
    let mut client = HttpClient::connect(server.address);
    let whole = without_ids(client.post(PATH, &body(&json!({}))).json()["output"].clone());
    let items = whole.as_array().unwrap().iter();
    let kinds: Vec<&str> = items.map(|item| item["type"].as_str().unwrap()).collect();
    let expected = ["message", "function_call", "message", "function_call", "message"];
    assert_eq!(kinds, expected, "{whole}");
    let streamed = events(&client.post(PATH, &body(&json!({"stream": true}))));
    let last = &streamed.last().unwrap()["response"];
    assert_eq!(without_ids(last["output"].clone()), whole);
}

#[test]
fn previous_response_id_continues_the_conversation() {
    const TEMPLATE: &str = "{% for m in messages %}<{{ m.role }}>{{ m.content }}\
        {% for c in m.tool_calls or [] %}{{ c.function.arguments.city }}{% endfor %}{% endfor %}";
    let server = TestServer::start(&ServerSetup { template: Some(TEMPLATE), ..setup(SCRIPT) });
    let mut client = HttpClient::connect(server.address);
    let first = client.post(PATH, &body(&json!({}))).json();
    let call_id = first["output"][2]["call_id"].clone();
    let output = json!([{"type": "function_call_output", "call_id": call_id, "output": "rain"}]);
    let next = json!({"previous_response_id": first["id"], "input": output, "instructions": "new"});
    let second = client.post(PATH, &body(&next)).json();
    let prompt = "<system>new<user>hi<assistant>I look.Köln<tool>rain";
    let text = json!({"prompt": prompt, "add_special_tokens": false});
    let count = client.post("/tokenize", &text).json()["count"].clone();
    assert_eq!(second["usage"]["input_tokens"], count);
    assert_eq!(second["previous_response_id"], first["id"]);

    // The same conversation, sent in full instead of by `previous_response_id`.
    let items = [json!({"role": "user", "content": [{"type": "input_text", "text": "hi"}]})];
    let items: Vec<Value> = items
        .into_iter()
        .chain(first["output"].as_array().unwrap().clone())
        .chain(output.as_array().unwrap().clone())
        .collect();
    let whole = client.post(PATH, &body(&json!({"input": items, "instructions": "new"}))).json();
    assert_eq!(whole["usage"]["input_tokens"], count);

    client.send("DELETE", &format!("{PATH}/{}", first["id"].as_str().unwrap()), "", b"");
    assert_eq!(client.read().unwrap().json()["deleted"], true);
    let gone = client.post(PATH, &body(&next));
    assert_eq!(
        (gone.status, &gone.json()["error"]["param"]),
        (404, &json!("previous_response_id"))
    );
}

#[test]
fn background_responses_can_be_fetched_and_cancelled() {
    let slow = ServerSetup { step_time: Duration::from_millis(2), ..setup(SCRIPT) };
    let server = TestServer::start(&slow);
    let mut client = HttpClient::connect(server.address);
    let queued = client.post(PATH, &body(&json!({"background": true}))).json();
    assert_eq!(queued["status"], "queued");
    let id = queued["id"].as_str().unwrap();
    let (start, mut seen) = (Instant::now(), vec![json!("queued")]);
    while seen.last() != Some(&json!("completed")) {
        assert!(start.elapsed() < Duration::from_secs(20), "{seen:?}");
        std::thread::sleep(Duration::from_millis(5));
        seen.push(get(&mut client, id).json()["status"].clone());
        seen.dedup();
    }
    assert_eq!(seen, ["queued", "in_progress", "completed"]);
    let made = get(&mut client, id).json();
    assert_eq!(
        (&made["status"], &made["output"][1]["content"][0]["text"]),
        (&json!("completed"), &json!("I look."))
    );
    let empty = json!({});
    let finished = client.post(&format!("{PATH}/{id}/cancel"), &empty);
    assert_eq!(finished.status, 400);

    let queued = client.post(PATH, &body(&json!({"background": true}))).json();
    let id = queued["id"].as_str().unwrap();
    let cancelled = client.post(&format!("{PATH}/{id}/cancel"), &empty).json();
    assert_eq!(cancelled["status"], "cancelled");
    server.wait_idle(Duration::from_secs(5));
    assert_eq!(get(&mut client, id).json()["status"], "cancelled");
    let again = client.post(&format!("{PATH}/{id}/cancel"), &empty);
    assert_eq!((again.status, &again.json()["status"]), (200, &json!("cancelled")));
    assert_eq!(client.post(&format!("{PATH}/resp_none/cancel"), &empty).status, 404);
}

#[test]
fn structured_text_and_forced_calls() {
    let parsers = (Some(ToolCallSyntax::HERMES), None);
    let server = TestServer::start(&ServerSetup { parsers, ..ServerSetup::default() });
    let mut client = HttpClient::connect(server.address);
    let schema = json!({"enum": ["yes", "no"]});
    let format = json!({"format": {"type": "json_schema", "name": "answer", "schema": schema}});
    let text_only = json!({"text": format, "tool_choice": "none"});
    let reply = client.post(PATH, &body(&text_only)).json();
    let text = reply["output"][0]["content"][0]["text"].as_str().unwrap();
    assert!(["\"yes\"", "\"no\""].contains(&text.trim()), "{reply}");
    assert_eq!(reply["text"], format);
}

#[test]
fn unsupported_fields_are_rejected_by_name() {
    let server = TestServer::start(&setup(SCRIPT));
    let mut client = HttpClient::connect(server.address);
    let cases = [
        (json!({"input": null}), "input"),
        (json!({"input": []}), "input"),
        (
            json!({"input": [{"role": "user", "content": [{"type": "input_image"}]}]}),
            "input[0].content[0]",
        ),
        (
            json!({"input": [{"type": "function_call", "call_id": "a", "name": "f", "arguments": 7}]}),
            "input[0].arguments",
        ),
        (json!({"truncation": "head"}), "truncation"),
        (json!({"include": ["message.output_text.logprobs"]}), "include"),
        (json!({"max_tool_calls": 0}), "max_tool_calls"),
        (json!({"text": {"verbosity": "huge"}}), "text.verbosity"),
        (json!({"reasoning": {"summary": "none"}}), "reasoning.summary"),
        (json!({"metadata": {"k": 1}}), "metadata"),
        (json!({"prompt": {"id": "p"}}), "prompt"),
        (json!({"conversation": 7}), "conversation"),
        (json!({"conversation": {}}), "conversation.id"),
        (json!({"text": {"format": {"type": "xml"}}}), "text.format.type"),
        (json!({"reasoning": {"effort": "huge"}}), "reasoning.effort"),
        (json!({"background": true, "stream": true}), "stream"),
        (json!({"background": true, "store": false}), "background"),
        (json!({"n": 2}), "n"),
    ];
    for (extra, param) in cases {
        let reply = client.post(PATH, &body(&extra));
        assert_eq!(reply.status, 400, "{extra}");
        assert_eq!(reply.json()["error"]["param"], param, "{extra}");
    }
    assert_eq!(get(&mut client, "resp_none").status, 404);
}

#[test]
fn stored_responses_are_private_to_their_api_key() {
    let keys = ApiKeys::new(["one", "two"], ["root"]);
    let options = ServerOptions { api_keys: keys, ..ServerOptions::default() };
    let server = TestServer::start(&ServerSetup { options, ..setup(SCRIPT) });
    let mut client = HttpClient::connect(server.address);
    let mut send = |method: &str, path: &str, key: &str, body: &Value| {
        let text = if method == "GET" { String::new() } else { body.to_string() };
        client.send(method, path, &format!("Authorization: Bearer {key}\r\n"), text.as_bytes());
        client.read().unwrap()
    };
    let made = send("POST", PATH, "one", &body(&json!({}))).json();
    let one = format!("{PATH}/{}", made["id"].as_str().unwrap());
    let next = body(&json!({"previous_response_id": made["id"]}));
    for other in ["two", "root"] {
        for (method, path) in [("GET", &one), ("DELETE", &one), ("POST", &format!("{one}/cancel"))]
        {
            let reply = send(method, path, other, &json!({}));
            let reason = reply.json()["error"]["reason"].clone();
            assert_eq!((reply.status, reason), (404, json!("unknown_response")), "{method}");
        }
        assert_eq!(send("POST", PATH, other, &next).status, 404);
    }
    assert_eq!(send("GET", &one, "one", &json!({})).json(), made);
    assert_eq!(send("POST", PATH, "one", &next).status, 200);
}
