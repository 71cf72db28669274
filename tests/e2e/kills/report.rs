//! Results of a drill: counts and durations.

use super::load::StreamResults;
use super::topologies::DrillTopology;
use rustix::process::Signal;
use std::collections::BTreeMap;
use std::fmt;
use std::time::{Duration, Instant};

/// Maximum time by which an executor may outlive its server.
const ORPHAN_TIME_MAX: Duration = Duration::from_secs(2);

/// An executor failure as reported by the server.
#[derive(Debug, Clone, Copy)]
pub(super) struct ObservedFailure {
    pub(super) signal: Signal,
    /// Number of processes that were sent the signal.
    pub(super) sent: usize,
    /// Time from the signal to the failure report.
    pub(super) after: Duration,
    pub(super) failed_at: Instant,
    /// Time from the failure to the restore, unless the replacements failed as well.
    pub(super) restored_after: Option<Duration>,
}

/// Results of one server.
#[derive(Debug, Default)]
pub(super) struct ServerRun {
    pub(super) failures: Vec<ObservedFailure>,
    pub(super) results: StreamResults,
    /// Time from the server's exit to that of the last executor.
    pub(super) orphans_exited_after: Duration,
}

/// Results of all servers.
#[derive(Debug, Default)]
pub(super) struct KillDrillReport {
    pub(super) duration: Duration,
    by_topology: BTreeMap<DrillTopology, Vec<ServerRun>>,
}

impl KillDrillReport {
    pub(super) fn add(&mut self, world: DrillTopology, life: ServerRun) {
        self.by_topology.entry(world).or_default().push(life);
    }

    fn server_runs(&self) -> impl Iterator<Item = &ServerRun> {
        self.by_topology.values().flatten()
    }

    /// Number of processes killed, and number stopped.
    pub(super) fn signals(&self) -> (usize, usize) {
        (sent(self.server_runs(), Signal::KILL), sent(self.server_runs(), Signal::STOP))
    }

    /// Progress line.
    pub(super) fn line(&self) -> String {
        let (kills, stops) = self.signals();
        let answers = total_results(self.server_runs());
        let wrong = answers.failed + answers.wrong_tokens + answers.hung;
        format!("{kills} kills, {stops} stops, {} right, {wrong} wrong", answers.correct)
    }

    /// Panics unless every client received every token once, and no executor outlived its server for too
    /// long.
    pub(super) fn check(&self) {
        let answers = total_results(self.server_runs());
        let wrong = (answers.failed, answers.wrong_tokens, answers.hung);
        assert_eq!(wrong, (0, 0, 0), "failed, wrong tokens, hung: {:#?}", answers.descriptions);
        assert!(answers.correct > 0, "no request was answered");
        let orphans =
            self.server_runs().map(|life| life.orphans_exited_after).max().unwrap_or_default();
        assert!(orphans <= ORPHAN_TIME_MAX, "an executor outlived its server by {orphans:?}");
    }
}

fn sent<'a>(lives: impl Iterator<Item = &'a ServerRun>, signal: Signal) -> usize {
    lives.flat_map(|life| &life.failures).filter(|seen| seen.signal == signal).map(|s| s.sent).sum()
}

fn total_results<'a>(lives: impl Iterator<Item = &'a ServerRun>) -> StreamResults {
    let mut all = StreamResults::default();
    lives.for_each(|life| all.add(life.results.clone()));
    all
}

/// Median, 99th percentile (nearest rank) and maximum in milliseconds; empty without times.
fn quantiles(times: impl Iterator<Item = Duration>) -> String {
    let mut times: Vec<f64> = times.map(|time| time.as_secs_f64() * 1e3).collect();
    times.sort_unstable_by(f64::total_cmp);
    let rank = |p: f64| times[((times.len() as f64 * p).ceil() as usize).max(1) - 1];
    match times.last() {
        None => "| | |".to_owned(),
        Some(most) => format!("{:.1} | {:.1} | {most:.1} |", rank(0.5), rank(0.99)),
    }
}

fn row(f: &mut fmt::Formatter<'_>, name: &str, lives: &[&ServerRun]) -> fmt::Result {
    let all = || lives.iter().copied();
    let seen = |signal| all().flat_map(|life| &life.failures).filter(move |s| s.signal == signal);
    let answers = total_results(all());
    let StreamResults { correct: right, tokens, failed: lost, wrong_tokens: changed, hung, .. } =
        answers;
    let (kills, stops) = (sent(all(), Signal::KILL), sent(all(), Signal::STOP));
    let orphans =
        all().map(|life| life.orphans_exited_after).max().unwrap_or_default().as_secs_f64();
    write!(f, "| {name} | {} | {kills} | {stops} | {right} | {tokens} |", lives.len())?;
    write!(
        f,
        " {lost} | {changed} | {hung} | {} ",
        quantiles(seen(Signal::KILL).map(|s| s.after))
    )?;
    write!(f, "{} ", quantiles(seen(Signal::STOP).map(|s| s.after)))?;
    let back = all().flat_map(|life| &life.failures).filter_map(|seen| seen.restored_after);
    writeln!(f, "{} {:.1} |", quantiles(back), orphans * 1e3)
}

impl fmt::Display for KillDrillReport {
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
        for (world, lives) in &self.by_topology {
            row(f, world.name(), &lives.iter().collect::<Vec<_>>())?;
        }
        row(f, "all", &self.server_runs().collect::<Vec<_>>())
    }
}
