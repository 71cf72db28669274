//! What a drill has found: counts, and how long things took.

use super::load::Answers;
use super::worlds::World;
use rustix::process::Signal;
use std::collections::BTreeMap;
use std::fmt;
use std::time::{Duration, Instant};

/// An executor may outlive its server for so long.
const ORPHANS_MAX: Duration = Duration::from_secs(2);

/// A loss, as its server told it.
#[derive(Debug, Clone, Copy)]
pub(super) struct Seen {
    pub(super) signal: Signal,
    /// Processes that got it.
    pub(super) sent: usize,
    /// From the signal to the restart.
    pub(super) after: Duration,
    pub(super) lost: Instant,
    /// From the loss to the return, unless its successors were lost, too.
    pub(super) back: Option<Duration>,
}

/// What happened to one server.
#[derive(Debug, Default)]
pub(super) struct Life {
    pub(super) seen: Vec<Seen>,
    pub(super) answers: Answers,
    /// From the server's death to that of the last executor.
    pub(super) orphans_gone: Duration,
}

/// What happened to all servers.
#[derive(Debug, Default)]
pub(super) struct Report {
    pub(super) took: Duration,
    worlds: BTreeMap<World, Vec<Life>>,
}

impl Report {
    pub(super) fn add(&mut self, world: World, life: Life) {
        self.worlds.entry(world).or_default().push(life);
    }

    fn lives(&self) -> impl Iterator<Item = &Life> {
        self.worlds.values().flatten()
    }

    /// Processes killed, and stopped.
    pub(super) fn signals(&self) -> (usize, usize) {
        (sent(self.lives(), Signal::KILL), sent(self.lives(), Signal::STOP))
    }

    /// How far it is.
    pub(super) fn line(&self) -> String {
        let (kills, stops) = self.signals();
        let answers = answers(self.lives());
        let wrong = answers.lost + answers.changed + answers.hung;
        format!("{kills} kills, {stops} stops, {} right, {wrong} wrong", answers.right)
    }

    /// Panics unless every client heard every token once, and nobody outlived a server.
    pub(super) fn check(&self) {
        let answers = answers(self.lives());
        let wrong = (answers.lost, answers.changed, answers.hung);
        assert_eq!(wrong, (0, 0, 0), "lost, changed, hung: {:#?}", answers.told);
        assert!(answers.right > 0, "nobody has asked");
        let orphans = self.lives().map(|life| life.orphans_gone).max().unwrap_or_default();
        assert!(orphans <= ORPHANS_MAX, "an executor outlived its server by {orphans:?}");
    }
}

fn sent<'a>(lives: impl Iterator<Item = &'a Life>, signal: Signal) -> usize {
    lives.flat_map(|life| &life.seen).filter(|seen| seen.signal == signal).map(|s| s.sent).sum()
}

fn answers<'a>(lives: impl Iterator<Item = &'a Life>) -> Answers {
    let mut all = Answers::default();
    lives.for_each(|life| all.add(life.answers.clone()));
    all
}

/// Median, 99th percentile (nearest rank) and maximum in milliseconds; empty of nothing.
fn quantiles(times: impl Iterator<Item = Duration>) -> String {
    let mut times: Vec<f64> = times.map(|time| time.as_secs_f64() * 1e3).collect();
    times.sort_unstable_by(f64::total_cmp);
    let rank = |p: f64| times[((times.len() as f64 * p).ceil() as usize).max(1) - 1];
    match times.last() {
        None => "| | |".to_owned(),
        Some(most) => format!("{:.1} | {:.1} | {most:.1} |", rank(0.5), rank(0.99)),
    }
}

fn row(f: &mut fmt::Formatter<'_>, name: &str, lives: &[&Life]) -> fmt::Result {
    let all = || lives.iter().copied();
    let seen = |signal| all().flat_map(|life| &life.seen).filter(move |s| s.signal == signal);
    let answers = answers(all());
    let Answers { right, tokens, lost, changed, hung, .. } = answers;
    let (kills, stops) = (sent(all(), Signal::KILL), sent(all(), Signal::STOP));
    let orphans = all().map(|life| life.orphans_gone).max().unwrap_or_default().as_secs_f64();
    write!(f, "| {name} | {} | {kills} | {stops} | {right} | {tokens} |", lives.len())?;
    write!(
        f,
        " {lost} | {changed} | {hung} | {} ",
        quantiles(seen(Signal::KILL).map(|s| s.after))
    )?;
    write!(f, "{} ", quantiles(seen(Signal::STOP).map(|s| s.after)))?;
    let back = all().flat_map(|life| &life.seen).filter_map(|seen| seen.back);
    writeln!(f, "{} {:.1} |", quantiles(back), orphans * 1e3)
}

impl fmt::Display for Report {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let each = |what: &str| format!("{what} p50 | p99 | max |");
        let times = ["killed: seen", "stopped: seen", "back"].map(each).join(" ");
        writeln!(f, "{:.0} s, times in ms:", self.took.as_secs_f64())?;
        write!(
            f,
            "| world | servers | kills | stops | answers | tokens | lost | changed | hung | "
        )?;
        writeln!(f, "{times} last executor after its server |")?;
        writeln!(f, "|---|{}", "--:|".repeat(18))?;
        for (world, lives) in &self.worlds {
            row(f, world.name(), &lives.iter().collect::<Vec<_>>())?;
        }
        row(f, "all", &self.lives().collect::<Vec<_>>())
    }
}
