//! Shows the progress of long operations on stderr: as a progress bar on a terminal, else as periodic log
//! lines.

use std::io::{IsTerminal as _, Write as _};
use std::sync::Mutex;
use std::time::{Duration, Instant};

use indicatif::{HumanBytes, ProgressBar, ProgressDrawTarget, ProgressStyle};

/// Interval between log lines that show progress.
const LINE_INTERVAL: Duration = Duration::from_secs(5);

/// Unit in which progress is shown.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum ProgressUnit {
    /// Bytes, shown in MiB and GiB.
    Bytes,
    /// Items, shown as numbers.
    Items,
}

/// Shows the progress of one operation. If the reporter is dropped without a call of `finish`, the last state
/// stays on the screen.
#[derive(Debug)]
pub struct ProgressReporter {
    label: String,
    unit: ProgressUnit,
    sink: ProgressSink,
}

/// Where progress is shown: as a bar on a terminal, or as log lines.
#[derive(Debug)]
enum ProgressSink {
    Bar(ProgressBar),
    Lines(Mutex<ProgressLogState>),
}

/// State of progress that is shown as log lines.
#[derive(Debug)]
struct ProgressLogState {
    done: u64,
    total: u64,
    started: Instant,
    written: Instant,
}

impl ProgressReporter {
    /// Starts to show an operation with `total` units; 0 = the total is not known yet.
    pub fn new(label: &str, total: u64, unit: ProgressUnit) -> Self {
        let sink = if std::io::stderr().is_terminal() {
            let bar = ProgressBar::with_draw_target(Some(total), ProgressDrawTarget::stderr());
            bar.set_style(style(unit));
            bar.set_message(label.to_owned());
            bar.enable_steady_tick(Duration::from_millis(200));
            ProgressSink::Bar(bar)
        } else {
            let now = Instant::now();
            ProgressSink::Lines(Mutex::new(ProgressLogState {
                done: 0,
                total,
                started: now,
                written: now,
            }))
        };
        Self { label: label.to_owned(), unit, sink }
    }

    /// Sets the number of finished units and the total number.
    pub fn set(&self, done: u64, total: u64) {
        match &self.sink {
            ProgressSink::Bar(bar) => {
                bar.set_length(total);
                bar.set_position(done);
            }
            ProgressSink::Lines(lines) => {
                let Ok(mut lines) = lines.lock() else { return };
                lines.done = done;
                lines.total = total;
                if lines.written.elapsed() >= LINE_INTERVAL {
                    lines.written = Instant::now();
                    self.write_line(&lines, "");
                }
            }
        }
    }

    /// Increases the number of finished units.
    pub fn add(&self, units: u64) {
        match &self.sink {
            ProgressSink::Bar(bar) => bar.inc(units),
            ProgressSink::Lines(lines) => {
                let (done, total) = match lines.lock() {
                    Ok(lines) => (lines.done + units, lines.total),
                    Err(_) => return,
                };
                self.set(done, total);
            }
        }
    }

    /// Ends the operation: removes the progress bar and prints the duration.
    pub fn finish(self) {
        match &self.sink {
            ProgressSink::Bar(bar) => {
                let (done, elapsed) = (bar.position(), bar.elapsed());
                bar.finish_and_clear();
                // A closed stderr must not stop the operation.
                let _ignored = writeln!(std::io::stderr(), "{}", self.summary(done, elapsed));
            }
            ProgressSink::Lines(lines) => {
                let Ok(lines) = lines.lock() else { return };
                tracing::info!("{}", self.summary(lines.done, lines.started.elapsed()));
            }
        }
    }

    fn summary(&self, done: u64, elapsed: Duration) -> String {
        let seconds = elapsed.as_secs_f64();
        format!("{}: {} in {seconds:.1} s", self.label, self.amount(done))
    }

    fn write_line(&self, lines: &ProgressLogState, suffix: &str) {
        let percent = (lines.done * 100).checked_div(lines.total);
        let percent = percent.map_or_else(String::new, |p| format!(" ({p} %)"));
        let of = if lines.total > 0 {
            format!(" of {}", self.amount(lines.total))
        } else {
            String::new()
        };
        tracing::info!("{}: {}{of}{percent}{suffix}", self.label, self.amount(lines.done));
    }

    fn amount(&self, units: u64) -> String {
        match self.unit {
            ProgressUnit::Bytes => HumanBytes(units).to_string(),
            ProgressUnit::Items => units.to_string(),
        }
    }
}

fn style(unit: ProgressUnit) -> ProgressStyle {
    let template = match unit {
        ProgressUnit::Bytes => {
            "{msg} {wide_bar} {bytes}/{total_bytes} {binary_bytes_per_sec} {eta_precise}"
        }
        ProgressUnit::Items => "{msg} {wide_bar} {pos}/{len} {per_sec} {eta_precise}",
    };
    ProgressStyle::with_template(template).unwrap_or_else(|_| ProgressStyle::default_bar())
}
