//! Compiles thousands of hostile grammars and of distinct harmless grammars: every compilation ends in time,
//! and memory is bounded.

mod specs;

use crate::hostile_grammars::{take_first, vocabulary};
use crate::rng::SimRng;
use crate::test_server::grammar_worker;
use grammar::{
    CompiledGrammar, GrammarCompilePool, GrammarError, GrammarSpec, GrammarTimings,
    OutputConstraint,
};
use specs::{harmless_spec, random_spec};
use std::sync::Arc;
use std::sync::mpsc::channel;
use std::time::{Duration, Instant};

/// Number of grammars of every test run.
const FORMS: u64 = 60;
/// Number of bitmasks built per accepted grammar.
const MASKS: u32 = 30;
/// Maximum time for one grammar, rejected or with all its bitmasks built, on a machine with other load.
const TIME_LIMIT: Duration = Duration::from_secs(30);

/// A grammar compile pool that compiles one grammar after another.
struct GrammarCompileHarness(GrammarCompilePool);

impl GrammarCompileHarness {
    fn start() -> Self {
        let timings = Arc::new(GrammarTimings::default());
        Self(GrammarCompilePool::start(vocabulary, &grammar_worker(), timings).unwrap())
    }

    fn compile(&self, form: GrammarSpec) -> Result<CompiledGrammar, GrammarError> {
        let (told, result) = channel();
        self.0
            .compile(OutputConstraint::new(form, "test"), move |result| told.send(result).unwrap());
        result.recv_timeout(TIME_LIMIT).expect("a grammar has an end")
    }
}

/// Counts of accepted and rejected grammars, and their times.
#[derive(Debug, Default)]
struct RandomGrammarCounts {
    accepted: u64,
    rejected: u64,
    masks: u64,
    /// Longest time until a grammar was accepted or rejected.
    judged: Duration,
    /// Longest time to build all bitmasks of one accepted grammar.
    followed: Duration,
    /// Time of each grammar, from the start of its compilation to the last bitmask.
    took: Vec<Duration>,
}

/// Compiles `count` grammars drawn from `seed`, and builds bitmasks of the accepted grammars.
fn run(seed: u64, count: u64) -> RandomGrammarCounts {
    let (bench, mut tally) = (GrammarCompileHarness::start(), RandomGrammarCounts::default());
    for number in 0..count {
        let form = random_spec(&mut SimRng::new(seed ^ number << 20));
        let shown: String = format!("{form:?}").chars().take(200).collect();
        let since = Instant::now();
        let result = bench.compile(form);
        let judged = Instant::now();
        tally.judged = tally.judged.max(judged - since);
        if let Ok(compiled) = result {
            tally.accepted += 1;
            let mut session = compiled.session_seed(false).session();
            let mut made = 0;
            while made < MASKS && session.mask().is_some_and(|mask| take_first(&mut session, &mask))
            {
                made += 1;
            }
            tally.masks += u64::from(made);
            tally.followed = tally.followed.max(judged.elapsed());
        } else {
            tally.rejected += 1;
        }
        assert!(since.elapsed() < TIME_LIMIT, "grammar {number} of seed {seed}: {shown}");
        tally.took.push(since.elapsed());
        if number % 1_000 == 999 {
            println!(
                "{} grammars, {} accepted, {} KiB",
                number + 1,
                tally.accepted,
                resident_kib()
            );
        }
    }
    tally.took.sort_unstable();
    tally
}

/// Resident memory of this process in KiB. Test compilations (dry runs) take place in worker processes, which
/// have their own memory limit.
fn resident_kib() -> u64 {
    let status = std::fs::read_to_string("/proc/self/status").unwrap();
    let line = status.lines().find_map(|line| line.strip_prefix("VmRSS:")).unwrap();
    line.trim().trim_end_matches(" kB").parse().unwrap()
}

#[test]
fn random_grammars_are_rejected_or_followed_in_time() {
    let tally = run(7, FORMS);
    assert!(tally.accepted > 5 && tally.rejected > 5 && tally.masks > 50, "{tally:?}");
}

/// Compiles `HADRON_GRAMMARS_COUNT` random hostile grammars.
#[test]
#[ignore = "takes minutes: `just hostile-grammars`"]
fn many_random_grammars() {
    let (count, seed) =
        (env_number("HADRON_GRAMMARS_COUNT").unwrap_or(10_000), env_number("HADRON_GRAMMARS_SEED"));
    let began = Instant::now();
    let tally = run(seed.unwrap_or(1), count);
    let at = |p: f64| tally.took[((tally.took.len() - 1) as f64 * p) as usize];
    println!(
        "{count} grammars in {:.0} s: {} accepted, {} rejected, {} masks; each p50 {:?}, p99 {:?}, max {:?}; judged within \
         {:?}, masks of one within {:?}; {} KiB",
        began.elapsed().as_secs_f64(),
        tally.accepted,
        tally.rejected,
        tally.masks,
        at(0.5),
        at(0.99),
        at(1.0),
        tally.judged,
        tally.followed,
        resident_kib()
    );
}

/// Compiles `HADRON_SCHEMAS_COUNT` distinct harmless schemas.
#[test]
#[ignore = "takes minutes: `just schemas`"]
fn many_distinct_schemas() {
    let count = env_number("HADRON_SCHEMAS_COUNT").unwrap_or(100_000);
    let (bench, began) = (GrammarCompileHarness::start(), Instant::now());
    let mut seen = Vec::new();
    for number in 0..count {
        bench.compile(harmless_spec(number)).unwrap();
        if (number + 1) % (count / 10) == 0 {
            seen.push(resident_kib());
            println!(
                "{} schemas, {:.0} s: {} KiB",
                number + 1,
                began.elapsed().as_secs_f64(),
                seen[seen.len() - 1]
            );
        }
    }
    // The grammar cache is full after a fifth of the schemas.
    let (early, late) = (seen[1], seen[9]);
    assert!(late * 100 <= early * 105, "{early} KiB after a fifth, {late} KiB in the end");
}

#[expect(clippy::disallowed_methods, reason = "sizes come from `just`")]
fn env_number(name: &str) -> Option<u64> {
    std::env::var(name).ok()?.parse().ok()
}
