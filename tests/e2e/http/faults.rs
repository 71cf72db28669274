//! Clients that disconnect, engines that fail, and servers that shut down.

use crate::http_client::{HttpClient, get};
use crate::test_server::{ServerSetup, TestServer};
use engine::EngineClient;
use engine::SupervisorEvent;
use scheduler::{AbortCause, FinishReason};
use serde_json::{Value, json};
use server::ServerOptions;
use std::time::{Duration, Instant};

const STEP: Duration = Duration::from_millis(10);

fn slow() -> ServerSetup {
    ServerSetup { step_time: STEP, ..ServerSetup::default() }
}

fn stream_body(max_tokens: u32) -> String {
    json!({"prompt": vec![65; 40], "max_tokens": max_tokens, "ignore_eos": true, "stream": true})
        .to_string()
}

fn in_use(client: &EngineClient) -> u32 {
    client.stats().blocks.in_use
}

#[test]
fn client_disconnect_frees_blocks_within_a_step() {
    let server = TestServer::start(&slow());
    for chunks in [1, 3, 8] {
        let mut client = HttpClient::connect(server.address);
        client.send("POST", "/v1/completions", "", stream_body(4_000).as_bytes());
        assert_eq!(client.read_head().unwrap().status, 200);
        for _ in 0..chunks {
            client.read_chunk().unwrap();
        }
        assert!(in_use(server.client()) > 0);
        let before = server.client().stats().steps_total;
        drop(client);
        let start = Instant::now();
        server.wait_idle(Duration::from_secs(20));
        // On an idle machine the abort takes one step and 50 ms; on any machine, nearly all remaining steps
        // must be skipped.
        let steps = server.client().stats().steps_total - before;
        assert!(steps < 100, "{steps} steps, {:?}", start.elapsed());
    }
    let cached = server.client().stats().blocks.cached;
    assert!(cached > 0, "the prefix stays cached");
}

#[test]
fn clients_may_disconnect_at_any_time() {
    let server = TestServer::start(&ServerSetup { max_num_seqs: 4, ..slow() });
    for wait_ms in [0, 1, 3, 10, 25] {
        let clients: Vec<HttpClient> = (0..12)
            .map(|_| {
                let mut client = HttpClient::connect(server.address);
                client.send("POST", "/v1/completions", "", stream_body(500).as_bytes());
                client
            })
            .collect();
        std::thread::sleep(Duration::from_millis(wait_ms));
        drop(clients);
        server.wait_idle(Duration::from_secs(3));
    }
}

#[test]
fn health_follows_startup_drain_and_stop() {
    let setup = slow();
    let mut server = TestServer::listen(&setup);
    let at = server.address;
    let status = |path: &str| get(at, path).status;
    let table = || ["/livez", "/live", "/readyz", "/ready", "/health", "/ping"].map(status);
    assert_eq!(table(), [200, 200, 503, 503, 503, 503]);
    let early = get(at, "/v1/models");
    assert_eq!((early.status, &early.json()["error"]["reason"]), (503, &json!("starting")));
    assert_eq!(early.header("retry-after"), Some("10"));
    assert_eq!(status("/version"), 200);
    server.bring_up(&setup);
    assert_eq!(table(), [200; 6]);

    let mut streams: Vec<HttpClient> = (0..3)
        .map(|i| {
            let mut client = HttpClient::connect(at);
            let tokens = if i == 0 { 10 } else { 4_000 };
            client.send("POST", "/v1/completions", "", stream_body(tokens).as_bytes());
            client
        })
        .collect();
    for client in &mut streams {
        assert_eq!(client.read_head().unwrap().status, 200);
    }
    server.app.health.set_draining();
    assert_eq!(table(), [200, 200, 503, 503, 503, 503]);
    let mut late = HttpClient::connect(at);
    late.send("POST", "/v1/completions", "", stream_body(5).as_bytes());
    let late = late.read().unwrap();
    assert_eq!((late.status, &late.json()["error"]["reason"]), (503, &json!("draining")));
    assert_eq!(late.header("retry-after"), Some("1"));

    std::thread::sleep(Duration::from_millis(300));
    server.client().close(&FinishReason::Abort(AbortCause::Shutdown));
    for (i, client) in streams.iter_mut().enumerate() {
        let text = read_to_end(client);
        assert!(text.ends_with("data: [DONE]\n\n"), "{text}");
        let last = if i == 0 { "\"finish_reason\":\"length\"" } else { "\"reason\":\"draining\"" };
        assert!(text.contains(last), "{i}: {text}");
    }
    drop(streams);
    let connections = server.connections.clone();
    let closing = async { tokio::time::timeout(Duration::from_secs(2), connections.close()).await };
    server.runtime.block_on(closing).expect("all connections end");
    server.wait_idle(Duration::from_secs(1));
}

#[test]
fn overdue_step_fails_every_probe_until_it_completes() {
    let step_deadline = Some(Duration::from_millis(100));
    let setup =
        ServerSetup { step_time: Duration::from_secs(3), step_deadline, ..ServerSetup::default() };
    let server = TestServer::start(&setup);
    let at = server.address;
    let table = || ["/livez", "/readyz", "/health", "/ping"].map(|path| get(at, path).status);
    assert_eq!(table(), [200; 4]);
    let mut slow = HttpClient::connect(at);
    let body = br#"{"prompt":"a","max_tokens":1}"#;
    slow.send("POST", "/v1/completions", "", body);
    let sent = Instant::now();
    while table() != [503; 4] {
        assert!(sent.elapsed() < setup.step_time, "not before the reply");
    }
    let mut late = HttpClient::connect(at);
    late.send("POST", "/v1/completions", "", body);
    let late = late.read().unwrap();
    assert_eq!((late.status, &late.json()["error"]["reason"]), (503, &json!("engine_unavailable")));
    assert_eq!(slow.read().unwrap().status, 200);
    let answered = Instant::now();
    while table() != [200; 4] {
        assert!(answered.elapsed() < Duration::from_secs(20), "still overdue after the reply");
    }
}

/// Reads the rest of a chunked body as text.
fn read_to_end(client: &mut HttpClient) -> String {
    let mut body = Vec::new();
    while let Some(chunk) = client.read_chunk().filter(|chunk| !chunk.is_empty()) {
        body.extend(chunk);
    }
    String::from_utf8(body).unwrap()
}

#[test]
fn device_failure_ends_every_request_with_an_error() {
    let server = TestServer::start(&ServerSetup { fails_at: Some(20), ..slow() });
    let mut streamed = HttpClient::connect(server.address);
    streamed.send("POST", "/v1/completions", "", stream_body(4_000).as_bytes());
    assert_eq!(streamed.read_head().unwrap().status, 200);
    let mut unary = HttpClient::connect(server.address);
    unary.send(
        "POST",
        "/v1/completions",
        "",
        br#"{"prompt":"a","max_tokens":4000,"ignore_eos":true}"#,
    );
    let text = read_to_end(&mut streamed);
    assert!(text.contains("engine_unavailable") && text.ends_with("data: [DONE]\n\n"), "{text}");
    let reply = unary.read().unwrap();
    let body: Value = reply.json();
    assert_eq!((reply.status, &body["error"]["reason"]), (503, &json!("engine_unavailable")));
    assert!(
        matches!(server.supervisor_events.recv_timeout(Duration::from_mins(1)), Ok(SupervisorEvent::EngineFailed(text)) if text.contains("device lost"))
    );
    assert_eq!(get(server.address, "/readyz").status, 503);
    assert_eq!(get(server.address, "/livez").status, 200);
    let mut late = HttpClient::connect(server.address);
    late.send("POST", "/v1/completions", "", stream_body(5).as_bytes());
    assert_eq!(late.read().unwrap().status, 503);
}

#[test]
fn idle_streams_get_keep_alive_comments() {
    let keep_alive = Duration::from_millis(30);
    let options = ServerOptions { keep_alive, ..ServerOptions::default() };
    // The step time is far longer than the keep-alive interval, also on a busy machine.
    let setup =
        ServerSetup { options, step_time: Duration::from_secs(1), ..ServerSetup::default() };
    let server = TestServer::start(&setup);
    let mut client = HttpClient::connect(server.address);
    client.send("POST", "/v1/completions", "", stream_body(1).as_bytes());
    assert_eq!(client.read_head().unwrap().status, 200);
    let text = read_to_end(&mut client);
    // Headers and keep-alive comments are sent before the first token.
    assert!(text.starts_with(": keep-alive\n\n"), "{text}");
    assert!(text.ends_with("data: [DONE]\n\n"));
}

#[test]
fn duplicate_request_ids_are_both_served() {
    let server = TestServer::start(&slow());
    let mut clients: Vec<HttpClient> = (0..2)
        .map(|_| {
            let mut client = HttpClient::connect(server.address);
            let headers = "X-Request-Id: same\r\n";
            client.send("POST", "/v1/completions", headers, stream_body(5).as_bytes());
            client
        })
        .collect();
    for client in &mut clients {
        let reply = client.read().unwrap();
        assert_eq!(reply.header("x-request-id"), Some("same"));
        assert_eq!(reply.events().last().unwrap()["id"], "cmpl-same");
    }
}
