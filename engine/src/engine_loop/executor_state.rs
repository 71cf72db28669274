//! Reactions of the engine loop to heartbeats, failures and restored executors.

use super::{EngineLoop, EngineLoopState};
use crate::client::ExecutorId;
use crate::replica_handle::ReplicaHandle;
use protocol::{ExecutorCommand, ExecutorReady, Replica};
use scheduler::{ExecutorFailure, SchedulerEvent};
use std::sync::mpsc::SyncSender;

impl EngineLoop {
    /// Handles a heartbeat of an executor: checks whether the oldest step in flight of its replica is
    /// overdue.
    pub(super) fn on_heartbeat(&mut self, sender: ExecutorId, now_ms: u64) {
        self.record_heartbeat(sender);
        let replica_handle = &mut self.replica_handles[usize::from(sender.replica.0)];
        let outcome = replica_handle.on_heartbeat(sender.rank, now_ms);
        outcome.ranks.into_iter().for_each(|rank| self.observers.metrics.executors.straggler(rank));
        if let Some(cause) = outcome.cause {
            let cause = cause + &self.stragglers_of_other_replicas(sender.replica);
            self.fail_executors(sender.replica, ExecutorFailure::StepTimeout, cause);
        }
    }

    /// Describes the ranks of the other replicas in the lockstep group (replicas that execute each step
    /// together) that have not finished their oldest step in flight.
    fn stragglers_of_other_replicas(&self, replica: Replica) -> String {
        let peers = self.engine.lockstep_group(replica).filter(|peer| *peer != replica);
        let unfinished =
            peers.flat_map(|peer| self.replica_handles[usize::from(peer.0)].unfinished());
        let unfinished: Vec<String> = unfinished.map(|rank| rank.0.to_string()).collect();
        if unfinished.is_empty() {
            return String::new();
        }
        format!("; stragglers of other replicas: rank {}", unfinished.join(", rank "))
    }

    /// Marks the executors of a replica as failed. If a replica of the same lockstep group (replicas that
    /// execute each step together) is already marked, the failure is ignored, because it is a consequence of
    /// the first one.
    pub(super) fn fail_executors(
        &mut self,
        replica: Replica,
        failure: ExecutorFailure,
        cause: String,
    ) {
        let is_failing =
            |peer: Replica| self.replica_handles[usize::from(peer.0)].failure.is_some();
        if !self.engine.lockstep_group(replica).any(is_failing) {
            self.replica_handle(replica).failure = Some((failure, cause));
        }
    }

    /// Records a heartbeat of an executor. Every message of the executor counts as a heartbeat: a rank that
    /// finishes steps may be too busy to send heartbeats.
    pub(super) fn record_heartbeat(&self, sender: ExecutorId) {
        let replica_handle = &self.replica_handles[usize::from(sender.replica.0)];
        let rank = replica_handle.ranks().nth(usize::from(sender.rank));
        if let Some(rank) = rank.filter(|_| self.is_current(sender)) {
            self.observers.metrics.executors.heartbeat(rank);
        }
    }

    /// Whether the sender is an executor of a running replica and has the current epoch (executor
    /// generation).
    pub(super) fn is_current(&self, sender: ExecutorId) -> bool {
        let replica_handle = &self.replica_handles[usize::from(sender.replica.0)];
        replica_handle.is_up() && sender.epoch == self.engine.epoch(sender.replica)
    }

    /// Detaches failed executors and returns their replicas with the failure causes. The scheduler recomputes
    /// the requests of these replicas on another replica or, after the restart, on the replacement executors.
    pub(super) fn collect_failures(
        &mut self,
        state: &mut EngineLoopState,
    ) -> Vec<(Replica, String)> {
        let mut failures = Vec::new();
        for replica in (0..self.replica_handles.len() as u16).map(Replica) {
            let Some((failure, cause)) = self.replica_handle(replica).failure.take() else {
                continue;
            };
            for peer in self.engine.lockstep_group(replica) {
                self.replica_handle(peer).fail();
                state.step_clock.executors_failed(peer);
                self.observers.metrics.executors.executors_failed(peer, failure);
            }
            state.events.push(SchedulerEvent::ExecutorsFailed { replica, failure });
            failures.push((replica, cause));
        }
        if !failures.is_empty() {
            self.observers
                .health
                .set_executors_failed(self.replica_handles.iter().any(ReplicaHandle::is_up));
        }
        failures
    }

    /// Attaches the restarted executors of a replica, so that the scheduler sends batches to them.
    pub(super) fn restore_executors(
        &mut self,
        replica: Replica,
        executor: SyncSender<ExecutorCommand>,
        ready: ExecutorReady,
        state: &mut EngineLoopState,
    ) {
        let ExecutorReady { kv_blocks, capture_sizes } = ready;
        self.replica_handle(replica).restore(executor);
        state.events.push(SchedulerEvent::ExecutorsReady {
            replica,
            blocks: kv_blocks,
            capture_sizes,
        });
        let is_up = |peer: Replica| self.replica_handles[usize::from(peer.0)].is_up();
        if self.engine.lockstep_group(replica).all(is_up) {
            self.observers.health.set_executors_restored();
        }
    }
}
