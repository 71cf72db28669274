//! One replica: its requests, its cache, its group's generation, and its figures.

use crate::place::{Candidate, Load};
use crate::plan::Plan;
use crate::state::State;
use crate::stats::Requeue;
use crate::{BlockStats, EngineConfig, EngineError, Loss, StepStats};
use kvcache::{Bug, KvCache, KvConfig};
use protocol::{Epoch, Replica, StepTiming};

/// Everything the engine keeps per replica.
#[derive(Debug)]
pub(crate) struct Domain {
    pub(crate) state: State,
    pub(crate) kv: KvCache,
    /// Generation of the executor group.
    pub(crate) epoch: Epoch,
    /// Since when the executors are gone; `None` = they are there.
    pub(crate) lost_at_ms: Option<u64>,
    pub(crate) graph_rows: Vec<u32>,
    pub(crate) load: Load,
    /// The plan in the making; its buffers are reused.
    pub(crate) plan: Plan,
    /// Something changed since the last snapshot.
    pub(crate) changed: bool,
    pub(crate) rows: u32,
    pub(crate) step_tokens: u32,
    pub(crate) timing: StepTiming,
}

impl Domain {
    pub(crate) fn new(replica: Replica, config: &EngineConfig) -> Result<Self, EngineError> {
        let seats = config.limits.seats();
        Ok(Self {
            state: State::new(replica, seats, config.kv.hasher(), config.planted),
            kv: KvCache::new(&config.kv)?,
            epoch: Epoch(1),
            lost_at_ms: None,
            graph_rows: config.graph_rows.clone(),
            load: Load::default(),
            plan: Plan::default(),
            changed: true,
            rows: 0,
            step_tokens: 0,
            timing: StepTiming::default(),
        })
    }

    pub(crate) fn is_ready(&self) -> bool {
        self.lost_at_ms.is_none()
    }

    pub(crate) fn candidate(&self) -> Candidate<'_> {
        Candidate { ready: self.is_ready(), load: self.load, kv: &self.kv }
    }

    /// Keeps the size of the step just sent.
    pub(crate) fn note_step(&mut self) {
        (self.rows, self.step_tokens) = (self.plan.rows.len() as u32, self.plan.tokens());
        self.changed = true;
    }

    /// Forgets what the executors held: every running request will be recomputed from its committed
    /// tokens, and nothing of the former generation will be applied.
    pub(crate) fn lose(&mut self, now_ms: u64, loss: Loss) {
        let planted = self.state.planted;
        self.state.totals.recovered.add(loss, self.state.running.len() as u64);
        if !planted.has(Bug::LossKeepsRunning) {
            self.requeue_running(Requeue::Loss(loss));
        }
        while let Some(flight) = self.state.flights.pop_front() {
            self.state.recycle_rows(flight.rows);
        }
        if !planted.has(Bug::LossKeepsIndex) {
            self.kv.clear();
        }
        if self.is_ready() || !planted.has(Bug::RelapseKeepsEpoch) {
            self.epoch = self.epoch.next();
        }
        self.lost_at_ms.get_or_insert(now_ms);
        self.changed = true;
    }

    /// Sends every running request back to the queue, without a block.
    pub(crate) fn requeue_running(&mut self, why: Requeue) {
        let running: Vec<_> = self.state.running.slots().collect();
        self.state.running.retain(|_| false);
        // Last first, so that the lowest seats are on top again and blocks are freed in reverse order.
        for slot in running.into_iter().rev() {
            self.state.requeue(slot, &mut self.kv, why);
        }
        self.state.blocked = None;
    }

    /// The executors are back with an empty pool of `blocks`.
    pub(crate) fn restore(&mut self, kv: &KvConfig, blocks: u32, graph_rows: Vec<u32>) {
        if blocks != self.kv.counts().pool && blocks > 0 {
            let kv = KvConfig { blocks, ..kv.clone() };
            self.kv = KvCache::new(&kv).expect("a pool like the first one, of another size");
        }
        self.graph_rows = graph_rows;
        self.lost_at_ms = None;
        self.changed = true;
    }

    /// Counters of this moment.
    pub(crate) fn stats(&self, replica: Replica) -> StepStats {
        let (state, totals, counts) = (&self.state, self.state.totals, self.kv.counts());
        let next = state.waiting.slots().next();
        StepStats {
            replica,
            ready: self.is_ready(),
            step: state.step,
            steps_in_flight: state.flights.len() as u32,
            running: state.running.len() as u32,
            waiting: state.waiting.len() as u32,
            waiting_tokens: state.waiting_tokens,
            next_submitted_ms: next.map(|slot| state.requests[slot].cold.asked.submitted_ms),
            blocks: BlockStats {
                pool: counts.pool,
                vacant: counts.vacant,
                cached: counts.cached,
                in_use: counts.in_use,
                reserved: state.reserved,
            },
            rows: self.rows,
            step_tokens: self.step_tokens,
            timing: self.timing,
            steps_total: totals.steps,
            prompt_tokens_total: totals.prompt_tokens,
            prompt_tokens_cached_total: totals.prompt_tokens_cached,
            generated_tokens_total: totals.generated_tokens,
            drafts_total: totals.drafts,
            preemptions_total: totals.preemptions,
            requests_recovered_total: totals.recovered,
            tokens_recomputed_total: totals.recomputed_tokens,
            prefix_queries_total: totals.prefix_queries,
            prefix_hits_total: totals.prefix_hits,
            rows_dropped_total: totals.rows_dropped,
            outputs_dropped_total: totals.outputs_dropped,
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::Limits;
    use protocol::{KvGroup, KvKind, KvSpec};

    #[test]
    fn a_pool_is_as_large_as_the_executors_that_came_back_say() {
        let group = KvGroup { layers: vec![0], kind: KvKind::Full, bytes_per_block: 1 };
        let spec = KvSpec { block_tokens: 4, groups: vec![group] };
        let config = EngineConfig::new(Limits::cpu(8, 100), KvConfig::new(spec, 8, [1, 2]));
        let mut domain = Domain::new(Replica(0), &config).unwrap();
        for (blocks, pool) in [(8, 8), (3, 3), (0, 3), (9, 9)] {
            domain.lose(0, Loss::Exited);
            assert!(!domain.is_ready());
            domain.restore(&config.kv, blocks, Vec::new());
            assert!(domain.is_ready());
            assert_eq!(domain.kv.counts().pool, pool, "0: nothing was said of it");
        }
    }
}
