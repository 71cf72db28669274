//! Times in which the engine's process stands still and nobody else does, or one kind of its threads alone gets no processor: the
//! engine's, or those that read links. Executors go on with what they have and say so, clients come and go, and all of it
//! waits.

use crate::event_queue::SimEvent;
use crate::invariant::CheckResult;
use crate::world::{SimWorld, replica_changes};

/// How many there are in a world at most.
pub(crate) const PROCESS_PAUSES_MAX: u32 = 6;

/// One such time.
#[derive(Debug, Clone, Copy)]
pub(crate) struct ProcessPause {
    until_ms: u64,
    /// Whether the engine's thread stands still.
    engine: bool,
    /// Whether whoever reads links does.
    readers: bool,
    /// Whether what the last tick sends leaves the process behind it only.
    writers: bool,
}

impl SimWorld {
    /// With bad luck something stands still behind the next tick.
    pub(crate) fn maybe_pause_process(&mut self) {
        if self.process_pause.is_some()
            || self.pauses_left == 0
            || !self.rng.chance_per_mille(self.config.faults.process_pause)
        {
            return;
        }
        self.pauses_left -= 1;
        let short = self.rng.chance_per_mille(200);
        let lasts_ms = if short { (300, 5_000) } else { (5_000, 30_000) };
        let lasts_ms = u64::from(self.rng.between(lasts_ms.0, lasts_ms.1));
        let (engine, readers) =
            self.rng.pick(&[(true, true), (true, true), (true, false), (false, true)]);
        let writers = engine && readers && self.rng.chance_per_mille(700);
        let until_ms = self.now_ms + lasts_ms;
        self.process_pause = Some(ProcessPause { until_ms, engine, readers, writers });
        self.counts.process_pauses += 1;
        self.trace.record(
            self.now_ms,
            "stands",
            &[lasts_ms, engine.into(), readers.into(), writers.into()],
        );
        self.events.add(until_ms, SimEvent::Wake);
        if self.config.faults.hang > 0 && self.rng.chance_per_mille(400) {
            let replica = self.rng.below(self.replicas.len() as u64) as usize;
            let at_ms = self.now_ms + self.rng.below(lasts_ms);
            self.events.add(at_ms, SimEvent::Hang { replica });
        }
    }

    /// If the engine does, what others do meanwhile.
    pub(crate) fn run_process_pause(&mut self) -> CheckResult {
        let engine = self.process_pause.filter(|standstill| standstill.engine);
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

    /// Whatever stood still goes on, if it is time.
    pub(crate) fn end_process_pause(&mut self) -> CheckResult {
        let over = |standstill: &mut ProcessPause| standstill.until_ms <= self.now_ms;
        let Some(ProcessPause { readers, .. }) = self.process_pause.take_if(over) else {
            return Ok(());
        };
        self.resumed_ms = self.now_ms;
        if readers { self.resume_link_readers() } else { Ok(()) }
    }

    /// Whether whatever arrives is read at once.
    pub(crate) fn link_readers_run(&self) -> bool {
        self.link_readers_resume_ms().is_none()
    }

    /// When it is read again, if nobody reads now.
    pub(crate) fn link_readers_resume_ms(&self) -> Option<u64> {
        self.process_pause
            .filter(|standstill| standstill.readers)
            .map(|standstill| standstill.until_ms)
    }

    /// When what is sent now leaves the process.
    pub(crate) fn send_leaves_ms(&self) -> u64 {
        let stuck = self.process_pause.filter(|standstill| standstill.writers);
        stuck.map_or(self.now_ms, |standstill| standstill.until_ms)
    }

    /// When a message that arrives is taken from its link, if the engine's thread is awake and finds nothing there before.
    pub(crate) fn message_read_ms(&self) -> Option<u64> {
        self.process_pause
            .filter(|standstill| !standstill.engine)
            .map(|standstill| standstill.until_ms)
    }

    /// When others take the place of executors whose loss waits to be heard: whoever starts them is told by the engine.
    pub(crate) fn replacement_ready_ms(&self, replica: usize) -> Option<u64> {
        let lost = replica_changes(&self.inbox, self.config.scheduler.lockstep).failed;
        let waits = self.group_of(&lost).contains(&replica);
        let engine = self.process_pause.filter(|standstill| standstill.engine && waits);
        engine.map(|standstill| standstill.until_ms + 1)
    }
}
