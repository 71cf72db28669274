//! Chooses the replica of a submission, and counts the waiting and running (outstanding) requests and their
//! prompt tokens for each replica.

use crate::{RequestSubmission, RoutingPolicy};
use kvcache::{KvCache, SequenceContent};
use protocol::{BlockId, Replica};

/// Cost of a waiting or running request in tokens, in addition to its number of prompt tokens, under
/// `RoutingPolicy::LeastTokens`.
const TOKENS_PER_REQUEST: u64 = 512;

/// Number of waiting and running requests of one replica, and the total number of their prompt tokens.
#[derive(Debug, Clone, Copy, Default, PartialEq, Eq)]
pub(crate) struct ReplicaLoad {
    pub(crate) requests: u64,
    pub(crate) tokens: u64,
}

impl ReplicaLoad {
    pub(crate) fn charge(&mut self, tokens: u64) {
        self.requests += 1;
        self.tokens += tokens;
    }

    pub(crate) fn release(&mut self, tokens: u64) {
        self.requests -= 1;
        self.tokens -= tokens;
    }
}

/// State of a replica that routing reads.
pub(crate) struct ReplicaCandidate<'a> {
    pub(crate) ready: bool,
    pub(crate) load: ReplicaLoad,
    pub(crate) kv: &'a KvCache,
}

/// Router state: the round-robin position, and a scratch buffer for the blocks of prefix hits.
#[derive(Debug, Default)]
pub(crate) struct ReplicaRouter {
    next_replica: usize,
    hit_blocks: Vec<BlockId>,
}

impl ReplicaRouter {
    /// Returns the replica with the lowest cost. Failed replicas come last; replicas with equal cost are
    /// chosen in turn.
    pub(crate) fn route(
        &mut self,
        submit: &RequestSubmission,
        routing: RoutingPolicy,
        candidates: &[ReplicaCandidate<'_>],
    ) -> Replica {
        if let Some(pinned) = submit.replica {
            return pinned;
        }
        let (first, count) = (self.next_replica, candidates.len());
        let rotated = (0..count).map(|i| (first + i) % count);
        let best = rotated.min_by_key(|&i| {
            let candidate = &candidates[i];
            (!candidate.ready, self.cost(submit, routing, candidate))
        });
        let best = best.expect("the number of replicas is at least 1");
        self.next_replica = best + 1;
        Replica(best as u16)
    }

    fn cost(
        &mut self,
        submit: &RequestSubmission,
        routing: RoutingPolicy,
        candidate: &ReplicaCandidate<'_>,
    ) -> u64 {
        let ReplicaLoad { requests, tokens } = candidate.load;
        match routing {
            RoutingPolicy::Prefix => tokens + self.uncached_tokens(submit, candidate.kv),
            RoutingPolicy::LeastTokens => tokens + TOKENS_PER_REQUEST * requests,
            RoutingPolicy::LeastRequests => requests,
            RoutingPolicy::RoundRobin => 0,
        }
    }

    fn uncached_tokens(&mut self, submit: &RequestSubmission, kv: &KvCache) -> u64 {
        self.hit_blocks.clear();
        let (tokens, block_keys, extra_keys) =
            (&submit.tokens, &submit.block_keys, submit.extra_keys.as_ref());
        let hit = kv
            .match_prefix(SequenceContent { tokens, block_keys, extra_keys }, &mut self.hit_blocks);
        submit.tokens.len() as u64 - u64::from(hit.blocks * kv.block_tokens())
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use kvcache::{BlockTables, KvConfig, TableEntries};
    use protocol::{KvGroup, KvKind, KvSpec};

    const BLOCK_TOKENS: u32 = 4;

    fn config() -> KvConfig {
        let group = KvGroup { layers: vec![0], kind: KvKind::Full, bytes_per_block: 1 };
        let spec = KvSpec { block_tokens: BLOCK_TOKENS, groups: vec![group] };
        KvConfig::new(spec, 16, [1, 2])
    }

    fn submit(tokens: u32, config: &KvConfig) -> RequestSubmission {
        RequestSubmission::greedy(1, (0..tokens).collect(), &config.block_hasher())
    }

    /// Builds a cache that holds the first `blocks` blocks of the request.
    fn cache(config: &KvConfig, submit: &RequestSubmission, blocks: u32) -> KvCache {
        let mut kv = KvCache::new(config).unwrap();
        let mut tables = BlockTables::default();
        kv.grow(&mut tables, TableEntries::all(blocks));
        let (tokens, block_keys) = (&submit.tokens[..], &submit.block_keys[..]);
        (0..blocks).for_each(|index| {
            let content = SequenceContent { tokens, block_keys, extra_keys: None };
            kv.publish(&mut tables, 0, index, content);
        });
        kv.free(&mut tables);
        kv
    }

    #[test]
    fn cheapest_ready_replica_is_chosen() {
        let config = config();
        let request = submit(41, &config);
        // Each entry: number of outstanding requests, number of outstanding tokens, number of cached blocks
        // of the prompt.
        let replicas = [(2, 100, 0), (1, 300, 0), (9, 110, 9)];
        let caches = replicas.map(|(_, _, blocks)| cache(&config, &request, blocks));
        let chosen = |routing, ready: [bool; 3]| {
            let candidate = |i: usize| {
                let (requests, tokens, _) = replicas[i];
                ReplicaCandidate {
                    ready: ready[i],
                    load: ReplicaLoad { requests, tokens },
                    kv: &caches[i],
                }
            };
            let candidates: Vec<_> = (0..3).map(candidate).collect();
            ReplicaRouter::default().route(&request, routing, &candidates).0
        };
        let all = [true; 3];
        assert_eq!(chosen(RoutingPolicy::Prefix, all), 2, "100 + 41, 300 + 41, 110 + 41 - 36");
        assert_eq!(chosen(RoutingPolicy::LeastTokens, all), 1, "1,124, 812 and 4,718");
        assert_eq!(chosen(RoutingPolicy::LeastRequests, all), 1);
        assert_eq!(chosen(RoutingPolicy::RoundRobin, all), 0);
        let without_second = [true, false, true];
        assert_eq!(chosen(RoutingPolicy::LeastTokens, without_second), 0, "replica 1 has failed");
        let none = [false; 3];
        assert_eq!(chosen(RoutingPolicy::Prefix, none), 2, "all have failed: the lowest cost wins");
    }

    #[test]
    fn cached_tokens_offset_outstanding_tokens() {
        let config = config();
        let request = submit(41, &config);
        let caches = [0, 9].map(|blocks| cache(&config, &request, blocks));
        let chosen = |tokens| {
            let loads = [ReplicaLoad::default(), ReplicaLoad { requests: 1, tokens }];
            let candidates = loads.iter().zip(&caches);
            let candidates =
                candidates.map(|(&load, kv)| ReplicaCandidate { ready: true, load, kv });
            let candidates: Vec<_> = candidates.collect();
            ReplicaRouter::default().route(&request, RoutingPolicy::Prefix, &candidates).0
        };
        assert_eq!(chosen(35), 1, "41 on the idle replica, 35 + 41 - 36 on the other");
        assert_eq!(chosen(37), 0, "41 on the idle replica, 37 + 41 - 36 on the other");
    }

    #[test]
    fn equal_replicas_take_turns() {
        let config = config();
        let request = submit(9, &config);
        let kv = cache(&config, &request, 0);
        let mut load = [ReplicaLoad::default(); 3];
        let mut router = ReplicaRouter::default();
        let mut next = |load: &[ReplicaLoad; 3], routing| {
            let candidate = |&load: &ReplicaLoad| ReplicaCandidate { ready: true, load, kv: &kv };
            router.route(&request, routing, &load.iter().map(candidate).collect::<Vec<_>>()).0
        };
        let turns: Vec<_> = (0..4).map(|_| next(&load, RoutingPolicy::RoundRobin)).collect();
        assert_eq!(turns, [0, 1, 2, 0]);
        load[1].charge(40);
        assert_eq!(next(&load, RoutingPolicy::Prefix), 2, "replica 1 is next, but it has load");
        load[1].release(40);
        assert_eq!(
            [next(&load, RoutingPolicy::Prefix), next(&load, RoutingPolicy::Prefix)],
            [0, 1]
        );
    }
}
