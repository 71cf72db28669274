//! Registers the full blocks of a request, prompt and output blocks alike, in the prefix cache.

use crate::request::Request;
use kvcache::{BlockHasher, KvCache, PrefixCacheInsertOutcome, TableEntries};

/// Registers the full blocks of `request` below position `below` in the prefix cache, in order and, in groups that
/// keep all positions, without gaps.
///
/// In these groups, registration stops for the rest of the request at a block whose preceding block is not registered, or
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
    let TableEntries { kept, windowed } = kv.group_counts();
    let mut end = full;
    for group in 0..kept as u8 {
        end = publish_kept(request, kv, group, end);
    }
    request.may_publish = end == full;
    if windowed > 0 && !request.owns_windows(kv) {
        for group in kept..kept + windowed {
            publish_window(request, kv, group as u8, end);
        }
    }
    request.published_blocks = end;
}

/// Registers the blocks below index `end` in a group that keeps all positions. Returns the index of the first
/// block that could not be registered, or `end`.
fn publish_kept(request: &mut Request, kv: &mut KvCache, group: u8, end: u32) -> u32 {
    for index in request.published_blocks..end {
        let (tables, content) = request.cold_fields.block_tables_and_content();
        match kv.publish(tables, group, index, content) {
            PrefixCacheInsertOutcome::Stored => {}
            PrefixCacheInsertOutcome::Deduplicated => {
                request.sent_blocks = request.sent_blocks.min(index);
            }
            PrefixCacheInsertOutcome::Rejected => return index,
        }
    }
    end
}

/// Registers the blocks below index `end` that the request holds in a window group. A block that cannot be
/// registered does not affect the blocks after it.
fn publish_window(request: &mut Request, kv: &mut KvCache, group: u8, end: u32) {
    let held = request.cold_fields.block_tables.group(group.into()).first_held();
    for index in request.published_blocks.max(held)..end {
        let (tables, content) = request.cold_fields.block_tables_and_content();
        if kv.publish(tables, group, index, content) == PrefixCacheInsertOutcome::Deduplicated {
            let sent = &mut request.cold_fields.windows.sent_entries;
            *sent = (*sent).min(index);
        }
    }
}
