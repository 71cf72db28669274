//! Faults of the machine and of its operator: pauses, blocked logs, exhausted file descriptors, open sockets,
//! and panics.

use super::executor_process::{
    children_as, complete_text, executor, is_ready, is_zombie, send, wait_until,
};
use super::server_process::{ServerProcess, command};
use crate::bounded_child::{end_child, run_to_end, wait_within};
use crate::deadlines::BoundedJoin as _;
use crate::http_client::connect_within;
use crate::http_client::{HttpClient, get, post};
use crate::test_server::{ServerSetup, TestServer};
use axum::routing::get as on_get;
use rustix::process::{Pid, Resource, Rlimit, getrlimit, prlimit, setrlimit};
use serde_json::json;
use server::ConnectionTimeouts;
use server::listener::{ConnectionLimiter, bind};
use server::routes::router;
use std::fs::{self, File};
use std::io::{Read, Write};
use std::net::{IpAddr, Ipv4Addr, SocketAddr, TcpListener, TcpStream};
use std::process::{Child, Stdio};
use std::sync::Arc;
use std::time::{Duration, Instant};

const EXECUTOR_PROCESS_FLAGS: &[&str] =
    &["--executor", "process", "--threads", "1", "--dtype", "float32"];
const TIMEOUT: Duration = Duration::from_mins(1);

/// A loopback address that no process listens on.
fn free_address() -> SocketAddr {
    TcpListener::bind("127.0.0.1:0").unwrap().local_addr().unwrap()
}

/// A server on a port that the test chooses, so that the address is known without reading the server's log,
/// which is blocked in some tests.
struct FixedPortServer {
    child: Child,
    at: SocketAddr,
}

impl FixedPortServer {
    fn start(log: Stdio, more: &[&str]) -> Self {
        let at = free_address();
        let port = at.port().to_string();
        let mut command = command(&[EXECUTOR_PROCESS_FLAGS, &["--port", &port], more].concat());
        let child = command.env("RUST_LOG", "debug").stderr(log).spawn().unwrap();
        wait_until(TIMEOUT, "the start", || connect_within(at, TIMEOUT).is_ok() && is_ready(at));
        Self { child, at }
    }

    /// Checks that the server completes a request, replaces a killed executor, completes another request, and
    /// drains.
    fn assert_full_lifecycle(&mut self) {
        let first = complete_text(self.at, 20);
        let [executor] = children_as("executor", self.child.id())[..] else {
            panic!("one executor")
        };
        send(executor, "-KILL");
        wait_until(TIMEOUT, "a replacement executor", || {
            children_as("executor", self.child.id()).iter().any(|pid| *pid != executor)
        });
        assert_eq!(complete_text(self.at, 20), first);
        send(self.child.id(), "-TERM");
        assert_eq!(wait_within(&mut self.child, TIMEOUT).code(), Some(0));
    }
}

impl Drop for FixedPortServer {
    fn drop(&mut self) {
        end_child(&mut self.child);
    }
}

#[test]
fn full_log_disk_loses_only_log_lines() {
    let full = || File::options().write(true).open("/dev/full").unwrap();
    FixedPortServer::start(full().into(), &["--trace-requests", "/dev/full"])
        .assert_full_lifecycle();
}

#[test]
fn closed_log_pipe_loses_only_log_lines() {
    let (reader, writer) = std::io::pipe().unwrap();
    drop(reader);
    FixedPortServer::start(writer.into(), &["--log-format", "json"]).assert_full_lifecycle();
}

#[test]
fn blocked_log_pipe_delays_nothing_and_counts_drops() {
    let (mut reader, mut writer) = std::io::pipe().unwrap();
    // Fills the pipe of the server's log: 64 KiB is the capacity of a pipe on Linux.
    writer.write_all(&vec![b'.'; 1 << 16]).unwrap();
    let mut server = FixedPortServer::start(writer.into(), &[]);
    let first = complete_text(server.at, 20);
    let former = children_as("executor", server.child.id());
    send(former[0], "-KILL");
    wait_until(TIMEOUT, "a replacement executor", || {
        children_as("executor", server.child.id()).iter().any(|pid| !former.contains(pid))
    });
    assert_eq!(complete_text(server.at, 20), first);
    // The test reads the log from here on; the log must report the number of lost lines.
    let log = std::thread::spawn(move || {
        let mut text = Vec::new();
        reader.read_to_end(&mut text).unwrap();
        String::from_utf8_lossy(&text).into_owned()
    });
    server.assert_full_lifecycle();
    let text = log.join_bounded();
    let told =
        text.lines().find(|line| line.contains("log lines were dropped")).unwrap_or_else(|| {
            panic!("{}", text.trim_start_matches('.'));
        });
    let lines = told.split_once("lines=").and_then(|(_, n)| n.split_whitespace().next());
    assert!(lines.and_then(|n| n.parse::<u32>().ok()).is_some_and(|n| n >= 3), "{told}");
}

#[test]
fn paused_server_does_not_fail_its_executors() {
    let process = ServerProcess::start(EXECUTOR_PROCESS_FLAGS);
    let (at, before) = (process.address, executor(&process));
    let first = complete_text(at, 20);
    let waiting = std::thread::spawn(move || complete_text(at, 1_500));
    std::thread::sleep(Duration::from_millis(100));
    process.signal("STOP");
    // The pause is longer than the heartbeat timeout of an executor.
    std::thread::sleep(Duration::from_secs(8));
    process.signal("CONT");
    assert!(!waiting.join_bounded().is_empty());
    assert_eq!(complete_text(at, 20), first);
    // Heartbeat checks after the pause do not declare the executors failed either.
    std::thread::sleep(Duration::from_millis(2_500));
    assert_eq!((executor(&process), is_ready(at)), (before, true));
}

#[test]
fn second_signal_leaves_no_orphan_process() {
    let mut process = ServerProcess::start(EXECUTOR_PROCESS_FLAGS);
    let left = executor(&process);
    let mut client = HttpClient::connect(process.address);
    let body = json!({"prompt": "a", "max_tokens": 2_000, "ignore_eos": true, "stream": true});
    client.send("POST", "/v1/completions", "", body.to_string().as_bytes());
    assert_eq!(client.read_head().unwrap().status, 200);
    process.signal("TERM");
    std::thread::sleep(Duration::from_millis(20));
    process.signal("TERM");
    process.exits_within(TIMEOUT);
    let gone = || !fs::exists(format!("/proc/{left}")).unwrap() || is_zombie(left);
    wait_until(Duration::from_secs(2), "the executor's end", gone);
}

/// TCP sockets of a process from `/proc/net/tcp`: local address, remote address, and whether the socket
/// listens.
fn sockets_of(pid: u32) -> Vec<(SocketAddr, SocketAddr, bool)> {
    let links = fs::read_dir(format!("/proc/{pid}/fd")).unwrap().flatten();
    let links = links.filter_map(|entry| fs::read_link(entry.path()).ok());
    let own: Vec<String> = links.map(|link| link.display().to_string()).collect();
    // The server is not configured for IPv6, so no IPv6 socket may belong to it.
    let six = fs::read_to_string(format!("/proc/{pid}/net/tcp6")).unwrap_or_default();
    let is_own = |inode: &str| own.contains(&format!("socket:[{inode}]"));
    let strange = six.lines().skip(1).filter_map(|line| line.split_whitespace().nth(9));
    assert_eq!(strange.filter(|inode| is_own(inode)).count(), 0, "{six}");
    let table = fs::read_to_string(format!("/proc/{pid}/net/tcp")).unwrap();
    let read = |line: &str| {
        let fields: Vec<&str> = line.split_whitespace().collect();
        is_own(fields[9]).then(|| (address(fields[1]), address(fields[2]), fields[3] == "0A"))
    };
    table.lines().skip(1).filter_map(read).collect()
}

/// Parses an address as in `/proc/net/tcp`: `0100007F:1F90` is 127.0.0.1:8080.
fn address(text: &str) -> SocketAddr {
    let (host, port) = text.split_once(':').unwrap();
    let host = u32::from_str_radix(host, 16).unwrap().to_le_bytes();
    (IpAddr::V4(Ipv4Addr::from(host)), u16::from_str_radix(port, 16).unwrap()).into()
}

#[test]
fn no_socket_leaves_loopback_by_default() {
    let (admin, events) = (free_address().to_string(), free_address());
    let config = json!({"enable_kv_cache_events": true, "publisher": "zmq",
        "endpoint": format!("tcp://{events}")});
    let more = ["--admin-listen", &admin, "--kv-events-config", &config.to_string()];
    let process = ServerProcess::start(&[EXECUTOR_PROCESS_FLAGS, &more].concat());
    assert!(!complete_text(process.address, 5).is_empty());
    let hostile = json!({"messages": [{"role": "user", "content": [
        {"type": "image_url", "image_url": {"url": "http://192.0.2.1/x"}}]}]});
    assert_eq!(post(process.address, "/v1/chat/completions", &hostile).status, 400);
    let mut all = vec![process.id()];
    all.extend(super::executor_process::children(process.id()));
    assert!(all.len() > 1, "{all:?}");
    let sockets: Vec<_> = all.into_iter().map(sockets_of).collect();
    for (local, remote, listens) in sockets.iter().flatten() {
        assert!(local.ip().is_loopback(), "{sockets:?}");
        assert!(*listens || remote.ip().is_loopback(), "{sockets:?}");
    }
    let mut listening: Vec<SocketAddr> =
        sockets[0].iter().filter(|s| s.2).map(|(local, ..)| *local).collect();
    let mut expected = vec![process.address, admin.parse().unwrap(), events];
    listening.sort_unstable();
    expected.sort_unstable();
    assert_eq!(listening, expected, "HTTP, operators, KV events and nothing else");
    assert!(sockets[1..].iter().flatten().all(|s| !s.2), "executors listen nowhere: {sockets:?}");
}

#[test]
fn probes_answer_when_descriptors_run_out() {
    let limit = getrlimit(Resource::Nofile);
    // The server inherits this descriptor limit, and reserves 256 descriptors for purposes other than
    // connections.
    let few = Rlimit { current: Some(300), ..limit };
    let start = || {
        setrlimit(Resource::Nofile, few).unwrap();
        let process = ServerProcess::start(&["--threads", "1"]);
        setrlimit(Resource::Nofile, limit).unwrap();
        process
    };
    let process = start();
    let at = process.address;
    let crowd: Vec<TcpStream> = (0..400).map(|_| connect_within(at, TIMEOUT).unwrap()).collect();
    let asked = Instant::now();
    assert_eq!(get(at, "/livez").status, 200);
    assert!(asked.elapsed() < Duration::from_secs(20), "{:?}", asked.elapsed());
    drop(crowd);
    wait_until(TIMEOUT, "places for others", || {
        let mut client = HttpClient::connect(at);
        client.send("POST", "/v1/completions", "", br#"{"prompt":"a","max_tokens":1}"#);
        client.read().is_some_and(|reply| reply.status == 200)
    });
}

#[test]
fn accept_failures_are_rate_limited_in_the_log() {
    let mut process = ServerProcess::start(&["--threads", "1"]);
    let pid = Pid::from_raw(process.id() as i32);
    let open = fs::read_dir(format!("/proc/{}/fd", process.id())).unwrap().count() as u64;
    // The server derived its connection limit from the descriptor limit at start-up, before the limit is
    // lowered here.
    let few = Rlimit { current: Some(open + 3), ..getrlimit(Resource::Nofile) };
    prlimit(pid, Resource::Nofile, few).unwrap();
    let _crowd: Vec<_> =
        (0..20).map(|_| connect_within(process.address, TIMEOUT).unwrap()).collect();
    std::thread::sleep(Duration::from_secs(2));
    process.signal("KILL");
    process.exits_within(TIMEOUT);
    let lines = process.stderr_text().matches("accept failed").count();
    assert!((1..=8).contains(&lines), "{lines} lines in 2 s");
}

#[test]
fn handler_panic_fails_one_request() {
    let server = TestServer::start(&ServerSetup::default());
    let app = Arc::clone(&server.app);
    let broken = async || -> &'static str { panic!("a handler that is wrong, at {}", file!()) };
    let routes =
        router(Arc::clone(&app)).merge(axum::Router::new().route("/broken", on_get(broken)));
    let connections = ConnectionLimiter::new(16);
    let at = {
        let _inside = server.runtime.enter();
        let listener = bind(free_address()).unwrap();
        let at = listener.local_addr().unwrap();
        let limiter = connections.clone();
        server.runtime.spawn(async move {
            limiter.accept(listener, app, routes, ConnectionTimeouts::default()).await;
        });
        at
    };
    let mut client = HttpClient::connect(at);
    for _ in 0..3 {
        client.send("GET", "/broken", "", b"");
        let reply = client.read().unwrap();
        assert_eq!(reply.status, 500);
        let text = String::from_utf8(reply.body.clone()).unwrap();
        for leak in ["wrong", ".rs", "panic", "/"] {
            assert!(!text.contains(leak), "{text}");
        }
        let body = json!({"prompt": "a", "max_tokens": 2});
        assert_eq!(client.post("/v1/completions", &body).status, 200, "the connection lives on");
    }
    server.wait_idle(TIMEOUT);
}

#[test]
fn no_route_accepts_weights_or_kv() {
    let server = TestServer::start(&ServerSetup::default());
    // Routes through which other inference servers accept weights, tensors and code over HTTP; none may
    // exist.
    for path in [
        "/update_weights",
        "/update_weights_from_disk",
        "/update_weights_from_tensor",
        "/update_weights_from_distributed",
        "/init_weights_update_group",
        "/collective_rpc",
        "/v1/load_lora_adapter",
        "/load_lora_adapter",
        "/sleep",
        "/resume_memory_occupation",
    ] {
        let reply = post(server.address, path, &json!({"model_path": "/etc", "method": "x"}));
        assert!([404, 501].contains(&reply.status), "{path}: {}", reply.status);
    }
    let body = json!({"prompt": "a", "kv_transfer_params": {"do_remote_prefill": true}});
    let reply = post(server.address, "/v1/completions", &body);
    assert_eq!(
        (reply.status, &reply.json()["error"]["param"]),
        (400, &json!("kv_transfer_params"))
    );
    let flag = ["--kv-transfer-config", "{\"kv_connector\":\"x\"}"];
    let output = run_to_end(&mut command(&flag));
    let text = String::from_utf8_lossy(&output.stderr);
    assert!(!output.status.success() && text.contains("--kv-transfer-config"), "{text}");
}

/// A copy of the demo model in a temporary folder.
pub(crate) fn demo_copy() -> tempfile::TempDir {
    let folder = tempfile::tempdir().unwrap();
    let demo = std::path::Path::new(env!("CARGO_MANIFEST_DIR")).join("tests/data/demo");
    let files = ["config.json", "generation_config.json", "model.safetensors"];
    for name in files.into_iter().chain(["tokenizer.json", "tokenizer_config.json"]) {
        fs::copy(demo.join(name), folder.path().join(name)).unwrap();
    }
    folder
}

/// Folder with the demo model and this chat template; `None` = without a chat template.
fn demo_with(template: Option<&str>) -> tempfile::TempDir {
    let folder = demo_copy();
    let text = fs::read_to_string(folder.path().join("tokenizer_config.json")).unwrap();
    let mut config: serde_json::Value = serde_json::from_str(&text).unwrap();
    match template {
        Some(template) => config["chat_template"] = json!(template),
        None => drop(config.as_object_mut().unwrap().remove("chat_template")),
    }
    fs::write(folder.path().join("tokenizer_config.json"), config.to_string()).unwrap();
    folder
}

#[test]
fn missing_chat_template_is_allowed_and_broken_one_is_not() {
    let folder = demo_with(None);
    let process = ServerProcess::start(&[folder.path().to_str().unwrap(), "--threads", "1"]);
    assert!(!complete_text(process.address, 5).is_empty());
    let chat = json!({"messages": [{"role": "user", "content": "hi"}]});
    let reply = post(process.address, "/v1/chat/completions", &chat);
    assert_eq!((reply.status, &reply.json()["error"]["reason"]), (400, &json!("no_chat_template")));

    let folder = demo_with(Some("{% for m in messages %}{{ m.content }}"));
    let output = run_to_end(&mut command(&[folder.path().to_str().unwrap(), "--port", "0"]));
    let text = String::from_utf8_lossy(&output.stderr);
    assert_eq!(output.status.code(), Some(1), "{text}");
    assert!(text.contains("tokenizer_config.json") && text.contains("template"), "{text}");
}
