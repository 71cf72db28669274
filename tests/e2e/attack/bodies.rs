//! Request bodies that are too large, nested too deeply, or not JSON.

use super::target::{AttackTarget, REPLY_TIMEOUT};
use crate::http::malformed::{MalformedRequestRng, exchange, garbage, request};
use crate::rng::SimRng;

/// Number of requests on one connection.
const BURST: u64 = 40;

/// Sends a request body of up to 40 MB: one string, nested lists, one long list, or spaces.
pub(super) fn huge(target: &AttackTarget, rng: &mut SimRng) {
    let bytes = rng.scaled(1_000, 40_000_000) as usize;
    let body = match rng.below(4) {
        0 => format!("{{\"prompt\":\"{}\"}}", "a ".repeat(bytes / 2)),
        1 => format!("{{\"prompt\":{}", "[".repeat(bytes)),
        2 => format!("{{\"prompt\":[{}1]}}", "1,".repeat(bytes / 2)),
        _ => " ".repeat(bytes),
    };
    let path = rng.pick(&["/v1/completions", "/v1/chat/completions", "/tokenize"]);
    target.post("huge_bodies", path, body.as_bytes());
}

/// Sends mutated JSON requests and malformed HTTP request heads over one connection.
pub(super) fn malformed(target: &AttackTarget, rng: &mut SimRng) {
    let mut request_rng = MalformedRequestRng(rng.next_u64());
    let mut bytes = Vec::new();
    if rng.chance_per_mille(300) {
        bytes = garbage(&mut request_rng);
    } else {
        for _ in 0..BURST {
            request(&mut request_rng, &mut bytes);
        }
    }
    let mut counts = [0; 6];
    // `exchange` panics if it gets a 5xx status or if the connection hangs.
    let sent = std::panic::catch_unwind(std::panic::AssertUnwindSafe(|| {
        exchange(target.address, &bytes, REPLY_TIMEOUT, &mut counts);
    }));
    if sent.is_err() {
        target.add_violation("malformed_bodies: see the panic above".to_owned());
    }
}
