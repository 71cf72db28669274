//! A simulator that finds nothing proves nothing: each planted bug must be found, and soon.
//!
//! Runs with every `cargo test`; `just canary` shows what was noticed.

#![allow(clippy::print_stdout, reason = "shows what was noticed, and when")]

use crate::setup::GROUPS;
use crate::swarm::sweep;
use scheduler::{Bug, Planted};

/// Seeds within which each bug must be found.
const SEEDS: u64 = 1000;

/// Walks through bugs in the worlds from `first` on.
fn find_all(bugs: &[Bug], first: u64) {
    let mut missed = Vec::new();
    println!("{:<24} {:>6}  first thing noticed", "planted bug", "seed");
    for &bug in bugs {
        let harvest = sweep(first..first + SEEDS, Planted::bug(bug), true);
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
fn every_planted_bug_is_found() {
    find_all(&Bug::OF_REPLICAS, 0);
}

#[test]
fn every_planted_bug_of_groups_is_found() {
    find_all(&Bug::OF_GROUPS, GROUPS);
}
