//! Draft tokens of models with recurrent states do not change outputs: rejected draft tokens are never part of a state,
//! whichever proposer is used.

use crate::drafts::{expected_tokens, request};
use crate::scheduler_harness::{
    BLOCK, HarnessRequest, SchedulerHarness, config, eagle, eagle_drafting, model_drafting,
    recurrent_model, recurrent_mtp_drafting, shared, speculating,
};
use crate::{PROMPT, TOTAL, name, rules};
use executor::{ExecutorConfig, ModelDtype};
use protocol::SpeculativeMethod;

/// Returns configurations with every proposer, in two types, on one rank and on two ranks.
fn configs(drafts: u8) -> Vec<ExecutorConfig> {
    use ModelDtype::{Bfloat16, Float32};
    let other_model = config(Float32, 2).model;
    vec![
        speculating(recurrent_model(Float32), drafts),
        speculating(recurrent_model(Bfloat16), drafts),
        speculating(shared(recurrent_model(Float32), 2, false), drafts),
        recurrent_mtp_drafting(Float32, drafts),
        recurrent_mtp_drafting(Bfloat16, drafts),
        shared(recurrent_mtp_drafting(Float32, drafts), 2, false),
        model_drafting(recurrent_model(Float32), other_model, drafts),
        eagle_drafting(recurrent_model(Float32), eagle(), drafts),
    ]
}

#[test]
fn recurrent_outputs_do_not_depend_on_draft_count() {
    let (mut drafted, mut accepted) = (0, 0);
    for config in configs(16) {
        let name = format!("{:?}, {}", config.settings.speculative, name(&config));
        let mut harness = SchedulerHarness::with(config);
        for sampling in rules() {
            let mut plain = request(3, &sampling, 0);
            harness.finish(&mut plain, PROMPT, TOTAL);
            for (drafts, chunk) in [(1, PROMPT), (2, 7), (5, 16), (16, PROMPT)] {
                let mut request = request(3, &sampling, drafts);
                harness.finish(&mut request, chunk, TOTAL);
                assert_eq!(
                    expected_tokens(&request),
                    expected_tokens(&plain),
                    "{name}, {drafts} drafts, {sampling:?}"
                );
                (drafted, accepted) = (drafted + request.drafted, accepted + request.accepted);
                harness.free(request.table);
            }
            harness.free(plain.table);
        }
    }
    println!("{accepted} of {drafted} drafts accepted");
    assert!(0 < accepted && accepted < drafted, "{accepted} of {drafted}");
}

/// Rows in flight start where the accepted draft tokens of earlier rows end. This position exists on the device only, where
/// the number of tokens of the states is computed from it.
#[test]
fn recurrent_rows_in_flight_draft_the_same() {
    let is_ngram = |config: &ExecutorConfig| {
        let method = config.settings.speculative.map(|speculative| speculative.method);
        matches!(method, Some(SpeculativeMethod::Ngram { .. }))
    };
    // N-gram lookup reads the tokens of earlier steps on the host, so its rows are never in flight.
    for config in configs(4).into_iter().filter(|config| !is_ngram(config)) {
        let (name, exact) = (name(&config), config.settings.dtype == ModelDtype::Float32);
        let mut harness = SchedulerHarness::with(config);
        let requests = |drafts: u8| -> Vec<_> {
            let one = |(i, rules)| request(i, rules, drafts.min(1 + i as u8)).in_slot(i as u32);
            (0..).zip(&rules()).map(one).collect()
        };
        let mut plain = requests(0);
        harness.finish_all(&mut plain, TOTAL);
        for preempted_at in [None, Some(PROMPT + 5).filter(|_| exact)] {
            let (mut ahead, mut left) = (requests(4), preempted_at);
            harness.finish_async(&mut ahead, TOTAL, |harness, requests, _| {
                if left.take_if(|at| requests[2].tokens.len() >= *at).is_some() {
                    let blocks = requests[2].preempt(30);
                    harness.free(blocks);
                }
            });
            for (ahead, plain) in ahead.iter_mut().zip(&plain) {
                let [found, expected] = [&*ahead, plain].map(expected_tokens);
                assert_eq!(found, expected, "{name}, preempted at {preempted_at:?}");
                assert!(ahead.drafted > 0, "{name}");
                harness.free(std::mem::take(&mut ahead.table));
            }
        }
        for request in plain {
            harness.free(request.table);
        }
    }
}

#[test]
fn recurrent_drafts_in_mixed_batches_change_nothing() {
    for config in configs(4) {
        let (name, rules) = (name(&config), rules());
        let mut harness = SchedulerHarness::with(config);
        let [plain, mixed] = [0, 1].map(|drafts| {
            let one = |i: u64| {
                request(100 + i, &rules[i as usize % 4], drafts * (i % 5) as u8).in_slot(i as u32)
            };
            let mut requests: Vec<HarnessRequest> = (0..12).map(one).collect();
            harness.finish_all(&mut requests, TOTAL);
            for request in &mut requests {
                harness.free(std::mem::take(&mut request.table));
            }
            requests
        });
        for (i, (plain, mixed)) in plain.iter().zip(&mixed).enumerate() {
            assert_eq!(expected_tokens(mixed), expected_tokens(plain), "{name}, request {i}");
        }
        assert!(mixed.iter().any(|request| request.drafted > 0), "{name}");
    }
}

/// A row that reads a checkpoint and writes another slot leaves the checkpoint as it is, also if it has draft tokens.
#[test]
fn recurrent_drafts_after_a_checkpoint_change_nothing() {
    for config in configs(3) {
        let name = format!("{:?}, {}", config.settings.speculative, name(&config));
        let mut harness = SchedulerHarness::with(config);
        for sampling in rules() {
            let mut plain = request(3, &sampling, 0);
            harness.finish(&mut plain, PROMPT, TOTAL);
            let mut prefix = request(3, &sampling, 0).in_slot(21);
            prefix.tokens.truncate(BLOCK);
            prefix.prompt_len = BLOCK;
            prefix.table.keeps_blocks = true;
            harness.finish(&mut prefix, BLOCK, BLOCK + 1); // Its state is that after `BLOCK` tokens.
            for (seq_slot, chunk) in [(8, PROMPT), (9, 5), (8, 1)] {
                let mut hit = request(3, &sampling, 3).in_slot(seq_slot);
                hit.table = prefix.table.prefix(1);
                (hit.computed, hit.checkpoint) = (BLOCK, Some(21));
                harness.finish(&mut hit, chunk, TOTAL);
                assert_eq!(
                    expected_tokens(&hit),
                    expected_tokens(&plain),
                    "{name}, chunks of {chunk}, {sampling:?}"
                );
                harness.free(hit.table.split_off(1));
            }
            harness.free(prefix.table);
            harness.free(plain.table);
        }
    }
}
