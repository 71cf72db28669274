//! Registration of histograms: per replica, per label value, or for the whole server.

use super::{MetricRegistrar, ReplicaOrSharedSeries};
use crate::histogram_buckets::HistogramFamily;
use prometheus::{Error, Histogram, HistogramOpts, HistogramVec};

impl MetricRegistrar<'_> {
    /// Registers a histogram per replica.
    pub(crate) fn histogram_of_replicas(
        &self,
        name: &str,
        help: &str,
        family: HistogramFamily,
    ) -> Result<ReplicaOrSharedSeries<Histogram>, Error> {
        let opts = HistogramOpts::new(name, help).buckets(self.buckets.of(family));
        let family = self.add(HistogramVec::new(opts, &Self::labels(&[]))?)?;
        Ok(ReplicaOrSharedSeries(self.children(&[], |values| family.with_label_values(values))))
    }

    /// Registers a histogram per replica and value of `label`; returns one entry per value.
    pub(crate) fn histograms_of_replicas<const N: usize>(
        &self,
        name: &str,
        help: &str,
        family: HistogramFamily,
        label: &str,
        values: [&str; N],
    ) -> Result<[ReplicaOrSharedSeries<Histogram>; N], Error> {
        let opts = HistogramOpts::new(name, help).buckets(self.buckets.of(family));
        let family = self.add(HistogramVec::new(opts, &Self::labels(&[label]))?)?;
        let of = |value| self.children(&[value], |values| family.with_label_values(values));
        Ok(values.map(|value| ReplicaOrSharedSeries(of(value))))
    }

    /// Registers a histogram per replica and pair of values of two labels; returns one entry per pair, in
    /// order.
    pub(crate) fn histograms_by(
        &self,
        name: &str,
        help: &str,
        family: HistogramFamily,
        [first, second]: [&str; 2],
        values: &[[&str; 2]],
    ) -> Result<Vec<ReplicaOrSharedSeries<Histogram>>, Error> {
        let opts = HistogramOpts::new(name, help).buckets(self.buckets.of(family));
        let family =
            self.add(HistogramVec::new(opts, &["model_name", "engine", first, second])?)?;
        let of = |[first, second]: &[&str; 2]| {
            let child =
                |engine: &String| family.with_label_values(&[self.model, engine, first, second]);
            ReplicaOrSharedSeries(self.engines.iter().map(child).collect())
        };
        Ok(values.iter().map(of).collect())
    }

    /// Registers a histogram of the whole server per value of `label`; the label `engine` is 0.
    pub(crate) fn histograms<const N: usize>(
        &self,
        name: &str,
        help: &str,
        family: HistogramFamily,
        label: &str,
        values: [&str; N],
    ) -> Result<[Histogram; N], Error> {
        let opts = HistogramOpts::new(name, help).buckets(self.buckets.of(family));
        let labels = ["model_name", "engine", label];
        let family = self.add(HistogramVec::new(opts, &labels)?)?;
        Ok(values.map(|value| family.with_label_values(&[self.model, "0", value])))
    }
}
