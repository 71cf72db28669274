//! Effects of scheduler ticks: batches for the executors, token events and KV events.

use super::{EngineLoop, EngineLoopState};
use crate::step_clock::BatchSummary;
use protocol::{Batch, Replica};
use scheduler::{SchedulerEffect, StepWorkload};

impl EngineLoop {
    pub(super) fn apply_effect(
        &mut self,
        effect: SchedulerEffect,
        now_ms: u64,
        state: &mut EngineLoopState,
    ) {
        match effect {
            SchedulerEffect::SendBatch { replica, batch } => {
                self.send_batch(replica, batch, now_ms, state);
            }
            // The send fails if the fan-out task, which delivers token events to the streams, has ended.
            SchedulerEffect::TokenEvents(list) => drop(self.token_events.blocking_send(list)),
            SchedulerEffect::Stats(stats) => {
                state.step_clock.stats_changed(&stats, now_ms);
                self.client.set_stats(stats);
            }
            SchedulerEffect::KvEvents { replica, events } => {
                if let Some(feed) = self.kv_events.get_mut(usize::from(replica.0)) {
                    feed.add(events);
                }
            }
            SchedulerEffect::BlocksEvicted { replica, lifetimes } => {
                if let Some(block_lifetimes) = &self.observers.metrics.block_lifetimes {
                    block_lifetimes.evicted(replica, &lifetimes);
                }
            }
            // Reports the outcome of a prefix cache reset; the caller may have dropped its receiver.
            SchedulerEffect::ControlDone { succeeded, .. } => {
                state.pending_cache_resets.pop_front().map(|reply| reply.send(succeeded));
            }
        }
    }

    /// Sends a batch to the executors of its replica and requests the grammar bitmasks of the batch from the
    /// mask workers.
    fn send_batch(
        &mut self,
        replica: Replica,
        batch: Batch,
        now_ms: u64,
        state: &mut EngineLoopState,
    ) {
        let summary = BatchSummary::of(&batch);
        let masked = self.mask_workers.masked_rows(&batch);
        let replica_handle = &mut self.replica_handles[usize::from(replica.0)];
        // Replicas in lockstep execute each step together, so the replica with the most work determines the
        // duration of the step.
        let group_max = state.max_pairs.iter().find(|(step, _)| *step == summary.step);
        let work = StepWorkload {
            tokens: summary.tokens.max(batch.moe_tokens.into()),
            attention_pairs: group_max.map_or(summary.attention_pairs, |(_, max_pairs)| *max_pairs),
        };
        let deadline = replica_handle.send(batch, work, now_ms);
        if let Some(executor) = replica_handle.sender().filter(|_| !masked.is_empty()) {
            self.mask_workers.request_masks(
                summary.step,
                masked,
                executor,
                replica_handle.expected_wait(),
            );
        }
        state.step_clock.batch_sent(replica, &summary, deadline, now_ms);
    }

    /// Passes the changes that this tick (scheduler call) made to the prefix indices to the publishers of KV
    /// events.
    pub(super) fn flush_kv_events(&mut self) {
        for feed in &mut self.kv_events {
            feed.flush();
        }
    }
}
