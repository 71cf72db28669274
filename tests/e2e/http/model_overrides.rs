//! `--hf-overrides` reaches all readers of `config.json`.

use super::server_process::ServerProcess;
use crate::http_client::post;
use serde_json::{Value, json};

fn completion(server: &ServerProcess) -> Value {
    let body =
        json!({"prompt": "Once", "max_tokens": 4, "temperature": 0, "return_token_ids": true});
    post(server.address, "/v1/completions", &body).json()["choices"][0].clone()
}

#[test]
fn overridden_eos_id_ends_the_output() {
    let choice = completion(&ServerProcess::start(&[]));
    let ids = choice["token_ids"].as_array().unwrap_or_else(|| panic!("{choice}")).clone();
    assert_eq!((ids.len(), &choice["finish_reason"]), (4, &json!("length")));
    let overrides = json!({"eos_token_id": [ids[2]]}).to_string();
    let choice = completion(&ServerProcess::start(&["--hf-overrides", &overrides]));
    let expected = ids.iter().position(|id| *id == ids[2]).unwrap();
    assert_eq!(choice["finish_reason"], "stop", "{choice}");
    assert!(choice["token_ids"].as_array().unwrap().len() <= expected + 1, "{choice}");
}
