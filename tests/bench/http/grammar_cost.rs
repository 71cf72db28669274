//! Effect of expensive grammars on other requests: step times of a server with 64 streams without a grammar.
//! Four cases are compared: only these streams; in addition, four clients that send requests with an accepted
//! grammar; four clients that send a new grammar per request, all of which are rejected; and four clients
//! that send these rejected requests with an invalid field, so that they are rejected before their grammar is
//! processed. The cases alternate several times, so that other load of the machine affects all of them.
//!
//! A step time is the sum of the times in the server's timing record of the step: scheduling, passing the
//! batch to the executor, and waiting for its output.

use super::bystander_cost::{median, read, spread, steps};
use crate::deadlines::BoundedJoin as _;
use crate::small_tokenizer::TokenizerAlphabet;
use crate::test_server::{ServerSetup, TestServer};
use serde_json::{Value, json};
use server::ConnectionTimeouts;
use std::net::SocketAddr;
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, AtomicUsize, Ordering};
use std::time::{Duration, Instant};
use tokio::io::{AsyncReadExt, AsyncWriteExt};
use tokio::net::TcpStream;

const STREAMS: usize = 64;
const CONSTRAINED: usize = 4;
const STEP: Duration = Duration::from_millis(5);
const ROUNDS: usize = 5;

/// Requests with a grammar that four clients send while the streams without a grammar run.
#[derive(Clone)]
struct ConstrainedLoad {
    name: String,
    /// The serialised request body in two parts. A number between the parts makes the grammar of each request
    /// different; serialising the body only once saves processor time of the client.
    body: [String; 2],
    /// Whether each request has a different grammar, which contains the number of the request.
    numbered: bool,
    /// Expected HTTP status of every reply.
    status: &'static str,
    /// Interval between the requests of a client; `None` = a client sends its next request when it has
    /// received a reply.
    every: Option<Duration>,
}

impl ConstrainedLoad {
    /// Requests whose grammar is accepted.
    fn accepted(name: &str, grammar: &Value) -> Self {
        let body = [body(grammar), String::new()];
        Self { name: name.to_owned(), body, numbered: false, status: "200", every: None }
    }

    /// Requests whose grammars are rejected. In each request, the text `NUMBER` in `grammar` is replaced by
    /// another number.
    fn rejected(name: &str, grammar: &Value) -> Self {
        let body = body(grammar);
        let (before, behind) = body.split_once(NUMBER).unwrap();
        let body = [before.to_owned(), behind.to_owned()];
        Self { name: name.to_owned(), body, numbered: true, status: "400", every: None }
    }

    /// Returns the same load, but with `answers_per_s` requests per second over all clients.
    fn with_rate(&self, answers_per_s: f64) -> Self {
        let every = Duration::from_secs_f64(CONSTRAINED as f64 / answers_per_s);
        let name = format!("{}, {answers_per_s} a second", self.name);
        Self { name, every: Some(every), ..self.clone() }
    }

    /// Returns the same load, but each request also has an unknown field, so that the server rejects the
    /// request when it parses the body. The difference between the step times of both loads is the cost of
    /// processing the grammars.
    fn rejected_early(&self, answers_per_s: f64) -> Self {
        let [before, behind] = &self.body;
        let field = "\"structured_outputs\":{";
        let before = before.replace(field, &format!("{field}\"unknown\":true,"));
        let name = format!("{}, unread", self.name);
        Self { name, body: [before, behind.clone()], ..self.with_rate(answers_per_s) }
    }

    fn body(&self, n: usize) -> String {
        let [before, behind] = &self.body;
        if self.numbered { format!("{before}{n}{behind}") } else { before.clone() }
    }
}

const NUMBER: &str = "NUMBER";

fn body(grammar: &Value) -> String {
    json!({"prompt": "once", "max_tokens": 2_000, "structured_outputs": grammar}).to_string()
}

fn loads() -> Vec<ConstrainedLoad> {
    let long = ["ab", "cd", "ef"].map(|letters| letters.repeat(10_000));
    let words: Vec<String> = (0..4_000).map(|i| format!("w{}", i * 7_919)).collect();
    let patterns: Vec<Value> = (0..1_000)
        .map(|i| {
            let number = if i == 0 { NUMBER } else { "" };
            json!({"pattern": format!("^x{number}y{i}(a|b)*c{{1,{i}}}$")})
        })
        .collect();
    let powers = "(((((a{1,100}){1,100}){1,100}){1,100}){1,100}){1,100}";
    let powers = ConstrainedLoad::rejected(
        "refused: powers of a repeat",
        &json!({"regex": format!("{NUMBER}{powers}")}),
    );
    let patterns = ConstrainedLoad::rejected(
        "refused: a thousand patterns at once",
        &json!({"json": {"anyOf": patterns}}),
    );
    vec![
        ConstrainedLoad::accepted("three texts of 20 KB", &json!({ "choice": long })),
        ConstrainedLoad::accepted("4,000 words", &json!({ "choice": words })),
        ConstrainedLoad::accepted(
            "repeats in repeats",
            &json!({"regex": "(([a-z]{1,20} ){1,30}!){1,40}"}),
        ),
        powers.with_rate(1.0),
        powers.with_rate(10.0),
        powers,
        patterns.with_rate(1.0),
        patterns.with_rate(10.0),
        patterns,
    ]
}

#[test]
#[ignore = "measures times: `just costly-grammars`"]
fn costly_grammars_do_not_slow_other_streams() {
    println!("{STREAMS} streams, steps of {} ms on the device, {ROUNDS} rounds", STEP.as_millis());
    println!(
        "| round | load | steps | p50 | p99 | p99 against no load | masks overdue | answers/s |"
    );
    println!("|--:|---|--:|--:|--:|--:|--:|--:|");
    let besides = loads();
    let mut changes = vec![Vec::new(); besides.len()];
    for round in 0..ROUNDS {
        let quiet = measure(round, None, None).p99;
        for (concurrent_load, changes) in besides.iter().zip(&mut changes) {
            let with = measure(round, Some(concurrent_load), Some(quiet));
            let without = if concurrent_load.status == "400" {
                measure(
                    round,
                    Some(&concurrent_load.rejected_early(with.replies_per_s)),
                    Some(quiet),
                )
                .p99
            } else {
                quiet
            };
            changes.push([with.p99 / quiet, with.p99 / without]);
        }
    }
    for (ConstrainedLoad { name, status, .. }, changes) in besides.iter().zip(changes) {
        let [quiet, without] = [0, 1].map(|which| {
            let ratios = changes.iter().map(|ratios| ratios[which]).collect();
            (median(ratios) - 1.0) * 100.0
        });
        println!("{name}: median change of a round {quiet:+.1} % against no load");
        if *status == "400" {
            println!("  and {without:+.1} % against the same requests, rejected early");
        }
    }
}

/// Step times of the server with the streams without a grammar, and replies per second to the clients that
/// send requests with a grammar.
struct GrammarCostResult {
    /// 99th percentile of the step times in milliseconds.
    p99: f64,
    replies_per_s: f64,
}

fn measure(
    round: usize,
    concurrent_load: Option<&ConstrainedLoad>,
    quiet: Option<f64>,
) -> GrammarCostResult {
    let wait = Duration::from_mins(5);
    let setup = ServerSetup {
        alphabet: TokenizerAlphabet::Ascii,
        blocks: 65_536,
        step_time: STEP,
        deadlines: ConnectionTimeouts { header: wait, idle: wait, write: wait },
        ..ServerSetup::default()
    };
    let server = TestServer::start(&setup);
    let (address, done) = (server.address, Arc::new(AtomicBool::new(false)));
    let (answered, since) = (Arc::new(AtomicUsize::new(0)), Instant::now());
    let clients = {
        let (done, concurrent_load) = (Arc::clone(&done), concurrent_load.cloned());
        let answered = Arc::clone(&answered);
        std::thread::spawn(move || {
            let mut builder = tokio::runtime::Builder::new_current_thread();
            let runtime = builder.enable_all().build().unwrap();
            runtime.block_on(async {
                for _ in 0..STREAMS {
                    tokio::spawn(read(address, false));
                }
                for (client, concurrent_load) in
                    std::iter::repeat_n(concurrent_load, CONSTRAINED).flatten().enumerate()
                {
                    tokio::spawn(follow(
                        address,
                        concurrent_load,
                        client,
                        round,
                        Arc::clone(&answered),
                    ));
                }
                while !done.load(Ordering::Relaxed) {
                    tokio::time::sleep(Duration::from_millis(20)).await;
                }
            });
        })
    };
    while server.client().stats().running < STREAMS as u32 {
        std::thread::sleep(Duration::from_millis(10));
    }
    std::thread::sleep(Duration::from_secs(1)); // By now all streams decode.
    let (steps, p50, p99) = spread(steps(&server));
    let answers_per_s = answered.load(Ordering::Relaxed) as f64 / since.elapsed().as_secs_f64();
    let late = server.app.serving().unwrap().metrics.grammar.masks_overdue.load(Ordering::Relaxed);
    done.store(true, Ordering::Relaxed);
    clients.join_bounded();
    let change = (p99 / quiet.unwrap_or(p99) - 1.0) * 100.0;
    let concurrent_load =
        concurrent_load.map_or("none", |concurrent_load| concurrent_load.name.as_str());
    println!(
        "| {round} | {concurrent_load} | {steps} | {p50:.3} ms | {p99:.3} ms | {change:+.1} % | {late} | {answers_per_s:.1} |"
    );
    GrammarCostResult { p99, replies_per_s: answers_per_s }
}

/// Runs one client of a load: sends requests with a grammar one after another, and checks the HTTP status of
/// each reply.
async fn follow(
    address: SocketAddr,
    concurrent_load: ConstrainedLoad,
    client: usize,
    round: usize,
    answered: Arc<AtomicUsize>,
) {
    let start = tokio::time::Instant::now();
    let mut turn = concurrent_load.every.map(|every| {
        let first = start + every * client as u32 / CONSTRAINED as u32;
        tokio::time::interval_at(first, every)
    });
    for n in 0.. {
        if let Some(turn) = &mut turn {
            turn.tick().await;
        }
        let body = concurrent_load.body((round * CONSTRAINED + client) * 10_000 + n);
        let head = format!(
            "POST /v1/completions HTTP/1.1\r\nHost: x\r\nConnection: close\r\nContent-Length: {}\r\n\r\n",
            body.len()
        );
        let mut socket = TcpStream::connect(address).await.unwrap();
        socket.write_all(head.as_bytes()).await.unwrap();
        socket.write_all(body.as_bytes()).await.unwrap();
        let mut reply = Vec::new();
        let _ = socket.read_to_end(&mut reply).await; // A server that shuts down may cut the reply.
        let status = reply.get(9..12);
        // A rejected grammar may have status 429 instead of 400: its dry run (compilation and sample tokens,
        // to measure its cost) may lack processor time while the streams run.
        let is_known = |status: &[u8]| {
            status == concurrent_load.status.as_bytes()
                || concurrent_load.status == "400" && status == b"429"
        };
        let expected = status.is_none_or(is_known);
        assert!(expected, "{}", String::from_utf8_lossy(&reply));
        answered.fetch_add(1, Ordering::Relaxed);
    }
}
