//! `/v1/conversations`: conversations, their items, and responses that continue them.

use crate::http_client::{HttpClient, HttpReply};
use crate::test_server::{ServerSetup, TestServer};
use serde_json::{Value, json};
use server::{ApiKeys, ServerOptions};
use text::{ReasoningFamily, ToolCallSyntax};

const PATH: &str = "/v1/conversations";
const RESPONSES: &str = "/v1/responses";
const SCRIPT: &str = "<think>hm</think>I look.\n<tool_call>\n{\"name\": \"weather\", \
    \"arguments\": {\"city\": \"Rome\"}}\n</tool_call>";
const TEMPLATE: &str = "{% for m in messages %}<{{ m.role }}>{{ m.content }}{% for c in m.tool_calls or [] %}\
    {{ c.function.name }}{% endfor %}{% endfor %}";

fn setup() -> ServerSetup {
    let parsers = (Some(ToolCallSyntax::HERMES), Some(ReasoningFamily::QWEN3));
    let (scripted_output, template) = (Some(SCRIPT), Some(TEMPLATE));
    ServerSetup { scripted_output, parsers, template, ..ServerSetup::default() }
}

fn ok(reply: &HttpReply) -> Value {
    assert_eq!(reply.status, 200, "{}", String::from_utf8_lossy(&reply.body));
    reply.json()
}

fn send(client: &mut HttpClient, method: &str, path: &str) -> HttpReply {
    client.send(method, path, "", b"");
    client.read().unwrap()
}

fn message(text: &str) -> Value {
    json!({"role": "user", "content": text})
}

/// Ids of the items in a list.
fn ids(list: &Value) -> Vec<String> {
    let items = list["data"].as_array().unwrap().iter();
    items.map(|item| item["id"].as_str().unwrap().to_owned()).collect()
}

fn response(conversation: &Value, input: &Value) -> Value {
    let tools = json!([{"type": "function", "name": "weather"}]);
    json!({"conversation": conversation, "input": input, "tools": tools, "max_output_tokens": 300})
}

#[test]
fn conversations_are_created_changed_and_deleted() {
    let server = TestServer::start(&setup());
    let mut client = HttpClient::connect(server.address);
    let made = ok(&client.post(PATH, &json!({"items": [], "metadata": {"k": "v"}})));
    let one = format!("{PATH}/{}", made["id"].as_str().unwrap());
    assert_eq!((&made["object"], &made["metadata"]), (&json!("conversation"), &json!({"k": "v"})));
    assert!(made["created_at"].as_u64().is_some());
    assert_eq!(ok(&send(&mut client, "GET", &one)), made);
    let changed = ok(&client.post(&one, &json!({"metadata": {"k": "w"}})));
    assert_eq!((&changed["metadata"], &changed["id"]), (&json!({"k": "w"}), &made["id"]));
    assert_eq!(ok(&send(&mut client, "GET", &one)), changed);
    let deleted = ok(&send(&mut client, "DELETE", &one));
    assert_eq!(
        deleted,
        json!({"id": made["id"], "object": "conversation.deleted", "deleted": true})
    );
    for (method, path) in [("GET", one.clone()), ("DELETE", one.clone()), ("GET", one + "/items")] {
        let reply = send(&mut client, method, &path);
        let reason = reply.json()["error"]["reason"].clone();
        assert_eq!((reply.status, reason), (404, json!("unknown_conversation")), "{method} {path}");
    }
}

#[test]
fn items_are_listed_in_pages_and_deleted() {
    let server = TestServer::start(&setup());
    let mut client = HttpClient::connect(server.address);
    let made = ok(&client.post(PATH, &json!({"items": [message("0")]})));
    let items = format!("{PATH}/{}/items", made["id"].as_str().unwrap());
    let more: Vec<Value> = (1..25).map(|i| message(&i.to_string())).collect();
    let added = ok(&client.post(&items, &json!({"items": more})));
    assert_eq!((ids(&added).len(), &added["has_more"]), (24, &json!(false)));
    assert_eq!(added["last_id"], ids(&added)[23]);

    let first = ok(&send(&mut client, "GET", &format!("{items}?order=asc&include[]=x")));
    assert_eq!((ids(&first).len(), &first["has_more"]), (20, &json!(true)));
    assert_eq!(first["data"][0]["content"], json!([{"type": "input_text", "text": "0"}]));
    let after = first["last_id"].as_str().unwrap();
    let path = format!("{items}?order=asc&after={after}&limit=10");
    let second = ok(&send(&mut client, "GET", &path));
    assert_eq!((ids(&second).len(), &second["has_more"]), (5, &json!(false)));
    let newest = ok(&send(&mut client, "GET", &format!("{items}?limit=1")));
    assert_eq!(newest["first_id"], second["last_id"]);

    let one = format!("{items}/{}", newest["first_id"].as_str().unwrap());
    assert_eq!(ok(&send(&mut client, "GET", &one)), newest["data"][0]);
    assert_eq!(ok(&send(&mut client, "DELETE", &one))["id"], made["id"]);
    assert_eq!(send(&mut client, "GET", &one).status, 404);
    assert_eq!(send(&mut client, "DELETE", &one).status, 404);
    for (query, param) in
        [("limit=0", "limit"), ("order=up", "order"), ("after=x", "after"), ("x=1", "x")]
    {
        let reply = send(&mut client, "GET", &format!("{items}?{query}"));
        assert_eq!((reply.status, &reply.json()["error"]["param"]), (400, &json!(param)));
    }
    let cases = [
        (json!({"items": 7}), "items"),
        (json!({"items": [{"role": "user"}]}), "items[0].content"),
        (json!({"items": [{"type": "compaction", "encrypted_content": "A"}]}), "items[0].type"),
        (json!({}), "items"),
    ];
    for (body, param) in cases {
        let reply = client.post(&items, &body);
        assert_eq!((reply.status, &reply.json()["error"]["param"]), (400, &json!(param)), "{body}");
    }
    let invalid = client.post(PATH, &json!({"metadata": {"k": 1}}));
    assert_eq!((invalid.status, &invalid.json()["error"]["param"]), (400, &json!("metadata")));
}

#[test]
fn responses_continue_and_extend_a_conversation() {
    let server = TestServer::start(&setup());
    let mut client = HttpClient::connect(server.address);
    let made =
        ok(&client.post(PATH, &json!({"items": [{"role": "developer", "content": "be brief"}]})));
    let items = format!("{PATH}/{}/items?order=asc", made["id"].as_str().unwrap());
    let first = ok(&client.post(RESPONSES, &response(&made["id"], &json!("hi"))));
    assert_eq!(first["conversation"], json!({"id": made["id"]}));
    let list = ok(&send(&mut client, "GET", &items));
    let kinds: Vec<&str> =
        list["data"].as_array().unwrap().iter().map(|i| i["type"].as_str().unwrap()).collect();
    assert_eq!(kinds, ["message", "message", "reasoning", "message", "function_call"]);
    assert_eq!(list["data"][2], first["output"][0]);

    let call_id = &first["output"][2]["call_id"];
    let output = json!([{"type": "function_call_output", "call_id": call_id, "output": "rain"}]);
    let mut second = response(&json!({"id": made["id"]}), &output);
    second["stream"] = json!(true);
    let reply = client.post(RESPONSES, &second);
    assert_eq!(reply.status, 200);
    let text = String::from_utf8(reply.body).unwrap();
    let last = text.lines().filter_map(|line| line.strip_prefix("data: ")).next_back().unwrap();
    let last: Value = serde_json::from_str(last).unwrap();
    let prompt = "<developer>be brief<user>hi<assistant>I look.weather<tool>rain";
    let mut count = |prompt: &str| {
        let body = json!({"prompt": prompt, "add_special_tokens": false});
        client.post("/tokenize", &body).json()["count"].clone()
    };
    assert_eq!(last["response"]["usage"]["input_tokens"], count(prompt));
    let short_count = count("<user>hi");
    let list = ok(&send(&mut client, "GET", &items));
    assert_eq!(ids(&list).len(), 9);

    // A request outside the conversation can reference the conversation's items too.
    let refer = json!([{"type": "item_reference", "id": list["data"][1]["id"]}]);
    let reply = ok(&client.post(RESPONSES, &json!({"input": refer, "max_output_tokens": 1})));
    assert_eq!(reply["usage"]["input_tokens"], short_count);

    let mut both = response(&made["id"], &json!("x"));
    both["previous_response_id"] = first["id"].clone();
    let reply = client.post(RESPONSES, &both);
    assert_eq!((reply.status, &reply.json()["error"]["param"]), (400, &json!("conversation")));
    let reply = client.post(RESPONSES, &response(&json!("conv_none"), &json!("x")));
    assert_eq!((reply.status, &reply.json()["error"]["param"]), (404, &json!("conversation")));
    assert!(reply.json()["error"]["message"].as_str().unwrap().contains("conv_none"));
}

#[test]
fn conversations_are_private_to_their_api_key() {
    let keys = ApiKeys::new(["one", "two"], ["root"]);
    let options = ServerOptions { api_keys: keys, ..ServerOptions::default() };
    let server = TestServer::start(&ServerSetup { options, ..setup() });
    let mut client = HttpClient::connect(server.address);
    let mut send = |method: &str, path: &str, key: &str, body: &Value| {
        let text = if method == "POST" { body.to_string() } else { String::new() };
        client.send(method, path, &format!("Authorization: Bearer {key}\r\n"), text.as_bytes());
        client.read().unwrap()
    };
    let made = ok(&send("POST", PATH, "one", &json!({"items": [message("hi")]})));
    let one = format!("{PATH}/{}", made["id"].as_str().unwrap());
    let items = format!("{one}/items");
    let list = ok(&send("GET", &items, "one", &json!({})));
    let item = format!("{items}/{}", ids(&list)[0]);
    for other in ["two", "root"] {
        for (method, path, body) in [
            ("GET", &one, json!({})),
            ("POST", &one, json!({"metadata": {}})),
            ("GET", &items, json!({})),
            ("POST", &items, json!({"items": [message("x")]})),
            ("GET", &item, json!({})),
            ("DELETE", &item, json!({})),
            ("DELETE", &one, json!({})),
        ] {
            assert_eq!(send(method, path, other, &body).status, 404, "{method} {path}");
        }
        let next = response(&made["id"], &json!("x"));
        assert_eq!(send("POST", RESPONSES, other, &next).status, 404);
    }
    assert_eq!(ok(&send("GET", &items, "one", &json!({}))), list);
}
