//! Clients that do not attack: their requests must get the outputs that were recorded before the attacks.

use super::target::AttackTarget;
use crate::http_client::{HttpClient, HttpReply};
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
struct RecordedExchange {
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
            client.reader.get_ref().set_read_timeout(Some(FIRST_ANSWER_TIMEOUT)).unwrap();
            let body = request.body.to_string();
            client.send(
                "POST",
                request.path,
                "Content-Type: application/json\r\n",
                body.as_bytes(),
            );
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
            let RecordedExchange { path, body, text } = &self.0[next % self.0.len()];
            let sent = body.to_string();
            let Some(reply) = target.post("bystander", path, sent.as_bytes()) else { continue };
            if reply.status == 429 {
                target.rejected.fetch_add(1, Ordering::Relaxed);
                std::thread::sleep(PAUSE);
                continue;
            }
            next += 1;
            target.replies.fetch_add(1, Ordering::Relaxed);
            if reply.status != 200 {
                target.add_violation(format!("bystander: {} instead of a reply", reply.status));
            } else if text_of(&reply, body["stream"] == true) != *text {
                target.add_violation(format!("bystander: another reply to {sent}"));
            }
        }
    }
}
