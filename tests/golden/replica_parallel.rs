//! Data-parallel replicas that share experts; each replica has a separate batch of tokens. All-gather and
//! all-to-all must give equal bits, and the logits must match those of one device.

use device::gpu::HalfDtype;
use models::ModelConfig;
use ops::DType;

use crate::LOGIT_TOLERANCE;
use crate::fixture::GoldenFixture;
use crate::model_harness::{
    self, ModelHarness, RankContext, SequenceRow, ShardingMode, difference, run_ranks_each, top,
};

/// Logits of several tokens, one row per token.
type LogitRows = Vec<Vec<f32>>;

/// Range `[from, to)` of the fixture's tokens that a replica processes in a step; `None` if it has no token.
type ReplicaTokenRange = Option<(usize, usize)>;

/// Tokens of four replicas in three steps. In a step, some replicas have a long prompt while others have few
/// tokens or none.
const STEPS: [[ReplicaTokenRange; 4]; 3] = [
    [Some((0, 80)), Some((0, 1)), None, Some((0, 13))],
    [Some((80, 81)), Some((1, 50)), Some((0, 3)), None],
    [None, None, Some((3, 5)), None],
];

/// Runs each of the `STEPS` twice, with logits of all tokens and with logits of every third token only.
/// Returns the logits per replica and run.
fn replicas(
    fixture: &GoldenFixture,
    size: usize,
    sharing: ShardingMode,
    dtype: DType,
) -> Vec<Vec<LogitRows>> {
    run_ranks_each(size, sharing, HalfDtype::BF16, |rank_context| {
        let mut harness = ModelHarness::load(rank_context, fixture, dtype);
        let row = SequenceRow::new(&mut harness, &fixture.tokens);
        let run_step = |step: &[ReplicaTokenRange; 4]| {
            let most = step[..size].iter().flatten().map(|(from, to)| to - from).max();
            rank_context.set_max_tokens_of_any_rank(most.unwrap_or(0));
            let own = step[rank_context.replica()].map(|(from, to)| row.part(from, to - from));
            let rows: Vec<&SequenceRow> = own.iter().collect();
            let indices: Vec<i32> =
                (0..rows.iter().map(|row| row.len as i32).sum()).step_by(3).collect();
            [harness.run(&rows), harness.run_rows(&rows, &indices)]
        };
        STEPS
            .iter()
            .filter(|all| all[..size].iter().any(Option::is_some))
            .flat_map(run_step)
            .collect()
    })
}

#[test]
fn uneven_and_idle_replicas_match_one_device() {
    for name in ["qwen3_moe-plain-tied", "deepseek_v3-groups-yarn"] {
        let fixture = GoldenFixture::read(name);
        let single = RankContext::single();
        let mut harness = ModelHarness::load(&single, &fixture, DType::F32);
        let row = SequenceRow::new(&mut harness, &fixture.tokens);
        let expected = harness.run(&[&row]);
        for size in [2, 4].into_iter().filter(|&size| model_harness::has_ranks(size)) {
            let all_to_all = replicas(&fixture, size, ShardingMode::AllToAllReplicas, DType::F32);
            let gathered = replicas(&fixture, size, ShardingMode::AttentionReplicas, DType::F32);
            assert!(
                all_to_all == gathered,
                "{name}, {size} replicas: all-gather and all-to-all differ"
            );
            for (replica, found) in all_to_all.iter().enumerate() {
                for (step, found) in STEPS.iter().zip(found.chunks(2)) {
                    let (from, to) = step[replica].unwrap_or_default();
                    check(&found[0], &expected[from..to]);
                    let selected: LogitRows =
                        expected[from..to].iter().step_by(3).cloned().collect();
                    check(&found[1], &selected);
                }
            }
            let all_to_all = replicas(&fixture, size, ShardingMode::AllToAllReplicas, DType::BF16);
            let gathered = replicas(&fixture, size, ShardingMode::AttentionReplicas, DType::BF16);
            assert!(
                all_to_all == gathered,
                "{name}, {size} replicas in bf16: all-gather and all-to-all differ"
            );
        }
    }
}

fn check(found: &[Vec<f32>], expected: &[Vec<f32>]) {
    assert_eq!(found.len(), expected.len());
    let worst = difference(found, expected);
    assert!(worst <= LOGIT_TOLERANCE, "logits differ by {worst}");
    assert!(found.iter().zip(expected).all(|(a, b)| top(a) == top(b)), "argmax differs");
}

/// Extreme imbalance: in some layer, all tokens of a step are routed to experts of the same rank.
#[test]
fn all_tokens_may_route_to_one_rank() {
    const TOKENS: usize = 7;
    let fixture = GoldenFixture::read("qwen3_moe-plain-tied");
    let config = ModelConfig::from_json("config.json".as_ref(), &fixture.config).unwrap();
    let experts = config.moe.as_ref().unwrap().experts;
    for size in [2, 4].into_iter().filter(|&size| model_harness::has_ranks(size)) {
        let owner = |expert: &i32| *expert as usize / (experts / size);
        let single = RankContext::single();
        let mut harness = ModelHarness::load(&single, &fixture, DType::F32);
        let routes_to_one_rank = |harness: &mut ModelHarness<'_>, token: i32| {
            let row = SequenceRow::new(harness, &[token]);
            let trace = harness.run_traced(&row);
            let one = |chosen: &[i32]| chosen.iter().all(|e| owner(e) == owner(&chosen[0]));
            trace.routes.iter().any(|layer| one(&layer[0])).then_some(trace.logits)
        };
        let found =
            (0..20).find_map(|token| Some((token, routes_to_one_rank(&mut harness, token)?)));
        let (token, expected) = found.expect("a token with all its experts on one rank");
        let run = |sharing| {
            run_ranks_each(size, sharing, HalfDtype::BF16, |rank_context| {
                let mut harness = ModelHarness::load(rank_context, &fixture, DType::F32);
                let rows: Vec<SequenceRow> =
                    (0..TOKENS).map(|_| SequenceRow::new(&mut harness, &[token])).collect();
                harness.run(&rows.iter().collect::<Vec<_>>())
            })
        };
        let all_to_all = run(ShardingMode::AllToAllReplicas);
        assert!(
            all_to_all == run(ShardingMode::AttentionReplicas),
            "{size} replicas: all-gather and all-to-all differ"
        );
        let all = vec![expected[0].clone(); TOKENS];
        for found in &all_to_all {
            check(found, &all);
        }
    }
}
