//! A subscriber of one replica's KV events, which rebuilds the prefix index from them. I14: applying the
//! events to an empty set gives the prefix index. I15: a block is stored only after its KV is computed, and
//! only once. I17: no block of a failed row is stored. I4: a block is stored after the preceding block of its
//! sequence and removed before it, and blocks with different cache salts are kept apart.

use crate::hash_model::text::{EMPTY, entry, fold};
use crate::invariant::{CheckResult, InvariantViolation, ensure};
use protocol::{BlockHash, ExtraKey, KvEvent, KvKind, Token};
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

/// Context and salt of a prefix.
#[derive(Debug, Clone)]
struct PrefixContext {
    context: u64,
    salt: Option<String>,
}

/// Contents of a cached block.
#[derive(Debug, Clone, PartialEq, Eq, Hash)]
struct PrefixIdentity {
    group: u8,
    salt: Option<String>,
    context: u64,
}

impl MirroredBlock {
    fn prefix(&self) -> PrefixContext {
        PrefixContext { context: self.context, salt: self.salt.clone() }
    }
}

/// Mirror of the prefix index: the blocks that are cached according to the KV events, and the contexts (hash
/// of all tokens up to the end of a block) whose KV has really been computed.
#[derive(Debug, Default)]
pub(crate) struct IndexMirror {
    blocks: BTreeMap<(u8, BlockHash), MirroredBlock>,
    cached_prefixes: HashSet<PrefixIdentity>,
    /// Prefixes that were removed in this tick; a row that was planned earlier in the same tick may have used
    /// them.
    removed_this_tick: HashSet<PrefixIdentity>,
    /// Contexts and salts of all blocks stored so far, without a group that keeps all positions: a block of a
    /// window group may be stored after the preceding block was removed.
    stored_contexts: BTreeMap<BlockHash, PrefixContext>,
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

    /// Groups and hashes of the blocks that are cached according to the KV events.
    pub(crate) fn hashes(&self) -> impl ExactSizeIterator<Item = (u8, BlockHash)> {
        self.blocks.keys().copied()
    }

    /// Whether the first `blocks` blocks of `tokens` may be a prefix hit under `salt`: each group must have the
    /// blocks that the query after the hit reads.
    pub(crate) fn has_prefix(
        &self,
        tokens: &[Token],
        blocks: u32,
        size: u32,
        salt: Option<&str>,
        kinds: &[KvKind],
    ) -> bool {
        let mut context = EMPTY;
        let prefix = tokens.chunks_exact(size as usize).take(blocks as usize);
        (0..).zip(prefix).all(|(block, ids)| {
            context = ids.iter().fold(context, |c, &id| fold(c, entry(c, id)));
            let is_read = |kind: &KvKind| (block + 1) * size > kind.first_read(blocks * size);
            (0..).zip(kinds).filter(|(_, kind)| is_read(kind)).all(|(group, _)| {
                let identity = PrefixIdentity { group, salt: salt.map(str::to_owned), context };
                self.cached_prefixes.contains(&identity)
                    || self.removed_this_tick.contains(&identity)
            })
        })
    }

    /// Applies one KV event and checks it.
    pub(crate) fn apply(&mut self, event: &KvEvent, size: u32, kinds: &[KvKind]) -> CheckResult {
        match event {
            KvEvent::Stored { hashes, parent, tokens, extra_keys, group } => {
                ensure!("I14", usize::from(*group) < kinds.len(), "group {group}");
                let ids = hashes.len() * size as usize;
                ensure!("I14", tokens.len() == ids, "{} ids, expected {ids}", tokens.len());
                ensure!("I14", extra_keys.len() == hashes.len(), "extra keys {extra_keys:?}");
                let mut parent = *parent;
                for ((&hash, ids), extra) in
                    hashes.iter().zip(tokens.chunks_exact(size as usize)).zip(extra_keys)
                {
                    let before = self.context_before(hash, parent, extra, *group, kinds)?;
                    self.store(*group, hash, parent, before, ids)?;
                    parent = Some(hash);
                }
                Ok(())
            }
            KvEvent::Removed { hashes, group } => {
                hashes.iter().try_for_each(|hash| self.remove(*group, *hash))
            }
            KvEvent::Cleared => {
                self.blocks.clear();
                self.cached_prefixes.clear();
                Ok(())
            }
        }
    }

    /// Context and salt of the prefix before a block that is being stored in `group`.
    fn context_before(
        &mut self,
        hash: BlockHash,
        parent: Option<BlockHash>,
        extra: &[ExtraKey],
        group: u8,
        kinds: &[KvKind],
    ) -> Result<PrefixContext, InvariantViolation> {
        let Some(parent) = parent else {
            let salt = extra.iter().find_map(|key| match key {
                ExtraKey::Salt(salt) => Some(salt.clone()),
                ExtraKey::Lora(_) => None,
            });
            return Ok(PrefixContext { context: EMPTY, salt });
        };
        ensure!("I4", extra.is_empty(), "{hash:?} has extra keys after the first block");
        let is_window = kinds[usize::from(group)].window().is_some();
        if !is_window && let Some(block) = self.blocks.get_mut(&(group, parent)) {
            block.children += 1;
        }
        // A window group stores a block only if the groups that keep all positions have the block and, with it,
        // the preceding block.
        let parent_group = if is_window { 0 } else { group };
        let known = match kinds[0].window() {
            None => self.blocks.get(&(parent_group, parent)).map(MirroredBlock::prefix),
            Some(_) => self.stored_contexts.get(&parent).cloned(),
        };
        known.ok_or_else(|| InvariantViolation {
            invariant: "I4",
            text: format!("{hash:?} is stored without its parent {parent:?}"),
        })
    }

    fn store(
        &mut self,
        group: u8,
        hash: BlockHash,
        parent: Option<BlockHash>,
        before: PrefixContext,
        ids: &[Token],
    ) -> CheckResult {
        ensure!("I15", hash.0 != 0, "hash 0");
        let is_new = !self.blocks.contains_key(&(group, hash));
        ensure!("I14", is_new, "{hash:?} is stored twice in group {group}");
        let PrefixContext { context, salt } = before;
        let context = ids.iter().fold(context, |c, &id| fold(c, entry(c, id)));
        let computed = self.computed_contexts.contains(&context);
        ensure!("I15", computed, "{hash:?} of {ids:?} is stored, but no output covers it");
        self.stored_contexts.insert(hash, PrefixContext { context, salt: salt.clone() });
        self.cached_prefixes.insert(PrefixIdentity { group, salt: salt.clone(), context });
        self.blocks.insert((group, hash), MirroredBlock { context, salt, parent, children: 0 });
        self.stored += 1;
        Ok(())
    }

    fn remove(&mut self, group: u8, hash: BlockHash) -> CheckResult {
        let Some(block) = self.blocks.remove(&(group, hash)) else {
            ensure!("I14", false, "{hash:?} is removed from group {group}, but was not stored");
            return Ok(());
        };
        ensure!(
            "I4",
            block.children == 0,
            "{hash:?} is removed before {} children",
            block.children
        );
        if let Some(parent) = block.parent.and_then(|p| self.blocks.get_mut(&(group, p))) {
            parent.children = parent.children.saturating_sub(1);
        }
        let identity = PrefixIdentity { group, salt: block.salt, context: block.context };
        self.cached_prefixes.remove(&identity);
        self.removed_this_tick.insert(identity);
        self.removed += 1;
        Ok(())
    }
}
