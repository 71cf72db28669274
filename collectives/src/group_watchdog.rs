//! Watchdog thread of a device group, which detects failed ranks, and [`LaunchedCollectives`], which confirms
//! that the device has completed the calls that this rank launched.
//!
//! Collective calls return before the device has completed them. If a rank failed, the devices of all other
//! ranks would wait in a collective operation forever. A watchdog thread therefore monitors the ranks, and
//! aborts the operations in flight after a failure.

use std::panic::{AssertUnwindSafe, catch_unwind};
use std::sync::atomic::Ordering::{Relaxed, SeqCst};
use std::sync::atomic::{AtomicBool, AtomicU32};
use std::sync::{Arc, Mutex, PoisonError};
use std::thread::{self, JoinHandle};
use std::time::Duration;

use device::HostSharedMemory;

use crate::collective_call::CALL_WORDS;
use crate::communicator::GpuCommunicator;
use crate::peer_memory::PeerMemory;
use crate::peer_waiter::{abort_group, check_not_aborted, process_has_exited};
use crate::shared_layout::{CALL_HISTORY_LEN, GroupMemoryLayout, RankFlag};
use crate::{CollectiveCall, CollectiveCallState, CollectiveError};

/// Interval at which the watchdog thread checks whether ranks have failed.
const CHECK_INTERVAL: Duration = Duration::from_millis(50);

/// Failure state of a group, shared by all threads of this rank's process.
#[derive(Debug)]
pub(crate) struct GroupHealth {
    memory: Arc<HostSharedMemory>,
    layout: GroupMemoryLayout,
    rank: usize,
    failure: Mutex<Option<CollectiveError>>,
    /// Sequence number of the last call for which completion on the device has been confirmed.
    done_calls: AtomicU32,
}

/// The collective calls that a rank had launched when this value was created. `finish` confirms that they
/// have completed.
#[derive(Debug)]
pub struct LaunchedCollectives {
    health: Arc<GroupHealth>,
    /// Sequence number of the newest collective call that this value covers.
    sequence: u32,
}

/// Watchdog thread that monitors the ranks of a group. The thread ends when this value is dropped.
#[derive(Debug)]
pub(crate) struct GroupWatchdog {
    pub(crate) health: Arc<GroupHealth>,
    stopped: Arc<AtomicBool>,
    thread: Option<JoinHandle<()>>,
}

impl GroupHealth {
    pub(crate) fn new(
        memory: Arc<HostSharedMemory>,
        layout: GroupMemoryLayout,
        rank: usize,
    ) -> Self {
        Self { memory, layout, rank, failure: Mutex::default(), done_calls: AtomicU32::new(0) }
    }

    /// Checks whether the group has failed.
    ///
    /// Errors: the group has failed on this rank, or another rank has aborted the group. After an abort, this
    /// device may have received undefined data from the device of the other rank.
    pub(crate) fn check(&self) -> Result<(), CollectiveError> {
        match &*self.failure.lock().unwrap_or_else(PoisonError::into_inner) {
            Some(error) => Err(error.clone()),
            None => check_not_aborted(self.memory.words(), &self.layout),
        }
    }

    /// Stores `error` unless a failure of the group has already been stored. Returns the stored failure.
    pub(crate) fn fail(&self, error: CollectiveError) -> CollectiveError {
        let mut failure = self.failure.lock().unwrap_or_else(PoisonError::into_inner);
        failure.get_or_insert(error).clone()
    }

    /// Checks the flags of the other ranks in shared memory, and whether their processes are alive.
    ///
    /// Errors: another rank has left the group or its process has exited, or the group was aborted.
    pub(crate) fn check_peers(&self) -> Result<(), CollectiveError> {
        let words = self.memory.words();
        check_not_aborted(words, &self.layout)?;
        for rank in (0..self.layout.size).filter(|&rank| rank != self.rank) {
            let flag = |flag| words[self.layout.rank_flag(rank, flag)].load(SeqCst);
            if flag(RankFlag::HasLeft) != 0 || process_has_exited(flag(RankFlag::ProcessId)) {
                return Err(CollectiveError::RankFailed { rank });
            }
        }
        Ok(())
    }

    /// Sets the state of this rank's call records to completed, up to the sequence number `sequence`.
    fn mark_done_up_to(&self, sequence: u32) {
        let done = self.done_calls.swap(sequence, SeqCst);
        // Sequence numbers wrap around, so the difference is computed modulo 2³². Completion is always
        // confirmed in launch order.
        let new = sequence.wrapping_sub(done).min(CALL_HISTORY_LEN as u32);
        for age in (0..new).rev() {
            let sequence = sequence.wrapping_sub(age);
            let record = &self.memory.words()[self.layout.call_record(self.rank, sequence)];
            if record[..CALL_WORDS][0].load(Relaxed) == sequence {
                CollectiveCall { state: CollectiveCallState::Done, ..CollectiveCall::read(record) }
                    .write(record);
            }
        }
    }
}

impl LaunchedCollectives {
    pub(crate) fn new(health: &Arc<GroupHealth>, sequence: u32) -> Self {
        Self { health: Arc::clone(health), sequence }
    }

    /// Records in shared memory that the calls which this value covers have completed. Must be called after
    /// the device has completed these calls, and before any of their results are used.
    ///
    /// Errors: the group has failed, so that the results are undefined.
    pub fn finish(&self) -> Result<(), CollectiveError> {
        self.health.check()?;
        self.health.mark_done_up_to(self.sequence);
        Ok(())
    }
}

impl GroupWatchdog {
    /// Starts to monitor the ranks. If a rank fails, the watchdog thread aborts all waits of `communicator`
    /// and `peers`.
    pub(crate) fn start(
        health: &Arc<GroupHealth>,
        communicator: &Arc<GpuCommunicator>,
        peers: Option<&Arc<PeerMemory>>,
    ) -> Result<Self, CollectiveError> {
        let stopped = Arc::new(AtomicBool::new(false));
        let (watched, stop_flag) = (Arc::clone(health), Arc::clone(&stopped));
        let (communicator, peers) = (Arc::clone(communicator), peers.cloned());
        let watch = move || {
            let first_failure = || wait_for_failure(&watched, &communicator, &stop_flag);
            let failure = catch_unwind(AssertUnwindSafe(first_failure))
                .unwrap_or(Some(CollectiveError::WatchdogPanicked));
            let Some(error) = failure else { return };
            // The failure is stored for this rank and for the other ranks before the device continues, so
            // that no rank uses the results of an aborted collective operation.
            let error = watched.fail(error);
            abort_group(watched.memory.words(), &watched.layout, watched.rank, &error);
            if let Some(peers) = &peers {
                peers.abort();
            }
            communicator.abort();
        };
        let thread = thread::Builder::new().name("rank-watchdog".to_owned()).spawn(watch);
        let thread =
            thread.map_err(|error| CollectiveError::WatchdogStart { error: error.to_string() })?;
        Ok(Self { health: Arc::clone(health), stopped, thread: Some(thread) })
    }
}

/// Checks the ranks and the communicator every `CHECK_INTERVAL`, and returns the first failure; `None` if the
/// watchdog was stopped.
fn wait_for_failure(
    health: &GroupHealth,
    communicator: &GpuCommunicator,
    stopped: &AtomicBool,
) -> Option<CollectiveError> {
    while !stopped.load(SeqCst) {
        let checked = health.check_peers().and_then(|()| Ok(communicator.is_ready()?));
        if let Err(error) = checked {
            return Some(error);
        }
        thread::park_timeout(CHECK_INTERVAL);
    }
    None
}

impl Drop for GroupWatchdog {
    #[expect(clippy::disallowed_methods, reason = "the thread was asked to stop and woken")]
    fn drop(&mut self) {
        self.stopped.store(true, SeqCst);
        if let Some(thread) = self.thread.take() {
            thread.thread().unpark();
            // The panic hook has already reported a panic of the thread.
            let _ = thread.join();
        }
    }
}

#[cfg(test)]
#[allow(clippy::unwrap_used, reason = "a test that cannot go on panics")]
mod tests {
    use super::*;
    use crate::SharedMemoryRendezvous;

    #[test]
    fn results_after_an_abort_by_a_peer_are_rejected() {
        let rendezvous = SharedMemoryRendezvous::create(&[3]).unwrap();
        let group = |rank| rendezvous.join(0, rank).unwrap();
        let (groups, rank_failed) =
            ([group(0), group(1), group(2)], CollectiveError::RankFailed { rank: 2 });
        let health: Vec<_> = groups.iter().map(|group| Arc::new(group.health())).collect();
        let checkpoint = LaunchedCollectives::new(&health[0], 0);
        checkpoint.finish().unwrap();
        // Rank 1 has detected the failure of rank 2; rank 0 has not checked the ranks yet.
        abort_group(health[1].memory.words(), &health[1].layout, 1, &rank_failed);
        assert_eq!(checkpoint.finish(), Err(rank_failed.clone()));
        assert_eq!(health[0].check_peers(), Err(rank_failed));
    }
}
