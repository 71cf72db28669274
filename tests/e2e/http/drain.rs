//! SIGTERM with a thousand running streams: each stream gets a final event, and the process exits within the
//! time limit.

use super::server_process::ServerProcess;
use crate::http_client::{HttpClient, HttpReply};
use rustix::process::{Resource, Rlimit, getrlimit, setrlimit};
use serde_json::json;
use std::io::Read;
use std::time::{Duration, Instant};

const STREAMS: usize = 1_000;
/// Limit of open file descriptors of this process, which the server inherits.
const DESCRIPTORS: u64 = 4_096;

/// How a stream ended when the server was drained.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
enum StreamOutcome {
    /// The client received all requested tokens.
    Finished,
    /// The drain ended the stream with an error event.
    Drained,
}

fn allow_descriptors() {
    let limit = getrlimit(Resource::Nofile);
    if limit.current.is_some_and(|now| now < DESCRIPTORS) {
        let wanted = Rlimit { current: Some(DESCRIPTORS), ..limit };
        setrlimit(Resource::Nofile, wanted).expect("a thousand connections need descriptors");
    }
}

#[test]
fn drain_ends_a_thousand_streams_properly() {
    allow_descriptors();
    let limit = Duration::from_secs(2);
    let flags =
        ["--threads", "1", "--shutdown-timeout", "2s", "--sse-keep-alive-interval", "200ms"];
    let mut process = ServerProcess::start(&flags);
    let body = json!({"prompt": "Once", "max_tokens": 1000, "ignore_eos": true, "stream": true})
        .to_string();
    let mut clients: Vec<HttpClient> = (0..STREAMS)
        .map(|_| {
            let mut client = HttpClient::connect(process.address);
            client.send("POST", "/v1/completions", "", body.as_bytes());
            client
        })
        .collect();
    // The server sends headers with the first token, or with the first keep-alive comment of a waiting
    // request.
    let heads: Vec<HttpReply> =
        clients.iter_mut().map(|client| client.read_head().unwrap()).collect();
    assert!(heads.iter().all(|head| head.status == 200));
    process.signal("TERM");
    let start = Instant::now();
    let ends: Vec<StreamOutcome> = clients.iter_mut().map(end_of).collect();
    let took = start.elapsed();
    assert_eq!(process.exits_within(limit + Duration::from_secs(20)).code(), Some(0));
    let count = |end| ends.iter().filter(|e| **e == end).count();
    println!(
        "{} streams finished, {} drained after {took:?}",
        count(StreamOutcome::Finished),
        count(StreamOutcome::Drained)
    );
    assert!(count(StreamOutcome::Drained) > 0, "the limit was reached");
    // `limit` is the value of `--shutdown-timeout`; six seconds are slack for a busy machine.
    assert!(start.elapsed() < limit + Duration::from_secs(6), "{:?}", start.elapsed());
}

/// Reads a stream to its end and checks that it contains exactly one final event.
fn end_of(client: &mut HttpClient) -> StreamOutcome {
    let mut text = String::new();
    client.reader.read_to_string(&mut text).unwrap();
    let done = text.matches("data: [DONE]").count();
    let finished = text.matches("\"finish_reason\":\"length\"").count();
    let drained = text.matches("\"reason\":\"draining\"").count();
    let tail = &text[text.len().saturating_sub(300)..];
    assert_eq!((done, finished + drained), (1, 1), "...{tail}");
    assert!(text.ends_with("0\r\n\r\n"), "the body is whole: ...{tail}");
    if finished == 1 { StreamOutcome::Finished } else { StreamOutcome::Drained }
}
