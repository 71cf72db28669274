//! Request fields for the pairwise tests, each with values at and beyond its bounds.

use serde_json::{Value, json};

/// A request field with valid and invalid values.
pub(super) struct PairwiseFieldValues {
    pub(super) name: &'static str,
    pub(super) valid: Vec<Value>,
    pub(super) invalid: Vec<Value>,
    /// Whether every request must contain the field.
    pub(super) required: bool,
}

fn field(name: &'static str, good: Value, bad: Value) -> PairwiseFieldValues {
    let list = |values: Value| values.as_array().expect("a list of values").clone();
    PairwiseFieldValues { name, valid: list(good), invalid: list(bad), required: false }
}

/// Fields of `/v1/completions`, for a model with 512 token ids and 512 positions.
pub(super) fn text() -> Vec<PairwiseFieldValues> {
    let prompt = field(
        "prompt",
        json!(["hello", [1, 2, 3], ["a", "b"], vec![5; 480], "\u{1f98a}<|im_end|>"]),
        json!(["", [], [512], [-1], {}]),
    );
    let own = vec![
        PairwiseFieldValues { required: true, ..prompt },
        field("logprobs", json!([0, 1, 20]), json!([21, -2, true])),
        field("echo", json!([true, false]), json!([1])),
    ];
    [own, sampling(), delivery()].into_iter().flatten().collect()
}

/// Fields of `/v1/chat/completions`.
pub(super) fn chat() -> Vec<PairwiseFieldValues> {
    let one = |content: Value| json!([{"role": "user", "content": content}]);
    let messages = field(
        "messages",
        json!([
            one(json!("hello")),
            one(json!([{"type": "text", "text": "a"}, {"type": "text", "text": "b"}])),
            [{"role": "system", "content": "x"}, {"role": "user", "content": ""}],
        ]),
        json!([[], [{"role": "user"}], one(json!(7))]),
    );
    let function =
        json!({"type": "function", "function": {"name": "f", "parameters": {"type": "object"}}});
    let own = vec![
        PairwiseFieldValues { required: true, ..messages },
        field("logprobs", json!([true, false]), json!([1])),
        field("top_logprobs", json!([0, 20]), json!([21, -2])),
        field("tools", json!([[function]]), json!([[{}], {}])),
        field("tool_choice", json!(["none", "auto"]), json!(["any", 1])),
        field("add_generation_prompt", json!([true, false]), json!([1])),
        field("chat_template_kwargs", json!([{}, {"x": 1}]), json!([[]])),
        field("reasoning_effort", json!(["low", "none"]), json!(["huge"])),
    ];
    [own, sampling(), delivery()].into_iter().flatten().collect()
}

fn sampling() -> Vec<PairwiseFieldValues> {
    let long = "x".repeat(256);
    vec![
        field("temperature", json!([0, 1e-6, 0.7, 2, null]), json!([-0.001, 2.001, "1"])),
        field("top_p", json!([1e-9, 0.5, 1]), json!([0, 1.0001, -1])),
        field("top_k", json!([-1, 0, 1, 2_147_483_647]), json!([-2, 1.5])),
        field("min_p", json!([0, 0.5, 1]), json!([-0.1, 1.1])),
        field("repetition_penalty", json!([1e-30, 0.5, 1, 1e30]), json!([0, -1])),
        field("frequency_penalty", json!([-2, 2]), json!([-2.1, 2.1])),
        field("presence_penalty", json!([-2, 2]), json!([-2.1, 2.1])),
        field("seed", json!([i64::MIN, i64::MAX, 0]), json!([1e30, 1.5])),
        field("n", json!([1, 2, 4]), json!([0, 129, -1])),
        field("max_tokens", json!([1, 2, 5]), json!([0, -1, 100_000, u64::MAX])),
        field("min_tokens", json!([0, 1, 2]), json!([-1, 5_000])),
        field(
            "stop",
            json!(["a", [long], vec!["zz"; 16], []]),
            json!(["", [""], vec!["a"; 17], ["x".repeat(257)]]),
        ),
        field("stop_token_ids", json!([[0], [511, 2], []]), json!([[512], [-1], vec![1; 129]])),
        field("ignore_eos", json!([true, false]), json!([1])),
        field(
            "logit_bias",
            json!([{"0": -100}, {"511": 100, "7": 1}, {}]),
            json!([{"512": 1}, {"a": 1}]),
        ),
        field("allowed_token_ids", json!([[7], [5, 6, 511]]), json!([[], [512]])),
        field("bad_words", json!([["a"], ["the", "b c"], []]), json!([[""], [1]])),
        field("regex", json!(["[a-z]{1,3}"]), json!(["(a+"])),
        field(
            "response_format",
            json!([{"type": "text"}, {"type": "json_object"}]),
            json!([{}, 1]),
        ),
    ]
}

fn delivery() -> Vec<PairwiseFieldValues> {
    let salt = "s".repeat(128);
    vec![
        field("prompt_logprobs", json!([0, 3, 20]), json!([21, -2])),
        field("stream", json!([true, false]), json!(["yes"])),
        field("stream_options", json!([{"include_usage": true}]), json!([{"include_usage": 1}])),
        field("stream_interval", json!([1, 1_000]), json!([0])),
        field("skip_special_tokens", json!([true, false]), json!(["no"])),
        field("include_stop_str_in_output", json!([true, false]), json!([0])),
        field("cache_salt", json!(["s", salt]), json!(["", "a/b"])),
        field("priority", json!([0]), json!([1.5, 1_u64 << 40])),
        field("data_parallel_rank", json!([0]), json!([1, -1])),
        field("truncate_prompt_tokens", json!([-1, 1, 400]), json!([0, -2])),
        field("return_token_ids", json!([true, false]), json!([1])),
        field("return_tokens_as_token_ids", json!([true, false]), json!([1])),
        field("request_id", json!(["a.b:c-d_1"]), json!(["sp ace", 7])),
    ]
}
