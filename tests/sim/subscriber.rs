//! A subscriber of KV events that vanishes and comes back. I14 with gaps: its publisher keeps the last batches and numbers
//! them; who returns is told those it missed, or, where they are gone, the whole index. Whenever it has heard all, it
//! believes to be cached what the index holds.

use crate::broken::{Broken, Checked, ensure};
use crate::inside;
use crate::world::World;
use protocol::{BlockHash, KvEvent, Replica};
use std::collections::{BTreeSet, VecDeque};

/// What an event does to the set of cached blocks.
#[derive(Debug, Clone)]
enum Change {
    Stored(Vec<BlockHash>),
    Removed(Vec<BlockHash>),
    Cleared,
}

/// How somebody who returns has caught up.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
enum Caught {
    Replayed,
    Listed,
}

/// A subscriber, and what its publisher keeps for it.
#[derive(Debug)]
pub(crate) struct Subscriber {
    believes: BTreeSet<BlockHash>,
    /// Whether it is there.
    listens: bool,
    /// Batches published so far, and of these the ones it has heard of.
    published: u64,
    heard: u64,
    /// The last of them.
    kept: VecDeque<Vec<Change>>,
    room: usize,
}

impl Subscriber {
    /// Somebody who listens from the beginning; its publisher keeps so many batches.
    pub(crate) fn new(room: usize) -> Self {
        let (believes, kept) = (BTreeSet::new(), VecDeque::new());
        Self { believes, listens: true, published: 0, heard: 0, kept, room }
    }

    /// A batch of events is published.
    pub(crate) fn publish(&mut self, events: &[KvEvent]) {
        let changes = events.iter().map(|event| match event {
            KvEvent::Stored { hashes, .. } => Change::Stored(hashes.clone()),
            KvEvent::Removed { hashes, .. } => Change::Removed(hashes.clone()),
            KvEvent::Cleared => Change::Cleared,
        });
        self.kept.push_back(changes.collect());
        self.published += 1;
        if self.listens {
            self.replay();
        }
        while self.kept.len() > self.room {
            self.kept.pop_front();
        }
    }

    /// Hears what it has not heard and the publisher still has.
    fn replay(&mut self) {
        let missed = (self.published - self.heard) as usize;
        for changes in self.kept.iter().skip(self.kept.len() - missed) {
            for change in changes {
                match change {
                    Change::Stored(hashes) => self.believes.extend(hashes),
                    Change::Removed(hashes) => hashes.iter().for_each(|hash| {
                        self.believes.remove(hash);
                    }),
                    Change::Cleared => self.believes.clear(),
                }
            }
        }
        self.heard = self.published;
    }

    /// Comes back and catches up, from `listing` where the publisher keeps too little.
    fn come_back(&mut self, listing: &BTreeSet<BlockHash>) -> Caught {
        self.listens = true;
        if (self.published - self.heard) as usize <= self.kept.len() {
            self.replay();
            return Caught::Replayed;
        }
        (self.believes, self.heard) = (listing.clone(), self.published);
        Caught::Listed
    }
}

impl World {
    /// Each replica's subscriber, in worlds that have them.
    pub(crate) fn subscribe(&mut self) {
        if self.setup.faults.vanish > 0 {
            for site in &mut self.sites {
                site.subscriber = Some(Subscriber::new(self.chance.pick(&[0, 1, 4, 40])));
            }
        }
    }

    /// Subscribers vanish or return; what they believe then is the index.
    pub(crate) fn come_and_go(&mut self) -> Checked {
        for replica in 0..self.sites.len() {
            if self.chance.hits(self.setup.faults.vanish) {
                let back = self.return_subscriber(replica)?;
                if let Some(subscriber) = &mut self.sites[replica].subscriber {
                    subscriber.listens = back;
                }
            }
        }
        Ok(())
    }

    /// All are there in the end.
    pub(crate) fn gather_subscribers(&mut self) -> Checked {
        (0..self.sites.len()).try_for_each(|replica| self.return_subscriber(replica).map(drop))
    }

    /// A replica's subscriber hears all; whether it was away.
    fn return_subscriber(&mut self, replica: usize) -> Result<bool, Broken> {
        let Some(subscriber) = &mut self.sites[replica].subscriber else { return Ok(false) };
        let index = inside::indexed(&self.engine, Replica(replica as u16));
        let was_away = !subscriber.listens;
        if was_away {
            match subscriber.come_back(&index) {
                Caught::Replayed => self.tally.replays += 1,
                Caught::Listed => self.tally.listings += 1,
            }
        }
        let believes = &subscriber.believes;
        ensure!("I14", *believes == index, "replica {replica}: {believes:?}, index {index:?}");
        Ok(was_away)
    }
}

#[test]
fn what_a_replay_leaves_out_is_missed() {
    let stored = |hash| {
        let (hashes, tokens, extra_keys) = (vec![BlockHash(hash)], vec![1], vec![Vec::new()]);
        [KvEvent::Stored { hashes, parent: None, tokens, extra_keys, group: 0 }]
    };
    let index: BTreeSet<_> = (1..=3).map(BlockHash).collect();
    for (room, caught) in [(2, Caught::Replayed), (1, Caught::Listed)] {
        let mut subscriber = Subscriber::new(room);
        subscriber.publish(&stored(1));
        subscriber.listens = false;
        subscriber.publish(&stored(2));
        subscriber.publish(&stored(3));
        assert_ne!(subscriber.believes, index);
        assert_eq!(subscriber.come_back(&index), caught);
        assert_eq!(subscriber.believes, index);
        subscriber.publish(&[KvEvent::Removed { hashes: vec![BlockHash(2)], group: 0 }]);
        assert_ne!(subscriber.believes, index);
    }
}
