//! A simulator that finds nothing proves nothing: each planted bug must be found, and soon.
//!
//! Runs with `cargo test --test sim --features planted`.

use crate::swarm::sweep;
use scheduler::{Bug, Planted};

/// Seeds within which each bug must be found.
const SEEDS: u64 = 1000;

#[test]
fn every_planted_bug_is_found() {
    let mut missed = Vec::new();
    println!("{:<24} {:>6}  first thing noticed", "planted bug", "seed");
    for bug in Bug::ALL {
        let harvest = sweep(0..SEEDS, Planted::bug(bug), true);
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
