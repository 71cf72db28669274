//! The harmony format of gpt-oss over HTTP: replies and streams of all chat endpoints, cut outputs, forced and
//! strict tool calls, output formats and thinking budgets.

use super::tool_calls::{joined, tool, without_ids};
use super::{anthropic, responses};
use crate::http_client::{HttpClient, HttpReply, post};
use crate::small_tokenizer::TokenizerAlphabet;
use crate::test_server::{ServerSetup, TestServer};
use serde_json::{Value, json};
use text::{ReasoningFamily, ToolCallSyntax};

const CHAT: &str = "/v1/chat/completions";
/// Output with reasoning in two parts, a preamble and a call.
const CALL: &str = "<|channel|>analysis<|message|>hm<|end|><|start|>assistant<|channel|>analysis<|message|>so\
    <|end|><|start|>assistant<|channel|>commentary<|message|>I look.<|end|><|start|>assistant<|channel|>\
    commentary to=functions.weather <|constrain|>json<|message|>{\"city\": \"Köln\"}<|call|>";
/// Output with reasoning and an answer that is JSON.
const ANSWER: &str = "<|channel|>analysis<|message|>hm<|end|><|start|>assistant<|channel|>final<|message|>{\"city\": \"Bonn\"}";

fn setup(script: &'static str) -> ServerSetup {
    let parsers = (Some(ToolCallSyntax::HARMONY), Some(ReasoningFamily::HARMONY));
    ServerSetup { scripted_output: Some(script), parsers, ..ServerSetup::default() }
}

/// Setup of a model whose markers are special tokens, of which `<|call|>` and `<|return|>` end the output.
fn special(script: &'static str) -> ServerSetup {
    ServerSetup { alphabet: TokenizerAlphabet::Harmony, ..setup(script) }
}

fn body(extra: &Value) -> Value {
    let mut body = json!({"messages": [{"role": "user", "content": "hi"}], "max_tokens": 600});
    body.as_object_mut().unwrap().extend(extra.as_object().unwrap().clone());
    body
}

fn with_tools(extra: &Value) -> Value {
    let mut body = body(extra);
    body["tools"] = json!([tool("weather")]);
    body
}

fn ok(reply: &HttpReply) -> Value {
    assert_eq!(reply.status, 200, "{}", String::from_utf8_lossy(&reply.body));
    reply.json()
}

/// Schema of the object in `ANSWER`.
fn schema() -> Value {
    json!({"type": "object", "properties": {"city": {"enum": ["Bonn", "Rome"]}}, "required": ["city"],
        "additionalProperties": false})
}

#[test]
fn chat_replies_equal_unary_and_streamed() {
    let server = TestServer::start(&setup(CALL));
    let mut client = HttpClient::connect(server.address);
    let reply = ok(&client.post(CHAT, &with_tools(&json!({}))));
    let choice = &reply["choices"][0];
    let function = json!({"name": "weather", "arguments": "{\"city\": \"Köln\"}"});
    let expected = json!({"role": "assistant", "content": "I look.", "reasoning": "hm\nso",
        "reasoning_content": "hm\nso", "tool_calls": [{"type": "function", "function": function}]});
    assert_eq!(without_ids(choice["message"].clone()), expected);
    assert_eq!(choice["finish_reason"], "tool_calls");
    // Each byte is one token: the text of both messages, and `<|end|>` without its last byte.
    assert_eq!(reply["usage"]["completion_tokens_details"]["reasoning_tokens"], 2 * (2 + 6));
    let events = client.post(CHAT, &with_tools(&json!({"stream": true}))).events();
    let (message, finish) = joined(&events);
    assert_eq!((without_ids(message), finish), (expected, json!("tool_calls")));

    let none = ok(&client.post(CHAT, &with_tools(&json!({"tool_choice": "none"}))));
    let message = &none["choices"][0]["message"];
    assert_eq!(message["content"], "I look.\n{\"city\": \"Köln\"}");
    assert_eq!(message["tool_calls"], Value::Null);
}

#[test]
fn cut_outputs_equal_unary_and_streamed() {
    let server = TestServer::start(&setup(CALL));
    let mut client = HttpClient::connect(server.address);
    let call = CALL.find("{\"city").unwrap();
    let mut seen = Vec::new();
    for max_tokens in [1, 5, 31, 32, 40, 120, call - 1, call, call + 3, CALL.len() - 9] {
        let extra = json!({"max_tokens": max_tokens});
        let reply = ok(&client.post(CHAT, &with_tools(&extra)));
        let choice = &reply["choices"][0];
        assert_eq!(choice["finish_reason"], "length");
        let streamed = json!({"max_tokens": max_tokens, "stream": true});
        let (mut message, _) = joined(&client.post(CHAT, &with_tools(&streamed)).events());
        // A stream sends an empty first content, which a reply without content does not have.
        if message["content"] == "" && choice["message"]["content"].is_null() {
            message["content"] = Value::Null;
        }
        for key in ["content", "reasoning"] {
            assert_eq!(message[key], choice["message"][key], "{max_tokens}");
        }
        let message = without_ids(choice["message"].clone());
        seen.push((message["reasoning"].clone(), message["tool_calls"][0]["function"].clone()));
    }
    assert_eq!(seen[3].0, "hm");
    let name = |arguments: &str| json!({"name": "weather", "arguments": arguments});
    assert_eq!(seen[7].1, name(""));
    assert_eq!(seen[8].1, name("{\"c"));
}

#[test]
fn responses_and_messages_have_items_and_blocks() {
    let server = TestServer::start(&setup(CALL));
    let mut client = HttpClient::connect(server.address);
    let parameters = json!({"type": "object"});
    let mut asked = json!({"input": "hi", "max_output_tokens": 600,
        "tools": [{"type": "function", "name": "weather", "parameters": parameters}]});
    let reply = ok(&client.post("/v1/responses", &asked));
    let thought = json!({"type": "reasoning_text", "text": "hm\nso"});
    let text = json!({"type": "output_text", "text": "I look.", "annotations": [], "logprobs": []});
    let expected = json!([
        {"type": "reasoning", "summary": [], "content": [thought], "status": "completed"},
        {"type": "message", "role": "assistant", "content": [text], "status": "completed"},
        {"type": "function_call", "name": "weather", "arguments": "{\"city\": \"Köln\"}",
            "status": "completed"},
    ]);
    assert_eq!(responses::without_ids(reply["output"].clone()), expected);
    asked["stream"] = json!(true);
    let streamed = responses::events(&client.post("/v1/responses", &asked));
    let last = &streamed.last().unwrap()["response"];
    assert_eq!(responses::without_ids(last["output"].clone()), expected);

    let mut asked = json!({"model": "tiny", "max_tokens": 600,
        "messages": [{"role": "user", "content": "hi"}],
        "tools": [{"name": "weather", "input_schema": parameters}]});
    let reply = ok(&client.post("/v1/messages", &asked));
    let blocks = reply["content"].as_array().unwrap();
    assert_eq!(blocks[0], json!({"type": "thinking", "thinking": "hm\nso", "signature": ""}));
    assert_eq!(blocks[1], json!({"type": "text", "text": "I look."}));
    assert_eq!(blocks[2]["input"], json!({"city": "Köln"}));
    assert_eq!(reply["stop_reason"], "tool_use");
    asked["stream"] = json!(true);
    let streamed = anthropic::events(&client.post("/v1/messages", &asked));
    let part = |key: &str| -> String {
        streamed.iter().filter_map(|(_, event)| event["delta"][key].as_str()).collect()
    };
    assert_eq!((part("thinking"), part("text")), ("hm\nso".to_owned(), "I look.".to_owned()));
    assert_eq!(part("partial_json"), "{\"city\": \"Köln\"}");
}

#[test]
fn output_formats_apply_to_the_answer() {
    let server = TestServer::start(&special(ANSWER));
    let mut client = HttpClient::connect(server.address);
    let format = json!({"type": "json_schema", "json_schema": {"name": "a", "schema": schema()}});
    let extra = json!({"response_format": format});
    for asked in [body(&extra), with_tools(&extra)] {
        let reply = ok(&client.post(CHAT, &asked));
        let message = &reply["choices"][0]["message"];
        assert_eq!(
            (&message["reasoning"], &message["content"]),
            (&json!("hm"), &json!("{\"city\": \"Bonn\"}"))
        );
    }
    let bare = TestServer::start(&special("{\"city\": \"Rome\"}"));
    let continued = json!({"messages": [{"role": "assistant", "content": "It is "}],
        "continue_final_message": true, "response_format": format});
    let reply = ok(&post(bare.address, CHAT, &body(&continued)));
    assert_eq!(reply["choices"][0]["message"]["content"], "{\"city\": \"Rome\"}");

    // In a response, the format applies to messages; calls remain possible.
    let parameters = json!({"type": "object"});
    let asked = json!({"input": "hi", "max_output_tokens": 600,
        "text": {"format": {"type": "json_schema", "name": "a", "schema": schema()}},
        "tools": [{"type": "function", "name": "weather", "parameters": parameters}]});
    let reply = ok(&client.post("/v1/responses", &asked));
    assert_eq!(reply["output"][1]["content"][0]["text"], "{\"city\": \"Bonn\"}", "{reply}");
    let calling = TestServer::start(&special(
        "<|channel|>commentary to=functions.weather json<|message|>{\"city\": \"Rome\"}",
    ));
    let reply = ok(&post(calling.address, "/v1/responses", &asked));
    assert_eq!(reply["output"][0]["arguments"], "{\"city\": \"Rome\"}", "{reply}");
}

#[test]
fn forced_and_strict_calls_follow_the_reasoning() {
    const SCRIPT: &str = "<|channel|>analysis<|message|>hm<|end|><|start|>assistant<|channel|>commentary \
        to=functions.weather <|constrain|>json<|message|>{\"city\": \"Paris\"}";
    let server = TestServer::start(&special(SCRIPT));
    let mut client = HttpClient::connect(server.address);
    let mut strict = tool("weather");
    strict["function"]["parameters"] = schema();
    for extra in [json!({"tool_choice": "required"}), json!({})] {
        let mut asked = body(&extra);
        strict["function"]["strict"] = json!(true);
        asked["tools"] = json!([strict]);
        let reply = ok(&client.post(CHAT, &asked));
        let message = &reply["choices"][0]["message"];
        assert_eq!(message["reasoning"], "hm", "{reply}");
        let arguments = message["tool_calls"][0]["function"]["arguments"].as_str().unwrap();
        let arguments: Value = serde_json::from_str(arguments).unwrap();
        assert!(jsonschema::is_valid(&schema(), &arguments), "{arguments}");
        asked["messages"] = json!([{"role": "assistant", "content": "It is "}]);
        asked["continue_final_message"] = json!(true);
        let reply = client.post(CHAT, &asked);
        let param = if extra == json!({}) { "tools" } else { "tool_choice" };
        assert_eq!((reply.status, &reply.json()["error"]["param"]), (400, &json!(param)));
    }
}

/// Reasoning and content of a reply to a request with a thinking budget of four tokens.
fn budgeted(script: &'static str) -> (Value, Value) {
    let server = TestServer::start(&special(script));
    let reply = ok(&post(server.address, CHAT, &body(&json!({"thinking_token_budget": 4}))));
    let message = &reply["choices"][0]["message"];
    let reasoning = message["reasoning"].as_str().unwrap_or_default();
    let counted = &reply["usage"]["completion_tokens_details"]["reasoning_tokens"];
    assert_eq!(*counted, reasoning.len(), "{reply}");
    (message["reasoning"].clone(), message["content"].clone())
}

#[test]
fn thinking_budgets_end_the_reasoning_message() {
    // `<|end|><|start|>assistant`, two special tokens and nine bytes, replaces the letters.
    let once =
        "<|channel|>analysis<|message|>0123abcdefghijk<|channel|>final<|message|>So.<|return|>";
    assert_eq!(budgeted(once), (json!("0123"), json!("So.")));
    // The reasoning begins again; then the opening of the answer replaces 18 tokens.
    let again = "<|channel|>analysis<|message|>0123abcdefghijk<|channel|>analysis<|message|>\
        abcdefghijklmnopqrSo.<|return|>";
    assert_eq!(budgeted(again), (json!("0123"), json!("So.")));
    let format = json!({"type": "json_schema", "json_schema": {"name": "a", "schema": schema()}});
    let extra = json!({"thinking_token_budget": 4, "response_format": format});
    let server = TestServer::start(&special(
        "<|channel|>analysis<|message|>0123abcdefghijk<|channel|>final<|message|>{\"city\": \"Rome\"}",
    ));
    let message = ok(&post(server.address, CHAT, &body(&extra)))["choices"][0]["message"].clone();
    assert_eq!(
        (&message["reasoning"], &message["content"]),
        (&json!("0123"), &json!("{\"city\": \"Rome\"}"))
    );
    let within = "<|channel|>analysis<|message|>012<|end|><|start|>assistant<|channel|>final<|message|>So.<|return|>";
    assert_eq!(budgeted(within), (json!("012"), json!("So.")));
    assert_eq!(budgeted("<|channel|>final<|message|>So.<|return|>"), (Value::Null, json!("So.")));
}

#[test]
fn end_tokens_end_the_output_and_are_not_shown() {
    const ENDED: &str = "<|channel|>analysis<|message|>hm<|end|><|start|>assistant<|channel|>commentary \
        to=functions.weather <|constrain|>json<|message|>{\"city\": \"Rome\"}<|call|><|start|>assistant\
        <|channel|>final<|message|>So.<|return|> more";
    let server = TestServer::start(&special(ENDED));
    let mut client = HttpClient::connect(server.address);
    for extra in [
        json!({}),
        json!({"include_stop_str_in_output": true}),
        json!({"skip_special_tokens": false}),
    ] {
        let reply = ok(&client.post(CHAT, &with_tools(&extra)));
        let choice = &reply["choices"][0];
        let message = &choice["message"];
        assert_eq!((&message["reasoning"], &message["content"]), (&json!("hm"), &Value::Null));
        assert_eq!(message["tool_calls"][0]["function"]["arguments"], "{\"city\": \"Rome\"}");
        assert_eq!(
            (&choice["finish_reason"], &choice["stop_reason"]),
            (&json!("tool_calls"), &Value::Null)
        );
    }
    let ignored =
        ok(&client.post(CHAT, &with_tools(&json!({"ignore_eos": true, "max_tokens": 120}))));
    let message = &ignored["choices"][0]["message"];
    assert!(message["content"].as_str().unwrap().starts_with("So.\n"), "{message}");
    assert_eq!(message["tool_calls"].as_array().unwrap().len(), 1);
    let answer = TestServer::start(&special("<|channel|>final<|message|>So.<|return|>x"));
    for extra in [json!({}), json!({"include_stop_str_in_output": true})] {
        let reply = ok(&post(answer.address, CHAT, &body(&extra)));
        let choice = &reply["choices"][0];
        assert_eq!(
            (&choice["message"]["content"], &choice["finish_reason"]),
            (&json!("So."), &json!("stop"))
        );
    }
}

#[test]
fn grammars_end_at_the_end_tokens() {
    const SCRIPT: &str = "<|channel|>analysis<|message|>0123<|end|><|start|>assistant<|channel|>commentary \
        to=functions.weather <|constrain|>json<|message|>{\"city\": \"Bonn\"}<|call|>";
    let server = TestServer::start(&special(SCRIPT));
    let mut client = HttpClient::connect(server.address);
    let mut strict = tool("weather");
    strict["function"]["parameters"] = schema();
    strict["function"]["strict"] = json!(true);
    for extra in [json!({"tool_choice": "required"}), json!({})] {
        let mut asked = body(&extra);
        asked["tools"] = json!([strict]);
        let message = ok(&client.post(CHAT, &asked))["choices"][0]["message"].clone();
        assert_eq!(message["reasoning"], "0123", "{message}");
        assert_eq!(message["tool_calls"][0]["function"]["arguments"], "{\"city\": \"Bonn\"}");
    }
    let format = json!({"type": "json_schema", "json_schema": {"name": "a", "schema": schema()}});
    let answering = TestServer::start(&special(ANSWER));
    let reply = ok(&post(answering.address, CHAT, &body(&json!({"response_format": format}))));
    assert_eq!(reply["choices"][0]["message"]["content"], "{\"city\": \"Bonn\"}");
    assert_eq!(reply["choices"][0]["finish_reason"], "stop");
}
