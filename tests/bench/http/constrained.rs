//! What a costly grammar costs its neighbours: the steps of 64 plain streams alone, and beside four clients whose
//! requests, one after the other, follow it. All in turn, several times: what the machine does beside them falls on all.
//!
//! Time of a step is what the server itself keeps of it: scheduling, hand-over and the way to the answer.

use super::disturbed::{median, read, spread, steps};
use crate::http_host::{Server, Setup};
use crate::small_tokenizer::Alphabet;
use hadron::server::connection::Deadlines;
use serde_json::{Value, json};
use std::net::SocketAddr;
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, Ordering};
use std::time::Duration;
use tokio::io::{AsyncReadExt, AsyncWriteExt};
use tokio::net::TcpStream;

const STREAMS: usize = 64;
const CONSTRAINED: usize = 4;
const STEP: Duration = Duration::from_millis(5);
const ROUNDS: usize = 5;

fn grammars() -> [(&'static str, Value); 3] {
    let long = ["ab", "cd", "ef"].map(|letters| letters.repeat(10_000));
    let words: Vec<String> = (0..4_000).map(|i| format!("w{}", i * 7_919)).collect();
    [
        ("three texts of 20 KB", json!({ "choice": long })),
        ("4,000 words", json!({ "choice": words })),
        ("repeats in repeats", json!({"regex": "(([a-z]{1,20} ){1,30}!){1,40}"})),
    ]
}

#[test]
#[ignore = "a measurement; run it alone"]
fn costly_grammars() {
    println!("{STREAMS} streams, steps of {} ms on the device, {ROUNDS} rounds", STEP.as_millis());
    println!("| round | beside | steps | p50 | p99 | p99 against nobody | masks late |");
    println!("|--:|---|--:|--:|--:|--:|--:|");
    let grammars = grammars();
    let mut ratios = vec![Vec::new(); grammars.len()];
    for round in 0..ROUNDS {
        let quiet = measure(round, "nobody", None, None);
        for ((name, grammar), ratios) in grammars.iter().zip(&mut ratios) {
            ratios.push(measure(round, name, Some(grammar), Some(quiet)) / quiet);
        }
    }
    for ((name, _), ratios) in grammars.iter().zip(ratios) {
        println!("{name}: median change of a round {:+.1} %", (median(ratios) - 1.0) * 100.0);
    }
}

/// The 99th percentile of the steps of the plain streams, in milliseconds.
fn measure(round: usize, beside: &str, grammar: Option<&Value>, quiet: Option<f64>) -> f64 {
    let wait = Duration::from_mins(5);
    let setup = Setup {
        alphabet: Alphabet::Ascii,
        blocks: 65_536,
        step_time: STEP,
        deadlines: Deadlines { header: wait, idle: wait, write: wait },
        ..Setup::default()
    };
    let server = Server::start(&setup);
    let (address, done) = (server.address, Arc::new(AtomicBool::new(false)));
    let body = grammar.map(|grammar| {
        json!({"prompt": "once", "max_tokens": 2_000, "structured_outputs": grammar}).to_string()
    });
    let clients = {
        let done = Arc::clone(&done);
        std::thread::spawn(move || {
            let mut builder = tokio::runtime::Builder::new_current_thread();
            let runtime = builder.enable_all().build().unwrap();
            runtime.block_on(async {
                for _ in 0..STREAMS {
                    tokio::spawn(read(address, false));
                }
                for body in std::iter::repeat_n(body, CONSTRAINED).flatten() {
                    tokio::spawn(follow(address, body));
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
    std::thread::sleep(Duration::from_secs(1)); // Everybody decodes.
    let (steps, p50, p99) = spread(steps(&server));
    let late = server.app.serving().unwrap().metrics.grammar.masks_late.load(Ordering::Relaxed);
    done.store(true, Ordering::Relaxed);
    clients.join().unwrap();
    let change = (p99 / quiet.unwrap_or(p99) - 1.0) * 100.0;
    println!(
        "| {round} | {beside} | {steps} | {p50:.3} ms | {p99:.3} ms | {change:+.1} % | {late} |"
    );
    p99
}

/// One constrained request after the other.
async fn follow(address: SocketAddr, body: String) {
    let head = format!(
        "POST /v1/completions HTTP/1.1\r\nHost: x\r\nConnection: close\r\nContent-Length: {}\r\n\r\n",
        body.len()
    );
    loop {
        let mut socket = TcpStream::connect(address).await.unwrap();
        socket.write_all(head.as_bytes()).await.unwrap();
        socket.write_all(body.as_bytes()).await.unwrap();
        let mut reply = Vec::new();
        let _ = socket.read_to_end(&mut reply).await; // A server that ends may cut it.
        let status = reply.get(9..12);
        assert!(status.is_none_or(|s| s == b"200"), "{}", String::from_utf8_lossy(&reply));
    }
}
