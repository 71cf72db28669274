//! Draft tokens of an EAGLE-3 layer do not change outputs, and do not depend on the batch.

use crate::drafts::{expected_tokens, job};
use crate::scheduler_harness::{
    BLOCK, SchedulerHarness, ScriptedRequest, config, eagle, eagle_drafting, mla_model, moe_model,
    shared,
};
use crate::{PROMPT, TOTAL, name, rules};
use executor::{Executor, ExecutorConfig, ExecutorError, ModelDtype, SpeculationError};
use models::ModelConfig;
use models::config::Eagle3Config;
use protocol::SpeculativeConfig;

/// A variant of EAGLE-3 checkpoints: normed auxiliary states, a residual stream of the normed state, or the
/// normed state as carry-over.
fn variant(change: fn(&mut Eagle3Config)) -> ModelConfig {
    let mut eagle = eagle();
    eagle.eagle.as_mut().map(change).unwrap();
    eagle
}

/// A layer of half the width, with its own embedding and the full vocabulary.
fn smaller_hidden_model() -> ModelConfig {
    let shape = Eagle3Config { vocab: 384, ..eagle().eagle.unwrap() };
    ModelConfig { hidden: 32, heads: 2, kv_heads: 1, eagle: Some(shape), ..eagle() }
}

/// One rank and several, with models of several kinds.
fn worlds(drafts: u8) -> Vec<ExecutorConfig> {
    use ModelDtype::{Bfloat16, Float32};
    let by = |config, eagle| eagle_drafting(config, eagle, drafts);
    let normed = variant(|e| (e.aux_norms, e.carries_normed_state) = (true, true));
    vec![
        by(config(Float32, 2), eagle()),
        by(config(Bfloat16, 2), variant(|e| e.normed_residual = true)),
        by(shared(config(Float32, 1), 2, false), variant(|e| e.aux_layers = Some([0, 1, 3]))),
        by(shared(moe_model(Float32), 2, true), normed),
        by(moe_model(Float32), smaller_hidden_model()),
        by(mla_model(Float32), eagle()),
    ]
}

fn in_f32(drafts: u8) -> impl Iterator<Item = ExecutorConfig> {
    worlds(drafts).into_iter().filter(|world| world.settings.dtype == ModelDtype::Float32)
}

#[test]
fn any_number_of_drafts_changes_nothing() {
    let (mut drafted, mut accepted) = (0, 0);
    for world in worlds(4) {
        let name = name(&world);
        let mut player = SchedulerHarness::with(world);
        for sampling in rules() {
            let mut plain = job(3, &sampling, 0);
            player.finish(&mut plain, PROMPT, TOTAL);
            for drafts in 1..=4 {
                let mut job = job(3, &sampling, drafts);
                player.finish(&mut job, PROMPT, TOTAL);
                assert_eq!(
                    expected_tokens(&job),
                    expected_tokens(&plain),
                    "{name}, {drafts} drafts, {sampling:?}"
                );
                assert!(job.drafted >= TOTAL - PROMPT - 2 - job.accepted, "{}", job.drafted);
                drafted += job.drafted;
                accepted += job.accepted;
                player.free(job.table);
            }
            player.free(plain.table);
        }
    }
    println!("{accepted} of {drafted} drafts accepted");
    assert!(accepted < drafted, "{accepted} of {drafted}");
}

/// Outputs equal those of a model without speculation.
#[test]
fn collecting_aux_hidden_states_changes_nothing() {
    for world in worlds(2) {
        let name = name(&world);
        let play = |world: ExecutorConfig, drafts| {
            let mut player = SchedulerHarness::with(world);
            let mut job = job(3, &rules()[1], drafts);
            player.finish(&mut job, 16, TOTAL);
            expected_tokens(&job)
        };
        let mut alone = world.clone();
        (alone.settings.speculative, alone.settings.draft_model_dir, alone.draft) =
            (None, None, None);
        assert_eq!(play(world, 2), play(alone, 0), "{name}");
    }
}

/// A row of an asynchronous step starts at a position that only the device has. One request is preempted with
/// a row in flight.
#[test]
fn async_steps_draft_and_sample_the_same() {
    for world in in_f32(4) {
        let name = name(&world);
        let mut player = SchedulerHarness::with(world);
        let jobs = |drafts: u8| -> Vec<_> {
            let one = |(i, rules)| job(i, rules, drafts.min(1 + i as u8)).in_slot(i as u32);
            (0..).zip(&rules()).map(one).collect()
        };
        let mut plain = jobs(0);
        player.finish_all(&mut plain, TOTAL);
        for preempted_at in [None, Some(PROMPT + 5)] {
            let (mut ahead, mut left) = (jobs(4), preempted_at);
            player.finish_async(&mut ahead, TOTAL, |player, jobs, _| {
                if left.take_if(|at| jobs[2].tokens.len() >= *at).is_some() {
                    let blocks = jobs[2].preempt(30);
                    player.free(blocks);
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
                player.free(std::mem::take(&mut ahead.table));
            }
        }
        for job in plain {
            player.free(job.table);
        }
    }
}

#[test]
fn eagle3_drafts_unchanged_by_chunks_preemption_prefix_hits() {
    for world in in_f32(3) {
        let name = name(&world);
        let mut player = SchedulerHarness::with(world);
        for sampling in rules() {
            let mut whole = job(3, &sampling, 3);
            player.finish(&mut whole, PROMPT, TOTAL);
            let of = |job: &ScriptedRequest| (expected_tokens(job), job.drafted, job.accepted);
            for chunk in [1, 7, 33] {
                let mut job = job(3, &sampling, 3).in_slot(17);
                player.finish(&mut job, chunk, TOTAL);
                assert_eq!(of(&job), of(&whole), "{name}, chunks of {chunk}, {sampling:?}");
                player.free(job.table);
            }
            let mut job = job(3, &sampling, 3);
            player.finish(&mut job, 16, PROMPT + 7);
            let blocks = job.preempt(30);
            player.free(blocks);
            player.finish(&mut job, 33, TOTAL);
            assert_eq!(
                expected_tokens(&job),
                expected_tokens(&whole),
                "{name}, preempted, {sampling:?}"
            );
            player.free(job.table);
            let mut hit = crate::drafts::job(3, &sampling, 3).in_slot(8);
            hit.table = whole.table[..2].to_vec();
            hit.computed = 2 * BLOCK;
            player.finish(&mut hit, PROMPT, TOTAL);
            assert_eq!(of(&hit), of(&whole), "{name}, behind a hit, {sampling:?}");
            player.free(hit.table.split_off(2));
            player.free(whole.table);
        }
    }
}

/// The layer stores keys and values per token, and one block-boundary state per block.
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
    let refused = |config: ExecutorConfig| match Executor::load(config, &mut |_| {}) {
        Err(ExecutorError::Speculation(error)) => error,
        other => panic!("{other:?}"),
    };
    let model = || config(ModelDtype::Float32, 1);
    let by = |eagle| refused(eagle_drafting(model(), eagle, 2));
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
    assert_eq!(refused(none), SpeculationError::NoEagleCheckpoint);
    let mut many = eagle_drafting(model(), eagle(), 2);
    many.settings.speculative =
        Some(SpeculativeConfig { draft_tokens: 5, ..many.settings.speculative.unwrap() });
    assert_eq!(refused(many), SpeculationError::TooManyDrafts { drafts: 5 });
    let mut other = crate::scheduler_harness::model_drafting(model(), eagle(), 2);
    assert_eq!(refused(other.clone()), SpeculationError::UnexpectedEagleCheckpoint);
    (other.model, other.settings.speculative) = (eagle(), None);
    other.draft = None;
    let error = Executor::load(other, &mut |_| {}).unwrap_err().to_string();
    assert!(error.contains("LlamaForCausalLMEagle3 drafts for another model"), "{error}");
    let odd = ModelConfig { heads: 3, kv_heads: 3, ..eagle() };
    let split = Executor::load(eagle_drafting(shared(model(), 2, false), odd, 2), &mut |_| {});
    let error = split.unwrap_err().to_string();
    assert!(error.contains("midlayer") && error.contains("num_attention_heads 3"), "{error}");
}
