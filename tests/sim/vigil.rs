//! The watch over executors, by the product's own rules (`UnderWay`, `Silence`): signs of life, whoever reads them, and who is
//! given up for want of them. F25: nobody is whose group does its work, whatever stood still meanwhile. F10: whoever
//! hangs is, soon after everybody could know.

use crate::broken::{Checked, ensure};
use crate::executor::{Executor, Hang};
use crate::happening::Happening;
use crate::world::{Site, World, news};
use protocol::{Batch, Pace, Replica, StepId};
use scheduler::{
    Event, Loss, Planted, SECOND_LOOK, SILENCE, Silence, StepDeadline, UnderWay, Work,
};
use std::collections::VecDeque;

/// An executor that has said nothing for so long gives a sign of life.
const BEAT_MS: u64 = 1000;
/// How often an engine's thread is awake at least.
const HEARTBEAT_MS: usize = 250;
/// What links, ticks that come late and steps of the clock add to the time in which a hang must be noticed.
const SLACK_MS: u64 = 700;
/// Signs of life, each replica's on average, after which nobody waits any more for something to happen.
const QUIET_BEATS: usize = 100;

/// Something that the engine's thread hears besides events, in their order.
#[derive(Debug)]
pub(crate) enum Sign {
    /// A step was answered.
    Answered { replica: usize, step: StepId },
    /// The executors of a life gave a sign of it.
    Beat { replica: usize, life: u32 },
}

/// What is known of a replica's executors from what they say and when.
#[derive(Debug)]
pub(crate) struct Vigil {
    steps: UnderWay,
    /// Steps not answered, and when each could begin, by this world's clock and no rule.
    begun: VecDeque<(StepId, u64)>,
    silence: Silence,
    /// How long whoever reads their link waits for the next message.
    until_ms: u64,
    /// Whether one has come that nobody could read yet.
    unread: bool,
}

impl Default for Vigil {
    fn default() -> Self {
        let steps = UnderWay::new(1, StepDeadline::new(None, Pace::default()));
        let (begun, silence) = (VecDeque::new(), Silence::default());
        Self { steps, begun, silence, until_ms: 0, unread: false }
    }
}

impl Vigil {
    /// A watch with a bug in force.
    pub(crate) fn new(planted: Planted) -> Self {
        let mut vigil = Self::default();
        (vigil.steps.planted, vigil.silence.planted) = (planted, planted);
        vigil
    }

    /// A batch is sent.
    pub(crate) fn sent(&mut self, batch: &Batch, now_ms: u64) {
        let tokens = batch.rows.iter().map(|row| u64::from(row.len) + u64::from(row.drafts)).sum();
        let masked = batch.rows.iter().any(|row| row.masked);
        self.steps.send(batch.step, Work { tokens, pairs: 0 }, masked, now_ms);
        self.begun.push_back((batch.step, now_ms));
    }

    /// A step was answered.
    fn answered(&mut self, step: StepId, now_ms: u64) {
        self.steps.answered(step, now_ms);
        while self.begun.pop_front_if(|(sent, _)| *sent <= step).is_some() {}
        if let Some((_, at_ms)) = self.begun.front_mut() {
            *at_ms = now_ms.max(*at_ms);
        }
    }

    /// The executors are gone.
    pub(crate) fn lose(&mut self) {
        self.begun.clear();
        self.steps.lose();
    }

    fn reads(&mut self, now_ms: u64) {
        self.silence.is_broken();
        self.waits(now_ms);
    }

    fn waits(&mut self, now_ms: u64) {
        self.until_ms = now_ms + self.silence.patience().as_millis() as u64;
    }
}

impl World {
    /// New executors are watched.
    pub(crate) fn watch(&mut self, replica: usize) {
        if !self.setup.watched {
            return;
        }
        let (now_ms, site) = (self.now_ms, &mut self.sites[replica]);
        let life = site.incarnation;
        site.vigil.unread = false;
        site.vigil.reads(now_ms);
        self.agenda.add(site.vigil.until_ms, Happening::Look { replica, life });
        self.agenda.add(now_ms + BEAT_MS, Happening::Beat { replica, life });
    }

    /// An executor that has said nothing for a while gives a sign of life.
    pub(crate) fn beat(&mut self, replica: usize, life: u32) {
        self.quiet += 1;
        let delay_ms = self.link_delay_ms();
        let (now_ms, over) = (self.now_ms, self.is_over());
        let site = &mut self.sites[replica];
        let lives = site.incarnation == life && !over;
        let Some(executor) = site.executor.as_mut().filter(|_| lives) else { return };
        if executor.hangs.is_some_and(|(hang, _)| hang == Hang::Stopped) {
            return;
        }
        if now_ms >= executor.said_ms + BEAT_MS {
            executor.said_ms = now_ms;
            executor.last_reply_ms = executor.last_reply_ms.max(now_ms + delay_ms);
            self.agenda.add(executor.last_reply_ms, Happening::Alive { replica, life });
        }
        self.agenda.add(executor.said_ms + BEAT_MS, Happening::Beat { replica, life });
    }

    /// A sign of life arrives.
    pub(crate) fn alive(&mut self, replica: usize, life: u32) {
        if !self.is_severed(replica, life) {
            self.trace.note(self.now_ms, "alive", &[replica as u64]);
            self.arrives(replica, life);
            self.signs.push(Sign::Beat { replica, life });
        }
    }

    /// A message that arrives while the engine's thread is awake, but nobody reads links, lies there until somebody does.
    pub(crate) fn lie_unread(&mut self, what: Happening) -> Option<Happening> {
        if !what.is_watch() {
            self.quiet = 0;
        }
        let life = match &what {
            Happening::Reply { replica, reply } => Some((*replica, reply.link)),
            Happening::Alive { replica, life } => Some((*replica, *life)),
            _ => None,
        };
        let (Some(at_ms), Some((replica, life))) = (self.read_later_ms(), life) else {
            return Some(what);
        };
        self.arrives(replica, life);
        self.agenda.add(at_ms, what);
        None
    }

    /// Something arrives from the executors of a life; whoever stands still finds it later.
    pub(crate) fn arrives(&mut self, replica: usize, life: u32) {
        let (now_ms, reads) = (self.now_ms, self.readers_run());
        let site = &mut self.sites[replica];
        if site.announced == life {
            if reads {
                site.vigil.reads(now_ms);
            } else {
                site.vigil.unread = true;
            }
        }
    }

    /// Whoever reads a replica's link may have waited for long enough.
    pub(crate) fn look(&mut self, replica: usize, life: u32) -> Checked {
        if self.sites[replica].incarnation != life || self.is_over() {
            return Ok(());
        }
        if let Some(until_ms) = self.readers_wake_ms() {
            self.agenda.add(until_ms, Happening::Look { replica, life });
            return Ok(());
        }
        if self.now_ms >= self.sites[replica].vigil.until_ms {
            self.look_in_vain(replica)?;
        }
        let at_ms = self.sites[replica].vigil.until_ms.max(self.now_ms + 1);
        self.agenda.add(at_ms, Happening::Look { replica, life });
        Ok(())
    }

    /// Nothing was there to be read when the time was over.
    fn look_in_vain(&mut self, replica: usize) -> Checked {
        let (now_ms, hangs) = (self.now_ms, self.hangs(replica));
        let vigil = &mut self.sites[replica].vigil;
        if vigil.silence.lasts() {
            return self.give_up(replica, Loss::Silent);
        }
        vigil.waits(now_ms);
        self.tally.spared += u64::from(!hangs);
        Ok(())
    }

    /// Whoever stood still with the engine's process goes on: their clocks first, or what has come meanwhile.
    pub(crate) fn readers_wake(&mut self) -> Checked {
        let now_ms = self.now_ms;
        for replica in 0..self.sites.len() {
            let clock_first = self.chance.hits(500);
            let vigil = &self.sites[replica].vigil;
            if vigil.until_ms <= now_ms && (clock_first || !vigil.unread) {
                self.look_in_vain(replica)?;
            }
            let vigil = &mut self.sites[replica].vigil;
            if std::mem::take(&mut vigil.unread) {
                vigil.reads(now_ms);
            }
        }
        Ok(())
    }

    /// The engine's thread hears what was said since its last tick, and gives up who is late.
    pub(crate) fn judge(&mut self) -> Checked {
        self.heartbeats();
        let now_ms = self.now_ms;
        for sign in std::mem::take(&mut self.signs) {
            match sign {
                Sign::Answered { replica, step } => {
                    self.sites[replica].vigil.answered(step, now_ms);
                }
                Sign::Beat { replica, life } => {
                    let hangs = self.hangs(replica);
                    let site = &mut self.sites[replica];
                    if site.announced != life || site.lost_at_ms.is_some() {
                        continue; // Of a former generation.
                    }
                    let lateness = site.vigil.steps.beat(0, now_ms);
                    self.tally.spared += u64::from(!lateness.ranks.is_empty() && !hangs);
                    if lateness.overdue.is_some() {
                        self.give_up(replica, Loss::Late)?;
                    }
                }
            }
        }
        self.check_hangs_are_noticed()
    }

    /// The engine's thread has been awake several times a second since its last tick, but for when it stood still.
    fn heartbeats(&mut self) {
        let (now_ms, ticked_ms) = (self.now_ms, self.ticked_ms);
        self.ticked_ms = now_ms;
        let stood = self.engine_woke_ms > ticked_ms;
        let from_ms = if stood { self.engine_woke_ms } else { ticked_ms };
        for site in self.sites.iter_mut().filter(|_| self.setup.watched) {
            (from_ms..now_ms).step_by(HEARTBEAT_MS).for_each(|ms| site.vigil.steps.awake(ms));
            site.vigil.steps.awake(now_ms);
        }
    }

    /// Executors are given up and others take their place, unless it is known that they are gone.
    fn give_up(&mut self, replica: usize, loss: Loss) -> Checked {
        let lost = news(&self.inbox, self.setup.engine.lockstep).lost;
        let known = self.group_of(&lost).contains(&replica);
        if known || self.sites[replica].executor.is_none() {
            return Ok(());
        }
        let guilty = if loss == Loss::Silent { self.is_mute(replica) } else { self.hangs(replica) };
        ensure!("F25", guilty, "replica {replica} is {loss:?}, but does its work, or beats");
        match loss {
            Loss::Silent => self.tally.silent += 1,
            _ => self.tally.late += 1,
        }
        let back_ms = self.now_ms + 1 + self.chance.below(700);
        self.trace.note(self.now_ms, "given up", &[replica as u64]);
        self.inbox.push(Event::Lost { replica: Replica(replica as u16), loss });
        self.replace(replica, self.now_ms, back_ms)
    }

    /// Whether no sign of life comes from a replica's executor.
    fn is_mute(&self, replica: usize) -> bool {
        let stopped = |executor: &Executor| matches!(executor.hangs, Some((Hang::Stopped, _)));
        let mute = |executor: &Executor| stopped(executor) || executor.deaf;
        self.sites[replica].executor.as_ref().is_none_or(mute)
    }

    /// Whether something keeps a replica's group from its work.
    pub(crate) fn hangs(&self, replica: usize) -> bool {
        let works = |executor: &Executor| executor.hangs.is_none() && !executor.deaf;
        let group = self.group_of(&[replica]);
        !group.into_iter().all(|peer| self.sites[peer].executor.as_ref().is_some_and(works))
    }

    /// The executors of a replica do nothing any more, whether or not they say that they live.
    pub(crate) fn hang(&mut self, replica: usize) {
        let may = !self.healed && self.crashes_left > 0;
        let hang = self.chance.pick(&[Hang::Working, Hang::Stopped]);
        let Some(executor) = &mut self.sites[replica].executor else { return };
        if may && executor.hangs.is_none() {
            executor.hangs = Some((hang, self.now_ms));
            self.crashes_left -= 1;
            self.tally.hangs += 1;
            self.trace.note(self.now_ms, "hang", &[replica as u64]);
        }
    }

    /// F10, F25: a hang is noticed within the time that silence or a step may take, counted from when the engine last
    /// stood still, if that was later.
    fn check_hangs_are_noticed(&self) -> Checked {
        if self.standstill.is_some() || self.is_over() {
            return Ok(());
        }
        let hang = |site: &Site| site.executor.as_ref().and_then(|executor| executor.hangs);
        for (replica, site) in self.sites.iter().enumerate() {
            let Some((hang, since_ms)) = hang(site) else { continue };
            let since_ms = since_ms.max(self.woke_ms);
            let within_ms = match hang {
                Hang::Stopped => Some(since_ms + (SILENCE + SECOND_LOOK).as_millis() as u64),
                Hang::Working => {
                    let begun = site.vigil.begun.front().zip(site.vigil.steps.oldest());
                    begun.map(|((_, at_ms), (_, limit_ms))| {
                        since_ms.max(*at_ms) + limit_ms + 2 * BEAT_MS
                    })
                }
            };
            let late = within_ms.is_some_and(|within_ms| self.now_ms > within_ms + SLACK_MS);
            let (lasts_ms, stood) = (self.now_ms - since_ms, self.woke_ms);
            ensure!(
                "F10",
                !late,
                "{replica} hangs ({hang:?}) for {lasts_ms} ms, awake since {stood}"
            );
        }
        Ok(())
    }

    /// Whether nothing is left to be done, or nothing has happened for so long that nothing will.
    fn is_over(&self) -> bool {
        let done = self.healed && self.all_done() && self.engine.is_idle();
        let waits = self.sites.iter().any(|site| site.vigil.steps.oldest().is_some());
        done && !waits || self.quiet > QUIET_BEATS * self.sites.len()
    }
}
