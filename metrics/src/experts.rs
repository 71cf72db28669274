//! Tokens routed to the experts of a MoE model, per step.
//!
//! A model has thousands of experts, so single experts are counted here but have no series. The series are
//! per layer and show how uneven the load of the experts is.

use super::metric_registrar::{MetricRegistrar, ReplicaOrSharedSeries};
use prometheus::{Error, Gauge, IntCounter};
use protocol::{ExpertTokenCount, Replica};
use std::sync::atomic::{AtomicU64, Ordering};

/// Expert load metrics; empty if the model has no experts or their load is not counted.
pub struct ExpertMetrics {
    layers: Vec<ExpertLayerMetrics>,
    /// Number of tokens routed to each expert since the start: by replica, then by layer and expert.
    tokens: Vec<Vec<AtomicU64>>,
}

/// Token counts and series of the experts of one layer.
struct ExpertLayerMetrics {
    experts: usize,
    /// Index of the layer's first expert in the token counts.
    first: usize,
    /// Prometheus series of the layer; `None` for a dense layer.
    series: Option<ExpertLayerSeries>,
}

/// Prometheus series of a MoE layer: all routed tokens, and the load of its most loaded expert.
struct ExpertLayerSeries {
    tokens: ReplicaOrSharedSeries<IntCounter>,
    /// Tokens of the most loaded expert in each step, summed over the steps.
    hottest: ReplicaOrSharedSeries<IntCounter>,
    /// Token count of the most loaded expert divided by the mean over all experts, by replica.
    max_over_mean: Vec<Gauge>,
}

const TOKENS_HELP: &str = "Tokens routed to the experts of a layer; a token counts once for each of its experts. The last \
     layer computes only the prompt tokens with requested logits.";
const HOTTEST_HELP: &str = "Tokens routed to the most loaded expert of a layer in each step, summed; on GPUs, counts cover up to 16 \
     graph replays and the most loaded expert is that of all of them.";
const LOAD_HELP: &str = "Tokens of the most loaded expert of a layer, divided by the mean over its experts, since the start: 1 = \
     balanced, 0 = no tokens yet. Counted by the first rank of each replica.";

impl ExpertMetrics {
    /// Registers the series. `experts`: number of experts per layer, 0 for dense layers.
    pub(super) fn new(f: &MetricRegistrar<'_>, experts: &[u16]) -> Result<Self, Error> {
        let names: Vec<String> = (0..experts.len()).map(|layer| layer.to_string()).collect();
        let sparse: Vec<&str> = names
            .iter()
            .zip(experts)
            .filter(|(_, experts)| **experts > 0)
            .map(|(name, _)| &name[..])
            .collect();
        let mut series = series(f, &sparse)?.into_iter();
        let mut first = 0;
        let layers: Vec<ExpertLayerMetrics> = experts
            .iter()
            .map(|&experts| {
                let experts = usize::from(experts);
                let series = if experts > 0 { series.next() } else { None };
                first += experts;
                ExpertLayerMetrics { experts, first: first - experts, series }
            })
            .collect();
        let zeros = || (0..first).map(|_| AtomicU64::new(0)).collect();
        Ok(Self { layers, tokens: (0..f.replicas()).map(|_| zeros()).collect() })
    }

    /// Adds the token counts of a completed step to the totals of each expert and layer. In `counts`, the
    /// entries of a layer are adjacent.
    pub fn step_completed(&self, replica: Replica, counts: &[ExpertTokenCount]) {
        let Some(totals) = self.tokens.get(usize::from(replica.0)) else { return };
        for of_layer in counts.chunk_by(|a, b| a.layer == b.layer) {
            let Some(layer) = self.layers.get(usize::from(of_layer[0].layer)) else { continue };
            let own = &totals[layer.first..][..layer.experts];
            for count in of_layer {
                if let Some(total) = own.get(usize::from(count.expert)) {
                    total.fetch_add(u64::from(count.tokens), Ordering::Relaxed);
                }
            }
            if let Some(ExpertLayerSeries { tokens, hottest, .. }) = &layer.series {
                let each = || of_layer.iter().map(|count| u64::from(count.tokens));
                tokens.of(replica).inc_by(each().sum());
                hottest.of(replica).inc_by(each().max().unwrap_or(0));
            }
        }
    }

    /// Updates, for a scrape, the gauges of the load imbalance: token count of the most loaded expert of a
    /// layer, divided by the mean over its experts.
    pub(super) fn update(&self) {
        for layer in &self.layers {
            let Some(series) = &layer.series else { continue };
            for (gauge, totals) in series.max_over_mean.iter().zip(&self.tokens) {
                let own = &totals[layer.first..][..layer.experts];
                let each = || own.iter().map(|total| total.load(Ordering::Relaxed));
                let (max, sum) = (each().max().unwrap_or(0), each().sum::<u64>());
                gauge.set(max as f64 * layer.experts as f64 / sum.max(1) as f64);
            }
        }
    }

    /// Returns the token counts since the start by replica, layer and expert; the list of a dense layer is
    /// empty.
    pub fn table(&self) -> Vec<Vec<Vec<u64>>> {
        let of = |totals: &Vec<AtomicU64>| {
            let layer = |layer: &ExpertLayerMetrics| {
                let own = &totals[layer.first..][..layer.experts];
                own.iter().map(|total| total.load(Ordering::Relaxed)).collect()
            };
            self.layers.iter().map(layer).collect()
        };
        self.tokens.iter().map(of).collect()
    }
}

/// Registers the series of the MoE layers. `layers`: layer indices, as values of the label `layer`.
fn series(f: &MetricRegistrar<'_>, layers: &[&str]) -> Result<Vec<ExpertLayerSeries>, Error> {
    if layers.is_empty() {
        return Ok(Vec::new());
    }
    let values: Vec<[&str; 1]> = layers.iter().map(|layer| [*layer]).collect();
    let counters = |name, help| f.counters_by(name, help, ["layer"], &values);
    let tokens = counters("hadron:expert_tokens_total", TOKENS_HELP)?.into_iter();
    let hottest = counters("hadron:expert_tokens_hottest_total", HOTTEST_HELP)?;
    let load =
        f.gauges_of_first_ranks("hadron:expert_load_max_over_mean", LOAD_HELP, "layer", layers)?;
    let of =
        |((tokens, hottest), max_over_mean)| ExpertLayerSeries { tokens, hottest, max_over_mean };
    Ok(tokens.zip(hottest).zip(load).map(of).collect())
}
