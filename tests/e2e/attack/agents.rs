//! Attacks on the APIs of coding agents: stored responses, conversations, Anthropic messages, rendered prompts.

use super::target::AttackTarget;
use crate::rng::SimRng;
use serde_json::{Value, json};

const RESPONSES: &str = "/v1/responses";
const CONVERSATIONS: &str = "/v1/conversations";
/// Size in bytes above which the server removes the oldest stored responses, and the oldest conversations.
const STORE_BYTES_MAX: usize = 64 << 20;

fn send(target: &AttackTarget, kind: &str, path: &str, body: &Value) -> Option<Value> {
    let reply = target.post(kind, path, body.to_string().as_bytes())?;
    (reply.status == 200).then(|| serde_json::from_slice(&reply.body).unwrap_or_default())
}

/// Sends `method path` without a body on a new connection.
fn call(target: &AttackTarget, kind: &str, method: &str, path: &str) {
    let Some(mut client) = target.connect() else { return };
    client.send(method, path, "", b"");
    match client.read() {
        Some(reply) => target.check(kind, &reply),
        None => target.add_violation(format!("{kind}: no reply on {method} {path}")),
    }
}

/// Returns `count` messages of `length` characters.
fn items(count: usize, length: usize) -> Value {
    json!(vec![json!({"role": "user", "content": "x".repeat(length)}); count])
}

/// Fills the store of responses and the store of conversations up to their limits, so that memory growth afterwards
/// is not that of stores that fill up.
pub(super) fn fill_stores(target: &AttackTarget) {
    const KIND: &str = "fill_stores";
    let (items, bytes) = (500, 2_000);
    for _ in 0..=STORE_BYTES_MAX / (items * bytes) {
        let response = json!({"input": self::items(items, bytes), "max_output_tokens": 1, "truncation": "auto"});
        send(target, KIND, RESPONSES, &response);
        send(target, KIND, CONVERSATIONS, &json!({"items": self::items(items, bytes)}));
    }
}

/// Stores responses, continues one of them several times, and reads, lists and deletes them, also with ids that
/// do not exist.
pub(super) fn responses(target: &AttackTarget, rng: &mut SimRng) {
    const KIND: &str = "stored_responses";
    let (count, length) = (rng.scaled(1, 200) as usize, rng.scaled(1, 2_000) as usize);
    let mut previous = Value::Null;
    for _ in 0..rng.between(1, 4) {
        let body = json!({"input": items(count, length), "max_output_tokens": 4, "truncation": "auto",
            "previous_response_id": previous, "metadata": {"k": "v".repeat(length.min(512))}});
        previous = send(target, KIND, RESPONSES, &body).map_or(Value::Null, |r| r["id"].clone());
    }
    let id = previous.as_str().unwrap_or("resp_unknown").to_owned();
    for method in ["GET", "DELETE", "GET"] {
        call(target, KIND, method, &format!("{RESPONSES}/{id}"));
    }
    call(target, KIND, "GET", &format!("{RESPONSES}/{id}/input_items?limit=100"));
}

/// Fills conversations with items, reads them page by page, and leaves them or deletes them.
pub(super) fn conversations(target: &AttackTarget, rng: &mut SimRng) {
    const KIND: &str = "conversations";
    let (count, length) = (rng.scaled(1, 2_000) as usize, rng.scaled(1, 2_000) as usize);
    let made = send(target, KIND, CONVERSATIONS, &json!({"items": items(count, length)}));
    let id = made.as_ref().and_then(|c| c["id"].as_str()).unwrap_or("conv_unknown").to_owned();
    for _ in 0..rng.between(1, 4) {
        send(
            target,
            KIND,
            &format!("{CONVERSATIONS}/{id}/items"),
            &json!({"items": items(20, length)}),
        );
        call(target, KIND, "GET", &format!("{CONVERSATIONS}/{id}/items?limit=100"));
    }
    let answer = json!({"input": "a", "conversation": id, "max_output_tokens": 4});
    send(target, KIND, RESPONSES, &answer);
    if rng.chance_per_mille(500) {
        call(target, KIND, "DELETE", &format!("{CONVERSATIONS}/{id}"));
    }
}

/// Sends Anthropic messages with many turns, tools, context edits and thinking budgets.
pub(super) fn messages(target: &AttackTarget, rng: &mut SimRng) {
    let turns = rng.scaled(1, 200) as usize;
    let call = |i: usize| {
        [
            json!({"role": "assistant", "content": [
                {"type": "thinking", "thinking": "t".repeat(i), "signature": ""},
                {"type": "tool_use", "id": format!("c{i}"), "name": "f", "input": {"q": "x".repeat(i)}}]}),
            json!({"role": "user", "content": [
                {"type": "tool_result", "tool_use_id": format!("c{i}"), "content": "r".repeat(10 * i)}]}),
        ]
    };
    let start = std::iter::once(json!({"role": "user", "content": "start"}));
    let conversation: Vec<Value> = start.chain((0..turns).flat_map(call)).collect();
    let edits = json!([{"type": "clear_thinking_20251015"},
        {"type": "clear_tool_uses_20250919", "trigger": {"type": "tool_uses", "value": rng.between(0, 9)}}]);
    let body = json!({"messages": conversation, "max_tokens": 4, "context_management": {"edits": edits},
        "thinking": {"type": "enabled", "budget_tokens": 1_024}, "system": "s".repeat(turns),
        "tools": [{"name": "f", "input_schema": {"type": "object"}}]});
    let path = rng.pick(&["/v1/messages", "/v1/messages/count_tokens"]);
    send(target, "agent_messages", path, &body);
}

/// Renders prompts, generates from token ids, and calls routes that this server does not serve.
pub(super) fn renders(target: &AttackTarget, rng: &mut SimRng) {
    let n = rng.scaled(1, 3_000) as usize;
    let (path, body) = match rng.below(6) {
        0 => ("/v1/completions/render", json!({"prompt": vec!["a"; n.min(300)], "max_tokens": 4})),
        1 => ("/v1/chat/completions/render", json!({"messages": items(n, 10)})),
        2 => (
            "/generate",
            json!({"input_ids": vec![7; n], "sampling_params": {"max_new_tokens": 4}}),
        ),
        3 => ("/v1/embeddings", json!({"input": vec!["a"; n]})),
        4 => ("/rerank", json!({"query": "a", "documents": vec!["b"; n]})),
        _ => ("/abort_request", json!({"request_id": "x".repeat(n)})),
    };
    send(target, "renders", path, &body);
}
