//! A KV-event subscriber that disconnects and reconnects. The publisher keeps the last batches of KV events
//! with their sequence numbers in a replay buffer. A reconnected subscriber receives the missed batches or,
//! if they are no longer in the buffer, a snapshot of the whole prefix index. I14: after the subscriber has
//! received the missed changes, its set of cached blocks equals the prefix index.

use crate::introspection::{self, GroupBlockHash};
use crate::invariant::{CheckResult, InvariantViolation, ensure};
use crate::world::SimWorld;
use protocol::{BlockHash, KvEvent, Replica};
use std::collections::{BTreeSet, VecDeque};

/// Change that a KV event makes to a subscriber's set of cached blocks of a KV group.
#[derive(Debug, Clone)]
enum IndexChange {
    Stored(u8, Vec<BlockHash>),
    Removed(u8, Vec<BlockHash>),
    Cleared,
}

/// Source from which a subscriber gets the changes that it missed: the replay buffer or a snapshot of the
/// prefix index.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
enum CatchUpSource {
    FromReplay,
    FromSnapshot,
}

/// A KV-event subscriber, and the replay buffer of its publisher.
#[derive(Debug)]
pub(crate) struct SimKvEventSubscriber {
    cached_hashes: BTreeSet<GroupBlockHash>,
    /// Whether the subscriber is connected to the publisher.
    connected: bool,
    /// Number of event batches published so far.
    batches_published: u64,
    /// Number of event batches that the subscriber has received.
    batches_received: u64,
    /// The last published event batches, which a reconnected subscriber can still receive.
    replay_buffer: VecDeque<Vec<IndexChange>>,
    replay_capacity: usize,
}

impl SimKvEventSubscriber {
    /// Creates a subscriber that is connected at the start; the publisher keeps the last `capacity` event
    /// batches.
    pub(crate) fn new(capacity: usize) -> Self {
        Self {
            cached_hashes: BTreeSet::new(),
            connected: true,
            batches_published: 0,
            batches_received: 0,
            replay_buffer: VecDeque::new(),
            replay_capacity: capacity,
        }
    }

    /// Publishes a batch of KV events, which a connected subscriber receives.
    pub(crate) fn publish(&mut self, events: &[KvEvent]) {
        let changes = events.iter().map(|event| match event {
            KvEvent::Stored { hashes, group, .. } => IndexChange::Stored(*group, hashes.clone()),
            KvEvent::Removed { hashes, group } => IndexChange::Removed(*group, hashes.clone()),
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

    /// Applies the missed event batches that are still in the replay buffer.
    fn replay(&mut self) {
        let missed = (self.batches_published - self.batches_received) as usize;
        for changes in self.replay_buffer.iter().skip(self.replay_buffer.len() - missed) {
            for change in changes {
                match change {
                    IndexChange::Stored(group, hashes) => {
                        let hashes = hashes.iter();
                        self.cached_hashes
                            .extend(hashes.map(|&hash| GroupBlockHash { group: *group, hash }));
                    }
                    IndexChange::Removed(group, hashes) => hashes.iter().for_each(|hash| {
                        self.cached_hashes.remove(&GroupBlockHash { group: *group, hash: *hash });
                    }),
                    IndexChange::Cleared => self.cached_hashes.clear(),
                }
            }
        }
        self.batches_received = self.batches_published;
    }

    /// Reconnects, and applies the missed changes: from the replay buffer or, if it no longer has all missed
    /// batches, from the prefix index `listing`.
    fn reconnect(&mut self, listing: &BTreeSet<GroupBlockHash>) -> CatchUpSource {
        self.connected = true;
        if (self.batches_published - self.batches_received) as usize <= self.replay_buffer.len() {
            self.replay();
            return CatchUpSource::FromReplay;
        }
        (self.cached_hashes, self.batches_received) = (listing.clone(), self.batches_published);
        CatchUpSource::FromSnapshot
    }
}

impl SimWorld {
    /// Adds a subscriber to each replica, in simulations whose subscribers disconnect.
    pub(crate) fn add_subscribers(&mut self) {
        if self.config.faults.subscriber_disconnect > 0 {
            for replica_state in &mut self.replicas {
                replica_state.subscriber =
                    Some(SimKvEventSubscriber::new(self.rng.pick(&[0, 1, 4, 40])));
            }
        }
    }

    /// Disconnects and reconnects subscribers at random; after a reconnect, a subscriber's set of cached
    /// blocks must equal the prefix index.
    pub(crate) fn churn_subscribers(&mut self) -> CheckResult {
        for replica in 0..self.replicas.len() {
            if self.rng.chance_per_mille(self.config.faults.subscriber_disconnect) {
                let connected = self.reconnect_subscriber(replica)?;
                if let Some(subscriber) = &mut self.replicas[replica].subscriber {
                    subscriber.connected = connected;
                }
            }
        }
        Ok(())
    }

    /// Reconnects all subscribers at the end of the simulation.
    pub(crate) fn reconnect_subscribers(&mut self) -> CheckResult {
        (0..self.replicas.len())
            .try_for_each(|replica| self.reconnect_subscriber(replica).map(drop))
    }

    /// Reconnects a replica's subscriber and compares its set of cached blocks with the prefix index. Returns
    /// whether the subscriber was disconnected.
    fn reconnect_subscriber(&mut self, replica: usize) -> Result<bool, InvariantViolation> {
        let Some(subscriber) = &mut self.replicas[replica].subscriber else { return Ok(false) };
        let index = introspection::indexed_hashes(&self.scheduler, Replica(replica as u16));
        let was_disconnected = !subscriber.connected;
        if was_disconnected {
            match subscriber.reconnect(&index) {
                CatchUpSource::FromReplay => self.counts.replays += 1,
                CatchUpSource::FromSnapshot => self.counts.snapshots += 1,
            }
        }
        let cached_hashes = &subscriber.cached_hashes;
        ensure!(
            "I14",
            *cached_hashes == index,
            "replica {replica}: {cached_hashes:?}, index {index:?}"
        );
        Ok(was_disconnected)
    }
}

#[test]
fn subscriber_misses_batches_outside_the_replay_buffer() {
    let stored = |hash| {
        let (hashes, tokens, extra_keys) = (vec![BlockHash(hash)], vec![1], vec![Vec::new()]);
        [KvEvent::Stored { hashes, parent: None, tokens, extra_keys, group: 0 }]
    };
    let index: BTreeSet<_> =
        (1..=3).map(|hash| GroupBlockHash { group: 0, hash: BlockHash(hash) }).collect();
    for (capacity, caught) in [(2, CatchUpSource::FromReplay), (1, CatchUpSource::FromSnapshot)] {
        let mut subscriber = SimKvEventSubscriber::new(capacity);
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
