//! Waiting for a rank: a moment awake, then asleep, with an eye on whether it still lives.
//!
//! Ranks and their threads may outnumber the cores, and then the one that is waited for needs this one.

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

/// Looks before sleeping, where every rank has a core: about 20 µs, what falling asleep and waking up cost.
const SPINS: u32 = 1_000;
/// How long a sleeper goes without looking whether the other still lives.
const SLEEP_INTERVAL: Timespec = Timespec { tv_sec: 0, tv_nsec: 50_000_000 };
/// Longest wait in the first round, to which ranks come as they have loaded: the time that a start may take.
const FIRST_ROUND_TIMEOUT: Duration = Duration::from_mins(10);
/// Longest wait later on. Whoever watches the steps ends the group sooner; this ends it if nobody does.
const ROUND_TIMEOUT: Duration = Duration::from_mins(1);

/// How one rank waits.
#[derive(Debug)]
pub(crate) struct PeerWaiter {
    spins: u32,
}

impl PeerWaiter {
    /// For one of `size` ranks.
    pub(crate) fn new(size: usize) -> Self {
        let cores = available_parallelism().map_or(1, usize::from);
        Self { spins: if cores >= size { SPINS } else { 0 } }
    }

    /// Returns once rank `peer` has come to `round`.
    ///
    /// Errors: it is gone, it does not come, or somebody has given up.
    pub(crate) fn wait_for_round(
        &self,
        words: &[AtomicU32],
        place: &GroupLayout,
        peer: usize,
        round: u32,
        call: &CollectiveCall,
    ) -> Result<(), CollectiveError> {
        let posted = &words[place.rank_flag(peer, RankFlag::RoundsPosted)];
        for _ in 0..self.spins {
            if has_reached_round(posted.load(Acquire), round) {
                return Ok(());
            }
            spin_loop();
        }
        let asleep = &words[place.rank_flag(peer, RankFlag::SleepingThreads)];
        asleep.fetch_add(1, SeqCst);
        let result = sleep_until_round(words, place, peer, round, call);
        asleep.fetch_sub(1, SeqCst);
        result
    }

    /// Wakes those who wait for the rank that owns this flag.
    pub(crate) fn wake_waiters(posted: &AtomicU32) {
        // It cannot fail on a word that is mapped.
        let _ = futex::wake(posted, futex::Flags::empty(), i32::MAX as u32);
    }
}

/// Ends the group for all on behalf of `rank`: the first reason stays.
pub(crate) fn abort_group(
    words: &[AtomicU32],
    place: &GroupLayout,
    rank: usize,
    error: &CollectiveError,
) {
    let culprit = match error {
        CollectiveError::RankFailed { rank } | CollectiveError::RankTimeout { rank, .. } => *rank,
        _ => rank,
    };
    let _ = words[place.abort_flag()].compare_exchange(0, culprit as u32 + 1, SeqCst, Relaxed);
    for rank in 0..place.size {
        PeerWaiter::wake_waiters(&words[place.rank_flag(rank, RankFlag::RoundsPosted)]);
    }
}

/// Errors: somebody has given the group up.
pub(crate) fn check_not_aborted(
    words: &[AtomicU32],
    place: &GroupLayout,
) -> Result<(), CollectiveError> {
    match words[place.abort_flag()].load(SeqCst) {
        0 => Ok(()),
        ABORTED_BY_CREATOR => Err(CollectiveError::Aborted),
        rank => Err(CollectiveError::RankFailed { rank: rank as usize - 1 }),
    }
}

fn sleep_until_round(
    words: &[AtomicU32],
    place: &GroupLayout,
    peer: usize,
    round: u32,
    call: &CollectiveCall,
) -> Result<(), CollectiveError> {
    let posted = &words[place.rank_flag(peer, RankFlag::RoundsPosted)];
    let since = Instant::now();
    let patience = if round == 1 { FIRST_ROUND_TIMEOUT } else { ROUND_TIMEOUT };
    loop {
        let seen = posted.load(SeqCst);
        if has_reached_round(seen, round) {
            return Ok(());
        }
        check_not_aborted(words, place)?;
        if words[place.rank_flag(peer, RankFlag::HasLeft)].load(SeqCst) != 0 {
            return Err(CollectiveError::RankFailed { rank: peer });
        }
        if since.elapsed() > patience {
            let seconds = patience.as_secs();
            return Err(CollectiveError::RankTimeout { rank: peer, call: *call, seconds });
        }
        // A word that has changed meanwhile and a signal are no errors: the next look tells.
        let napped = futex::wait(posted, futex::Flags::empty(), seen, Some(&SLEEP_INTERVAL));
        let process = words[place.rank_flag(peer, RankFlag::ProcessId)].load(SeqCst);
        if napped == Err(Errno::TIMEDOUT)
            && process_has_exited(process)
            && !has_reached_round(posted.load(SeqCst), round)
        {
            return Err(CollectiveError::RankFailed { rank: peer });
        }
    }
}

/// Whether a rank that has come to `posted` rounds has come to this one; both start again at 0 some day.
fn has_reached_round(posted: u32, round: u32) -> bool {
    posted.wrapping_sub(round) as i32 >= 0
}

/// Whether a process is gone, waited for by its parent or not. One that has not joined yet is 0.
pub(crate) fn process_has_exited(process: u32) -> bool {
    let Some(pid) = Pid::from_raw(process as i32) else { return false };
    match pidfd_open(pid, PidfdFlags::empty()) {
        Ok(process) => {
            let mut watched = [PollFd::new(&process, PollFlags::IN)];
            let now = Timespec { tv_sec: 0, tv_nsec: 0 };
            matches!(poll(&mut watched, Some(&now)), Ok(1))
        }
        Err(error) => error == Errno::SRCH,
    }
}
