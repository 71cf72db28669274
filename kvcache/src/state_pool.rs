//! State slots of one state group, and the index of its checkpoints: states at block boundaries from which
//! requests with the same prefix resume.
//!
//! An unreferenced slot is free, or holds a checkpoint. Allocation uses free slots first, lowest first, then evicts
//! the least recently used checkpoint. A hash maps to at most one checkpoint.

use crate::BlockKey;
use crate::block_pool::{BlockPool, EvictionOrder};
use crate::prefix_index::PrefixIndex;
use protocol::{BlockHash, StateSlot};

/// State slots and checkpoints of one state group.
#[derive(Debug, Clone)]
pub(crate) struct StatePool {
    slots: BlockPool,
    index: PrefixIndex,
    /// For each slot: the key of the block at whose end its checkpoint is; `None` = no checkpoint.
    keys: Vec<Option<BlockKey>>,
}

/// State slots of one state group by use; free + checkpoints + in use = pool.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Default)]
pub struct StateSlotCounts {
    /// Number of slots in the pool.
    pub pool: u32,
    /// Unreferenced slots without a checkpoint.
    pub free: u32,
    /// Unreferenced slots with a checkpoint.
    pub checkpoints: u32,
    /// Slots that requests reference.
    pub in_use: u32,
}

impl StatePool {
    pub(crate) fn new(slots: u32, secret: u64) -> Self {
        Self {
            slots: BlockPool::new(slots),
            index: PrefixIndex::new(slots, secret),
            keys: vec![None; slots as usize],
        }
    }

    pub(crate) fn counts(&self) -> StateSlotCounts {
        let (pool, free) = (self.slots.blocks(), self.slots.free_count());
        let checkpoints = self.slots.cached_count();
        StateSlotCounts { pool, free, checkpoints, in_use: pool - free - checkpoints }
    }

    /// Number of slots that can be allocated: free slots and unreferenced checkpoints.
    pub(crate) fn available(&self) -> u32 {
        self.slots.free_count() + self.slots.cached_count()
    }

    /// Returns the checkpoint at the end of the block with key `key`.
    pub(crate) fn find(&self, key: BlockKey) -> Option<StateSlot> {
        let slot = self.index.get(key.hash)?;
        (self.keys[slot as usize] == Some(key)).then_some(StateSlot(slot))
    }

    /// Returns whether no request references a slot.
    pub(crate) fn is_unreferenced(&self, slot: StateSlot) -> bool {
        self.slots.ref_count(slot.0) == 0
    }

    /// Returns whether a slot is unreferenced and has no checkpoint, so that no row may read it.
    pub(crate) fn is_free(&self, slot: StateSlot) -> bool {
        self.is_unreferenced(slot) && self.keys[slot.0 as usize].is_none()
    }

    /// Allocates a slot. The caller has checked that one is available.
    pub(crate) fn allocate(&mut self) -> StateSlot {
        let allocated = self.slots.allocate();
        if allocated.evicted {
            self.drop_checkpoint(allocated.block);
        }
        StateSlot(allocated.block)
    }

    /// Adds a reference to a checkpoint.
    pub(crate) fn pin(&mut self, slot: StateSlot) {
        self.slots.pin(slot.0);
    }

    /// Removes a reference. Without references, the slot is an evictable checkpoint or free.
    pub(crate) fn release(&mut self, slot: StateSlot) {
        let is_checkpoint = self.keys[slot.0 as usize].is_some();
        self.slots.release(slot.0, is_checkpoint, EvictionOrder::Last);
    }

    /// Makes a referenced slot the checkpoint at the end of the block with key `key`, unless the index has a
    /// checkpoint with this hash. Returns whether it became a checkpoint.
    pub(crate) fn publish(&mut self, slot: StateSlot, key: BlockKey) -> bool {
        if self.index.get(key.hash).is_some() {
            return false;
        }
        self.index.insert(key.hash, slot.0);
        self.keys[slot.0 as usize] = Some(key);
        true
    }

    /// Drops the checkpoint at the end of the block with hash `hash`, if there is one.
    pub(crate) fn forget(&mut self, hash: BlockHash) {
        let Some(slot) = self.index.get(hash) else { return };
        self.drop_checkpoint(slot);
        if self.slots.ref_count(slot) == 0 {
            self.slots.free_cached(slot);
        }
    }

    fn drop_checkpoint(&mut self, slot: u32) {
        let key = self.keys[slot as usize].take().expect("an indexed slot has a key");
        self.index.remove(key.hash, slot);
    }

    /// Drops all checkpoints.
    pub(crate) fn clear(&mut self) {
        self.index.clear();
        self.keys.fill(None);
        self.slots.free_all_cached();
    }

    /// Panics unless `refs` are the reference counts of the slots, and index and keys agree.
    pub(crate) fn check(&self, refs: &[u32]) {
        self.slots.check(refs, |slot| self.keys[slot as usize].is_some());
        let keys = self.keys.iter().flatten().count();
        assert_eq!(keys, self.index.len(), "keys and index of checkpoints differ");
        for (hash, slot) in self.index.iter() {
            let key = self.keys[slot as usize].expect("an indexed slot has a key");
            assert_eq!(key.hash, hash, "slot {slot} is indexed under another hash");
        }
    }

    /// Iterates over the hashes of all checkpoints, in no particular order.
    pub(crate) fn hashes(&self) -> impl Iterator<Item = BlockHash> {
        self.index.iter().map(|(hash, _)| hash)
    }
}
