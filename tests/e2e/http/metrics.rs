//! Values of `/metrics`, `/load` and `/v1/loads` after known requests.

use crate::deadlines::wait_until;
use crate::http_client::{HttpClient, get, post};
use crate::test_server::{BLOCK_TOKENS, ServerSetup, TestServer};
use engine::AdmissionLimits;
use scheduler::LifetimeSampleRate;
use serde_json::{Value, json};
use server::{ApiKeys, ServerOptions};
use std::collections::BTreeMap;
use std::net::SocketAddr;
use std::sync::atomic::{AtomicBool, Ordering};
use std::time::{Duration, Instant};

/// Values of the samples of `/metrics`, by series name and labels.
type MetricSamples = BTreeMap<String, f64>;

/// Every sample of `/metrics` by name and labels; the labels `model_name` and `engine` are removed.
fn scrape(address: SocketAddr) -> MetricSamples {
    let reply = get(address, "/metrics");
    assert_eq!(reply.status, 200);
    assert_eq!(reply.header("content-type"), Some("text/plain; version=0.0.4; charset=utf-8"));
    samples(std::str::from_utf8(&reply.body).unwrap())
}

fn samples(page: &str) -> MetricSamples {
    let sample = |line: &str| {
        let (series, value) = line.rsplit_once(' ').unwrap();
        let series = series.replace("engine=\"0\",", "").replace(",model_name=\"tiny\"", "");
        let series = series.replace("engine=\"0\"", "").replace("model_name=\"tiny\"", "");
        (series.replace("{}", "").replace("{,", "{"), value.parse().unwrap())
    };
    page.lines().filter(|line| !line.starts_with('#')).map(sample).collect()
}

fn complete(address: SocketAddr, body: &Value) {
    let reply = post(address, "/v1/completions", body);
    assert_eq!(reply.status, 200, "{}", String::from_utf8_lossy(&reply.body));
}

#[test]
fn ten_requests_are_counted_in_metrics() {
    let server = TestServer::start(&ServerSetup::default());
    let before = scrape(server.address);
    assert_eq!(before["vllm:num_requests_running"], 0.0);
    assert_eq!(before["hadron:http_requests_total{code=\"200\",route=\"/v1/completions\"}"], 0.0);
    let prompt = "once upon a time there was a king who liked long prompts, and a queen";
    let asked = json!({"prompt": prompt, "return_token_strs": false});
    let prompt_tokens = post(server.address, "/tokenize", &asked).json()["count"].as_f64().unwrap();
    let cacheable =
        ((prompt_tokens - 1.0) / f64::from(BLOCK_TOKENS)).floor() * f64::from(BLOCK_TOKENS);
    assert!(cacheable > 0.0, "{prompt_tokens} tokens fill no block");
    for i in 0..10 {
        let body = json!({"prompt": prompt, "max_tokens": 8, "ignore_eos": true, "n": 1 + i % 2,
            "stream": i % 3 == 0, "nobody_reads": 1, "this": 2});
        complete(server.address, &body);
    }
    server.wait_idle(Duration::from_secs(2));
    let after = scrape(server.address);
    let new = |series: &str| after[series] - before[series];
    assert_eq!(new("vllm:request_success_total{finished_reason=\"length\"}"), 15.0);
    assert_eq!(new("vllm:generation_tokens_total"), 120.0);
    assert_eq!(new("vllm:prompt_tokens_total"), 15.0 * prompt_tokens);
    let hits = new("vllm:prompt_tokens_cached_total");
    assert!(hits >= 9.0 * cacheable, "{hits} found in the cache");
    assert_eq!(new("vllm:prompt_tokens_by_source_total{source=\"local_cache_hit\"}"), hits);
    for histogram in [
        "vllm:time_to_first_token_seconds",
        "vllm:e2e_request_latency_seconds",
        "vllm:request_queue_time_seconds",
        "vllm:request_prefill_time_seconds",
        "vllm:request_decode_time_seconds",
        "vllm:request_inference_time_seconds",
        "vllm:request_time_per_output_token_seconds",
        "vllm:request_prompt_tokens",
        "vllm:request_generation_tokens",
        "vllm:request_params_max_tokens",
        "vllm:request_num_preemptions",
        "vllm:request_prefill_kv_computed_tokens",
    ] {
        assert_eq!(new(&format!("{histogram}_count")), 15.0, "{histogram}");
    }
    assert_eq!(new("vllm:inter_token_latency_seconds_count"), 105.0);
    assert_eq!(new("vllm:request_params_n_count"), 10.0);
    assert_eq!(new("vllm:request_params_n_sum"), 15.0);
    assert_eq!(new("vllm:request_max_num_generation_tokens_count"), 10.0);
    let steps = new("vllm:iteration_tokens_total_count");
    assert!(steps >= 80.0, "{steps} steps");
    for phase in ["plan", "commit", "apply", "send", "wait", "device"] {
        let count = format!("hadron:step_seconds_count{{phase=\"{phase}\"}}");
        assert_eq!(new(&count), steps, "{phase}");
    }
    assert_eq!(new("hadron:eager_steps_total"), steps);
    assert_eq!(new("hadron:http_requests_total{code=\"200\",route=\"/v1/completions\"}"), 10.0);
    assert_eq!(new("hadron:ignored_fields_total"), 20.0);
    assert_eq!(new("hadron:tokenize_seconds_count{result=\"ok\"}"), 10.0);
    assert_eq!(after["hadron:http_open_streams"], 0.0);
    assert_eq!(after["vllm:kv_cache_usage_perc"], 0.0);
    assert!(after["hadron:kv_blocks{state=\"cached\"}"] > 0.0);
    assert_eq!(after["hadron:executor_up{rank=\"0\"}"], 1.0);
    assert!(after["hadron:heartbeat_age_seconds{rank=\"0\"}"] < 2.0);
    assert!(after["process_resident_memory_bytes"] > 1e6);
    check_histograms(&after);
}

/// Checks that the bucket counts of each histogram are non-decreasing and that the last one equals the
/// histogram's count.
fn check_histograms(samples: &MetricSamples) {
    let mut last: BTreeMap<String, Vec<(f64, f64)>> = BTreeMap::new();
    for (series, &count) in samples.iter().filter(|(series, _)| series.contains("_bucket{")) {
        let (head, rest) = series.split_once("le=\"").unwrap();
        let bound = rest.trim_end_matches("\"}");
        let bound = if bound == "+Inf" { f64::INFINITY } else { bound.parse().unwrap() };
        last.entry(head.to_owned()).or_default().push((bound, count));
    }
    assert!(last.len() > 20, "{} histograms", last.len());
    for (head, mut buckets) in last {
        buckets.sort_by(|a, b| a.0.total_cmp(&b.0));
        assert!(buckets.is_sorted_by(|a, b| a.1 <= b.1), "{head}: {buckets:?}");
        let count = head.replace("_bucket{", "_count{").trim_end_matches(',').to_owned() + "}";
        let count = samples[&count.replace("{}", "")];
        assert_eq!(buckets.last(), Some(&(f64::INFINITY, count)), "{head}");
    }
}

#[test]
fn block_lifetimes_are_exported_when_enabled() {
    let blocks = ServerSetup { blocks: 40, max_model_len: 512, ..ServerSetup::default() };
    let series = ["lifetime", "idle_before_evict", "reuse_gap"];
    let of = |page: &MetricSamples, part: &str| {
        series.map(|name| page[&format!("vllm:kv_block_{name}_seconds_{part}")])
    };
    let server = TestServer::start(&ServerSetup {
        block_lifetimes: LifetimeSampleRate::new(1.0),
        ..blocks.clone()
    });
    let at = server.address;
    assert_eq!(of(&scrape(at), "count"), [0.0; 3]);
    // A prompt has seven KV blocks, of which six are full. The six full blocks of the first prompt are prefix
    // hits of two later requests.
    const FULL: f64 = 6.0;
    let prompts = [0, 0, 0, 1, 2, 3, 4, 5, 6, 7, 8, 9, 10, 11];
    for n in prompts {
        complete(at, &json!({"prompt": vec![40 + n; 100], "max_tokens": 2, "ignore_eos": true}));
    }
    server.wait_idle(Duration::from_mins(1));
    let page = scrape(at);
    let evicted = 12.0 * FULL - page["hadron:kv_blocks{state=\"cached\"}"];
    assert!(evicted >= 12.0 * FULL - 40.0);
    assert_eq!(of(&page, "count"), [evicted, evicted, FULL]);
    let [lifetime, idle, gaps] = of(&page, "sum");
    const ROUNDED: f64 = 1e-6;
    assert!(lifetime > 0.0 && idle + gaps <= lifetime + ROUNDED, "{lifetime} {idle} {gaps}");
    assert_eq!(page["vllm:kv_block_lifetime_seconds_bucket{le=\"1800\"}"], evicted);
    check_histograms(&page);

    let server = TestServer::start(&blocks);
    assert!(!scrape(server.address).keys().any(|series| series.contains("kv_block_")));
}

#[test]
fn metrics_support_head_and_are_empty_at_startup() {
    let mut server = TestServer::listen(&ServerSetup::default());
    assert_eq!(get(server.address, "/metrics").status, 503);
    assert_eq!(get(server.address, "/v1/loads").status, 503);
    assert_eq!(post(server.address, "/v1/completions", &json!({"prompt": "a"})).status, 503);
    assert_eq!(get(server.address, "/readyz").status, 503); // A failed probe is not a rejection.
    server.bring_up(&ServerSetup::default());
    let page = scrape(server.address);
    assert_eq!(page["hadron:admission_rejections_total{reason=\"starting\"}"], 3.0);
    let mut client = HttpClient::connect(server.address);
    client.send("HEAD", "/metrics", "", b"");
    let head = client.read_head().unwrap();
    assert_eq!(head.status, 200);
    assert!(head.header("content-type").unwrap().starts_with("text/plain; version=0.0.4"));
    // The reply to HEAD has no body, so the connection can be used for a further request.
    client.send("GET", "/load", "", b"");
    assert_eq!(client.read().unwrap().json(), json!({"server_load": 0}));
}

#[test]
fn rejections_and_unknown_paths_use_bounded_labels() {
    let admission = AdmissionLimits { requests: 1, prefill_tokens: u64::MAX, bytes: 1 << 20 };
    let step_time = Duration::from_millis(20);
    let server = TestServer::start(&ServerSetup { step_time, admission, ..ServerSetup::default() });
    let endless = json!({"prompt": "a", "max_tokens": 500, "ignore_eos": true, "stream": true});
    let mut client = HttpClient::connect(server.address);
    client.send("POST", "/v1/completions", "", endless.to_string().as_bytes());
    assert_eq!(client.read_head().unwrap().status, 200);
    assert_eq!(post(server.address, "/v1/completions", &json!({"prompt": "b"})).status, 429);
    drop(client);
    server.wait_idle(Duration::from_secs(5));
    for path in ["/a", "/b?x=1", "/metrics/x"] {
        assert_eq!(get(server.address, path).status, 404);
    }
    assert_eq!(post(server.address, "/v1/completions", &json!({"prompt": 1.5})).status, 400);
    let mut client = HttpClient::connect(server.address);
    client.send_raw(b"GET / HTTP/1.1\r\nno colon\r\n\r\n").unwrap();
    assert_eq!(client.read().unwrap().status, 400, "the HTTP library rejects it");
    let mut unknown = json!({"prompt": "a", "max_tokens": 1});
    for number in 0..12 {
        unknown[format!("unknown_{number}")] = json!(number);
    }
    complete(server.address, &unknown);
    let page = scrape(server.address);
    assert_eq!(page["hadron:ignored_fields_total"], 12.0, "the header names ten of them");
    assert_eq!(page["hadron:http_requests_total{code=\"404\",route=\"unknown\"}"], 3.0);
    assert_eq!(page["hadron:http_requests_total{code=\"400\",route=\"unknown\"}"], 1.0);
    assert_eq!(page["hadron:http_requests_total{code=\"400\",route=\"/v1/completions\"}"], 1.0);
    let rejected = "admission_rejections_total{reason=\"max_num_queued_reqs\"}";
    assert_eq!(page[&format!("hadron:{rejected}")], 1.0);
    // vLLM's rejection metric has no `engine` label, and `model_name` comes before the reason.
    assert_eq!(page[&format!("vllm:{rejected}").replace("{,", "{")], 1.0);
    assert_eq!(page["hadron:tokenize_seconds_count{result=\"error\"}"], 1.0);
}

#[test]
fn loads_route_reports_running_requests() {
    let setup = ServerSetup { step_time: Duration::from_millis(20), ..ServerSetup::default() };
    let server = TestServer::start(&setup);
    let body = json!({"prompt": "hello", "max_tokens": 500, "ignore_eos": true, "stream": true});
    let idle = get(server.address, "/v1/loads").json();
    assert_eq!(
        (&idle["dp_rank_count"], &idle["loads"][0]["num_total_reqs"]),
        (&json!(1), &json!(0))
    );
    assert_eq!((&idle["model"], &idle["devices"]), (&json!("tiny"), &json!(["hash model"])));
    assert!(idle["uptime_s"].as_u64().is_some(), "{idle}");
    let mut client = HttpClient::connect(server.address);
    client.send("POST", "/v1/completions", "", body.to_string().as_bytes());
    assert_eq!(client.read_head().unwrap().status, 200);
    let mut loads = Value::Null;
    wait_until(Duration::from_mins(1), "a throughput", || {
        loads = get(server.address, "/v1/loads?include=steps").json();
        loads["loads"][0]["gen_throughput"].as_f64() > Some(0.0)
    });
    let load = &loads["loads"][0];
    assert_eq!(load["ready"], true);
    assert_eq!((&loads["dp_rank_count"], &load["dp_rank"]), (&json!(1), &json!(0)));
    assert_eq!(load["num_running_reqs"], 1);
    assert_eq!(load["num_total_reqs"], 1);
    assert_eq!(load["max_total_num_tokens"], setup.blocks * BLOCK_TOKENS);
    assert_eq!(load["max_running_requests"], setup.max_num_seqs);
    assert!(load["num_used_tokens"].as_u64().unwrap() >= u64::from(BLOCK_TOKENS), "{load}");
    let throughput = load["gen_throughput"].as_f64().unwrap();
    assert!((1.0..=60.0).contains(&throughput), "{throughput} tokens/s at 50 steps/s");
    let steps = loads["steps"].as_array().unwrap();
    let step = steps.last().unwrap();
    assert_eq!((&step["decode_rows"], &step["running"]), (&json!(1), &json!(1)));
    // The device may start the step while the batch is still being handed over (`send_ns`), so the step's 20
    // ms are split between `send_ns` and `wait_ns`.
    let [send_ns, wait_ns] = ["send_ns", "wait_ns"].map(|part| step[part].as_u64().unwrap());
    assert!(send_ns + wait_ns >= 19_000_000, "{step}");
    let alias = get(server.address, "/loads?dp_rank=0&include=core").json();
    assert_eq!(alias["loads"][0]["num_running_reqs"], 1);
    assert_eq!(alias["steps"], Value::Null);
    for (query, param) in [
        ("dp_rank=1", "dp_rank"),
        ("dp_rank=x", "dp_rank"),
        ("include=lora", "include"),
        ("x=1", "x"),
    ] {
        let reply = get(server.address, &format!("/v1/loads?{query}"));
        assert_eq!(
            (reply.status, &reply.json()["error"]["param"]),
            (400, &json!(param)),
            "{query}"
        );
    }
    let page = scrape(server.address);
    assert_eq!(page["hadron:http_open_streams"], 1.0);
    drop(client);
    server.wait_idle(Duration::from_secs(5));
    assert_eq!(scrape(server.address)["hadron:http_open_streams"], 0.0);
    let aborted = "vllm:request_success_total{finished_reason=\"abort\"}";
    assert_eq!(scrape(server.address)[aborted], 1.0);
}

#[test]
fn queue_age_grows_while_requests_wait() {
    let step_time = Duration::from_millis(5);
    let server =
        TestServer::start(&ServerSetup { max_num_seqs: 1, step_time, ..ServerSetup::default() });
    let at = server.address;
    let age = || scrape(at)["hadron:queue_age_seconds"];
    let until = |what: &str, reached: &dyn Fn(f64) -> bool| {
        let begun = Instant::now();
        while !reached(age()) {
            assert!(begun.elapsed() < Duration::from_secs(20), "not {what}: {}", age());
            std::thread::sleep(Duration::from_millis(5));
        }
    };
    assert_eq!(age(), 0.0);
    let long = json!({"prompt": "a", "max_tokens": 4_000, "ignore_eos": true, "stream": true});
    let [mut first, mut second] = [(); 2].map(|()| HttpClient::connect(at));
    first.send("POST", "/v1/completions", "", long.to_string().as_bytes());
    assert_eq!(first.read_head().unwrap().status, 200);
    assert_eq!(age(), 0.0, "the only request has a sequence slot");
    second.send("POST", "/v1/completions", "", br#"{"prompt": "b", "max_tokens": 1}"#);
    until("a while", &|age| age > 0.3);
    drop(first);
    assert_eq!(second.read().unwrap().status, 200);
    until("over", &|age| age == 0.0);
}

#[test]
fn debug_routes_list_steps_and_cached_blocks() {
    let options =
        ServerOptions { api_keys: ApiKeys::new([], ["root"]), ..ServerOptions::default() };
    let server = TestServer::start(&ServerSetup { options, ..ServerSetup::default() });
    let sample = |path: &str, headers: &str| {
        let mut client = HttpClient::connect(server.address);
        client.send("GET", path, headers, b"");
        client.read().unwrap()
    };
    let prompt: Vec<u32> = (0..100).map(|i| 40 + i % 50).collect();
    complete(server.address, &json!({"prompt": prompt, "max_tokens": 10, "ignore_eos": true}));
    server.wait_idle(Duration::from_secs(2));
    for path in ["/debug/steps", "/debug/kv"] {
        assert_eq!(sample(path, "").status, 404, "{path} is for operators");
    }
    let key = "Authorization: Bearer root\r\n";
    let steps = sample("/debug/steps", key).json();
    let steps = steps["steps"].as_array().unwrap();
    let sum = |field: &str| steps.iter().map(|s| s[field].as_u64().unwrap()).sum::<u64>();
    assert_eq!(sum("tokens"), 109, "the prompt, and each output token but the last");
    assert_eq!((sum("prefill_rows"), sum("decode_rows")), (1, 9));
    assert_eq!(sum("prompt_pairs"), 100 * 100, "rows of one token have none");
    assert!(steps.iter().all(|step| step["allowed_ms"].as_u64() >= Some(5_000)));
    let kv = sample("/debug/kv", key).json();
    let replica = &kv["replicas"][0];
    let resident = replica["resident"].as_array().unwrap();
    assert_eq!((&replica["dp_rank"], &replica["block_size"]), (&json!(0), &json!(BLOCK_TOKENS)));
    assert_eq!(resident.len() as u64, replica["blocks"]["cached"].as_u64().unwrap());
    assert!(resident.len() >= 6 && resident.iter().all(|hash| hash.as_str().unwrap().len() == 16));
    assert!(resident.is_sorted_by_key(|hash| hash.as_str().unwrap()), "ascending");
    assert_eq!(replica["prefix_hits_by_group"], json!([]), "the model has one KV group");
}

/// Reads `/metrics` repeatedly until `done` and checks that counters do not decrease; returns the number of
/// pages read.
fn watch(address: SocketAddr, done: &AtomicBool) -> usize {
    let (mut client, mut last, mut pages) = (HttpClient::connect(address), MetricSamples::new(), 0);
    while !done.load(Ordering::Relaxed) || pages == 0 {
        client.send("GET", "/metrics", "", b"");
        let reply = client.read().unwrap();
        assert_eq!(reply.status, 200);
        assert!(reply.body.ends_with(b"\n"));
        let now = samples(std::str::from_utf8(&reply.body).unwrap());
        let grows = |series: &str| {
            series.contains("_total") || series.contains("_bucket") || series.contains("_count")
        };
        for (series, was) in last.iter().filter(|(series, _)| grows(series)) {
            let is = now.get(series).unwrap_or_else(|| panic!("{series} is gone"));
            assert!(is >= was, "{series}: {was} then {is}");
        }
        check_histograms(&now);
        (last, pages) = (now, pages + 1);
        std::thread::sleep(Duration::from_millis(10));
    }
    pages
}

#[test]
fn scrapes_under_load_are_complete_and_monotonic() {
    let server = TestServer::start(&ServerSetup { blocks: 4_096, ..ServerSetup::default() });
    let (address, done) = (server.address, AtomicBool::new(false));
    std::thread::scope(|scope| {
        let watchers: Vec<_> = (0..2).map(|_| scope.spawn(|| watch(address, &done))).collect();
        let load: Vec<_> = (0..8)
            .map(|_| {
                scope.spawn(move || {
                    for n in 1..6 {
                        complete(address, &json!({"prompt": "abc", "max_tokens": 100, "n": n}));
                    }
                })
            })
            .collect();
        for thread in load {
            thread.join().unwrap();
        }
        done.store(true, Ordering::Relaxed);
        let pages: usize = watchers.into_iter().map(|w| w.join().unwrap()).sum();
        assert!(pages >= 2, "{pages} pages");
    });
    server.wait_idle(Duration::from_secs(5));
    let page = scrape(address);
    let ended: f64 = ["stop", "length", "abort", "error"]
        .iter()
        .map(|r| page[&format!("vllm:request_success_total{{finished_reason=\"{r}\"}}")])
        .sum();
    assert_eq!(ended, 8.0 * 15.0);
    assert_eq!(page["vllm:e2e_request_latency_seconds_count"], 8.0 * 15.0);
}
