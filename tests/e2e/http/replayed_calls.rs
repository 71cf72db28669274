//! Assistant messages that clients send back in the history: tool calls that `max_tokens` truncated, and
//! messages with the field `refusal`.

use crate::http_client::HttpClient;
use crate::test_server::{ServerSetup, TestServer};
use serde_json::{Value, json};
use text::ToolCallSyntax;

const TEMPLATE: &str = "{% for m in messages %}<{{ m.role }}>{{ m.content or '' }}\
    {% for c in m.tool_calls or [] %}{% for k, v in c.function.arguments.items() %}[{{ k }}={{ v }}]\
    {% endfor %}{% endfor %}{% endfor %}{% if add_generation_prompt %}<assistant>{% endif %}";
const SCRIPT: &str = "<tool_call>\n{\"name\": \"save\", \"arguments\": {\"path\": \"a\", \"text\": \
    \"line one, line two\"}}\n</tool_call>";

fn start() -> TestServer {
    TestServer::start(&ServerSetup {
        scripted_output: Some(SCRIPT),
        template: Some(TEMPLATE),
        parsers: (Some(ToolCallSyntax::HERMES), None),
        ..ServerSetup::default()
    })
}

fn schema() -> Value {
    json!({"type": "object", "properties": {"path": {"type": "string"}, "text": {"type": "string"}}})
}

/// Number of tokens of a prompt.
fn count(client: &mut HttpClient, prompt: &str) -> Value {
    let body = json!({"prompt": prompt, "add_special_tokens": false});
    client.post("/tokenize", &body).json()["count"].clone()
}

#[test]
fn chat_takes_back_its_own_truncated_call() {
    let server = start();
    let mut client = HttpClient::connect(server.address);
    let tools = json!([{"type": "function", "function": {"name": "save", "parameters": schema()}}]);
    let user = json!({"role": "user", "content": "hi"});
    // The output ends inside the second argument; each byte is one token.
    let max_tokens = SCRIPT.find(", line two").unwrap();
    let body = json!({"messages": [user], "tools": tools, "max_tokens": max_tokens});
    let choice = client.post("/v1/chat/completions", &body).json()["choices"][0].clone();
    assert_eq!(choice["finish_reason"], "length");
    let call = &choice["message"]["tool_calls"][0];
    assert_eq!(call["function"]["arguments"], "{\"path\": \"a\", \"text\": \"line one");
    let result = json!({"role": "tool", "tool_call_id": call["id"], "content": "cut"});
    let body = json!({"messages": [user, choice["message"], result], "max_tokens": 1});
    let reply = client.post("/v1/chat/completions", &body);
    assert_eq!(reply.status, 200, "{}", reply.json());
    let prompt = "<user>hi<assistant>[path=a][text=line one]<tool>cut<assistant>";
    assert_eq!(reply.json()["usage"]["prompt_tokens"], count(&mut client, prompt));
}

#[test]
fn other_endpoints_take_back_truncated_calls() {
    let server = start();
    let mut client = HttpClient::connect(server.address);
    let prompt = "<user>hi<assistant>[text=abc]<tool>cut<user>go<assistant>";
    let expected = count(&mut client, prompt);
    let cut = "{\"text\": \"abc";
    let input = json!([
        {"role": "user", "content": "hi"},
        {"type": "function_call", "call_id": "c", "name": "save", "arguments": cut},
        {"type": "function_call_output", "call_id": "c", "output": "cut"},
        {"role": "user", "content": "go"},
    ]);
    let reply = client.post("/v1/responses", &json!({"input": input, "max_output_tokens": 1}));
    assert_eq!(reply.status, 200, "{}", reply.json());
    assert_eq!(reply.json()["usage"]["input_tokens"], expected);
    let messages = json!([
        {"role": "user", "content": "hi"},
        {"role": "assistant", "content": [{"type": "tool_use", "id": "c", "name": "save", "input": cut}]},
        {"role": "user", "content": [
            {"type": "tool_result", "tool_use_id": "c", "content": "cut"}, {"type": "text", "text": "go"}]},
    ]);
    let reply = client.post("/v1/messages/count_tokens", &json!({"messages": messages}));
    assert_eq!(reply.json()["input_tokens"], expected, "{}", reply.json());
}

#[test]
fn refusals_of_the_assistant_reach_the_template() {
    let server = start();
    let mut client = HttpClient::connect(server.address);
    let expected = count(&mut client, "<user>hi<assistant>I cannot.<user>why<assistant>");
    let part = json!({"type": "refusal", "refusal": "I cannot."});
    for refusal in [
        json!({"role": "assistant", "content": [part]}),
        json!({"role": "assistant", "content": null, "refusal": "I cannot."}),
        json!({"role": "assistant", "content": "I cannot.", "refusal": null}),
    ] {
        let user = |text: &str| json!({"role": "user", "content": text});
        let body = json!({"messages": [user("hi"), refusal, user("why")], "max_tokens": 1});
        let reply = client.post("/v1/chat/completions", &body);
        assert_eq!(reply.json()["usage"]["prompt_tokens"], expected, "{refusal} {}", reply.json());
    }
    let body = json!({"messages": [{"role": "user", "content": [part]}], "max_tokens": 1});
    let error = client.post("/v1/chat/completions", &body).json()["error"].clone();
    assert_eq!(error["param"], "messages[0].content[0].type", "{error}");
}
