//! Tests of plans for models with window groups.

use super::*;
use crate::KvGroupHitStats;

/// Adds a running request with `computed` computed tokens to a scenario with a window group; its block tables have
/// entries for all known tokens and, in the window group, for the computed tokens.
fn run_windowed(scenario: &mut PlanScenario, entry: &str, config: &SchedulerConfig) {
    let entry = parse_request(entry);
    let mut request = request(&entry, u64::from(entry.name), config);
    let kv = &mut scenario.kv;
    let entries = TableEntries {
        kept: kv.blocks_for(entry.known_len),
        windowed: kv.blocks_for(entry.computed),
    };
    request.grow_tables(entries, kv);
    request.computed_tokens = entry.computed;
    request.seq_slot = Some(scenario.state.take_sequence_slot());
    if entry.non_preemptible {
        let in_flight = config.limits.request_tokens_in_flight();
        let total = config.kv.spec.blocks_of_request(request.limit, in_flight);
        request.reserved_blocks = total - kv.blocks_to_grow(TableEntries::default(), entries);
        scenario.state.reserved_blocks += request.reserved_blocks;
    }
    let key = request.cold_fields.queue_key;
    let slot = scenario.state.requests.insert(request);
    scenario.state.running.insert(key, slot);
}

/// Plans a step of running requests in a pool of `blocks` blocks of four tokens, with a group that keeps all positions
/// and a group with a window of 16 tokens. Chunks have at most four tokens.
fn plan_windowed(blocks: u32, running: &[&str]) -> String {
    let mut scenario = scenario("step=8 chunk=4 free=1 |");
    let group = |kind| KvGroup { layers: vec![0], kind, bytes_per_block: 1 };
    let groups = vec![group(KvKind::Full), group(KvKind::Window { tokens: 16 })];
    let kv = KvConfig::new(KvSpec { block_tokens: 4, groups }, blocks, [1, 2]);
    scenario.kv = KvCache::new(&kv).unwrap();
    let config = SchedulerConfig::new(scenario.limits.clone(), kv);
    for entry in running {
        run_windowed(&mut scenario, entry, &config);
    }
    let plan = plan(&scenario.state, &scenario.kv, &scenario.limits, None, StepPlan::default());
    scenario.render(&plan)
}

/// Admits `entry` while 8 tokens of its prompt are cached in the group that keeps all positions, but no block in the
/// window group. `change` is applied to the request.
fn hits_without_window(entry: &str, change: impl FnOnce(&mut Request)) -> Vec<KvGroupHitStats> {
    let mut scenario = scenario("free=1 |");
    let group = |kind| KvGroup { layers: vec![0], kind, bytes_per_block: 1 };
    let groups = vec![group(KvKind::Full), group(KvKind::Window { tokens: 6 })];
    let kv = KvConfig::new(KvSpec { block_tokens: 4, groups }, 100, [1, 2]);
    scenario.kv = KvCache::new(&kv).unwrap();
    scenario.state = ReplicaRequests::new(Replica(0), 16, &kv);
    let config = SchedulerConfig::new(scenario.limits.clone(), kv);
    let mut tables = scenario.fill(&tokens(b'a', 8), 8);
    scenario.kv.free(&mut tables);
    let mut request = request(&parse_request(entry), 100, &config);
    change(&mut request);
    scenario.state.enqueue(request);
    let plan = plan(&scenario.state, &scenario.kv, &scenario.limits, None, StepPlan::default());
    assert_eq!(plan.admit.len(), 1);
    commit(&mut scenario.state, &mut scenario.kv, &plan, 0);
    scenario.state.kv_group_hits.to_vec()
}

#[test]
fn group_without_window_is_counted_as_the_cutting_one() {
    let of = |hits: Vec<KvGroupHitStats>| -> Vec<[u64; 3]> {
        hits.iter().map(|group| [group.offered, group.given, group.missed]).collect()
    };
    assert_eq!(of(hits_without_window("a 0/9", |_| {})), [[8, 0, 0], [0, 0, 8]]);
    assert_eq!(of(hits_without_window("b 0/9", |_| {})), [[0; 3]; 2], "another prompt");
    // A request that needs the logprobs of its prompt looks nothing up.
    let with_logprobs = |request: &mut Request| {
        request.cold_fields.params.sampling.prompt_logprobs = Some(1);
    };
    assert_eq!(of(hits_without_window("a 0/9", with_logprobs)), [[0; 3]; 2]);
}

#[test]
fn chunks_allocate_their_window_blocks() {
    // `a` holds 7 + 2 blocks and needs another one for its chunk.
    assert_eq!(plan_windowed(10, &["a 8/28"]), "run a[8,12)");
    // `b` holds 4 + 1 blocks. It is preempted for the chunk of `a`, although its own chunk would need a block too.
    assert_eq!(plan_windowed(15, &["a 8/28", "b 4/16"]), "run a[8,12)");
    assert_eq!(plan_windowed(14, &["a 8/28", "b 4/16"]), "run a[8,12) preempt b");
}

#[test]
fn chunks_with_reserve_are_planned_after_one_without_blocks() {
    // `b` holds 4 + 1 blocks and reserves 7 for up to 24 tokens, so that `a` lacks a block.
    assert_eq!(plan_windowed(21, &["a 8/28", "b! 4/16"]), "run b[4,8)");
    assert_eq!(plan_windowed(22, &["a 8/28", "b! 4/16"]), "run a[8,12) b[4,8)");
}
