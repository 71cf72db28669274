//! The layer behind the last one, which guesses the token after next.

use device::gpu::HalfDtype;
use ops::DType;

use crate::check_half;
use crate::fixture::GoldenFixture;
use crate::model_harness::{
    self, ModelHarness, RankContext, SequenceRow, ShardingMode, closeness, difference, run_ranks,
    top,
};

const NAME: &str = "deepseek_v3-mtp";
/// CPU f32 against the reference: sums in another order.
const TOLERANCE: f32 = 1e-4;

/// All drafts of a sequence: behind each token but the first.
fn all_drafts(
    replay: &mut ModelHarness<'_>,
    fixture: &GoldenFixture,
) -> (SequenceRow, Vec<Vec<f32>>, Vec<Vec<f32>>) {
    let row = SequenceRow::new(replay, &fixture.tokens);
    let mut before = replay.hidden(&row);
    before.pop();
    let logits = replay.drafts(&row.part(1, before.len()), &before);
    (row, before, logits)
}

fn matches_reference(place: &RankContext, fixture: &GoldenFixture) {
    let mut replay = ModelHarness::load_with(place, fixture, DType::F32, true);
    let (_, before, logits) = all_drafts(&mut replay, fixture);
    let tokens: Vec<i32> = logits.iter().map(|logits| top(logits) as i32).collect();
    assert_eq!(tokens, fixture.draft_tokens);
    let theirs = &fixture.draft_logits;
    let worst = difference(&logits[logits.len() - theirs.len()..], theirs);
    assert!(worst <= TOLERANCE, "logits differ by {worst}");

    // Bit for bit, however it is cut: drafts of a part, what is kept of another, drafts behind that.
    let row = SequenceRow::new(&mut replay, &fixture.tokens);
    let hidden = replay.hidden(&row);
    replay.write_draft_kv(&row.part(0, 1), &[vec![0.0; hidden[0].len()]]);
    assert!(hidden[..before.len()] == before, "the draft layer changed the model");
    for (start, end) in [(1, 8), (8, 24), (24, 25), (25, 89), (89, before.len() + 1)] {
        let (part, before) = (row.part(start, end - start), &before[start - 1..end - 1]);
        if start % 2 == 0 {
            replay.write_draft_kv(&part, before);
        } else {
            assert!(replay.drafts(&part, before) == logits[start - 1..end - 1], "{start}..{end}");
        }
    }
}

#[test]
fn mtp_logits_match_the_reference() {
    if model_harness::on_a_gpu() {
        return; // There draft layers are held to the CPU by executor/tests/emulated_gpu.
    }
    let fixture = GoldenFixture::read(NAME);
    matches_reference(&RankContext::alone(), &fixture);
    for (size, sharing) in [
        (2, ShardingMode::TensorParallel),
        (4, ShardingMode::TensorParallel),
        (2, ShardingMode::ExpertParallel),
    ] {
        run_ranks(size, sharing, HalfDtype::BF16, |place| matches_reference(place, &fixture));
    }
}

/// Routes of the model behind each token that a draft begins with, then of the draft layer, in one list for each draft.
type RoutedExperts = Vec<Vec<Vec<i32>>>;

/// Logits of the drafts that the fixture has, and how they were routed: all in one pass, and one by one.
fn both_ways(
    place: &RankContext,
    fixture: &GoldenFixture,
    dtype: DType,
) -> [(Vec<Vec<f32>>, RoutedExperts); 2] {
    let mut replay = ModelHarness::load_with(place, fixture, dtype, true);
    let (row, before, _) = all_drafts(&mut replay, fixture);
    let main = replay.run_traced(&row).routes;
    let many = replay.traced_drafts(&row.part(1, before.len()), &before);
    let one = |t: usize| replay.traced_drafts(&row.part(t, 1), &before[t - 1..t]);
    let few: (Vec<_>, Vec<_>) = (1..=before.len()).map(one).unzip();
    [many, (few.0.concat(), few.1.concat())].map(|(mut logits, own)| {
        let first = own.len() - fixture.draft_logits.len();
        let of_model = |t: usize| main.iter().map(move |layer| layer[t].clone());
        let routes = (first..).zip(&own[first..]);
        let routes = routes.map(|(t, own)| of_model(t).chain([own.clone()]).collect());
        (logits.split_off(first), routes.collect())
    })
}

/// Rows of few tokens and of many go different ways in bf16, and both come near, where no near tie of a router is tipped.
#[test]
fn mtp_logits_in_bf16_are_close() {
    if model_harness::on_a_gpu() {
        return;
    }
    let fixture = GoldenFixture::read(NAME);
    let place = RankContext::alone();
    let [(_, exact), _] = both_ways(&place, &fixture, DType::F32);
    for (logits, routes) in both_ways(&place, &fixture, DType::BF16) {
        let kept: Vec<usize> = (0..exact.len()).filter(|&t| routes[t] == exact[t]).collect();
        println!("the same experts at {} of {} drafts", kept.len(), exact.len());
        let least = fixture.bf16_gate.same_experts * exact.len() as f64;
        assert!(kept.len() as f64 >= least, "{} drafts of {}", kept.len(), exact.len());
        let rows =
            |of: &[Vec<f32>]| -> Vec<Vec<f32>> { kept.iter().map(|&t| of[t].clone()).collect() };
        check_half(&fixture, &closeness(&rows(&logits), &rows(&fixture.draft_logits)), DType::BF16);
    }
}
