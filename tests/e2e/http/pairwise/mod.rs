//! Pairwise tests of request fields: each value of a field is combined with each value of every other field.
//! A greedy choice keeps the number of requests small, and several are sent concurrently.
//!
//! A request with valid values is served, or rejected with the name of a field that contradicts another
//! field. An invalid value is rejected with its field's name, whatever the other fields are. No request gets
//! a 5xx status.

mod fields;
mod matrix;

use crate::http_client::{HttpClient, HttpReply, get, post};
use crate::test_server::{ServerSetup, TestServer};
use fields::{PairwiseFieldValues, chat, text};
use matrix::{FieldChoices, FieldValueCount, PairCoverage};
use serde_json::{Map, Value, json};
use std::net::SocketAddr;
use std::path::Path;
use std::sync::Mutex;
use std::time::Duration;

/// Number of threads that send requests.
const CONCURRENCY: usize = 3;
/// Maximum number of attempts per combination, each without the field that the previous rejection named.
const TRIES: usize = 6;

/// Counts of requests with valid values.
#[derive(Debug, Default)]
struct PairwiseCounts {
    served: usize,
    rejected: usize,
    /// Accepted combinations, into which later requests put invalid values.
    valid_rows: Vec<FieldChoices>,
}

fn body(fields: &[PairwiseFieldValues], row: &FieldChoices) -> Value {
    let values = fields.iter().zip(row);
    let present = values.filter_map(|(field, &choice)| {
        Some((field.name.to_owned(), field.valid.get(choice?)?.clone()))
    });
    Value::Object(present.collect::<Map<_, _>>())
}

/// Fields that together may leave no allowed token; the rejection (`no_token_allowed`) then names none of
/// them.
const RULES: [&str; 4] = ["allowed_token_ids", "regex", "response_format", "min_tokens"];

/// The field that a rejection names, without the path of a value inside the field.
fn rejected_field(reply: &HttpReply, sent: &Value) -> String {
    let body = reply.json();
    if body["error"]["reason"] == "no_token_allowed" {
        let rule = RULES.iter().find(|rule| !sent[**rule].is_null());
        return (*rule.unwrap_or_else(|| panic!("no rules: {sent}: {body}"))).to_owned();
    }
    let param = body["error"]["param"].as_str().unwrap_or_else(|| panic!("no name: {body}"));
    param.split(['[', '.']).next().unwrap().to_owned()
}

fn check(reply: &HttpReply, sent: &Value) {
    let text = String::from_utf8_lossy(&reply.body);
    assert!(reply.status < 500, "{sent}: {text}");
    assert!(!text.contains("panicked") && !text.contains("src/"), "{sent}: {text}");
    if reply.status == 200 && sent["stream"] == true {
        assert!(!reply.events().is_empty(), "{sent}: {text}");
    }
}

/// Sends combinations until every pair of valid values was part of an accepted request or was tried once.
fn allowed(
    at: SocketAddr,
    path: &str,
    fields: &[PairwiseFieldValues],
    matrix: &Mutex<PairCoverage>,
) -> PairwiseCounts {
    let mut client = HttpClient::connect(at);
    let mut tally = PairwiseCounts::default();
    loop {
        let Some(mut row) = matrix.lock().unwrap().next() else { return tally };
        for _ in 0..TRIES {
            let sent = body(fields, &row);
            let reply = client.post(path, &sent);
            check(&reply, &sent);
            if reply.status == 200 {
                tally.served += 1;
                matrix.lock().unwrap().cover(&row);
                tally.valid_rows.push(row);
                break;
            }
            tally.rejected += 1;
            let name = rejected_field(&reply, &sent);
            let at = fields.iter().position(|field| field.name == name);
            let at = at.filter(|&at| row[at].is_some() && !fields[at].required);
            let Some(at) = at else { panic!("{sent} blames {name}: {}", reply.json()) };
            row[at] = None;
        }
    }
}

/// Puts one or two invalid values into accepted combinations; the rejection must name one of their fields.
/// Each invalid value is tried alone and with every fifth of the invalid values after it in the list. Returns
/// the number of requests.
fn forbidden(
    at: SocketAddr,
    path: &str,
    fields: &[PairwiseFieldValues],
    good: &[FieldChoices],
) -> usize {
    let bad: Vec<(&str, &Value)> =
        fields.iter().flat_map(|f| f.invalid.iter().map(|value| (f.name, value))).collect();
    let mut client = HttpClient::connect(at);
    let (mut sent, mut wrong) = (0, Vec::new());
    for (first, (name, value)) in bad.iter().enumerate() {
        for (other, of_other) in bad[first..].iter().step_by(5) {
            let mut body = body(fields, &good[sent % good.len()]);
            body[*name] = (*value).clone();
            body[*other] = (*of_other).clone();
            // With `echo`, `max_tokens` 0 is valid: such a request returns the prompt and its
            // log-probabilities.
            if body["max_tokens"] == 0 && body["echo"] == true {
                body["echo"] = json!(false);
            }
            let reply = client.post(path, &body);
            check(&reply, &body);
            let rejected = (400..500).contains(&reply.status);
            let blames = if rejected { rejected_field(&reply, &body) } else { String::new() };
            // If `max_tokens` is invalid, the rejection may instead name `min_tokens`, which then exceeds
            // `max_tokens`, or the prompt, which together with `max_tokens` exceeds the context length.
            let affected = ["min_tokens", "prompt", "messages"].contains(&blames.as_str());
            let meets = affected && [*name, *other].contains(&"max_tokens");
            if blames != *name && blames != *other && !meets {
                wrong.push(format!("{name} {value}, {other} {of_other}: {blames:?} for {body}"));
            }
            sent += 1;
        }
    }
    let count = wrong.len();
    wrong.truncate(20);
    assert_eq!(count, 0, "of {sent}: {wrong:#?}");
    sent
}

#[test]
fn every_parameter_pair_is_served_or_rejected_by_name() {
    let model = Path::new(env!("CARGO_MANIFEST_DIR")).join("tests/data/demo");
    let setup = ServerSetup {
        model: Some(model),
        max_model_len: 512,
        max_num_seqs: 64,
        ..ServerSetup::default()
    };
    let server = TestServer::start(&setup);
    let request_body = json!({"prompt": "The quick brown fox", "max_tokens": 20, "ignore_eos": true, "temperature": 0});
    let at = server.address;
    let response = || post(at, "/v1/completions", &request_body).json()["choices"].clone();
    let before = response();
    for (path, fields) in [("/v1/completions", text()), ("/v1/chat/completions", chat())] {
        let sizes = fields
            .iter()
            .map(|field| FieldValueCount { count: field.valid.len(), is_required: field.required })
            .collect();
        let matrix = Mutex::new(PairCoverage::new(sizes));
        let workers = std::thread::scope(|scope| {
            let worker = || scope.spawn(|| allowed(at, path, &fields, &matrix));
            let workers: Vec<_> = (0..CONCURRENCY).map(|_| worker()).collect();
            workers.into_iter().map(|worker| worker.join().unwrap()).collect::<Vec<_>>()
        });
        let good: Vec<FieldChoices> =
            workers.iter().flat_map(|tally| tally.valid_rows.clone()).collect();
        let (served, rejected) =
            workers.iter().fold((0, 0), |(a, r), tally| (a + tally.served, r + tally.rejected));
        let (covered, pairs) = matrix.lock().unwrap().covered();
        println!(
            "{path}: {covered} of {pairs} pairs covered by {served} served requests, {rejected} rejections"
        );
        assert!(covered * 100 >= pairs * 95, "too many pairs contradict each other");
        let hostile = forbidden(at, path, &fields, &good);
        println!("{path}: {hostile} requests with values that are not allowed");
        assert_eq!(response(), before, "{path}");
    }
    assert_eq!(get(at, "/readyz").status, 200);
    server.wait_idle(Duration::from_mins(1));
}
