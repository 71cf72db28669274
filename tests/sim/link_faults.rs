//! Links that break. A stream loses nothing in the middle: what is lost is everything behind a point, in one direction
//! or in both, until somebody notices.

use crate::event_queue::SimEvent;
use crate::invariant::CheckResult;
use crate::world::SimWorld;

/// Longest time in which nobody notices that a link carries replies only.
const LINK_FAILURE_SEEN_MS: u64 = 800;

impl SimWorld {
    /// The link to a replica's executors breaks behind what has arrived so far.
    ///
    /// Both ways: the executors see the end and go, what they had computed and queued is lost. One way: they go on with
    /// what they have and answer it, while the scheduler sends more, until the silence is noticed.
    pub(crate) fn break_link(&mut self, replica: usize) -> CheckResult {
        self.counts.broken_links += 1;
        let half = self.rng.chance_per_mille(self.config.faults.one_way_break);
        self.trace.record(self.now_ms, "cut", &[replica as u64, half.into()]);
        let site = &mut self.replicas[replica];
        if !half {
            site.broken_links.push(site.incarnation);
            return self.crash(replica);
        }
        self.counts.one_way_breaks += 1;
        let incarnation = site.incarnation;
        let at_ms = self.now_ms + 1 + self.rng.below(LINK_FAILURE_SEEN_MS);
        self.events.add(at_ms, SimEvent::LinkFailureSeen { replica, incarnation });
        if let Some(executor) = &mut self.replicas[replica].executor {
            executor.link_broken = true;
        }
        self.start_next_step(replica);
        Ok(())
    }

    /// Whether what comes on a link is lost.
    pub(crate) fn is_link_broken(&self, replica: usize, link: u32) -> bool {
        self.replicas[replica].broken_links.contains(&link)
    }

    /// A batch or a reply never arrives.
    pub(crate) fn count_lost_frame(&mut self, replica: usize) {
        self.counts.lost_frames += 1;
        self.trace.record(self.now_ms, "frame lost", &[replica as u64]);
    }
}
