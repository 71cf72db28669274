//! Draft tokens of an MTP module do not change outputs, and do not depend on the batch.

use crate::drafts::{expected_tokens, job};
use crate::scheduler_harness::{
    BLOCK, SchedulerHarness, ScriptedRequest, moe_model, mtp_drafting, shared, speculating,
    with_all_experts_placed, with_expert_placement,
};
use crate::{PROMPT, TOTAL, name, rules};
use executor::{Executor, ExecutorConfig, ExecutorError, ModelDtype, SpeculationError};
use protocol::SpeculativeConfig;

/// One rank; two ranks that split heads and experts; two EP ranks, with experts in order or with an expert
/// placement, of the MTP module too, or of the other layers only.
fn worlds(drafts: u8) -> [ExecutorConfig; 6] {
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
                // The first output token has no draft tokens, and no row drafts beyond its maximum.
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

/// A row of an asynchronous step starts at a position that only the device has: its draft tokens and output
/// are the same. One request is preempted with a row in flight.
#[test]
fn async_steps_draft_and_sample_the_same() {
    for world in worlds(4) {
        let (name, exact) = (name(&world), world.settings.dtype == ModelDtype::Float32);
        let mut player = SchedulerHarness::with(world);
        let jobs = |drafts: u8| -> Vec<_> {
            let one = |(i, rules)| job(i, rules, drafts.min(1 + i as u8)).in_slot(i as u32);
            (0..).zip(&rules()).map(one).collect()
        };
        let mut plain = jobs(0);
        player.finish_all(&mut plain, TOTAL);
        let mut waited = jobs(4);
        player.finish_all(&mut waited, TOTAL);
        // In 16-bit types, recomputation in other chunks may give other tokens.
        for preempted_at in [None, Some(PROMPT + 5).filter(|_| exact)] {
            let (mut ahead, mut left) = (jobs(4), preempted_at);
            player.finish_async(&mut ahead, TOTAL, |player, jobs, _| {
                if left.take_if(|at| jobs[2].tokens.len() >= *at).is_some() {
                    let blocks = jobs[2].preempt(30);
                    player.free(blocks);
                }
            });
            assert_eq!(left, None);
            for ((ahead, waited), plain) in ahead.iter_mut().zip(&waited).zip(&plain) {
                assert_eq!(
                    expected_tokens(ahead),
                    expected_tokens(plain),
                    "{name}, preempted at {preempted_at:?}"
                );
                let counts = |job: &ScriptedRequest| [job.drafted, job.accepted];
                let more = counts(ahead).iter().zip(counts(waited)).all(|(a, b)| *a >= b);
                // One more row may be in flight at the end.
                assert!(ahead.drafted > 0 && (more || preempted_at.is_some()), "{name}");
                player.free(std::mem::take(&mut ahead.table));
            }
        }
        waited.into_iter().chain(plain).for_each(|job| player.free(job.table));
    }
}

/// A row with an overdue bitmask is forwarded again, with its last token only.
#[test]
fn overdue_bitmasks_change_nothing_with_mtp() {
    let play = |world: ExecutorConfig, late| {
        let mut player = SchedulerHarness::with(world);
        player.overdue_bitmasks = late;
        let mut job = job(3, &rules()[1], 0);
        job.masked = true;
        player.finish(&mut job, 7, TOTAL);
        expected_tokens(&job)
    };
    for world in worlds(2).into_iter().filter(|world| world.settings.dtype == ModelDtype::Float32) {
        assert_eq!(play(world.clone(), true), play(world, false));
    }
}

#[test]
fn mtp_drafts_unchanged_by_chunks_preemption_prefix_hits() {
    for world in worlds(3).into_iter().filter(|world| world.settings.dtype == ModelDtype::Float32) {
        let name = name(&world);
        let mut player = SchedulerHarness::with(world);
        for sampling in rules() {
            let mut whole = job(3, &sampling, 3);
            player.finish(&mut whole, PROMPT, TOTAL);
            let expected = (expected_tokens(&whole), whole.drafted, whole.accepted);
            for chunk in [1, 7, 16, 33] {
                let mut job = job(3, &sampling, 3).in_slot(17);
                player.finish(&mut job, chunk, TOTAL);
                let found = (expected_tokens(&job), job.drafted, job.accepted);
                assert_eq!(found, expected, "{name}, chunks of {chunk}, {sampling:?}");
                player.free(job.table);
            }
            for at in [PROMPT + 1, PROMPT + 7] {
                let mut job = job(3, &sampling, 3);
                player.finish(&mut job, 16, at);
                let blocks = job.preempt(30);
                player.free(blocks);
                player.finish(&mut job, 33, TOTAL);
                assert_eq!(
                    expected_tokens(&job),
                    expected.0,
                    "{name}, preempted at {at}, {sampling:?}"
                );
                player.free(job.table);
            }
            let mut hit = job(3, &sampling, 3).in_slot(8);
            hit.table = whole.table[..2].to_vec();
            hit.computed = 2 * BLOCK;
            player.finish(&mut hit, PROMPT, TOTAL);
            let found = (expected_tokens(&hit), hit.drafted, hit.accepted);
            assert_eq!(found, expected, "{name}, behind a hit, {sampling:?}");
            player.free(hit.table.split_off(2));
            player.free(whole.table);
        }
    }
}

#[test]
fn batch_mates_with_and_without_drafts_change_nothing() {
    for world in worlds(4).into_iter().filter(|world| world.settings.dtype == ModelDtype::Float32) {
        let name = name(&world);
        let rules = rules();
        let mut player = SchedulerHarness::with(world);
        let mut jobs = [0, 1].map(|drafts| {
            let one = |i: u64| {
                job(100 + i, &rules[i as usize % 4], drafts * (i % 5) as u8).in_slot(i as u32)
            };
            (0..12).map(one).collect::<Vec<_>>()
        });
        for jobs in &mut jobs {
            player.finish_all(jobs, TOTAL);
            for job in jobs {
                player.free(std::mem::take(&mut job.table));
            }
        }
        let [plain, mixed] = jobs;
        for (i, (plain, mixed)) in plain.iter().zip(&mixed).enumerate() {
            assert_eq!(expected_tokens(mixed), expected_tokens(plain), "{name}, request {i}");
        }
        assert!(mixed.iter().filter(|job| job.drafts > 0).all(|job| job.drafted > 0));
    }
}

/// The MTP module stores one MLA row per token, and one block-boundary state per block.
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
    let refused = |config: ExecutorConfig| match Executor::load(config, &mut |_| {}) {
        Err(ExecutorError::Speculation(error)) => error,
        other => panic!("{other:?}"),
    };
    let mut many = config();
    many.settings.speculative =
        Some(SpeculativeConfig { draft_tokens: 5, ..many.settings.speculative.unwrap() });
    assert_eq!(refused(many), SpeculationError::TooManyDrafts { drafts: 5 });
    for layers in [0, 2] {
        let mut other = config();
        other.model.mtp_layers = layers;
        let architecture = "DeepseekV3ForCausalLM";
        assert_eq!(refused(other), SpeculationError::MtpModules { architecture, layers });
    }
    let mut qwen = speculating(moe_model(ModelDtype::Float32), 2);
    qwen.settings.speculative = config().settings.speculative;
    assert!(refused(qwen).to_string().contains("num_nextn_predict_layers"));
}
