//! Set of the blocks that a publisher has announced to its subscribers, from which snapshots are made.

use super::backlog::{CoalescedChanges, EventBacklog};
use protocol::{BlockHash, ExtraKey, KvEvent, Token};
use std::collections::HashMap;

/// Key of a KV block: its block hash and its KV cache group.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash)]
pub(super) struct BlockHashWithGroupId {
    pub(super) group_id: u8,
    pub(super) hash: BlockHash,
}

/// Blocks that were stored by published events and not removed by later ones. A subscriber that has missed no
/// event has the same set.
#[derive(Debug, Default)]
pub struct AnnouncedBlocks {
    blocks: HashMap<BlockHashWithGroupId, AnnouncedBlock>,
    /// Number of blocks stored so far; orders blocks so that parents precede children.
    stored: u64,
    stores_token_ids: bool,
}

/// Block that was announced to subscribers, or that will be announced with the backlog (the coalesced events
/// that did not fit in the publisher's queue).
#[derive(Debug)]
pub(super) struct AnnouncedBlock {
    /// Number that orders blocks by time: blocks that were stored earlier have lower numbers.
    pub(super) order: u64,
    pub(super) parent: Option<BlockHash>,
    tokens: Box<[Token]>,
    extra: Vec<ExtraKey>,
}

impl AnnouncedBlock {
    /// Memory usage of the block, in bytes; counted for the byte limit of the publisher's queue.
    pub(super) fn bytes(&self) -> u64 {
        let keys = self.extra.iter().map(|key| {
            let (ExtraKey::Lora(text) | ExtraKey::Salt(text)) = key;
            size_of::<ExtraKey>() + text.len()
        });
        (size_of::<Self>() + size_of_val(&self.tokens[..]) + keys.sum::<usize>()) as u64
    }

    /// Returns the blocks of a `Stored` event, with order numbers from `order` on. Other events have no
    /// blocks.
    pub(super) fn blocks_of(
        event: &KvEvent,
        mut order: u64,
    ) -> impl Iterator<Item = (BlockHash, Self)> {
        let (hashes, mut parent, tokens, extra_keys) = match event {
            KvEvent::Stored { hashes, parent, tokens, extra_keys, .. } => {
                (hashes.as_slice(), *parent, tokens.as_slice(), extra_keys.as_slice())
            }
            KvEvent::Removed { .. } | KvEvent::Cleared => Default::default(),
        };
        let per_block = tokens.len() / hashes.len().max(1);
        hashes.iter().enumerate().map(move |(i, &hash)| {
            let ids = tokens.get(i * per_block..(i + 1) * per_block).unwrap_or_default();
            let extra = extra_keys.get(i).cloned().unwrap_or_default();
            let block = Self { order, parent: parent.replace(hash), tokens: ids.into(), extra };
            order += 1;
            (hash, block)
        })
    }
}

impl AnnouncedBlocks {
    /// Creates an empty set. Without `stores_token_ids`, its snapshots carry no token ids.
    pub fn new(stores_token_ids: bool) -> Self {
        Self { stores_token_ids, ..Self::default() }
    }

    /// Applies a published event to the set of announced blocks.
    pub fn apply(&mut self, event: &KvEvent) {
        match event {
            KvEvent::Cleared => self.blocks.clear(),
            KvEvent::Removed { hashes, group } => {
                for &hash in hashes {
                    self.blocks.remove(&BlockHashWithGroupId { group_id: *group, hash });
                }
            }
            KvEvent::Stored { group, .. } => {
                for (hash, block) in AnnouncedBlock::blocks_of(event, self.stored) {
                    self.store(BlockHashWithGroupId { group_id: *group, hash }, block);
                }
            }
        }
    }

    /// Applies a backlog to the set of announced blocks. The backlog replaces the events that did not fit in
    /// the publisher's queue.
    pub fn apply_backlog(&mut self, backlog: EventBacklog) {
        let CoalescedChanges { cleared, removed, stored } = backlog.coalesce();
        if cleared {
            self.blocks.clear();
        }
        for key in removed {
            self.blocks.remove(&key);
        }
        for (key, block) in stored {
            self.store(key, AnnouncedBlock { order: self.stored, ..block });
        }
    }

    fn store(&mut self, key: BlockHashWithGroupId, mut block: AnnouncedBlock) {
        self.stored = block.order + 1;
        if !self.stores_token_ids {
            block.tokens = Box::default();
        }
        self.blocks.insert(key, block);
    }

    /// Number of announced blocks.
    pub fn len(&self) -> usize {
        self.blocks.len()
    }

    /// Whether no blocks are announced.
    pub fn is_empty(&self) -> bool {
        self.blocks.is_empty()
    }

    /// Returns events that rebuild the set: a clear, then all blocks, parents first.
    pub fn snapshot(&self) -> Vec<KvEvent> {
        let mut blocks: Vec<_> =
            self.blocks.iter().map(|(key, block)| (block.order, key, block)).collect();
        blocks.sort_unstable_by_key(|(order, ..)| *order);
        let mut events = vec![KvEvent::Cleared];
        for (_, &BlockHashWithGroupId { group_id, hash }, block) in blocks {
            if let Some(KvEvent::Stored { hashes, tokens, extra_keys, group, .. }) =
                events.last_mut()
                && *group == group_id
                && hashes.last().copied() == block.parent
            {
                hashes.push(hash);
                tokens.extend(&block.tokens);
                extra_keys.push(block.extra.clone());
                continue;
            }
            events.push(KvEvent::Stored {
                hashes: vec![hash],
                parent: block.parent,
                tokens: block.tokens.to_vec(),
                extra_keys: vec![block.extra.clone()],
                group: group_id,
            });
        }
        events
    }
}
