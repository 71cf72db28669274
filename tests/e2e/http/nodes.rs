//! One server on two nodes. Both nodes are processes on this machine and are connected over loopback.

use super::executor_process::{
    body, children_as, complete_text, finish, is_ready, is_zombie, send, stream_of, wait_until,
};
use super::server_process::{ServerProcess, command};
use crate::bounded_child::{end_child, exit_within, read_lines, run_to_end};
use crate::deadlines::accept_within;
use crate::http_client::connect_within;
use crate::http_client::{HttpClient, get, post};
use protocol::frame::encode;
use protocol::{Epoch, NodeHandshake, PROTOCOL_VERSION};
use serde_json::Value;
use std::fs::{self, Permissions};
use std::io::{Read, Write};
use std::net::{SocketAddr, TcpListener, TcpStream};
use std::os::unix::fs::PermissionsExt as _;
use std::os::unix::process::CommandExt as _;
use std::process::{Child, Command, ExitStatus, Stdio};
use std::sync::atomic::{AtomicU16, Ordering};
use std::sync::{Arc, Mutex};
use std::time::{Duration, Instant};

const EXACT: &[&str] = &["--threads", "1", "--dtype", "float32"];
const SECRET: &str = "a secret of the tests of nodes";
pub(super) const TIMEOUT: Duration = Duration::from_mins(3);

/// Rendezvous address of one test (`--master-addr`, `--master-port`): a loopback address unique to this
/// process, and a port unique to the test.
pub(crate) struct ClusterAddress {
    host: String,
    port: String,
}

impl ClusterAddress {
    pub(crate) fn new() -> Self {
        static TESTS: AtomicU16 = AtomicU16::new(0);
        let [_, a, b, c] = std::process::id().to_be_bytes();
        let host = format!("127.{}.{b}.{c}", 64 | (a & 63));
        let port = 20_000 + TESTS.fetch_add(1, Ordering::Relaxed);
        Self { host, port: port.to_string() }
    }

    /// The address of a proxy or listener that node 1 connects to instead of node 0.
    pub(crate) fn at(address: SocketAddr) -> Self {
        Self { host: address.ip().to_string(), port: address.port().to_string() }
    }

    pub(crate) fn address(&self) -> SocketAddr {
        format!("{}:{}", self.host, self.port).parse().unwrap()
    }

    fn connect(&self) -> TcpStream {
        connect_within(self.address(), TIMEOUT).unwrap()
    }
}

/// A `hadron serve` process of one node, whose log is collected.
pub(crate) struct NodeProcess {
    child: Child,
    log: Arc<Mutex<String>>,
}

impl NodeProcess {
    /// Starts node `rank` of two, with the cluster secret of these tests.
    pub(crate) fn start(place: &ClusterAddress, rank: u16, more: &[&str]) -> Self {
        Self::with_secret(place, rank, more, SECRET)
    }

    fn with_secret(place: &ClusterAddress, rank: u16, more: &[&str], secret: &str) -> Self {
        Self::with_flags(place, rank, &[EXACT, &["-dp", "2"], more].concat(), secret)
    }

    /// Starts node `rank` of two with ranks as in `flags`, which include the model.
    pub(super) fn with_ranks(place: &ClusterAddress, rank: u16, flags: &[&str]) -> Self {
        Self::with_flags(place, rank, flags, SECRET)
    }

    fn with_flags(place: &ClusterAddress, rank: u16, flags: &[&str], secret: &str) -> Self {
        let rank = rank.to_string();
        let own = ["--port", "0", "--nnodes", "2", "--node-rank", &rank];
        let meet = ["--master-addr", &place.host, "--master-port", &place.port];
        let mut command = command(&[&own[..], &meet, flags].concat());
        command.env("RUST_LOG", "info").env("HADRON_CLUSTER_SECRET", secret);
        Self::of(command)
    }

    /// Starts a command in its own process group, so that its child processes can be killed with it.
    fn of(mut command: Command) -> Self {
        command.process_group(0);
        let mut child = command.spawn().unwrap();
        let text = Arc::new(Mutex::new(String::new()));
        let log = Arc::clone(&text);
        read_lines(child.stderr.take().unwrap(), move |line| {
            log.lock().unwrap().push_str(&String::from_utf8_lossy(&line));
        });
        Self { child, log: text }
    }

    /// Starts both nodes; returns them and the HTTP address of node 0.
    fn two(place: &ClusterAddress, more: &[&str]) -> (Self, Self, SocketAddr) {
        let nodes = (Self::start(place, 0, more), Self::start(place, 1, more));
        let address = nodes.0.address();
        (nodes.0, nodes.1, address)
    }

    pub(crate) fn log(&self) -> String {
        self.log.lock().unwrap().clone()
    }

    pub(crate) fn wait_for_log(&self, words: &str) {
        let start = Instant::now();
        while !self.log().contains(words) {
            assert!(start.elapsed() < TIMEOUT, "no {words:?}: {}", self.log());
            std::thread::sleep(Duration::from_millis(5));
        }
    }

    /// The node's HTTP address, from its log once it is ready.
    pub(crate) fn address(&self) -> SocketAddr {
        self.wait_for_log(" on http://");
        let text = self.log();
        let rest = text.split_once(" on http://").unwrap().1;
        rest.split(' ').next().unwrap().parse().unwrap()
    }

    pub(super) fn signal(&self, name: &str) {
        send(self.child.id(), &format!("-{name}"));
    }

    pub(crate) fn kill(&self) {
        self.signal("KILL");
    }

    /// Process id of this node's only executor.
    pub(super) fn executor(&self) -> u32 {
        let found = children_as("executor", self.child.id());
        let [only] = found[..] else { panic!("children: {found:?}: {}", self.log()) };
        only
    }

    pub(crate) fn has_ended(&mut self) -> bool {
        self.child.try_wait().unwrap().is_some()
    }

    pub(crate) fn exits(&mut self) -> ExitStatus {
        let status = exit_within(&mut self.child, TIMEOUT);
        status.unwrap_or_else(|| panic!("still running: {}", self.log()))
    }
}

impl Drop for NodeProcess {
    fn drop(&mut self) {
        if std::thread::panicking() {
            println!("log of process {}:\n{}", self.child.id(), self.log());
        }
        let mut kill = Command::new("kill");
        // In most tests the processes of this node have exited already, so `kill` fails.
        run_to_end(kill.args(["-KILL", "--", &format!("-{}", self.child.id())]));
        end_child(&mut self.child);
    }
}

pub(super) fn is_running(pid: u32) -> bool {
    fs::exists(format!("/proc/{pid}")).unwrap() && !is_zombie(pid)
}

fn expected(tokens: u32) -> String {
    complete_text(ServerProcess::start(EXACT).address, tokens)
}

fn on_replica(rank: u16, tokens: u32, streamed: bool) -> Value {
    let mut body = body(tokens, streamed);
    body["data_parallel_rank"] = rank.into();
    body
}

pub(crate) fn complete_on_replica(at: SocketAddr, rank: u16, tokens: u32) -> String {
    let reply = post(at, "/v1/completions", &on_replica(rank, tokens, false)).json();
    reply["choices"][0]["text"].as_str().unwrap_or_else(|| panic!("{reply}")).to_owned()
}

fn metric(at: SocketAddr, name: &str, labels: &str) -> f64 {
    let page = String::from_utf8(get(at, "/metrics").body).unwrap();
    let series = format!("{name}{{{labels}}} ");
    let found = page.lines().find_map(|line| line.strip_prefix(&series));
    found.unwrap_or_else(|| panic!("no {series}: {page}")).parse().unwrap()
}

#[test]
fn two_nodes_match_one_and_survive_remote_executor_kill() {
    const TOKENS: u32 = 1_000;
    let expected = expected(TOKENS);
    let (mut zero, mut one, at) = NodeProcess::two(&ClusterAddress::new(), &[]);
    for rank in [0, 1] {
        assert!(
            complete_on_replica(at, rank, TOKENS) == expected,
            "replica {rank} differs from one alone"
        );
    }
    let up = r#"engine="1",model_name="hadron-demo",rank="1""#;
    assert_eq!(metric(at, "hadron:executor_up", up), 1.0);
    let former = (zero.executor(), one.executor());
    for pid in [former.0, former.1] {
        let environment = fs::read(format!("/proc/{pid}/environ")).unwrap();
        assert!(
            !String::from_utf8_lossy(&environment).contains(SECRET),
            "an executor inherits the secret"
        );
    }
    let streams = [0, 1, 1].map(|rank| stream_of(at, &on_replica(rank, TOKENS, true)));
    send(former.1, "-KILL");
    let labels = r#"cause="exited",engine="1",model_name="hadron-demo""#;
    wait_until(TIMEOUT, "the failure", || {
        metric(at, "hadron:executor_restarts_total", labels) == 1.0
    });
    assert!(is_ready(at), "the other replica serves");
    for stream in streams {
        let (text, end) = finish(stream);
        assert!(text == expected && end == "length", "differs from an undisturbed run: {text}");
    }
    zero.wait_for_log("node 1: executor rank 1 (process ");
    zero.wait_for_log("ended: signal: 9");
    let latter = (zero.executor(), one.executor());
    assert!(latter.0 == former.0 && latter.1 != former.1, "{former:?} {latter:?}");

    // SIGTERM to node 1 alone does not end it while node 0 runs.
    one.signal("TERM");
    one.wait_for_log("waiting until node 0 has drained");
    assert_eq!(complete_on_replica(at, 1, 20), complete_on_replica(at, 0, 20));
    zero.signal("TERM");
    assert_eq!(zero.exits().code(), Some(0), "{}", zero.log());
    assert_eq!(one.exits().code(), Some(0), "{}", one.log());
    assert!(!is_running(latter.0) && !is_running(latter.1), "an executor outlived its server");
    for node in [&zero, &one] {
        assert!(!node.log().contains(SECRET), "the log contains the secret");
    }
}

#[test]
fn requests_of_a_dead_node_move_or_wait() {
    const TOKENS: u32 = 1_000;
    let expected = expected(TOKENS);
    let place = ClusterAddress::new();
    let (mut zero, one, at) = NodeProcess::two(&place, &["--dp-load-balance", "round_robin"]);
    let free = [(); 2].map(|()| stream_of(at, &body(TOKENS, true)));
    let pinned = stream_of(at, &on_replica(1, TOKENS, true));
    let executor = one.executor();
    one.signal("KILL");
    zero.wait_for_log("node failed");
    assert!(is_ready(at), "node 0 still serves");
    wait_until(TIMEOUT, "the end of its executor", || !is_running(executor));
    for stream in free {
        let (text, end) = finish(stream);
        assert!(text == expected && end == "length", "differs from an undisturbed run: {text}");
    }
    let loads = get(at, "/v1/loads").json();
    let ready = [0, 1].map(|replica| loads["loads"][replica]["ready"].as_bool());
    assert_eq!(ready, [Some(true), Some(false)], "{loads}");
    drop(one);
    let mut again = NodeProcess::start(&place, 1, &[]);
    let (text, end) = finish(pinned);
    assert!(text == expected && end == "length", "differs from an undisturbed run: {text}");
    assert!(complete_on_replica(at, 1, 20) == expected[..complete_on_replica(at, 0, 20).len()]);

    // Without node 0, node 1 has no work and exits.
    let left = again.executor();
    zero.signal("KILL");
    assert_eq!(again.exits().code(), Some(3), "{}", again.log());
    again.wait_for_log("connection to node 0 failed");
    wait_until(TIMEOUT, "the end of its executor", || !is_running(left));
    assert!(zero.exits().code().is_none());
}

#[test]
fn heartbeat_timeout_disconnects_both_nodes() {
    let place = ClusterAddress::new();
    let (zero, mut one, at) = NodeProcess::two(&place, &[]);
    let short = complete_on_replica(at, 1, 20);
    // Stopping node 1's process is equivalent to a network partition: its executor still runs and must not
    // continue alone.
    let executor = one.executor();
    one.signal("STOP");
    zero.wait_for_log("no heartbeat for 5 s");
    wait_until(TIMEOUT, "the end of its executor", || !is_running(executor));
    assert!(is_ready(at));
    assert_eq!(complete_text(at, 20), short, "on node 0");
    one.signal("CONT");
    assert_eq!(one.exits().code(), Some(3), "{}", one.log());

    let mut again = NodeProcess::start(&place, 1, &[]);
    assert_eq!(complete_on_replica(at, 1, 20), short, "once it is back");
    zero.signal("STOP");
    assert_eq!(again.exits().code(), Some(3), "{}", again.log());
    again.wait_for_log("no heartbeat for 5 s");
    zero.signal("CONT");
    // After its scheduler was paused, node 0 reports unready until it has checked its executors.
    wait_until(TIMEOUT, "node 0", || is_ready(at));
    assert_eq!(complete_text(at, 20), short, "node 0 serves alone");
}

/// Emulates `srun` with one task on each of two nodes, both on this machine.
const SRUN: &str = r#"#!/bin/bash
while [[ $1 == -* ]]; do shift; done
trap 'kill -TERM $(jobs -p)' TERM
SLURM_NODEID=1 "$@" &
SLURM_NODEID=0 "$@" &
wait; wait
"#;

#[test]
fn slurm_job_serves_on_all_nodes() {
    let folder = tempfile::tempdir().unwrap();
    let path = |name: &str| folder.path().join(name);
    fs::write(path("srun"), SRUN).unwrap();
    fs::set_permissions(path("srun"), Permissions::from_mode(0o755)).unwrap();
    std::os::unix::fs::symlink(env!("CARGO_BIN_EXE_hadron"), path("hadron")).unwrap();
    fs::write(path("keys"), "the key\n").unwrap();
    let place = ClusterAddress::new();
    let mut job = Command::new("bash");
    job.arg(concat!(env!("CARGO_MANIFEST_DIR"), "/deploy/slurm/hadron.sbatch"));
    job.args(["--log-format", "human", "--master-port", &place.port]);
    job.args(["--host", "127.0.0.1", "--port", "0"]).args(EXACT);
    let paths = format!("{}:/usr/bin:/bin", folder.path().display());
    job.env("PATH", paths).env("HADRON_KEYS", path("keys")).env("RUST_LOG", "info");
    job.env("SLURM_NNODES", "2").env("SLURM_NTASKS", "2");
    job.env("SLURM_JOB_NODELIST", format!("{},nowhere", place.host));
    job.stdin(Stdio::null()).stdout(Stdio::null()).stderr(Stdio::piped());
    let mut job = NodeProcess::of(job);
    let at = job.address();
    let body = on_replica(1, 20, false).to_string();
    let ask = |header: &str| {
        let mut client = HttpClient::connect(at);
        client.send("POST", "/v1/completions", header, body.as_bytes());
        client.read().unwrap()
    };
    assert_eq!(ask("").status, 401);
    let reply = ask("Authorization: Bearer the key\r\n").json();
    assert_eq!(reply["usage"]["completion_tokens"], 20, "{reply}");
    job.signal("TERM");
    job.exits();
    for words in ["drained", "node 0 has shut down"] {
        job.wait_for_log(words);
    }
}

/// Reads everything until the other end closes the connection.
fn rest(mut stream: TcpStream) -> Vec<u8> {
    let mut bytes = Vec::new();
    // The connection may be reset, but the read must not time out.
    let end = stream.read_to_end(&mut bytes);
    assert!(!matches!(&end, Err(e) if e.kind() == std::io::ErrorKind::WouldBlock), "still open");
    bytes
}

#[test]
fn strangers_are_dropped_and_wrong_secrets_logged() {
    let place = ClusterAddress::new();
    let zero = NodeProcess::start(&place, 0, &[]);
    zero.wait_for_log("waiting for the other nodes");
    // A handshake response that is valid except for its length.
    let mut long =
        b"HDRN\x00\x00\x22\x00\x00\x00\x00\x00\x00\x00\x00\x00\xff\xff\xff\x3f\x00\x00\x00\x00"
            .to_vec();
    long[4..6].copy_from_slice(&PROTOCOL_VERSION.to_le_bytes());
    for bytes in [
        &b"GET / HTTP/1.1\r\nHost: x\r\n\r\n"[..],
        b"\x16\x03\x01\x02\x00\x01\x00\x01\xfc\x03\x03",
        &[255; 5_000],
        &long,
        b"",
    ] {
        let mut stream = place.connect();
        let _ = stream.write_all(bytes); // The connection may be closed already.
        rest(stream);
    }
    // Opens more connections that send nothing than node 0 permits to be in the handshake at the same time.
    let silent: Vec<_> = (0..40).map(|_| place.connect()).collect();
    for stream in silent {
        assert!(rest(stream).len() < 200, "a challenge at most");
    }
    // A version mismatch is logged, because an operator has to correct it.
    let mut former = place.connect();
    let frame =
        b"HDRN\x01\x00\x22\x00\x00\x00\x00\x00\x00\x00\x00\x00\x00\x00\x00\x00\x00\x00\x00\x00";
    former.write_all(frame).unwrap();
    rest(former);
    zero.wait_for_log("the peer has protocol version 1, this process has ");

    // Repeated failed authentication is not logged each time.
    for _ in 0..30 {
        let mut unauthenticated = place.connect();
        unauthenticated.read_exact(&mut [0; 60]).unwrap(); // Reads the minimum size of the server's challenge.
        let answer = NodeHandshake::Response { nonce: [1; 32], proof: [2; 32] };
        let mut frame = Vec::new();
        encode(&answer, Epoch(0), &mut frame).unwrap();
        unauthenticated.write_all(&frame).unwrap();
        let mut denied = Vec::new();
        encode(&NodeHandshake::Denied, Epoch(0), &mut denied).unwrap();
        assert!(rest(unauthenticated).ends_with(&denied));
    }
    let told = zero.log().matches("node connection rejected").count();
    assert!((1..30).contains(&told), "{told} lines: {}", zero.log());

    let mut wrong = NodeProcess::with_secret(&place, 1, &[], "another secret of the tests");
    assert_eq!(wrong.exits().code(), Some(1), "{}", wrong.log());
    wrong.wait_for_log("the peer does not have the cluster secret");
    for (flags, reason) in [
        (
            &["-dp", "4"][..],
            "node 1 has parallel sizes tensor-parallel 1, data-parallel 4, node 0 tensor-parallel 1, data-parallel 2",
        ),
        (&["--nnodes", "3", "-dp", "3"], "node 1 has --nnodes 3, node 0 2"),
        (&["--load-format", "synth"], "node 1 has model digest"),
    ] {
        let mut other = NodeProcess::start(&place, 1, flags);
        assert_eq!(other.exits().code(), Some(1), "{}", other.log());
        other.wait_for_log("node 0 rejected this node: ");
        other.wait_for_log(reason);
    }
    let one = NodeProcess::start(&place, 1, &[]);
    let at = zero.address();
    assert_eq!(complete_on_replica(at, 1, 20), complete_on_replica(at, 0, 20));
    // A second node with a rank that is already connected is rejected and does not affect the first.
    let mut second = NodeProcess::start(&place, 1, &[]);
    assert_eq!(second.exits().code(), Some(1), "{}", second.log());
    second.wait_for_log("node 1 is already connected");
    assert_eq!(complete_on_replica(at, 1, 20), complete_on_replica(at, 0, 20));
    drop(one);
}

#[test]
fn missing_or_mismatched_node_zero_fails_startup() {
    let place = ClusterAddress::new();
    let mut absent = NodeProcess::start(&place, 1, &["--startup-timeout", "300ms"]);
    assert_eq!(absent.exits().code(), Some(1));
    absent.wait_for_log("is unreachable: ");
    absent.wait_for_log("--startup-timeout sets this bound");

    let listener = TcpListener::bind(format!("{}:{}", place.host, place.port)).unwrap();
    let mut one = NodeProcess::start(&place, 1, &[]);
    let mut stream = accept_within(&listener, TIMEOUT);
    let header = [&b"HDRN\x04\x00\x21\x00"[..], &[0; 16]].concat();
    stream.write_all(&header).unwrap();
    assert_eq!(one.exits().code(), Some(1));
    one.wait_for_log("the peer has protocol version 4, this process has ");

    drop((stream, listener));
    let mut waits = NodeProcess::start(&place, 0, &["--startup-timeout", "1s"]);
    assert_eq!(waits.exits().code(), Some(1));
    waits.wait_for_log("node 1 has not joined after 1 s");
}
