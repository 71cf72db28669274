//! Tool calls and reasoning in chat completions, on a device with scripted output.

use crate::http_client::{HttpClient, post};
use crate::test_server::{ServerSetup, TestServer};
use serde_json::{Value, json};
use text::{ReasoningFamily, ToolCallSyntax};

const CHAT: &str = "/v1/chat/completions";
const TWO_CALLS: &str = "<think>\nhm, both\n</think>\n\nI look.\n<tool_call>\n{\"name\": \"weather\", \
    \"arguments\": {\"city\": \"Köln\"}}\n</tool_call>\n<tool_call>\n{\"name\": \"time\", \
    \"arguments\": {}}\n</tool_call>";
/// Chat template that renders tool names, message content, reasoning, tool calls and tool call ids.
const TEMPLATE: &str = "{% for t in tools or [] %}[{{ t.function.name }}]{% endfor %}\
    {% for m in messages %}<{{ m.role }}>{{ m.content }}{{ m.reasoning_content }}\
    {% for c in m.tool_calls or [] %}{{ c.function.name }}={{ c.function.arguments.city }}\
    {% endfor %}{{ m.tool_call_id }}{% endfor %}";

fn setup(script: &'static str) -> ServerSetup {
    let parsers = (Some(ToolCallSyntax::HERMES), Some(ReasoningFamily::QWEN3));
    ServerSetup { scripted_output: Some(script), parsers, ..ServerSetup::default() }
}

pub(super) fn tool(name: &str) -> Value {
    let parameters = json!({"type": "object", "properties": {"city": {"type": "string"}}});
    json!({"type": "function", "function": {"name": name, "parameters": parameters}})
}

fn body(extra: &Value) -> Value {
    let mut body = json!({"messages": [{"role": "user", "content": "hi"}], "max_tokens": 400,
        "tools": [tool("weather"), tool("time")]});
    body.as_object_mut().unwrap().extend(extra.as_object().unwrap().clone());
    body
}

/// The message assembled from the chunks of a stream, and the last finish reason.
pub(super) fn joined(events: &[Value]) -> (Value, Value) {
    let mut message = json!({"role": "assistant"});
    let mut finish = Value::Null;
    let add = |to: &mut Value, part: &Value| {
        if let Some(text) = part.as_str() {
            *to = json!(to.as_str().unwrap_or_default().to_owned() + text);
        }
    };
    for choice in events.iter().flat_map(|e| e["choices"].as_array().unwrap()) {
        for key in ["content", "reasoning", "reasoning_content"] {
            add(&mut message[key], &choice["delta"][key]);
        }
        for call in choice["delta"]["tool_calls"].as_array().into_iter().flatten() {
            let index = call["index"].as_u64().unwrap() as usize;
            if message["tool_calls"][index].is_null() {
                assert_eq!(call["function"]["arguments"], "");
                let calls = &mut message["tool_calls"];
                if calls.is_null() {
                    *calls = json!([]);
                }
                let mut call = call.clone();
                call.as_object_mut().unwrap().remove("index");
                calls.as_array_mut().unwrap().push(call);
            } else {
                let so_far = &mut message["tool_calls"][index]["function"]["arguments"];
                add(so_far, &call["function"]["arguments"]);
            }
        }
        if !choice["finish_reason"].is_null() {
            finish = choice["finish_reason"].clone();
        }
    }
    (message, finish)
}

/// The message without the ids of its tool calls, which are new in every reply.
pub(super) fn without_ids(mut message: Value) -> Value {
    for call in message["tool_calls"].as_array_mut().into_iter().flatten() {
        let id = call.as_object_mut().unwrap().remove("id").unwrap();
        let tail = id.as_str().unwrap().strip_prefix("call_").unwrap().to_owned();
        assert!(tail.len() == 24 && tail.bytes().all(|b| b.is_ascii_alphanumeric()));
    }
    message
}

#[test]
fn tool_calls_and_reasoning_equal_unary_and_streamed() {
    let server = TestServer::start(&setup(TWO_CALLS));
    let mut client = HttpClient::connect(server.address);
    let reply = client.post(CHAT, &body(&json!({}))).json();
    let choice = &reply["choices"][0];
    let call = |name: &str, arguments: &str| json!({"type": "function", "function": {"name": name, "arguments": arguments}});
    let expected = json!({"role": "assistant", "content": "\n\nI look.",
        "reasoning": "\nhm, both\n", "reasoning_content": "\nhm, both\n",
        "tool_calls": [call("weather", "{\"city\": \"Köln\"}"), call("time", "{}")]});
    assert_eq!(without_ids(choice["message"].clone()), expected);
    assert_eq!(choice["finish_reason"], "tool_calls");
    // Each byte is one token: 10 tokens of reasoning, and the end marker `</think>` without its last byte.
    assert_eq!(reply["usage"]["completion_tokens_details"]["reasoning_tokens"], 10 + 7);

    let events = client.post(CHAT, &body(&json!({"stream": true}))).events();
    let (message, finish) = joined(&events);
    assert_eq!((without_ids(message), finish), (expected, json!("tool_calls")));
    let fragments = events.iter().filter(|e| {
        e["choices"][0]["delta"]["tool_calls"][0]["function"]["arguments"].as_str() > Some("")
    });
    assert!(fragments.count() > 10, "arguments come as they are written");

    let one = client.post(CHAT, &body(&json!({"parallel_tool_calls": false}))).json();
    assert_eq!(one["choices"][0]["message"]["tool_calls"].as_array().unwrap().len(), 1);
    let none = client.post(CHAT, &body(&json!({"tool_choice": "none"}))).json();
    let content = none["choices"][0]["message"]["content"].as_str().unwrap().to_owned();
    assert!(content.contains("</tool_call>\n<tool_call>"), "{content}");
    assert_eq!(none["choices"][0]["finish_reason"], "stop");
    let hidden = client.post(CHAT, &body(&json!({"include_reasoning": false}))).json();
    assert_eq!(hidden["choices"][0]["message"]["reasoning"], Value::Null);
}

#[test]
fn truncated_tool_call_equals_unary_and_streamed() {
    let server = TestServer::start(&setup(TWO_CALLS));
    let mut client = HttpClient::connect(server.address);
    let reply = client.post(CHAT, &body(&json!({"max_tokens": 95}))).json();
    let choice = &reply["choices"][0];
    let call = &choice["message"]["tool_calls"][0]["function"];
    assert_eq!(*call, json!({"name": "weather", "arguments": "{\"city\": \"Köln"}));
    assert_eq!(choice["finish_reason"], "length");
    let events = client.post(CHAT, &body(&json!({"max_tokens": 95, "stream": true}))).events();
    let expected = (without_ids(choice["message"].clone()), json!("length"));
    let (message, finish) = joined(&events);
    assert_eq!((without_ids(message), finish), expected);
    // A tool call whose name is still incomplete is reported as content, in unary and in streamed replies.
    let early = client.post(CHAT, &body(&json!({"max_tokens": 50}))).json();
    let message = &early["choices"][0]["message"];
    assert_eq!(message["tool_calls"], Value::Null);
    assert!(message["content"].as_str().unwrap().contains("<tool_call>"), "{message}");
    let events = client.post(CHAT, &body(&json!({"max_tokens": 50, "stream": true}))).events();
    assert_eq!(joined(&events).0["content"], message["content"]);
    // An output that ends inside a tool call, because a stop string occurs in it, is reported as content.
    let stop = json!({"stop": ["Köln"]});
    let stopped = client.post(CHAT, &body(&stop)).json();
    let message = &stopped["choices"][0]["message"];
    assert_eq!(
        (&message["tool_calls"], &stopped["choices"][0]["finish_reason"]),
        (&Value::Null, &json!("stop"))
    );
}

#[test]
fn tool_call_only_message_has_null_content() {
    let script = "<tool_call>{\"name\": \"time\", \"arguments\": {}}</tool_call>";
    let server = TestServer::start(&setup(script));
    let reply = post(server.address, CHAT, &body(&json!({}))).json();
    let message = &reply["choices"][0]["message"];
    assert_eq!(message["content"], Value::Null);
    assert!(message.as_object().unwrap().contains_key("content"));
    assert_eq!(message["tool_calls"][0]["function"]["name"], "time");
}

#[test]
fn tools_and_earlier_calls_reach_the_template() {
    let server = TestServer::start(&ServerSetup { template: Some(TEMPLATE), ..setup("ok") });
    let mut client = HttpClient::connect(server.address);
    let call = json!({"id": "call_1", "type": "function",
        "function": {"name": "weather", "arguments": "{\"city\": \"Bonn\"}"}});
    let messages = json!([
        {"role": "user", "content": "hi"},
        {"role": "assistant", "content": null, "reasoning": "hm", "tool_calls": [call]},
        {"role": "tool", "tool_call_id": "call_1", "content": "rain"},
    ]);
    let chat = body(&json!({"messages": messages}));
    let ids = client.post("/tokenize", &chat).json()["tokens"].clone();
    let text = client.post("/detokenize", &json!({"tokens": ids})).json()["prompt"].clone();
    assert_eq!(text, "[weather][time]<user>hi<assistant>hmweather=Bonn<tool>raincall_1");
    assert_eq!(client.post(CHAT, &chat).json()["choices"][0]["message"]["content"], "ok");
}

#[test]
fn invalid_tools_are_rejected_by_name() {
    let server = TestServer::start(&setup("ok"));
    let mut client = HttpClient::connect(server.address);
    let name = |name: &str| json!({"tools": [tool(name)]});
    let many: Vec<Value> = (0..129).map(|i| tool(&format!("t{i}"))).collect();
    let named = json!({"type": "function", "function": {"name": "none_such"}});
    let schema = |parameters: Value| json!({"tools": [{"type": "function", "function": {"name": "f", "parameters": parameters}}]});
    let calls = |arguments: Value| {
        let function = json!({"name": "f", "arguments": arguments});
        json!({"messages": [{"role": "assistant", "tool_calls": [{"function": function}]}]})
    };
    let cases = [
        (name("no spaces"), "tools[0].function.name"),
        (name(&"x".repeat(129)), "tools[0].function.name"),
        (json!({"tools": [tool("a"), tool("a")]}), "tools[1].function.name"),
        (json!({"tools": many}), "tools"),
        (json!({"tools": [{"type": "web_search"}]}), "tools[0].type"),
        (json!({"tools": [{"type": "function"}]}), "tools[0].function"),
        (schema(json!([1])), "tools[0].function.parameters"),
        (schema(json!({"type": "string"})), "tools[0].function.parameters"),
        (json!({"tool_choice": "maybe"}), "tool_choice"),
        (json!({"tool_choice": named}), "tool_choice"),
        (json!({"tools": [], "tool_choice": "required"}), "tool_choice"),
        (json!({"tool_choice": {"type": "function"}}), "tool_choice.function"),
        (json!({"functions": [{}]}), "functions"),
        (json!({"function_call": {"name": "x"}}), "function_call"),
        (calls(json!("broken")), "messages[0].tool_calls[0].function.arguments"),
        (calls(json!("[1]")), "messages[0].tool_calls[0].function.arguments"),
        (json!({"messages": [{"role": "function", "content": "x"}]}), "messages[0].role"),
        (
            json!({"messages": [{"role": "user", "content": "x", "tool_calls": [{}]}]}),
            "messages[0].tool_calls",
        ),
    ];
    for (extra, param) in cases {
        let reply = client.post(CHAT, &body(&extra));
        assert_eq!(reply.status, 400, "{extra}");
        assert_eq!(reply.json()["error"]["param"], param, "{extra}");
    }
}

#[test]
fn other_tool_parsers_work() {
    let families: [(ToolCallSyntax, &str, usize); 4] = [
        (
            ToolCallSyntax::QWEN3_CODER,
            "<tool_call>\n<function=weather>\n<parameter=city>\nBonn\n</parameter>\n</function>\n</tool_call>",
            29,
        ),
        (
            ToolCallSyntax::LLAMA3_JSON,
            "{\"name\": \"weather\", \"parameters\": {\"city\": \"Bonn\"}}",
            29,
        ),
        (ToolCallSyntax::MISTRAL, "[TOOL_CALLS]weather{\"city\": \"Bonn\"}", 9),
        (
            ToolCallSyntax::DEEPSEEK_V3,
            "<｜tool▁calls▁begin｜><｜tool▁call▁begin｜>function<｜tool▁sep｜>weather\n```json\n\
             {\"city\": \"Bonn\"}\n```<｜tool▁call▁end｜><｜tool▁calls▁end｜>",
            29,
        ),
    ];
    for (syntax, script, id_bytes) in families {
        let setup = ServerSetup { parsers: (Some(syntax), None), ..setup(script) };
        let server = TestServer::start(&setup);
        let reply = post(server.address, CHAT, &body(&json!({}))).json();
        let call = &reply["choices"][0]["message"]["tool_calls"][0];
        assert_eq!(call["function"]["arguments"], "{\"city\": \"Bonn\"}", "{syntax:?}");
        assert_eq!(call["id"].as_str().unwrap().len(), id_bytes, "{syntax:?}");
    }
}
