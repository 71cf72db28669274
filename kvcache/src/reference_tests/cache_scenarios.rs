//! Tests of single operations of the cache.

use super::*;

/// Runs `ops` on a cache of four blocks, and compares block tables, free count and cached blocks (least
/// recently used first) with `expected`.
fn check(ops: &[&str], expected: &Expect) {
    let mut config = config(64);
    config.blocks = 4;
    let mut kv = KvCache::new(&config).expect("a valid configuration");
    let mut tables: BTreeMap<char, BlockTables> = BTreeMap::new();
    for op in ops {
        let (verb, block_name) = op.split_once(' ').expect("`verb name`");
        let name = block_name.chars().next().expect("a name");
        let tokens = vec![u32::from(name); BLOCK_TOKENS as usize + 1];
        let mut keys = Vec::new();
        config.block_hasher().extend_keys(&mut keys, &tokens, None);
        let content = SequenceContent { tokens: &tokens, block_keys: &keys, extra_keys: None };
        let table = tables.entry(name).or_default();
        match verb {
            "allocate" => {
                let entries = table.iter().map(BlockTable::len).sum::<u32>() + 1;
                kv.grow(table, TableEntries::all(entries));
            }
            "publish" => {
                assert_eq!(kv.publish(table, 0, 0, content), PrefixCacheInsertOutcome::Stored);
            }
            "free" => kv.free(table),
            "hit" => {
                let mut found = Vec::new();
                let hit = kv.match_prefix(content, &mut found);
                kv.pin(table, hit.blocks, &found);
            }
            verb => panic!("unknown verb {verb}"),
        }
    }
    expected.assert_eq(show(&kv, &tables).trim());
}

/// Returns the blocks of each table in `tables`, the free count and the cached blocks as text.
fn show(kv: &KvCache, tables: &BTreeMap<char, BlockTables>) -> String {
    let references = tables.iter().flat_map(|(name, table)| {
        let blocks = table.iter().flat_map(BlockTable::held);
        blocks.map(move |block| format!("{name}={}", block.0))
    });
    let references: Vec<String> = references.collect();
    let cached: Vec<String> = kv.evictable_blocks().map(|block| block.0.to_string()).collect();
    let free = kv.counts().free;
    format!("{} | free {free} | cached {}", references.join(" "), cached.join(" "))
}

#[test]
fn lru_eviction_order() {
    // Free blocks are allocated before cached blocks, lowest id first. A block that is freed without being
    // registered in the prefix index becomes free again.
    check(
        &["allocate a", "allocate b", "free a", "allocate c"],
        &expect!["b=1 c=0 | free 2 | cached"],
    );
    // An indexed block becomes cached when it is freed, and is not evicted while a free block is available.
    let ab = ["allocate a", "publish a", "allocate b", "publish b", "free a", "free b"];
    check(&ab, &expect!["| free 2 | cached 0 1"]);
    check(&[&ab[..], &["allocate c"]].concat(), &expect!["c=2 | free 1 | cached 0 1"]);
    // A cached block that is hit leaves the LRU list. When it is freed again, it is the most recently used
    // block.
    check(&[&ab[..], &["hit a"]].concat(), &expect!["a=0 | free 2 | cached 1"]);
    check(&[&ab[..], &["hit a", "free a"]].concat(), &expect!["| free 2 | cached 1 0"]);
    // If no block is free, the least recently used cached block is evicted.
    let full = [&ab[..], &["hit a", "free a", "allocate c", "allocate c", "allocate d"]].concat();
    check(&full, &expect!["c=2 c=3 d=1 | free 0 | cached 0"]);
}

#[test]
fn tables_are_evicted_leaf_first() {
    let config = config(64);
    let mut kv = KvCache::new(&config).expect("a valid configuration");
    let tokens: Vec<Token> = (0..6).collect();
    let mut keys = Vec::new();
    config.block_hasher().extend_keys(&mut keys, &tokens, None);
    let content = SequenceContent { tokens: &tokens, block_keys: &keys, extra_keys: None };
    let mut tables = BlockTables::default();
    kv.grow(&mut tables, TableEntries::all(3));
    for index in [0, 1, 0, 2] {
        assert_eq!(
            kv.publish(&mut tables, 0, index, content),
            PrefixCacheInsertOutcome::Stored,
            "also when repeated"
        );
    }
    assert_eq!((kv.published_blocks(), tables.is_empty()), (3, false));
    kv.free(&mut tables);
    assert!(tables.is_empty());
    kv.take_events();
    kv.grow(&mut tables, TableEntries::all(BLOCKS));
    let removed: Vec<BlockHash> = keys.iter().rev().map(|key| key.hash).collect();
    assert_eq!(kv.take_events(), [KvEvent::Removed { hashes: removed, group: 0 }]);
}

#[test]
fn publishing_stops_at_an_unindexed_parent() {
    let config = config(64);
    let mut kv = KvCache::new(&config).expect("a valid configuration");
    let tokens: Vec<Token> = (0..4).collect();
    let mut keys = Vec::new();
    config.block_hasher().extend_keys(&mut keys, &tokens, None);
    let content = SequenceContent { tokens: &tokens, block_keys: &keys, extra_keys: None };
    let mut tables = BlockTables::default();
    kv.grow(&mut tables, TableEntries::all(2));
    assert_eq!(kv.publish(&mut tables, 0, 0, content), PrefixCacheInsertOutcome::Stored);
    kv.clear();
    assert_eq!(
        kv.publish(&mut tables, 0, 1, content),
        PrefixCacheInsertOutcome::Rejected,
        "the parent is not indexed"
    );
    kv.check([&tables].into_iter());
}

#[test]
fn lifetimes_are_sampled_only_for_cached_blocks() {
    let run = |lifetime_sample, caching| {
        let config = KvConfig { caching, lifetime_sample, ..config(64) };
        let mut kv = KvCache::new(&config).expect("a valid configuration");
        let mut lifetimes = 0;
        for n in 0..1_000 {
            let tokens = vec![n; BLOCK_TOKENS as usize];
            let mut keys = Vec::new();
            config.block_hasher().extend_keys(&mut keys, &tokens, None);
            let content = SequenceContent { tokens: &tokens, block_keys: &keys, extra_keys: None };
            let mut tables = BlockTables::default();
            kv.grow(&mut tables, TableEntries::all(1));
            if caching {
                assert_eq!(
                    kv.publish(&mut tables, 0, 0, content),
                    PrefixCacheInsertOutcome::Stored
                );
            }
            kv.free(&mut tables);
            lifetimes += kv.take_lifetimes().len();
        }
        lifetimes
    };
    assert_eq!((run(None, true), run(LifetimeSampleRate::new(1.0), false)), (0, 0));
    let evicted = 1_000 - BLOCKS as usize;
    assert_eq!(run(LifetimeSampleRate::new(1.0), true), evicted);
    let half = run(LifetimeSampleRate::new(0.5), true);
    assert!((evicted * 4 / 10..evicted * 6 / 10).contains(&half), "{half} of {evicted}");
}

/// Checks that cached blocks of a request with another cache salt do not match, even if a submitter computed
/// the block keys with the wrong salt.
#[test]
fn prefix_hit_requires_equal_extra_keys() {
    let config = config(64);
    let mut kv = KvCache::new(&config).expect("a valid configuration");
    let tokens = [1; BLOCK_TOKENS as usize + 1];
    let [salt, other_salt] = ["own", "other"].map(|salt| ExtraKeys::salted(Some(salt.to_owned())));
    let mut keys = Vec::new();
    config.block_hasher().extend_keys(&mut keys, &tokens, salt.as_deref());
    let content = |extra| SequenceContent { tokens: &tokens, block_keys: &keys, extra_keys: extra };
    let mut tables = BlockTables::default();
    kv.grow(&mut tables, TableEntries::all(1));
    assert_eq!(
        kv.publish(&mut tables, 0, 0, content(salt.as_ref())),
        PrefixCacheInsertOutcome::Stored
    );
    let hits = [salt.as_ref(), other_salt.as_ref(), None]
        .map(|extra| kv.match_prefix(content(extra), &mut Vec::new()).blocks);
    assert_eq!(hits, [1, 0, 0]);
}

#[test]
fn events_are_recorded_only_when_enabled() {
    let run = |events| {
        let config = KvConfig { events, ..config(64) };
        let mut kv = KvCache::new(&config).expect("a valid configuration");
        let tokens = [1; BLOCK_TOKENS as usize];
        let mut keys = Vec::new();
        config.block_hasher().extend_keys(&mut keys, &tokens, None);
        let content = SequenceContent { tokens: &tokens, block_keys: &keys, extra_keys: None };
        let mut tables = BlockTables::default();
        for _ in 0..2 {
            kv.grow(&mut tables, TableEntries::all(1));
            assert_eq!(kv.publish(&mut tables, 0, 0, content), PrefixCacheInsertOutcome::Stored);
            kv.free(&mut tables);
            kv.grow(&mut tables, TableEntries::all(BLOCKS)); // Evicts the block.
            kv.free(&mut tables);
        }
        kv.clear();
        kv.take_events().len()
    };
    assert_eq!([true, false].map(run), [5, 0], "stored and evicted twice, then cleared");
}
