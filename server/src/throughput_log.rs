//! Throughput log line: every ten seconds with traffic, logs token rates and the load of each replica, as in
//! vLLM (`--disable-log-stats` turns it off).

use super::app::AppState;
use scheduler::SchedulerStats;
use std::sync::Arc;
use std::time::{Duration, Instant};
use tokio::time::MissedTickBehavior;

/// Interval between throughput log lines.
pub const THROUGHPUT_INTERVAL: Duration = Duration::from_secs(10);

/// Token rates of a replica in an interval, and its load at the end of the interval.
#[derive(Debug, Clone, Copy, PartialEq)]
struct ReplicaThroughput {
    replica: u16,
    prompt_tokens_per_s: f64,
    generation_tokens_per_s: f64,
    running: u32,
    waiting: u32,
    /// Percentage of KV blocks in use.
    kv_cache_percent: f64,
    /// Prefix cache hit rate in percent: found tokens divided by looked-up tokens; `None` if no token was
    /// looked up in the interval.
    prefix_hit_percent: Option<f64>,
}

impl ReplicaThroughput {
    /// Returns the throughput between two snapshots of a replica's statistics; `None` if there was no
    /// traffic.
    fn between(before: &SchedulerStats, now: &SchedulerStats, elapsed: Duration) -> Option<Self> {
        let since = |total: fn(&SchedulerStats) -> u64| total(now).saturating_sub(total(before));
        let prompt = since(|stats| stats.prompt_tokens_total);
        let generated = since(|stats| stats.generated_tokens_total);
        if prompt == 0 && generated == 0 && now.running == 0 && now.waiting == 0 {
            return None;
        }
        let rate = |tokens: u64| rounded(tokens as f64 / elapsed.as_secs_f64());
        let percent = |part: f64, whole: f64| rounded(100.0 * part / whole);
        let lookups = since(|stats| stats.prefix_queries_total);
        let hits = since(|stats| stats.prefix_hits_total);
        let pool = f64::from(now.blocks.pool.max(1));
        Some(Self {
            replica: now.replica.0,
            prompt_tokens_per_s: rate(prompt),
            generation_tokens_per_s: rate(generated),
            running: now.running,
            waiting: now.waiting,
            kv_cache_percent: percent(f64::from(now.blocks.in_use), pool),
            prefix_hit_percent: (lookups > 0).then(|| percent(hits as f64, lookups as f64)),
        })
    }

    fn log(&self) {
        tracing::info!(
            replica = self.replica,
            prompt_tokens_per_s = self.prompt_tokens_per_s,
            generation_tokens_per_s = self.generation_tokens_per_s,
            running = self.running,
            waiting = self.waiting,
            kv_cache_percent = self.kv_cache_percent,
            prefix_hit_percent = self.prefix_hit_percent,
            "throughput"
        );
    }
}

/// Rounds to one decimal place.
fn rounded(value: f64) -> f64 {
    (value * 10.0).round() / 10.0
}

/// Logs the throughput of all replicas until the runtime ends.
pub async fn log_throughput(app: Arc<AppState>, interval: Duration) {
    let mut ticks = tokio::time::interval(interval);
    ticks.set_missed_tick_behavior(MissedTickBehavior::Delay);
    ticks.tick().await; // The first tick is immediate.
    let (mut before, mut measured_at) = (Vec::<SchedulerStats>::new(), Instant::now());
    loop {
        ticks.tick().await;
        let Ok(serving) = app.serving() else { continue };
        let (now, elapsed) = (serving.client.replica_stats(), measured_at.elapsed());
        let start = SchedulerStats::default();
        for (index, stats) in now.iter().enumerate() {
            let before = before.get(index).unwrap_or(&start);
            if let Some(throughput) = ReplicaThroughput::between(before, stats, elapsed) {
                throughput.log();
            }
        }
        (before, measured_at) = (now, Instant::now());
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn first_statistics() -> SchedulerStats {
        SchedulerStats {
            prompt_tokens_total: 100,
            generated_tokens_total: 50,
            prefix_queries_total: 100,
            prefix_hits_total: 10,
            ..SchedulerStats::default()
        }
    }

    #[test]
    fn throughput_is_measured_between_two_statistics() {
        let before = first_statistics();
        let mut now = before.clone();
        let ten_seconds = Duration::from_secs(10);
        assert_eq!(ReplicaThroughput::between(&before, &now, ten_seconds), None);
        now.running = 3;
        now.prompt_tokens_total = 1_100;
        now.generated_tokens_total = 54;
        now.prefix_queries_total = 400;
        now.prefix_hits_total = 110;
        now.blocks.pool = 8;
        now.blocks.in_use = 3;
        let expected = ReplicaThroughput {
            replica: 0,
            prompt_tokens_per_s: 100.0,
            generation_tokens_per_s: 0.4,
            running: 3,
            waiting: 0,
            kv_cache_percent: 37.5,
            prefix_hit_percent: Some(33.3),
        };
        assert_eq!(ReplicaThroughput::between(&before, &now, ten_seconds), Some(expected));
        // After an engine restart, the counters start at zero.
        assert_eq!(
            ReplicaThroughput::between(&now, &before, ten_seconds),
            None,
            "no traffic since the restart"
        );
    }
}
