//! Parallel ranks: checks of the parallel configuration, communication groups, and their rendezvous.

use std::path::Path;
use std::sync::Arc;

use collectives::{CollectiveError, DeviceGroup, ParallelGroup, SharedMemoryGroup};
use kernels::gpu::GpuBackend;
use models::sharding::{ParallelRank, ParallelRanks};
use models::{ModelConfig, check_split};
use protocol::{ExecutorSettings, ExpertPlacement, ParallelConfig, Rank, StartupPhase};

use crate::rank_calls::CollectiveHistory;
use crate::{ExecutorError, StartupPhaseProgress};

/// Reason why a parallel configuration cannot be served.
#[derive(Debug, Clone, PartialEq, Eq, thiserror::Error)]
pub enum ParallelConfigError {
    /// The parallel configuration has no ranks, or the given rank is not below the number of ranks.
    #[error("rank {rank} is outside the world of {tp_size} x {dp_size} ranks")]
    Rank {
        /// Global rank that is not in the configuration.
        rank: u16,
        /// Number of tensor parallel ranks per replica.
        tp_size: u16,
        /// Number of data parallel replicas.
        dp_size: u16,
    },
    /// Expert parallelism is enabled for a model without experts.
    #[error("expert parallelism is enabled, but the model has no experts")]
    NoExperts,
    /// The checkpoint is a draft model, not a target model.
    #[error(
        "{architecture} is a draft model: set it as `model` in --speculative-config of its target model"
    )]
    DraftModelOnly {
        /// Architecture named in `config.json` of the checkpoint.
        architecture: &'static str,
    },
    /// Several ranks form communication groups, but no rendezvous memory (shared memory in which the ranks
    /// form the groups) is configured.
    #[error("{ranks} ranks of communication groups need rendezvous memory")]
    NoRendezvous {
        /// Number of ranks in the communication groups of this rank.
        ranks: u16,
    },
}

/// Checks that a model can be served with a parallel configuration. Called before the model is loaded.
///
/// Errors: the error names the setting that conflicts with the model, its value and the nearest valid values.
pub fn check_world(
    parallel: ParallelConfig,
    model: &ModelConfig,
    placement: Option<&ExpertPlacement>,
) -> Result<(), ExecutorError> {
    let ParallelConfig { tp_size, dp_size, expert_parallel } = parallel;
    let reject = |error: ParallelConfigError| Err(error.into());
    if tp_size == 0 || dp_size == 0 {
        return reject(ParallelConfigError::Rank { rank: 0, tp_size, dp_size });
    }
    if model.eagle.is_some() {
        return reject(ParallelConfigError::DraftModelOnly {
            architecture: model.architecture.name(),
        });
    }
    if expert_parallel && model.moe.is_none() {
        return reject(ParallelConfigError::NoExperts);
    }
    Ok(check_split(model, &ranks(parallel, Rank(0))?, placement)?)
}

/// Checks that a draft model can be served on the ranks of its target model, by the same rules as
/// [`check_world`]. For a draft model without experts, the expert parallelism setting is ignored.
pub fn check_draft_world(
    parallel: ParallelConfig,
    draft: &ModelConfig,
) -> Result<(), ExecutorError> {
    if draft.eagle.is_some() {
        return Ok(check_split(draft, &ranks(parallel, Rank(0))?, None)?);
    }
    let expert_parallel = parallel.expert_parallel && draft.moe.is_some();
    check_world(ParallelConfig { expert_parallel, ..parallel }, draft, None)
}

/// Returns the tensor parallel rank and the expert parallel rank of a global rank.
pub(crate) fn ranks(
    parallel: ParallelConfig,
    rank: Rank,
) -> Result<ParallelRanks, ParallelConfigError> {
    let ParallelConfig { tp_size, dp_size, expert_parallel } = parallel;
    if rank.0 >= parallel.world_size() {
        return Err(ParallelConfigError::Rank { rank: rank.0, tp_size, dp_size });
    }
    let tp = ParallelRank { rank: usize::from(rank.0 % tp_size), size: usize::from(tp_size) };
    let world =
        ParallelRank { rank: usize::from(rank.0), size: usize::from(parallel.world_size()) };
    Ok(ParallelRanks { tp, ep: if expert_parallel { world } else { ParallelRank::SINGLE } })
}

/// Whether this rank reports the outputs of its replica. All other ranks of the replica send only `StepDone`.
pub(crate) fn reports_outputs(settings: &ExecutorSettings) -> bool {
    settings.rank.0.is_multiple_of(settings.parallel.tp_size.max(1))
}

/// Joins the two communication groups of a rank: the TP group of its replica, and the DP group. The DP group
/// contains the ranks of all replicas that have the same TP rank. Replicas that share experts exchange tokens
/// in the DP group.
pub(crate) fn groups(
    settings: &ExecutorSettings,
    gpu: Option<&Arc<GpuBackend>>,
    progress: &mut dyn FnMut(StartupPhaseProgress),
) -> Result<[ParallelGroup; 2], ExecutorError> {
    let (parallel, rank) = (settings.parallel, settings.rank);
    let ParallelRanks { tp, .. } = ranks(parallel, rank)?;
    let replica = usize::from(rank.0 / parallel.tp_size);
    let dp_rank = ParallelRank { rank: replica, size: parallel.dp_size.into() };
    let dp = if parallel.lockstep() { dp_rank } else { ParallelRank::SINGLE };
    if tp.size == 1 && dp.size == 1 {
        return Ok([ParallelGroup::single(), ParallelGroup::single()]);
    }
    let phase = StartupPhase::Join;
    progress(StartupPhaseProgress { phase, done: 0, total: 1 });
    let no_rendezvous = ParallelConfigError::NoRendezvous { ranks: (tp.size * dp.size) as u16 };
    let path = settings.rendezvous.as_deref().ok_or(no_rendezvous)?;
    let rendezvous = collectives::SharedMemoryRendezvous::open(path, &sizes(parallel))?;
    let join = |group: usize,
                member: ParallelRank,
                one_shot_all_reduce: bool|
     -> Result<ParallelGroup, CollectiveError> {
        if member.size == 1 {
            return Ok(ParallelGroup::single());
        }
        let shared = rendezvous.join(group, member.rank)?;
        Ok(ParallelGroup::new(match gpu {
            Some(gpu) => Box::new(join_device_group(shared, gpu, one_shot_all_reduce)?),
            None => Box::new(shared),
        }))
    };
    let dp_group = usize::from(parallel.dp_size) + tp.rank;
    // The DP group needs no all-reduce: expert outputs are summed by reduce-scatter.
    let joined = [join(replica, tp, settings.one_shot_all_reduce)?, join(dp_group, dp, false)?];
    progress(StartupPhaseProgress { phase, done: 1, total: 1 });
    Ok(joined)
}

fn join_device_group(
    shared: SharedMemoryGroup,
    gpu: &Arc<GpuBackend>,
    one_shot_all_reduce: bool,
) -> Result<DeviceGroup, CollectiveError> {
    if !one_shot_all_reduce {
        return DeviceGroup::join_with_custom_all_reduce_limit(shared, gpu, 0);
    }
    let group = DeviceGroup::join(shared, gpu)?;
    if let Some(error) = group.peer_access_error() {
        tracing::warn!(%error, "one-shot all-reduce is disabled: small all-reduces use the collectives library");
    }
    Ok(group)
}

/// Returns the sizes of all communication groups: the TP group of each replica, then, if replicas share
/// experts, the DP group of each TP rank.
fn sizes(parallel: ParallelConfig) -> Vec<usize> {
    let [tp_size, dp_size] = [parallel.tp_size, parallel.dp_size].map(usize::from);
    let mut sizes = vec![tp_size; dp_size];
    if parallel.lockstep() {
        sizes.resize(dp_size + tp_size, dp_size);
    }
    sizes
}

/// Shared memory in which the ranks of a host form their communication groups. The engine owns the shared
/// memory and creates it anew each time it starts the ranks.
#[derive(Debug)]
pub struct RankRendezvous {
    memory: collectives::SharedMemoryRendezvous,
    parallel: ParallelConfig,
}

impl RankRendezvous {
    /// Creates the shared memory. Called before any rank is started.
    pub fn new(parallel: ParallelConfig) -> Result<Self, CollectiveError> {
        Ok(Self {
            memory: collectives::SharedMemoryRendezvous::create(&sizes(parallel))?,
            parallel,
        })
    }

    /// Path of the shared memory, for the ranks' `ExecutorSettings::rendezvous`. It is valid for processes of
    /// this host until `self` is dropped.
    #[must_use]
    pub fn path(&self) -> &Path {
        self.memory.path()
    }

    /// Makes the collective fail on all ranks that wait for other ranks in it.
    pub fn abort(&self) {
        self.memory.abort();
    }

    /// Returns the most recent collectives of every rank, finished or not. The rank with the lowest sequence
    /// number is the one for which the other ranks wait.
    #[must_use]
    pub fn calls(&self) -> Vec<CollectiveHistory> {
        let [tp_size, dp_size] = [self.parallel.tp_size, self.parallel.dp_size].map(usize::from);
        let rank = |axis, group, rank, of_world| CollectiveHistory {
            axis,
            rank: Rank(of_world as u16),
            calls: self.memory.call_history(group, rank),
        };
        let world = usize::from(self.parallel.world_size());
        let all = |shared: bool| (0..world).filter(move |_| shared);
        let tp = all(tp_size > 1).map(|r| rank("tp", r / tp_size, r % tp_size, r));
        let dp = all(self.parallel.lockstep());
        let dp = dp.map(|r| rank("dp", dp_size + r % tp_size, r / tp_size, r));
        tp.chain(dp).collect()
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn tp_ranks_of_a_replica_are_consecutive() {
        let parallel = ParallelConfig { tp_size: 2, dp_size: 3, expert_parallel: false };
        let ranks_of = |rank| ranks(parallel, Rank(rank)).unwrap();
        assert_eq!(ranks_of(3).tp, ParallelRank { rank: 1, size: 2 });
        assert_eq!(ranks_of(4).tp, ParallelRank { rank: 0, size: 2 });
        assert_eq!(ranks_of(4).ep, ParallelRank::SINGLE);
        let error = ranks(parallel, Rank(6)).unwrap_err().to_string();
        assert_eq!(error, "rank 6 is outside the world of 2 x 3 ranks");
        assert_eq!(sizes(parallel), [2, 2, 2]);
        assert_eq!(sizes(ParallelConfig { dp_size: 1, expert_parallel: true, ..parallel }), [2]);
        let ep_config = ParallelConfig { expert_parallel: true, ..parallel };
        assert_eq!(sizes(ep_config), [2, 2, 2, 3, 3]);
        let ParallelRanks { tp, ep } = ranks(ep_config, Rank(3)).unwrap();
        assert_eq!(
            (tp, ep),
            (ParallelRank { rank: 1, size: 2 }, ParallelRank { rank: 3, size: 6 })
        );
    }
}
