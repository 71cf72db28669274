//! Mutation check of the simulator: it must find each injected fault within a bounded number of seeds.
//!
//! Faults in the inputs and outputs of the scheduler run with every `cargo test`; `just canary` prints which
//! invariant each fault violated. Faults inside the scheduler and the KV cache are patches in
//! `tests/sim/mutants`, which `just mutants` runs.

#![allow(clippy::print_stdout, reason = "prints the detected violation and its seed")]

use crate::fault_injector::InjectedFault;
use crate::seed_sweep::{SimSeedResult, sweep};
use crate::sim_config::{GROUP_SEEDS_FROM, STATE_SEEDS_FROM, WINDOW_SEEDS_FROM};

/// Number of seeds within which each fault must be found.
const SEEDS: u64 = 1000;
/// Maximum number of characters that are printed of the description of a violated invariant.
const VIOLATION_CHARS: usize = 110;

/// Prints a line with the name of a fault, the seed that found it, and the violated invariant.
fn print_failure(name: &str, failure: &SimSeedResult) {
    let violation = failure.violation.as_ref().map(ToString::to_string).unwrap_or_default();
    let violation: String = violation.replace('\n', " ").chars().take(VIOLATION_CHARS).collect();
    println!("{name:<30} {:>10}  {violation}", failure.seed);
}

/// Runs each fault in the simulations of up to `SEEDS` seeds, starting at seed `first`; fails if a fault
/// violates no invariant.
fn find_all(faults: &[InjectedFault], first: u64) {
    let mut missed = Vec::new();
    println!("{:<30} {:>10}  first violation", "injected fault", "seed");
    for &fault in faults {
        let result = sweep(first..first + SEEDS, Some(fault), true);
        match result.failures.first() {
            Some(failure) => print_failure(&format!("{fault:?}"), failure),
            None => missed.push(fault),
        }
    }
    assert!(missed.is_empty(), "not found within {SEEDS} seeds: {missed:?}");
}

#[test]
fn every_injected_fault_is_found() {
    find_all(&InjectedFault::REPLICA_FAULTS, 0);
}

#[test]
fn every_injected_fault_of_groups_is_found() {
    find_all(&InjectedFault::GROUP_FAULTS, GROUP_SEEDS_FROM);
}

#[test]
fn every_injected_fault_of_windows_is_found() {
    find_all(&InjectedFault::WINDOW_FAULTS, WINDOW_SEEDS_FROM);
}

#[test]
fn every_injected_fault_of_states_is_found() {
    find_all(&InjectedFault::STATE_FAULTS, STATE_SEEDS_FROM);
}

/// Runs simulations with and without lockstep groups, windows and states until an invariant is violated. `just mutants` runs this
/// test with a patch of `tests/sim/mutants` applied; it fails if no seed violates an invariant.
#[test]
#[ignore = "needs a patch of tests/sim/mutants: `just mutants`"]
fn patched_code_is_found() {
    let found = [0, GROUP_SEEDS_FROM, WINDOW_SEEDS_FROM, STATE_SEEDS_FROM]
        .into_iter()
        .find_map(|first| sweep(first..first + SEEDS, None, true).failures.into_iter().next());
    print_failure("PatchedCode", &found.expect("no seed fails"));
}
