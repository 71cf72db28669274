//! Checks of the service that requests get. I11: no request is overtaken. I18: the queue length is bounded.
//! I4: prefix hits use blocks stored under the request's cache salt. A5: computed blocks stay prefix hits.
//! F8, F39: no request waits for a failed replica longer than necessary.

use crate::client::{ClientStage, SimClient};
use crate::invariant::{CheckResult, ensure};
use crate::world::{SimReplica, SimWorld};
use protocol::Batch;

/// Number of preemptions after which a request is no longer preemptible.
const SHARING_PREEMPTIONS: u32 = 4;

impl SimWorld {
    /// Checks A5: all full blocks of a successfully finished request, output tokens included, are prefix hits
    /// for a prompt that continues the request, unless short hashes collided or the cache was cleared. Requests
    /// that are no longer preemptible do not share the blocks of their windows.
    pub(crate) fn check_blocks_stay_cached(&self, index: usize, preemptions: u32) -> CheckResult {
        let kv = &self.config.scheduler.kv;
        let has_windows = self.config.kv_kinds().any(|kind| kind.window().is_some());
        if has_windows && preemptions >= SHARING_PREEMPTIONS {
            return Ok(());
        }
        if !kv.caching || kv.hash_bits < 64 || self.cleared || self.failure_in_tick {
            return Ok(());
        }
        let (client, size) = (&self.clients[index], self.config.block_tokens());
        let kinds: Vec<_> = self.config.kv_kinds().collect();
        let salt = client.submit.extra_keys.as_ref().and_then(|extra| extra.salt.as_deref());
        let full = (client.known_tokens.len() as u32 - 1) / size;
        let found = self
            .replicas
            .iter()
            .any(|s| s.mirror.has_prefix(&client.known_tokens, full, size, salt, &kinds));
        ensure!("A5", found, "request {}: not all of its {full} blocks are cached", index + 1);
        Ok(())
    }

    /// Checks I11: no request starts before a request on the same replica that arrived earlier and has equal
    /// or better priority. The replica of a request is known if there is only one replica, or if the client
    /// selected the replica.
    pub(crate) fn check_service_order(&mut self, index: usize, batch: &Batch) -> CheckResult {
        let on_replica = |client: &SimClient| {
            self.replicas.len() == 1
                || client.submit.replica.is_some_and(|r| usize::from(r.0) == index)
        };
        for row in batch.rows.iter().filter(|row| row.seq_init.is_some()) {
            let at = row.request.0 as usize - 1;
            self.clients[at].started = true;
            let first = (self.clients[at].submit.priority, at);
            let overtaken = self.clients.iter().enumerate().find(|(other, client)| {
                let waits = client.stage == ClientStage::Live && !client.started;
                waits && (client.submit.priority, *other) < first && on_replica(client)
            });
            let overtaken = overtaken.map(|(_, client)| client.id().0);
            ensure!("I11", overtaken.is_none(), "request {} overtakes {overtaken:?}", at + 1);
        }
        Ok(())
    }

    /// Checks I18: the waiting queue is not longer than its limit. Preempted requests are not counted.
    pub(crate) fn check_queue_limits(&self) -> CheckResult {
        let cap = self.config.scheduler.limits.max_waiting_requests as usize;
        if cap < self.clients.len() {
            let waits = |client: &&SimClient| client.stage == ClientStage::Live && !client.started;
            let waiting = self.clients.iter().filter(waits).count();
            ensure!("I18", waiting <= cap, "{waiting} requests wait, the cap is {cap}");
        }
        Ok(())
    }

    /// Checks F39: when a replica has failed, its waiting requests move to the remaining replicas, except for
    /// requests that are pinned to the failed replica.
    pub(crate) fn check_queue_migration(&self) -> CheckResult {
        let kv = &self.config.scheduler.kv;
        let available = |replica_state: &SimReplica| {
            replica_state.failed_at_ms.is_none() && replica_state.blocks == kv.blocks
        };
        if self.config.scheduler.lockstep || !self.replicas.iter().any(available) {
            return Ok(());
        }
        let failed = self
            .replicas
            .iter()
            .enumerate()
            .filter(|(_, replica_state)| replica_state.failed_at_ms.is_some());
        for (index, replica_state) in failed {
            let pinned = |client: &&SimClient| {
                let selected = client.submit.replica.is_some_and(|r| usize::from(r.0) == index);
                client.stage == ClientStage::Live && selected
            };
            let pinned = self.clients.iter().filter(pinned).count() as u32;
            let waiting = replica_state.stats.waiting;
            ensure!(
                "F39",
                waiting <= pinned,
                "{waiting} wait for failed replica {index}, {pinned} pinned"
            );
        }
        Ok(())
    }

    /// Checks F8: no request waits for a failed replica longer than the configured timeout.
    pub(crate) fn check_failure_timeout(&self) -> CheckResult {
        let timeout_ms = self.config.scheduler.limits.failure_timeout_ms;
        let timed_out = |at_ms: Option<u64>| at_ms.is_some_and(|at| self.now_ms - at >= timeout_ms);
        for (index, _) in self
            .replicas
            .iter()
            .enumerate()
            .filter(|(_, replica_state)| timed_out(replica_state.failed_at_ms))
        {
            let waits = |client: &&SimClient| {
                let pinned = client.submit.replica.is_some_and(|r| usize::from(r.0) == index);
                client.stage == ClientStage::Live && (pinned || self.replicas.len() == 1)
            };
            let waiting = self.clients.iter().find(waits).map(|client| client.id().0);
            ensure!("F8", waiting.is_none(), "{waiting:?} still waits for failed replica {index}");
        }
        Ok(())
    }

    /// Checks I4: the first row of a request starts after position 0 only if the blocks before this position
    /// are cached under the request's salt.
    pub(crate) fn check_prefix_hits(&mut self, index: usize, batch: &Batch) -> CheckResult {
        let size = self.config.block_tokens();
        let kinds: Vec<_> = self.config.kv_kinds().collect();
        for row in batch.rows.iter().filter(|row| row.seq_init.is_some() && row.start > 0) {
            let client = &self.clients[row.request.0 as usize - 1];
            let salt = client.submit.extra_keys.as_ref().and_then(|extra| extra.salt.as_deref());
            let (id, start) = (row.request.0, row.start);
            ensure!("I4", start % size == 0, "request {id} starts at {start} inside a block");
            let found = self.replicas[index].mirror.has_prefix(
                &client.known_tokens,
                start / size,
                size,
                salt,
                &kinds,
            );
            ensure!("I4", found, "request {id} starts at {start}, but its prefix is not cached");
            self.counts.hits += 1;
        }
        Ok(())
    }
}
