//! Tests of TP and DP ranks on GPUs, eager and replayed: tokens equal those of a single rank, and steps use
//! the expected collectives.

use crate::deadlines::BoundedJoin as _;
use crate::scheduler_harness::{
    HarnessRequest, HarnessRequestChunk, LockstepGroup, SchedulerHarness, config, moe_model,
    shared, with_expert_placement,
};
use crate::{
    GeneratedTokens, HALF_NEAR, assert_close, assert_within, emulated_gpu, on_emulator, play,
    rules, with_few_slots,
};
use collectives::{CollectiveCallState, CollectiveOp};
use executor::{ExecutorConfig, ModelDtype};
use ops::DType;
use protocol::{GraphCaptureConfig, ParallelConfig, SamplingParams};
use std::sync::Arc;
use std::thread;

/// Number of steps that the replicas run in lockstep. A replica that finishes its requests earlier runs steps
/// without rows.
const STEPS: usize = 24;

/// Configures ranks that each run on their own emulated GPU and form one device group. Tests that run in
/// parallel use different group names.
pub(crate) fn join_device_group(
    group: &str,
    warp_size: u32,
    config: ExecutorConfig,
    enforce_eager: bool,
) -> ExecutorConfig {
    let mut config = on_emulator(warp_size, config, enforce_eager);
    let ranks = usize::from(config.settings.parallel.world_size());
    config.settings.libraries.as_mut().unwrap().driver = emulated_gpu::library_of(group);
    config.settings.gpus = (0..ranks as u32).collect();
    config
}

#[test]
fn tp_ranks_match_single_rank_eager_and_replayed() {
    let dense = |dtype| shared(config(dtype, 2), 2, false);
    let split = |dtype| shared(moe_model(dtype), 2, false);
    let expert_parallel = |dtype| shared(moe_model(dtype), 2, true);
    let single_rank = |config: ExecutorConfig| ExecutorConfig {
        settings: protocol::ExecutorSettings {
            parallel: ParallelConfig::default(),
            expert_placement: None,
            ..config.settings.clone()
        },
        ..config
    };
    let configs = [
        ("dense", 64, dense(ModelDtype::Float32)),
        ("experts in parts", 32, split(ModelDtype::Float32)),
        ("experts whole", 64, expert_parallel(ModelDtype::Float32)),
        ("experts placed", 32, with_expert_placement(expert_parallel(ModelDtype::Float32))),
    ];
    for (what, warp_size, config) in configs {
        let expected =
            play(&mut SchedulerHarness::with(with_few_slots(single_rank(config.clone()))));
        let launched = play(&mut SchedulerHarness::with(join_device_group(
            "replica",
            warp_size,
            config.clone(),
            true,
        )));
        assert_close(&launched, &expected, what);
        let mut replaying =
            SchedulerHarness::with(join_device_group("replica", warp_size, config, false));
        assert_eq!(replaying.graphs, [1, 2, 4, 8], "{what}");
        assert_eq!(play(&mut replaying), launched, "{what}");
    }
}

/// Returns sets of sampling parameters. Vocab-parallel sampling supports all of them except the last, which
/// needs full rows of logits.
fn sampling_variants() -> [SamplingParams; 6] {
    let random = |temperature| SamplingParams { temperature, ..SamplingParams::greedy() };
    let strict = SamplingParams { logprobs: None, ..rules()[1].clone() };
    [
        SamplingParams::greedy(),
        random(0.8),
        SamplingParams { top_k: 5, top_p: 0.9, ..random(1.0) },
        SamplingParams { temperature: 1.3, top_k: 24, min_p: 0.05, ..strict.clone() },
        strict,
        SamplingParams { top_p: 0.8, ..random(1.0) },
    ]
}

/// Element type, rows and columns of the first rank's input to an all-gather; `None` = there was none.
type GatheredShape = Option<(DType, u32, u32)>;

/// Returns the shape of the most recent all-gather of the first rank.
fn gathered_shapes(harness: &SchedulerHarness) -> GatheredShape {
    let calls = harness.lockstep.rendezvous.calls();
    let of_first = &calls.first()?.calls;
    let gather = of_first.iter().rfind(|call| call.op == CollectiveOp::AllGather)?;
    Some((gather.dtype, gather.rows, gather.cols))
}

/// Returns the outputs of all requests, and the shapes of the all-gathers in three decode steps: of the first
/// five requests, of all six requests, and of five requests of which one is sampled under a grammar bitmask.
fn sample(harness: &mut SchedulerHarness) -> (Vec<GeneratedTokens>, [GatheredShape; 3]) {
    let request = |(id, sampling): (u64, SamplingParams)| {
        HarnessRequest::new(id, 4 + 3 * id as usize, sampling)
    };
    let mut requests: Vec<HarnessRequest> = (0..).zip(sampling_variants()).map(request).collect();
    let decode = |harness: &mut SchedulerHarness, requests: &mut [HarnessRequest], steps: usize| {
        for step in 0..steps {
            harness.from_device = step > 0;
            harness
                .step(&mut requests.iter_mut().map(|request| request.chunk(1)).collect::<Vec<_>>());
        }
        harness.from_device = false;
        gathered_shapes(harness)
    };
    let mut found = [None; 3];
    for request in &mut requests[..5] {
        let len = request.prompt_len;
        harness.step(&mut [request.chunk(len)]);
    }
    found[0] = decode(harness, &mut requests[..5], 4);
    let len = requests[5].prompt_len;
    harness.step(&mut [requests[5].chunk(len)]);
    found[1] = decode(harness, &mut requests, 3);
    requests[0].masked = true;
    found[2] = decode(harness, &mut requests[..5], 2);
    (requests.iter().map(HarnessRequest::output).collect(), found)
}

#[test]
fn vocab_parallel_sampling_matches_single_rank() {
    let (expected, _) =
        sample(&mut SchedulerHarness::with(with_few_slots(config(ModelDtype::Float32, 2))));
    for (warp_size, enforce_eager) in [(64, true), (32, false)] {
        let config = shared(config(ModelDtype::Float32, 2), 2, false);
        let mut config = join_device_group("parts", warp_size, config, enforce_eager);
        if !enforce_eager {
            config.settings.graph_capture = GraphCaptureConfig::Sizes(vec![8]);
        }
        let mut harness = SchedulerHarness::with(config);
        let (found, gathered) = sample(&mut harness);
        assert_eq!(found, expected, "warp size {warp_size}");
        // Vocab-parallel sampling gathers 24 candidates of 192 ids as 52 words per row; full logits are 192
        // values per row. Steps of five or six rows replay the graph for eight rows; steps with a row that is
        // sampled under a grammar are launched eagerly.
        let rows = if enforce_eager { [5, 6] } else { [8, 8] };
        let in_parts = |rows: u32| Some((DType::I32, 1, 52 * rows));
        let whole = Some((DType::F32, rows[1], 192));
        assert_eq!(gathered, [in_parts(rows[0]), whole, in_parts(5)], "warp size {warp_size}");
    }
}

#[test]
fn library_all_reduce_gives_the_same_tokens() {
    let mut config =
        join_device_group("sums", 64, shared(config(ModelDtype::Float32, 2), 2, false), true);
    let found = play(&mut SchedulerHarness::with(config.clone()));
    config.settings.one_shot_all_reduce = false;
    assert_eq!(play(&mut SchedulerHarness::with(config)), found);
}

/// In f16, the result of every addition in an all-reduce is rounded, both in the one-shot all-reduce and in
/// the all-reduce of NCCL or RCCL.
#[test]
fn tp_in_f16_stays_near_f32() {
    if !crate::is_selected_by_cursor(3, crate::SHARDS) {
        return;
    }
    let expected =
        play(&mut SchedulerHarness::with(with_few_slots(config(ModelDtype::Float32, 2))));
    let mut config =
        join_device_group("halves", 32, shared(config(ModelDtype::Float16, 2), 2, false), false);
    let replayed = play(&mut SchedulerHarness::with(config.clone()));
    assert_within(&replayed, &expected, HALF_NEAR, "one-shot all-reduce");
    config.settings.one_shot_all_reduce = false;
    let launched = play(&mut SchedulerHarness::with(config));
    assert_within(&launched, &expected, HALF_NEAR, "library all-reduce");
}

/// Runs the requests of one replica. Odd replicas start with steps without rows and then run their requests
/// one after the other.
fn play_replica(harness: &mut SchedulerHarness, replica: u16) -> Vec<GeneratedTokens> {
    let request = |i: u16| {
        let sampling = SamplingParams { logprobs: Some(3), ..SamplingParams::greedy() };
        let id = u64::from(1 + replica * 7 + i);
        HarnessRequest::new(id, 9 + usize::from(5 * i + 3 * replica), sampling)
            .in_slot(u32::from(i))
    };
    let mut requests: Vec<HarnessRequest> = (0..2).map(request).collect();
    for step in 0..STEPS {
        let mut rows: Vec<HarnessRequestChunk<'_>> = Vec::new();
        let idle = replica % 2 == 1 && step < 3;
        for request in requests
            .iter_mut()
            .filter(|request| !idle && request.tokens.len() < request.prompt_len + 4)
        {
            if replica.is_multiple_of(2) || rows.is_empty() {
                let len = request.remaining().min(1 + (step * 11) % 30);
                rows.push(request.chunk(len));
            }
        }
        rows.sort_by_key(|chunk| chunk.len > 1); // Decode rows come first.
        harness.step(&mut rows);
    }
    assert!(
        requests.iter().all(|request| request.tokens.len() == request.prompt_len + 4),
        "too few steps"
    );
    requests.iter().map(HarnessRequest::output).collect()
}

#[test]
fn expert_parallel_replicas_match_single_replica() {
    let mut config = moe_model(ModelDtype::Float32);
    let single_rank = |replica| {
        play_replica(
            &mut SchedulerHarness::with(with_few_slots(moe_model(ModelDtype::Float32))),
            replica,
        )
    };
    config.settings.parallel = ParallelConfig { tp_size: 1, dp_size: 2, expert_parallel: true };
    for (warp_size, enforce_eager) in [(64, true), (32, false)] {
        let config = join_device_group("replicas", warp_size, config.clone(), enforce_eager);
        let lockstep = Arc::new(LockstepGroup::new(&config));
        let start = |replica| {
            let (config, lockstep) = (config.clone(), Arc::clone(&lockstep));
            thread::spawn(move || {
                let mut harness =
                    SchedulerHarness::of_replica(config, replica, Arc::clone(&lockstep));
                let found = play_replica(&mut harness, replica);
                lockstep.agree(0); // Wait for the last step of all ranks: an exit makes the group fail.
                found
            })
        };
        let replicas = [start(0), start(1)];
        for (replica, found) in (0..).zip(replicas) {
            let found = found.join_bounded();
            assert_close(
                &found,
                &single_rank(replica),
                &format!("replica {replica}, warp size {warp_size}"),
            );
        }
        // Captured graphs exchange a fixed number of tokens between replicas, by all-gather and
        // reduce-scatter. Eager steps send tokens only to the ranks of their experts, by all-to-all.
        let calls: Vec<_> =
            lockstep.rendezvous.calls().into_iter().flat_map(|rank| rank.calls).collect();
        let called = |operation| calls.iter().any(|call| call.op == operation);
        assert!(called(CollectiveOp::AllToAll), "warp size {warp_size}");
        assert_eq!(called(CollectiveOp::ReduceScatter), !enforce_eager, "warp size {warp_size}");
    }
}

/// The engine can read the call history of each rank, including the collectives of replayed steps.
#[test]
fn captured_collectives_are_reported_by_each_replay() {
    let mut harness = SchedulerHarness::with(join_device_group(
        "calls",
        64,
        shared(config(ModelDtype::Float32, 2), 2, false),
        false,
    ));
    let mut request = HarnessRequest::new(1, 9, SamplingParams::greedy());
    harness.step(&mut [request.chunk(9)]);
    let before = harness.lockstep.rendezvous.calls()[0].calls.last().unwrap().sequence;
    harness.step(&mut [request.chunk(1)]);
    for rank in harness.lockstep.rendezvous.calls() {
        let calls: Vec<_> = rank.calls.iter().filter(|call| call.sequence > before).collect();
        let gathers = calls.iter().filter(|call| call.op == CollectiveOp::AllGather).count();
        // One all-reduce for the embedding, two for each of three layers, and the all-gather of the logits.
        assert_eq!((calls.len(), gathers), (8, 1), "rank {}", rank.rank.0);
        assert!(calls.iter().all(|call| call.state == CollectiveCallState::Done), "{calls:?}");
    }
}
