//! Who holds each block. A block nobody holds is in exactly one of vacant and cached.
//!
//! Taking spends vacant blocks first, lowest id first, then evicts the cached block that has been
//! idle longest. Nothing here allocates after start.

use crate::lru::Lru;
use crate::vacant::Vacant;
use crate::{Bug, Planted};

/// Reference counts and free lists of a fixed number of blocks.
#[derive(Debug, Clone)]
pub(crate) struct Pool {
    refs: Vec<u32>,
    vacant: Vacant,
    cached: Lru,
    planted: Planted,
}

/// A block just taken, with one reference.
pub(crate) struct Taken {
    pub(crate) block: u32,
    /// It held something findable: the caller must take it out of the index.
    pub(crate) evicted: bool,
}

impl Pool {
    pub(crate) fn new(blocks: u32, planted: Planted) -> Self {
        let refs = vec![0; blocks as usize];
        Self { refs, vacant: Vacant::full(blocks), cached: Lru::new(blocks), planted }
    }

    pub(crate) fn blocks(&self) -> u32 {
        self.refs.len() as u32
    }

    pub(crate) fn vacant(&self) -> u32 {
        self.vacant.count()
    }

    pub(crate) fn cached(&self) -> u32 {
        self.cached.count()
    }

    pub(crate) fn refs(&self, block: u32) -> u32 {
        self.refs[block as usize]
    }

    /// Cached blocks, oldest first.
    pub(crate) fn idle(&self) -> impl Iterator<Item = u32> {
        self.cached.iter()
    }

    /// Takes a free block; the caller has counted that there is one.
    pub(crate) fn take(&mut self) -> Taken {
        let (block, evicted) = match self.vacant.take_lowest() {
            Some(block) => (block, false),
            None => (self.cached.take_oldest().expect("the plan counted its free blocks"), true),
        };
        assert_eq!(self.refs(block), 0, "free block {block} is held");
        self.refs[block as usize] = 1;
        Taken { block, evicted }
    }

    /// Adds a holder to a findable block.
    pub(crate) fn claim(&mut self, block: u32) {
        let stays = self.planted.has(Bug::ClaimKeepsLruPlace);
        if self.refs(block) == 0 && !stays {
            self.cached.unlink(block);
        }
        self.refs[block as usize] += 1;
    }

    /// Takes a holder away; the last one puts the block on a free list.
    pub(crate) fn release(&mut self, block: u32, findable: bool) {
        let refs = &mut self.refs[block as usize];
        *refs = refs.checked_sub(1).expect("a released block has a holder");
        let freed = *refs == 0 || (self.planted.has(Bug::DoubleFree) && *refs == 1);
        if !freed || (self.planted.has(Bug::ClaimKeepsLruPlace) && self.cached.contains(block)) {
            return;
        }
        if findable {
            self.cached.push_newest(block);
        } else {
            self.vacant.insert(block);
        }
    }

    /// Nothing is findable any more: every cached block becomes vacant.
    pub(crate) fn forget_cached(&mut self) {
        while let Some(block) = self.cached.take_oldest() {
            self.vacant.insert(block);
        }
    }

    /// Panics unless `refs` are the reference counts, every block is in exactly one place, and the
    /// cached blocks are exactly the idle findable ones.
    pub(crate) fn check(&self, refs: &[u32], findable: impl Fn(u32) -> bool) {
        assert_eq!(self.refs, refs, "reference counts differ from what the tables hold");
        for block in 0..self.blocks() {
            let places = [self.vacant.contains(block), self.cached.contains(block)];
            let idle = self.refs(block) == 0;
            assert_eq!(
                places,
                [idle && !findable(block), idle && findable(block)],
                "block {block}"
            );
        }
        assert_eq!(self.idle().count(), self.cached.count() as usize);
        let free = (0..self.blocks()).filter(|&b| self.refs(b) == 0).count();
        assert_eq!(free, (self.vacant() + self.cached()) as usize, "free blocks miscounted");
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    #[should_panic(expected = "reference counts differ")]
    fn a_block_that_no_table_holds_is_noticed() {
        let mut pool = Pool::new(2, Planted::default());
        pool.take();
        pool.check(&[0, 0], |_| false);
    }

    #[test]
    #[should_panic(expected = "block 0")]
    fn a_findable_block_that_is_vacant_is_noticed() {
        Pool::new(2, Planted::default()).check(&[0, 0], |block| block == 0);
    }
}
