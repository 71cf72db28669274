//! Tests of the conversion of `/generate` requests and replies.

use super::generate_fields::{GenerateLogprobOptions, GenerateRequest, rename_field};
use super::generate_output::finish_reason;
use crate::api_error::ApiError;
use crate::openai::choice::{ChoiceFinishReason, StopMatch};
use crate::request_fields::RequestFields;
use crate::strict_json::JsonValue;
use serde_json::{Value, json};

fn taken(body: &Value) -> Result<GenerateRequest, ApiError> {
    let body = JsonValue::parse(body.to_string().as_bytes())?;
    GenerateRequest::take(&mut RequestFields::of_body(body)?)
}

fn completion(body: &Value) -> Value {
    Value::Object(taken(body).map_err(|error| error.text()).unwrap().completion.into_values())
}

#[test]
fn requests_become_text_completions() {
    assert_eq!(completion(&json!({"text": "x"})), json!({"prompt": "x", "max_tokens": 128}));
    let all = json!({"input_ids": [1, 2], "stream": true, "rid": "a", "sampling_params": {
        "max_new_tokens": 3, "min_new_tokens": 1, "sampling_seed": 7, "no_stop_trim": true, "top_k": -1}});
    let expected = json!({"prompt": [1, 2], "stream": true, "rid": "a", "max_tokens": 3, "min_tokens": 1,
        "seed": 7, "include_stop_str_in_output": true, "top_k": -1});
    assert_eq!(completion(&all), expected);
    let logprobs = json!({"text": "x", "return_logprob": true, "logprob_start_len": 0, "top_logprobs_num": 2,
        "return_text_in_logprobs": true});
    let fields = completion(&logprobs);
    assert_eq!((&fields["logprobs"], &fields["prompt_logprobs"]), (&json!(2), &json!(2)));
    let expected = GenerateLogprobOptions { top: 2, prompt_start: Some(0), with_text: true };
    assert_eq!(taken(&logprobs).ok().and_then(|request| request.logprobs), Some(expected));
}

#[test]
fn lists_of_prompts_are_batches() {
    let is_batch = |body: Value| taken(&body).map_err(|error| error.text()).unwrap().is_batch;
    assert!(!is_batch(json!({"text": "x"})) && !is_batch(json!({"input_ids": [1]})));
    assert!(is_batch(json!({"text": ["x"]})) && is_batch(json!({"input_ids": [[1]]})));
    assert!(is_batch(json!({"text": "x", "sampling_params": {"n": 2}})));
    let equal = json!({"text": ["x", "y"], "return_logprob": [true, true],
        "sampling_params": [{"top_k": 1}, {"top_k": 1}]});
    assert!(taken(&equal).unwrap_or_else(|error| panic!("{}", error.text())).logprobs.is_some());
}

#[test]
fn unsupported_fields_are_rejected_by_name() {
    for (body, param) in [
        (json!({}), "text"),
        (json!({"text": "x", "input_ids": [1]}), "input_ids"),
        (json!({"text": "x", "lora_path": "a"}), "lora_path"),
        (json!({"text": "x", "image_data": ["a"]}), "image_data"),
        (json!({"text": "x", "return_hidden_states": true}), "return_hidden_states"),
        (json!({"text": "x", "sampling_params": {"ebnf": "a"}}), "sampling_params.ebnf"),
        (
            json!({"text": "x", "sampling_params": {"stop_regex": "a"}}),
            "sampling_params.stop_regex",
        ),
        (json!({"text": "x", "sampling_params": [{"n": 1}, {"n": 2}]}), "sampling_params"),
        (json!({"text": "x", "top_logprobs_num": [1, 2]}), "top_logprobs_num"),
    ] {
        let error = taken(&body).err().unwrap_or_else(|| panic!("{body}"));
        assert_eq!((error.status.as_u16(), error.param.as_deref()), (400, Some(param)), "{body}");
    }
    for (field, reason) in
        [("image_data", "images are"), ("video_data", "videos are"), ("audio_data", "audio is")]
    {
        let error = taken(&json!({"text": "x", field: ["a"]})).err().unwrap();
        let expected = format!("{reason} not supported by this model, which reads text only");
        assert!(error.text().contains(&expected), "{}", error.text());
    }
    let absent = json!({"text": "x", "image_data": [null], "return_hidden_states": false, "lora_path": null});
    assert!(taken(&absent).is_ok());
    let unknown = json!({"text": "x", "sampling_params": {"what": 1}});
    assert_eq!(taken(&unknown).ok().unwrap().ignored, ["sampling_params.what"]);
}

#[test]
fn errors_name_the_fields_of_the_request() {
    let renamed = |param: &str| rename_field(ApiError::invalid(param, "x"), "text").param.unwrap();
    assert_eq!(renamed("max_tokens"), "sampling_params.max_new_tokens");
    assert_eq!(renamed("stop[1]"), "sampling_params.stop[1]");
    assert_eq!(renamed("stop_token_ids"), "sampling_params.stop_token_ids");
    assert_eq!(renamed("n"), "sampling_params.n");
    assert_eq!(renamed("prompt[2]"), "text[2]");
    assert_eq!(renamed("prompt_logprobs"), "logprob_start_len");
    assert_eq!(renamed("priority"), "priority");
}

#[test]
fn finish_reasons_are_objects() {
    let of = |end: ChoiceFinishReason| finish_reason(Some(&end), Some(9), 3);
    assert_eq!(finish_reason(None, None, 0), Value::Null);
    assert_eq!(of(ChoiceFinishReason::Length), json!({"type": "length", "length": 3}));
    assert_eq!(of(ChoiceFinishReason::Stop(StopMatch::Eos)), json!({"type": "stop", "matched": 9}));
    let text = StopMatch::Text("x".to_owned());
    assert_eq!(of(ChoiceFinishReason::Stop(text)), json!({"type": "stop", "matched": "x"}));
}
