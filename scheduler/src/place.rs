//! Chooses the replica of a submit. Load is charged once and released once, whatever the ending.

use crate::{Routing, Submit};
use kvcache::{Content, KvCache};
use protocol::{BlockId, Replica};

/// Tokens that an outstanding request weighs besides its own.
const TOKENS_PER_REQUEST: u64 = 512;

/// Outstanding work of one replica.
#[derive(Debug, Clone, Copy, Default, PartialEq, Eq)]
pub(crate) struct Load {
    pub(crate) requests: u64,
    pub(crate) tokens: u64,
}

impl Load {
    pub(crate) fn charge(&mut self, tokens: u64) {
        self.requests += 1;
        self.tokens += tokens;
    }

    pub(crate) fn release(&mut self, tokens: u64) {
        self.requests -= 1;
        self.tokens -= tokens;
    }
}

/// What routing may know about a replica.
pub(crate) struct Candidate<'a> {
    pub(crate) ready: bool,
    pub(crate) load: Load,
    pub(crate) kv: &'a KvCache,
}

/// Rotates among equals; the only memory that routing has.
#[derive(Debug, Default)]
pub(crate) struct Placer {
    turn: usize,
    found: Vec<BlockId>,
}

impl Placer {
    /// The replica with the smallest cost, lost ones last, ties in turn.
    pub(crate) fn place(
        &mut self,
        submit: &Submit,
        routing: Routing,
        candidates: &[Candidate<'_>],
    ) -> Replica {
        if let Some(pinned) = submit.replica {
            return pinned;
        }
        let (turn, count) = (self.turn, candidates.len());
        let from_turn = (0..count).map(|i| (turn + i) % count);
        let best = from_turn.min_by_key(|&i| {
            let candidate = &candidates[i];
            (!candidate.ready, self.cost(submit, routing, candidate))
        });
        let best = best.expect("an engine has replicas");
        self.turn = best + 1;
        Replica(best as u16)
    }

    fn cost(&mut self, submit: &Submit, routing: Routing, candidate: &Candidate<'_>) -> u64 {
        let Load { requests, tokens } = candidate.load;
        match routing {
            Routing::Prefix => tokens + self.uncached(submit, candidate.kv),
            Routing::LeastTokens => tokens + TOKENS_PER_REQUEST * requests,
            Routing::LeastRequests => requests,
            Routing::RoundRobin => 0,
        }
    }

    fn uncached(&mut self, submit: &Submit, kv: &KvCache) -> u64 {
        self.found.clear();
        let (tokens, keys, extra) = (&submit.tokens, &submit.keys, submit.extra.as_ref());
        let hit = kv.match_prefix(Content { tokens, keys, extra }, &mut self.found);
        submit.tokens.len() as u64 - u64::from(hit.blocks * kv.block_tokens())
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use kvcache::{KvConfig, Table};
    use protocol::{KvGroup, KvKind, KvSpec};

    const BLOCK_TOKENS: u32 = 4;

    fn config() -> KvConfig {
        let group = KvGroup { layers: vec![0], kind: KvKind::Full, bytes_per_block: 1 };
        let spec = KvSpec { block_tokens: BLOCK_TOKENS, groups: vec![group] };
        KvConfig::new(spec, 16, [1, 2])
    }

    fn submit(tokens: u32, config: &KvConfig) -> Submit {
        Submit::greedy(1, (0..tokens).collect(), &config.hasher())
    }

    /// A cache that holds so many of the request's blocks.
    fn cache(config: &KvConfig, submit: &Submit, blocks: u32) -> KvCache {
        let mut kv = KvCache::new(config).unwrap();
        let mut table = Table::default();
        kv.grow(&mut table, blocks);
        let (tokens, keys) = (&submit.tokens[..], &submit.keys[..]);
        (0..blocks).for_each(|index| {
            kv.publish(&mut table, index, Content { tokens, keys, extra: None });
        });
        kv.free(&mut table);
        kv
    }

    #[test]
    fn the_cheapest_replica_that_is_there_is_chosen() {
        let config = config();
        let asked = submit(41, &config);
        // Requests and tokens outstanding, and blocks of the prompt that are cached there.
        let replicas = [(2, 100, 0), (1, 300, 0), (9, 110, 9)];
        let caches = replicas.map(|(_, _, blocks)| cache(&config, &asked, blocks));
        let chosen = |routing, ready: [bool; 3]| {
            let candidate = |i: usize| {
                let (requests, tokens, _) = replicas[i];
                Candidate { ready: ready[i], load: Load { requests, tokens }, kv: &caches[i] }
            };
            let candidates: Vec<_> = (0..3).map(candidate).collect();
            Placer::default().place(&asked, routing, &candidates).0
        };
        let all = [true; 3];
        assert_eq!(chosen(Routing::Prefix, all), 2, "100 + 41, 300 + 41, 110 + 41 - 36");
        assert_eq!(chosen(Routing::LeastTokens, all), 1, "1,124, 812 and 4,718");
        assert_eq!(chosen(Routing::LeastRequests, all), 1);
        assert_eq!(chosen(Routing::RoundRobin, all), 0);
        assert_eq!(chosen(Routing::LeastTokens, [true, false, true]), 0, "one is lost");
        assert_eq!(chosen(Routing::Prefix, [false; 3]), 2, "all are lost: the cheapest waits");
    }

    #[test]
    fn what_is_cached_weighs_as_much_as_what_is_outstanding() {
        let config = config();
        let asked = submit(41, &config);
        let caches = [0, 9].map(|blocks| cache(&config, &asked, blocks));
        let chosen = |tokens| {
            let loads = [Load::default(), Load { requests: 1, tokens }];
            let candidates = loads.iter().zip(&caches);
            let candidates = candidates.map(|(&load, kv)| Candidate { ready: true, load, kv });
            let candidates: Vec<_> = candidates.collect();
            Placer::default().place(&asked, Routing::Prefix, &candidates).0
        };
        assert_eq!(chosen(35), 1, "41 of an idle one, 35 + 41 - 36");
        assert_eq!(chosen(37), 0, "41, 37 + 41 - 36");
    }

    #[test]
    fn equals_take_turns() {
        let config = config();
        let asked = submit(9, &config);
        let kv = cache(&config, &asked, 0);
        let mut load = [Load::default(); 3];
        let mut placer = Placer::default();
        let mut next = |load: &[Load; 3], routing| {
            let candidate = |&load: &Load| Candidate { ready: true, load, kv: &kv };
            placer.place(&asked, routing, &load.iter().map(candidate).collect::<Vec<_>>()).0
        };
        let turns: Vec<_> = (0..4).map(|_| next(&load, Routing::RoundRobin)).collect();
        assert_eq!(turns, [0, 1, 2, 0]);
        load[1].charge(40);
        assert_eq!(next(&load, Routing::Prefix), 2, "its turn, but it is busy");
        load[1].release(40);
        assert_eq!([next(&load, Routing::Prefix), next(&load, Routing::Prefix)], [0, 1]);
    }
}
