//! Health of the ranks of a device group, and completion of the calls that this rank launched.
//!
//! Launches return before they complete. After the failure of a rank, the devices of all other ranks would
//! wait in a collective forever, so a watchdog thread monitors the ranks and aborts operations in flight.

use std::panic::{AssertUnwindSafe, catch_unwind};
use std::sync::atomic::Ordering::{Relaxed, SeqCst};
use std::sync::atomic::{AtomicBool, AtomicU32};
use std::sync::{Arc, Mutex, PoisonError};
use std::thread::{self, JoinHandle};
use std::time::Duration;

use device::SharedMemory;

use crate::collective_call::CALL_WORDS;
use crate::communicator::GpuCommunicator;
use crate::peer_memory::PeerMemory;
use crate::peer_waiter::{abort_group, check_not_aborted, process_has_exited};
use crate::shared_layout::{CALL_HISTORY_LEN, GroupLayout, RankFlag};
use crate::{CallState, CollectiveCall, CollectiveError};

/// Interval of the watchdog's checks.
const CHECK_INTERVAL: Duration = Duration::from_millis(50);

/// Health of the group of a rank, shared by all threads of its process.
#[derive(Debug)]
pub(crate) struct GroupHealth {
    memory: Arc<SharedMemory>,
    layout: GroupLayout,
    rank: usize,
    failure: Mutex<Option<CollectiveError>>,
    /// Sequence number of the last call that the device is known to have completed.
    done_calls: AtomicU32,
}

/// Calls that a rank had launched in its group at some point in time.
#[derive(Debug)]
pub struct LaunchCheckpoint {
    health: Arc<GroupHealth>,
    /// Sequence number of the newest call.
    sequence: u32,
}

/// Watchdog thread of the ranks; it ends when this value is dropped.
#[derive(Debug)]
pub(crate) struct GroupWatchdog {
    pub(crate) health: Arc<GroupHealth>,
    stopped: Arc<AtomicBool>,
    thread: Option<JoinHandle<()>>,
}

impl GroupHealth {
    pub(crate) fn new(memory: Arc<SharedMemory>, layout: GroupLayout, rank: usize) -> Self {
        Self { memory, layout, rank, failure: Mutex::default(), done_calls: AtomicU32::new(0) }
    }

    /// Errors: the group has failed on this rank, or a peer has aborted it. The device of an aborted peer may
    /// since have sent undefined data to this device.
    pub(crate) fn check(&self) -> Result<(), CollectiveError> {
        match &*self.failure.lock().unwrap_or_else(PoisonError::into_inner) {
            Some(error) => Err(error.clone()),
            None => check_not_aborted(self.memory.words(), &self.layout),
        }
    }

    /// Stores a failure and returns the stored one; the first failure is kept.
    pub(crate) fn fail(&self, error: CollectiveError) -> CollectiveError {
        let mut failure = self.failure.lock().unwrap_or_else(PoisonError::into_inner);
        failure.get_or_insert(error).clone()
    }

    /// Errors: a rank has failed, or the group was aborted.
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

    /// Marks all calls up to `sequence` as completed by the device.
    fn mark_done_up_to(&self, sequence: u32) {
        let done = self.done_calls.swap(sequence, SeqCst);
        // Sequence numbers wrap around; steps complete in order.
        let new = sequence.wrapping_sub(done).min(CALL_HISTORY_LEN as u32);
        for age in (0..new).rev() {
            let sequence = sequence.wrapping_sub(age);
            let record = &self.memory.words()[self.layout.call_record(self.rank, sequence)];
            if record[..CALL_WORDS][0].load(Relaxed) == sequence {
                CollectiveCall { state: CallState::Done, ..CollectiveCall::read(record) }
                    .write(record);
            }
        }
    }
}

impl LaunchCheckpoint {
    pub(crate) fn new(health: &Arc<GroupHealth>, sequence: u32) -> Self {
        Self { health: Arc::clone(health), sequence }
    }

    /// Must be called after the device has completed the calls, and before any of their results is used.
    ///
    /// Errors: the group has failed; the results are undefined.
    pub fn finish(&self) -> Result<(), CollectiveError> {
        self.health.check()?;
        self.health.mark_done_up_to(self.sequence);
        Ok(())
    }
}

impl GroupWatchdog {
    /// Starts to monitor the ranks; aborts all waits of `communicator` and `peers` after a rank has failed.
    pub(crate) fn start(
        health: &Arc<GroupHealth>,
        communicator: &Arc<GpuCommunicator>,
        peers: Option<&Arc<PeerMemory>>,
    ) -> Result<Self, CollectiveError> {
        let stopped = Arc::new(AtomicBool::new(false));
        let (watched, stop_flag) = (Arc::clone(health), Arc::clone(&stopped));
        let (communicator, peers) = (Arc::clone(communicator), peers.cloned());
        let watch = move || {
            let first_failure = || {
                while !stop_flag.load(SeqCst) {
                    let checked = watched.check_peers().and_then(|()| Ok(communicator.is_ready()?));
                    if let Err(error) = checked {
                        return Some(error);
                    }
                    thread::park_timeout(CHECK_INTERVAL);
                }
                None
            };
            let failure = catch_unwind(AssertUnwindSafe(first_failure))
                .unwrap_or(Some(CollectiveError::WatchdogPanicked));
            let Some(error) = failure else { return };
            // The failure is published to this rank and to its peers before the device continues, so that no
            // rank uses the results of an aborted collective.
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

impl Drop for GroupWatchdog {
    fn drop(&mut self) {
        self.stopped.store(true, SeqCst);
        if let Some(thread) = self.thread.take() {
            thread.thread().unpark();
            // A panic of the thread has been reported by the panic hook.
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
        let checkpoint = LaunchCheckpoint::new(&health[0], 0);
        checkpoint.finish().unwrap();
        // Rank 1 detects the failure of rank 2; rank 0 has not checked yet.
        abort_group(health[1].memory.words(), &health[1].layout, 1, &rank_failed);
        assert_eq!(checkpoint.finish(), Err(rank_failed.clone()));
        assert_eq!(health[0].check_peers(), Err(rank_failed));
    }
}
