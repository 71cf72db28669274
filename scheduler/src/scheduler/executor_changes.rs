//! Reactions of the scheduler to failed and restored executors.

use super::Scheduler;
use super::lockstep_step::flush_kv_events;
use crate::replica_state::ReplicaState;
use crate::slab::SlabSlot;
use crate::{ExecutorFailure, FinishReason, RequestError, SchedulerEffect};
use protocol::Replica;

impl Scheduler {
    /// Handles an executor failure. In lockstep, all replicas of the group fail. Without lockstep, the
    /// waiting requests of the failed replica migrate to ready replicas.
    pub(super) fn handle_executor_failure(&mut self, replica: Replica, failure: ExecutorFailure) {
        let replica = usize::from(replica.0);
        for failed in self.group_of(replica) {
            self.replicas[failed].on_executor_failure(self.now_ms, failure);
        }
        self.migrate_queue(replica);
    }

    /// Migrates waiting requests of a failed replica to ready replicas with large enough pools. Ranks of a
    /// lockstep group cannot migrate requests.
    fn migrate_queue(&mut self, from: usize) {
        if self.config.lockstep || self.replicas[from].is_ready() {
            return;
        }
        let waiting: Vec<SlabSlot> = self.replicas[from].state.waiting.slots().collect();
        for slot in waiting {
            self.migrate_request(from, slot);
        }
    }

    /// Migrates a waiting request to the ready replica with the lowest load among those with a large enough
    /// KV pool, unless the client selected the replica. Returns whether the request migrated. Pool sizes
    /// differ if executors were restarted with less memory.
    fn migrate_request(&mut self, from: usize, slot: SlabSlot) -> bool {
        let request = &self.replicas[from].state.requests[slot];
        let (limit, pinned) = (request.limit, request.cold_fields.params.pinned_to_replica);
        let can_host =
            |&i: &usize| i != from && self.replicas[i].is_ready() && self.pool_can_hold(i, limit);
        let targets = (0..self.replicas.len()).filter(can_host);
        let least_loaded = targets.min_by_key(|&i| (self.replicas[i].load.tokens, i));
        let Some(to) = least_loaded.filter(|_| !pinned) else { return false };
        let ReplicaState { state, load, stats_changed, .. } = &mut self.replicas[from];
        let request = state.requests.remove(slot);
        state.waiting.remove(request.cold_fields.queue_key);
        state.waiting_tokens -= u64::from(request.len);
        load.release(request.cold_fields.params.load_tokens);
        *stats_changed = true;
        self.enqueue(to, request);
        true
    }

    /// Returns whether a replica's pool can hold a request of `limit` tokens.
    fn pool_can_hold(&self, replica: usize, limit: u32) -> bool {
        let kv = &self.replicas[replica].kv;
        let in_flight = self.config.limits.request_tokens_in_flight();
        self.config.kv.spec.blocks_of_request(limit, in_flight) <= kv.counts().pool
    }

    /// Handles a replica whose executors have been restored. Requests that no longer fit its KV pool migrate
    /// or fail; waiting requests of replicas that are still failed may migrate to it.
    pub(super) fn handle_executors_ready(
        &mut self,
        replica: Replica,
        blocks: u32,
        capture_sizes: Vec<u32>,
        effects: &mut Vec<SchedulerEffect>,
    ) {
        let index = usize::from(replica.0);
        let restored = &mut self.replicas[index];
        if restored.is_ready() {
            return;
        }
        flush_kv_events(replica, restored, effects);
        restored.on_executors_restored(&self.config.kv, blocks, capture_sizes);
        restored.kv.set_time(self.now_ms);
        let state = &self.replicas[index].state;
        let waiting = state.waiting.slots().map(|slot| (slot, &state.requests[slot]));
        let too_large = waiting.filter(|(_, request)| !self.pool_can_hold(index, request.limit));
        let too_large: Vec<_> = too_large.map(|(slot, request)| (slot, request.id)).collect();
        for (slot, id) in too_large {
            if self.config.lockstep || !self.migrate_request(index, slot) {
                self.finish_request(id, FinishReason::Error(RequestError::ReplicaUnavailable));
            }
        }
        for failed in 0..self.replicas.len() {
            self.migrate_queue(failed);
        }
    }

    /// Fails the waiting requests of replicas that have been failed for longer than the failure timeout.
    pub(super) fn fail_expired_requests(&mut self) {
        let timeout = self.config.limits.failure_timeout_ms;
        for index in 0..self.replicas.len() {
            let replica = &self.replicas[index];
            let expired = |since: u64| self.now_ms.saturating_sub(since) >= timeout;
            if !replica.failed_at_ms.is_some_and(expired) || replica.state.waiting.is_empty() {
                continue;
            }
            let waiting = replica.state.waiting.slots();
            let ids: Vec<_> = waiting.map(|slot| replica.state.requests[slot].id).collect();
            for id in ids {
                self.finish_request(id, FinishReason::Error(RequestError::ReplicaUnavailable));
            }
        }
    }
}
