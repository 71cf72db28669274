//! KV events of a server under load: the set of blocks that a subscriber builds equals the prefix index
//! whenever the server is idle.

use super::executor_process::{executor, send};
use super::server_process::ServerProcess;
use crate::bounded_child::run_to_end;
use crate::deadlines::BoundedJoin as _;
use crate::http_client::{HttpClient, get, post};
use crate::kv_event_replay::{self, config, sequence_number};
use crate::test_server::{ServerSetup, TestServer};
use metrics::kv_events::KvEventsConfig;
use metrics::kv_events::{
    BatchArrival, DecodedKvEvent, ExternalBlockHash, SequenceNumberTracker, SubscriberBlocks,
    decode,
};
use serde_json::{Value, json};
use std::collections::BTreeSet;
use std::net::SocketAddr;
use std::process;
use std::time::{Duration, Instant};
use zmq::{Context, Socket};

const WAIT: Duration = Duration::from_secs(20);
/// Default number of tokens per block.
const BLOCK_TOKENS: usize = 16;

/// Keys of `/kv_event_sources` that vLLM's publisher configuration also has.
const VLLM_KEYS: &[&str] = &[
    "enable_kv_cache_events",
    "publisher",
    "endpoint",
    "replay_endpoint",
    "buffer_steps",
    "hwm",
    "max_queue_size",
    "topic",
];

/// KV-event subscriber configured from the server's `/kv_event_sources`; tracks the cached blocks.
struct KvEventTestSubscriber {
    server: SocketAddr,
    live: Socket,
    follower: SequenceNumberTracker,
    blocks: SubscriberBlocks,
}

fn source(server: SocketAddr) -> Value {
    let sources = get(server, "/kv_event_sources").json();
    assert_eq!(sources.as_object().unwrap().len(), 1, "{sources}");
    let source = sources["0"].as_object().unwrap();
    let missing = |key: &&&str| !source.contains_key(**key);
    assert_eq!(VLLM_KEYS.iter().find(missing), None, "{sources}");
    sources["0"].clone()
}

fn replay(server: SocketAddr, start: u64) -> Vec<(u64, Vec<u8>)> {
    let endpoint = source(server)["replay_endpoint"].as_str().unwrap().to_owned();
    kv_event_replay::replay(&endpoint, start, WAIT.as_millis() as i32)
}

impl KvEventTestSubscriber {
    fn new(server: SocketAddr) -> Self {
        let live = Context::new().socket(zmq::SUB).unwrap();
        live.set_subscribe(b"").unwrap();
        live.connect(source(server)["endpoint"].as_str().unwrap()).unwrap();
        std::thread::sleep(Duration::from_millis(200)); // ZMTP does not acknowledge subscriptions.
        Self {
            server,
            live,
            follower: SequenceNumberTracker::at(0),
            blocks: SubscriberBlocks::default(),
        }
    }

    fn take(&mut self, seq: u64, payload: &[u8]) {
        let mut broken = Vec::new();
        let events = decode(payload).unwrap().events;
        for event in &events {
            self.blocks.apply(event, &mut broken);
        }
        assert_eq!(broken, [], "batch {seq}");
        self.follower.advance(seq);
    }

    /// Receives all batches published so far; returns the number of batches that were received on the
    /// subscription and not by a replay.
    fn follow(&mut self) -> u64 {
        let last = source(self.server)["last_seq"].as_u64().unwrap();
        let (start, mut live) = (Instant::now(), 0);
        while self.follower.check(last) != BatchArrival::Duplicate {
            assert!(start.elapsed() < WAIT, "batch {last} never came");
            if self.live.poll(zmq::POLLIN, 50).unwrap() == 0 {
                // The last batches were published before the subscription became active, so they are
                // requested as a replay.
                self.fill(self.follower.next().unwrap());
                continue;
            }
            let frames = self.live.recv_multipart(0).unwrap();
            let seq = sequence_number(&frames[1]);
            match self.follower.check(seq) {
                BatchArrival::Duplicate => {}
                BatchArrival::Next => {
                    live += 1;
                    self.take(seq, &frames[2]);
                }
                BatchArrival::Gap { from } => self.fill(from),
            }
        }
        live
    }

    /// Receives batches until a batch after `batch` has arrived and the subscriber's set has `blocks` blocks.
    /// One call of `follow` may not suffice, because events of a request may be published after its reply.
    fn follow_beyond(&mut self, batch: Option<u64>, blocks: usize) {
        let start = Instant::now();
        loop {
            self.follow();
            let count = self.blocks.hashes().count();
            if self.follower.next() > batch && count == blocks {
                return;
            }
            assert!(start.elapsed() < WAIT, "{count} blocks instead of {blocks}");
        }
    }

    fn fill(&mut self, from: u64) {
        for (seq, payload) in replay(self.server, from) {
            self.take(seq, &payload);
        }
    }

    fn hashes(&self) -> BTreeSet<String> {
        self.blocks.hashes().map(ExternalBlockHash::to_string).collect()
    }
}

/// Block hashes in the engine's prefix index.
fn index(server: &TestServer) -> BTreeSet<String> {
    let resident = server.engine_reply(server.client().cached_blocks());
    resident[0].hashes[0].iter().map(|hash| format!("{:016x}", hash.0)).collect()
}

/// Prompt number `number`; the prompts share prefixes and form a tree.
fn prompt(number: u32) -> Vec<u32> {
    let shared = number % 3;
    (0..40 + number % 5 * 16)
        .map(|i| 65 + (shared + i * (1 + number / 7 * u32::from(i > 30))) % 26)
        .collect()
}

fn complete(server: SocketAddr, number: u32) {
    let body =
        json!({"prompt": prompt(number), "max_tokens": 30, "ignore_eos": true, "seed": number});
    assert_eq!(post(server, "/v1/completions", &body).status, 200);
}

#[test]
fn subscriber_blocks_equal_the_prefix_index() {
    for (format, blocks) in [("map", 400), ("map", 40), ("array", 40)] {
        let kv_events = Some(config(&json!({"format": format})));
        let setup = ServerSetup { blocks, max_model_len: 300, kv_events, ..ServerSetup::default() };
        let server = TestServer::start(&setup);
        let mut subscriber = KvEventTestSubscriber::new(server.address);
        subscriber.follow();
        for number in 0..60 {
            if number % 4 == 0 {
                let threads = (0..4).map(|i| {
                    let at = server.address;
                    std::thread::spawn(move || complete(at, number * 10 + i))
                });
                for thread in threads.collect::<Vec<_>>() {
                    thread.join_bounded();
                }
            } else {
                complete(server.address, number);
            }
            server.wait_idle(WAIT);
            // The last batch may not have arrived yet, but the engine's index no longer changes.
            let (resting, start) = (index(&server), Instant::now());
            while subscriber.hashes() != resting {
                assert!(start.elapsed() < WAIT, "{format}: not the index after request {number}");
                subscriber.follow();
            }
            assert!(resting.len() <= blocks as usize);
        }
        assert_eq!(source(server.address)["dropped"], 0);
        assert!(server.engine_reply(server.client().reset_prefix_cache(false)));
        let start = Instant::now();
        while !subscriber.blocks.is_empty() {
            assert!(start.elapsed() < WAIT, "the reset was not announced");
            subscriber.follow();
        }
        assert_eq!(index(&server), BTreeSet::new());
    }
}

#[test]
fn replay_returns_the_same_bytes_or_a_snapshot() {
    let kv_events = Some(config(&json!({"buffer_steps": 40})));
    let server = TestServer::start(&ServerSetup {
        blocks: 60,
        max_model_len: 300,
        kv_events,
        ..ServerSetup::default()
    });
    let mut live = Vec::new();
    let subscriber = KvEventTestSubscriber::new(server.address);
    for number in 0..30 {
        complete(server.address, number);
    }
    server.wait_idle(WAIT);
    while subscriber.live.poll(zmq::POLLIN, 500).unwrap() > 0 {
        let frames = subscriber.live.recv_multipart(0).unwrap();
        live.push((sequence_number(&frames[1]), frames[2].clone()));
    }
    let numbers: Vec<u64> = live.iter().map(|(seq, _)| *seq).collect();
    assert!(numbers.windows(2).all(|pair| pair[1] == pair[0] + 1), "contiguous");
    let (last, held) = (numbers[numbers.len() - 1], 40.min(live.len()));
    assert!(live.len() > 45, "only {} batches", live.len());
    assert_eq!(replay(server.address, last - 39), live[live.len() - held..]);
    let [(seq, payload)] = &replay(server.address, last - 40)[..] else { panic!("no snapshot") };
    assert_eq!(*seq, last);
    let mut set = SubscriberBlocks::default();
    let mut broken = Vec::new();
    for event in decode(payload).unwrap().events {
        set.apply(&event, &mut broken);
    }
    assert_eq!(broken, []);
    let known: BTreeSet<String> = set.hashes().map(ExternalBlockHash::to_string).collect();
    assert_eq!(known, index(&server));
}

#[test]
fn stalled_subscriber_does_not_slow_requests() {
    let took = |kv_events: Option<KvEventsConfig>, stuck: bool| {
        let server = TestServer::start(&ServerSetup {
            blocks: 200,
            max_model_len: 300,
            kv_events,
            ..ServerSetup::default()
        });
        let reader = stuck.then(|| KvEventTestSubscriber::new(server.address));
        let mut client = HttpClient::connect(server.address);
        let mut times: Vec<Duration> = (0..300)
            .map(|number| {
                let body = json!({"prompt": prompt(number), "max_tokens": 16, "ignore_eos": true});
                let start = Instant::now();
                assert_eq!(client.post("/v1/completions", &body).status, 200);
                start.elapsed()
            })
            .collect();
        drop(reader);
        times.sort_unstable();
        times[times.len() / 2]
    };
    // Other load on the machine varies, so the test passes if at least one of five measurements is fast
    // enough.
    let unaffected = (0..5).any(|_| {
        let without = took(None, false);
        let with = took(Some(config(&json!({"hwm": 1}))), true);
        println!(
            "median request: {without:?} without events, {with:?} with a subscriber that never reads"
        );
        // A request has 16 steps, and publishing its KV events may cost at most 1 ms per step.
        with < without + Duration::from_millis(16)
    });
    assert!(unaffected);
}

#[test]
fn disabled_events_have_no_sources() {
    let server = TestServer::start(&ServerSetup::default());
    assert_eq!(get(server.address, "/kv_event_sources").json(), json!({}));
}

fn hadron(args: &[&str]) -> process::Output {
    let mut hadron = process::Command::new(env!("CARGO_BIN_EXE_hadron"));
    run_to_end(hadron.arg("events").args(args))
}

#[test]
fn events_cli_follows_a_restart() {
    let port = || {
        let listener = std::net::TcpListener::bind("127.0.0.1:0").unwrap();
        listener.local_addr().unwrap().port()
    };
    let (publish, replays) = (port(), port());
    let keys = json!({"enable_kv_cache_events": true, "endpoint": format!("tcp://127.0.0.1:{publish}"),
                      "replay_endpoint": format!("tcp://127.0.0.1:{replays}")});
    let args = ["--kv-events-config", &keys.to_string(), "--threads", "1"];
    let ask = |server: SocketAddr| {
        let body = json!({"prompt": "The quick brown fox jumps over the lazy dog.", "max_tokens": 40,
                          "ignore_eos": true, "cache_salt": "tenant-a"});
        assert_eq!(post(server, "/v1/completions", &body).status, 200);
    };
    let server = ServerProcess::start(&args);
    ask(server.address);
    let url = format!("http://{}", server.address);
    let tail = hadron(&["tail", "--url", &url, "--from", "0", "--duration", "500ms"]);
    let text = String::from_utf8(tail.stdout).unwrap();
    assert!(tail.status.success() && text.starts_with("TIME (UTC)"), "{text}");
    assert!(text.contains("  cleared     all") && text.contains("  stored  "), "{text}");
    assert!(text.contains("tenant-a"), "{text}");
    let tail = hadron(&["tail", "--url", &url, "--from", "0", "--batches", "2", "--json"]);
    let lines = String::from_utf8(tail.stdout).unwrap();
    let lines: Vec<Value> = lines.lines().map(|line| serde_json::from_str(line).unwrap()).collect();
    assert_eq!(lines[0]["events"][0]["type"], "AllBlocksCleared");
    assert_eq!(lines[1]["events"][0]["block_size"], 16);
    let check = hadron(&["check", "--url", &url, "--duration", "500ms"]);
    let text = String::from_utf8(check.stdout).unwrap();
    assert!(check.status.success() && text.ends_with("ok\n"), "{text}");
    let folder = tempfile::tempdir().unwrap();
    let file = folder.path().join("events");
    let file_name = file.to_str().unwrap();
    let dump = hadron(&["dump", "--url", &url, "--from", "0", "--batches", "2", "-o", file_name]);
    assert!(dump.status.success(), "{}", String::from_utf8_lossy(&dump.stderr));
    assert_eq!(std::fs::read(&file).unwrap()[..3], [0x93, 0xc4, 0], "an array, an empty topic");
    let none = hadron(&["tail", "--url", "http://127.0.0.1:1"]);
    assert_eq!(none.status.code(), Some(1));
    assert!(String::from_utf8_lossy(&none.stderr).contains("give an ENDPOINT"));

    let last = source(server.address)["last_seq"].as_u64().unwrap();
    drop(server); // Dropping the server kills it without a shutdown.
    let server = ServerProcess::start(&args);
    let source = source(server.address);
    assert!(source["epoch"].as_u64().unwrap() > last, "{source}");
    let batches = replay(server.address, last + 1);
    assert_eq!(decode(&batches[0].1).unwrap().events, [DecodedKvEvent::AllBlocksCleared]);
}

#[test]
fn executor_failure_clears_blocks_and_continues_sequence() {
    let keys = json!({"enable_kv_cache_events": true, "endpoint": "tcp://127.0.0.1:0",
                      "replay_endpoint": "tcp://127.0.0.1:0"});
    let args = ["--kv-events-config", &keys.to_string(), "--executor", "process", "--threads", "1"];
    let server = ServerProcess::start(&args);
    let ask = || {
        let body = json!({"prompt": "The quick brown fox jumps over the lazy dog.", "max_tokens": 30,
                          "ignore_eos": true, "temperature": 0});
        let reply = post(server.address, "/v1/completions", &body);
        assert_eq!(reply.status, 200);
        // The last generated token is never an input of the model, so it has no KV entry.
        (reply.json()["usage"]["total_tokens"].as_u64().unwrap() as usize - 1) / BLOCK_TOKENS
    };
    let mut subscriber = KvEventTestSubscriber::new(server.address);
    let blocks = ask();
    subscriber.follow_beyond(None, blocks);
    let (before, next) = (subscriber.hashes(), subscriber.follower.next().unwrap());
    assert!(!before.is_empty());
    send(executor(&server), "-KILL");
    ask(); // This request waits until the executor is restored, and its prompt is computed again.
    subscriber.follow_beyond(Some(next), blocks);
    assert_eq!(subscriber.hashes(), before, "the same request again");
    let events =
        replay(server.address, next).into_iter().map(|(_, payload)| decode(&payload).unwrap());
    let first = events.flat_map(|batch| batch.events).next().unwrap();
    assert_eq!(first, DecodedKvEvent::AllBlocksCleared);
    assert!(source(server.address)["epoch"].as_u64().unwrap() < next);
}

#[test]
fn invalid_publisher_config_fails_startup_by_name() {
    let taken = std::net::TcpListener::bind("127.0.0.1:0").unwrap();
    let endpoint = format!("tcp://{}", taken.local_addr().unwrap());
    for (keys, cause) in [
        (json!({"enable_kv_cache_events": true, "endpoint": endpoint}), "in use"),
        (json!({"enable_kv_cache_events": true, "topic": "{nope}"}), "placeholders"),
        (json!({"enable_kv_cache_events": true, "endpoint": "udp://h:1"}), "tcp://HOST:PORT"),
        (json!({"enable_kv_cache_event": true}), "enable_kv_cache_event"),
        (json!({"hwm": -1}), "hwm -1"),
    ] {
        let args = ["--port", "0", "--kv-events-config", &keys.to_string()];
        let output = run_to_end(&mut super::server_process::command(&args));
        let text = String::from_utf8_lossy(&output.stderr);
        assert!(!output.status.success() && text.contains(cause), "{keys}: {text}");
        assert!(text.contains("--kv-events-config"), "{keys}: {text}");
    }
}
