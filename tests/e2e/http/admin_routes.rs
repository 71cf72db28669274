//! Admin routes: clearing the prefix cache, aborting requests, tracing requests; and JSON logs.

use super::server_process::{ServerProcess, command};
use crate::bounded_child::{CHILD_TIMEOUT, ChildPipe, run_to_end, send_signal, wait_within};
use crate::deadlines::BoundedJoin;
use crate::http_client::{HttpClient, HttpReply, get, post};
use crate::test_server::{ServerSetup, TestServer};
use serde_json::{Value, json};
use server::{ApiKeys, RequestTracer, ServerOptions};
use std::net::SocketAddr;
use std::path::Path;
use std::process::Stdio;
use std::time::{Duration, Instant};

const KEY: &str = "Authorization: Bearer root\r\n";

fn setup(step_ms: u64) -> ServerSetup {
    let options =
        ServerOptions { api_keys: ApiKeys::new([], ["root"]), ..ServerOptions::default() };
    ServerSetup { options, step_time: Duration::from_millis(step_ms), ..ServerSetup::default() }
}

fn post_admin(at: SocketAddr, path: &str, body: &Value) -> HttpReply {
    let mut client = HttpClient::connect(at);
    client.send("POST", path, KEY, body.to_string().as_bytes());
    client.read().unwrap()
}

fn endless(at: SocketAddr, id: &str) -> HttpClient {
    let mut client = HttpClient::connect(at);
    let body =
        json!({"prompt": vec![65; 64], "max_tokens": 4000, "ignore_eos": true, "stream": true});
    client.send(
        "POST",
        "/v1/completions",
        &format!("X-Request-Id: {id}\r\n"),
        body.to_string().as_bytes(),
    );
    assert_eq!(client.read_head().unwrap().status, 200);
    client
}

/// Reads the rest of a stream, which must end with a final event.
fn rest(client: &mut HttpClient) -> String {
    let mut body = Vec::new();
    while let Some(chunk) = client.read_chunk().filter(|chunk| !chunk.is_empty()) {
        body.extend(chunk);
    }
    let text = String::from_utf8(body).unwrap();
    assert!(text.ends_with("data: [DONE]\n\n"), "{text}");
    text
}

fn cached(at: SocketAddr, prompt: &[u32]) -> u64 {
    let reply = post(at, "/v1/completions", &json!({"prompt": prompt, "max_tokens": 1, "seed": 1}));
    reply.json()["usage"]["prompt_tokens_details"]["cached_tokens"].as_u64().unwrap()
}

#[test]
fn reset_prefix_cache_fails_while_blocks_are_in_use() {
    let server = TestServer::start(&setup(2));
    let at = server.address;
    let prompt = vec![66; 64];
    let reset = |query: &str| post_admin(at, &format!("/reset_prefix_cache{query}"), &json!({}));
    assert_eq!(cached(at, &prompt), 0);
    assert!(cached(at, &prompt) >= 48);
    server.wait_idle(Duration::from_secs(2));
    assert_eq!(reset("").json(), json!({"success": true}));
    assert_eq!(cached(at, &prompt), 0);

    let mut stream = endless(at, "held");
    assert_eq!(reset("").json(), json!({"success": false}));
    assert_eq!(reset("?reset_running_requests=false").json(), json!({"success": false}));
    assert!(cached(at, &prompt) >= 48, "the prefix cache was not cleared");
    assert_eq!(
        post_admin(at, "/flush_cache?reset_running_requests=true", &json!({})).json(),
        json!({"success": true})
    );
    assert_eq!(cached(at, &prompt), 0);
    stream.read_chunk().expect("the stream goes on");
    drop(stream);
    for (query, param) in [("?reset_running_requests=7", "reset_running_requests"), ("?x=1", "x")] {
        let reply = reset(query);
        assert_eq!((reply.status, &reply.json()["error"]["param"]), (400, &json!(param)));
    }
}

/// Running requests are restarted when the prefix cache is cleared, and their output is unchanged.
#[test]
fn restarted_request_has_the_same_output() {
    let server = TestServer::start(&setup(1));
    let at = server.address;
    let body = json!({"prompt": vec![67; 40], "max_tokens": 200, "ignore_eos": true, "seed": 9});
    let baseline = post(at, "/v1/completions", &body).json()["choices"].clone();
    let resets = std::thread::spawn(move || {
        for _ in 0..12 {
            std::thread::sleep(Duration::from_millis(12));
            post_admin(at, "/reset_prefix_cache?reset_running_requests=true", &json!({}));
        }
    });
    assert_eq!(post(at, "/v1/completions", &body).json()["choices"], baseline);
    resets.join_bounded();
    server.wait_idle(Duration::from_secs(2));
}

#[test]
fn requests_are_aborted_by_id() {
    let server = TestServer::start(&setup(5));
    let at = server.address;
    let abort = |body: Value| post_admin(at, "/abort_request", &body);
    let mut streams: Vec<HttpClient> = ["a", "a", "b", "c", "d"].map(|id| endless(at, id)).into();
    assert_eq!(abort(json!({"request_id": "nobody"})).json(), json!({"aborted": 0}));
    assert_eq!(abort(json!({"request_id": "a"})).json(), json!({"aborted": 2}));
    assert_eq!(abort(json!({"request_id": "a"})).json(), json!({"aborted": 0}), "twice is once");
    assert_eq!(abort(json!({"rid": "cmpl-b"})).json(), json!({"aborted": 1}), "as in the reply");
    assert_eq!(abort(json!({"request_ids": ["c", "x"]})).json(), json!({"aborted": 1}));
    for stream in &mut streams[..4] {
        assert!(rest(stream).contains("\"finish_reason\":\"abort\""));
    }
    let mut many: Vec<HttpClient> = ["m0", "m9999"].map(|id| endless(at, id)).into();
    let names: Vec<String> = (0..10_000).map(|number| format!("cmpl-m{number}")).collect();
    assert_eq!(abort(json!({"request_ids": names})).json(), json!({"aborted": 2}));
    assert!(many.iter_mut().all(|stream| rest(stream).contains("\"finish_reason\":\"abort\"")));
    let waits = std::thread::spawn(move || {
        post(at, "/v1/completions", &json!({"prompt": "a", "max_tokens": 4000, "ignore_eos": true}))
    });
    while server.client().requests_in_flight() < 2 {
        std::thread::sleep(Duration::from_millis(1));
    }
    assert_eq!(
        post_admin(at, "/abort_requests", &json!({"abort_all": true})).json(),
        json!({"aborted": 2})
    );
    assert!(rest(&mut streams[4]).contains("\"finish_reason\":\"abort\""));
    let reply = waits.join_bounded();
    assert_eq!(
        (reply.status, &reply.json()["choices"][0]["finish_reason"]),
        (200, &json!("abort"))
    );
    drop(streams);
    server.wait_idle(Duration::from_secs(2));
    for (body, param) in [
        (json!({}), "request_id"),
        (json!({"abort_all": true, "request_id": "a"}), "abort_all"),
        (json!({"request_id": 5}), "request_id"),
        (json!({"request_ids": "a"}), "request_ids"),
    ] {
        let reply = abort(body);
        assert_eq!((reply.status, &reply.json()["error"]["param"]), (400, &json!(param)));
    }
}

/// With one sequence slot, the waiting request with the best priority is admitted next.
#[test]
fn priority_decides_admission_order() {
    let server = TestServer::start(&ServerSetup { max_num_seqs: 1, priorities: true, ..setup(3) });
    let at = server.address;
    let mut first = endless(at, "first");
    let waiting: Vec<_> = [(5, "late"), (0, "middle"), (-3, "urgent")]
        .into_iter()
        .map(|(priority, name)| {
            let before = server.client().requests_in_flight();
            let body =
                json!({"prompt": "a", "max_tokens": 20, "ignore_eos": true, "priority": priority});
            let waits = std::thread::spawn(move || {
                assert_eq!(post(at, "/v1/completions", &body).status, 200);
                (Instant::now(), name)
            });
            while server.client().requests_in_flight() == before {
                std::thread::sleep(Duration::from_millis(1));
            }
            waits
        })
        .collect();
    post_admin(at, "/abort_request", &json!({"request_id": "first"}));
    rest(&mut first);
    let mut ends: Vec<_> = waiting.into_iter().map(BoundedJoin::join_bounded).collect();
    ends.sort_unstable();
    assert_eq!(ends.iter().map(|end| end.1).collect::<Vec<_>>(), ["urgent", "middle", "late"]);
}

fn lines(path: &Path) -> Vec<Value> {
    let text = std::fs::read_to_string(path).unwrap();
    text.lines().map(|line| serde_json::from_str(line).unwrap()).collect()
}

#[test]
fn every_request_writes_a_trace_line() {
    let folder = tempfile::tempdir().unwrap();
    for with_ids in [false, true] {
        let path = folder.path().join(format!("{with_ids}.jsonl"));
        let tracer = RequestTracer::open(&path, with_ids).unwrap();
        let mut setup = setup(2);
        setup.options.tracer = Some(tracer.clone());
        let server = TestServer::start(&setup);
        let at = server.address;
        let body = json!({"prompt": [65, 66, 67], "max_tokens": 4, "n": 2, "ignore_eos": true, "request_id": "two"});
        assert_eq!(post(at, "/v1/completions", &body).status, 200);
        let mut gone = endless(at, "gone");
        gone.read_chunk().unwrap();
        drop(gone);
        server.wait_idle(Duration::from_secs(2));
        assert_eq!(post(at, "/v1/completions", &json!({"prompt": ""})).status, 400, "leaves none");
        assert!(tracer.flush(Duration::from_secs(20)));
        let lines = lines(&path);
        assert_eq!(lines.len(), 2, "{lines:?}");
        let line = &lines[0];
        assert_eq!(
            (&line["request_id"], &line["path"]),
            (&json!("two"), &json!("/v1/completions"))
        );
        assert_eq!(
            (&line["prompt_tokens"], &line["completion_tokens"]),
            (&json!([3]), &json!([4, 4]))
        );
        assert_eq!(line["finish_reasons"], json!(["length", "length"]));
        assert!(line["latency_ms"].as_f64().unwrap() >= line["first_token_ms"].as_f64().unwrap());
        assert_eq!(lines[1]["finish_reasons"], json!(["client_gone"]));
        if with_ids {
            assert_eq!(line["prompt_ids"], json!([[65, 66, 67]]));
            assert_eq!(line["completion_ids"][1].as_array().unwrap().len(), 4);
        } else {
            assert!(line.get("prompt_ids").is_none());
        }
    }
}

/// Requests many long outputs and disconnects; returns once the server has released the requests.
fn leave(at: SocketAddr, headers: &str, name: &str) {
    let load = || get(at, "/load").json()["server_load"].as_u64();
    let body =
        json!({"prompt": "a", "max_tokens": 1500, "ignore_eos": true, "n": 16, "request_id": name});
    let mut client = HttpClient::connect(at);
    client.send("POST", "/v1/completions", headers, body.to_string().as_bytes());
    let begun = Instant::now();
    let wait = |wanted| {
        while load() != Some(wanted) {
            assert!(begun.elapsed() < Duration::from_secs(20), "{name}: the load is {:?}", load());
            std::thread::sleep(Duration::from_millis(2));
        }
    };
    wait(16);
    drop(client);
    wait(0);
}

/// Number of clients that disconnect while their request is prefilled, or soon after.
const EARLY_DISCONNECTS: u64 = 300;

/// Requests a long output and disconnects within two milliseconds.
fn leave_at_once(at: SocketAddr, number: u64) {
    let body = json!({"prompt": "a", "max_tokens": 1500, "ignore_eos": true, "n": 16});
    let mut client = HttpClient::connect(at);
    client.send("POST", "/v1/completions", "", body.to_string().as_bytes());
    std::thread::sleep(Duration::from_micros(number % 20 * 100));
}

/// Completes one request, disconnects from many more, then shuts the server down with SIGTERM.
fn abandon_then_stop(at: SocketAddr, pid: u32) {
    let body = json!({"prompt": "a", "max_tokens": 3, "ignore_eos": true});
    assert_eq!(post(at, "/v1/completions", &body).status, 200);
    leave(at, "X-Request-Id: by-header\r\n", "by-body");
    leave(at, "", "by-body");
    (0..EARLY_DISCONNECTS).for_each(|number| leave_at_once(at, number));
    assert!(send_signal(pid, "-TERM"), "the server has exited");
}

#[test]
fn json_log_has_only_json_lines() {
    let folder = tempfile::tempdir().unwrap();
    let trace = folder.path().join("requests.jsonl");
    let args = ["--port", "0", "--threads", "1", "--log-format", "json", "--executor", "process"];
    let mut child = command(&args);
    child.args(["--trace-requests", trace.to_str().unwrap()]).env("RUST_LOG", "info,hadron=debug");
    let mut child = child.stdout(Stdio::null()).spawn().unwrap();
    let log = ChildPipe::start(child.stderr.take().unwrap());
    let mut clients = None;
    let mut executors = 0;
    let mut left = Vec::new();
    while let Some(line) = log.next_line(CHILD_TIMEOUT) {
        let event: Value = serde_json::from_str(&line).unwrap_or_else(|e| panic!("{e}: {line}"));
        executors += usize::from(event["executor_rank"] == 0);
        left.extend((event["status"] == 499).then(|| event["span"]["id"].clone()));
        if event["message"] == "ready" {
            let at: SocketAddr = event["address"].as_str().unwrap().parse().unwrap();
            // The requests are sent from another thread, because the log must be read meanwhile: a full pipe
            // loses lines.
            let pid = child.id();
            clients = Some(std::thread::spawn(move || abandon_then_stop(at, pid)));
        }
    }
    clients.expect("a line with the message `ready`").join_bounded();
    assert!(executors > 0, "the executor's lines name it");
    assert_eq!(wait_within(&mut child, CHILD_TIMEOUT).code(), Some(0));
    assert_eq!(left[..2], ["by-header", "by-body"], "lines about a request name it");
    assert!(left.len() as u64 > EARLY_DISCONNECTS / 3, "only {} were submitted", left.len());
    let is_gone = |line: &&Value| line["finish_reasons"][0] == "client_gone";
    let gone = lines(&trace).iter().filter(is_gone).count();
    assert_eq!(gone, left.len(), "each disconnected client has a line on disk before the exit");
}

#[test]
fn startup_failure_is_logged_in_json() {
    let args = ["/no/such/model", "--port", "0", "--log-format", "json"];
    let output = run_to_end(&mut command(&args));
    assert_eq!(output.status.code(), Some(1));
    let text = String::from_utf8(output.stderr).unwrap();
    let events: Vec<Value> = text.lines().map(|line| serde_json::from_str(line).unwrap()).collect();
    let last = events.last().unwrap();
    assert_eq!((&last["level"], &last["message"]), (&json!("ERROR"), &json!("hadron failed")));
    assert!(last["cause"].as_str().unwrap().contains("/no/such/model"), "{last}");
}

#[test]
fn public_bind_without_api_key_logs_a_warning() {
    let warned = |args: &[&str]| {
        let mut process =
            ServerProcess::start(&[&["--host", "0.0.0.0", "--threads", "1"], args].concat());
        process.signal("TERM");
        process.exits_within(Duration::from_secs(20));
        process.stderr_text().contains("anyone who can reach this address")
    };
    assert!(warned(&[]));
    assert!(!warned(&["--api-key", "k"]));
}
