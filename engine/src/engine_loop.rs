//! The scheduler's thread: drains its inbox, ticks the engine, sends the effects.
//!
//! Owns the engine; sleeps while nothing happens and wakes a few times a second for the heartbeat.
//! A panic here means that the books are wrong: the process dumps and aborts.

use crate::client::{
    BatchInbox, CachedBlocks, ENGINE_UNAVAILABLE, EngineClient, EngineMessage, ExecutorId,
};
use crate::engine_host::EngineObservers;
use crate::executors::ExecutorLink;
use crate::replica_handle::ReplicaHandle;
use crate::step_clock::{BatchSummary, StepClock, max_pairs_by_step};
use grammar::MaskWorkers;
use metrics::StartFailure;
use metrics::kv_events::KvEventFeed;
use protocol::{Batch, Epoch, ExecutorCommand, ExecutorReady, Replica, StepId};
use scheduler::{
    ControlCommand, ExecutorFailure, Scheduler, SchedulerEffect, SchedulerEvent, StepStats,
    StepWork, TokenEvent,
};
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
pub(crate) const EVENT_LISTS_QUEUED_MAX: usize = 64;
/// Lists handed out before streams get a turn.
const EVENT_LISTS_PER_TURN: usize = 8;

/// Something the main thread must know.
pub enum SupervisorEvent {
    /// The process got this signal.
    Signal(i32),
    /// The executors of a replica are lost. The engine has taken note and waits for some of the next generation.
    ExecutorsFailed {
        /// Whose.
        replica: Replica,
        /// That generation.
        epoch: Epoch,
        /// What became of the former ones.
        cause: String,
    },
    /// A start of a replica's executors is over.
    StartFinished {
        /// Whose; of replicas that step together, the first.
        replica: Replica,
        /// Their generation.
        epoch: Epoch,
        /// The links to them, those to replicas that step with it behind, and what they brought up; or why they did
        /// not come up.
        outcome: Result<(Vec<ExecutorLink>, ExecutorReady), StartFailureReport>,
    },
    /// There is no executor and will be none; the engine has stopped.
    EngineFailed(String),
}

/// Executors that were started again and have not become ready.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct StartFailureReport {
    /// The class of failure.
    pub failure: StartFailure,
    /// What happened, in words.
    pub text: String,
}

/// Everything the thread works with.
pub(crate) struct EngineLoop {
    /// The scheduler.
    pub engine: Scheduler,
    /// Who hears what the prefix index holds, by replica; empty = nobody.
    pub kv_events: Vec<KvEventFeed>,
    /// Where submits and answers arrive.
    pub inbox: Arc<BatchInbox<EngineMessage>>,
    /// The executors, by replica.
    pub replica_handles: Vec<ReplicaHandle>,
    /// Whether lost executors can be replaced: they were processes.
    pub can_restart: bool,
    /// Where news of requests go.
    pub token_events: mpsc::Sender<Vec<TokenEvent>>,
    /// For the end of everything.
    pub client: EngineClient,
    /// Who hears of what it does.
    pub observers: EngineObservers,
    /// Who makes the masks of constrained requests.
    pub mask_workers: MaskWorkers,
    /// Road to the main thread.
    pub supervisor: std_mpsc::Sender<SupervisorEvent>,
}

/// What is under way between two looks into the inbox.
struct EngineLoopState {
    /// For the next tick.
    events: Vec<SchedulerEvent>,
    step_clock: StepClock,
    /// Of replicas that step together: most pairs of each step of this tick.
    max_pairs: Vec<(StepId, u64)>,
    /// Who waits to hear whether cached prefixes were forgotten, in the order of the orders.
    pending_cache_resets: VecDeque<oneshot::Sender<bool>>,
}

/// How the loop ends.
enum EngineExit {
    /// It was told to.
    Stopped,
    /// There is no executor and will be none.
    Failed(String),
}

impl EngineLoop {
    /// Starts the thread.
    pub(crate) fn spawn(self) -> std::io::Result<JoinHandle<()>> {
        thread::Builder::new().name("scheduler".to_owned()).spawn(move || {
            let client = self.client.clone();
            if catch_unwind(AssertUnwindSafe(|| self.run())).is_err() {
                let stats = client.replica_stats();
                tracing::error!(?stats, "the scheduler broke an invariant: aborting");
                std::process::abort();
            }
        })
    }

    fn run(mut self) {
        let (mut signals, mut effects) = (Vec::new(), Vec::new());
        let clocks =
            StepClock::new(Arc::clone(&self.observers.metrics), self.replica_handles.len());
        let mut desk = EngineLoopState {
            events: Vec::new(),
            step_clock: clocks,
            max_pairs: Vec::new(),
            pending_cache_resets: VecDeque::new(),
        };
        loop {
            desk.step_clock.sleeps();
            self.inbox.drain(&mut signals, HEARTBEAT);
            desk.step_clock.wakes();
            let now_ms = self.observers.health.heartbeat();
            self.replica_handles.iter_mut().for_each(|station| station.scheduler_awake(now_ms));
            if !self.can_restart {
                // The executors live and die with this process.
                self.replica_handles.iter().flat_map(ReplicaHandle::ranks).for_each(|rank| {
                    self.observers.metrics.executors.heartbeat(rank);
                });
            }
            for signal in signals.drain(..) {
                match self.handle_message(signal, now_ms, &mut desk) {
                    ControlFlow::Continue(()) => {}
                    ControlFlow::Break(EngineExit::Stopped) => return self.stop(),
                    ControlFlow::Break(EngineExit::Failed(cause)) => return self.fail(cause),
                }
            }
            let lost = self.collect_failures(&mut desk);
            self.engine.tick_timed(now_ms, &mut desk.events, &mut effects, &mut desk.step_clock);
            // The masks of a batch build on what the same tick committed, which comes behind it.
            self.mask_workers.observe_effects(&effects);
            desk.step_clock.ticked(&effects);
            if self.engine.lockstep_group(Replica(0)).count() > 1 {
                desk.max_pairs = max_pairs_by_step(&effects);
            }
            for effect in effects.drain(..) {
                self.apply_effect(effect, now_ms, &mut desk);
            }
            self.flush_kv_events();
            self.report_steps();
            for (replica, cause) in lost {
                let epoch = self.engine.epoch(replica);
                // The main thread may have left already, at shutdown.
                let _ = self.supervisor.send(SupervisorEvent::ExecutorsFailed {
                    replica,
                    epoch,
                    cause,
                });
            }
        }
    }

    /// Takes one signal; breaks if the loop is to end.
    fn handle_message(
        &mut self,
        signal: EngineMessage,
        now_ms: u64,
        desk: &mut EngineLoopState,
    ) -> ControlFlow<EngineExit> {
        match signal {
            EngineMessage::Event(event) => {
                if let SchedulerEvent::StepOutput { replica, output } = &event {
                    desk.step_clock.step_completed(*replica, output);
                    self.replica_handle(*replica).step_answered(output.step, now_ms);
                    self.record_heartbeat(ExecutorId {
                        replica: *replica,
                        epoch: output.epoch,
                        rank: 0,
                    });
                }
                desk.events.push(event);
            }
            EngineMessage::DecodingGuide { request, guide } => {
                self.mask_workers.begin(request, guide);
            }
            EngineMessage::ExecutorFailed { sender, failure: loss, cause }
                if self.is_current(sender) =>
            {
                if !self.can_restart {
                    return ControlFlow::Break(EngineExit::Failed(cause));
                }
                self.fail_executors(sender.replica, loss, cause);
            }
            EngineMessage::ExecutorRestored { replica, executor, ready } => {
                self.restore_executors(replica, executor, ready, desk);
            }
            EngineMessage::Profile { on, replies } => {
                self.replica_handles.iter_mut().for_each(|station| station.profile(on, &replies));
            }
            EngineMessage::ProfileReply(sender, profiled) if self.is_current(sender) => {
                self.replica_handle(sender.replica).profile_replied(sender.rank, profiled);
            }
            EngineMessage::StepDone(sender, step) if self.is_current(sender) => {
                self.replica_handle(sender.replica).rank_finished(sender.rank, step);
                self.record_heartbeat(sender);
            }
            EngineMessage::Heartbeat(sender) if self.is_current(sender) => {
                self.on_heartbeat(sender, now_ms);
            }
            // Of a former generation.
            EngineMessage::ExecutorFailed { .. }
            | EngineMessage::ProfileReply(..)
            | EngineMessage::StepDone(..)
            | EngineMessage::Heartbeat(_) => {}
            EngineMessage::ResetPrefixCache { restart, reply } => {
                desk.pending_cache_resets.push_back(reply);
                let op_id = 0; // Answers come in the order of the orders.
                desk.events.push(SchedulerEvent::Control(ControlCommand::ClearPrefixCache {
                    op_id,
                    requeue_running: restart,
                }));
            }
            EngineMessage::ListCachedBlocks { reply } if reply.is_closed() => {} // Whoever asked has gone.
            EngineMessage::ListCachedBlocks { reply } => drop(reply.send(self.cached_blocks())),
            EngineMessage::RestartsExhausted(cause) => {
                return ControlFlow::Break(EngineExit::Failed(cause));
            }
            EngineMessage::Stop => return ControlFlow::Break(EngineExit::Stopped),
        }
        ControlFlow::Continue(())
    }

    fn replica_handle(&mut self, replica: Replica) -> &mut ReplicaHandle {
        &mut self.replica_handles[usize::from(replica.0)]
    }

    /// An executor gave a sign of life: is the oldest step of its replica late?
    fn on_heartbeat(&mut self, sender: ExecutorId, now_ms: u64) {
        self.record_heartbeat(sender);
        let station = &mut self.replica_handles[usize::from(sender.replica.0)];
        let lateness = station.on_heartbeat(sender.rank, now_ms);
        lateness
            .ranks
            .into_iter()
            .for_each(|rank| self.observers.metrics.executors.straggler(rank));
        if let Some(cause) = lateness.cause {
            let cause = cause + &self.stragglers_elsewhere(sender.replica);
            self.fail_executors(sender.replica, ExecutorFailure::StepTimeout, cause);
        }
    }

    /// Ranks of other replicas in the same group step that have not done it either, in words.
    fn stragglers_elsewhere(&self, replica: Replica) -> String {
        let others = self.engine.lockstep_group(replica).filter(|other| *other != replica);
        let behind =
            others.flat_map(|other| self.replica_handles[usize::from(other.0)].unfinished());
        let behind: Vec<String> = behind.map(|rank| rank.0.to_string()).collect();
        if behind.is_empty() {
            return String::new();
        }
        format!("; late of other replicas: rank {}", behind.join(", rank "))
    }

    /// Gives up the executors of a replica, and with them those of replicas that step with it. What comes first is the
    /// reason: the others only follow.
    fn fail_executors(&mut self, replica: Replica, loss: ExecutorFailure, cause: String) {
        let given_up = |peer: Replica| self.replica_handles[usize::from(peer.0)].failure.is_some();
        if !self.engine.lockstep_group(replica).any(given_up) {
            self.replica_handle(replica).failure = Some((loss, cause));
        }
    }

    /// Whoever speaks lives: one that answers steps has no time to beat.
    fn record_heartbeat(&self, sender: ExecutorId) {
        let station = &self.replica_handles[usize::from(sender.replica.0)];
        let rank = station.ranks().nth(usize::from(sender.rank));
        if let Some(rank) = rank.filter(|_| self.is_current(sender)) {
            self.observers.metrics.executors.heartbeat(rank);
        }
    }

    /// Whether this is said by an executor that works now.
    fn is_current(&self, sender: ExecutorId) -> bool {
        let station = &self.replica_handles[usize::from(sender.replica.0)];
        station.is_up() && sender.epoch == self.engine.epoch(sender.replica)
    }

    /// Takes note of the executors that are gone, and returns whose and why: what they had is computed again, by
    /// those of another replica or by the next ones of this.
    fn collect_failures(&mut self, desk: &mut EngineLoopState) -> Vec<(Replica, String)> {
        let mut gone = Vec::new();
        for replica in (0..self.replica_handles.len() as u16).map(Replica) {
            let Some((loss, cause)) = self.replica_handle(replica).failure.take() else { continue };
            for peer in self.engine.lockstep_group(replica) {
                self.replica_handle(peer).fail();
                desk.step_clock.executors_failed(peer);
                self.observers.metrics.executors.executors_failed(peer, loss);
            }
            desk.events.push(SchedulerEvent::ExecutorsFailed { replica, failure: loss });
            gone.push((replica, cause));
        }
        if !gone.is_empty() {
            self.observers
                .health
                .set_executors_failed(self.replica_handles.iter().any(ReplicaHandle::is_up));
        }
        gone
    }

    /// The executors of a replica are back.
    fn restore_executors(
        &mut self,
        replica: Replica,
        executor: SyncSender<ExecutorCommand>,
        ready: ExecutorReady,
        desk: &mut EngineLoopState,
    ) {
        let ExecutorReady { kv_blocks: blocks, capture_sizes: graph_rows } = ready;
        self.replica_handle(replica).restore(executor);
        desk.events.push(SchedulerEvent::ExecutorsReady {
            replica,
            blocks,
            capture_sizes: graph_rows,
        });
        let is_up = |peer: Replica| self.replica_handles[usize::from(peer.0)].is_up();
        if self.engine.lockstep_group(replica).all(is_up) {
            self.observers.health.set_executors_restored();
        }
    }

    fn apply_effect(&mut self, effect: SchedulerEffect, now_ms: u64, desk: &mut EngineLoopState) {
        match effect {
            SchedulerEffect::SendBatch { replica, batch } => {
                self.send_batch(replica, batch, now_ms, desk);
            }
            // A closed channel means that nobody is left to hear the news.
            SchedulerEffect::TokenEvents(list) => drop(self.token_events.blocking_send(list)),
            SchedulerEffect::Stats(stats) => {
                desk.step_clock.stats_changed(&stats, now_ms);
                self.client.set_stats(stats);
            }
            SchedulerEffect::KvEvents { replica, events } => {
                if let Some(feed) = self.kv_events.get_mut(usize::from(replica.0)) {
                    feed.add(events);
                }
            }
            SchedulerEffect::BlocksEvicted { replica, lifetimes: stays } => {
                if let Some(residency) = &self.observers.metrics.block_lifetimes {
                    residency.evicted(replica, &stays);
                }
            }
            // Whoever asked may have gone.
            SchedulerEffect::ControlDone { succeeded: done, .. } => {
                desk.pending_cache_resets.pop_front().map(|reply| reply.send(done));
            }
        }
    }

    /// Sends a batch, and has its masks made.
    fn send_batch(
        &mut self,
        replica: Replica,
        batch: Batch,
        now_ms: u64,
        desk: &mut EngineLoopState,
    ) {
        let facts = BatchSummary::of(&batch);
        let masked = self.mask_workers.masked_rows(&batch);
        let station = &mut self.replica_handles[usize::from(replica.0)];
        // A step of a group takes as long as that of the replica with most to do.
        let of_group = desk.max_pairs.iter().find(|(step, _)| *step == facts.step);
        let work = StepWork {
            tokens: facts.tokens.max(batch.moe_tokens.into()),
            attention_pairs: of_group.map_or(facts.pairs, |(_, most)| *most),
        };
        let allowed = station.send(batch, work, now_ms);
        if let Some(executor) = station.sender().filter(|_| !masked.is_empty()) {
            self.mask_workers.request_masks(facts.step, masked, executor, station.expected());
        }
        desk.step_clock.sent(replica, &facts, allowed, now_ms);
    }

    /// Hands over what this tick changed in the prefix indices.
    fn flush_kv_events(&mut self) {
        for feed in &mut self.kv_events {
            feed.flush();
        }
    }

    /// Tells the probes which step they may wait for: as long as one replica is on time, the server serves.
    fn report_steps(&self) {
        let live = || self.replica_handles.iter().filter(|station| station.is_up());
        let latest = live().map(ReplicaHandle::oldest).collect::<Option<Vec<_>>>();
        match latest
            .unwrap_or_default()
            .into_iter()
            .max_by_key(|(at_ms, limit_ms)| at_ms + limit_ms)
        {
            None => self.observers.health.steps_completed(),
            Some((at_ms, limit_ms)) => self.observers.health.step_sent(at_ms, limit_ms),
        }
    }

    /// What the prefix indices hold now.
    fn cached_blocks(&self) -> Vec<CachedBlocks> {
        let stats = self.client.replica_stats();
        let of = |stats: &StepStats| CachedBlocks::of(&self.engine, stats.replica, stats.blocks);
        stats.iter().map(of).collect()
    }

    fn stop(self) {
        self.replica_handles.iter().for_each(ReplicaHandle::stop);
    }

    /// There will be no executor any more: every request ends, and the process will.
    fn fail(self, text: String) {
        self.observers.health.set_unavailable();
        self.client.close(&ENGINE_UNAVAILABLE);
        // The main thread may have left already, at shutdown.
        let _ = self.supervisor.send(SupervisorEvent::EngineFailed(text));
    }
}

/// Hands out lists of events for as long as the engine lives.
pub(crate) async fn fan_out(client: EngineClient, mut news: mpsc::Receiver<Vec<TokenEvent>>) {
    let mut lists = Vec::with_capacity(EVENT_LISTS_PER_TURN);
    while news.recv_many(&mut lists, EVENT_LISTS_PER_TURN).await > 0 {
        for list in lists.drain(..) {
            client.deliver(list);
        }
        tokio::task::yield_now().await; // The streams just woken write before more is handed out.
    }
}
