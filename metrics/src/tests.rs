//! Tests of the values on the metrics page after events were recorded.

mod replicas;

use super::*;
use protocol::{CollectiveTiming, ExpertTokenCount, KvKind, Rank, Replica, RequestId, RowError};
use scheduler::{
    AbortCause, BlockStats, ExecutorFailure, ExecutorFailureCounts, FinishReason, FirstAdmission,
    KvGroupHitStats, RecomputedTokenCounts, RequestError, StateSlotStats, StopReason, TokenEvent,
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
