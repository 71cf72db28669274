//! Throughput of HTTP and SSE with a simulated device whose steps take no time, compared with sockets without
//! HTTP.
//!
//! Everything runs in this process: scheduler, simulated device (hash model), detokeniser, HTTP server
//! (hyper) and client. The client reads chunks and counts events; each token is one event.

mod bystander_cost;
mod cache_salt_timing;
mod client;
mod client_disconnects;
mod grammar_cost;
mod grammar_dry_run;
mod long_prompts;
mod many_streams;
mod paced_server;
mod preemption_storm;
mod socket_ceiling;
mod stuck_subscribers;

use crate::hash_model::KvSlotAccess;
use crate::small_tokenizer::TokenizerAlphabet;
use crate::test_server::{ServerSetup, TestServer};
use client::StreamCounts;
use std::time::Duration;

const STREAMS: usize = 256;
const TOKENS: usize = 3_000;

/// An API endpoint, and the name of the request field that contains the prompt.
struct BenchEndpoint {
    name: &'static str,
    path: &'static str,
    body: &'static str,
}

const KINDS: &[BenchEndpoint] = &[
    BenchEndpoint {
        name: "completions",
        path: "/v1/completions",
        body: r#""prompt":"once upon a time""#,
    },
    BenchEndpoint {
        name: "chat",
        path: "/v1/chat/completions",
        body: r#""messages":[{"role":"user","content":"once upon a time"}]"#,
    },
];

#[test]
#[ignore = "measures times: `just http-speed`"]
fn tokens_per_second() {
    println!("{STREAMS} streams x {TOKENS} tokens; each token is an event");
    println!("| case | tokens/s | events/s | bytes/event | events/read | p50 first token |");
    println!("|---|---:|---:|---:|---:|---:|");
    for round in 0..3 {
        for kind in KINDS {
            measure(kind, round);
        }
    }
}

fn measure(kind: &BenchEndpoint, round: u32) {
    let setup = ServerSetup {
        slot_access: KvSlotAccess::Untouched,
        alphabet: TokenizerAlphabet::Ascii,
        blocks: 65_536,
        workers: 1,
        ..ServerSetup::default()
    };
    let server = TestServer::start(&setup);
    let body = format!(
        r#"{{{},"max_tokens":{TOKENS},"ignore_eos":true,"stream":true,"stream_options":{{"include_usage":true}}}}"#,
        kind.body
    );
    let request = format!(
        "POST {} HTTP/1.1\r\nHost: x\r\nContent-Length: {}\r\n\r\n{body}",
        kind.path,
        body.len()
    );
    let counts = client::run(server.address, &request, STREAMS);
    report(&format!("{} ({round})", kind.name), &counts, TOKENS * STREAMS);
    server.wait_idle(Duration::from_secs(5));
    drop(server);
    let event_bytes = counts.bytes / counts.events;
    for per_write in [1, (counts.events / counts.reads).max(1)] {
        let counts = socket_ceiling::run(STREAMS, TOKENS, event_bytes, per_write);
        report(&format!("bare sockets, {per_write} per write"), &counts, TOKENS * STREAMS);
    }
}

fn report(what: &str, counts: &StreamCounts, tokens: usize) {
    let seconds = counts.elapsed.as_secs_f64();
    println!(
        "| {what} | {:.0} | {:.0} | {} | {:.1} | {:.1} ms |",
        tokens as f64 / seconds,
        counts.events as f64 / seconds,
        counts.bytes / counts.events,
        counts.events as f64 / counts.reads as f64,
        counts.first_p50.as_secs_f64() * 1e3,
    );
}
