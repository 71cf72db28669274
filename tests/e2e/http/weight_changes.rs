//! Weights that change while a server runs, and executor restarts that fail until the original weights are
//! back.

use super::executor_process::{
    complete_text_of, executor, finish, is_ready, send, stream_of, wait_until,
};
use super::nodes::{ClusterAddress, NodeProcess};
use super::parallel_ranks::{metric, ranks, start, synth};
use crate::bounded_child::run_to_end;
use crate::http_client::{get, post};
use serde_json::{Value, json};
use std::fs;
use std::path::{Path, PathBuf};
use std::process::Command;
use std::time::{Duration, Instant};
use tempfile::TempDir;

/// Name of the weights file in a model folder.
pub(crate) const FILE: &str = "model.safetensors";
/// Timeout of each wait; processes start slowly if many tests share few cores.
const TIMEOUT: Duration = Duration::from_mins(2);
const TOKENS: u32 = 3_500;
const EXECUTOR_PROCESS_FLAGS: &[&str] = &["--executor", "process", "--served-model-name", "m"];

/// Returns the name of the metric series that counts failed restarts of a replica for the cause `cause`.
fn failures(replica: u16, cause: &str) -> String {
    format!(
        "hadron:executor_start_failures_total{{cause=\"{cause}\",engine=\"{replica}\",model_name=\"m\"}}"
    )
}

/// A small checkpoint, another checkpoint of equal size, and functions that replace the weights of the first
/// checkpoint.
struct SwappableCheckpoint {
    folder: TempDir,
    other: TempDir,
}

impl SwappableCheckpoint {
    fn new() -> Self {
        let config = json!({
            "architectures": ["Qwen3ForCausalLM"], "model_type": "qwen3", "vocab_size": 272,
            "hidden_size": 64, "num_hidden_layers": 2, "num_attention_heads": 4, "head_dim": 16,
            "num_key_value_heads": 2, "intermediate_size": 96, "hidden_act": "silu",
            "rms_norm_eps": 1e-6, "rope_theta": 10000.0, "max_position_embeddings": 4096,
            "tie_word_embeddings": false, "attention_bias": false, "bos_token_id": 1,
            "eos_token_id": 2,
        });
        let (folder, other) = (synth(&config), tempfile::tempdir().unwrap());
        let mut hadron = Command::new(env!("CARGO_BIN_EXE_hadron"));
        hadron.arg("synth").arg(folder.path().join("config.json")).arg(other.path().join("model"));
        let made = run_to_end(hadron.args(["--dtype", "float32", "--seed", "9"]));
        assert!(made.status.success());
        let both = Self { folder, other };
        let sizes =
            [both.dir(), both.other_dir()].map(|dir| fs::metadata(dir.join(FILE)).unwrap().len());
        assert_eq!(sizes[0], sizes[1]);
        both
    }

    fn dir(&self) -> PathBuf {
        self.folder.path().join("model")
    }

    fn other_dir(&self) -> PathBuf {
        self.other.path().join("model")
    }

    fn name(&self) -> String {
        self.dir().to_str().unwrap().to_owned()
    }

    fn bytes(&self) -> Vec<u8> {
        fs::read(self.dir().join(FILE)).unwrap()
    }

    fn other_bytes(&self) -> Vec<u8> {
        fs::read(self.other_dir().join(FILE)).unwrap()
    }

    /// The weights file with one bit changed, at a position that the sampled digest (a hash of parts of the
    /// file) does not cover.
    fn one_bit_changed(&self) -> Vec<u8> {
        let mut bytes = self.bytes();
        let last_sample = bytes.len() - 256;
        let between = usize::midpoint(last_sample * 15 / 31, last_sample * 16 / 31);
        bytes[between] ^= 1;
        bytes
    }

    /// Replaces the weights file. Running executors continue with the old file.
    fn put(&self, bytes: &[u8]) {
        put(&self.dir(), bytes);
    }
}

/// Replaces the weights file of the model folder `dir`. Processes that have the old file open keep it.
pub(crate) fn put(dir: &Path, bytes: &[u8]) {
    let new = dir.join("new");
    fs::write(&new, bytes).unwrap();
    fs::rename(new, dir.join(FILE)).unwrap();
}

fn greedy(streamed: bool) -> Value {
    json!({"prompt": "The quick brown fox", "max_tokens": TOKENS, "temperature": 0,
           "ignore_eos": true, "stream": streamed})
}

fn pinned(replica: u16) -> Value {
    json!({"prompt": "abc", "max_tokens": 40, "temperature": 0, "ignore_eos": true,
           "data_parallel_rank": replica})
}

/// Replaces the weights file with `bytes` and kills the executor during a greedy stream. The server must exit
/// and log the cause, and the stream must contain no token computed with other weights.
fn assert_named_failure(
    checkpoint: &SwappableCheckpoint,
    flags: &[&str],
    file: &Path,
    bytes: &[u8],
    expected: &str,
) {
    let name = checkpoint.name();
    let soon = ["--restart-backoff", "100ms", "--restart-give-up", "2s"];
    let mut process = start(&[&[name.as_str()], EXECUTOR_PROCESS_FLAGS, &soon, flags].concat());
    let at = process.address;
    let undisturbed = complete_text_of(at, &greedy(false));
    let stream = stream_of(at, &greedy(true));
    let whole = fs::read(file.join(FILE)).unwrap();
    put(file, bytes);
    send(executor(&process), "-KILL");
    wait_until(TIMEOUT, "the cause in /readyz", || {
        let reply = get(at, "/readyz");
        reply.status == 503 && reply.json()["error"]["reason"] == "weights_changed"
    });
    assert_eq!(get(at, "/livez").status, 200);
    assert!(metric(at, &failures(0, "weights_changed")) > 0.0);
    let (text, end) = finish(stream);
    assert_eq!(end, "engine_unavailable");
    // The stream may end within a character, whose bytes are then replaced.
    let whole_characters = text.trim_end_matches(char::REPLACEMENT_CHARACTER);
    let same = undisturbed.starts_with(whole_characters);
    assert!(same, "tokens of other weights:\n{text}\n{undisturbed}");
    assert_eq!(process.exits_within(TIMEOUT).code(), Some(3));
    let message = process.stderr_text();
    assert!(message.contains(expected), "{message}");
    put(file, &whole);
}

#[test]
fn swapped_weights_fail_by_name_and_change_no_token() {
    let checkpoint = SwappableCheckpoint::new();
    let (dir, other, bit) =
        (checkpoint.dir(), checkpoint.other_bytes(), checkpoint.one_bit_changed());
    let folder = "weights_changed: the model folder's digest is ";
    assert_named_failure(&checkpoint, &[], &dir, &other, folder);
    let loaded = "weights_changed: the digest of the weights ";
    assert_named_failure(&checkpoint, &[], &dir, &bit, loaded);
}

#[test]
fn swapped_draft_model_weights_are_detected() {
    let (checkpoint, draft) = (SwappableCheckpoint::new(), SwappableCheckpoint::new());
    let method =
        json!({"method": "draft_model", "model": draft.name(), "num_speculative_tokens": 2});
    let flags = ["--speculative-config", &method.to_string()];
    let loaded = "weights_changed: the digest of the weights ";
    assert_named_failure(&checkpoint, &flags, &draft.dir(), &draft.one_bit_changed(), loaded);
}

#[test]
fn replica_never_restarts_with_other_weights() {
    let checkpoint = SwappableCheckpoint::new();
    let (name, whole) = (checkpoint.name(), checkpoint.bytes());
    let process = start(&[name.as_str(), "-dp", "2", "--served-model-name", "m"]);
    let at = process.address;
    let expected = complete_text_of(at, &pinned(0));
    assert_eq!(complete_text_of(at, &pinned(1)), expected);
    checkpoint.put(&checkpoint.one_bit_changed());
    send(ranks(&process)[&1], "-KILL");
    wait_until(TIMEOUT, "two failed starts", || metric(at, &failures(1, "weights_changed")) >= 2.0);
    assert!(is_ready(at), "the other replica serves");
    assert_eq!(complete_text_of(at, &pinned(0)), expected);
    assert_eq!(metric(at, &failures(0, "weights_changed")), 0.0);
    // Once the original weights are back, the replica is restored.
    checkpoint.put(&whole);
    assert_eq!(complete_text_of(at, &pinned(1)), expected);
}

#[test]
fn restart_is_retried_until_weights_are_complete() {
    let checkpoint = SwappableCheckpoint::new();
    let (name, whole) = (checkpoint.name(), checkpoint.bytes());
    let process = start(&[&[name.as_str()], EXECUTOR_PROCESS_FLAGS].concat());
    let at = process.address;
    let expected = complete_text_of(at, &greedy(false));
    let stream = stream_of(at, &greedy(true));
    checkpoint.put(&whole[..whole.len() / 3]);
    let killed = Instant::now();
    send(executor(&process), "-KILL");
    let failed = || {
        ["weights_changed", "fault", "exited"]
            .map(|cause| metric(at, &failures(0, cause)))
            .iter()
            .sum::<f64>()
    };
    wait_until(TIMEOUT, "more starts than a server had in all before", || failed() >= 4.0);
    assert!(killed.elapsed() > Duration::from_millis(1_700), "pauses: {:?}", killed.elapsed());
    let reply = get(at, "/readyz");
    assert_eq!(reply.status, 503);
    let message = reply.json()["error"]["message"].to_string();
    assert!(message.contains("its last start failed: "), "{message}");
    assert_eq!(get(at, "/livez").status, 200, "waiting is no reason to kill the server");
    checkpoint.put(&whole);
    let (text, end) = finish(stream);
    assert_eq!(end, "length");
    assert!(text == expected, "differs from an undisturbed run:\n{text}\n{expected}");
    assert!(is_ready(at));
}

#[test]
fn restart_backoff_does_not_delay_shutdown() {
    let checkpoint = SwappableCheckpoint::new();
    let (name, whole) = (checkpoint.name(), checkpoint.bytes());
    let pause = [
        "--restart-backoff",
        "600s",
        "--restart-backoff-max",
        "600s",
        "--restart-give-up",
        "2000s",
    ];
    let mut process = start(&[&[name.as_str()], EXECUTOR_PROCESS_FLAGS, &pause].concat());
    let at = process.address;
    checkpoint.put(&whole[..whole.len() / 3]);
    send(executor(&process), "-KILL");
    wait_until(TIMEOUT, "a failed start", || {
        let reply = get(at, "/readyz");
        let says = |words| String::from_utf8_lossy(&reply.body).contains(words);
        reply.status == 503 && says("its last start failed: ")
    });
    let began = Instant::now();
    process.signal("TERM");
    assert_eq!(process.exits_within(TIMEOUT).code(), Some(0));
    assert!(began.elapsed() < Duration::from_secs(20), "{:?}", began.elapsed());
}

#[test]
fn system_fingerprint_follows_the_weights() {
    let checkpoint = SwappableCheckpoint::new();
    let fingerprint = |dir: PathBuf| {
        let process = start(&[dir.to_str().unwrap()]);
        let body = json!({"prompt": "a", "max_tokens": 1});
        let reply = post(process.address, "/v1/completions", &body).json();
        reply["system_fingerprint"].as_str().unwrap().to_owned()
    };
    let first = fingerprint(checkpoint.dir());
    assert_eq!(fingerprint(checkpoint.dir()), first);
    assert_ne!(fingerprint(checkpoint.other_dir()), first, "the same configuration");
    checkpoint.put(&checkpoint.one_bit_changed());
    assert_ne!(fingerprint(checkpoint.dir()), first);
}

#[test]
fn nodes_with_different_weights_never_serve_together() {
    let (checkpoint, same) = (SwappableCheckpoint::new(), SwappableCheckpoint::new());
    let place = ClusterAddress::new();
    let mut zero = NodeProcess::start(&place, 0, &[&checkpoint.name()]);
    // Node 0 rejects a node with other weights before that node loads them.
    let mut one = NodeProcess::start(&place, 1, &[checkpoint.other_dir().to_str().unwrap()]);
    assert_eq!(one.exits().code(), Some(1), "{}", one.log());
    one.wait_for_log("node 0 rejected this node: node 1 has model digest ");
    // A bit changed at a position that the sampled digest (a hash of parts of the weights file) does not
    // cover is detected when the weights are loaded.
    same.put(&same.one_bit_changed());
    let _one = NodeProcess::start(&place, 1, &[&same.name()]);
    assert_eq!(zero.exits().code(), Some(1), "{}", zero.log());
    zero.wait_for_log(": weights_changed: the digest of the weights ");
}

/// The executor of the second node restarts with other weights while the first node serves.
#[test]
fn rejoining_node_with_other_weights_is_rejected() {
    let (checkpoint, same) = (SwappableCheckpoint::new(), SwappableCheckpoint::new());
    let place = ClusterAddress::new();
    let flags = ["--served-model-name", "m"];
    let zero = NodeProcess::start(&place, 0, &[&[checkpoint.name().as_str()], &flags[..]].concat());
    let mut one = NodeProcess::start(&place, 1, &[&[same.name().as_str()], &flags[..]].concat());
    let at = zero.address();
    let expected = complete_text_of(at, &pinned(0));
    assert_eq!(complete_text_of(at, &pinned(1)), expected);
    one.kill();
    one.exits();
    let whole = same.bytes();
    same.put(&same.one_bit_changed());
    let again = NodeProcess::start(&place, 1, &[&[same.name().as_str()], &flags[..]].concat());
    wait_until(TIMEOUT, "two failed starts", || metric(at, &failures(1, "weights_changed")) >= 2.0);
    assert_eq!(complete_text_of(at, &pinned(0)), expected);
    same.put(&whole);
    assert_eq!(complete_text_of(at, &pinned(1)), expected);
    drop(again);
}
