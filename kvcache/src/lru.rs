//! Cached blocks in LRU order: an intrusive list over block ids.

const END: u32 = u32::MAX;

/// Links of a block in the LRU list.
#[derive(Debug, Clone, Copy)]
struct LruLinks {
    older: u32,
    newer: u32,
    linked: bool,
}

const UNLINKED: LruLinks = LruLinks { older: END, newer: END, linked: false };

/// LRU list, least recently used first; every operation is O(1) and none allocates memory.
#[derive(Debug, Clone)]
pub(crate) struct LruList {
    links: Vec<LruLinks>,
    oldest: u32,
    newest: u32,
    count: u32,
}

impl LruList {
    pub(crate) fn new(blocks: u32) -> Self {
        Self { links: vec![UNLINKED; blocks as usize], oldest: END, newest: END, count: 0 }
    }

    pub(crate) fn count(&self) -> u32 {
        self.count
    }

    pub(crate) fn contains(&self, block: u32) -> bool {
        self.links[block as usize].linked
    }

    pub(crate) fn push_newest(&mut self, block: u32) {
        assert!(!self.contains(block), "block {block} is already cached");
        self.links[block as usize] = LruLinks { older: self.newest, newer: END, linked: true };
        match self.newest {
            END => self.oldest = block,
            newest => self.links[newest as usize].newer = block,
        }
        self.newest = block;
        self.count += 1;
    }

    /// Adds a block that will be evicted before all other blocks.
    pub(crate) fn push_oldest(&mut self, block: u32) {
        assert!(!self.contains(block), "block {block} is already cached");
        self.links[block as usize] = LruLinks { older: END, newer: self.oldest, linked: true };
        match self.oldest {
            END => self.newest = block,
            oldest => self.links[oldest as usize].older = block,
        }
        self.oldest = block;
        self.count += 1;
    }

    pub(crate) fn unlink(&mut self, block: u32) {
        let LruLinks { older, newer, linked } = self.links[block as usize];
        assert!(linked, "block {block} is not cached");
        match older {
            END => self.oldest = newer,
            older => self.links[older as usize].newer = newer,
        }
        match newer {
            END => self.newest = older,
            newer => self.links[newer as usize].older = older,
        }
        self.links[block as usize] = UNLINKED;
        self.count -= 1;
    }

    pub(crate) fn pop_oldest(&mut self) -> Option<u32> {
        let oldest = (self.oldest != END).then_some(self.oldest)?;
        self.unlink(oldest);
        Some(oldest)
    }

    /// Iterates over the blocks, least recently used first.
    pub(crate) fn iter(&self) -> impl Iterator<Item = u32> {
        let next = |&block: &u32| Some(self.links[block as usize].newer).filter(|&b| b != END);
        std::iter::successors(Some(self.oldest).filter(|&b| b != END), next)
    }
}
