//! Metrics of KV groups with sliding windows or recurrent state, copied from the statistics of the scheduler.

use super::MetricsConfig;
use super::kv_event_metrics::raise_to;
use super::metric_registrar::MetricRegistrar;
use prometheus::{Error, Gauge, IntCounter};
use scheduler::{SchedulerStats, StateSlotStats};

/// Metrics of the KV groups of a model; empty for models whose layers all keep all positions.
#[derive(Default)]
pub(super) struct KvGroupMetrics {
    misses: Vec<GroupMissSeries>,
    state_slots: Vec<StateSlotSeries>,
}

/// Tokens by which one group shortened prefix hits.
struct GroupMissSeries {
    group: usize,
    /// One counter per series of replicas.
    counters: Vec<IntCounter>,
}

/// State slots of one state.
struct StateSlotSeries {
    count: fn(&StateSlotStats) -> u32,
    /// One gauge per series of replicas.
    gauges: Vec<Gauge>,
}

impl KvGroupMetrics {
    /// Registers the series of the groups in `config`.
    pub(super) fn new(f: &MetricRegistrar<'_>, config: &MetricsConfig) -> Result<Self, Error> {
        let mut metrics = Self::default();
        if !config.shortening_groups.is_empty() {
            let names: Vec<String> =
                config.shortening_groups.iter().map(ToString::to_string).collect();
            let names: Vec<&str> = names.iter().map(String::as_str).collect();
            let help = "Tokens by which a KV group shortened prefix hits, because its windows before their end or its states at their end were not cached.";
            let series =
                f.counters_by("hadron:prefix_cache_group_misses_total", help, "group", &names)?;
            for (group, series) in config.shortening_groups.iter().zip(series) {
                let counters = series.iter().cloned().collect();
                metrics.misses.push(GroupMissSeries { group: usize::from(*group), counters });
            }
        }
        if config.has_states {
            let states = ["free", "checkpoint", "used"];
            let help = "Slots of recurrent states in each state group: without a state (free), with the state of a cached prefix (checkpoint), used by requests.";
            let gauges = f.gauges_of_replicas("hadron:state_slots", help, "state", states)?;
            let counts: [fn(&StateSlotStats) -> u32; 3] =
                [|slots| slots.free, |slots| slots.checkpoints, |slots| slots.in_use];
            let series = counts.into_iter().zip(gauges);
            metrics.state_slots =
                series.map(|(count, gauges)| StateSlotSeries { count, gauges }).collect();
        }
        Ok(metrics)
    }

    /// Updates series `index` from the statistics of its replicas.
    pub(super) fn update(&self, index: usize, replicas: &[SchedulerStats]) {
        for GroupMissSeries { group, counters } in &self.misses {
            let missed = |stats: &SchedulerStats| {
                stats.prefix_tokens_missed_total.get(*group).copied().unwrap_or(0)
            };
            raise_to(&counters[index], replicas.iter().map(missed).sum());
        }
        for StateSlotSeries { count, gauges } in &self.state_slots {
            let slots: u32 = replicas.iter().map(|stats| count(&stats.state_slots)).sum();
            gauges[index].set(f64::from(slots));
        }
    }
}
