//! The scheduler's thread: drains its inbox, ticks the engine, sends the effects.
//!
//! Owns the engine; sleeps while nothing happens and wakes a few times a second for the heartbeat.
//! A panic here means that the books are wrong: the process dumps and aborts.

use crate::engine_client::{ENGINE_LOST, EngineClient, Inbox, Resident, Sender, Signal};
use crate::grammar::MaskWorkers;
use crate::kv_events::Feed;
use crate::launcher::executor::ExecutorLink;
use crate::launcher::host::Observers;
use crate::launcher::station::Station;
use crate::launcher::step_watch::{BatchFacts, StepWatch, most_pairs};
use crate::metrics::StartFailure;
use protocol::{Batch, Epoch, Ready, Replica, StepId, ToExecutor};
use scheduler::{Control, Effect, Engine, Event, Loss, StepStats, TokenEvent, Work};
use std::collections::VecDeque;
use std::ops::ControlFlow;
use std::panic::{AssertUnwindSafe, catch_unwind};
use std::sync::Arc;
use std::sync::mpsc::{self as std_mpsc, SyncSender};
use std::thread::{self, JoinHandle};
use std::time::Duration;
use tokio::sync::{mpsc, oneshot};

/// Longest sleep of an idle engine: the period of its heartbeat. Stations take a much longer one for a pause of the process.
const HEARTBEAT: Duration = Duration::from_millis(250);
/// Lists of events that may wait to be handed out before the engine waits too.
pub const LISTS_WAITING_MAX: usize = 64;
/// Lists handed out before streams get a turn.
const LISTS_PER_TURN: usize = 8;

/// Something the main thread must know.
pub enum Notice {
    /// The process got this signal.
    Signal(i32),
    /// The executors of a replica are lost. The engine has taken note and waits for some of the next generation.
    ExecutorLost {
        /// Whose.
        replica: Replica,
        /// That generation.
        epoch: Epoch,
        /// What became of the former ones.
        cause: String,
    },
    /// A start of a replica's executors is over.
    Up {
        /// Whose; of replicas that step together, the first.
        replica: Replica,
        /// Their generation.
        epoch: Epoch,
        /// The links to them, those to replicas that step with it behind, and what they brought up; or why they did
        /// not come up.
        outcome: Result<(Vec<ExecutorLink>, Ready), FailedStart>,
    },
    /// There is no executor and will be none; the engine has stopped.
    EngineFailed(String),
}

/// Executors that were started again and have not become ready.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct FailedStart {
    /// The class of failure.
    pub failure: StartFailure,
    /// What happened, in words.
    pub text: String,
}

/// Everything the thread works with.
pub struct EngineThread {
    /// The scheduler.
    pub engine: Engine,
    /// Who hears what the prefix index holds, by replica; empty = nobody.
    pub kv_events: Vec<Feed>,
    /// Where submits and answers arrive.
    pub inbox: Arc<Inbox<Signal>>,
    /// The executors, by replica.
    pub stations: Vec<Station>,
    /// Whether lost executors can be replaced: they were processes.
    pub recovers: bool,
    /// Where news of requests go.
    pub news: mpsc::Sender<Vec<TokenEvent>>,
    /// For the end of everything.
    pub client: EngineClient,
    /// Who hears of what it does.
    pub observers: Observers,
    /// Who makes the masks of constrained requests.
    pub masks: MaskWorkers,
    /// Road to the main thread.
    pub notices: std_mpsc::Sender<Notice>,
}

/// What is under way between two looks into the inbox.
struct Desk {
    /// For the next tick.
    events: Vec<Event>,
    clocks: StepWatch,
    /// Of replicas that step together: most pairs of each step of this tick.
    most_pairs: Vec<(StepId, u64)>,
    /// Who waits to hear whether cached prefixes were forgotten, in the order of the orders.
    clearing: VecDeque<oneshot::Sender<bool>>,
}

/// How the loop ends.
enum End {
    /// It was told to.
    Stopped,
    /// There is no executor and will be none.
    Failed(String),
}

impl EngineThread {
    /// Starts the thread.
    pub fn spawn(self) -> std::io::Result<JoinHandle<()>> {
        thread::Builder::new().name("scheduler".to_owned()).spawn(move || {
            let client = self.client.clone();
            if catch_unwind(AssertUnwindSafe(|| self.run())).is_err() {
                let stats = client.replicas();
                tracing::error!(?stats, "the scheduler broke an invariant: aborting");
                std::process::abort();
            }
        })
    }

    fn run(mut self) {
        let (mut signals, mut effects) = (Vec::new(), Vec::new());
        let clocks = StepWatch::new(Arc::clone(&self.observers.metrics), self.stations.len());
        let mut desk =
            Desk { events: Vec::new(), clocks, most_pairs: Vec::new(), clearing: VecDeque::new() };
        loop {
            desk.clocks.sleeps();
            self.inbox.take(&mut signals, HEARTBEAT);
            desk.clocks.wakes();
            let now_ms = self.observers.health.beat();
            self.stations.iter_mut().for_each(|station| station.awake(now_ms));
            if !self.recovers {
                // The executors live and die with this process.
                self.stations.iter().flat_map(Station::ranks).for_each(|rank| {
                    self.observers.metrics.life.alive(rank);
                });
            }
            for signal in signals.drain(..) {
                match self.hear(signal, now_ms, &mut desk) {
                    ControlFlow::Continue(()) => {}
                    ControlFlow::Break(End::Stopped) => return self.stop(),
                    ControlFlow::Break(End::Failed(cause)) => return self.fail(cause),
                }
            }
            let lost = self.lose(&mut desk);
            self.engine.tick_timed(now_ms, &mut desk.events, &mut effects, &mut desk.clocks);
            // The masks of a batch build on what the same tick committed, which comes behind it.
            self.masks.hear(&effects);
            desk.clocks.ticked(&effects);
            if self.engine.group(Replica(0)).count() > 1 {
                desk.most_pairs = most_pairs(&effects);
            }
            for effect in effects.drain(..) {
                self.act(effect, now_ms, &mut desk);
            }
            self.flush_kv_events();
            self.report_steps();
            for (replica, cause) in lost {
                let epoch = self.engine.epoch(replica);
                // The main thread may have left already, at shutdown.
                let _ = self.notices.send(Notice::ExecutorLost { replica, epoch, cause });
            }
        }
    }

    /// Takes one signal; breaks if the loop is to end.
    fn hear(&mut self, signal: Signal, now_ms: u64, desk: &mut Desk) -> ControlFlow<End> {
        match signal {
            Signal::Event(event) => {
                if let Event::Output { replica, output } = &event {
                    desk.clocks.answered(*replica, output);
                    self.station(*replica).answered(output.step, now_ms);
                    self.alive(Sender { replica: *replica, epoch: output.epoch, rank: 0 });
                }
                desk.events.push(event);
            }
            Signal::Guide { request, guide } => self.masks.begin(request, guide),
            Signal::Lost { sender, loss, cause } if self.is_news(sender) => {
                if !self.recovers {
                    return ControlFlow::Break(End::Failed(cause));
                }
                self.give_up(sender.replica, loss, cause);
            }
            Signal::Back { replica, executor, ready } => {
                self.resume(replica, executor, ready, desk);
            }
            Signal::Profile { on, replies } => {
                self.stations.iter_mut().for_each(|station| station.profile(on, &replies));
            }
            Signal::Profiled(sender, profiled) if self.is_news(sender) => {
                self.station(sender.replica).profiled(sender.rank, profiled);
            }
            Signal::StepDone(sender, step) if self.is_news(sender) => {
                self.station(sender.replica).done(sender.rank, step);
                self.alive(sender);
            }
            Signal::Beat(sender) if self.is_news(sender) => self.executor_lives(sender, now_ms),
            // Of a former generation.
            Signal::Lost { .. } | Signal::Profiled(..) | Signal::StepDone(..) | Signal::Beat(_) => {
            }
            Signal::ClearPrefixCache { restart, reply } => {
                desk.clearing.push_back(reply);
                let op_id = 0; // Answers come in the order of the orders.
                desk.events.push(Event::Control(Control::ClearPrefixCache { op_id, restart }));
            }
            Signal::Resident { reply } if reply.is_closed() => {} // Whoever asked has gone.
            Signal::Resident { reply } => drop(reply.send(self.resident())),
            Signal::GiveUp(cause) => return ControlFlow::Break(End::Failed(cause)),
            Signal::Stop => return ControlFlow::Break(End::Stopped),
        }
        ControlFlow::Continue(())
    }

    fn station(&mut self, replica: Replica) -> &mut Station {
        &mut self.stations[usize::from(replica.0)]
    }

    /// An executor gave a sign of life: is the oldest step of its replica late?
    fn executor_lives(&mut self, sender: Sender, now_ms: u64) {
        self.alive(sender);
        let station = &mut self.stations[usize::from(sender.replica.0)];
        let lateness = station.beat(sender.rank, now_ms);
        lateness.ranks.into_iter().for_each(|rank| self.observers.metrics.life.late(rank));
        if let Some(cause) = lateness.cause {
            let cause = cause + &self.others_behind(sender.replica);
            self.give_up(sender.replica, Loss::Late, cause);
        }
    }

    /// Ranks of other replicas in the same group step that have not done it either, in words.
    fn others_behind(&self, replica: Replica) -> String {
        let others = self.engine.group(replica).filter(|other| *other != replica);
        let behind = others.flat_map(|other| self.stations[usize::from(other.0)].unfinished());
        let behind: Vec<String> = behind.map(|rank| rank.0.to_string()).collect();
        if behind.is_empty() {
            return String::new();
        }
        format!("; late of other replicas: rank {}", behind.join(", rank "))
    }

    /// Gives up the executors of a replica, and with them those of replicas that step with it. What comes first is the
    /// reason: the others only follow.
    fn give_up(&mut self, replica: Replica, loss: Loss, cause: String) {
        let given_up = |peer: Replica| self.stations[usize::from(peer.0)].lost.is_some();
        if !self.engine.group(replica).any(given_up) {
            self.station(replica).lost = Some((loss, cause));
        }
    }

    /// Whoever speaks lives: one that answers steps has no time to beat.
    fn alive(&self, sender: Sender) {
        let station = &self.stations[usize::from(sender.replica.0)];
        let rank = station.ranks().nth(usize::from(sender.rank));
        if let Some(rank) = rank.filter(|_| self.is_news(sender)) {
            self.observers.metrics.life.alive(rank);
        }
    }

    /// Whether this is said by an executor that works now.
    fn is_news(&self, sender: Sender) -> bool {
        let station = &self.stations[usize::from(sender.replica.0)];
        station.is_up() && sender.epoch == self.engine.epoch(sender.replica)
    }

    /// Takes note of the executors that are gone, and returns whose and why: what they had is computed again, by
    /// those of another replica or by the next ones of this.
    fn lose(&mut self, desk: &mut Desk) -> Vec<(Replica, String)> {
        let mut gone = Vec::new();
        for replica in (0..self.stations.len() as u16).map(Replica) {
            let Some((loss, cause)) = self.station(replica).lost.take() else { continue };
            for peer in self.engine.group(replica) {
                self.station(peer).lose();
                desk.clocks.lost(peer);
                self.observers.metrics.life.lost(peer, loss);
            }
            desk.events.push(Event::Lost { replica, loss });
            gone.push((replica, cause));
        }
        if !gone.is_empty() {
            self.observers.health.set_lost(self.stations.iter().any(Station::is_up));
        }
        gone
    }

    /// The executors of a replica are back.
    fn resume(
        &mut self,
        replica: Replica,
        executor: SyncSender<ToExecutor>,
        ready: Ready,
        desk: &mut Desk,
    ) {
        let Ready { blocks, graph_rows } = ready;
        self.station(replica).resume(executor);
        desk.events.push(Event::Ready { replica, blocks, graph_rows });
        let is_up = |peer: Replica| self.stations[usize::from(peer.0)].is_up();
        if self.engine.group(replica).all(is_up) {
            self.observers.health.set_restarted();
        }
    }

    fn act(&mut self, effect: Effect, now_ms: u64, desk: &mut Desk) {
        match effect {
            Effect::Send { replica, batch } => self.send(replica, batch, now_ms, desk),
            // A closed channel means that nobody is left to hear the news.
            Effect::Tokens(list) => drop(self.news.blocking_send(list)),
            Effect::Stats(stats) => {
                desk.clocks.counted(&stats, now_ms);
                self.client.set_stats(stats);
            }
            Effect::Kv { replica, events } => {
                if let Some(feed) = self.kv_events.get_mut(usize::from(replica.0)) {
                    feed.gather(events);
                }
            }
            Effect::Evicted { replica, stays } => {
                if let Some(residency) = &self.observers.metrics.residency {
                    residency.evicted(replica, &stays);
                }
            }
            // Whoever asked may have gone.
            Effect::ControlDone { done, .. } => {
                desk.clearing.pop_front().map(|reply| reply.send(done));
            }
        }
    }

    /// Sends a batch, and has its masks made.
    fn send(&mut self, replica: Replica, batch: Batch, now_ms: u64, desk: &mut Desk) {
        let facts = BatchFacts::of(&batch);
        let masked = self.masks.rows_of(&batch);
        let station = &mut self.stations[usize::from(replica.0)];
        // A step of a group takes as long as that of the replica with most to do.
        let of_group = desk.most_pairs.iter().find(|(step, _)| *step == facts.step);
        let work = Work {
            tokens: facts.tokens.max(batch.moe_tokens.into()),
            pairs: of_group.map_or(facts.pairs, |(_, most)| *most),
        };
        let allowed = station.send(batch, work, now_ms);
        if let Some(executor) = station.road().filter(|_| !masked.is_empty()) {
            self.masks.make(facts.step, masked, executor, station.expected());
        }
        desk.clocks.sent(replica, &facts, allowed, now_ms);
    }

    /// Hands over what this tick changed in the prefix indices.
    fn flush_kv_events(&mut self) {
        for feed in &mut self.kv_events {
            feed.flush();
        }
    }

    /// Tells the probes which step they may wait for: as long as one replica is on time, the server serves.
    fn report_steps(&self) {
        let live = || self.stations.iter().filter(|station| station.is_up());
        let latest = live().map(Station::oldest).collect::<Option<Vec<_>>>();
        match latest
            .unwrap_or_default()
            .into_iter()
            .max_by_key(|(at_ms, limit_ms)| at_ms + limit_ms)
        {
            None => self.observers.health.steps_answered(),
            Some((at_ms, limit_ms)) => self.observers.health.step_sent(at_ms, limit_ms),
        }
    }

    /// What the prefix indices hold now.
    fn resident(&self) -> Vec<Resident> {
        let stats = self.client.replicas();
        let of = |stats: &StepStats| Resident::of(&self.engine, stats.replica, stats.blocks);
        stats.iter().map(of).collect()
    }

    fn stop(self) {
        self.stations.iter().for_each(Station::stop);
    }

    /// There will be no executor any more: every request ends, and the process will.
    fn fail(self, text: String) {
        self.observers.health.set_unavailable();
        self.client.close(&ENGINE_LOST);
        // The main thread may have left already, at shutdown.
        let _ = self.notices.send(Notice::EngineFailed(text));
    }
}

/// Hands out lists of events for as long as the engine lives.
pub async fn fan_out(client: EngineClient, mut news: mpsc::Receiver<Vec<TokenEvent>>) {
    let mut lists = Vec::with_capacity(LISTS_PER_TURN);
    while news.recv_many(&mut lists, LISTS_PER_TURN).await > 0 {
        for list in lists.drain(..) {
            client.deliver(list);
        }
        tokio::task::yield_now().await; // The streams just woken write before more is handed out.
    }
}
