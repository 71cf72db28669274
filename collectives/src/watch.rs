//! Whether the ranks of a group on devices still live, and how far what this one launched has come.
//!
//! Launches return before they are done. A rank that is gone would leave the device of every other one waiting in a
//! collective for good, so a thread looks after them, and ends what is under way.

use crate::call::CALL_WORDS;
use crate::layout::{CALLS, Flag, Place};
use crate::waiting::{give_up, given_up, has_ended};
use crate::{Call, CallState, CollectiveError};
use kernels::SharedMemory;
use kernels::hip::{Communicator, PeerMemory};
use std::sync::atomic::Ordering::{Relaxed, SeqCst};
use std::sync::atomic::{AtomicBool, AtomicU32};
use std::sync::{Arc, Mutex, PoisonError};
use std::thread::{self, JoinHandle};
use std::time::Duration;

/// How often the ranks are looked after.
const LOOK: Duration = Duration::from_millis(50);

/// What is known of the group of a rank, for all threads of its process.
#[derive(Debug)]
pub(crate) struct Health {
    memory: Arc<SharedMemory>,
    place: Place,
    rank: usize,
    failure: Mutex<Option<CollectiveError>>,
    /// Calls that the device is known to have come past.
    done: AtomicU32,
}

/// What a rank had launched in its group at some moment.
#[derive(Debug)]
pub struct Launched {
    health: Arc<Health>,
    /// The newest call.
    sequence: u32,
}

/// The thread that looks after the ranks; it ends with this value.
#[derive(Debug)]
pub(crate) struct Watch {
    pub(crate) health: Arc<Health>,
    over: Arc<AtomicBool>,
    thread: Option<JoinHandle<()>>,
}

impl Health {
    pub(crate) fn new(memory: Arc<SharedMemory>, place: Place, rank: usize) -> Self {
        Self { memory, place, rank, failure: Mutex::default(), done: AtomicU32::new(0) }
    }

    /// Why the group is of no further use, if it is: to this rank, or to one that has given it up, whose device may since
    /// have shown this one's what means nothing.
    pub(crate) fn check(&self) -> Result<(), CollectiveError> {
        match &*self.failure.lock().unwrap_or_else(PoisonError::into_inner) {
            Some(error) => Err(error.clone()),
            None => given_up(self.memory.words(), &self.place),
        }
    }

    /// The first reason stays.
    pub(crate) fn fail(&self, error: CollectiveError) -> CollectiveError {
        let mut failure = self.failure.lock().unwrap_or_else(PoisonError::into_inner);
        failure.get_or_insert(error).clone()
    }

    /// Errors: a rank is gone, or somebody has given the group up.
    pub(crate) fn look(&self) -> Result<(), CollectiveError> {
        let words = self.memory.words();
        given_up(words, &self.place)?;
        for rank in (0..self.place.size).filter(|&rank| rank != self.rank) {
            let flag = |flag| words[self.place.flag(rank, flag)].load(SeqCst);
            if flag(Flag::Left) != 0 || has_ended(flag(Flag::Process)) {
                return Err(CollectiveError::Lost { rank });
            }
        }
        Ok(())
    }

    /// The device has come past all calls up to this one.
    fn passed(&self, sequence: u32) {
        let done = self.done.swap(sequence, SeqCst);
        // Numbers of calls start over; steps are finished in their order.
        let new = sequence.wrapping_sub(done).min(CALLS as u32);
        for back in (0..new).rev() {
            let sequence = sequence.wrapping_sub(back);
            let note = &self.memory.words()[self.place.call(self.rank, sequence)];
            if note[..CALL_WORDS][0].load(Relaxed) == sequence {
                Call { state: CallState::Done, ..Call::read(note) }.write(note);
            }
        }
    }
}

impl Launched {
    pub(crate) fn new(health: &Arc<Health>, sequence: u32) -> Self {
        Self { health: Arc::clone(health), sequence }
    }

    /// To be called once the device has come past it, and before anything that it computed is believed.
    ///
    /// Errors: the group has failed; what came is worthless.
    pub fn finish(&self) -> Result<(), CollectiveError> {
        self.health.check()?;
        self.health.passed(self.sequence);
        Ok(())
    }
}

impl Watch {
    /// Looks after the ranks from now on, and ends what `communicator` and `peers` wait for when one of them is gone.
    pub(crate) fn start(
        health: &Arc<Health>,
        communicator: &Arc<Communicator>,
        peers: Option<&Arc<PeerMemory>>,
    ) -> Result<Self, CollectiveError> {
        let over = Arc::new(AtomicBool::new(false));
        let (watched, ended) = (Arc::clone(health), Arc::clone(&over));
        let (communicator, peers) = (Arc::clone(communicator), peers.cloned());
        let look = move || {
            while !ended.load(SeqCst) {
                let failed = watched.look().and_then(|()| Ok(communicator.is_ready()?));
                if let Err(error) = failed {
                    // Said, here and to the other ranks, before the device goes on: nobody may take what it leaves, or
                    // shows to others, for an answer.
                    let error = watched.fail(error);
                    give_up(watched.memory.words(), &watched.place, watched.rank, &error);
                    if let Some(peers) = &peers {
                        peers.end();
                    }
                    communicator.abort();
                    return;
                }
                thread::park_timeout(LOOK);
            }
        };
        let thread = thread::Builder::new().name("ranks".to_owned()).spawn(look);
        let thread = thread.map_err(|error| CollectiveError::Watch { error: error.to_string() })?;
        Ok(Self { health: Arc::clone(health), over, thread: Some(thread) })
    }
}

impl Drop for Watch {
    fn drop(&mut self) {
        self.over.store(true, SeqCst);
        if let Some(thread) = self.thread.take() {
            thread.thread().unpark();
            // One that panicked has said so.
            let _ = thread.join();
        }
    }
}

#[cfg(test)]
#[allow(clippy::unwrap_used, reason = "a test that cannot go on panics")]
mod tests {
    use super::*;
    use crate::Meeting;

    #[test]
    fn nobody_believes_what_came_past_a_rank_that_has_given_up() {
        let meeting = Meeting::create(&[3]).unwrap();
        let group = |rank| meeting.join(0, rank).unwrap();
        let (groups, lost) = ([group(0), group(1), group(2)], CollectiveError::Lost { rank: 2 });
        let health: Vec<_> = groups.iter().map(|group| Arc::new(group.health())).collect();
        let launched = Launched::new(&health[0], 0);
        launched.finish().unwrap();
        // Rank 1 finds that rank 2 is gone; rank 0 has not looked yet.
        give_up(health[1].memory.words(), &health[1].place, 1, &lost);
        assert_eq!(launched.finish(), Err(lost.clone()));
        assert_eq!(health[0].look(), Err(lost));
    }
}
