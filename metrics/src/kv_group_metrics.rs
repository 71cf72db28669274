//! Metrics of KV groups with sliding windows or recurrent state, copied from the statistics of the scheduler.

use super::MetricsConfig;
use super::kv_event_metrics::raise_to;
use super::metric_registrar::MetricRegistrar;
use prometheus::{Error, Gauge, IntCounter};
use protocol::KvKind;
use scheduler::{KvGroupHitStats, SchedulerStats, StateSlotStats};

/// Counter family of prefix hits, with one series for each group.
struct HitCounterFamily {
    name: &'static str,
    help: &'static str,
    count: fn(&KvGroupHitStats) -> u64,
}

#[rustfmt::skip] // One metric per line.
const HIT_FAMILIES: [HitCounterFamily; 3] = [
    HitCounterFamily { name: "hadron:prefix_cache_group_offered_total", help: "Tokens that a KV group alone could have given to prefix hits, within the tokens that the groups which keep all positions have.", count: |group| group.offered },
    HitCounterFamily { name: "hadron:prefix_cache_group_hits_total", help: "Tokens of prefix hits by KV group; equal for all groups, because a prefix hit needs all of them.", count: |group| group.given },
    HitCounterFamily { name: "hadron:prefix_cache_group_misses_total", help: "Tokens by which a KV group shortened prefix hits, because its windows before their end or its states at their end were not cached.", count: |group| group.missed },
];

/// Metrics of the KV groups of a model; empty for models whose layers all keep all positions in one group.
#[derive(Default)]
pub(super) struct KvGroupMetrics {
    hits: Vec<GroupHitSeries>,
    state_slots: Vec<StateSlotSeries>,
}

/// One counter of the prefix hits of one group.
struct GroupHitSeries {
    group: usize,
    count: fn(&KvGroupHitStats) -> u64,
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
        let kinds = &config.kv_kinds;
        if kinds.len() > 1 || kinds.iter().any(|kind| !kind.keeps_all_positions()) {
            for family in &HIT_FAMILIES {
                metrics.add_hits(f, kinds, family)?;
            }
        }
        if kinds.iter().any(|kind| kind.is_state()) {
            metrics.add_state_slots(f)?;
        }
        Ok(metrics)
    }

    /// Registers a counter for each of the groups, whose kinds are `kinds`.
    fn add_hits(
        &mut self,
        f: &MetricRegistrar<'_>,
        kinds: &[KvKind],
        family: &HitCounterFamily,
    ) -> Result<(), Error> {
        let groups: Vec<String> = (0..kinds.len()).map(|group| group.to_string()).collect();
        let labels = groups.iter().zip(kinds).map(|(group, kind)| [group.as_str(), kind.name()]);
        let labels: Vec<[&str; 2]> = labels.collect();
        let series = f.counters_by(family.name, family.help, ["group", "kind"], &labels)?;
        for (group, series) in series.iter().enumerate() {
            let counters = series.iter().cloned().collect();
            self.hits.push(GroupHitSeries { group, count: family.count, counters });
        }
        Ok(())
    }

    /// Registers the gauges of state slots.
    fn add_state_slots(&mut self, f: &MetricRegistrar<'_>) -> Result<(), Error> {
        let states = ["free", "checkpoint", "used"];
        let help = "Slots of recurrent states in each state group: without a state (free), with the state of a cached prefix (checkpoint), used by requests.";
        let gauges = f.gauges_of_replicas("hadron:state_slots", help, "state", states)?;
        let counts: [fn(&StateSlotStats) -> u32; 3] =
            [|slots| slots.free, |slots| slots.checkpoints, |slots| slots.in_use];
        let series = counts.into_iter().zip(gauges);
        self.state_slots =
            series.map(|(count, gauges)| StateSlotSeries { count, gauges }).collect();
        Ok(())
    }

    /// Updates series `index` from the statistics of its replicas.
    pub(super) fn update(&self, index: usize, replicas: &[SchedulerStats]) {
        for GroupHitSeries { group, count, counters } in &self.hits {
            let total =
                |stats: &SchedulerStats| stats.kv_group_hits_total.get(*group).map_or(0, count);
            raise_to(&counters[index], replicas.iter().map(total).sum());
        }
        for StateSlotSeries { count, gauges } in &self.state_slots {
            let slots: u32 = replicas.iter().map(|stats| count(&stats.state_slots)).sum();
            gauges[index].set(f64::from(slots));
        }
    }
}
