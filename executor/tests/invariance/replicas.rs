//! Tests of replicas that share experts: each replica computes different requests, and its outputs equal the
//! outputs of a single replica.

use crate::deadlines::BoundedJoin;
use crate::scheduler_harness::{
    HarnessRequest, HarnessRequestChunk, LockstepGroup, SchedulerHarness, moe_model, mtp_drafting,
    speculating, with_expert_placement,
};
use crate::{close, rules};
use collectives::{CollectiveCallState, CollectiveOp};
use executor::{ExecutorConfig, ModelDtype};
use protocol::{ParallelConfig, Token, TokenLogprobs};
use std::sync::Arc;
use std::thread;

/// Number of steps that the replicas run in lockstep. A replica that finishes its requests earlier runs steps
/// without rows.
const STEPS: usize = 60;

/// Generated tokens of a request of a replica, and their log-probabilities.
type ReplicaOutput = (Vec<Token>, Vec<TokenLogprobs>);

fn model(dtype: ModelDtype, tp_size: u16, dp_size: u16) -> ExecutorConfig {
    let mut config = moe_model(dtype);
    config.settings.parallel = ParallelConfig { tp_size, dp_size, expert_parallel: true };
    config
}

/// Number of output tokens per request that are compared with the output tokens of a single replica.
const EXPECTED_TOKENS: usize = 10;

/// Returns the requests of a replica. Odd replicas start with steps without rows and then run their requests
/// one after the other; even replicas run two requests at a time.
fn requests(replica: u16, drafts: u8) -> Vec<HarnessRequest> {
    let request = |i: u16| {
        let id = u64::from(1 + replica * 7 + i);
        let rules = rules();
        let mut request = HarnessRequest::new(
            id,
            20 + usize::from(9 * i + 3 * replica),
            rules[id as usize % rules.len()].clone(),
        );
        request.drafts = drafts;
        request
    };
    (0..2).map(request).collect()
}

/// Runs the requests of a replica in lockstep with its group, and returns their outputs.
fn play(harness: &mut SchedulerHarness, replica: u16) -> Vec<ReplicaOutput> {
    play_drafting(harness, replica, 0).0
}

/// Runs the requests of a replica with draft tokens. Returns their outputs, and the numbers of proposed and
/// of accepted draft tokens.
fn play_drafting(
    harness: &mut SchedulerHarness,
    replica: u16,
    drafts: u8,
) -> (Vec<ReplicaOutput>, [usize; 2]) {
    let mut requests = requests(replica, drafts);
    for step in 0..STEPS {
        let mut rows: Vec<HarnessRequestChunk<'_>> = Vec::new();
        let idle = replica % 2 == 1 && step < 5;
        for request in requests
            .iter_mut()
            .filter(|request| !idle && request.tokens.len() < request.prompt_len + EXPECTED_TOKENS)
        {
            if replica.is_multiple_of(2) || rows.is_empty() {
                let len = request.remaining().min(1 + (step * 11) % 30);
                rows.push(request.chunk(len));
            }
        }
        rows.sort_by_key(|chunk| chunk.len > 1); // Decode rows come first.
        let output = harness.step(&mut rows);
        assert!(!rows.is_empty() || output.rows.is_empty());
    }
    assert!(
        requests.iter().all(|request| request.tokens.len() >= request.prompt_len + EXPECTED_TOKENS),
        "too few steps"
    );
    let output = |request: &HarnessRequest| {
        let (mut tokens, mut logprobs) = request.output();
        tokens.truncate(EXPECTED_TOKENS); // The last row may emit more.
        logprobs.truncate(EXPECTED_TOKENS);
        (tokens, logprobs)
    };
    let count = |of: fn(&HarnessRequest) -> usize| requests.iter().map(of).sum();
    (
        requests.iter().map(output).collect(),
        [count(|request| request.drafted), count(|request| request.accepted)],
    )
}

/// Returns the outputs of each replica of a group.
fn run_replicas(config: &ExecutorConfig) -> Vec<Vec<ReplicaOutput>> {
    run_replicas_in(config, &Arc::new(LockstepGroup::new(config)))
}

fn run_replicas_in(
    config: &ExecutorConfig,
    lockstep: &Arc<LockstepGroup>,
) -> Vec<Vec<ReplicaOutput>> {
    let replica = |replica| {
        let (config, lockstep) = (config.clone(), Arc::clone(lockstep));
        thread::spawn(move || {
            play(&mut SchedulerHarness::of_replica(config, replica, lockstep), replica)
        })
    };
    let replicas: Vec<_> = (0..config.settings.parallel.dp_size).map(replica).collect();
    replicas.into_iter().map(BoundedJoin::join_bounded).collect()
}

/// Returns the kinds of collectives that exchanged tokens with the experts of other ranks, and the total
/// bytes that the ranks sent to each other.
fn gathered_rows(config: &ExecutorConfig) -> (Vec<CollectiveOp>, u64) {
    let lockstep = Arc::new(LockstepGroup::new(config));
    run_replicas_in(config, &lockstep);
    let (mut operations, mut bytes) = (Vec::new(), 0);
    let size = u64::from(config.settings.parallel.dp_size);
    let ranks = lockstep.rendezvous.calls();
    for (rank, call) in ranks.iter().flat_map(|rank| rank.calls.iter().map(move |c| (rank, c))) {
        assert!(rank.axis == "dp" && call.state == CollectiveCallState::Done, "{call}");
        assert!(rank.calls.len() < collectives::CALL_HISTORY_LEN, "the history has all calls");
        let (rows, row) = (u64::from(call.rows), u64::from(call.cols) * call.dtype.bytes() as u64);
        bytes += match call.op {
            CollectiveOp::AllToAll if rank.rank.0 == 0 => rows * row, // `rows` is a total: count it once.
            CollectiveOp::AllToAll => 0,
            CollectiveOp::ExchangeCounts => row * (size - 1),
            // All-gather: each rank sends its rows to all other ranks. Reduce-scatter: each rank receives as
            // many rows of partial sums from all other ranks.
            _ => rows / size * row * (size - 1),
        };
        if !operations.contains(&call.op) {
            operations.push(call.op);
        }
    }
    (operations, bytes)
}

/// The number of experts per token and the number of ranks determine whether all-to-all or all-gather is
/// used: all-to-all is used if it sends fewer bytes.
#[test]
fn all_to_all_is_used_for_few_target_ranks() {
    use CollectiveOp::{AllGatherRows, AllToAll, ExchangeCounts, ReduceScatter};
    for (dp_size, most) in [(2, 2), (4, 4)] {
        let mut found = (1..8).map(|top_k| {
            let mut config = model(ModelDtype::Float32, 1, dp_size);
            config.model.moe.as_mut().unwrap().top_k = top_k;
            let (operations, bytes) = gathered_rows(&config);
            println!("{top_k} of 8 experts on {dp_size} ranks: {bytes} bytes, {operations:?}");
            (top_k, operations, bytes)
        });
        let sent: Vec<_> = found.by_ref().take(most).collect();
        let gathered: Vec<_> = found.collect();
        assert!(sent.iter().all(|(_, operations, _)| *operations == [ExchangeCounts, AllToAll]));
        let gathering = [AllGatherRows, ReduceScatter];
        assert!(gathered.iter().all(|(_, operations, _)| *operations == gathering));
        assert!(sent.iter().all(|(_, _, bytes)| *bytes < gathered[0].2), "{sent:?}, {gathered:?}");
        assert!(sent.is_sorted_by_key(|(_, _, bytes)| *bytes), "{sent:?}");
    }
}

#[test]
fn expert_parallel_replicas_match_single_replica() {
    let run_single =
        |replica| play(&mut SchedulerHarness::with(moe_model(ModelDtype::Float32)), replica);
    let of = |tp_size, dp_size| model(ModelDtype::Float32, tp_size, dp_size);
    for config in [
        of(1, 2),
        of(2, 2),
        of(1, 4),
        with_expert_placement(of(1, 2)),
        with_expert_placement(of(2, 2)),
    ] {
        let dp_size = config.settings.parallel.dp_size;
        let found = run_replicas(&config);
        for (replica, found) in (0..dp_size).zip(&found) {
            for ((tokens, logprobs), (own, own_logprobs)) in run_single(replica).iter().zip(found) {
                assert_eq!(tokens, own, "replica {replica} of {dp_size}");
                assert!(close(logprobs, own_logprobs), "replica {replica}");
            }
        }
    }
}

/// All replicas run draft passes in lockstep, even a replica whose rows have no draft tokens. The numbers of
/// draft tokens equal the numbers of a single rank, and outputs equal the outputs without draft tokens.
#[test]
fn replicas_run_draft_passes_in_lockstep() {
    const DRAFTS: u8 = 3;
    for (tp_size, dp_size, method) in [(1, 2, true), (2, 2, true), (1, 4, true), (1, 2, false)] {
        let of = |layer: bool| {
            if layer {
                mtp_drafting(ModelDtype::Float32, DRAFTS)
            } else {
                speculating(moe_model(ModelDtype::Float32), DRAFTS)
            }
        };
        let mut config = of(method);
        config.settings.parallel = ParallelConfig { tp_size, dp_size, expert_parallel: true };
        let lockstep = Arc::new(LockstepGroup::new(&config));
        let start = |replica| {
            let (config, lockstep) = (config.clone(), Arc::clone(&lockstep));
            let play = move || {
                let mut harness = SchedulerHarness::of_replica(config, replica, lockstep);
                play_drafting(&mut harness, replica, DRAFTS)
            };
            thread::spawn(play)
        };
        let replicas: Vec<_> = (0..dp_size).map(start).collect();
        for (replica, found) in (0..).zip(replicas) {
            let (found, counted) = found.join_bounded();
            let name = format!("replica {replica} of {dp_size}, {tp_size} ranks each");
            let plain = play(&mut SchedulerHarness::with(of(method)), replica);
            for ((tokens, logprobs), (own, own_logprobs)) in plain.iter().zip(&found) {
                assert_eq!(tokens, own, "{name}");
                assert!(close(logprobs, own_logprobs), "{name}");
            }
            let single = play_drafting(&mut SchedulerHarness::with(of(method)), replica, DRAFTS);
            assert_eq!(single.1, counted, "{name}");
            assert!(!method || counted[0] > 10, "{name}: {counted:?}");
        }
    }
}

/// A replica's outputs are bit-identical in any dtype, whatever batches the other replicas run.
#[test]
fn other_replicas_change_no_bit() {
    for dtype in crate::DTYPES {
        let config = model(dtype, 1, 2);
        let lockstep = Arc::new(LockstepGroup::new(&config));
        let idle = {
            let (config, lockstep) = (config.clone(), Arc::clone(&lockstep));
            thread::spawn(move || {
                let mut harness = SchedulerHarness::of_replica(config, 1, lockstep);
                (0..STEPS).for_each(|_| drop(harness.step(&mut [])));
            })
        };
        let single = play(&mut SchedulerHarness::of_replica(config.clone(), 0, lockstep), 0);
        idle.join_bounded();
        assert_eq!(run_replicas(&config)[0], single, "{dtype:?}");
    }
}
