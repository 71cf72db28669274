//! Timer thread of the mask workers: sends a step's token bitmasks at the step's deadline, and cancels
//! bitmask computations that exceed `MASK_TIME`.

use crate::limits::MASK_TIME;
use crate::mask_session::MaskSession;
use crate::step_mask_collector::StepMaskCollector;
use crate::timings::GrammarTimings;
use std::cmp::Reverse;
use std::collections::BTreeMap;
use std::io;
use std::sync::mpsc::{Receiver, RecvTimeoutError, Sender, channel};
use std::sync::{Arc, Weak};
use std::thread;
use std::time::{Duration, Instant};

/// Interval between checks for bitmask computations that exceed `MASK_TIME`.
const OVERDUE_CHECK_INTERVAL: Duration = Duration::from_millis(500);

/// Message to the timer thread.
pub(super) enum MaskTimerCommand {
    /// A request has started; from now on, the timer checks whether its masks exceed `MASK_TIME`.
    Begin(Weak<MaskSession>),
    /// A step waits for its token bitmasks until the given deadline.
    Step(Instant, Arc<StepMaskCollector>),
}

/// Timer that sends a step's token bitmasks at the step's deadline, and cancels bitmask computations that
/// exceed `MASK_TIME`.
#[derive(Default)]
pub(super) struct MaskTimer {
    /// Steps ordered by deadline; the counter distinguishes steps with equal deadlines.
    steps: BTreeMap<Reverse<(Instant, u64)>, Arc<StepMaskCollector>>,
    count: u64,
    sessions: Vec<Weak<MaskSession>>,
}

impl MaskTimer {
    /// Starts the timer thread, which runs until the returned sender is dropped.
    ///
    /// Errors: the thread cannot be started.
    pub(super) fn start(timings: Arc<GrammarTimings>) -> io::Result<Sender<MaskTimerCommand>> {
        let (timer, events) = channel();
        let run = move || Self::default().run(&events, &timings);
        thread::Builder::new().name("grammar-timer".to_owned()).spawn(run)?;
        Ok(timer)
    }

    fn run(mut self, events: &Receiver<MaskTimerCommand>, timings: &GrammarTimings) {
        let mut checked_at = Instant::now();
        loop {
            match events.recv_timeout(self.time_to_next_event()) {
                Ok(MaskTimerCommand::Begin(session)) => self.sessions.push(session),
                Ok(MaskTimerCommand::Step(deadline, step)) => {
                    self.count += 1;
                    self.steps.insert(Reverse((deadline, self.count)), step);
                }
                Err(RecvTimeoutError::Timeout) => {}
                Err(RecvTimeoutError::Disconnected) => return,
            }
            let now = Instant::now();
            self.expire_steps(now, timings);
            if now.saturating_duration_since(checked_at) >= OVERDUE_CHECK_INTERVAL {
                checked_at = now;
                self.cancel_overdue_masks(now);
            }
        }
    }

    fn time_to_next_event(&self) -> Duration {
        let idle = if self.sessions.is_empty() { MASK_TIME } else { OVERDUE_CHECK_INTERVAL };
        let first = self.steps.last_key_value().map(|(Reverse((deadline, _)), _)| *deadline);
        first.map_or(idle, |deadline| deadline.saturating_duration_since(Instant::now()).min(idle))
    }

    fn expire_steps(&mut self, now: Instant, timings: &GrammarTimings) {
        while let Some(first) = self.steps.last_entry() {
            let Reverse((deadline, _)) = *first.key();
            if deadline > now {
                return;
            }
            first.remove().send_without_overdue(&timings.masks_overdue);
        }
    }

    fn cancel_overdue_masks(&mut self, now: Instant) {
        self.sessions.retain(|session| match session.upgrade() {
            Some(session) => {
                session.cancel_if_overdue(now);
                true
            }
            None => false,
        });
    }
}
