//! Counters of prefix hits for each KV group: which group offers how much, and which group cuts a hit.

use crate::request::Request;
use kvcache::{KvCache, PrefixHit};
use protocol::{KvKind, KvSpec};

/// Counters of the prefix hits of admitted requests in one KV group, in tokens.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct KvGroupHitStats {
    /// Kind of the group.
    pub kind: KvKind,
    /// Tokens that the group alone could have given.
    pub offered: u64,
    /// Tokens of the hits. The number is the same in all groups, because a hit needs all of them.
    pub given: u64,
    /// Tokens by which hits were shortened because the group lacked a window or a checkpoint.
    pub missed: u64,
}

/// Counters of all KV groups of a replica; empty if all layers keep all positions in one group, in which case the
/// group gives all that it offers.
#[derive(Debug)]
pub(crate) struct KvGroupHits(Box<[KvGroupHitStats]>);

impl KvGroupHits {
    pub(crate) fn new(spec: &KvSpec) -> Self {
        let kinds = spec.groups.iter().map(|group| group.kind);
        let is_single = spec.groups.len() == 1 && kinds.clone().all(KvKind::keeps_all_positions);
        let new = |kind| KvGroupHitStats { kind, offered: 0, given: 0, missed: 0 };
        Self(if is_single { Box::default() } else { kinds.map(new).collect() })
    }

    /// Counts the prefix hit of an admitted request. No block may have been allocated since the lookup, because an
    /// allocation can evict blocks and checkpoints.
    pub(crate) fn count(&mut self, request: &Request, hit: PrefixHit, kv: &KvCache) {
        if self.0.is_empty() || !request.may_use_prefix_cache(kv) {
            return;
        }
        let tokens = |blocks: u32| u64::from(blocks) * u64::from(kv.block_tokens());
        for (group, stats) in (0..).zip(&mut self.0) {
            stats.offered += tokens(kv.blocks_offered(group, request.content(), hit));
            stats.given += tokens(hit.blocks);
            if hit.cut_by == Some(group) {
                stats.missed += tokens(hit.wanted - hit.blocks);
            }
        }
    }

    pub(crate) fn to_vec(&self) -> Vec<KvGroupHitStats> {
        self.0.to_vec()
    }
}
