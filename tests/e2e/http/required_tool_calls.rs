//! Required tool calls: the grammar forces a tool call, whatever tokens the mock executor (hash model) would
//! generate without the grammar.

use crate::http_client::{HttpClient, post};
use crate::test_server::{ServerSetup, TestServer};
use serde_json::{Value, json};
use text::{ReasoningFamily, ToolCallSyntax};

const CHAT: &str = "/v1/chat/completions";

fn tools() -> Value {
    let weather = json!({"type": "object", "additionalProperties": false, "required": ["city"],
        "properties": {"city": {"enum": ["Bonn", "Rome"]}, "days": {"$ref": "#/$defs/days"}},
        "$defs": {"days": {"type": "integer", "minimum": 1, "maximum": 9}}});
    let time = json!({"type": "object", "additionalProperties": false, "properties": {}});
    let tool = |name: &str, parameters: Value| json!({"type": "function", "function": {"name": name, "parameters": parameters}});
    json!([tool("weather", weather), tool("mcp/clock.now:2", time)])
}

fn body(choice: &Value, seed: u64) -> Value {
    json!({"messages": [{"role": "user", "content": "hi"}], "tools": tools(), "seed": seed,
        "tool_choice": choice, "parallel_tool_calls": false, "max_tokens": 600})
}

#[test]
fn required_tool_choice_works_for_every_parser() {
    for syntax in ToolCallSyntax::all() {
        let server = TestServer::start(&ServerSetup {
            parsers: (Some(syntax), None),
            ..ServerSetup::default()
        });
        let mut client = HttpClient::connect(server.address);
        let named = |name: &str| json!({"type": "function", "function": {"name": name}});
        let clock = named("mcp/clock.now:2");
        for (choice, seed) in [(json!("required"), 1), (clock, 2), (named("weather"), 3)] {
            let reply = client.post(CHAT, &body(&choice, seed));
            assert_eq!(reply.status, 200, "{syntax:?}: {}", String::from_utf8_lossy(&reply.body));
            let reply = reply.json();
            let only = &reply["choices"][0];
            assert_eq!(only["finish_reason"], "tool_calls", "{syntax:?} {only}");
            let calls = only["message"]["tool_calls"].as_array().unwrap();
            assert_eq!(calls.len(), 1, "{syntax:?}");
            let function = &calls[0]["function"];
            let arguments: Value =
                serde_json::from_str(function["arguments"].as_str().unwrap()).unwrap();
            if seed == 3 || seed == 1 && function["name"] == "weather" {
                assert_eq!(function["name"], "weather");
                assert!(["Bonn", "Rome"].contains(&arguments["city"].as_str().unwrap()));
            } else {
                assert_eq!((&function["name"], arguments), (&json!("mcp/clock.now:2"), json!({})));
            }
        }
    }
}

#[test]
fn required_tool_call_starts_after_reasoning() {
    const THINKS: &str = "{{ messages[0].content }}<think>\n";
    let parsers = (Some(ToolCallSyntax::HERMES), Some(ReasoningFamily::QWEN3));
    let server = TestServer::start(&ServerSetup {
        parsers,
        template: Some(THINKS),
        ..ServerSetup::default()
    });
    let mut chat = body(&json!("required"), 1);
    chat["max_tokens"] = json!(40);
    let reply = post(server.address, CHAT, &chat).json();
    let message = &reply["choices"][0]["message"];
    // The mock executor (hash model) never generates the end-of-reasoning marker by itself, so the reasoning
    // fills the whole output.
    assert_eq!(reply["choices"][0]["finish_reason"], "length");
    assert!(!message["reasoning"].as_str().unwrap().is_empty());
    assert_eq!(reply["usage"]["completion_tokens_details"]["reasoning_tokens"], 40);
}

#[test]
fn unsatisfiable_tool_choice_is_rejected() {
    let server = TestServer::start(&ServerSetup::default());
    let reply = post(server.address, CHAT, &body(&json!("required"), 1));
    assert_eq!((reply.status, &reply.json()["error"]["param"]), (400, &json!("tool_choice")));
    let parsers = (Some(ToolCallSyntax::HERMES), None);
    let server = TestServer::start(&ServerSetup { parsers, ..ServerSetup::default() });
    let mut twice = body(&json!("required"), 1);
    twice["response_format"] = json!({"type": "json_object"});
    let reply = post(server.address, CHAT, &twice);
    assert_eq!((reply.status, &reply.json()["error"]["param"]), (400, &json!("tool_choice")));
    let mut wider = body(&json!("required"), 1);
    wider["tools"][0]["function"]["parameters"]["x-guidance"] = json!({"lenient": true});
    let reply = post(server.address, CHAT, &wider);
    assert_eq!((reply.status, &reply.json()["error"]["param"]), (400, &json!("tools[0]")));
    let mut unknown = body(&json!("required"), 1);
    unknown["tools"][0]["function"]["parameters"]["properties"]["city"] =
        json!({"type": "string", "contentEncoding": "base64", "uniqueItems": true});
    let reply = post(server.address, CHAT, &unknown);
    let error = reply.json()["error"].clone();
    assert_eq!((reply.status, &error["reason"]), (400, &json!("invalid_grammar")), "{error}");
}
