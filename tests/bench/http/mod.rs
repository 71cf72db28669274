//! HTTP and server-sent events over a device that takes no time, next to what bare sockets do.
//!
//! Everything is in this process, client included: scheduler, hash model, detokeniser, hyper. The
//! client reads chunks and counts events; each token is an event of its own.

mod ceiling;
mod client;
mod constrained;
mod disturbed;
mod long_prompts;
mod many;
mod paced;
mod salts;
mod storm;
mod stuck;
mod trials;
mod vanish;

use crate::hash_model::Reading;
use crate::http_host::{Server, Setup};
use crate::small_tokenizer::Alphabet;
use client::Counts;
use std::time::Duration;

const STREAMS: usize = 256;
const TOKENS: usize = 3_000;

/// One kind of reply.
struct Kind {
    name: &'static str,
    path: &'static str,
    body: &'static str,
}

const KINDS: &[Kind] = &[
    Kind { name: "completions", path: "/v1/completions", body: r#""prompt":"once upon a time""# },
    Kind {
        name: "chat",
        path: "/v1/chat/completions",
        body: r#""messages":[{"role":"user","content":"once upon a time"}]"#,
    },
];

#[test]
#[ignore = "a measurement: `just http-speed`"]
fn tokens_per_second() {
    println!("{STREAMS} streams x {TOKENS} tokens; each token is an event");
    println!("| what | tokens/s | events/s | bytes/event | events/read | p50 first token |");
    println!("|---|---:|---:|---:|---:|---:|");
    for round in 0..3 {
        for kind in KINDS {
            measure(kind, round);
        }
    }
}

fn measure(kind: &Kind, round: u32) {
    let setup = Setup {
        reading: Reading::Nothing,
        alphabet: Alphabet::Ascii,
        blocks: 65_536,
        workers: 1,
        ..Setup::default()
    };
    let server = Server::start(&setup);
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
        let counts = ceiling::run(STREAMS, TOKENS, event_bytes, per_write);
        report(&format!("bare sockets, {per_write} a write"), &counts, TOKENS * STREAMS);
    }
}

fn report(what: &str, counts: &Counts, tokens: usize) {
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
