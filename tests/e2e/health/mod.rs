//! Whether probes tell the truth: servers suffer what a machine and its operator do to them, somebody outside asks all
//! probes the whole time, and what they say is compared with what is so.
//!
//! The truth comes from outside, too: a process that was killed is gone, and a request that is answered was served.
//! `just health` runs five hundred faults, every test run a few.

mod life;
mod watch;

use crate::chance::Chance;
use life::{Fault, live};
use std::collections::BTreeMap;
use std::time::{Duration, Instant};

/// Within so long probes must say what is so.
const SOON: Duration = Duration::from_secs(1);
/// The same where other tests run beside this one.
const PATIENCE: Duration = Duration::from_secs(10);

/// How faults were seen, by kind.
#[derive(Debug, Default)]
struct Report(BTreeMap<&'static str, Vec<Fault>>);

impl Report {
    fn add(&mut self, faults: Vec<Fault>) {
        for fault in faults {
            println!("{fault:?}");
            self.0.entry(fault.kind).or_default().push(fault);
        }
    }

    fn count(&self) -> usize {
        self.0.values().map(Vec::len).sum()
    }

    /// Prints a table, and returns what probes said that was not so, or not within `bound`.
    fn judge(&self, bound: Duration) -> Vec<String> {
        println!(
            "| fault | count | told after p50 | p99 | max ms | well again told after p50 | p99 | max ms | untrue |"
        );
        println!("|---|--:|--:|--:|--:|--:|--:|--:|--:|");
        let mut untrue = Vec::new();
        for (kind, faults) in &self.0 {
            let wrong: Vec<String> = faults
                .iter()
                .filter_map(|fault| Some(format!("{kind}: {}", fault.untrue(bound)?)))
                .collect();
            let told = quantiles(faults.iter().filter_map(|fault| fault.told));
            let well = quantiles(faults.iter().filter_map(|fault| fault.well_told));
            println!("| {kind} | {} | {told} | {well} | {} |", faults.len(), wrong.len());
            untrue.extend(wrong);
        }
        untrue
    }
}

/// Median, 99th percentile (nearest rank) and maximum in milliseconds.
fn quantiles(times: impl Iterator<Item = Duration>) -> String {
    let mut times: Vec<u128> = times.map(|time| time.as_millis()).collect();
    times.sort_unstable();
    let rank = |p: f64| times[((times.len() as f64 * p).ceil() as usize).max(1) - 1];
    let Some(most) = times.last() else { return "| |".to_owned() };
    format!("{} | {} | {most}", rank(0.5), rank(0.99))
}

/// Servers live one after the other until so many faults have happened.
fn run(seed: u64, faults: usize) -> Report {
    println!("seed {seed}");
    let (mut chance, mut report) = (Chance::new(seed), Report::default());
    let began = Instant::now();
    while report.count() < faults {
        report.add(live(&mut chance));
    }
    println!("{} faults in {:.0} s", report.count(), began.elapsed().as_secs_f64());
    report
}

#[test]
fn probes_say_what_is_so() {
    let untrue = run(11, 10).judge(PATIENCE);
    assert!(untrue.is_empty(), "{untrue:#?}");
}

/// As many faults as `HADRON_HEALTH_FAULTS` says.
#[test]
#[ignore = "minutes: `just health`"]
#[expect(clippy::disallowed_methods, reason = "count and seed come from `just`")]
fn hundreds_of_faults() {
    let said = |name: &str| std::env::var(name).ok().and_then(|text| text.parse::<u64>().ok());
    let faults = said("HADRON_HEALTH_FAULTS").unwrap_or(500) as usize;
    let untrue = run(said("HADRON_HEALTH_SEED").unwrap_or(1), faults).judge(SOON);
    assert!(untrue.is_empty(), "{untrue:#?}");
}
