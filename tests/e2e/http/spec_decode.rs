//! `--speculative-config`: outputs and log-probabilities are bit-identical with and without draft tokens, for
//! every sampling option and scheduler decision.

use super::executor_process::{
    complete_text, executor, finish, is_ready, send, stream, stream_of, wait_until,
};
use super::mla::{model, model_with};
use super::parallel_ranks::{metric, start, synth};
use super::server_process::command;
use crate::bounded_child::run_to_end;
use crate::deadlines::BoundedJoin;
use crate::http_client::{get, post};
use serde_json::{Value, json};
use std::net::SocketAddr;
use std::thread;
use std::time::{Duration, Instant};

const CONFIG: &str = r#"{"method":"ngram","num_speculative_tokens":4,"prompt_lookup_max":4}"#;
/// Configuration that proposes draft tokens in every step, most of which are rejected.
const EAGER_CONFIG: &str =
    r#"{"method":"ngram","num_speculative_tokens":7,"prompt_lookup_min":1,"prompt_lookup_max":3}"#;
/// Flags that cause chunked prefill and preemptions.
const SMALL_CACHE_FLAGS: &[&str] = &[
    "--max-model-len",
    "512",
    "--num-gpu-blocks-override",
    "40",
    "--max-num-batched-tokens",
    "64",
    "--max-num-seqs",
    "16",
];

/// Sampling parameters of the requests, one set per request.
fn rules() -> Vec<Value> {
    vec![
        json!({"temperature": 0}),
        json!({"temperature": 0, "logprobs": 3}),
        json!({"temperature": 0.7}),
        json!({"temperature": 1, "top_p": 0.9, "top_k": 40, "min_p": 0.01, "logprobs": 2}),
        json!({"temperature": 1, "repetition_penalty": 1.1, "frequency_penalty": 0.3,
               "presence_penalty": 0.2}),
        json!({"temperature": 0, "stop": ["price is 1", " duo"]}),
        json!({"temperature": 0.6, "stop": ["5", "For dupo"], "include_stop_str_in_output": true,
               "min_tokens": 6, "logprobs": 0}),
        json!({"temperature": 1, "regex": "(the price is [0-9]{2,4}[.] ){6,}"}),
        json!({"temperature": 0.9, "n": 2}),
        json!({"temperature": 0, "bad_words": ["price", " is 1"], "logit_bias": {"300": 2}}),
        json!({"temperature": 0.5, "prompt_logprobs": 2, "stop_token_ids": [60, 61, 62, 63]}),
        json!({"temperature": 0.8, "echo": true, "logprobs": 1, "max_tokens": 3}),
        json!({"temperature": 0, "max_tokens": 1}),
    ]
}

/// A repetitive prompt, which makes the output repetitive; one in four prompts shares a prefix with others.
fn body(which: usize, rule: &Value) -> Value {
    let notes = "For beni the price is 178. For dupo the price is 154. ".repeat(5);
    let prompt = format!("Note {}. {notes}For sutuvi the price is {which}. For", which % 4);
    let mut body = json!({"prompt": prompt,
                          "max_tokens": 90, "ignore_eos": true, "seed": which, "return_token_ids": true});
    body.as_object_mut().unwrap().extend(rule.as_object().unwrap().clone());
    body
}

/// Text, token ids and log-probabilities of a request's output.
fn token_outputs(at: SocketAddr, body: &Value) -> Value {
    let reply = post(at, "/v1/completions", body);
    assert_eq!(reply.status, 200, "{body}: {}", String::from_utf8_lossy(&reply.body));
    let reply = reply.json();
    json!([reply["choices"], reply["usage"]["completion_tokens"]])
}

fn spec_decode(at: SocketAddr, name: &str, position: &str) -> f64 {
    let labels = r#"engine="0",model_name="hadron-demo""#;
    metric(at, &format!("vllm:spec_decode_num_{name}_total{{{labels}{position}}}"))
}

/// Numbers of draft tokens and of accepted draft tokens, from the server's metrics.
fn spec_decode_counts(at: SocketAddr) -> (f64, f64) {
    let place = |i: u8| {
        let position = format!(r#",position="{i}""#);
        spec_decode(at, "accepted_tokens_per_pos", &position)
    };
    let places: Vec<f64> = (0..4).map(place).collect();
    assert!(places.is_sorted_by(|a, b| a >= b), "{places:?}");
    let [rows, tokens, accepted] =
        ["drafts", "draft_tokens", "accepted_tokens"].map(|name| spec_decode(at, name, ""));
    assert!(rows <= tokens && places[0] <= rows && places[0] <= accepted, "{places:?}");
    (tokens, accepted)
}

#[test]
fn spec_decode_changes_no_output() {
    let bodies: Vec<Value> = (0..).zip(rules()).map(|(which, rule)| body(which, &rule)).collect();
    let plain = start(&[]);
    let expected: Vec<Value> =
        bodies.iter().map(|body| token_outputs(plain.address, body)).collect();
    drop(plain);
    let drafting = start(&["--speculative-config", CONFIG]);
    let at = drafting.address;
    for (body, expected) in bodies.iter().zip(&expected) {
        assert_eq!(token_outputs(at, body), *expected, "{body}");
    }
    let (tokens, accepted) = spec_decode_counts(at);
    println!("{accepted} of {tokens} drafts accepted");
    assert!(0.0 < accepted && accepted < tokens, "{accepted} of {tokens}");
    let streams = |body: &Value| body["n"].is_null() && body["prompt_logprobs"].is_null();
    for (body, expected) in bodies.iter().zip(&expected).filter(|(body, _)| streams(body)) {
        let mut body = body.clone();
        body["stream"] = json!(true);
        let (text, end) = finish(stream_of(at, &body));
        let choice = &expected[0][0];
        assert_eq!((&json!(text), &end), (&choice["text"], &choice["finish_reason"]), "{body}");
    }
}

/// Requests whose outputs are constrained by a JSON schema, a Lark grammar, a choice or a regular expression,
/// some with further sampling parameters.
fn constrained_bodies() -> Vec<Value> {
    let item = json!({"type": "object", "additionalProperties": false, "required": ["item", "price"],
        "properties": {"item": {"enum": ["beni", "dupo"]},
                       "price": {"type": "integer", "minimum": 10, "maximum": 999}}});
    let list = json!({"type": "array", "items": item, "minItems": 4, "maxItems": 5});
    let json = json!({"json": list, "disable_any_whitespace": true});
    let lark = "start: (\"the price is \" /[0-9]{2,3}/ \". \"){4}";
    let constraints = [
        json!({"structured_outputs": json}),
        json!({"structured_outputs": json, "temperature": 0.8}),
        json!({"structured_outputs": json, "temperature": 1, "logprobs": 2, "top_p": 0.9,
               "frequency_penalty": 0.4, "repetition_penalty": 1.1}),
        json!({"response_format": {"type": "json_schema",
                                   "json_schema": {"name": "list", "schema": list}}}),
        json!({"structured_outputs": {"grammar": lark}, "temperature": 0.7}),
        json!({"structured_outputs": {"choice": ["For beni the price is 178. For dupo the price is 154.",
                                                 "For beni the price is 154."]}}),
        json!({"regex": "(the price is [0-9]{2,4}[.] )+", "min_tokens": 40, "bad_words": [" is 1"]}),
        json!({"regex": "(the price is [0-9]{2,4}[.] )+", "stop": ["is 15"], "n": 2, "temperature": 0.9}),
    ];
    let body = |(which, constraint): (usize, &Value)| {
        let mut body = body(which, constraint);
        body["max_tokens"] = json!(160);
        body
    };
    constraints.iter().enumerate().map(body).collect()
}

/// Draft tokens under a grammar are accepted, the outputs equal the outputs without draft tokens, and JSON is
/// valid.
#[test]
fn drafts_under_grammars_change_no_output() {
    let bodies = constrained_bodies();
    let plain = start(&[]);
    let expected: Vec<Value> =
        bodies.iter().map(|body| token_outputs(plain.address, body)).collect();
    drop(plain);
    let small_cache = [&["--speculative-config", EAGER_CONFIG], SMALL_CACHE_FLAGS].concat();
    let process = ["--executor", "process", "--speculative-config", EAGER_CONFIG];
    for flags in [&small_cache[..], &process] {
        let drafting = start(flags);
        let at = drafting.address;
        let ask = |body: &Value| {
            let body = body.clone();
            thread::spawn(move || token_outputs(at, &body))
        };
        let asked: Vec<_> = bodies.iter().map(ask).collect();
        for ((asked, expected), body) in asked.into_iter().zip(&expected).zip(&bodies) {
            let found = asked.join_bounded();
            assert_eq!(found, *expected, "{flags:?}: {body}");
            let choice = &found[0][0];
            let is_json = body["regex"].is_null() && body["structured_outputs"]["json"].is_object();
            if is_json && choice["finish_reason"] == "stop" {
                let text = choice["text"].as_str().unwrap();
                let list: Vec<Value> = serde_json::from_str(text).unwrap();
                assert!((4..=5).contains(&list.len()), "{text}");
            }
        }
        let (tokens, accepted) = spec_decode_counts(at);
        println!("{flags:?}: {accepted} of {tokens} drafts accepted");
        assert!(0.0 < accepted && accepted < tokens, "{accepted} of {tokens}");
    }
}

#[test]
fn usage_counts_draft_tokens() {
    let details = |at, which| {
        let body = body(which, &json!({"temperature": 0}));
        let mut usage = post(at, "/v1/completions", &body).json()["usage"].take();
        usage["completion_tokens_details"].take()
    };
    let plain = start(&[]);
    assert_eq!(details(plain.address, 0), Value::Null);
    drop(plain);
    let drafting = start(&["--speculative-config", CONFIG]);
    let mut sums = (0.0, 0.0);
    for which in 0..3 {
        let details = details(drafting.address, which);
        let count = |name: &str| details[name].as_f64().unwrap();
        assert!(count("accepted_draft_tokens") <= count("draft_tokens"), "{details}");
        sums = (sums.0 + count("draft_tokens"), sums.1 + count("accepted_draft_tokens"));
    }
    assert_eq!(sums, spec_decode_counts(drafting.address));
}

/// Sums the numbers in a list.
fn sum(list: &Value) -> u64 {
    list.as_array().unwrap().iter().map(|number| number.as_u64().unwrap()).sum()
}

#[test]
fn replies_contain_draft_statistics_if_enabled() {
    let flags = ["--speculative-config", CONFIG, "--per-request-spec-decode-metrics", "detailed"];
    let server = start(&flags);
    let mut body = body(1, &json!({"temperature": 0}));
    let reply = post(server.address, "/v1/completions", &body).json();
    let statistics = &reply["metrics"]["speculative_decoding"];
    let details = &reply["usage"]["completion_tokens_details"];
    assert_eq!(statistics["num_draft_tokens"], details["draft_tokens"], "{reply}");
    assert_eq!(statistics["num_accepted_draft_tokens"], details["accepted_draft_tokens"]);
    assert_eq!(statistics["num_spec_tokens"], 4);
    assert_eq!(json!(sum(&statistics["per_step_drafted"])), details["draft_tokens"]);
    assert_eq!(json!(sum(&statistics["per_step_accepted"])), details["accepted_draft_tokens"]);
    let histogram = &statistics["acceptance_histogram"];
    assert_eq!(histogram.as_array().unwrap().len(), 5);
    assert_eq!(json!(sum(histogram)), statistics["num_spec_steps"]);
    assert!(statistics["mean_acceptance_length"].as_f64().unwrap() > 1.0, "{statistics}");

    body["stream"] = json!(true);
    body["stream_options"] = json!({"include_usage": true});
    let stream = post(server.address, "/v1/completions", &body).body;
    let stream = String::from_utf8(stream).unwrap();
    let chunks = stream.lines().filter_map(|line| line.strip_prefix("data: "));
    let chunks: Vec<&str> = chunks.filter(|chunk| chunk.contains("\"metrics\"")).collect();
    assert_eq!(chunks.len(), 1, "{stream}");
    let last: Value = serde_json::from_str(chunks[0]).unwrap();
    assert_eq!(last["metrics"]["speculative_decoding"]["num_spec_tokens"], 4, "{last}");
    assert!(last["usage"]["completion_tokens"].is_u64(), "{last}");

    let messages = json!([{"role": "user", "content": "For beni the price is 178. For beni"}]);
    let chat = json!({"messages": messages, "max_tokens": 8, "n": 2});
    let reply = post(server.address, "/v1/chat/completions", &chat).json();
    assert_eq!(reply["metrics"], json!({"speculative_decoding": null}), "{reply}");
}

#[test]
fn spec_decode_changes_no_output_under_preemption() {
    let bodies: Vec<Value> = (0..).zip(rules()).map(|(which, rule)| body(which, &rule)).collect();
    let plain = start(&[]);
    let expected: Vec<Value> =
        bodies.iter().map(|body| token_outputs(plain.address, body)).collect();
    drop(plain);
    let drafting = start(&[&["--speculative-config", EAGER_CONFIG], SMALL_CACHE_FLAGS].concat());
    let at = drafting.address;
    let ask = |body: &Value| {
        let body = body.clone();
        thread::spawn(move || token_outputs(at, &body))
    };
    let preemptions =
        || metric(at, r#"vllm:num_preemptions_total{engine="0",model_name="hadron-demo"}"#);
    let begun = Instant::now();
    while preemptions() == 0.0 {
        assert!(begun.elapsed() < Duration::from_mins(1), "no request was preempted");
        let asked: Vec<_> = bodies.iter().map(ask).collect();
        for ((asked, expected), body) in asked.into_iter().zip(&expected).zip(&bodies) {
            assert_eq!(asked.join_bounded(), *expected, "{body}");
        }
    }
    let (tokens, accepted) = spec_decode_counts(at);
    println!("{accepted} of {tokens} drafts accepted, {} preemptions", preemptions());
    assert!(0.0 < accepted && accepted < tokens, "{accepted} of {tokens}");
}

#[test]
fn tensor_parallel_ranks_draft_identically() {
    let bodies: Vec<Value> = (0..).zip(rules()).map(|(which, rule)| body(which, &rule)).collect();
    let flags = ["--tensor-parallel-size", "2", "--max-num-batched-tokens", "64"];
    let plain = start(&flags);
    let expected: Vec<Value> =
        bodies.iter().map(|body| token_outputs(plain.address, body)).collect();
    drop(plain);
    let drafting = start(&[&["--speculative-config", EAGER_CONFIG], &flags[..]].concat());
    for (body, expected) in bodies.iter().zip(&expected) {
        assert_eq!(token_outputs(drafting.address, body), *expected, "{body}");
    }
    assert!(spec_decode_counts(drafting.address).1 > 0.0);
}

/// Output token ids of twelve requests with repetitive prompts, all sent at once. Three of them are
/// constrained.
fn ids_of_all(at: SocketAddr) -> Vec<Value> {
    let ask = |which: u64| {
        let prompt: Vec<u64> = (0..70).map(|i| 3 + (i % 9 * 7 + which * 31) % 250).collect();
        let mut body = json!({"prompt": prompt, "max_tokens": 60, "ignore_eos": true, "seed": which,
                              "temperature": which % 2, "return_token_ids": true});
        if which % 4 == 1 {
            body["regex"] = json!("([a-p]{1,3}[0-9])+");
        }
        thread::spawn(move || token_outputs(at, &body)[0][0]["token_ids"].clone())
    };
    let asked: Vec<_> = (0..12).map(ask).collect();
    asked.into_iter().map(BoundedJoin::join_bounded).collect()
}

#[test]
fn expert_parallel_replicas_may_draft_differently() {
    let model = model();
    let folder = model.path().join("model").to_str().unwrap().to_owned();
    let sizes =
        [folder.as_str(), "--num-gpu-blocks-override", "256", "--max-num-batched-tokens", "48"];
    let plain = start(&sizes);
    let expected = ids_of_all(plain.address);
    assert!(expected.iter().all(|ids| ids.as_array().map(Vec::len) == Some(60)), "{expected:?}");
    drop(plain);
    for flags in [&[][..], &["--data-parallel-size", "2", "--enable-expert-parallel"]] {
        let drafting =
            start(&[&sizes[..], &["--speculative-config", EAGER_CONFIG], flags].concat());
        assert!(ids_of_all(drafting.address) == expected, "{flags:?}");
        let page = String::from_utf8(get(drafting.address, "/metrics").body).unwrap();
        let series = |name: &str| -> Vec<&str> {
            let name = format!("vllm:spec_decode_num_{name}_tokens_total{{");
            page.lines().filter(|line| line.starts_with(&name)).collect()
        };
        let none = |line: &&str| line.ends_with(" 0");
        let [drafted, accepted] = ["draft", "accepted"].map(series);
        // Acceptance of draft tokens depends on random outputs, so a single replica may have no accepted
        // draft tokens.
        assert!(!drafted.is_empty() && !drafted.iter().any(none), "{drafted:?}");
        assert!(!accepted.iter().all(none), "{accepted:?}");
    }
}

#[test]
fn executor_kill_during_spec_decode_changes_no_output() {
    const TOKENS: u32 = 1_500;
    let plain = start(&[]);
    let expected = complete_text(plain.address, TOKENS);
    drop(plain);
    let process = start(&["--executor", "process", "--speculative-config", EAGER_CONFIG]);
    let at = process.address;
    let streams: Vec<_> = (0..3).map(|_| stream(at, TOKENS)).collect();
    let former = executor(&process);
    send(former, "-KILL");
    wait_until(Duration::from_mins(1), "the failure", || !is_ready(at));
    for stream in streams {
        let (text, end) = finish(stream);
        assert_eq!(end, "length");
        assert!(text == expected, "differs from a run without drafts:\n{text}\n{expected}");
    }
    wait_until(Duration::from_mins(1), "the restart", || is_ready(at));
    assert_ne!(executor(&process), former);
    assert!(spec_decode_counts(at).1 > 0.0);
}

/// Speculative configuration that uses the MTP module of the model.
const MTP_CONFIG: &str = r#"{"method":"mtp","num_speculative_tokens":3}"#;

/// Sum of a speculative-decoding counter over the replicas.
fn counted(at: SocketAddr, name: &str) -> f64 {
    let page = String::from_utf8(get(at, "/metrics").body).unwrap();
    let name = format!("vllm:spec_decode_num_{name}_total{{");
    let lines = page.lines().filter(|line| line.starts_with(&name));
    lines.map(|line| line.rsplit(' ').next().unwrap().parse::<f64>().unwrap()).sum()
}

#[test]
fn mtp_changes_no_output() {
    let model = model_with(1);
    let folder = model.path().join("model").to_str().unwrap().to_owned();
    let sizes =
        [folder.as_str(), "--num-gpu-blocks-override", "256", "--max-num-batched-tokens", "64"];
    let plain = start(&sizes);
    let expected = ids_of_all(plain.address);
    drop(plain);
    let cramped = [&[folder.as_str()], SMALL_CACHE_FLAGS].concat();
    for flags in [
        &sizes[..],
        &cramped,
        &[&sizes[..], &["--tensor-parallel-size", "2"]].concat(),
        &[&sizes[..], &["--tensor-parallel-size", "2", "--enable-expert-parallel"]].concat(),
        &[&sizes[..], &["--data-parallel-size", "2"]].concat(),
        &[&sizes[..], &["--data-parallel-size", "2", "--enable-expert-parallel"]].concat(),
    ] {
        let drafting = start(&[flags, &["--speculative-config", MTP_CONFIG]].concat());
        let at = drafting.address;
        for time in ["cold", "with prefix hits"] {
            assert!(ids_of_all(at) == expected, "{flags:?}, {time}");
        }
        let [rows, tokens, right] =
            ["drafts", "draft_tokens", "accepted_tokens"].map(|name| counted(at, name));
        println!("{flags:?}: {right} of {tokens} drafts accepted");
        assert!(2.0 * rows < tokens && tokens <= 3.0 * rows && right < tokens, "{rows} {tokens}");
    }
}

/// The model is its own draft model, so all draft tokens of greedy requests, which are half of the requests,
/// are accepted.
#[test]
fn draft_model_changes_no_output() {
    let model = model();
    let folder = model.path().join("model").to_str().unwrap().to_owned();
    let sizes =
        [folder.as_str(), "--num-gpu-blocks-override", "256", "--max-num-batched-tokens", "64"];
    let plain = start(&sizes);
    let expected = ids_of_all(plain.address);
    drop(plain);
    let itself = json!({"method": "draft_model", "num_speculative_tokens": 4, "model": folder});
    let itself = itself.to_string();
    for flags in [&[][..], &["--tensor-parallel-size", "2", "--enable-expert-parallel"]] {
        let drafting = start(&[&sizes[..], &["--speculative-config", &itself], flags].concat());
        let at = drafting.address;
        assert!(ids_of_all(at) == expected, "{flags:?}");
        let [tokens, right] = ["draft_tokens", "accepted_tokens"].map(|name| counted(at, name));
        println!("{flags:?}: {right} of {tokens} drafts accepted");
        // Six of twelve requests are greedy, and each greedy request takes twelve steps with four accepted
        // draft tokens.
        assert!((240.0..tokens).contains(&right), "{right} of {tokens}");
    }
}

/// Covers draft tokens of an MTP module and of an EAGLE-3 layer.
#[test]
fn restarted_executor_drafts_again() {
    let own = model_with(1);
    let [dense, layer] = eagle3_models(&json!({}));
    let [own, dense, layer] =
        [&own, &dense, &layer].map(|dir| dir.path().join("model").to_str().unwrap().to_owned());
    for (folder, config) in [(&own, MTP_CONFIG.to_owned()), (&dense, eagle3(&layer, 3))] {
        let sizes = [folder.as_str(), "--num-gpu-blocks-override", "256"];
        let plain = start(&sizes);
        let expected = ids_of_all(plain.address);
        drop(plain);
        let flags = ["--executor", "process", "--speculative-config", &config];
        let process = start(&[&sizes[..], &flags].concat());
        let at = process.address;
        let asked = thread::spawn(move || ids_of_all(at));
        wait_until(Duration::from_mins(1), "drafts", || counted(at, "draft_tokens") > 0.0);
        let former = executor(&process);
        send(former, "-KILL");
        assert!(asked.join_bounded() == expected, "{config}: across the death of an executor");
        wait_until(Duration::from_mins(1), "the restart", || is_ready(at));
        assert_ne!(executor(&process), former);
        assert!(ids_of_all(at) == expected, "{config}: after it");
    }
}

#[test]
fn models_without_usable_mtp_are_rejected_by_name() {
    let [none, one, two] = [0, 1, 2].map(model_with);
    let folder =
        |model: &tempfile::TempDir| model.path().join("model").to_str().unwrap().to_owned();
    let [none, one, two] = [&none, &one, &two].map(folder);
    let many = r#"{"method":"mtp","num_speculative_tokens":17}"#;
    for (config, flags, named) in [
        (MTP_CONFIG, &[none.as_str()][..], "DeepseekV3ForCausalLM model has no MTP modules"),
        (MTP_CONFIG, &[two.as_str()], "DeepseekV3ForCausalLM model has 2 MTP modules"),
        (MTP_CONFIG, &[], "model has no MTP modules"), // The demo model.
        (many, &[one.as_str()], "num_speculative_tokens 17"),
    ] {
        let flags = [&["--port", "0", "--speculative-config", config], flags].concat();
        let output = run_to_end(&mut command(&flags));
        let text = String::from_utf8_lossy(&output.stderr);
        assert!(!output.status.success(), "{flags:?}: {text}");
        assert!(text.contains("--speculative-config") && text.contains(named), "{flags:?}: {text}");
    }
}

/// Checkpoints of a dense model of six layers, and of an EAGLE-3 layer with a draft vocabulary of 96 ids.
fn eagle3_models(members: &Value) -> [tempfile::TempDir; 2] {
    let model = synth(&json!({
        "architectures": ["Qwen3ForCausalLM"], "model_type": "qwen3", "vocab_size": 272,
        "hidden_size": 64, "num_hidden_layers": 6, "num_attention_heads": 4,
        "num_key_value_heads": 2, "head_dim": 16, "intermediate_size": 96, "rms_norm_eps": 1e-6,
        "max_position_embeddings": 1024, "eos_token_id": 2
    }));
    let mut layer = json!({
        "architectures": ["LlamaForCausalLMEagle3"], "model_type": "llama", "vocab_size": 272,
        "draft_vocab_size": 96, "hidden_size": 64, "num_hidden_layers": 1,
        "num_attention_heads": 4, "num_key_value_heads": 2, "head_dim": 16,
        "intermediate_size": 96, "rms_norm_eps": 1e-6, "max_position_embeddings": 1024,
        "eagle_config": {"eagle_aux_hidden_state_layer_ids": [0, 1, 2]}
    });
    layer.as_object_mut().unwrap().extend(members.as_object().unwrap().clone());
    [model, synth(&layer)]
}

fn eagle3(layer: &str, drafts: u8) -> String {
    json!({"method": "eagle3", "model": layer, "num_speculative_tokens": drafts}).to_string()
}

#[test]
fn eagle3_changes_no_output() {
    let both = eagle3_models(&json!({}));
    let latents = model();
    let [dense, latents, layer] = [&both[0], &latents, &both[1]]
        .map(|dir| dir.path().join("model").to_str().unwrap().to_owned());
    let dp = ["--data-parallel-size", "2", "--enable-expert-parallel"];
    for (model, worlds) in [
        (&dense, [&[][..], SMALL_CACHE_FLAGS, &["--tensor-parallel-size", "2"]]),
        (&latents, [&["--tensor-parallel-size", "2", "--enable-expert-parallel"], &dp[..2], &dp]),
    ] {
        let sizes = [model, "--num-gpu-blocks-override", "256", "--max-num-batched-tokens", "64"];
        let plain = start(&sizes);
        let expected = ids_of_all(plain.address);
        drop(plain);
        for flags in worlds {
            let sizes = if flags == SMALL_CACHE_FLAGS { &sizes[..1] } else { &sizes };
            let config = eagle3(&layer, 3);
            let drafting = start(&[sizes, flags, &["--speculative-config", &config]].concat());
            let at = drafting.address;
            for time in ["cold", "with prefix hits"] {
                assert!(ids_of_all(at) == expected, "{flags:?}, {time}");
            }
            let [rows, tokens, right] =
                ["drafts", "draft_tokens", "accepted_tokens"].map(|name| counted(at, name));
            println!("{flags:?}: {right} of {tokens} drafts accepted");
            assert!(2.0 * rows < tokens && tokens <= 3.0 * rows, "{tokens} for {rows} rows");
            assert!(right < tokens, "{right} of {tokens}");
        }
    }
}

#[test]
fn mismatched_eagle3_config_is_rejected_by_field() {
    let rejected = |members: Value, config: &dyn Fn(&str) -> String, named: &str| {
        let both = eagle3_models(&members);
        let [model, layer] =
            both.each_ref().map(|dir| dir.path().join("model").to_str().unwrap().to_owned());
        let flags = [model.as_str(), "--port", "0", "--speculative-config", &config(&layer)];
        let output = run_to_end(&mut command(&flags));
        let text = String::from_utf8_lossy(&output.stderr);
        assert!(!output.status.success() && text.contains(named), "{named}: {text}");
        assert!(text.contains("--speculative-config"), "{text}");
    };
    let by = |drafts| move |layer: &str| eagle3(layer, drafts);
    rejected(json!({}), &by(17), "num_speculative_tokens 17: 1 to 16 for eagle3");
    rejected(json!({"vocab_size": 300}), &by(2), "field `vocab_size`");
    rejected(
        json!({"hidden_size": 48, "num_attention_heads": 3, "num_key_value_heads": 3}),
        &by(2),
        "field `hidden_size`",
    );
    rejected(json!({"target_hidden_size": 96}), &by(2), "field `target_hidden_size`");
    let deep = json!({"eagle_config": {"eagle_aux_hidden_state_layer_ids": [0, 2, 6]}});
    rejected(deep, &by(2), "input of layer 7, the target model has 6 layers");
    let other = |layer: &str| eagle3(layer, 2).replace("eagle3", "draft_model");
    rejected(json!({}), &other, "needs method eagle3");
    let both = eagle3_models(&json!({}));
    let layer = both[1].path().join("model").to_str().unwrap().to_owned();
    let output = run_to_end(&mut command(&[&layer, "--port", "0"]));
    let text = String::from_utf8_lossy(&output.stderr);
    assert!(text.contains("LlamaForCausalLMEagle3 is a draft model"), "{text}");
}
