//! Speculative decoding changes the number of tokens per step, but not the output. Outputs are bit-identical
//! to outputs without draft tokens, for any proposed tokens, in any batch, after a prefix hit, after a
//! preemption, and on all ranks.

use crate::scheduler_harness::{
    BLOCK, HarnessRequest, SchedulerHarness, config, eagle, eagle_drafting, mla_model,
    model_drafting, mtp_drafting, recurrent_model, recurrent_mtp_drafting, shared, speculating,
};
use crate::{PROMPT, TOTAL, configs, configs_without_states, name, rules};
use executor::{ExecutorConfig, ModelDtype};
use protocol::{DraftAcceptanceRule, RowError, SamplingParams, Token, TokenLogprobs};

/// Returns a request with a repetitive prompt, so that n-gram lookup proposes draft tokens.
pub(crate) fn request(id: u64, sampling: &SamplingParams, drafts: u8) -> HarnessRequest {
    let mut request = HarnessRequest::new(id, PROMPT, sampling.clone());
    request.tokens =
        (0..PROMPT as u64).map(|i| (i * i % (5 + id % 7) + 20 + id % 3) as Token).collect();
    request.drafts = drafts;
    request
}

/// Returns the generated tokens of a request of `TOTAL` tokens. With draft tokens, the last row may have
/// emitted more tokens; these are removed.
pub(crate) fn expected_tokens(request: &HarnessRequest) -> (Vec<Token>, Vec<TokenLogprobs>) {
    let (mut tokens, mut logprobs) = request.output();
    tokens.truncate(TOTAL - PROMPT);
    logprobs.truncate(TOTAL - PROMPT);
    (tokens, logprobs)
}

/// Requests that ran with rows in flight.
pub(crate) struct InFlightRun {
    pub(crate) requests: Vec<HarnessRequest>,
    /// Whether a request was preempted with a row in flight.
    pub(crate) preempted: bool,
}

/// Runs the requests of `requests(drafts)` with two steps in flight, and compares their tokens with those of
/// `requests(0)`. If results do not depend on chunks (`exact`), they are run again with a preemption: a preempted request is
/// recomputed in other chunks, which may change its tokens in 16-bit types.
pub(crate) fn run_in_flight(
    harness: &mut SchedulerHarness,
    requests: &dyn Fn(u8) -> Vec<HarnessRequest>,
    drafts: u8,
    exact: bool,
) -> Vec<InFlightRun> {
    let mut plain = requests(0);
    harness.finish_all(&mut plain, TOTAL);
    let preemptions = [None, exact.then_some(PROMPT + 5)];
    let runs = preemptions[..=usize::from(exact)].iter().map(|&preempted_at| {
        let (mut ahead, mut left) = (requests(drafts), preempted_at);
        harness.finish_async(&mut ahead, TOTAL, |harness, requests, _| {
            if left.take_if(|at| requests[2].tokens.len() >= *at).is_some() {
                let blocks = requests[2].preempt(30);
                harness.free(blocks);
            }
        });
        assert_eq!(left, None);
        for (ahead, plain) in ahead.iter_mut().zip(&plain) {
            let [found, expected] = [&*ahead, plain].map(expected_tokens);
            assert_eq!(found, expected, "preempted at {preempted_at:?}");
            assert!(ahead.drafted > 0 || ahead.drafts == 0);
            harness.free(std::mem::take(&mut ahead.table));
        }
        InFlightRun { requests: ahead, preempted: preempted_at.is_some() }
    });
    let runs = runs.collect();
    for request in plain {
        harness.free(request.table);
    }
    runs
}

/// Returns one request per set of sampling parameters, with 1 draft token, 2, …, up to `drafts`.
pub(crate) fn requests_of_all_rules(drafts: u8) -> Vec<HarnessRequest> {
    let one = |(i, rules)| request(i, rules, drafts.min(1 + i as u8)).in_slot(i as u32);
    (0..).zip(&rules()).map(one).collect()
}

#[test]
fn draft_count_does_not_change_outputs() {
    let (mut drafted, mut accepted) = (0, 0);
    for config in configs() {
        let name = name(&config);
        let mut harness = SchedulerHarness::with(speculating(config, 4));
        for sampling in rules() {
            let mut plain = request(3, &sampling, 0);
            harness.finish(&mut plain, PROMPT, TOTAL);
            for drafts in 1..=4 {
                let mut request = request(3, &sampling, drafts);
                harness.finish(&mut request, 16, TOTAL);
                assert_eq!(
                    expected_tokens(&request),
                    expected_tokens(&plain),
                    "{name}, {drafts} drafts, {sampling:?}"
                );
                drafted += request.drafted;
                accepted += request.accepted;
                harness.free(request.table);
            }
            harness.free(plain.table);
        }
    }
    println!("{accepted} of {drafted} drafts accepted");
    assert!(0 < accepted && accepted < drafted, "{accepted} of {drafted}");
}

#[test]
fn drafts_continue_after_preemption_and_prefix_hits() {
    for config in configs_without_states() {
        let name = name(&config);
        let mut harness = SchedulerHarness::with(speculating(config, 3));
        for sampling in rules() {
            let mut plain = request(3, &sampling, 0);
            plain.table.keeps_blocks = true;
            harness.finish(&mut plain, PROMPT, TOTAL);
            for at in [PROMPT + 1, PROMPT + 7] {
                let mut request = request(3, &sampling, 3);
                harness.finish(&mut request, 16, at);
                let blocks = request.preempt(30);
                harness.free(blocks);
                harness.finish(&mut request, 33, TOTAL);
                assert_eq!(
                    expected_tokens(&request),
                    expected_tokens(&plain),
                    "{name}, preempted at {at}, {sampling:?}"
                );
                harness.free(request.table);
            }
            let mut hit = request(3, &sampling, 3).in_slot(8);
            hit.table = plain.table.prefix(2);
            hit.computed = 2 * BLOCK;
            harness.finish(&mut hit, PROMPT, TOTAL);
            assert_eq!(
                expected_tokens(&hit),
                expected_tokens(&plain),
                "{name}, after a prefix hit, {sampling:?}"
            );
            harness.free(hit.table.split_off(2));
            harness.free(plain.table);
        }
    }
}

#[test]
fn mixed_draft_batches_do_not_change_outputs() {
    for config in configs() {
        let name = name(&config);
        let rules = rules();
        let mut harness = SchedulerHarness::with(speculating(config, 4));
        let requests = |drafts: fn(u64) -> u8| -> Vec<HarnessRequest> {
            let one = |i| request(100 + i, &rules[i as usize % 4], drafts(i)).in_slot(i as u32);
            (0..12).map(one).collect()
        };
        let (mut plain, mut mixed) = (requests(|_| 0), requests(|i| (i % 5) as u8));
        harness.finish_all(&mut plain, TOTAL);
        for request in &mut plain {
            harness.free(std::mem::take(&mut request.table));
        }
        harness.finish_all(&mut mixed, TOTAL);
        for (i, (plain, mixed)) in plain.iter().zip(&mixed).enumerate() {
            assert_eq!(expected_tokens(mixed), expected_tokens(plain), "{name}, request {i}");
        }
        assert!(mixed.iter().any(|request| request.drafted > 0));
    }
}

/// In 16-bit types, MLA uses different kernels for rows with few tokens and rows with many tokens; the
/// outputs are equal.
#[test]
fn max_drafts_change_nothing_with_mla() {
    let mut drafted = 0;
    for dtype in crate::DTYPES {
        let mut harness = SchedulerHarness::with(speculating(mla_model(dtype), 16));
        for sampling in rules() {
            let mut plain = request(3, &sampling, 0);
            harness.finish(&mut plain, PROMPT, TOTAL);
            for drafts in [1, 4, 15, 16] {
                let mut request = request(3, &sampling, drafts);
                harness.finish(&mut request, PROMPT, TOTAL);
                assert_eq!(
                    expected_tokens(&request),
                    expected_tokens(&plain),
                    "{dtype:?}, {drafts} drafts, {sampling:?}"
                );
                drafted = drafted.max(request.drafted);
                harness.free(request.table);
            }
            harness.free(plain.table);
        }
    }
    assert!(drafted > 16, "{drafted} drafts");
}

/// Returns the tokens that are emitted before a sampling error. The error occurs because id 5 is the only
/// allowed id, and the third successive 5 is a bad word.
fn tokens_before_error(drafts: u8) -> Vec<Token> {
    let (allowed, bad_words) = (Some(vec![5]), vec![vec![5, 5, 5]]);
    let sampling =
        SamplingParams { allowed_token_ids: allowed, bad_words, ..SamplingParams::greedy() };
    let mut harness = SchedulerHarness::with(speculating(config(ModelDtype::Float32, 1), 4));
    let mut request = HarnessRequest::new(3, PROMPT, sampling);
    request.tokens[..8].fill(5);
    request.tokens[PROMPT - 1] = 9;
    request.drafts = drafts;
    loop {
        let remaining = request.remaining();
        let (rows, output) = harness.try_step(&mut [request.chunk(remaining)]);
        let result = &output.rows[0];
        match result.error {
            None => request.apply_output(&rows[0], result),
            Some(error) => {
                assert_eq!((error, result.sampled_tokens.len()), (RowError::AllMasked, 0));
                return request.output().0;
            }
        }
    }
}

#[test]
fn error_after_accepted_drafts_loses_no_token() {
    for drafts in 0..=4 {
        assert_eq!(tokens_before_error(drafts), [5, 5], "{drafts} drafts");
    }
}

/// Runs a request with a grammar and up to `drafts` draft tokens per row. Returns its tokens, the number of
/// proposed draft tokens, and the number of accepted draft tokens.
fn constrained_tokens(
    harness: &mut SchedulerHarness,
    sampling: &SamplingParams,
    drafts: u8,
) -> (Vec<Token>, [usize; 2]) {
    let mut request = request(3, sampling, drafts);
    request.masked = true;
    harness.finish(&mut request, 16, TOTAL);
    harness.free(std::mem::take(&mut request.table));
    (expected_tokens(&request).0, [request.drafted, request.accepted])
}

/// Draft tokens of requests with a grammar are verified under the bitmasks of their positions. Outputs do not
/// depend on draft tokens, even if bitmasks are overdue for some positions or for all. The test harness
/// checks that every token is allowed.
#[test]
fn drafts_under_bitmasks_do_not_change_outputs() {
    use ModelDtype::Float32;
    let same_model = |config: ExecutorConfig| {
        let draft = config.model.clone();
        model_drafting(config, draft, 4)
    };
    let (ngram, device) = (|config| speculating(config, 4), mtp_drafting(Float32, 4));
    let configs = vec![
        ngram(config(Float32, 2)),
        ngram(shared(config(Float32, 1), 2, false)),
        device.clone(),
        shared(device, 2, true),
        same_model(config(Float32, 2)),
        same_model(shared(config(Float32, 1), 2, false)),
        eagle_drafting(config(Float32, 2), eagle(), 4),
        recurrent_mtp_drafting(Float32, 4),
        ngram(recurrent_model(Float32)),
    ];
    for (i, config) in configs.into_iter().enumerate() {
        let name = format!("{i}: {}", name(&config));
        let mut harness = SchedulerHarness::with(config);
        let mut totals = [0; 2];
        for sampling in rules().into_iter().skip(1).step_by(2) {
            let (expected, _) = constrained_tokens(&mut harness, &sampling, 0);
            for (masks_max, overdue) in [(usize::MAX, false), (2, false), (usize::MAX, true)] {
                (harness.masks_max, harness.overdue_bitmasks) = (masks_max, overdue);
                let (tokens, counts) = constrained_tokens(&mut harness, &sampling, 4);
                assert_eq!(tokens, expected, "{name}, {masks_max}, {overdue}, {sampling:?}");
                totals = [totals[0] + counts[0], totals[1] + counts[1]];
            }
            (harness.masks_max, harness.overdue_bitmasks) = (usize::MAX, false);
        }
        let [drafted, accepted] = totals;
        println!("{name}: {accepted} of {drafted} drafts accepted");
        let is_untrained = i == 6 || i == 7; // The EAGLE-3 layer and the MTP module have random weights.
        assert!(accepted < drafted && (accepted > 0 || is_untrained), "{name}: {totals:?}");
    }
}

/// Synthetic acceptance accepts draft tokens at random, at about the configured rate, and identically on all
/// ranks.
#[test]
fn synthetic_acceptance_rate_is_met() {
    let chance = |mut config: ExecutorConfig, per_mille| {
        let how = config.settings.speculative.as_mut().unwrap();
        how.acceptance = DraftAcceptanceRule::Synthetic { per_mille, decrease: 0 };
        let mut harness = SchedulerHarness::with(config);
        let mut found = [0; 2];
        for id in 0..6 {
            let mut request = request(id, &rules()[0], 1);
            harness.finish(&mut request, PROMPT, PROMPT + 100);
            found = [found[0] + request.drafted, found[1] + request.accepted];
            harness.free(request.table);
        }
        found
    };
    let layer = || mtp_drafting(ModelDtype::Float32, 1);
    let [drafted, accepted] = chance(layer(), 1000);
    assert!(drafted > 200 && accepted == drafted, "{accepted} of {drafted}");
    assert_eq!(chance(layer(), 0)[1], 0);
    let [drafted, accepted] = chance(layer(), 600);
    let share = accepted as f64 / drafted as f64;
    assert!((0.5..0.7).contains(&share), "{accepted} of {drafted}");
    // With several ranks, the harness checks that the outputs of all ranks are equal.
    assert_eq!(chance(shared(layer(), 2, false), 600), [drafted, accepted]);
}

/// With a synthetic acceptance length of 2.6 and four draft tokens, the first draft token is always accepted,
/// the second with probability 0.6, and later ones never.
#[test]
fn synthetic_acceptance_length_is_met() {
    let mut config = mtp_drafting(ModelDtype::Float32, 4);
    let speculative = config.settings.speculative.as_mut().unwrap();
    speculative.acceptance = DraftAcceptanceRule::Synthetic { per_mille: 1600, decrease: 1000 };
    let mut harness = SchedulerHarness::with(config);
    let (mut drafted, mut accepted) = (0, 0);
    for id in 0..6 {
        let mut request = request(id, &rules()[0], 4);
        harness.finish(&mut request, PROMPT, PROMPT + 120);
        (drafted, accepted) = (drafted + request.drafted, accepted + request.accepted);
        harness.free(request.table);
    }
    let per_step = 4.0 * accepted as f64 / drafted as f64;
    assert!((1.45..1.75).contains(&per_step), "{accepted} of {drafted}");
}
