//! Where an executor stands among the ranks of its world, and how they meet.

use crate::rank_calls::RankCalls;
use crate::{ExecutorError, Progress};
use collectives::{CollectiveError, DeviceGroup, Group, SharedGroup};
use kernels::hip::HipDevice;
use models::sharding::{Part, Ranks};
use models::{Config, check_split};
use protocol::{ExpertPlacement, Parallel, Phase, Rank, Settings};
use std::path::Path;
use std::sync::Arc;

/// A world that cannot be served.
#[derive(Debug, Clone, PartialEq, Eq, thiserror::Error)]
pub enum WorldError {
    /// No ranks at all, or one that is not among them.
    #[error("rank {rank} is none of {tp_size} x {dp_size} ranks")]
    Rank {
        /// The rank.
        rank: u16,
        /// Ranks that share every layer.
        tp_size: u16,
        /// Replicas.
        dp_size: u16,
    },
    /// Nothing to spread.
    #[error("expert parallelism was asked for, but the model has no experts")]
    NoExperts,
    /// A checkpoint without a model.
    #[error(
        "{architecture} drafts for another model, which --speculative-config does not name: it names what drafts"
    )]
    DraftsOnly {
        /// The checkpoint's.
        architecture: &'static str,
    },
    /// Nobody said where the ranks meet.
    #[error("{ranks} ranks that share layers need shared memory to meet in")]
    NoMeeting {
        /// Ranks that share something with this one.
        ranks: u16,
    },
}

/// Checks that a model can be served by such a world, before anything is loaded.
///
/// Errors: what is in the way, with the numbers and the nearest ones that work.
pub fn check_world(
    parallel: Parallel,
    model: &Config,
    placement: Option<&ExpertPlacement>,
) -> Result<(), ExecutorError> {
    let Parallel { tp_size, dp_size, experts } = parallel;
    let refused = |error: WorldError| Err(error.into());
    if tp_size == 0 || dp_size == 0 {
        return refused(WorldError::Rank { rank: 0, tp_size, dp_size });
    }
    if model.eagle.is_some() {
        return refused(WorldError::DraftsOnly { architecture: model.architecture.name() });
    }
    if experts && model.moe.is_none() {
        return refused(WorldError::NoExperts);
    }
    Ok(check_split(model, &ranks(parallel, Rank(0))?, placement)?)
}

/// The same for what drafts for a model, whose ranks it shares: without experts none are held whole.
pub fn check_draft_world(parallel: Parallel, draft: &Config) -> Result<(), ExecutorError> {
    if draft.eagle.is_some() {
        return Ok(check_split(draft, &ranks(parallel, Rank(0))?, None)?);
    }
    let experts = parallel.experts && draft.moe.is_some();
    check_world(Parallel { experts, ..parallel }, draft, None)
}

/// The part of the model that a rank holds.
pub(crate) fn ranks(parallel: Parallel, rank: Rank) -> Result<Ranks, WorldError> {
    let Parallel { tp_size, dp_size, experts } = parallel;
    if rank.0 >= parallel.world_size() {
        return Err(WorldError::Rank { rank: rank.0, tp_size, dp_size });
    }
    let tp = Part { rank: usize::from(rank.0 % tp_size), size: usize::from(tp_size) };
    let world = Part { rank: usize::from(rank.0), size: usize::from(parallel.world_size()) };
    Ok(Ranks { tp, ep: if experts { world } else { Part::ALONE } })
}

/// Whether this rank's answers are those of its replica; the others only say that they are done.
pub(crate) fn answers(settings: &Settings) -> bool {
    settings.rank.0.is_multiple_of(settings.parallel.tp_size.max(1))
}

/// The groups of a rank: those who share its layers, and those in the same place of other replicas, with whom it
/// shares experts.
pub(crate) fn groups(
    settings: &Settings,
    gpu: Option<&Arc<HipDevice>>,
    progress: &mut dyn FnMut(Progress),
) -> Result<[Group; 2], ExecutorError> {
    let (parallel, rank) = (settings.parallel, settings.rank);
    let Ranks { tp, .. } = ranks(parallel, rank)?;
    let replica = usize::from(rank.0 / parallel.tp_size);
    let all = Part { rank: replica, size: parallel.dp_size.into() };
    let dp = if parallel.lockstep() { all } else { Part::ALONE };
    if tp.size == 1 && dp.size == 1 {
        return Ok([Group::single(), Group::single()]);
    }
    let phase = Phase::Join;
    progress(Progress { phase, done: 0, total: 1 });
    let no_meeting = WorldError::NoMeeting { ranks: (tp.size * dp.size) as u16 };
    let path = settings.meeting.as_deref().ok_or(no_meeting)?;
    let meeting = collectives::Meeting::open(path, &sizes(parallel))?;
    let join = |group: usize, part: Part, sums: bool| -> Result<Group, CollectiveError> {
        if part.size == 1 {
            return Ok(Group::single());
        }
        let shared = meeting.join(group, part.rank)?;
        Ok(Group::new(match gpu {
            Some(gpu) => Box::new(on_gpus(shared, gpu, sums)?),
            None => Box::new(shared),
        }))
    };
    let across = usize::from(parallel.dp_size) + tp.rank;
    // Across replicas nothing is summed but for experts, by scattering.
    let joined = [join(replica, tp, settings.one_shot_sums)?, join(across, dp, false)?];
    progress(Progress { phase, done: 1, total: 1 });
    Ok(joined)
}

fn on_gpus(
    shared: SharedGroup,
    gpu: &Arc<HipDevice>,
    one_shot_sums: bool,
) -> Result<DeviceGroup, CollectiveError> {
    if !one_shot_sums {
        return DeviceGroup::join_summing(shared, gpu, 0);
    }
    let group = DeviceGroup::join(shared, gpu)?;
    if let Some(error) = group.apart() {
        tracing::warn!(%error, "small sums of ranks go the slower way, through the library");
    }
    Ok(group)
}

/// Sizes of the groups of a world: those of the replicas, then, if these share experts, those of the ranks in the same
/// place of each.
fn sizes(parallel: Parallel) -> Vec<usize> {
    let [tp_size, dp_size] = [parallel.tp_size, parallel.dp_size].map(usize::from);
    let mut sizes = vec![tp_size; dp_size];
    if parallel.lockstep() {
        sizes.resize(dp_size + tp_size, dp_size);
    }
    sizes
}

/// The memory in which the ranks of a world meet, as whoever starts them holds it. Each generation of ranks needs a
/// new one.
#[derive(Debug)]
pub struct Meeting {
    memory: collectives::Meeting,
    parallel: Parallel,
}

impl Meeting {
    /// Memory in which nobody has come yet.
    pub fn new(parallel: Parallel) -> Result<Self, CollectiveError> {
        Ok(Self { memory: collectives::Meeting::create(&sizes(parallel))?, parallel })
    }

    /// What `Settings::meeting` of the ranks is: good for processes of this host, for as long as this value lives.
    #[must_use]
    pub fn path(&self) -> &Path {
        self.memory.path()
    }

    /// Makes every rank that waits for others fail.
    pub fn abort(&self) {
        self.memory.abort();
    }

    /// The last collectives of every rank, whatever state it is in: who is behind shows in their numbers.
    #[must_use]
    pub fn calls(&self) -> Vec<RankCalls> {
        let [tp_size, dp_size] = [self.parallel.tp_size, self.parallel.dp_size].map(usize::from);
        let rank = |axis, group, rank, of_world| RankCalls {
            axis,
            rank: Rank(of_world as u16),
            calls: self.memory.calls(group, rank),
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
    fn ranks_of_a_replica_come_one_after_the_other() {
        let parallel = Parallel { tp_size: 2, dp_size: 3, experts: false };
        let place = |rank| ranks(parallel, Rank(rank)).unwrap();
        assert_eq!(place(3).tp, Part { rank: 1, size: 2 });
        assert_eq!(place(4).tp, Part { rank: 0, size: 2 });
        assert_eq!(place(4).ep, Part::ALONE);
        let error = ranks(parallel, Rank(6)).unwrap_err().to_string();
        assert_eq!(error, "rank 6 is none of 2 x 3 ranks");
        assert_eq!(sizes(parallel), [2, 2, 2]);
        assert_eq!(sizes(Parallel { dp_size: 1, experts: true, ..parallel }), [2]);
        let spread = Parallel { experts: true, ..parallel };
        assert_eq!(sizes(spread), [2, 2, 2, 3, 3]);
        let Ranks { tp, ep } = ranks(spread, Rank(3)).unwrap();
        assert_eq!((tp, ep), (Part { rank: 1, size: 2 }, Part { rank: 3, size: 6 }));
    }
}
