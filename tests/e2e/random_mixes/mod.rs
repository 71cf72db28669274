//! Random requests with random engine limits and faults, on the real scheduler and executor. Whatever other
//! requests, disconnects, preemptions and executor failures occur, the output of each request is
//! bit-identical to its output when it runs alone.
//!
//! The oracle is a run of each request alone on the same model in f32, with an empty cache and no faults. A
//! failure prints its seed.

mod generated_requests;
mod mix_runner;

use crate::invariance::{
    BLOCK, EngineTestConfig, EngineTestModel, MAX_MODEL_LEN, SEQUENTIAL, WINDOW, compile, model,
};
use crate::rng::SimRng;
use generated_requests::{GeneratedRequest, generate, specs};
use grammar::CompiledGrammar;
use mix_runner::{MixConfig, MixCounts, MixFaultRates, RequestOutput, run};
use protocol::KvKind;
use scheduler::{AbortCause, FinishReason};
use std::ops::Range;

/// Number of seeds of every test run.
const SEEDS: u64 = 8;
/// First seed of runs of a model with recurrent states.
const RECURRENT_SEEDS_FROM: u64 = 1_000_000_000;
/// Seeds of every test run of a model with recurrent states. About one seed
/// in twenty preempts a request; this range has such a seed.
const RECURRENT_SEEDS: Range<u64> = RECURRENT_SEEDS_FROM + 100..RECURRENT_SEEDS_FROM + 120;

/// Draws the engine limits and fault rates of one run.
fn random_mix(rng: &mut SimRng) -> MixConfig {
    let drafts = rng.pick(&[0, 0, 1, 3]);
    let mut world = EngineTestConfig {
        tokens_per_step: rng.pick(&[24, 40, 100, 512]),
        requests_running: rng.pick(&[2, 8, 24]),
        blocks: rng.pick(&[32, 33, 40, 400]),
        caching: rng.chance_per_mille(700),
        steps_in_flight: rng.pick(&[1, 2, 3]),
        drafts,
        uses_draft_model: drafts > 0 && rng.chance_per_mille(500),
        ..SEQUENTIAL
    };
    let faults = MixFaultRates {
        overdue_masks: if rng.chance_per_mille(500) { rng.pick(&[50, 300]) } else { 0 },
        delayed_outputs: if rng.chance_per_mille(500) { 500 } else { 0 },
        dies_at_tick: rng.chance_per_mille(400).then(|| 5 + rng.below(40)),
    };
    let tokens_per_chunk = rng.chance_per_mille(300).then(|| rng.pick(&[16, 33, 64]));
    let mixed = !rng.chance_per_mille(150);
    if rng.chance_per_mille(400) {
        world.model = EngineTestModel::DemoWithWindows;
        // The blocks that a request holds in the KV group of the windows.
        let window = KvKind::Window { tokens: WINDOW as u32 };
        world.blocks += window.blocks_of_request(MAX_MODEL_LEN, 3 * world.tokens_per_step, BLOCK);
    }
    MixConfig { setting: world, tokens_per_chunk, mixed, faults }
}

/// Draws the engine limits and fault rates of one run of a model with recurrent states, which has no draft model.
fn random_recurrent_mix(rng: &mut SimRng) -> MixConfig {
    let mut mix = random_mix(rng);
    mix.setting.model = EngineTestModel::Recurrent;
    mix.setting.uses_draft_model = false;
    // The model has one group with blocks, unlike models with windows, for which `random_mix` draws larger pools.
    mix.setting.blocks = rng.pick(&[32, 33, 40, 400]);
    mix.setting.state_checkpoint_tokens = rng.pick(&[16, 48, 80, 8_192]);
    mix
}

/// Generates requests from a seed, runs them one after another without faults and concurrently with faults,
/// and compares the outputs.
fn run_seed(seed: u64, grammars: &[CompiledGrammar]) -> MixCounts {
    let mut rng = SimRng::new(seed);
    let asked = generate(&mut rng, model().vocab as u32);
    let draw = if seed < RECURRENT_SEEDS_FROM { random_mix } else { random_recurrent_mix };
    let mix = draw(&mut rng);
    let calm = MixConfig {
        setting: EngineTestConfig { model: mix.setting.model, ..SEQUENTIAL },
        tokens_per_chunk: None,
        mixed: true,
        faults: MixFaultRates::default(),
    };
    let patient: Vec<GeneratedRequest> =
        asked.iter().map(|a| GeneratedRequest { disconnects_at_tick: None, ..a.clone() }).collect();
    let (baseline, _) = run(&patient, &calm, grammars, &mut rng);
    let (together, met) = run(&asked, &mix, grammars, &mut rng);
    for ((asked, baseline), together) in asked.iter().zip(&baseline).zip(&together) {
        let same = match &together.finish {
            Some(FinishReason::Abort(AbortCause::ClientDisconnected)) => {
                together.is_prefix_of(baseline)
            }
            Some(FinishReason::Error(_)) => together.fails_identically(baseline),
            _ => together == baseline,
        };
        assert!(
            same,
            "seed {seed}: {asked:?}\nalone {baseline:#?}\nin {mix:?} {together:#?}\nreplay: just mixes {seed} 1"
        );
    }
    met
}

impl RequestOutput {
    /// Whether this output is a prefix of the output `whole`.
    fn is_prefix_of(&self, whole: &Self) -> bool {
        whole.tokens.starts_with(&self.tokens)
            && whole.logprobs.starts_with(&self.logprobs)
            && whole.prompt_logprobs.starts_with(&self.prompt_logprobs)
    }

    /// Whether both outputs end for the same reason after the same tokens. The number of prompt positions
    /// with log-probabilities before a failure may differ, because it depends on the prefill chunks.
    fn fails_identically(&self, other: &Self) -> bool {
        let (mine, theirs) = (&self.prompt_logprobs, &other.prompt_logprobs);
        self.finish == other.finish
            && self.tokens == other.tokens
            && self.logprobs == other.logprobs
            && (mine.starts_with(theirs) || theirs.starts_with(mine))
    }
}

/// Checks that the seeds of a test run caused every event that a model of any kind can have.
fn assert_all_happened(met: &MixCounts) {
    println!("{met:?}");
    let happened = [
        met.preemptions,
        met.cached_tokens,
        met.accepted,
        met.disconnects,
        met.executor_failures,
        met.overdue_masks,
        met.masked,
        met.ended_early,
        met.scored,
    ];
    assert!(happened.iter().all(|&count| count > 0), "too little happened: {met:?}");
}

#[test]
fn output_is_independent_of_concurrent_requests() {
    let grammars = compile(specs());
    let met =
        (0..SEEDS).fold(MixCounts::default(), |met, number| met + run_seed(number, &grammars));
    assert_all_happened(&met);
}

/// As `output_is_independent_of_concurrent_requests`, for a model whose requests resume from checkpoints of recurrent
/// states, which later rows of other requests must not change.
#[test]
fn recurrent_output_is_independent_of_other_requests() {
    let grammars = compile(specs());
    let add = |met, number| met + run_seed(number, &grammars);
    let met = RECURRENT_SEEDS.fold(MixCounts::default(), add);
    assert_all_happened(&met);
    assert!(met.forks > 0, "no state was forked: {met:?}");
}

/// Tests the requests of `HADRON_MIXES_COUNT` seeds from `HADRON_MIXES_FROM` on.
#[test]
#[ignore = "runs COUNT cases from case FROM on: `just mixes FROM COUNT`"]
#[expect(clippy::disallowed_methods, reason = "the seeds come from `just`")]
fn explore_random_mixes() {
    let env_var = |name: &str| std::env::var(name).ok().and_then(|text| text.parse::<u64>().ok());
    let from = env_var("HADRON_MIXES_FROM").unwrap_or(SEEDS);
    let count = env_var("HADRON_MIXES_COUNT").unwrap_or(100);
    let grammars = compile(specs());
    let began = std::time::Instant::now();
    let mut met = MixCounts::default();
    for number in from..from + count {
        met = met + run_seed(number, &grammars);
        if number % 100 == 99 {
            println!("up to seed {number}, {:.0} s: {met:?}", began.elapsed().as_secs_f64());
        }
    }
    println!("{count} seeds, {:.0} s: {met:?}", began.elapsed().as_secs_f64());
}
