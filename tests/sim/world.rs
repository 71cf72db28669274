//! The simulated world: a virtual clock, an agenda, the real engine, simulated executors and clients.
//!
//! Two phases. Safety: faults happen, everything is checked after every tick. Then all heals, and
//! within a bound of steps every request must end and the engine must be idle (`finish.rs`).

use crate::batch_checks::Told;
use crate::broken::{Broken, Checked, ensure};
use crate::chance::Chance;
use crate::client::{Client, Stage};
use crate::executor::{Executor, Ran};
use crate::happening::{Agenda, Happening, Reply};
use crate::hash_model::text::avalanche;
use crate::inside::is_vacant;
use crate::mirror::Mirror;
use crate::requests;
use crate::setup::{Faults, Setup};
use crate::trace::Trace;
use protocol::{BlockId, Replica, RequestId, Row, RowError};
use scheduler::{AbortCause, Control, Effect, Engine, Event, Planted, StepStats};

/// One replica, as the world knows it.
#[derive(Debug, Default)]
pub(crate) struct Site {
    /// Its executors, unless they are dead.
    pub(crate) executor: Option<Executor>,
    /// Counts its executors' lives.
    pub(crate) incarnation: u32,
    /// When the engine was told that they are dead, until it is told that they are back.
    pub(crate) lost_at_ms: Option<u64>,
    /// What its executors have been told.
    pub(crate) told: Told,
    /// What a subscriber of its KV events believes.
    pub(crate) mirror: Mirror,
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
    fn new(blocks: u32) -> Self {
        Self { blocks, ..Self::default() }
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
    pub(crate) aborts: u64,
    pub(crate) crashes: u64,
    pub(crate) stale: u64,
    pub(crate) failed_rows: u64,
    pub(crate) refused: u64,
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
    inbox: Vec<Event>,
    control: u64,
    crashes_left: u32,
}

impl World {
    /// The world of a seed, before its first event.
    pub(crate) fn new(seed: u64, planted: Planted, readable: bool) -> Self {
        let mut chance = Chance::new(seed);
        let setup = Setup::draw(&mut chance, planted);
        let engine = Engine::new(setup.engine.clone()).expect("drawn configurations are valid");
        let mut trace = Trace::new(readable);
        trace.line(|| format!("seed {seed}: {setup:#?}"));
        let mut world = Self {
            crashes_left: setup.faults.crashes,
            sites: (0..setup.engine.replicas).map(|_| Site::new(setup.engine.kv.blocks)).collect(),
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
            control: 0,
        };
        world.people();
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
            }
            while let Some(what) = self.agenda.take(self.now_ms) {
                self.happen(what)?;
            }
            self.tick()?;
            let bound = self.step_bound();
            ensure!("I12", self.tally.steps <= bound, "no end after {bound} steps");
        }
        self.finish()
    }

    /// Draws the clients, when they come and when some of them leave.
    fn people(&mut self) {
        let asked = requests::draw(&self.setup, &mut self.chance);
        let mut last_ms = 0;
        for (index, (at_ms, submit)) in asked.into_iter().enumerate() {
            self.clients.push(Client::new(submit, &self.setup));
            self.agenda.add(at_ms, Happening::Arrive(index));
            last_ms = at_ms;
            while self.chance.hits(self.setup.faults.abort) {
                let cause = self.chance.pick(&[
                    AbortCause::StopText,
                    AbortCause::ClientGone,
                    AbortCause::SlowReader,
                    AbortCause::Deadline,
                ]);
                let after_ms = self.chance.scaled(0, 2000);
                // One in a hundred overtakes its own request.
                let early = u64::from(self.chance.hits(10));
                let at_ms = (at_ms + u64::from(after_ms)).saturating_sub(early * 2000);
                self.agenda.add(at_ms, Happening::Abort(index, cause));
            }
        }
        let rest_ms = self.chance.below(500);
        self.agenda.add(last_ms + rest_ms, Happening::Heal);
    }

    /// Fresh executors for a replica, of the generation the engine expects.
    pub(crate) fn start_executor(&mut self, replica: usize) {
        let epoch = self.engine.epoch(Replica(replica as u16));
        let site = &mut self.sites[replica];
        let executor = Executor::new(epoch, site.blocks, &self.setup);
        site.executor = Some(executor);
        site.told.forget();
        site.vacant = vec![true; site.blocks as usize];
    }

    fn happen(&mut self, what: Happening) -> Checked {
        match what {
            Happening::Arrive(index) => self.arrive(index),
            Happening::Abort(index, cause) => self.abort(index, cause),
            Happening::StepDone { replica, incarnation } => {
                if self.sites[replica].incarnation == incarnation {
                    self.step_done(replica)?;
                }
            }
            Happening::Reply { replica, reply } => self.reply(replica, reply),
            Happening::Lost { replica } => {
                self.trace.note(self.now_ms, "lost", &[replica as u64]);
                self.inbox.push(Event::Lost { replica: Replica(replica as u16) });
            }
            Happening::Ready { replica } => {
                self.trace.note(self.now_ms, "ready", &[replica as u64]);
                let blocks = self.blocks_of_new_executors();
                self.sites[replica].blocks = blocks;
                let graph_rows = self.setup.engine.graph_rows.clone();
                let replica = Replica(replica as u16);
                self.inbox.push(Event::Ready { replica, blocks, graph_rows });
            }
            Happening::Clear => {
                self.cleared = true;
                self.control += 1;
                let op_id = self.control;
                self.inbox.push(Event::Control(Control::ClearPrefixCache { op_id }));
            }
            Happening::Wake => {}
            Happening::Heal => {
                self.setup.faults = Faults::none();
                self.trace.note(self.now_ms, "heal", &[]);
                if self.chance.hits(100) {
                    self.drain();
                }
            }
        }
        Ok(())
    }

    /// New executors may find less memory than the old ones: what no longer fits may fail.
    fn blocks_of_new_executors(&mut self) -> u32 {
        let blocks = self.setup.engine.kv.blocks;
        if !self.chance.hits(self.setup.faults.shrink) {
            return blocks;
        }
        let blocks = self.chance.between(1, blocks);
        let size = self.setup.block_tokens();
        for client in &mut self.clients {
            client.excuses.unavailable |= client.limit().div_ceil(size) > blocks;
        }
        blocks
    }

    fn arrive(&mut self, index: usize) {
        let client = &mut self.clients[index];
        client.stage = Stage::Live;
        let mut submit = client.submit.clone();
        // The keys come from the submitting thread; some submitters leave that to the engine.
        if !self.chance.hits(200) {
            submit.keys = self.engine.hasher().hash(&submit.tokens, submit.extra.as_deref());
        }
        self.tally.requests += 1;
        let (prompt, max_tokens) = (submit.tokens.len() as u64, u64::from(submit.max_tokens));
        self.trace.note(self.now_ms, "submit", &[submit.id.0, prompt, max_tokens]);
        self.inbox.push(Event::Submit(Box::new(submit)));
    }

    fn abort(&mut self, index: usize, cause: AbortCause) {
        let client = &mut self.clients[index];
        if client.stage == Stage::Live && client.excuses.abort.is_none() {
            client.excuses.abort = Some(cause);
            self.tally.aborts += 1;
        }
        let request = client.id();
        self.trace.note(self.now_ms, "abort", &[request.0]);
        self.inbox.push(Event::Abort { request, cause });
        if self.chance.hits(100) {
            // Nobody has this id.
            self.inbox.push(Event::Abort { request: RequestId(1 << 40), cause });
        }
    }

    /// I20: the server shuts down and takes back what is still live; nothing may run behind that.
    fn drain(&mut self) {
        for index in 0..self.clients.len() {
            if self.clients[index].stage == Stage::Live {
                self.abort(index, AbortCause::Drain);
            }
        }
    }

    /// The executor runs the step that was due, and with bad luck never runs another one.
    fn step_done(&mut self, replica: usize) -> Checked {
        let faults = self.setup.faults.clone();
        let Some(ran) = self.execute(replica, faults.row)? else {
            self.kick(replica);
            return Ok(());
        };
        let delay_ms = self.link_delay_ms();
        let Some(executor) = &mut self.sites[replica].executor else { return Ok(()) };
        executor.last_reply_ms = executor.last_reply_ms.max(self.now_ms + delay_ms);
        let at_ms = executor.last_reply_ms;
        if self.chance.hits(faults.duplicate) {
            let output = ran.output.clone();
            let later_ms = at_ms + self.chance.below(200);
            let reply = Reply { output, filled: Vec::new(), repeated: true };
            self.agenda.add(later_ms + 1, Happening::Reply { replica, reply });
        }
        let reply = Reply { output: ran.output, filled: ran.filled, repeated: false };
        self.agenda.add(at_ms, Happening::Reply { replica, reply });
        if self.crashes_left > 0 && self.chance.hits(faults.crash) {
            self.crash(replica)?;
        } else {
            self.kick(replica);
        }
        Ok(())
    }

    /// Runs the batch at the head of a replica's queue; some rows may fail.
    fn execute(&mut self, replica: usize, rate: u32) -> Result<Option<Ran>, Broken> {
        let luck = if rate > 0 { self.chance.bits() } else { 0 };
        let draw = move |row: &Row| avalanche(luck ^ row.request.0) % 1000;
        let fails =
            move |row: &Row| (draw(row) < u64::from(rate)).then_some(RowError::NonFiniteLogits);
        let Some(executor) = &mut self.sites[replica].executor else { return Ok(None) };
        let ran = executor
            .run(fails)
            .map_err(|violation| Broken { invariant: "I7", text: violation.0 })?;
        let Some(mut ran) = ran else { return Ok(None) };
        for (index, row) in ran.rows.iter().enumerate() {
            let client = &mut self.clients[row.request.0 as usize - 1];
            let output = &mut ran.output.rows[index];
            let garbled = rate > 0 && draw(row) >= 1000 - u64::from(rate);
            if garbled && output.error.is_none() {
                client.excuses.bad_output = true;
                // An id that does not exist, an id too many, or more drafts accepted than there were.
                let id = self.setup.engine.limits.vocab_size;
                match output.emitted.first_mut() {
                    Some(first) if luck % 3 == 0 => *first = id,
                    Some(_) if luck % 3 == 1 => {
                        let made_up = row.drafts + 1 - output.accepted;
                        output.accepted += made_up;
                        output.emitted.extend((0..made_up).map(|_| 0));
                    }
                    _ => output.emitted.push(0),
                }
                ran.filled.retain(|(row, _)| *row != index);
            }
            client.excuses.row_failed |= output.error.is_some();
            if garbled || output.error.is_some() {
                self.tally.failed_rows += 1;
                self.trace.note(self.now_ms, "row fails", &[row.request.0, u64::from(row.start)]);
            }
        }
        Ok(Some(ran))
    }

    /// Starts the next step of a replica, if its executors are idle and one waits.
    pub(crate) fn kick(&mut self, replica: usize) {
        let (step_ms, stall) = (self.setup.load.step_ms, self.setup.faults.stall);
        let now_ms = self.now_ms;
        let site = &mut self.sites[replica];
        let Some(executor) = &mut site.executor else { return };
        let Some(start_ms) = executor.next_start_ms(now_ms) else { return };
        executor.busy = true;
        let mut end_ms = start_ms + self.chance.below(u64::from(step_ms) + 1);
        if self.chance.hits(stall) {
            end_ms += self.chance.below(3000);
        }
        let incarnation = site.incarnation;
        self.agenda.add(end_ms, Happening::StepDone { replica, incarnation });
    }

    /// A replica's executors die, in lockstep those of all ranks.
    fn crash(&mut self, replica: usize) -> Checked {
        self.crashes_left -= 1;
        self.tally.crashes += 1;
        let group =
            if self.setup.engine.lockstep { 0..self.sites.len() } else { replica..replica + 1 };
        let seen_ms = self.now_ms + self.chance.below(50);
        let back_ms = seen_ms + 1 + self.chance.below(700);
        self.trace.note(self.now_ms, "crash", &[replica as u64]);
        self.agenda.add(seen_ms, Happening::Lost { replica });
        if self.chance.hits(200) {
            // Two ranks of the replica report it.
            self.agenda.add(seen_ms + self.chance.below(2), Happening::Lost { replica });
        }
        for replica in group {
            let late_ms = self.chance.below(30);
            self.agenda.add(back_ms + late_ms, Happening::Ready { replica });
            self.sites[replica].incarnation += 1;
            self.leave_replies_behind(replica)?;
            self.sites[replica].executor = None;
        }
        if self.setup.engine.limits.loss_timeout_ms < 1000 {
            for after_ms in (0..2000).step_by(50) {
                self.agenda.add(seen_ms + after_ms, Happening::Wake);
            }
        }
        Ok(())
    }

    /// Replies to what a dying executor had in its queue may still arrive, whenever they like.
    fn leave_replies_behind(&mut self, replica: usize) -> Checked {
        let rate = self.setup.faults.stale;
        while self.sites[replica].executor.as_ref().is_some_and(Executor::has_work) {
            let ran = self.execute(replica, 0)?;
            let Some(Ran { output, .. }) = ran.filter(|_| self.chance.hits(rate)) else { continue };
            // Behind the news of the death: before it, it would be an ordinary reply.
            let at_ms = self.now_ms + 51 + self.chance.below(1500);
            let reply = Reply { output, filled: Vec::new(), repeated: false };
            self.agenda.add(at_ms, Happening::Reply { replica, reply });
        }
        Ok(())
    }

    /// An output reaches the engine.
    fn reply(&mut self, replica: usize, reply: Reply) {
        let lost_now = self.group_of(&comings_and_goings(&self.inbox).0).contains(&replica);
        let site = &mut self.sites[replica];
        let epoch = self.engine.epoch(Replica(replica as u16));
        let stale = reply.repeated || lost_now || reply.output.epoch != epoch;
        if stale {
            site.stale_outputs += 1;
            self.tally.stale += 1;
        } else {
            site.told.in_flight = site.told.in_flight.saturating_sub(1);
            reply.filled.iter().for_each(|&(_, context)| site.mirror.computed(context));
        }
        let numbers = [replica as u64, reply.output.step.0, reply.output.epoch.0, u64::from(stale)];
        self.trace.note(self.now_ms, "output", &numbers);
        let replica = Replica(replica as u16);
        self.inbox.push(Event::Output { replica, output: reply.output });
    }

    fn tick(&mut self) -> Checked {
        if self.chance.hits(self.setup.faults.clear) {
            self.happen(Happening::Clear)?;
        }
        let mut inbox = std::mem::take(&mut self.inbox);
        let aborted: Vec<usize> = aborted_live(&inbox, &self.clients);
        let (lost, ready) = comings_and_goings(&inbox);
        let submitted = submitted(&inbox);
        self.losing = !lost.is_empty();
        self.note_losses(&lost);
        self.tally.ticks += 1;
        let mut effects = std::mem::take(&mut self.effects);
        self.engine.tick(self.now_ms, &mut inbox, &mut effects);
        self.inbox = inbox;
        for replica in ready {
            self.sites[replica].lost_at_ms = None;
            self.start_executor(replica);
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
        for index in aborted {
            let (id, stage) = (self.clients[index].id().0, self.clients[index].stage);
            ensure!("I9", stage == Stage::Done, "request {id} was aborted, but lives on");
        }
        for index in submitted {
            let client = &self.clients[index];
            let (id, refused) = (client.id().0, client.stage == Stage::Done);
            let hopeless = client.is_hopeless(&self.setup);
            ensure!("I9", refused || !hopeless, "request {id} can never be served, but lives");
        }
        self.check_queue()?;
        self.check_patience()?;
        self.engine.check();
        self.poison_freed();
        for replica in 0..self.sites.len() {
            self.kick(replica);
        }
        Ok(())
    }

    /// Notes which replicas are gone and for how long.
    fn note_losses(&mut self, lost: &[usize]) {
        let now_ms = self.now_ms;
        for replica in self.group_of(lost) {
            self.sites[replica].lost_at_ms.get_or_insert(now_ms);
            self.sites[replica].told.forget();
        }
        let timeout_ms = self.setup.engine.limits.loss_timeout_ms;
        let gone = |site: &Site| site.lost_at_ms.is_some_and(|at_ms| now_ms - at_ms >= timeout_ms);
        if self.sites.iter().any(gone) {
            for client in &mut self.clients {
                client.excuses.unavailable |= client.stage == Stage::Live;
            }
        }
    }

    fn group_of(&self, lost: &[usize]) -> Vec<usize> {
        if self.setup.engine.lockstep && !lost.is_empty() {
            return (0..self.sites.len()).collect();
        }
        lost.to_vec()
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

    /// A one-way delay of a link.
    pub(crate) fn link_delay_ms(&mut self) -> u64 {
        self.chance.below(u64::from(self.setup.load.link_ms) + 1)
    }

    /// Steps within which everything must be over: each token is forwarded at most once per
    /// admission, and every step forwards a token on some replica.
    fn step_bound(&self) -> u64 {
        let tokens: u64 = self.clients.iter().map(|c| u64::from(c.limit())).sum();
        let lives = 6 + self.tally.crashes;
        tokens * lives * u64::from(self.setup.engine.replicas) + 1000
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

/// Replicas whose loss and whose return are in the inbox.
fn comings_and_goings(inbox: &[Event]) -> (Vec<usize>, Vec<usize>) {
    let lost = inbox.iter().filter_map(|event| match event {
        Event::Lost { replica } => Some(usize::from(replica.0)),
        _ => None,
    });
    let ready = inbox.iter().filter_map(|event| match event {
        Event::Ready { replica, .. } => Some(usize::from(replica.0)),
        _ => None,
    });
    (lost.collect(), ready.collect())
}
