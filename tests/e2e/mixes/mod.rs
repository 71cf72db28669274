//! Requests drawn from a seed over the real scheduler and the real executor, in a mix drawn from it, too: whoever runs
//! beside it, leaves, or is preempted, and whatever dies in between, each gets the bits that it gets alone.
//!
//! The demo model in f32 is the oracle: a request alone, cold and undisturbed. A failure names its seed.

mod asked;
mod run;

use crate::chance::Chance;
use crate::invariance::{PLAIN, World, compile, model};
use asked::{Asked, draw, forms};
use hadron::grammar::Compiled;
use run::{Faults, Heard, Met, Mix, run};
use scheduler::{AbortCause, Finish};

/// Seeds of every test run.
const SEEDS: u64 = 8;

/// The mix of a seed: sizes of the engine, and what happens to it.
fn mix(chance: &mut Chance) -> Mix {
    let drafts = chance.pick(&[0, 0, 1, 3]);
    let world = World {
        tokens_per_step: chance.pick(&[24, 40, 100, 512]),
        requests_running: chance.pick(&[2, 8, 24]),
        blocks: chance.pick(&[32, 33, 40, 400]),
        caching: chance.hits(700),
        steps_in_flight: chance.pick(&[1, 2, 3]),
        drafts,
        itself: drafts > 0 && chance.hits(500),
    };
    let faults = Faults {
        late: if chance.hits(500) { chance.pick(&[50, 300]) } else { 0 },
        hold: if chance.hits(500) { 500 } else { 0 },
        dies_at_tick: chance.hits(400).then(|| 5 + chance.below(40)),
    };
    let tokens_per_chunk = chance.hits(300).then(|| chance.pick(&[16, 33, 64]));
    Mix { world, tokens_per_chunk, mixed: !chance.hits(150), faults }
}

/// Runs a seed twice, one after the other and mixed, and compares.
fn seed(seed: u64, grammars: &[Compiled]) -> Met {
    let mut chance = Chance::new(seed);
    let asked = draw(&mut chance, model().vocab as u32);
    let mix = mix(&mut chance);
    let calm = Mix { world: PLAIN, tokens_per_chunk: None, mixed: true, faults: Faults::default() };
    let patient: Vec<Asked> =
        asked.iter().map(|a| Asked { gone_at_tick: None, ..a.clone() }).collect();
    let (alone, _) = run(&patient, &calm, grammars, &mut chance);
    let (together, met) = run(&asked, &mix, grammars, &mut chance);
    for ((asked, alone), together) in asked.iter().zip(&alone).zip(&together) {
        let same = match &together.finish {
            Some(Finish::Abort(AbortCause::ClientGone)) => together.begins(alone),
            Some(Finish::Error(_)) => together.fails_like(alone),
            _ => together == alone,
        };
        assert!(
            same,
            "seed {seed}: {asked:?}\nalone {alone:#?}\nin {mix:?} {together:#?}\nreplay: just mixes {seed} 1"
        );
    }
    met
}

impl Heard {
    /// Whether this is how another one begins.
    fn begins(&self, whole: &Self) -> bool {
        whole.tokens.starts_with(&self.tokens)
            && whole.logprobs.starts_with(&self.logprobs)
            && whole.prompt_logprobs.starts_with(&self.prompt_logprobs)
    }

    /// Whether both end alike behind the same tokens. How much of the prompt was scored before depends on its chunks.
    fn fails_like(&self, other: &Self) -> bool {
        let (mine, theirs) = (&self.prompt_logprobs, &other.prompt_logprobs);
        self.finish == other.finish
            && self.tokens == other.tokens
            && self.logprobs == other.logprobs
            && (mine.starts_with(theirs) || theirs.starts_with(mine))
    }
}

#[test]
fn whatever_is_asked_beside_it_a_request_gets_what_it_gets_alone() {
    let grammars = compile(forms());
    let met = (0..SEEDS).fold(Met::default(), |met, number| met + seed(number, &grammars));
    println!("{met:?}");
    let happened = [
        met.preemptions,
        met.cached_tokens,
        met.accepted,
        met.gone,
        met.deaths,
        met.late,
        met.masked,
        met.ended_early,
        met.scored,
    ];
    assert!(happened.iter().all(|&count| count > 0), "too little happened: {met:?}");
}

/// Seeds that no test has seen: `HADRON_MIXES_FROM`, `HADRON_MIXES_COUNT`.
#[test]
#[ignore = "as long as asked for: `just mixes FROM COUNT`"]
#[expect(clippy::disallowed_methods, reason = "the seeds come from `just`")]
fn explore() {
    let said = |name: &str| std::env::var(name).ok().and_then(|text| text.parse::<u64>().ok());
    let from = said("HADRON_MIXES_FROM").unwrap_or(SEEDS);
    let count = said("HADRON_MIXES_COUNT").unwrap_or(100);
    let grammars = compile(forms());
    let began = std::time::Instant::now();
    let mut met = Met::default();
    for number in from..from + count {
        met = met + seed(number, &grammars);
        if number % 100 == 99 {
            println!("up to seed {number}, {:.0} s: {met:?}", began.elapsed().as_secs_f64());
        }
    }
    println!("{count} seeds, {:.0} s: {met:?}", began.elapsed().as_secs_f64());
}
