//! Replicas that share experts, each with its own tokens: all-gather and all-to-all give equal bits, and the
//! tokens of one device.

use device::gpu::HalfDtype;
use models::ModelConfig;
use ops::DType;

use crate::LOGIT_TOLERANCE;
use crate::fixture::GoldenFixture;
use crate::model_harness::{
    self, ModelHarness, RankContext, SequenceRow, ShardingMode, difference, run_ranks_each, top,
};

type LogitRows = Vec<Vec<f32>>;

/// Tokens `[from, to)` of the fixture that a replica has in a step, if any.
type StepTokens = Option<(usize, usize)>;

/// Tokens of four replicas in three steps: a long prompt together with few and no tokens, then the reverse.
const STEPS: [[StepTokens; 4]; 3] = [
    [Some((0, 80)), Some((0, 1)), None, Some((0, 13))],
    [Some((80, 81)), Some((1, 50)), Some((0, 3)), None],
    [None, None, Some((3, 5)), None],
];

/// Logits of each replica in each step: of all tokens, then of every third token only.
fn replicas(
    fixture: &GoldenFixture,
    size: usize,
    sharing: ShardingMode,
    dtype: DType,
) -> Vec<Vec<LogitRows>> {
    run_ranks_each(size, sharing, HalfDtype::BF16, |place| {
        let mut replay = ModelHarness::load(place, fixture, dtype);
        let row = SequenceRow::new(&mut replay, &fixture.tokens);
        let turn = |turn: &[StepTokens; 4]| {
            let most = turn[..size].iter().flatten().map(|(from, to)| to - from).max();
            place.set_max_tokens_of_others(most.unwrap_or(0));
            let own = turn[place.replica()].map(|(from, to)| row.part(from, to - from));
            let rows: Vec<&SequenceRow> = own.iter().collect();
            let asked: Vec<i32> =
                (0..rows.iter().map(|row| row.len as i32).sum()).step_by(3).collect();
            [replay.run(&rows), replay.run_rows(&rows, &asked)]
        };
        STEPS.iter().filter(|all| all[..size].iter().any(Option::is_some)).flat_map(turn).collect()
    })
}

#[test]
fn uneven_and_idle_replicas_match_one_device() {
    for name in ["qwen3_moe-plain-tied", "deepseek_v3-groups-yarn"] {
        let fixture = GoldenFixture::read(name);
        let alone = RankContext::alone();
        let mut replay = ModelHarness::load(&alone, &fixture, DType::F32);
        let row = SequenceRow::new(&mut replay, &fixture.tokens);
        let expected = replay.run(&[&row]);
        for size in [2, 4].into_iter().filter(|&size| model_harness::has_ranks(size)) {
            let sent = replicas(&fixture, size, ShardingMode::AllToAllReplicas, DType::F32);
            let gathered = replicas(&fixture, size, ShardingMode::AttentionReplicas, DType::F32);
            assert!(sent == gathered, "{name}, {size} replicas: gathered or sent");
            for (replica, found) in sent.iter().enumerate() {
                for (turn, found) in STEPS.iter().zip(found.chunks(2)) {
                    let (from, to) = turn[replica].unwrap_or_default();
                    check(&found[0], &expected[from..to]);
                    let asked: LogitRows = expected[from..to].iter().step_by(3).cloned().collect();
                    check(&found[1], &asked);
                }
            }
            let sent = replicas(&fixture, size, ShardingMode::AllToAllReplicas, DType::BF16);
            let gathered = replicas(&fixture, size, ShardingMode::AttentionReplicas, DType::BF16);
            assert!(sent == gathered, "{name}, {size} replicas in bf16: gathered or sent");
        }
    }
}

fn check(found: &[Vec<f32>], expected: &[Vec<f32>]) {
    assert_eq!(found.len(), expected.len());
    let worst = difference(found, expected);
    assert!(worst <= LOGIT_TOLERANCE, "logits differ by {worst}");
    assert!(found.iter().zip(expected).all(|(a, b)| top(a) == top(b)), "another token");
}

/// In some layer every token of a step is routed to one of the ranks, which has all of the work.
#[test]
fn all_tokens_may_route_to_one_rank() {
    const TOKENS: usize = 7;
    let fixture = GoldenFixture::read("qwen3_moe-plain-tied");
    let config = ModelConfig::from_json("config.json".as_ref(), &fixture.config).unwrap();
    let experts = config.moe.as_ref().unwrap().experts;
    for size in [2, 4].into_iter().filter(|&size| model_harness::has_ranks(size)) {
        let holder = |expert: &i32| *expert as usize / (experts / size);
        let alone = RankContext::alone();
        let mut replay = ModelHarness::load(&alone, &fixture, DType::F32);
        let crowds = |replay: &mut ModelHarness<'_>, token: i32| {
            let row = SequenceRow::new(replay, &[token]);
            let seen = replay.run_traced(&row);
            let one = |chosen: &[i32]| chosen.iter().all(|e| holder(e) == holder(&chosen[0]));
            seen.routes.iter().any(|layer| one(&layer[0])).then_some(seen.logits)
        };
        let found = (0..20).find_map(|token| Some((token, crowds(&mut replay, token)?)));
        let (token, expected) = found.expect("a token whose experts lie together");
        let run = |sharing| {
            run_ranks_each(size, sharing, HalfDtype::BF16, |place| {
                let mut replay = ModelHarness::load(place, &fixture, DType::F32);
                let rows: Vec<SequenceRow> =
                    (0..TOKENS).map(|_| SequenceRow::new(&mut replay, &[token])).collect();
                replay.run(&rows.iter().collect::<Vec<_>>())
            })
        };
        let sent = run(ShardingMode::AllToAllReplicas);
        assert!(sent == run(ShardingMode::AttentionReplicas), "{size} replicas: gathered or sent");
        let all = vec![expected[0].clone(); TOKENS];
        for found in &sent {
            check(found, &all);
        }
    }
}
