//! `hadron bench compare`: compares the metrics of two benchmark result files.

use std::path::Path;
use std::process::ExitCode;

use anyhow::{Context as _, Result, bail};
use serde_json::Value;

use super::report;
use crate::config::BenchCompareArgs;

/// Compared metrics: JSON pointer into the results of a level (one set of parameters that a benchmark
/// measured), and whether a higher value is better.
const COMPARED_METRICS: &[(&str, bool)] = &[
    ("/output_tok_s", true),
    ("/total_tok_s", true),
    ("/ttft_ms/p50", false),
    ("/ttft_ms/p99", false),
    ("/tpot_ms/p50", false),
    ("/tpot_ms/p99", false),
    ("/itl_ms/p99", false),
    ("/e2e_ms/p50", false),
    ("/step_us/p50", false),
    ("/step_us/p99", false),
    ("/time_us/p50", false),
];

/// Keys that identify a level (one set of parameters) in a result file. Levels with equal values of these
/// keys are compared between both files.
const LEVEL_KEYS: &[&str] = &["concurrency", "running", "op", "tokens"];

/// Prints every metric that both files contain, with its change. The exit code is 1 if `--fail-above` is
/// exceeded.
pub(super) fn run(args: &BenchCompareArgs) -> Result<ExitCode> {
    let (before, after) = (read(&args.before)?, read(&args.after)?);
    if before["kind"] != after["kind"] {
        bail!("the files are of different benchmarks: {} and {}", before["kind"], after["kind"]);
    }
    if before["settings"] != after["settings"] {
        tracing::warn!("settings differ: {} and {}", before["settings"], after["settings"]);
    }
    let mut rows = Vec::new();
    let mut worst = f64::NEG_INFINITY;
    for level in levels(&before) {
        let is_same_level = |other: &&Value| LEVEL_KEYS.iter().all(|key| other[key] == level[key]);
        let Some(other) = levels(&after).iter().find(is_same_level) else { continue };
        for row in compare_level(level, other) {
            worst = worst.max(row.worse_percent);
            rows.push(row.cells(&level_name(level)));
        }
    }
    if rows.is_empty() {
        bail!("the files have no common level");
    }
    report::print_table(&["level", "metric", "before", "after", "change"], &rows)?;
    let failed = args.fail_above.is_some_and(|limit| worst > limit);
    Ok(if failed { ExitCode::FAILURE } else { ExitCode::SUCCESS })
}

struct MetricComparison {
    metric: &'static str,
    before: f64,
    after: f64,
    /// Change of the metric in percent; positive if the metric is worse, negative if it has improved.
    worse_percent: f64,
}

impl MetricComparison {
    fn cells(&self, level: &str) -> Vec<String> {
        let change = (self.after / self.before - 1.0) * 100.0;
        vec![
            level.to_owned(),
            self.metric.trim_start_matches('/').replace('/', " "),
            format!("{:.2}", self.before),
            format!("{:.2}", self.after),
            format!("{change:+.1} %"),
        ]
    }
}

/// Compares the metrics of the same level in both result files. A metric that one file does not contain, or
/// that is 0 in `before`, is skipped.
fn compare_level(before: &Value, after: &Value) -> Vec<MetricComparison> {
    let pair = |&(metric, higher_is_better): &(&'static str, bool)| {
        let value = |level: &Value| level.pointer(metric).and_then(Value::as_f64);
        let (before, after) = (value(before)?, value(after)?);
        let change = (after / before - 1.0) * 100.0;
        let worse_percent = if higher_is_better { -change } else { change };
        (before > 0.0).then_some(MetricComparison { metric, before, after, worse_percent })
    };
    COMPARED_METRICS.iter().filter_map(pair).collect()
}

fn levels(result: &Value) -> &[Value] {
    result["levels"].as_array().map_or(&[], Vec::as_slice)
}

fn level_name(level: &Value) -> String {
    let part = |key: &&str| match &level[*key] {
        Value::Null => None,
        Value::String(text) => Some(format!("{key} {text}")),
        value => Some(format!("{key} {value}")),
    };
    LEVEL_KEYS.iter().filter_map(part).collect::<Vec<_>>().join(", ")
}

fn read(path: &Path) -> Result<Value> {
    let bytes = std::fs::read(path).with_context(|| path.display().to_string())?;
    serde_json::from_slice(&bytes).with_context(|| path.display().to_string())
}

#[cfg(test)]
mod tests {
    use super::*;
    use serde_json::json;

    #[test]
    fn regression_sign_follows_metric_direction() {
        let level = |rate: f64, ttft: f64| json!({"concurrency": 8, "output_tok_s": rate, "ttft_ms": {"p50": ttft, "p99": 0.0}});
        let pairs = compare_level(&level(100.0, 10.0), &level(90.0, 12.0));
        let regressions: Vec<i64> = pairs.iter().map(|p| p.worse_percent.round() as i64).collect();
        assert_eq!(regressions, [10, 20]);
        assert_eq!(level_name(&level(1.0, 1.0)), "concurrency 8");
        assert_eq!(level_name(&json!({"op": "o_proj", "tokens": 8})), "op o_proj, tokens 8");
    }
}
