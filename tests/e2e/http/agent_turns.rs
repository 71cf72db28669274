//! Prefix caching over the turns of an agent: each request repeats the conversation so far and appends the
//! model's tool call and the tool result.

use crate::http_client::HttpClient;
use crate::test_server::{BLOCK_TOKENS, ServerSetup, TestServer};
use serde_json::{Value, json};
use text::ToolCallSyntax;

const TURNS: u64 = 20;
/// Minimum ratio of cached tokens to cacheable tokens, which are the tokens in full blocks of the preceding
/// prompt and output. The ratio is about 0.98, because the model outputs single-byte tokens, some of which
/// the tokenizer merges when the output is part of the next prompt.
const CACHED_SHARE_MIN: f64 = 0.95;
const SCRIPT: &str = "I look.\n<tool_call>\n{\"name\": \"read\", \"arguments\": {\"path\": \
    \"src/main.rs\", \"lines\": [1, 200]}}\n</tool_call>";
/// Chat template that renders tools, tool calls and tool results like the Qwen3 templates.
const TEMPLATE: &str = "{% for m in messages %}<|{{ m.role }}|>{% if loop.first and tools %}\
    {% for t in tools %}{{ t | tojson }}\n{% endfor %}{% endif %}{{ m.content or '' }}\
    {% for c in m.tool_calls or [] %}{% if m.content or not loop.first %}{{ '\\n' }}{% endif %}<tool_call>\n\
    {\"name\": \"{{ c.function.name }}\", \"arguments\": {{ c.function.arguments | tojson }}}\n</tool_call>\
    {% endfor %}<|end|>{% endfor %}{% if add_generation_prompt %}<|assistant|>{% endif %}";

/// Token counts of the reply in one turn of a conversation (`usage`).
struct TurnUsage {
    prompt: u64,
    cached: u64,
    output: u64,
}

fn start() -> TestServer {
    TestServer::start(&ServerSetup {
        scripted_output: Some(SCRIPT),
        template: Some(TEMPLATE),
        parsers: (Some(ToolCallSyntax::HERMES), None),
        blocks: 4_096,
        max_model_len: 32_768,
        ..ServerSetup::default()
    })
}

fn schema() -> Value {
    json!({"type": "object", "required": ["path"], "properties": {
        "path": {"type": "string"}, "lines": {"type": "array", "items": {"type": "integer"}}}})
}

/// Tool result text of turn `turn`.
fn tool_result(turn: u64) -> String {
    format!("line {turn}: let x = f({turn});\n").repeat(12)
}

/// Runs the turns of an agent and returns the share of cacheable tokens that were cached.
fn cached_share(mut turn_of: impl FnMut(u64) -> TurnUsage) -> f64 {
    let (mut cacheable, mut cached, mut preceding) = (0, 0, 0);
    for turn in 0..TURNS {
        let usage = turn_of(turn);
        let block = u64::from(BLOCK_TOKENS);
        cacheable += preceding / block * block;
        cached += usage.cached;
        preceding = usage.prompt + usage.output;
        assert!(usage.output > 50, "turn {turn}: the call has {} tokens", usage.output);
    }
    assert!(cacheable > 50_000, "{cacheable} tokens could be cached");
    cached as f64 / cacheable as f64
}

fn count(usage: &Value, name: &str) -> u64 {
    usage.pointer(name).and_then(Value::as_u64).unwrap_or_else(|| panic!("{name}: {usage}"))
}

#[test]
fn messages_turns_find_their_history_in_the_cache() {
    let server = start();
    let mut client = HttpClient::connect(server.address);
    let mut messages = vec![json!({"role": "user", "content": "Mend the bug."})];
    let share = cached_share(|turn| {
        // The attribution line of Claude Code differs in each request.
        let line = format!("x-anthropic-billing-header: cc_version=2.1.332.{turn}; cch={turn};");
        let system = json!([{"type": "text", "text": line},
            {"type": "text", "text": "You write code. ".repeat(60)}]);
        let body = json!({"max_tokens": 200, "system": system, "messages": messages,
            "tools": [{"name": "read", "input_schema": schema()}]});
        let reply = client.post("/v1/messages", &body);
        assert_eq!(reply.status, 200, "{}", reply.json());
        let reply = reply.json();
        let call = reply["content"].as_array().unwrap().last().unwrap();
        assert_eq!(call["type"], "tool_use", "{reply}");
        messages.push(json!({"role": "assistant", "content": reply["content"]}));
        messages.push(json!({"role": "user", "content": [{"type": "tool_result",
            "tool_use_id": call["id"], "content": tool_result(turn)}]}));
        let cached = count(&reply["usage"], "/cache_read_input_tokens");
        TurnUsage {
            prompt: count(&reply["usage"], "/input_tokens") + cached,
            cached,
            output: count(&reply["usage"], "/output_tokens"),
        }
    });
    assert!(share >= CACHED_SHARE_MIN, "{share:.4} of the cacheable tokens were cached");
}

#[test]
fn responses_turns_find_their_history_in_the_cache() {
    let server = start();
    let mut client = HttpClient::connect(server.address);
    let mut input = vec![json!({"role": "user", "content": "Mend the bug."})];
    let share = cached_share(|turn| {
        let body = json!({"instructions": "You write code. ".repeat(60), "input": input,
            "store": false, "include": ["reasoning.encrypted_content"],
            "prompt_cache_key": "session", "max_output_tokens": 200,
            "tools": [{"type": "function", "name": "read", "parameters": schema()}]});
        let reply = client.post("/v1/responses", &body);
        assert_eq!(reply.status, 200, "{}", reply.json());
        let reply = reply.json();
        let output = reply["output"].as_array().unwrap();
        let call = output.last().unwrap();
        assert_eq!(call["type"], "function_call", "{reply}");
        input.extend(output.iter().cloned());
        input.push(json!({"type": "function_call_output", "call_id": call["call_id"],
            "output": tool_result(turn)}));
        TurnUsage {
            prompt: count(&reply["usage"], "/input_tokens"),
            cached: count(&reply["usage"], "/input_tokens_details/cached_tokens"),
            output: count(&reply["usage"], "/output_tokens"),
        }
    });
    assert!(share >= CACHED_SHARE_MIN, "{share:.4} of the cacheable tokens were cached");
}
