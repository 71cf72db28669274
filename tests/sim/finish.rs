//! The end of a world: everything healed and nothing left to happen. I6: nothing is held. I12:
//! nobody waits for ever. I14: subscribers know the index. I16: every stale output was dropped.

use crate::broken::{Checked, ensure};
use crate::client::Stage;
use crate::inside;
use crate::world::World;
use protocol::{BlockHash, Replica};
use std::collections::BTreeSet;

impl World {
    /// Checks the engine after its last event.
    pub(crate) fn finish(&mut self) -> Checked {
        for client in &self.clients {
            let (id, stage) = (client.id().0, client.stage);
            ensure!("I12", stage == Stage::Done, "request {id} is {stage:?} and nothing happens");
        }
        ensure!("I6", self.engine.is_idle(), "all requests are done, the engine is not idle");
        self.engine.check();
        self.gather_subscribers()?;
        for (index, site) in self.sites.iter().enumerate() {
            let stats = &site.stats;
            let held = (stats.running, stats.waiting, stats.waiting_tokens, stats.steps_in_flight);
            ensure!("I6", held == (0, 0, 0, 0), "replica {index} is idle with {stats:?}");
            let blocks = stats.blocks;
            ensure!("I6", blocks.in_use + blocks.reserved == 0, "replica {index}: {blocks:?}");
            let (dropped, stale) = (stats.outputs_dropped_total, site.stale_outputs);
            ensure!("I16", dropped == stale, "{stale} stale outputs, {dropped} dropped");
            let known: BTreeSet<BlockHash> = site.mirror.hashes().collect();
            let indexed = inside::indexed(&self.engine, Replica(index as u16));
            ensure!("I14", known == indexed, "replica {index}: {known:?}, index {indexed:?}");
            let cached = blocks.cached as usize;
            ensure!("I14", known.len() == cached, "{} announced, {cached} cached", known.len());
            self.tally.preemptions += stats.preemptions_total;
            self.tally.stored += site.mirror.stored;
            self.tally.removed += site.mirror.removed;
            self.tally.stays += site.stays;
        }
        let told: u64 = self.clients.iter().map(|c| u64::from(c.delivered)).sum();
        let made: u64 = self.sites.iter().map(|s| s.stats.generated_tokens_total).sum();
        ensure!("I9", told == made, "{made} tokens counted, {told} delivered");
        self.trace.note(self.now_ms, "end", &[self.tally.steps, self.tally.tokens]);
        Ok(())
    }
}
