//! Runs seeds: one with a trace, or many on all cores. A panic of the engine (its own checks) counts
//! as a broken invariant, so that a failure is a seed in any case.

use crate::broken::Broken;
use crate::world::{Tally, World};
use scheduler::Planted;
use std::cell::RefCell;
use std::ops::{AddAssign, Range};
use std::panic::{AssertUnwindSafe, catch_unwind, set_hook, take_hook};
use std::sync::atomic::{AtomicBool, AtomicU64, Ordering};
use std::sync::{Mutex, Once};

/// How one seed went.
#[derive(Debug)]
pub(crate) struct Run {
    /// The seed.
    pub(crate) seed: u64,
    /// Hash of all that happened.
    pub(crate) hash: u64,
    /// How much happened.
    pub(crate) tally: Tally,
    /// The first broken invariant.
    pub(crate) broken: Option<Broken>,
    /// Readable trace, if asked for.
    pub(crate) lines: String,
}

/// How many seeds went.
#[derive(Debug, Default)]
pub(crate) struct Harvest {
    /// Seeds run, repetitions left out.
    pub(crate) seeds: u64,
    /// What they did.
    pub(crate) tally: Tally,
    /// Failures, lowest seed first.
    pub(crate) failures: Vec<Run>,
}

thread_local! {
    /// Set while this thread simulates: the place and message of a panic go here.
    static PANIC: RefCell<Option<String>> = const { RefCell::new(None) };
}

/// Runs one seed.
pub(crate) fn run(seed: u64, planted: Planted, readable: bool) -> Run {
    listen_to_panics();
    PANIC.set(Some(String::new()));
    let mut world = World::new(seed, planted, readable);
    let result = catch_unwind(AssertUnwindSafe(|| world.run()));
    let panic = PANIC.take().unwrap_or_default();
    let broken = match result {
        Ok(result) => result.err(),
        Err(_) => Some(Broken { invariant: "an assertion", text: panic }),
    };
    let (hash, tally) = (world.trace.hash(), world.tally);
    Run { seed, hash, tally, broken, lines: world.trace.into_lines() }
}

/// Runs a range of seeds on all cores, until one fails or all have passed. Every hundredth seed
/// runs twice and must do the same (I19).
pub(crate) fn sweep(seeds: Range<u64>, planted: Planted, stop_at_failure: bool) -> Harvest {
    let (next, stop) = (AtomicU64::new(seeds.start), AtomicBool::new(false));
    let harvest = Mutex::new(Harvest::default());
    let work = || {
        while !stop.load(Ordering::Relaxed) {
            let seed = next.fetch_add(1, Ordering::Relaxed);
            if seed >= seeds.end {
                break;
            }
            let mut this = run(seed, planted, false);
            if seed.is_multiple_of(100) && this.broken.is_none() {
                this.broken = differs(&this, &run(seed, planted, false));
            }
            let mut harvest = harvest.lock().expect("no thread panics with the lock");
            harvest.seeds += 1;
            harvest.tally += this.tally;
            if this.broken.is_some() {
                stop.fetch_or(stop_at_failure, Ordering::Relaxed);
                harvest.failures.push(this);
            }
        }
    };
    let cores = std::thread::available_parallelism().map_or(1, usize::from);
    std::thread::scope(|scope| (0..cores).for_each(|_| drop(scope.spawn(work))));
    let mut harvest = harvest.into_inner().expect("all threads have ended");
    harvest.failures.sort_by_key(|run| run.seed);
    harvest
}

/// I19: two runs of a seed are the same run.
fn differs(first: &Run, second: &Run) -> Option<Broken> {
    let text = format!("trace hashes {:x} and {:x}", first.hash, second.hash);
    (first.hash != second.hash).then_some(Broken { invariant: "I19", text })
}

/// Keeps panics of simulating threads off the terminal: they are results here.
fn listen_to_panics() {
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

impl AddAssign for Tally {
    fn add_assign(&mut self, other: Self) {
        self.steps += other.steps;
        self.ticks += other.ticks;
        self.rows += other.rows;
        self.tokens += other.tokens;
        self.requests += other.requests;
        self.preemptions += other.preemptions;
        self.hits += other.hits;
        self.stored += other.stored;
        self.removed += other.removed;
        self.stays += other.stays;
        self.aborts += other.aborts;
        self.crashes += other.crashes;
        self.stale += other.stale;
        self.failed_rows += other.failed_rows;
        self.masked_rows += other.masked_rows;
        self.late_masks += other.late_masks;
        self.ended_masks += other.ended_masks;
        self.refused += other.refused;
        self.drafted += other.drafted;
        self.accepted += other.accepted;
        self.moved += other.moved;
        self.batches_of_eight += other.batches_of_eight;
        self.idle_of_eight += other.idle_of_eight;
        self.relapses += other.relapses;
        self.cuts += other.cuts;
        self.halves += other.halves;
        self.lost_frames += other.lost_frames;
        self.replays += other.replays;
        self.listings += other.listings;
        self.namesakes += other.namesakes;
        self.orders += other.orders;
        self.standstills += other.standstills;
        self.hangs += other.hangs;
        self.late += other.late;
        self.silent += other.silent;
        self.spared += other.spared;
    }
}
