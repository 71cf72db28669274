//! Tests of plans for models with window groups.

use super::*;

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
    let plan = plan(&scenario.state, &scenario.kv, &scenario.limits, StepPlan::default());
    scenario.render(&plan)
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
