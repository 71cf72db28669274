//! Runs the simulations of seeds: one seed with a trace, or many seeds on all cores. A panic of the scheduler
//! (a failed assertion) counts as a violated invariant, so that every failure is identified by its seed.

use crate::fault_injector::InjectedFault;
use crate::invariant::InvariantViolation;
use crate::world::{SimCounts, SimWorld};
use std::cell::RefCell;
use std::ops::{AddAssign, Range};
use std::panic::{AssertUnwindSafe, catch_unwind, set_hook, take_hook};
use std::sync::atomic::{AtomicBool, AtomicU64, Ordering};
use std::sync::{Mutex, Once};

/// Result of the simulation of one seed.
#[derive(Debug)]
pub(crate) struct SimSeedResult {
    /// The seed that was simulated.
    pub(crate) seed: u64,
    /// Hash of the run's trace.
    pub(crate) hash: u64,
    /// Counts of events and faults in the run.
    pub(crate) counts: SimCounts,
    /// The first violated invariant, if any.
    pub(crate) violation: Option<InvariantViolation>,
    /// Readable trace of the run; empty unless requested.
    pub(crate) lines: String,
}

/// Summed results of a range of seeds.
#[derive(Debug, Default)]
pub(crate) struct SweepResult {
    /// Number of seeds that were simulated; a second run of the same seed is not counted.
    pub(crate) seeds: u64,
    /// Counts of events and faults, summed over all runs.
    pub(crate) counts: SimCounts,
    /// Runs that violated an invariant, lowest seed first.
    pub(crate) failures: Vec<SimSeedResult>,
}

thread_local! {
    /// Location and message of the last panic on this thread; set only while the thread simulates.
    static PANIC: RefCell<Option<String>> = const { RefCell::new(None) };
}

/// Runs one seed, with an injected fault if `fault` is given.
pub(crate) fn run(seed: u64, fault: Option<InjectedFault>, readable: bool) -> SimSeedResult {
    capture_panics();
    PANIC.set(Some(String::new()));
    let mut world = SimWorld::new(seed, fault, readable);
    let result = catch_unwind(AssertUnwindSafe(|| world.run()));
    let panic = PANIC.take().unwrap_or_default();
    let violation = match result {
        Ok(result) => result.err(),
        Err(_) => Some(InvariantViolation { invariant: "an assertion", text: panic }),
    };
    let (hash, counts) = (world.trace.hash(), world.counts);
    SimSeedResult { seed, hash, counts, violation, lines: world.trace.into_lines() }
}

/// Runs a range of seeds on all cores, until all have run or, with `stop_at_failure`, until one has failed.
/// Every hundredth seed runs twice and must give the same trace (I19).
pub(crate) fn sweep(
    seeds: Range<u64>,
    fault: Option<InjectedFault>,
    stop_at_failure: bool,
) -> SweepResult {
    let (next, stop) = (AtomicU64::new(seeds.start), AtomicBool::new(false));
    let result = Mutex::new(SweepResult::default());
    let work = || {
        while !stop.load(Ordering::Relaxed) {
            let seed = next.fetch_add(1, Ordering::Relaxed);
            if seed >= seeds.end {
                break;
            }
            let mut this = run(seed, fault, false);
            if seed.is_multiple_of(100) && this.violation.is_none() {
                this.violation = check_determinism(&this, &run(seed, fault, false));
            }
            let mut result = result.lock().expect("no thread panics with the lock");
            result.seeds += 1;
            result.counts += this.counts;
            if this.violation.is_some() {
                stop.fetch_or(stop_at_failure, Ordering::Relaxed);
                result.failures.push(this);
            }
        }
    };
    let cores = std::thread::available_parallelism().map_or(1, usize::from);
    std::thread::scope(|scope| (0..cores).for_each(|_| drop(scope.spawn(work))));
    let mut result = result.into_inner().expect("all threads have ended");
    result.failures.sort_by_key(|run| run.seed);
    result
}

/// Checks I19: two runs of a seed have the same trace hash.
fn check_determinism(first: &SimSeedResult, second: &SimSeedResult) -> Option<InvariantViolation> {
    let text = format!("trace hashes {:x} and {:x}", first.hash, second.hash);
    (first.hash != second.hash).then_some(InvariantViolation { invariant: "I19", text })
}

/// Installs a panic hook. If the panicking thread runs a simulation, the hook stores the panic text in
/// `PANIC` instead of printing it.
fn capture_panics() {
    static ONCE: Once = Once::new();
    ONCE.call_once(|| {
        let usual = take_hook();
        set_hook(Box::new(move |info| {
            let simulating = PANIC.with_borrow_mut(|panic| match panic {
                Some(text) => {
                    *text = info.to_string();
                    true
                }
                None => false,
            });
            if !simulating {
                usual(info);
            }
        }));
    });
}

impl AddAssign for SimCounts {
    fn add_assign(&mut self, other: Self) {
        self.steps += other.steps;
        self.ticks += other.ticks;
        self.rows += other.rows;
        self.tokens += other.tokens;
        self.requests += other.requests;
        self.preemptions += other.preemptions;
        self.hits += other.hits;
        self.missed_hits += other.missed_hits;
        self.forks += other.forks;
        self.resumed_states += other.resumed_states;
        self.mla_rows += other.mla_rows;
        self.unequal_block_rows += other.unequal_block_rows;
        self.stored += other.stored;
        self.removed += other.removed;
        self.lifetimes += other.lifetimes;
        self.aborts += other.aborts;
        self.crashes += other.crashes;
        self.stale_outputs += other.stale_outputs;
        self.failed_rows += other.failed_rows;
        self.masked_rows += other.masked_rows;
        self.overdue_masks += other.overdue_masks;
        self.ended_masks += other.ended_masks;
        self.overdue_draft_masks += other.overdue_draft_masks;
        self.masked_drafted += other.masked_drafted;
        self.masked_accepted += other.masked_accepted;
        self.rejected += other.rejected;
        self.drafted += other.drafted;
        self.accepted += other.accepted;
        self.shifted_rows += other.shifted_rows;
        self.batches_of_eight += other.batches_of_eight;
        self.idle_of_eight += other.idle_of_eight;
        self.repeated_failures += other.repeated_failures;
        self.broken_links += other.broken_links;
        self.one_way_breaks += other.one_way_breaks;
        self.lost_frames += other.lost_frames;
        self.replays += other.replays;
        self.snapshots += other.snapshots;
        self.shared_client_ids += other.shared_client_ids;
        self.aborts_by_client_id += other.aborts_by_client_id;
        self.process_pauses += other.process_pauses;
        self.hangs += other.hangs;
        self.step_timeouts += other.step_timeouts;
        self.heartbeat_timeouts += other.heartbeat_timeouts;
        self.false_suspicions += other.false_suspicions;
    }
}
