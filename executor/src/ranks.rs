//! Parallel ranks: checks of the parallel configuration, communication groups, and their rendezvous.

use std::path::Path;
use std::sync::Arc;

use collectives::{
    CollectiveError, DeviceGroup, GroupMembership, HostMesh, MeshEndpoint, MeshListener,
    ParallelGroup, SharedMemoryGroup, SharedMemoryRendezvous,
};
use kernels::gpu::GpuBackend;
use models::sharding::{ParallelRank, ParallelRanks};
use models::{ModelConfig, check_split};
use protocol::{
    ExecutorSettings, ExpertPlacement, ParallelConfig, Rank, RankEndpoint, StartupPhase,
};

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
    /// The communication groups have ranks on several hosts, but the endpoints of the ranks cannot be exchanged.
    #[error("ranks on several hosts need a scheduler that exchanges their endpoints")]
    NoEndpointExchange,
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

/// Exchange of endpoints between the ranks that start together.
pub trait EndpointExchange {
    /// Sends the endpoint of this rank, and returns the endpoints of all ranks.
    ///
    /// Errors: the exchange is not possible, or the link to the scheduler failed.
    fn exchange(&mut self, own: RankEndpoint) -> Result<Vec<RankEndpoint>, ExecutorError>;
}

/// Exchange of ranks that are all on one host: there is none.
pub(crate) struct SingleHost;

impl EndpointExchange for SingleHost {
    fn exchange(&mut self, _: RankEndpoint) -> Result<Vec<RankEndpoint>, ExecutorError> {
        Err(ParallelConfigError::NoEndpointExchange.into())
    }
}

/// Communication groups of a rank.
pub(crate) struct RankGroups {
    /// TP group of the replica.
    pub(crate) tp: ParallelGroup,
    /// DP group: the ranks of all replicas that have the same TP rank. Replicas that share experts exchange tokens in it.
    pub(crate) dp: ParallelGroup,
}

/// Joins the communication groups of a rank.
pub(crate) fn groups(
    settings: &ExecutorSettings,
    gpu: Option<&Arc<GpuBackend>>,
    exchange: &mut dyn EndpointExchange,
    progress: &mut dyn FnMut(StartupPhaseProgress),
) -> Result<RankGroups, ExecutorError> {
    let parallel = settings.parallel;
    let memberships = memberships(parallel, settings.rank)?;
    if memberships.iter().flatten().count() == 0 {
        return Ok(RankGroups { tp: ParallelGroup::single(), dp: ParallelGroup::single() });
    }
    let phase = StartupPhase::Join;
    progress(StartupPhaseProgress { phase, done: 0, total: 1 });
    let no_rendezvous = ParallelConfigError::NoRendezvous { ranks: parallel.ranks_per_group() };
    let path = settings.rendezvous.as_deref().ok_or(no_rendezvous)?;
    let rendezvous = SharedMemoryRendezvous::open(path, &sizes(parallel))?;
    let joined = if let Some(host) = &settings.host_address {
        let mesh = host_mesh(settings, host, exchange)?;
        let joined: Vec<GroupMembership> = memberships.iter().flatten().cloned().collect();
        rendezvous.join_across_hosts(&mesh, &joined)?
    } else {
        let own = usize::from(settings.rank.0);
        let join = |membership: &GroupMembership| {
            let rank = membership.members.iter().position(|&member| member == own);
            rendezvous.join(membership.group, rank.unwrap_or_default())
        };
        memberships.iter().flatten().map(join).collect::<Result<_, _>>()?
    };
    // Peer memory reaches the GPUs of one host only. The DP group needs no all-reduce: expert outputs are summed by reduce-scatter.
    let one_shot = settings.one_shot_all_reduce && settings.host_address.is_none();
    let mut joined = joined.into_iter();
    let [tp, dp] = memberships.map(|membership| membership.and_then(|_| joined.next()));
    let groups =
        RankGroups { tp: parallel_group(tp, gpu, one_shot)?, dp: parallel_group(dp, gpu, false)? };
    progress(StartupPhaseProgress { phase, done: 1, total: 1 });
    Ok(groups)
}

/// TP and DP group of a rank; `None` = the group would have one rank.
fn memberships(
    parallel: ParallelConfig,
    rank: Rank,
) -> Result<[Option<GroupMembership>; 2], ParallelConfigError> {
    let ParallelRanks { tp, .. } = ranks(parallel, rank)?;
    let [tp_size, dp_size] = [parallel.tp_size, parallel.dp_size].map(usize::from);
    let replica = usize::from(rank.0) / tp_size;
    let replica_ranks = (replica * tp_size..(replica + 1) * tp_size).collect();
    let same_tp_rank = (0..dp_size).map(|replica| replica * tp_size + tp.rank).collect();
    let of =
        |is_group: bool, group, members| is_group.then_some(GroupMembership { group, members });
    Ok([
        of(tp_size > 1, replica, replica_ranks),
        of(parallel.lockstep(), dp_size + tp.rank, same_tp_rank),
    ])
}

/// Exchanges the endpoints of the ranks of all hosts. `host` is the name or address of this host.
fn host_mesh(
    settings: &ExecutorSettings,
    host: &str,
    exchange: &mut dyn EndpointExchange,
) -> Result<HostMesh, ExecutorError> {
    let listener = MeshListener::bind(host)?;
    let MeshEndpoint { address, token } = listener.endpoint().clone();
    let endpoints = exchange.exchange(RankEndpoint { rank: settings.rank, address, token })?;
    let by_rank = endpoints.into_iter().map(|RankEndpoint { rank, address, token }| {
        (usize::from(rank.0), MeshEndpoint { address, token })
    });
    let (per_host, rank) = (settings.ranks_on_host.into(), settings.rank.0.into());
    Ok(HostMesh::new(listener, by_rank.collect(), per_host, rank))
}

/// Returns the group with the transport of the device.
fn parallel_group(
    shared: Option<SharedMemoryGroup>,
    gpu: Option<&Arc<GpuBackend>>,
    one_shot_all_reduce: bool,
) -> Result<ParallelGroup, CollectiveError> {
    let Some(shared) = shared else { return Ok(ParallelGroup::single()) };
    Ok(ParallelGroup::new(match gpu {
        Some(gpu) => Box::new(join_device_group(shared, gpu, one_shot_all_reduce)?),
        None => Box::new(shared),
    }))
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
