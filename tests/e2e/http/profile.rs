//! `--profile`, `/start_profile` and `/stop_profile`: the trace files are valid, however the server ends.

use super::server_process::ServerProcess;
use crate::bounded_child::run_to_end;
use crate::http_client::post;
use crate::test_server::{ServerSetup, TestServer};
use serde_json::{Value, json};
use server::ServerOptions;
use std::net::SocketAddr;
use std::path::Path;
use std::process::Command;
use std::time::{Duration, Instant};

const TOKENS: usize = 20;

fn switch(address: SocketAddr, what: &str) -> Value {
    let reply = post(address, &format!("/{what}_profile"), &json!({}));
    assert_eq!(reply.status, 200, "{}", String::from_utf8_lossy(&reply.body));
    reply.json()
}

/// Completes a request that takes one prefill step and `TOKENS - 1` decode steps.
fn complete(address: SocketAddr) {
    let body = json!({"prompt": "The quick brown fox", "max_tokens": TOKENS, "ignore_eos": true});
    assert_eq!(post(address, "/v1/completions", &body).status, 200);
}

/// Returns the event counts of a trace file: device steps, step submissions, and waits for a step.
fn steps(path: &Path) -> [usize; 3] {
    let text = std::fs::read_to_string(path).unwrap();
    count(&serde_json::from_str(&text).unwrap_or_else(|e| panic!("{e}: {text}")))
}

fn count(trace: &Value) -> [usize; 3] {
    let events = trace["traceEvents"].as_array().unwrap();
    let count = |wanted: &dyn Fn(&Value) -> bool| events.iter().filter(|e| wanted(e)).count();
    [
        count(&|e| e["cat"] == "step"),
        count(&|e| e["cat"] == "host" && e["name"] == "submit"),
        count(&|e| e["cat"] == "host" && e["name"] == "wait"),
    ]
}

/// Waits until a trace file has the expected event counts. A read may find the file incomplete, because the
/// server is still writing it.
fn comes_to(path: &Path, wanted: [usize; 3]) {
    let deadline = Instant::now() + Duration::from_secs(20);
    loop {
        let text = std::fs::read_to_string(path).unwrap();
        let found = serde_json::from_str(&text).map(|trace| count(&trace));
        if matches!(found, Ok(steps) if steps == wanted) {
            return;
        }
        assert!(Instant::now() < deadline, "{found:?}, not {wanted:?}");
        std::thread::sleep(Duration::from_millis(50));
    }
}

#[test]
fn profiling_without_a_directory_is_an_error() {
    let server = TestServer::start(&ServerSetup::default());
    for path in ["/start_profile", "/stop_profile"] {
        let reply = post(server.address, path, &json!({}));
        assert_eq!(reply.status, 404);
        let error = &reply.json()["error"];
        assert_eq!(error["reason"], "profiling_off");
        assert!(error["message"].as_str().unwrap().contains("--profile DIR"), "{error}");
    }
}

#[test]
fn start_and_stop_profile_are_answered_in_order() {
    let options = ServerOptions { profile: true, ..ServerOptions::default() };
    let mut server =
        TestServer::listen(&ServerSetup { options: options.clone(), ..ServerSetup::default() });
    assert_eq!(post(server.address, "/start_profile", &json!({})).status, 503, "not up yet");
    server.bring_up(&ServerSetup { options, ..ServerSetup::default() });
    for _ in 0..2 {
        let started = json!({"status": "started", "file": "1.json"});
        assert_eq!(switch(server.address, "start"), started, "without its folder");
        assert_eq!(switch(server.address, "stop"), json!({"status": "stopped", "file": null}));
    }
}

#[test]
fn traces_parse_after_stop_kill_and_term() {
    let folder = tempfile::tempdir().unwrap();
    let traces = folder.path().to_str().unwrap();
    for executor in ["embedded", "process"] {
        let profile = format!("{traces}/{executor}");
        let args = ["--executor", executor, "--threads", "1", "--profile", &profile];
        let mut process = ServerProcess::start(&args);
        let at = process.address;
        let file = |name: &Value| Path::new(&profile).join(name.as_str().unwrap());
        complete(at); // These steps are recorded, because `--profile` starts recording at start-up.
        let first = file(&switch(at, "stop")["file"]);
        assert_eq!(steps(&first), [TOKENS; 3], "{executor}");
        complete(at);
        assert_eq!(switch(at, "stop"), json!({"status": "stopped", "file": null}));
        let second = file(&switch(at, "start")["file"]);
        complete(at);
        comes_to(&second, [TOKENS; 3]); // The file is written to disk while the recording goes on.
        complete(at);
        process.signal("TERM");
        assert_eq!(process.exits_within(Duration::from_secs(20)).code(), Some(0));
        assert_eq!(steps(&second), [2 * TOKENS; 3], "{executor}");
        assert_eq!(steps(&first), [TOKENS; 3]);
        print_tables(&second);
    }
}

/// Checks that `hadron bench trace` counts the steps of the file.
fn print_tables(file: &Path) {
    let mut hadron = Command::new(env!("CARGO_BIN_EXE_hadron"));
    let hadron = run_to_end(hadron.args(["bench", "trace"]).arg(file));
    let text = String::from_utf8(hadron.stdout).unwrap();
    assert!(hadron.status.success(), "{text}{}", String::from_utf8_lossy(&hadron.stderr));
    let cells = |line: &str| line.split("  ").map(str::trim).map(str::to_owned).collect::<Vec<_>>();
    let table = text.split("\n\n").next().unwrap().lines().map(cells);
    let counted = table.map(|row| {
        let row: Vec<String> = row.into_iter().filter(|cell| !cell.is_empty()).collect();
        row[1].parse::<usize>().unwrap_or(0)
    });
    let marked = text.lines().filter(|line| line.ends_with("steps with timestamps per launch"));
    let marked = marked.map(|line| line.split(' ').rev().nth(5).unwrap().parse::<usize>().unwrap());
    assert_eq!(counted.sum::<usize>() + marked.sum::<usize>(), 2 * TOKENS, "{text}");
    for word in ["decode, <= 1 rows", "prefill, <= ", "gap of step", "forward", "sampling"] {
        assert!(text.contains(word), "{word}: {text}");
    }
}
