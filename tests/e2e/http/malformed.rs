//! Sends a hundred thousand malformed requests, with random seeds derived from `HADRON_CURSOR`, or the
//! requested number (`just malformed COUNT`). No request may cause a 5xx status, a crash or a hang, and
//! memory must not grow, while valid requests are served.

use crate::bounded_child::run_within;
use crate::http_client::connect_within;
use crate::http_client::{HttpClient, post};
use crate::seed_cursor::first_seed;
use crate::test_server::{ServerSetup, TestServer};
use serde_json::json;
use std::io::{Read, Write};
use std::net::{Shutdown, SocketAddr};
use std::process::Command;
use std::time::{Duration, Instant};

/// Number of requests of every test run; HADRON_MALFORMED_REQUESTS overrides it.
const REQUESTS: usize = 100_000;
/// Number of requests written at once on one connection.
const BURST: usize = 100;

/// Random number generator of the malformed requests: splitmix64.
pub(crate) struct MalformedRequestRng(pub(crate) u64);

impl MalformedRequestRng {
    fn next(&mut self) -> u64 {
        self.0 = self.0.wrapping_add(0x9e37_79b9_7f4a_7c15);
        let z = (self.0 ^ (self.0 >> 30)).wrapping_mul(0xbf58_476d_1ce4_e5b9);
        z ^ (z >> 27)
    }

    fn below(&mut self, n: usize) -> usize {
        (self.next() % n as u64) as usize
    }

    fn pick<'a, T>(&mut self, list: &'a [T]) -> &'a T {
        &list[self.below(list.len())]
    }
}

/// A valid request that mutations change. There are no schemas: distinct ones fill the grammar cache, whose limit has tests
/// of its own (`many_distinct_schemas`).
struct ValidRequest {
    path: &'static str,
    body: &'static str,
}

const COMPLETIONS: &str = "/v1/completions";
const CHAT: &str = "/v1/chat/completions";
const MESSAGES: &str = "/v1/messages";
const RESPONSES: &str = "/v1/responses";
const VALID: &[ValidRequest] = &[
    ValidRequest {
        path: COMPLETIONS,
        body: r#"{"model":"tiny","prompt":"hello there","max_tokens":4,"temperature":0.5,"stop":["a","b"],"seed":3}"#,
    },
    ValidRequest {
        path: COMPLETIONS,
        body: r#"{"prompt":[72,105,33],"n":2,"max_tokens":2,"logprobs":2,"echo":true,"logit_bias":{"7":1.5}}"#,
    },
    ValidRequest {
        path: CHAT,
        body: r#"{"messages":[{"role":"system","content":"x"},{"role":"user","content":[{"type":"text","text":"hi"}]}],"max_tokens":3,"top_p":0.9}"#,
    },
    ValidRequest {
        path: CHAT,
        body: r#"{"messages":[{"role":"user","content":"hello"}],"stream":true,"stream_options":{"include_usage":true},"max_tokens":3}"#,
    },
    ValidRequest {
        path: CHAT,
        body: r#"{"messages":[{"role":"user","content":"hi"},{"role":"assistant","content":null,"tool_calls":[{"id":"c","type":"function","function":{"name":"f","arguments":"{}"}}]},{"role":"tool","tool_call_id":"c","content":"x"}],"tools":[{"type":"function","function":{"name":"f","parameters":{"type":"object","properties":{"n":{"type":"integer"}}}}}],"max_tokens":2}"#,
    },
    ValidRequest {
        path: MESSAGES,
        body: r#"{"max_tokens":2,"system":[{"type":"text","text":"s"}],"messages":[{"role":"user","content":"hi"},{"role":"assistant","content":[{"type":"tool_use","id":"c","name":"f","input":{"n":1}}]},{"role":"user","content":[{"type":"tool_result","tool_use_id":"c","content":"x"}]}],"tools":[{"name":"f","input_schema":{"type":"object"}}]}"#,
    },
    ValidRequest {
        path: MESSAGES,
        body: r#"{"max_tokens":2,"stream":true,"thinking":{"type":"disabled"},"messages":[{"role":"user","content":[{"type":"text","text":"hi","cache_control":{"type":"ephemeral"}}]}]}"#,
    },
    ValidRequest {
        path: "/v1/messages/count_tokens",
        body: r#"{"messages":[{"role":"user","content":"hi"}]}"#,
    },
    ValidRequest {
        path: RESPONSES,
        body: r#"{"input":"hi","max_output_tokens":2,"store":false,"instructions":"x"}"#,
    },
    ValidRequest {
        path: RESPONSES,
        body: r#"{"input":[{"role":"user","content":[{"type":"input_text","text":"hi"}]},{"type":"function_call","call_id":"c","name":"f","arguments":"{}"},{"type":"function_call_output","call_id":"c","output":"x"}],"tools":[{"type":"function","name":"f","parameters":{"type":"object"}},{"type":"namespace","name":"n","tools":[{"type":"function","name":"g"}]}],"tool_choice":"auto","store":false,"max_output_tokens":2,"stream":true}"#,
    },
    ValidRequest {
        path: "/v1/conversations",
        body: r#"{"items":[{"type":"message","role":"user","content":"hi"}],"metadata":{"a":"b"}}"#,
    },
    ValidRequest {
        path: "/v1/chat/completions/render",
        body: r#"{"messages":[{"role":"user","content":"hi"}]}"#,
    },
    ValidRequest {
        path: "/generate",
        body: r#"{"text":"hi","sampling_params":{"max_new_tokens":2,"temperature":0.5},"return_logprob":true}"#,
    },
    ValidRequest {
        path: "/v1/embeddings",
        body: r#"{"input":["a",[1,2]],"dimensions":8,"encoding_format":"base64"}"#,
    },
    ValidRequest { path: "/rerank", body: r#"{"query":"a","documents":["b","c"],"top_n":1}"# },
    ValidRequest { path: "/score", body: r#"{"text_1":"a","text_2":["b","c"]}"# },
    ValidRequest { path: "/detokenize", body: r#"{"tokens":[1,2,3]}"# },
    ValidRequest {
        path: "/tokenize",
        body: r#"{"prompt":"text to count","add_special_tokens":false}"#,
    },
];
/// Paths that get bodies of other paths.
const PATHS: &[&str] = &[
    COMPLETIONS,
    CHAT,
    MESSAGES,
    RESPONSES,
    "/tokenize",
    "/generate",
    "/v1/models",
    "/nowhere",
    "/v1/completions/../x",
    "/%00",
];
/// JSON values with which mutations replace the values of a valid body.
const ODD: &[&str] = &[
    "null",
    "true",
    "-1",
    "0",
    "1e400",
    "-0",
    "NaN",
    "1.5",
    "18446744073709551616",
    "\"\"",
    "[]",
    "{}",
    "[[]]",
    "[null]",
    "\"\\ud800\"",
    "\"\\u0000\"",
    "[1,\"a\"]",
    "{\"a\":{}}",
    "320",
    "-9",
    "\"<|im_end|>\"",
    "99999999999999999999999999",
    "\u{7f}",
    "'x'",
];

/// The body of a valid request with random mutations.
fn mutate(request_rng: &mut MalformedRequestRng, body: &str) -> Vec<u8> {
    let mut body = body.as_bytes().to_vec();
    for _ in 0..=request_rng.below(3) {
        let at = request_rng.below(body.len().max(1));
        match request_rng.below(7) {
            0 => body.truncate(at),
            1 => {
                if let Some(byte) = body.get_mut(at) {
                    *byte = request_rng.next() as u8;
                }
            }
            2 => body.insert(at.min(body.len()), *request_rng.pick(b"{}[]\",:\\0-\x00\xff")),
            3 => {
                // Replaces a JSON value: the bytes from a colon to the next `,`, `}` or `]`.
                let start = body[at.min(body.len())..].iter().position(|b| *b == b':');
                if let Some(start) = start.map(|i| at + i + 1) {
                    let end = body[start..].iter().position(|b| b",}]".contains(b));
                    let end = end.map_or(body.len(), |i| start + i);
                    body.splice(start..end, request_rng.pick(ODD).bytes());
                }
            }
            4 => {
                let tail = body[at.min(body.len())..].to_vec();
                body.extend(tail);
            }
            5 => {
                let len = 1 + request_rng.below(8);
                body.drain(at.min(body.len())..(at + len).min(body.len()));
            }
            _ => body = (0..request_rng.below(60)).map(|_| request_rng.next() as u8).collect(),
        }
    }
    body
}

/// Appends a request with a complete body to `out`; the server reads the next request on the same connection.
pub(crate) fn request(request_rng: &mut MalformedRequestRng, out: &mut Vec<u8>) {
    let method = if request_rng.below(20) == 0 {
        *request_rng.pick(&["GET", "PUT", "DELETE", "HEAD", "OPTIONS"])
    } else {
        "POST"
    };
    let valid = request_rng.pick(VALID);
    let path = if request_rng.below(6) == 0 { request_rng.pick(PATHS) } else { valid.path };
    let extra = match request_rng.below(24) {
        0 => "Content-Type: text/html\r\n",
        1 => "Content-Encoding: br\r\n",
        2 => "X-data-parallel-rank: -3\r\n",
        3 => "X-Request-Id: \u{1f980}\r\n",
        4 => "Accept: \"\r\nCookie: a;b;;=\r\n",
        _ => "",
    };
    let body = mutate(request_rng, valid.body);
    let head = format!(
        "{method} {path} HTTP/1.1\r\nHost: x\r\n{extra}Content-Length: {}\r\n\r\n",
        body.len()
    );
    out.extend(head.as_bytes());
    out.extend(body);
}

/// Bytes that start like HTTP but are mostly invalid.
pub(crate) fn garbage(request_rng: &mut MalformedRequestRng) -> Vec<u8> {
    let heads: &[&[u8]] = &[
        b"POST /v1/completions HTTP/1.1\r\nHost: x\r\nContent-Length: 5\r\nContent-Length: 6\r\n\r\n{}",
        b"POST /v1/completions HTTP/1.1\r\nTransfer-Encoding: chunked\r\n\r\nzz\r\n",
        b"POST /v1/completions HTTP/1.1\r\nTransfer-Encoding: chunked\r\n\r\nffffffffffffffff1\r\n",
        b"POST /v1/completions HTTP/9.9\r\n\r\n",
        b"GET  / HTTP/1.1\r\n\r\n",
        b"POST /v1/completions HTTP/1.1\r\nContent-Length: -1\r\n\r\n",
        b"POST /v1/completions HTTP/1.1\r\nContent-Length: 99999999999999999999\r\n\r\n",
        b"POST /v1/completions HTTP/1.1\r\nHost: x\r\n bad: folded\r\n\r\n",
        b"\r\n\r\n\r\n\x00\x01\x02",
        b"\x16\x03\x01\x02\x00\x01\x00\x01\xfc\x03\x03",
        b"POST /v1/completions HTTP/1.1\r\nHost: x\r\nContent-Length: 100\r\n\r\n{\"prompt\":",
    ];
    let mut bytes = request_rng.pick(heads).to_vec();
    for _ in 0..request_rng.below(4) {
        let at = request_rng.below(bytes.len());
        bytes[at] = request_rng.next() as u8;
    }
    bytes
}

/// Writes all bytes, reads all replies until the connection closes, and counts them by status class.
pub(crate) fn exchange(
    address: SocketAddr,
    bytes: &[u8],
    read_timeout: Duration,
    counts: &mut [u64; 6],
) {
    let mut stream = connect_within(address, read_timeout).unwrap();
    let mut reader = stream.try_clone().unwrap();
    let reading = std::thread::scope(|scope| {
        let reading = scope.spawn(move || {
            let mut text = Vec::new();
            match reader.read_to_end(&mut text) {
                Err(e)
                    if matches!(
                        e.kind(),
                        std::io::ErrorKind::WouldBlock | std::io::ErrorKind::TimedOut
                    ) =>
                {
                    panic!("hang: no end within {read_timeout:?}")
                }
                _ => text, // The connection may be reset.
            }
        });
        // The server may close the connection before it has read everything.
        let _ = stream.write_all(bytes);
        let _ = stream.shutdown(Shutdown::Write);
        reading.join().unwrap()
    });
    let leaks = ["panicked", "src/", "/tmp/", "/usr/", "/root/", "/home/"];
    let shown = without_model_roots(&String::from_utf8_lossy(&reading));
    for leak in leaks.into_iter().chain([env!("CARGO_MANIFEST_DIR")]) {
        assert!(!shown.contains(leak), "{leak} tells how the server is made: {shown}");
    }
    // A field that a mutation names `rs` gives a path such as `messages[0].rs: …`.
    let has_position = |text: &str| text.starts_with(|c: char| c.is_ascii_digit());
    assert!(
        !shown.split(".rs:").skip(1).any(has_position),
        "the position in a source file: {shown}"
    );
    let mut rest = &reading[..];
    while let Some(at) = find(rest, b"HTTP/1.1 ") {
        let class = rest.get(at + 9).map_or(0, |digit| usize::from(digit.wrapping_sub(b'0')));
        counts[class.min(5)] += 1;
        let head = &rest[at..rest.len().min(at + 600)];
        assert!(class != 5, "5xx: {}", String::from_utf8_lossy(head));
        rest = &rest[at + 9..];
    }
}

/// Removes the values of `root` from replies: the model's folder, which `/v1/models` lists like vLLM.
fn without_model_roots(text: &str) -> String {
    const FIELD: &str = "\"root\":\"";
    let mut parts = text.split(FIELD);
    let mut kept = parts.next().unwrap_or_default().to_owned();
    for part in parts {
        kept += FIELD;
        kept += part.split_once('"').map_or("", |(_, rest)| rest);
    }
    kept
}

fn find(text: &[u8], what: &[u8]) -> Option<usize> {
    text.windows(what.len()).position(|window| window == what)
}

fn resident_kib() -> u64 {
    let status = std::fs::read_to_string("/proc/self/status").unwrap_or_default();
    let line = status.lines().find_map(|line| line.strip_prefix("VmRSS:"));
    line.and_then(|rest| rest.split_whitespace().next()?.parse().ok()).unwrap_or(0)
}

/// Runs the test in a child process, so that the measured memory is that of the server under this traffic
/// alone.
#[test]
fn malformed_requests_never_cause_5xx() {
    let this = std::env::current_exe().unwrap();
    let mut child = Command::new(this);
    child.args([
        "--exact",
        "http::malformed::malformed_requests_process",
        "--ignored",
        "--nocapture",
    ]);
    let child = run_within(&mut child, Duration::from_hours(2)); // A manual run may send a million requests.
    let text = [child.stdout, child.stderr].concat();
    println!("{}", String::from_utf8_lossy(&text));
    assert!(child.status.success(), "{}", child.status);
}

#[test]
#[ignore = "child process, started by malformed_requests_never_cause_5xx and by `just malformed`"]
#[allow(clippy::disallowed_methods, reason = "how many comes from `just`")]
fn malformed_requests_process() {
    let message = std::env::var("HADRON_MALFORMED_REQUESTS").ok();
    send(message.map_or(REQUESTS, |text| text.parse().unwrap()));
}

fn send(requests: usize) {
    let server = TestServer::start(&ServerSetup::default());
    let good = json!({"prompt": "a good request", "max_tokens": 3, "seed": 1});
    let expected = post(server.address, "/v1/completions", &good).json()["choices"].clone();
    let mut request_rng = MalformedRequestRng(first_seed(42, 1_000, 1));
    let mut counts = [0; 6];
    let (mut sent, mut warm) = (0, 0);
    let mut slowest = Duration::ZERO;
    let start = Instant::now();
    while sent < requests {
        let mut burst = Vec::new();
        if request_rng.below(3) == 0 {
            burst = garbage(&mut request_rng);
            sent += 1;
        } else {
            for _ in 0..BURST {
                request(&mut request_rng, &mut burst);
            }
            sent += BURST;
        }
        exchange(server.address, &burst, Duration::from_secs(10), &mut counts);
        if sent >= requests / 4 && warm == 0 {
            warm = resident_kib();
        }
        if request_rng.below(40) == 0 {
            let begun = Instant::now();
            let reply = post(server.address, "/v1/completions", &good).json();
            assert_eq!(reply["choices"], expected, "good traffic is served the same");
            slowest = slowest.max(begun.elapsed());
        }
    }
    server.wait_idle(Duration::from_secs(5));
    let grown = resident_kib() as f64 / warm as f64;
    let seconds = start.elapsed().as_secs_f64();
    println!(
        "{sent} requests in {seconds:.1} s; answers by class {counts:?}; resident memory x{grown:.3} \
         since a quarter; slowest good request {slowest:?}"
    );
    assert!(counts[4] as usize > requests / 2, "{counts:?}");
    // The last three quarters of the requests may add at most 64 bytes each to resident memory; the bound
    // does not grow for more than the default number of requests.
    let grown_kib = resident_kib().saturating_sub(warm);
    // Conversations and responses that requests store, up to the limits of their stores, are not lost: 5 bytes per request
    // were measured over a million requests.
    let stored_kib = requests as u64 * 3 / 4 * 8 / 1024;
    let bound_kib = requests.min(REQUESTS) as u64 * 3 / 4 * 64 / 1024 + stored_kib;
    assert!(grown_kib < bound_kib, "memory grew by {grown_kib} KiB, x{grown:.3}");
    assert!(slowest < Duration::from_secs(10), "{slowest:?}");
    let mut client = HttpClient::connect(server.address);
    assert_eq!(client.post("/v1/completions", &good).status, 200);
}
