//! Checks at the end of a simulation, after the faults have ended and all events have happened. I6: no block
//! or sequence slot is in use. I12: no request waits forever. I14: the prefix index that each subscriber
//! built from KV events equals the scheduler's. I16: every stale output was dropped.

use crate::client::ClientStage;
use crate::introspection::{self, GroupBlockHash};
use crate::invariant::{CheckResult, ensure};
use crate::world::SimWorld;
use protocol::Replica;
use std::collections::BTreeSet;

impl SimWorld {
    /// Checks the scheduler, its replicas and the clients after the last event.
    pub(crate) fn check_final_state(&mut self) -> CheckResult {
        for client in &self.clients {
            let (id, stage) = (client.id().0, client.stage);
            ensure!(
                "I12",
                stage == ClientStage::Done,
                "request {id} is {stage:?}, but no event is left"
            );
        }
        ensure!(
            "I6",
            self.scheduler.is_idle(),
            "all requests are done, but the scheduler is not idle"
        );
        self.scheduler.check();
        self.reconnect_subscribers()?;
        for (index, replica_state) in self.replicas.iter().enumerate() {
            let stats = &replica_state.stats;
            let in_use =
                (stats.running, stats.waiting, stats.waiting_tokens, stats.steps_in_flight);
            ensure!("I6", in_use == (0, 0, 0, 0), "replica {index} is idle with {stats:?}");
            let blocks = stats.blocks;
            ensure!("I6", blocks.in_use + blocks.reserved == 0, "replica {index}: {blocks:?}");
            let (dropped, stale) = (stats.outputs_dropped_total, replica_state.stale_outputs);
            ensure!("I16", dropped == stale, "{stale} stale outputs, {dropped} dropped");
            let states = self.scheduler.kv(Replica(index as u16)).states();
            let in_use = (0..states.groups()).map(|group| states.counts(group).in_use).sum::<u32>();
            ensure!("I6", in_use == 0, "replica {index} is idle with {in_use} state slots in use");
            let stored = replica_state.mirror.hashes();
            let stored: BTreeSet<GroupBlockHash> =
                stored.map(|(group, hash)| GroupBlockHash { group, hash }).collect();
            let indexed = introspection::indexed_hashes(&self.scheduler, Replica(index as u16));
            ensure!("I14", stored == indexed, "replica {index}: {stored:?}, index {indexed:?}");
            let cached = blocks.cached as usize;
            ensure!("I14", stored.len() == cached, "{} stored, {cached} cached", stored.len());
            let groups = &stats.kv_group_hits_total;
            let missed: u64 = groups.iter().map(|group| group.missed).sum();
            let hits = stats.prefix_hits_total;
            let of_group = groups.iter().all(|g| g.given == hits && g.offered >= hits);
            let of_kept = groups.iter().filter(|group| group.kind.keeps_all_positions());
            let counted = of_group && of_kept.clone().all(|g| g.offered >= hits + missed);
            ensure!("I4", counted, "replica {index}: {hits} tokens of hits, {groups:?}");
            self.counts.missed_hits += u64::from(missed > 0);
            self.counts.preemptions += stats.preemptions_total;
            self.counts.stored += replica_state.mirror.stored;
            self.counts.removed += replica_state.mirror.removed;
            self.counts.lifetimes += replica_state.lifetimes;
        }
        let delivered: u64 = self.clients.iter().map(|c| u64::from(c.delivered)).sum();
        let generated: u64 = self.replicas.iter().map(|s| s.stats.generated_tokens_total).sum();
        ensure!("I9", delivered == generated, "{generated} tokens counted, {delivered} delivered");
        self.trace.record(self.now_ms, "end", &[self.counts.steps, self.counts.tokens]);
        Ok(())
    }
}
