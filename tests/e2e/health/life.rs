//! One server: its executors die as often as it survives, it stands still, and ends.

use super::SOON;
use super::watch::{Look, Watch};
use crate::chance::Chance;
use crate::http::executor_process::{body, stream_of, within};
use crate::http::process::Process;
use crate::http::ranks::ranks_of;
use crate::http_client::post;
use rustix::process::{Pid, Signal, kill_process};
use serde_json::json;
use std::time::{Duration, Instant};

/// Deaths of its executors that a server survives in ten minutes.
const DEATHS: usize = 3;
const PATIENCE: Duration = Duration::from_mins(1);
const ONE: &[&str] = &["--executor", "process"];
const TWO: &[&str] = &["-tp", "2"];
const EXACT: &[&str] = &["--threads", "1", "--dtype", "float32", "--shutdown-timeout", "2s"];

/// A fault and what probes said of it.
#[derive(Debug)]
pub(super) struct Fault {
    pub(super) kind: &'static str,
    /// From the fault to the first look that told of it.
    pub(super) told: Option<Duration>,
    /// From the fault to its end, and from there to the first look that told of that.
    lasted: Duration,
    pub(super) well_told: Option<Duration>,
    /// Looks that said what was not so for longer than a second.
    wrong: Vec<Look>,
}

impl Fault {
    /// What probes did not say within `bound`, or, unless others had the processors meanwhile, said though it was not so.
    pub(super) fn untrue(&self, bound: Duration) -> Option<String> {
        let late = |told: Option<Duration>| told.is_none_or(|after| after > bound);
        // Whoever looks on a busy machine may miss what is over soon.
        let unnoticed = late(self.told) && self.lasted > bound.min(SOON * 3 / 2);
        let still = self.kind != TERM && self.kind != KILL && late(self.well_told);
        let wrong = bound <= SOON && !self.wrong.is_empty();
        (unnoticed || still || wrong).then(|| format!("{self:?}"))
    }
}

const DEATH: &str = "executors die";
const STOP: &str = "the server stands still";
const TERM: &str = "the server is told to end";
const KILL: &str = "the server dies";

fn serves(look: &Look) -> bool {
    (look.live, look.ready, look.health) == (Some(200), Some(200), Some(200))
}

/// Starts a server and has it suffer.
pub(super) fn live(chance: &mut Chance) -> Vec<Fault> {
    let ranks = chance.pick(&[ONE, TWO]);
    let mut process = Process::start(&[ranks, EXACT].concat());
    let watch = Watch::start(process.address);
    let mut faults = Vec::new();
    for _ in 0..DEATHS {
        settle(&watch);
        std::thread::sleep(Duration::from_millis(chance.below(200)));
        let busy = chance.hits(500).then(|| stream_of(process.address, &body(1_000, true)));
        faults.push(executors_die(&process, &watch, chance));
        drop(busy);
    }
    settle(&watch);
    faults.push(stands_still(&process, &watch));
    settle(&watch);
    let end = if chance.hits(500) { TERM } else { KILL };
    faults.push(ends(&mut process, &watch, end));
    faults
}

/// Waits until the probes say that all is well.
fn settle(watch: &Watch) {
    let from = Instant::now();
    within(PATIENCE, "all is well", || watch.since(from).iter().any(serves));
}

/// Whether a look says that a server does not live which does: in words, or by silence for longer than a second.
fn denies_life(look: &Look, looks: &[Look]) -> bool {
    let soon = look.from..look.from + SOON;
    let answered = |other: &Look| other.live == Some(200) && soon.contains(&other.to);
    look.live.map_or_else(|| !looks.iter().any(answered), |status| status != 200)
}

fn after(since: Instant, look: Option<&Look>) -> Option<Duration> {
    look.map(|look| look.to - since)
}

/// One rank dies, or all do. Somebody asks at once, and knows by the answer when others serve.
fn executors_die(process: &Process, watch: &Watch, chance: &mut Chance) -> Fault {
    let ranks: Vec<u32> = ranks_of(process.id()).into_values().collect();
    let victims = if chance.hits(500) {
        ranks.clone()
    } else {
        vec![ranks[chance.below(ranks.len() as u64) as usize]]
    };
    let since = Instant::now();
    for pid in &victims {
        // Gone already, if the death of another one was noticed before.
        let _ = kill_process(Pid::from_raw(*pid as i32).unwrap(), Signal::KILL);
    }
    within(PATIENCE, "an answer of others", || {
        let reply =
            post(process.address, "/v1/completions", &json!({"prompt": "a", "max_tokens": 1}));
        let now = ranks_of(process.id());
        reply.status == 200 && !now.is_empty() && !now.values().any(|pid| victims.contains(pid))
    });
    let back = Instant::now();
    within(PATIENCE, "the next look", || watch.since(back).iter().any(serves));
    let looks = watch.since(since);
    let told = looks.iter().find(|look| look.ready != Some(200));
    let well = looks.iter().find(|look| look.from >= back && serves(look));
    let wrong = looks.iter().filter(|look| {
        let lost = look.from > since + SOON && look.to + SOON < back;
        denies_life(look, &looks) || lost && (look.ready == Some(200) || look.health == Some(200))
    });
    let wrong = wrong.copied().collect();
    let (told, well_told) = (after(since, told), after(back, well));
    Fault { kind: DEATH, told, lasted: back - since, well_told, wrong }
}

fn stands_still(process: &Process, watch: &Watch) -> Fault {
    let since = Instant::now();
    process.signal("STOP");
    std::thread::sleep(2 * SOON);
    let back = Instant::now();
    process.signal("CONT");
    within(PATIENCE, "the next look", || watch.since(back).iter().any(serves));
    let looks = watch.since(since);
    let told = looks.iter().find(|look| look.live.is_none());
    let well = looks.iter().find(|look| look.from >= back && serves(look));
    let wrong = looks.iter().filter(|look| {
        let answers = [look.live, look.ready, look.health].iter().any(Option::is_some);
        look.from > since + SOON && look.to < back && answers
    });
    let wrong = wrong.copied().collect();
    let (told, well_told) = (after(since, told), after(back, well));
    Fault { kind: STOP, told, lasted: back - since, well_told, wrong }
}

/// A drain: not ready any more, alive to the end, then nobody is there. A death: nobody is there.
fn ends(process: &mut Process, watch: &Watch, kind: &'static str) -> Fault {
    let _stream = stream_of(process.address, &body(1_900, true));
    let since = Instant::now();
    process.signal(if kind == TERM { "TERM" } else { "KILL" });
    process.exits_within(PATIENCE);
    let gone = Instant::now();
    let silent = |look: &Look| (look.live, look.ready, look.health) == (None, None, None);
    within(PATIENCE, "a look at nobody", || watch.since(gone).iter().any(silent));
    let looks = watch.since(since);
    let told = looks.iter().find(|look| look.ready != Some(200));
    let wrong = looks.iter().filter(|look| {
        let ready = look.ready == Some(200) || look.health == Some(200);
        let died = kind == TERM && look.to < gone && look.live.is_some_and(|status| status != 200);
        look.from > since + SOON && ready || look.from > gone && !silent(look) || died
    });
    let wrong = wrong.copied().collect();
    let lasted = gone - since + SOON; // Nobody comes back.
    Fault { kind, told: after(since, told), lasted, well_told: None, wrong }
}
