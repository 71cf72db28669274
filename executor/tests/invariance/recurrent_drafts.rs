//! Draft tokens of models with recurrent states do not change outputs: rejected draft tokens are never part of a state,
//! whichever proposer is used.

use crate::drafts::{expected_tokens, request, requests_of_all_rules, run_in_flight};
use crate::scheduler_harness::{
    BLOCK, HarnessRequest, SchedulerHarness, config, eagle, eagle_drafting, model_drafting,
    recurrent_model, recurrent_mtp_drafting, shared, speculating,
};
use crate::{PROMPT, TOTAL, name, rules};
use executor::{ExecutorConfig, ModelDtype};
use models::ModelConfig;
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
        let exact = config.settings.dtype == ModelDtype::Float32;
        let mut harness = SchedulerHarness::with(config);
        run_in_flight(&mut harness, &requests_of_all_rules, 4, exact);
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

/// Returns configurations with a draft model of one attention layer. It has the embedding of the target model, so that a part of
/// its draft tokens is accepted.
fn accepting_configs(drafts: u8) -> [ExecutorConfig; 3] {
    use ModelDtype::{Bfloat16, Float32};
    let one_layer = ModelConfig { layers: 1, ..config(Float32, 2).model };
    let by_one_layer = |config| model_drafting(config, one_layer.clone(), drafts);
    [
        by_one_layer(recurrent_model(Float32)),
        by_one_layer(recurrent_model(Bfloat16)),
        by_one_layer(shared(recurrent_model(Float32), 2, false)),
    ]
}

/// Runs requests with two steps in flight after a hit of one block, and compares their tokens with those of requests without
/// hits and draft tokens. Each request reads the checkpoint of its own prefix.
fn run_prefix_hits(harness: &mut SchedulerHarness, drafts: u8) -> Vec<HarnessRequest> {
    const FIRST_CHECKPOINT: u32 = 20;
    let mut plain = requests_of_all_rules(0);
    harness.finish_all(&mut plain, TOTAL);
    let mut prefixes = requests_of_all_rules(0);
    let mut hits = requests_of_all_rules(drafts);
    for (slot, (prefix, hit)) in (FIRST_CHECKPOINT..).zip(prefixes.iter_mut().zip(&mut hits)) {
        prefix.move_to_slot(slot);
        prefix.tokens.truncate(BLOCK);
        prefix.prompt_len = BLOCK;
        prefix.table.keeps_blocks = true;
        harness.finish(prefix, BLOCK, BLOCK + 1); // Its state is that after `BLOCK` tokens.
        hit.table = prefix.table.prefix(1);
        (hit.computed, hit.checkpoint) = (BLOCK, Some(slot));
    }
    harness.finish_async(&mut hits, TOTAL, |_, _, _| {});
    for (hit, plain) in hits.iter_mut().zip(&plain) {
        assert_eq!(expected_tokens(hit), expected_tokens(plain), "after a prefix hit");
        harness.free(hit.table.split_off(1));
    }
    plain.into_iter().chain(prefixes).for_each(|request| harness.free(request.table));
    hits
}

/// States of rows in flight include accepted draft tokens, whose number is known on the device only. Prompts are computed in
/// chunks, after a preemption, and after prefix hits.
#[test]
fn accepted_drafts_in_flight_change_nothing() {
    for config in accepting_configs(4) {
        let (name, exact) = (name(&config), config.settings.dtype == ModelDtype::Float32);
        let mut harness = SchedulerHarness::with(config);
        let in_flight = run_in_flight(&mut harness, &requests_of_all_rules, 4, exact);
        let mut runs: Vec<_> = in_flight.into_iter().map(|run| run.requests).collect();
        runs.push(run_prefix_hits(&mut harness, 4));
        for requests in runs {
            let accepted: usize = requests.iter().map(|request| request.accepted).sum();
            let drafted: usize = requests.iter().map(|request| request.drafted).sum();
            println!("{name}: {accepted} of {drafted} draft tokens accepted");
            assert!(10 <= accepted && accepted < drafted, "{name}: {accepted} of {drafted}");
        }
    }
}
