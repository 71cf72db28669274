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
        let count = candidates.len();
        let turn = self.turn % count;
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
