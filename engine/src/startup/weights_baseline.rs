//! Digests of the weights loaded in the first start, compared with the digests of later starts and of other
//! ranks.

use protocol::{ParallelConfig, Rank, WeightsDigest};
use std::collections::BTreeMap;
use std::fmt;
use std::hash::{DefaultHasher, Hasher};

/// Weight digests of the ranks of a server, recorded at the first start of each rank.
#[derive(Debug, Clone)]
pub struct WeightsDigestBaseline {
    parallel: ParallelConfig,
    by_rank: BTreeMap<u16, WeightsDigest>,
}

/// Digest conflict: two ranks, or two starts of one rank, loaded different weights although the weights must
/// be the same.
#[derive(Debug, Clone, Copy, PartialEq, Eq, thiserror::Error)]
#[error("the digest of {part} is {theirs:016x}, but rank {} has {ours:016x}", other.0)]
pub struct DigestConflict {
    /// Part of the weights with conflicting digests.
    pub part: WeightsDigestPart,
    /// Digest of the rank that has just loaded its weights.
    pub theirs: u64,
    /// Rank whose recorded digest conflicts. It is the rank that has just loaded its weights if the digest of
    /// the previous start of this rank differs.
    pub other: Rank,
    /// Recorded digest of the rank `other`.
    pub ours: u64,
}

/// Field of [`WeightsDigest`] that conflicts.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum WeightsDigestPart {
    /// `common`: weights that all ranks load.
    Common,
    /// `sharded`: weights of one tensor-parallel rank.
    Sharded,
    /// `experts`: weights of the experts that a rank loads.
    Experts,
}

impl fmt::Display for WeightsDigestPart {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str(match self {
            Self::Common => "the weights that all ranks load",
            Self::Sharded => "the weights of this tensor-parallel rank",
            Self::Experts => "the experts of this rank",
        })
    }
}

impl WeightsDigestBaseline {
    /// Creates a baseline without digests.
    pub fn new(parallel: ParallelConfig) -> Self {
        Self { parallel, by_rank: BTreeMap::new() }
    }

    /// Compares the digests of a rank with all recorded digests, and records them if the rank has no recorded
    /// digests.
    ///
    /// Errors: two digests that must be equal differ; the rank's own previous digests are compared first.
    pub fn admit(&mut self, rank: Rank, digest: WeightsDigest) -> Result<(), DigestConflict> {
        let own = self.by_rank.get_key_value(&rank.0);
        for (&other, recorded) in own.into_iter().chain(&self.by_rank) {
            self.compare(rank, digest, Rank(other), *recorded)?;
        }
        self.by_rank.entry(rank.0).or_insert(digest);
        Ok(())
    }

    fn compare(
        &self,
        rank: Rank,
        digest: WeightsDigest,
        other: Rank,
        recorded: WeightsDigest,
    ) -> Result<(), DigestConflict> {
        let same = |part, theirs, ours| {
            if theirs == ours { Ok(()) } else { Err(DigestConflict { part, theirs, other, ours }) }
        };
        same(WeightsDigestPart::Common, digest.common, recorded.common)?;
        let tp_size = self.parallel.tp_size.max(1);
        let same_tp_rank = rank.0 % tp_size == other.0 % tp_size;
        if same_tp_rank {
            same(WeightsDigestPart::Sharded, digest.sharded, recorded.sharded)?;
        }
        if if self.parallel.expert_parallel { rank == other } else { same_tp_rank } {
            same(WeightsDigestPart::Experts, digest.experts, recorded.experts)?;
        }
        Ok(())
    }

    /// Returns a hash of all loaded weights. It depends on the sharding of the weights but not on the number
    /// of replicas, unless the replicas share experts.
    pub fn fingerprint(&self) -> u64 {
        let ParallelConfig { tp_size, dp_size, expert_parallel: experts } = self.parallel;
        let ranks = if experts { tp_size * dp_size } else { tp_size };
        let mut hasher = DefaultHasher::new();
        for digest in self.by_rank.range(..ranks).map(|(_, digest)| digest) {
            for part in [digest.common, digest.sharded, digest.experts] {
                hasher.write_u64(part);
            }
        }
        hasher.finish()
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn digest(common: u64, sharded: u64, experts: u64) -> WeightsDigest {
        WeightsDigest { common, sharded, experts }
    }

    /// Digest of the weights that a rank has loaded.
    #[derive(Debug, Clone, Copy)]
    struct RankDigest {
        rank: Rank,
        digest: WeightsDigest,
    }

    fn on_rank(rank: u16, digest: WeightsDigest) -> RankDigest {
        RankDigest { rank: Rank(rank), digest }
    }

    /// Records the digests `loaded`, in order, in a baseline of two replicas with two ranks each; returns the
    /// fingerprint of the baseline. `experts`: whether expert parallelism is enabled.
    fn admitted(experts: bool, loaded: &[RankDigest]) -> Result<u64, DigestConflict> {
        let mut baseline = WeightsDigestBaseline::new(ParallelConfig {
            tp_size: 2,
            dp_size: 2,
            expert_parallel: experts,
        });
        for RankDigest { rank, digest } in loaded {
            baseline.admit(*rank, *digest)?;
        }
        Ok(baseline.fingerprint())
    }

    #[test]
    fn replicas_agree_rank_by_rank() {
        let [first, second] = [digest(1, 2, 3), digest(1, 4, 5)];
        let all = [on_rank(0, first), on_rank(1, second), on_rank(2, first), on_rank(3, second)];
        assert!(admitted(false, &all).is_ok());
        let swapped = [on_rank(0, first), on_rank(1, second), on_rank(2, second)];
        let conflict = admitted(false, &swapped).unwrap_err();
        assert_eq!((conflict.part, conflict.other), (WeightsDigestPart::Sharded, Rank(0)));
        assert_eq!(
            conflict.to_string(),
            "the digest of the weights of this tensor-parallel rank is 0000000000000004, \
             but rank 0 has 0000000000000002"
        );
        let experts = [on_rank(0, first), on_rank(2, digest(1, 2, 9))];
        assert_eq!(admitted(false, &experts).unwrap_err().part, WeightsDigestPart::Experts);
    }

    #[test]
    fn all_ranks_agree_on_common_weights() {
        let conflict = admitted(false, &[on_rank(0, digest(1, 2, 3)), on_rank(1, digest(9, 4, 5))])
            .unwrap_err();
        assert_eq!(
            (conflict.part, conflict.theirs, conflict.ours),
            (WeightsDigestPart::Common, 9, 1)
        );
    }

    #[test]
    fn expert_parallel_ranks_have_experts_of_their_own() {
        let all =
            [on_rank(0, digest(1, 2, 3)), on_rank(1, digest(1, 4, 5)), on_rank(2, digest(1, 2, 6))];
        assert!(admitted(true, &all).is_ok());
        let again = [all[0], all[1], all[2], on_rank(2, digest(1, 2, 7))];
        let conflict = admitted(true, &again).unwrap_err();
        assert_eq!((conflict.part, conflict.other), (WeightsDigestPart::Experts, Rank(2)));
    }

    #[test]
    fn restart_is_compared_with_the_first_start() {
        let first = digest(1, 2, 3);
        assert!(
            admitted(false, &[on_rank(0, first), on_rank(0, first), on_rank(0, first)]).is_ok()
        );
        for changed in [digest(9, 2, 3), digest(1, 9, 3), digest(1, 2, 9)] {
            let conflict = admitted(false, &[on_rank(0, first), on_rank(0, changed)]).unwrap_err();
            assert_eq!((conflict.theirs, conflict.other), (9, Rank(0)));
        }
    }

    #[test]
    fn fingerprint_follows_every_digest_of_a_replica() {
        let all = |sharded| [on_rank(0, digest(1, 2, 3)), on_rank(1, digest(1, sharded, 5))];
        let first = admitted(false, &all(4)).unwrap();
        assert_ne!(admitted(false, &all(6)).unwrap(), first);
        // A second replica with the same weights does not change the fingerprint.
        let more = [all(4)[0], all(4)[1], on_rank(2, digest(1, 2, 3)), on_rank(3, digest(1, 4, 5))];
        assert_eq!(admitted(false, &more).unwrap(), first);
    }
}
