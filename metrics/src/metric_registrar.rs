//! Registration of metric families with their labels; most series are created at server start-up.

mod histograms;

use super::MetricsConfig;
use super::histogram_buckets::HistogramBuckets;
use prometheus::core::Collector;
use prometheus::{
    Counter, CounterVec, Error, Gauge, GaugeVec, IntCounter, IntCounterVec, Opts, Registry,
};
use protocol::Replica;

/// Metric with one series per replica (label `engine`), or one series for all replicas. If there are fewer
/// series than replicas, the remaining replicas use the last series.
pub(super) struct ReplicaOrSharedSeries<T>(Vec<T>);

impl<T> ReplicaOrSharedSeries<T> {
    /// Returns the series of a replica.
    pub(super) fn of(&self, replica: Replica) -> &T {
        &self.0[usize::from(replica.0).min(self.0.len() - 1)]
    }

    /// Iterates over the series of all replicas.
    pub(super) fn iter(&self) -> std::slice::Iter<'_, T> {
        self.0.iter()
    }
}

impl<T> From<Vec<T>> for ReplicaOrSharedSeries<T> {
    /// Creates the metric from its series. `series` must not be empty; `MetricRegistrar` creates at least one
    /// series.
    fn from(series: Vec<T>) -> Self {
        Self(series)
    }
}

/// Label of an info series.
#[derive(Debug, Clone, Copy)]
pub(super) struct InfoLabel<'a> {
    pub(super) name: &'a str,
    pub(super) value: &'a str,
}

/// Registers metric families with the labels that they have in common.
pub(super) struct MetricRegistrar<'a> {
    registry: &'a Registry,
    model: &'a str,
    buckets: HistogramBuckets<'a>,
    engines: Vec<String>,
    /// Total number of executors of all replicas.
    ranks: u16,
    tp_size: u16,
}

impl<'a> MetricRegistrar<'a> {
    pub(super) fn new(registry: &'a Registry, config: &'a MetricsConfig) -> Self {
        let (replicas, tp_size) = (config.replicas.max(1), config.tp_size.max(1));
        let engines = if config.aggregate { 1 } else { replicas };
        let buckets = HistogramBuckets::new(&config.buckets, config.max_model_len);
        let engines = (0..engines).map(|engine| engine.to_string()).collect();
        let ranks = replicas * tp_size;
        Self { registry, model: &config.model_name, buckets, engines, ranks, tp_size }
    }

    /// Registers a counter of seconds without labels, for metrics of the process.
    pub(super) fn process_seconds(&self, name: &str, help: &str) -> Result<Counter, Error> {
        self.add(Counter::new(name, help)?)
    }

    /// Registers a gauge without labels, for metrics of the process.
    pub(super) fn process_gauge(&self, name: &str, help: &str) -> Result<Gauge, Error> {
        self.add(Gauge::new(name, help)?)
    }

    /// Registers a collector that computes its metrics at each scrape.
    pub(super) fn add_collector(&self, family: impl Collector + 'static) -> Result<(), Error> {
        self.registry.register(Box::new(family))
    }

    fn add<C: Collector + Clone + 'static>(&self, family: C) -> Result<C, Error> {
        self.registry.register(Box::new(family.clone()))?;
        Ok(family)
    }

    /// Registers a counter of the whole server; its label `engine` is 0.
    pub(super) fn counter(&self, name: &str, help: &str) -> Result<IntCounter, Error> {
        let family = IntCounterVec::new(Opts::new(name, help), &["model_name", "engine"])?;
        Ok(self.add(family)?.with_label_values(&[self.model, "0"]))
    }

    /// Registers a counter per replica.
    pub(super) fn counter_of_replicas(
        &self,
        name: &str,
        help: &str,
    ) -> Result<Vec<IntCounter>, Error> {
        let family = self.add(IntCounterVec::new(Opts::new(name, help), &Self::labels(&[]))?)?;
        Ok(self.children(&[], |values| family.with_label_values(values)))
    }

    /// Registers a counter per replica and value of `label`; returns one vector per value.
    pub(super) fn counters_of_replicas<const N: usize>(
        &self,
        name: &str,
        help: &str,
        label: &str,
        values: [&str; N],
    ) -> Result<[Vec<IntCounter>; N], Error> {
        let labels = Self::labels(&[label]);
        let family = self.add(IntCounterVec::new(Opts::new(name, help), &labels)?)?;
        Ok(values.map(|value| self.children(&[value], |values| family.with_label_values(values))))
    }

    /// Registers a counter per replica and combination of values of `labels`; the values depend on the model.
    /// Returns one entry per combination, in order.
    pub(super) fn counters_by<const N: usize>(
        &self,
        name: &str,
        help: &str,
        labels: [&str; N],
        values: &[[&str; N]],
    ) -> Result<Vec<ReplicaOrSharedSeries<IntCounter>>, Error> {
        let labels = Self::labels(&labels);
        let family = self.add(IntCounterVec::new(Opts::new(name, help), &labels)?)?;
        let of =
            |own: &[&str; N]| self.children(own, |values| family.with_label_values(values)).into();
        Ok(values.iter().map(of).collect())
    }

    /// Registers a gauge per replica.
    pub(super) fn gauge_of_replicas(&self, name: &str, help: &str) -> Result<Vec<Gauge>, Error> {
        let family = self.add(GaugeVec::new(Opts::new(name, help), &Self::labels(&[]))?)?;
        Ok(self.children(&[], |values| family.with_label_values(values)))
    }

    /// Registers a gauge per replica and value of `label`; returns one vector per value.
    pub(super) fn gauges_of_replicas<const N: usize>(
        &self,
        name: &str,
        help: &str,
        label: &str,
        values: [&str; N],
    ) -> Result<[Vec<Gauge>; N], Error> {
        let labels = Self::labels(&[label]);
        let family = self.add(GaugeVec::new(Opts::new(name, help), &labels)?)?;
        Ok(values.map(|value| self.children(&[value], |values| family.with_label_values(values))))
    }

    /// Registers a gauge of the whole server per value of `label`; the label `engine` is 0.
    pub(super) fn gauges<const N: usize>(
        &self,
        name: &str,
        help: &str,
        label: &str,
        values: [&str; N],
    ) -> Result<[Gauge; N], Error> {
        let labels = ["model_name", "engine", label];
        let family = self.add(GaugeVec::new(Opts::new(name, help), &labels)?)?;
        Ok(values.map(|value| family.with_label_values(&[self.model, "0", value])))
    }

    /// Registers a gauge per executor, with its replica and world rank as labels.
    pub(super) fn gauge_of_ranks(&self, name: &str, help: &str) -> Result<Vec<Gauge>, Error> {
        let family = self.add(GaugeVec::new(Opts::new(name, help), &Self::labels(&["rank"]))?)?;
        Ok(self.ranks().map(|values| family.with_label_values(&values)).collect())
    }

    /// Registers a gauge per value of `label` and replica, for the replica's first executor. Returns one
    /// vector per value, indexed by replica.
    pub(super) fn gauges_of_first_ranks(
        &self,
        name: &str,
        help: &str,
        label: &str,
        values: &[&str],
    ) -> Result<Vec<Vec<Gauge>>, Error> {
        let labels = ["model_name", "engine", "rank", label];
        let family = self.add(GaugeVec::new(Opts::new(name, help), &labels)?)?;
        let of = |value: &&str| {
            let first = self.ranks().step_by(usize::from(self.tp_size));
            let child = |[model, engine, rank]: [String; 3]| {
                family.with_label_values(&[&model[..], &engine, &rank, value])
            };
            first.map(child).collect()
        };
        Ok(values.iter().map(of).collect())
    }

    /// Registers a counter per executor, with its replica and world rank as labels.
    pub(super) fn counter_of_ranks(
        &self,
        name: &str,
        help: &str,
    ) -> Result<Vec<IntCounter>, Error> {
        let labels = Self::labels(&["rank"]);
        let family = self.add(IntCounterVec::new(Opts::new(name, help), &labels)?)?;
        Ok(self.ranks().map(|values| family.with_label_values(&values)).collect())
    }

    /// Returns the values of the labels `model_name`, `engine` and `rank` of each executor.
    fn ranks(&self) -> impl Iterator<Item = [String; 3]> {
        (0..self.ranks).map(|rank| {
            let last = self.engines.len() - 1;
            let engine = usize::from(rank / self.tp_size).min(last);
            [self.model.to_owned(), self.engines[engine].clone(), rank.to_string()]
        })
    }

    /// Number of executors per replica.
    pub(super) fn tp_size(&self) -> u16 {
        self.tp_size
    }

    /// Number of replicas, including replicas that share one series.
    pub(super) fn replicas(&self) -> u16 {
        self.ranks / self.tp_size
    }

    /// Registers a gauge with only the given labels, without `model_name` and `engine`.
    pub(super) fn info(
        &self,
        name: &str,
        help: &str,
        labels: &[InfoLabel<'_>],
    ) -> Result<Gauge, Error> {
        let names: Vec<&str> = labels.iter().map(|label| label.name).collect();
        let values: Vec<&str> = labels.iter().map(|label| label.value).collect();
        let family = self.add(GaugeVec::new(Opts::new(name, help), &names)?)?;
        Ok(family.with_label_values(&values))
    }

    /// Registers an info gauge per replica: its value is 1, its labels are the labels passed and `engine`.
    pub(super) fn info_of_replicas(
        &self,
        name: &str,
        help: &str,
        labels: &[InfoLabel<'_>],
    ) -> Result<(), Error> {
        let mut names: Vec<&str> = labels.iter().map(|label| label.name).collect();
        let mut values: Vec<&str> = labels.iter().map(|label| label.value).collect();
        names.push("engine");
        let family = self.add(GaugeVec::new(Opts::new(name, help), &names)?)?;
        for engine in &self.engines {
            values.push(engine);
            family.with_label_values(&values).set(1.0);
            values.pop();
        }
        Ok(())
    }

    /// Registers a counter of seconds of the whole server; its label `engine` is 0.
    pub(super) fn seconds(&self, name: &str, help: &str) -> Result<Counter, Error> {
        let family = CounterVec::new(Opts::new(name, help), &["model_name", "engine"])?;
        Ok(self.add(family)?.with_label_values(&[self.model, "0"]))
    }

    /// Registers a gauge of the whole server, without the label `engine`.
    pub(super) fn gauge(&self, name: &str, help: &str) -> Result<Gauge, Error> {
        let family = GaugeVec::new(Opts::new(name, help), &["model_name"])?;
        Ok(self.add(family)?.with_label_values(&[self.model]))
    }

    /// Registers a counter family whose label values are not all known at start-up; the caller creates its
    /// series.
    pub(super) fn open_counters(
        &self,
        name: &str,
        help: &str,
        labels: &[&str],
    ) -> Result<IntCounterVec, Error> {
        self.add(IntCounterVec::new(Opts::new(name, help), labels)?)
    }

    /// Value of the label `model_name`.
    pub(super) fn model(&self) -> &str {
        self.model
    }

    fn labels<'l>(additional: &[&'l str]) -> Vec<&'l str> {
        [&["model_name", "engine"], additional].concat()
    }

    /// Creates the series of a metric family, one per value of the label `engine`. `additional`: values of
    /// further labels that all of these series have.
    fn children<T>(&self, additional: &[&str], child: impl Fn(&[&str]) -> T) -> Vec<T> {
        let values = |engine: &String| child(&[&[self.model, engine], additional].concat());
        self.engines.iter().map(values).collect()
    }
}
