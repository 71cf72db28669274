//! Structured output on a mock executor (hash model): every kind of grammar, how constrained outputs end, and
//! the cost for other requests.

use crate::deadlines::BoundedJoin as _;
use crate::http_client::{HttpClient, post};
use crate::test_server::{ServerSetup, TestServer};
use serde_json::{Value, json};
use std::time::{Duration, Instant};

const PATH: &str = "/v1/completions";

fn completion(extra: &Value) -> Value {
    let mut body =
        json!({"prompt": "once upon a time", "max_tokens": 300, "temperature": 1, "seed": 7});
    body.as_object_mut().unwrap().extend(extra.as_object().unwrap().clone());
    body
}

/// Text and finish reason of a completion with one choice.
fn complete(server: &TestServer, extra: &Value) -> (String, String) {
    let reply = post(server.address, PATH, &completion(extra));
    let message = String::from_utf8_lossy(&reply.body).into_owned();
    assert_eq!(reply.status, 200, "{extra}: {message}");
    let choice = &reply.json()["choices"][0];
    let text = |name: &str| choice[name].as_str().unwrap_or_else(|| panic!("{message}")).to_owned();
    (text("text"), text("finish_reason"))
}

#[test]
fn every_structured_output_kind_limits_the_text() {
    let server = TestServer::start(&ServerSetup::default());
    let schema = json!({"type": "object", "required": ["colour", "count"], "additionalProperties": false,
        "properties": {"colour": {"enum": ["red", "green"]}, "count": {"type": "integer", "minimum": 3,
        "maximum": 12}}});
    let is_valid = |text: &str| {
        let value: Value = serde_json::from_str(text).unwrap_or_else(|e| panic!("{text}: {e}"));
        assert!(jsonschema::is_valid(&schema, &value), "{text}");
    };
    for seed in 0..20 {
        let of = |name: &str, value: &Value| {
            let mut body = json!({"seed": seed});
            body[name] = value.clone();
            let (text, end) = complete(&server, &body);
            assert_eq!(end, "stop", "{name} {value}: {text}");
            text
        };
        let outputs = |value: Value| of("structured_outputs", &value);
        is_valid(&of(
            "response_format",
            &json!({"type": "json_schema", "json_schema": {"name": "a", "schema": schema}}),
        ));
        let compact = outputs(json!({"json": schema, "disable_any_whitespace": true}));
        is_valid(&compact);
        assert!(!compact.contains([' ', '\n']), "{compact}");
        is_valid(&of("json_schema", &json!(schema.to_string())));
        assert!(
            ["yes", "no", "it \"depends\""]
                .contains(&outputs(json!({"choice": ["yes", "no", "it \"depends\""]})).as_str())
        );
        let hex = outputs(json!({"regex": "0x[0-9a-f]{2,6}"}));
        let digits = hex.strip_prefix("0x").unwrap();
        assert!(
            (2..=6).contains(&digits.len()) && u32::from_str_radix(digits, 16).is_ok(),
            "{hex}"
        );
        assert_eq!(of("regex", &json!("a{17}")), "a".repeat(17));
        let sum = outputs(json!({"grammar": "start: num (\"+\" num){2}\nnum: /[0-9]{1,3}/"}));
        assert_eq!(sum.split('+').filter(|n| n.parse::<u16>().is_ok()).count(), 3, "{sum}");
    }
    let object = json!({"response_format": {"type": "json_object"}, "max_tokens": 4_000});
    let (text, end) = complete(&server, &object);
    assert!(text.trim_start().starts_with('{'), "{text}");
    assert!(end == "length" || serde_json::from_str::<Value>(&text).unwrap().is_object(), "{text}");
    server.wait_idle(Duration::from_secs(5));
}

#[test]
fn constraints_combine_with_stop_and_min_tokens() {
    let server = TestServer::start(&ServerSetup::default());
    let one = json!({"structured_outputs": {"regex": "[ab]{4}"}});
    let with = |name: &str, value: Value| {
        let mut body = one.clone();
        body[name] = value;
        body
    };
    let (text, end) = complete(&server, &with("ignore_eos", json!(true)));
    assert_eq!(
        (text.len(), end.as_str()),
        (4, "stop"),
        "{text}: an end that must come is not ignored"
    );
    let (text, end) = complete(&server, &with("logit_bias", json!({"97": 100, "98": -100})));
    assert!(text.len() == 4 && end == "stop", "{text}");
    let (text, _) = complete(&server, &with("allowed_token_ids", json!([98, 99, 319])));
    assert_eq!(text, "bbbb");
    let (text, end) =
        complete(&server, &json!({"regex": "x*", "ignore_eos": true, "max_tokens": 40}));
    assert_eq!((text, end.as_str()), ("x".repeat(40), "length"), "an end that may come is ignored");
    let (_, end) = complete(&server, &json!({"regex": "x*", "min_tokens": 30, "max_tokens": 31}));
    assert!(end == "length" || end == "stop");
    let (text, end) = complete(&server, &with("max_tokens", json!(2)));
    assert!((2..=4).contains(&text.len()) && end == "length", "{text}");
    for (name, value) in [("allowed_token_ids", json!([99])), ("min_tokens", json!(5))] {
        let reply = post(server.address, PATH, &completion(&with(name, value)));
        assert_eq!(reply.status, 400, "{}", String::from_utf8_lossy(&reply.body));
        assert_eq!(reply.json()["error"]["reason"], "no_token_allowed");
    }
    server.wait_idle(Duration::from_secs(5));
}

#[test]
fn constraints_apply_to_choices_streams_and_chat() {
    let server = TestServer::start(&ServerSetup::default());
    let body = completion(&json!({"n": 4, "structured_outputs": {"regex": "[a-z]{5,40}[0-9]"}}));
    let unary = post(server.address, PATH, &body).json();
    let texts: Vec<&str> =
        unary["choices"].as_array().unwrap().iter().map(|c| c["text"].as_str().unwrap()).collect();
    assert!(texts.iter().all(|t| t.ends_with(|c: char| c.is_ascii_digit())), "{texts:?}");
    assert!(texts.iter().any(|t| *t != texts[0]), "choices differ: {texts:?}");
    let mut streamed = vec![String::new(); 4];
    let mut body = body.clone();
    body["stream"] = json!(true);
    for event in post(server.address, PATH, &body).events() {
        for choice in event["choices"].as_array().unwrap() {
            streamed[choice["index"].as_u64().unwrap() as usize] +=
                choice["text"].as_str().unwrap();
        }
    }
    assert_eq!(streamed, texts);
    let chat = json!({"messages": [{"role": "user", "content": "?"}], "seed": 1, "logprobs": true,
        "response_format": {"type": "json_schema", "json_schema": {"name": "n", "schema": {"const": "so"}}}});
    let reply = post(server.address, "/v1/chat/completions", &chat).json();
    assert_eq!(
        reply["choices"][0]["message"]["content"].as_str().map(str::trim),
        Some("\"so\""),
        "{reply}"
    );
}

/// Grammars that are expensive to compile: each is rejected, or its bitmasks are computed fast.
fn hostile() -> Vec<Value> {
    let deep =
        |open: &str, close: &str, n: usize| format!("{}a{}", open.repeat(n), close.repeat(n));
    let mut nested = json!({"type": "string"});
    for _ in 0..100 {
        nested = json!({"items": nested});
    }
    vec![
        json!({"regex": deep("(", ")", 20_000)}),
        json!({"regex": "(((((a{1,100}){1,100}){1,100}){1,100}){1,100}){1,100}"}),
        json!({"regex": "(a|b|ab)*c{99999}"}),
        json!({"grammar": format!("start: {}", deep("(", ")", 20_000))}),
        json!({"grammar": "start: start start"}),
        json!({"grammar": "start: a\na: a a | \"x\"{1,400000}"}),
        json!({"json": {"type": "string", "minLength": 1_000_000, "pattern": "^(a|b|ab)*$"}}),
        json!({"json": {"$ref": "#/$defs/a", "$defs": {"a": {"$ref": "#/$defs/b"}, "b": {"$ref": "#/$defs/a"}}}}),
        json!({"json": nested}),
        json!({"choice": vec!["x".repeat(60_000); 4]}),
        json!({"choice": ["x".repeat(60_000), "y".to_owned()]}),
        json!({"json": {"$ref": "#"}}),
        json!({"json": {"type": "string", "minLength": 1_000_000_000}}),
        json!({"json": {"type": "integer", "multipleOf": 999_983}}),
        json!({"grammar": "start: \"a\" b\nb: %json {\"items\": {\"multipleOf\": 999983}}"}),
        json!({"json": {"enum": (0..6_000).map(|i| format!("w{}", i * 7_919)).collect::<Vec<_>>()}}),
        json!({"regex": "((a{1,1000}){1,1000}b){1,1000}"}),
        json!({"regex": "(?=a)b"}),
    ]
}

#[test]
fn hostile_grammar_is_rejected_fast_and_isolated() {
    let server = TestServer::start(&ServerSetup {
        step_time: Duration::from_millis(2),
        ..ServerSetup::default()
    });
    let address = server.address;
    let attackers: Vec<_> = hostile()
        .into_iter()
        .map(|outputs| {
            std::thread::spawn(move || {
                let body = completion(&json!({"structured_outputs": outputs, "max_tokens": 8}));
                let since = Instant::now();
                let reply = post(address, PATH, &body);
                (outputs, reply.status, reply.json()["error"]["reason"].clone(), since.elapsed())
            })
        })
        .collect();
    let mut client = HttpClient::connect(address);
    let mut slowest = Duration::ZERO;
    while attackers.iter().any(|attacker| !attacker.is_finished()) {
        let since = Instant::now();
        let reply = client.post(PATH, &completion(&json!({"max_tokens": 4})));
        assert_eq!(reply.status, 200);
        slowest = slowest.max(since.elapsed());
    }
    let mut answered = 0;
    for attacker in attackers {
        let (outputs, status, reason, took) = attacker.join_bounded();
        let shown: String = outputs.to_string().chars().take(80).collect();
        answered += u32::from(status != 429);
        let rejected = matches!(
            (status, reason.as_str()),
            // On a busy machine no grammar worker was available within ten seconds, or a worker got no
            // processor time within three.
            (400, Some("invalid_grammar")) | (429, Some("grammars_overloaded"))
        );
        assert!(status == 200 || rejected, "{shown}: {status} {reason}");
        assert!(took < Duration::from_secs(30), "{shown}: {status} after {took:?}");
    }
    assert!(answered >= 10, "{answered} requests got a worker and processor time");
    assert!(slowest < Duration::from_secs(10), "another request waited {slowest:?}");
    server.wait_idle(Duration::from_secs(5));
}

#[test]
fn multiples_with_many_places_are_followed() {
    let server = TestServer::start(&ServerSetup::default());
    for fine in [1e-9, 1e-12, 1e-308] {
        let schema = json!({"type": "number", "multipleOf": fine});
        let mut body = completion(&json!({"structured_outputs": {"json": schema}}));
        body["max_tokens"] = json!(20);
        let reply = post(server.address, PATH, &body);
        assert_eq!(reply.status, 200, "{fine}: {}", String::from_utf8_lossy(&reply.body));
    }
}

/// The error message for a grammar that cannot be compiled is complete and readable, and names the field.
#[test]
fn grammar_errors_are_explained() {
    let server = TestServer::start(&ServerSetup::default());
    let rejected = |outputs: Value| {
        let body = completion(&json!({"structured_outputs": outputs}));
        // The server rejects a request with 429 if the test compilation of its grammar in a worker process
        // (dry run) gets no processor time; the test then repeats the request.
        let mut replies = (0..20).map(|_| post(server.address, PATH, &body));
        let reply = replies.find(|reply| reply.status != 429).expect("a worker within 20 requests");
        assert_eq!(reply.status, 400, "{body}");
        let error = reply.json()["error"].clone();
        let text = |key: &str| error[key].as_str().unwrap_or_default().to_owned();
        (text("param"), text("message"))
    };
    let leaks = ["panic", "backtrace", ".rs", "src/", "overflow", "/root", "llguidance"];
    for (keyword, value) in [
        ("multipleOf", json!(1e308)),
        ("multipleOf", json!(0)),
        ("multipleOf", json!(-1)),
        ("minimum", json!(1e308)),
        ("exclusiveMaximum", json!(-1e300)),
        ("minLength", json!(0.5)),
    ] {
        let (param, message) = rejected(json!({"json": {"type": "number", keyword: value}}));
        assert_eq!(param, "structured_outputs.json");
        assert!(message.contains(keyword), "{keyword} {value}: {message}");
        assert!(!leaks.iter().any(|leak| message.contains(leak)), "{message}");
    }
    // The grammar library (llguidance) panics for this pattern: it splits a text inside a character.
    let odd = format!("a{}", "é".repeat(80));
    let (_, message) = rejected(json!({"json": {"type": "string", "pattern": [odd]}}));
    // On a busy machine logging the panic's backtrace may take longer than the timeout of the test
    // compilation in the worker process (dry run).
    let is_late = message.contains("longer than");
    assert!(is_late || message.ends_with("the grammar cannot be compiled"), "{message}");
    assert!(!leaks.iter().any(|leak| message.contains(leak)), "{message}");
    let (param, message) = rejected(json!({"regex": "(a"}));
    assert_eq!(param, "structured_outputs.regex");
    assert!(message.contains(&param) && message.contains("a group is not closed"), "{message}");
    let (param, message) = rejected(json!({"json": {}, "whitespace_pattern": "(a"}));
    assert_eq!(param, "structured_outputs.whitespace_pattern");
    assert!(message.contains(&param) && message.contains("a group is not closed"), "{message}");
    let (param, message) = rejected(json!({"json": {"$ref": "#"}}));
    assert_eq!(param, "structured_outputs.json");
    assert!(message.contains(&param) && !message.contains("NoExtension"), "{message}");
}
