//! Chaos between processes: links that break, executors that die or stop in every phase of a server's life.
//!
//! `just chaos MINUTES` draws faults for that long, every test run goes through each of them once.

mod lifecycle_phases;
mod links;
mod random_faults;

use crate::http_client::{HttpClient, post};
use serde_json::{Value, json};
use std::io::Read as _;
use std::net::SocketAddr;

/// Small steps, one executor.
const EXECUTOR_PROCESS_FLAGS: &[&str] =
    &["--executor", "process", "--threads", "1", "--dtype", "float32"];

/// A sampled request, so that a token more or less changes all that follows.
fn body(prompt_words: usize, tokens: u32, streamed: bool) -> Value {
    json!({"prompt": "fox ".repeat(prompt_words), "max_tokens": tokens, "seed": 7, "temperature": 1,
        "ignore_eos": true, "stream": streamed})
}

/// The text that answers it.
fn text_of(at: SocketAddr, body: &Value) -> String {
    let reply = post(at, "/v1/completions", body).json();
    reply["choices"][0]["text"].as_str().unwrap_or_else(|| panic!("{reply}")).to_owned()
}

/// Everything that comes back on a connection until its end, whatever that is.
fn rest_of(client: &mut HttpClient) -> String {
    let mut all = Vec::new();
    let _ = client.reader.read_to_end(&mut all); // A reset is an end, too.
    String::from_utf8_lossy(&all).into_owned()
}
