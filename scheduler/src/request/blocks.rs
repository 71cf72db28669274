//! KV blocks of a request: prefix hits, allocation, block keys.

use super::Request;
use crate::cold_fields::RequestColdFields;
use kvcache::{BlockHasher, BlockTables, KvCache, SequenceContent, TableEntries};
use protocol::{BlockId, PoolingMethod};

impl Request {
    /// Returns whether the prompt may use cached blocks. It may not if prompt logprobs or certain pooling
    /// methods need every position to be forwarded, or if the request must own the blocks of its windows.
    pub(crate) fn may_use_prefix_cache(&self, kv: &KvCache) -> bool {
        let sampling = &self.cold_fields.params.sampling;
        if sampling.pooling.as_ref().is_some_and(PoolingMethod::reads_every_token)
            || self.owns_windows(kv)
        {
            return false;
        }
        sampling.prompt_logprobs.is_none()
            || self.cold_fields.prompt_logprobs_sent >= self.cold_fields.prompt_len
    }

    /// Returns whether the blocks of the request in window groups are never shared. A non-preemptible request
    /// releases such blocks into its reserve, for which they must become available.
    pub(crate) fn owns_windows(&self, kv: &KvCache) -> bool {
        self.non_preemptible && kv.group_counts().windowed > 0
    }

    /// Returns the number of entries in the block tables.
    #[inline]
    pub(crate) fn table_entries(&self, kv: &KvCache) -> TableEntries {
        let has_windows = kv.group_counts().windowed > 0;
        let windowed = if has_windows { self.cold_fields.windows.entries } else { 0 };
        TableEntries { kept: self.block_count, windowed }
    }

    /// Returns the number of blocks that the request holds in window groups.
    pub(crate) fn window_blocks_held(&self, kv: &KvCache) -> u32 {
        let windows = self.cold_fields.block_tables.iter().skip(kv.group_counts().kept as usize);
        windows.map(|table| table.held().len() as u32).sum()
    }

    /// Returns the number of entries in the shortest block table.
    #[inline]
    pub(crate) fn smallest_table(&self, kv: &KvCache) -> u32 {
        let TableEntries { kept, windowed } = self.table_entries(kv);
        if kv.group_counts().windowed > 0 { windowed } else { kept }
    }

    /// Adds a reference to each block of a prefix hit of `blocks` blocks, makes the blocks the entries of the
    /// empty tables `tables`, and makes these the block tables of the request. The request must hold no blocks.
    pub(crate) fn pin_blocks(
        &mut self,
        mut tables: BlockTables,
        blocks: u32,
        found: &[BlockId],
        kv: &mut KvCache,
    ) {
        kv.pin(&mut tables, blocks, found);
        let cold = &mut *self.cold_fields;
        cold.block_tables = tables;
        self.set_table_entries(TableEntries::all(blocks), kv);
    }

    /// Allocates blocks until each block table has at least `entries` entries.
    pub(crate) fn grow_tables(&mut self, entries: TableEntries, kv: &mut KvCache) {
        let current = self.table_entries(kv);
        let entries = TableEntries {
            kept: entries.kept.max(current.kept),
            windowed: entries.windowed.max(current.windowed),
        };
        kv.grow(&mut self.cold_fields.block_tables, entries);
        self.set_table_entries(entries, kv);
    }

    fn set_table_entries(&mut self, entries: TableEntries, kv: &KvCache) {
        let TableEntries { kept, windowed } = kv.group_counts();
        self.block_count = if kept > 0 { entries.kept } else { 0 };
        if windowed > 0 {
            self.cold_fields.windows.entries = entries.windowed;
        }
    }

    /// Frees all blocks and state slots of the request. Returns the emptied block tables, so that another request can reuse
    /// their memory.
    pub(crate) fn free_blocks(&mut self, kv: &mut KvCache) -> BlockTables {
        let mut tables = std::mem::take(&mut self.cold_fields.block_tables);
        kv.free(&mut tables);
        kv.states_mut().free(&mut self.cold_fields.states.slots);
        self.set_table_entries(TableEntries::default(), kv);
        tables
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
