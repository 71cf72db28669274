//! Bodies that are too large, too deep, or no JSON at all.

use super::target::{AttackTarget, REPLY_TIMEOUT};
use crate::http::malformed::{MalformedRequestRng, exchange, garbage, request};
use crate::rng::SimRng;

/// Requests on one connection.
const BURST: u64 = 40;

/// A body of up to 40 MB, announced or sent in full: one string, nested lists, or spaces.
pub(super) fn huge(target: &AttackTarget, chance: &mut SimRng) {
    let bytes = chance.scaled(1_000, 40_000_000) as usize;
    let body = match chance.below(4) {
        0 => format!("{{\"prompt\":\"{}\"}}", "a ".repeat(bytes / 2)),
        1 => format!("{{\"prompt\":{}", "[".repeat(bytes)),
        2 => format!("{{\"prompt\":[{}1]}}", "1,".repeat(bytes / 2)),
        _ => " ".repeat(bytes),
    };
    let path = chance.pick(&["/v1/completions", "/v1/chat/completions", "/tokenize"]);
    target.post("huge_bodies", path, body.as_bytes());
}

/// Requests with changed bytes, and bytes that are hardly HTTP, on one connection.
pub(super) fn malformed(target: &AttackTarget, chance: &mut SimRng) {
    let mut dice = MalformedRequestRng(chance.next_u64());
    let mut bytes = Vec::new();
    if chance.chance_per_mille(300) {
        bytes = garbage(&mut dice);
    } else {
        for _ in 0..BURST {
            request(&mut dice, &mut bytes);
        }
    }
    let mut counts = [0; 6];
    // It panics at 5xx and at a connection that hangs.
    let sent = std::panic::catch_unwind(std::panic::AssertUnwindSafe(|| {
        exchange(target.address, &bytes, REPLY_TIMEOUT, &mut counts);
    }));
    if sent.is_err() {
        target.add_violation("malformed_bodies: see the panic above".to_owned());
    }
}
