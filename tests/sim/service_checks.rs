//! What clients may expect of the service as a whole. I11: nobody is overtaken. I18: the queue is
//! bounded. I4: hits are on blocks that were announced under the right salt. A5: what was computed is
//! found again. F8, F39: nobody waits for a dead replica longer than need be.

use crate::broken::{Checked, ensure};
use crate::client::{Client, Stage};
use crate::world::{Site, World};
use protocol::Batch;

impl World {
    /// A5: all full blocks of a request that ended well can be found by the next turn, generated
    /// ones too, unless short hashes collided or the cache was cleared.
    pub(crate) fn check_found_again(&self, index: usize) -> Checked {
        let kv = &self.setup.engine.kv;
        if !kv.caching || kv.hash_bits < 64 || self.cleared || self.losing {
            return Ok(());
        }
        let (client, size) = (&self.clients[index], self.setup.block_tokens());
        let salt = client.submit.extra.as_ref().and_then(|extra| extra.salt.as_deref());
        let full = (client.text.len() as u32 - 1) / size;
        let found = self.sites.iter().any(|s| s.mirror.finds(&client.text, full, size, salt));
        ensure!("A5", found, "request {}: not all of its {full} blocks are findable", index + 1);
        Ok(())
    }

    /// I11: nobody starts in front of somebody on the same replica who came earlier with no worse
    /// priority. Replicas are known where there is one, or where the user chose.
    pub(crate) fn check_order(&mut self, index: usize, batch: &Batch) -> Checked {
        let here = |client: &Client| {
            self.sites.len() == 1
                || client.submit.replica.is_some_and(|r| usize::from(r.0) == index)
        };
        for row in batch.rows.iter().filter(|row| row.init.is_some()) {
            let at = row.request.0 as usize - 1;
            self.clients[at].started = true;
            let first = (self.clients[at].submit.priority, at);
            let overtaken = self.clients.iter().enumerate().find(|(other, client)| {
                let waits = client.stage == Stage::Live && !client.started;
                waits && (client.submit.priority, *other) < first && here(client)
            });
            let overtaken = overtaken.map(|(_, client)| client.id().0);
            ensure!("I11", overtaken.is_none(), "request {} overtakes {overtaken:?}", at + 1);
        }
        Ok(())
    }

    /// I18: the queue stays within its cap. Requests that started and came back are not counted.
    pub(crate) fn check_queue(&self) -> Checked {
        let cap = self.setup.engine.limits.requests_waiting as usize;
        if cap < self.clients.len() {
            let waits = |client: &&Client| client.stage == Stage::Live && !client.started;
            let waiting = self.clients.iter().filter(waits).count();
            ensure!("I18", waiting <= cap, "{waiting} requests wait, the cap is {cap}");
        }
        Ok(())
    }

    /// F39: the queue of a lost replica moves to those that are left, pinned requests excepted.
    pub(crate) fn check_moved(&self) -> Checked {
        let kv = &self.setup.engine.kv;
        let refuge = |site: &Site| site.lost_at_ms.is_none() && site.blocks == kv.blocks;
        if self.setup.engine.lockstep || !self.sites.iter().any(refuge) {
            return Ok(());
        }
        let lost = self.sites.iter().enumerate().filter(|(_, site)| site.lost_at_ms.is_some());
        for (index, site) in lost {
            let pinned = |client: &&Client| {
                let here = client.submit.replica.is_some_and(|r| usize::from(r.0) == index);
                client.stage == Stage::Live && here
            };
            let pinned = self.clients.iter().filter(pinned).count() as u32;
            let waiting = site.stats.waiting;
            ensure!("F39", waiting <= pinned, "{waiting} wait for lost {index}, {pinned} pinned");
        }
        Ok(())
    }

    /// Promise 1: nobody waits longer for a lost replica than the configured time.
    pub(crate) fn check_patience(&self) -> Checked {
        let timeout_ms = self.setup.engine.limits.loss_timeout_ms;
        let gone = |at_ms: Option<u64>| at_ms.is_some_and(|at| self.now_ms - at >= timeout_ms);
        for (index, _) in self.sites.iter().enumerate().filter(|(_, site)| gone(site.lost_at_ms)) {
            let here = |client: &&Client| {
                let pinned = client.submit.replica.is_some_and(|r| usize::from(r.0) == index);
                client.stage == Stage::Live && (pinned || self.sites.len() == 1)
            };
            let waiting = self.clients.iter().find(here).map(|client| client.id().0);
            ensure!("F8", waiting.is_none(), "{waiting:?} still waits for lost replica {index}");
        }
        Ok(())
    }

    /// I4: a request that starts behind position 0 starts on blocks that its salt may find.
    pub(crate) fn check_hits(&mut self, index: usize, batch: &Batch) -> Checked {
        let size = self.setup.block_tokens();
        for row in batch.rows.iter().filter(|row| row.init.is_some() && row.start > 0) {
            let client = &self.clients[row.request.0 as usize - 1];
            let salt = client.submit.extra.as_ref().and_then(|extra| extra.salt.as_deref());
            let (id, start) = (row.request.0, row.start);
            ensure!("I4", start % size == 0, "request {id} starts at {start} inside a block");
            let found = self.sites[index].mirror.finds(&client.text, start / size, size, salt);
            ensure!("I4", found, "request {id} starts at {start}, which nobody has announced");
            self.tally.hits += 1;
        }
        Ok(())
    }
}
