//! The `hadron` executable with the demo model: start, signals, exit codes.

use crate::bounded_child::{
    CHILD_TIMEOUT, ChildPipe, end_child, run_to_end, send_signal, wait_within,
};
use crate::http_client::{HttpClient, get, post};
use serde_json::json;
use std::io::Read;
use std::net::{SocketAddr, TcpListener};
use std::process::{Child, Command, ExitStatus, Stdio};
use std::time::{Duration, Instant};

/// A `hadron serve` process of the demo model on a free port.
pub(crate) struct ServerProcess {
    child: Child,
    stderr: ChildPipe,
    /// What the server wrote to stderr before the ready line.
    stderr_text: String,
    pub(crate) address: SocketAddr,
}

/// Flags that set the KV cache size, or that select a GPU, whose memory determines the size.
const SIZES: [&str; 4] = [
    "--kv-cache-memory-bytes",
    "--num-gpu-blocks-override",
    "--device",
    "--gpu-memory-utilization",
];
/// KV cache size for tests that set none, because the default depends on the machine's memory.
const SIZE: &str = "256MiB";

pub(crate) fn command(args: &[&str]) -> Command {
    let mut command = Command::new(env!("CARGO_BIN_EXE_hadron"));
    command.arg("serve").args(args).current_dir("/");
    if !args.iter().any(|arg| SIZES.contains(arg)) {
        command.args([SIZES[0], SIZE]);
    }
    command.env("RUST_LOG", "warn").stdin(Stdio::null()).stdout(Stdio::null());
    command.stderr(Stdio::piped());
    command
}

impl ServerProcess {
    /// Starts the server and reads the ready line.
    pub(crate) fn start(args: &[&str]) -> Self {
        Self::of(&mut command(&[&["--port", "0"], args].concat()))
    }

    /// Starts a command with its log on stderr, and reads the ready line.
    pub(crate) fn of(command: &mut Command) -> Self {
        let mut child = command.spawn().unwrap();
        let stderr = ChildPipe::start(child.stderr.take().unwrap());
        let ReadyLine { address, earlier_text } = ready_line(&stderr);
        Self { child, stderr, stderr_text: earlier_text, address }
    }

    /// Returns everything on stderr; the process must have exited.
    pub(crate) fn stderr_text(&mut self) -> String {
        self.stderr_text += &self.stderr.rest();
        self.stderr_text.clone()
    }

    pub(crate) fn id(&self) -> u32 {
        self.child.id()
    }

    pub(crate) fn signal(&self, name: &str) {
        assert!(send_signal(self.child.id(), &format!("-{name}")), "the server has exited");
    }

    pub(crate) fn exits_within(&mut self, limit: Duration) -> ExitStatus {
        wait_within(&mut self.child, limit)
    }
}

impl Drop for ServerProcess {
    fn drop(&mut self) {
        end_child(&mut self.child);
    }
}

/// Address in the ready line of a server, and the text of its log before this line.
pub(crate) struct ReadyLine {
    pub(crate) address: SocketAddr,
    pub(crate) earlier_text: String,
}

/// Reads the log of a server up to the ready line.
pub(crate) fn ready_line(stderr: &ChildPipe) -> ReadyLine {
    let mut earlier_text = String::new();
    while let Some(line) = stderr.next_line(CHILD_TIMEOUT) {
        if let Some((_, rest)) = line.split_once(" on http://") {
            let address = rest.split(' ').next().unwrap().parse().unwrap();
            return ReadyLine { address, earlier_text };
        }
        earlier_text += &line;
    }
    panic!("no ready line: {earlier_text}")
}

fn endless(address: SocketAddr) -> HttpClient {
    let mut client = HttpClient::connect(address);
    let body = json!({"prompt": "What is", "max_tokens": 2000, "ignore_eos": true, "stream": true});
    client.send("POST", "/v1/completions", "", body.to_string().as_bytes());
    assert_eq!(client.read_head().unwrap().status, 200);
    client
}

fn read_to_end(client: &mut HttpClient) -> String {
    let mut text = Vec::new();
    let _ = client.reader.read_to_end(&mut text); // The connection may be reset.
    String::from_utf8_lossy(&text).into_owned()
}

#[test]
fn demo_serves_and_drain_ends_streams_properly() {
    let mut process = ServerProcess::start(&["--shutdown-timeout", "2s"]);
    let question = json!({"messages": [{"role": "user", "content": "What is 12 plus 30?"}]});
    let reply = post(process.address, "/v1/chat/completions", &question).json();
    assert!(reply["choices"][0]["message"]["content"].as_str().unwrap().contains("42"), "{reply}");
    let mut stream = endless(process.address);
    let start = Instant::now();
    process.signal("TERM");
    while get(process.address, "/readyz").status != 503 {
        assert!(start.elapsed() < Duration::from_secs(2), "ready in its drain");
    }
    assert_eq!(get(process.address, "/livez").status, 200);
    let text = read_to_end(&mut stream);
    assert!(text.contains("data: [DONE]"), "{text}");
    assert_eq!(process.exits_within(Duration::from_secs(20)).code(), Some(0));
    let rest = process.stderr.rest();
    assert!(rest.contains("curl http://"), "a line to try: {rest}");
    // The stream may have finished before the drain timeout.
    let was_cut = text.contains("\"reason\":\"draining\"");
    let says = rest.contains("drain timeout: incomplete outputs are aborted outputs=1");
    assert_eq!(says, was_cut, "{rest}");
}

#[test]
fn second_signal_exits_immediately() {
    let mut process = ServerProcess::start(&[]);
    let _stream = endless(process.address);
    process.signal("TERM");
    std::thread::sleep(Duration::from_millis(50));
    process.signal("INT");
    let code = process.exits_within(Duration::from_secs(2)).code();
    // The drain ends with exit code 0 if the stream has finished before the second signal.
    assert!(code == Some(130) || code == Some(0), "{code:?}");
}

#[test]
fn startup_errors_are_named_and_exit_1() {
    let taken = TcpListener::bind("127.0.0.1:0").unwrap();
    let port = taken.local_addr().unwrap().port().to_string();
    let cases: &[(&[&str], &str)] = &[
        (&["--port", &port], "ddress already in use"),
        (&["/no/such/model", "--port", "0"], "/no/such/model"),
        (&["--port", "0", "--trace-requests", "/no/such/folder/x"], "--trace-requests"),
        (&["--port", "0", "--admin-listen", "nowhere"], "--admin-listen"),
        (
            &["--port", "0", "--max-model-len", "2048", "--num-gpu-blocks-override", "10"],
            "10 KV blocks",
        ),
    ];
    for (args, cause) in cases {
        let start = Instant::now();
        let output = run_to_end(&mut command(args));
        let text = String::from_utf8_lossy(&output.stderr);
        assert_eq!(output.status.code(), Some(1), "{args:?}: {text}");
        assert!(text.contains(cause), "{args:?}: {text}");
        assert!(start.elapsed() < Duration::from_mins(1), "{args:?}: {:?}", start.elapsed());
    }
}

#[test]
fn demo_unpack_failure_names_folder_and_tmpdir() {
    let folder = "/no/such/temporary/folder";
    let output = run_to_end(command(&["--port", "0"]).env("TMPDIR", folder));
    let text = String::from_utf8_lossy(&output.stderr);
    assert_eq!(output.status.code(), Some(1), "{text}");
    for part in ["cannot unpack the demo model", folder, "No such file", "set TMPDIR"] {
        assert!(text.contains(part), "no {part:?}: {text}");
    }
}
