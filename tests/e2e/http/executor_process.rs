//! `--executor process`: outputs are the same as with an executor thread, and failed executor processes are
//! replaced.

use super::server_process::{ServerProcess, command};
use crate::bounded_child::{run_to_end, send_signal};
use crate::deadlines::BoundedJoin as _;
pub(crate) use crate::deadlines::wait_until;
use crate::http_client::{HttpClient, get, post};
use serde_json::{Value, json};
use std::fs;
use std::net::SocketAddr;
use std::time::Duration;

const EXECUTOR_PROCESS_FLAGS: &[&str] =
    &["--executor", "process", "--threads", "1", "--dtype", "float32"];

/// Process ids of the children of `parent`.
pub(super) fn children(parent: u32) -> Vec<u32> {
    let id = |entry: fs::DirEntry| entry.file_name().to_str()?.parse::<u32>().ok();
    let of = |pid: &u32| {
        let stat = fs::read_to_string(format!("/proc/{pid}/stat")).unwrap_or_default();
        // The process name in `/proc/PID/stat` may contain spaces and brackets; later fields do not.
        let mut rest = stat.rsplit(") ").next().unwrap_or_default().split(' ');
        let state = rest.next().map(str::to_owned);
        (state, rest.next().and_then(|parent| parent.parse::<u32>().ok()))
    };
    let all = fs::read_dir("/proc").unwrap().flatten().filter_map(id);
    all.filter(|pid| matches!(of(pid), (Some(state), Some(p)) if p == parent && state != "Z"))
        .collect()
}

/// Children of `parent` started as `hadron ROLE`.
pub(crate) fn children_as(role: &str, parent: u32) -> Vec<u32> {
    let is_one = |pid: &u32| {
        let words = fs::read_to_string(format!("/proc/{pid}/cmdline")).unwrap_or_default();
        words.split('\0').nth(1) == Some(role)
    };
    children(parent).into_iter().filter(is_one).collect()
}

/// Process id of the server's only executor.
pub(crate) fn executor(process: &ServerProcess) -> u32 {
    let found = children_as("executor", process.id());
    let [only] = found[..] else { panic!("children: {found:?}") };
    only
}

pub(crate) fn send(pid: u32, signal: &str) {
    assert!(send_signal(pid, signal), "process {pid} does not exist");
}

pub(crate) fn is_ready(address: SocketAddr) -> bool {
    get(address, "/readyz").status == 200
}

/// Body of a request with random sampling and a fixed seed: a lost or repeated token changes all later
/// tokens, so that the output shows it.
pub(crate) fn body(tokens: u32, streamed: bool) -> Value {
    json!({"prompt": "The quick brown fox", "max_tokens": tokens, "seed": 7, "temperature": 1,
           "ignore_eos": true, "stream": streamed})
}

/// Output text of `tokens` tokens for the prompt of `body`, requested without streaming.
pub(crate) fn complete_text(address: SocketAddr, tokens: u32) -> String {
    complete_text_of(address, &body(tokens, false))
}

/// The output text of a request.
pub(super) fn complete_text_of(address: SocketAddr, body: &Value) -> String {
    let reply = post(address, "/v1/completions", body).json();
    reply["choices"][0]["text"].as_str().unwrap_or_else(|| panic!("{reply}")).to_owned()
}

/// A streamed completion of which the first tokens have been received.
pub(crate) struct StartedStream {
    client: HttpClient,
    /// Text of the SSE events received so far.
    events: String,
}

/// Starts a streamed completion of the prompt of `body`.
pub(crate) fn stream(address: SocketAddr, tokens: u32) -> StartedStream {
    stream_of(address, &body(tokens, true))
}

pub(crate) fn stream_of(address: SocketAddr, body: &Value) -> StartedStream {
    let mut client = HttpClient::connect(address);
    client.send("POST", "/v1/completions", "", body.to_string().as_bytes());
    assert_eq!(client.read_head().unwrap().status, 200);
    let first = client.read_chunk().unwrap();
    StartedStream { client, events: String::from_utf8(first).unwrap() }
}

/// Reads the rest of a stream; returns the whole output text and the finish reason.
pub(crate) fn finish(stream: StartedStream) -> (String, Value) {
    let StartedStream { mut client, mut events } = stream;
    while let Some(chunk) = client.read_chunk().filter(|chunk| !chunk.is_empty()) {
        events += std::str::from_utf8(&chunk).unwrap();
    }
    let (mut text, mut end) = (String::new(), Value::Null);
    for event in events.split("\n\n").filter_map(|event| event.strip_prefix("data: {")) {
        let event: Value = serde_json::from_str(&format!("{{{event}")).unwrap();
        text += event["choices"][0]["text"].as_str().unwrap_or_default();
        end = match event.get("error") {
            Some(error) => error["reason"].clone(),
            None => event["choices"][0]["finish_reason"].clone(),
        };
    }
    assert!(events.ends_with("data: [DONE]\n\n"), "{events}");
    (text, end)
}

#[test]
fn executor_kill_loses_and_repeats_no_token() {
    const TOKENS: u32 = 1_500;
    let mut process = ServerProcess::start(EXECUTOR_PROCESS_FLAGS);
    let at = process.address;
    let (expected, short) = (complete_text(at, TOKENS), complete_text(at, 20));
    let streams: Vec<_> = (0..3).map(|_| stream(at, TOKENS)).collect();
    let former = executor(&process);
    send(former, "-KILL");
    let seen = wait_until(Duration::from_secs(4), "the failure", || !is_ready(at));
    println!("seen after {seen:?}"); // The failure is detected in about 100 ms on an idle machine.
    assert_eq!(get(at, "/livez").status, 200, "a restart is no reason to kill the server");
    assert_eq!(
        complete_text(at, 20),
        short,
        "a request that comes during the restart waits for its end"
    );
    assert!(is_ready(at));
    assert_ne!(executor(&process), former);
    for stream in streams {
        let (text, end) = finish(stream);
        assert_eq!(end, "length");
        assert!(text == expected, "differs from an undisturbed run:\n{text}\n{expected}");
    }
    process.signal("TERM");
    assert_eq!(process.exits_within(Duration::from_secs(20)).code(), Some(0));
}

#[test]
fn step_outputs_count_as_heartbeats() {
    let process = ServerProcess::start(EXECUTOR_PROCESS_FLAGS);
    let at = process.address;
    let (mut busy, mut streams) = (stream(at, 1_500), 1);
    let (mut former, mut signs) = (f64::MAX, 0);
    while signs < 10 {
        let page = String::from_utf8(get(at, "/metrics").body).unwrap();
        let value = |name: &str| -> f64 {
            let line = page.lines().find(|line| line.starts_with(name));
            line.and_then(|line| line.rsplit(' ').next()).unwrap().parse().unwrap()
        };
        // The heartbeat age is 0 after any message of the executor, which sends heartbeats only if it has
        // sent no other message for a while. While steps run, the age must decrease because of step outputs.
        let age = value("hadron:heartbeat_age_seconds{");
        if value("vllm:num_requests_running{") == 0.0 {
            // The stream has ended before the heartbeat age decreased in ten scrapes, because a scrape takes
            // as long as many steps on this machine. Another stream is started.
            assert!(streams < 30, "{signs} heartbeats during 30 requests of 1,500 steps");
            (busy, streams, former) = (stream(at, 1_500), streams + 1, 0.0);
            continue;
        }
        signs += u32::from(age < former);
        former = age;
    }
    drop(busy);
}

#[test]
fn structured_output_survives_executor_restart() {
    let mut body = body(700, true);
    body["structured_outputs"] = json!({"regex": "[a-z]{1,8}((, |; |\\. )[a-z]{1,8})*"});
    let process = ServerProcess::start(EXECUTOR_PROCESS_FLAGS);
    let at = process.address;
    let (expected, end) = finish(stream_of(at, &body));
    assert_eq!(end, "length");
    let strange = |c: char| !(c.is_ascii_lowercase() || ",;. ".contains(c));
    assert!(expected.len() > 700 && !expected.contains(strange), "{expected}");
    let streams: Vec<_> = (0..2).map(|_| stream_of(at, &body)).collect();
    send(executor(&process), "-KILL");
    for stream in streams {
        let (text, end) = finish(stream);
        assert_eq!(end, "length");
        assert!(text == expected, "differs from an undisturbed run:\n{text}\n{expected}");
    }
}

#[test]
fn thinking_budget_survives_executor_restart() {
    let process = ServerProcess::start(
        &[EXECUTOR_PROCESS_FLAGS, &["--reasoning-parser", "deepseek_r1"]].concat(),
    );
    let at = process.address;
    let body = json!({"messages": [{"role": "user", "content": "hi"}], "max_tokens": 500, "ignore_eos": true,
        "thinking_token_budget": 400, "return_token_ids": true, "temperature": 1, "seed": 5});
    let ask = move || {
        let choice = post(at, "/v1/chat/completions", &body).json()["choices"][0].clone();
        (choice["message"]["content"].clone(), choice["token_ids"].clone())
    };
    let expected = ask();
    assert!(
        expected.0.as_str().is_some_and(|text| !text.is_empty()),
        "it has come to an end: {expected:?}"
    );
    let again = std::thread::spawn(ask);
    wait_until(Duration::from_secs(20), "a token", || generated(at) > 600);
    send(executor(&process), "-KILL");
    assert_eq!(again.join_bounded(), expected);
}

/// Total number of tokens that the server has generated, from its metrics.
fn generated(at: SocketAddr) -> u64 {
    let page = String::from_utf8(get(at, "/metrics").body).unwrap();
    let line = page.lines().find(|line| line.starts_with("vllm:generation_tokens_total"));
    line.and_then(|line| line.rsplit(' ').next()).unwrap().parse::<f64>().unwrap() as u64
}

#[test]
fn repeated_executor_failures_end_the_server() {
    let folder = tempfile::tempdir().unwrap();
    let trace = folder.path().join("requests.jsonl");
    let traced = ["--trace-requests", trace.to_str().unwrap()];
    let mut process = ServerProcess::start(&[EXECUTOR_PROCESS_FLAGS, &traced].concat());
    let at = process.address;
    for _ in 0..3 {
        send(executor(&process), "-KILL");
        wait_until(Duration::from_secs(4), "the failure", || !is_ready(at));
        wait_until(Duration::from_secs(20), "the restart", || is_ready(at));
    }
    let stream = stream(at, 1_900);
    send(executor(&process), "-KILL");
    assert_eq!(finish(stream).1, "engine_unavailable");
    assert_eq!(process.exits_within(Duration::from_secs(20)).code(), Some(3));
    let lines = fs::read_to_string(trace).unwrap();
    assert_eq!(lines.lines().count(), 1, "what the failure ended has its line: {lines}");
}

#[test]
fn hung_executor_is_restarted() {
    let process = ServerProcess::start(EXECUTOR_PROCESS_FLAGS);
    let at = process.address;
    let short = complete_text(at, 20);
    let former = executor(&process);
    send(former, "-STOP");
    let stream = std::thread::spawn(move || complete_text(at, 20));
    wait_until(Duration::from_secs(12), "the failure", || !is_ready(at));
    assert_eq!(stream.join_bounded(), short);
    assert_ne!(executor(&process), former);
}

#[test]
fn process_group_signals_are_handled_by_the_server() {
    let process = ServerProcess::start(EXECUTOR_PROCESS_FLAGS);
    let former = executor(&process);
    for signal in ["-INT", "-TERM"] {
        send(former, signal);
    }
    std::thread::sleep(Duration::from_millis(100));
    assert!(!complete_text(process.address, 5).is_empty());
    assert_eq!(executor(&process), former);
}

#[test]
fn executors_exit_with_the_server() {
    let process = ServerProcess::start(EXECUTOR_PROCESS_FLAGS);
    let left = executor(&process);
    let _stream = stream(process.address, 1_900);
    process.signal("KILL");
    let gone = || !fs::exists(format!("/proc/{left}")).unwrap() || is_zombie(left);
    wait_until(Duration::from_secs(2), "the executor's end", gone);
}

/// Whether a process has exited but its parent has not waited for it.
pub(crate) fn is_zombie(pid: u32) -> bool {
    let stat = fs::read_to_string(format!("/proc/{pid}/stat")).unwrap_or_default();
    stat.contains(") Z ")
}

#[test]
fn executor_start_failure_is_named_and_exits_1() {
    let cases: &[(&[&str], &str)] = &[
        (&["--device", "cuda", "--device-libraries", "/no/such/libcuda.so"], "/no/such/libcuda.so"),
        (
            &["--executor", "process", "--max-model-len", "2048", "--num-gpu-blocks-override", "9"],
            "9 KV blocks",
        ),
    ];
    for (args, cause) in cases {
        let output = run_to_end(&mut command(&[&["--port", "0"], *args].concat()));
        let text = String::from_utf8_lossy(&output.stderr);
        assert_eq!(output.status.code(), Some(1), "{args:?}: {text}");
        assert!(text.contains(cause) && text.contains("(while: "), "{args:?}: {text}");
    }
    let mut by_hand = std::process::Command::new(env!("CARGO_BIN_EXE_hadron"));
    let output = run_to_end(by_hand.args(["executor", "--rank", "0", "--epoch", "1"]));
    let text = String::from_utf8_lossy(&output.stderr);
    assert!(output.status.code() == Some(1) && text.contains("hadron serve"), "{text}");
}
