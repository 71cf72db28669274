//! Tests that simulate seeds: the seeds of every `cargo test`, larger ranges of seeds, and the replay of a
//! single seed.

use crate::seed_cursor::first_seed;
use crate::seed_sweep::{SweepResult, run, sweep};
use crate::sim_config::{GROUP_SEEDS_FROM, LINK_SEEDS_FROM, STATE_SEEDS_FROM, WINDOW_SEEDS_FROM};
use crate::world::SimCounts;
use std::time::Instant;

/// Number of simulations with the default kinds of faults and without lockstep groups.
const SEEDS: u64 = 2700;
/// Number of simulations with lockstep groups.
const GROUP_SEEDS: u64 = 300;
/// Number of simulations with broken links and with KV-event subscribers that disconnect.
const LINK_SEEDS: u64 = 300;
/// Number of simulations of models with window groups.
const WINDOW_SEEDS: u64 = 600;
/// Number of simulations of models with state groups.
const STATE_SEEDS: u64 = 300;
/// First seed of runs with the environment variable `HADRON_CURSOR`, above all seeds simulated so far.
const FRESH_SEEDS_FROM: u64 = 10_000_000;
/// Minimum number of scheduler steps in `SEEDS` simulations. Thirty runs with new seeds had a mean of 1.22
/// million steps and a standard deviation of 0.04 million. The minimum must hold for every set of seeds, so
/// it is at least five standard deviations below the mean.
const STEPS_MIN: u64 = 1_000_000;
/// Minimum number of draft tokens accepted under grammar bitmasks in `SEEDS` simulations. Nine runs with new
/// seeds had a mean of 23,600 and a standard deviation of 1,750.
const MASKED_ACCEPTED_MIN: u64 = 14_000;
/// Minimum number of batches of lockstep groups with eight ranks in `GROUP_SEEDS` simulations (mean 132,000,
/// standard deviation 24,000).
const BATCHES_OF_EIGHT_MIN: u64 = 10_000;
/// Minimum number of occurrences of each kind of fault in the simulations of one test. With new seeds, the
/// rarest kind occurs about 120 times.
const FAULTS_MIN: u64 = 30;
/// Number of seeds that mutation testing runs for each mutant of the scheduler and the KV cache.
const MUTANT_SEEDS: u64 = 800;

#[test]
fn million_steps_keep_all_invariants() {
    let start = Instant::now();
    let first = first_seed(0, FRESH_SEEDS_FROM, SEEDS);
    let result = sweep(first..first + SEEDS, None, true);
    assert_no_failures(&result);
    let counts = result.counts;
    println!(
        "{} seeds from {first} in {:.1} s: {counts:?}",
        result.seeds,
        start.elapsed().as_secs_f64()
    );
    assert!(counts.steps >= STEPS_MIN, "{result:?}");
    assert!(counts.masked_accepted >= MASKED_ACCEPTED_MIN, "{result:?}");
    // The test is meaningful only if each kind of fault happened often enough.
    let happened = [
        counts.preemptions,
        counts.hits,
        counts.removed,
        counts.lifetimes,
        counts.aborts,
        counts.crashes,
        counts.stale_outputs,
        counts.failed_rows,
        counts.masked_rows,
        counts.overdue_masks,
        counts.ended_masks,
        counts.overdue_draft_masks,
        counts.masked_drafted - counts.masked_accepted,
        counts.rejected,
        counts.accepted,
        counts.drafted - counts.accepted,
        counts.shifted_rows,
        counts.process_pauses,
        counts.hangs,
        counts.step_timeouts,
        counts.heartbeat_timeouts,
        counts.false_suspicions,
        counts.shared_client_ids,
        counts.aborts_by_client_id,
        counts.mla_rows,
    ];
    assert!(happened.iter().all(|&count| count >= FAULTS_MIN), "too few faults: {counts:?}");
}

/// Simulates lockstep groups of up to 8 ranks, with crashes, ranks that fail again before the other ranks are
/// restored, steps that wait for the slowest rank, and outputs of different ranks in any order.
#[test]
fn lockstep_groups_keep_all_invariants() {
    let start = Instant::now();
    let first = first_seed(GROUP_SEEDS_FROM, GROUP_SEEDS_FROM + FRESH_SEEDS_FROM, GROUP_SEEDS);
    let result = sweep(first..first + GROUP_SEEDS, None, true);
    assert_no_failures(&result);
    let counts = result.counts;
    println!(
        "{} seeds from {first} in {:.1} s: {counts:?}",
        result.seeds,
        start.elapsed().as_secs_f64()
    );
    assert!(counts.batches_of_eight >= BATCHES_OF_EIGHT_MIN, "{counts:?}");
    let happened = [
        counts.idle_of_eight,
        counts.crashes,
        counts.repeated_failures,
        counts.stale_outputs,
        counts.preemptions,
        counts.shifted_rows,
    ];
    assert!(happened.iter().all(|&count| count >= FAULTS_MIN), "too few faults: {counts:?}");
    assert_heartbeat_faults_happened(&counts);
}

/// Simulates models with one to three window groups, with zero to two groups that keep all positions, of which
/// some have lockstep groups or broken links.
#[test]
fn window_groups_keep_all_invariants() {
    let start = Instant::now();
    let first = first_seed(WINDOW_SEEDS_FROM, WINDOW_SEEDS_FROM + FRESH_SEEDS_FROM, WINDOW_SEEDS);
    let result = sweep(first..first + WINDOW_SEEDS, None, true);
    assert_no_failures(&result);
    let counts = result.counts;
    println!(
        "{} seeds from {first} in {:.1} s: {counts:?}",
        result.seeds,
        start.elapsed().as_secs_f64()
    );
    let happened = [
        counts.preemptions,
        counts.hits,
        counts.removed,
        counts.lifetimes,
        counts.crashes,
        counts.stale_outputs,
        counts.failed_rows,
        counts.overdue_masks,
        counts.shifted_rows,
        counts.missed_hits,
        counts.mla_rows,
        counts.unequal_block_rows,
    ];
    assert!(happened.iter().all(|&count| count >= FAULTS_MIN), "too few faults: {counts:?}");
}

/// Simulates models with one or two state groups, some of them with window groups, lockstep groups or broken links.
#[test]
fn state_groups_keep_all_invariants() {
    let start = Instant::now();
    let first = first_seed(STATE_SEEDS_FROM, STATE_SEEDS_FROM + FRESH_SEEDS_FROM, STATE_SEEDS);
    let result = sweep(first..first + STATE_SEEDS, None, true);
    assert_no_failures(&result);
    let counts = result.counts;
    println!(
        "{} seeds from {first} in {:.1} s: {counts:?}",
        result.seeds,
        start.elapsed().as_secs_f64()
    );
    let happened = [
        counts.preemptions,
        counts.hits,
        counts.removed,
        counts.crashes,
        counts.stale_outputs,
        counts.failed_rows,
        counts.masked_rows,
        counts.overdue_masks,
        counts.missed_hits,
        counts.forks,
        counts.resumed_states,
        counts.mla_rows,
        counts.unequal_block_rows,
    ];
    assert!(happened.iter().all(|&count| count >= FAULTS_MIN), "too few faults: {counts:?}");
}

/// Simulates links that lose messages in one or both directions until the failure is detected. Also simulates
/// KV-event subscribers that disconnect, reconnect, and get the missed changes from a replay or a snapshot.
#[test]
fn broken_links_and_subscribers_keep_all_invariants() {
    let start = Instant::now();
    let first = first_seed(LINK_SEEDS_FROM, LINK_SEEDS_FROM + FRESH_SEEDS_FROM, LINK_SEEDS);
    let result = sweep(first..first + LINK_SEEDS, None, true);
    assert_no_failures(&result);
    let counts = result.counts;
    println!(
        "{} seeds from {first} in {:.1} s: {counts:?}",
        result.seeds,
        start.elapsed().as_secs_f64()
    );
    let happened = [
        counts.broken_links - counts.one_way_breaks,
        counts.one_way_breaks,
        counts.lost_frames,
        counts.replays,
        counts.snapshots,
        counts.stale_outputs,
        counts.preemptions,
    ];
    assert!(happened.iter().all(|&count| count >= FAULTS_MIN), "too few faults: {counts:?}");
    assert_heartbeat_faults_happened(&counts);
}

/// Simulates `MUTANT_SEEDS` seeds without lockstep groups, and an eighth as many each with lockstep groups
/// and with broken links. Takes seconds. Mutation testing runs this test for each mutant.
#[test]
#[ignore = "repeats seeds of the other sweeps: `just mutants-random`"]
fn mutant_seeds() {
    assert_no_failures(&sweep(0..MUTANT_SEEDS, None, true));
    assert_no_failures(&sweep(GROUP_SEEDS_FROM..GROUP_SEEDS_FROM + MUTANT_SEEDS / 8, None, true));
    for first in [LINK_SEEDS_FROM, WINDOW_SEEDS_FROM, STATE_SEEDS_FROM] {
        assert_no_failures(&sweep(first..first + MUTANT_SEEDS / 8, None, true));
    }
}

/// Checks that the run contained pauses, hangs, step timeouts, heartbeat timeouts and false suspicions (a
/// first timeout of executors that made progress). The rarest kind, step timeouts in simulations with broken
/// links, occurs 14 times on average.
fn assert_heartbeat_faults_happened(counts: &SimCounts) {
    let happened = [
        counts.process_pauses,
        counts.hangs,
        counts.step_timeouts,
        counts.heartbeat_timeouts,
        counts.false_suspicions,
    ];
    assert!(happened.iter().all(|&count| count > 0), "a kind is missing: {counts:?}");
}

/// Panics with the first failure of a range of seeds, if there is one.
fn assert_no_failures(result: &SweepResult) {
    if let Some(failure) = result.failures.first() {
        let violation = failure.violation.as_ref().expect("a failure has a cause");
        panic!("seed {}: {violation}\nreplay: just sim {}", failure.seed, failure.seed);
    }
}

/// Replays one seed with a readable trace: `just sim SEED`.
#[test]
#[ignore = "needs a seed in HADRON_SIM_SEED: `just sim SEED`"]
fn replay_seed() {
    let seed = env_number("HADRON_SIM_SEED").expect("HADRON_SIM_SEED is a number");
    let run = run(seed, None, true);
    println!("{}", run.lines);
    println!("seed {seed}: trace hash {:016x}, {:?}", run.hash, run.counts);
    if let Some(violation) = run.violation {
        panic!("seed {seed}: {violation}");
    }
}

/// Searches for failures in the simulations of `HADRON_SIM_COUNT` seeds from `HADRON_SIM_FROM` on. Also runs
/// a fifth of this number each with lockstep groups, with broken links, with window groups, and with state groups.
#[test]
#[ignore = "runs as many seeds as requested: `just explore FROM COUNT`"]
fn explore_seeds() {
    let start = Instant::now();
    let from = env_number("HADRON_SIM_FROM").unwrap_or(SEEDS);
    let count = env_number("HADRON_SIM_COUNT").unwrap_or(20_000);
    let mut failing = 0;
    let others = [GROUP_SEEDS_FROM, LINK_SEEDS_FROM, WINDOW_SEEDS_FROM, STATE_SEEDS_FROM];
    let others = others.map(|first| (first, count / 5));
    for (first, count) in [(0, count)].into_iter().chain(others) {
        let seeds = first + from..first + from + count;
        let result = sweep(seeds.clone(), None, false);
        let (steps, counts) = (result.counts.steps, result.counts);
        println!("seeds {seeds:?}: {} in {steps} steps: {counts:?}", result.seeds);
        for failure in &result.failures {
            let violation = failure.violation.as_ref().expect("a failure has a cause").to_string();
            println!("seed {}: {}", failure.seed, violation.chars().take(300).collect::<String>());
        }
        failing += result.failures.len();
    }
    let (took, computed) = (start.elapsed().as_secs_f64(), processor_seconds());
    println!("{failing} failing; {took:.1} s, {computed:.1} CPU s");
    assert_eq!(failing, 0, "seeds fail");
}

/// Processor time in seconds that all threads of this process have used so far.
fn processor_seconds() -> f64 {
    let stat = std::fs::read_to_string("/proc/self/stat").unwrap_or_default();
    // The process name may contain spaces and parentheses. User time and system time are the 12th and 13th
    // fields after the last closing parenthesis.
    let behind = stat.rsplit_once(')').map_or("", |(_, behind)| behind);
    let ticks = behind.split_whitespace().skip(11).take(2).filter_map(|t| t.parse::<f64>().ok());
    ticks.sum::<f64>() / 100.0
}

#[expect(clippy::disallowed_methods, reason = "tests take their seed from the command line")]
fn env_number(name: &str) -> Option<u64> {
    std::env::var(name).ok()?.parse().ok()
}
