//! KV cache groups: which positions a group keeps, its prefix index, and which of its blocks later requests may
//! use.

use crate::prefix_index::PrefixIndex;
use protocol::{KvGroup, KvKind};

/// A KV cache group of one replica.
#[derive(Debug, Clone)]
pub(crate) struct CacheGroup {
    pub(crate) index: PrefixIndex,
    kind: KvKind,
    block_tokens: u32,
}

impl CacheGroup {
    pub(crate) fn new(group: &KvGroup, block_tokens: u32, blocks: u32, secret: u64) -> Self {
        Self { index: PrefixIndex::new(blocks, secret), kind: group.kind, block_tokens }
    }

    /// Whether blocks before a window are released.
    #[inline]
    pub(crate) fn is_window(&self) -> bool {
        self.kind.window().is_some()
    }

    /// Whether a prefix hit needs the last block before its end, so that a state at this boundary is of no use
    /// without it.
    #[inline]
    pub(crate) fn is_read_before_boundary(&self) -> bool {
        self.kind.window() != Some(1)
    }

    /// Largest number of blocks that a request of `len` tokens holds, if at most `in_flight` of its tokens are in
    /// flight.
    pub(crate) fn blocks_of_request(&self, len: u32, in_flight: u32) -> u32 {
        self.kind.blocks_of_request(len, in_flight, self.block_tokens)
    }

    /// Index of the first block that queries at `position` and later read.
    #[inline]
    pub(crate) fn first_read_block(&self, position: u32) -> u32 {
        self.kind.first_read(position) / self.block_tokens
    }

    /// Index of the first block that a prefix hit of `blocks` blocks needs; `blocks` if it needs none.
    #[inline]
    pub(crate) fn first_hit_block(&self, blocks: u32) -> u32 {
        self.first_read_block(blocks * self.block_tokens).min(blocks)
    }

    /// Returns the longest prefix hit of at most `blocks` blocks that this group can serve. `is_cached` returns
    /// whether block `i` of the prefix is in the index of this group.
    pub(crate) fn longest_hit(&self, blocks: u32, is_cached: impl Fn(u32) -> bool) -> u32 {
        if !self.is_window() {
            return (0..blocks).find(|&index| !is_cached(index)).unwrap_or(blocks);
        }
        // The blocks from `from` up to the hit are cached.
        let (mut hit, mut from) = (blocks, blocks);
        while from > self.first_hit_block(hit) {
            from -= 1;
            if !is_cached(from) {
                hit = from;
            }
        }
        hit
    }

    /// Whether a prefix hit that ends at position `end` reads block `index`.
    fn is_read_by_hit(&self, index: u32, end: u32) -> bool {
        let blocks = end / self.block_tokens;
        (self.first_hit_block(blocks)..blocks).contains(&index)
    }
}

/// Positions at which later prompts are likely to continue a request. Blocks before a window are evicted
/// before all other cached blocks, unless a prefix hit that ends at such a position needs them.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct WindowCheckpoints {
    /// End of the longest prefix hit of the same prompt.
    pub prompt_end: u32,
    /// End of the prefix hit of this request, or where it would have ended if all windows before it had been
    /// cached; 0 = none.
    pub hit_end: u32,
    /// Distance of further checkpoints in tokens, a multiple of the tokens per block; 0 = none.
    pub interval: u32,
}

impl WindowCheckpoints {
    /// Whether a prefix hit at a checkpoint needs block `index` of `group`.
    pub(crate) fn need(&self, group: &CacheGroup, index: u32) -> bool {
        let end = (index + 1) * group.block_tokens;
        let next = end.checked_next_multiple_of(self.interval).unwrap_or(0);
        [self.prompt_end, self.hit_end, next].iter().any(|&end| group.is_read_by_hit(index, end))
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn group(kind: KvKind) -> CacheGroup {
        CacheGroup::new(&KvGroup { layers: vec![0], kind, bytes_per_block: 1 }, 4, 64, 1)
    }

    fn window(tokens: u32) -> CacheGroup {
        group(KvKind::Window { tokens })
    }

    #[test]
    fn hits_need_the_blocks_of_their_window() {
        // The query at position 20 (five blocks of four tokens) reads the keys of positions 20 - (W - 1) to 20.
        for (tokens, first) in [(1, 5), (2, 4), (5, 4), (6, 3), (9, 3), (10, 2), (21, 0), (99, 0)] {
            assert_eq!(window(tokens).first_hit_block(5), first, "window of {tokens}");
        }
        assert_eq!(window(3).first_hit_block(0), 0);
        assert_eq!(group(KvKind::Full).first_hit_block(5), 0);
    }

    #[test]
    fn longest_hit_ends_after_cached_windows() {
        let hit =
            |group: &CacheGroup, cached: &[u32]| group.longest_hit(8, |i| cached.contains(&i));
        let full = group(KvKind::Full);
        assert_eq!([hit(&full, &[0, 1, 3]), hit(&full, &[1, 2])], [2, 0]);
        // A window of 6 tokens needs the last two blocks of the hit.
        let two = window(6);
        assert_eq!(hit(&two, &[6, 7]), 8);
        assert_eq!(hit(&two, &[0, 4, 5, 7]), 6);
        assert_eq!(hit(&two, &[0, 2, 4, 6]), 1, "the first block has no predecessor");
        assert_eq!(hit(&two, &[1, 3, 5, 7]), 0);
        assert_eq!(hit(&window(1), &[]), 8, "a window of one token reads no cached key");
    }

    #[test]
    fn checkpoints_keep_the_windows_before_them() {
        let group = window(6);
        let kept = |checkpoints: WindowCheckpoints| -> Vec<u32> {
            (0..12).filter(|&index| checkpoints.need(&group, index)).collect()
        };
        let none = WindowCheckpoints { prompt_end: 0, hit_end: 0, interval: 0 };
        assert!(kept(none).is_empty());
        assert_eq!(kept(WindowCheckpoints { prompt_end: 40, ..none }), [8, 9]);
        assert_eq!(kept(WindowCheckpoints { hit_end: 4, ..none }), [0]);
        assert_eq!(kept(WindowCheckpoints { interval: 16, ..none }), [2, 3, 6, 7, 10, 11]);
    }
}
