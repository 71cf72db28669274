//! Draft tokens of an MTP module do not change outputs, and do not depend on the other rows of the batch.

use crate::drafts::{expected_tokens, request, requests_of_all_rules, run_in_flight};
use crate::scheduler_harness::{
    BLOCK, HarnessRequest, SchedulerHarness, moe_model, mtp_drafting, shared, speculating,
    with_all_experts_placed, with_expert_placement,
};
use crate::{PROMPT, TOTAL, name, rules};
use executor::{Executor, ExecutorConfig, ExecutorError, ModelDtype, SpeculationError};
use protocol::SpeculativeConfig;

/// Returns configurations with one rank; with two ranks that split heads and experts; and with two EP ranks.
/// The EP ranks have the experts in order, or an expert placement that may include the experts of the MTP
/// module.
fn configs(drafts: u8) -> [ExecutorConfig; 6] {
    use ModelDtype::{Bfloat16, Float32};
    [
        mtp_drafting(Float32, drafts),
        mtp_drafting(Bfloat16, drafts),
        shared(mtp_drafting(Float32, drafts), 2, false),
        shared(mtp_drafting(Float32, drafts), 2, true),
        with_expert_placement(shared(mtp_drafting(Float32, drafts), 2, true)),
        with_all_experts_placed(shared(mtp_drafting(Float32, drafts), 2, true)),
    ]
}

#[test]
fn draft_count_does_not_change_outputs() {
    let (mut drafted, mut accepted) = (0, 0);
    for config in configs(4) {
        let name = name(&config);
        let mut harness = SchedulerHarness::with(config);
        for sampling in rules() {
            let mut plain = request(3, &sampling, 0);
            harness.finish(&mut plain, PROMPT, TOTAL);
            for drafts in 1..=4 {
                let mut request = request(3, &sampling, drafts);
                harness.finish(&mut request, PROMPT, TOTAL);
                assert_eq!(
                    expected_tokens(&request),
                    expected_tokens(&plain),
                    "{name}, {drafts} drafts, {sampling:?}"
                );
                // Each decode row proposes at least one draft token, and emits one token plus the accepted
                // draft tokens. So, up to a margin of 2, the number of draft tokens is at least the number of
                // emitted tokens minus the number of accepted draft tokens.
                assert!(
                    request.drafted >= TOTAL - PROMPT - 2 - request.accepted,
                    "{}",
                    request.drafted
                );
                drafted += request.drafted;
                accepted += request.accepted;
                harness.free(request.table);
            }
            harness.free(plain.table);
        }
    }
    println!("{accepted} of {drafted} drafts accepted");
    assert!(accepted < drafted, "{accepted} of {drafted}");
}

/// The start position of a row in an asynchronous step is known only on the device, because the host has not
/// yet received the number of accepted draft tokens. Draft tokens and outputs are the same as in synchronous
/// steps, even if a request is preempted with a row in flight.
#[test]
fn async_steps_draft_and_sample_the_same() {
    for config in configs(4) {
        let (name, exact) = (name(&config), config.settings.dtype == ModelDtype::Float32);
        let mut harness = SchedulerHarness::with(config);
        let mut waited = requests_of_all_rules(4);
        harness.finish_all(&mut waited, TOTAL);
        for run in run_in_flight(&mut harness, &requests_of_all_rules, 4, exact) {
            let counts = |request: &HarnessRequest| [request.drafted, request.accepted];
            for (ahead, waited) in run.requests.iter().zip(&waited) {
                let more = counts(ahead).iter().zip(counts(waited)).all(|(a, b)| *a >= b);
                // With asynchronous steps, one more row may be in flight when a request ends, so the numbers
                // of draft tokens may be larger than with synchronous steps.
                assert!(more || run.preempted, "{name}");
            }
        }
        for request in waited {
            harness.free(request.table);
        }
    }
}

/// If the grammar bitmask of a row is overdue, the last token of the row is forwarded again in the next step.
#[test]
fn overdue_bitmasks_change_nothing_with_mtp() {
    let play = |config: ExecutorConfig, overdue| {
        let mut harness = SchedulerHarness::with(config);
        harness.overdue_bitmasks = overdue;
        let mut request = request(3, &rules()[1], 0);
        request.masked = true;
        harness.finish(&mut request, 7, TOTAL);
        expected_tokens(&request)
    };
    for config in
        configs(2).into_iter().filter(|config| config.settings.dtype == ModelDtype::Float32)
    {
        assert_eq!(play(config.clone(), true), play(config, false));
    }
}

#[test]
fn mtp_drafts_unchanged_by_chunks_preemption_prefix_hits() {
    for config in
        configs(3).into_iter().filter(|config| config.settings.dtype == ModelDtype::Float32)
    {
        let name = name(&config);
        let mut harness = SchedulerHarness::with(config);
        for sampling in rules() {
            let mut uninterrupted = request(3, &sampling, 3);
            harness.finish(&mut uninterrupted, PROMPT, TOTAL);
            let expected =
                (expected_tokens(&uninterrupted), uninterrupted.drafted, uninterrupted.accepted);
            for chunk in [1, 7, 16, 33] {
                let mut request = request(3, &sampling, 3).in_slot(17);
                harness.finish(&mut request, chunk, TOTAL);
                let found = (expected_tokens(&request), request.drafted, request.accepted);
                assert_eq!(found, expected, "{name}, chunks of {chunk}, {sampling:?}");
                harness.free(request.table);
            }
            for at in [PROMPT + 1, PROMPT + 7] {
                let mut request = request(3, &sampling, 3);
                harness.finish(&mut request, 16, at);
                let blocks = request.preempt(30);
                harness.free(blocks);
                harness.finish(&mut request, 33, TOTAL);
                assert_eq!(
                    expected_tokens(&request),
                    expected.0,
                    "{name}, preempted at {at}, {sampling:?}"
                );
                harness.free(request.table);
            }
            let mut hit = request(3, &sampling, 3).in_slot(8);
            hit.table = uninterrupted.table.prefix(2);
            hit.computed = 2 * BLOCK;
            harness.finish(&mut hit, PROMPT, TOTAL);
            let found = (expected_tokens(&hit), hit.drafted, hit.accepted);
            assert_eq!(found, expected, "{name}, after a prefix hit, {sampling:?}");
            harness.free(hit.table.split_off(2));
            harness.free(uninterrupted.table);
        }
    }
}

#[test]
fn mixed_draft_batches_do_not_change_outputs() {
    for config in
        configs(4).into_iter().filter(|config| config.settings.dtype == ModelDtype::Float32)
    {
        let name = name(&config);
        let rules = rules();
        let mut harness = SchedulerHarness::with(config);
        let mut requests = [0, 1].map(|drafts| {
            let one = |i: u64| {
                request(100 + i, &rules[i as usize % 4], drafts * (i % 5) as u8).in_slot(i as u32)
            };
            (0..12).map(one).collect::<Vec<_>>()
        });
        for requests in &mut requests {
            harness.finish_all(requests, TOTAL);
            for request in requests {
                harness.free(std::mem::take(&mut request.table));
            }
        }
        let [plain, mixed] = requests;
        for (i, (plain, mixed)) in plain.iter().zip(&mixed).enumerate() {
            assert_eq!(expected_tokens(mixed), expected_tokens(plain), "{name}, request {i}");
        }
        assert!(
            mixed.iter().filter(|request| request.drafts > 0).all(|request| request.drafted > 0)
        );
    }
}

/// Each KV block also stores one MLA row per token for the MTP module, and the hidden state of the block's
/// last token.
#[test]
fn block_size_includes_the_mtp_module() {
    let bytes = |config| Executor::load(config, &mut |_| {}).unwrap().kv_spec().bytes_per_block();
    let config = mtp_drafting(ModelDtype::Float32, 1);
    let (hidden, layers) = (config.model.hidden as u64, config.model.layers as u64);
    let mut plain = config.clone();
    plain.settings.speculative = None;
    let plain = bytes(plain);
    assert_eq!(bytes(config), plain / layers * (layers + 1) + hidden * 4);
}

#[test]
fn model_without_mtp_module_is_rejected() {
    let config = || mtp_drafting(ModelDtype::Float32, 2);
    let rejection = |config: ExecutorConfig| match Executor::load(config, &mut |_| {}) {
        Err(ExecutorError::Speculation(error)) => error,
        other => panic!("{other:?}"),
    };
    let mut too_many_drafts = config();
    let settings = too_many_drafts.settings.speculative.unwrap();
    let too_many = Some(SpeculativeConfig { draft_tokens: 17, ..settings });
    too_many_drafts.settings.speculative = too_many;
    assert_eq!(rejection(too_many_drafts), SpeculationError::TooManyDrafts { drafts: 17 });
    let architecture = "DeepseekV3ForCausalLM";
    for (layers, expected) in [
        (0, SpeculationError::NoMtpModules { architecture }),
        (2, SpeculationError::MtpModules { architecture, layers: 2 }),
    ] {
        let mut other = config();
        other.model.mtp_layers = layers;
        assert_eq!(rejection(other), expected);
    }
    let mut qwen = speculating(moe_model(ModelDtype::Float32), 2);
    qwen.settings.speculative = too_many;
    let error = rejection(qwen).to_string();
    assert!(error.contains("Qwen3MoeForCausalLM model has no MTP modules"), "{error}");
}
