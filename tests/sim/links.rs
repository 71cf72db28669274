//! Links that break. A stream loses nothing in the middle: what is lost is everything behind a point, in one direction
//! or in both, until somebody notices.

use crate::broken::Checked;
use crate::happening::Happening;
use crate::world::World;

/// Longest time in which nobody notices that a link carries replies only.
const DEAF_MS: u64 = 800;

impl World {
    /// The link to a replica's executors breaks behind what has arrived so far.
    ///
    /// Both ways: the executors see the end and go, what they had computed and queued is lost. One way: they go on with
    /// what they have and answer it, while the scheduler sends more, until the silence is noticed.
    pub(crate) fn cut(&mut self, replica: usize) -> Checked {
        self.tally.cuts += 1;
        let half = self.chance.hits(self.setup.faults.half);
        self.trace.note(self.now_ms, "cut", &[replica as u64, half.into()]);
        let site = &mut self.sites[replica];
        if !half {
            site.severed.push(site.incarnation);
            return self.crash(replica);
        }
        self.tally.halves += 1;
        let incarnation = site.incarnation;
        let at_ms = self.now_ms + 1 + self.chance.below(DEAF_MS);
        self.agenda.add(at_ms, Happening::Deaf { replica, incarnation });
        if let Some(executor) = &mut self.sites[replica].executor {
            executor.deaf = true;
        }
        self.kick(replica);
        Ok(())
    }

    /// Whether what comes on a link is lost.
    pub(crate) fn is_severed(&self, replica: usize, link: u32) -> bool {
        self.sites[replica].severed.contains(&link)
    }

    /// A batch or a reply never arrives.
    pub(crate) fn lose_frame(&mut self, replica: usize) {
        self.tally.lost_frames += 1;
        self.trace.note(self.now_ms, "frame lost", &[replica as u64]);
    }
}
