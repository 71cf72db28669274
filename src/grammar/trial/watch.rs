//! The thread that takes over a trial where others leave the idle one nothing.
//!
//! An idle thread gets some three thousandths of a processor that others use up: too little for any grammar. Instead
//! of a share of its own it has this thread, of low priority, which tries the same grammar once it can be seen that the
//! idle one starves: early enough to have had its processor time by the end of the time that a grammar may take.

use super::message::FromTrial;
use crate::grammar::compile::{Findings, GrammarError};
use crate::grammar::constraint::Constraint;
use crate::grammar::limits::{COMPILE_TIME, TRIAL_CPU_LEAST};
use crate::grammar::lock;
use protocol::link::{FrameWriter, LinkError, Sending};
use rustix::time::{ClockId, clock_gettime};
use std::io::Write;
use std::sync::{Arc, Condvar, Mutex, PoisonError};
use std::thread;
use std::time::{Duration, Instant};

type Verdict = Result<Findings, GrammarError>;

/// From one look at the trials to the next: waking up with each of them would cost what idleness saves.
const LOOK_EVERY: Duration = Duration::from_millis(100);
/// Time after which a trial without its least processor time is taken over.
const STARVED_AFTER: Duration = Duration::from_millis(300);
/// Looks that find nothing before the thread sleeps until there is a trial.
const LOOKS_IN_VAIN: u32 = 20;

/// A grammar that the server waits for.
pub(super) struct Trial {
    pub(super) constraint: Arc<Constraint>,
    since: Instant,
    /// Processor time of this process when it began.
    spent: Duration,
}

impl Trial {
    pub(super) fn begun(constraint: Arc<Constraint>) -> Self {
        Self { constraint, since: Instant::now(), spent: processor_time() }
    }

    /// Whether others leave it nothing, or it takes as long as a grammar may: then the server lets it go on for no
    /// other reason.
    fn starves(&self) -> bool {
        let (age, spent) = (self.since.elapsed(), processor_time().saturating_sub(self.spent));
        age > COMPILE_TIME || age > STARVED_AFTER && spent < TRIAL_CPU_LEAST
    }
}

/// Of all threads of this process.
fn processor_time() -> Duration {
    let time = clock_gettime(ClockId::ProcessCPUTime);
    Duration::new(time.tv_sec.unsigned_abs(), time.tv_nsec.unsigned_abs() as u32)
}

/// Where trials begin and verdicts are handed in.
pub(super) struct Desk<W> {
    state: Mutex<State<W>>,
    begun: Condvar,
}

struct State<W> {
    to: FrameWriter<W, FromTrial>,
    /// Without a verdict so far.
    pending: Option<Arc<Trial>>,
}

impl<W: Write> Desk<W> {
    /// A desk whose verdicts go to `to`.
    pub(super) fn new(to: FrameWriter<W, FromTrial>) -> Self {
        Self { state: Mutex::new(State { to, pending: None }), begun: Condvar::new() }
    }

    /// Errors: the server is gone.
    pub(super) fn send(&self, message: FromTrial) -> Result<(), LinkError> {
        lock(&self.state).to.send(message)
    }

    /// From here on the trial has to end in a verdict.
    pub(super) fn begin(&self, trial: &Arc<Trial>) {
        lock(&self.state).pending = Some(Arc::clone(trial));
        self.begun.notify_one();
    }

    /// Tells the verdict of a trial, unless it has one.
    ///
    /// Errors: the server is gone.
    pub(super) fn tell(&self, trial: &Arc<Trial>, verdict: Verdict) -> Result<(), LinkError> {
        let mut state = lock(&self.state);
        let told = state.pending.take_if(|pending| Arc::ptr_eq(pending, trial));
        told.map_or(Ok(()), |_| state.to.send(FromTrial::Verdict(verdict)))
    }

    fn pending(&self) -> Option<Arc<Trial>> {
        lock(&self.state).pending.clone()
    }

    fn wait_for_trial(&self) {
        let waits = |state: &mut State<W>| state.pending.is_none();
        drop(
            self.begun.wait_while(lock(&self.state), waits).unwrap_or_else(PoisonError::into_inner),
        );
    }
}

/// Tries what starves, for ever.
///
/// Errors: the server is gone.
pub(super) fn watch<W: Write>(
    desk: &Desk<W>,
    try_out: impl Fn(&Trial) -> Verdict,
) -> Result<(), LinkError> {
    loop {
        desk.wait_for_trial();
        let mut in_vain = 0;
        while in_vain < LOOKS_IN_VAIN {
            thread::sleep(LOOK_EVERY);
            match desk.pending() {
                Some(trial) if trial.starves() => desk.tell(&trial, try_out(&trial))?,
                Some(_) => in_vain = 0,
                None => in_vain += 1,
            }
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::grammar::Form;
    use crate::worker_process::EPOCH;
    use protocol::link::{FrameReader, Receiving};
    use std::os::unix::net::UnixStream;

    const WAIT: Duration = Duration::from_mins(1);

    fn verdict(said: &str) -> Verdict {
        Err(GrammarError::Invalid(said.to_owned()))
    }

    #[test]
    fn a_trial_that_starves_is_taken_over_and_has_one_verdict() {
        let (ours, theirs) = UnixStream::pair().unwrap();
        let mut server = FrameReader::<_, FromTrial>::new(ours, EPOCH);
        let desk = Arc::new(Desk::new(FrameWriter::new(theirs, EPOCH)));
        let watching = Arc::clone(&desk);
        thread::spawn(move || watch(&watching, |_| verdict("watch")));
        let begin = || {
            let form = Form::Regex("a".to_owned());
            let trial = Arc::new(Trial::begun(Arc::new(Constraint::new(form, "regex"))));
            desk.begin(&trial);
            trial
        };
        // The thread sleeps before the first one, and looks before the second.
        for _ in 0..2 {
            let since = Instant::now();
            let starving = begin();
            let heard = server.recv(WAIT).unwrap();
            assert_eq!(heard, Some(FromTrial::Verdict(verdict("watch"))));
            assert!(since.elapsed() > STARVED_AFTER, "it had its time");
            desk.tell(&starving, verdict("late")).unwrap();
            let quick = begin();
            desk.tell(&quick, verdict("quick")).unwrap();
            let heard = server.recv(WAIT).unwrap();
            assert_eq!(heard, Some(FromTrial::Verdict(verdict("quick"))), "not the late one");
        }
    }
}
