//! Backlog of a KV-event publisher: events that did not fit in its full queue, coalesced per block.
//!
//! However long the publisher is blocked, a backlog has entries for at most twice the blocks of the KV pool:
//! announced blocks that have been removed since they were announced, and cached blocks that have not been
//! announced. A step only adds its own events, so its cost does not depend on the number of cached blocks.

use super::announced_blocks::{AnnouncedBlock, BlockHashWithGroupId};
use protocol::KvEvent;
use std::collections::HashMap;

/// Difference between the blocks that the publisher has announced and the blocks that are cached.
#[derive(Debug)]
pub struct EventBacklog {
    /// Whether subscribers must clear all announced blocks before the other changes.
    cleared: bool,
    blocks: HashMap<BlockHashWithGroupId, BacklogEntry>,
    /// Total memory usage of the blocks in the field `stored` of all entries, in bytes.
    bytes: u64,
    /// Number of changes added so far, which is the order number of the next change.
    changes: u64,
}

/// Coalesced changes of one block; at least one field is set.
#[derive(Debug, Default)]
struct BacklogEntry {
    /// Order number of the removal of an announced block; `None` = not removed, or never announced.
    removed: Option<u64>,
    /// State of the block, if it was stored (after the removal, if there was one) and is still cached.
    stored: Option<Box<AnnouncedBlock>>,
}

/// Coalesced changes of a backlog, in an order that subscribers accept: removals with children first, then
/// stores with parents first.
pub(super) struct CoalescedChanges {
    /// Whether subscribers must clear all announced blocks before the other changes.
    pub(super) cleared: bool,
    /// Keys of the removed blocks.
    pub(super) removed: Vec<BlockHashWithGroupId>,
    /// Stored blocks, each with its key.
    pub(super) stored: Vec<(BlockHashWithGroupId, AnnouncedBlock)>,
}

impl EventBacklog {
    /// Creates an empty backlog. Reserves space for a KV pool of `blocks` blocks, so that adding events does
    /// not reallocate.
    pub fn new(blocks: u32) -> Self {
        let blocks = HashMap::with_capacity(2 * blocks as usize);
        Self { cleared: false, blocks, bytes: 0, changes: 0 }
    }

    /// Adds an event that did not fit in the queue.
    pub fn add(&mut self, event: &KvEvent) {
        match event {
            KvEvent::Cleared => {
                self.cleared = true;
                self.blocks.clear();
                self.bytes = 0;
            }
            KvEvent::Removed { hashes, group } => {
                for &hash in hashes {
                    self.remove(BlockHashWithGroupId { group_id: *group, hash });
                }
            }
            KvEvent::Stored { group, .. } => {
                for (hash, block) in AnnouncedBlock::blocks_of(event, self.changes) {
                    self.changes = block.order + 1;
                    self.bytes += block.bytes();
                    let key = BlockHashWithGroupId { group_id: *group, hash };
                    let entry = self.blocks.entry(key).or_default();
                    let previous = entry.stored.replace(Box::new(block));
                    self.bytes -= previous.map_or(0, |block| block.bytes());
                }
            }
        }
    }

    fn remove(&mut self, key: BlockHashWithGroupId) {
        let order = self.changes;
        self.changes += 1;
        let entry = self.blocks.entry(key).or_default();
        let stored = entry.stored.take();
        self.bytes -= stored.as_ref().map_or(0, |block| block.bytes());
        if stored.is_none() {
            entry.removed = Some(order);
        } else if entry.removed.is_none() {
            self.blocks.remove(&key); // The block was stored and removed without being announced.
        }
    }

    /// Memory usage of the backlog, in bytes; counted for the byte limit of the publisher's queue.
    pub(super) fn bytes(&self) -> u64 {
        let entry_bytes = size_of::<(BlockHashWithGroupId, BacklogEntry)>();
        self.bytes + (self.blocks.capacity() * entry_bytes) as u64
    }

    /// Number of blocks with pending changes.
    pub fn len(&self) -> usize {
        self.blocks.len()
    }

    /// Whether no block has pending changes; a pending clear is not considered.
    pub fn is_empty(&self) -> bool {
        self.blocks.is_empty()
    }

    /// Returns the changes in an order that subscribers accept: removals with children first, then stores
    /// with parents first.
    pub(super) fn coalesce(self) -> CoalescedChanges {
        let (mut removed, mut stored) = (Vec::new(), Vec::new());
        for (key, entry) in self.blocks {
            removed.extend(entry.removed.map(|order| (order, key)));
            stored.extend(entry.stored.map(|block| (key, *block)));
        }
        removed.sort_unstable_by_key(|(order, _)| *order);
        stored.sort_unstable_by_key(|(_, block): &(_, AnnouncedBlock)| block.order);
        let removed = removed.into_iter().map(|(_, key)| key).collect();
        CoalescedChanges { cleared: self.cleared, removed, stored }
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use protocol::BlockHash;

    fn stored(parent: Option<u64>, hashes: &[u64]) -> KvEvent {
        KvEvent::Stored {
            hashes: hashes.iter().copied().map(BlockHash).collect(),
            parent: parent.map(BlockHash),
            tokens: hashes.iter().map(|hash| *hash as u32).collect(),
            extra_keys: vec![Vec::new(); hashes.len()],
            group: 0,
        }
    }

    fn removed(hashes: &[u64]) -> KvEvent {
        KvEvent::Removed { hashes: hashes.iter().copied().map(BlockHash).collect(), group: 0 }
    }

    /// Block hashes, each with its parent.
    type BlocksWithParents = Vec<(u64, Option<u64>)>;

    /// Returns the coalesced changes of `events`: whether all blocks are cleared, the removed hashes, the
    /// stored blocks.
    fn coalesced(events: &[KvEvent]) -> (bool, Vec<u64>, BlocksWithParents) {
        let mut backlog = EventBacklog::new(4);
        for event in events {
            backlog.add(event);
        }
        let CoalescedChanges { cleared, removed, stored } = backlog.coalesce();
        let parent = |block: &AnnouncedBlock| block.parent.map(|parent| parent.0);
        let stored = stored.iter().map(|(key, block)| (key.hash.0, parent(block))).collect();
        (cleared, removed.iter().map(|key| key.hash.0).collect(), stored)
    }

    #[test]
    fn backlog_holds_only_the_difference() {
        let stored_and_removed = coalesced(&[stored(None, &[1, 2]), removed(&[2]), removed(&[1])]);
        assert_eq!(stored_and_removed, (false, vec![], vec![]));
        let chain = coalesced(&[stored(None, &[1, 2]), stored(Some(2), &[3]), removed(&[3])]);
        assert_eq!(chain, (false, vec![], vec![(1, None), (2, Some(1))]));
        // Blocks 4 and 5, a child of 4, were announced before. Both are removed; then 4 is stored again, with
        // a new child 6.
        let again = coalesced(&[removed(&[5, 4]), stored(None, &[4]), stored(Some(4), &[6])]);
        assert_eq!(again, (false, vec![5, 4], vec![(4, None), (6, Some(4))]));
        let twice = coalesced(&[removed(&[4]), stored(None, &[4]), removed(&[4])]);
        assert_eq!(twice, (false, vec![4], vec![]));
        let cleared =
            coalesced(&[removed(&[4]), stored(None, &[1]), KvEvent::Cleared, stored(None, &[2])]);
        assert_eq!(cleared, (true, vec![], vec![(2, None)]));
    }

    #[test]
    fn backlog_is_bounded_by_the_differing_blocks() {
        let mut backlog = EventBacklog::new(2);
        for round in 1..1_000 {
            backlog.add(&stored(None, &[2 * round, 2 * round + 1]));
            backlog.add(&removed(&[2 * round, 2 * round + 1]));
        }
        assert!(backlog.is_empty() && backlog.bytes == 0);
        backlog.add(&stored(None, &[1, 2]));
        backlog.add(&stored(None, &[1]));
        assert_eq!(
            backlog.bytes,
            2 * (size_of::<AnnouncedBlock>() as u64 + 4),
            "each block once, with its token"
        );
        backlog.add(&KvEvent::Cleared);
        assert_eq!(backlog.bytes, 0);
    }
}
