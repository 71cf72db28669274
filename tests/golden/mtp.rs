//! Compares the MTP module with a reference. The module predicts the token after the next one.

use device::gpu::HalfDtype;
use models::{ModelConfig, check_split};
use ops::DType;

use crate::check_half;
use crate::fixture::{DraftChain, GoldenFixture};
use crate::model_harness::{
    self, ModelHarness, RankContext, SequenceRow, ShardingMode, closeness, difference, run_ranks,
    top,
};

const NAMES: [&str; 5] = [
    "deepseek_v3-mtp",
    "qwen3_5-mtp",
    "qwen3_5_moe-text-mtp",
    "qwen3_next-fp8-blocks-mtp",
    "qwen3_next-mtp",
];
/// Maximum absolute difference between logits on the CPU in f32 and logits of the reference, which adds in
/// another order.
const TOLERANCE: f32 = 1e-4;

/// Returns the tokens of the fixture as a row, the model's hidden states for all tokens except the last, and
/// the MTP logits for all tokens except the first.
fn all_drafts(
    harness: &mut ModelHarness<'_>,
    fixture: &GoldenFixture,
) -> (SequenceRow, Vec<Vec<f32>>, Vec<Vec<f32>>) {
    let row = SequenceRow::new(harness, &fixture.tokens);
    let mut before = harness.hidden(&row);
    before.pop();
    let logits = harness.mtp_logits(&row.part(1, before.len()), &before);
    (row, before, logits)
}

fn matches_reference(rank_context: &RankContext, fixture: &GoldenFixture) {
    let mut harness = ModelHarness::load_with(rank_context, fixture, DType::F32, true);
    let (_, before, logits) = all_drafts(&mut harness, fixture);
    let tokens: Vec<i32> = logits.iter().map(|logits| top(logits) as i32).collect();
    assert_eq!(tokens, fixture.draft_tokens);
    let expected = &fixture.draft_logits;
    let worst = difference(&logits[logits.len() - expected.len()..], expected);
    assert!(worst <= TOLERANCE, "logits differ by {worst}");

    // Logits are bit-exact for any chunking, also if some chunks only write KV entries.
    let row = SequenceRow::new(&mut harness, &fixture.tokens);
    let hidden = harness.hidden(&row);
    harness.write_draft_kv(&row.part(0, 1), &[vec![0.0; hidden[0].len()]]);
    assert!(hidden[..before.len()] == before, "the MTP module changes the model's hidden states");
    for (start, end) in [(1, 8), (8, 24), (24, 25), (25, 89), (89, before.len() + 1)] {
        let (part, before) = (row.part(start, end - start), &before[start - 1..end - 1]);
        if start % 2 == 0 {
            harness.write_draft_kv(&part, before);
        } else {
            assert!(
                harness.mtp_logits(&part, before) == logits[start - 1..end - 1],
                "{start}..{end}"
            );
        }
    }
    chains_match_reference(&harness, fixture, &row, &hidden);
}

/// Each draft token of a chain is computed from the module's output for the previous draft token. The KV entries that a
/// chain writes do not affect the next chain.
fn chains_match_reference(
    harness: &ModelHarness<'_>,
    fixture: &GoldenFixture,
    row: &SequenceRow,
    hidden: &[Vec<f32>],
) {
    for DraftChain { start: at, tokens: chain } in &fixture.draft_chains {
        let mut row = row.clone();
        let mut outputs = harness.mtp_outputs(&row.part(1, *at), &hidden[..*at]);
        for (i, expected) in chain.iter().enumerate() {
            let last = outputs.logits.len() - 1;
            let draft_token = top(&outputs.logits[last]) as i32;
            assert_eq!(draft_token, *expected, "draft {i} after {at}");
            let position = at + 1 + i;
            row.tokens.resize(row.tokens.len().max(position + 1), 0);
            row.tokens[position] = draft_token;
            outputs = harness.mtp_outputs(&row.part(position, 1), &outputs.states[last..]);
        }
    }
}

#[test]
fn mtp_logits_match_the_reference() {
    if model_harness::on_a_gpu() {
        return; // On GPUs, MTP modules are compared with the CPU in executor/tests/emulated_gpu.
    }
    for fixture in NAMES.map(GoldenFixture::read) {
        matches_reference(&RankContext::single(), &fixture);
        let config = ModelConfig::from_json("config.json".as_ref(), &fixture.config).unwrap();
        let shardings = [
            (2, ShardingMode::TensorParallel),
            (4, ShardingMode::TensorParallel),
            (2, ShardingMode::ExpertParallel),
        ];
        let is_supported = |&(size, sharing): &(usize, ShardingMode)| {
            let has_experts = config.moe.is_some() || sharing == ShardingMode::TensorParallel;
            let rank_context = RankContext::ranks(0, size, sharing);
            has_experts && check_split(&config, &rank_context, None).is_ok()
        };
        for (size, sharing) in shardings.into_iter().filter(is_supported) {
            run_ranks(size, sharing, HalfDtype::BF16, |rank_context| {
                matches_reference(rank_context, &fixture);
            });
        }
    }
}

/// For each draft position, the experts that each model layer selects for the token, then the experts that
/// the MTP module selects.
type RoutedExperts = Vec<Vec<Vec<i32>>>;

/// Returns the MTP logits and experts at the fixture's draft positions twice: computed in one pass, and one
/// position at a time.
fn batched_and_single(
    rank_context: &RankContext,
    fixture: &GoldenFixture,
    dtype: DType,
) -> [(Vec<Vec<f32>>, RoutedExperts); 2] {
    let mut harness = ModelHarness::load_with(rank_context, fixture, dtype, true);
    let (row, before, _) = all_drafts(&mut harness, fixture);
    let main = harness.run_traced(&row).routes;
    let many = harness.traced_mtp_logits(&row.part(1, before.len()), &before);
    let one = |t: usize| harness.traced_mtp_logits(&row.part(t, 1), &before[t - 1..t]);
    let few: (Vec<_>, Vec<_>) = (1..=before.len()).map(one).unzip();
    [many, (few.0.concat(), few.1.concat())].map(|(mut logits, own)| {
        let first = logits.len() - fixture.draft_logits.len();
        let of_model = |t: usize| main.iter().map(move |layer| layer[t].clone());
        let of_module = |t: usize| own.get(t).cloned();
        let routes = (first..logits.len()).map(|t| of_model(t).chain(of_module(t)).collect());
        let routes = routes.collect();
        (logits.split_off(first), routes)
    })
}

/// In bf16, different kernels are used for few and for many rows. With both, the logits must be close to
/// those of the fixture at positions where the router selects the same experts as in f32.
#[test]
fn mtp_logits_in_bf16_are_close() {
    if model_harness::on_a_gpu() {
        return;
    }
    NAMES.map(GoldenFixture::read).iter().for_each(bf16_is_close);
}

fn bf16_is_close(fixture: &GoldenFixture) {
    let rank_context = RankContext::single();
    let [(_, exact), _] = batched_and_single(&rank_context, fixture, DType::F32);
    for (logits, routes) in batched_and_single(&rank_context, fixture, DType::BF16) {
        let positions: Vec<usize> = (0..exact.len()).filter(|&t| routes[t] == exact[t]).collect();
        println!("same experts at {} of {} drafts", positions.len(), exact.len());
        let least = fixture.bf16_gate.same_experts * exact.len() as f64;
        assert!(positions.len() as f64 >= least, "{} drafts of {}", positions.len(), exact.len());
        let rows = |of: &[Vec<f32>]| -> Vec<Vec<f32>> {
            positions.iter().map(|&t| of[t].clone()).collect()
        };
        check_half(fixture, &closeness(&rows(&logits), &rows(&fixture.draft_logits)), DType::BF16);
    }
}
