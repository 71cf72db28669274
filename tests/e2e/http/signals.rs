//! Signals during streams: signals that end the server, SIGHUP, which reopens its log files, and signals that
//! also reach its child processes.

use super::executor_process::{
    children_as, complete_text, executor, finish, send, stream, wait_until,
};
use super::server_process::{ServerProcess, command};
use crate::bounded_child::end_child;
use crate::http_client::post;
use rustix::process::{Pid, Resource, Rlimit, prlimit};
use serde_json::{Value, json};
use std::fs;
use std::net::SocketAddr;
use std::path::Path;
use std::process::{Child, Stdio};
use std::time::{Duration, Instant};

const EXECUTOR_PROCESS_FLAGS: &[&str] =
    &["--executor", "process", "--threads", "1", "--dtype", "float32"];
const TOKENS: u32 = 150;
const TIMEOUT: Duration = Duration::from_secs(20);

#[test]
fn harmless_signals_end_neither_server_nor_children() {
    let mut process = ServerProcess::start(EXECUTOR_PROCESS_FLAGS);
    let (at, pid) = (process.address, executor(&process));
    let expected = complete_text(at, TOKENS);
    let grammar = json!({"prompt": "a", "max_tokens": 5, "structured_outputs": {"regex": "[ab]+"}});
    assert_eq!(post(at, "/v1/completions", &grammar).status, 200);
    for signal in ["-HUP", "-USR1", "-USR2", "-XFSZ"] {
        let running = stream(at, TOKENS);
        send(process.id(), signal);
        send(pid, signal);
        for worker in children_as("grammar-worker", process.id()) {
            send(worker, signal);
        }
        assert_eq!(finish(running), (expected.clone(), json!("length")), "{signal}");
        assert_eq!(executor(&process), pid, "{signal}");
    }
    // A terminal sends its signals to the whole process group: children ignore them, and only the server
    // reacts.
    let running = stream(at, TOKENS);
    for signal in ["-QUIT", "-INT"] {
        send(pid, signal);
        for worker in children_as("grammar-worker", process.id()) {
            send(worker, signal);
        }
    }
    assert_eq!(finish(running), (expected, json!("length")));
    assert_eq!(executor(&process), pid);
    process.signal("TERM");
    assert_eq!(process.exits_within(TIMEOUT).code(), Some(0));
}

#[test]
fn sigquit_drains_and_a_second_one_ends_at_once() {
    let mut process =
        ServerProcess::start(&[EXECUTOR_PROCESS_FLAGS, &["--shutdown-timeout", "30s"]].concat());
    let running = stream(process.address, TOKENS);
    process.signal("QUIT");
    assert_eq!(finish(running).1, json!("length"), "the stream ends by itself");
    assert_eq!(process.exits_within(TIMEOUT).code(), Some(0));

    let mut process = ServerProcess::start(EXECUTOR_PROCESS_FLAGS);
    let _running = stream(process.address, 2_000);
    process.signal("QUIT");
    std::thread::sleep(Duration::from_millis(50));
    process.signal("QUIT");
    let code = process.exits_within(Duration::from_secs(2)).code();
    // The drain ends with exit code 0 if the stream has finished before the second signal.
    assert!(code == Some(131) || code == Some(0), "{code:?}");
}

/// A `hadron serve` process that logs to a file.
struct FileLoggedServer {
    child: Child,
    at: SocketAddr,
}

impl FileLoggedServer {
    fn start(log: &Path, args: &[&str]) -> Self {
        let mut command = command(&[&["--port", "0"], args].concat());
        command.env("RUST_LOG", "info").stderr(Stdio::from(fs::File::create(log).unwrap()));
        let child = command.spawn().unwrap();
        let start = Instant::now();
        let at = loop {
            let text = fs::read_to_string(log).unwrap();
            if let Some((_, rest)) = text.split_once(" on http://")
                && let Some((address, _)) = rest.split_once(' ')
            {
                break address.parse().unwrap();
            }
            assert!(start.elapsed() < Duration::from_mins(1), "no ready line: {text}");
            std::thread::sleep(Duration::from_millis(20));
        };
        Self { child, at }
    }
}

impl Drop for FileLoggedServer {
    fn drop(&mut self) {
        end_child(&mut self.child);
    }
}

fn lines(path: &Path) -> Vec<Value> {
    let text = fs::read_to_string(path).unwrap_or_default();
    assert!(text.is_empty() || text.ends_with('\n'), "half a line at the end: {text:?}");
    text.lines()
        .map(|line| serde_json::from_str(line).unwrap_or_else(|_| panic!("{line}")))
        .collect()
}

fn complete(at: SocketAddr, count: usize) {
    for _ in 0..count {
        let body = json!({"prompt": "a", "max_tokens": 1});
        assert_eq!(post(at, "/v1/completions", &body).status, 200);
    }
}

/// Rotates log files as logrotate does without `copytruncate`: renames them, then sends SIGHUP.
#[test]
fn sighup_reopens_moved_log_files() {
    let folder = tempfile::tempdir().unwrap();
    let (log, trace) = (folder.path().join("log"), folder.path().join("trace"));
    let moved = |path: &Path| path.with_extension("1");
    let args = [EXECUTOR_PROCESS_FLAGS, &["--trace-requests", trace.to_str().unwrap()]].concat();
    let server = FileLoggedServer::start(&log, &args);
    complete(server.at, 3);
    wait_until(TIMEOUT, "lines", || lines(&trace).len() == 3);
    let running = stream(server.at, TOKENS);
    for path in [&log, &trace] {
        fs::rename(path, moved(path)).unwrap();
    }
    send(server.child.id(), "-HUP");
    wait_until(TIMEOUT, "new files", || log.exists() && trace.exists());
    assert_eq!(finish(running).1, json!("length"));
    complete(server.at, 2);
    wait_until(TIMEOUT, "lines", || lines(&trace).len() == 3);
    assert_eq!(lines(&moved(&trace)).len(), 3);
    assert!(fs::read_to_string(&log).unwrap().contains("log file reopened"));
    assert!(!fs::read_to_string(moved(&log)).unwrap().contains("reopened"));
    // The server writes the executors' log messages, so that they also go to the new file.
    send(children_as("executor", server.child.id())[0], "-KILL");
    wait_until(TIMEOUT, "the executor's return", || {
        fs::read_to_string(&log).unwrap().contains("executors restarted")
    });
    send(server.child.id(), "-TERM");
    wait_until(TIMEOUT, "the drain message", || {
        fs::read_to_string(&log).unwrap().contains("drained")
    });
}

#[test]
fn full_disk_drops_whole_trace_lines_and_logs_the_count() {
    const REQUESTS: usize = 12;
    let folder = tempfile::tempdir().unwrap();
    let trace = folder.path().join("trace");
    let mut process =
        ServerProcess::start(&["--threads", "1", "--trace-requests", trace.to_str().unwrap()]);
    complete(process.address, 1);
    wait_until(TIMEOUT, "a line", || lines(&trace).len() == 1);
    let line = fs::metadata(&trace).unwrap().len();
    // The file size limit emulates a full disk: it permits three and a half lines of the request trace.
    let limit = Rlimit { current: Some(line * 7 / 2), maximum: None };
    prlimit(Pid::from_raw(process.id() as i32), Resource::Fsize, limit).unwrap();
    complete(process.address, REQUESTS - 1);
    process.signal("TERM");
    assert_eq!(process.exits_within(TIMEOUT).code(), Some(0));
    let written = lines(&trace).len();
    assert!((2..=4).contains(&written), "{written}");
    let lost = REQUESTS - written;
    let text = process.stderr_text();
    assert!(text.contains("lines of --trace-requests were dropped"), "{text}");
    assert!(text.contains(&format!("in_all={lost} ")), "{lost}: {text}");
    assert!(
        text.contains(&format!("the --trace-requests file is incomplete lost={lost}")),
        "{text}"
    );
}

#[test]
fn full_trace_disk_is_reported_with_numbers() {
    let process = ServerProcess::start(&["--threads", "1", "--trace-requests", "/dev/full"]);
    complete(process.address, 2);
    send(process.id(), "-TERM");
    let mut process = process;
    process.exits_within(TIMEOUT);
    let text = process.stderr_text();
    assert!(text.contains("lines of --trace-requests were dropped lines="), "{text}");
    assert!(text.contains(" in_all=2 "), "{text}");
    assert!(text.contains("file is incomplete lost=2"), "{text}");
}
