//! Attacks by many requests that cost more than their size suggests.

use super::target::AttackTarget;
use crate::rng::SimRng;
use serde_json::json;

/// Sends several concurrent requests to tokenise long texts.
pub(super) fn tokenize(target: &AttackTarget, rng: &mut SimRng) {
    let words = rng.scaled(10, 400_000) as usize;
    let body = match rng.below(4) {
        0 => json!({"prompt": "aZ9 ".repeat(words)}),
        1 => json!({"prompt": "\u{1f980}\u{200d}".repeat(words / 4)}),
        2 => json!({"messages": vec![json!({"role": "user", "content": "fox"}); words.min(4_000)]}),
        _ => json!({"prompt": "a".repeat(words)}),
    };
    let body = body.to_string();
    std::thread::scope(|scope| {
        for _ in 0..4 {
            scope.spawn(|| target.post("tokenize_floods", "/tokenize", body.as_bytes()));
        }
    });
    let tokens: Vec<u64> = (0..words.min(100_000) as u64).map(|i| i % 300).collect();
    let body = json!({"tokens": tokens}).to_string();
    target.post("tokenize_floods", "/detokenize", body.as_bytes());
}

/// Requests metrics and other server pages repeatedly on one connection.
pub(super) fn metrics(target: &AttackTarget, rng: &mut SimRng) {
    let Some(mut client) = target.connect() else { return };
    for _ in 0..rng.between(1, 40) {
        let path = rng.pick(&["/metrics", "/v1/models", "/load", "/version", "/openapi.json"]);
        client.send("GET", path, "", b"");
        match client.read() {
            Some(reply) => target.check("metrics_floods", &reply),
            None => return target.add_violation(format!("metrics_floods: no reply on {path}")),
        }
    }
}
