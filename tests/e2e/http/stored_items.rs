//! References to items of responses and conversations, and large integers in stored items.

use crate::http_client::{HttpClient, HttpReply};
use crate::test_server::{ServerSetup, TestServer};
use serde_json::{Value, json};
use std::time::{Duration, Instant};

const PATH: &str = "/v1/responses";
const CONVERSATIONS: &str = "/v1/conversations";
const TEMPLATE: &str = "{% for m in messages %}<{{ m.role }}>{{ m.content }}{% for c in m.tool_calls or [] %}\
    {{ c.function.name }}{{ c.function.arguments | tojson }}{% endfor %}{% endfor %}";
const LARGE: &str = "-123456789012345678901234567890";

fn setup() -> ServerSetup {
    ServerSetup { scripted_output: Some("I look."), template: Some(TEMPLATE), ..Default::default() }
}

fn text(reply: &HttpReply) -> String {
    let text = String::from_utf8_lossy(&reply.body).into_owned();
    assert_eq!(reply.status, 200, "{text}");
    text
}

fn ok(reply: &HttpReply) -> Value {
    text(reply);
    reply.json()
}

fn send(client: &mut HttpClient, method: &str, path: &str, body: &str) -> HttpReply {
    client.send(method, path, "Content-Type: application/json\r\n", body.as_bytes());
    client.read().unwrap()
}

/// Sends a request that references the item `id`. Returns whether its prompt has as many tokens as `prompt`;
/// `None` = the item is not stored.
fn refers(client: &mut HttpClient, id: &Value, prompt: &str) -> Option<bool> {
    let input = json!([{"type": "item_reference", "id": id}]);
    let reply = client.post(PATH, &json!({"input": input, "store": false}));
    if reply.status == 404 {
        return None;
    }
    let body = json!({"prompt": prompt, "add_special_tokens": false});
    let count = client.post("/tokenize", &body).json()["count"].clone();
    Some(ok(&reply)["usage"]["input_tokens"] == count)
}

#[test]
fn items_are_found_in_all_objects_that_contain_them() {
    let server = TestServer::start(&setup());
    let mut client = HttpClient::connect(server.address);
    for (store, streams) in [(false, false), (false, true), (true, false)] {
        let made = ok(&client.post(CONVERSATIONS, &json!({})));
        let one = format!("{CONVERSATIONS}/{}", made["id"].as_str().unwrap());
        let items = format!("{one}/items?order=asc");
        let request =
            json!({"conversation": made["id"], "input": "hi", "store": store, "stream": streams});
        let reply = client.post(PATH, &request);
        assert_eq!(reply.status, 200);
        let list = ok(&send(&mut client, "GET", &items, ""));
        let (user, assistant) = (&list["data"][0]["id"], &list["data"][1]["id"]);
        if !streams {
            let response = reply.json();
            assert_eq!(response["output"][0]["id"], *assistant);
            let response = format!("{PATH}/{}", response["id"].as_str().unwrap());
            if store {
                let inputs = ok(&send(&mut client, "GET", &format!("{response}/input_items"), ""));
                assert_eq!(inputs["data"][0]["id"], *user);
                ok(&send(&mut client, "DELETE", &response, ""));
            }
        }
        assert_eq!(refers(&mut client, user, "<user>hi"), Some(true), "{list}");
        assert_eq!(refers(&mut client, assistant, "<assistant>I look."), Some(true), "{list}");
        let item = format!("{one}/items/{}", user.as_str().unwrap());
        assert_eq!(ok(&send(&mut client, "GET", &item, "")), list["data"][0]);
        ok(&send(&mut client, "DELETE", &item, ""));
        assert_eq!(refers(&mut client, user, ""), None);
        ok(&send(&mut client, "DELETE", &one, ""));
        assert_eq!(refers(&mut client, assistant, ""), None);
    }
}

#[test]
fn items_outlive_their_conversation_in_a_stored_response() {
    let server = TestServer::start(&setup());
    let mut client = HttpClient::connect(server.address);
    let made = ok(&client.post(CONVERSATIONS, &json!({})));
    let response = ok(&client.post(PATH, &json!({"conversation": made["id"], "input": "hi"})));
    let one = format!("{CONVERSATIONS}/{}", made["id"].as_str().unwrap());
    ok(&send(&mut client, "DELETE", &one, ""));
    let id = &response["output"][0]["id"];
    assert_eq!(refers(&mut client, id, "<assistant>I look."), Some(true));
}

#[test]
fn stored_numbers_keep_all_digits() {
    let server = TestServer::start(&setup());
    let mut client = HttpClient::connect(server.address);
    let call = format!(
        r#"{{"type":"function_call","call_id":"c","name":"f","arguments":{{"n":{LARGE}}}}}"#
    );
    let tool = format!(
        r#"{{"type":"function","name":"f","parameters":{{"properties":{{"n":{{"minimum":{LARGE}}}}}}}}}"#
    );
    let made = ok(&send(&mut client, "POST", CONVERSATIONS, &format!(r#"{{"items":[{call}]}}"#)));
    let items = format!("{CONVERSATIONS}/{}/items", made["id"].as_str().unwrap());
    let list = text(&send(&mut client, "GET", &items, ""));
    assert!(list.contains(&format!(r#""arguments":{{"n":{LARGE}}}"#)), "{list}");
    let id = &serde_json::from_str::<Value>(&list).unwrap()["data"][0]["id"];
    let prompt = format!(r#"<assistant>f{{"n": {LARGE}}}"#);
    assert_eq!(refers(&mut client, id, &prompt), Some(true));

    let request = format!(
        r#"{{"conversation":{},"input":[{call}],"tools":[{tool}],"background":true}}"#,
        made["id"]
    );
    let first = text(&send(&mut client, "POST", PATH, &request));
    assert!(first.contains(&format!(r#""minimum":{LARGE}"#)), "{first}");
    let id = serde_json::from_str::<Value>(&first).unwrap()["id"].clone();
    let path = format!("{PATH}/{}", id.as_str().unwrap());
    let deadline = Instant::now() + Duration::from_secs(20);
    let body = loop {
        let body = text(&send(&mut client, "GET", &path, ""));
        if body.contains(r#""status":"completed""#) {
            break body;
        }
        assert!(Instant::now() < deadline, "{body}");
        std::thread::sleep(Duration::from_millis(5));
    };
    assert!(body.contains(&format!(r#""minimum":{LARGE}"#)), "{body}");
    let inputs = text(&send(&mut client, "GET", &format!("{path}/input_items"), ""));
    assert!(inputs.contains(&format!(r#"{{"n":{LARGE}}}"#)), "{inputs}");

    let streamed = format!(r#"{{"input":"hi","tools":[{tool}],"stream":true}}"#);
    let events = text(&send(&mut client, "POST", PATH, &streamed));
    for event in ["response.created", "response.completed"] {
        let data = events.split(&format!("event: {event}\n")).nth(1).unwrap();
        let data = data.lines().next().unwrap();
        assert!(data.contains(&format!(r#""minimum":{LARGE}"#)), "{data}");
    }

    // The next prompt contains the initial items of the conversation and the items of the response.
    let body = json!({"conversation": made["id"], "input": "more"});
    let next = ok(&client.post(PATH, &body));
    let calls =
        format!(r#"<assistant>f{{"n": {LARGE}}}f{{"n": {LARGE}}}<assistant>I look.<user>more"#);
    let count = json!({"prompt": calls, "add_special_tokens": false});
    let count = client.post("/tokenize", &count).json()["count"].clone();
    assert_eq!(next["usage"]["input_tokens"], count);
}
