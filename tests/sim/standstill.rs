//! Times in which the engine's process stands still and nobody else does, or one kind of its threads alone gets no processor: the
//! engine's, or those that read links. Executors go on with what they have and say so, clients come and go, and all of it
//! waits.

use crate::broken::Checked;
use crate::happening::Happening;
use crate::world::{World, news};

/// How many there are in a world at most.
pub(crate) const STANDSTILLS: u32 = 6;

/// One such time.
#[derive(Debug, Clone, Copy)]
pub(crate) struct Standstill {
    until_ms: u64,
    /// Whether the engine's thread stands still.
    engine: bool,
    /// Whether whoever reads links does.
    readers: bool,
    /// Whether what the last tick sends leaves the process behind it only.
    writers: bool,
}

impl World {
    /// With bad luck something stands still behind the next tick.
    pub(crate) fn may_stand_still(&mut self) {
        if self.standstill.is_some()
            || self.standstills_left == 0
            || !self.chance.hits(self.setup.faults.still)
        {
            return;
        }
        self.standstills_left -= 1;
        let short = self.chance.hits(200);
        let lasts_ms = if short { (300, 5_000) } else { (5_000, 30_000) };
        let lasts_ms = u64::from(self.chance.between(lasts_ms.0, lasts_ms.1));
        let (engine, readers) =
            self.chance.pick(&[(true, true), (true, true), (true, false), (false, true)]);
        let writers = engine && readers && self.chance.hits(700);
        let until_ms = self.now_ms + lasts_ms;
        self.standstill = Some(Standstill { until_ms, engine, readers, writers });
        self.tally.standstills += 1;
        self.trace.note(
            self.now_ms,
            "stands",
            &[lasts_ms, engine.into(), readers.into(), writers.into()],
        );
        self.agenda.add(until_ms, Happening::Wake);
        if self.setup.faults.hang > 0 && self.chance.hits(400) {
            let replica = self.chance.below(self.sites.len() as u64) as usize;
            let at_ms = self.now_ms + self.chance.below(lasts_ms);
            self.agenda.add(at_ms, Happening::Hang { replica });
        }
    }

    /// If the engine does, what others do meanwhile.
    pub(crate) fn stand_still(&mut self) -> Checked {
        let engine = self.standstill.filter(|standstill| standstill.engine);
        let Some(Standstill { until_ms, .. }) = engine else { return Ok(()) };
        while let Some(next_ms) = self.agenda.next_ms().filter(|next_ms| *next_ms < until_ms) {
            self.now_ms = self.now_ms.max(next_ms);
            while let Some(what) = self.agenda.take(self.now_ms) {
                self.happen(what)?;
            }
        }
        (self.now_ms, self.engine_woke_ms) = (until_ms, until_ms);
        self.go_on()
    }

    /// Whatever stood still goes on, if it is time.
    pub(crate) fn go_on(&mut self) -> Checked {
        let over = |standstill: &mut Standstill| standstill.until_ms <= self.now_ms;
        let Some(Standstill { readers, .. }) = self.standstill.take_if(over) else { return Ok(()) };
        self.woke_ms = self.now_ms;
        if readers { self.readers_wake() } else { Ok(()) }
    }

    /// Whether whatever arrives is read at once.
    pub(crate) fn readers_run(&self) -> bool {
        self.readers_wake_ms().is_none()
    }

    /// When it is read again, if nobody reads now.
    pub(crate) fn readers_wake_ms(&self) -> Option<u64> {
        self.standstill
            .filter(|standstill| standstill.readers)
            .map(|standstill| standstill.until_ms)
    }

    /// When what is sent now leaves the process.
    pub(crate) fn leaves_ms(&self) -> u64 {
        let stuck = self.standstill.filter(|standstill| standstill.writers);
        stuck.map_or(self.now_ms, |standstill| standstill.until_ms)
    }

    /// When a message that arrives is taken from its link, if the engine's thread is awake and finds nothing there before.
    pub(crate) fn read_later_ms(&self) -> Option<u64> {
        self.standstill
            .filter(|standstill| !standstill.engine)
            .map(|standstill| standstill.until_ms)
    }

    /// When others take the place of executors whose loss waits to be heard: whoever starts them is told by the engine.
    pub(crate) fn replaced_ms(&self, replica: usize) -> Option<u64> {
        let lost = news(&self.inbox, self.setup.engine.lockstep).lost;
        let waits = self.group_of(&lost).contains(&replica);
        let engine = self.standstill.filter(|standstill| standstill.engine && waits);
        engine.map(|standstill| standstill.until_ms + 1)
    }
}
