//! Clients that stream completions and compare the tokens with the expected outputs.

use super::rng::KillTestRng;
use super::topologies::RecordedRequest;
use crate::http_client::HttpClient;
use serde_json::Value;
use std::net::SocketAddr;
use std::sync::atomic::{AtomicBool, Ordering};
use std::time::{Duration, Instant};

/// Maximum time without any data on a stream, keep-alive comments included; after it the stream counts as
/// hung.
const STREAM_TIMEOUT: Duration = Duration::from_secs(30);

/// Numbers of the streamed requests of a kill test by outcome, and descriptions of the failed requests.
#[derive(Debug, Clone, Default)]
pub(super) struct StreamOutcomeCounts {
    pub(super) correct: usize,
    pub(super) tokens: usize,
    /// Number of requests that were rejected, or whose stream was truncated or ended with an error or before
    /// their last token.
    pub(super) failed: usize,
    /// Number of requests that got different tokens, or more tokens, than an undisturbed server returns.
    pub(super) wrong_tokens: usize,
    pub(super) hung: usize,
    /// Descriptions of all requests that failed, hung or got wrong tokens.
    pub(super) descriptions: Vec<String>,
}

impl StreamOutcomeCounts {
    pub(super) fn add(&mut self, other: Self) {
        self.correct += other.correct;
        self.tokens += other.tokens;
        self.failed += other.failed;
        self.wrong_tokens += other.wrong_tokens;
        self.hung += other.hung;
        self.descriptions.extend(other.descriptions);
    }

    fn count(&mut self, request: &RecordedRequest, received: &ClientStreamOutcome) {
        let expected = &request.ids;
        let description = match received {
            ClientStreamOutcome::Complete { ids, end } if ids == expected && end == "length" => {
                self.correct += 1;
                self.tokens += ids.len();
                return;
            }
            ClientStreamOutcome::Complete { ids, end } => {
                let same = ids.iter().zip(expected).take_while(|(a, b)| a == b).count();
                let cut = same == ids.len() && ids.len() < expected.len();
                *(if cut { &mut self.failed } else { &mut self.wrong_tokens }) += 1;
                let (received, of) = (ids.len(), expected.len());
                format!("{received} of {of} tokens, the first {same} correct, then {end}")
            }
            ClientStreamOutcome::Truncated(how) => {
                self.failed += 1;
                how.clone()
            }
            ClientStreamOutcome::Hung => {
                self.hung += 1;
                format!("no data for {STREAM_TIMEOUT:?}")
            }
        };
        self.descriptions.push(description);
    }
}

/// How a client's stream of a completion ended: complete, truncated or hung.
enum ClientStreamOutcome {
    /// All events up to `[DONE]` arrived.
    Complete {
        ids: Vec<u32>,
        end: String,
    },
    Truncated(String),
    Hung,
}

/// Runs one client: streams randomly chosen requests one after another until stopped, and compares the
/// tokens.
pub(super) fn send_requests(
    at: SocketAddr,
    requests: &[RecordedRequest],
    mut rng: KillTestRng,
    stop: &AtomicBool,
) -> StreamOutcomeCounts {
    let mut results = StreamOutcomeCounts::default();
    while !stop.load(Ordering::Relaxed) {
        let request = &requests[rng.below(requests.len() as u64) as usize];
        results.count(request, &read_stream(at, request));
    }
    results
}

/// Sends a request for a stream and returns its connection.
pub(super) fn open(at: SocketAddr, request: &RecordedRequest) -> HttpClient {
    let mut client = HttpClient::connect(at);
    client.send("POST", "/v1/completions", "", request.body.to_string().as_bytes());
    client
}

fn read_stream(at: SocketAddr, request: &RecordedRequest) -> ClientStreamOutcome {
    let mut client = open(at, request);
    let (mut since, mut events) = (Instant::now(), Vec::new());
    let ended = |since: Instant| {
        if since.elapsed() + Duration::from_secs(1) > STREAM_TIMEOUT {
            return ClientStreamOutcome::Hung;
        }
        ClientStreamOutcome::Truncated("the connection ended".to_owned())
    };
    let Some(head) = client.read_head() else { return ended(since) };
    if head.status != 200 {
        return ClientStreamOutcome::Truncated(format!("status {}", head.status));
    }
    loop {
        since = Instant::now();
        match client.read_chunk() {
            None => return ended(since),
            Some(chunk) if chunk.is_empty() => return of_events(&events),
            Some(chunk) => events.extend(chunk),
        }
    }
}

/// Token ids of a stream's events, and how the stream ended.
fn of_events(events: &[u8]) -> ClientStreamOutcome {
    let text = String::from_utf8_lossy(events);
    let (mut ids, mut end) = (Vec::new(), String::new());
    for event in text.split("\n\n").filter_map(|event| event.strip_prefix("data: {")) {
        let event: Value = serde_json::from_str(&format!("{{{event}")).unwrap();
        if let Some(error) = event.get("error") {
            return ClientStreamOutcome::Truncated(error.to_string());
        }
        let choice = &event["choices"][0];
        let more = choice["token_ids"].as_array().into_iter().flatten();
        ids.extend(more.map(|id| id.as_u64().unwrap() as u32));
        end += choice["finish_reason"].as_str().unwrap_or_default();
    }
    if text.ends_with("data: [DONE]\n\n") {
        ClientStreamOutcome::Complete { ids, end }
    } else {
        ClientStreamOutcome::Truncated("no [DONE]".to_owned())
    }
}
