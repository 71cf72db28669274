//! `thinking_token_budget`: reasoning ends within the budget, and the rest of the output is unchanged.

use super::parallel_ranks::metric;
use crate::deadlines::BoundedJoin as _;
use crate::http_client::{HttpClient, HttpReply, get, post};
use crate::small_tokenizer;
use crate::test_server::{ServerSetup, TestServer};
use serde_json::{Value, json};
use std::time::{Duration, Instant};
use text::{ReasoningFamily, ToolCallSyntax};

const CHAT: &str = "/v1/chat/completions";
/// Scripted model output with reasoning of 40 tokens.
const SCRIPT: &str = "<think>0123456789012345678901234567890123456789</think>So.";
/// Number of tokens of `</think>`.
const END_MARKER_TOKENS: usize = 8;
/// Chat template whose generation prompt opens the reasoning (`<think>`).
const OPENS: &str = "{% for m in messages %}<{{ m.role }}>{{ m.content }}{% endfor %}\
    {% if add_generation_prompt %}<think>\n{% endif %}";

fn scripted(script: &'static str) -> ServerSetup {
    let parsers = (Some(ToolCallSyntax::HERMES), Some(ReasoningFamily::QWEN3));
    ServerSetup { scripted_output: Some(script), parsers, ..ServerSetup::default() }
}

/// Setup of a model whose outputs always start with reasoning.
fn always_thinking_setup() -> ServerSetup {
    let parsers = (None, Some(ReasoningFamily::DEEPSEEK_R1));
    ServerSetup { parsers, template: Some(OPENS), ..ServerSetup::default() }
}

fn body(extra: &Value) -> Value {
    let mut body =
        json!({"messages": [{"role": "user", "content": "hi"}], "max_tokens": 400, "seed": 7});
    body.as_object_mut().unwrap().extend(extra.as_object().unwrap().clone());
    body
}

fn parsed_reply(reply: &HttpReply) -> Value {
    let text = String::from_utf8_lossy(&reply.body).into_owned();
    assert_eq!(reply.status, 200, "{text}");
    reply.json()
}

/// Reasoning and content of a reply's first choice.
fn parts(reply: &Value) -> (String, String) {
    let message = &reply["choices"][0]["message"];
    let text = |key: &str| message[key].as_str().unwrap_or_default().to_owned();
    (text("reasoning"), text("content"))
}

fn reasoning_tokens(reply: &Value) -> u64 {
    reply["usage"]["completion_tokens_details"]["reasoning_tokens"].as_u64().unwrap()
}

#[test]
fn end_marker_is_forced_once_budget_is_spent() {
    let server = TestServer::start(&scripted(SCRIPT));
    let mut client = HttpClient::connect(server.address);
    let mut ask = |extra: &Value| parsed_reply(&client.post(CHAT, &body(extra)));
    // The end marker `</think>` replaces digits of the script; the rest of the script becomes content.
    for budget in [0, 1, 10, 39] {
        let reply = ask(&json!({"thinking_token_budget": budget}));
        let thought = &SCRIPT[7..][..budget];
        assert_eq!(
            parts(&reply),
            (thought.to_owned(), SCRIPT[7 + budget + END_MARKER_TOKENS..].to_owned())
        );
        assert_eq!(
            reasoning_tokens(&reply),
            (budget + END_MARKER_TOKENS - 1) as u64,
            "all but the last token of the end marker count"
        );
        assert_eq!(reply["usage"]["completion_tokens"], SCRIPT.len() + 1);
    }
    // A budget that the reasoning does not exceed has no effect. Budgets of 41 to 46 tokens end inside the
    // end marker `</think>`.
    for budget in [40, 41, 46, 47, 100_000] {
        let reply = ask(&json!({"thinking_token_budget": budget}));
        assert_eq!(parts(&reply), (SCRIPT[7..47].to_owned(), "So.".to_owned()), "{budget}");
    }
    server.wait_idle(Duration::from_secs(1));
}

#[test]
fn thinking_budget_is_consistent_across_reply_kinds() {
    let server = TestServer::start(&scripted(SCRIPT));
    let mut client = HttpClient::connect(server.address);
    let extra = json!({"thinking_token_budget": 9, "n": 3, "logprobs": true, "top_logprobs": 1,
        "return_token_ids": true, "stop": ["So"]});
    let whole = parsed_reply(&client.post(CHAT, &body(&extra)));
    let expected =
        (SCRIPT[7..16].to_owned(), SCRIPT[16 + END_MARKER_TOKENS..SCRIPT.len() - 3].to_owned());
    for choice in whole["choices"].as_array().unwrap() {
        assert_eq!(parts(&json!({"choices": [choice]})), expected);
        let logprobs = choice["logprobs"]["content"].as_array().unwrap();
        let ids = choice["token_ids"].as_array().unwrap();
        assert_eq!((logprobs.len(), ids.len()), (SCRIPT.len() - 1, SCRIPT.len() - 1));
        assert_eq!(
            (&choice["finish_reason"], &choice["stop_reason"]),
            (&json!("stop"), &json!("So"))
        );
    }
    let mut asked = body(&extra);
    asked["stream"] = json!(true);
    let mut streamed = vec![(String::new(), String::new()); 3];
    for event in client.post(CHAT, &asked).events() {
        for choice in event["choices"].as_array().unwrap() {
            let part = &mut streamed[choice["index"].as_u64().unwrap() as usize];
            part.0 += choice["delta"]["reasoning"].as_str().unwrap_or_default();
            part.1 += choice["delta"]["content"].as_str().unwrap_or_default();
        }
    }
    assert_eq!(streamed, vec![expected; 3]);
}

#[test]
fn reasoning_opened_by_the_prompt_counts() {
    let server = TestServer::start(&always_thinking_setup());
    let mut client = HttpClient::connect(server.address);
    let mut ids = |extra: Value| -> Vec<u64> {
        let mut asked = body(&extra);
        asked["return_token_ids"] = json!(true);
        asked["max_tokens"] = json!(30);
        let reply = parsed_reply(&client.post(CHAT, &asked));
        let ids = reply["choices"][0]["token_ids"].as_array().unwrap();
        ids.iter().map(|id| id.as_u64().unwrap()).collect()
    };
    let mark: Vec<u64> = "</think>".bytes().map(u64::from).collect();
    let opened = ids(json!({"thinking_token_budget": 6, "ignore_eos": true}));
    assert_eq!(opened[6..][..END_MARKER_TOKENS], mark, "the template opened it");
    let free = ids(json!({"ignore_eos": true}));
    assert_eq!(opened[..6], free[..6], "nothing changes before");
    let messages = |last: &str| json!([{"role": "user", "content": "hi"}, {"role": "assistant", "content": last}]);
    let continued = |last: &str, budget: u32| {
        json!({"messages": messages(last), "ignore_eos": true,
        "continue_final_message": true, "thinking_token_budget": budget})
    };
    let begun = ids(continued("<think>xyz", 5));
    assert_eq!(begun[2..][..END_MARKER_TOKENS], mark, "three of five tokens are thought");
    assert_eq!(
        ids(continued("<think>xyz", 2))[..END_MARKER_TOKENS],
        mark,
        "more than there may be"
    );
    let answering = ids(continued("<think>xyz</think>So", 2));
    assert!(
        !answering.windows(END_MARKER_TOKENS).any(|ids| ids == mark),
        "that is over: {answering:?}"
    );
}

#[test]
fn grammar_begins_after_the_forced_marker() {
    let server = TestServer::start(&always_thinking_setup());
    let extra = json!({"thinking_token_budget": 20, "structured_outputs": {"regex": "[xy]{4}"}, "temperature": 1});
    for seed in 0..8 {
        let mut asked = body(&extra);
        asked["seed"] = json!(seed);
        let reply = parsed_reply(&post(server.address, CHAT, &asked));
        let (thought, text) = parts(&reply);
        assert!(text.len() == 4 && text.bytes().all(|b| b"xy".contains(&b)), "{reply}");
        assert!(!thought.contains('\u{fffd}'), "no broken character: {thought}");
        assert!(
            (20..=23 + END_MARKER_TOKENS as u64).contains(&reasoning_tokens(&reply)),
            "{reply}"
        );
        assert_eq!(reply["choices"][0]["finish_reason"], "stop");
    }
}

/// Number of grammar bitmasks built so far.
fn masks(server: &TestServer) -> u64 {
    let page = String::from_utf8(get(server.address, "/metrics").body).unwrap();
    let line = page.lines().find(|line| line.starts_with("hadron:grammar_mask_seconds_count"));
    line.and_then(|line| line.rsplit(' ').next()).unwrap().parse::<f64>().unwrap() as u64
}

#[test]
fn thinking_budget_needs_masks_only_at_its_end() {
    let server = TestServer::start(&always_thinking_setup());
    let extra = json!({"thinking_token_budget": 300, "max_tokens": 900, "ignore_eos": true});
    let below = json!({"thinking_token_budget": 300, "max_tokens": 300, "ignore_eos": true});
    parsed_reply(&post(server.address, CHAT, &body(&below)));
    assert_eq!(masks(&server), 0);
    parsed_reply(&post(server.address, CHAT, &body(&extra)));
    let made = masks(&server);
    // Until the scheduler has been notified that no further masks are needed, it may request masks for some
    // more rows.
    assert!((END_MARKER_TOKENS as u64..END_MARKER_TOKENS as u64 + 100).contains(&made), "{made}");
}

#[test]
fn thinking_budget_survives_preemption() {
    let asked = |i: u64| {
        let budget = 20 + 9 * i;
        body(&json!({"messages": [{"role": "user", "content": format!("{i} {}", "x".repeat(80))}],
            "thinking_token_budget": budget, "max_tokens": 150, "ignore_eos": true, "seed": i,
            "temperature": 1, "return_token_ids": true}))
    };
    let ids = |reply: &Value| reply["choices"][0]["token_ids"].clone();
    let baseline = TestServer::start(&always_thinking_setup());
    let expected: Vec<Value> =
        (0..12).map(|i| ids(&parsed_reply(&post(baseline.address, CHAT, &asked(i))))).collect();
    let crowded = TestServer::start(&ServerSetup {
        blocks: 64,
        step_tokens: 64,
        max_model_len: 512,
        ..always_thinking_setup()
    });
    let address = crowded.address;
    let begun = Instant::now();
    let series = r#"vllm:num_preemptions_total{engine="0",model_name="tiny"}"#;
    while metric(address, series) == 0.0 {
        assert!(begun.elapsed() < Duration::from_mins(1), "no request was preempted");
        let threads: Vec<_> = (0..12)
            .map(|i| std::thread::spawn(move || parsed_reply(&post(address, CHAT, &asked(i)))))
            .collect();
        for (thread, expected) in threads.into_iter().zip(&expected) {
            assert_eq!(ids(&thread.join_bounded()), *expected);
        }
    }
}

#[test]
fn unenforceable_thinking_budgets_are_rejected() {
    let server = TestServer::start(&always_thinking_setup());
    let mut client = HttpClient::connect(server.address);
    let with = |extra: Value| {
        let mut asked = body(&extra);
        asked["thinking_token_budget"] = json!(5);
        asked
    };
    let cases = [
        (body(&json!({"thinking_token_budget": -1})), "thinking_token_budget"),
        (body(&json!({"thinking_token_budget": "5"})), "thinking_token_budget"),
        (with(json!({"allowed_token_ids": [97, 98]})), "allowed_token_ids"),
        (with(json!({"bad_words": [">"]})), "bad_words"),
        (with(json!({"stop_token_ids": [62], "min_tokens": 9})), "min_tokens"),
    ];
    for (asked, param) in cases {
        let reply = client.post(CHAT, &asked);
        assert_eq!(
            (reply.status, &reply.json()["error"]["param"]),
            (400, &json!(param)),
            "{asked}"
        );
    }
    let allowed = small_tokenizer::bytes_of("</think>ab");
    let rules = json!({"allowed_token_ids": allowed, "stop_token_ids": [62], "ignore_eos": true});
    let stopped = parsed_reply(&client.post(CHAT, &with(rules)));
    assert_eq!(
        stopped["choices"][0]["stop_reason"], 62,
        "the mark's last token is a stop like any other"
    );
    let plain = TestServer::start(&ServerSetup::default());
    let reply = post(plain.address, CHAT, &with(json!({})));
    assert_eq!(
        (reply.status, &reply.json()["error"]["reason"]),
        (400, &json!("unsupported_field"))
    );
}

#[test]
fn other_endpoints_support_thinking_budgets() {
    let server = TestServer::start(&scripted(SCRIPT));
    let mut client = HttpClient::connect(server.address);
    let message = json!({"model": "tiny", "max_tokens": 300, "messages": [{"role": "user", "content": "hi"}],
        "thinking": {"type": "enabled", "budget_tokens": 4}});
    let reply = parsed_reply(&client.post("/v1/messages", &message));
    assert_eq!(reply["content"][0]["thinking"], "0123", "{reply}");
    let asked = json!({"model": "tiny", "input": "hi", "thinking_token_budget": 4});
    let reply = parsed_reply(&client.post("/v1/responses", &asked));
    assert_eq!(reply["output"][0]["content"][0]["text"], "0123", "{reply}");
}
