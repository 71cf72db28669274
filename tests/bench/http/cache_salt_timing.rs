//! Checks that the time to first token (TTFT) does not reveal the cached prefixes of one tenant to another.
//! The TTFT of three kinds of requests is measured: a cached prompt under the `cache_salt` with which it was
//! cached, the same prompt under a salt that was never used, and a prompt that was never sent.
//!
//! For the cached prompt under another salt, the TTFT must be indistinguishable from that of a new prompt.
//! For the cached prompt under its own salt, it must be distinguishable; otherwise the measurement is too
//! inaccurate.

use super::long_prompts::LongPromptServer;
use crate::http_client::HttpClient;
use crate::rng::SimRng;
use serde_json::{Value, json};
use std::time::{Duration, Instant};

/// Letters that the demo's tokenizer never merges, so that a prompt of `n` bytes has `n` tokens.
const LETTERS: &[u8] = b"BCDEGJKLOQRSUVXYZ";
/// Number of words of a prompt; a word is a space and `WORD_LETTERS` letters. Words are random, because the
/// server's tokenizer caches the tokens of words that it has seen.
const WORDS: usize = 250;
const WORD_LETTERS: usize = 5;
const PROMPT_TOKENS: usize = WORDS * (1 + WORD_LETTERS);
/// Maximum deviation of `roc_area` from 0.5, in standard deviations. 0.5 is the expected value for
/// indistinguishable times; random variation exceeds this deviation in one of 1,500 runs.
const DEVIATIONS: f64 = 3.4;
/// Minimum `roc_area` at which the times of prefix hits and of uncached prompts count as distinguishable.
const DISTINGUISHABLE_AREA: f64 = 0.9;

fn prompt(rng: &mut SimRng) -> String {
    let mut text = String::with_capacity(PROMPT_TOKENS);
    for _ in 0..WORDS {
        text.push(' ');
        text.extend((0..WORD_LETTERS).map(|_| char::from(rng.pick(LETTERS))));
    }
    text
}

/// A random `cache_salt`. All salts have 16 characters, so that their length does not affect the times.
fn salt(rng: &mut SimRng) -> String {
    format!("{:016x}", rng.next_u64())
}

/// Sends a streamed request; returns its time to first token and the number of cached prompt tokens.
fn time_first_token(client: &mut HttpClient, prompt: &str, salt: &str) -> (Duration, u64) {
    let body = json!({"prompt": prompt, "cache_salt": salt, "max_tokens": 1, "ignore_eos": true,
        "stream": true, "stream_options": {"include_usage": true}});
    let body = body.to_string();
    let since = Instant::now();
    client.send("POST", "/v1/completions", "", body.as_bytes());
    let mut reply = client.read_head().unwrap();
    assert_eq!(reply.status, 200);
    let mut chunk = client.read_chunk().unwrap();
    let took = since.elapsed();
    while !chunk.is_empty() {
        reply.body.extend(chunk);
        chunk = client.read_chunk().unwrap();
    }
    let events = reply.events();
    let usage: &Value = &events.last().unwrap()["usage"];
    assert_eq!(usage["prompt_tokens"], PROMPT_TOKENS, "{usage}");
    (took, usage["prompt_tokens_details"]["cached_tokens"].as_u64().unwrap())
}

/// Fraction of all pairs of a time in `first` and a time in `second` in which the time in `first` is shorter;
/// pairs of equal times count half. This is the area under the ROC curve of a classifier that uses the time
/// alone.
fn roc_area(first: &[Duration], second: &[Duration]) -> f64 {
    let pairs = first.iter().flat_map(|a| second.iter().map(move |b| a.cmp(b)));
    let wins: f64 = pairs.map(|order| f64::from(1 - order as i8) / 2.0).sum();
    wins / (first.len() * second.len()) as f64
}

fn median(times: &[Duration]) -> Duration {
    let mut times = times.to_vec();
    times.sort_unstable();
    times[times.len() / 2]
}

#[test]
fn roc_area_is_a_share_of_pairs() {
    let ms = |times: [u64; 3]| times.map(Duration::from_millis);
    assert_eq!(roc_area(&ms([1, 2, 3]), &ms([4, 5, 6])), 1.0);
    assert_eq!(roc_area(&ms([4, 5, 6]), &ms([1, 2, 3])), 0.0);
    assert_eq!(roc_area(&ms([1, 5, 5]), &ms([1, 5, 5])), 0.5);
}

/// Returns the times to first token (TTFT) of three kinds of requests: cached prompts under their own salt,
/// the same prompts under another salt, and uncached prompts. In each of the `rounds` rounds, one request of
/// each kind is sent, in random order.
fn measure(rounds: usize) -> [Vec<Duration>; 3] {
    let flags = ["--threads", "1", "--kv-cache-memory-bytes", "256MiB"];
    let process = LongPromptServer::start(&flags);
    let (mut rng, mut client) = (SimRng::new(13), HttpClient::connect(process.address));
    let mut times: [Vec<Duration>; 3] = Default::default();
    for _ in 0..rounds {
        let (cached, fresh) = (prompt(&mut rng), prompt(&mut rng));
        let [owner, other, nobody] = [(); 3].map(|()| salt(&mut rng));
        time_first_token(&mut client, &cached, &owner);
        let asked = [(&cached, owner), (&cached, other), (&fresh, nobody)];
        let mut left = vec![0, 1, 2];
        while !left.is_empty() {
            let kind = left.swap_remove(rng.below(left.len() as u64) as usize);
            let (took, hit) = time_first_token(&mut client, asked[kind].0, &asked[kind].1);
            assert_eq!(hit > 0, kind == 0, "{hit} tokens cached");
            times[kind].push(took);
        }
    }
    times
}

/// Measures `HADRON_SALTS_COUNT` requests of each kind; by default 300.
#[test]
#[ignore = "measures times: `just salts COUNT`"]
#[allow(clippy::disallowed_methods, reason = "the number comes from `just`")]
fn cache_hit_timing_does_not_leak_across_salts() {
    let message = std::env::var("HADRON_SALTS_COUNT").ok();
    let rounds = message.map_or(300, |text| text.parse::<usize>().unwrap());
    let [hits, others, cold] = measure(rounds);
    let [across, within] = [&others, &hits].map(|times| roc_area(times, &cold));
    let allowed = DEVIATIONS / (6.0 * rounds as f64).sqrt();
    let [of_hits, of_others, of_cold] = [&hits, &others, &cold].map(|times| median(times));
    println!(
        "{rounds} rounds, prompts of {PROMPT_TOKENS} tokens; medians: {of_hits:.2?} under the salt of the cached prompt, \
         {of_others:.2?} under a new salt, {of_cold:.2?} for a new prompt; area under the ROC curve, against new prompts: \
         {across:.3} across salts (0.5 ± {allowed:.3}: indistinguishable), {within:.3} within one salt"
    );
    assert!(
        (across - 0.5).abs() < allowed,
        "{across}: times reveal the cached prompts of another salt"
    );
    assert!(within > DISTINGUISHABLE_AREA, "{within}: too much noise to distinguish a hit");
}
