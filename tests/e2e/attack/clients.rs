//! Attacks by clients that disconnect, or that do not read their streams.

use super::target::AttackTarget;
use crate::rng::SimRng;
use serde_json::json;
use std::time::Duration;

/// Starts streams and closes their connections before the first token or after some tokens.
pub(super) fn leave(target: &AttackTarget, rng: &mut SimRng) {
    for _ in 0..rng.between(1, 12) {
        let Some(mut client) = target.connect() else { return };
        let body = json!({"prompt": "leaving ".repeat(rng.between(1, 40) as usize),
            "max_tokens": 300, "stream": rng.chance_per_mille(800), "ignore_eos": true, "n": rng.between(1, 4)});
        let text = body.to_string();
        let head = format!(
            "POST /v1/completions HTTP/1.1\r\nHost: x\r\nContent-Type: application/json\r\n\
             Content-Length: {}\r\n\r\n{text}",
            text.len()
        );
        let _ = client.send_raw(head.as_bytes()); // The server may have closed the connection.
        if rng.chance_per_mille(500) {
            std::thread::sleep(Duration::from_millis(rng.below(60)));
        }
    }
}

/// Starts streams and does not read them while they are generated.
pub(super) fn read_slowly(target: &AttackTarget, rng: &mut SimRng) {
    let body = json!({"prompt": "slow", "max_tokens": 200, "stream": true, "ignore_eos": true,
        "logprobs": 5, "n": 4})
    .to_string();
    let head = format!(
        "POST /v1/completions HTTP/1.1\r\nHost: x\r\nContent-Type: application/json\r\n\
         Content-Length: {}\r\n\r\n{body}",
        body.len()
    );
    let mut clients: Vec<_> = (0..6).map_while(|_| target.connect()).collect();
    for client in &mut clients {
        let _ = client.send_raw(head.as_bytes()); // The server may reject the request.
    }
    std::thread::sleep(Duration::from_millis(300 + rng.below(700)));
    for client in &mut clients {
        if let Some(reply) = client.read_head() {
            target.check("slow_readers", &reply);
        }
    }
}
