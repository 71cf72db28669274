//! State slots of all state groups of one replica, and the checkpoints in them.
//!
//! A checkpoint is made by a fork: the live slot of a request becomes the checkpoint, the request gets a fresh slot,
//! and its next row reads the former and writes the latter. No state is copied. A checkpoint is found only after the
//! output of the row that wrote it has been applied.

use crate::BlockKey;
use crate::state_pool::{StatePool, StateSlotCounts};
use crate::state_slots::{SourcePurpose, StateRow, StateSlots, StateSource};
use protocol::{BlockHash, StateSlot, StateSlotAccess, ThinVec};

/// State slots and checkpoints of all state groups. Each group has a pool of its own; all pools have the same number
/// of slots.
#[derive(Debug, Clone)]
pub struct StateCache {
    pools: Box<[StatePool]>,
    /// Index in `KvSpec::groups` of the first state group.
    first_group: u8,
    block_tokens: u32,
    published_checkpoints: u64,
}

impl StateCache {
    pub(crate) fn new(
        groups: usize,
        first_group: u8,
        slots: u32,
        block_tokens: u32,
        secret: u64,
    ) -> Self {
        let pools = (0..groups).map(|_| StatePool::new(slots, secret)).collect();
        Self { pools, first_group, block_tokens, published_checkpoints: 0 }
    }

    /// Returns whether the model has no state groups.
    #[inline]
    pub fn is_empty(&self) -> bool {
        self.pools.is_empty()
    }

    /// Returns the number of state groups.
    pub fn groups(&self) -> usize {
        self.pools.len()
    }

    /// Returns the use of the slots of state group `group`, counted from the first state group.
    pub fn counts(&self, group: usize) -> StateSlotCounts {
        self.pools[group].counts()
    }

    /// Returns the number of slots that can be allocated in each group.
    pub fn available(&self) -> u32 {
        self.pools.iter().map(StatePool::available).min().unwrap_or(u32::MAX)
    }

    /// Returns whether a slot of a state group is unreferenced and has no checkpoint, so that no row may read it.
    pub fn is_free(&self, group: usize, slot: StateSlot) -> bool {
        self.pools[group].is_free(slot)
    }

    /// Returns how many checkpoints have been made since the start.
    #[inline]
    pub fn published_checkpoints(&self) -> u64 {
        self.published_checkpoints
    }

    /// Returns the longest prefix of at most `blocks` blocks at whose end a group has a checkpoint.
    pub(crate) fn longest_hit(&self, group: usize, blocks: u32, keys: &[BlockKey]) -> u32 {
        let has_checkpoint =
            |blocks: &u32| self.pools[group].find(keys[*blocks as usize - 1]).is_some();
        (1..=blocks).rev().find(has_checkpoint).unwrap_or(0)
    }

    /// Index in `KvSpec::groups` of a state group.
    pub(crate) fn group_id(&self, group: usize) -> u8 {
        self.first_group + group as u8
    }

    /// Returns the number of slots by which a reference to the checkpoint at the end of the block with key `key`
    /// reduces the available slots: 1 if no request references it in a group, otherwise 0.
    pub(crate) fn evictable(&self, key: BlockKey) -> u32 {
        let unreferenced =
            |pool: &StatePool| pool.find(key).is_some_and(|slot| pool.is_unreferenced(slot));
        u32::from(self.pools.iter().any(unreferenced))
    }

    /// Adds a reference to the checkpoint of a prefix hit of `position` tokens, whose last block has the key `key`.
    /// The row at this position will read it.
    pub fn pin(&mut self, slots: &mut StateSlots, key: BlockKey, position: u32) {
        let find = |pool: &mut StatePool| {
            let slot = pool.find(key).expect("a prefix hit ends at a checkpoint");
            pool.pin(slot);
            slot
        };
        let found = self.pools.iter_mut().map(find).collect();
        slots.sources.push(StateSource {
            slots: found,
            position,
            purpose: SourcePurpose::Checkpoint,
        });
    }

    /// Allocates the live slots of a request, and spare slots `with_spare`. The caller has checked that `available`
    /// is at least the number of slots per group.
    pub fn allocate(&mut self, slots: &mut StateSlots, with_spare: bool) {
        slots.live = self.allocate_each();
        if with_spare {
            slots.spare = self.allocate_each();
        }
    }

    fn allocate_each(&mut self) -> Vec<StateSlot> {
        self.pools.iter_mut().map(StatePool::allocate).collect()
    }

    /// Returns the slots that a row reads and writes. If the state before the row is to become a checkpoint and a slot
    /// is available, the row reads the live slots and writes fresh ones; without an available slot, no checkpoint is
    /// made.
    pub fn access(&mut self, slots: &mut StateSlots, row: StateRow) -> ThinVec<StateSlotAccess> {
        let has_source = slots.sources.last().is_some_and(|source| source.position == row.start);
        if row.start > 0 && !has_source {
            if row.checkpoint && self.available() > 0 {
                let fresh = self.allocate_each();
                replace_live(slots, fresh, row.start, SourcePurpose::PendingCheckpoint);
            } else if row.may_repeat {
                let spare = std::mem::take(&mut slots.spare);
                assert!(!spare.is_empty(), "a row that may be repeated has no spare slot");
                replace_live(slots, spare, row.start, SourcePurpose::Repeat);
            }
        }
        let source = slots.sources.last().filter(|source| source.position == row.start);
        let read = source.map_or(&slots.live, |source| &source.slots);
        let access =
            |(group, (&read, &write)): (usize, (&StateSlot, &StateSlot))| StateSlotAccess {
                group: self.group_id(group),
                read: (row.start > 0).then_some(read),
                write,
            };
        read.iter().zip(&slots.live).enumerate().map(access).collect()
    }

    /// Updates the slots of a request after an output has been applied: `computed` is the number of positions that
    /// the applied outputs cover, `published` the number of positions whose blocks are registered in the prefix
    /// cache, and `keys` are the keys of the blocks.
    ///
    /// States that these outputs wrote become checkpoints, if their blocks are registered; slots whose reader has
    /// been applied are released.
    pub fn settle(
        &mut self,
        slots: &mut StateSlots,
        computed: u32,
        published: u32,
        keys: &[BlockKey],
    ) {
        while let Some(source) =
            slots.sources.first_mut().filter(|source| source.position <= computed)
        {
            if source.purpose == SourcePurpose::PendingCheckpoint {
                source.purpose = SourcePurpose::Checkpoint;
                if source.position <= published {
                    let key = keys[(source.position / self.block_tokens) as usize - 1];
                    self.publish(&source.slots, key);
                }
            }
            if source.position == computed {
                break; // Its reader has not been applied.
            }
            let source = slots.sources.remove(0);
            match source.purpose {
                SourcePurpose::Repeat => slots.spare = source.slots,
                _ => self.release(&source.slots),
            }
        }
    }

    fn publish(&mut self, slots: &[StateSlot], key: BlockKey) {
        let mut published = false;
        for (pool, &slot) in self.pools.iter_mut().zip(slots) {
            published |= pool.publish(slot, key);
        }
        self.published_checkpoints += u64::from(published);
    }

    fn release(&mut self, slots: &[StateSlot]) {
        for (pool, &slot) in self.pools.iter_mut().zip(slots) {
            pool.release(slot);
        }
    }

    /// Releases all slots of a request. Checkpoints stay until they are evicted.
    pub fn free(&mut self, slots: &mut StateSlots) {
        let StateSlots { live, spare, sources } = std::mem::take(slots);
        self.release(&live);
        self.release(&spare);
        for source in &sources {
            self.release(&source.slots);
        }
    }

    /// Drops the checkpoints at the end of the block with hash `hash`.
    pub(crate) fn forget(&mut self, hash: BlockHash) {
        self.pools.iter_mut().for_each(|pool| pool.forget(hash));
    }

    /// Drops all checkpoints. Requests keep their slots.
    pub(crate) fn clear(&mut self) {
        self.pools.iter_mut().for_each(StatePool::clear);
    }

    /// Recomputes the reference counts of all slots from `requests`, which must be the slots of all requests, and
    /// checks that each checkpoint has its block: `is_indexed` returns whether the groups that keep all positions have
    /// a block with a hash. Panics on a difference.
    pub(crate) fn check<'a>(
        &self,
        requests: impl Iterator<Item = &'a StateSlots>,
        is_indexed: impl Fn(BlockHash) -> bool,
    ) {
        let requests: Vec<_> = requests.collect();
        for (group, pool) in self.pools.iter().enumerate() {
            let mut refs = vec![0; pool.counts().pool as usize];
            for slot in requests.iter().flat_map(|slots| slots.of_group(group)) {
                refs[slot.0 as usize] += 1;
            }
            pool.check(&refs);
            for hash in pool.hashes() {
                assert!(is_indexed(hash), "the block of checkpoint {hash:?} is not indexed");
            }
        }
    }
}

/// Makes `fresh` the live slots; the former ones become the source of the row at `position`.
fn replace_live(
    slots: &mut StateSlots,
    fresh: Vec<StateSlot>,
    position: u32,
    purpose: SourcePurpose,
) {
    let former = std::mem::replace(&mut slots.live, fresh);
    slots.sources.push(StateSource { slots: former, position, purpose });
}
