//! Prefix hits: the longest prefix whose blocks every group of the cache has.

use super::{BlockIdentity, KvCache, PrefixHit, SequenceContent};
use crate::ExtraKeys;
use protocol::{BlockId, Token};
use std::sync::Arc;

impl KvCache {
    /// Looks up the longest prefix of `content` that all groups have cached, and appends its blocks to `found`,
    /// group by group. The last token is never part of the prefix, so that at least one token is left to
    /// forward.
    ///
    /// A block matches only if hash, token ids, extra keys and private guard are equal. No reference to the
    /// found blocks is added: `pin` must be called before any allocation, which could evict them.
    pub fn match_prefix(
        &self,
        content: SequenceContent<'_>,
        found: &mut Vec<BlockId>,
    ) -> PrefixHit {
        let mut hit = PrefixHit::default();
        if !self.caching {
            return hit;
        }
        let first_found = found.len();
        let blocks_max = self.blocks_looked_up(content);
        if self.groups.len() == 1 && self.group_counts.kept == 1 && self.states.is_empty() {
            found.extend((0..blocks_max).map_while(|i| self.find(0, i, content)).map(BlockId));
            hit.blocks = (found.len() - first_found) as u32;
        } else {
            hit = self.match_groups(content, blocks_max, found);
        }
        let found = &found[first_found..];
        hit.found = found.len() as u32;
        hit.wanted = hit.wanted.max(hit.blocks);
        hit.evictable = found.iter().filter(|block| self.ref_count(**block) == 0).count() as u32;
        hit
    }

    /// Returns the number of leading blocks that `group` alone could give to a request whose lookup of `content`
    /// had the result `hit`. Groups with windows or states give at most the `hit.wanted` blocks whose tokens the
    /// groups that keep all positions verify.
    ///
    /// Only a hit that was cut, and several groups that keep all positions, need a further lookup.
    pub fn blocks_offered(&self, group: u8, content: SequenceContent<'_>, hit: PrefixHit) -> u32 {
        let group = usize::from(group);
        let is_cached = |block: u32| self.find(group, block, content).is_some();
        match self.groups.get(group) {
            Some(kept) if !kept.is_window() => {
                let blocks_max = self.blocks_looked_up(content);
                (hit.wanted..blocks_max).find(|&block| !is_cached(block)).unwrap_or(blocks_max)
            }
            _ if hit.blocks == hit.wanted => hit.wanted,
            Some(window) => window.longest_hit(hit.wanted, is_cached),
            None => {
                let state_group = group - self.groups.len();
                self.states.longest_hit(state_group, hit.wanted, content.block_keys)
            }
        }
    }

    /// Returns the number of leading blocks of `content` that a lookup considers: the last token is computed.
    fn blocks_looked_up(&self, content: SequenceContent<'_>) -> u32 {
        let blocks_max = (content.tokens.len() as u32).saturating_sub(1) / self.block_tokens;
        blocks_max.min(content.block_keys.len() as u32)
    }

    /// Finds the longest prefix of at most `blocks_max` blocks that all groups have, and appends its blocks to
    /// `found`.
    fn match_groups(
        &self,
        content: SequenceContent<'_>,
        blocks_max: u32,
        found: &mut Vec<BlockId>,
    ) -> PrefixHit {
        let mut hit = PrefixHit { wanted: blocks_max, ..PrefixHit::default() };
        self.shorten_to_kept_groups(content, &mut hit);
        while self.shorten_to_windows(content, &mut hit)
            || self.shorten_to_states(content, &mut hit)
        {}
        for group in 0..self.groups.len() {
            let first = self.groups[group].first_hit_block(hit.blocks);
            let block = |index| self.find(group, index, content);
            found.extend((first..hit.blocks).filter_map(block).map(BlockId));
        }
        if hit.blocks > 0 {
            let key = content.block_keys[hit.blocks as usize - 1];
            hit.evictable_states = self.states.evictable(key);
        }
        hit
    }

    /// Shortens a hit to the blocks that the groups which keep all positions have.
    fn shorten_to_kept_groups(&self, content: SequenceContent<'_>, hit: &mut PrefixHit) {
        for (index, group) in self.groups.iter().enumerate().filter(|(_, g)| !g.is_window()) {
            let is_cached = |block| self.find(index, block, content).is_some();
            hit.wanted = group.longest_hit(hit.wanted, is_cached);
        }
        hit.blocks = hit.wanted;
    }

    /// Shortens a hit to a prefix whose windows each window group has. Returns whether it became shorter: the
    /// shorter prefix may lack the windows of other groups.
    fn shorten_to_windows(&self, content: SequenceContent<'_>, hit: &mut PrefixHit) -> bool {
        let before = hit.blocks;
        for (index, group) in self.groups.iter().enumerate().filter(|(_, g)| g.is_window()) {
            let is_cached = |block| self.find(index, block, content).is_some();
            let blocks = group.longest_hit(hit.blocks, is_cached);
            if blocks < hit.blocks {
                hit.blocks = blocks;
                hit.cut_by = Some(index as u8);
            }
        }
        if self.group_counts.kept == 0 {
            // Without a group that keeps all positions, evicted prefixes cannot be distinguished.
            (hit.wanted, hit.cut_by) = (hit.blocks, None);
        }
        hit.blocks < before
    }

    /// Shortens a hit to a prefix at whose end each state group has a checkpoint. Returns whether it became shorter.
    fn shorten_to_states(&self, content: SequenceContent<'_>, hit: &mut PrefixHit) -> bool {
        let before = hit.blocks;
        for group in 0..self.states.groups() {
            let blocks = self.states.longest_hit(group, hit.blocks, content.block_keys);
            if blocks < hit.blocks {
                hit.blocks = blocks;
                hit.cut_by = Some(self.states.group_id(group));
            }
        }
        hit.blocks < before
    }

    /// Returns the indexed block of `group` that has the contents of block `index` of `content`.
    fn find(&self, group: usize, index: u32, content: SequenceContent<'_>) -> Option<u32> {
        let block = self.groups[group].index.get(content.block_keys[index as usize].hash)?;
        self.matches_block(block, index, content).then_some(block)
    }

    /// Returns whether `block`, which has the hash of block `index` of `content`, also has its guard, token
    /// ids and extra keys.
    pub(super) fn matches_block(
        &self,
        block: u32,
        index: u32,
        content: SequenceContent<'_>,
    ) -> bool {
        let metadata =
            self.block_metadata[block as usize].as_ref().expect("an indexed block has metadata");
        metadata.key.guard == content.block_keys[index as usize].guard
            && self.tokens_of_block(block) == self.tokens_of_content(content, index)
            && self.same_extra_keys(metadata, index, content)
    }

    fn same_extra_keys(
        &self,
        metadata: &BlockIdentity,
        index: u32,
        content: SequenceContent<'_>,
    ) -> bool {
        let (block_keys, content_keys) =
            (metadata.extra.as_deref(), content.extra_keys.map(Arc::as_ref));
        ExtraKeys::same_in_block(block_keys, content_keys, index, self.block_tokens)
    }

    fn tokens_of_block(&self, block: u32) -> &[Token] {
        let first = block as usize * self.block_tokens as usize;
        &self.cached_tokens[first..first + self.block_tokens as usize]
    }

    pub(super) fn tokens_of_content<'a>(
        &self,
        content: SequenceContent<'a>,
        index: u32,
    ) -> &'a [Token] {
        let first = index as usize * self.block_tokens as usize;
        &content.tokens[first..first + self.block_tokens as usize]
    }
}
