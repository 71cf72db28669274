//! Streaming clients that know what they have to hear.

use super::chance::Chance;
use super::worlds::Question;
use crate::http_client::Client;
use serde_json::Value;
use std::net::SocketAddr;
use std::sync::atomic::{AtomicBool, Ordering};
use std::time::{Duration, Instant};

/// A stream that says nothing for so long, not even a comment, hangs. The client waits no longer.
const SILENCE: Duration = Duration::from_secs(30);

/// What became of the requests of a drill.
#[derive(Debug, Clone, Default)]
pub(super) struct Answers {
    pub(super) right: usize,
    pub(super) tokens: usize,
    /// Refused, cut off, ended with an error or too early.
    pub(super) lost: usize,
    /// With other tokens than an undisturbed server's, or more of them.
    pub(super) changed: usize,
    pub(super) hung: usize,
    /// What was wrong with each.
    pub(super) told: Vec<String>,
}

impl Answers {
    pub(super) fn add(&mut self, other: Self) {
        self.right += other.right;
        self.tokens += other.tokens;
        self.lost += other.lost;
        self.changed += other.changed;
        self.hung += other.hung;
        self.told.extend(other.told);
    }

    fn count(&mut self, question: &Question, heard: &Heard) {
        let expected = &question.ids;
        let told = match heard {
            Heard::Ended { ids, end } if ids == expected && end == "length" => {
                self.right += 1;
                self.tokens += ids.len();
                return;
            }
            Heard::Ended { ids, end } => {
                let same = ids.iter().zip(expected).take_while(|(a, b)| a == b).count();
                let cut = same == ids.len() && ids.len() < expected.len();
                *(if cut { &mut self.lost } else { &mut self.changed }) += 1;
                let (heard, of) = (ids.len(), expected.len());
                format!("{heard} of {of} tokens, the first {same} as they should be, then {end}")
            }
            Heard::Cut(how) => {
                self.lost += 1;
                how.clone()
            }
            Heard::Nothing => {
                self.hung += 1;
                format!("silent for {SILENCE:?}")
            }
        };
        self.told.push(told);
    }
}

/// What a client heard.
enum Heard {
    /// All up to `[DONE]`.
    Ended {
        ids: Vec<u32>,
        end: String,
    },
    Cut(String),
    Nothing,
}

/// Asks one question after another until told to stop.
pub(super) fn ask_on(
    at: SocketAddr,
    questions: &[Question],
    mut chance: Chance,
    stop: &AtomicBool,
) -> Answers {
    let mut answers = Answers::default();
    while !stop.load(Ordering::Relaxed) {
        let question = &questions[chance.below(questions.len() as u64) as usize];
        answers.count(question, &hear(at, question));
    }
    answers
}

/// Opens a stream and leaves it to its fate.
pub(super) fn open(at: SocketAddr, question: &Question) -> Client {
    let mut client = Client::connect(at);
    client.send("POST", "/v1/completions", "", question.body.to_string().as_bytes());
    client
}

fn hear(at: SocketAddr, question: &Question) -> Heard {
    let mut client = open(at, question);
    let (mut since, mut events) = (Instant::now(), Vec::new());
    let ended = |since: Instant| {
        if since.elapsed() + Duration::from_secs(1) > SILENCE {
            return Heard::Nothing;
        }
        Heard::Cut("the connection ended".to_owned())
    };
    let Some(head) = client.read_head() else { return ended(since) };
    if head.status != 200 {
        return Heard::Cut(format!("status {}", head.status));
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

/// The ids of a stream and how it ended.
fn of_events(events: &[u8]) -> Heard {
    let text = String::from_utf8_lossy(events);
    let (mut ids, mut end) = (Vec::new(), String::new());
    for event in text.split("\n\n").filter_map(|event| event.strip_prefix("data: {")) {
        let event: Value = serde_json::from_str(&format!("{{{event}")).unwrap();
        if let Some(error) = event.get("error") {
            return Heard::Cut(error.to_string());
        }
        let choice = &event["choices"][0];
        let more = choice["token_ids"].as_array().into_iter().flatten();
        ids.extend(more.map(|id| id.as_u64().unwrap() as u32));
        end += choice["finish_reason"].as_str().unwrap_or_default();
    }
    if text.ends_with("data: [DONE]\n\n") {
        Heard::Ended { ids, end }
    } else {
        Heard::Cut("no [DONE]".to_owned())
    }
}
