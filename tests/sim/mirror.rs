//! A subscriber of one replica's KV events. I14: the events applied to an empty set are the index.
//! I15: nothing is announced before its KV is computed, nor twice. I17: nothing that failed is.
//! I4: parents are announced first and leave last, and salts stay apart.

use crate::broken::{Checked, ensure};
use crate::hash_model::text::{EMPTY, entry, fold};
use protocol::{BlockHash, ExtraKey, KvEvent, Token};
use std::collections::{BTreeMap, HashSet};

/// A block as a subscriber knows it.
#[derive(Debug, Clone)]
struct Known {
    /// Context behind the block: stands for everything in it and in front of it.
    context: u64,
    salt: Option<String>,
    parent: Option<BlockHash>,
    children: u32,
}

/// What a subscriber believes to be cached, and what the devices have really computed.
#[derive(Debug, Default)]
pub(crate) struct Mirror {
    blocks: BTreeMap<BlockHash, Known>,
    findable: HashSet<(Option<String>, u64)>,
    /// Removed in this tick: a plan of the same tick may have used them before.
    gone: HashSet<(Option<String>, u64)>,
    computed: HashSet<u64>,
    /// Blocks announced so far.
    pub(crate) stored: u64,
    /// Blocks taken back so far.
    pub(crate) removed: u64,
}

impl Mirror {
    /// Notes that an output delivered to the engine covers a block with this context.
    pub(crate) fn computed(&mut self, context: u64) {
        self.computed.insert(context);
    }

    /// The device is gone, and with it everything computed.
    pub(crate) fn lose(&mut self) {
        self.computed.clear();
    }

    /// All effects of a tick were taken.
    pub(crate) fn end_tick(&mut self) {
        self.gone.clear();
    }

    /// Hashes believed to be cached.
    pub(crate) fn hashes(&self) -> impl ExactSizeIterator<Item = BlockHash> {
        self.blocks.keys().copied()
    }

    /// Whether the first `blocks` blocks of `tokens` may be found under `salt`.
    pub(crate) fn finds(
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
            self.findable.contains(&identity) || self.gone.contains(&identity)
        })
    }

    /// Applies one event.
    pub(crate) fn apply(&mut self, event: &KvEvent, size: u32) -> Checked {
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
                self.findable.clear();
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
    ) -> Checked {
        ensure!("I15", hash.0 != 0, "hash 0");
        ensure!("I14", !self.blocks.contains_key(&hash), "{hash:?} is announced twice");
        let (before, salt) = match parent {
            None => {
                let salt = extra.iter().find_map(|key| match key {
                    ExtraKey::Salt(salt) => Some(salt.clone()),
                    ExtraKey::Lora(_) => None,
                });
                (EMPTY, salt)
            }
            Some(parent) => {
                let Some(known) = self.blocks.get_mut(&parent) else {
                    ensure!("I4", false, "{hash:?} is announced without its parent {parent:?}");
                    return Ok(());
                };
                known.children += 1;
                ensure!("I4", extra.is_empty(), "{hash:?} has a salt behind the first block");
                (known.context, known.salt.clone())
            }
        };
        let context = ids.iter().fold(before, |c, &id| fold(c, entry(c, id)));
        let computed = self.computed.contains(&context);
        ensure!("I15", computed, "{hash:?} of {ids:?} is announced, but no output covers it");
        self.findable.insert((salt.clone(), context));
        self.blocks.insert(hash, Known { context, salt, parent, children: 0 });
        self.stored += 1;
        Ok(())
    }

    fn remove(&mut self, hash: BlockHash) -> Checked {
        let Some(known) = self.blocks.remove(&hash) else {
            ensure!("I14", false, "{hash:?} is removed, but was not there");
            return Ok(());
        };
        ensure!(
            "I4",
            known.children == 0,
            "{hash:?} is removed before {} children",
            known.children
        );
        if let Some(parent) = known.parent.and_then(|p| self.blocks.get_mut(&p)) {
            parent.children -= 1;
        }
        let identity = (known.salt, known.context);
        self.findable.remove(&identity);
        self.gone.insert(identity);
        self.removed += 1;
        Ok(())
    }
}
