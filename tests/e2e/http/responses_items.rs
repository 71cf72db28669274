//! Input items of `/v1/responses`: references to stored items, and items that other servers produced, such as
//! `mcp_call`.

use crate::http_client::{HttpClient, HttpReply};
use crate::test_server::{ServerSetup, TestServer};
use serde_json::{Value, json};
use server::{ApiKeys, ServerOptions};
use text::{ReasoningFamily, ToolCallSyntax};

const PATH: &str = "/v1/responses";
const IGNORED: &str = "x-hadron-ignored-fields";
const SCRIPT: &str = "<think>hm</think>I look.\n<tool_call>\n{\"name\": \"weather\", \
    \"arguments\": {\"city\": \"Rome\"}}\n</tool_call>";
const TEMPLATE: &str = "{% for m in messages %}<{{ m.role }}>{{ m.reasoning_content or '' }}|{{ m.content }}\
    {% for c in m.tool_calls or [] %}{{ c.function.name }}{{ c.function.arguments | tojson }}{% endfor %}\
    {% endfor %}";

fn setup() -> ServerSetup {
    let parsers = (Some(ToolCallSyntax::HERMES), Some(ReasoningFamily::QWEN3));
    let (scripted_output, template) = (Some(SCRIPT), Some(TEMPLATE));
    ServerSetup { scripted_output, parsers, template, ..ServerSetup::default() }
}

fn body(input: &Value) -> Value {
    let schema = json!({"type": "object", "properties": {"city": {"type": "string"}}});
    let tools = json!([{"type": "function", "name": "weather", "parameters": schema}]);
    json!({"input": input, "tools": tools, "max_output_tokens": 300})
}

fn ok(reply: &HttpReply) -> Value {
    assert_eq!(reply.status, 200, "{}", String::from_utf8_lossy(&reply.body));
    reply.json()
}

/// Checks that the prompt of a reply has as many tokens as `prompt`.
fn assert_prompt(client: &mut HttpClient, reply: &Value, prompt: &str) {
    let body = json!({"prompt": prompt, "add_special_tokens": false});
    let count = client.post("/tokenize", &body).json()["count"].clone();
    assert_eq!(reply["usage"]["input_tokens"], count, "{prompt}");
}

#[test]
fn items_of_other_servers_reach_the_template() {
    let server = TestServer::start(&setup());
    let mut client = HttpClient::connect(server.address);
    let input = json!([
        {"role": "user", "content": "hi"},
        {"type": "reasoning", "id": "rs_1", "encrypted_content": "AAAA",
            "summary": [{"type": "summary_text", "text": "thought"}]},
        {"type": "message", "role": "assistant", "phase": "commentary", "status": "completed",
            "content": [{"type": "output_text", "text": "I try.", "annotations": []},
                {"type": "refusal", "refusal": "No."}]},
        {"type": "web_search_call", "id": "ws_1", "status": "completed",
            "action": {"type": "search", "query": "x"}},
        {"type": "local_shell_call", "id": "lsh_1", "call_id": "a", "status": "completed",
            "action": {"type": "exec", "command": ["ls"], "env": {}}},
        {"type": "local_shell_call_output", "id": "a", "output": "files"},
        {"type": "function_call", "call_id": "b", "name": "weather",
            "arguments": "{\"city\": \"Rome\", \"days\": [1, 2"},
        {"type": "function_call_output", "call_id": "b", "output": "cut"},
        {"type": "mcp_call", "id": "mcp_1", "server_label": "docs", "name": "find",
            "arguments": "{}", "output": "found"},
    ]);
    let reply = client.post(PATH, &body(&input));
    let ignored = "input[1].encrypted_content, input[2].phase, input[3], tools";
    assert_eq!(reply.header(IGNORED), Some(ignored));
    let prompt = "<user>|hi<assistant>thought|I try.\nNo.local_shell{\"command\": [\"ls\"], \"env\": {}}\
        <tool>|files<assistant>|weather{\"city\": \"Rome\", \"days\": [1, 2]}<tool>|cut\
        <assistant>|docs__find{}<tool>|found";
    assert_prompt(&mut client, &ok(&reply), prompt);
}

#[test]
fn item_references_name_stored_items() {
    let keys = ApiKeys::new(["one", "two"], ["root"]);
    let options = ServerOptions { api_keys: keys, ..ServerOptions::default() };
    let server = TestServer::start(&ServerSetup { options, ..setup() });
    let mut client = HttpClient::connect(server.address);
    let mut send = |path: &str, key: &str, body: &Value| {
        let head = format!("Authorization: Bearer {key}\r\nContent-Type: application/json\r\n");
        client.send("POST", path, &head, body.to_string().as_bytes());
        client.read().unwrap()
    };
    let first = ok(&send(PATH, "one", &body(&json!("hi"))));
    let output = first["output"].as_array().unwrap();
    let mut input = vec![json!({"role": "user", "content": "hi"})];
    input.extend(output.iter().map(|item| json!({"type": "item_reference", "id": item["id"]})));
    let call_id = &output[2]["call_id"];
    input.push(json!({"type": "function_call_output", "call_id": call_id, "output": "rain"}));
    let second = ok(&send(PATH, "one", &body(&json!(input))));
    let prompt = "<user>|hi<assistant>hm|I look.weather{\"city\": \"Rome\"}<tool>|rain";
    let text = json!({"prompt": prompt, "add_special_tokens": false});
    let count = send("/tokenize", "one", &text).json()["count"].clone();
    assert_eq!(second["usage"]["input_tokens"], count);
    // The `type` of an item reference may be omitted.
    let untyped = json!([{"role": "user", "content": "hi"}, {"id": output[1]["id"]}]);
    ok(&send(PATH, "one", &body(&untyped)));

    let id = output[1]["id"].as_str().unwrap();
    let other = format!("{}9", &id[..id.len() - 1]);
    for (key, id) in [("two", id), ("one", other.as_str()), ("one", "msg_x"), ("one", "msg_0a_1")] {
        let input = json!([{"role": "user", "content": "x"}, {"type": "item_reference", "id": id}]);
        let reply = send(PATH, key, &body(&input));
        let error = reply.json()["error"].clone();
        assert_eq!((reply.status, &error["param"]), (404, &json!("input[1].id")), "{id}");
        assert!(error["message"].as_str().unwrap().contains(id), "{error}");
    }
}

#[test]
fn invalid_input_items_are_rejected_by_name() {
    let server = TestServer::start(&setup());
    let mut client = HttpClient::connect(server.address);
    let part = |part: Value| json!([{"role": "assistant", "content": [part]}]);
    let cases = [
        (json!([{"type": "compaction", "encrypted_content": "AAAA"}]), "input[0].type"),
        (json!([{"type": "a_later_type", "text": "x"}]), "input[0].type"),
        (json!([{"type": "message", "role": "critic", "content": "x"}]), "input[0].role"),
        (json!([{"type": "message", "role": "user"}]), "input[0].content"),
        (part(json!({"type": "refusal"})), "input[0].content[0].type"),
        (json!([{"type": "custom_tool_call", "call_id": "a", "name": "f"}]), "input[0].input"),
        (json!([{"type": "custom_tool_call_output", "call_id": "a"}]), "input[0].output"),
        (json!([{"type": "item_reference"}]), "input[0].id"),
        (json!([{"type": "mcp_call", "id": "x"}]), "input[0].name"),
    ];
    for (input, param) in cases {
        let reply = client.post(PATH, &body(&input));
        assert_eq!(reply.status, 400, "{input}");
        assert_eq!(reply.json()["error"]["param"], param, "{input}");
    }
}

#[test]
fn input_items_of_a_response_are_listed() {
    let server = TestServer::start(&setup());
    let mut client = HttpClient::connect(server.address);
    let output = json!({"type": "function_call_output", "call_id": "c", "output": "sun"});
    let call =
        json!({"type": "function_call", "call_id": "c", "name": "weather", "arguments": "{}"});
    let user = json!({"role": "user", "content": "hi"});
    let first = ok(&client.post(PATH, &body(&json!([user, call, output]))));
    let mut next = body(&json!("more"));
    next["previous_response_id"] = first["id"].clone();
    let second = ok(&client.post(PATH, &next));

    let mut list = |id: &Value, query: &str| {
        let path = format!("{PATH}/{}/input_items{query}", id.as_str().unwrap());
        client.send("GET", &path, "", b"");
        client.read().unwrap()
    };
    let ids = |page: &Value| -> Vec<String> {
        let items = page["data"].as_array().unwrap().iter();
        items.map(|item| item["id"].as_str().unwrap().to_owned()).collect()
    };
    let page = ok(&list(&first["id"], "?order=asc&limit=2&include[]=x"));
    assert_eq!((&page["object"], &page["has_more"]), (&json!("list"), &json!(true)));
    assert_eq!(page["data"][0]["content"][0], json!({"type": "input_text", "text": "hi"}));
    assert_eq!(page["data"][1]["type"], "function_call");
    let rest = format!("?order=asc&after={}", page["last_id"].as_str().unwrap());
    let rest = ok(&list(&first["id"], &rest));
    assert_eq!((&rest["data"][0]["output"], &rest["has_more"]), (&json!("sun"), &json!(false)));

    // The input of the second response consists of the first response's input and output, and a new message.
    let all = ok(&list(&second["id"], "?order=asc"));
    let output_ids = ids(&json!({"data": first["output"]}));
    let expected = [ids(&page), ids(&rest), output_ids].concat();
    assert_eq!(ids(&all)[..expected.len()], expected);
    assert_eq!(all["data"].as_array().unwrap().len(), expected.len() + 1);
    let newest = ok(&list(&second["id"], "?limit=1"));
    assert_eq!(newest["data"][0]["content"][0]["text"], "more");
    assert_eq!(list(&second["id"], "?order=up").json()["error"]["param"], "order");
    assert_eq!(list(&json!("resp_0"), "").status, 404);

    // Later requests may refer to input items.
    let reference = json!([{"type": "item_reference", "id": ids(&page)[0]}]);
    ok(&client.post(PATH, &body(&reference)));
    let compact = client.post("/v1/responses/compact", &body(&json!("hi")));
    let message = compact.json()["error"]["message"].clone();
    assert_eq!(compact.status, 501);
    assert!(message.as_str().unwrap().contains("truncation"), "{message}");
}
