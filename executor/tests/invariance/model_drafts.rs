//! Draft tokens of a draft model: outputs do not change, and an identical draft model is always accepted.

use crate::drafts::{expected_tokens, job};
use crate::scheduler_harness::{
    BLOCK, SchedulerHarness, config, mla_model, model_drafting, moe_model, shared,
};
use crate::{PROMPT, TOTAL, name, rules};
use executor::{Executor, ExecutorConfig, ExecutorError, ModelDtype, SpeculationError};
use models::ModelConfig;

/// A draft model of two layers and half the width, with the same vocabulary.
fn small() -> ModelConfig {
    let mut small = config(ModelDtype::Float32, 1).model;
    (small.layers, small.hidden, small.intermediate) = (2, 32, 64);
    small
}

/// One rank and several, with models of several kinds.
fn worlds(drafts: u8) -> Vec<ExecutorConfig> {
    use ModelDtype::{Bfloat16, Float32};
    let by_small = |config| model_drafting(config, small(), drafts);
    vec![
        by_small(config(Float32, 2)),
        by_small(config(Bfloat16, 2)),
        by_small(shared(moe_model(Float32), 2, true)),
        model_drafting(config(Float32, 1), moe_model(Float32).model, drafts),
        by_small(mla_model(Float32)),
    ]
}

#[test]
fn drafts_of_another_model_change_nothing() {
    for world in worlds(4) {
        let name = name(&world);
        let mut player = SchedulerHarness::with(world);
        for sampling in rules() {
            let mut plain = job(3, &sampling, 0);
            player.finish(&mut plain, PROMPT, TOTAL);
            for drafts in [1, 4] {
                let mut job = job(3, &sampling, drafts);
                player.finish(&mut job, 16, TOTAL);
                assert_eq!(
                    expected_tokens(&job),
                    expected_tokens(&plain),
                    "{name}, {drafts} drafts, {sampling:?}"
                );
                assert!(job.drafted >= TOTAL - PROMPT - 2 - job.accepted, "{}", job.drafted);
                player.free(job.table);
            }
            player.free(plain.table);
        }
    }
}

/// In chunks, after a preemption, after a prefix hit and next to rows without draft tokens: the draft KV
/// matches the target's.
#[test]
fn drafts_of_the_same_model_are_always_accepted() {
    let model = config(ModelDtype::Float32, 1);
    let alike = model_drafting(model.clone(), model.model.clone(), 3);
    for world in [alike.clone(), shared(alike, 2, false)] {
        let mut player = SchedulerHarness::with(world);
        let greedy = &rules()[0];
        let mut first = job(3, greedy, 3);
        player.finish(&mut first, 7, TOTAL);
        assert!(first.drafted > 12 && first.accepted == first.drafted, "{}", first.drafted);
        let mut again = job(3, greedy, 3);
        player.finish(&mut again, 16, PROMPT + 5);
        let blocks = again.preempt(30);
        let mut other = job(9, greedy, 0); // Overwrites the released blocks.
        player.free(blocks);
        player.finish(&mut other, 60, TOTAL);
        player.finish(&mut again, 33, TOTAL);
        assert!(
            again.accepted == again.drafted && expected_tokens(&again) == expected_tokens(&first),
            "{}",
            again.accepted
        );
        let mut hit = job(3, greedy, 2).in_slot(8);
        hit.table = first.table[..2].to_vec();
        hit.computed = 2 * BLOCK;
        let mut plain = job(11, greedy, 0).in_slot(9);
        while hit.tokens.len() < TOTAL {
            let (own, others) = (hit.want(), plain.want().min(5));
            let mut rows = [(&mut plain, others), (&mut hit, own)];
            rows.sort_by_key(|(_, len)| *len > 1);
            player.step(&mut rows);
        }
        assert!(
            hit.accepted == hit.drafted && expected_tokens(&hit) == expected_tokens(&first),
            "{}",
            hit.accepted
        );
    }
}

/// With all draft tokens accepted, asynchronous rows start at their upper bound (`start` plus `draft_slack`).
#[test]
fn all_drafts_are_accepted_in_async_steps() {
    let model = config(ModelDtype::Float32, 1);
    let alike = model_drafting(model.clone(), model.model.clone(), 3);
    for world in [alike.clone(), shared(alike, 2, false)] {
        let mut player = SchedulerHarness::with(world);
        let greedy = &rules()[0];
        let jobs = |drafts| [3, 5, 9].map(|id| job(id, greedy, drafts).in_slot(id as u32));
        let (mut plain, mut ahead) = (jobs(0), jobs(3));
        player.finish_all(&mut plain, TOTAL);
        player.finish_async(&mut ahead, TOTAL, |_, _, _| {});
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
    let refused = |config: ExecutorConfig| match Executor::load(config, &mut |_| {}) {
        Err(ExecutorError::Speculation(error)) => error,
        other => panic!("{other:?}"),
    };
    let model = || config(ModelDtype::Float32, 1);
    let other = ModelConfig { vocab: 400, ..small() };
    let expected = SpeculationError::Vocabulary { draft: 400, model: 384 };
    assert_eq!(refused(model_drafting(model(), other, 1)), expected);
    let expected = SpeculationError::TooManyModelDrafts { drafts: 17 };
    assert_eq!(refused(model_drafting(model(), small(), 17)), expected);
    let none = ExecutorConfig { draft: None, ..model_drafting(model(), small(), 1) };
    assert_eq!(refused(none), SpeculationError::NoDraftModel);
}
