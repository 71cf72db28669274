//! One server on two nodes: both are processes of this machine that meet over loopback.

use super::executor_process::{
    answer, body, children_as, finish, is_ready, is_zombie, send, stream_of, within,
};
use super::process::{Process, command};
use crate::http_client::{Client, get, post};
use protocol::frame::encode;
use protocol::{Epoch, Handshake, PROTOCOL_VERSION};
use serde_json::Value;
use std::fs::{self, Permissions};
use std::io::{BufRead, BufReader, Read, Write};
use std::net::{SocketAddr, TcpListener, TcpStream};
use std::os::unix::fs::PermissionsExt as _;
use std::os::unix::process::CommandExt as _;
use std::process::{Child, Command, ExitStatus, Stdio};
use std::sync::atomic::{AtomicU16, Ordering};
use std::sync::{Arc, Mutex};
use std::time::{Duration, Instant};

const EXACT: &[&str] = &["--threads", "1", "--dtype", "float32"];
const SECRET: &str = "a secret of the tests of nodes";
const SOON: Duration = Duration::from_mins(3);

/// Where the nodes of one test meet: an address of loopback that is this process's, a port that is this test's.
pub(crate) struct Place {
    host: String,
    port: String,
}

impl Place {
    pub(crate) fn new() -> Self {
        static TESTS: AtomicU16 = AtomicU16::new(0);
        let [_, a, b, c] = std::process::id().to_be_bytes();
        let host = format!("127.{}.{b}.{c}", 64 | (a & 63));
        let port = 20_000 + TESTS.fetch_add(1, Ordering::Relaxed);
        Self { host, port: port.to_string() }
    }

    /// Where something else listens for node 0.
    pub(crate) fn at(address: SocketAddr) -> Self {
        Self { host: address.ip().to_string(), port: address.port().to_string() }
    }

    pub(crate) fn address(&self) -> SocketAddr {
        format!("{}:{}", self.host, self.port).parse().unwrap()
    }

    fn connect(&self) -> TcpStream {
        let stream = TcpStream::connect(format!("{}:{}", self.host, self.port)).unwrap();
        stream.set_read_timeout(Some(SOON)).unwrap();
        stream
    }
}

/// One of the processes.
pub(crate) struct Node {
    child: Child,
    said: Arc<Mutex<String>>,
}

impl Node {
    /// Node `rank` of two, with the secret of these tests.
    pub(crate) fn start(place: &Place, rank: u16, more: &[&str]) -> Self {
        Self::with_secret(place, rank, more, SECRET)
    }

    fn with_secret(place: &Place, rank: u16, more: &[&str], secret: &str) -> Self {
        let rank = rank.to_string();
        let own = ["--port", "0", "--nnodes", "2", "--node-rank", &rank, "-dp", "2"];
        let meet = ["--master-addr", &place.host, "--master-port", &place.port];
        let mut command = command(&[EXACT, &own, &meet, more].concat());
        command.env("RUST_LOG", "info").env("HADRON_CLUSTER_SECRET", secret);
        Self::of(command)
    }

    /// With all that it starts, in a process group of its own.
    fn of(mut command: Command) -> Self {
        command.process_group(0);
        let mut child = command.spawn().unwrap();
        let stderr = BufReader::new(child.stderr.take().unwrap());
        let said = Arc::new(Mutex::new(String::new()));
        let log = Arc::clone(&said);
        std::thread::spawn(move || {
            for line in stderr.lines().map_while(Result::ok) {
                log.lock().unwrap().push_str(&(line + "\n"));
            }
        });
        Self { child, said }
    }

    /// Both nodes, and where node 0 answers.
    fn two(place: &Place, more: &[&str]) -> (Self, Self, SocketAddr) {
        let nodes = (Self::start(place, 0, more), Self::start(place, 1, more));
        let address = nodes.0.address();
        (nodes.0, nodes.1, address)
    }

    pub(crate) fn said(&self) -> String {
        self.said.lock().unwrap().clone()
    }

    pub(crate) fn says(&self, words: &str) {
        let start = Instant::now();
        while !self.said().contains(words) {
            assert!(start.elapsed() < SOON, "no {words:?}: {}", self.said());
            std::thread::sleep(Duration::from_millis(5));
        }
    }

    /// Once it is ready.
    pub(crate) fn address(&self) -> SocketAddr {
        self.says(" on http://");
        let said = self.said();
        let rest = said.split_once(" on http://").unwrap().1;
        rest.split(' ').next().unwrap().parse().unwrap()
    }

    fn signal(&self, name: &str) {
        send(self.child.id(), &format!("-{name}"));
    }

    pub(crate) fn kill(&self) {
        self.signal("KILL");
    }

    /// The one executor of this node.
    fn executor(&self) -> u32 {
        let found = children_as("executor", self.child.id());
        let [only] = found[..] else { panic!("children: {found:?}: {}", self.said()) };
        only
    }

    pub(crate) fn has_ended(&mut self) -> bool {
        self.child.try_wait().unwrap().is_some()
    }

    pub(crate) fn exits(&mut self) -> ExitStatus {
        let start = Instant::now();
        loop {
            if let Some(status) = self.child.try_wait().unwrap() {
                return status;
            }
            assert!(start.elapsed() < SOON, "still running: {}", self.said());
            std::thread::sleep(Duration::from_millis(5));
        }
    }
}

impl Drop for Node {
    fn drop(&mut self) {
        if std::thread::panicking() {
            println!("process {} said:\n{}", self.child.id(), self.said());
        }
        // Gone already in most tests.
        let group = format!("-{}", self.child.id());
        let _ = Command::new("kill").args(["-KILL", "--", &group]).stderr(Stdio::null()).status();
        let _ = self.child.kill();
        let _ = self.child.wait();
    }
}

fn lives(pid: u32) -> bool {
    fs::exists(format!("/proc/{pid}")).unwrap() && !is_zombie(pid)
}

fn expected(tokens: u32) -> String {
    answer(Process::start(EXACT).address, tokens)
}

fn on_replica(rank: u16, tokens: u32, streamed: bool) -> Value {
    let mut body = body(tokens, streamed);
    body["data_parallel_rank"] = rank.into();
    body
}

pub(crate) fn answer_of(at: SocketAddr, rank: u16, tokens: u32) -> String {
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
fn two_nodes_answer_like_one_and_the_death_of_a_remote_executor_is_a_stall() {
    const TOKENS: u32 = 1_000;
    let expected = expected(TOKENS);
    let (mut zero, mut one, at) = Node::two(&Place::new(), &[]);
    for rank in [0, 1] {
        assert!(answer_of(at, rank, TOKENS) == expected, "replica {rank} differs from one alone");
    }
    let up = r#"engine="1",model_name="hadron-demo",rank="1""#;
    assert_eq!(metric(at, "hadron:executor_up", up), 1.0);
    let former = (zero.executor(), one.executor());
    for pid in [former.0, former.1] {
        let environment = fs::read(format!("/proc/{pid}/environ")).unwrap();
        assert!(!String::from_utf8_lossy(&environment).contains(SECRET), "told to an executor");
    }
    let streams = [0, 1, 1].map(|rank| stream_of(at, &on_replica(rank, TOKENS, true)));
    send(former.1, "-KILL");
    let labels = r#"cause="exited",engine="1",model_name="hadron-demo""#;
    within(SOON, "the loss", || metric(at, "hadron:executor_restarts_total", labels) == 1.0);
    assert!(is_ready(at), "the other replica serves");
    for stream in streams {
        let (text, end) = finish(stream);
        assert!(text == expected && end == "length", "differs from an undisturbed run: {text}");
    }
    zero.says("node 1: executor rank 1 (process ");
    zero.says("ended: signal: 9");
    let latter = (zero.executor(), one.executor());
    assert!(latter.0 == former.0 && latter.1 != former.1, "{former:?} {latter:?}");

    // A signal to the other node alone ends nothing as long as node 0 goes on.
    one.signal("TERM");
    one.says("going on until node 0 has drained");
    assert_eq!(answer_of(at, 1, 20), answer_of(at, 0, 20));
    zero.signal("TERM");
    assert_eq!(zero.exits().code(), Some(0), "{}", zero.said());
    assert_eq!(one.exits().code(), Some(0), "{}", one.said());
    assert!(!lives(latter.0) && !lives(latter.1), "an orphan");
    for node in [&zero, &one] {
        assert!(!node.said().contains(SECRET), "the secret was told");
    }
}

#[test]
fn the_requests_of_a_node_that_dies_move_or_wait_for_its_return() {
    const TOKENS: u32 = 1_000;
    let expected = expected(TOKENS);
    let place = Place::new();
    let (mut zero, one, at) = Node::two(&place, &["--dp-load-balance", "round_robin"]);
    let free = [(); 2].map(|()| stream_of(at, &body(TOKENS, true)));
    let pinned = stream_of(at, &on_replica(1, TOKENS, true));
    let executor = one.executor();
    one.signal("KILL");
    zero.says("node is lost");
    assert!(is_ready(at), "node 0 serves on");
    within(SOON, "the end of its executor", || !lives(executor));
    for stream in free {
        let (text, end) = finish(stream);
        assert!(text == expected && end == "length", "differs from an undisturbed run: {text}");
    }
    let loads = get(at, "/v1/loads").json();
    let ready = [0, 1].map(|replica| loads["loads"][replica]["ready"].as_bool());
    assert_eq!(ready, [Some(true), Some(false)], "{loads}");
    drop(one);
    let mut again = Node::start(&place, 1, &[]);
    let (text, end) = finish(pinned);
    assert!(text == expected && end == "length", "differs from an undisturbed run: {text}");
    assert!(answer_of(at, 1, 20) == expected[..answer_of(at, 0, 20).len()]);

    // Without node 0 there is nothing to do, and nobody to ask.
    let left = again.executor();
    zero.signal("KILL");
    assert_eq!(again.exits().code(), Some(3), "{}", again.said());
    again.says("node 0 is gone");
    within(SOON, "the end of its executor", || !lives(left));
    assert!(zero.exits().code().is_none());
}

#[test]
fn silence_is_given_up_on_both_sides() {
    let place = Place::new();
    let (zero, mut one, at) = Node::two(&place, &[]);
    let short = answer_of(at, 1, 20);
    // Stopped, the node is as good as cut off; its executor is not, and must not go on by itself.
    let executor = one.executor();
    one.signal("STOP");
    zero.says("no sign of life for 5 s");
    within(SOON, "the end of its executor", || !lives(executor));
    assert!(is_ready(at));
    assert_eq!(answer(at, 20), short, "on node 0");
    one.signal("CONT");
    assert_eq!(one.exits().code(), Some(3), "{}", one.said());

    let mut again = Node::start(&place, 1, &[]);
    assert_eq!(answer_of(at, 1, 20), short, "once it is back");
    zero.signal("STOP");
    assert_eq!(again.exits().code(), Some(3), "{}", again.said());
    again.says("no sign of life for 5 s");
    zero.signal("CONT");
    // Its scheduler has stood still for a while, and says so until it has looked around.
    within(SOON, "node 0", || is_ready(at));
    assert_eq!(answer(at, 20), short, "node 0 serves on alone");
}

/// As `srun` runs a task on each of two nodes, both of them here.
const SRUN: &str = r#"#!/bin/bash
while [[ $1 == -* ]]; do shift; done
trap 'kill -TERM $(jobs -p)' TERM
SLURM_NODEID=1 "$@" &
SLURM_NODEID=0 "$@" &
wait; wait
"#;

#[test]
fn a_job_of_slurm_serves_on_its_nodes() {
    let folder = tempfile::tempdir().unwrap();
    let path = |name: &str| folder.path().join(name);
    fs::write(path("srun"), SRUN).unwrap();
    fs::set_permissions(path("srun"), Permissions::from_mode(0o755)).unwrap();
    std::os::unix::fs::symlink(env!("CARGO_BIN_EXE_hadron"), path("hadron")).unwrap();
    fs::write(path("keys"), "the key\n").unwrap();
    let place = Place::new();
    let mut job = Command::new("bash");
    job.arg(concat!(env!("CARGO_MANIFEST_DIR"), "/deploy/slurm/hadron.sbatch"));
    job.args(["--log-format", "human", "--master-port", &place.port]);
    job.args(["--host", "127.0.0.1", "--port", "0"]).args(EXACT);
    let paths = format!("{}:/usr/bin:/bin", folder.path().display());
    job.env("PATH", paths).env("HADRON_KEYS", path("keys")).env("RUST_LOG", "info");
    job.env("SLURM_NNODES", "2").env("SLURM_NTASKS", "2");
    job.env("SLURM_JOB_NODELIST", format!("{},nowhere", place.host));
    job.stdin(Stdio::null()).stdout(Stdio::null()).stderr(Stdio::piped());
    let mut job = Node::of(job);
    let at = job.address();
    let body = on_replica(1, 20, false).to_string();
    let ask = |header: &str| {
        let mut client = Client::connect(at);
        client.send("POST", "/v1/completions", header, body.as_bytes());
        client.read().unwrap()
    };
    assert_eq!(ask("").status, 401);
    let reply = ask("Authorization: Bearer the key\r\n").json();
    assert_eq!(reply["usage"]["completion_tokens"], 20, "{reply}");
    job.signal("TERM");
    job.exits();
    for words in ["drained", "node 0 has ended the service"] {
        job.says(words);
    }
}

/// What comes back until the connection closes.
fn rest(mut stream: TcpStream) -> Vec<u8> {
    let mut bytes = Vec::new();
    // A reset is an end, too; time that runs out is none.
    let end = stream.read_to_end(&mut bytes);
    assert!(!matches!(&end, Err(e) if e.kind() == std::io::ErrorKind::WouldBlock), "still open");
    bytes
}

#[test]
fn strangers_are_forgotten_and_a_wrong_secret_is_told() {
    let place = Place::new();
    let zero = Node::start(&place, 0, &[]);
    zero.says("waiting for the other nodes");
    // An answer, if it were not for its length.
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
        let _ = stream.write_all(bytes); // It may be closed already.
        rest(stream);
    }
    // More than find room.
    let silent: Vec<_> = (0..40).map(|_| place.connect()).collect();
    for stream in silent {
        assert!(rest(stream).len() < 200, "a challenge at most");
    }
    // Another version is told, because it is somebody's mistake.
    let mut former = place.connect();
    let frame =
        b"HDRN\x01\x00\x22\x00\x00\x00\x00\x00\x00\x00\x00\x00\x00\x00\x00\x00\x00\x00\x00\x00";
    former.write_all(frame).unwrap();
    rest(former);
    zero.says("the peer speaks protocol 1, this process ");

    // Those who guess fill no log.
    for _ in 0..30 {
        let mut guess = place.connect();
        guess.read_exact(&mut [0; 60]).unwrap(); // The least that a challenge has.
        let answer = Handshake::Answer { nonce: [1; 32], proof: [2; 32] };
        let mut frame = Vec::new();
        encode(&answer, Epoch(0), &mut frame).unwrap();
        guess.write_all(&frame).unwrap();
        let mut denied = Vec::new();
        encode(&Handshake::Denied, Epoch(0), &mut denied).unwrap();
        assert!(rest(guess).ends_with(&denied));
    }
    let told = zero.said().matches("a node was not let in").count();
    assert!((1..30).contains(&told), "{told} lines: {}", zero.said());

    let mut wrong = Node::with_secret(&place, 1, &[], "another secret of the tests");
    assert_eq!(wrong.exits().code(), Some(1), "{}", wrong.said());
    wrong.says("the other end does not know the secret");
    for (flags, reason) in [
        (
            &["-dp", "4"][..],
            "node 1 has the sizes tensor-parallel 1, data-parallel 4, node 0 tensor-parallel 1, data-parallel 2",
        ),
        (&["--nnodes", "3", "-dp", "3"], "node 1 has --nnodes 3, node 0 2"),
        (&["--load-format", "synth"], "node 1 has model digest"),
    ] {
        let mut other = Node::start(&place, 1, flags);
        assert_eq!(other.exits().code(), Some(1), "{}", other.said());
        other.says("node 0 refuses this node: ");
        other.says(reason);
    }
    let one = Node::start(&place, 1, &[]);
    let at = zero.address();
    assert_eq!(answer_of(at, 1, 20), answer_of(at, 0, 20));
    // One that claims a place that is taken harms nobody.
    let mut second = Node::start(&place, 1, &[]);
    assert_eq!(second.exits().code(), Some(1), "{}", second.said());
    second.says("node 1 is here already");
    assert_eq!(answer_of(at, 1, 20), answer_of(at, 0, 20));
    drop(one);
}

#[test]
fn a_node_zero_that_is_another_build_or_absent_ends_the_start() {
    let place = Place::new();
    let mut absent = Node::start(&place, 1, &["--startup-timeout", "300ms"]);
    assert_eq!(absent.exits().code(), Some(1));
    absent.says("does not answer: ");
    absent.says("--startup-timeout sets this bound");

    let listener = TcpListener::bind(format!("{}:{}", place.host, place.port)).unwrap();
    let mut one = Node::start(&place, 1, &[]);
    let (mut stream, _) = listener.accept().unwrap();
    let header = [&b"HDRN\x04\x00\x21\x00"[..], &[0; 16]].concat();
    stream.write_all(&header).unwrap();
    assert_eq!(one.exits().code(), Some(1));
    one.says("the peer speaks protocol 4, this process ");

    drop((stream, listener));
    let mut waits = Node::start(&place, 0, &["--startup-timeout", "1s"]);
    assert_eq!(waits.exits().code(), Some(1));
    waits.says("node 1 has not joined after 1 s");
}
