//! Accuracy test of the second demo model, which has MLA, group-limited expert routing, and a jointly trained
//! MTP module.
//!
//! In f32 the output token ids are the same for any number of ranks, with and without draft tokens.

use super::accuracy::{AccuracyServer, compared, run, scored};
use crate::http_client::get;
use crate::seed_cursor::is_selected_by_cursor;

const DEMO: &str = concat!(env!("CARGO_MANIFEST_DIR"), "/tests/data/demo_deepseek");

/// Minimum acceptance rate of draft tokens in percent, with one draft token per step.
const ACCEPTED_MIN: f64 = 70.0;

/// Returns the number of draft tokens and the number of accepted draft tokens, from the server's metrics.
fn spec_decode_counts(server: &AccuracyServer) -> [f64; 2] {
    let address = server.url.strip_prefix("http://").unwrap().parse().unwrap();
    let page = String::from_utf8(get(address, "/metrics").body).unwrap();
    ["draft_tokens", "accepted_tokens"].map(|name| {
        let series = format!("vllm:spec_decode_num_{name}_total{{");
        let line = page.lines().find(|line| line.starts_with(&series)).unwrap();
        line.rsplit(' ').next().unwrap().parse().unwrap()
    })
}

#[test]
fn accuracy_is_the_same_with_mla_experts_ranks_and_mtp() {
    let count = compared();
    let score = |flags: &str, count: u32| run(&format!("{DEMO} {flags}"), 64, count).0;
    let scored = scored(1);
    let all = score("--dtype float32", scored);
    assert!(all * 100 >= scored * 95, "{all} of {scored} is below 95 %");
    let baseline = if count == scored { all } else { score("--dtype float32", count) };
    let ranks = "--dtype float32 --threads 1 --enable-expert-parallel";
    for (turn, shared) in (0..).zip(["--tensor-parallel-size 2", "--data-parallel-size 2"]) {
        if is_selected_by_cursor(turn, 2) {
            assert_eq!(score(&format!("{ranks} {shared}"), count), baseline, "{shared}");
        }
    }
    let rounded = score("", count);
    assert!(rounded * 100 >= count * 95, "{rounded} of {count} in bf16");

    let single = acceptance_percent("--spec-tokens 1", baseline, count);
    assert!(single >= ACCEPTED_MIN, "{single:.1} % of single drafts");
    acceptance_percent(
        "--spec-tokens 4 --num-gpu-blocks-override 44 --max-model-len 700",
        baseline,
        count,
    );
}

/// Starts an f32 server with MTP drafts and returns the acceptance rate of draft tokens in percent. Asserts
/// that the score on `count` questions equals `right`, the score without draft tokens.
fn acceptance_percent(flags: &str, right: u32, count: u32) -> f64 {
    let server =
        AccuracyServer::start(&format!("{DEMO} --dtype float32 --spec-method mtp {flags}"));
    assert_eq!(server.score(64, count), right, "{flags}");
    let [drafted, accepted] = spec_decode_counts(&server);
    let share = 100.0 * accepted / drafted;
    println!("{accepted} of {drafted} drafts accepted, {share:.1} %, with {flags:?}");
    server.stop();
    share
}
