//! Limits and deadlines of connections, headers, bodies and queues.

use crate::hash_model::KvSlotAccess;
use crate::http_client::{HttpClient, get, post};
use crate::test_server::{ServerSetup, TestServer};
use engine::AdmissionLimits;
use serde_json::{Value, json};
use server::{ConnectionTimeouts, ServerOptions};
use std::io::Read;
use std::time::{Duration, Instant};

fn reason(reply: &crate::http_client::HttpReply) -> Value {
    reply.json()["error"]["reason"].clone()
}

#[test]
fn headers_and_bodies_are_capped() {
    let setup = ServerSetup { body_bytes_max: 10_000, ..ServerSetup::default() };
    let server = TestServer::start(&setup);
    let at = server.address;
    let send = |headers: &str, body: &[u8]| {
        let mut client = HttpClient::connect(at);
        client.send("POST", "/v1/completions", headers, body);
        client.read().unwrap()
    };
    let many: String =
        (0..70).flat_map(|i| ["X-".into(), i.to_string(), ": 1\r\n".into()]).collect();
    let reply = send(&many, b"{}");
    assert_eq!((reply.status, reason(&reply)), (431, json!("header_limit")));
    let long = format!("X-Long: {}\r\n", "a".repeat(70_000));
    let reply = send(&long, b"{}");
    assert_eq!((reply.status, reason(&reply)), (431, json!("header_limit")));
    let reply = send("", &vec![b' '; 10_001]);
    assert_eq!((reply.status, reason(&reply)), (413, json!("body_limit")));
    let mut client = HttpClient::connect(at);
    let chunk = format!("{:x}\r\n{}\r\n", 6_000, " ".repeat(6_000));
    let head = "POST /v1/completions HTTP/1.1\r\nHost: x\r\nTransfer-Encoding: chunked\r\n\r\n";
    client.send_raw(format!("{head}{chunk}{chunk}0\r\n\r\n").as_bytes()).unwrap();
    assert_eq!(client.read().unwrap().status, 413);
    let reply = send("Content-Encoding: gzip\r\n", b"xx");
    assert_eq!((reply.status, reason(&reply)), (415, json!("compressed_body")));
    let reply = send("Content-Type: text/plain\r\n", b"{}");
    assert_eq!((reply.status, reason(&reply)), (415, json!("not_json")));
    let reply = send("Content-Type: application/json; charset=utf-8\r\n", b"{}");
    assert_eq!(reply.status, 400);
    let mut client = HttpClient::connect(at);
    client.send_raw(b"PRI * HTTP/2.0\r\n\r\nSM\r\n\r\n").unwrap();
    assert!(client.read_head().is_none_or(|reply| reply.status >= 400), "no HTTP/2");
}

/// Request heads that the HTTP library rejects before routing get errors in the server's usual format.
#[test]
fn unreadable_head_is_rejected_in_json() {
    let server = TestServer::start(&ServerSetup::default());
    let long = |count: usize| "a".repeat(count);
    let many = "X-Many: 1\r\n".repeat(200);
    for (bytes, status, told) in [
        ("GET / HTTP/9.9\r\n\r\n".to_owned(), 400, "invalid_value"),
        ("GET  / HTTP/1.1\r\n\r\n".to_owned(), 400, "invalid_value"),
        ("GET / HTTP/1.1\r\nno colon\r\n\r\n".to_owned(), 400, "invalid_value"),
        ("\u{16}\u{3}\u{1} not HTTP at all\r\n\r\n".to_owned(), 400, "invalid_value"),
        (
            "POST / HTTP/1.1\r\nContent-Length: 1\r\nContent-Length: 2\r\n\r\n".to_owned(),
            400,
            "invalid_value",
        ),
        (format!("GET / HTTP/1.1\r\n{many}\r\n"), 431, "header_limit"),
        (format!("GET / HTTP/1.1\r\nX-Long: {}\r\n\r\n", long(300_000)), 431, "header_limit"),
        (format!("GET /{} HTTP/1.1\r\n\r\n", long(70_000)), 431, "header_limit"),
    ] {
        let mut client = HttpClient::connect(server.address);
        // The valid request before the malformed one on the same connection must get its own reply.
        client.send_raw(b"GET /version HTTP/1.1\r\nHost: x\r\n\r\n").unwrap();
        client.send_raw(bytes.as_bytes()).unwrap();
        assert!(client.read().unwrap().json()["version"].is_string());
        let shown = &bytes[..bytes.len().min(60)];
        let reply = client.read().unwrap_or_else(|| panic!("no reply to {shown:?}"));
        assert_eq!((reply.status, reason(&reply)), (status, json!(told)), "{shown:?}");
        assert_eq!(reply.json()["error"]["code"], status);
        assert_eq!(reply.header("content-type"), Some("application/json"));
        assert_eq!(reply.header("connection"), Some("close"));
        assert!(reply.header("date").is_some());
        let mut rest = Vec::new();
        client.reader.read_to_end(&mut rest).unwrap();
        assert!(rest.is_empty(), "nothing follows");
    }
}

#[test]
fn slow_clients_hit_deadlines() {
    let ms = Duration::from_millis;
    // In each case only one timeout is short, so that timeout must be the one that closes the connection.
    let (never, soon) = (Duration::from_mins(10), ms(300));
    let closes = |deadlines: ConnectionTimeouts, body_timeout: Duration, bytes: &[u8]| {
        let options = ServerOptions { body_timeout, ..ServerOptions::default() };
        let server =
            TestServer::start(&ServerSetup { options, deadlines, ..ServerSetup::default() });
        let mut client = HttpClient::connect(server.address);
        let start = Instant::now();
        client.send_raw(bytes).unwrap();
        let mut rest = Vec::new();
        // The read fails after half a minute if the server does not close the connection.
        client.reader.read_to_end(&mut rest).unwrap();
        assert!(start.elapsed() + ms(50) >= soon, "{bytes:?}: {:?}", start.elapsed());
        String::from_utf8(rest).unwrap()
    };
    let header = ConnectionTimeouts { header: soon, idle: never, write: never };
    closes(header, never, b"GET /version HT");
    let idle = ConnectionTimeouts { header: never, idle: soon, write: never };
    closes(idle, never, b"");
    let kept = closes(idle, never, b"GET /version HTTP/1.1\r\nHost: x\r\n\r\n");
    assert!(kept.starts_with("HTTP/1.1 200"));
    let body = b"POST /v1/completions HTTP/1.1\r\nHost: x\r\nContent-Length: 50\r\n\r\n{";
    let reply = closes(ConnectionTimeouts { idle: soon, ..idle }, soon, body);
    assert!(reply.starts_with("HTTP/1.1 408"), "{reply}");
    assert!(reply.contains("slow_body"));
}

#[test]
fn stalled_reader_is_disconnected_alone() {
    let deadlines =
        ConnectionTimeouts { write: Duration::from_millis(600), ..ConnectionTimeouts::default() };
    let setup =
        ServerSetup { deadlines, max_model_len: 60_000, blocks: 8_192, ..ServerSetup::default() };
    let server = TestServer::start(&setup);
    let body = json!({"prompt": "a", "max_tokens": 50_000, "ignore_eos": true, "stream": true,
        "logprobs": 5, "seed": 1});
    let mut stuck = HttpClient::connect(server.address);
    stuck.send("POST", "/v1/completions", "", body.to_string().as_bytes());
    let mut short = body.clone();
    short["max_tokens"] = json!(50);
    assert_eq!(post(server.address, "/v1/completions", &short).events().len(), 50);
    server.wait_idle(Duration::from_secs(20));
}

#[test]
fn a_slow_reader_gets_the_same_text_in_fewer_chunks() {
    // The mock executor (hash model) that accesses no KV slots is fast enough for a stream far larger than
    // the socket buffers.
    let reading = KvSlotAccess::Untouched;
    // The write timeout exceeds the time that a busy machine needs to generate everything.
    let deadlines =
        ConnectionTimeouts { write: Duration::from_mins(5), ..ConnectionTimeouts::default() };
    let (blocks, max_model_len) = (8_192, 70_000);
    let setup = ServerSetup {
        blocks,
        max_model_len,
        slot_access: reading,
        deadlines,
        ..ServerSetup::default()
    };
    let server = TestServer::start(&setup);
    let mut body = json!({"prompt": "a", "max_tokens": 60_000, "ignore_eos": true, "seed": 5});
    let whole = post(server.address, "/v1/completions", &body).json();
    body["stream"] = json!(true);
    let mut slow = HttpClient::connect(server.address);
    slow.send("POST", "/v1/completions", "", body.to_string().as_bytes());
    let (begun, mut seen) = (Instant::now(), false);
    while !seen || server.client().requests_in_flight() > 0 {
        seen |= server.client().requests_in_flight() > 0;
        assert!(begun.elapsed() < Duration::from_secs(200), "it is never generated");
        std::thread::sleep(Duration::from_millis(10));
    }
    let events = slow.read().unwrap().events();
    let text: String = events.iter().map(|e| e["choices"][0]["text"].as_str().unwrap()).collect();
    assert_eq!(text, whole["choices"][0]["text"].as_str().unwrap());
    let longest = events.iter().map(|e| e["choices"][0]["text"].as_str().unwrap().len()).max();
    assert!(longest > Some(256), "deltas were merged: {longest:?}");
}

#[test]
fn full_queue_sends_retry_after() {
    let admission = AdmissionLimits { requests: 4, prefill_tokens: 1_000, bytes: 100_000 };
    let step_time = Duration::from_millis(20);
    let server = TestServer::start(&ServerSetup { step_time, admission, ..ServerSetup::default() });
    let long =
        json!({"prompt": "a", "max_tokens": 2_000, "ignore_eos": true, "stream": true, "n": 4});
    let mut first = HttpClient::connect(server.address);
    first.send("POST", "/v1/completions", "", long.to_string().as_bytes());
    assert_eq!(first.read_head().unwrap().status, 200);
    assert_eq!(get(server.address, "/load").json()["server_load"], 4);
    let reply = post(server.address, "/v1/completions", &json!({"prompt": "b"}));
    assert_eq!((reply.status, reason(&reply)), (429, json!("max_num_queued_reqs")));
    assert!(reply.header("retry-after").unwrap().parse::<u32>().unwrap() >= 1);
    drop(first);
    server.wait_idle(Duration::from_secs(2));
    let many = json!({"prompt": vec![65; 1_500]});
    let reply = post(server.address, "/v1/completions", &many);
    assert_eq!((reply.status, reason(&reply)), (429, json!("max_num_queued_tokens")));
    assert_eq!(post(server.address, "/v1/completions", &json!({"prompt": "b"})).status, 200);
    server.wait_idle(Duration::from_secs(2));
}

/// Bodies in transfer count towards the limit of queued bytes: slow clients with large bodies exhaust it
/// before their requests are complete.
#[test]
fn bodies_count_as_queued_bytes_while_read() {
    let admission = AdmissionLimits { requests: 4, prefill_tokens: 1_000, bytes: 10_000 };
    let server = TestServer::start(&ServerSetup { admission, ..ServerSetup::default() });
    let at = server.address;
    let small = || post(at, "/v1/completions", &json!({"prompt": "b", "max_tokens": 1}));
    let head = "POST /v1/completions HTTP/1.1\r\nHost: x\r\nContent-Length: 9999\r\n\r\n";
    let slow = format!("{head}{}", " ".repeat(9_990));
    let within = |begun: Instant| assert!(begun.elapsed() < Duration::from_secs(20), "too long");
    let (mut held, begun) = (Vec::new(), Instant::now());
    loop {
        // Starts an incomplete body that nearly exhausts the limit of queued bytes. This body may itself be
        // rejected if the previous small request still counts towards the limit; the next iteration then
        // starts another body.
        let mut client = HttpClient::connect(at);
        client.send_raw(slow.as_bytes()).unwrap();
        held.push(client);
        std::thread::sleep(Duration::from_millis(20));
        let reply = small();
        if (reply.status, reason(&reply)) == (429, json!("max_queued_bytes")) {
            break;
        }
        within(begun);
    }
    assert_eq!(get(at, "/load").json()["server_load"], 0, "it is no request yet");
    let reply = post(at, "/tokenize", &json!({"prompt": "b"}));
    assert_eq!((reply.status, reason(&reply)), (429, json!("max_queued_bytes")));
    drop(held);
    let begun = Instant::now();
    while small().status != 200 {
        within(begun);
    }
    server.wait_idle(Duration::from_secs(5));
}

#[test]
fn only_probes_are_served_beyond_the_connection_limit() {
    let server = TestServer::start(&ServerSetup { connections: 4, ..ServerSetup::default() });
    let held: Vec<HttpClient> = (0..4)
        .map(|_| {
            let mut client = HttpClient::connect(server.address);
            client.send("GET", "/version", "", b"");
            assert_eq!(client.read().unwrap().status, 200);
            client
        })
        .collect();
    assert_eq!(get(server.address, "/readyz").status, 200);
    assert_eq!(get(server.address, "/v1/models").status, 503);
    drop(held);
    let begun = Instant::now();
    while get(server.address, "/v1/models").status != 200 {
        assert!(begun.elapsed() < Duration::from_secs(20), "no place is free");
        std::thread::sleep(Duration::from_millis(2));
    }
}

#[test]
fn overlong_prompts_are_rejected_without_tokenizing() {
    let server = TestServer::start(&ServerSetup::default());
    let mut client = HttpClient::connect(server.address);
    let far = "hello world, ".repeat(60_000);
    let user = json!([{"role": "user", "content": far}]);
    let cases = [
        ("/v1/completions", json!({"prompt": far}), "prompt"),
        ("/v1/chat/completions", json!({"messages": user}), "messages"),
        ("/v1/responses", json!({"input": far}), "input"),
    ];
    for (path, body, field) in cases {
        let reply = client.post(path, &body);
        assert_eq!((reply.status, reason(&reply)), (400, json!("context_length_exceeded")));
        let error = reply.json()["error"].clone();
        let message = error["message"].as_str().unwrap();
        let start = "This model's maximum context length is 4096 tokens. However, you requested ";
        let counts = message.strip_prefix(start).unwrap_or_else(|| panic!("{message}"));
        assert!(counts.starts_with(|c: char| c.is_ascii_digit()), "{message}");
        let (_, end) = message.split_once("or completion. ").unwrap();
        let expected = "(context_length_exceeded) The prompt was not tokenized, so its number of \
            tokens is a lower bound.";
        assert_eq!(end, expected);
        assert_eq!(error["code"], "context_length_exceeded");
        assert_eq!(error["param"], field);
    }
    let reply = client.post("/v1/messages", &json!({"messages": user, "max_tokens": 8}));
    let message = reply.json()["error"]["message"].as_str().unwrap().to_owned();
    let count = message.strip_prefix("prompt is too long: ").unwrap_or_default();
    let count = count.strip_suffix(" tokens > 4096 maximum").unwrap_or_default();
    assert!(count.parse::<u64>().is_ok_and(|count| count > 4_096), "{message}");
    let both = json!({"messages": [{"role": "user", "content": "hi"}], "max_tokens": 4_096});
    let reply = client.post("/v1/messages", &both);
    let message = reply.json()["error"]["message"].as_str().unwrap().to_owned();
    assert_eq!(reply.status, 400);
    let start = "input length and `max_tokens` exceed context limit: ";
    assert!(message.starts_with(start) && message.contains(" + 4096 > 4096, "), "{message}");
    // A prompt may have any length if the request truncates it or only tokenises it.
    let cut = json!({"prompt": far, "truncate_prompt_tokens": 16, "max_tokens": 1});
    assert_eq!(client.post("/v1/completions", &cut).status, 200);
    assert_eq!(client.post("/tokenize", &json!({"prompt": far})).status, 200);
    // Two letters are one token, so this prompt just fits the context length.
    let fits = json!({"prompt": "aa".repeat(4_000), "max_tokens": 1});
    assert_eq!(client.post("/v1/completions", &fits).status, 200);
}
