//! Pauses of the engine's process, or of one kind of its threads: the scheduler's thread or the link readers.
//! During a pause, executors run the queued batches and send messages, and clients send requests and aborts;
//! all messages are processed after the pause.

use crate::event_queue::SimEvent;
use crate::invariant::CheckResult;
use crate::world::{SimWorld, replica_changes};

/// Maximum number of pauses in a simulation.
pub(crate) const PROCESS_PAUSES_MAX: u32 = 6;

/// A pause of the engine's process or of some of its threads.
#[derive(Debug, Clone, Copy)]
pub(crate) struct ProcessPause {
    until_ms: u64,
    /// Whether the scheduler's thread is paused.
    engine: bool,
    /// Whether the link readers are paused.
    readers: bool,
    /// Whether batches sent in the last tick leave the process only after the pause.
    writers: bool,
}

impl SimWorld {
    /// With a probability that is part of the configuration, starts a pause of the engine after the current
    /// tick.
    pub(crate) fn maybe_pause_process(&mut self) {
        if self.process_pause.is_some()
            || self.pauses_left == 0
            || !self.rng.chance_per_mille(self.config.faults.process_pause)
        {
            return;
        }
        self.pauses_left -= 1;
        let short = self.rng.chance_per_mille(200);
        let (least_ms, most_ms) = if short { (300, 5_000) } else { (5_000, 30_000) };
        let lasts_ms = u64::from(self.rng.between(least_ms, most_ms));
        let (engine, readers) =
            self.rng.pick(&[(true, true), (true, true), (true, false), (false, true)]);
        let writers = engine && readers && self.rng.chance_per_mille(700);
        let until_ms = self.now_ms + lasts_ms;
        self.process_pause = Some(ProcessPause { until_ms, engine, readers, writers });
        self.counts.process_pauses += 1;
        self.trace.record(
            self.now_ms,
            "pause",
            &[lasts_ms, engine.into(), readers.into(), writers.into()],
        );
        self.events.add(until_ms, SimEvent::Wake);
        if self.config.faults.hang > 0 && self.rng.chance_per_mille(400) {
            let replica = self.rng.below(self.replicas.len() as u64) as usize;
            let at_ms = self.now_ms + self.rng.below(lasts_ms);
            self.events.add(at_ms, SimEvent::Hang { replica });
        }
    }

    /// If the scheduler's thread is paused, handles all events until the pause ends without running the
    /// scheduler.
    pub(crate) fn run_process_pause(&mut self) -> CheckResult {
        let engine = self.process_pause.filter(|pause| pause.engine);
        let Some(ProcessPause { until_ms, .. }) = engine else { return Ok(()) };
        while let Some(next_ms) = self.events.next_ms().filter(|next_ms| *next_ms < until_ms) {
            self.now_ms = self.now_ms.max(next_ms);
            while let Some(what) = self.events.pop_due(self.now_ms) {
                self.handle_event(what)?;
            }
        }
        (self.now_ms, self.scheduler_resumed_ms) = (until_ms, until_ms);
        self.end_process_pause()
    }

    /// Ends the pause if the time of its end is reached.
    pub(crate) fn end_process_pause(&mut self) -> CheckResult {
        let over = |pause: &mut ProcessPause| pause.until_ms <= self.now_ms;
        let Some(ProcessPause { readers, .. }) = self.process_pause.take_if(over) else {
            return Ok(());
        };
        self.resumed_ms = self.now_ms;
        if readers {
            self.resume_link_readers()?;
        }
        // A link delivers its messages in order: the messages that arrived during the pause precede all later
        // messages.
        for what in std::mem::take(&mut self.unread) {
            self.handle_event(what)?;
        }
        Ok(())
    }

    /// Whether link readers are running, so that arriving messages are read at once.
    pub(crate) fn link_readers_run(&self) -> bool {
        self.link_readers_resume_ms().is_none()
    }

    /// Time at which link readers resume; `None` if they are not paused.
    pub(crate) fn link_readers_resume_ms(&self) -> Option<u64> {
        self.process_pause.filter(|pause| pause.readers).map(|pause| pause.until_ms)
    }

    /// Time at which a message that is sent now leaves the process.
    pub(crate) fn send_leaves_ms(&self) -> u64 {
        let paused = self.process_pause.filter(|pause| pause.writers);
        paused.map_or(self.now_ms, |pause| pause.until_ms)
    }

    /// Time at which an arriving message is read from its link; `None` unless link readers are paused while
    /// the scheduler's thread runs.
    pub(crate) fn message_read_ms(&self) -> Option<u64> {
        self.process_pause.filter(|pause| !pause.engine).map(|pause| pause.until_ms)
    }

    /// If the scheduler's thread is paused before it has processed the failure of a replica, returns the
    /// earliest start time of replacement executors: the scheduler's thread must request them.
    pub(crate) fn replacement_ready_ms(&self, replica: usize) -> Option<u64> {
        let failed = replica_changes(&self.inbox, self.config.scheduler.lockstep).failed;
        let is_failed = self.group_of(&failed).contains(&replica);
        let engine = self.process_pause.filter(|pause| pause.engine && is_failed);
        engine.map(|pause| pause.until_ms + 1)
    }
}
