//! Checks that health probes report the actual state: faults are injected into servers, an external prober
//! requests all probes throughout, and its results are compared with the state of the processes.
//!
//! The actual state is observed from outside: a killed process has exited, and a completed request shows that
//! the server serves. `just health` injects five hundred faults, every test run a few.

mod fault_run;
mod prober;

use crate::rng::SimRng;
use fault_run::{ObservedFault, run_server};
use std::collections::BTreeMap;
use std::time::{Duration, Instant};

/// Time within which probes must report a fault.
const DETECTION_LIMIT: Duration = Duration::from_secs(1);
/// Time within which probes must report a fault while other tests run in parallel.
const DETECTION_LIMIT_UNDER_LOAD: Duration = Duration::from_secs(10);

/// Observed faults by kind of fault.
#[derive(Debug, Default)]
struct FaultDetectionReport(BTreeMap<&'static str, Vec<ObservedFault>>);

impl FaultDetectionReport {
    fn add(&mut self, faults: Vec<ObservedFault>) {
        for fault in faults {
            println!("{fault:?}");
            self.0.entry(fault.kind).or_default().push(fault);
        }
    }

    fn count(&self) -> usize {
        self.0.values().map(Vec::len).sum()
    }

    /// Prints a table of the faults. Returns descriptions of wrong probe results and of faults that were not
    /// reported within `bound`.
    fn judge(&self, bound: Duration) -> Vec<String> {
        println!(
            "| fault | count | detected after p50 | p99 | max ms | recovery detected after p50 | p99 | max ms | false probes |"
        );
        println!("|---|--:|--:|--:|--:|--:|--:|--:|--:|");
        let mut untrue = Vec::new();
        for (kind, faults) in &self.0 {
            let wrong: Vec<String> = faults
                .iter()
                .filter_map(|fault| Some(format!("{kind}: {}", fault.violation(bound)?)))
                .collect();
            let detected = quantiles(faults.iter().filter_map(|fault| fault.detected_after));
            let recovered =
                quantiles(faults.iter().filter_map(|fault| fault.recovery_detected_after));
            println!("| {kind} | {} | {detected} | {recovered} | {} |", faults.len(), wrong.len());
            untrue.extend(wrong);
        }
        untrue
    }
}

/// Median, 99th percentile (nearest rank) and maximum of `times` in milliseconds, as text.
fn quantiles(times: impl Iterator<Item = Duration>) -> String {
    let mut times: Vec<u128> = times.map(|time| time.as_millis()).collect();
    times.sort_unstable();
    let rank = |p: f64| times[((times.len() as f64 * p).ceil() as usize).max(1) - 1];
    let Some(most) = times.last() else { return "| |".to_owned() };
    format!("{} | {} | {most}", rank(0.5), rank(0.99))
}

/// Runs consecutive servers until `faults` faults have been injected.
fn run(seed: u64, faults: usize) -> FaultDetectionReport {
    println!("seed {seed}");
    let (mut rng, mut report) = (SimRng::new(seed), FaultDetectionReport::default());
    let began = Instant::now();
    while report.count() < faults {
        report.add(run_server(&mut rng));
    }
    println!("{} faults in {:.0} s", report.count(), began.elapsed().as_secs_f64());
    report
}

#[test]
fn probes_report_the_true_state() {
    let untrue = run(11, 10).judge(DETECTION_LIMIT_UNDER_LOAD);
    assert!(untrue.is_empty(), "{untrue:#?}");
}

/// Injects `HADRON_HEALTH_FAULTS` faults.
#[test]
#[ignore = "takes minutes: `just health`"]
#[expect(clippy::disallowed_methods, reason = "count and seed come from `just`")]
fn probes_stay_true_over_hundreds_of_faults() {
    let env_var = |name: &str| std::env::var(name).ok().and_then(|text| text.parse::<u64>().ok());
    let faults = env_var("HADRON_HEALTH_FAULTS").unwrap_or(500) as usize;
    let untrue = run(env_var("HADRON_HEALTH_SEED").unwrap_or(1), faults).judge(DETECTION_LIMIT);
    assert!(untrue.is_empty(), "{untrue:#?}");
}
