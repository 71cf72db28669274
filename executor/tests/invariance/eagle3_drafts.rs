//! Draft tokens of an EAGLE-3 layer do not change outputs, and do not depend on the other rows of the batch.

use crate::drafts::{expected_tokens, request};
use crate::scheduler_harness::{
    BLOCK, HarnessRequest, SchedulerHarness, config, eagle, eagle_drafting, mla_model, moe_model,
    shared, two_head_sizes_model,
};
use crate::{PROMPT, TOTAL, name, rules};
use executor::{Executor, ExecutorConfig, ExecutorError, ModelDtype, SpeculationError};
use models::ModelConfig;
use models::config::Eagle3Config;
use protocol::SpeculativeConfig;

/// Returns an EAGLE-3 checkpoint with a changed architecture option: normed auxiliary states (`fc_norm`),
/// normed state in the residual stream (`norm_before_residual`), or normed output (`norm_output`).
fn variant(change: fn(&mut Eagle3Config)) -> ModelConfig {
    let mut eagle = eagle();
    eagle.eagle.as_mut().map(change).unwrap();
    eagle
}

/// Returns an EAGLE-3 layer with half the hidden size of the target model, its own embedding and the full
/// vocabulary.
fn smaller_hidden_model() -> ModelConfig {
    let shape = Eagle3Config { vocab: 384, ..eagle().eagle.unwrap() };
    ModelConfig { hidden: 32, heads: 2, kv_heads: 1, eagle: Some(shape), ..eagle() }
}

/// Returns configurations with one rank and with several ranks, for models of several kinds.
fn configs(drafts: u8) -> Vec<ExecutorConfig> {
    use ModelDtype::{Bfloat16, Float32};
    let by = |config, eagle| eagle_drafting(config, eagle, drafts);
    let normed = variant(|e| (e.fc_norm, e.norm_output) = (true, true));
    vec![
        by(config(Float32, 2), eagle()),
        by(config(Bfloat16, 2), variant(|e| e.norm_before_residual = true)),
        by(shared(config(Float32, 1), 2, false), variant(|e| e.aux_layers = Some([0, 1, 3]))),
        by(shared(moe_model(Float32), 2, true), normed),
        by(moe_model(Float32), smaller_hidden_model()),
        by(mla_model(Float32), eagle()),
        by(two_head_sizes_model(Float32), eagle()),
    ]
}

fn in_f32(drafts: u8) -> impl Iterator<Item = ExecutorConfig> {
    configs(drafts).into_iter().filter(|config| config.settings.dtype == ModelDtype::Float32)
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

/// Collecting the auxiliary hidden states that EAGLE-3 reads does not change the outputs of the target model.
#[test]
fn collecting_aux_hidden_states_changes_nothing() {
    for config in configs(2) {
        let name = name(&config);
        let play = |config: ExecutorConfig, drafts| {
            let mut harness = SchedulerHarness::with(config);
            let mut request = request(3, &rules()[1], drafts);
            harness.finish(&mut request, 16, TOTAL);
            expected_tokens(&request)
        };
        let mut without_drafts = config.clone();
        (
            without_drafts.settings.speculative,
            without_drafts.settings.draft_model_dir,
            without_drafts.draft,
        ) = (None, None, None);
        assert_eq!(play(config, 2), play(without_drafts, 0), "{name}");
    }
}

/// The start position of a row in an asynchronous step is known only on the device, because the host has not
/// yet received the number of accepted draft tokens. Draft tokens and outputs are the same as in synchronous
/// steps, even if a request is preempted with a row in flight.
#[test]
fn async_steps_draft_and_sample_the_same() {
    for config in in_f32(4) {
        let name = name(&config);
        let mut harness = SchedulerHarness::with(config);
        let requests = |drafts: u8| -> Vec<_> {
            let one = |(i, rules)| request(i, rules, drafts.min(1 + i as u8)).in_slot(i as u32);
            (0..).zip(&rules()).map(one).collect()
        };
        let mut plain = requests(0);
        harness.finish_all(&mut plain, TOTAL);
        for preempted_at in [None, Some(PROMPT + 5)] {
            let (mut ahead, mut left) = (requests(4), preempted_at);
            harness.finish_async(&mut ahead, TOTAL, |harness, requests, _| {
                if left.take_if(|at| requests[2].tokens.len() >= *at).is_some() {
                    let blocks = requests[2].preempt(30);
                    harness.free(blocks);
                }
            });
            assert_eq!(left, None);
            for (ahead, plain) in ahead.iter_mut().zip(&plain) {
                assert_eq!(
                    expected_tokens(ahead),
                    expected_tokens(plain),
                    "{name}, preempted at {preempted_at:?}"
                );
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
fn eagle3_drafts_unchanged_by_chunks_preemption_prefix_hits() {
    for config in in_f32(3) {
        let name = name(&config);
        let mut harness = SchedulerHarness::with(config);
        for sampling in rules() {
            let mut uninterrupted = request(3, &sampling, 3);
            uninterrupted.table.keeps_blocks = true;
            harness.finish(&mut uninterrupted, PROMPT, TOTAL);
            let of = |request: &HarnessRequest| {
                (expected_tokens(request), request.drafted, request.accepted)
            };
            for chunk in [1, 7, 33] {
                let mut request = request(3, &sampling, 3).in_slot(17);
                harness.finish(&mut request, chunk, TOTAL);
                assert_eq!(
                    of(&request),
                    of(&uninterrupted),
                    "{name}, chunks of {chunk}, {sampling:?}"
                );
                harness.free(request.table);
            }
            let mut request = request(3, &sampling, 3);
            harness.finish(&mut request, 16, PROMPT + 7);
            let blocks = request.preempt(30);
            harness.free(blocks);
            harness.finish(&mut request, 33, TOTAL);
            assert_eq!(
                expected_tokens(&request),
                expected_tokens(&uninterrupted),
                "{name}, preempted, {sampling:?}"
            );
            harness.free(request.table);
            let mut hit = crate::drafts::request(3, &sampling, 3).in_slot(8);
            hit.table = uninterrupted.table.prefix(2);
            hit.computed = 2 * BLOCK;
            harness.finish(&mut hit, PROMPT, TOTAL);
            assert_eq!(of(&hit), of(&uninterrupted), "{name}, after a prefix hit, {sampling:?}");
            harness.free(hit.table.split_off(2));
            harness.free(uninterrupted.table);
        }
    }
}

/// Each KV block also stores the keys and values of the EAGLE-3 layer, and the hidden state of the block's
/// last token.
#[test]
fn block_size_includes_the_eagle3_layer() {
    let bytes = |config| Executor::load(config, &mut |_| {}).unwrap().kv_spec().bytes_per_block();
    let model = || config(ModelDtype::Float32, 1);
    let draft = eagle();
    let layer = BLOCK * 2 * draft.kv_heads * draft.head_dim * 4;
    let drafting = bytes(eagle_drafting(model(), draft.clone(), 1));
    assert_eq!(drafting, bytes(model()) + (layer + draft.hidden * 4) as u64);
}

#[test]
fn mismatched_eagle3_config_is_rejected_by_field() {
    let rejection = |config: ExecutorConfig| match Executor::load(config, &mut |_| {}) {
        Err(ExecutorError::Speculation(error)) => error,
        other => panic!("{other:?}"),
    };
    let model = || config(ModelDtype::Float32, 1);
    let by = |eagle| rejection(eagle_drafting(model(), eagle, 2));
    let error = by(ModelConfig { vocab: 400, ..eagle() });
    assert_eq!(error, SpeculationError::Vocabulary { draft: 400, model: 384 });
    assert!(error.to_string().contains("vocab_size"), "{error}");
    let error = by(variant(|e| e.target_hidden = 96));
    let expected =
        SpeculationError::HiddenSize { field: "target_hidden_size", draft: 96, model: 64 };
    assert_eq!(error, expected);
    let deep = by(variant(|e| e.aux_layers = Some([1, 2, 4])));
    assert_eq!(deep, SpeculationError::AuxLayer { layer: 4, layers: 3 });
    assert_eq!(by(model().model), SpeculationError::NoEagleCheckpoint);
    let none = ExecutorConfig { draft: None, ..eagle_drafting(model(), eagle(), 2) };
    assert_eq!(rejection(none), SpeculationError::NoEagleCheckpoint);
    let mut too_many_drafts = eagle_drafting(model(), eagle(), 2);
    too_many_drafts.settings.speculative = Some(SpeculativeConfig {
        draft_tokens: 17,
        ..too_many_drafts.settings.speculative.unwrap()
    });
    assert_eq!(rejection(too_many_drafts), SpeculationError::TooManyDrafts { drafts: 17 });
    let mut other = crate::scheduler_harness::model_drafting(model(), eagle(), 2);
    assert_eq!(rejection(other.clone()), SpeculationError::UnexpectedEagleCheckpoint);
    (other.model, other.settings.speculative) = (eagle(), None);
    other.draft = None;
    let error = Executor::load(other, &mut |_| {}).unwrap_err().to_string();
    assert!(error.contains("LlamaForCausalLMEagle3 is a draft model"), "{error}");
    let odd = ModelConfig { heads: 3, kv_heads: 3, ..eagle() };
    let split = Executor::load(eagle_drafting(shared(model(), 2, false), odd, 2), &mut |_| {});
    let error = split.unwrap_err().to_string();
    assert!(error.contains("midlayer") && error.contains("num_attention_heads 3"), "{error}");
}
