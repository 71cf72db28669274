//! Tests of speculative decoding on emulated GPUs, with eager launches and graph replay: outputs equal the
//! outputs on the CPU and the outputs without draft tokens.

use crate::deadlines::BoundedJoin;
use crate::ranks::join_device_group;
use crate::scheduler_harness::{
    HarnessRequest, HarnessRequestChunk, LockstepGroup, SchedulerHarness, eagle, eagle_drafting,
    model_drafting, recurrent_model, recurrent_mtp_drafting, shared, speculating,
    with_all_experts_placed,
};
use crate::{GeneratedTokens, assert_close, mla_model, on_emulator, rules, with_few_slots};
use executor::{ExecutorConfig, ModelDtype};
use models::config::ModelConfig;
use protocol::{
    DraftAcceptanceRule, GraphCaptureConfig, ParallelConfig, SpeculativeConfig, SpeculativeMethod,
    Token,
};
use std::sync::Arc;
use std::thread;

/// Number of output tokens per request that are compared with the CPU outputs.
const EXPECTED_TOKENS: usize = 8;

/// Number of steps that the replicas run in lockstep. A replica that finishes its requests earlier runs steps
/// without rows.
const STEPS: usize = 22;

/// Returns requests with repetitive prompts, so that draft tokens are proposed. Request `i` has up to
/// `drafts[i]` draft tokens per row; the penalties of the second request read its output.
fn requests(drafts: [u8; 3]) -> Vec<HarnessRequest> {
    let request = |(id, drafts): (u64, u8)| {
        let mut request =
            HarnessRequest::new(id, 9 + 5 * id as usize, rules()[id as usize % 2].clone());
        let token = |i: u64| (i * i % (3 + id) + 20 + id) as Token;
        request.tokens = (0..request.prompt_len as u64).map(token).collect();
        request.drafts = drafts;
        request
    };
    (0..).zip(drafts).map(request).collect()
}

/// Runs the requests in shared batches with chunked prefill. The second request is preempted once; a fourth
/// request then starts with a prefix hit on the first block of the third request.
fn play(harness: &mut SchedulerHarness, drafts: [u8; 3]) -> (Vec<GeneratedTokens>, [usize; 2]) {
    play_masked(harness, drafts, &[])
}

/// Runs the requests of `play`; the requests with indices in `masked` are sampled under grammar bitmasks.
fn play_masked(
    harness: &mut SchedulerHarness,
    drafts: [u8; 3],
    masked: &[usize],
) -> (Vec<GeneratedTokens>, [usize; 2]) {
    let mut requests = requests(drafts);
    for &request in masked {
        requests[request].masked = true;
    }
    let mut turn = 0;
    while requests.iter().any(|request| request.tokens.len() < request.prompt_len + EXPECTED_TOKENS)
    {
        let open = |request: &&mut HarnessRequest| {
            request.tokens.len() < request.prompt_len + EXPECTED_TOKENS
        };
        let mut rows: Vec<HarnessRequestChunk<'_>> = Vec::new();
        for request in requests.iter_mut().filter(open) {
            let len = request.remaining().min(10);
            rows.push(request.chunk(len));
        }
        rows.sort_by_key(|chunk| chunk.len > 1); // Decode rows come first.
        harness.step(&mut rows);
        turn += 1;
        if turn == 5 {
            let blocks = requests[1].preempt(7);
            harness.free(blocks);
        }
    }
    let mut hit = HarnessRequest::new(2, requests[2].prompt_len, rules()[0].clone()).in_slot(6);
    hit.tokens.clone_from_slice(&requests[2].tokens[..hit.prompt_len]);
    if harness.states.is_empty() {
        hit.table = requests[2].table.prefix(1);
        hit.computed = crate::scheduler_harness::BLOCK;
    }
    hit.drafts = drafts[2];
    let total = hit.prompt_len + EXPECTED_TOKENS;
    harness.finish(&mut hit, 5, total);
    requests.push(hit);
    let count = |of: fn(&HarnessRequest) -> usize| requests.iter().map(of).sum();
    (
        requests.iter().map(expected_tokens).collect(),
        [count(|request| request.drafted), count(|request| request.accepted)],
    )
}

/// Returns the first `EXPECTED_TOKENS` generated tokens of a request, and their log-probabilities. With draft
/// tokens, the last row may have emitted more tokens.
fn expected_tokens(request: &HarnessRequest) -> GeneratedTokens {
    let (mut tokens, mut logprobs) = request.output();
    tokens.truncate(EXPECTED_TOKENS);
    logprobs.truncate(EXPECTED_TOKENS);
    (tokens, logprobs)
}

/// Returns the outputs of a CPU run without draft tokens.
fn tokens_without_drafts(config: &ExecutorConfig) -> Vec<GeneratedTokens> {
    let mut config = with_few_slots(config.clone());
    config.settings.speculative = None;
    config.draft = None;
    play(&mut SchedulerHarness::with(config), [0; 3]).0
}

fn check(what: &str, warp_size: u32, drafting: &ExecutorConfig, drafts: [u8; 3]) {
    let expected = tokens_without_drafts(drafting);
    let (on_cpu, counted) =
        play(&mut SchedulerHarness::with(with_few_slots(drafting.clone())), drafts);
    assert!(on_cpu == expected, "{what}: drafts change nothing on the CPU");
    assert!(counted[0] > 4, "{what}: {counted:?}");
    let harness = |eager| {
        let mut config = on_emulator(warp_size, drafting.clone(), eager);
        config.settings.graph_capture =
            if eager { GraphCaptureConfig::Disabled } else { GraphCaptureConfig::Sizes(vec![4]) };
        SchedulerHarness::with(config)
    };
    let (launched, found) = play(&mut harness(true), drafts);
    assert_close(&launched, &expected, what);
    assert_eq!(found, counted, "{what}: draft counts of the CPU");
    let mut replaying = harness(false);
    assert_eq!(replaying.graphs, [4], "{what}");
    let (replayed, found) = play(&mut replaying, drafts);
    assert!(replayed == launched, "{what}: replay equals eager");
    assert_eq!(found, counted, "{what}");
}

#[test]
fn ngram_drafts_match_eager_and_replayed() {
    if !crate::is_selected_by_cursor(0, crate::SHARDS) {
        return;
    }
    let dense = crate::scheduler_harness::config(ModelDtype::Float32, 2);
    check("dense", 64, &speculating(dense, 3), [3, 2, 3]);
}

/// Rows with draft tokens are staged as several rows of one token each, of which the first updates the recurrent state.
#[test]
fn recurrent_drafts_match_eager_and_replayed() {
    if !crate::is_selected_by_cursor(1, crate::SHARDS) {
        return;
    }
    let ngram = speculating(recurrent_model(ModelDtype::Float32), 3);
    check("recurrent, n-gram", 64, &ngram, [3, 2, 3]);
    check("recurrent, MTP", 32, &recurrent_mtp_drafting(ModelDtype::Float32, 3), [3, 3, 1]);
}

/// The MLA model of these tests, with an MTP module that proposes up to `drafts` draft tokens.
fn mtp_drafting(dtype: ModelDtype, drafts: u8) -> ExecutorConfig {
    let mut config = mla_model(dtype);
    config.model.mtp_layers = 1;
    config.settings.speculative = Some(SpeculativeConfig {
        draft_tokens: drafts,
        method: SpeculativeMethod::Mtp,
        acceptance: DraftAcceptanceRule::Exact,
    });
    config
}

#[test]
fn mtp_module_drafts_eager_and_replayed() {
    if !crate::is_selected_by_cursor(2, crate::SHARDS) {
        return;
    }
    check("two drafts", 64, &mtp_drafting(ModelDtype::Float32, 2), [2, 1, 2]);
    check("three drafts", 32, &mtp_drafting(ModelDtype::Float32, 3), [3, 3, 1]);
}

/// Draft tokens proposed on the host or on the device are verified under the grammar bitmasks of their
/// positions; draft tokens at positions without a bitmask are rejected. Steps with rows that are sampled
/// under a grammar are launched eagerly; other steps replay graphs.
#[test]
fn masked_rows_verify_drafts_as_on_the_cpu() {
    if !crate::is_selected_by_cursor(3, crate::SHARDS) {
        return;
    }
    let dense = crate::scheduler_harness::config(ModelDtype::Float32, 2);
    let same_model = model_drafting(dense.clone(), dense.model.clone(), 3);
    let masked = [0, 1];
    let ngram = speculating(dense, 3);
    for (config, drafts, masks_max) in [(ngram, [3, 2, 3], usize::MAX), (same_model, [3, 2, 1], 2)]
    {
        let name = format!("{:?}, up to {masks_max} bitmasks", config.settings.speculative);
        let play = |config, drafts| {
            let mut harness = SchedulerHarness::with(config);
            harness.masks_max = masks_max;
            play_masked(&mut harness, drafts, &masked)
        };
        let mut plain = with_few_slots(config.clone());
        (plain.settings.speculative, plain.draft) = (None, None);
        let expected = play(plain, [0; 3]).0;
        let (on_cpu, counted) = play(with_few_slots(config.clone()), drafts);
        assert!(on_cpu == expected, "{name}: drafts change nothing on the CPU");
        assert!(counted[0] > 4 && counted[1] > 0, "{name}: {counted:?}");
        let mut config = on_emulator(64, config, false);
        config.settings.graph_capture = GraphCaptureConfig::Sizes(vec![4]);
        let (found, found_counts) = play(config, drafts);
        assert_close(&found, &expected, &name);
        assert_eq!(found_counts, counted, "{name}: draft counts of the CPU");
    }
}

/// Asynchronous steps (submitted before the previous step is finished) continue from the sequence slots on
/// the device. Their tokens and draft tokens equal the tokens and draft tokens of the CPU.
#[test]
fn async_steps_match_the_cpu() {
    if !crate::is_selected_by_cursor(0, crate::SHARDS) {
        return;
    }
    let dense = crate::scheduler_harness::config(ModelDtype::Float32, 2);
    let same_model = dense.model.clone();
    let configs = [
        (64, GraphCaptureConfig::Sizes(vec![4]), mtp_drafting(ModelDtype::Float32, 2)),
        (32, GraphCaptureConfig::Disabled, model_drafting(dense.clone(), same_model, 2)),
        (64, GraphCaptureConfig::Sizes(vec![4]), eagle_drafting(dense, eagle(), 2)),
    ];
    for (warp_size, capture, config) in configs {
        let total = 19 + EXPECTED_TOKENS; // Length for the longest prompt.
        let play = |config: ExecutorConfig, drafts: [u8; 3]| {
            let (mut harness, mut requests, mut left) =
                (SchedulerHarness::with(config), requests(drafts), true);
            harness.finish_async(&mut requests, total, |harness, requests, _| {
                if requests[1].tokens.len() > requests[1].prompt_len + 3
                    && std::mem::take(&mut left)
                {
                    let blocks = requests[1].preempt(7);
                    harness.free(blocks);
                }
            });
            assert!(!left && requests.iter().all(|request| request.tokens.len() >= total));
            let count = |of: fn(&HarnessRequest) -> usize| requests.iter().map(of).sum::<usize>();
            let counted = [count(|request| request.drafted), count(|request| request.accepted)];
            (requests.iter().map(expected_tokens).collect::<Vec<_>>(), counted)
        };
        let mut plain = with_few_slots(config.clone());
        plain.settings.speculative = None;
        let drafts = [2, 1, 2];
        let expected = play(plain, [0; 3]).0;
        let (on_cpu, counted) = play(with_few_slots(config.clone()), drafts);
        assert_close(&on_cpu, &expected, "on the CPU");
        let mut config = on_emulator(warp_size, config, false);
        config.settings.graph_capture = capture;
        let (found, expected_counts) = play(config, drafts);
        assert_close(&found, &expected, "async steps");
        assert_eq!(expected_counts, counted, "warp size {warp_size}: draft counts of the CPU");
    }
}

/// A draft model that is identical to the target model proposes only tokens that are accepted, although it
/// has its own KV cache.
#[test]
fn draft_model_drafts_eager_and_replayed() {
    if !crate::is_selected_by_cursor(1, crate::SHARDS) {
        return;
    }
    let dense = crate::scheduler_harness::config(ModelDtype::Float32, 2);
    let same_model = dense.model.clone();
    check("another model", 64, &model_drafting(dense, same_model, 2), [2, 1, 2]);
}

/// Runs EAGLE-3 with the generic attention kernels and, in bf16, with the attention kernels for tensor cores.
#[test]
fn eagle3_drafts_eager_and_replayed() {
    if !crate::is_selected_by_cursor(3, crate::SHARDS) {
        return;
    }
    let dense = crate::scheduler_harness::config(ModelDtype::Float32, 2);
    check("eagle3", 64, &eagle_drafting(dense, eagle(), 2), [2, 1, 2]);
    let harness = |capture| {
        let wide = ModelConfig { head_dim: 64, ..eagle() };
        let half = crate::scheduler_harness::config(ModelDtype::Bfloat16, 2);
        let mut config = on_emulator(32, eagle_drafting(half, wide, 1), false);
        config.settings.graph_capture = capture;
        SchedulerHarness::with(config)
    };
    let (launched, counted) = play(&mut harness(GraphCaptureConfig::Disabled), [1; 3]);
    let (replayed, found) = play(&mut harness(GraphCaptureConfig::Sizes(vec![4])), [1; 3]);
    assert!(replayed == launched && found == counted, "{found:?}, {counted:?}");
    assert!(counted[0] > 10, "{counted:?}");
}

/// In 16-bit types, MLA and the masking of the MTP module's first position run in other kernels than in f32.
#[test]
fn mtp_in_bf16_replay_equals_eager() {
    let harness = |capture| {
        let mut config = on_emulator(64, mtp_drafting(ModelDtype::Bfloat16, 1), false);
        config.settings.graph_capture = capture;
        SchedulerHarness::with(config)
    };
    let (launched, counted) = play(&mut harness(GraphCaptureConfig::Disabled), [1; 3]);
    let (replayed, found) = play(&mut harness(GraphCaptureConfig::Sizes(vec![4])), [1; 3]);
    assert!(replayed == launched && found == counted, "{found:?}, {counted:?}");
    assert!(counted[0] > 10, "{counted:?}");
}

/// Runs the requests of one replica. The second replica starts with steps without rows and then runs its
/// requests one after the other.
fn play_replica(
    harness: &mut SchedulerHarness,
    replica: u16,
    drafts: u8,
) -> (Vec<GeneratedTokens>, [usize; 2]) {
    let request = |i: u16| {
        let id = u64::from(1 + replica * 7 + i);
        let mut request =
            HarnessRequest::new(id, 9 + usize::from(5 * i + 3 * replica), rules()[0].clone());
        request.drafts = drafts;
        request.in_slot(u32::from(i))
    };
    let mut requests: Vec<HarnessRequest> = (0..2).map(request).collect();
    for step in 0..STEPS {
        let mut rows: Vec<HarnessRequestChunk<'_>> = Vec::new();
        let idle = replica == 1 && step < 3;
        for request in requests
            .iter_mut()
            .filter(|request| !idle && request.tokens.len() < request.prompt_len + 5)
        {
            if replica == 0 || rows.is_empty() {
                let len = request.remaining().min(1 + (step * 11) % 30);
                rows.push(request.chunk(len));
            }
        }
        rows.sort_by_key(|chunk| chunk.len > 1); // Decode rows come first.
        harness.step(&mut rows);
    }
    let output = |request: &HarnessRequest| {
        let (mut tokens, mut logprobs) = request.output();
        assert!(tokens.len() >= 5, "too few steps");
        tokens.truncate(5);
        logprobs.truncate(5);
        (tokens, logprobs)
    };
    let count = |of: fn(&HarnessRequest) -> usize| requests.iter().map(of).sum();
    (
        requests.iter().map(output).collect(),
        [count(|request| request.drafted), count(|request| request.accepted)],
    )
}

/// Returns the outputs of two replicas that share experts, and their numbers of proposed and accepted draft
/// tokens. `capture` determines which graphs the GPUs capture.
fn in_replicas(
    warp_size: u32,
    capture: GraphCaptureConfig,
    single_rank: &ExecutorConfig,
) -> Vec<(Vec<GeneratedTokens>, [usize; 2])> {
    let mut config = single_rank.clone();
    config.settings.parallel = ParallelConfig { tp_size: 1, dp_size: 2, expert_parallel: true };
    let mut config = join_device_group("draft-replicas", warp_size, config, false);
    config.settings.graph_capture = capture;
    let lockstep = Arc::new(LockstepGroup::new(&config));
    let start = |replica| {
        let (config, lockstep) = (config.clone(), Arc::clone(&lockstep));
        thread::spawn(move || {
            let mut harness = SchedulerHarness::of_replica(config, replica, Arc::clone(&lockstep));
            let found = play_replica(&mut harness, replica, 2);
            lockstep.agree(0); // Wait for the last step of all ranks: an exit makes the group fail.
            found
        })
    };
    [start(0), start(1)].into_iter().map(BoundedJoin::join_bounded).collect()
}

/// Replicas that share experts run an equal number of draft passes, even if a replica has no rows.
#[test]
fn expert_parallel_replicas_draft_in_lockstep() {
    if !crate::is_selected_by_cursor(2, crate::SHARDS) {
        return;
    }
    let single_rank = mtp_drafting(ModelDtype::Float32, 2);
    for (warp_size, capture) in
        [(64, GraphCaptureConfig::Disabled), (32, GraphCaptureConfig::Sizes(vec![2]))]
    {
        let name = format!("warp size {warp_size}, {capture:?}");
        let found = in_replicas(warp_size, capture, &single_rank);
        for (replica, (found, counted)) in (0..).zip(found) {
            let plain = play_replica(
                &mut SchedulerHarness::with(with_few_slots(single_rank.clone())),
                replica,
                0,
            )
            .0;
            assert_close(&found, &plain, &format!("replica {replica}, {name}"));
            let expected_counts = play_replica(
                &mut SchedulerHarness::with(with_few_slots(single_rank.clone())),
                replica,
                2,
            )
            .1;
            assert_eq!(counted, expected_counts, "replica {replica}, {name}");
        }
    }
    // In bf16, MLA uses other kernels than in f32; a replica without requests runs these kernels with 0 rows.
    let single_rank = mtp_drafting(ModelDtype::Bfloat16, 2);
    let launched = in_replicas(64, GraphCaptureConfig::Disabled, &single_rank);
    assert_eq!(
        launched,
        in_replicas(64, GraphCaptureConfig::Sizes(vec![2]), &single_rank),
        "in bf16"
    );
}

/// Each rank computes one vocabulary shard of the draft logits and runs the experts that are placed on it,
/// including experts of the MTP module. All ranks choose the same draft tokens.
#[test]
fn ranks_propose_and_verify_the_same_drafts() {
    if !crate::is_selected_by_cursor(0, crate::SHARDS) {
        return;
    }
    let by_states =
        eagle_drafting(crate::scheduler_harness::config(ModelDtype::Float32, 2), eagle(), 2);
    let layer = mtp_drafting(ModelDtype::Float32, 2);
    let mut placed = with_all_experts_placed(shared(layer.clone(), 2, true));
    placed.settings.expert_placement.as_mut().unwrap().layers.remove(1); // This model has one layer less.
    for (single_rank, config) in [(layer, placed), (by_states.clone(), shared(by_states, 2, false))]
    {
        let expected = tokens_without_drafts(&single_rank);
        let counted =
            play(&mut SchedulerHarness::with(with_few_slots(single_rank.clone())), [2; 3]).1;
        let mut config = join_device_group("drafts", 64, config, false);
        config.settings.graph_capture = GraphCaptureConfig::Sizes(vec![4]);
        let (replayed, found) = play(&mut SchedulerHarness::with(config), [2; 3]);
        assert_close(&replayed, &expected, "two ranks");
        assert_eq!(found, counted);
    }
}
