//! Draft tokens on GPUs: the tokens of the CPU, which are those of a run without drafts, eager and replayed.

use crate::player::{
    LockstepGroup, SchedulerHarness, ScriptedRequest, eagle, eagle_drafting, model_drafting,
    shared, speculating, with_all_experts_placed,
};
use crate::ranks::join_device_group;
use crate::{GeneratedTokens, assert_close, mla_model, on_emulator, rules, with_few_slots};
use executor::{ExecutorConfig, ModelDtype};
use models::config::ModelConfig;
use protocol::{
    DraftAcceptance, GraphCapture, ParallelConfig, SpeculativeConfig, SpeculativeMethod, Token,
};
use std::sync::Arc;
use std::thread;

/// Number of output tokens that are compared.
const EXPECTED_TOKENS: usize = 8;

/// Number of lockstep steps of replicas: a replica that finishes earlier is idle for the rest.
const STEPS: usize = 22;

/// Requests with repetitive prompts, so that draft tokens are proposed; the second one's penalties read its
/// output.
fn jobs(drafts: [u8; 3]) -> Vec<ScriptedRequest> {
    let job = |(id, drafts): (u64, u8)| {
        let mut job =
            ScriptedRequest::new(id, 9 + 5 * id as usize, rules()[id as usize % 2].clone());
        let token = |i: u64| (i * i % (3 + id) + 20 + id) as Token;
        job.tokens = (0..job.prompt_len as u64).map(token).collect();
        job.drafts = drafts;
        job
    };
    (0..).zip(drafts).map(job).collect()
}

/// Runs requests in chunks in the same batches; one is preempted, another starts with a prefix hit on the
/// third one's first block.
fn play(player: &mut SchedulerHarness, drafts: [u8; 3]) -> (Vec<GeneratedTokens>, [usize; 2]) {
    let mut jobs = jobs(drafts);
    let mut turn = 0;
    while jobs.iter().any(|job| job.tokens.len() < job.prompt_len + EXPECTED_TOKENS) {
        let open = |job: &&mut ScriptedRequest| job.tokens.len() < job.prompt_len + EXPECTED_TOKENS;
        let mut rows: Vec<(&mut ScriptedRequest, usize)> = Vec::new();
        for job in jobs.iter_mut().filter(open) {
            let len = job.want().min(10);
            rows.push((job, len));
        }
        rows.sort_by_key(|(_, len)| *len > 1); // Decode rows come first.
        player.step(&mut rows);
        turn += 1;
        if turn == 5 {
            let blocks = jobs[1].preempt(7);
            player.free(blocks);
        }
    }
    let mut hit = ScriptedRequest::new(2, jobs[2].prompt_len, rules()[0].clone()).in_slot(6);
    hit.tokens.clone_from_slice(&jobs[2].tokens[..hit.prompt_len]);
    hit.table = jobs[2].table[..1].to_vec();
    hit.computed = crate::player::BLOCK;
    hit.drafts = drafts[2];
    let total = hit.prompt_len + EXPECTED_TOKENS;
    player.finish(&mut hit, 5, total);
    jobs.push(hit);
    let count = |of: fn(&ScriptedRequest) -> usize| jobs.iter().map(of).sum();
    (
        jobs.iter().map(expected_tokens).collect(),
        [count(|job| job.drafted), count(|job| job.accepted)],
    )
}

/// Generated tokens up to the compared length: the last row may emit more.
fn expected_tokens(job: &ScriptedRequest) -> GeneratedTokens {
    let (mut tokens, mut logprobs) = job.output();
    tokens.truncate(EXPECTED_TOKENS);
    logprobs.truncate(EXPECTED_TOKENS);
    (tokens, logprobs)
}

/// Outputs on the CPU without draft tokens.
fn tokens_without_drafts(config: &ExecutorConfig) -> Vec<GeneratedTokens> {
    let mut config = with_few_slots(config.clone());
    config.settings.speculative = None;
    config.draft = None;
    play(&mut SchedulerHarness::with(config), [0; 3]).0
}

fn check(what: &str, wave: u32, drafting: &ExecutorConfig, drafts: [u8; 3]) {
    let expected = tokens_without_drafts(drafting);
    let (on_cpu, counted) =
        play(&mut SchedulerHarness::with(with_few_slots(drafting.clone())), drafts);
    assert!(on_cpu == expected, "{what}: drafts change nothing on the CPU");
    assert!(counted[0] > 4, "{what}: {counted:?}");
    let player = |eager| {
        let mut config = on_emulator(wave, drafting.clone(), eager);
        config.settings.graph_capture =
            if eager { GraphCapture::Disabled } else { GraphCapture::Sizes(vec![4]) };
        SchedulerHarness::with(config)
    };
    let (launched, found) = play(&mut player(true), drafts);
    assert_close(&launched, &expected, what);
    assert_eq!(found, counted, "{what}: guesses of the CPU");
    let mut replaying = player(false);
    assert_eq!(replaying.graphs, [4], "{what}");
    let (replayed, found) = play(&mut replaying, drafts);
    assert!(replayed == launched, "{what}: a recording changes no bit");
    assert_eq!(found, counted, "{what}");
}

#[test]
fn ngram_drafts_match_eager_and_replayed() {
    if !crate::is_selected_by_cursor(0) {
        return;
    }
    let dense = crate::player::config(ModelDtype::Float32, 2);
    check("dense", 64, &speculating(dense, 3), [3, 2, 3]);
}

/// The MLA model with an MTP module that proposes up to `drafts` draft tokens.
fn mtp_drafting(dtype: ModelDtype, drafts: u8) -> ExecutorConfig {
    let mut config = mla_model(dtype);
    config.model.mtp_layers = 1;
    config.settings.speculative = Some(SpeculativeConfig {
        draft_tokens: drafts,
        method: SpeculativeMethod::Mtp,
        acceptance: DraftAcceptance::Exact,
    });
    config
}

#[test]
fn mtp_module_drafts_eager_and_replayed() {
    if !crate::is_selected_by_cursor(0) {
        return;
    }
    check("two drafts", 64, &mtp_drafting(ModelDtype::Float32, 2), [2, 1, 2]);
    check("three drafts", 32, &mtp_drafting(ModelDtype::Float32, 3), [3, 3, 1]);
}

/// Steps submitted before earlier ones are finished continue from the device's sequence slots: same tokens
/// and drafts as the CPU.
#[test]
fn async_steps_match_the_cpu() {
    if !crate::is_selected_by_cursor(0) {
        return;
    }
    let dense = crate::player::config(ModelDtype::Float32, 2);
    let alike = dense.model.clone();
    let worlds = [
        (64, GraphCapture::Sizes(vec![4]), mtp_drafting(ModelDtype::Float32, 2)),
        (32, GraphCapture::Disabled, model_drafting(dense.clone(), alike, 2)),
        (64, GraphCapture::Sizes(vec![4]), eagle_drafting(dense, eagle(), 2)),
    ];
    for (wave, capture, world) in worlds {
        let total = 19 + EXPECTED_TOKENS; // For the longest prompt.
        let play = |config: ExecutorConfig, drafts: [u8; 3]| {
            let (mut player, mut jobs, mut left) =
                (SchedulerHarness::with(config), jobs(drafts), true);
            player.finish_async(&mut jobs, total, |player, jobs, _| {
                if jobs[1].tokens.len() > jobs[1].prompt_len + 3 && std::mem::take(&mut left) {
                    let blocks = jobs[1].preempt(7);
                    player.free(blocks);
                }
            });
            assert!(!left && jobs.iter().all(|job| job.tokens.len() >= total));
            let count = |of: fn(&ScriptedRequest) -> usize| jobs.iter().map(of).sum::<usize>();
            let counted = [count(|job| job.drafted), count(|job| job.accepted)];
            (jobs.iter().map(expected_tokens).collect::<Vec<_>>(), counted)
        };
        let mut plain = with_few_slots(world.clone());
        plain.settings.speculative = None;
        let drafts = [2, 1, 2];
        let expected = play(plain, [0; 3]).0;
        let (on_cpu, counted) = play(with_few_slots(world.clone()), drafts);
        assert_close(&on_cpu, &expected, "on the CPU");
        let mut config = on_emulator(wave, world, false);
        config.settings.graph_capture = capture;
        let (found, guessed) = play(config, drafts);
        assert_close(&found, &expected, "ahead");
        assert_eq!(guessed, counted, "wave {wave}: guesses of the CPU");
    }
}

/// An identical draft model is always accepted; it has its own KV cache.
#[test]
fn draft_model_drafts_eager_and_replayed() {
    if !crate::is_selected_by_cursor(1) {
        return;
    }
    let dense = crate::player::config(ModelDtype::Float32, 2);
    let alike = dense.model.clone();
    check("another model", 64, &model_drafting(dense, alike, 2), [2, 1, 2]);
}

/// EAGLE-3 with the generic attention kernels, and in bf16 with those of matrix units.
#[test]
fn eagle3_drafts_eager_and_replayed() {
    if !crate::is_selected_by_cursor(1) {
        return;
    }
    let dense = crate::player::config(ModelDtype::Float32, 2);
    check("eagle3", 64, &eagle_drafting(dense, eagle(), 2), [2, 1, 2]);
    let player = |capture| {
        let wide = ModelConfig { head_dim: 64, ..eagle() };
        let half = crate::player::config(ModelDtype::Bfloat16, 2);
        let mut config = on_emulator(32, eagle_drafting(half, wide, 1), false);
        config.settings.graph_capture = capture;
        SchedulerHarness::with(config)
    };
    let (launched, counted) = play(&mut player(GraphCapture::Disabled), [1; 3]);
    let (replayed, found) = play(&mut player(GraphCapture::Sizes(vec![4])), [1; 3]);
    assert!(replayed == launched && found == counted, "{found:?}, {counted:?}");
    assert!(counted[0] > 10, "{counted:?}");
}

/// 16-bit MLA uses other kernels, in which the MTP module masks the first position too.
#[test]
fn mtp_in_bf16_replay_equals_eager() {
    let player = |capture| {
        let mut config = on_emulator(64, mtp_drafting(ModelDtype::Bfloat16, 1), false);
        config.settings.graph_capture = capture;
        SchedulerHarness::with(config)
    };
    let (launched, counted) = play(&mut player(GraphCapture::Disabled), [1; 3]);
    let (replayed, found) = play(&mut player(GraphCapture::Sizes(vec![4])), [1; 3]);
    assert!(replayed == launched && found == counted, "{found:?}, {counted:?}");
    assert!(counted[0] > 10, "{counted:?}");
}

/// Runs the requests of one replica; the second replica runs them one after the other and is idle at first.
fn play_replica(
    player: &mut SchedulerHarness,
    replica: u16,
    drafts: u8,
) -> (Vec<GeneratedTokens>, [usize; 2]) {
    let job = |i: u16| {
        let id = u64::from(1 + replica * 7 + i);
        let mut job =
            ScriptedRequest::new(id, 9 + usize::from(5 * i + 3 * replica), rules()[0].clone());
        job.drafts = drafts;
        job.in_slot(u32::from(i))
    };
    let mut jobs: Vec<ScriptedRequest> = (0..2).map(job).collect();
    for step in 0..STEPS {
        let mut rows: Vec<(&mut ScriptedRequest, usize)> = Vec::new();
        let idle = replica == 1 && step < 3;
        for job in jobs.iter_mut().filter(|job| !idle && job.tokens.len() < job.prompt_len + 5) {
            if replica == 0 || rows.is_empty() {
                let len = job.want().min(1 + (step * 11) % 30);
                rows.push((job, len));
            }
        }
        rows.sort_by_key(|(_, len)| *len > 1); // Decode rows come first.
        player.step(&mut rows);
    }
    let said = |job: &ScriptedRequest| {
        let (mut tokens, mut logprobs) = job.output();
        assert!(tokens.len() >= 5, "too few steps");
        tokens.truncate(5);
        logprobs.truncate(5);
        (tokens, logprobs)
    };
    let count = |of: fn(&ScriptedRequest) -> usize| jobs.iter().map(of).sum();
    (jobs.iter().map(said).collect(), [count(|job| job.drafted), count(|job| job.accepted)])
}

/// Outputs and draft counts of two replicas that share experts, on GPUs that capture graphs as `capture`
/// configures.
fn in_replicas(
    (wave, capture): (u32, GraphCapture),
    alone: &ExecutorConfig,
) -> Vec<(Vec<GeneratedTokens>, [usize; 2])> {
    let mut world = alone.clone();
    world.settings.parallel = ParallelConfig { tp_size: 1, dp_size: 2, expert_parallel: true };
    let mut config = join_device_group("draft-replicas", wave, world, false);
    config.settings.graph_capture = capture;
    let pact = Arc::new(LockstepGroup::new(&config));
    let start = |replica| {
        let (config, pact) = (config.clone(), Arc::clone(&pact));
        thread::spawn(move || {
            let mut player = SchedulerHarness::of_replica(config, replica, Arc::clone(&pact));
            let found = play_replica(&mut player, replica, 2);
            pact.agree(0); // A rank that leaves fails the group: wait until all have finished their last step.
            found
        })
    };
    [start(0), start(1)].into_iter().map(|replica| replica.join().unwrap()).collect()
}

/// Replicas that share experts run the same number of draft passes, including idle replicas.
#[test]
fn replicas_that_share_experts_draft_together() {
    if !crate::is_selected_by_cursor(1) {
        return;
    }
    let alone = mtp_drafting(ModelDtype::Float32, 2);
    for world in [(64, GraphCapture::Disabled), (32, GraphCapture::Sizes(vec![2]))] {
        let found = in_replicas(world.clone(), &alone);
        for (replica, (found, counted)) in (0..).zip(found) {
            let plain = play_replica(
                &mut SchedulerHarness::with(with_few_slots(alone.clone())),
                replica,
                0,
            )
            .0;
            assert_close(&found, &plain, &format!("replica {replica}, {world:?}"));
            let guessed = play_replica(
                &mut SchedulerHarness::with(with_few_slots(alone.clone())),
                replica,
                2,
            )
            .1;
            assert_eq!(counted, guessed, "replica {replica}, {world:?}");
        }
    }
    // In bf16, MLA uses other kernels, which run without rows where a replica is idle.
    let alone = mtp_drafting(ModelDtype::Bfloat16, 2);
    let launched = in_replicas((64, GraphCapture::Disabled), &alone);
    assert_eq!(launched, in_replicas((64, GraphCapture::Sizes(vec![2])), &alone), "in bf16");
}

/// Each rank has its vocabulary shard of the draft logits, and the experts placed on it, the MTP module's
/// too; all ranks choose the same draft tokens.
#[test]
fn ranks_propose_and_verify_the_same_drafts() {
    if !crate::is_selected_by_cursor(1) {
        return;
    }
    let by_states = eagle_drafting(crate::player::config(ModelDtype::Float32, 2), eagle(), 2);
    let layer = mtp_drafting(ModelDtype::Float32, 2);
    let mut placed = with_all_experts_placed(shared(layer.clone(), 2, true));
    placed.settings.expert_placement.as_mut().unwrap().layers.remove(1); // This model has one layer less.
    for (alone, world) in [(layer, placed), (by_states.clone(), shared(by_states, 2, false))] {
        let expected = tokens_without_drafts(&alone);
        let counted = play(&mut SchedulerHarness::with(with_few_slots(alone.clone())), [2; 3]).1;
        let mut world = join_device_group("drafts", 64, world, false);
        world.settings.graph_capture = GraphCapture::Sizes(vec![4]);
        let (replayed, found) = play(&mut SchedulerHarness::with(world), [2; 3]);
        assert_close(&replayed, &expected, "two ranks");
        assert_eq!(found, counted);
    }
}
