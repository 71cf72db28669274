//! Prompts of `/v1/responses`: truncation, and the positions of system messages.

use crate::http_client::{HttpClient, HttpReply};
use crate::test_server::{ServerSetup, TestServer};
use serde_json::{Value, json};

const PATH: &str = "/v1/responses";
const TEMPLATE: &str = "{% for m in messages %}<{{ m.role }}>{{ m.content }}{% for c in m.tool_calls or [] %}\
    {{ c.function.name }}{% endfor %}{% endfor %}";
/// Chat template that renders system messages at any position.
const INLINE: &str = "{% for m in messages %}<{{ m.role }}>{{ m.content }}{% endfor %}\
    {% if add_generation_prompt %}<assistant>{% endif %}";
/// Chat template that rejects system messages after the first message.
const FIRST_ONLY: &str = "{% for m in messages %}{% if m.role == 'system' and not loop.first %}\
    {{ raise_exception('only first') }}{% endif %}<{{ m.role }}>{{ m.content }}{% endfor %}";
/// Chat template that omits system messages after the first message.
const OMITS_LATER: &str = "{% for m in messages %}{% if m.role != 'system' or loop.first %}\
    <{{ m.role }}>{{ m.content }}{% endif %}{% endfor %}";
/// Chat template that shows developer messages at the start only, as gpt-oss does.
const FIRST_DEVELOPER: &str = "{% for m in messages %}{% if loop.first or m.role not in ['system', 'developer'] %}\
    <{{ m.role }}>{{ m.content }}{% endif %}{% endfor %}{% if add_generation_prompt %}<assistant>{% endif %}";
/// Chat template without developer messages.
const NO_DEVELOPER: &str = "{% for m in messages %}{% if m.role != 'developer' %}<{{ m.role }}>{{ m.content }}\
    {% endif %}{% endfor %}{% if add_generation_prompt %}<assistant>{% endif %}";
/// Context length, in tokens of one byte each.
const CONTEXT: u32 = 200;
const OUTPUT_TOKENS: usize = 20;

fn server(template: &'static str, max_model_len: u32) -> TestServer {
    TestServer::start(&ServerSetup {
        template: Some(template),
        max_model_len,
        ..ServerSetup::default()
    })
}

fn message(role: &str, content: &str) -> Value {
    json!({"role": role, "content": content})
}

fn body(input: &[Value], truncation: &str) -> Value {
    json!({"input": input, "truncation": truncation, "instructions": "rules",
        "max_output_tokens": OUTPUT_TOKENS})
}

fn input_tokens(reply: &HttpReply) -> usize {
    assert_eq!(reply.status, 200, "{}", String::from_utf8_lossy(&reply.body));
    reply.json()["usage"]["input_tokens"].as_u64().unwrap() as usize
}

/// Number of tokens of a prompt.
fn count(client: &mut HttpClient, prompt: &str) -> usize {
    let body = json!({"prompt": prompt, "add_special_tokens": false});
    client.post("/tokenize", &body).json()["count"].as_u64().unwrap() as usize
}

/// Checks that the server dropped as few turns or items of the conversation as possible, so that the prompt
/// and the output fit into the context: the reply's prompt has as many tokens as `prompt(minimum)`.
fn assert_fewest_dropped(
    client: &mut HttpClient,
    reply: &HttpReply,
    parts: usize,
    prompt: impl Fn(usize) -> String,
) {
    let room = CONTEXT as usize - OUTPUT_TOKENS;
    let mut counts = (0..=parts).map(|dropped| count(client, &prompt(dropped)));
    let expected = counts.position(|count| count <= room).unwrap();
    assert!(expected > 0 && expected < parts, "{expected} of {parts} are dropped");
    let expected_count = count(client, &prompt(expected));
    assert_eq!(input_tokens(reply), expected_count, "{expected} of {parts} are dropped");
}

#[test]
fn truncation_drops_the_oldest_turns() {
    let server = server(TEMPLATE, CONTEXT);
    let mut client = HttpClient::connect(server.address);
    // Every turn has a different length.
    let text = |i: usize| "x y".repeat(4 + i);
    let turn = |i: usize| [message("user", &text(i)), message("assistant", &text(i))];
    let turns = 10;
    let mut input: Vec<Value> = (0..turns).flat_map(turn).collect();
    input.insert(1, message("developer", "kept"));
    input.push(message("user", "last question"));

    let rejected = client.post(PATH, &body(&input, "disabled"));
    let error = rejected.json()["error"].clone();
    assert_eq!((rejected.status, &error["reason"]), (400, &json!("context_length_exceeded")));

    let reply = client.post(PATH, &body(&input, "auto"));
    assert_eq!(reply.json()["truncation"], "auto");
    assert_fewest_dropped(&mut client, &reply, turns, |dropped| {
        let left = (dropped..turns).map(|i| format!("<user>{0}<assistant>{0}", text(i)));
        let left: String = left.collect();
        format!("<system>rules\n\nkept{left}<user>last question")
    });

    // The conversation is stored untruncated, so the next response, without `truncation`, exceeds the
    // context.
    let next = json!({"previous_response_id": reply.json()["id"], "input": "more",
        "max_output_tokens": OUTPUT_TOKENS});
    assert_eq!(client.post(PATH, &next).status, 400);
    let short = client.post(PATH, &body(&[message("user", "hi")], "auto"));
    assert_eq!(input_tokens(&short), count(&mut client, "<system>rules<user>hi"));
}

#[test]
fn truncation_keeps_calls_with_their_outputs() {
    let server = server(TEMPLATE, CONTEXT);
    let mut client = HttpClient::connect(server.address);
    let output = |i: usize| "o p".repeat(i + 1);
    let step = |i: usize| {
        let id = format!("c{i}");
        let call = json!({"type": "function_call", "call_id": id, "name": "f", "arguments": "{}"});
        [call, json!({"type": "function_call_output", "call_id": id, "output": output(i)})]
    };
    let steps = 12;
    let mut input = vec![message("user", "old"), message("assistant", "answer")];
    input.push(message("user", "work"));
    input.extend((0..steps).flat_map(step));
    let reply = client.post(PATH, &body(&input, "auto"));
    assert_fewest_dropped(&mut client, &reply, steps, |dropped| {
        let left = (dropped..steps).map(|i| format!("<assistant>f<tool>{}", output(i)));
        format!("<system>rules<user>work{}", left.collect::<String>())
    });

    // The last tool output alone exceeds the context.
    let call = json!({"type": "function_call", "call_id": "x", "name": "f", "arguments": "{}"});
    let long = "o".repeat(CONTEXT as usize);
    let output = json!({"type": "function_call_output", "call_id": "x", "output": long});
    let reply = client.post(PATH, &body(&[message("user", "a"), call, output], "auto"));
    let error = reply.json()["error"].clone();
    assert_eq!((reply.status, &error["reason"]), (400, &json!("context_length_exceeded")));
    let invalid = client.post(PATH, &body(&[message("user", "a")], "middle"));
    assert_eq!((invalid.status, &invalid.json()["error"]["param"]), (400, &json!("truncation")));
}

#[test]
fn later_system_messages_are_placed_by_the_template() {
    let input = [
        message("developer", "one"),
        message("user", "hi"),
        message("developer", "two"),
        message("user", "go on"),
    ];
    let in_place = "<system>rules<developer>one<user>hi<developer>two<user>go on<assistant>";
    let folded = "<system>rules\n\none<user>hi\n\ntwo\ngo on";
    for (template, prompt) in [(INLINE, in_place), (FIRST_ONLY, folded), (OMITS_LATER, folded)] {
        let server = server(template, 4_096);
        let mut client = HttpClient::connect(server.address);
        let reply = client.post(PATH, &body(&input, "disabled"));
        assert_eq!(input_tokens(&reply), count(&mut client, prompt), "{template}");
    }
}

/// Developer messages keep their role where the template shows them, as in chat completions.
#[test]
fn developer_messages_keep_the_role_that_is_shown() {
    let first = [message("developer", "one"), message("user", "hi")];
    let later = [&first[..], &[message("developer", "two"), message("user", "go on")]].concat();
    let cases = [
        (INLINE, "<developer>one<user>hi", "<developer>two<user>go on"),
        (FIRST_DEVELOPER, "<developer>one<user>hi", "\n\ntwo\ngo on"),
        (NO_DEVELOPER, "<system>one<user>hi", "<system>two<user>go on"),
    ];
    for (template, start, rest) in cases {
        let server = server(template, 4_096);
        let mut client = HttpClient::connect(server.address);
        let prompts = [format!("{start}<assistant>"), format!("{start}{rest}<assistant>")];
        for (input, prompt) in [&first[..], &later].into_iter().zip(prompts) {
            let body = json!({"input": input, "max_output_tokens": 4});
            let tokens = input_tokens(&client.post(PATH, &body));
            assert_eq!(tokens, count(&mut client, &prompt), "{template}");
        }
        let chat = json!({"messages": first, "max_tokens": 4});
        let usage = client.post("/v1/chat/completions", &chat).json()["usage"].clone();
        let prompt = format!("{start}<assistant>");
        assert_eq!(usage["prompt_tokens"], count(&mut client, &prompt), "{template}");
    }
}
