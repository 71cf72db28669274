//! Checks that every series of `/metrics` changes when the event that it reports happens, except series that
//! cannot change in this test.

use super::executor_process::{executor, send, stream, wait_until};
use super::parallel_ranks::with_experts;
use super::server_process::ServerProcess;
use crate::http_client::{HttpClient, get, post};
use crate::kv_event_replay;
use crate::test_server::{ServerSetup, TestServer};
use engine::AdmissionLimits;
use protocol::RowError;
use scheduler::LifetimeSampleRate;
use serde_json::{Value, json};
use std::collections::{BTreeMap, BTreeSet};
use std::net::SocketAddr;
use std::panic::{AssertUnwindSafe, catch_unwind, resume_unwind};
use std::sync::atomic::{AtomicBool, Ordering};
use std::thread;
use std::time::{Duration, Instant};

/// Timeout of each wait, only exceeded if something hangs: on a busy machine a process may need a minute to
/// start.
const WAIT: Duration = Duration::from_mins(3);
/// Time between two scrapes.
const PAUSE: Duration = Duration::from_millis(2);

/// Series that cannot change in this test, each with the reason.
const UNCHANGED_SERIES: &[(&str, &str)] = &[
    (
        "hadron:admission_rejections_total{reason=\"text_memory\"}",
        "a text that waits half a minute for the memory of others",
    ),
    ("hadron:executor_restarts_total{cause=\"fault\"}", "devices here end with their process"),
    ("hadron:executor_start_failures_total{cause=\"exited\"}", "executors here come up"),
    ("hadron:executor_start_failures_total{cause=\"fault\"}", "executors here come up"),
    ("hadron:executor_start_failures_total{cause=\"mismatch\"}", "executors here come up"),
    ("hadron:executor_start_failures_total{cause=\"system\"}", "executors here come up"),
    ("hadron:executor_start_failures_total{cause=\"timeout\"}", "executors here come up"),
    ("hadron:executor_start_failures_total{cause=\"weights_changed\"}", "executors here come up"),
    ("hadron:grammar_masks_failed_total", "a request that spends ten seconds on its masks"),
    ("hadron:graph_replays_total", "only GPUs record steps"),
    ("hadron:prefix_cache_window_misses_total", "the models have no windows"),
    ("hadron:requests_recovered_total{cause=\"fault\"}", "devices here end with their process"),
    ("hadron:spec_decode_synthetic_acceptance_rate", "drafts are verified"),
    ("hadron:startup_seconds{phase=\"comm\"}", "a single executor joins no other rank"),
    ("hadron:tokens_recomputed_total{cause=\"fault\"}", "devices here end with their process"),
    (
        "hadron:tokens_recomputed_total{cause=\"late\"}",
        "an overdue device here is in this process and has no replacement",
    ),
    ("process_max_fds", "a limit"),
    ("process_start_time_seconds", "a fact"),
    ("vllm:cache_config_info", "always 1; its labels contain the information"),
    ("vllm:engine_sleep_state{sleep_state=\"awake\"}", "the server never sleeps"),
    ("vllm:engine_sleep_state{sleep_state=\"discard_all\"}", "the server never sleeps"),
    ("vllm:engine_sleep_state{sleep_state=\"weights_offloaded\"}", "the server never sleeps"),
    ("vllm:external_prefix_cache_hits_total", "no other cache is asked"),
    ("vllm:external_prefix_cache_queries_total", "no other cache is asked"),
    ("vllm:mm_cache_hits_total", "models read text only"),
    ("vllm:mm_cache_queries_total", "models read text only"),
    ("vllm:prompt_tokens_by_source_total{source=\"external_kv_transfer\"}", "no KV is received"),
    (
        "vllm:prompt_tokens_cached_by_source_total{source=\"external_kv_transfer\"}",
        "no KV is received",
    ),
    ("vllm:request_success_total{finished_reason=\"repetition\"}", "repetition ends nothing"),
    ("vllm:spec_decode_num_accepted_tokens_per_pos_total{position=\"0\"}", "nothing is drafted"),
    ("vllm:spec_decode_num_accepted_tokens_total", "nothing is drafted"),
    ("vllm:spec_decode_num_draft_tokens_total", "nothing is drafted"),
    ("vllm:spec_decode_num_drafts_total", "nothing is drafted"),
];

/// Series that this test does not require to change, because they change only on a busy machine;
/// `grammar/src/tests.rs` and `grammar_worker.rs` test some of them.
const LOAD_DEPENDENT_SERIES: [&str; 2] = [
    "hadron:admission_rejections_total{reason=\"grammars_overloaded\"}",
    "hadron:grammar_masks_late_total",
];

/// Series that never counts as changed: each server of this process computes it from the current time, so
/// that its values differ by microseconds.
const STARTED: &str = "process_start_time_seconds";

/// Values of the series of `/metrics`, by name and labels.
type MetricsPage = BTreeMap<String, f64>;

/// Series of `/metrics` without the labels `model_name` and `engine`; histograms only as count and sum.
fn page(address: SocketAddr) -> MetricsPage {
    let reply = get(address, "/metrics");
    assert_eq!(reply.status, 200);
    let text = String::from_utf8(reply.body).unwrap();
    let samples = text.lines().filter(|line| !line.starts_with('#') && !line.contains("_bucket{"));
    samples.map(sample).collect()
}

fn sample(line: &str) -> (String, f64) {
    let (series, value) = line.rsplit_once(' ').unwrap();
    let (name, labels) = series.split_once('{').unwrap_or((series, "}"));
    let own = |label: &&str| !label.starts_with("engine=") && !label.starts_with("model_name=");
    let labels: Vec<&str> = labels.trim_end_matches('}').split(',').filter(own).collect();
    let of_setup = name == "vllm:cache_config_info" || labels.concat().is_empty();
    let series = if of_setup { name.to_owned() } else { format!("{name}{{{}}}", labels.join(",")) };
    (series, value.parse().unwrap())
}

/// Names of the series whose value in at least one scrape differed from the value on an idle server.
#[derive(Clone)]
struct ChangedSeries {
    idle: MetricsPage,
    series: BTreeSet<String>,
}

impl ChangedSeries {
    fn scrape(&mut self, address: SocketAddr) -> MetricsPage {
        let page = page(address);
        let moved = page.iter().filter(|(series, value)| self.idle.get(*series) != Some(*value));
        let moved = moved.filter(|(series, _)| *series != STARTED);
        self.series.extend(moved.map(|(series, _)| series.clone()));
        page
    }

    /// Scrapes until all of `series` have changed.
    fn wait_for(&mut self, address: SocketAddr, series: &[&str]) {
        let start = Instant::now();
        while let Some(still) = series.iter().find(|series| !self.series.contains(**series)) {
            assert!(start.elapsed() < WAIT, "{still} did not change");
            self.scrape(address);
            thread::sleep(PAUSE);
        }
    }
}

fn body(extra: &Value) -> Value {
    let mut body = json!({"prompt": vec![65; 40], "max_tokens": 20, "ignore_eos": true});
    body.as_object_mut().unwrap().extend(extra.as_object().unwrap().clone());
    body
}

fn complete(address: SocketAddr, extra: &Value) -> u16 {
    post(address, "/v1/completions", &body(extra)).status
}

/// Runs `watch` while `clients` clients call `ask` repeatedly, each time with a different number.
fn under_load(clients: u32, ask: impl Fn(u32) + Sync, watch: impl FnOnce()) {
    let (done, ask) = (AtomicBool::new(false), &ask);
    thread::scope(|scope| {
        for client in 0..clients {
            let (done, mut number) = (&done, client);
            scope.spawn(move || {
                while !done.load(Ordering::Relaxed) {
                    ask(number);
                    number += clients;
                }
            });
        }
        // If `watch` panics, the clients must be stopped before the panic continues.
        let watched = catch_unwind(AssertUnwindSafe(watch));
        done.store(true, Ordering::Relaxed);
        watched.unwrap_or_else(|panic| resume_unwind(panic));
    });
}

/// Returns a prompt of `tokens` tokens that depends on `number`; numbers below 65,536 give distinct prompts.
fn prompt(number: u32, tokens: usize) -> Vec<u32> {
    let digits = [number % 256, number / 256 % 256];
    digits.into_iter().cycle().take(tokens).collect()
}

/// Makes the queue and preemption series change: with few blocks and sequence slots, requests wait, are
/// preempted, and finally become non-preemptible.
fn preempt_requests(moved: &mut ChangedSeries) {
    let setup =
        ServerSetup { blocks: 40, max_num_seqs: 6, max_model_len: 512, ..ServerSetup::default() };
    let server = TestServer::start(&setup);
    let load = |number: u32| {
        let asked =
            json!({"prompt": prompt(number, 3), "max_tokens": 60 + number % 1_000 * 37 % 400});
        assert_eq!(complete(server.address, &asked), 200);
    };
    under_load(12, load, || {
        let gauges = [
            "vllm:num_requests_running",
            "vllm:num_requests_waiting",
            "vllm:num_requests_waiting_by_reason{reason=\"capacity\"}",
            "hadron:queue_age_seconds",
            "vllm:num_preemptions_total",
            "hadron:tokens_recomputed_total{cause=\"preemption\"}",
            "hadron:kv_blocks{state=\"reserved\"}",
        ];
        moved.wait_for(server.address, &gauges);
    });
    server.wait_idle(WAIT);
    moved.scrape(server.address);
}

/// Makes the block lifetime series change: a prompt is a prefix hit twice before other requests evict its
/// blocks.
fn evicted(moved: &mut ChangedSeries) {
    // With this step time, block lifetimes are milliseconds instead of nearly 0.
    let step_time = Duration::from_millis(5);
    let setup = ServerSetup { blocks: 40, max_model_len: 512, step_time, ..measured() };
    let server = TestServer::start(&setup);
    for n in [0, 0, 0, 1, 2, 3, 4, 5, 6, 7, 8, 9, 10, 11] {
        assert_eq!(
            complete(server.address, &json!({"prompt": vec![40 + n; 100], "max_tokens": 2})),
            200
        );
    }
    moved.scrape(server.address);
}

/// Makes the finish reason series change: requests end for each reason, and some requests never start.
fn finish_requests(moved: &mut ChangedSeries) {
    let setup = ServerSetup { step_time: Duration::from_millis(5), ..ServerSetup::default() };
    let server = TestServer::start(&setup);
    let at = server.address;
    let chat = json!({"messages": [{"role": "user", "content": "hello"}], "max_tokens": 4});
    assert_eq!(post(at, "/v1/chat/completions", &chat).status, 200);
    assert_eq!(complete(at, &json!({"n": 2, "nobody_reads_this": 1})), 200);
    assert_eq!(complete(at, &json!({"stop": ["a", "e", "i", "o"], "max_tokens": 2_000})), 200);
    assert_eq!(complete(at, &json!({"prompt": 1.5})), 400);
    let mut client = HttpClient::connect(at);
    let endless = body(&json!({"max_tokens": 4_000, "stream": true})).to_string();
    client.send("POST", "/v1/completions", "", endless.as_bytes());
    assert_eq!(client.read_head().unwrap().status, 200);
    moved.wait_for(at, &["hadron:http_open_streams"]);
    assert!(server.engine_reply(server.client().reset_prefix_cache(true)));
    moved.wait_for(at, &["hadron:tokens_recomputed_total{cause=\"reset\"}"]);
    drop(client);
    server.wait_idle(WAIT);
    moved.scrape(at);
    let nan = ServerSetup { row_error: Some(RowError::NonFiniteLogits), ..ServerSetup::default() };
    let server = TestServer::start(&nan);
    assert_eq!(complete(server.address, &json!({})), 500);
    moved.scrape(server.address);
}

/// Makes the grammar series change: one request uses a grammar, and requests with expensive grammars are
/// rejected after a long time.
fn grammars(moved: &mut ChangedSeries) {
    let server = TestServer::start(&ServerSetup::default());
    let at = server.address;
    let of = |regex: &str| json!({"structured_outputs": {"regex": regex}, "ignore_eos": false});
    assert_eq!(complete(at, &of("[a-z]{5,9}")), 200);
    let hostile = |number: u32| {
        let regex =
            format!("{number}(((((a{{1,100}}){{1,100}}){{1,100}}){{1,100}}){{1,100}}){{1,100}}");
        assert_ne!(complete(at, &of(&regex)), 200);
    };
    under_load(1, hostile, || {
        let series = [
            "vllm:num_requests_waiting_by_reason{reason=\"deferred\"}",
            "hadron:grammar_compile_seconds_count{result=\"error\"}",
        ];
        moved.wait_for(at, &series);
    });
}

/// Makes the rejection series change: requests are rejected because of load or of the server's state.
fn reject_requests(moved: &mut ChangedSeries) {
    let one = AdmissionLimits { requests: 1, prefill_tokens: u64::MAX, bytes: 1 << 20 };
    for (admission, prompt) in [
        (AdmissionLimits { requests: 0, ..one }, json!("a")),
        (AdmissionLimits { prefill_tokens: 8, ..one }, json!(vec![65; 40])),
        (AdmissionLimits { bytes: 8, ..one }, json!("a")),
    ] {
        let server = TestServer::start(&ServerSetup { admission, ..ServerSetup::default() });
        assert_eq!(complete(server.address, &json!({"prompt": prompt})), 429);
        moved.scrape(server.address);
    }
    let mut server = TestServer::listen(&ServerSetup::default());
    assert_eq!(complete(server.address, &json!({})), 503);
    server.bring_up(&ServerSetup::default());
    server.app.health.set_draining();
    assert_eq!(complete(server.address, &json!({})), 503);
    moved.scrape(server.address);
    let server = TestServer::start(&ServerSetup { fails_at: Some(1), ..ServerSetup::default() });
    // The device fails in this request, and no replica is left.
    assert_eq!(complete(server.address, &json!({})), 503);
    assert_eq!(complete(server.address, &json!({})), 503);
    moved.scrape(server.address);
}

/// Makes the KV-event publisher series change: clients keep the publisher busy with requests for full
/// replays.
fn publisher(moved: &mut ChangedSeries) {
    let keys = json!({"max_queue_size": 1, "buffer_steps": 0});
    let kv_events = Some(kv_event_replay::config(&keys));
    let server =
        TestServer::start(&ServerSetup { blocks: 4_096, kv_events, ..ServerSetup::default() });
    let at = server.address;
    let sources = get(at, "/kv_event_sources").json();
    let endpoint = sources["0"]["replay_endpoint"].as_str().unwrap();
    // Two of eight clients request replays; the completion requests of the other six cause KV events.
    let load = |number: u32| {
        if number % 8 < 2 {
            assert_eq!(kv_event_replay::replay(endpoint, 1, WAIT.as_millis() as i32).len(), 1);
        } else {
            let asked = json!({"prompt": prompt(number, 200), "max_tokens": 100});
            assert_eq!(complete(at, &asked), 200);
        }
    };
    under_load(8, load, || {
        let overflow = ["hadron:kv_events_dropped_total", "hadron:kv_events_queue_depth"];
        let again = ["hadron:kv_events_snapshots_total", "hadron:kv_events_replayed_total"];
        moved.wait_for(at, &[overflow, again].concat());
    });
    server.wait_idle(WAIT);
    moved.scrape(at);
}

/// Makes the step timeout series change: a device in this process sends heartbeats but no outputs.
fn stall_device(moved: &mut ChangedSeries) {
    let step_deadline = Some(Duration::from_millis(300));
    let server = TestServer::start(&ServerSetup {
        hangs_at: Some(3),
        step_deadline,
        ..ServerSetup::default()
    });
    let at = server.address;
    let mut hung = HttpClient::connect(at);
    hung.send("POST", "/v1/completions", "", body(&json!({})).to_string().as_bytes());
    let series = [
        "hadron:late_rank_total{rank=\"0\"}",
        "hadron:executor_restarts_total{cause=\"late\"}",
        "hadron:requests_recovered_total{cause=\"late\"}",
        "hadron:executor_up{rank=\"0\"}",
    ];
    moved.wait_for(at, &series);
}

/// Makes the executor failure series change: one executor process exits, and another one hangs.
fn fail_executors(moved: &mut ChangedSeries) {
    let process = ServerProcess::start(&["--executor", "process", "--threads", "1"]);
    let at = process.address;
    for (signal, cause) in [("-KILL", "exited"), ("-STOP", "silent")] {
        // The output is long enough that the stream is incomplete when the signal arrives.
        let running = stream(at, 1_900);
        send(executor(&process), signal);
        let series = ["executor_restarts", "requests_recovered", "tokens_recomputed"]
            .map(|name| format!("hadron:{name}_total{{cause=\"{cause}\"}}"));
        moved.wait_for(at, &series.each_ref().map(String::as_str));
        drop(running);
    }
    // The `process_*` series of the separate server process always differ from those of the idle server in
    // this process, so they do not count as changed.
    moved.series.retain(|series| !series.starts_with("process_"));
}

/// Checks the series of lockstep groups and of MoE models.
#[test]
fn every_group_and_expert_series_changes() {
    let model = with_experts();
    let folder = model.path().join("model");
    let groups = ["-tp", "2", "-dp", "2", "--enable-expert-parallel", "--threads", "1"];
    let sizes = ["--max-model-len", "256", "--num-gpu-blocks-override", "64"];
    let process =
        ServerProcess::start(&[&[folder.to_str().unwrap()], &groups[..], &sizes].concat());
    let of_groups = || {
        let mut page = page(process.address);
        page.retain(|series, _| {
            series.starts_with("hadron:collective_") || series.starts_with("hadron:expert_")
        });
        page
    };
    let idle = of_groups();
    for replica in [0, 1] {
        assert_eq!(complete(process.address, &json!({"data_parallel_rank": replica})), 200);
    }
    let pairs = [("all_gather", "tp"), ("all_reduce", "tp"), ("exchange_counts", "dp")];
    for (op, group) in pairs.into_iter().chain([("all_to_all", "dp")]) {
        let series =
            |part| format!("hadron:collective_seconds_{part}{{group=\"{group}\",op=\"{op}\"}}");
        assert_eq!(idle.get(&series("count")), Some(&0.0), "{idle:?}");
        // The other replica may report its last step a moment later, so the test waits.
        wait_until(WAIT, "more time of steps than of their collectives", || {
            let page = page(process.address);
            let device = page["hadron:step_seconds_sum{phase=\"device\"}"];
            let (steps, time) = (page[&series("count")], page[&series("sum")]);
            steps >= 20.0 && time > 0.0 && time < device
        });
    }
    let moved = of_groups();
    let still: Vec<&String> =
        idle.keys().filter(|series| idle[*series] == moved[*series]).collect();
    // The server uses all-to-all instead of all-gather and reduce-scatter, because each token needs only 2 of
    // 8 experts, which are on four ranks.
    let gathered = |series: &&String| {
        ["op=\"all_gather_rows\"", "op=\"reduce_scatter\""].iter().any(|op| series.contains(op))
    };
    assert!(still.iter().all(gathered), "{still:?} of {idle:?}");
    assert_eq!((still.len(), idle.len()), (4, 20), "{idle:?}");
}

/// The default setup with optional series enabled.
fn measured() -> ServerSetup {
    ServerSetup { block_lifetimes: LifetimeSampleRate::new(1.0), ..ServerSetup::default() }
}

#[test]
fn every_other_series_changes() {
    let server = TestServer::start(&measured());
    let mut moved = ChangedSeries { idle: page(server.address), series: BTreeSet::new() };
    drop(server);
    let mut apart = moved.clone();
    thread::scope(|scope| {
        // `fail_executors` runs in parallel with the other parts, because it waits for a heartbeat timeout of
        // five seconds.
        scope.spawn(|| fail_executors(&mut apart));
        for part in [
            stall_device,
            preempt_requests,
            evicted,
            finish_requests,
            grammars,
            reject_requests,
            publisher,
        ] {
            part(&mut moved);
        }
    });
    let idle = moved.idle;
    let mut moved = &moved.series | &apart.series;
    moved.extend(LOAD_DEPENDENT_SERIES.map(str::to_owned));
    let still: Vec<&str> =
        idle.keys().map(String::as_str).filter(|series| !moved.contains(*series)).collect();
    let known: Vec<&str> = UNCHANGED_SERIES.iter().map(|(series, _)| *series).collect();
    assert_eq!(still, known);
    assert!(idle.len() > 100, "{} series", idle.len());
}
