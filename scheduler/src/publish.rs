//! Makes a request's full blocks findable, prompt and generated alike: one rule for both.

use crate::request::Request;
use kvcache::{Bug, Hasher, KvCache, Published};

/// Publishes the full blocks of `request` that lie below position `below`, in order, without gaps.
///
/// Stops for good where the parent is not findable or another block has the hash. An adopted block
/// changes the table, so the seat is told from that entry on.
pub(crate) fn publish(request: &mut Request, kv: &mut KvCache, hasher: &Hasher, below: u32) {
    let full = below.min(request.len) / kv.block_tokens();
    if !request.publishing || full <= request.published {
        return;
    }
    request.gather_below(full * kv.block_tokens());
    request.extend_keys(hasher);
    while request.published < full {
        let index = request.published;
        let (table, content) = request.cold.table_and_content();
        match kv.publish(table, index, content) {
            Published::Stored => {}
            Published::Adopted if kv.planted().has(Bug::AdoptionNotSent) => {}
            Published::Adopted => request.sent = request.sent.min(index),
            Published::Refused => {
                request.publishing = false;
                return;
            }
        }
        request.published += 1;
    }
}
