//! An hour of prompts of a megabyte, or as many minutes as asked for: their steps grow with their context, from milliseconds to
//! many times what any step is allowed at first, and none of them may be taken for a hang.
//!
//! The server is the real one, with its executor in a process that a late step would end. Shorter prompts and a stream run beside the
//! long ones, so that expectations fall between two of them, and some prompts go on behind a megabyte that is cached: their first step
//! has its whole context at once.

use crate::chance::Chance;
use crate::http_client::{Client, Reply, get, post};
use serde_json::{Value, json};
use std::fs;
use std::io::{BufRead, BufReader};
use std::net::SocketAddr;
use std::process::{Child, Command, Stdio};
use std::sync::Mutex;
use std::sync::atomic::{AtomicBool, AtomicU64, Ordering};
use std::time::{Duration, Instant};

/// Prompts: name, bytes of text, and how many of ten are such.
const SIZES: [(&str, usize, u64); 4] = [
    ("10 KB", 10 << 10, 2),
    ("100 KB", 100 << 10, 2),
    ("1 MB", 1 << 20, 3),
    ("1 MB and 30 KB more", 30 << 10, 3),
];
const MEGABYTE: usize = 2;
/// What its client has sent last of a megabyte, and more.
const FOLLOW_UP: usize = 3;
/// A word of the synthetic vocabulary and two letters: bytes, and tokens.
const PIECE_BYTES: usize = "<|t300|>ab".len();
const PIECE_TOKENS: usize = 3;
/// Words of three digits begin behind the bytes and the special tokens.
const WORDS: std::ops::Range<u64> = 300..1_000;
/// Of the model: the longest prompt and its answer.
const CONTEXT: usize = 320 << 10;
/// Tokens of a step: the last ones of a megabyte take longer than any step is allowed before its kind has been seen.
const STEP_TOKENS: &str = "8192";
/// Two megabytes and what runs beside them, so that nobody is preempted.
const BLOCKS: &str = "49152";
/// Each sends one prompt after another.
const CLIENTS: u64 = 2;
const ANSWER_TOKENS: usize = 8;
/// Of each of the streams that run beside all the time.
const STREAM_TOKENS: usize = 64;
/// Of the newest 1,024 steps none may be missed.
const LOOK_EVERY: Duration = Duration::from_millis(200);
const TELL_EVERY: Duration = Duration::from_mins(1);
/// For an answer behind other prompts of a megabyte.
const PATIENCE: Duration = Duration::from_hours(1);

/// `hadron serve` on a free port.
pub(super) struct Process {
    child: Child,
    pub(super) address: SocketAddr,
}

impl Process {
    /// Starts it and reads the ready line.
    pub(super) fn start(args: &[&str]) -> Self {
        let mut command = Command::new(env!("CARGO_BIN_EXE_hadron"));
        command.arg("serve").args(args).args(["--port", "0"]).env("RUST_LOG", "warn");
        command.stdin(Stdio::null()).stdout(Stdio::null()).stderr(Stdio::piped());
        let mut child = command.spawn().unwrap();
        let mut lines = BufReader::new(child.stderr.take().unwrap()).lines();
        let mut said = Vec::new();
        let address = loop {
            let Some(Ok(line)) = lines.next() else { panic!("no ready line: {said:?}") };
            if let Some((_, rest)) = line.split_once(" on http://") {
                break rest.split(' ').next().unwrap().parse().unwrap();
            }
            said.push(line);
        };
        // Why an executor is given up stands there, and a pipe that nobody reads would stop the server.
        std::thread::spawn(move || {
            lines.map_while(Result::ok).for_each(|line| println!("server: {line}"));
        });
        Self { child, address }
    }

    /// The server and its executors.
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

impl Drop for Process {
    fn drop(&mut self) {
        // Gone already if the measurement failed.
        let _ = self.child.kill();
        let _ = self.child.wait();
    }
}

/// Attention and little else: what a step takes depends on its context more than it does in any real model.
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
    let made = made.args(["--dtype", "float32"]).output().unwrap();
    assert!(made.status.success(), "{}", String::from_utf8_lossy(&made.stderr));
    folder
}

/// A text like no other, and its tokens.
fn prompt(chance: &mut Chance, bytes: usize) -> (String, usize) {
    let pieces = bytes / PIECE_BYTES;
    let mut text = String::with_capacity(bytes);
    for _ in 0..pieces {
        let mut letter = || char::from(b'a' + chance.below(26) as u8);
        let letters = [letter(), letter()];
        let word = WORDS.start + chance.below(WORDS.end - WORDS.start);
        text += &format!("<|t{word}|>");
        text.extend(letters);
    }
    (text, pieces * PIECE_TOKENS)
}

/// What clients saw.
#[derive(Default)]
struct Seen {
    /// Prompts of each size that were answered whole.
    ended: [AtomicU64; SIZES.len()],
    streams: AtomicU64,
    wrong: AtomicU64,
    /// The longest time between two events of a stream, and the longest answer.
    longest: Mutex<[Duration; 2]>,
}

impl Seen {
    fn took(&self, kind: usize, time: Duration) {
        let mut longest = self.longest.lock().unwrap();
        longest[kind] = longest[kind].max(time);
    }

    fn is_wrong(&self, what: &str) {
        self.wrong.fetch_add(1, Ordering::Relaxed);
        println!("wrong: {what}");
    }

    fn line(&self) -> String {
        let count =
            |at: usize| format!("{} of {}", self.ended[at].load(Ordering::Relaxed), SIZES[at].0);
        let [gap, answer] = *self.longest.lock().unwrap();
        format!(
            "answered {}, {}, {}, {}, and {} streams; {} wrong; longest gap of a stream {gap:.1?}, longest answer {answer:.1?}",
            count(0),
            count(1),
            count(2),
            count(3),
            self.streams.load(Ordering::Relaxed),
            self.wrong.load(Ordering::Relaxed),
        )
    }
}

fn patient(address: SocketAddr) -> Client {
    let client = Client::connect(address);
    client.reader.get_ref().set_read_timeout(Some(PATIENCE)).unwrap();
    client
}

/// One prompt after another, of sizes that are drawn.
fn send_prompts(address: SocketAddr, seed: u64, over: &AtomicBool, seen: &Seen) {
    let mut chance = Chance::new(seed);
    let mut megabyte = (String::new(), 0);
    while !over.load(Ordering::Relaxed) {
        let mut drawn = chance.below(SIZES.iter().map(|size| size.2).sum());
        let size = SIZES.iter().position(|size| {
            let is_it = drawn < size.2;
            drawn = drawn.saturating_sub(size.2);
            is_it
        });
        let size = size.unwrap();
        let (mut text, mut tokens) = prompt(&mut chance, SIZES[size].1);
        match size {
            MEGABYTE => megabyte = (text.clone(), tokens),
            FOLLOW_UP => {
                text.insert_str(0, &megabyte.0);
                tokens += megabyte.1;
            }
            _ => {}
        }
        let body = json!({"prompt": text, "max_tokens": ANSWER_TOKENS, "ignore_eos": true});
        let (mut client, since) = (patient(address), Instant::now());
        client.send("POST", "/v1/completions", "", body.to_string().as_bytes());
        let reply = client.read();
        seen.took(1, since.elapsed());
        match reply {
            Some(reply) if is_whole(&reply, tokens, size == FOLLOW_UP) => {
                seen.ended[size].fetch_add(1, Ordering::Relaxed);
            }
            Some(Reply { status, body, .. }) => {
                seen.is_wrong(&format!("{status} {}", String::from_utf8_lossy(&body)));
            }
            None => seen.is_wrong("no reply"),
        }
    }
}

/// Whether all of a prompt was read, none of it was cached unless it may be, and its answer has its length.
fn is_whole(reply: &Reply, prompt_tokens: usize, may_be_cached: bool) -> bool {
    if reply.status != 200 {
        return false;
    }
    let reply = reply.json();
    let usage = &reply["usage"];
    usage["prompt_tokens"] == prompt_tokens
        && (may_be_cached || usage["prompt_tokens_details"]["cached_tokens"] == 0)
        && usage["completion_tokens"] == ANSWER_TOKENS
        && reply["choices"][0]["finish_reason"] == "length"
}

/// One short stream after another.
fn read_streams(address: SocketAddr, over: &AtomicBool, seen: &Seen) {
    let mut number = 0_u64;
    while !over.load(Ordering::Relaxed) {
        number += 1;
        let body = json!({"prompt": format!("{number} streams"), "max_tokens": STREAM_TOKENS, "ignore_eos": true,
            "stream": true, "stream_options": {"include_usage": true}});
        let mut client = patient(address);
        client.send("POST", "/v1/completions", "", body.to_string().as_bytes());
        let status = client.read_head().map(|head| head.status);
        let text = read_events(&mut client, seen);
        let told = format!("\"completion_tokens\":{STREAM_TOKENS}");
        if status == Some(200) && text.ends_with("data: [DONE]\n\n") && text.contains(&told) {
            seen.streams.fetch_add(1, Ordering::Relaxed);
        } else {
            seen.is_wrong(&format!("{status:?} {text}"));
        }
    }
}

/// All that a stream says, up to its end.
fn read_events(client: &mut Client, seen: &Seen) -> String {
    let (mut text, mut last) = (String::new(), Instant::now());
    while let Some(chunk) = client.read_chunk().filter(|chunk| !chunk.is_empty()) {
        // Comments only say that nothing has come.
        if !chunk.starts_with(b":") {
            seen.took(0, last.elapsed());
            last = Instant::now();
        }
        text += &String::from_utf8_lossy(&chunk);
    }
    text
}

/// What the server keeps of a step.
struct Record {
    number: u64,
    tokens: u64,
    took: Duration,
    allowed: Duration,
}

/// The newest steps, oldest first.
fn records(address: SocketAddr) -> Vec<Record> {
    let mut client = patient(address);
    client.send("GET", "/debug/steps", "Authorization: Bearer root\r\n", b"");
    let page = client.read().unwrap().json();
    let record = |step: &Value| {
        let field = |name: &str| step[name].as_u64().unwrap();
        let took = Duration::from_nanos(field("wait_ns"));
        let allowed = Duration::from_millis(field("allowed_ms"));
        Record { number: field("step"), tokens: field("tokens"), took, allowed }
    };
    page["steps"].as_array().unwrap().iter().map(record).collect()
}

/// A step, and what it was allowed to take.
#[derive(Clone, Copy, Default)]
struct Step {
    tokens: u64,
    took: Duration,
    allowed: Duration,
}

impl Step {
    fn share(&self) -> f64 {
        self.took.as_secs_f64() / self.allowed.as_secs_f64().max(1e-9)
    }

    fn line(&self) -> String {
        format!("{:.1?} of {:.1?} for {} tokens", self.took, self.allowed, self.tokens)
    }
}

/// The steps of a server.
struct Steps {
    /// Number of the newest one, how many there were before the measurement, and how many have been told of since.
    newest: u64,
    before: u64,
    told: u64,
    longest: Step,
    /// The one that came nearest to its deadline.
    nearest: Step,
}

impl Steps {
    fn begin(address: SocketAddr) -> Self {
        let body = json!({"prompt": "begin", "max_tokens": ANSWER_TOKENS, "ignore_eos": true});
        assert_eq!(post(address, "/v1/completions", &body).status, 200);
        let newest = records(address).last().unwrap().number;
        let (longest, nearest) = (Step::default(), Step::default());
        Self { newest, before: newest, told: 0, longest, nearest }
    }

    /// Reads what is new.
    fn look(&mut self, address: SocketAddr) {
        for record in records(address) {
            if record.number > self.newest {
                self.newest = record.number;
                self.note(Step {
                    tokens: record.tokens,
                    took: record.took,
                    allowed: record.allowed,
                });
            }
        }
    }

    fn note(&mut self, step: Step) {
        self.told += 1;
        if step.took > self.longest.took {
            self.longest = step;
        }
        if step.share() > self.nearest.share() {
            self.nearest = step;
        }
    }

    fn line(&self) -> String {
        format!(
            "{} of {} steps seen; the longest took {}; nearest to its deadline, at {:.2} of it, {}",
            self.told,
            self.newest - self.before,
            self.longest.line(),
            self.nearest.share(),
            self.nearest.line(),
        )
    }
}

/// What executors were lost for, and steps that were late for a moment.
fn alarms(address: SocketAddr) -> f64 {
    let page = String::from_utf8(get(address, "/metrics").body).unwrap();
    let names = ["hadron:executor_restarts_total{", "hadron:late_rank_total{"];
    let lines = page.lines().filter(|line| names.iter().any(|name| line.starts_with(name)));
    let values: Vec<f64> =
        lines.map(|line| line.rsplit(' ').next().unwrap().parse().unwrap()).collect();
    assert_eq!(values.len(), 5, "four causes and a rank: {page}");
    values.iter().sum()
}

/// Resident memory of each process now, and at most.
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

/// Lets clients send for so long, and waits for what is under way then.
fn run(process: &Process, time: Duration, seen: &Seen, steps: &mut Steps) {
    let (address, over, start) = (process.address, AtomicBool::new(false), Instant::now());
    std::thread::scope(|scope| {
        let over = &over;
        let senders: Vec<_> = (0..CLIENTS)
            .map(|seed| scope.spawn(move || send_prompts(address, seed, over, seen)))
            .collect();
        scope.spawn(move || read_streams(address, over, seen));
        let mut told = start;
        while !senders.iter().all(|sender| sender.is_finished()) {
            std::thread::sleep(LOOK_EVERY);
            steps.look(address);
            over.store(start.elapsed() >= time, Ordering::Relaxed);
            if told.elapsed() >= TELL_EVERY {
                told = Instant::now();
                println!("{:.0?}: {}; {}", start.elapsed(), seen.line(), memory(&process.pids()));
            }
        }
    });
    steps.look(address);
}

/// As many minutes as HADRON_LONG_PROMPTS_MINUTES says.
#[test]
#[ignore = "an hour: `just long-prompts MINUTES`"]
#[allow(clippy::disallowed_methods, reason = "the length comes from `just`")]
fn an_hour_of_long_prompts() {
    let said = std::env::var("HADRON_LONG_PROMPTS_MINUTES").ok();
    let minutes = said.map_or(60.0, |text| text.parse::<f64>().unwrap());
    let folder = model();
    let path = folder.path().join("model");
    let apart =
        ["--executor", "process", "--threads", "1", "--dtype", "float32", "--max-num-seqs", "8"];
    let sizes = ["--max-num-batched-tokens", STEP_TOKENS, "--num-gpu-blocks-override", BLOCKS];
    let args = [&[path.to_str().unwrap(), "--admin-key", "root"], &apart[..], &sizes[..]].concat();
    let process = Process::start(&args);
    let (pids, seen, mut steps) = (process.pids(), Seen::default(), Steps::begin(process.address));
    run(&process, Duration::from_secs_f64(minutes * 60.0), &seen, &mut steps);
    let alarms = alarms(process.address);
    println!("{minutes} minutes: {}", seen.line());
    println!("{}", steps.line());
    println!("{}; {alarms} false alarms", memory(&process.pids()));
    assert_eq!((alarms, process.pids()), (0.0, pids), "an executor that worked was given up");
    assert_eq!(seen.wrong.into_inner(), 0);
    assert!(seen.ended[MEGABYTE].load(Ordering::Relaxed) > 0, "no megabyte was answered");
}
