//! Sends prompts of 1 MiB for an hour or for the requested number of minutes. The step times of such a prompt
//! grow with its context, from milliseconds to several times the minimum step deadline, and the server must
//! not treat any step as a hang.
//!
//! The server is a real `hadron serve` process, whose executor is a separate process that the server kills if
//! a step exceeds its deadline. Shorter prompts and a stream run at the same time as the long prompts. Each 1
//! MiB prompt is followed by hundreds of short prompts, which lower the server's estimate of step times, and
//! then by the same 1 MiB prompt with a suffix. The last prompt is a prefix hit, so its first step already
//! has the whole context.

use crate::bounded_child::{CHILD_TIMEOUT, ChildPipe, end_child, run_to_end};
use crate::http_client::{HttpClient, HttpReply, get};
use crate::rng::SimRng;
use serde_json::{Value, json};
use std::fmt::Write as _;
use std::fs;
use std::net::SocketAddr;
use std::process::{Child, Command, Stdio};
use std::sync::Mutex;
use std::sync::atomic::{AtomicBool, AtomicU64, Ordering};
use std::thread::ScopedJoinHandle;
use std::time::{Duration, Instant};

/// Kinds of prompts with their sizes in bytes. The last kind is a 1 MiB prompt with a suffix; its size is
/// that of the suffix.
const KINDS: [(&str, usize); 5] = [
    ("10 KB", 10 << 10),
    ("100 KB", 100 << 10),
    ("1 MB", 1 << 20),
    ("2 KB", 2 << 10),
    ("1 MB and 24 KB more", 24 << 10),
];
/// Indices in `KINDS` from which a client draws its next prompt. Prompts of the other two kinds are sent
/// after each 1 MiB prompt.
const RANDOM_KINDS: [usize; 4] = [0, 1, MEGABYTE, MEGABYTE];
const MEGABYTE: usize = 2;
const SHORT: usize = 3;
const LONGER: usize = 4;
/// Number of short prompts that a client sends after each prompt of the kind `MEGABYTE`.
const SHORT_ONES: usize = 300;
/// A prompt is a sequence of pieces of this length in bytes. A piece is one token of the synthetic
/// vocabulary, such as `<|t300|>`, and two letters.
const PIECE_BYTES: usize = "<|t300|>ab".len();
/// Number of tokens of a piece of a prompt (see `PIECE_BYTES`): one for `<|t300|>`, and one per letter.
const PIECE_TOKENS: usize = 3;
/// Range of the token ids N whose text `<|tN|>` is used in prompts: three digits, and above the ids of bytes
/// and special tokens.
const WORDS: std::ops::Range<u64> = 300..1_000;
/// Context length of the model in tokens, which the longest prompt and its output do not exceed.
const CONTEXT: usize = 320 << 10;
/// Token budget of a step. With this value, the last steps of a 1 MiB prompt take longer than the minimum
/// step deadline of five seconds.
const STEP_TOKENS: &str = "8192";
/// Number of KV blocks. It is large enough that no request is preempted, and that a 1 MiB prompt is still
/// cached when it is sent again.
const BLOCKS: &str = "98304";
/// Number of clients; each sends one prompt after another.
const CLIENTS: u64 = 2;
const ANSWER_TOKENS: usize = 8;
/// Output tokens of each background stream: more than the number of steps that prefill a 1 MiB prompt, so
/// that a stream runs during whole prefills. A stream that starts during a prefill may wait until the prefill
/// ends.
const STREAM_TOKENS: usize = 4_096;
/// Interval at which the server's timing records of its steps are read; the server keeps the last 1,024
/// records. Records of short steps may be missed, but records of long steps are not.
const POLL_INTERVAL: Duration = Duration::from_millis(500);
const REPORT_INTERVAL: Duration = Duration::from_mins(1);
/// Timeout for a reply. It is long because a request may wait until other 1 MiB prompts are finished.
const ANSWER_TIMEOUT: Duration = Duration::from_hours(1);

/// A `hadron serve` process on a free port.
pub(super) struct LongPromptServer {
    child: Child,
    pub(super) address: SocketAddr,
}

impl LongPromptServer {
    /// Starts the server, and waits for the log line with its address, which the server writes when it is
    /// ready.
    pub(super) fn start(args: &[&str]) -> Self {
        let mut command = Command::new(env!("CARGO_BIN_EXE_hadron"));
        command.arg("serve").args(args).args(["--port", "0"]).env("RUST_LOG", "warn");
        command.stdin(Stdio::null()).stdout(Stdio::null()).stderr(Stdio::piped());
        let mut child = command.spawn().unwrap();
        let log = ChildPipe::start(child.stderr.take().unwrap());
        let mut text = Vec::new();
        let address = loop {
            let line = log.next_line(CHILD_TIMEOUT);
            let Some(line) = line else { panic!("no ready line: {text:?}") };
            if let Some((_, rest)) = line.split_once(" on http://") {
                break rest.split(' ').next().unwrap().parse().unwrap();
            }
            text.push(line);
        };
        // Prints the warnings in the server's log, such as the cause of an executor failure.
        log.for_each(|line| {
            if line.contains(" WARN ") {
                print!("server: {line}");
            }
        });
        Self { child, address }
    }

    /// Process ids of the server and its executors.
    fn pids(&self) -> Vec<u32> {
        let server = self.child.id();
        let children = fs::read_to_string(format!("/proc/{server}/task/{server}/children"));
        let children = children.unwrap();
        let children = children.split_whitespace().map(|pid| pid.parse().unwrap());
        let is_executor = |pid: &u32| {
            let words = fs::read_to_string(format!("/proc/{pid}/cmdline")).unwrap_or_default();
            words.split('\0').nth(1) == Some("executor")
        };
        [server].into_iter().chain(children.filter(is_executor)).collect()
    }
}

impl Drop for LongPromptServer {
    fn drop(&mut self) {
        end_child(&mut self.child);
    }
}

/// Writes a checkpoint of a model in which attention takes most of the step time, so that the step time
/// depends on the context length more than in any real model.
fn model() -> tempfile::TempDir {
    let config = json!({
        "architectures": ["Qwen3ForCausalLM"], "model_type": "qwen3", "vocab_size": WORDS.end,
        "hidden_size": 64, "num_hidden_layers": 1, "num_attention_heads": 2,
        "num_key_value_heads": 1, "head_dim": 16, "intermediate_size": 96, "rms_norm_eps": 1e-6,
        "rope_theta": 1e7, "max_position_embeddings": CONTEXT, "hidden_act": "silu",
        "tie_word_embeddings": false, "bos_token_id": 1, "eos_token_id": 2,
    });
    let folder = tempfile::tempdir().unwrap();
    let path = folder.path().join("config.json");
    fs::write(&path, config.to_string()).unwrap();
    let mut hadron = Command::new(env!("CARGO_BIN_EXE_hadron"));
    let made = hadron.arg("synth").args([&path, &folder.path().join("model")]);
    let made = run_to_end(made.args(["--dtype", "float32"]));
    assert!(made.status.success(), "{}", String::from_utf8_lossy(&made.stderr));
    folder
}

/// A random prompt of `bytes` bytes, rounded down to a multiple of `PIECE_BYTES`.
fn prompt(rng: &mut SimRng, bytes: usize) -> String {
    let mut text = String::with_capacity(bytes);
    for _ in 0..bytes / PIECE_BYTES {
        let word = WORDS.start + rng.below(WORDS.end - WORDS.start);
        let mut letter = || char::from(b'a' + rng.below(26) as u8);
        let _ = write!(text, "<|t{word}|>{}{}", letter(), letter()); // Writing to a `String` cannot fail.
    }
    text
}

/// Numbers of completed and wrong replies, and longest times, over all clients.
#[derive(Default)]
struct LongPromptCounts {
    /// Number of completed prompts of each kind in `KINDS`.
    ended: [AtomicU64; KINDS.len()],
    streams: AtomicU64,
    wrong: AtomicU64,
    /// The longest time between two events of a stream, and the longest time from sending a request to its
    /// complete reply.
    longest: Mutex<[Duration; 2]>,
}

impl LongPromptCounts {
    fn took(&self, kind: usize, time: Duration) {
        let mut longest = self.longest.lock().unwrap();
        longest[kind] = longest[kind].max(time);
    }

    fn is_wrong(&self, what: &str) {
        self.wrong.fetch_add(1, Ordering::Relaxed);
        println!("wrong: {what}");
    }

    fn line(&self) -> String {
        let load = |count: &AtomicU64| count.load(Ordering::Relaxed);
        let count =
            |(ended, kind): (&AtomicU64, &(&str, usize))| format!("{} of {}", load(ended), kind.0);
        let ended: Vec<String> = self.ended.iter().zip(&KINDS).map(count).collect();
        let [gap, answer] = *self.longest.lock().unwrap();
        format!(
            "answered: {}, {} streams; wrong: {}; longest gap of a stream {gap:.1?}, longest answer {answer:.1?}",
            ended.join(", "),
            load(&self.streams),
            load(&self.wrong),
        )
    }
}

fn connect(address: SocketAddr) -> HttpClient {
    let mut client = HttpClient::connect(address);
    client.set_read_timeout(ANSWER_TIMEOUT);
    client
}

/// A client that sends prompts of random kinds one after another.
struct LongPromptClient<'a> {
    address: SocketAddr,
    rng: SimRng,
    seen: &'a LongPromptCounts,
}

impl LongPromptClient<'_> {
    fn run(&mut self, over: &AtomicBool) {
        while !over.load(Ordering::Relaxed) {
            let kind = self.rng.pick(&RANDOM_KINDS);
            let text = prompt(&mut self.rng, KINDS[kind].1);
            self.send_prompt(kind, &text);
            if kind == MEGABYTE {
                self.send_short_prompts(text);
            }
        }
    }

    /// Sends `SHORT_ONES` short prompts, then the 1 MiB prompt `text` again with a suffix.
    fn send_short_prompts(&mut self, mut text: String) {
        for _ in 0..SHORT_ONES {
            let short = prompt(&mut self.rng, KINDS[SHORT].1);
            self.send_prompt(SHORT, &short);
        }
        text += &prompt(&mut self.rng, KINDS[LONGER].1);
        self.send_prompt(LONGER, &text);
    }

    fn send_prompt(&self, kind: usize, text: &str) {
        let body = json!({"prompt": text, "max_tokens": ANSWER_TOKENS, "ignore_eos": true});
        let (mut client, since) = (connect(self.address), Instant::now());
        client.send("POST", "/v1/completions", "", body.to_string().as_bytes());
        let reply = client.read();
        self.seen.took(1, since.elapsed());
        let tokens = text.len() / PIECE_BYTES * PIECE_TOKENS;
        match reply {
            Some(reply) if is_complete(&reply, tokens, kind == LONGER) => {
                self.seen.ended[kind].fetch_add(1, Ordering::Relaxed);
            }
            Some(HttpReply { status, body, .. }) => {
                self.seen.is_wrong(&format!("{status} {}", String::from_utf8_lossy(&body)));
            }
            None => self.seen.is_wrong("no reply"),
        }
    }
}

/// Whether a reply is correct: all `prompt_tokens` tokens were processed, the prompt was a prefix hit if and
/// only if `is_cached`, and the output has the requested length.
fn is_complete(reply: &HttpReply, prompt_tokens: usize, is_cached: bool) -> bool {
    if reply.status != 200 {
        return false;
    }
    let reply = reply.json();
    let usage = &reply["usage"];
    usage["prompt_tokens"] == prompt_tokens
        && (usage["prompt_tokens_details"]["cached_tokens"] != 0) == is_cached
        && usage["completion_tokens"] == ANSWER_TOKENS
        && reply["choices"][0]["finish_reason"] == "length"
}

/// Runs the background client: reads one stream after another until `over` is true.
fn read_streams(address: SocketAddr, over: &AtomicBool, seen: &LongPromptCounts) {
    let mut number = 0_u64;
    while !over.load(Ordering::Relaxed) {
        number += 1;
        // `logit_bias` forces the output to consist of one letter. Each token is then valid UTF-8, so that
        // each token is one event.
        let body = json!({"prompt": format!("{number} streams"), "max_tokens": STREAM_TOKENS, "ignore_eos": true,
            "logit_bias": {"97": 100}, "stream": true, "stream_options": {"include_usage": true}});
        let mut client = connect(address);
        client.send("POST", "/v1/completions", "", body.to_string().as_bytes());
        let status = client.read_head().map(|head| head.status);
        let text = read_events(&mut client, seen);
        let told = format!("\"completion_tokens\":{STREAM_TOKENS}");
        if status == Some(200) && text.ends_with("data: [DONE]\n\n") && text.contains(&told) {
            seen.streams.fetch_add(1, Ordering::Relaxed);
        } else {
            let end: Vec<&str> = text.lines().rev().take(4).collect();
            seen.is_wrong(&format!("{status:?}, a stream that ends with {end:?}"));
        }
    }
}

/// Reads a stream to its end and returns its SSE text; records the longest time between two events in `seen`.
fn read_events(client: &mut HttpClient, seen: &LongPromptCounts) -> String {
    let (mut text, mut last) = (String::new(), None);
    while let Some(chunk) = client.read_chunk().filter(|chunk| !chunk.is_empty()) {
        // SSE comments are keep-alives without tokens.
        if !chunk.starts_with(b":") {
            let before = last.replace(Instant::now());
            seen.took(0, before.map_or(Duration::ZERO, |before| before.elapsed()));
        }
        text += &String::from_utf8_lossy(&chunk);
    }
    text
}

/// The server's timing record of one step.
#[derive(Debug, Clone, Copy, Default)]
struct ServerStepRecord {
    number: u64,
    tokens: u64,
    took: Duration,
    /// Step deadline that the server set for this step.
    allowed: Duration,
}

impl ServerStepRecord {
    fn of(step: &Value) -> Self {
        let field = |name: &str| step[name].as_u64().unwrap();
        Self {
            number: field("step"),
            tokens: field("tokens"),
            took: Duration::from_nanos(field("wait_ns")),
            allowed: Duration::from_millis(field("allowed_ms")),
        }
    }

    fn share(&self) -> f64 {
        self.took.as_secs_f64() / self.allowed.as_secs_f64().max(1e-9)
    }
}

impl std::fmt::Display for ServerStepRecord {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        let Self { tokens, took, allowed, .. } = self;
        write!(f, "{took:.1?} of {allowed:.1?} ({tokens} tokens)")
    }
}

/// Summary of the step records that were read from a server.
#[derive(Default)]
struct StepRecordSummary {
    newest: u64,
    /// Number of step records that were read.
    seen: u64,
    longest: ServerStepRecord,
    /// The step with the largest ratio of duration to deadline.
    nearest: ServerStepRecord,
}

impl StepRecordSummary {
    /// Reads the timing records of the steps after step `newest` from the server.
    fn poll(&mut self, address: SocketAddr) {
        let mut client = connect(address);
        client.send("GET", "/debug/steps", "Authorization: Bearer root\r\n", b"");
        let page = client.read().unwrap().json();
        let steps = page["steps"].as_array().unwrap().iter().map(ServerStepRecord::of);
        let known = self.newest;
        for step in steps.skip_while(|step| step.number <= known) {
            (self.newest, self.seen) = (step.number, self.seen + 1);
            if step.took > self.longest.took {
                self.longest = step;
            }
            if step.share() > self.nearest.share() {
                self.nearest = step;
            }
        }
    }

    fn line(&self) -> String {
        let Self { newest, seen, longest, nearest } = self;
        let share = nearest.share();
        format!(
            "{seen} of {newest} steps seen; longest {longest}; nearest to its deadline, at {share:.2}, {nearest}"
        )
    }
}

/// Number of executor restarts plus number of steps that exceeded their deadline (`late_rank_total`), from
/// `/metrics`. Both must stay 0.
fn false_alarms(address: SocketAddr) -> f64 {
    let page = String::from_utf8(get(address, "/metrics").body).unwrap();
    let names = ["hadron:executor_restarts_total{", "hadron:late_rank_total{"];
    let lines = page.lines().filter(|line| names.iter().any(|name| line.starts_with(name)));
    let values: Vec<f64> =
        lines.map(|line| line.rsplit(' ').next().unwrap().parse().unwrap()).collect();
    assert_eq!(values.len(), 5, "four causes and a rank: {page}");
    values.iter().sum()
}

/// Current and peak resident memory of each process.
fn memory(pids: &[u32]) -> String {
    let mib = |pid: u32, field: &str| {
        let status = fs::read_to_string(format!("/proc/{pid}/status")).unwrap_or_default();
        let line = status.lines().find_map(|line| line.strip_prefix(field)?.strip_prefix(':'));
        let kib = line.and_then(|rest| rest.split_whitespace().next()?.parse::<u64>().ok());
        kib.unwrap_or(0) >> 10
    };
    let of = |&pid: &u32| format!("{} of {}", mib(pid, "VmRSS"), mib(pid, "VmHWM"));
    let each: Vec<String> = pids.iter().map(of).collect();
    format!("server and executor hold {} MiB", each.join(" and "))
}

/// Runs the clients for the duration `time`, then waits until all requests that were already sent have
/// finished.
fn run(
    process: &LongPromptServer,
    time: Duration,
    seen: &LongPromptCounts,
    steps: &mut StepRecordSummary,
) {
    let (address, over, start) = (process.address, AtomicBool::new(false), Instant::now());
    std::thread::scope(|scope| {
        let over = &over;
        let senders: Vec<_> = (0..CLIENTS)
            .map(|seed| {
                scope.spawn(move || {
                    LongPromptClient { address, rng: SimRng::new(seed), seen }.run(over);
                })
            })
            .collect();
        scope.spawn(move || read_streams(address, over, seen));
        let mut told = start;
        while !senders.iter().all(ScopedJoinHandle::is_finished) {
            std::thread::sleep(POLL_INTERVAL);
            steps.poll(address);
            over.store(start.elapsed() >= time, Ordering::Relaxed);
            if told.elapsed() >= REPORT_INTERVAL {
                told = Instant::now();
                println!("{:.0?}: {}", start.elapsed(), seen.line());
                println!("  {}; {}", steps.line(), memory(&process.pids()));
            }
        }
    });
    steps.poll(address);
}

/// Sends long prompts for `HADRON_LONG_PROMPTS_MINUTES` minutes.
#[test]
#[ignore = "takes an hour: `just long-prompts MINUTES`"]
#[allow(clippy::disallowed_methods, reason = "the length comes from `just`")]
fn long_prompts_cause_no_false_step_timeout() {
    let message = std::env::var("HADRON_LONG_PROMPTS_MINUTES").ok();
    let minutes = message.map_or(60.0, |text| text.parse::<f64>().unwrap());
    let folder = model();
    let path = folder.path().join("model");
    let apart =
        ["--executor", "process", "--threads", "1", "--dtype", "float32", "--max-num-seqs", "8"];
    let sizes = ["--max-num-batched-tokens", STEP_TOKENS, "--num-gpu-blocks-override", BLOCKS];
    let args = [&[path.to_str().unwrap(), "--admin-key", "root"], &apart[..], &sizes[..]].concat();
    let process = LongPromptServer::start(&args);
    let (pids, seen, mut steps) =
        (process.pids(), LongPromptCounts::default(), StepRecordSummary::default());
    run(&process, Duration::from_secs_f64(minutes * 60.0), &seen, &mut steps);
    let alarms = false_alarms(process.address);
    println!("{minutes} minutes: {}", seen.line());
    println!("{}", steps.line());
    println!("{}; {alarms} false alarms", memory(&process.pids()));
    assert_eq!((alarms, process.pids()), (0.0, pids), "a working executor was declared failed");
    assert_eq!(seen.wrong.into_inner(), 0);
    assert!(seen.ended[LONGER].load(Ordering::Relaxed) > 0, "no megabyte came again");
}
