//! Mutation check of the simulator: each injected fault must be found within a bounded number of seeds.
//!
//! Runs with every `cargo test`; `just canary` prints which invariant broke.

#![allow(clippy::print_stdout, reason = "shows what was noticed, and when")]

use crate::seed_sweep::sweep;
use crate::sim_config::GROUP_SEEDS_FROM;
use scheduler::{FaultInjection, InjectedFault};

/// Seeds within which each fault must be found.
const SEEDS: u64 = 1000;

/// Searches each fault in the worlds from seed `first` on.
fn find_all(bugs: &[InjectedFault], first: u64) {
    let mut missed = Vec::new();
    println!("{:<24} {:>6}  first thing noticed", "planted bug", "seed");
    for &bug in bugs {
        let harvest = sweep(first..first + SEEDS, FaultInjection::with_fault(bug), true);
        let Some(failure) = harvest.failures.first() else {
            missed.push(bug);
            continue;
        };
        let noticed = failure.broken.as_ref().map(ToString::to_string).unwrap_or_default();
        let noticed: String = noticed.replace('\n', " ").chars().take(110).collect();
        println!("{:<24} {:>6}  {noticed}", format!("{bug:?}"), failure.seed);
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
