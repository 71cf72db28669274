//! Chat templates over HTTP: message formats that clients send, and request fields that a template does not
//! render.

use crate::http_client::{HttpClient, post};
use crate::test_server::{ServerSetup, TestServer};
use serde_json::{Value, json};
use server::ServerOptions;

const CHAT: &str = "/v1/chat/completions";
/// Chat template that requires message content as a list of parts and tool-call arguments as a string.
const PARTS: &str = "{% for m in messages %}{% if m.role in ['system', 'user', 'assistant'] %}<{{ m.role }}>\
    {% for p in m.content or [] %}{{ p.text }}{% endfor %}\
    {% for c in m.tool_calls or [] %}{{ '|' + c.function.arguments }}{% endfor %}\
    {% endif %}{% endfor %}";

fn start(template: &'static str, strict_fields: bool) -> TestServer {
    let options = ServerOptions { strict_fields, ..ServerOptions::default() };
    TestServer::start(&ServerSetup { template: Some(template), options, ..ServerSetup::default() })
}

/// Renders a conversation. Returns the prompt text, or the error message.
fn prompt(server: &TestServer, messages: &Value) -> Result<String, String> {
    let body = json!({"messages": messages, "add_special_tokens": false});
    let reply = post(server.address, "/tokenize", &body);
    if reply.status != 200 {
        assert_eq!(reply.status, 400);
        return Err(reply.json()["error"]["message"].as_str().unwrap().to_owned());
    }
    let tokens = json!({"tokens": reply.json()["tokens"]});
    let text = post(server.address, "/detokenize", &tokens).json();
    Ok(text["prompt"].as_str().unwrap().to_owned())
}

#[test]
fn messages_reach_the_prompt_in_every_form() {
    let server = start(PARTS, false);
    let parts = json!([{"type": "text", "text": "a"}, {"type": "input_text", "text": "b"}]);
    let call = json!({"type": "function", "function": {"name": "f", "arguments": "{\"a\":1}"}});
    let messages = json!([
        {"role": "developer", "content": "d"},
        {"role": "user", "content": parts},
        {"role": "assistant", "content": null, "tool_calls": [call]},
        {"role": "user", "content": "c"},
    ]);
    let text = "<system>d<user>ab<assistant>|{\"a\":1}<user>c";
    assert_eq!(prompt(&server, &messages), Ok(text.to_owned()));
    let lost = json!([{"role": "user", "content": "a"}, {"role": "critic", "content": "b"}]);
    let message = prompt(&server, &lost).unwrap_err();
    assert!(message.contains("critic") && message.contains("message 1"), "{message}");
    let arguments = "{{ messages[0].content + 1 }}";
    let failed = prompt(&start(arguments, false), &lost).unwrap_err();
    assert!(failed.starts_with("the chat template cannot render these messages: "), "{failed}");
}

#[test]
fn fields_that_the_template_hides_are_reported() {
    let parameters = json!({"type": "object", "properties": {}});
    let tool =
        json!({"type": "function", "function": {"name": "mcp/a.b:c", "parameters": parameters}});
    let messages = json!([{"role": "user", "content": "a"}]);
    let body = json!({"messages": messages, "tools": [tool], "max_tokens": 1});
    let header = "x-hadron-ignored-fields";
    let reply = post(start(PARTS, false).address, CHAT, &body);
    assert_eq!((reply.status, reply.header(header)), (200, Some("tools")));
    let reply = post(start(PARTS, true).address, CHAT, &body);
    assert_eq!((reply.status, &reply.json()["error"]["param"]), (400, &json!("tools")));
    let all = start("{{ tools|tojson }}{{ messages|tojson }}", true);
    let reply = post(all.address, CHAT, &body);
    assert_eq!((reply.status, reply.header(header)), (200, None));
}

#[test]
fn integers_of_any_size_reach_the_prompt() {
    const TEMPLATE: &str = "{{ messages[0].weight }} {% for c in messages[1].tool_calls %}\
        {{ c.function.arguments | tojson }} {% endfor %}{{ n + 1 }} {{ list }} \
        {{ tools[0].function.parameters | tojson }}";
    let large = "123456789012345678901234567890";
    let call = |arguments: &str| {
        format!(r#"{{"type":"function","function":{{"name":"f","arguments":{arguments}}}}}"#)
    };
    let calls = [
        call(&format!(r#"{{"a":{large},"b":[-{large},0.1]}}"#)),
        call(&format!(r#""{{\"a\": {large}, \"b\": 1.0, \"c\": \"cut""#)),
    ];
    let schema = format!(r#"{{"type":"object","properties":{{"x":{{"maximum":{large}}}}}}}"#);
    let body = format!(
        r#"{{"messages":[{{"role":"user","content":"hi","weight":-{large}}},
            {{"role":"assistant","content":"","tool_calls":[{}]}}],
            "tools":[{{"type":"function","function":{{"name":"f","parameters":{schema}}}}}],
            "chat_template_kwargs":{{"n":18446744073709551615,"list":[-0,1E2,9007199254740993]}},
            "add_special_tokens":false}}"#,
        calls.join(",")
    );
    let server = start(TEMPLATE, false);
    let mut client = HttpClient::connect(server.address);
    client.send("POST", "/tokenize", "", body.as_bytes());
    let reply = client.read().unwrap();
    assert_eq!(reply.status, 200, "{}", String::from_utf8_lossy(&reply.body));
    let tokens = json!({"tokens": reply.json()["tokens"]});
    let text = post(server.address, "/detokenize", &tokens).json()["prompt"].clone();
    let expected = format!(
        "-{large} {{\"a\": {large}, \"b\": [-{large}, 0.1]}} \
         {{\"a\": {large}, \"b\": 1.0, \"c\": \"cut\"}} \
         18446744073709551616 [0, 100.0, 9007199254740993] \
         {{\"type\": \"object\", \"properties\": {{\"x\": {{\"maximum\": {large}}}}}}}"
    );
    assert_eq!(text.as_str(), Some(expected.as_str()));
}
