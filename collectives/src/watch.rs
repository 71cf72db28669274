//! Whether the ranks of a group on devices still live, and how far what this one launched has come.
//!
//! Launches return before they are done. A rank that is gone would leave the device of every other one waiting in a
//! collective for good, so a thread looks after them, and ends what is under way.

use crate::call::CALL_WORDS;
use crate::layout::{CALLS, Flag, Place};
use crate::meeting::GIVEN_UP;
use crate::waiting::has_ended;
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

    /// Why the group is of no further use, if it is.
    pub(crate) fn check(&self) -> Result<(), CollectiveError> {
        match &*self.failure.lock().unwrap_or_else(PoisonError::into_inner) {
            Some(error) => Err(error.clone()),
            None => Ok(()),
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
        match words[self.place.abort()].load(SeqCst) {
            0 => {}
            GIVEN_UP => return Err(CollectiveError::Aborted),
            rank => return Err(CollectiveError::Lost { rank: rank as usize - 1 }),
        }
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
                    // Said before the device goes on, so that nobody takes what it leaves for an answer.
                    watched.fail(error);
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
