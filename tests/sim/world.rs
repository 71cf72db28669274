//! The simulated world: a virtual clock, an agenda, the real engine, simulated executors and clients.
//!
//! Two phases. Safety: faults happen, everything is checked after every tick. Then all heals, and
//! within a bound of steps every request must end and the engine must be idle (`finish.rs`).

use crate::batch_checks::Told;
use crate::broken::{Checked, ensure};
use crate::chance::Chance;
use crate::client::{Client, Stage};
use crate::executor::Executor;
use crate::happening::{Agenda, Happening};
use crate::inside::is_vacant;
use crate::mirror::Mirror;
use crate::setup::{Faults, GROUPS, LATER, LINKS, Setup};
use crate::standstill::{STANDSTILLS, Standstill};
use crate::subscriber::Subscriber;
use crate::trace::Trace;
use crate::vigil::{Sign, Vigil};
use protocol::{BlockId, Replica};
use scheduler::{Control, Effect, Engine, Event, Loss, Planted, StepStats};

/// One replica, as the world knows it.
#[derive(Debug, Default)]
pub(crate) struct Site {
    /// Its executors, unless they are dead.
    pub(crate) executor: Option<Executor>,
    /// Counts its executors' lives.
    pub(crate) incarnation: u32,
    /// Which of these lives the engine was last told of.
    pub(crate) announced: u32,
    /// When the engine was told that they are dead, until it is told that they are back.
    pub(crate) lost_at_ms: Option<u64>,
    /// What its executors have been told.
    pub(crate) told: Told,
    /// Stays of evicted blocks that were told so far.
    pub(crate) stays: u64,
    /// What a subscriber of its KV events believes.
    pub(crate) mirror: Mirror,
    /// Another one, who comes and goes.
    pub(crate) subscriber: Option<Subscriber>,
    /// Lives of its executors whose link has broken: what was on the way is lost.
    pub(crate) severed: Vec<u32>,
    /// What its executors are watched by.
    pub(crate) vigil: Vigil,
    /// Its counters.
    pub(crate) stats: StepStats,
    /// Outputs that the engine must have dropped.
    pub(crate) stale_outputs: u64,
    /// Blocks its executors allocated.
    pub(crate) blocks: u32,
    /// Blocks that nobody held and nobody could find after the last tick.
    vacant: Vec<bool>,
}

impl Site {
    fn new(blocks: u32, planted: Planted) -> Self {
        Self { blocks, vigil: Vigil::new(planted), ..Self::default() }
    }
}

/// What a run did, to show that the faults really happened.
#[derive(Debug, Clone, Copy, Default)]
pub(crate) struct Tally {
    pub(crate) steps: u64,
    pub(crate) ticks: u64,
    pub(crate) rows: u64,
    pub(crate) tokens: u64,
    pub(crate) requests: u64,
    pub(crate) preemptions: u64,
    pub(crate) hits: u64,
    pub(crate) stored: u64,
    pub(crate) removed: u64,
    pub(crate) stays: u64,
    pub(crate) aborts: u64,
    pub(crate) crashes: u64,
    pub(crate) stale: u64,
    pub(crate) failed_rows: u64,
    pub(crate) masked_rows: u64,
    pub(crate) late_masks: u64,
    pub(crate) ended_masks: u64,
    pub(crate) refused: u64,
    /// Drafts verified, and of these accepted.
    pub(crate) drafted: u64,
    pub(crate) accepted: u64,
    /// Rows that began behind their `start`, where only the seat knew.
    pub(crate) moved: u64,
    /// Batches of groups of 8 ranks that step together, and how many of them were empty.
    pub(crate) batches_of_eight: u64,
    pub(crate) idle_of_eight: u64,
    /// Deaths of a rank before all of its group were back.
    pub(crate) relapses: u64,
    /// Links that broke, and of these the ones that first lost batches only.
    pub(crate) cuts: u64,
    pub(crate) halves: u64,
    /// Batches and replies that were lost on them.
    pub(crate) lost_frames: u64,
    /// Subscribers that came back and were told what they had missed, or everything.
    pub(crate) replays: u64,
    pub(crate) listings: u64,
    /// Requests sent while another one of their name was in flight, and orders by name that meant several.
    pub(crate) namesakes: u64,
    pub(crate) orders: u64,
    /// Times in which the engine stood still.
    pub(crate) standstills: u64,
    /// Executors that hung, and how many were given up as late and as silent.
    pub(crate) hangs: u64,
    pub(crate) late: u64,
    pub(crate) silent: u64,
    /// Executors that seemed late or silent at a first look and did their work.
    pub(crate) spared: u64,
}

/// The world of one seed.
#[derive(Debug)]
pub(crate) struct World {
    pub(crate) setup: Setup,
    pub(crate) chance: Chance,
    pub(crate) now_ms: u64,
    pub(crate) agenda: Agenda,
    pub(crate) engine: Engine,
    pub(crate) sites: Vec<Site>,
    pub(crate) clients: Vec<Client>,
    pub(crate) trace: Trace,
    pub(crate) tally: Tally,
    /// Whether somebody cleared the prefix cache.
    pub(crate) cleared: bool,
    /// Whether a replica is lost in this tick.
    pub(crate) losing: bool,
    pub(crate) effects: Vec<Effect>,
    pub(crate) inbox: Vec<Event>,
    /// What was said besides, since the last tick.
    pub(crate) signs: Vec<Sign>,
    control: u64,
    pub(crate) crashes_left: u32,
    pub(crate) standstills_left: u32,
    /// What stands still, and since when nothing has.
    pub(crate) standstill: Option<Standstill>,
    pub(crate) woke_ms: u64,
    /// The same of the engine's thread alone, and when it last had a tick.
    pub(crate) engine_woke_ms: u64,
    pub(crate) ticked_ms: u64,
    /// Whether nothing goes wrong any more.
    pub(crate) healed: bool,
    /// Signs of life since something else happened.
    pub(crate) quiet: usize,
}

impl World {
    /// The world of a seed, before its first event.
    pub(crate) fn new(seed: u64, planted: Planted, readable: bool) -> Self {
        let mut chance = Chance::new(seed);
        let draw = match seed {
            LINKS.. => Setup::draw_links,
            GROUPS.. => Setup::draw_group,
            _ => Setup::draw,
        };
        let mut setup = draw(&mut chance, planted);
        let mut later = Chance::new(seed ^ LATER);
        setup.draw_later(&mut later);
        let engine = Engine::new(setup.engine.clone()).expect("drawn configurations are valid");
        let mut trace = Trace::new(readable);
        trace.line(|| format!("seed {seed}: {setup:#?}"));
        let mut world = Self {
            crashes_left: setup.faults.crashes,
            sites: (0..setup.engine.replicas)
                .map(|_| Site::new(setup.engine.kv.blocks, planted))
                .collect(),
            engine,
            setup,
            chance,
            now_ms: 0,
            agenda: Agenda::default(),
            clients: Vec::new(),
            trace,
            tally: Tally::default(),
            cleared: false,
            losing: false,
            effects: Vec::new(),
            inbox: Vec::new(),
            signs: Vec::new(),
            control: 0,
            standstills_left: STANDSTILLS,
            standstill: None,
            woke_ms: 0,
            engine_woke_ms: 0,
            ticked_ms: 0,
            healed: false,
            quiet: 0,
        };
        world.subscribe();
        world.people();
        world.name_people(&mut later);
        for replica in 0..world.sites.len() {
            world.start_executor(replica);
        }
        world
    }

    /// Runs both phases.
    pub(crate) fn run(&mut self) -> Checked {
        while let Some(next_ms) = self.agenda.next_ms() {
            self.now_ms = self.now_ms.max(next_ms);
            if self.chance.hits(self.setup.faults.pause) {
                self.now_ms += self.chance.below(60);
            }
            if self.chance.hits(self.setup.faults.jump) {
                self.now_ms += 86_400_000;
                (self.woke_ms, self.engine_woke_ms) = (self.now_ms, self.now_ms);
            }
            self.go_on()?;
            while let Some(what) = self.agenda.take(self.now_ms) {
                self.happen(what)?;
            }
            self.may_stand_still();
            self.tick()?;
            self.stand_still()?;
            let bound = self.step_bound();
            ensure!("I12", self.tally.steps <= bound, "no end after {bound} steps");
        }
        self.finish()
    }

    /// Fresh executors for a replica, of the generation the engine expects.
    pub(crate) fn start_executor(&mut self, replica: usize) {
        let epoch = self.engine.epoch(Replica(replica as u16));
        let site = &mut self.sites[replica];
        let executor = Executor::new(epoch, site.blocks, &self.setup);
        site.executor = Some(executor);
        site.told.forget();
        site.vacant = vec![true; site.blocks as usize];
        self.watch(replica);
    }

    pub(crate) fn happen(&mut self, what: Happening) -> Checked {
        let Some(what) = self.lie_unread(what) else { return Ok(()) };
        match what {
            Happening::Arrive(index) => self.arrive(index),
            Happening::Abort(index, cause) => self.abort(index, cause),
            Happening::StepDone { replica, incarnation } => {
                if self.sites[replica].incarnation == incarnation {
                    self.step_done(replica)?;
                }
            }
            Happening::Reply { replica, reply } => self.reply(replica, reply),
            Happening::Lost { replica, incarnation } => {
                // Of two deaths the later one is told: whoever is back in between is not taken for dead.
                if self.sites[replica].incarnation == incarnation {
                    self.trace.note(self.now_ms, "lost", &[replica as u64]);
                    let (replica, loss) = (Replica(replica as u16), Loss::Exited);
                    self.inbox.push(Event::Lost { replica, loss });
                }
            }
            Happening::Ready { replica, incarnation } => {
                if self.sites[replica].incarnation == incarnation {
                    self.ready(replica);
                }
            }
            Happening::Relapse { replica, incarnation } => self.relapse(replica, incarnation)?,
            Happening::Deaf { replica, incarnation } => {
                if self.sites[replica].incarnation == incarnation {
                    self.crash(replica)?;
                }
            }
            Happening::Beat { replica, life } => self.beat(replica, life),
            Happening::Alive { replica, life } => self.alive(replica, life),
            Happening::Look { replica, life } => self.look(replica, life)?,
            Happening::Hang { replica } => self.hang(replica),
            Happening::Clear => {
                self.cleared = true;
                self.control += 1;
                let op_id = self.control;
                let restart = op_id.is_multiple_of(2);
                self.inbox.push(Event::Control(Control::ClearPrefixCache { op_id, restart }));
            }
            Happening::MaskMade { request, outputs } => self.mask_made(request, outputs),
            Happening::MasksOver { request } => {
                self.trace.note(self.now_ms, "masks over", &[request.0]);
                self.inbox.push(Event::MasksOver { request });
            }
            Happening::Wake => {}
            Happening::Heal => {
                self.setup.faults = Faults::none();
                self.healed = true;
                self.trace.note(self.now_ms, "heal", &[]);
                if self.chance.hits(100) {
                    self.drain();
                }
            }
        }
        Ok(())
    }

    fn tick(&mut self) -> Checked {
        if self.chance.hits(self.setup.faults.clear) {
            self.happen(Happening::Clear)?;
        }
        let bearers = self.order();
        self.judge()?;
        let mut inbox = std::mem::take(&mut self.inbox);
        let aborted: Vec<usize> = aborted_live(&inbox, &self.clients);
        let News { lost, back, relapsed } = news(&inbox, self.setup.engine.lockstep);
        let submitted = submitted(&inbox);
        self.losing = !lost.is_empty();
        for replica in relapsed {
            self.sites[replica].lost_at_ms = None; // And lost anew, now.
        }
        self.note_losses(&lost);
        self.tally.ticks += 1;
        let mut effects = std::mem::take(&mut self.effects);
        self.engine.tick(self.now_ms, &mut inbox, &mut effects);
        self.inbox = inbox;
        for replica in back {
            self.sites[replica].lost_at_ms = None;
            self.start_executor(replica);
            // It may have died before the engine took notice of it.
            let site = &mut self.sites[replica];
            site.executor.take_if(|_| site.announced != site.incarnation);
        }
        self.absorb(&mut effects)?;
        if self.chance.hits(100) {
            self.engine.tick(self.now_ms, &mut Vec::new(), &mut effects);
            let sends = effects.iter().any(|effect| matches!(effect, Effect::Send { .. }));
            ensure!("I12", !sends, "a tick left work undone, the next one sends {effects:?}");
            effects.clear();
        }
        self.effects = effects;
        self.check_moved()?;
        for replica in self.group_of(&lost) {
            self.sites[replica].mirror.lose();
        }
        self.check_taken_in(&aborted, &submitted)?;
        self.check_order_by_name(&bearers)?;
        self.come_and_go()?;
        self.check_queue()?;
        self.check_patience()?;
        self.engine.check();
        self.poison_freed();
        for replica in 0..self.sites.len() {
            self.kick(replica);
        }
        Ok(())
    }

    /// I9: whoever was taken back has ended, and so has whoever can never be served.
    fn check_taken_in(&self, aborted: &[usize], submitted: &[usize]) -> Checked {
        for &index in aborted {
            let (id, stage) = (self.clients[index].id().0, self.clients[index].stage);
            ensure!("I9", stage == Stage::Done, "request {id} was aborted, but lives on");
        }
        for &index in submitted {
            let client = &self.clients[index];
            let (id, refused) = (client.id().0, client.stage == Stage::Done);
            let hopeless = client.is_hopeless(&self.setup);
            ensure!("I9", refused || !hopeless, "request {id} can never be served, but lives");
        }
        Ok(())
    }

    /// Notes which replicas are gone and for how long.
    fn note_losses(&mut self, lost: &[usize]) {
        let now_ms = self.now_ms;
        for replica in self.group_of(lost) {
            self.sites[replica].lost_at_ms.get_or_insert(now_ms);
            self.sites[replica].told.forget();
            self.sites[replica].vigil.lose();
        }
        let timeout_ms = self.setup.engine.limits.loss_timeout_ms;
        let gone = |site: &Site| site.lost_at_ms.is_some_and(|at_ms| now_ms - at_ms >= timeout_ms);
        if self.sites.iter().any(gone) {
            for client in &mut self.clients {
                client.excuses.unavailable |= client.stage == Stage::Live;
            }
        }
    }

    pub(crate) fn group_of(&self, lost: &[usize]) -> Vec<usize> {
        if self.setup.engine.lockstep && !lost.is_empty() {
            return (0..self.sites.len()).collect();
        }
        lost.to_vec()
    }

    /// Whether every request has ended.
    pub(crate) fn all_done(&self) -> bool {
        self.clients.iter().all(|client| client.stage == Stage::Done)
    }

    /// What was given back becomes unreadable, behind all that has been sent.
    fn poison_freed(&mut self) {
        for (replica, site) in self.sites.iter_mut().enumerate() {
            let Some(executor) = &mut site.executor else { continue };
            let mut freed = Vec::new();
            for (block, was_vacant) in site.vacant.iter_mut().enumerate() {
                let block = BlockId(block as u32);
                let vacant = is_vacant(&self.engine, Replica(replica as u16), block);
                if vacant && !*was_vacant {
                    freed.push(block);
                }
                *was_vacant = vacant;
            }
            if !freed.is_empty() {
                executor.free(freed);
            }
        }
    }

    /// Steps within which everything must be over: each token is forwarded at most once per
    /// admission and once more for each late mask, and every step forwards a token on some replica.
    fn step_bound(&self) -> u64 {
        let tokens: u64 = self.clients.iter().map(|c| u64::from(c.limit())).sum();
        // Every second time that the cache is cleared all begin anew.
        let given_up = self.tally.late + self.tally.silent;
        let lives = 6 + self.tally.crashes + given_up + self.control / 2;
        tokens * lives * u64::from(self.setup.engine.replicas) + self.tally.late_masks + 1000
    }
}

/// Clients whose submit is in the inbox.
fn submitted(inbox: &[Event]) -> Vec<usize> {
    let index = |event: &Event| match event {
        Event::Submit(submit) => Some(submit.id.0 as usize - 1),
        _ => None,
    };
    inbox.iter().filter_map(index).collect()
}

/// Live clients whose abort is in the inbox, behind their submit.
fn aborted_live(inbox: &[Event], clients: &[Client]) -> Vec<usize> {
    let arrives_later = |at: usize, id| {
        inbox[at..].iter().any(|e| matches!(e, Event::Submit(submit) if submit.id == id))
    };
    let live = |(at, event): (usize, &Event)| match event {
        Event::Abort { request, .. } if !arrives_later(at, *request) => {
            let index = request.0 as usize - 1;
            clients.get(index).is_some_and(|client| client.stage == Stage::Live).then_some(index)
        }
        _ => None,
    };
    inbox.iter().enumerate().filter_map(live).collect()
}

/// Replicas by what the inbox says of them.
#[derive(Debug, Default)]
pub(crate) struct News {
    /// Whose loss is there.
    pub(crate) lost: Vec<usize>,
    /// Who is back.
    pub(crate) back: Vec<usize>,
    /// Who was back for no time at all: the loss of its group stands behind its return.
    pub(crate) relapsed: Vec<usize>,
}

/// Of replicas that step together (`lockstep`: all), what is lost is the group.
pub(crate) fn news(inbox: &[Event], lockstep: bool) -> News {
    let mut news = News::default();
    for event in inbox {
        match event {
            Event::Lost { replica, .. } => {
                let gone = usize::from(replica.0);
                let relapsed = news.back.extract_if(.., |replica| lockstep || *replica == gone);
                news.relapsed.extend(relapsed);
                news.lost.push(gone);
            }
            Event::Ready { replica, .. } => news.back.push(usize::from(replica.0)),
            _ => {}
        }
    }
    news
}
