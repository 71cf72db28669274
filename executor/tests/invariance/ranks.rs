//! Ranks that share a vocabulary choose what one rank chooses, and tell each other little for it.

use crate::player::{Job, Player, config, experts, placed, shared};
use crate::{LOGPROB_TOLERANCE, PROMPT};
use collectives::Operation;
use executor::{Dtype, Executor, ExecutorConfig, Meeting};
use proptest::prelude::*;
use proptest::strategy::ValueTree;
use proptest::test_runner::TestRunner;
use protocol::{ExpertTokens, Phase, Rank, Sampling, Token, TokenLogprobs};

/// Enough for rules to cut somewhere in the middle.
const VOCAB: usize = 4000;
const TOTAL: usize = 44;

fn wide(ranks: u16) -> ExecutorConfig {
    let mut config = config(Dtype::Float32, 1);
    config.model.vocab = VOCAB;
    if ranks == 1 { config } else { shared(config, ranks, false) }
}

prop_compose! {
    fn cuts()(
        temperature in prop_oneof![Just(0.0_f32), Just(1.0_f32), 0.05_f32..2.0],
        top_k in prop_oneof![Just(0_u32), Just(0_u32), 1_u32..100, 1_u32..4000],
        top_p in prop_oneof![Just(1.0_f32), 0.05_f32..1.0],
        min_p in prop_oneof![Just(0.0_f32), Just(0.0_f32), 0.001_f32..0.9],
        logprobs in prop::option::of(prop_oneof![0_u32..21, Just(u32::MAX)]),
        prompt_logprobs in prop::option::weighted(0.3, 0_u32..21),
    ) -> Sampling {
        Sampling { temperature, top_k, top_p, min_p, logprobs, prompt_logprobs, ..Sampling::greedy() }
    }
}

prop_compose! {
    fn samplings()(
        cuts in cuts(),
        penalised in any::<bool>(),
        repetition in 0.7_f32..1.5,
        frequency in -0.5_f32..0.9,
        presence in -0.5_f32..0.9,
        min_tokens in 0_u32..8,
        stop_ids in prop::collection::vec(0_u32..4000, 0..3),
        logit_bias in prop::collection::vec((0_u32..4000, -4.0_f32..4.0), 0..5),
        allowed in prop::option::weighted(0.2, prop::collection::vec(0_u32..4000, 1..300)),
        bad_words in prop::collection::vec(prop::collection::vec(0_u32..4000, 1..3), 0..3),
    ) -> Sampling {
        let edited = Sampling { min_tokens, stop_ids, logit_bias, allowed, bad_words, ..cuts };
        if penalised { Sampling { repetition, frequency, presence, ..edited } } else { edited }
    }
}

/// The same requests every time.
fn drawn(count: usize) -> Vec<Sampling> {
    let mut runner = TestRunner::deterministic();
    (0..count)
        .map(|i| match i % 3 {
            0 => cuts().new_tree(&mut runner).unwrap().current(),
            _ => samplings().new_tree(&mut runner).unwrap().current(),
        })
        .collect()
}

type Output = (Vec<Token>, Vec<TokenLogprobs>, Vec<TokenLogprobs>);

fn play(ranks: u16, requests: &[Sampling]) -> Vec<Output> {
    let mut player = Player::with(wide(ranks));
    let job = |(i, sampling): (u64, &Sampling)| {
        Job::new(i, 5 + (i as usize * 13) % 30, sampling.clone()).on_seat(i as u32)
    };
    let mut jobs: Vec<Job> = (0..).zip(requests).map(job).collect();
    player.finish_all(&mut jobs, TOTAL);
    jobs.into_iter().map(|job| (job.tokens, job.logprobs, job.prompt_logprobs)).collect()
}

fn assert_close(ours: &[TokenLogprobs], theirs: &[TokenLogprobs], what: &str) {
    let near = |a: f32, b: f32| (a - b).abs() <= LOGPROB_TOLERANCE;
    assert_eq!(ours.len(), theirs.len(), "{what}");
    for (a, b) in ours.iter().zip(theirs) {
        assert!(a.token == b.token && near(a.logprob, b.logprob), "{what}: {a:?}, {b:?}");
        assert_eq!(a.top.len(), b.top.len(), "{what}");
        // Ids of equal rank may change places where their logits differ in the last bits.
        for (&(_, a), &(_, b)) in a.top.iter().zip(&b.top) {
            assert!(near(a, b), "{what}: {a}, {b}");
        }
    }
}

#[test]
fn whatever_is_asked_ranks_find_the_tokens_of_one() {
    let requests = drawn(40);
    let expected = play(1, &requests);
    for ranks in [2, 4] {
        let found = play(ranks, &requests);
        for (i, (ours, theirs)) in found.iter().zip(&expected).enumerate() {
            let what = format!("{ranks} ranks, {:?}", requests[i]);
            assert_eq!(ours.0, theirs.0, "{what}");
            assert_close(&ours.1, &theirs.1, &what);
            assert_close(&ours.2, &theirs.2, &what);
        }
    }
}

/// Words that each rank brings to gatherings in one decode step of `rows` requests, call by call.
fn gathered(ranks: u16, rows: u64, sampling: &Sampling) -> Vec<u32> {
    let mut player = Player::with(wide(ranks));
    let mut jobs: Vec<Job> =
        (0..rows).map(|i| Job::new(i, PROMPT, sampling.clone()).on_seat(i as u32)).collect();
    let prompts: Vec<(&mut Job, usize)> = jobs.iter_mut().map(|job| (job, PROMPT)).collect();
    player.step(&mut { prompts });
    let seen = player.pact.meeting.calls()[0].calls.len();
    player.step(&mut jobs.iter_mut().map(|job| (job, 1)).collect::<Vec<_>>());
    let calls = &player.pact.meeting.calls()[0].calls[seen..];
    let gathers = calls.iter().filter(|call| call.operation == Operation::AllGather);
    gathers.map(|call| call.rows * call.cols).collect()
}

#[test]
fn a_step_tells_what_its_rules_need() {
    let greedy = Sampling::greedy();
    let drawn = Sampling { temperature: 1.0, ..greedy.clone() };
    let top_k = Sampling { top_k: 20, top_p: 0.9, ..drawn.clone() };
    let scored = Sampling { logprobs: Some(5), ..drawn.clone() };
    for ranks in [2, 4] {
        assert_eq!(gathered(ranks, 1, &greedy), [3]);
        assert_eq!(gathered(ranks, 8, &greedy), [24]);
        assert_eq!(gathered(ranks, 8, &drawn), [24]);
        assert_eq!(gathered(ranks, 8, &top_k), [8 * 41]);
        assert_eq!(gathered(ranks, 8, &scored), [8 * 17, 8]);
    }
}

#[test]
fn where_experts_lie_changes_no_token() {
    let play = |config| {
        let mut player = Player::with(config);
        let mut job = Job::new(3, PROMPT, Sampling { logprobs: Some(3), ..Sampling::greedy() });
        player.finish(&mut job, 16, PROMPT + 20);
        job.output()
    };
    let one = play(experts(Dtype::Float32));
    let spread = play(shared(experts(Dtype::Float32), 2, true));
    let ranks = play(placed(shared(experts(Dtype::Float32), 2, true)));
    for found in [&spread, &ranks] {
        assert_eq!(found.0, one.0);
        assert_close(&found.1, &one.1, "experts in places");
    }
    assert_eq!(
        ranks.1, spread.1,
        "a token has two experts: their sum is the same either way round"
    );
}

/// Bytes of weights that a rank of this world reads.
fn weight_bytes(mut config: ExecutorConfig, rank: u16) -> u64 {
    let meeting = Meeting::new(config.settings.parallel).unwrap();
    config.settings.meeting = Some(meeting.path().to_owned());
    config.settings.rank = Rank(rank);
    let mut bytes = 0;
    let progress = &mut |progress: executor::Progress| {
        if progress.phase == Phase::Load {
            bytes = progress.total;
        }
    };
    Executor::load(config, progress).unwrap();
    bytes
}

#[test]
fn each_rank_holds_the_experts_that_were_placed_there() {
    let spread = shared(experts(Dtype::Float32), 2, true);
    let moe = spread.model.moe.as_ref().unwrap();
    let expert = (3 * spread.model.hidden * moe.intermediate * size_of::<u16>()) as u64; // Synthetic ones are bf16.
    for rank in [0, 1] {
        let (usual, placed) =
            (weight_bytes(spread.clone(), rank), weight_bytes(placed(spread.clone()), rank));
        assert_eq!(placed, usual + 2 * expert, "rank {rank}: 6 of layer 1 instead of 4");
    }
}

#[test]
fn experts_are_counted_once_however_many_ranks_hold_them() {
    let counted = |ranks: u16, spread: bool| {
        let config = experts(Dtype::Float32);
        let config = if ranks == 1 { config } else { shared(config, ranks, spread) };
        let mut player = Player::with(config);
        let mut job = Job::new(3, PROMPT, Sampling::greedy());
        let prompt = player.step(&mut [(&mut job, PROMPT)]).experts;
        let decode = player.step(&mut [(&mut job, 1)]).experts;
        (prompt, decode)
    };
    let (prompt, decode) = counted(1, false);
    // Layer 0 is dense; the others have 8 experts, and send each token to 2 of them: the last one those that a token comes from.
    for (layer, tokens) in [(1, PROMPT as u32), (2, 1)] {
        let of = |counts: &[ExpertTokens]| -> u32 {
            counts.iter().filter(|count| count.layer == layer).map(|count| count.tokens).sum()
        };
        assert_eq!((of(&prompt), of(&decode)), (2 * tokens, 2));
    }
    let order: Vec<(u16, u16)> = prompt.iter().map(|c| (c.layer, c.expert)).collect();
    assert!(order.is_sorted() && prompt.iter().all(|c| c.layer > 0 && c.expert < 8));
    assert!(decode.iter().all(|c| c.tokens == 1), "a token goes to different experts: {decode:?}");
    for (ranks, spread) in [(2, false), (2, true), (4, true)] {
        // By their own numbers, wherever they lie.
        assert_eq!(counted(ranks, spread), (prompt.clone(), decode.clone()), "{ranks} ranks");
    }
}
