//! Waits for a peer rank: polls briefly, then sleeps and checks periodically that the peer's process is
//! alive.
//!
//! Ranks and their threads may outnumber the cores, in which case the peer needs the core of the waiting
//! rank.

use crate::rendezvous::ABORTED_BY_CREATOR;
use crate::shared_layout::{GroupLayout, RankFlag};
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

/// Number of polls before sleep if every rank has a core: about 20 µs, the cost of a futex sleep and wake-up.
const SPINS: u32 = 1_000;
/// Longest sleep between two checks that the peer's process is alive.
const SLEEP_INTERVAL: Timespec = Timespec { tv_sec: 0, tv_nsec: 50_000_000 };
/// Timeout of the first round, which ranks reach after loading weights: the time that a start may take.
const FIRST_ROUND_TIMEOUT: Duration = Duration::from_mins(10);
/// Timeout of later rounds: a fallback, because the monitoring of steps ends the group sooner.
const ROUND_TIMEOUT: Duration = Duration::from_mins(1);

/// Wait policy of one rank.
#[derive(Debug)]
pub(crate) struct PeerWaiter {
    spins: u32,
}

impl PeerWaiter {
    /// Creates the policy of a rank in a group of `size` ranks.
    pub(crate) fn new(size: usize) -> Self {
        let cores = available_parallelism().map_or(1, usize::from);
        Self { spins: if cores >= size { SPINS } else { 0 } }
    }

    /// Returns after rank `peer` has reached `round`.
    ///
    /// Errors: the peer has failed or timed out, or the group was aborted.
    pub(crate) fn wait_for_round(
        &self,
        words: &[AtomicU32],
        layout: &GroupLayout,
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

    /// Wakes the threads that wait for the rank of this flag.
    pub(crate) fn wake_waiters(posted: &AtomicU32) {
        // A wake on a mapped word cannot fail.
        let _ = futex::wake(posted, futex::Flags::empty(), i32::MAX as u32);
    }
}

/// Aborts the group for all ranks on behalf of `rank`; the first cause is kept.
pub(crate) fn abort_group(
    words: &[AtomicU32],
    layout: &GroupLayout,
    rank: usize,
    error: &CollectiveError,
) {
    let failed_rank = match error {
        CollectiveError::RankFailed { rank } | CollectiveError::RankTimeout { rank, .. } => *rank,
        _ => rank,
    };
    let _ = words[layout.abort_flag()].compare_exchange(0, failed_rank as u32 + 1, SeqCst, Relaxed);
    for rank in 0..layout.size {
        PeerWaiter::wake_waiters(&words[layout.rank_flag(rank, RankFlag::RoundsPosted)]);
    }
}

/// Errors: the group was aborted.
pub(crate) fn check_not_aborted(
    words: &[AtomicU32],
    layout: &GroupLayout,
) -> Result<(), CollectiveError> {
    match words[layout.abort_flag()].load(SeqCst) {
        0 => Ok(()),
        ABORTED_BY_CREATOR => Err(CollectiveError::Aborted),
        rank => Err(CollectiveError::RankFailed { rank: rank as usize - 1 }),
    }
}

fn sleep_until_round(
    words: &[AtomicU32],
    layout: &GroupLayout,
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
        check_not_aborted(words, layout)?;
        if words[layout.rank_flag(peer, RankFlag::HasLeft)].load(SeqCst) != 0 {
            return Err(CollectiveError::RankFailed { rank: peer });
        }
        if since.elapsed() > timeout {
            let seconds = timeout.as_secs();
            return Err(CollectiveError::RankTimeout { rank: peer, call: *call, seconds });
        }
        // A changed word (EAGAIN) and a signal (EINTR) are not errors: the loop checks again.
        let woken = futex::wait(posted, futex::Flags::empty(), seen, Some(&SLEEP_INTERVAL));
        let process = words[layout.rank_flag(peer, RankFlag::ProcessId)].load(SeqCst);
        if woken == Err(Errno::TIMEDOUT)
            && process_has_exited(process)
            && !has_reached_round(posted.load(SeqCst), round)
        {
            return Err(CollectiveError::RankFailed { rank: peer });
        }
    }
}

/// Whether a rank that has posted `posted` rounds has reached `round`; both counters wrap around.
fn has_reached_round(posted: u32, round: u32) -> bool {
    posted.wrapping_sub(round) as i32 >= 0
}

/// Whether a process has exited, reaped by its parent or not. `process` is 0 before the rank has joined.
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
