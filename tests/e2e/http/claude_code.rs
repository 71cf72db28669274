//! `/v1/messages` as coding agents use it: fields that only Anthropic's services interpret, tools defined by
//! Anthropic, and system messages within a conversation.

use crate::http_client::{HttpClient, HttpReply, get};
use crate::test_server::{BLOCK_TOKENS, ServerSetup, TestServer};
use serde_json::{Value, json};
use server::ServerOptions;
use text::ToolCallSyntax;

const PATH: &str = "/v1/messages";
/// Chat template that renders messages of any role at any position.
const OPEN_TEMPLATE: &str = "{% for m in messages %}<{{ m.role }}>{{ m.content }}{% endfor %}\
    {% if add_generation_prompt %}<assistant>{% endif %}";
/// Template that shows tools.
const TOOLS_TEMPLATE: &str = "{% for t in tools or [] %}[{{ t.function.name }}]{% endfor %}\
    {% for m in messages %}<{{ m.role }}>{{ m.content }}{% endfor %}";
/// Chat template that accepts a system message only at the start, and requires alternating roles.
const STRICT_TEMPLATE: &str = "{% for m in messages %}{% if m.role == 'system' %}\
    {% if not loop.first %}{{ raise_exception('system must be first') }}{% endif %}\
    {% elif loop.previtem is defined and loop.previtem.role == m.role %}\
    {{ raise_exception('roles must alternate') }}{% endif %}<{{ m.role }}>{{ m.content }}\
    {% endfor %}{% if add_generation_prompt %}<assistant>{% endif %}";

fn start(template: &'static str) -> TestServer {
    TestServer::start(&ServerSetup {
        scripted_output: Some("ok"),
        template: Some(template),
        parsers: (Some(ToolCallSyntax::HERMES), None),
        ..ServerSetup::default()
    })
}

/// Request with the fields that Claude Code 2.1 sends.
fn agent_request() -> Value {
    let schema = json!({"type": "object", "properties": {"command": {"type": "string"}}});
    json!({
        "model": "tiny",
        "max_tokens": 16,
        "system": [{"type": "text", "text": "Be brief.", "cache_control": {"type": "ephemeral"}}],
        "messages": [{"role": "user", "content": [
            {"type": "text", "text": "hi", "cache_control": {"type": "ephemeral", "ttl": "1h"}}]}],
        "tools": [
            {"name": "Bash", "description": "d", "input_schema": schema, "eager_input_streaming": true},
            {"type": "web_search_20250305", "name": "web_search", "max_uses": 8},
            {"type": "custom", "name": "mcp__docs__find", "input_schema": schema, "defer_loading": true},
        ],
        "thinking": {"type": "adaptive", "display": "summarized"},
        "context_management": {"edits": [{"type": "clear_thinking_20251015", "keep": "all"}]},
        "output_config": {"effort": "high", "task_budget": {"type": "tokens", "total": 20_000}},
        "metadata": {"user_id": "user_1_account__session_2"},
        "mcp_servers": [],
        "speed": "standard",
    })
}

fn ignored(reply: &HttpReply) -> Vec<&str> {
    let mut names: Vec<&str> =
        reply.header("x-hadron-ignored-fields").unwrap_or_default().split(", ").collect();
    names.sort_unstable();
    names
}

#[test]
fn request_of_a_coding_agent_is_served() {
    let options = ServerOptions { strict_fields: true, ..ServerOptions::default() };
    let (scripted_output, template) = (Some("ok"), Some(TOOLS_TEMPLATE));
    let setup = ServerSetup { options, scripted_output, template, ..ServerSetup::default() };
    let server = TestServer::start(&setup);
    let mut client = HttpClient::connect(server.address);
    let expected = [
        "messages[0].content[0].cache_control",
        "metadata",
        "output_config.task_budget",
        "speed",
        "system[0].cache_control",
        "thinking.display",
        "tools[0].eager_input_streaming",
        "tools[1]",
        "tools[2].defer_loading",
    ];
    let mut body = agent_request();
    let reply = client.post("/v1/messages?beta=true", &body);
    assert_eq!(reply.status, 200, "{}", reply.json());
    assert_eq!(reply.json()["content"][0]["text"], "ok");
    let mut named = expected.to_vec();
    named.insert(2, "output_config.effort");
    assert_eq!(ignored(&reply), named);
    assert_eq!(reply.json()["context_management"], json!({"applied_edits": []}));
    let mut streamed = body.clone();
    streamed["stream"] = json!(true);
    let events = String::from_utf8(client.post(PATH, &streamed).body).unwrap();
    let last = events.lines().find(|line| line.contains(r#""type":"message_delta""#)).unwrap();
    assert!(last.ends_with(r#""context_management":{"applied_edits":[]}}"#), "{last}");
    let count = client.post("/v1/messages/count_tokens?beta=true", &body);
    assert_eq!(count.status, 200, "{}", count.json());
    assert_eq!(ignored(&count), expected);
    body["thinking"] = json!({"type": "enabled", "budget_tokens": 1_024});
    let reply = client.post(PATH, &body);
    assert!(ignored(&reply).contains(&"thinking.budget_tokens"), "{}", reply.json());
    // `--strict-fields` accepts known fields without effect and rejects unknown fields.
    body["unheard_of"] = json!(1);
    assert_eq!(client.post(PATH, &body).status, 400);
}

/// Asserts that the prompt of a conversation is `prompt`.
fn assert_prompt(client: &mut HttpClient, messages: &Value, prompt: &str) {
    let body = json!({"system": "S", "messages": messages});
    let counted = client.post("/v1/messages/count_tokens", &body);
    assert_eq!(counted.status, 200, "{}", counted.json());
    let ids = client.post("/tokenize", &json!({"prompt": prompt, "add_special_tokens": false}));
    assert_eq!(counted.json()["input_tokens"], ids.json()["count"], "{messages}");
    let mut body = body;
    body["max_tokens"] = json!(4);
    let reply = client.post(PATH, &body);
    assert_eq!(reply.status, 200, "{messages}: {}", reply.json());
}

#[test]
fn system_messages_reach_the_model_at_their_place() {
    let messages = json!([
        {"role": "user", "content": "a"},
        {"role": "system", "content": [{"type": "text", "text": "N"}]},
        {"role": "assistant", "content": "b"},
        {"role": "user", "content": "c"},
        {"role": "system", "content": "M"},
    ]);
    let open = start(OPEN_TEMPLATE);
    let prompt = "<system>S<user>a<system>N<assistant>b<user>c<system>M<assistant>";
    assert_prompt(&mut HttpClient::connect(open.address), &messages, prompt);
    let strict = start(STRICT_TEMPLATE);
    let prompt = "<system>S<user>a\n\nN<assistant>b<user>c\n\nM<assistant>";
    assert_prompt(&mut HttpClient::connect(strict.address), &messages, prompt);
}

/// Consecutive user messages are merged into one turn, as in Anthropic's API.
#[test]
fn consecutive_user_messages_are_one_turn() {
    let server = start(STRICT_TEMPLATE);
    let messages = json!([{"role": "user", "content": "a"}, {"role": "user", "content": "b"}]);
    assert_prompt(
        &mut HttpClient::connect(server.address),
        &messages,
        "<system>S<user>a\nb<assistant>",
    );
}

/// Templates have no place for `is_error`, and reasoning that another server encrypted cannot be read.
#[test]
fn unused_parts_of_blocks_are_named_by_path() {
    let server = start(OPEN_TEMPLATE);
    let mut client = HttpClient::connect(server.address);
    let call = json!({"type": "tool_use", "id": "t", "name": "f", "input": {}, "caller": {"type": "direct"}});
    let hidden = json!({"type": "redacted_thinking", "data": "x"});
    let thought = json!({"type": "thinking", "thinking": "t", "signature": "s"});
    let result = |is_error: bool| json!([{"type": "tool_result", "tool_use_id": "t", "content": "r", "is_error": is_error}]);
    let mut tool = json!({"name": "f", "input_schema": {"type": "object"}});
    tool["allowed_callers"] = json!(["direct"]);
    let body = json!({"max_tokens": 4, "tools": [tool], "messages": [
        {"role": "user", "content": [{"type": "text", "text": "a", "citations": []}]},
        {"role": "assistant", "content": [thought, hidden, call]},
        {"role": "user", "content": result(false)},
        {"role": "assistant", "content": "b"},
        {"role": "user", "content": result(true)},
    ]});
    let reply = client.post(PATH, &body);
    assert_eq!(reply.status, 200, "{}", reply.json());
    let expected = [
        "messages.tool_calls",
        "messages[0].content[0].citations",
        "messages[1].content[1]",
        "messages[1].content[2].caller",
        "messages[4].content[0].is_error",
        "tools",
        "tools[0].allowed_callers",
    ];
    assert_eq!(ignored(&reply), expected);
    // The list in the header is bounded.
    let mut body = body;
    body["tools"] = (0..300)
        .map(|i| json!({"name": format!("f{i}"), "input_schema": {}, ("x".repeat(900)): 1}))
        .collect();
    let reply = client.post(PATH, &body);
    assert_eq!(reply.status, 200, "{}", reply.json());
    let names = ignored(&reply);
    assert!(names.len() <= 40 && names.iter().all(|name| name.len() < 100), "{names:?}");
    assert!(names.contains(&format!("tools[3].{}", "x".repeat(64)).as_str()), "{names:?}");
}

#[test]
fn parts_of_tool_results_reach_the_model() {
    let server = start(OPEN_TEMPLATE);
    let document = json!({"type": "document", "title": "T", "source": {"type": "text",
        "media_type": "text/plain", "data": "D"}});
    let content = json!([{"type": "tool_reference", "tool_name": "mcp__docs__find"}, document]);
    let messages = json!([
        {"role": "user", "content": "a"},
        {"role": "assistant", "content": [{"type": "tool_use", "id": "t", "name": "f", "input": {}}]},
        {"role": "user", "content": [
            {"type": "tool_result", "tool_use_id": "t", "content": content, "is_error": false}]},
    ]);
    let prompt = "<system>S<user>a<assistant><tool>mcp__docs__find\nT\nD<assistant>";
    assert_prompt(&mut HttpClient::connect(server.address), &messages, prompt);
}

#[test]
fn cleared_tool_results_are_not_in_the_prompt() {
    let server = start(OPEN_TEMPLATE);
    let mut client = HttpClient::connect(server.address);
    let call = |id: &str| json!({"role": "assistant", "content": [{"type": "tool_use", "id": id, "name": "f", "input": {}}]});
    let result = |id: &str, text: &str| json!({"role": "user", "content": [{"type": "tool_result", "tool_use_id": id, "content": text}]});
    let user = json!({"role": "user", "content": "a"});
    let long = "long ".repeat(50);
    let messages = json!([user, call("t"), result("t", &long), call("u"), result("u", "short")]);
    let mut body = json!({"system": "S", "messages": messages});
    let count = "/v1/messages/count_tokens";
    let original = client.post(count, &body).json()["input_tokens"].clone();
    let one = json!({"type": "tool_uses", "value": 1});
    let edit = json!({"type": "clear_tool_uses_20250919", "trigger": one, "keep": one});
    body["context_management"] = json!({"edits": [edit]});
    let counted = client.post(count, &body).json();
    assert_eq!(counted["context_management"]["original_input_tokens"], original, "{counted}");
    let prompt = "<system>S<user>a<assistant><tool>[This tool result was removed to shorten the \
                  conversation.]<assistant><tool>short<assistant>";
    let prompt = json!({"prompt": prompt, "add_special_tokens": false});
    assert_eq!(counted["input_tokens"], client.post("/tokenize", &prompt).json()["count"]);
    body["max_tokens"] = json!(4);
    let reply = client.post(PATH, &body);
    // The template shows no calls; the context edit has its effect, so it is not named.
    let named = Some("messages.tool_calls");
    assert_eq!((reply.status, reply.header("x-hadron-ignored-fields")), (200, named));
    let applied = &reply.json()["context_management"]["applied_edits"][0];
    let cleared = original.as_u64().unwrap() - counted["input_tokens"].as_u64().unwrap();
    let expected = json!({"type": "clear_tool_uses_20250919", "cleared_tool_uses": 1, "cleared_input_tokens": cleared});
    assert_eq!(*applied, expected);
}

/// The server writes no summaries: it serves prompts up to the threshold, and counts tokens of any prompt.
#[test]
fn compaction_is_rejected_above_its_threshold() {
    let server = start(OPEN_TEMPLATE);
    let mut client = HttpClient::connect(server.address);
    let user = json!({"role": "user", "content": "a".repeat(100)});
    let mut body = json!({"messages": [user], "max_tokens": 4});
    let count = "/v1/messages/count_tokens";
    let tokens = client.post(count, &body).json()["input_tokens"].as_u64().unwrap();
    let edit = |value: u64| json!({"edits": [{"type": "compact_20260112", "trigger": {"type": "input_tokens", "value": value}}]});
    body["context_management"] = edit(tokens);
    let reply = client.post(PATH, &body);
    assert_eq!((reply.status, reply.header("x-hadron-ignored-fields")), (200, None));
    body["context_management"] = edit(tokens - 1);
    let reply = client.post(PATH, &body);
    let message = reply.json()["error"]["message"].as_str().unwrap().to_owned();
    assert_eq!(reply.status, 400, "{message}");
    assert!(message.starts_with("context_management.edits[0].type: "), "{message}");
    assert_eq!(client.post(count, &body).json()["input_tokens"], tokens);

    let mut body = json!({"input": "a".repeat(100), "max_output_tokens": 4});
    for (threshold, status) in [(1_000, 200), (10, 400)] {
        body["context_management"] =
            json!([{"type": "compaction", "compact_threshold": threshold}]);
        let reply = client.post("/v1/responses", &body);
        assert_eq!(reply.status, status, "{}", String::from_utf8_lossy(&reply.body));
    }
    let error = client.post("/v1/responses", &body).json();
    assert_eq!(error["error"]["param"], "context_management[0].compact_threshold");
}

#[test]
fn services_that_the_server_lacks_are_named_in_errors() {
    let server = start(OPEN_TEMPLATE);
    let mut client = HttpClient::connect(server.address);
    let image = json!({"type": "image", "source": {"type": "base64", "data": ""}});
    let pdf = json!({"type": "document", "source": {"type": "base64", "data": ""}});
    let third = |block: Value| {
        let user = json!({"role": "user", "content": "a"});
        json!([user, {"role": "assistant", "content": "b"}, {"role": "user", "content": [block]}])
    };
    let cases = [
        (
            json!({"mcp_servers": [{"type": "url", "name": "a", "url": "http://a"}]}),
            "mcp_servers: ",
        ),
        (
            json!({"tool_choice": {"type": "tool", "name": "web_search"}}),
            "tool_choice: names a tool",
        ),
        (
            json!({"messages": third(image)}),
            "messages[2].content[0]: images are not supported by this model",
        ),
        (
            json!({"messages": third(pdf)}),
            "messages[2].content[0]: documents other than plain text are not supported",
        ),
        (
            json!({"context_management": {"edits": [{"type": "rewrite_20300101"}]}}),
            "context_management.edits[0].type: ",
        ),
    ];
    for (extra, start) in cases {
        for path in [PATH, "/v1/messages/count_tokens"] {
            let mut body = agent_request();
            body.as_object_mut().unwrap().extend(extra.as_object().unwrap().clone());
            let reply = client.post(path, &body);
            let message = reply.json()["error"]["message"].as_str().unwrap().to_owned();
            assert_eq!(reply.status, 400, "{message}");
            assert!(message.starts_with(start), "{message}");
        }
    }
}

/// Sends the turns of a conversation, each with a different attribution line and system message, and asserts
/// that each turn finds the blocks of the preceding prompt in the prefix cache.
fn assert_turns_are_cached(template: &'static str) {
    let server = start(template);
    let mut client = HttpClient::connect(server.address);
    let instructions = "You write code. ".repeat(40);
    let (mut messages, mut preceding) = (Vec::new(), 0);
    for turn in 0..3 {
        let line =
            format!("x-anthropic-billing-header: cc_version=2.1.332.{turn}; cch=fa69{turn};");
        messages.push(json!({"role": "user", "content": format!("Do step {turn}.")}));
        messages.push(json!({"role": "system", "content": format!("{turn} tokens left")}));
        let system =
            json!([{"type": "text", "text": line}, {"type": "text", "text": instructions}]);
        let body = json!({"max_tokens": 8, "system": system, "messages": messages});
        let reply = client.post(PATH, &body).json();
        let count = |name: &str| reply["usage"][name].as_u64().unwrap_or_else(|| panic!("{reply}"));
        let cached = count("cache_read_input_tokens");
        let whole_blocks = preceding / u64::from(BLOCK_TOKENS) * u64::from(BLOCK_TOKENS);
        assert!(cached >= whole_blocks, "turn {turn}: {cached} of {preceding} tokens are cached");
        preceding = count("input_tokens") + cached;
        assert!(preceding > 300, "the prompt contains the instructions: {preceding} tokens");
        messages.push(json!({"role": "assistant", "content": reply["content"][0]["text"]}));
    }
}

#[test]
fn turns_with_changing_attribution_are_cached() {
    assert_turns_are_cached(OPEN_TEMPLATE);
    assert_turns_are_cached(STRICT_TEMPLATE);
}

#[test]
fn names_that_match_a_pattern_are_served_and_repeated() {
    let server = start(OPEN_TEMPLATE);
    let mut client = HttpClient::connect(server.address);
    let mut body = agent_request();
    body["model"] = json!("claude-opus-5[1m]");
    assert_eq!(client.post(PATH, &body).json()["model"], "claude-opus-5[1m]");
    let chat = |model: &str| json!({"model": model, "max_tokens": 2, "messages": [{"role": "user", "content": "hi"}]});
    let reply = client.post("/v1/chat/completions", &chat("claude-x")).json();
    assert_eq!(reply["model"], "claude-x");
    assert_eq!(client.post("/v1/chat/completions", &chat("gpt-5")).status, 404);
    let list = get(server.address, "/v1/models").json();
    let ids: Vec<&Value> =
        list["data"].as_array().unwrap().iter().map(|card| &card["id"]).collect();
    assert_eq!(ids, ["tiny", "org/alias"]);
    assert_eq!(get(server.address, "/v1/models/claude-x").json()["id"], "claude-x");
}
