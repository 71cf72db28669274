//! Renders the metrics page from a template: between scrapes only the numbers change.
//!
//! The Prometheus library renders the first page, and the text before each number is kept. Series are never
//! removed and the labels of a series never change, so an equal number of series per family means equal
//! series. If the number of series of a family has changed, the Prometheus library renders the page again.

use prometheus::proto::{Histogram, MetricFamily, MetricType};
use prometheus::{Encoder, Error, TextEncoder};
use std::fmt::Write as _;

/// Estimated size of a number on the page, in bytes, by which memory for the page is reserved.
const NUMBER_BYTES: usize = 12;
/// 2^53: whole numbers of smaller magnitude are written as integers, which represent them exactly.
const WHOLE_BELOW: f64 = 9_007_199_254_740_992.0;

/// Metrics page without its numbers.
#[derive(Default)]
pub(super) struct ExpositionTemplate {
    /// Number of series of each metric family, in page order. If it changes, the template is built again.
    shape: Vec<usize>,
    template: String,
    /// Byte offset in `template` at which each number of the page is inserted.
    number_offsets: Vec<usize>,
}

impl ExpositionTemplate {
    /// Renders the metric families in text format 0.0.4, byte for byte as the Prometheus library does.
    ///
    /// Errors: the errors of the Prometheus library; none is known to occur.
    pub(super) fn write(&mut self, families: &[MetricFamily]) -> Result<String, Error> {
        if !families.iter().map(series).eq(self.shape.iter().copied()) {
            *self = Self::of(families)?;
        }
        let bytes = self.template.len() + NUMBER_BYTES * self.number_offsets.len();
        let mut page = String::with_capacity(bytes);
        let (mut from, mut offsets) = (0, self.number_offsets.iter());
        each_number(families, |number| {
            let to = offsets.next().copied().unwrap_or(from);
            page.push_str(&self.template[from..to]);
            write_number(&mut page, number);
            from = to;
        });
        page.push_str(&self.template[from..]);
        Ok(page)
    }

    /// Builds the template from a page rendered by the Prometheus library.
    fn of(families: &[MetricFamily]) -> Result<Self, Error> {
        let mut page = Vec::new();
        TextEncoder::new().encode(families, &mut page)?;
        let page = String::from_utf8(page).map_err(|error| Error::Msg(error.to_string()))?;
        let shape = families.iter().map(series).collect();
        let mut template = String::with_capacity(page.len());
        let mut number_offsets = Vec::new();
        for line in page.lines() {
            match line.rsplit_once(' ').filter(|_| !line.starts_with('#')) {
                None => template += line,
                Some((head, _)) => {
                    template += head;
                    template.push(' ');
                    number_offsets.push(template.len());
                }
            }
            template.push('\n');
        }
        let mut numbers = 0;
        each_number(families, |_| numbers += 1);
        if numbers != number_offsets.len() {
            let text = format!("a page of {} samples has {numbers} numbers", number_offsets.len());
            return Err(Error::Msg(text));
        }
        Ok(Self { shape, template, number_offsets })
    }
}

fn series(family: &MetricFamily) -> usize {
    family.get_metric().len()
}

/// Calls `take` with every number of the page, in the order in which the Prometheus library writes them.
fn each_number(families: &[MetricFamily], mut take: impl FnMut(f64)) {
    for family in families {
        let kind = family.get_field_type();
        for metric in family.get_metric() {
            match kind {
                MetricType::COUNTER => take(metric.get_counter().get_value()),
                MetricType::GAUGE => take(metric.get_gauge().get_value()),
                MetricType::HISTOGRAM => of_histogram(metric.get_histogram(), &mut take),
                // No registered metric has these types. With such a metric, `ExpositionTemplate::of` would
                // find a different count of numbers and fail.
                MetricType::SUMMARY | MetricType::UNTYPED => {}
            }
        }
    }
}

fn of_histogram(histogram: &Histogram, take: &mut impl FnMut(f64)) {
    let buckets = histogram.get_bucket();
    for bucket in buckets {
        take(bucket.cumulative_count() as f64);
    }
    if buckets.last().is_none_or(|last| last.upper_bound() != f64::INFINITY) {
        take(histogram.get_sample_count() as f64);
    }
    take(histogram.get_sample_sum());
    take(histogram.get_sample_count() as f64);
}

fn write_number(page: &mut String, number: f64) {
    // Writing to a string cannot fail.
    let _ = if number.trunc() == number && number.abs() < WHOLE_BELOW {
        write!(page, "{}", number as i64)
    } else {
        write!(page, "{number}")
    };
}

#[cfg(test)]
mod tests {
    use super::*;
    use prometheus::{Gauge, HistogramOpts, HistogramVec, IntCounterVec, Opts, Registry};

    fn encode_with_library(families: &[MetricFamily]) -> String {
        let mut page = Vec::new();
        TextEncoder::new().encode(families, &mut page).unwrap();
        String::from_utf8(page).unwrap()
    }

    #[test]
    fn pages_equal_the_prometheus_encoder_output() {
        let registry = Registry::new();
        let gauge = Gauge::new("level", "A level,\nin two lines.").unwrap();
        let counters = IntCounterVec::new(Opts::new("seen_total", "Seen."), &["what"]).unwrap();
        let opts = HistogramOpts::new("took_seconds", "Took.").buckets(vec![1e-6, 0.25, 10.0]);
        let times = HistogramVec::new(opts, &["phase"]).unwrap();
        registry.register(Box::new(gauge.clone())).unwrap();
        registry.register(Box::new(counters.clone())).unwrap();
        registry.register(Box::new(times.clone())).unwrap();
        let mut exposition = ExpositionTemplate::default();
        let mut check = || {
            let families = registry.gather();
            assert_eq!(exposition.write(&families).unwrap(), encode_with_library(&families));
        };
        check();
        for level in [0.0, -3.0, 0.1, 1e15, 1e16, 1.5e300, 4e-9, f64::NAN, f64::INFINITY] {
            gauge.set(level);
            check();
        }
        for (round, what) in ["a b", "#", "quo\"te", "new\nline", "", "a b"].iter().enumerate() {
            counters.with_label_values(&[what]).inc_by(round as u64);
            times.with_label_values(&[if round % 2 == 0 { "plan" } else { "wait" }]).observe(0.2);
            check();
        }
    }
}
