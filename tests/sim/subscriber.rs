//! A subscriber of KV events that vanishes and comes back. I14 with gaps: its publisher keeps the last batches and numbers
//! them; who returns is told those it missed, or, where they are gone, the whole index. Whenever it has heard all, it
//! believes to be cached what the index holds.

use crate::introspection;
use crate::invariant::{CheckResult, InvariantViolation, ensure};
use crate::world::SimWorld;
use protocol::{BlockHash, KvEvent, Replica};
use std::collections::{BTreeSet, VecDeque};

/// What an event does to the set of cached blocks.
#[derive(Debug, Clone)]
enum IndexChange {
    Stored(Vec<BlockHash>),
    Removed(Vec<BlockHash>),
    Cleared,
}

/// How somebody who returns has caught up.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
enum CatchUpKind {
    FromReplay,
    FromSnapshot,
}

/// A subscriber, and what its publisher keeps for it.
#[derive(Debug)]
pub(crate) struct SimSubscriber {
    cached_hashes: BTreeSet<BlockHash>,
    /// Whether it is there.
    connected: bool,
    /// Batches published so far, and of these the ones it has heard of.
    batches_published: u64,
    batches_received: u64,
    /// The last of them.
    replay_buffer: VecDeque<Vec<IndexChange>>,
    replay_capacity: usize,
}

impl SimSubscriber {
    /// Somebody who listens from the beginning; its publisher keeps so many batches.
    pub(crate) fn new(room: usize) -> Self {
        let (believes, kept) = (BTreeSet::new(), VecDeque::new());
        Self {
            cached_hashes: believes,
            connected: true,
            batches_published: 0,
            batches_received: 0,
            replay_buffer: kept,
            replay_capacity: room,
        }
    }

    /// A batch of events is published.
    pub(crate) fn publish(&mut self, events: &[KvEvent]) {
        let changes = events.iter().map(|event| match event {
            KvEvent::Stored { hashes, .. } => IndexChange::Stored(hashes.clone()),
            KvEvent::Removed { hashes, .. } => IndexChange::Removed(hashes.clone()),
            KvEvent::Cleared => IndexChange::Cleared,
        });
        self.replay_buffer.push_back(changes.collect());
        self.batches_published += 1;
        if self.connected {
            self.replay();
        }
        while self.replay_buffer.len() > self.replay_capacity {
            self.replay_buffer.pop_front();
        }
    }

    /// Hears what it has not heard and the publisher still has.
    fn replay(&mut self) {
        let missed = (self.batches_published - self.batches_received) as usize;
        for changes in self.replay_buffer.iter().skip(self.replay_buffer.len() - missed) {
            for change in changes {
                match change {
                    IndexChange::Stored(hashes) => self.cached_hashes.extend(hashes),
                    IndexChange::Removed(hashes) => hashes.iter().for_each(|hash| {
                        self.cached_hashes.remove(hash);
                    }),
                    IndexChange::Cleared => self.cached_hashes.clear(),
                }
            }
        }
        self.batches_received = self.batches_published;
    }

    /// Comes back and catches up, from `listing` where the publisher keeps too little.
    fn reconnect(&mut self, listing: &BTreeSet<BlockHash>) -> CatchUpKind {
        self.connected = true;
        if (self.batches_published - self.batches_received) as usize <= self.replay_buffer.len() {
            self.replay();
            return CatchUpKind::FromReplay;
        }
        (self.cached_hashes, self.batches_received) = (listing.clone(), self.batches_published);
        CatchUpKind::FromSnapshot
    }
}

impl SimWorld {
    /// Each replica's subscriber, in worlds that have them.
    pub(crate) fn add_subscribers(&mut self) {
        if self.config.faults.subscriber_disconnect > 0 {
            for site in &mut self.replicas {
                site.subscriber = Some(SimSubscriber::new(self.rng.pick(&[0, 1, 4, 40])));
            }
        }
    }

    /// Subscribers vanish or return; what they believe then is the index.
    pub(crate) fn churn_subscribers(&mut self) -> CheckResult {
        for replica in 0..self.replicas.len() {
            if self.rng.chance_per_mille(self.config.faults.subscriber_disconnect) {
                let back = self.reconnect_subscriber(replica)?;
                if let Some(subscriber) = &mut self.replicas[replica].subscriber {
                    subscriber.connected = back;
                }
            }
        }
        Ok(())
    }

    /// All are there in the end.
    pub(crate) fn reconnect_subscribers(&mut self) -> CheckResult {
        (0..self.replicas.len())
            .try_for_each(|replica| self.reconnect_subscriber(replica).map(drop))
    }

    /// A replica's subscriber hears all; whether it was away.
    fn reconnect_subscriber(&mut self, replica: usize) -> Result<bool, InvariantViolation> {
        let Some(subscriber) = &mut self.replicas[replica].subscriber else { return Ok(false) };
        let index = introspection::indexed_hashes(&self.scheduler, Replica(replica as u16));
        let was_away = !subscriber.connected;
        if was_away {
            match subscriber.reconnect(&index) {
                CatchUpKind::FromReplay => self.counts.replays += 1,
                CatchUpKind::FromSnapshot => self.counts.snapshots += 1,
            }
        }
        let believes = &subscriber.cached_hashes;
        ensure!("I14", *believes == index, "replica {replica}: {believes:?}, index {index:?}");
        Ok(was_away)
    }
}

#[test]
fn subscriber_misses_batches_outside_the_replay_buffer() {
    let stored = |hash| {
        let (hashes, tokens, extra_keys) = (vec![BlockHash(hash)], vec![1], vec![Vec::new()]);
        [KvEvent::Stored { hashes, parent: None, tokens, extra_keys, group: 0 }]
    };
    let index: BTreeSet<_> = (1..=3).map(BlockHash).collect();
    for (room, caught) in [(2, CatchUpKind::FromReplay), (1, CatchUpKind::FromSnapshot)] {
        let mut subscriber = SimSubscriber::new(room);
        subscriber.publish(&stored(1));
        subscriber.connected = false;
        subscriber.publish(&stored(2));
        subscriber.publish(&stored(3));
        assert_ne!(subscriber.cached_hashes, index);
        assert_eq!(subscriber.reconnect(&index), caught);
        assert_eq!(subscriber.cached_hashes, index);
        subscriber.publish(&[KvEvent::Removed { hashes: vec![BlockHash(2)], group: 0 }]);
        assert_ne!(subscriber.cached_hashes, index);
    }
}
