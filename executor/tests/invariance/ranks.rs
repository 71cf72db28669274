//! Tests of sampling and expert load on several ranks: tokens equal those of a single rank, and the ranks
//! exchange only the data that sampling needs.

use crate::scheduler_harness::{
    HarnessRequest, SchedulerHarness, config, moe_model, shared, with_expert_placement,
};
use crate::{LOGPROB_TOLERANCE, PROMPT};
use collectives::CollectiveOp;
use executor::{Executor, ExecutorConfig, ModelDtype, RankRendezvous};
use proptest::prelude::*;
use proptest::strategy::ValueTree;
use proptest::test_runner::TestRunner;
use protocol::{ExpertTokenCount, Rank, SamplingParams, StartupPhase, Token, TokenLogprobs};

/// Vocabulary size. It is large enough that top-k and top-p select a part of the vocabulary.
const VOCAB: usize = 4000;
const TOTAL: usize = 44;

fn wide(ranks: u16) -> ExecutorConfig {
    let mut config = config(ModelDtype::Float32, 1);
    config.model.vocab = VOCAB;
    if ranks == 1 { config } else { shared(config, ranks, false) }
}

prop_compose! {
    fn cutoff_variants()(
        temperature in prop_oneof![Just(0.0_f32), Just(1.0_f32), 0.05_f32..2.0],
        top_k in prop_oneof![Just(0_u32), Just(0_u32), 1_u32..100, 1_u32..4000],
        top_p in prop_oneof![Just(1.0_f32), 0.05_f32..1.0],
        min_p in prop_oneof![Just(0.0_f32), Just(0.0_f32), 0.001_f32..0.9],
        logprobs in prop::option::of(prop_oneof![0_u32..21, Just(u32::MAX)]),
        prompt_logprobs in prop::option::weighted(0.3, 0_u32..21),
    ) -> SamplingParams {
        SamplingParams { temperature, top_k, top_p, min_p, logprobs, prompt_logprobs, ..SamplingParams::greedy() }
    }
}

prop_compose! {
    fn sampling_variants()(
        cuts in cutoff_variants(),
        penalised in any::<bool>(),
        repetition in 0.7_f32..1.5,
        frequency in -0.5_f32..0.9,
        presence in -0.5_f32..0.9,
        min_tokens in 0_u32..8,
        stop_ids in prop::collection::vec(0_u32..4000, 0..3),
        logit_bias in prop::collection::vec((0_u32..4000, -4.0_f32..4.0), 0..5),
        allowed in prop::option::weighted(0.2, prop::collection::vec(0_u32..4000, 1..300)),
        bad_words in prop::collection::vec(prop::collection::vec(0_u32..4000, 1..3), 0..3),
    ) -> SamplingParams {
        let edited = SamplingParams { min_tokens, stop_token_ids: stop_ids, logit_bias, allowed_token_ids: allowed, bad_words, ..cuts };
        if penalised { SamplingParams { repetition_penalty: repetition, frequency_penalty: frequency, presence_penalty: presence, ..edited } } else { edited }
    }
}

/// Returns pseudo-random sampling parameters, the same in every run.
fn random(count: usize) -> Vec<SamplingParams> {
    let mut runner = TestRunner::deterministic();
    (0..count)
        .map(|i| match i % 3 {
            0 => cutoff_variants().new_tree(&mut runner).unwrap().current(),
            _ => sampling_variants().new_tree(&mut runner).unwrap().current(),
        })
        .collect()
}

/// Tokens of a request, the log-probabilities of these tokens, and the log-probabilities of the prompt
/// tokens.
type OutputWithPromptLogprobs = (Vec<Token>, Vec<TokenLogprobs>, Vec<TokenLogprobs>);

fn play(ranks: u16, requests: &[SamplingParams]) -> Vec<OutputWithPromptLogprobs> {
    let mut harness = SchedulerHarness::with(wide(ranks));
    let request = |(i, sampling): (u64, &SamplingParams)| {
        HarnessRequest::new(i, 5 + (i as usize * 13) % 30, sampling.clone()).in_slot(i as u32)
    };
    let mut requests: Vec<HarnessRequest> = (0..).zip(requests).map(request).collect();
    harness.finish_all(&mut requests, TOTAL);
    requests
        .into_iter()
        .map(|request| (request.tokens, request.logprobs, request.prompt_logprobs))
        .collect()
}

fn assert_close(ours: &[TokenLogprobs], theirs: &[TokenLogprobs], what: &str) {
    let near = |a: f32, b: f32| (a - b).abs() <= LOGPROB_TOLERANCE;
    assert_eq!(ours.len(), theirs.len(), "{what}");
    for (a, b) in ours.iter().zip(theirs) {
        assert!(a.token == b.token && near(a.logprob, b.logprob), "{what}: {a:?}, {b:?}");
        assert_eq!(a.top_logprobs.len(), b.top_logprobs.len(), "{what}");
        // Only the log-probabilities are compared, not the token ids: two ids may swap their order if their
        // logits differ only in the last bits.
        for (&(_, a), &(_, b)) in a.top_logprobs.iter().zip(&b.top_logprobs) {
            assert!(near(a, b), "{what}: {a}, {b}");
        }
    }
}

#[test]
fn ranks_match_single_rank_for_all_sampling_params() {
    let requests = random(40);
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

/// Returns, for each all-gather in one decode step of `rows` requests, the number of elements that a rank
/// sends.
fn gathered(ranks: u16, rows: u64, sampling: &SamplingParams) -> Vec<u32> {
    let mut harness = SchedulerHarness::with(wide(ranks));
    let mut requests: Vec<HarnessRequest> = (0..rows)
        .map(|i| HarnessRequest::new(i, PROMPT, sampling.clone()).in_slot(i as u32))
        .collect();
    let mut prompts: Vec<_> = requests.iter_mut().map(|request| request.chunk(PROMPT)).collect();
    harness.step(&mut prompts);
    let seen = harness.lockstep.rendezvous.calls()[0].calls.len();
    harness.step(&mut requests.iter_mut().map(|request| request.chunk(1)).collect::<Vec<_>>());
    let calls = &harness.lockstep.rendezvous.calls()[0].calls[seen..];
    let gathers = calls.iter().filter(|call| call.op == CollectiveOp::AllGather);
    gathers.map(|call| call.rows * call.cols).collect()
}

#[test]
fn step_gathers_only_what_sampling_needs() {
    let greedy = SamplingParams::greedy();
    let random = SamplingParams { temperature: 1.0, ..greedy.clone() };
    let top_k = SamplingParams { top_k: 20, top_p: 0.9, ..random.clone() };
    let scored = SamplingParams { logprobs: Some(5), ..random.clone() };
    for ranks in [2, 4] {
        assert_eq!(gathered(ranks, 1, &greedy), [3]);
        assert_eq!(gathered(ranks, 8, &greedy), [24]);
        assert_eq!(gathered(ranks, 8, &random), [24]);
        assert_eq!(gathered(ranks, 8, &top_k), [8 * 41]);
        assert_eq!(gathered(ranks, 8, &scored), [8 * 17, 8]);
    }
}

#[test]
fn expert_placement_changes_no_token() {
    let play = |config| {
        let mut harness = SchedulerHarness::with(config);
        let mut request = HarnessRequest::new(
            3,
            PROMPT,
            SamplingParams { logprobs: Some(3), ..SamplingParams::greedy() },
        );
        harness.finish(&mut request, 16, PROMPT + 20);
        request.output()
    };
    let one = play(moe_model(ModelDtype::Float32));
    let expert_parallel = play(shared(moe_model(ModelDtype::Float32), 2, true));
    let ranks = play(with_expert_placement(shared(moe_model(ModelDtype::Float32), 2, true)));
    for found in [&expert_parallel, &ranks] {
        assert_eq!(found.0, one.0);
        assert_close(&found.1, &one.1, "expert placement");
    }
    assert_eq!(
        ranks.1, expert_parallel.1,
        "a token has two experts: their sum is the same either way round"
    );
}

/// Returns the bytes of weights that rank `rank` loads in this configuration.
fn weight_bytes(mut config: ExecutorConfig, rank: u16) -> u64 {
    let rendezvous = RankRendezvous::new(config.settings.parallel).unwrap();
    config.settings.rendezvous = Some(rendezvous.path().to_owned());
    config.settings.rank = Rank(rank);
    let mut bytes = 0;
    let progress = &mut |progress: executor::StartupPhaseProgress| {
        if progress.phase == StartupPhase::Load {
            bytes = progress.total;
        }
    };
    Executor::load(config, progress).unwrap();
    bytes
}

#[test]
fn ranks_load_the_experts_placed_on_them() {
    let expert_parallel = shared(moe_model(ModelDtype::Float32), 2, true);
    let moe = expert_parallel.model.moe.as_ref().unwrap();
    // Bytes of one expert: three matrices (gate, up, down) of synthetic bf16 weights, 2 bytes per weight.
    let expert = (3 * expert_parallel.model.hidden * moe.intermediate * size_of::<u16>()) as u64;
    for rank in [0, 1] {
        let (in_order, placed) = (
            weight_bytes(expert_parallel.clone(), rank),
            weight_bytes(with_expert_placement(expert_parallel.clone()), rank),
        );
        assert_eq!(placed, in_order + 2 * expert, "rank {rank}: 6 of layer 1 instead of 4");
    }
}

#[test]
fn expert_load_is_counted_once_with_replicated_experts() {
    let counted = |ranks: u16, expert_parallel: bool| {
        let config = moe_model(ModelDtype::Float32);
        let config = if ranks == 1 { config } else { shared(config, ranks, expert_parallel) };
        let mut harness = SchedulerHarness::with(config);
        let mut request = HarnessRequest::new(3, PROMPT, SamplingParams::greedy());
        let prompt = harness.step(&mut [request.chunk(PROMPT)]).expert_tokens;
        let decode = harness.step(&mut [request.chunk(1)]).expert_tokens;
        (prompt, decode)
    };
    let (prompt, decode) = counted(1, false);
    // Layer 0 is dense; the other layers route each token to 2 of 8 experts. For a prompt, the last layer
    // computes sample positions only.
    for (layer, tokens) in [(1, PROMPT as u32), (2, 1)] {
        let of = |counts: &[ExpertTokenCount]| -> u32 {
            counts.iter().filter(|count| count.layer == layer).map(|count| count.tokens).sum()
        };
        assert_eq!((of(&prompt), of(&decode)), (2 * tokens, 2));
    }
    let order: Vec<(u16, u16)> = prompt.iter().map(|c| (c.layer, c.expert)).collect();
    assert!(order.is_sorted() && prompt.iter().all(|c| c.layer > 0 && c.expert < 8));
    assert!(decode.iter().all(|c| c.tokens == 1), "a token goes to different experts: {decode:?}");
    for (ranks, expert_parallel) in [(2, false), (2, true), (4, true)] {
        // Tokens are counted per logical expert, so the counts do not depend on the expert placement.
        assert_eq!(
            counted(ranks, expert_parallel),
            (prompt.clone(), decode.clone()),
            "{ranks} ranks"
        );
    }
}
