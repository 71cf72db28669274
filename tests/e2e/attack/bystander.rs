//! Clients that do not attack: their requests must get the outputs that were recorded before the attacks.

use super::target::AttackTarget;
use crate::http_client::{HttpClient, HttpReply};
use crate::rng::SimRng;
use serde_json::{Value, json};
use std::net::SocketAddr;
use std::sync::atomic::{AtomicBool, Ordering};
use std::time::Duration;

/// Pause before a request that was rejected because of load is sent again.
const PAUSE: Duration = Duration::from_millis(50);

/// Timeout of a reply before the attacks start. It is long, because the machine may be busy.
const FIRST_ANSWER_TIMEOUT: Duration = Duration::from_mins(2);

/// Requests with the text of their replies before the attacks, which later replies must equal.
pub(super) struct RecordedExchanges(Vec<RecordedExchange>);

/// Path and body of a request, and the text of the reply.
pub(super) struct RecordedExchange {
    path: &'static str,
    body: Value,
    text: String,
}

fn requests() -> Vec<RecordedExchange> {
    let chat = json!([{"role": "user", "content": "What is 12 plus 30?"}]);
    let asked = [
        (
            "/v1/completions",
            json!({"prompt": "The quick brown fox", "max_tokens": 40, "seed": 7,
            "temperature": 1, "ignore_eos": true, "logprobs": 2}),
        ),
        (
            "/v1/completions",
            json!({"prompt": "fox ".repeat(60), "max_tokens": 30, "seed": 9, "n": 3,
            "temperature": 0.8, "ignore_eos": true}),
        ),
        ("/v1/chat/completions", json!({"messages": chat, "max_tokens": 24, "temperature": 0})),
        (
            "/v1/completions",
            json!({"prompt": "a", "max_tokens": 12, "seed": 3, "temperature": 1,
            "structured_outputs": {"regex": "[a-z]{3,8}[0-9]{2}"}}),
        ),
        (
            "/v1/completions",
            json!({"prompt": "streams", "max_tokens": 30, "seed": 5, "temperature": 1,
            "ignore_eos": true, "stream": true}),
        ),
    ];
    let known = |(path, body)| RecordedExchange { path, body, text: String::new() };
    asked.into_iter().map(known).collect()
}

/// Text of a reply without ids, times and cached-token counts, which may differ between replies with the same
/// output.
fn text_of(reply: &HttpReply, streamed: bool) -> String {
    if !streamed {
        return reply.json()["choices"].to_string();
    }
    let text = |event: Value| event["choices"][0]["text"].as_str().unwrap_or_default().to_owned();
    reply.events().into_iter().map(text).collect()
}

impl RecordedExchanges {
    /// Records the outputs of all requests on a server that is not under attack.
    pub(super) fn learn(at: SocketAddr) -> Self {
        let mut known = requests();
        for request in &mut known {
            let mut client = HttpClient::connect(at);
            client.set_read_timeout(FIRST_ANSWER_TIMEOUT);
            client.send_raw(&request.request()).unwrap();
            let reply = client.read().expect("a reply");
            assert_eq!(reply.status, 200, "{}", String::from_utf8_lossy(&reply.body));
            request.text = text_of(&reply, request.body["stream"] == true);
        }
        Self(known)
    }

    /// Repeats the requests, from number `first` on, and compares their outputs with the recorded ones until
    /// the attacks are over.
    pub(super) fn compare(&self, target: &AttackTarget, over: &AtomicBool, first: u64) {
        let mut next = first as usize;
        while !over.load(Ordering::Relaxed) {
            let exchange = &self.0[next % self.0.len()];
            let sent = exchange.body.to_string();
            let reply = target.post("bystander", exchange.path, sent.as_bytes());
            let Some(reply) = reply else { continue };
            if exchange.check(target, "bystander", &reply) {
                next += 1;
            } else {
                std::thread::sleep(PAUSE);
            }
        }
    }

    /// Returns a random request.
    pub(super) fn pick(&self, rng: &mut SimRng) -> &RecordedExchange {
        &self.0[rng.below(self.0.len() as u64) as usize]
    }
}

impl RecordedExchange {
    /// Returns the bytes of this request.
    pub(super) fn request(&self) -> Vec<u8> {
        let body = self.body.to_string();
        let head = format!(
            "POST {} HTTP/1.1\r\nHost: x\r\nContent-Type: application/json\r\nContent-Length: {}\r\n\r\n",
            self.path,
            body.len()
        );
        [head.as_bytes(), body.as_bytes()].concat()
    }

    /// Records a violation if the reply does not have the recorded output. Returns false if the request was
    /// rejected for load.
    pub(super) fn check(&self, target: &AttackTarget, kind: &str, reply: &HttpReply) -> bool {
        if reply.status == 429 {
            target.rejected.fetch_add(1, Ordering::Relaxed);
            return false;
        }
        target.replies.fetch_add(1, Ordering::Relaxed);
        if reply.status != 200 {
            target.add_violation(format!("{kind}: {} instead of a reply", reply.status));
        } else if text_of(reply, self.body["stream"] == true) != self.text {
            target.add_violation(format!("{kind}: another reply to {}", self.body));
        }
        true
    }
}
