//! Processor time for gathering and formatting the content of `/metrics`, without HTTP. The process has 456
//! open sockets, because the number of open file descriptors, which is one of the metrics, is counted for
//! each page.

use crate::kv_overflow::timed;
use metrics::{KvCacheInfo, MetricsConfig, ServerMetrics, StepTimingRecord};
use protocol::Replica;
use scheduler::SchedulerStats;
use std::net::UdpSocket;
use std::time::Duration;

const SOCKETS: usize = 456;
const PAGES: usize = 5_000;

#[test]
#[ignore = "measures times: `just metrics-page`"]
fn metrics_page_cost() {
    let _sockets: Vec<UdpSocket> =
        (0..SOCKETS).map(|_| UdpSocket::bind("127.0.0.1:0").unwrap()).collect();
    let metrics = ServerMetrics::new(&MetricsConfig::new("tiny", 4_096)).unwrap();
    let facts = KvCacheInfo {
        block_tokens: 16,
        blocks: 65_536,
        pool_tokens: 1 << 20,
        dtype: "auto".to_owned(),
        memory_utilization: 0.9,
        prefix_caching: true,
        max_num_seqs: 256,
    };
    metrics.set_kv_cache(facts).unwrap();
    let step = |step| StepTimingRecord {
        step,
        plan_ns: 71_234,
        wait_ns: 5_012_345,
        ..StepTimingRecord::default()
    };
    let mut times: Vec<Duration> = (0..PAGES)
        .map(|round| {
            metrics.steps.step_sent(Replica(0), &step(round as u64));
            metrics.http.read_body(Duration::from_micros(round as u64), true);
            let (took, page) = timed(|| metrics.render(&[SchedulerStats::default()]).unwrap());
            assert!(page.ends_with('\n'));
            took
        })
        .collect();
    let page = metrics.render(&[SchedulerStats::default()]).unwrap();
    let samples = page.lines().filter(|line| !line.starts_with('#')).count();
    times.sort_unstable();
    let us = |share: f64| times[((PAGES - 1) as f64 * share) as usize].as_secs_f64() * 1e6;
    let mean = times.iter().sum::<Duration>().as_secs_f64() * 1e6 / PAGES as f64;
    println!(
        "{samples} samples, {} bytes: p50 {:.1} µs, p99 {:.1} µs, mean {mean:.1} µs",
        page.len(),
        us(0.5),
        us(0.99)
    );
}
