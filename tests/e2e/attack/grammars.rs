//! Attacks by schemas, regular expressions, tool definitions and chat templates that are as expensive as
//! possible.

use super::target::AttackTarget;
use crate::rng::SimRng;
use serde_json::{Value, json};

fn send(target: &AttackTarget, kind: &str, path: &str, body: &Value) {
    target.post(kind, path, body.to_string().as_bytes());
}

/// Fills the cache of compiled grammars, so that memory growth afterwards is not that of a cache that fills up.
pub(super) fn fill_cache(target: &AttackTarget) {
    const CHOICES: usize = 1_000;
    const GRAMMARS: usize = 120;
    for i in 0..GRAMMARS {
        let choices: Vec<String> = (0..CHOICES).map(|j| format!("choice {j} of {i}")).collect();
        let body =
            json!({"prompt": "a", "max_tokens": 1, "structured_outputs": {"choice": choices}});
        send(target, "fill_cache", "/v1/completions", &body);
    }
}

/// A JSON schema nested to `depth` levels.
fn nested(depth: usize) -> Value {
    (0..depth).fold(
        json!({"type": "string"}),
        |inner, _| json!({"type": "object", "properties": {"a": inner}, "required": ["a"]}),
    )
}

/// Sends an expensive grammar of each kind.
pub(super) fn schemas(target: &AttackTarget, rng: &mut SimRng) {
    let n = rng.scaled(2, 2_000) as usize;
    let open = |open: &str, close: &str| format!("{}a{}", open.repeat(n), close.repeat(n));
    let constraint = match rng.below(8) {
        0 => json!({"regex": open("(", ")")}),
        1 => json!({"regex": format!("({})*x{{1000}}", "a?".repeat(n))}),
        2 => json!({"regex": "((((a{1,100}){1,100}){1,100}){1,100}){1,100}"}),
        3 => json!({"json": nested(n.min(110))}),
        4 => {
            json!({"json": {"type": "array", "minItems": 2_000_000_000_u64, "items": {"type": "null"}}})
        }
        5 => {
            json!({"json": {"anyOf": vec![json!({"type": "string", "pattern": format!("^x{n}(a|b)*c$")}); n]}})
        }
        6 => json!({"grammar": format!("start: {}", "\"a\"? ".repeat(n))}),
        _ => json!({"choice": (0..n).map(|i| format!("choice {i}")).collect::<Vec<_>>()}),
    };
    let body = json!({"prompt": "a", "max_tokens": 8, "structured_outputs": constraint});
    send(target, "hostile_schemas", "/v1/completions", &body);
}

/// Sends many tools, or tools whose parameters are large schemas.
pub(super) fn tools(target: &AttackTarget, rng: &mut SimRng) {
    let count = rng.scaled(1, 140) as usize;
    let depth = rng.scaled(1, 60) as usize;
    let tool = |i: usize| {
        let parameters =
            if i == 0 { nested(depth) } else { json!({"type": "object", "properties": {}}) };
        json!({"type": "function", "function": {"name": format!("tool_{i}"), "parameters": parameters,
            "description": "x".repeat(depth * 10)}})
    };
    let tools: Vec<Value> = (0..count).map(tool).collect();
    let choice = rng.pick(&["auto", "required", "none"]);
    let body = json!({"messages": [{"role": "user", "content": "call"}], "max_tokens": 8,
        "tools": tools, "tool_choice": choice});
    send(target, "hostile_tools", "/v1/chat/completions", &body);
}

/// Sends chat templates with endless loops, recursion, doubling strings, self-reference, and errors.
pub(super) fn templates(target: &AttackTarget, rng: &mut SimRng) {
    let template = rng.pick(&[
        "{% for i in range(100000000) %}{{ i }}{% endfor %}",
        "{% for a in range(9999) %}{% for b in range(9999) %}{{ messages }}{% endfor %}{% endfor %}",
        "{% macro m(x) %}{{ m(x) }}{{ m(x) }}{% endmacro %}{{ m(1) }}",
        "{{ 'x' * 1000000 }}",
        "{% set n = namespace(x='x') %}{% for i in range(60) %}{% set n.x = n.x ~ n.x %}{% endfor %}{{ n.x|length }}",
        "{% set n = namespace() %}{% set n.x = n %}{{ n|tojson }}{{ n }}",
        "{{ messages[9].content.x.y }}",
        "{% if %}",
        "{{ messages[0].content | join(',') * 99 }}",
    ]);
    let body = json!({"messages": [{"role": "user", "content": "hello"}], "max_tokens": 4,
        "chat_template": template});
    send(target, "hostile_templates", "/v1/chat/completions", &body);
}
