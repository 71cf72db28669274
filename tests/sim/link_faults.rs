//! Broken links. A link is a byte stream, so it never loses a single message: after some point it loses all
//! messages, in one direction or in both, until the failure is detected.

use crate::event_queue::SimEvent;
use crate::invariant::CheckResult;
use crate::world::SimWorld;

/// Maximum time in milliseconds until the engine detects a link that loses only batches to the executors.
const LINK_FAILURE_SEEN_MS: u64 = 800;

impl SimWorld {
    /// Breaks the link to a replica's executors; only messages that have already arrived are kept.
    ///
    /// If both directions break, the executors read EOF and exit, and outputs that are computed or queued are
    /// lost. If one direction breaks, the executors run and send the outputs of the batches they have
    /// received, while batches sent from now on are lost until the failure is detected.
    pub(crate) fn break_link(&mut self, replica: usize) -> CheckResult {
        self.counts.broken_links += 1;
        let one_way = self.rng.chance_per_mille(self.config.faults.one_way_break);
        self.trace.record(self.now_ms, "link broken", &[replica as u64, one_way.into()]);
        let replica_state = &mut self.replicas[replica];
        if !one_way {
            replica_state.broken_links.push(replica_state.incarnation);
            return self.crash(replica);
        }
        self.counts.one_way_breaks += 1;
        let incarnation = replica_state.incarnation;
        let at_ms = self.now_ms + 1 + self.rng.below(LINK_FAILURE_SEEN_MS);
        self.events.add(at_ms, SimEvent::LinkFailureSeen { replica, incarnation });
        if let Some(executor) = &mut self.replicas[replica].executor {
            executor.link_broken = true;
        }
        self.start_next_step(replica);
        Ok(())
    }

    /// Whether messages that arrive on a link are lost because the link is broken. `link` counts the executor
    /// starts of the replica up to the executors that use the link.
    pub(crate) fn is_link_broken(&self, replica: usize, link: u32) -> bool {
        self.replicas[replica].broken_links.contains(&link)
    }

    /// Counts a batch or output that was lost on a broken link.
    pub(crate) fn count_lost_frame(&mut self, replica: usize) {
        self.counts.lost_frames += 1;
        self.trace.record(self.now_ms, "frame lost", &[replica as u64]);
    }
}
