//! Results of a kill test: counts of signals and requests, and times of detection and recovery.

use super::load::StreamOutcomeCounts;
use super::topologies::KillTestTopology;
use rustix::process::Signal;
use std::collections::BTreeMap;
use std::fmt;
use std::time::{Duration, Instant};

/// Maximum time for which an executor may run after its server has exited.
const ORPHAN_TIME_MAX: Duration = Duration::from_secs(2);

/// A failure of a group of executors, caused by a signal and logged by the server.
#[derive(Debug, Clone, Copy)]
pub(super) struct ObservedFailure {
    pub(super) signal: Signal,
    /// Number of processes to which the signal was sent.
    pub(super) sent: usize,
    /// Time from the signal to the failure report.
    pub(super) detected_after: Duration,
    pub(super) failed_at: Instant,
    /// Time from the failure until the group serves again; `None` if the replacement executors failed before
    /// they served.
    pub(super) restored_after: Option<Duration>,
}

/// Results of one server of a kill test.
#[derive(Debug, Default)]
pub(super) struct KillTestServerReport {
    pub(super) failures: Vec<ObservedFailure>,
    pub(super) results: StreamOutcomeCounts,
    /// Time from the server's exit until its last executor has exited.
    pub(super) orphans_exited_after: Duration,
}

/// Results of all servers of a kill test.
#[derive(Debug, Default)]
pub(super) struct KillTestReport {
    pub(super) duration: Duration,
    by_topology: BTreeMap<KillTestTopology, Vec<KillTestServerReport>>,
}

impl KillTestReport {
    pub(super) fn add(&mut self, topology: KillTestTopology, server_run: KillTestServerReport) {
        self.by_topology.entry(topology).or_default().push(server_run);
    }

    fn server_runs(&self) -> impl Iterator<Item = &KillTestServerReport> {
        self.by_topology.values().flatten()
    }

    /// Returns the number of processes that were killed, and the number that were stopped.
    pub(super) fn signals(&self) -> (usize, usize) {
        (sent(self.server_runs(), Signal::KILL), sent(self.server_runs(), Signal::STOP))
    }

    /// Line that reports the progress of the kill test.
    pub(super) fn line(&self) -> String {
        let (kills, stops) = self.signals();
        let results = total_results(self.server_runs());
        let wrong = results.failed + results.wrong_tokens + results.hung;
        format!("{kills} kills, {stops} stops, {} right, {wrong} wrong", results.correct)
    }

    /// Panics unless every client got each token once and no executor outlived its server for longer than
    /// permitted.
    pub(super) fn check(&self) {
        let results = total_results(self.server_runs());
        let wrong = (results.failed, results.wrong_tokens, results.hung);
        assert_eq!(wrong, (0, 0, 0), "failed, wrong tokens, hung: {:#?}", results.descriptions);
        assert!(results.correct > 0, "no request was correct");
        let orphans = self
            .server_runs()
            .map(|server_run| server_run.orphans_exited_after)
            .max()
            .unwrap_or_default();
        assert!(orphans <= ORPHAN_TIME_MAX, "an executor outlived its server by {orphans:?}");
    }
}

fn sent<'a>(server_runs: impl Iterator<Item = &'a KillTestServerReport>, signal: Signal) -> usize {
    server_runs
        .flat_map(|server_run| &server_run.failures)
        .filter(|seen| seen.signal == signal)
        .map(|s| s.sent)
        .sum()
}

fn total_results<'a>(
    server_runs: impl Iterator<Item = &'a KillTestServerReport>,
) -> StreamOutcomeCounts {
    let mut all = StreamOutcomeCounts::default();
    server_runs.for_each(|server_run| all.add(server_run.results.clone()));
    all
}

/// Median, 99th percentile (nearest rank) and maximum of `times` in milliseconds, as text; empty without
/// times.
fn quantiles(times: impl Iterator<Item = Duration>) -> String {
    let mut times: Vec<f64> = times.map(|time| time.as_secs_f64() * 1e3).collect();
    times.sort_unstable_by(f64::total_cmp);
    let rank = |p: f64| times[((times.len() as f64 * p).ceil() as usize).max(1) - 1];
    match times.last() {
        None => "| | |".to_owned(),
        Some(most) => format!("{:.1} | {:.1} | {most:.1} |", rank(0.5), rank(0.99)),
    }
}

fn row(
    f: &mut fmt::Formatter<'_>,
    name: &str,
    server_runs: &[&KillTestServerReport],
) -> fmt::Result {
    let all = || server_runs.iter().copied();
    let seen = |signal| {
        all().flat_map(|server_run| &server_run.failures).filter(move |s| s.signal == signal)
    };
    let results = total_results(all());
    let StreamOutcomeCounts { correct, tokens, failed, wrong_tokens, hung, .. } = results;
    let (kills, stops) = (sent(all(), Signal::KILL), sent(all(), Signal::STOP));
    let orphans = all()
        .map(|server_run| server_run.orphans_exited_after)
        .max()
        .unwrap_or_default()
        .as_secs_f64();
    write!(f, "| {name} | {} | {kills} | {stops} | {correct} | {tokens} |", server_runs.len())?;
    write!(
        f,
        " {failed} | {wrong_tokens} | {hung} | {} ",
        quantiles(seen(Signal::KILL).map(|s| s.detected_after))
    )?;
    write!(f, "{} ", quantiles(seen(Signal::STOP).map(|s| s.detected_after)))?;
    let restored =
        all().flat_map(|server_run| &server_run.failures).filter_map(|seen| seen.restored_after);
    writeln!(f, "{} {:.1} |", quantiles(restored), orphans * 1e3)
}

impl fmt::Display for KillTestReport {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let each = |what: &str| format!("{what} p50 | p99 | max |");
        let times = ["kill to detection", "stop to detection", "recovery"].map(each).join(" ");
        writeln!(f, "{:.0} s, times in ms:", self.duration.as_secs_f64())?;
        write!(
            f,
            "| topology | servers | kills | stops | answers | tokens | failed | wrong tokens | hung | "
        )?;
        writeln!(f, "{times} last executor exit after its server |")?;
        writeln!(f, "|---|{}", "--:|".repeat(18))?;
        for (topology, server_runs) in &self.by_topology {
            row(f, topology.name(), &server_runs.iter().collect::<Vec<_>>())?;
        }
        row(f, "all", &self.server_runs().collect::<Vec<_>>())
    }
}
