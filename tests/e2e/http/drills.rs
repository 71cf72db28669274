//! What machines and operators do to a server: pauses, logs that nobody takes, descriptors that run out, sockets, panics.

use super::executor_process::{answer, children_as, executor, is_ready, is_zombie, send, within};
use super::process::{Process, command};
use crate::http_client::{Client, get, post};
use crate::http_host::{Server, Setup};
use crate::watchdog::run_to_end;
use axum::routing::get as on_get;
use hadron::server::connection::Deadlines;
use hadron::server::listen::{Connections, bind};
use hadron::server::routes::router;
use rustix::process::{Pid, Resource, Rlimit, getrlimit, prlimit, setrlimit};
use serde_json::json;
use std::fs::{self, File};
use std::io::{Read, Write};
use std::net::{IpAddr, Ipv4Addr, SocketAddr, TcpListener, TcpStream};
use std::process::{Child, Stdio};
use std::sync::Arc;
use std::time::{Duration, Instant};

const APART: &[&str] = &["--executor", "process", "--threads", "1", "--dtype", "float32"];
const SOON: Duration = Duration::from_mins(1);

/// A port that nobody listens on.
fn free() -> SocketAddr {
    TcpListener::bind("127.0.0.1:0").unwrap().local_addr().unwrap()
}

/// A server whose log goes where nobody reads its address.
struct Silent {
    child: Child,
    at: SocketAddr,
}

impl Silent {
    fn start(log: Stdio, more: &[&str]) -> Self {
        let at = free();
        let port = at.port().to_string();
        let mut command = command(&[APART, &["--port", &port], more].concat());
        let child = command.env("RUST_LOG", "debug").stderr(log).spawn().unwrap();
        within(SOON, "the start", || TcpStream::connect(at).is_ok() && is_ready(at));
        Self { child, at }
    }

    /// Answers, loses its executor, answers again, drains.
    fn lives_and_ends(&mut self) {
        let first = answer(self.at, 20);
        let [executor] = children_as("executor", self.child.id())[..] else {
            panic!("one executor")
        };
        send(executor, "-KILL");
        within(SOON, "a successor", || {
            children_as("executor", self.child.id()).iter().any(|pid| *pid != executor)
        });
        assert_eq!(answer(self.at, 20), first);
        send(self.child.id(), "-TERM");
        let ended = || self.child.try_wait().unwrap().is_some();
        within(SOON, "the end", ended);
        assert_eq!(self.child.wait().unwrap().code(), Some(0));
    }
}

impl Drop for Silent {
    fn drop(&mut self) {
        let _ = self.child.kill(); // Gone already, unless the test fails.
        let _ = self.child.wait();
    }
}

#[test]
fn a_log_on_a_full_disk_is_lost_and_nothing_else() {
    let full = || File::options().write(true).open("/dev/full").unwrap();
    Silent::start(full().into(), &["--trace-requests", "/dev/full"]).lives_and_ends();
}

#[test]
fn a_log_whose_reader_has_gone_is_lost_and_nothing_else() {
    let (reader, writer) = std::io::pipe().unwrap();
    drop(reader);
    Silent::start(writer.into(), &["--log-format", "json"]).lives_and_ends();
}

#[test]
fn a_log_that_nobody_reads_holds_nothing_up_and_lost_lines_are_counted() {
    let (mut reader, mut writer) = std::io::pipe().unwrap();
    writer.write_all(&vec![b'.'; 1 << 16]).unwrap(); // As much as a pipe of Linux holds.
    let mut server = Silent::start(writer.into(), &[]);
    let first = answer(server.at, 20);
    let former = children_as("executor", server.child.id());
    send(former[0], "-KILL");
    within(SOON, "a successor", || {
        children_as("executor", server.child.id()).iter().any(|pid| !former.contains(pid))
    });
    assert_eq!(answer(server.at, 20), first);
    // Somebody reads again, and hears how much there was.
    let log = std::thread::spawn(move || {
        let mut said = Vec::new();
        reader.read_to_end(&mut said).unwrap();
        String::from_utf8_lossy(&said).into_owned()
    });
    server.lives_and_ends();
    let said = log.join().unwrap();
    let told = said.lines().find(|line| line.contains("they are lost")).unwrap_or_else(|| {
        panic!("{}", said.trim_start_matches('.'));
    });
    let lines = told.split_once("lines=").and_then(|(_, n)| n.split_whitespace().next());
    assert!(lines.and_then(|n| n.parse::<u32>().ok()).is_some_and(|n| n >= 3), "{told}");
}

#[test]
fn a_server_that_was_paused_kills_nobody() {
    let process = Process::start(APART);
    let (at, before) = (process.address, executor(&process));
    let first = answer(at, 20);
    let waiting = std::thread::spawn(move || answer(at, 1_500));
    std::thread::sleep(Duration::from_millis(100));
    process.signal("STOP");
    // Longer than the silence of an executor that is taken for a hang.
    std::thread::sleep(Duration::from_secs(8));
    process.signal("CONT");
    assert!(!waiting.join().unwrap().is_empty());
    assert_eq!(answer(at, 20), first);
    // Nor does it think better of it at the next looks.
    std::thread::sleep(Duration::from_millis(2_500));
    assert_eq!((executor(&process), is_ready(at)), (before, true));
}

#[test]
fn a_second_signal_leaves_no_orphan() {
    let mut process = Process::start(APART);
    let left = executor(&process);
    let mut client = Client::connect(process.address);
    let body = json!({"prompt": "a", "max_tokens": 2_000, "ignore_eos": true, "stream": true});
    client.send("POST", "/v1/completions", "", body.to_string().as_bytes());
    assert_eq!(client.read_head().unwrap().status, 200);
    process.signal("TERM");
    std::thread::sleep(Duration::from_millis(20));
    process.signal("TERM");
    process.exits_within(SOON);
    let gone = || !fs::exists(format!("/proc/{left}")).unwrap() || is_zombie(left);
    within(Duration::from_secs(2), "the executor's end", gone);
}

/// Lines of `/proc/net/tcp` that belong to a process: local address, remote address, whether it listens.
fn sockets_of(pid: u32) -> Vec<(SocketAddr, SocketAddr, bool)> {
    let links = fs::read_dir(format!("/proc/{pid}/fd")).unwrap().flatten();
    let links = links.filter_map(|entry| fs::read_link(entry.path()).ok());
    let own: Vec<String> = links.map(|link| link.display().to_string()).collect();
    // Nothing speaks IPv6 unless it is told to.
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

/// `0100007F:1F90` is 127.0.0.1:8080.
fn address(text: &str) -> SocketAddr {
    let (host, port) = text.split_once(':').unwrap();
    let host = u32::from_str_radix(host, 16).unwrap().to_le_bytes();
    (IpAddr::V4(Ipv4Addr::from(host)), u16::from_str_radix(port, 16).unwrap()).into()
}

#[test]
fn nothing_listens_or_speaks_beyond_this_machine_unless_told() {
    let (admin, events) = (free().to_string(), free());
    let config = json!({"enable_kv_cache_events": true, "publisher": "zmq",
        "endpoint": format!("tcp://{events}")});
    let more = ["--admin-listen", &admin, "--kv-events-config", &config.to_string()];
    let process = Process::start(&[APART, &more].concat());
    assert!(!answer(process.address, 5).is_empty());
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
fn where_descriptors_run_out_probes_are_still_answered() {
    let limit = getrlimit(Resource::Nofile);
    // Inherited by the server, whose reserve for everything but connections is 256.
    let few = Rlimit { current: Some(300), ..limit };
    let start = || {
        setrlimit(Resource::Nofile, few).unwrap();
        let process = Process::start(&["--threads", "1"]);
        setrlimit(Resource::Nofile, limit).unwrap();
        process
    };
    let process = start();
    let at = process.address;
    let crowd: Vec<TcpStream> = (0..400).map(|_| TcpStream::connect(at).unwrap()).collect();
    let asked = Instant::now();
    assert_eq!(get(at, "/livez").status, 200);
    assert!(asked.elapsed() < Duration::from_secs(20), "{:?}", asked.elapsed());
    drop(crowd);
    within(SOON, "places for others", || {
        let mut client = Client::connect(at);
        client.send("POST", "/v1/completions", "", br#"{"prompt":"a","max_tokens":1}"#);
        client.read().is_some_and(|reply| reply.status == 200)
    });
}

#[test]
fn accept_failures_are_a_few_lines_a_minute() {
    let mut process = Process::start(&["--threads", "1"]);
    let pid = Pid::from_raw(process.id() as i32);
    let open = fs::read_dir(format!("/proc/{}/fd", process.id())).unwrap().count() as u64;
    // Its connections are limited by what it had at its start.
    let few = Rlimit { current: Some(open + 3), ..getrlimit(Resource::Nofile) };
    prlimit(pid, Resource::Nofile, few).unwrap();
    let _crowd: Vec<_> = (0..20).map(|_| TcpStream::connect(process.address).unwrap()).collect();
    std::thread::sleep(Duration::from_secs(2));
    process.signal("KILL");
    process.exits_within(SOON);
    let lines = process.said().matches("accept failed").count();
    assert!((1..=8).contains(&lines), "{lines} lines in 2 s");
}

#[test]
fn a_panic_costs_one_request() {
    let server = Server::start(&Setup::default());
    let app = Arc::clone(&server.app);
    let broken = async || -> &'static str { panic!("a handler that is wrong, at {}", file!()) };
    let routes =
        router(Arc::clone(&app)).merge(axum::Router::new().route("/broken", on_get(broken)));
    let connections = Connections::new(16);
    let at = {
        let _inside = server.runtime.enter();
        let listener = bind(free()).unwrap();
        let at = listener.local_addr().unwrap();
        let accepting = connections.clone();
        server.runtime.spawn(async move {
            accepting.accept(listener, (app, routes), Deadlines::default()).await;
        });
        at
    };
    let mut client = Client::connect(at);
    for _ in 0..3 {
        client.send("GET", "/broken", "", b"");
        let reply = client.read().unwrap();
        assert_eq!(reply.status, 500);
        let said = String::from_utf8(reply.body.clone()).unwrap();
        for leak in ["wrong", ".rs", "panic", "/"] {
            assert!(!said.contains(leak), "{said}");
        }
        let body = json!({"prompt": "a", "max_tokens": 2});
        assert_eq!(client.post("/v1/completions", &body).status, 200, "the connection lives on");
    }
    server.wait_idle(SOON);
}

#[test]
fn weights_and_kv_come_from_nobody() {
    let server = Server::start(&Setup::default());
    // Paths under which others take weights, tensors and code over HTTP.
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
    let said = String::from_utf8_lossy(&output.stderr);
    assert!(!output.status.success() && said.contains("--kv-transfer-config"), "{said}");
}

/// The demo model without what makes chats of messages, or with a template that is none.
fn demo_with(template: Option<&str>) -> tempfile::TempDir {
    let folder = tempfile::tempdir().unwrap();
    let demo = std::path::Path::new(env!("CARGO_MANIFEST_DIR")).join("tests/data/demo");
    for name in ["config.json", "generation_config.json", "model.safetensors", "tokenizer.json"] {
        fs::copy(demo.join(name), folder.path().join(name)).unwrap();
    }
    let text = fs::read_to_string(demo.join("tokenizer_config.json")).unwrap();
    let mut config: serde_json::Value = serde_json::from_str(&text).unwrap();
    match template {
        Some(template) => config["chat_template"] = json!(template),
        None => drop(config.as_object_mut().unwrap().remove("chat_template")),
    }
    fs::write(folder.path().join("tokenizer_config.json"), config.to_string()).unwrap();
    folder
}

#[test]
fn without_a_chat_template_completions_work_and_a_broken_one_ends_the_start() {
    let folder = demo_with(None);
    let process = Process::start(&[folder.path().to_str().unwrap(), "--threads", "1"]);
    assert!(!answer(process.address, 5).is_empty());
    let chat = json!({"messages": [{"role": "user", "content": "hi"}]});
    let reply = post(process.address, "/v1/chat/completions", &chat);
    assert_eq!((reply.status, &reply.json()["error"]["reason"]), (400, &json!("no_chat_template")));

    let folder = demo_with(Some("{% for m in messages %}{{ m.content }}"));
    let output = run_to_end(&mut command(&[folder.path().to_str().unwrap(), "--port", "0"]));
    let said = String::from_utf8_lossy(&output.stderr);
    assert_eq!(output.status.code(), Some(1), "{said}");
    assert!(said.contains("tokenizer_config.json") && said.contains("template"), "{said}");
}
