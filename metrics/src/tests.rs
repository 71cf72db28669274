//! Tests of the values on the metrics page after events were recorded.

use super::*;
use protocol::{CollectiveTiming, ExpertTokenCount, Rank, Replica, RequestId, RowError};
use scheduler::{
    AbortCause, BlockStats, ExecutorFailure, ExecutorFailureCounts, FinishReason, FirstAdmission,
    RecomputedTokenCounts, RequestError, StopReason, TokenEvent,
};
use std::time::{Duration, Instant};

fn metrics() -> Arc<ServerMetrics> {
    ServerMetrics::new(&MetricsConfig::new("m", 4_096)).unwrap()
}

/// Returns the value of a sample on the page. `series`: the metric name with its labels in page order.
fn value(page: &str, series: &str) -> f64 {
    let line =
        page.lines().find(|line| line.strip_prefix(series).is_some_and(|l| l.starts_with(' ')));
    let line = line.unwrap_or_else(|| panic!("no {series} in\n{page}"));
    line.rsplit(' ').next().unwrap().parse().unwrap()
}

fn count(page: &str, histogram: &str) -> (f64, f64) {
    let of = |part| value(page, &format!("{histogram}_{part}{{engine=\"0\",model_name=\"m\"}}"));
    (of("count"), of("sum"))
}

fn event(tokens: usize, finish: Option<FinishReason>) -> TokenEvent {
    let end = FinishReason::Length;
    let tokens: Vec<u32> = vec![7; tokens];
    TokenEvent {
        tokens: tokens.into(),
        finish_reason: finish,
        ..TokenEvent::finished(RequestId(1), end)
    }
}

#[test]
fn all_series_exist_before_the_first_request() {
    let metrics = metrics();
    let page = metrics.render(&[]).unwrap();
    for series in [
        r#"vllm:num_requests_running{engine="0",model_name="m"}"#,
        r#"vllm:request_success_total{engine="0",finished_reason="repetition",model_name="m"}"#,
        r#"vllm:e2e_request_latency_seconds_bucket{engine="0",model_name="m",le="+Inf"}"#,
        r#"vllm:inter_token_latency_seconds_bucket{engine="0",model_name="m",le="0.0005"}"#,
        r#"vllm:request_prompt_tokens_bucket{engine="0",model_name="m",le="2000"}"#,
        r#"vllm:admission_rejections_total{model_name="m",reason="max_num_queued_reqs"}"#,
        r#"vllm:lora_requests_info{max_lora="0",running_lora_adapters="",waiting_lora_adapters=""}"#,
        r#"hadron:step_seconds_bucket{engine="0",model_name="m",phase="device",le="0.000001"}"#,
        r#"hadron:kv_events_batches_total{engine="0",model_name="m"}"#,
        "process_resident_memory_bytes",
    ] {
        value(&page, series);
    }
    assert!(!page.contains("_created"));
    assert!(page.contains("# TYPE vllm:prompt_tokens_total counter"));
    assert!(page.contains("# TYPE vllm:iteration_tokens_total histogram"));
}

/// Returns the page after a request with two choices, of which the first one was admitted.
fn page_of_two_choices() -> String {
    let metrics = metrics();
    let arrived = Instant::now().checked_sub(Duration::from_secs(1)).unwrap();
    let mut choices: Vec<_> = RequestTimes::of_choices(2, arrived, 10, 64).collect();
    let run = Some(FirstAdmission { replica: Replica(0), cached_tokens: 4, queued_ms: 0 });
    let round = metrics.requests.delivery_round();
    round.event(&mut choices[0], &TokenEvent { first_admission: run, ..event(1, None) });
    round.event(&mut choices[1], &event(3, Some(FinishReason::Stop(StopReason::Eos(2)))));
    drop(round);
    let round = metrics.requests.delivery_round();
    let last = TokenEvent { preemptions: 2, ..event(2, Some(FinishReason::Length)) };
    round.event(&mut choices[0], &last);
    drop(round);
    metrics.render(&[]).unwrap()
}

#[test]
fn request_phases_are_each_observed_once() {
    let page = page_of_two_choices();
    let (requests, latency) = count(&page, "vllm:e2e_request_latency_seconds");
    assert_eq!(requests, 2.0);
    assert!((2.0..4.0).contains(&latency), "{latency}");
    assert_eq!(count(&page, "vllm:time_to_first_token_seconds").0, 2.0);
    assert_eq!(count(&page, "vllm:inter_token_latency_seconds").0, 1.0);
    assert_eq!(count(&page, "vllm:request_generation_tokens"), (2.0, 6.0));
    assert_eq!(count(&page, "vllm:request_prompt_tokens"), (2.0, 20.0));
    assert_eq!(count(&page, "vllm:request_params_max_tokens"), (2.0, 128.0));
    assert_eq!(count(&page, "vllm:request_params_n"), (1.0, 2.0));
    assert_eq!(count(&page, "vllm:request_max_num_generation_tokens"), (1.0, 3.0));
    assert_eq!(count(&page, "vllm:request_num_preemptions"), (2.0, 2.0));
    // Only the request that was scheduled (with an admission event) has queue, prefill and decode times.
    for phase in ["queue", "prefill", "decode", "inference"] {
        assert_eq!(count(&page, &format!("vllm:request_{phase}_time_seconds")).0, 1.0);
    }
    assert_eq!(count(&page, "vllm:request_prefill_kv_computed_tokens"), (1.0, 6.0));
    assert_eq!(count(&page, "vllm:request_time_per_output_token_seconds").0, 1.0);
}

#[test]
fn rejections_are_not_counted_as_finished() {
    let metrics = metrics();
    let nan = FinishReason::Error(RequestError::RowFailed(RowError::NonFiniteLogits));
    let ends = [
        FinishReason::Abort(AbortCause::StopString),
        FinishReason::Abort(AbortCause::ClientDisconnected),
        nan,
        FinishReason::Rejected(Box::new(scheduler::RejectReason::EmptyPrompt)),
    ];
    for finish in ends {
        let times = RequestTimes::of_choices(1, Instant::now(), 1, 1).next().unwrap();
        metrics.requests.ended(&times, &finish, Instant::now());
    }
    let page = metrics.render(&[]).unwrap();
    let of = |reason: &str| {
        let labels = format!(r#"{{engine="0",finished_reason="{reason}",model_name="m"}}"#);
        value(&page, &format!("vllm:request_success_total{labels}"))
    };
    assert_eq!(["stop", "length", "abort", "error"].map(of), [1.0, 0.0, 1.0, 1.0]);
    assert_eq!(value(&page, r#"vllm:corrupted_requests_total{engine="0",model_name="m"}"#), 1.0);
}

fn stats(in_use: u32, generated: u64) -> SchedulerStats {
    let blocks = BlockStats { pool: 10, free: 10 - in_use, in_use, ..BlockStats::default() };
    SchedulerStats {
        blocks,
        running: in_use,
        generated_tokens_total: generated,
        ..SchedulerStats::default()
    }
}

#[test]
fn series_are_per_replica_or_aggregated() {
    let config = MetricsConfig { replicas: 2, ..MetricsConfig::new("m", 64) };
    let per_replica = ServerMetrics::new(&config).unwrap();
    let page = per_replica.render(&[stats(2, 5), stats(4, 7)]).unwrap();
    let usage = |page: &str, engine: u32| {
        value(page, &format!(r#"vllm:kv_cache_usage_perc{{engine="{engine}",model_name="m"}}"#))
    };
    assert_eq!((usage(&page, 0), usage(&page, 1)), (0.2, 0.4));
    let aggregated = ServerMetrics::new(&MetricsConfig { aggregate: true, ..config }).unwrap();
    let page = aggregated.render(&[stats(2, 5), stats(4, 7)]).unwrap();
    assert!((usage(&page, 0) - 0.3).abs() < 1e-9 && !page.contains(r#"engine="1""#));
    let tokens = r#"vllm:generation_tokens_total{engine="0",model_name="m"}"#;
    assert_eq!(value(&page, tokens), 12.0);
    assert_eq!(value(&aggregated.render(&[stats(1, 5), stats(1, 9)]).unwrap(), tokens), 14.0);
    assert_eq!(value(&page, r#"vllm:num_requests_running{engine="0",model_name="m"}"#), 6.0);
}

#[test]
fn failure_causes_and_sequences_are_per_replica() {
    let config = MetricsConfig { replicas: 2, ..MetricsConfig::new("m", 64) };
    let recovered_requests = ExecutorFailureCounts {
        exited: 1,
        heartbeat_timeout: 2,
        step_timeout: 3,
        reported_fault: 4,
    };
    let tokens = ExecutorFailureCounts {
        exited: 10,
        heartbeat_timeout: 20,
        step_timeout: 30,
        reported_fault: 40,
    };
    let recovered_stats = SchedulerStats {
        requests_recovered_total: recovered_requests,
        tokens_recomputed_total: RecomputedTokenCounts {
            preemption: 50,
            reset: 60,
            executor_failure: tokens,
        },
        ..stats(1, 1)
    };
    let run = |metrics: &ServerMetrics| {
        for (counters, base) in metrics.kv_events.iter().zip([1_u64 << 50, 1 << 49]) {
            counters.seq.store(base + 1, Ordering::Relaxed);
            counters.events.store(base, Ordering::Relaxed);
            counters.replayed.store(3, Ordering::Relaxed);
        }
        metrics.render(&[recovered_stats.clone(), stats(1, 1)]).unwrap()
    };
    let of = |page: &str, name: &str, engine: u32, cause: &str| {
        value(page, &format!(r#"{name}{{cause="{cause}",engine="{engine}",model_name="m"}}"#))
    };
    let page = run(&ServerMetrics::new(&config).unwrap());
    let causes = ["exited", "silent", "late", "fault", "preemption", "reset"];
    let recovered = "hadron:requests_recovered_total";
    let recomputed = "hadron:tokens_recomputed_total";
    for (cause, n) in causes.into_iter().zip(1..) {
        let n = f64::from(n);
        assert_eq!(of(&page, recomputed, 0, cause), 10.0 * n, "{cause}");
        assert_eq!(of(&page, recomputed, 1, cause), 0.0, "{cause}");
        if n <= 4.0 {
            assert_eq!(of(&page, recovered, 0, cause), n, "{cause}");
        }
    }
    let events = |page: &str, name: &str, engine: u32| {
        value(page, &format!(r#"hadron:kv_events_{name}{{engine="{engine}",model_name="m"}}"#))
    };
    let (first, second) = ((1_u64 << 50) as f64, (1_u64 << 49) as f64);
    assert_eq!([0, 1].map(|engine| events(&page, "seq", engine)), [first + 1.0, second + 1.0]);
    assert!(page.contains(&format!(" {}\n", (1_u64 << 50) + 1)), "every digit of a number");
    assert_eq!(events(&page, "published_total", 1), second);
    assert_eq!(events(&page, "replayed_total", 1), 3.0);
    let page = run(&ServerMetrics::new(&MetricsConfig { aggregate: true, ..config }).unwrap());
    assert_eq!(
        events(&page, "seq", 0),
        first + 1.0,
        "the maximum, because a sum is not a sequence number"
    );
    assert_eq!(events(&page, "published_total", 0), first + second);
}

/// Configuration of two replicas of two ranks each.
fn two_replicas() -> MetricsConfig {
    MetricsConfig { replicas: 2, tp_size: 2, ..MetricsConfig::new("m", 64) }
}

/// Records a request, a step and a failure of replica 1; returns the page.
fn page_of_second_replica(metrics: &ServerMetrics) -> String {
    let mut times = RequestTimes::of_choices(1, Instant::now(), 1, 1).next().unwrap();
    let first_run = Some(FirstAdmission { replica: Replica(1), cached_tokens: 0, queued_ms: 0 });
    let last = TokenEvent { first_admission: first_run, ..event(1, Some(FinishReason::Length)) };
    metrics.requests.delivery_round().event(&mut times, &last);
    metrics.steps.step_sent(Replica(1), &StepTimingRecord::default());
    metrics.steps.set_throughput(Replica(1), 2.5);
    metrics.executors.straggler(Rank(3));
    metrics.executors.executors_failed(Replica(1), ExecutorFailure::StepTimeout);
    metrics.kv_events[1].batches.store(7, Ordering::Relaxed);
    let ready = SchedulerStats { executors_ready: true, ..stats(1, 1) };
    metrics.render(&[ready, stats(1, 1)]).unwrap()
}

#[test]
fn aggregated_series_have_no_replica() {
    let config = MetricsConfig { aggregate: true, ..two_replicas() };
    let page = page_of_second_replica(&ServerMetrics::new(&config).unwrap());
    assert!(!page.contains(r#"engine="1""#));
    let success =
        r#"vllm:request_success_total{engine="0",finished_reason="length",model_name="m"}"#;
    assert_eq!(value(&page, success), 1.0);
    assert_eq!(value(&page, r#"hadron:late_rank_total{engine="0",model_name="m",rank="3"}"#), 1.0);
}

#[test]
fn requests_are_counted_on_their_replica() {
    let per_replica = ServerMetrics::new(&two_replicas()).unwrap();
    let page = page_of_second_replica(&per_replica);
    for (series, engines) in [
        (
            r#"vllm:request_success_total{engine="E",finished_reason="length",model_name="m"}"#,
            [0.0, 1.0],
        ),
        (r#"vllm:time_to_first_token_seconds_count{engine="E",model_name="m"}"#, [0.0, 1.0]),
        (r#"vllm:iteration_tokens_total_count{engine="E",model_name="m"}"#, [0.0, 1.0]),
        (r#"hadron:executor_restarts_total{cause="late",engine="E",model_name="m"}"#, [0.0, 1.0]),
        (r#"hadron:kv_events_batches_total{engine="E",model_name="m"}"#, [0.0, 7.0]),
    ] {
        let of = |engine: &str| value(&page, &series.replace('E', engine));
        assert_eq!([of("0"), of("1")], engines, "{series}");
    }
    let of_ranks = |name: &str| {
        let series =
            |rank| format!(r#"{name}{{engine="{}",model_name="m",rank="{rank}"}}"#, rank / 2);
        [0, 1, 2, 3].map(|rank| value(&page, &series(rank)))
    };
    assert_eq!(of_ranks("hadron:executor_up"), [1.0, 1.0, 0.0, 0.0]);
    assert_eq!(of_ranks("hadron:late_rank_total"), [0.0, 0.0, 0.0, 1.0]);
    assert_eq!(
        (per_replica.steps.throughput(Replica(0)), per_replica.steps.throughput(Replica(1))),
        (0.0, 2.5)
    );
}

/// Checks that the committed page of metrics is current. To regenerate it, run `UPDATE_EXPECT=1 cargo test`.
#[test]
fn metrics_reference_page_is_current() {
    let path = std::path::Path::new(env!("CARGO_MANIFEST_DIR")).join("..").join(page_path());
    expect_test::expect_file![path].assert_eq(&reference_page().unwrap());
}

#[test]
fn dense_model_has_no_expert_series() {
    assert!(!metrics().render(&[]).unwrap().contains("expert"));
}

#[test]
fn expert_tokens_are_counted_per_layer_and_expert() {
    let config = MetricsConfig::new("m", 4_096);
    let metrics =
        ServerMetrics::new(&MetricsConfig { experts: vec![0, 3, 3], replicas: 2, ..config })
            .unwrap();
    let count_of = |layer, expert, tokens| ExpertTokenCount { layer, expert, tokens };
    metrics
        .experts
        .step_completed(Replica(1), &[count_of(1, 0, 4), count_of(1, 2, 6), count_of(2, 1, 10)]);
    metrics.experts.step_completed(Replica(1), &[count_of(1, 0, 5)]);
    metrics.experts.step_completed(Replica(1), &[count_of(9, 0, 1), count_of(2, 7, 1)]);
    let page = metrics.render(&[]).unwrap();
    let of = |name: &str, engine: u16, layer: u16| {
        let labels = format!("engine=\"{engine}\",layer=\"{layer}\",model_name=\"m\"");
        value(&page, &format!("hadron:expert_tokens_{name}{{{labels}}}"))
    };
    assert_eq!((of("total", 1, 1), of("hottest_total", 1, 1)), (15.0, 11.0));
    assert_eq!(of("hottest_total", 1, 2), 10.0 + 1.0);
    assert_eq!(of("total", 0, 1), 0.0);
    let load = |engine: u16, layer: u16| {
        let labels =
            format!("engine=\"{engine}\",layer=\"{layer}\",model_name=\"m\",rank=\"{engine}\"");
        value(&page, &format!("hadron:expert_load_max_over_mean{{{labels}}}"))
    };
    assert_eq!((load(1, 1), load(1, 2), load(0, 1)), (9.0 / 5.0, 3.0, 0.0));
    assert!(!page.contains("layer=\"0\""), "a dense layer");
    let table = metrics.experts.table();
    assert_eq!(table[1], [vec![], vec![9, 0, 6], vec![0, 10, 0]]);
    assert_eq!(table[0], [vec![], vec![0; 3], vec![0; 3]]);
}

#[test]
fn collectives_are_observed_where_a_step_called_them() {
    let config = MetricsConfig { replicas: 2, tp_size: 2, ..MetricsConfig::new("m", 64) };
    let single_rank = ServerMetrics::new(&MetricsConfig { tp_size: 1, ..config.clone() }).unwrap();
    assert!(
        !single_rank.render(&[]).unwrap().contains("collective"),
        "one rank has no collectives"
    );
    let per_replica = ServerMetrics::new(&config).unwrap();
    assert!(
        !per_replica.render(&[]).unwrap().contains("group=\"dp\""),
        "replicas without shared experts"
    );
    let metrics = ServerMetrics::new(&MetricsConfig { experts_shared: true, ..config }).unwrap();
    let timing = CollectiveTiming { tp_all_reduce_ns: 500_000_000, ..CollectiveTiming::default() };
    metrics.collectives.step_completed(Replica(1), &timing);
    let timing = CollectiveTiming { dp_reduce_scatter_ns: 250_000_000, ..timing };
    metrics.collectives.step_completed(Replica(1), &timing);
    let page = metrics.render(&[]).unwrap();
    let of = |part: &str, engine: u16, group: &str, op: &str| {
        let labels = format!("engine=\"{engine}\",group=\"{group}\",model_name=\"m\",op=\"{op}\"");
        value(&page, &format!("hadron:collective_seconds_{part}{{{labels}}}"))
    };
    assert_eq!(["count", "sum"].map(|part| of(part, 1, "tp", "all_reduce")), [2.0, 1.0]);
    assert_eq!(["count", "sum"].map(|part| of(part, 1, "dp", "reduce_scatter")), [1.0, 0.25]);
    assert_eq!(of("count", 1, "tp", "all_gather"), 0.0);
    assert_eq!(of("count", 0, "tp", "all_reduce"), 0.0);
}
