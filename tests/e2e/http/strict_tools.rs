//! Strict tools with `tool_choice` `auto`, structural tags, and fields that are reported as ignored, over
//! HTTP.

use crate::http_client::{HttpClient, HttpReply};
use crate::test_server::{ServerSetup, TestServer};
use serde_json::{Value, json};
use text::{ReasoningFamily, ToolCallSyntax};

const CHAT: &str = "/v1/chat/completions";
const IGNORED: &str = "x-hadron-ignored-fields";
/// Chat template that prints the names of the tools.
const TEMPLATE: &str = "{% for t in tools or [] %}[{{ t.function.name }}]{% endfor %}\
    {% for m in messages %}<{{ m.role }}>{{ m.content }}{% endfor %}";
/// Scripted output with a tool call whose arguments violate the tool's schema.
const CALL: &str =
    "Ok.\n<tool_call>\n{\"name\": \"f\", \"arguments\": {\"n\": \"bad\"}}\n</tool_call>";

fn setup(template: Option<&'static str>) -> ServerSetup {
    let (parsers, template) = ((Some(ToolCallSyntax::HERMES), None), template.or(Some(TEMPLATE)));
    ServerSetup { parsers, template, ..ServerSetup::default() }
}

fn ok(reply: &HttpReply) -> Value {
    assert_eq!(reply.status, 200, "{}", String::from_utf8_lossy(&reply.body));
    reply.json()
}

fn schema() -> Value {
    json!({"type": "object", "properties": {"n": {"type": "integer", "minimum": 0, "maximum": 9}},
        "required": ["n"], "additionalProperties": false})
}

fn function(strict: Option<bool>) -> Value {
    json!({"type": "function", "function": {"name": "f", "parameters": schema(), "strict": strict}})
}

fn body(extra: &Value) -> Value {
    let mut body = json!({"messages": [{"role": "user", "content": "hi"}], "max_tokens": 40});
    body.as_object_mut().unwrap().extend(extra.as_object().unwrap().clone());
    body
}

#[test]
fn free_calls_of_strict_tools_match_the_schema() {
    let server = TestServer::start(&ServerSetup { scripted_output: Some(CALL), ..setup(None) });
    let mut client = HttpClient::connect(server.address);
    let called = |reply: &Value| {
        let message = &reply["choices"][0]["message"];
        assert!(message["content"].as_str().unwrap().starts_with("Ok."));
        message["tool_calls"][0]["function"]["arguments"].as_str().unwrap().to_owned()
    };
    for seed in 0..4 {
        let mut extra = json!({"tools": [function(Some(true))], "seed": seed, "max_tokens": 200,
            "parallel_tool_calls": false});
        let reply = client.post(CHAT, &body(&extra));
        assert_eq!(reply.header(IGNORED), None);
        let arguments: Value = serde_json::from_str(&called(&ok(&reply))).unwrap();
        assert!(jsonschema::is_valid(&schema(), &arguments), "{arguments}");
        extra["tools"] = json!([function(None)]);
        let reply = ok(&client.post(CHAT, &body(&extra)));
        assert_eq!(called(&reply), "{\"n\": \"bad\"}");
    }
}

#[test]
fn strict_tools_without_grammar_are_named() {
    let server = TestServer::start(&setup(None));
    let mut client = HttpClient::connect(server.address);
    for (extra, ignored) in [
        (json!({"tools": [function(Some(true))]}), None),
        (json!({"tools": [function(Some(false)), ]}), None),
        (
            json!({"tools": [function(Some(true))], "tool_choice": "none"}),
            Some("tools[0].function.strict"),
        ),
        (
            json!({"tools": [function(Some(true))], "response_format": {"type": "json_object"}}),
            Some("tools[0].function.strict"),
        ),
    ] {
        let reply = client.post(CHAT, &body(&extra));
        assert_eq!((reply.status, reply.header(IGNORED)), (200, ignored), "{extra}");
    }
    let mut tool = function(Some(true));
    tool["function"]["parameters"]["properties"]["n"] =
        json!({"type": "array", "uniqueItems": true});
    let reply = client.post(CHAT, &body(&json!({"tools": [tool]})));
    assert_eq!(reply.status, 400);
}

#[test]
fn structural_tags_constrain_the_output() {
    let server = TestServer::start(&setup(None));
    let mut client = HttpClient::connect(server.address);
    let tag = json!({"type": "tag", "begin": "<n>", "end": "</n>",
        "content": {"type": "json_schema", "json_schema": schema()}});
    let format = json!({"type": "triggered_tags", "triggers": ["<n"], "tags": [tag],
        "at_least_one": true, "stop_after_first": true});
    let tag = json!({"type": "structural_tag", "format": format});
    // The grammar allows whitespace between JSON tokens, and the model's random output contains much of it,
    // hence the large `max_tokens`.
    for extra in [
        json!({"seed": 1, "max_tokens": 400, "response_format": tag}),
        json!({"seed": 2, "max_tokens": 400, "structured_outputs": {"structural_tag": tag.to_string()}}),
    ] {
        let reply = ok(&client.post(CHAT, &body(&extra)));
        let content = reply["choices"][0]["message"]["content"].as_str().unwrap().to_owned();
        let inner = content.strip_prefix("<n>").and_then(|rest| rest.strip_suffix("</n>"));
        let inner = inner.unwrap_or_else(|| panic!("{reply}"));
        let inner: Value = serde_json::from_str(inner).unwrap();
        assert!(jsonschema::is_valid(&schema(), &inner), "{content}");
    }
    let unknown = json!({"response_format": {"type": "structural_tag", "format": {"type": "x"}}});
    let reply = client.post(CHAT, &body(&unknown));
    assert_eq!(reply.json()["error"]["param"], "response_format.format.type");
}

#[test]
fn hidden_fields_are_named_in_every_conversation_api() {
    let template = "{% for m in messages %}<{{ m.role }}>{{ m.content }}{% endfor %}";
    let server = TestServer::start(&setup(Some(template)));
    let mut client = HttpClient::connect(server.address);
    let user = json!({"role": "user", "content": "hi"});
    let tool = json!({"name": "f", "input_schema": schema()});
    let call = json!({"type": "tool_use", "id": "c", "name": "f", "input": {"n": 1}});
    let result = json!({"type": "tool_result", "tool_use_id": "c", "content": "x"});
    let messages = json!([user, {"role": "assistant", "content": [call]},
        {"role": "user", "content": [result]}]);
    let anthropic = json!({"max_tokens": 2, "messages": messages, "tools": [tool]});
    let reply = client.post("/v1/messages", &anthropic);
    assert_eq!((reply.status, reply.header(IGNORED)), (200, Some("tools, messages.tool_calls")));
    let input = json!([user, {"type": "function_call", "call_id": "c", "name": "f", "arguments": "{}"},
        {"type": "function_call_output", "call_id": "c", "output": "x"}]);
    let tool = json!({"type": "function", "name": "f", "parameters": schema()});
    let responses = json!({"max_output_tokens": 2, "input": input, "tools": [tool]});
    let reply = client.post("/v1/responses", &responses);
    assert_eq!((reply.status, reply.header(IGNORED)), (200, Some("tools, input.tool_calls")));
    let chat = json!({"documents": [{"text": "d"}], "reasoning_effort": "low", "user": "u"});
    let reply = client.post(CHAT, &body(&chat));
    let named = Some("user, documents, reasoning_effort");
    assert_eq!((reply.status, reply.header(IGNORED)), (200, named));
}

#[test]
fn disabled_thinking_is_named_if_no_template_reads_it() {
    let thinking = |kind: &str| {
        let user = json!({"role": "user", "content": "hi"});
        json!({"max_tokens": 2, "messages": [user], "thinking": {"type": kind}})
    };
    let fixed = "{% for m in messages %}<{{ m.role }}>{{ m.content }}{% endfor %}";
    let switched = "{% if enable_thinking %}<think>{% endif %}{{ messages[0].content }}";
    let reasoning = Some(ReasoningFamily::QWEN3);
    for (template, reasoning, ignored) in [
        (fixed, reasoning, Some("thinking.type")),
        (switched, reasoning, None),
        (fixed, None, None),
    ] {
        let parsers = (None, reasoning);
        let server = TestServer::start(&ServerSetup { parsers, ..setup(Some(template)) });
        let mut client = HttpClient::connect(server.address);
        for (kind, ignored) in [("disabled", ignored), ("adaptive", None)] {
            let reply = client.post("/v1/messages", &thinking(kind));
            assert_eq!((reply.status, reply.header(IGNORED)), (200, ignored), "{kind} {template}");
        }
    }
}

#[test]
fn template_variables_may_be_lists_and_objects() {
    let template =
        "{{ facts[0] }}{{ options.style.name }}{% for m in messages %}{{ m.content }}{% endfor %}";
    let server = TestServer::start(&setup(Some(template)));
    let mut client = HttpClient::connect(server.address);
    let kwargs = json!({"facts": ["one"], "options": {"style": {"name": "two"}}});
    let reply = ok(&client.post(CHAT, &body(&json!({"chat_template_kwargs": kwargs}))));
    let prompt = json!({"prompt": "onetwohi", "add_special_tokens": false});
    let count = client.post("/tokenize", &prompt).json()["count"].clone();
    assert_eq!(reply["usage"]["prompt_tokens"], count);
}
