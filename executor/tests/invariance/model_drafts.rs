//! Draft tokens of a draft model do not change outputs. If draft model and target model are identical, all
//! draft tokens are accepted.

use crate::drafts::{expected_tokens, request};
use crate::scheduler_harness::{
    BLOCK, SchedulerHarness, config, mla_model, model_drafting, moe_model, shared,
    two_head_sizes_model, window_model,
};
use crate::{PROMPT, TOTAL, name, rules};
use executor::{Executor, ExecutorConfig, ExecutorError, ModelDtype, SpeculationError};
use models::ModelConfig;

/// Returns a draft model with two layers and half the hidden size of the target model, and the same
/// vocabulary.
fn small() -> ModelConfig {
    let mut small = config(ModelDtype::Float32, 1).model;
    (small.layers, small.hidden, small.intermediate) = (2, 32, 64);
    small
}

/// Returns configurations with one rank and with several ranks, for models of several kinds.
fn configs(drafts: u8) -> Vec<ExecutorConfig> {
    use ModelDtype::{Bfloat16, Float32};
    let by_small = |config| model_drafting(config, small(), drafts);
    vec![
        by_small(config(Float32, 2)),
        by_small(config(Bfloat16, 2)),
        by_small(shared(moe_model(Float32), 2, true)),
        model_drafting(config(Float32, 1), moe_model(Float32).model, drafts),
        by_small(mla_model(Float32)),
        by_small(window_model(Bfloat16)),
        by_small(two_head_sizes_model(Float32)),
        by_small(shared(two_head_sizes_model(Float32), 2, false)),
        // The draft model has an odd number of layers, and two layers share a place of a block.
        model_drafting(two_head_sizes_model(Bfloat16), config(Bfloat16, 1).model, drafts),
        model_drafting(config(Float32, 1), window_model(Float32).model, drafts),
    ]
}

#[test]
fn draft_model_does_not_change_outputs() {
    for config in configs(4) {
        let name = name(&config);
        let mut harness = SchedulerHarness::with(config);
        for sampling in rules() {
            let mut plain = request(3, &sampling, 0);
            harness.finish(&mut plain, PROMPT, TOTAL);
            for drafts in [1, 4] {
                let mut request = request(3, &sampling, drafts);
                harness.finish(&mut request, 16, TOTAL);
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
                harness.free(request.table);
            }
            harness.free(plain.table);
        }
    }
}

/// Returns configurations whose draft model is the target model: with one rank, with two ranks, and with
/// sliding windows, for which the target model has several KV groups.
fn same_models() -> [ExecutorConfig; 3] {
    let same_model = |config: ExecutorConfig| {
        let draft = config.model.clone();
        model_drafting(config, draft, 3)
    };
    let full = same_model(config(ModelDtype::Float32, 1));
    [full.clone(), shared(full, 2, false), same_model(window_model(ModelDtype::Float32))]
}

/// The draft KV stays consistent with the KV of the target model with chunked prefill, after a preemption,
/// after a prefix hit, and in batches with rows without draft tokens.
#[test]
fn drafts_of_the_same_model_are_always_accepted() {
    for config in same_models() {
        let mut harness = SchedulerHarness::with(config);
        let greedy = &rules()[0];
        let mut first = request(3, greedy, 3);
        first.table.keeps_blocks = true;
        harness.finish(&mut first, 7, TOTAL);
        assert!(first.drafted > 12 && first.accepted == first.drafted, "{}", first.drafted);
        let mut resumed = request(3, greedy, 3);
        harness.finish(&mut resumed, 16, PROMPT + 5);
        let blocks = resumed.preempt(30);
        let mut other = request(9, greedy, 0); // Overwrites the released blocks.
        harness.free(blocks);
        harness.finish(&mut other, 60, TOTAL);
        harness.finish(&mut resumed, 33, TOTAL);
        assert!(
            resumed.accepted == resumed.drafted
                && expected_tokens(&resumed) == expected_tokens(&first),
            "{}",
            resumed.accepted
        );
        let mut hit = request(3, greedy, 2).in_slot(8);
        hit.table = first.table.prefix(2);
        hit.computed = 2 * BLOCK;
        let mut plain = request(11, greedy, 0).in_slot(9);
        while hit.tokens.len() < TOTAL {
            let (own, others) = (hit.remaining(), plain.remaining().min(5));
            let mut rows = [plain.chunk(others), hit.chunk(own)];
            rows.sort_by_key(|chunk| chunk.len > 1);
            harness.step(&mut rows);
        }
        assert!(
            hit.accepted == hit.drafted && expected_tokens(&hit) == expected_tokens(&first),
            "{}",
            hit.accepted
        );
    }
}

/// If all draft tokens are accepted, each row of an asynchronous step starts at its latest possible position,
/// `start` plus the number of draft tokens in flight (`draft_slack`).
#[test]
fn all_drafts_are_accepted_in_async_steps() {
    for config in same_models() {
        let mut harness = SchedulerHarness::with(config);
        let greedy = &rules()[0];
        let requests = |drafts| [3, 5, 9].map(|id| request(id, greedy, drafts).in_slot(id as u32));
        let (mut plain, mut ahead) = (requests(0), requests(3));
        harness.finish_all(&mut plain, TOTAL);
        harness.finish_async(&mut ahead, TOTAL, |_, _, _| {});
        for (ahead, plain) in ahead.iter().zip(&plain) {
            assert!(ahead.drafted > 12 && ahead.accepted == ahead.drafted, "{}", ahead.drafted);
            assert_eq!(expected_tokens(ahead), expected_tokens(plain));
        }
    }
}

#[test]
fn block_size_includes_both_models() {
    let bytes = |config| Executor::load(config, &mut |_| {}).unwrap().kv_spec().bytes_per_block();
    let (model, draft) = (config(ModelDtype::Float32, 1), small());
    let each =
        [bytes(model.clone()), bytes(ExecutorConfig { model: draft.clone(), ..model.clone() })];
    assert_eq!(bytes(model_drafting(model, draft, 1)), each[0] + each[1]);
}

#[test]
fn incompatible_draft_model_is_rejected() {
    let rejection = |config: ExecutorConfig| match Executor::load(config, &mut |_| {}) {
        Err(ExecutorError::Speculation(error)) => error,
        other => panic!("{other:?}"),
    };
    let model = || config(ModelDtype::Float32, 1);
    let other = ModelConfig { vocab: 400, ..small() };
    let expected = SpeculationError::Vocabulary { draft: 400, model: 384 };
    assert_eq!(rejection(model_drafting(model(), other, 1)), expected);
    let expected = SpeculationError::TooManyModelDrafts { drafts: 17 };
    assert_eq!(rejection(model_drafting(model(), small(), 17)), expected);
    let none = ExecutorConfig { draft: None, ..model_drafting(model(), small(), 1) };
    assert_eq!(rejection(none), SpeculationError::NoDraftModel);
}
