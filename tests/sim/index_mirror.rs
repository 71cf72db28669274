//! A subscriber of one replica's KV events, which rebuilds the prefix index from them. I14: applying the
//! events to an empty set gives the prefix index. I15: a block is stored only after its KV is computed, and
//! only once. I17: no block of a failed row is stored. I4: a block is stored after the preceding block of its
//! sequence and removed before it, and blocks with different cache salts are kept apart.

use crate::hash_model::text::{EMPTY, entry, fold};
use crate::invariant::{CheckResult, ensure};
use protocol::{BlockHash, ExtraKey, KvEvent, Token};
use std::collections::{BTreeMap, HashSet};

/// A block in a subscriber's index.
#[derive(Debug, Clone)]
struct MirroredBlock {
    /// Hash of all tokens up to the end of the block, which identifies the contents of the block and its
    /// whole prefix.
    context: u64,
    salt: Option<String>,
    parent: Option<BlockHash>,
    children: u32,
}

/// Mirror of the prefix index: the blocks that are cached according to the KV events, and the contexts (hash
/// of all tokens up to the end of a block) whose KV has really been computed.
#[derive(Debug, Default)]
pub(crate) struct IndexMirror {
    blocks: BTreeMap<BlockHash, MirroredBlock>,
    cached_prefixes: HashSet<(Option<String>, u64)>,
    /// Prefixes that were removed in this tick; a row that was planned earlier in the same tick may have used
    /// them.
    removed_this_tick: HashSet<(Option<String>, u64)>,
    computed_contexts: HashSet<u64>,
    /// Number of blocks stored so far.
    pub(crate) stored: u64,
    /// Number of blocks removed so far.
    pub(crate) removed: u64,
}

impl IndexMirror {
    /// Records that the KV of the block with this context (hash of all tokens up to the end of the block) is
    /// computed, according to an output that reached the scheduler.
    pub(crate) fn mark_computed(&mut self, context: u64) {
        self.computed_contexts.insert(context);
    }

    /// Clears the contexts (hashes of prefixes) whose KV was computed, because an executor failure loses the
    /// KV cache.
    pub(crate) fn clear_computed(&mut self) {
        self.computed_contexts.clear();
    }

    /// Clears the prefixes that were removed in a tick, after all effects of the tick were applied.
    pub(crate) fn end_tick(&mut self) {
        self.removed_this_tick.clear();
    }

    /// Hashes of the blocks that are cached according to the KV events.
    pub(crate) fn hashes(&self) -> impl ExactSizeIterator<Item = BlockHash> {
        self.blocks.keys().copied()
    }

    /// Whether the first `blocks` blocks of `tokens` may be a prefix hit under `salt`.
    pub(crate) fn has_prefix(
        &self,
        tokens: &[Token],
        blocks: u32,
        size: u32,
        salt: Option<&str>,
    ) -> bool {
        let mut context = EMPTY;
        tokens.chunks_exact(size as usize).take(blocks as usize).all(|ids| {
            context = ids.iter().fold(context, |c, &id| fold(c, entry(c, id)));
            let identity = (salt.map(str::to_owned), context);
            self.cached_prefixes.contains(&identity) || self.removed_this_tick.contains(&identity)
        })
    }

    /// Applies one KV event and checks it.
    pub(crate) fn apply(&mut self, event: &KvEvent, size: u32) -> CheckResult {
        match event {
            KvEvent::Stored { hashes, parent, tokens, extra_keys, group } => {
                ensure!("I14", *group == 0, "group {group}");
                let ids = hashes.len() * size as usize;
                ensure!("I14", tokens.len() == ids, "{} ids, expected {ids}", tokens.len());
                ensure!("I14", extra_keys.len() == hashes.len(), "extra keys {extra_keys:?}");
                let mut parent = *parent;
                for ((&hash, ids), extra) in
                    hashes.iter().zip(tokens.chunks_exact(size as usize)).zip(extra_keys)
                {
                    self.store(hash, parent, ids, extra)?;
                    parent = Some(hash);
                }
                Ok(())
            }
            KvEvent::Removed { hashes, group } => {
                ensure!("I14", *group == 0, "group {group}");
                hashes.iter().try_for_each(|hash| self.remove(*hash))
            }
            KvEvent::Cleared => {
                self.blocks.clear();
                self.cached_prefixes.clear();
                Ok(())
            }
        }
    }

    fn store(
        &mut self,
        hash: BlockHash,
        parent: Option<BlockHash>,
        ids: &[Token],
        extra: &[ExtraKey],
    ) -> CheckResult {
        ensure!("I15", hash.0 != 0, "hash 0");
        ensure!("I14", !self.blocks.contains_key(&hash), "{hash:?} is stored twice");
        let (before, salt) = match parent {
            None => {
                let salt = extra.iter().find_map(|key| match key {
                    ExtraKey::Salt(salt) => Some(salt.clone()),
                    ExtraKey::Lora(_) => None,
                });
                (EMPTY, salt)
            }
            Some(parent) => {
                let Some(block) = self.blocks.get_mut(&parent) else {
                    ensure!("I4", false, "{hash:?} is stored without its parent {parent:?}");
                    return Ok(());
                };
                block.children += 1;
                ensure!("I4", extra.is_empty(), "{hash:?} has extra keys after the first block");
                (block.context, block.salt.clone())
            }
        };
        let context = ids.iter().fold(before, |c, &id| fold(c, entry(c, id)));
        let computed = self.computed_contexts.contains(&context);
        ensure!("I15", computed, "{hash:?} of {ids:?} is stored, but no output covers it");
        self.cached_prefixes.insert((salt.clone(), context));
        self.blocks.insert(hash, MirroredBlock { context, salt, parent, children: 0 });
        self.stored += 1;
        Ok(())
    }

    fn remove(&mut self, hash: BlockHash) -> CheckResult {
        let Some(block) = self.blocks.remove(&hash) else {
            ensure!("I14", false, "{hash:?} is removed, but was not stored");
            return Ok(());
        };
        ensure!(
            "I4",
            block.children == 0,
            "{hash:?} is removed before {} children",
            block.children
        );
        if let Some(parent) = block.parent.and_then(|p| self.blocks.get_mut(&p)) {
            parent.children -= 1;
        }
        let identity = (block.salt, block.context);
        self.cached_prefixes.remove(&identity);
        self.removed_this_tick.insert(identity);
        self.removed += 1;
        Ok(())
    }
}
