//! KV blocks of a request: prefix hits, allocation, block keys.

use super::Request;
use crate::cold_fields::RequestColdFields;
use kvcache::{BlockHasher, BlockTable, KvCache, SequenceContent};
use protocol::{BlockId, PoolingMethod};

impl Request {
    /// Returns whether the prompt may use cached blocks. It may not if prompt logprobs or certain pooling
    /// methods need every position to be forwarded.
    pub(crate) fn may_use_prefix_cache(&self) -> bool {
        let sampling = &self.cold_fields.params.sampling;
        if sampling.pooling.as_ref().is_some_and(PoolingMethod::reads_every_token) {
            return false;
        }
        sampling.prompt_logprobs.is_none()
            || self.cold_fields.prompt_logprobs_sent >= self.cold_fields.prompt_len
    }

    /// Adds a reference to each block of a prefix hit, appends the blocks to the empty table `table`, and
    /// makes it the block table of the request. The request must hold no blocks.
    pub(crate) fn pin_blocks(
        &mut self,
        mut table: BlockTable,
        hit_blocks: &[BlockId],
        kv: &mut KvCache,
    ) {
        kv.pin(&mut table, hit_blocks);
        self.block_count = table.len();
        self.cold_fields.block_table = table;
    }

    /// Allocates `count` blocks and appends them to the block table of the request.
    pub(crate) fn allocate_blocks(&mut self, count: u32, kv: &mut KvCache) {
        kv.allocate(&mut self.cold_fields.block_table, count);
        self.block_count += count;
    }

    /// Frees all blocks of the request. Returns the emptied block table, so that another request can reuse
    /// its memory.
    pub(crate) fn free_blocks(&mut self, kv: &mut KvCache) -> BlockTable {
        let mut table = std::mem::take(&mut self.cold_fields.block_table);
        kv.free(&mut table);
        self.block_count = 0;
        table
    }

    /// Computes the keys (hash and guard) of the request's full blocks that have no key yet.
    pub(crate) fn extend_block_keys(&mut self, hasher: &BlockHasher) {
        let RequestColdFields { block_keys, tokens, extra_keys, .. } = &mut *self.cold_fields;
        hasher.extend_keys(block_keys, tokens, extra_keys.as_deref());
    }

    /// Returns the tokens and keys under which full blocks are registered in the prefix cache.
    pub(crate) fn content(&self) -> SequenceContent<'_> {
        let RequestColdFields { block_keys, extra_keys, .. } = &*self.cold_fields;
        SequenceContent { tokens: self.tokens(), block_keys, extra_keys: extra_keys.as_ref() }
    }
}
