//! Faults between processes: broken links, and executors that are killed or stopped in each phase of a
//! server's lifecycle.
//!
//! `just chaos MINUTES` injects random faults for that time; every test run injects each of them once.

mod lifecycle_phases;
mod links;
mod random_faults;

use crate::http_client::{HttpClient, post};
use serde_json::{Value, json};
use std::io::Read as _;
use std::net::SocketAddr;

/// Flags for one single-threaded executor process in f32.
const EXECUTOR_PROCESS_FLAGS: &[&str] =
    &["--executor", "process", "--threads", "1", "--dtype", "float32"];

/// Body of a request with random sampling and a fixed seed: a lost or repeated token changes all later
/// tokens, so that the output shows it.
fn body(prompt_words: usize, tokens: u32, streamed: bool) -> Value {
    json!({"prompt": "fox ".repeat(prompt_words), "max_tokens": tokens, "seed": 7, "temperature": 1,
        "ignore_eos": true, "stream": streamed})
}

/// The output text of a request.
fn text_of(at: SocketAddr, body: &Value) -> String {
    let reply = post(at, "/v1/completions", body).json();
    reply["choices"][0]["text"].as_str().unwrap_or_else(|| panic!("{reply}")).to_owned()
}

/// Returns everything received on a connection until it ends or is reset, as text.
fn read_to_end(client: &mut HttpClient) -> String {
    let mut all = Vec::new();
    let _ = client.reader.read_to_end(&mut all); // The connection may be reset.
    String::from_utf8_lossy(&all).into_owned()
}
