//! Block set that a subscriber builds from KV events, and checks of the invariants of these events.

use super::decode::{BlockRemoved, BlockStored, DecodedKvEvent, ExternalBlockHash};
use std::collections::HashMap;

/// Key of a block in a subscriber's block set.
#[derive(Debug, Clone, PartialEq, Eq, Hash)]
struct SubscriberBlockKey {
    /// Storage medium of the block.
    medium: Option<String>,
    /// Index of the KV cache group.
    group_idx: u32,
    hash: ExternalBlockHash,
}

/// Blocks that the received events have stored and not removed.
#[derive(Debug, Clone, Default)]
pub struct SubscriberBlocks {
    blocks: HashMap<SubscriberBlockKey, SubscriberBlock>,
    /// Whether a clear was received. The set is complete from then on, so invariants can be checked.
    is_complete: bool,
}

/// Stored block: its parent, and the number of its stored children.
#[derive(Debug, Clone)]
struct SubscriberBlock {
    parent: Option<ExternalBlockHash>,
    children: u32,
}

/// Invariant of KV events that a received event violates.
#[derive(Debug, Clone, PartialEq, Eq, thiserror::Error)]
pub enum KvEventViolation {
    /// An event stores a block that is stored already.
    #[error("block {0} is stored twice")]
    StoredTwice(ExternalBlockHash),
    /// An event removes a block that is not stored.
    #[error("block {0} is removed but was not stored")]
    RemovedUnknown(ExternalBlockHash),
    /// An event stores a block before its parent.
    #[error("block {child} is stored before its parent {parent}")]
    ParentUnknown {
        /// Hash of the block.
        child: ExternalBlockHash,
        /// Hash of its parent.
        parent: ExternalBlockHash,
    },
    /// An event removes a block before its children.
    #[error("block {hash} is removed before its {children} children")]
    RemovedBeforeChildren {
        /// Hash of the block.
        hash: ExternalBlockHash,
        /// Number of children that are still stored.
        children: u32,
    },
    /// An event has token ids, but not one for each token of its blocks.
    #[error("{blocks} blocks of {block_size} tokens have {tokens} token ids")]
    TokenCount {
        /// Number of blocks in the event.
        blocks: usize,
        /// Tokens per block.
        block_size: u32,
        /// Number of token ids in the event.
        tokens: usize,
    },
    /// A block hash is 0, which some subscribers interpret as "no parent".
    #[error("a block hash is 0")]
    ZeroHash,
}

impl SubscriberBlocks {
    /// Applies an event to the set; appends the invariants that it violates to `violations`.
    pub fn apply(&mut self, event: &DecodedKvEvent, violations: &mut Vec<KvEventViolation>) {
        match event {
            DecodedKvEvent::AllBlocksCleared => {
                self.blocks.clear();
                self.is_complete = true;
            }
            DecodedKvEvent::BlockStored(stored) => self.store(stored, violations),
            DecodedKvEvent::BlockRemoved(removed) => self.remove(removed, violations),
        }
    }

    /// Number of blocks in the set.
    pub fn len(&self) -> usize {
        self.blocks.len()
    }

    /// Whether the set is empty.
    pub fn is_empty(&self) -> bool {
        self.blocks.is_empty()
    }

    /// Whether a clear was received, so that the set equals the publisher's block set.
    pub fn is_complete(&self) -> bool {
        self.is_complete
    }

    /// Returns the hashes of the blocks in the set, in no particular order.
    pub fn hashes(&self) -> impl Iterator<Item = &ExternalBlockHash> {
        self.blocks.keys().map(|key| &key.hash)
    }

    /// Counts the block `child` as a child of its parent. An unknown parent is a violation if the set is
    /// complete.
    fn add_child(
        &mut self,
        parent: &SubscriberBlockKey,
        child: &ExternalBlockHash,
    ) -> Option<KvEventViolation> {
        if let Some(block) = self.blocks.get_mut(parent) {
            block.children += 1;
            return None;
        }
        self.is_complete.then(|| KvEventViolation::ParentUnknown {
            child: child.clone(),
            parent: parent.hash.clone(),
        })
    }

    fn store(&mut self, stored: &BlockStored, violations: &mut Vec<KvEventViolation>) {
        violations.extend(check_token_count(stored));
        let key = |hash: &ExternalBlockHash| SubscriberBlockKey {
            medium: stored.medium.clone(),
            group_idx: stored.group_idx.unwrap_or(0),
            hash: hash.clone(),
        };
        // Blocks of a sliding window are stored and removed without regard to the preceding blocks.
        let is_window = stored.kv_cache_spec_sliding_window.is_some();
        let mut parent = stored.parent_block_hash.clone();
        for hash in &stored.block_hashes {
            if *hash == ExternalBlockHash::Number(0) {
                violations.push(KvEventViolation::ZeroHash);
            }
            if let Some(parent) = parent.as_ref().filter(|_| !is_window) {
                violations.extend(self.add_child(&key(parent), hash));
            }
            let parent = parent.replace(hash.clone()).filter(|_| !is_window);
            let block = SubscriberBlock { parent, children: 0 };
            if self.blocks.insert(key(hash), block).is_some() {
                violations.push(KvEventViolation::StoredTwice(hash.clone()));
            }
        }
    }

    fn remove(&mut self, removed: &BlockRemoved, violations: &mut Vec<KvEventViolation>) {
        let key = |hash: &ExternalBlockHash| SubscriberBlockKey {
            medium: removed.medium.clone(),
            group_idx: removed.group_idx.unwrap_or(0),
            hash: hash.clone(),
        };
        for hash in &removed.block_hashes {
            let Some(block) = self.blocks.remove(&key(hash)) else {
                if self.is_complete {
                    violations.push(KvEventViolation::RemovedUnknown(hash.clone()));
                }
                continue;
            };
            if block.children > 0 {
                let (hash, children) = (hash.clone(), block.children);
                violations.push(KvEventViolation::RemovedBeforeChildren { hash, children });
            }
            if let Some(parent) = block.parent.and_then(|parent| self.blocks.get_mut(&key(&parent)))
            {
                parent.children -= 1;
            }
        }
    }
}

/// Checks that an event has no token ids or one for each token of its blocks.
fn check_token_count(stored: &BlockStored) -> Option<KvEventViolation> {
    let (blocks, tokens) = (stored.block_hashes.len(), stored.token_ids.len());
    let block_size = stored.block_size;
    let is_valid = tokens == 0 || tokens == blocks * block_size as usize;
    (!is_valid).then_some(KvEventViolation::TokenCount { blocks, block_size, tokens })
}

#[cfg(test)]
mod tests {
    use super::*;

    fn stored(parent: Option<u64>, hashes: &[u64]) -> DecodedKvEvent {
        DecodedKvEvent::BlockStored(BlockStored {
            block_hashes: hashes.iter().map(|&h| ExternalBlockHash::Number(h)).collect(),
            parent_block_hash: parent.map(ExternalBlockHash::Number),
            token_ids: vec![7; hashes.len() * 2],
            block_size: 2,
            lora_id: None,
            medium: Some("GPU".to_owned()),
            lora_name: None,
            extra_keys: None,
            group_idx: Some(0),
            kv_cache_spec_kind: None,
            kv_cache_spec_sliding_window: None,
        })
    }

    fn removed(hashes: &[u64]) -> DecodedKvEvent {
        let block_hashes = hashes.iter().map(|&h| ExternalBlockHash::Number(h)).collect();
        DecodedKvEvent::BlockRemoved(BlockRemoved {
            block_hashes,
            medium: Some("GPU".to_owned()),
            group_idx: Some(0),
        })
    }

    fn apply_all(events: &[DecodedKvEvent]) -> (usize, Vec<String>) {
        let (mut set, mut violations) = (SubscriberBlocks::default(), Vec::new());
        for event in events {
            set.apply(event, &mut violations);
        }
        (set.len(), violations.iter().map(KvEventViolation::to_string).collect())
    }

    #[test]
    fn blocks_of_windows_have_no_parents() {
        let window = |parent, hashes: &[u64]| match stored(parent, hashes) {
            DecodedKvEvent::BlockStored(stored) => DecodedKvEvent::BlockStored(BlockStored {
                kv_cache_spec_kind: Some("sliding_window".to_owned()),
                kv_cache_spec_sliding_window: Some(4),
                ..stored
            }),
            other => other,
        };
        let events = [
            DecodedKvEvent::AllBlocksCleared,
            window(Some(9), &[1, 2, 3]),
            removed(&[1, 2]),
            window(Some(1), &[2]),
        ];
        assert_eq!(apply_all(&events), (2, Vec::new()));
    }

    #[test]
    fn violations_are_checked_after_the_first_clear() {
        let clear = DecodedKvEvent::AllBlocksCleared;
        assert_eq!(apply_all(&[clear.clone(), stored(None, &[1, 2]), stored(Some(2), &[3])]).0, 3);
        let valid = apply_all(&[clear.clone(), stored(None, &[1, 2]), removed(&[2, 1])]);
        assert_eq!(valid, (0, Vec::new()));
        for (events, expected) in [
            (vec![stored(None, &[1]), stored(None, &[1])], "stored twice"),
            (vec![removed(&[1])], "was not stored"),
            (vec![stored(Some(9), &[1])], "before its parent"),
            (vec![stored(None, &[1, 2]), removed(&[1])], "before its 1 children"),
            (vec![stored(None, &[0])], "is 0"),
        ] {
            let whole: Vec<DecodedKvEvent> =
                [clear.clone()].into_iter().chain(events.clone()).collect();
            let (_, texts) = apply_all(&whole);
            assert!(texts.len() == 1 && texts[0].contains(expected), "{texts:?}");
        }
        assert_eq!(
            apply_all(&[removed(&[1]), stored(Some(9), &[3])]),
            (1, Vec::new()),
            "a subscriber without a snapshot"
        );
    }
}
