//! Tests of series per replica and of aggregated series.

use super::*;

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

/// Kinds of the groups of a model with two window groups and a state group.
const KV_KINDS: [KvKind; 4] = [
    KvKind::Full,
    KvKind::Window { tokens: 8 },
    KvKind::Window { tokens: 8 },
    KvKind::State { slots_per_request: 1, bytes_per_slot: 8 },
];

fn page_with_groups(replicas: &[SchedulerStats]) -> String {
    let config = MetricsConfig {
        replicas: replicas.len() as u16,
        kv_kinds: KV_KINDS.to_vec(),
        ..MetricsConfig::new("m", 64)
    };
    ServerMetrics::new(&config).unwrap().render(replicas).unwrap()
}

#[test]
fn one_group_models_have_no_series_of_groups() {
    let one = MetricsConfig { kv_kinds: vec![KvKind::Mla], ..MetricsConfig::new("m", 64) };
    let plain = ServerMetrics::new(&one).unwrap().render(&[stats(1, 1)]).unwrap();
    assert!(!plain.contains("hadron:state_slots") && !plain.contains("prefix_cache_group"));
}

#[test]
fn prefix_hits_are_counted_per_kv_group() {
    let of = |missed: [u64; 4]| {
        let group = |(kind, missed): (KvKind, u64)| KvGroupHitStats {
            kind,
            offered: 100 - missed,
            given: 20,
            missed,
        };
        let groups = KV_KINDS.into_iter().zip(missed).map(group).collect();
        SchedulerStats { kv_group_hits_total: groups, ..stats(1, 1) }
    };
    let page = page_with_groups(&[of([0, 5, 0, 7]), of([0, 1, 0, 0])]);
    let series = |name: &str, engine: u32, group: u32| {
        let kind = ["full_attention", "sliding_window", "sliding_window", "recurrent_state"];
        let kind = kind[group as usize];
        let labels =
            format!(r#"{{engine="{engine}",group="{group}",kind="{kind}",model_name="m"}}"#);
        value(&page, &format!("hadron:prefix_cache_group_{name}_total{labels}"))
    };
    let of_groups = |name: &str, engine: u32| [0, 1, 2, 3].map(|g| series(name, engine, g));
    assert_eq!(of_groups("offered", 0), [100.0, 95.0, 100.0, 93.0]);
    assert_eq!(of_groups("hits", 0), [20.0; 4]);
    assert_eq!(of_groups("misses", 0), [0.0, 5.0, 0.0, 7.0]);
    assert_eq!(of_groups("misses", 1), [0.0, 1.0, 0.0, 0.0]);
    let total = |engine: u32| {
        let labels = format!(r#"{{engine="{engine}",model_name="m"}}"#);
        value(&page, &format!("hadron:prefix_cache_window_misses_total{labels}"))
    };
    assert_eq!([total(0), total(1)], [12.0, 1.0], "the sum over the groups");
}

#[test]
fn state_slots_are_shown_by_use() {
    let of = |in_use: u32| SchedulerStats {
        state_slots: StateSlotStats { pool: 9, free: 8 - in_use, checkpoints: 1, in_use },
        ..stats(1, 1)
    };
    let page = page_with_groups(&[of(2), of(4)]);
    let slots = |engine: u32, state: &str| {
        let labels = format!(r#"{{engine="{engine}",model_name="m",state="{state}"}}"#);
        value(&page, &format!("hadron:state_slots{labels}"))
    };
    assert_eq!(["free", "checkpoint", "used"].map(|state| slots(0, state)), [6.0, 1.0, 2.0]);
    assert_eq!(slots(1, "used"), 4.0);
}
