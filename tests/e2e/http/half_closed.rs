//! Clients that close their sending half, and clients that disconnect: both send FIN, but only clients that
//! close their sending half wait for the reply.

use crate::http_client::HttpClient;
use crate::http_client::connect_within;
use crate::test_server::{ServerSetup, TestServer};
use serde_json::{Value, json};
use std::io::{Read, Write};
use std::net::{Shutdown, SocketAddr};
use std::time::{Duration, Instant};

const STEP: Duration = Duration::from_millis(10);
const INTERIM: &str = "HTTP/1.1 100 Continue\r\n\r\n";

fn slow() -> ServerSetup {
    ServerSetup { step_time: STEP, ..ServerSetup::default() }
}

fn body(max_tokens: u32, stream: bool) -> Value {
    json!({"prompt": vec![65; 40], "max_tokens": max_tokens, "ignore_eos": true, "seed": 3,
           "stream": stream})
}

fn request(version: &str, body: &str) -> String {
    format!(
        "POST /v1/completions HTTP/{version}\r\nHost: x\r\nContent-Type: application/json\r\n\
         Content-Length: {}\r\n\r\n{body}",
        body.len()
    )
}

/// Sends `bytes`, then FIN after `pause`; returns everything received. Sends the request again after a 503
/// reply, because the engine may be unavailable for a moment on a busy machine.
fn half_closed(at: SocketAddr, bytes: &str, pause: Duration) -> String {
    let start = Instant::now();
    loop {
        let answer = exchange(at, bytes, pause);
        if !answer.contains(" 503 ") || start.elapsed() > Duration::from_secs(20) {
            return answer;
        }
    }
}

fn exchange(at: SocketAddr, bytes: &str, pause: Duration) -> String {
    let mut stream = connect_within(at, Duration::from_secs(30)).unwrap();
    stream.write_all(bytes.as_bytes()).unwrap();
    std::thread::sleep(pause);
    stream.shutdown(Shutdown::Write).unwrap();
    let mut answer = String::new();
    stream.read_to_string(&mut answer).unwrap();
    answer
}

/// Returns the concatenated texts of all events (streamed) or choices (unary) in a reply.
fn text(answer: &str) -> String {
    let mut text = String::new();
    for line in answer.lines().map(|line| line.strip_prefix("data: ").unwrap_or(line)) {
        if let Ok(event) = serde_json::from_str::<Value>(line) {
            text += event["choices"][0]["text"].as_str().unwrap_or_default();
        }
    }
    text
}

#[test]
fn half_closed_clients_get_complete_replies() {
    let server = TestServer::start(&slow());
    let at = server.address;
    let expected = HttpClient::connect(at).post("/v1/completions", &body(40, false)).json();
    let expected = expected["choices"][0]["text"].as_str().unwrap().to_owned();
    for pause_ms in [0, 1, 30, 200] {
        let pause = Duration::from_millis(pause_ms);
        let answer = half_closed(at, &request("1.1", &body(40, true).to_string()), pause);
        assert!(answer.contains("data: [DONE]\n\n"), "{pause_ms}: {answer}");
        assert!(answer.ends_with("0\r\n\r\n"), "{pause_ms}: {answer}");
        assert_eq!(text(&answer), expected, "{pause_ms}");
        let answer = half_closed(at, &request("1.1", &body(40, false).to_string()), pause);
        let answer = answer.strip_prefix(INTERIM).unwrap_or(&answer);
        assert!(answer.starts_with("HTTP/1.1 200"), "{pause_ms}: {answer}");
        assert_eq!(text(answer), expected, "{pause_ms}");
        // HTTP/1.0 has no interim (1xx) responses, so the reply must begin with its own status line.
        let answer = half_closed(at, &request("1.0", &body(40, false).to_string()), pause);
        assert!(answer.starts_with("HTTP/1.0 200"), "{pause_ms}: {answer}");
        assert_eq!(text(&answer), expected, "{pause_ms}");
    }
    server.wait_idle(Duration::from_secs(3));
}

#[test]
fn pipelined_requests_before_fin_are_all_answered() {
    let server = TestServer::start(&slow());
    let one = request("1.1", &body(10, false).to_string());
    let answer = half_closed(server.address, &[&one[..]; 3].concat(), Duration::ZERO);
    assert_eq!(answer.matches("HTTP/1.1 200 OK").count(), 3, "{answer}");
}

#[test]
fn disconnected_unary_clients_are_aborted_soon() {
    let server = TestServer::start(&ServerSetup { max_num_seqs: 2, ..slow() });
    // Two of the six requests run, each for 40 s unless it is aborted; the other four wait for a sequence
    // slot.
    for pause_ms in [0, 5, 100] {
        let clients: Vec<HttpClient> = (0..6)
            .map(|i| {
                let mut client = HttpClient::connect(server.address);
                let bytes = request("1.1", &body(4_000, i % 2 == 0 && pause_ms == 5).to_string());
                client.send_raw(bytes.as_bytes()).unwrap();
                client
            })
            .collect();
        std::thread::sleep(Duration::from_millis(pause_ms));
        drop(clients);
        let start = Instant::now();
        server.wait_idle(Duration::from_secs(3));
        println!("released after {:?}", start.elapsed());
    }
    // A client that has received the interim response `100 Continue` disconnects.
    let mut client = HttpClient::connect(server.address);
    let bytes = request("1.1", &body(4_000, false).to_string());
    let (head, body) = bytes.split_once("\r\n\r\n").unwrap();
    client.send_raw(format!("{head}\r\nExpect: 100-continue\r\n\r\n").as_bytes()).unwrap();
    assert_eq!(client.read_head().unwrap().status, 100);
    client.send_raw(body.as_bytes()).unwrap();
    std::thread::sleep(Duration::from_millis(100));
    assert!(server.client().requests_in_flight() > 0);
    drop(client);
    server.wait_idle(Duration::from_secs(3));
}

#[test]
fn a_body_cut_off_by_fin_ends_its_connection_at_once() {
    let server = TestServer::start(&slow());
    let whole = request("1.1", &body(40, false).to_string());
    for cut in [3, whole.len() - 20] {
        let start = Instant::now();
        let answer = half_closed(server.address, &whole[..cut], Duration::ZERO);
        assert!(!answer.contains("200 OK"), "{answer}");
        assert!(start.elapsed() < Duration::from_secs(4), "{:?}", start.elapsed());
    }
}

#[test]
fn requests_need_exactly_one_host() {
    let server = TestServer::start(&ServerSetup::default());
    let status = |head: &str| {
        let answer = half_closed(server.address, head, Duration::ZERO);
        let answer = answer.strip_prefix(INTERIM).unwrap_or(&answer).to_owned();
        answer.split(' ').nth(1).and_then(|status| status.parse::<u16>().ok())
    };
    for (head, expected) in [
        ("GET /version HTTP/1.1\r\nHost: x\r\n\r\n", 200),
        ("GET /version HTTP/1.1\r\nHost:\r\n\r\n", 200),
        ("GET /version HTTP/1.0\r\n\r\n", 200),
        ("GET /version HTTP/1.1\r\n\r\n", 400),
        ("GET /version HTTP/1.1\r\nHost: x\r\nHost: x\r\n\r\n", 400),
        ("GET /version HTTP/1.0\r\nHost: x\r\nhost: y\r\n\r\n", 400),
        ("GET /version HTTP/1.1\r\nHost: a b\r\n\r\n", 400),
    ] {
        assert_eq!(status(head), Some(expected), "{head:?}");
    }
}
