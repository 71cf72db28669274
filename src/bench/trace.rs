//! `hadron bench trace`: summarises a trace of `--profile`: step times, gaps between steps, and step time per
//! kernel family.
//!
//! Steps with timestamps per kernel launch are slower than other steps: they contribute the time per kernel
//! family, and the other steps contribute step times and gaps. A gap counts if the step after it continues a
//! running request: before a step of new requests only, the device waited for clients.

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
use crate::config::TraceArgs;

/// Prints the tables of one trace.
pub(super) fn run(args: &TraceArgs) -> Result<ExitCode> {
    let kinds = read(&args.file).with_context(|| args.file.display().to_string())?;
    if kinds.is_empty() {
        bail!("{}: no step is recorded", args.file.display());
    }
    print_table(
        &["step", "steps", "rows", "tokens", "ms", "gaps", "gap us", "gap of step"],
        &kinds.iter().map(|(kind, sums)| sums.row(&kind.to_string())).collect::<Vec<_>>(),
    )?;
    for (kind, sums) in kinds.iter().filter(|(_, sums)| sums.timed_steps.steps > 0) {
        let marked = &sums.timed_steps;
        writeln!(stdout(), "\n{kind}: {} steps marked launch by launch", marked.steps)?;
        print_table(&["part", "launches", "ms", "share"], &marked.rows())?;
    }
    Ok(ExitCode::SUCCESS)
}

/// Event of a trace file, one per line.
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

/// Arguments of a trace event.
#[derive(Deserialize, Default)]
#[serde(default)]
struct TraceEventArgs<'a> {
    step: u64,
    rows: u32,
    fresh: u32,
    tokens: u32,
    graph: Option<u32>,
    marked: bool,
    #[serde(borrow)]
    family: Cow<'a, str>,
}

/// Class of comparable steps.
#[derive(Debug, Clone, Copy, PartialEq, Eq, PartialOrd, Ord)]
enum StepClass {
    /// Replays of the captured graph with this number of rows.
    Replay(u32),
    /// Eager decode steps of one token per row, with up to this number of rows.
    Decode(u32),
    /// Eager steps with prefill, with up to this number of tokens.
    Mixed(u32),
}

impl StepClass {
    fn of(facts: &TraceEventArgs<'_>) -> Self {
        match facts.graph {
            Some(rows) => Self::Replay(rows),
            None if facts.tokens == facts.rows => Self::Decode(facts.rows.next_power_of_two()),
            None => Self::Mixed(facts.tokens.next_power_of_two()),
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

/// Totals over the steps of a class. Times are in microseconds.
#[derive(Debug, Default)]
struct StepClassTotals {
    /// Number of steps without launch timestamps.
    steps: u32,
    rows: u64,
    tokens: u64,
    us: f64,
    gaps: u32,
    gap_us: f64,
    /// Total time of the steps after counted gaps.
    gap_steps_us: f64,
    timed_steps: KernelFamilyTotals,
}

/// Totals over the steps with launch timestamps.
#[derive(Debug, Default)]
struct KernelFamilyTotals {
    steps: u32,
    us: f64,
    /// Number of launches and time in microseconds per kernel family.
    families: BTreeMap<String, (u32, f64)>,
}

/// Step before a possible gap.
#[derive(Debug, Clone, Copy)]
struct PreviousStep {
    step: u64,
    end_us: f64,
    marked: bool,
}

fn read(path: &Path) -> Result<BTreeMap<StepClass, StepClassTotals>> {
    let mut kinds: BTreeMap<StepClass, StepClassTotals> = BTreeMap::new();
    let (mut kind, mut former) = (None, None);
    for (n, line) in (1..).zip(BufReader::new(File::open(path)?).lines()) {
        let line = line?;
        let text = line.trim_end().trim_end_matches(',');
        if !text.starts_with("{\"name\"") {
            continue; // Start or end of the JSON document.
        }
        let event: ChromeTraceEvent<'_> =
            serde_json::from_str(text).with_context(|| format!("line {n}"))?;
        match (event.cat.as_ref(), kind) {
            ("step", _) => {
                let of = StepClass::of(&event.args);
                kinds.entry(of).or_default().add(&event, former);
                let (step, marked) = (event.args.step, event.args.marked);
                former = Some(PreviousStep { step, end_us: event.ts + event.dur, marked });
                kind = Some(of);
            }
            ("kernel", Some(of)) => kinds.entry(of).or_default().timed_steps.add(&event),
            _ => {}
        }
    }
    Ok(kinds)
}

impl StepClassTotals {
    fn add(&mut self, event: &ChromeTraceEvent<'_>, former: Option<PreviousStep>) {
        let facts = &event.args;
        if facts.marked {
            self.timed_steps.steps += 1;
            self.timed_steps.us += event.dur;
            return;
        }
        self.steps += 1;
        self.rows += u64::from(facts.rows);
        self.tokens += u64::from(facts.tokens);
        self.us += event.dur;
        let next = |former: &PreviousStep| former.step + 1 == facts.step && !former.marked;
        if let Some(former) = former.filter(next)
            && facts.fresh < facts.rows
        {
            self.gaps += 1;
            self.gap_us += event.ts - former.end_us;
            self.gap_steps_us += event.dur;
        }
    }

    fn row(&self, kind: &str) -> Vec<String> {
        let mean = |sum: f64, of: u32| sum / f64::from(of.max(1));
        let gap = |text: String| if self.gaps > 0 { text } else { "-".to_owned() };
        vec![
            kind.to_owned(),
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

    /// Returns a row per kernel family in descending order of time, then a row for the remaining time and the
    /// total.
    fn rows(&self) -> Vec<Vec<String>> {
        let steps = f64::from(self.steps.max(1));
        let row = |name: &str, launches: Option<u32>, us: f64| {
            let launches =
                launches.map_or("-".to_owned(), |n| format!("{:.1}", f64::from(n) / steps));
            let ms = format!("{:.3}", us / steps / 1e3);
            vec![name.to_owned(), launches, ms, format!("{:.1} %", 100.0 * us / self.us)]
        };
        let mut parts: Vec<_> = self.families.iter().collect();
        parts.sort_by(|(_, a), (_, b)| b.1.total_cmp(&a.1));
        let known: f64 = parts.iter().map(|(_, (_, us))| us).sum();
        let between = (self.us - known).max(0.0); // Timestamps are rounded.
        let rest = [row("between them", None, between), row("all", None, self.us)];
        let parts = parts.iter().map(|(name, (n, us))| row(name, Some(*n), *us));
        parts.chain(rest).collect()
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    /// Returns a step event at `ts` with duration `dur` and arguments `args`.
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
            step(200, 49, &format!(r#""step":2,{one}"#)), // 100.5 after the previous step.
            step(260, 49, &format!(r#""step":3,{one}"#)), // 10.5
            step(320, 149, &format!(r#""step":4,{one},"marked":true"#)),
            r#"{"name":"gemm","cat":"kernel","ts":320.000,"dur":100.000,"args":{"family":"products"}}"#.to_owned(),
            r#"{"name":"silu","cat":"kernel","ts":420.000,"dur":20.000,"args":{"family":"elementwise"}}"#.to_owned(),
            step(500, 49, &format!(r#""step":5,{one}"#)), // After a step with launch timestamps.
            step(560, 49, &format!(r#""step":7,{one}"#)), // Step 6 is missing.
            step(900, 49, r#""step":8,"rows":1,"fresh":1,"tokens":1,"graph":1"#), // New requests only.
        ];
        let path = std::env::temp_dir().join(format!("hadron-trace-{}.json", std::process::id()));
        std::fs::write(&path, format!("{{\"traceEvents\":[\n{}\n]}}\n", lines.join(",\n")))
            .unwrap();
        let kinds = read(&path).unwrap();
        std::fs::remove_file(&path).unwrap();
        let rows: Vec<String> =
            kinds.iter().map(|(kind, sums)| sums.row(&kind.to_string()).join(" | ")).collect();
        let expected = [
            "replay of 1 rows | 5 | 1.0 | 1.0 | 0.050 | 2 | 55.5 | 112.12 %",
            "prefill, <= 8 tokens | 1 | 1.0 | 8.0 | 0.100 | 0 | - | -",
        ];
        assert_eq!(rows, expected);
        let parts: Vec<String> = kinds[&StepClass::Replay(1)]
            .timed_steps
            .rows()
            .iter()
            .map(|row| row.join(" | "))
            .collect();
        let expected = [
            "products | 1.0 | 0.100 | 66.9 %",
            "elementwise | 1.0 | 0.020 | 13.4 %",
            "between them | - | 0.029 | 19.7 %",
            "all | - | 0.149 | 100.0 %",
        ];
        assert_eq!(parts, expected);
    }
}
