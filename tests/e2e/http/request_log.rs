//! Log lines about requests: the access log line, rejections, whose log lines are rate-limited, and the throughput.

use super::server_process::{ServerProcess, command};
use crate::deadlines::wait_until;
use crate::http_client::{HttpClient, get, post};
use serde_json::{Value, json};
use std::net::SocketAddr;
use std::time::Duration;

/// Starts the demo server, runs `requests`, and returns the lines of its log.
fn log_of(args: &[&str], requests: impl FnOnce(SocketAddr)) -> Vec<String> {
    let mut command = command(&[&["--port", "0"], args].concat());
    command.env("RUST_LOG", "info");
    let mut process = ServerProcess::of(&mut command);
    requests(process.address);
    process.signal("TERM");
    process.exits_within(Duration::from_secs(20));
    process.stderr_text().lines().map(str::to_owned).collect()
}

fn lines_with<'a>(log: &'a [String], text: &str) -> Vec<&'a str> {
    log.iter().map(String::as_str).filter(|line| line.contains(text)).collect()
}

#[test]
fn access_line_has_tokens_times_and_request_id() {
    let log = log_of(&["--enable-log-requests"], |address| {
        let body = json!({"prompt": "What is", "max_tokens": 3, "ignore_eos": true});
        let mut client = HttpClient::connect(address);
        for (id, stream) in [("unary-1", false), ("stream-1", true)] {
            let mut body = body.clone();
            body["stream"] = json!(stream);
            let id = format!("X-Request-Id: {id}\r\n");
            client.send("POST", "/v1/completions", &id, body.to_string().as_bytes());
            assert_eq!(client.read().unwrap().status, 200);
        }
        assert_eq!(get(address, "/v1/models").status, 200);
        assert_eq!(get(address, "/health").status, 200);
        let mut gone = HttpClient::connect(address);
        let endless =
            json!({"prompt": "x", "max_tokens": 2000, "ignore_eos": true, "stream": true});
        gone.send("POST", "/v1/completions", "", endless.to_string().as_bytes());
        assert_eq!(gone.read_head().unwrap().status, 200);
        drop(gone);
        wait_until(Duration::from_mins(1), "the end of the request", || {
            get(address, "/load").json()["server_load"] == 0
        });
    });
    let lines = lines_with(&log, "request finished");
    for id in ["unary-1", "stream-1"] {
        let line = lines.iter().find(|line| line.contains(id)).unwrap_or_else(|| panic!("{log:?}"));
        for field in [
            "method=POST",
            "route=\"/v1/completions\"",
            "status=200",
            "finish_reason=\"length\"",
            "output_tokens=3",
            "ttft_ms=",
            "duration_ms=",
        ] {
            assert!(line.contains(field), "{field}: {line}");
        }
    }
    let models = lines.iter().find(|line| line.contains("/v1/models")).unwrap();
    assert!(models.contains("status=200") && !models.contains("tokens"), "{models}");
    assert!(lines.iter().any(|line| line.contains("finish_reason=\"client_gone\"")), "{lines:?}");
    assert!(!lines.iter().any(|line| line.contains("/health")), "{lines:?}");
}

#[test]
fn pooled_requests_stop() {
    let log = log_of(&["--enable-log-requests", "--runner", "pooling"], |address| {
        assert_eq!(post(address, "/v1/embeddings", &json!({"input": ["a", "b"]})).status, 200);
        let page = get(address, "/metrics");
        let page = String::from_utf8_lossy(&page.body).into_owned();
        let is_stopped = |line: &&str| {
            line.starts_with("vllm:request_success_total{")
                && line.contains("finished_reason=\"stop\"")
                && line.ends_with(" 2")
        };
        assert!(page.lines().any(|line| is_stopped(&line)), "{page}");
    });
    let lines = lines_with(&log, "/v1/embeddings");
    assert!(lines.iter().any(|line| line.contains("finish_reason=\"stop\"")), "{log:?}");
}

#[test]
fn rejections_are_logged_with_their_reason_and_a_limit() {
    let log = log_of(&[], |address| {
        assert_eq!(post(address, "/v1/completions", &json!({"prompt": "x", "n": 0})).status, 400);
        for _ in 0..100 {
            assert_eq!(get(address, "/nowhere").status, 404);
        }
    });
    let lines = lines_with(&log, "request rejected");
    let of = |reason: &str| lines.iter().filter(|line| line.contains(reason)).count();
    assert_eq!(of("reason=\"invalid_value\""), 1, "{lines:?}");
    let unknown = of("reason=\"unknown_route\"");
    assert!((1..=20).contains(&unknown), "{unknown} lines of 100 requests");
    let invalid = lines.iter().find(|line| line.contains("invalid_value")).unwrap();
    assert!(invalid.contains("WARN") && invalid.contains("n: must be"), "{invalid}");
    assert!(lines_with(&log, "request finished").is_empty(), "access lines are off by default");
}

/// Numbers of lines about tools that the chat template does not show, at start-up and for requests, of a server with
/// the template `template` and requests with `tools`.
fn hidden_tool_lines(template: &str, tools: &[Value]) -> [usize; 2] {
    let log = log_of(&["--chat-template", template], |address| {
        for tools in tools {
            let messages = json!([{"role": "user", "content": "hi"}]);
            let body = json!({"messages": messages, "tools": tools, "max_tokens": 1});
            assert_eq!(post(address, "/v1/chat/completions", &body).status, 200);
        }
    });
    let texts = ["the chat template shows no tools", "the request has tools, which the chat"];
    texts.map(|text| {
        let lines = lines_with(&log, text);
        assert!(lines.iter().all(|line| line.contains("WARN")), "{lines:?}");
        lines.len()
    })
}

#[test]
fn tools_that_the_template_does_not_show_are_logged() {
    let plain = "{% for m in messages %}{{ m.content }}{% endfor %}";
    let none = json!([]);
    let tools = json!([{"type": "function", "function": {"name": "now", "parameters": {}}}]);
    let requests = [none.clone(), tools.clone(), none.clone()];
    assert_eq!(hidden_tool_lines(plain, &requests), [1, 1], "one request has tools");
    let shown = format!("{{{{ tools | tojson }}}}{plain}");
    assert_eq!(hidden_tool_lines(&shown, &[tools]), [0, 0]);
}

#[test]
fn throughput_is_logged_unless_disabled() {
    let requests = |address| {
        let body = json!({"prompt": "What is", "max_tokens": 4, "ignore_eos": true});
        assert_eq!(post(address, "/v1/completions", &body).status, 200);
        std::thread::sleep(server::THROUGHPUT_INTERVAL + Duration::from_secs(2));
    };
    let (log, without) = std::thread::scope(|scope| {
        let log = scope.spawn(|| log_of(&[], requests));
        let without = log_of(&["--disable-log-stats"], requests);
        (log.join().unwrap(), without)
    });
    let lines = lines_with(&log, "throughput");
    assert_eq!(lines.len(), 1, "{log:?}");
    for field in ["replica=0", "prompt_tokens_per_s=", "generation_tokens_per_s=0.", "running=0"] {
        assert!(lines[0].contains(field), "{field}: {}", lines[0]);
    }
    assert_eq!(lines_with(&without, "throughput").len(), 0, "{without:?}");
}
