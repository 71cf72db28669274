//! `hadron bench trace`: summarises a trace that `--profile` wrote: step times, gaps between steps, and the
//! time per kernel family.
//!
//! Some steps have a timestamp per kernel launch, which makes them slower. These steps give the time per
//! kernel family; the other steps give step times and gaps. A gap is counted only if the step after it
//! continues a running request: before a step with new requests only, the device may have waited for clients.

use std::borrow::Cow;
use std::collections::BTreeMap;
use std::fmt;
use std::fs::File;
use std::io::{BufRead as _, BufReader, Write as _, stdout};
use std::path::Path;
use std::process::ExitCode;

use anyhow::{Context as _, Result, bail};
use serde::Deserialize;

use super::report::print_table;
use crate::config::BenchTraceArgs;

/// Prints the summary tables of one trace file.
pub(super) fn run(args: &BenchTraceArgs) -> Result<ExitCode> {
    let classes = read(&args.file).with_context(|| args.file.display().to_string())?;
    if classes.is_empty() {
        bail!("{}: the trace contains no step", args.file.display());
    }
    print_table(
        &["step", "steps", "rows", "tokens", "ms", "gaps", "gap us", "gap of step"],
        &classes.iter().map(|(class, totals)| totals.row(&class.to_string())).collect::<Vec<_>>(),
    )?;
    for (class, totals) in classes.iter().filter(|(_, totals)| totals.timed_steps.steps > 0) {
        let timed = &totals.timed_steps;
        writeln!(stdout(), "\n{class}: {} steps with timestamps per launch", timed.steps)?;
        print_table(&["family", "launches", "ms", "share"], &timed.rows())?;
    }
    Ok(ExitCode::SUCCESS)
}

/// An event of a trace file, which has one event per line.
#[derive(Deserialize)]
struct ChromeTraceEvent<'a> {
    #[serde(borrow, default)]
    cat: Cow<'a, str>,
    #[serde(default)]
    ts: f64,
    #[serde(default)]
    dur: f64,
    #[serde(borrow)]
    args: TraceEventArgs<'a>,
}

/// Arguments of a trace event, as the executor writes them.
#[derive(Deserialize, Default)]
#[serde(default)]
struct TraceEventArgs<'a> {
    step: u64,
    rows: u32,
    fresh: u32,
    tokens: u32,
    graph: Option<u32>,
    #[serde(rename = "marked")]
    has_launch_timestamps: bool,
    #[serde(borrow)]
    family: Cow<'a, str>,
}

/// Steps with comparable times form a class, defined by launch mode and size. The report has one table row
/// per class.
#[derive(Debug, Clone, Copy, PartialEq, Eq, PartialOrd, Ord)]
enum StepClass {
    /// Replays of the captured graph that has this number of rows.
    Replay(u32),
    /// Eager (not graph-captured) decode steps of one token per row, with up to this number of rows.
    Decode(u32),
    /// Eager (not graph-captured) steps with prefill, with up to this number of tokens.
    Mixed(u32),
}

impl StepClass {
    fn from_args(args: &TraceEventArgs<'_>) -> Self {
        match args.graph {
            Some(rows) => Self::Replay(rows),
            None if args.tokens == args.rows => Self::Decode(args.rows.next_power_of_two()),
            None => Self::Mixed(args.tokens.next_power_of_two()),
        }
    }
}

impl fmt::Display for StepClass {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self {
            Self::Replay(rows) => write!(f, "replay of {rows} rows"),
            Self::Decode(rows) => write!(f, "decode, <= {rows} rows"),
            Self::Mixed(tokens) => write!(f, "prefill, <= {tokens} tokens"),
        }
    }
}

/// Totals over the steps of a class; times are in microseconds.
#[derive(Debug, Default)]
struct StepClassTotals {
    /// Number of steps without a timestamp per kernel launch. The fields up to `gap_steps_us` cover only
    /// these steps.
    steps: u32,
    rows: u64,
    tokens: u64,
    us: f64,
    gaps: u32,
    gap_us: f64,
    /// Total time of the steps that follow a counted gap. The report shows `gap_us` as a fraction of this
    /// time.
    gap_steps_us: f64,
    timed_steps: KernelFamilyTotals,
}

/// Totals over the steps with a timestamp per kernel launch; times are in microseconds.
#[derive(Debug, Default)]
struct KernelFamilyTotals {
    steps: u32,
    us: f64,
    /// Number of launches, and their total time, per kernel family.
    families: BTreeMap<String, (u32, f64)>,
}

/// End time of the step that precedes the current step. The gap between two steps lasts from the end of one
/// step to the start of the next step.
#[derive(Debug, Clone, Copy)]
struct PrecedingStepEnd {
    step: u64,
    end_us: f64,
    has_launch_timestamps: bool,
}

fn read(path: &Path) -> Result<BTreeMap<StepClass, StepClassTotals>> {
    let mut classes: BTreeMap<StepClass, StepClassTotals> = BTreeMap::new();
    let (mut class, mut previous) = (None, None);
    for (n, line) in (1..).zip(BufReader::new(File::open(path)?).lines()) {
        let line = line?;
        let text = line.trim_end().trim_end_matches(',');
        if !text.starts_with("{\"name\"") {
            continue; // First or last lines of the JSON document.
        }
        let event: ChromeTraceEvent<'_> =
            serde_json::from_str(text).with_context(|| format!("line {n}"))?;
        match (event.cat.as_ref(), class) {
            ("step", _) => {
                let step_class = StepClass::from_args(&event.args);
                classes.entry(step_class).or_default().add(&event, previous);
                let TraceEventArgs { step, has_launch_timestamps, .. } = event.args;
                let end_us = event.ts + event.dur;
                previous = Some(PrecedingStepEnd { step, end_us, has_launch_timestamps });
                class = Some(step_class);
            }
            ("kernel", Some(step_class)) => {
                classes.entry(step_class).or_default().timed_steps.add(&event);
            }
            _ => {}
        }
    }
    Ok(classes)
}

impl StepClassTotals {
    fn add(&mut self, event: &ChromeTraceEvent<'_>, previous: Option<PrecedingStepEnd>) {
        let args = &event.args;
        if args.has_launch_timestamps {
            self.timed_steps.steps += 1;
            self.timed_steps.us += event.dur;
            return;
        }
        self.steps += 1;
        self.rows += u64::from(args.rows);
        self.tokens += u64::from(args.tokens);
        self.us += event.dur;
        let is_next = |previous: &PrecedingStepEnd| {
            previous.step + 1 == args.step && !previous.has_launch_timestamps
        };
        if let Some(previous) = previous.filter(is_next)
            && args.fresh < args.rows
        {
            self.gaps += 1;
            self.gap_us += event.ts - previous.end_us;
            self.gap_steps_us += event.dur;
        }
    }

    fn row(&self, class: &str) -> Vec<String> {
        let mean = |sum: f64, count: u32| sum / f64::from(count.max(1));
        let gap = |text: String| if self.gaps > 0 { text } else { "-".to_owned() };
        vec![
            class.to_owned(),
            self.steps.to_string(),
            format!("{:.1}", mean(self.rows as f64, self.steps)),
            format!("{:.1}", mean(self.tokens as f64, self.steps)),
            format!("{:.3}", mean(self.us, self.steps) / 1e3),
            self.gaps.to_string(),
            gap(format!("{:.1}", mean(self.gap_us, self.gaps))),
            gap(format!("{:.2} %", 100.0 * self.gap_us / self.gap_steps_us)),
        ]
    }
}

impl KernelFamilyTotals {
    fn add(&mut self, event: &ChromeTraceEvent<'_>) {
        let family = self.families.entry(event.args.family.to_string()).or_default();
        family.0 += 1;
        family.1 += event.dur;
    }

    /// Returns the rows of the table: one per kernel family, in descending order of time; then the time
    /// between launches, and the total time.
    fn rows(&self) -> Vec<Vec<String>> {
        let steps = f64::from(self.steps.max(1));
        let row = |name: &str, launches: Option<u32>, us: f64| {
            let launches =
                launches.map_or("-".to_owned(), |n| format!("{:.1}", f64::from(n) / steps));
            let ms = format!("{:.3}", us / steps / 1e3);
            vec![name.to_owned(), launches, ms, format!("{:.1} %", 100.0 * us / self.us)]
        };
        let mut families: Vec<_> = self.families.iter().collect();
        families.sort_by(|(_, a), (_, b)| b.1.total_cmp(&a.1));
        let attributed_us: f64 = families.iter().map(|(_, (_, us))| us).sum();
        let between_us = (self.us - attributed_us).max(0.0); // Timestamps are rounded.
        let rest = [row("between launches", None, between_us), row("all", None, self.us)];
        let families = families.iter().map(|(name, (n, us))| row(name, Some(*n), *us));
        families.chain(rest).collect()
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    /// Returns a step event in JSON at time `ts` with duration `dur` and arguments `args`.
    fn step(ts: u32, dur: u32, args: &str) -> String {
        format!(
            r#"{{"name":"step","cat":"step","ph":"X","ts":{ts}.000,"dur":{dur}.500,"args":{{{args}}}}}"#
        )
    }

    #[test]
    fn gaps_count_only_while_requests_continue() {
        let one = r#""rows":1,"fresh":0,"tokens":1,"graph":1"#;
        let lines = [
            step(0, 99, r#""step":1,"rows":1,"fresh":1,"tokens":8,"graph":null"#),
            step(200, 49, &format!(r#""step":2,{one}"#)), // 100.5 µs after the previous step.
            step(260, 49, &format!(r#""step":3,{one}"#)), // 10.5 µs after the previous step.
            step(320, 149, &format!(r#""step":4,{one},"marked":true"#)),
            r#"{"name":"gemm","cat":"kernel","ts":320.000,"dur":100.000,"args":{"family":"linear layers"}}"#.to_owned(),
            r#"{"name":"silu","cat":"kernel","ts":420.000,"dur":20.000,"args":{"family":"elementwise"}}"#.to_owned(),
            step(500, 49, &format!(r#""step":5,{one}"#)), // Follows a step with launch timestamps.
            step(560, 49, &format!(r#""step":7,{one}"#)), // Step 6 is missing.
            step(900, 49, r#""step":8,"rows":1,"fresh":1,"tokens":1,"graph":1"#), // New requests only.
        ];
        let path = std::env::temp_dir().join(format!("hadron-trace-{}.json", std::process::id()));
        std::fs::write(&path, format!("{{\"traceEvents\":[\n{}\n]}}\n", lines.join(",\n")))
            .unwrap();
        let classes = read(&path).unwrap();
        std::fs::remove_file(&path).unwrap();
        let rows: Vec<String> = classes
            .iter()
            .map(|(class, totals)| totals.row(&class.to_string()).join(" | "))
            .collect();
        let expected = [
            "replay of 1 rows | 5 | 1.0 | 1.0 | 0.050 | 2 | 55.5 | 112.12 %",
            "prefill, <= 8 tokens | 1 | 1.0 | 8.0 | 0.100 | 0 | - | -",
        ];
        assert_eq!(rows, expected);
        let families: Vec<String> = classes[&StepClass::Replay(1)]
            .timed_steps
            .rows()
            .iter()
            .map(|row| row.join(" | "))
            .collect();
        let expected = [
            "linear layers | 1.0 | 0.100 | 66.9 %",
            "elementwise | 1.0 | 0.020 | 13.4 %",
            "between launches | - | 0.029 | 19.7 %",
            "all | - | 0.149 | 100.0 %",
        ];
        assert_eq!(families, expected);
    }
}
