//! Structured-output metrics, read from the counters of the grammar crate.

use super::kv_event_metrics::raise_to;
use super::metric_registrar::MetricRegistrar;
use grammar::{BOUNDS_US, DurationHistogram, GrammarTimings};
use prometheus::core::{Collector, Desc};
use prometheus::proto::{Bucket, Histogram, LabelPair, Metric, MetricFamily, MetricType};
use prometheus::{Error, IntCounter};
use std::collections::HashMap;
use std::sync::Arc;
use std::sync::atomic::Ordering;

/// Structured-output counters, which are updated at each scrape. The histograms are collected directly from
/// `GrammarTimings`.
pub(super) struct GrammarMetrics {
    masks_failed: IntCounter,
    masks_overdue: IntCounter,
}

impl GrammarMetrics {
    #[rustfmt::skip] // One metric per line.
    pub(super) fn new(f: &MetricRegistrar<'_>, timings: &Arc<GrammarTimings>) -> Result<Self, Error> {
        let of = |name, help, series| GrammarTimingCollector::new(f.model(), name, help, Arc::clone(timings), series);
        f.add_collector(of("hadron:grammar_compile_seconds", "Time to compile a grammar, by result; cached grammars are not observed.", vec![GrammarTimingSeries { result: "ok", histogram: |t| &t.compiled }, GrammarTimingSeries { result: "error", histogram: |t| &t.rejected }])?)?;
        f.add_collector(of("hadron:grammar_mask_seconds", "Time to compute one grammar bitmask.", vec![GrammarTimingSeries { result: "ok", histogram: |t| &t.masks }])?)?;
        Ok(Self { masks_failed: f.counter("hadron:grammar_masks_failed_total", "Grammar bitmasks that could not be computed; their requests ended with an error.")?, masks_overdue: f.counter("hadron:grammar_masks_late_total", "Overdue grammar bitmasks: their steps did not wait, and the rows ran again in a later step.")? })
    }

    pub(super) fn update(&self, timings: &GrammarTimings) {
        raise_to(&self.masks_failed, timings.masks_failed.load(Ordering::Relaxed));
        raise_to(&self.masks_overdue, timings.masks_overdue.load(Ordering::Relaxed));
    }
}

/// Histogram series with one value of the label `result`.
struct GrammarTimingSeries {
    /// Value of the label `result`.
    result: &'static str,
    histogram: fn(&GrammarTimings) -> &DurationHistogram,
}

/// Prometheus collector that exposes histograms stored in `GrammarTimings`.
struct GrammarTimingCollector {
    desc: Desc,
    help: &'static str,
    model: String,
    timings: Arc<GrammarTimings>,
    series: Vec<GrammarTimingSeries>,
}

impl GrammarTimingCollector {
    fn new(
        model: &str,
        name: &str,
        help: &'static str,
        timings: Arc<GrammarTimings>,
        series: Vec<GrammarTimingSeries>,
    ) -> Result<Self, Error> {
        let labels = ["model_name", "engine", "result"].map(str::to_owned).to_vec();
        let desc = Desc::new(name.to_owned(), help.to_owned(), labels, HashMap::new())?;
        Ok(Self { desc, help, model: model.to_owned(), timings, series })
    }

    fn metric(&self, series: &GrammarTimingSeries) -> Metric {
        let pair = |(name, value): (&str, &str)| {
            let mut pair = LabelPair::default();
            pair.set_name(name.to_owned());
            pair.set_value(value.to_owned());
            pair
        };
        let labels =
            [("engine", "0"), ("model_name", self.model.as_str()), ("result", series.result)];
        let mut metric = Metric::from_label(labels.map(pair).to_vec());
        metric.set_histogram(histogram((series.histogram)(&self.timings)));
        metric
    }
}

impl Collector for GrammarTimingCollector {
    fn desc(&self) -> Vec<&Desc> {
        vec![&self.desc]
    }

    fn collect(&self) -> Vec<MetricFamily> {
        let mut family = MetricFamily::default();
        family.set_name(self.desc.fq_name.clone());
        family.set_help(self.help.to_owned());
        family.set_field_type(MetricType::HISTOGRAM);
        family.set_metric(self.series.iter().map(|series| self.metric(series)).collect());
        vec![family]
    }
}

fn histogram(timings: &DurationHistogram) -> Histogram {
    let mut histogram = Histogram::default();
    let (counts, mut sum) = (timings.buckets(), 0);
    let mut buckets = Vec::with_capacity(BOUNDS_US.len());
    for (bound, count) in BOUNDS_US.iter().zip(counts) {
        sum += count;
        let mut bucket = Bucket::default();
        bucket.set_upper_bound(*bound as f64 * 1e-6);
        bucket.set_cumulative_count(sum);
        buckets.push(bucket);
    }
    histogram.set_sample_count(counts.iter().sum());
    histogram.set_sample_sum(timings.sum_seconds());
    histogram.set_bucket(buckets);
    histogram
}
