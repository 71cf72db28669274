//! Tests that recomputed tokens are counted by cause (executor failure, preemption, reset) and by replica.

use protocol::{
    Batch, KvGroup, KvKind, KvSpec, Replica, RequestId, RowOutput, SamplingParams, StepOutput,
    StepTiming, Token,
};
use scheduler::{
    AbortCause, ControlCommand, ExecutorFailure, ExecutorFailureCounts, KvConfig,
    RecomputedTokenCounts, RequestSubmission, Scheduler, SchedulerConfig, SchedulerEffect,
    SchedulerEvent, SchedulerLimits, SchedulerStats,
};

const BLOCK_TOKENS: u32 = 4;

/// A scheduler, the last batch of each replica, its statistics, and the result of the last control command.
struct RequeueHarness {
    scheduler: Scheduler,
    sent: Vec<Option<Batch>>,
    stats: Vec<SchedulerStats>,
    control_succeeded: Option<bool>,
}

impl RequeueHarness {
    fn new(replicas: u16, blocks: u32) -> Self {
        let group = KvGroup { layers: vec![0], kind: KvKind::Full, bytes_per_block: 1 };
        let spec = KvSpec { block_tokens: BLOCK_TOKENS, groups: vec![group] };
        let limits = SchedulerLimits { steps_in_flight: 1, ..SchedulerLimits::cpu(64, 100) };
        let config = SchedulerConfig::new(limits, KvConfig::new(spec, blocks, [1, 2]));
        let scheduler =
            Scheduler::new(SchedulerConfig { replicas, ..config }).expect("a valid configuration");
        let count = usize::from(replicas);
        let (sent, stats) = (vec![None; count], vec![SchedulerStats::default(); count]);
        Self { scheduler, sent, stats, control_succeeded: None }
    }

    fn tick(&mut self, event: SchedulerEvent) {
        let mut effects = Vec::new();
        self.scheduler.tick(0, &mut vec![event], &mut effects);
        for effect in effects {
            match effect {
                SchedulerEffect::SendBatch { replica, batch } => {
                    self.sent[usize::from(replica.0)] = Some(batch);
                }
                SchedulerEffect::Stats(stats) => {
                    let replica = usize::from(stats.replica.0);
                    self.stats[replica] = stats;
                }
                SchedulerEffect::ControlDone { op_id: 1, succeeded: done } => {
                    self.control_succeeded = Some(done);
                }
                _ => {}
            }
        }
    }

    /// Submits a request of `tokens` tokens that share no prefix with other requests.
    fn submit(&mut self, id: u64, tokens: u32) {
        self.submit_masked(id, tokens, None);
    }

    /// Submits a request with an output that is constrained from token `masked_from` on.
    fn submit_masked(&mut self, id: u64, tokens: u32, masked_from: Option<u32>) {
        let tokens: Vec<Token> = (0..tokens).map(|i| id as u32 * 30 + i).collect();
        let block_keys = self.scheduler.hasher().hash_prompt(&tokens, None);
        self.tick(SchedulerEvent::Submit(Box::new(RequestSubmission {
            id: RequestId(id),
            tokens,
            max_tokens: 30,
            sampling: SamplingParams::greedy(),
            first_masked_token: masked_from,
            rng_key: id,
            eos_ids: Vec::new(),
            stop_ids: Vec::new(),
            priority: 0,
            extra_keys: None,
            replica: None,
            block_keys,
        })));
    }

    /// Completes the last step of a replica: one token for every row that samples.
    fn complete_step(&mut self, replica: u16) {
        let batch = self.sent[usize::from(replica)].take().expect("a step is in flight");
        let mut rows = vec![RowOutput::default(); batch.rows.len()];
        for (output, row) in rows.iter_mut().zip(&batch.rows) {
            if row.samples {
                output.sampled_tokens.push(7);
            }
        }
        let Batch { step, epoch, .. } = batch;
        let timing = StepTiming::default();
        let output = StepOutput { step, epoch, rows, timing, expert_tokens: Vec::new() };
        self.tick(SchedulerEvent::StepOutput { replica: Replica(replica), output });
    }

    /// Clears the prefix cache. Returns whether it was cleared.
    fn clear(&mut self, requeue_running: bool) -> bool {
        self.tick(SchedulerEvent::Control(ControlCommand::ClearPrefixCache {
            op_id: 1,
            requeue_running,
        }));
        self.control_succeeded.take().expect("a control command completes in its tick")
    }

    fn fail_executors(&mut self, replica: u16, failure: ExecutorFailure) {
        self.tick(SchedulerEvent::ExecutorsFailed { replica: Replica(replica), failure });
    }

    fn failure_costs(&self, replica: usize) -> (ExecutorFailureCounts, RecomputedTokenCounts) {
        let stats = &self.stats[replica];
        (stats.requests_recovered_total, stats.tokens_recomputed_total)
    }
}

#[test]
fn failure_and_recompute_are_counted_on_their_replicas() {
    let mut harness = RequeueHarness::new(2, 16);
    harness.submit(1, 6);
    harness.complete_step(0); // The prompt and one output token are computed or in flight.
    harness.complete_step(0);
    harness.fail_executors(0, ExecutorFailure::HeartbeatTimeout);
    let none = ExecutorFailureCounts::default();
    let recovered = ExecutorFailureCounts { heartbeat_timeout: 1, ..none };
    assert_eq!(harness.failure_costs(0), (recovered, RecomputedTokenCounts::default()));
    let failure_counts = ExecutorFailureCounts { heartbeat_timeout: 8, ..none };
    let recomputed = RecomputedTokenCounts {
        executor_failure: failure_counts,
        ..RecomputedTokenCounts::default()
    };
    assert_eq!(harness.failure_costs(1), (none, recomputed), "replica 1 recomputes");
    // The second failure has another cause. No other replica is ready, so the request waits for restored
    // executors.
    harness.fail_executors(1, ExecutorFailure::ReportedFault);
    let recovered = ExecutorFailureCounts { reported_fault: 1, ..none };
    assert_eq!(harness.failure_costs(1), (recovered, recomputed));
    let (replica, capture_sizes) = (Replica(1), Vec::new());
    harness.tick(SchedulerEvent::ExecutorsReady { replica, blocks: 16, capture_sizes });
    let failure_counts = ExecutorFailureCounts { reported_fault: 8, ..failure_counts };
    assert_eq!(
        harness.failure_costs(1),
        (recovered, RecomputedTokenCounts { executor_failure: failure_counts, ..recomputed })
    );
}

#[test]
fn preemptions_and_resets_are_not_counted_as_failures() {
    let mut harness = RequeueHarness::new(1, 16);
    harness.submit(1, 6);
    harness.complete_step(0);
    assert!(harness.clear(true));
    harness.complete_step(0); // The output of the old epoch allows another step.
    let (recovered, recomputed) = harness.failure_costs(0);
    assert_eq!(recovered, ExecutorFailureCounts::default());
    assert_eq!(recomputed, RecomputedTokenCounts { reset: 7, ..RecomputedTokenCounts::default() });

    // The two requests outgrow the KV pool: one is preempted, and its blocks in the prefix cache are evicted.
    let mut harness = RequeueHarness::new(1, 16);
    harness.submit(1, 30);
    harness.submit(2, 30);
    while harness.stats[0].preemptions_total == 0 {
        harness.complete_step(0);
    }
    while harness.stats[0].tokens_recomputed_total == RecomputedTokenCounts::default() {
        harness.complete_step(0);
    }
    let (recovered, recomputed) = harness.failure_costs(0);
    assert_eq!(recovered, ExecutorFailureCounts::default());
    let RecomputedTokenCounts { preemption, reset, executor_failure: failure_counts } = recomputed;
    assert!(
        preemption > 0 && (reset, failure_counts) == (0, ExecutorFailureCounts::default()),
        "{recomputed:?}"
    );
}

#[test]
fn output_for_an_aborted_request_is_dropped_and_counted() {
    let mut harness = RequeueHarness::new(1, 16);
    harness.submit(1, 6);
    harness.submit(2, 6);
    harness.tick(SchedulerEvent::Abort {
        request: RequestId(1),
        cause: AbortCause::ClientDisconnected,
    });
    harness.complete_step(0);
    harness.complete_step(0);
    assert_eq!(harness.stats[0].rows_dropped_total, 1);
}

#[test]
fn output_of_an_old_epoch_is_dropped_and_counted() {
    let mut harness = RequeueHarness::new(1, 16);
    harness.submit(1, 6);
    let mut batch = harness.sent[0].clone().expect("a step is in flight");
    batch.epoch.0 += 1; // All other fields are as expected.
    let original = harness.sent[0].replace(batch);
    harness.complete_step(0);
    assert_eq!(harness.stats[0].outputs_dropped_total, 1);
    harness.sent[0] = original;
    harness.complete_step(0);
    assert_eq!(harness.stats[0].outputs_dropped_total, 1);
}

#[test]
fn clearing_the_prefix_cache_needs_idle_blocks_or_requeue() {
    let mut harness = RequeueHarness::new(1, 16);
    harness.submit(1, 6);
    harness.complete_step(0);
    assert!(!harness.clear(false), "its blocks are in use");
    assert_eq!((harness.stats[0].running, harness.stats[0].prefix_queries_total), (1, 6));
    harness.tick(SchedulerEvent::Abort {
        request: RequestId(1),
        cause: AbortCause::ClientDisconnected,
    });
    assert_eq!(harness.stats[0].blocks.cached, 1);
    assert!(harness.clear(false), "unreferenced blocks need no requeue");
    assert_eq!(harness.stats[0].blocks.cached, 0);
}

#[test]
fn stats_report_last_step_and_totals() {
    let mut harness = RequeueHarness::new(1, 16);
    assert!(harness.scheduler.is_idle());
    harness.submit(1, 6);
    for (steps, tokens) in [(0, 6), (1, 1), (2, 1)] {
        let stats = &harness.stats[0];
        assert_eq!(
            (stats.last_step_rows, stats.last_step_tokens, stats.steps_total),
            (1, tokens, steps)
        );
        assert_eq!(harness.scheduler.stats(Replica(0)), *stats, "equal to the emitted snapshot");
        assert!(!harness.scheduler.is_idle());
        harness.complete_step(0);
    }
    harness.tick(SchedulerEvent::Abort {
        request: RequestId(1),
        cause: AbortCause::ClientDisconnected,
    });
    assert!(!harness.scheduler.is_idle(), "its last step is in flight");
    harness.complete_step(0);
    assert!(harness.scheduler.is_idle());
}

#[test]
fn rows_are_masked_until_masks_are_done() {
    let mut harness = RequeueHarness::new(1, 16);
    harness.submit_masked(1, 6, Some(1));
    let mut masked = Vec::new();
    for step in 0..5 {
        masked.push(harness.sent[0].as_ref().expect("a step is in flight").rows[0].masked);
        if step == 2 {
            harness.tick(SchedulerEvent::MasksDone { request: RequestId(1) });
        }
        harness.complete_step(0);
    }
    assert_eq!(masked, [false, true, true, false, false], "the third row was in flight");
}

#[test]
fn restored_replica_takes_no_queued_requests() {
    let mut harness = RequeueHarness::new(2, 16);
    harness.fail_executors(0, ExecutorFailure::Exited);
    harness.submit(1, 6);
    harness.submit(2, 6); // Waits for the step in flight.
    let ready = SchedulerEvent::ExecutorsReady {
        replica: Replica(0),
        blocks: 16,
        capture_sizes: Vec::new(),
    };
    harness.tick(ready);
    assert_eq!((harness.stats[1].running, harness.stats[1].waiting), (1, 1));
    assert!(harness.sent[0].is_none());
}

#[test]
fn lockstep_replicas_fail_together_and_others_alone() {
    for (lockstep, expected) in [(true, &[0, 1][..]), (false, &[1])] {
        let group = KvGroup { layers: vec![0], kind: KvKind::Full, bytes_per_block: 1 };
        let spec = KvSpec { block_tokens: BLOCK_TOKENS, groups: vec![group] };
        let config =
            SchedulerConfig::new(SchedulerLimits::cpu(64, 100), KvConfig::new(spec, 16, [1, 2]));
        let scheduler =
            Scheduler::new(SchedulerConfig { replicas: 2, lockstep, ..config }).unwrap();
        let group: Vec<u16> =
            scheduler.lockstep_group(Replica(1)).map(|replica| replica.0).collect();
        assert_eq!(group, expected);
    }
}
