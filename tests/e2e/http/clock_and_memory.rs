//! Clock jumps, memory exhaustion of the machine, and violated invariants inside the server.

use super::executor_process::{
    children_as, complete_text, executor, finish, is_ready, is_zombie, stream, wait_until,
};
use super::server_process::{ServerProcess, command};
use crate::bounded_child::run_to_end;
use crate::http_client::{HttpClient, get, post};
use crate::test_server::{ServerSetup, TestServer};
use rustix::process::{Pid, Resource, Rlimit, prlimit};
use serde_json::json;
use std::fs;
use std::net::SocketAddr;
use std::os::unix::process::ExitStatusExt;
use std::process::Command;
use std::time::{Duration, SystemTime, UNIX_EPOCH};

const EXECUTOR_PROCESS_FLAGS: &[&str] =
    &["--executor", "process", "--threads", "1", "--dtype", "float32"];
const TIMEOUT: Duration = Duration::from_mins(1);
const DAY_S: i64 = 86_400;
const ABORTED: Option<i32> = Some(6);
/// The libfaketime build for multithreaded programs; the dynamic loader expands `$LIB`.
const LIBFAKETIME: &str = "/usr/$LIB/faketime/libfaketimeMT.so.1";

#[test]
#[ignore = "needs Debian's libfaketime: `just clock-jumps`"]
fn wall_clock_jumps_change_only_dates() {
    let folder = tempfile::tempdir().unwrap();
    let file = folder.path().join("offset");
    let jump = |seconds: i64| {
        // `rename` replaces libfaketime's timestamp file atomically, so that the server never reads an empty
        // file.
        let next = folder.path().join("next");
        fs::write(&next, format!("{seconds:+}")).unwrap();
        fs::rename(&next, &file).unwrap();
    };
    jump(0);
    let mut command = command(&[&["--port", "0"], EXECUTOR_PROCESS_FLAGS].concat());
    command.env("LD_PRELOAD", LIBFAKETIME).env("FAKETIME_TIMESTAMP_FILE", &file);
    command.env("FAKETIME_NO_CACHE", "1").env("FAKETIME_DONT_FAKE_MONOTONIC", "1");
    let mut process = ServerProcess::of(&mut command);
    let (at, former) = (process.address, executor(&process));
    let loaded = fs::read_to_string(format!("/proc/{former}/maps")).unwrap();
    assert!(loaded.contains("libfaketime"), "the executor's clock jumps too");
    let expected = complete_text(at, 1_500);
    for seconds in [DAY_S, -DAY_S, 3_650 * DAY_S, 0] {
        let waiting = stream(at, 1_500);
        jump(seconds);
        let (text, end) = finish(waiting);
        assert_eq!((text == expected, end), (true, json!("length")), "a jump by {seconds} s");
        let reply = post(at, "/v1/completions", &json!({"prompt": "a", "max_tokens": 1})).json();
        let now_s = SystemTime::now().duration_since(UNIX_EPOCH).unwrap().as_secs() as i64;
        let off_s = reply["created"].as_i64().unwrap() - now_s - seconds;
        assert!(off_s.abs() < 60, "dates follow the clock, by {off_s} s: {reply}");
        assert!(is_ready(at));
    }
    assert_eq!(executor(&process), former, "no executor was replaced");
    process.signal("TERM");
    assert_eq!(process.exits_within(TIMEOUT).code(), Some(0));
}

/// Limits the address space of a process to its current size plus `more_bytes`.
pub(super) fn limit_memory(pid: u32, more_bytes: u64) {
    let status = fs::read_to_string(format!("/proc/{pid}/status")).unwrap();
    let size = status.lines().find_map(|line| line.strip_prefix("VmSize:")).unwrap();
    let size_kib: u64 = size.trim().trim_end_matches(" kB").parse().unwrap();
    let most = Some(size_kib * 1024 + more_bytes);
    let limit = Rlimit { current: most, maximum: most };
    prlimit(Pid::from_raw(pid as i32), Resource::As, limit).unwrap();
}

#[test]
fn too_little_kv_memory_fails_startup_with_numbers() {
    let binary = env!("CARGO_BIN_EXE_hadron");
    // The KV cache size is set explicitly, because its default depends on the free memory of the machine.
    let size = "--kv-cache-memory-bytes 4GiB";
    let script = format!("ulimit -v 3000000; exec {binary} serve --port 0 --threads 1 {size}");
    for how in ["", " --executor process"] {
        let output = run_to_end(Command::new("sh").args(["-c", &(script.clone() + how)]));
        let text = String::from_utf8_lossy(&output.stderr);
        assert_eq!(output.status.code(), Some(1), "{text}");
        assert!(text.contains("out of memory: 42") && text.contains("KV cache"), "{text}");
    }
}

#[test]
fn ready_executor_allocates_no_more_memory() {
    let process = ServerProcess::start(EXECUTOR_PROCESS_FLAGS);
    let (at, former) = (process.address, executor(&process));
    limit_memory(former, 0);
    let long = json!({"prompt": "fox ".repeat(480), "max_tokens": 40, "logprobs": 5, "n": 8});
    assert_eq!(post(at, "/v1/completions", &long).status, 200);
    assert!(!complete_text(at, 1_500).is_empty());
    assert_eq!(executor(&process), former, "it was not replaced");
}

/// Sends a body in several writes and returns the reply's status, or `None` if the connection ended without a
/// reply.
fn send_large_body(at: SocketAddr, body: &[u8]) -> Option<u16> {
    let mut client = HttpClient::connect(at);
    let head = format!(
        "POST /v1/completions HTTP/1.1\r\nHost: x\r\nContent-Length: {}\r\n\r\n",
        body.len()
    );
    client.send_raw(head.as_bytes()).ok()?;
    body.chunks(1 << 16).try_for_each(|piece| client.send_raw(piece)).ok()?;
    client.read().map(|reply| reply.status)
}

#[test]
fn server_out_of_memory_rejects_or_exits_with_message() {
    // With this variable mimalloc reserves address space in steps of 16 MiB instead of 1 GiB, so that the
    // address-space limit applies to memory in use.
    let mut command = command(&[&["--port", "0"], EXECUTOR_PROCESS_FLAGS].concat());
    let mut process = ServerProcess::of(command.env("MIMALLOC_ARENA_RESERVE", "16MiB"));
    let (at, left) = (process.address, executor(&process));
    let first = complete_text(at, 20);
    limit_memory(process.id(), 32 << 20);
    let body = json!({"prompt": "x".repeat(7_000_000), "max_tokens": 1}).to_string();
    let received: Vec<Option<u16>> = std::thread::scope(|scope| {
        let ask = || scope.spawn(|| send_large_body(at, body.as_bytes()));
        let asking: Vec<_> = (0..24).map(|_| ask()).collect();
        asking.into_iter().map(|one| one.join().unwrap()).collect()
    });
    println!("{received:?}");
    assert!(received.iter().flatten().all(|status| (400..500).contains(status) || *status == 503));
    // The next request may fail as well, because the memory of the first one has not been released yet.
    let again = std::panic::catch_unwind(|| complete_text(at, 20));
    if let Ok(again) = again {
        assert_eq!(again, first);
        assert_eq!(children_as("executor", process.id()), [left]);
        assert_eq!(get(at, "/livez").status, 200);
    } else {
        let status = process.exits_within(TIMEOUT);
        let text = process.stderr_text();
        assert_eq!(status.signal(), ABORTED, "{text}");
        assert!(text.contains("memory allocation of"), "{text}");
        let gone = || !fs::exists(format!("/proc/{left}")).unwrap() || is_zombie(left);
        wait_until(Duration::from_secs(2), "the executor's end", gone);
    }
}

#[test]
fn scheduler_invariant_violation_aborts_the_process() {
    let mut again = Command::new(std::env::current_exe().unwrap());
    again.args([
        "--exact",
        "--ignored",
        "--nocapture",
        "http::clock_and_memory::invariant_violation_process",
    ]);
    let output = run_to_end(&mut again);
    let text = String::from_utf8_lossy(&[output.stdout, output.stderr].concat()).into_owned();
    assert_eq!(output.status.signal(), ABORTED, "{text}");
    assert!(text.contains("request id RequestId(1) is already in use"), "{text}");
    assert!(text.contains("the scheduler broke an invariant: aborting"), "{text}");
    assert!(!text.contains("the client got a reply"), "{text}");
}

#[test]
#[ignore = "aborts its process: run by `scheduler_invariant_violation_aborts_the_process` in a child process"]
fn invariant_violation_process() {
    tracing_subscriber::fmt().with_writer(std::io::stderr).init();
    let server =
        TestServer::start(&ServerSetup { submits_duplicate_id: true, ..ServerSetup::default() });
    let mut client = HttpClient::connect(server.address);
    client.send("POST", "/v1/completions", "", br#"{"prompt":"a","max_tokens":1}"#);
    let _ = client.read(); // The connection ends when the process aborts.
    println!("the client got a reply, or the connection ended before the process");
    std::thread::sleep(TIMEOUT);
}
