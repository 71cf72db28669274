//! Memory amplification: tokenization and OpenAI's completions get their most expensive bodies under an
//! address-space limit; `costly_routes.rs` has the other routes. The server must reply, survive, and stay below
//! the memory bound of docs/operations.md.

use super::clock_and_memory::limit_memory;
use super::server_process::ServerProcess;
use crate::http_client::{HttpClient, HttpReply, get};
use crate::seed_cursor::is_selected_by_cursor;
use serde_json::{Value, json};
use std::fs;
use std::time::Duration;

/// Approximate size in bytes of the costly bodies.
pub(super) const BODY_BYTES: usize = 3_000_000;
/// Size in bytes of a body that is close to the server's body limit.
const LONGEST_BYTES: usize = 7_800_000;
/// Value of `--max-text-memory` and of `--max-queued-bytes`.
const MEMORY: u64 = 512 << 20;
/// Memory in bytes that the server may use in addition to `--max-text-memory` and `--max-queued-bytes`: it
/// parses two long texts at a time, of up to 262,144 JSON values each.
const CONCURRENT_PARSE_BYTES: u64 = 512 << 20;
/// Number of clients that send the same body at the same time.
const CLIENTS: usize = 3;
/// Key of all requests; a server without `--admin-key` ignores it.
pub(super) const ADMIN_KEY: &str = "root";
const TIMEOUT: Duration = Duration::from_mins(5);

/// All bodies of this file.
pub(super) const OPENAI_BODIES: [fn() -> Vec<CostlyBody>; 5] =
    [texts, token_ids_and_logprobs, pairs, schemas, outputs];

/// A request body that needs much memory on a route.
#[derive(Debug, Clone)]
pub(super) struct CostlyBody {
    pub(super) name: &'static str,
    /// Path of the route as in its table; `{id}` becomes the id of a new conversation.
    pub(super) path: &'static str,
    body: Value,
    /// Maximum memory of one request in bytes per byte of the body.
    pub(super) factor: u64,
    statuses: &'static [u16],
    /// Server flags for this body, in addition to the flags for all bodies.
    flags: &'static [&'static str],
}

impl CostlyBody {
    pub(super) fn with_flags(self, flags: &'static [&'static str]) -> Self {
        Self { flags, ..self }
    }
}

pub(super) fn costly(
    name: &'static str,
    path: &'static str,
    factor: u64,
    statuses: &'static [u16],
    body: Value,
) -> CostlyBody {
    CostlyBody { name, path, body, factor, statuses, flags: &[] }
}

/// A list of small objects, the JSON that needs the most memory for its size.
pub(super) fn small_objects() -> Value {
    json!(vec![json!({"a": 1}); 60_000])
}

pub(super) fn user(content: impl Into<Value>) -> Value {
    json!([{"role": "user", "content": content.into()}])
}

pub(super) fn longest(of: &str) -> String {
    of.repeat(LONGEST_BYTES / of.len())
}

fn texts() -> Vec<CostlyBody> {
    let run = "x".repeat(BODY_BYTES);
    let words = "a1".repeat(BODY_BYTES / 2);
    let values = json!({"messages": user("a"), "chat_template_kwargs": {"x": small_objects()}});
    let cut = json!({"prompt": run, "truncate_prompt_tokens": 16, "max_tokens": 1});
    vec![
        costly("a run", "/tokenize", 260, &[200, 429], json!({"prompt": run})),
        costly("a run that never fits", "/tokenize", 60, &[400], json!({"prompt": longest("x")})),
        costly(
            "short words, as many as may be",
            "/tokenize",
            60,
            &[200],
            json!({"prompt": longest("a1"), "return_token_strs": true}),
        ),
        costly(
            "short words",
            "/tokenize",
            60,
            &[200],
            json!({"prompt": words, "return_token_strs": true}),
        ),
        costly("digits", "/tokenize", 60, &[200], json!({"prompt": "1".repeat(BODY_BYTES)})),
        costly("a run to be cut", "/v1/completions", 260, &[200, 429], cut),
        costly("a run", "/v1/completions", 20, &[400], json!({"prompt": run})),
        costly("a run", "/v1/chat/completions", 20, &[400], json!({"messages": user(run.clone())})),
        costly("a run", "/v1/responses", 20, &[400], json!({"input": run})),
        costly(
            "a run",
            "/v1/messages/count_tokens",
            260,
            &[200, 429],
            json!({"messages": user(run)}),
        ),
        costly("many values", "/tokenize", 400, &[200, 400], values),
    ]
}

fn token_ids_and_logprobs() -> Vec<CostlyBody> {
    let ids = vec![7_u32; BODY_BYTES / 2];
    let spaces = vec![301_u32; BODY_BYTES / 4];
    let prompt = vec![7_u32; 1_900];
    let told = |n: u32, prompt: &[u32]| json!({"prompt": prompt, "n": n, "max_tokens": 1, "prompt_logprobs": 20});
    let (few, many) = (told(4, &prompt), told(128, &prompt[..950]));
    let echoed = json!({"prompt": prompt, "n": 4, "max_tokens": 1, "echo": true, "logprobs": 20});
    vec![
        costly("short ids", "/detokenize", 30, &[200], json!({"tokens": ids})),
        costly("longer ids", "/detokenize", 30, &[200], json!({"tokens": spaces})),
        costly("ids", "/v1/completions", 30, &[400], json!({"prompt": ids})),
        costly("logprobs of a prompt, n = 4", "/v1/completions", 12_000, &[200, 429], few),
        costly("logprobs of a prompt, n = 128", "/v1/completions", 33_000, &[200, 429], many),
        costly("an echo with logprobs, n = 4", "/v1/completions", 14_000, &[200, 429], echoed),
    ]
}

/// Bodies for a reranker, which repeats the query in the prompt of every document.
fn pairs() -> Vec<CostlyBody> {
    const OVERRIDES: &str = r#"{"architectures": ["Qwen3ForSequenceClassification"],
        "classifier_from_token": ["n", "y"], "is_original_qwen3_reranker": true}"#;
    const FLAGS: &[&str] = &["--runner", "pooling", "--hf-overrides", OVERRIDES];
    let all = json!({"query": longest("a1"), "documents": vec!["a"; 2_048]});
    let mut cut = all.clone();
    cut["truncate_prompt_tokens"] = json!(16);
    let few = json!({"query": "a1".repeat(BODY_BYTES / 2), "documents": vec!["a"; 3],
                     "truncate_prompt_tokens": 16});
    let scored = json!({"text_1": "a1".repeat(BODY_BYTES / 2), "text_2": vec!["a"; 3],
                        "truncate_prompt_tokens": 16});
    let bodies = [
        costly("a long query for few documents", "/score", 120, &[200, 429], scored),
        costly("a long query", "/rerank", 20, &[400], all),
        costly("a long query to be cut", "/rerank", 20, &[400], cut),
        costly("a long query for few documents", "/rerank", 120, &[200, 429], few),
    ];
    bodies.into_iter().map(|body| body.with_flags(FLAGS)).collect()
}

fn schemas() -> Vec<CostlyBody> {
    let schema = json!({"type": "object", "x": small_objects()});
    let format = json!({"type": "json_schema", "json_schema": {"name": "x", "schema": schema}});
    let function = json!({"name": "f", "parameters": schema});
    let tools = json!([{"type": "function", "function": function}]);
    let grammar = format!("start: {}", "\"a\"? ".repeat(9_000));
    vec![
        costly(
            "a schema of small objects",
            "/v1/chat/completions",
            300,
            &[400],
            json!({"messages": user("a"), "response_format": format, "max_tokens": 1}),
        ),
        costly(
            "tools of small objects",
            "/v1/chat/completions",
            600,
            &[200, 400, 429],
            json!({"messages": user("a"), "tools": tools, "max_tokens": 1}),
        ),
        costly(
            "a grammar",
            "/v1/completions",
            2_000,
            &[200, 400, 429],
            json!({"prompt": "a", "structured_outputs": {"grammar": grammar}, "max_tokens": 1}),
        ),
    ]
}

/// Two bodies with a short prompt that request four outputs of 1,900 tokens with 20 top log-probabilities per
/// token: about 20 MiB of output.
fn outputs() -> Vec<CostlyBody> {
    let long = |mut body: Value| {
        body["n"] = json!(4);
        body["ignore_eos"] = json!(true);
        body["max_tokens"] = json!(1_900);
        body
    };
    let chat = json!({"messages": user("a"), "logprobs": true, "top_logprobs": 20});
    let text = json!({"prompt": "a", "logprobs": 20});
    vec![
        costly("logprobs of outputs", "/v1/chat/completions", 400_000, &[200, 429], long(chat)),
        costly("logprobs of outputs", "/v1/completions", 600_000, &[200, 429], long(text)),
    ]
}

/// Returns a field of `/proc/PID/status` in bytes; the file states KiB.
pub(super) fn status_bytes(pid: u32, name: &str) -> u64 {
    let status = fs::read_to_string(format!("/proc/{pid}/status")).unwrap();
    let line = status.lines().find_map(|line| line.strip_prefix(name)).unwrap();
    line.trim().trim_end_matches(" kB").parse::<u64>().unwrap() * 1024
}

fn send_body(process: &ServerProcess, path: &str, body: &str) -> HttpReply {
    let mut client = HttpClient::connect(process.address);
    client.set_read_timeout(TIMEOUT);
    let headers =
        format!("Content-Type: application/json\r\nAuthorization: Bearer {ADMIN_KEY}\r\n");
    client.send("POST", path, &headers, body.as_bytes());
    client.read().unwrap_or_else(|| panic!("no reply of {path}"))
}

/// Returns a path with the id of a new conversation in place of `{id}`.
fn with_conversation(process: &ServerProcess, path: &str) -> String {
    if !path.contains("{id}") {
        return path.to_owned();
    }
    let created = send_body(process, "/v1/conversations", "{}");
    path.replace("{id}", created.json()["id"].as_str().unwrap())
}

/// Sends a body from one client and then from several clients at once; prints the memory that the server
/// used.
pub(super) fn try_body(of: &CostlyBody) {
    let CostlyBody { name, path, body, factor, statuses, flags } = of;
    let body = body.to_string();
    let memory = MEMORY.to_string();
    let limits = ["--max-text-memory", &memory, "--max-queued-bytes", &memory];
    let fixed = ["--kv-cache-memory-bytes", "64MiB", "--threads", "1", "--executor", "process"];
    let args = [&limits[..], &fixed, &["--port", "0"], *flags].concat();
    // With this variable mimalloc reserves address space in steps of 16 MiB instead of 1 GiB, so that the
    // address-space limit applies to memory in use.
    let process = ServerProcess::of(
        super::server_process::command(&args).env("MIMALLOC_ARENA_RESERVE", "16MiB"),
    );
    let pid = process.id();
    let bound = 2 * MEMORY + CONCURRENT_PARSE_BYTES;
    // The extra gigabyte is for address space that thread stacks and allocator arenas reserve but never use.
    limit_memory(pid, bound + (1 << 30));
    let path = &with_conversation(&process, path);
    let before = status_bytes(pid, "VmRSS:");
    let told = |reply: &HttpReply| {
        let head: String = String::from_utf8_lossy(&reply.body).chars().take(200).collect();
        assert!(statuses.contains(&reply.status), "{path}, {name}: {} {head}", reply.status);
    };
    told(&send_body(&process, path, &body));
    let taken = status_bytes(pid, "VmHWM:") - before;
    std::thread::scope(|scope| {
        let all: Vec<_> =
            (0..CLIENTS).map(|_| scope.spawn(|| send_body(&process, path, &body))).collect();
        for one in all {
            told(&one.join().unwrap());
        }
    });
    let peak = status_bytes(pid, "VmHWM:") - before;
    let bytes = body.len() as u64;
    println!(
        "{path}, {name}: {bytes} bytes, {} bytes per byte, {} MiB for {CLIENTS}",
        taken / bytes,
        peak >> 20
    );
    assert_eq!(get(process.address, "/livez").status, 200);
    assert!(taken <= factor * bytes, "{path}, {name}: {} bytes per byte", taken / bytes);
    assert!(peak <= bound, "{path}, {name}: {peak} of {bound}");
}

#[test]
fn long_texts_stay_within_memory_limit() {
    if !is_selected_by_cursor(0, 2) {
        return;
    }
    texts().iter().for_each(try_body);
}

#[test]
fn long_id_lists_and_logprobs_stay_within_the_bound() {
    token_ids_and_logprobs().iter().for_each(try_body);
}

#[test]
fn pairs_of_a_reranker_stay_within_the_memory_bound() {
    pairs().iter().for_each(try_body);
}

#[test]
fn logprobs_of_outputs_stay_within_the_memory_bound() {
    if !is_selected_by_cursor(1, 2) {
        return;
    }
    outputs().iter().for_each(try_body);
}

#[test]
fn schemas_and_tools_stay_within_the_memory_bound() {
    schemas().iter().for_each(try_body);
}

#[test]
fn outputs_whose_logprobs_never_fit_are_refused() {
    let args = ["--max-queued-bytes", "1MiB", "--threads", "1", "--port", "0"];
    let process = ServerProcess::of(&mut super::server_process::command(&args));
    let body = |n: u32| json!({"prompt": "a", "logprobs": 20, "n": n, "max_tokens": 1_900});
    let rejected = send_body(&process, "/v1/completions", &body(2).to_string());
    let error = &rejected.json()["error"];
    assert_eq!((rejected.status, &error["param"]), (400, &json!("max_tokens")), "{error}");
    assert!(error["message"].as_str().unwrap().contains("1048576"), "{error}");
    // A streamed output is accepted, because its log-probabilities are not retained. Consecutive unary
    // outputs are accepted, because the memory of a reply is released once it has been sent.
    let mut streamed = body(2);
    streamed["stream"] = json!(true);
    assert_eq!(send_body(&process, "/v1/completions", &streamed.to_string()).status, 200);
    for _ in 0..3 {
        assert_eq!(send_body(&process, "/v1/completions", &body(1).to_string()).status, 200);
    }
}
