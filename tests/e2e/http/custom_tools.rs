//! Custom tools and lists of allowed tools in chat completions.

use crate::http_client::{HttpClient, HttpReply};
use crate::test_server::{ServerSetup, TestServer};
use serde_json::{Value, json};
use text::ToolCallSyntax;

const PATH: &str = "/v1/chat/completions";
const IGNORED: &str = "x-hadron-ignored-fields";
const CALLS: &str = "Ok.<tool_call>\n{\"name\": \"patch\", \"arguments\": \
    {\"input\": \"*** \\\"a\\\"\\n+\\u00e9\"}}\n</tool_call>\n<tool_call>\n\
    {\"name\": \"find\", \"arguments\": {\"q\": 1}}\n</tool_call>";
/// Chat template that prints the names and descriptions of the tools, and the calls of the conversation.
const TEMPLATE: &str = "{% for t in tools or [] %}[{{ t.function.name }}:{{ t.function.description }}]\
    {% endfor %}{% for m in messages %}<{{ m.role }}>{{ m.content }}{% for c in m.tool_calls or [] %}\
    {{ c.function.name }}{{ c.function.arguments | tojson }}{% endfor %}{% endfor %}";

fn setup(script: Option<&'static str>) -> ServerSetup {
    let parsers = (Some(ToolCallSyntax::HERMES), None);
    let template = Some(TEMPLATE);
    ServerSetup { scripted_output: script, parsers, template, ..ServerSetup::default() }
}

fn function(name: &str) -> Value {
    let schema = json!({"type": "object", "properties": {"q": {"type": "integer"}}});
    json!({"type": "function", "function": {"name": name, "description": "d", "parameters": schema}})
}

fn custom(name: &str, format: &Value) -> Value {
    json!({"type": "custom", "custom": {"name": name, "description": "c", "format": format}})
}

fn body(tools: &Value, extra: &Value) -> Value {
    let messages = json!([{"role": "user", "content": "hi"}]);
    let mut body = json!({"messages": messages, "max_tokens": 600, "tools": tools});
    body.as_object_mut().unwrap().extend(extra.as_object().unwrap().clone());
    body
}

fn ok(reply: &HttpReply) -> Value {
    assert_eq!(reply.status, 200, "{}", String::from_utf8_lossy(&reply.body));
    reply.json()
}

/// Number of tokens of a prompt.
fn tokens_of(client: &mut HttpClient, prompt: &str) -> Value {
    let body = json!({"prompt": prompt, "add_special_tokens": false});
    client.post("/tokenize", &body).json()["count"].clone()
}

/// Tool calls of a stream, joined from its chunks, without ids.
fn joined_calls(events: &[Value]) -> Vec<Value> {
    let mut calls: Vec<Value> = Vec::new();
    let deltas = events.iter().map(|event| &event["choices"][0]["delta"]["tool_calls"]);
    for part in deltas.flat_map(|calls| calls.as_array().into_iter().flatten()) {
        let index = part["index"].as_u64().unwrap() as usize;
        if index == calls.len() {
            let mut call = part.clone();
            call.as_object_mut().unwrap().retain(|key, _| key != "index" && key != "id");
            calls.push(call);
            continue;
        }
        for (kind, member) in [("custom", "input"), ("function", "arguments")] {
            if let Some(text) = part[kind][member].as_str() {
                assert!(!text.is_empty() && calls[index]["type"] == kind, "{part}");
                let joined = calls[index][kind][member].as_str().unwrap().to_owned() + text;
                calls[index][kind][member] = json!(joined);
            }
        }
    }
    calls
}

#[test]
fn custom_tool_calls_equal_unary_and_streamed() {
    let server = TestServer::start(&setup(Some(CALLS)));
    let mut client = HttpClient::connect(server.address);
    let tools = json!([custom("patch", &json!({"type": "text"})), function("find")]);
    let reply = client.post(PATH, &body(&tools, &json!({})));
    assert_eq!(reply.header(IGNORED), None);
    let reply = ok(&reply);
    let mut calls = reply["choices"][0]["message"]["tool_calls"].clone();
    let expected = json!([
        {"type": "custom", "custom": {"name": "patch", "input": "*** \"a\"\n+é"}},
        {"type": "function", "function": {"name": "find", "arguments": "{\"q\": 1}"}},
    ]);
    assert_eq!(reply["choices"][0]["finish_reason"], "tool_calls");
    let sent_back = calls.clone();
    for call in calls.as_array_mut().unwrap() {
        assert!(call.as_object_mut().unwrap().remove("id").is_some());
    }
    assert_eq!(calls, expected);
    let events = client.post(PATH, &body(&tools, &json!({"stream": true, "n": 1}))).events();
    assert_eq!(json!(joined_calls(&events)), expected);

    // The chat template receives a custom tool call as a function call with the argument `input`.
    let messages = json!([{"role": "user", "content": "hi"},
        {"role": "assistant", "content": "", "tool_calls": sent_back},
        {"role": "tool", "tool_call_id": sent_back[0]["id"], "content": "done"}]);
    let next = ok(&client.post(PATH, &body(&tools, &json!({"messages": messages}))));
    let prompt = "[patch:c][find:d]<user>hi<assistant>patch{\"input\": \"*** \\\"a\\\"\\n+é\"}\
        find{\"q\": 1}<tool>done";
    assert_eq!(next["usage"]["prompt_tokens"], tokens_of(&mut client, prompt));
}

#[test]
fn forced_custom_calls_match_their_regex() {
    let server = TestServer::start(&setup(None));
    let mut client = HttpClient::connect(server.address);
    let grammar = |syntax: &str, definition: &str| json!({"type": "grammar", "grammar": {"syntax": syntax, "definition": definition}});
    let tools = json!([custom("patch", &grammar("regex", "[ab\"]{3}|xyz"))]);
    for seed in 0..4 {
        let choice = json!({"type": "custom", "custom": {"name": "patch"}});
        let extra = json!({"tool_choice": choice, "seed": seed, "parallel_tool_calls": false});
        let reply = client.post(PATH, &body(&tools, &extra));
        assert_eq!(reply.header(IGNORED), None);
        let reply = ok(&reply);
        let call = &reply["choices"][0]["message"]["tool_calls"][0];
        let input = call["custom"]["input"].as_str().unwrap();
        let matches = input.len() == 3 && input.chars().all(|c| "ab\"".contains(c));
        assert!(matches || input == "xyz", "{input}");
    }
    let lark = "start: LETTER~2 | \"\\n\" DIGIT\n%import common.DIGIT\nLETTER: \"a\"..\"c\"";
    let tools = json!([custom("patch", &grammar("lark", lark))]);
    let reply = client.post(PATH, &body(&tools, &json!({"tool_choice": "required", "seed": 1})));
    assert_eq!(reply.header(IGNORED), None);
    let reply = ok(&reply);
    let input = reply["choices"][0]["message"]["tool_calls"][0]["custom"]["input"].clone();
    let input = input.as_str().unwrap();
    let matches = input.len() == 2 && input.chars().all(|c| ('a'..='c').contains(&c));
    assert!(matches || input.starts_with('\n') && input.len() == 2, "{input:?}");
    let lark = json!([custom("patch", &grammar("lark", "start: \"x\" start?"))]);
    let forced = json!({"tool_choice": "required", "max_tokens": 2});
    let reply = client.post(PATH, &body(&lark, &forced));
    assert_eq!((reply.status, reply.header(IGNORED)), (200, Some("tools[0].custom.format")));
}

#[test]
fn allowed_tools_restrict_the_tools() {
    let server = TestServer::start(&setup(None));
    let mut client = HttpClient::connect(server.address);
    let tools = json!([function("a"), custom("b", &json!({"type": "text"})), function("c")]);
    let choice = |mode: &str| {
        let allowed = json!([{"type": "custom", "custom": {"name": "b"}},
            {"type": "function", "function": {"name": "c"}}]);
        json!({"tool_choice": {"type": "allowed_tools", "allowed_tools": {"mode": mode, "tools": allowed}},
            "parallel_tool_calls": false, "max_tokens": if mode == "auto" { 1 } else { 600 }})
    };
    let reply = ok(&client.post(PATH, &body(&tools, &choice("required"))));
    let call = &reply["choices"][0]["message"]["tool_calls"][0];
    assert!(call["custom"]["name"] == "b" || call["function"]["name"] == "c", "{call}");
    let reply = ok(&client.post(PATH, &body(&tools, &choice("auto"))));
    let count = tokens_of(&mut client, "[b:c][c:d]<user>hi");
    assert_eq!(reply["usage"]["prompt_tokens"], count);
}

#[test]
fn invalid_custom_tools_are_rejected_by_name() {
    let server = TestServer::start(&setup(None));
    let mut client = HttpClient::connect(server.address);
    let f = json!([function("f")]);
    let none = json!({});
    let choice = |choice: Value| json!({"tool_choice": choice});
    let allowed = |value: Value| choice(json!({"type": "allowed_tools", "allowed_tools": value}));
    let cases = [
        (json!([{"type": "custom"}]), none.clone(), "tools[0].custom"),
        (json!([{"type": "custom", "custom": {}}]), none.clone(), "tools[0].custom.name"),
        (json!([{"type": "web_search"}]), none.clone(), "tools[0].type"),
        (json!([function("f"), custom("f", &Value::Null)]), none.clone(), "tools[1].custom.name"),
        (
            json!([custom("c", &json!({"type": "xml"}))]),
            none.clone(),
            "tools[0].custom.format.type",
        ),
        (
            json!([custom("c", &json!({"type": "grammar", "grammar": {"syntax": "ebnf"}}))]),
            none,
            "tools[0].custom.format.grammar.syntax",
        ),
        (f.clone(), choice(json!({"type": "custom", "custom": {"name": "g"}})), "tool_choice"),
        (f.clone(), choice(json!({"type": "custom"})), "tool_choice.custom"),
        (f.clone(), choice(json!({"type": "web_search"})), "tool_choice.type"),
        (f.clone(), allowed(json!({"mode": "any"})), "tool_choice.allowed_tools.mode"),
        (f.clone(), allowed(json!({"mode": "auto"})), "tool_choice.allowed_tools.tools"),
        (
            f,
            allowed(
                json!({"mode": "auto", "tools": [{"type": "function", "function": {"name": "g"}}]}),
            ),
            "tool_choice.allowed_tools.tools[0].function.name",
        ),
    ];
    for (tools, extra, param) in cases {
        let reply = client.post(PATH, &body(&tools, &extra));
        assert_eq!(reply.status, 400, "{tools} {extra}");
        assert_eq!(reply.json()["error"]["param"], param, "{tools} {extra}");
    }
}
