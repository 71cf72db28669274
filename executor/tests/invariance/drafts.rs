//! Draft tokens change the number of tokens per step, never the tokens: the same bits as without drafts,
//! whatever is proposed, in any batch, after a prefix hit and after a preemption, on all ranks.

use crate::scheduler_harness::{
    BLOCK, SchedulerHarness, ScriptedRequest, config, mla_model, mtp_drafting, shared, speculating,
};
use crate::{PROMPT, TOTAL, name, rules, worlds};
use executor::{ExecutorConfig, ModelDtype};
use protocol::{DraftAcceptance, RowError, SamplingParams, Token, TokenLogprobs};

/// A request with a repetitive prompt, so that n-gram lookup proposes draft tokens.
pub(crate) fn job(id: u64, sampling: &SamplingParams, drafts: u8) -> ScriptedRequest {
    let mut job = ScriptedRequest::new(id, PROMPT, sampling.clone());
    job.tokens =
        (0..PROMPT as u64).map(|i| (i * i % (5 + id % 7) + 20 + id % 3) as Token).collect();
    job.drafts = drafts;
    job
}

/// Generated tokens up to the compared length: the last row may emit more.
pub(crate) fn expected_tokens(job: &ScriptedRequest) -> (Vec<Token>, Vec<TokenLogprobs>) {
    let (mut tokens, mut logprobs) = job.output();
    tokens.truncate(TOTAL - PROMPT);
    logprobs.truncate(TOTAL - PROMPT);
    (tokens, logprobs)
}

#[test]
fn any_number_of_drafts_changes_nothing() {
    let (mut drafted, mut accepted) = (0, 0);
    for world in worlds() {
        let name = name(&world);
        let mut player = SchedulerHarness::with(speculating(world, 4));
        for sampling in rules() {
            let mut plain = job(3, &sampling, 0);
            player.finish(&mut plain, PROMPT, TOTAL);
            for drafts in 1..=4 {
                let mut job = job(3, &sampling, drafts);
                player.finish(&mut job, 16, TOTAL);
                assert_eq!(
                    expected_tokens(&job),
                    expected_tokens(&plain),
                    "{name}, {drafts} drafts, {sampling:?}"
                );
                drafted += job.drafted;
                accepted += job.accepted;
                player.free(job.table);
            }
            player.free(plain.table);
        }
    }
    println!("{accepted} of {drafted} drafts accepted");
    assert!(0 < accepted && accepted < drafted, "{accepted} of {drafted}");
}

#[test]
fn drafts_go_on_after_preemptions_and_behind_prefix_hits() {
    for world in worlds() {
        let name = name(&world);
        let mut player = SchedulerHarness::with(speculating(world, 3));
        for sampling in rules() {
            let mut plain = job(3, &sampling, 0);
            player.finish(&mut plain, PROMPT, TOTAL);
            for at in [PROMPT + 1, PROMPT + 7] {
                let mut job = job(3, &sampling, 3);
                player.finish(&mut job, 16, at);
                let blocks = job.preempt(30);
                player.free(blocks);
                player.finish(&mut job, 33, TOTAL);
                assert_eq!(
                    expected_tokens(&job),
                    expected_tokens(&plain),
                    "{name}, preempted at {at}, {sampling:?}"
                );
                player.free(job.table);
            }
            let mut hit = job(3, &sampling, 3).in_slot(8);
            hit.table = plain.table[..2].to_vec();
            hit.computed = 2 * BLOCK;
            player.finish(&mut hit, PROMPT, TOTAL);
            assert_eq!(
                expected_tokens(&hit),
                expected_tokens(&plain),
                "{name}, behind a hit, {sampling:?}"
            );
            player.free(hit.table.split_off(2));
            player.free(plain.table);
        }
    }
}

#[test]
fn batch_mates_with_and_without_drafts_change_nothing() {
    for world in worlds() {
        let name = name(&world);
        let rules = rules();
        let mut player = SchedulerHarness::with(speculating(world, 4));
        let jobs = |drafts: fn(u64) -> u8| -> Vec<ScriptedRequest> {
            let one = |i| job(100 + i, &rules[i as usize % 4], drafts(i)).in_slot(i as u32);
            (0..12).map(one).collect()
        };
        let (mut plain, mut mixed) = (jobs(|_| 0), jobs(|i| (i % 5) as u8));
        player.finish_all(&mut plain, TOTAL);
        for job in &mut plain {
            player.free(std::mem::take(&mut job.table));
        }
        player.finish_all(&mut mixed, TOTAL);
        for (i, (plain, mixed)) in plain.iter().zip(&mixed).enumerate() {
            assert_eq!(expected_tokens(mixed), expected_tokens(plain), "{name}, request {i}");
        }
        assert!(mixed.iter().any(|job| job.drafted > 0));
    }
}

/// In 16-bit types, MLA uses different kernels for rows of few and of many tokens.
#[test]
fn max_drafts_change_nothing_with_mla() {
    let mut drafted = 0;
    for dtype in crate::DTYPES {
        let mut player = SchedulerHarness::with(speculating(mla_model(dtype), 16));
        for sampling in rules() {
            let mut plain = job(3, &sampling, 0);
            player.finish(&mut plain, PROMPT, TOTAL);
            for drafts in [1, 4, 15, 16] {
                let mut job = job(3, &sampling, drafts);
                player.finish(&mut job, PROMPT, TOTAL);
                assert_eq!(
                    expected_tokens(&job),
                    expected_tokens(&plain),
                    "{dtype:?}, {drafts} drafts, {sampling:?}"
                );
                drafted = drafted.max(job.drafted);
                player.free(job.table);
            }
            player.free(plain.table);
        }
    }
    assert!(drafted > 16, "{drafted} drafts");
}

/// Tokens emitted before a sampling error: the third 5 is a bad word where all other ids are banned.
fn tokens_before_error(drafts: u8) -> Vec<Token> {
    let (allowed, bad_words) = (Some(vec![5]), vec![vec![5, 5, 5]]);
    let sampling =
        SamplingParams { allowed_token_ids: allowed, bad_words, ..SamplingParams::greedy() };
    let mut player = SchedulerHarness::with(speculating(config(ModelDtype::Float32, 1), 4));
    let mut job = ScriptedRequest::new(3, PROMPT, sampling);
    job.tokens[..8].fill(5);
    job.tokens[PROMPT - 1] = 9;
    job.drafts = drafts;
    loop {
        let want = job.want();
        let (rows, output) = player.try_step(&mut [(&mut job, want)]);
        let result = &output.rows[0];
        match result.error {
            None => job.learn(&rows[0], result),
            Some(error) => {
                assert_eq!((error, result.sampled_tokens.len()), (RowError::AllMasked, 0));
                return job.output().0;
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

/// Synthetic acceptance accepts draft tokens at random at about the configured rate, equally on all ranks.
#[test]
fn synthetic_acceptance_rate_is_met() {
    let chance = |mut config: ExecutorConfig, per_mille| {
        let how = config.settings.speculative.as_mut().unwrap();
        how.acceptance = DraftAcceptance::Synthetic { per_mille };
        let mut player = SchedulerHarness::with(config);
        let mut found = [0; 2];
        for id in 0..6 {
            let mut job = job(id, &rules()[0], 1);
            player.finish(&mut job, PROMPT, PROMPT + 100);
            found = [found[0] + job.drafted, found[1] + job.accepted];
            player.free(job.table);
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
    // The harness compares the outputs of both ranks.
    assert_eq!(chance(shared(layer(), 2, false), 600), [drafted, accepted]);
}
