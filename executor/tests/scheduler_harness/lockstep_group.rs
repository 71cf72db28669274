//! Ranks of a replica, and replicas that run in lockstep.

use super::scripted_bitmasks::ScriptedBitmaskSource;
use crate::deadlines::DeadlineBarrier;
use executor::{Executor, ExecutorConfig, RankRendezvous};
use protocol::{Batch, ParallelConfig, Rank, StepOutput};
use std::sync::atomic::AtomicU32;
use std::sync::atomic::Ordering::SeqCst;
use std::sync::mpsc::{Receiver, Sender, channel};
use std::thread;

/// Sets the configuration of one rank. Emulated ranks are threads of this process; each has its own device of
/// the emulator library.
pub(super) fn take_rank(config: &mut ExecutorConfig, rank: Rank) {
    config.settings.rank = rank;
    let world_size = config.settings.parallel.world_size();
    if let Some(libraries) = config.settings.libraries.as_mut().filter(|_| world_size > 1) {
        libraries.collectives = Some(libraries.driver.clone());
        // Each rank has a GPU of its own.
        config.settings.ranks_on_host = world_size;
    }
}

/// A rank of a replica other than the first rank. It runs the same batches as the first rank, on its own
/// thread.
pub(super) struct FollowerRank {
    pub(super) batches: Sender<(Batch, ScriptedBitmaskSource)>,
    pub(super) outputs: Receiver<StepOutput>,
}

impl FollowerRank {
    pub(super) fn start(mut config: ExecutorConfig, rank: Rank, blocks: u32) -> Self {
        take_rank(&mut config, rank);
        let (batches, todo) = channel::<(Batch, ScriptedBitmaskSource)>();
        let (done, outputs) = channel();
        thread::spawn(move || {
            let mut executor = Executor::load(config, &mut |_| {}).unwrap();
            executor.size_kv(blocks, &mut |_| {}).unwrap();
            for (batch, mut masks) in todo {
                let submitted = executor.submit_with_bitmasks(&batch, &mut masks).unwrap();
                if done.send(submitted.finish().unwrap()).is_err() {
                    return;
                }
            }
        });
        Self { batches, outputs }
    }
}

/// Group of replicas that run in lockstep. In each step, the replicas agree on the maximum numbers of rows
/// and tokens.
pub(crate) struct LockstepGroup {
    pub(super) parallel: ParallelConfig,
    pub(crate) rendezvous: RankRendezvous,
    barrier: DeadlineBarrier,
    max: AtomicU32,
}

impl LockstepGroup {
    /// Creates the group for the replicas of a configuration.
    pub(crate) fn new(config: &ExecutorConfig) -> Self {
        let parallel = config.settings.parallel;
        let (rendezvous, barrier) =
            (RankRendezvous::new(parallel).unwrap(), DeadlineBarrier::new(parallel.dp_size.into()));
        Self { parallel, rendezvous, barrier, max: AtomicU32::new(0) }
    }

    /// Returns the maximum of the values of all replicas, at least 1. Blocks until all replicas have called
    /// it.
    pub(crate) fn agree(&self, value: u32) -> u32 {
        self.agree_from(value).max(1) // The scheduler never sends a step without tokens in any replica; this harness does.
    }

    /// Returns the maximum of the values of all replicas, possibly 0. Blocks until all replicas have called
    /// it.
    pub(super) fn agree_from(&self, value: u32) -> u32 {
        self.max.fetch_max(value, SeqCst);
        self.barrier.wait();
        let max = self.max.load(SeqCst);
        if self.barrier.wait() {
            self.max.store(0, SeqCst);
        }
        self.barrier.wait();
        max
    }
}
