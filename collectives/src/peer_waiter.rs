//! Waiting for another rank in a shared memory collective. Collectives run in rounds: in a round, all ranks
//! exchange one chunk of data. Until the other rank has reached a round, the waiter polls briefly, then
//! sleeps, and periodically checks that the process of the other rank is alive.
//!
//! If there are more ranks than CPU cores, the waiter sleeps without polling, because the other rank may need
//! the core.

use crate::rendezvous::ABORTED_BY_CREATOR;
use crate::shared_layout::{GroupMemoryLayout, RankFlag};
use crate::{CollectiveCall, CollectiveError};
use rustix::event::{PollFd, PollFlags, poll};
use rustix::io::Errno;
use rustix::process::{Pid, PidfdFlags, pidfd_open};
use rustix::thread::futex;
use rustix::time::Timespec;
use std::hint::spin_loop;
use std::sync::atomic::AtomicU32;
use std::sync::atomic::Ordering::{Acquire, Relaxed, SeqCst};
use std::thread::available_parallelism;
use std::time::{Duration, Instant};

/// Number of polls before the first sleep, if there is a CPU core for every rank. The polls take about 20 µs,
/// which is the cost of a futex sleep and wake-up.
const SPINS: u32 = 1_000;
/// Longest sleep between two checks that the process of the other rank is alive.
const SLEEP_INTERVAL: Timespec = Timespec { tv_sec: 0, tv_nsec: 50_000_000 };
/// Timeout of the first round (exchange of one chunk between all ranks). Ranks reach the first round after
/// they have loaded their weights, so the timeout includes start-up.
const FIRST_ROUND_TIMEOUT: Duration = Duration::from_mins(10);
/// Timeout of every later round (exchange of one chunk between all ranks). This is a fallback: normally the
/// supervisor of the executors detects a stalled step earlier.
const ROUND_TIMEOUT: Duration = Duration::from_mins(1);

/// Waits for other ranks on behalf of one rank; stores the number of polls before a sleep.
#[derive(Debug)]
pub(crate) struct PeerWaiter {
    spins: u32,
}

impl PeerWaiter {
    /// Creates the waiter for one rank in a group of `size` ranks.
    pub(crate) fn new(size: usize) -> Self {
        let cores = available_parallelism().map_or(1, usize::from);
        Self { spins: if cores >= size { SPINS } else { 0 } }
    }

    /// Blocks until rank `peer` has reached the round (exchange of one chunk) with the number `round`; `call`
    /// is used in error messages.
    ///
    /// Errors: the rank `peer` has failed or timed out, or the group was aborted.
    pub(crate) fn wait_for_round(
        &self,
        words: &[AtomicU32],
        layout: &GroupMemoryLayout,
        peer: usize,
        round: u32,
        call: &CollectiveCall,
    ) -> Result<(), CollectiveError> {
        let posted = &words[layout.rank_flag(peer, RankFlag::RoundsPosted)];
        for _ in 0..self.spins {
            if has_reached_round(posted.load(Acquire), round) {
                return Ok(());
            }
            spin_loop();
        }
        let sleepers = &words[layout.rank_flag(peer, RankFlag::SleepingThreads)];
        sleepers.fetch_add(1, SeqCst);
        let result = sleep_until_round(words, layout, peer, round, call);
        sleepers.fetch_sub(1, SeqCst);
        result
    }

    /// Sets the round counter of a rank after all other words of the round were written, and wakes the threads that wait for it.
    pub(crate) fn post_round(
        words: &[AtomicU32],
        layout: &GroupMemoryLayout,
        rank: usize,
        round: u32,
    ) {
        let posted = &words[layout.rank_flag(rank, RankFlag::RoundsPosted)];
        // This store and the accesses to the counter of sleeping threads are sequentially consistent: either this thread observes
        // a sleeping thread, or the sleeping thread observes the new round before it sleeps.
        posted.store(round, SeqCst);
        if words[layout.rank_flag(rank, RankFlag::SleepingThreads)].load(SeqCst) > 0 {
            Self::wake_waiters(posted);
        }
    }

    /// Wakes all threads that sleep until a rank reaches its next round (exchange of one chunk); `posted` is
    /// the round counter of this rank.
    pub(crate) fn wake_waiters(posted: &AtomicU32) {
        // A wake-up on a word of mapped memory cannot fail.
        let _ = futex::wake(posted, futex::Flags::empty(), i32::MAX as u32);
    }
}

/// Aborts the group for all ranks, because `error` occurred on rank `rank`. If the group has already been
/// aborted, the failed rank that is stored is not changed.
pub(crate) fn abort_group(
    words: &[AtomicU32],
    layout: &GroupMemoryLayout,
    rank: usize,
    error: &CollectiveError,
) {
    let failed = failed_rank(rank, error);
    let _ = words[layout.abort_flag()].compare_exchange(0, failed as u32 + 1, SeqCst, Relaxed);
    for rank in 0..layout.size {
        PeerWaiter::wake_waiters(&words[layout.rank_flag(rank, RankFlag::RoundsPosted)]);
    }
}

/// Rank that has caused `error`, which rank `rank` returned.
pub(crate) fn failed_rank(rank: usize, error: &CollectiveError) -> usize {
    match error {
        CollectiveError::RankFailed { rank }
        | CollectiveError::RankTimeout { rank, .. }
        | CollectiveError::LinkFailed { rank, .. } => *rank,
        _ => rank,
    }
}

/// Checks the abort flag of the group.
///
/// Errors: a rank or the creator of the group has aborted it.
pub(crate) fn check_not_aborted(
    words: &[AtomicU32],
    layout: &GroupMemoryLayout,
) -> Result<(), CollectiveError> {
    match words[layout.abort_flag()].load(SeqCst) {
        0 => Ok(()),
        ABORTED_BY_CREATOR => Err(CollectiveError::Aborted),
        rank => Err(CollectiveError::RankFailed { rank: rank as usize - 1 }),
    }
}

fn sleep_until_round(
    words: &[AtomicU32],
    layout: &GroupMemoryLayout,
    peer: usize,
    round: u32,
    call: &CollectiveCall,
) -> Result<(), CollectiveError> {
    let posted = &words[layout.rank_flag(peer, RankFlag::RoundsPosted)];
    let since = Instant::now();
    let timeout = if round == 1 { FIRST_ROUND_TIMEOUT } else { ROUND_TIMEOUT };
    loop {
        let seen = posted.load(SeqCst);
        if has_reached_round(seen, round) {
            return Ok(());
        }
        check_peer_in_group(words, layout, peer)?;
        if since.elapsed() > timeout {
            let seconds = timeout.as_secs();
            return Err(CollectiveError::RankTimeout { rank: peer, call: *call, seconds });
        }
        // EAGAIN (the word has changed) and EINTR (a signal) are not errors: the next iteration checks the
        // word again.
        let woken = futex::wait(posted, futex::Flags::empty(), seen, Some(&SLEEP_INTERVAL));
        if woken == Err(Errno::TIMEDOUT) && has_exited_before_round(words, layout, peer, round) {
            return Err(CollectiveError::RankFailed { rank: peer });
        }
    }
}

/// Checks that the group was not aborted and that rank `peer` has not left it.
fn check_peer_in_group(
    words: &[AtomicU32],
    layout: &GroupMemoryLayout,
    peer: usize,
) -> Result<(), CollectiveError> {
    check_not_aborted(words, layout)?;
    match words[layout.rank_flag(peer, RankFlag::HasLeft)].load(SeqCst) {
        0 => Ok(()),
        _ => Err(CollectiveError::RankFailed { rank: peer }),
    }
}

/// Whether the process of rank `peer` has exited before the rank reached the round (exchange of one chunk)
/// with the number `round`.
fn has_exited_before_round(
    words: &[AtomicU32],
    layout: &GroupMemoryLayout,
    peer: usize,
    round: u32,
) -> bool {
    let flag = |flag| words[layout.rank_flag(peer, flag)].load(SeqCst);
    process_has_exited(flag(RankFlag::ProcessId))
        && !has_reached_round(flag(RankFlag::RoundsPosted), round)
}

/// Whether the round counter `posted` of a rank is at least `round`. Both numbers wrap around after 2³²
/// rounds (exchanges of one chunk).
fn has_reached_round(posted: u32, round: u32) -> bool {
    posted.wrapping_sub(round) as i32 >= 0
}

/// Whether the process with the id `process` has exited, even if its parent has not reaped it. Returns false
/// for the id 0, which a rank has before it joins its group.
pub(crate) fn process_has_exited(process: u32) -> bool {
    let Some(pid) = Pid::from_raw(process as i32) else { return false };
    match pidfd_open(pid, PidfdFlags::empty()) {
        Ok(process) => {
            let mut watched = [PollFd::new(&process, PollFlags::IN)];
            let no_wait = Timespec { tv_sec: 0, tv_nsec: 0 };
            matches!(poll(&mut watched, Some(&no_wait)), Ok(1))
        }
        Err(error) => error == Errno::SRCH,
    }
}
