//! Attacks by request fields with values at and beyond their limits.

use super::target::AttackTarget;
use crate::rng::SimRng;
use serde_json::{Map, Value, json};

/// Sends a request with several fields of extreme values at the same time.
pub(super) fn fields(target: &AttackTarget, rng: &mut SimRng) {
    let numbers = [
        json!(0),
        json!(1),
        json!(-1),
        json!(20),
        json!(21),
        json!(u64::MAX),
        json!(1e308),
        json!(null),
    ];
    let names = [
        "max_tokens",
        "min_tokens",
        "n",
        "best_of",
        "logprobs",
        "prompt_logprobs",
        "top_k",
        "top_p",
        "min_p",
        "temperature",
        "presence_penalty",
        "frequency_penalty",
        "repetition_penalty",
        "seed",
        "truncate_prompt_tokens",
        "stream_interval",
        "priority",
        "data_parallel_rank",
    ];
    let mut body = Map::from_iter([("prompt".to_owned(), json!("extreme"))]);
    for _ in 0..rng.between(1, 4) {
        let value = numbers[rng.below(numbers.len() as u64) as usize].clone();
        body.insert(rng.pick(&names).to_owned(), value);
    }
    let many = rng.scaled(1, 2_000) as usize;
    let biases = |n: usize| (0..n).map(|i| (i.to_string(), json!(i % 200)));
    let (name, value) = match rng.below(6) {
        0 => ("logit_bias", Value::Object(biases(many).collect())),
        1 => ("stop", json!(vec!["x".repeat(many); 16])),
        2 => ("bad_words", json!(vec!["word"; many])),
        3 => ("prompt", json!(vec!["many"; many])),
        4 => ("allowed_token_ids", json!((0..many).collect::<Vec<_>>())),
        _ => ("cache_salt", json!("s".repeat(many))),
    };
    body.insert(name.to_owned(), value);
    body.entry("max_tokens").or_insert(json!(4));
    let body = Value::Object(body).to_string();
    target.post("extreme_fields", "/v1/completions", body.as_bytes());
}

/// Requests up to the maximum number of choices, prompts and log-probabilities, or slightly more.
pub(super) fn choices(target: &AttackTarget, rng: &mut SimRng) {
    let n = rng.between(1, 17);
    let prompts = rng.scaled(1, 20);
    let body = json!({"prompt": vec!["choices"; prompts as usize], "n": n, "best_of": n, "temperature": 1,
        "max_tokens": rng.scaled(1, 60), "logprobs": rng.between(0, 20), "echo": rng.chance_per_mille(300),
        "ignore_eos": true});
    target.post("many_choices", "/v1/completions", body.to_string().as_bytes());
}
