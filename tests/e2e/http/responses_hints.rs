//! Fields of `/v1/responses` that have no effect: the server accepts them, lists them in a reply header and
//! counts them.

use crate::http_client::{HttpClient, get};
use crate::test_server::{ServerSetup, TestServer};
use serde_json::{Value, json};

const PATH: &str = "/v1/responses";
const IGNORED: &str = "x-hadron-ignored-fields";

#[test]
fn hints_are_accepted_and_named() {
    let mut strict = ServerSetup::default();
    strict.options.strict_fields = true;
    let server = TestServer::start(&strict);
    let mut client = HttpClient::connect(server.address);
    let cases = [
        (json!({"text": {"verbosity": "low"}}), Some("text.verbosity")),
        (json!({"reasoning": {"summary": "detailed"}}), Some("reasoning.summary")),
        (
            json!({"reasoning": {"summary": "concise", "effort": "xhigh"}}),
            Some("reasoning.summary, reasoning.effort"),
        ),
        (json!({"reasoning": {"generate_summary": "auto"}}), Some("reasoning.generate_summary")),
        (json!({"reasoning": {"context": "auto"}}), Some("reasoning.context")),
        (json!({"reasoning": {"effort": "minimal"}}), Some("reasoning.effort")),
        (json!({"include": ["reasoning.encrypted_content"]}), Some("include")),
        (json!({"include": ["file_search_call.results", "later.value"]}), Some("include")),
        (json!({"include": []}), None),
        (json!({"client_metadata": {"a": "b"}}), Some("client_metadata")),
        (json!({"prompt_cache_key": "k"}), Some("prompt_cache_key")),
        (json!({"prompt_cache_retention": "24h"}), Some("prompt_cache_retention")),
        (json!({"safety_identifier": "s"}), Some("safety_identifier")),
        (json!({"service_tier": "auto"}), Some("service_tier")),
        (json!({"user": "u"}), Some("user")),
        (json!({"moderation": {"model": "m"}}), Some("moderation")),
        (json!({"context_management": [{"type": "compaction"}]}), Some("context_management")),
        (json!({"stream_options": {"include_obfuscation": false}}), Some("stream_options")),
        (
            json!({"max_tool_calls": 3, "store": false, "parallel_tool_calls": true}),
            Some("max_tool_calls"),
        ),
    ];
    let names = cases.iter().filter_map(|(_, names)| names.as_deref());
    let named: usize = names.map(|names| names.split(", ").count()).sum();
    for (extra, name) in cases {
        let mut body = json!({"input": "hi", "max_output_tokens": 1});
        body.as_object_mut().unwrap().extend(extra.as_object().unwrap().clone());
        let reply = client.post(PATH, &body);
        assert_eq!((reply.status, reply.header(IGNORED)), (200, name), "{extra}");
        for (field, value) in extra.as_object().unwrap() {
            let echoed = &reply.json()[field];
            let is_echoed = ["store", "max_tool_calls", "parallel_tool_calls"].contains(&&**field);
            assert!(!is_echoed || echoed == value, "{field}: {echoed}");
        }
    }
    let metrics = get(server.address, "/metrics");
    let text = String::from_utf8(metrics.body).unwrap();
    let line = text.lines().find(|line| line.starts_with("hadron:ignored_fields_total{")).unwrap();
    assert!(line.ends_with(&format!(" {named}")), "{line}");
    let unknown = client.post(PATH, &json!({"input": "hi", "no_such_field": 1}));
    assert_eq!(unknown.json()["error"]["param"], "no_such_field");
}

#[test]
fn echoed_settings_repeat_the_request() {
    let server = TestServer::start(&ServerSetup::default());
    let mut client = HttpClient::connect(server.address);
    let body = json!({"input": "hi", "max_output_tokens": 1, "text": {"verbosity": "high"},
        "reasoning": {"effort": "low", "summary": "auto"}});
    let reply = client.post(PATH, &body).json();
    assert_eq!(reply["text"], json!({"format": {"type": "text"}, "verbosity": "high"}));
    assert_eq!(reply["reasoning"], json!({"effort": "low", "summary": "auto"}));
    assert_eq!(reply["usage"]["input_tokens_details"]["cache_write_tokens"], 0);
    let short = json!({"input": "hi", "stop": ["x"], "max_output_tokens": 1, "temperature": 0});
    let whole = client.post(PATH, &short);
    let completed_at = whole.json()["completed_at"].clone();
    assert_eq!(completed_at, Value::Null, "an incomplete response");
}
