//! Tools of `/v1/responses` that are not functions: custom tools, namespaces, and tools that are skipped.

use crate::http_client::{HttpClient, HttpReply};
use crate::test_server::{ServerSetup, TestServer};
use serde_json::{Value, json};
use text::ToolCallSyntax;

const PATH: &str = "/v1/responses";
const IGNORED: &str = "x-hadron-ignored-fields";
const PATCH_CALL: &str = "<tool_call>\n{\"name\": \"patch\", \"arguments\": \
    {\"input\": \"*** \\\"a\\\"\\n+\\u00e9\"}}\n</tool_call>";
const NAMESPACE_CALLS: &str = "<tool_call>\n{\"name\": \"mcp__find\", \"arguments\": {\"q\": 1}}\n\
    </tool_call>\n<tool_call>\n{\"name\": \"mcp__patch\", \"arguments\": {\"input\": \"x\"}}\n</tool_call>";
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
    json!({"type": "function", "name": name, "description": "d", "parameters": schema})
}

fn custom(name: &str) -> Value {
    json!({"type": "custom", "name": name, "description": "c", "format": {"type": "text"}})
}

fn body(tools: &Value, extra: &Value) -> Value {
    let mut body = json!({"input": "hi", "max_output_tokens": 600, "tools": tools});
    body.as_object_mut().unwrap().extend(extra.as_object().unwrap().clone());
    body
}

fn ok(reply: &HttpReply) -> Value {
    assert_eq!(reply.status, 200, "{}", String::from_utf8_lossy(&reply.body));
    reply.json()
}

/// The events of a stream.
fn events(reply: &HttpReply) -> Vec<Value> {
    let text = std::str::from_utf8(&reply.body).unwrap();
    let data = text.lines().filter_map(|line| line.strip_prefix("data: "));
    data.map(|data| serde_json::from_str(data).unwrap()).collect()
}

fn without(mut item: Value, keys: &[&str]) -> Value {
    item.as_object_mut().unwrap().retain(|key, _| !keys.contains(&key.as_str()));
    item
}

/// Number of tokens of a prompt.
fn tokens_of(client: &mut HttpClient, prompt: &str) -> Value {
    let body = json!({"prompt": prompt, "add_special_tokens": false});
    client.post("/tokenize", &body).json()["count"].clone()
}

#[test]
fn tools_of_other_types_are_skipped_and_named() {
    let mut strict = setup(Some(NAMESPACE_CALLS));
    strict.options.strict_fields = true;
    let server = TestServer::start(&strict);
    let mut client = HttpClient::connect(server.address);
    for kind in [
        "web_search",
        "web_search_preview_2025_03_11",
        "local_shell",
        "shell",
        "image_generation",
        "mcp",
        "file_search",
        "code_interpreter",
        "computer_use_preview",
        "tool_search",
        "apply_patch",
        "a_later_type",
    ] {
        let hosted = json!({"type": kind, "search_context_size": "low", "server_label": "x"});
        let tools = json!([hosted, function("mcp__find")]);
        let reply = client.post(PATH, &body(&tools, &json!({})));
        assert_eq!(reply.header(IGNORED), Some("tools[0]"), "{kind}");
        let reply = ok(&reply);
        assert_eq!((&reply["output"][0]["name"], &reply["tools"]), (&json!("mcp__find"), &tools));

        let choice = json!({"tool_choice": {"type": kind}});
        let reply = client.post(PATH, &body(&tools, &choice));
        let param = reply.json()["error"]["param"].clone();
        assert_eq!((reply.status, param), (400, json!("tool_choice.type")), "{kind}");
    }
    let only_hosted = body(&json!([{"type": "web_search"}]), &json!({"tool_choice": "auto"}));
    assert_eq!(client.post(PATH, &only_hosted).header(IGNORED), Some("tools[0]"));
}

#[test]
fn allowed_tools_that_are_skipped_are_named() {
    let server = TestServer::start(&setup(Some(NAMESPACE_CALLS)));
    let mut client = HttpClient::connect(server.address);
    let search = json!({"type": "web_search"});
    let tools = json!([search, function("mcp__find"), function("other")]);
    let find = json!({"type": "function", "name": "mcp__find"});
    let choice = |mode: &str, allowed: Value| json!({"tool_choice": {"type": "allowed_tools", "mode": mode, "tools": allowed}});
    let reply = client.post(PATH, &body(&tools, &choice("auto", json!([search, find]))));
    assert_eq!(reply.header(IGNORED), Some("tools[0], tool_choice.tools[0]"));
    assert_eq!(ok(&reply)["output"][0]["name"], "mcp__find");
    let none = client.post(PATH, &body(&tools, &choice("auto", json!([search]))));
    assert_eq!(none.status, 200, "{}", none.json());
    let required = client.post(PATH, &body(&tools, &choice("required", json!([search]))));
    let param = required.json()["error"]["param"].clone();
    assert_eq!((required.status, param), (400, json!("tool_choice")));
}

#[test]
fn custom_tool_calls_are_equal_unary_and_streamed() {
    let server = TestServer::start(&setup(Some(PATCH_CALL)));
    let mut client = HttpClient::connect(server.address);
    let tools = json!([custom("patch"), function("shell")]);
    let reply = client.post(PATH, &body(&tools, &json!({})));
    assert_eq!(reply.header(IGNORED), None);
    let reply = ok(&reply);
    let expected = json!({"type": "custom_tool_call", "name": "patch",
        "input": "*** \"a\"\n+é", "status": "completed"});
    assert_eq!(without(reply["output"][0].clone(), &["id", "call_id"]), expected);

    let events = events(&client.post(PATH, &body(&tools, &json!({"stream": true}))));
    let of = |kind: &str| -> Vec<&Value> {
        events.iter().filter(|event| event["type"] == format!("response.{kind}")).collect()
    };
    let deltas = of("custom_tool_call_input.delta");
    let text: String = deltas.iter().map(|event| event["delta"].as_str().unwrap()).collect();
    assert!(deltas.len() > 3, "the input comes as it is generated");
    let done = of("custom_tool_call_input.done");
    assert_eq!((text.as_str(), &done[0]["input"]), ("*** \"a\"\n+é", &json!(text)));
    let item = &of("output_item.done")[0]["item"];
    assert_eq!(without(item.clone(), &["id", "call_id"]), expected);
    assert_eq!(of("output_item.added")[0]["item"]["input"], "");
    assert_eq!(done[0]["item_id"], item["id"]);
    assert_eq!(of("completed")[0]["response"]["output"][0], *item);
}

#[test]
fn namespaces_are_flattened_and_given_back() {
    let server = TestServer::start(&setup(Some(NAMESPACE_CALLS)));
    let mut client = HttpClient::connect(server.address);
    let inner = json!([function("find"), custom("patch"), {"type": "web_search"}]);
    let namespace =
        json!({"type": "namespace", "name": "mcp", "description": "Files.", "tools": inner});
    let tools = json!([namespace, {"type": "namespace", "name": "empty", "tools": []}]);
    let reply = client.post(PATH, &body(&tools, &json!({})));
    assert_eq!(reply.header(IGNORED), Some("tools[0].tools[2]"));
    let first = ok(&reply);
    let output = first["output"].as_array().unwrap();
    assert_eq!(
        without(output[0].clone(), &["id", "call_id"]),
        json!({"type": "function_call", "name": "find", "namespace": "mcp",
            "arguments": "{\"q\": 1}", "status": "completed"})
    );
    assert_eq!(
        without(output[1].clone(), &["id", "call_id"]),
        json!({"type": "custom_tool_call", "name": "patch", "namespace": "mcp", "input": "x",
            "status": "completed"})
    );
    let head = "[mcp__find:Functions mcp__*: Files.\n\nd][mcp__patch:c]<user>hi";
    assert_eq!(first["usage"]["input_tokens"], tokens_of(&mut client, head));

    // In the next prompt, calls have their flattened names (`mcp__find`), whether their items are stored or
    // sent by the client.
    let results = json!([
        {"type": "function_call_output", "call_id": output[0]["call_id"], "output": "one"},
        {"type": "custom_tool_call_output", "call_id": output[1]["call_id"], "output": "two"},
    ]);
    let prompt = format!(
        "{head}<assistant>mcp__find{{\"q\": 1}}mcp__patch{{\"input\": \"x\"}}<tool>one<tool>two"
    );
    let count = tokens_of(&mut client, &prompt);
    let next = json!({"previous_response_id": first["id"], "input": results});
    let stored = ok(&client.post(PATH, &body(&tools, &next)));
    assert_eq!(stored["usage"]["input_tokens"], count);
    let mut items = vec![json!({"role": "user", "content": "hi"})];
    items.extend(output.iter().cloned());
    items.extend(results.as_array().unwrap().iter().cloned());
    let whole = ok(&client.post(PATH, &body(&tools, &json!({"input": items}))));
    assert_eq!(whole["usage"]["input_tokens"], count);
}

#[test]
fn tool_choice_names_one_tool_or_the_allowed_ones() {
    let server = TestServer::start(&setup(None));
    let mut client = HttpClient::connect(server.address);
    let namespace = json!({"type": "namespace", "name": "ns", "tools": [function("find")]});
    let tools = json!([function("a"), function("b"), custom("c"), namespace]);
    let mut called = |choice: Value| {
        let extra = json!({"tool_choice": choice, "parallel_tool_calls": false});
        let reply = ok(&client.post(PATH, &body(&tools, &extra)));
        assert_eq!(reply["tool_choice"], choice);
        let item = &reply["output"][0];
        [&item["type"], &item["namespace"], &item["name"]].map(Clone::clone)
    };
    let function_call = json!("function_call");
    let one = called(json!({"type": "function", "name": "b"}));
    assert_eq!(one, [function_call.clone(), Value::Null, json!("b")]);
    let one = called(json!({"type": "custom", "name": "c"}));
    assert_eq!(one, [json!("custom_tool_call"), Value::Null, json!("c")]);
    let inner = json!({"type": "function", "namespace": "ns", "name": "find"});
    assert_eq!(called(inner.clone()), [function_call, json!("ns"), json!("find")]);
    let allowed = json!([inner, {"type": "custom", "name": "c"}]);
    let one = called(json!({"type": "allowed_tools", "mode": "required", "tools": allowed}));
    assert!(one[2] == "find" || one[2] == "c", "{one:?}");

    let auto = json!({"type": "allowed_tools", "mode": "auto", "tools": allowed});
    let extra = json!({"tool_choice": auto, "max_output_tokens": 1});
    let reply = ok(&client.post(PATH, &body(&tools, &extra)));
    let prompt = "[c:c][ns__find:d]<user>hi";
    assert_eq!(reply["usage"]["input_tokens"], tokens_of(&mut client, prompt));
}

#[test]
fn forced_custom_calls_match_their_regex() {
    let server = TestServer::start(&setup(None));
    let mut client = HttpClient::connect(server.address);
    let format = |syntax: &str, definition: &str| json!({"type": "grammar", "syntax": syntax, "definition": definition});
    let mut tool = custom("patch");
    tool["format"] = format("regex", "[ab\"]{3}|xyz");
    for seed in 0..4 {
        let choice = json!({"tool_choice": {"type": "custom", "name": "patch"}, "seed": seed});
        let reply = client.post(PATH, &body(&json!([tool]), &choice));
        assert_eq!(reply.header(IGNORED), None);
        let reply = ok(&reply);
        let input = reply["output"][0]["input"].as_str().unwrap().to_owned();
        let matches = input.len() == 3 && input.chars().all(|c| "ab\"".contains(c));
        assert!(matches || input == "xyz", "{input}");
    }
    // With `tool_choice` `auto`, calls match the regex too. A grammar that is not enforced is listed in the
    // header of ignored fields.
    for (choice, ignored) in [("auto", None), ("none", Some("tools[0].format"))] {
        let short = json!({"max_output_tokens": 2, "tool_choice": choice});
        let reply = client.post(PATH, &body(&json!([tool]), &short));
        assert_eq!((reply.status, reply.header(IGNORED)), (200, ignored), "{choice}");
    }
    tool["format"] = format("lark", "start: \"x\" start?");
    let forced = json!({"tool_choice": "required", "max_output_tokens": 2});
    let reply = client.post(PATH, &body(&json!([tool]), &forced));
    assert_eq!((reply.status, reply.header(IGNORED)), (200, Some("tools[0].format")));
}

#[test]
fn a_forced_call_does_not_use_the_text_format() {
    let server = TestServer::start(&setup(None));
    let mut client = HttpClient::connect(server.address);
    let schema = json!({"enum": ["yes"]});
    let format = json!({"format": {"type": "json_schema", "name": "answer", "schema": schema}});
    let extra = json!({"text": format, "tool_choice": "required", "parallel_tool_calls": false});
    let reply = ok(&client.post(PATH, &body(&json!([function("a")]), &extra)));
    assert_eq!((&reply["output"][0]["name"], &reply["text"]), (&json!("a"), &format));
}

#[test]
fn text_format_applies_to_messages_only() {
    let server = TestServer::start(&setup(None));
    let mut client = HttpClient::connect(server.address);
    let schema = json!({"enum": ["yes"]});
    let format = json!({"format": {"type": "json_schema", "name": "a", "schema": schema}});
    let (mut messages, mut calls) = (0, 0);
    for seed in 0..32 {
        let extra = json!({"text": format, "seed": seed, "parallel_tool_calls": false});
        let reply = ok(&client.post(PATH, &body(&json!([function("a")]), &extra)));
        let item = &reply["output"][0];
        if item["type"] == "message" {
            assert_eq!(item["content"][0]["text"].as_str().unwrap().trim(), "\"yes\"");
            messages += 1;
        } else {
            assert_eq!((&item["type"], &item["name"]), (&json!("function_call"), &json!("a")));
            calls += 1;
        }
    }
    assert!(messages > 0 && calls > 0, "{messages} messages, {calls} calls");
}

#[test]
fn invalid_response_tools_are_rejected_by_name() {
    let server = TestServer::start(&setup(None));
    let mut client = HttpClient::connect(server.address);
    let namespace = |tools: Value| json!([{"type": "namespace", "name": "n", "tools": tools}]);
    let format = |format: Value| json!([{"type": "custom", "name": "c", "format": format}]);
    let choice = |choice: Value| json!({"tool_choice": choice});
    let none = json!({});
    let f = json!([function("f")]);
    let grammar = json!({"type": "grammar", "syntax": "ebnf", "definition": "x"});
    let allowed =
        |tools: Value| choice(json!({"type": "allowed_tools", "mode": "auto", "tools": tools}));
    let cases = [
        (json!([{"name": "x"}]), none.clone(), "tools[0].type"),
        (json!([{"type": "function"}]), none.clone(), "tools[0].name"),
        (json!([{"type": "custom"}]), none.clone(), "tools[0].name"),
        (json!([custom("f"), function("f")]), none.clone(), "tools[1].name"),
        (namespace(json!([{"name": "x"}])), none.clone(), "tools[0].tools[0].type"),
        (namespace(json!([function("a"), function("a")])), none.clone(), "tools[0].tools[1].name"),
        (namespace(json!(7)), none.clone(), "tools[0].tools"),
        (format(json!({"type": "xml"})), none.clone(), "tools[0].format.type"),
        (format(grammar), none.clone(), "tools[0].format.syntax"),
        (f.clone(), choice(json!({"type": "function", "name": "g"})), "tool_choice"),
        (f.clone(), choice(json!({"type": "web_search"})), "tool_choice.type"),
        (f.clone(), choice(json!({"type": "function"})), "tool_choice.name"),
        (f.clone(), choice(json!({"type": "allowed_tools", "mode": "any"})), "tool_choice.mode"),
        (
            f.clone(),
            allowed(json!([{"type": "function", "name": "g"}])),
            "tool_choice.tools[0].name",
        ),
        (f, allowed(json!([{"type": "mcp"}])), "tool_choice.tools[0].type"),
    ];
    for (tools, extra, param) in cases {
        let reply = client.post(PATH, &body(&tools, &extra));
        assert_eq!(reply.status, 400, "{tools} {extra}");
        assert_eq!(reply.json()["error"]["param"], param, "{tools} {extra}");
    }
}
