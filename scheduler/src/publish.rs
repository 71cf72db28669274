//! Registers the full blocks of a request, prompt and output blocks alike, in the prefix cache.

use crate::request::Request;
use kvcache::{BlockHasher, KvCache, PrefixCacheInsertOutcome};

/// Registers the full blocks of `request` below position `below` in the prefix cache, in order and without
/// gaps.
///
/// Registration stops for the rest of the request at a block whose preceding block is not registered, or
/// whose hash is equal to the hash of a different block. If the cache already holds an equal block, the
/// cached block replaces the entry in the block table, and the entries from this index on are sent to the
/// executor again.
pub(crate) fn publish_full_blocks(
    request: &mut Request,
    kv: &mut KvCache,
    hasher: &BlockHasher,
    below: u32,
) {
    let full = below.min(request.len) / kv.block_tokens();
    if !request.may_publish || full <= request.published_blocks {
        return;
    }
    request.flush_tail_below(full * kv.block_tokens());
    request.extend_block_keys(hasher);
    while request.published_blocks < full {
        let index = request.published_blocks;
        let (table, content) = request.cold_fields.block_table_and_content();
        match kv.publish(table, index, content) {
            PrefixCacheInsertOutcome::Stored => {}
            PrefixCacheInsertOutcome::Deduplicated => {
                request.sent_blocks = request.sent_blocks.min(index);
            }
            PrefixCacheInsertOutcome::Rejected => {
                request.may_publish = false;
                return;
            }
        }
        request.published_blocks += 1;
    }
}
