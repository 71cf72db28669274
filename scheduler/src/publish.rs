//! Makes a request's full blocks findable, prompt and generated alike: one rule for both.

use crate::request::Request;
use kvcache::{BlockHasher, InjectedFault, KvCache, PublishOutcome};

/// Publishes the full blocks of `request` that lie below position `below`, in order, without gaps.
///
/// Stops for good where the parent is not findable or another block has the hash. An adopted block
/// changes the table, so the seat is told from that entry on.
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
            PublishOutcome::Stored => {}
            PublishOutcome::Deduplicated
                if kv.fault_injection().is_active(InjectedFault::DeduplicationNotSent) => {}
            PublishOutcome::Deduplicated => request.sent_blocks = request.sent_blocks.min(index),
            PublishOutcome::Rejected => {
                request.may_publish = false;
                return;
            }
        }
        request.published_blocks += 1;
    }
}
