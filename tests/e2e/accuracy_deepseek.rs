//! The same gate for the second demo: latents, experts in groups, and a draft layer that was trained with them.
//!
//! In f32 the ids are those of one rank however many there are, and with drafts those without.

use super::accuracy::{Server, run};
use crate::http_client::get;

const DEMO: &str = concat!(env!("CARGO_MANIFEST_DIR"), "/tests/data/demo_deepseek");

/// Guesses of one token that must be right, of a hundred.
const ACCEPTED_MIN: f64 = 70.0;

/// Guessed and accepted tokens of a server, over all that it was asked.
fn drafted(server: &Server) -> [f64; 2] {
    let address = server.url.strip_prefix("http://").unwrap().parse().unwrap();
    let page = String::from_utf8(get(address, "/metrics").body).unwrap();
    ["draft_tokens", "accepted_tokens"].map(|name| {
        let series = format!("vllm:spec_decode_num_{name}_total{{");
        let line = page.lines().find(|line| line.starts_with(&series)).unwrap();
        line.rsplit(' ').next().unwrap().parse().unwrap()
    })
}

#[test]
fn latents_experts_ranks_and_drafts_have_the_same_score() {
    let score = |flags: &str| run(&format!("{DEMO} {flags}"), 64).0;
    let alone = score("--dtype float32");
    assert!(alone >= 475, "{alone} of 500 is below 95 %");
    let ranks = "--dtype float32 --threads 1 --enable-expert-parallel";
    for shared in ["--tensor-parallel-size 2", "--data-parallel-size 2"] {
        assert_eq!(score(&format!("{ranks} {shared}")), alone, "{shared}");
    }
    let rounded = score("");
    assert!(rounded >= 475, "{rounded} of 500 in bf16");

    let single = accepted("--spec-tokens 1", alone);
    assert!(single >= ACCEPTED_MIN, "{single:.1} % of single drafts");
    accepted("--spec-tokens 4 --num-gpu-blocks-override 44 --max-model-len 700", alone);
}

/// How many of a hundred drafts are accepted by a server in f32 that answers as many questions as without.
fn accepted(flags: &str, right: u32) -> f64 {
    let server = Server::start(&format!("{DEMO} --dtype float32 --spec-method mtp {flags}"));
    assert_eq!(server.score(64), (right, 500), "{flags}");
    let [drafted, accepted] = drafted(&server);
    let share = 100.0 * accepted / drafted;
    println!("{accepted} of {drafted} drafts accepted, {share:.1} %, with {flags:?}");
    server.stop();
    share
}
