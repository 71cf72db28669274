//! Reference counts of blocks. An unreferenced block is either free or cached.
//!
//! Allocation uses free blocks first, lowest id first, then evicts the least recently used cached block.
//! Operations do not allocate memory after construction.

use crate::free_block_set::FreeBlockSet;
use crate::lru::LruList;

/// Reference counts, free blocks and cached blocks of a pool of fixed size.
#[derive(Debug, Clone)]
pub(crate) struct BlockPool {
    ref_counts: Vec<u32>,
    free: FreeBlockSet,
    cached: LruList,
}

/// A newly allocated block with one reference.
pub(crate) struct AllocatedBlock {
    pub(crate) block: u32,
    /// Whether the block was cached: the caller must remove it from the prefix index.
    pub(crate) evicted: bool,
}

/// Position at which a released block enters the LRU list.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) enum EvictionOrder {
    /// Evicted before all blocks that are cached now.
    First,
    /// Evicted after all blocks that are cached now.
    Last,
}

impl BlockPool {
    pub(crate) fn new(blocks: u32) -> Self {
        let refs = vec![0; blocks as usize];
        Self { ref_counts: refs, free: FreeBlockSet::full(blocks), cached: LruList::new(blocks) }
    }

    pub(crate) fn blocks(&self) -> u32 {
        self.ref_counts.len() as u32
    }

    pub(crate) fn free_count(&self) -> u32 {
        self.free.count()
    }

    pub(crate) fn cached_count(&self) -> u32 {
        self.cached.count()
    }

    pub(crate) fn ref_count(&self, block: u32) -> u32 {
        self.ref_counts[block as usize]
    }

    /// Iterates over cached blocks, least recently used first.
    pub(crate) fn evictable(&self) -> impl Iterator<Item = u32> {
        self.cached.iter()
    }

    /// Allocates a block. The caller has checked that a free or cached block is available.
    pub(crate) fn allocate(&mut self) -> AllocatedBlock {
        let (block, evicted) = match self.free.pop_lowest() {
            Some(block) => (block, false),
            None => (
                self.cached.pop_oldest().expect("the caller checked that a block is available"),
                true,
            ),
        };
        assert_eq!(self.ref_count(block), 0, "free block {block} is referenced");
        self.ref_counts[block as usize] = 1;
        AllocatedBlock { block, evicted }
    }

    /// Adds a reference to a block of the prefix index.
    pub(crate) fn pin(&mut self, block: u32) {
        if self.ref_count(block) == 0 {
            self.cached.unlink(block);
        }
        self.ref_counts[block as usize] += 1;
    }

    /// Removes a reference from a block. Without references, the block becomes cached if `indexed` (it is in
    /// the prefix index), otherwise free.
    pub(crate) fn release(&mut self, block: u32, indexed: bool, order: EvictionOrder) {
        let refs = &mut self.ref_counts[block as usize];
        *refs = refs.checked_sub(1).expect("a released block is referenced");
        if *refs > 0 {
            return;
        }
        match (indexed, order) {
            (true, EvictionOrder::Last) => self.cached.push_newest(block),
            (true, EvictionOrder::First) => self.cached.push_oldest(block),
            (false, _) => self.free.insert(block),
        }
    }

    /// Frees a cached block, because it was removed from the prefix index.
    pub(crate) fn free_cached(&mut self, block: u32) {
        self.cached.unlink(block);
        self.free.insert(block);
    }

    /// Frees every cached block, because the prefix index was cleared.
    pub(crate) fn free_all_cached(&mut self) {
        while let Some(block) = self.cached.pop_oldest() {
            self.free.insert(block);
        }
    }

    /// Panics unless `refs` are the reference counts, every block is in exactly one state (free, cached or in
    /// use), and the cached blocks are exactly the unreferenced blocks of the prefix index.
    pub(crate) fn check(&self, refs: &[u32], is_indexed: impl Fn(u32) -> bool) {
        assert_eq!(self.ref_counts, refs, "reference counts differ from the block tables");
        for block in 0..self.blocks() {
            let states = [self.free.contains(block), self.cached.contains(block)];
            let idle = self.ref_count(block) == 0;
            assert_eq!(
                states,
                [idle && !is_indexed(block), idle && is_indexed(block)],
                "state of block {block}"
            );
        }
        assert_eq!(self.evictable().count(), self.cached.count() as usize);
        let free = (0..self.blocks()).filter(|&b| self.ref_count(b) == 0).count();
        assert_eq!(
            free,
            (self.free_count() + self.cached_count()) as usize,
            "unreferenced blocks miscounted"
        );
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    #[should_panic(expected = "reference counts differ")]
    fn check_detects_a_referenced_block_without_table() {
        let mut pool = BlockPool::new(2);
        pool.allocate();
        pool.check(&[0, 0], |_| false);
    }

    #[test]
    #[should_panic(expected = "state of block 0")]
    fn check_detects_a_cached_block_in_the_free_set() {
        BlockPool::new(2).check(&[0, 0], |block| block == 0);
    }
}
