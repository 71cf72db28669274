//! Checks that `/openapi.json` agrees with the server in routes, fields and ranges.

use crate::http_client::{HttpReply, get, post};
use crate::test_server::{ServerSetup, TestServer};
use serde_json::{Map, Value, json};
use server::openapi::document;
use server::routes::table;
use std::collections::BTreeSet;
use std::net::SocketAddr;

const IGNORED: &str = "x-hadron-ignored-fields";

/// Checks that the server serves the committed copy of the document. `UPDATE_EXPECT=1 cargo test --test e2e
/// openapi` updates the copy.
#[test]
fn the_committed_document_is_served() {
    let server = TestServer::start(&ServerSetup::default());
    let served = get(server.address, "/openapi.json").json();
    assert_eq!(served, document());
    let path = std::path::Path::new(env!("CARGO_MANIFEST_DIR")).join("docs/openapi.json");
    let text = format!("{}\n", serde_json::to_string_pretty(&served).unwrap());
    expect_test::expect_file![path].assert_eq(&text);
}

#[test]
fn documented_routes_match_the_server() {
    let document = document();
    let written: BTreeSet<(String, String)> = document["paths"]
        .as_object()
        .unwrap()
        .iter()
        .flat_map(|(path, entry)| {
            entry.as_object().unwrap().keys().map(|method| (method.clone(), path.clone()))
        })
        .collect();
    let routed: BTreeSet<(String, String)> =
        table().iter().map(|r| (r.method.to_owned(), r.path.replace("{*", "{"))).collect();
    assert_eq!(written, routed);
    let undescribed: Vec<&(String, String)> = written
        .iter()
        .filter(|(method, path)| document["paths"][path][method]["summary"] == "")
        .collect();
    assert!(undescribed.is_empty(), "no word in server/src/openapi/operations.rs: {undescribed:?}");
}

/// Valid base bodies, to which the tests add fields. Each entry has the name of its schema, the path of its
/// endpoint, and the body.
fn forms() -> Vec<(&'static str, &'static str, Value)> {
    let messages = json!([{"role": "user", "content": "x"}]);
    vec![
        ("ChatRequest", "/v1/chat/completions", json!({"messages": messages, "max_tokens": 1})),
        ("CompletionRequest", "/v1/completions", json!({"prompt": "x", "max_tokens": 1})),
        ("TokenizeRequest", "/tokenize", json!({"prompt": "x"})),
        ("TokenizeRequest", "/tokenize", json!({"messages": messages})),
        ("DetokenizeRequest", "/detokenize", json!({"tokens": [65]})),
    ]
}

fn properties(name: &str) -> Map<String, Value> {
    document()["components"]["schemas"][name]["properties"].as_object().unwrap().clone()
}

fn with(form: &Value, name: &str, value: Value) -> Value {
    let mut body = form.clone();
    body[name] = value;
    body
}

fn param(reply: &HttpReply) -> String {
    reply.json()["error"]["param"].as_str().unwrap_or_default().to_owned()
}

/// Every documented field is accepted: the server reports as ignored only fields that are documented as having
/// no effect. A null value is equivalent to absence, also for unknown fields.
#[test]
fn every_documented_field_is_accepted() {
    let server = TestServer::start(&ServerSetup { priorities: true, ..ServerSetup::default() });
    let at = server.address;
    let mut unknown = BTreeSet::new();
    let (mut known, mut without_effect) = (BTreeSet::new(), BTreeSet::new());
    for (schema, path, form) in forms() {
        for (name, kind) in properties(schema) {
            if kind["description"] == "accepted, no effect" {
                without_effect.insert((schema, name.clone()));
            }
            let absent = if form.get(&name).is_some() {
                form.clone()
            } else {
                with(&form, &name, Value::Null)
            };
            let reply = post(at, path, &absent);
            let text = String::from_utf8_lossy(&reply.body);
            assert_eq!(reply.status, 200, "{path} {name}: {text}");
            assert_eq!(reply.header(IGNORED), None, "{path} {name}: null");
            let set =
                if is_field_known(at, path, &form, &name) { &mut known } else { &mut unknown };
            set.insert((schema, name));
        }
        let reply = post(at, path, &with(&form, "no_such_field", json!(1)));
        assert_eq!(reply.header(IGNORED), Some("no_such_field"), "{path}");
        assert!(!is_field_known(at, path, &form, "no_such_field"), "{path}");
        let reply = post(at, path, &with(&form, "no_such_field", Value::Null));
        assert_eq!((reply.status, reply.header(IGNORED)), (200, None), "{path}");
    }
    // Some fields are valid in one of the base bodies only; each field must be known in at least one.
    let nowhere: BTreeSet<_> = unknown.difference(&known).cloned().collect();
    assert_eq!(nowhere, without_effect);
}

/// Whether the endpoint `path` uses the field `name`. If it does, it does not report the field as ignored
/// when the field, added to the body `form`, has a value of an unexpected type.
fn is_field_known(at: SocketAddr, path: &str, form: &Value, name: &str) -> bool {
    let strange = json!({"strange": {"strange": []}});
    let reply = || post(at, path, &with(form, name, strange));
    form.get(name).is_some() || reply().header(IGNORED) != Some(name)
}

/// Values just outside the documented ranges are rejected with the field's name.
#[test]
fn documented_ranges_match_the_server() {
    let server = TestServer::start(&ServerSetup { priorities: true, ..ServerSetup::default() });
    let mut tried = 0;
    for (schema, path, form) in forms() {
        for (name, schema) in properties(schema) {
            if !is_field_known(server.address, path, &form, &name) {
                continue;
            }
            for value in outside(&schema) {
                let reply = post(server.address, path, &with(&form, &name, value.clone()));
                let at_fault = param(&reply);
                assert_eq!(reply.status, 400, "{path} {name}: {value}");
                let named = at_fault.starts_with(&*name);
                assert!(named, "{path} {name}: {value}: {at_fault}");
                tried += 1;
            }
            check_inside(server.address, path, &form, &name, &schema);
        }
    }
    assert!(tried > 200, "{tried}");
}

/// Values that a schema does not allow: values of other types, and values just outside each bound.
fn outside(schema: &Value) -> Vec<Value> {
    let kinds = match &schema["type"] {
        Value::String(kind) => vec![kind.as_str()],
        Value::Array(kinds) => kinds.iter().filter_map(Value::as_str).collect(),
        _ => return Vec::new(),
    };
    let is = |kind: &str| kinds.contains(&kind);
    let mut values = Vec::new();
    for (kind, value) in [
        ("boolean", json!(true)),
        ("string", json!("x")),
        ("array", json!(["x"])),
        ("object", json!({"x": {"y": 1}})),
        ("integer", json!(1)),
        ("number", json!(0.5)),
    ] {
        let number = is("number") && kind == "integer";
        // The types of list items and of object members are checked elsewhere. For lists and objects, only an
        // integer is tried as a value of a wrong type.
        let container = (is("array") || is("object")) && kind == "integer";
        if !is(kind) && !number || container && !is(kind) {
            values.push(value);
        }
    }
    if let (true, Some(low)) = (is("integer"), schema["minimum"].as_i64()) {
        values.extend(low.checked_sub(1).map(Value::from));
    }
    if let (true, Some(high)) = (is("integer"), schema["maximum"].as_i64()) {
        values.extend(high.checked_add(1).map(Value::from));
    }
    if let (true, Some(low)) = (is("number"), schema["minimum"].as_f64()) {
        values.push(json!(low - 0.01));
    }
    if let (true, Some(low)) = (is("number"), schema["exclusiveMinimum"].as_f64()) {
        values.push(json!(low));
    }
    if let (true, Some(high)) = (is("number"), schema["maximum"].as_f64()) {
        values.push(json!(high + 0.01));
    }
    if let (true, Some(len)) = (is("array"), schema["maxItems"].as_u64()) {
        values.push(Value::from(vec![1; len as usize + 1]));
    }
    if let (true, Some(len)) = (is("string"), schema["maxLength"].as_u64()) {
        values.push(Value::from("x".repeat(len as usize + 1)));
    }
    values
}

/// Checks that the bounds of a range are accepted, or rejected for a reason other than type or range.
fn check_inside(at: SocketAddr, path: &str, form: &Value, name: &str, schema: &Value) {
    for end in ["minimum", "maximum"] {
        let Some(value) = schema.get(end).filter(|_| !schema["type"].is_string()) else { continue };
        let reply = post(at, path, &with(form, name, value.clone()));
        if reply.status == 200 {
            continue;
        }
        let message = reply.json()["error"]["message"].as_str().unwrap_or_default().to_owned();
        let of_range =
            message.starts_with("must be an integer") || message.starts_with("must be a number");
        assert!(!(of_range && param(&reply) == *name), "{path} {name}: {value}: {message}");
    }
}
