//! Accuracy test: exact-match score of the demo model on a question set, through the `hadron` binary and
//! HTTP.
//!
//! Other requests in the batch, preemption, prefix hits and chunking must not change an output, so the score
//! is equal in every configuration. Each server logs the totals of its counters at exit; a configuration that
//! is meant to cause preemptions or prefix hits must report some.

use crate::bounded_child::{
    CHILD_TIMEOUT, ChildPipe, end_child, run_within, send_signal, wait_within,
};
use crate::http::server_process::ready_line;
use crate::seed_cursor::is_selected_by_cursor;
use std::path::{Path, PathBuf};
use std::process::{Child, Command, Stdio};
use std::time::Duration;

const HADRON: &str = env!("CARGO_BIN_EXE_hadron");
const QUESTIONS: &str = concat!(env!("CARGO_MANIFEST_DIR"), "/tests/data/demo/questions.jsonl");
/// Total number of questions.
pub(super) const ALL_QUESTIONS: u32 = 500;
/// Number of questions in the default sample, which contains every fifth question. `HADRON_ACCURACY=all`
/// (`just accuracy`) selects all questions.
pub(super) const SAMPLED_QUESTIONS: u32 = 100;

/// Number of runs with a small KV cache, of which one must cause preemptions.
const ROUNDS_MAX: u32 = 5;

/// Number of questions with which each server configuration is tested.
#[allow(clippy::disallowed_methods, reason = "`just accuracy` asks for all")]
pub(super) fn compared() -> u32 {
    if std::env::var("HADRON_ACCURACY").is_ok_and(|value| value == "all") {
        ALL_QUESTIONS
    } else {
        SAMPLED_QUESTIONS
    }
}

/// Number of questions of the first score of demo model `model`, which must be at least 95 %: all questions
/// for one of the two models, which `HADRON_CURSOR` selects, and the sample for the other one.
pub(super) fn scored(model: u64) -> u32 {
    if is_selected_by_cursor(model, 2) { ALL_QUESTIONS } else { compared() }
}

/// Returns the path of a file with `count` questions, evenly spaced in the full question list. Writes the
/// file unless it is the full list.
fn questions(count: u32) -> PathBuf {
    if count == ALL_QUESTIONS {
        return PathBuf::from(QUESTIONS);
    }
    let path = Path::new(env!("CARGO_TARGET_TMPDIR")).join(format!("questions-{count}.jsonl"));
    let unfinished = path.with_extension(std::process::id().to_string());
    let text = std::fs::read_to_string(QUESTIONS).unwrap();
    let lines: Vec<&str> = text.lines().step_by((ALL_QUESTIONS / count) as usize).collect();
    std::fs::write(&unfinished, lines.join("\n") + "\n").unwrap();
    std::fs::rename(unfinished, &path).unwrap();
    path
}

/// A `hadron serve` process of a demo model on its own port.
pub(super) struct AccuracyServer {
    process: Child,
    stderr: ChildPipe,
    pub(super) url: String,
}

impl AccuracyServer {
    pub(super) fn start(flags: &str) -> Self {
        // The KV cache size is set explicitly, because its default depends on the free memory of the machine.
        let sized = flags.contains("--num-gpu-blocks-override");
        let size: &[&str] = if sized { &[] } else { &["--kv-cache-memory-bytes", "512MiB"] };
        let mut process = Command::new(HADRON)
            .args(["serve", "--port", "0"])
            .args(size)
            .args(flags.split_whitespace())
            .stderr(Stdio::piped())
            .spawn()
            .expect("the binary starts");
        let stderr = ChildPipe::start(process.stderr.take().unwrap());
        let address = ready_line(&stderr).address;
        Self { process, stderr, url: format!("http://{address}") }
    }

    /// Returns how many of `count` questions the model solves correctly, with `concurrency` requests in
    /// flight.
    pub(super) fn score(&self, concurrency: u32, count: u32) -> u32 {
        let mut tasks = Command::new(HADRON);
        tasks.args(["eval", "tasks", "--base-url", &self.url, "--data"]).arg(questions(count));
        tasks.args(["--concurrency", &concurrency.to_string()]);
        let output = run_within(&mut tasks, Duration::from_mins(20));
        let table = String::from_utf8(output.stdout).unwrap();
        let total = table.lines().find(|l| l.starts_with("total")).unwrap_or_else(|| {
            panic!("no score in:\n{table}\n{}", String::from_utf8_lossy(&output.stderr))
        });
        let words: Vec<&str> = total.split_whitespace().collect();
        assert_eq!(words[3].parse(), Ok(count), "{table}");
        words[1].parse().unwrap()
    }

    /// Stops the server with SIGTERM and returns its log.
    pub(super) fn stop(mut self) -> String {
        assert!(send_signal(self.process.id(), "-TERM"), "the server has exited");
        let log = self.stderr.rest();
        assert!(wait_within(&mut self.process, CHILD_TIMEOUT).success(), "{log}");
        log
    }
}

impl Drop for AccuracyServer {
    fn drop(&mut self) {
        end_child(&mut self.process);
    }
}

/// Value of the counter `name` in the totals that the server logs at its exit.
fn total(log: &str, name: &str) -> u64 {
    let line = log
        .lines()
        .rfind(|l| l.contains("drained"))
        .unwrap_or_else(|| panic!("no report in:\n{log}"));
    let key = format!("{name}=");
    let value = line.split_whitespace().find_map(|w| w.strip_prefix(&key));
    value.unwrap_or_else(|| panic!("no {name} in {line}")).parse().unwrap()
}

/// Runs the accuracy test on a server with the command-line flags `flags`. Returns the score (number of
/// correct outputs) and the server's log.
pub(super) fn run(flags: &str, concurrency: u32, count: u32) -> (u32, String) {
    let server = AccuracyServer::start(flags);
    let right = server.score(concurrency, count);
    println!("{right} of {count} at concurrency {concurrency} with {flags:?}");
    (right, server.stop())
}

/// Runs the accuracy test with a KV cache of 44 blocks until a run has caused preemptions, because the number
/// of requests that are in the batch together depends on the machine's speed. Asserts that each score is
/// `baseline`. Returns the number of runs, or `ROUNDS_MAX + 1` if none caused a preemption.
fn preempting_rounds(baseline: u32, count: u32) -> u32 {
    let preempted = |_: &u32| {
        let (score, log) = run("--num-gpu-blocks-override 44 --max-model-len 700", 64, count);
        assert_eq!(score, baseline);
        let preemptions = total(&log, "preemptions");
        println!("{preemptions} preemptions");
        preemptions > 0
    };
    (1..=ROUNDS_MAX).find(preempted).unwrap_or(ROUNDS_MAX + 1)
}

#[test]
fn accuracy_is_the_same_in_every_configuration() {
    let count = compared();
    let server = AccuracyServer::start("");
    let scored = scored(0);
    let all = server.score(64, scored);
    assert!(all * 100 >= scored * 95, "{all} of {scored} is below 95 %");
    let baseline = server.score(1, count);
    assert!(total(&server.stop(), "prefix_hits") > 0, "the questions share prefixes");

    let (uncached, log) = run("--no-enable-prefix-caching", 64, count);
    assert_eq!(uncached, baseline);
    assert_eq!(total(&log, "prefix_hits"), 0);

    assert!(preempting_rounds(baseline, count) <= ROUNDS_MAX, "44 blocks must cause preemptions");

    for flags in ["", "--max-num-batched-tokens 16", "--max-num-batched-tokens 4096"] {
        assert_eq!(run(flags, 64, count).0, baseline, "{flags:?}");
    }

    let (exact, _) = run("--dtype float32", 64, count);
    assert_eq!(exact, baseline);

    let (shared, _) = run("--dtype float32 --tensor-parallel-size 2 --threads 1", 64, count);
    assert_eq!(shared, exact);
}
