//! Set of free blocks from which the lowest id can be removed: a hierarchical bitmap. Each bit of a level
//! represents one 64-bit word of the level below.
//!
//! `insert` and `pop_lowest` touch one word per level (four levels for 16 million blocks) and never allocate
//! memory.

/// Set of the free blocks of a pool, by id.
#[derive(Debug, Clone)]
pub(crate) struct FreeBlockSet {
    /// `levels[0]` has a bit per block; a bit of `levels[l + 1]` is set iff the word of `levels[l]` is
    /// non-zero.
    levels: Vec<Vec<u64>>,
    count: u32,
}

impl FreeBlockSet {
    /// Creates the set of all ids below `blocks`.
    pub(crate) fn full(blocks: u32) -> Self {
        let mut levels = Vec::new();
        let mut bits = blocks as usize;
        loop {
            let words = bits.div_ceil(64).max(1);
            levels.push(vec![0; words]);
            if words == 1 {
                break;
            }
            bits = words;
        }
        let mut set = Self { levels, count: 0 };
        (0..blocks).for_each(|block| set.insert(block));
        set
    }

    pub(crate) fn count(&self) -> u32 {
        self.count
    }

    pub(crate) fn contains(&self, block: u32) -> bool {
        self.levels[0][block as usize / 64] >> (block % 64) & 1 == 1
    }

    pub(crate) fn insert(&mut self, block: u32) {
        assert!(!self.contains(block), "block {block} is already free");
        self.count += 1;
        let mut bit = block as usize;
        for level in &mut self.levels {
            let word = &mut level[bit / 64];
            let was_empty = *word == 0;
            *word |= 1 << (bit % 64);
            if !was_empty {
                break;
            }
            bit /= 64;
        }
    }

    pub(crate) fn pop_lowest(&mut self) -> Option<u32> {
        if self.count == 0 {
            return None;
        }
        let index = self
            .levels
            .iter()
            .rev()
            .fold(0, |i, level| i * 64 + level[i].trailing_zeros() as usize);
        self.count -= 1;
        let mut bit = index;
        for level in &mut self.levels {
            let word = &mut level[bit / 64];
            *word &= !(1 << (bit % 64));
            if *word != 0 {
                break;
            }
            bit /= 64;
        }
        Some(index as u32)
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use std::collections::BTreeSet;

    #[test]
    fn free_block_set_agrees_with_btreeset() {
        let mut free_set = FreeBlockSet::full(5000);
        let mut model: BTreeSet<u32> = (0..5000).collect();
        let mut allocated = Vec::new();
        let mut random = 1_u64;
        for _ in 0..20_000 {
            random = random.wrapping_mul(6_364_136_223_846_793_005).wrapping_add(1);
            if random >> 63 == 0 || allocated.is_empty() {
                let lowest = free_set.pop_lowest();
                assert_eq!(lowest, model.pop_first());
                allocated.extend(lowest);
            } else {
                let block = allocated.swap_remove((random >> 33) as usize % allocated.len());
                free_set.insert(block);
                model.insert(block);
            }
            assert_eq!(free_set.count() as usize, model.len());
        }
    }
}
