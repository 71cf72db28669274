//! Reference cache: a map of whole prefixes, with exact reference counts.

use super::*;

/// All inputs that the KV of a block depends on: the salt, and the token ids up to the end of the block.
type PrefixKey = (Option<String>, Vec<Token>);

/// A request: its content, its block table, and the number of its blocks in the prefix index.
pub(super) struct ReferenceRequest {
    pub(super) tokens: Vec<Token>,
    pub(super) keys: Vec<BlockKey>,
    pub(super) extra: Option<Arc<ExtraKeys>>,
    pub(super) tables: BlockTables,
    pub(super) published: u32,
    pub(super) publishing: bool,
}

impl ReferenceRequest {
    pub(super) fn prefix(&self, blocks: u32) -> PrefixKey {
        let salt = self.extra.as_ref().and_then(|extra| extra.salt.clone());
        (salt, self.tokens[..(blocks * BLOCK_TOKENS) as usize].to_vec())
    }

    pub(super) fn content(&self) -> SequenceContent<'_> {
        SequenceContent {
            tokens: &self.tokens,
            block_keys: &self.keys,
            extra_keys: self.extra.as_ref(),
        }
    }
}

/// Expected state of the cache: available blocks in the order in which they will be allocated, and the prefix
/// of each indexed block.
#[derive(Default)]
pub(super) struct ReferenceCache {
    pub(super) free: BTreeSet<u32>,
    pub(super) cached: Vec<u32>,
    pub(super) refs: BTreeMap<u32, u32>,
    pub(super) indexed: BTreeMap<PrefixKey, u32>,
    pub(super) now_ms: u64,
    /// Allocation time and use times of each block that is not free.
    pub(super) block_uses: BTreeMap<u32, Vec<u64>>,
    /// Lifetimes of evicted blocks.
    pub(super) lifetimes: Vec<BlockLifetime>,
}

impl ReferenceCache {
    pub(super) fn allocate(&mut self) -> u32 {
        let block = self.free.pop_first().unwrap_or_else(|| {
            let oldest = self.cached.remove(0);
            self.indexed.retain(|_, &mut block| block != oldest);
            let times = self.block_uses.remove(&oldest).expect("a cached block was allocated");
            self.lifetimes.push(expected_lifetime(&times, self.now_ms));
            oldest
        });
        self.block_uses.insert(block, vec![self.now_ms]);
        self.refs.insert(block, 1);
        block
    }

    pub(super) fn pin(&mut self, block: u32) {
        self.cached.retain(|&other| other != block);
        self.block_uses
            .get_mut(&block)
            .expect("a pinned block is in use or cached")
            .push(self.now_ms);
        *self.refs.entry(block).or_default() += 1;
    }

    pub(super) fn release(&mut self, block: u32) {
        let refs = self.refs.get_mut(&block).expect("a released block is referenced");
        *refs -= 1;
        if *refs > 0 {
            return;
        }
        if self.indexed.values().any(|&other| other == block) {
            self.cached.push(block);
        } else {
            self.block_uses.remove(&block);
            self.free.insert(block);
        }
    }
}

impl ReferenceCache {
    /// Replaces a reference to `block` by one to `indexed`.
    pub(super) fn replace(&mut self, block: u32, indexed: u32) {
        self.pin(indexed);
        self.release(block);
    }
}

/// Computes the expected lifetime of a block from its allocation time (first entry) and its use times.
fn expected_lifetime(times: &[u64], now_ms: u64) -> BlockLifetime {
    let uses = &times[1..];
    let gaps: Vec<u64> = uses.windows(2).map(|pair| pair[1] - pair[0]).collect();
    let first = gaps.len().saturating_sub(3);
    BlockLifetime {
        lifetime_ms: now_ms - times[0],
        idle_ms: now_ms - times[times.len() - 1],
        reuse_gaps_ms: gaps[first..].to_vec(),
    }
}
