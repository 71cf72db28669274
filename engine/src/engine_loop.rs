//! Scheduler thread: receives messages from its inbox, calls the scheduler (`Scheduler::tick`) and executes
//! the effects that the call returns, such as batches to send.
//!
//! Owns the scheduler. The thread sleeps while idle and wakes a few times per second for its heartbeat. A
//! panic on this thread means that the scheduler state is inconsistent: the process logs its counters and
//! aborts.

mod effects;
mod executor_state;
mod supervisor_event;

use crate::client::{
    BulkInbox, ENGINE_UNAVAILABLE, EngineClient, EngineMessage, ExecutorId, PrefixIndexSnapshot,
};
use crate::replica_handle::ReplicaHandle;
use crate::running_engine::EngineTelemetry;
use crate::step_clock::{StepTimer, max_attention_pairs};
use grammar::MaskWorkers;
use metrics::kv_events::KvEventFeed;
use protocol::{Replica, StepId};
use scheduler::{ControlCommand, Scheduler, SchedulerEvent, TokenEvent};
use std::collections::VecDeque;
use std::ops::ControlFlow;
use std::panic::{AssertUnwindSafe, catch_unwind};
use std::sync::Arc;
use std::sync::mpsc as std_mpsc;
use std::thread::{self, JoinHandle};
use std::time::Duration;
pub use supervisor_event::{ExecutorRestartFailure, SupervisorEvent};
use tokio::sync::{mpsc, oneshot};

/// Heartbeat period of the scheduler thread, which is its maximum sleep when idle. If the time between two
/// heartbeats is much longer, the process was paused, and the deadlines of the steps in flight are extended
/// by the pause.
const HEARTBEAT: Duration = Duration::from_millis(250);
/// Capacity of the queue to the fan-out task, which delivers token events to the request streams, in lists of
/// token events. The scheduler thread blocks while the queue is full.
pub(crate) const EVENT_LISTS_QUEUED_MAX: usize = 64;
/// Maximum number of lists of token events that the fan-out task delivers to the request streams before it
/// yields to the tasks that read the streams.
const EVENT_LISTS_PER_TURN: usize = 8;

/// Engine loop with all state that the scheduler thread owns.
pub(crate) struct EngineLoop {
    /// Scheduler; the loop passes the received messages to `Scheduler::tick`.
    pub engine: Scheduler,
    /// Feeds that send the KV events of each replica to its publisher, by replica; empty if KV events are
    /// disabled.
    pub kv_events: Vec<KvEventFeed>,
    /// Queue of submissions and executor messages.
    pub inbox: Arc<BulkInbox<EngineMessage>>,
    /// Handles to the executors, by replica.
    pub replica_handles: Vec<ReplicaHandle>,
    /// Whether failed executors can be restarted: true if the executors are processes.
    pub can_restart: bool,
    /// Queue of token events for the fan-out task, which delivers them to the request streams.
    pub token_events: mpsc::Sender<Vec<TokenEvent>>,
    /// Client, used to finish all requests when the engine fails.
    pub client: EngineClient,
    /// Health state and metrics, which the loop updates.
    pub observers: EngineTelemetry,
    /// Workers that compute the grammar bitmasks of constrained requests.
    pub mask_workers: MaskWorkers,
    /// Event queue of the supervisor on the main thread.
    pub supervisor: std_mpsc::Sender<SupervisorEvent>,
}

/// State that the engine loop keeps between messages, in addition to the fields of `EngineLoop`.
struct EngineLoopState {
    /// Scheduler events for the next call of `Scheduler::tick`.
    events: Vec<SchedulerEvent>,
    step_clock: StepTimer,
    /// If replicas run in lockstep (execute each step together): for each step that the current tick sends,
    /// the maximum number of attention pairs (tokens times context length) of any replica.
    max_pairs: Vec<(StepId, u64)>,
    /// Reply channels of prefix cache resets in progress, in the order of the commands.
    pending_cache_resets: VecDeque<oneshot::Sender<bool>>,
}

/// Reason why the engine loop ends.
enum EngineExit {
    /// `Stop` was received.
    Stopped,
    /// No executor is running and none will be started. Contains the cause.
    Failed(String),
}

impl EngineLoop {
    /// Starts the scheduler thread.
    pub(crate) fn spawn(self) -> std::io::Result<JoinHandle<()>> {
        thread::Builder::new().name("scheduler".to_owned()).spawn(move || {
            let client = self.client.clone();
            if catch_unwind(AssertUnwindSafe(|| self.run())).is_err() {
                for stats in client.replica_stats() {
                    tracing::error!(
                        replica = stats.replica.0,
                        step = stats.step.0,
                        steps_in_flight = stats.steps_in_flight,
                        running = stats.running,
                        waiting = stats.waiting,
                        blocks_in_use = stats.blocks.in_use,
                        "state of the replica"
                    );
                }
                tracing::error!("the scheduler broke an invariant: aborting");
                std::process::abort();
            }
        })
    }

    fn run(mut self) {
        let (mut messages, mut effects) = (Vec::new(), Vec::new());
        let step_clock =
            StepTimer::new(Arc::clone(&self.observers.metrics), self.replica_handles.len());
        let mut state = EngineLoopState {
            events: Vec::new(),
            step_clock,
            max_pairs: Vec::new(),
            pending_cache_resets: VecDeque::new(),
        };
        loop {
            state.step_clock.wait_begins();
            self.inbox.drain(&mut messages, HEARTBEAT);
            state.step_clock.wait_ends();
            let now_ms = self.observers.health.heartbeat();
            self.replica_handles.iter_mut().for_each(|handle| handle.scheduler_awake(now_ms));
            if !self.can_restart {
                // The executors are threads of this process, so a heartbeat of the scheduler thread counts as
                // their heartbeat.
                self.replica_handles.iter().flat_map(ReplicaHandle::ranks).for_each(|rank| {
                    self.observers.metrics.executors.heartbeat(rank);
                });
            }
            for message in messages.drain(..) {
                match self.handle_message(message, now_ms, &mut state) {
                    ControlFlow::Continue(()) => {}
                    ControlFlow::Break(EngineExit::Stopped) => return self.stop(),
                    ControlFlow::Break(EngineExit::Failed(cause)) => return self.fail(cause),
                }
            }
            let failures = self.collect_failures(&mut state);
            self.engine.tick_timed(now_ms, &mut state.events, &mut effects, &mut state.step_clock);
            // The grammar bitmasks of a batch depend on the tokens that the same scheduler tick accepts, but
            // the token effects follow the batch in the list of effects. So all effects are passed to the
            // mask workers before the batch is sent.
            self.mask_workers.observe_effects(&effects);
            state.step_clock.tick_done(&effects);
            if self.engine.lockstep_group(Replica(0)).count() > 1 {
                state.max_pairs = max_attention_pairs(&effects);
            }
            for effect in effects.drain(..) {
                self.apply_effect(effect, now_ms, &mut state);
            }
            self.flush_kv_events();
            self.report_steps();
            for (replica, cause) in failures {
                let epoch = self.engine.epoch(replica);
                // The send fails if the main thread has already ended (at shutdown).
                let _ = self.supervisor.send(SupervisorEvent::ExecutorsFailed {
                    replica,
                    epoch,
                    cause,
                });
            }
        }
    }

    /// Handles one message. Returns `ControlFlow::Break` if the loop must end.
    fn handle_message(
        &mut self,
        message: EngineMessage,
        now_ms: u64,
        state: &mut EngineLoopState,
    ) -> ControlFlow<EngineExit> {
        match message {
            EngineMessage::Event(event) => {
                if let SchedulerEvent::StepOutput { replica, output } = &event {
                    state.step_clock.step_completed(*replica, output);
                    let handle = self.replica_handle(*replica);
                    handle.step_completed(output.step, now_ms);
                    let costs = handle.step_costs();
                    self.engine.set_step_costs(*replica, costs);
                    self.record_heartbeat(ExecutorId {
                        replica: *replica,
                        epoch: output.epoch,
                        rank: 0,
                    });
                }
                state.events.push(event);
            }
            EngineMessage::DecodingGuide { request, guide } => {
                self.mask_workers.begin(request, guide);
            }
            EngineMessage::ExecutorFailed { sender, failure, cause } if self.is_current(sender) => {
                if !self.can_restart {
                    return ControlFlow::Break(EngineExit::Failed(cause));
                }
                self.fail_executors(sender.replica, failure, cause);
            }
            EngineMessage::ExecutorRestored { replica, executor, ready } => {
                self.restore_executors(replica, executor, ready, state);
            }
            EngineMessage::Profile { on, replies } => {
                self.replica_handles.iter_mut().for_each(|handle| handle.profile(on, &replies));
            }
            EngineMessage::ProfileReply(sender, status) if self.is_current(sender) => {
                self.replica_handle(sender.replica).profiler_replied(sender.rank, status);
            }
            EngineMessage::StepDone(sender, step) if self.is_current(sender) => {
                self.replica_handle(sender.replica).rank_finished(sender.rank, step);
                self.record_heartbeat(sender);
            }
            EngineMessage::Drafts(sender, drafts) if self.is_current(sender) => {
                self.mask_workers.report_drafts(drafts);
            }
            EngineMessage::Heartbeat(sender) if self.is_current(sender) => {
                self.on_heartbeat(sender, now_ms);
            }
            // Ignore messages from executors of an earlier epoch, which have been replaced.
            EngineMessage::ExecutorFailed { .. }
            | EngineMessage::ProfileReply(..)
            | EngineMessage::StepDone(..)
            | EngineMessage::Drafts(..)
            | EngineMessage::Heartbeat(_) => {}
            EngineMessage::ResetPrefixCache { restart, reply } => {
                state.pending_cache_resets.push_back(reply);
                let op_id = 0; // Replies come in the order of the commands.
                state.events.push(SchedulerEvent::Control(ControlCommand::ClearPrefixCache {
                    op_id,
                    requeue_running: restart,
                }));
            }
            // The caller has dropped its receiver, so no list is needed.
            EngineMessage::ListCachedBlocks { reply } if reply.is_closed() => {}
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

    /// Selects the step whose deadline the health probes check. If every running replica has a step in
    /// flight, it is, among the oldest steps of all replicas, the step with the latest deadline, so that the
    /// server is healthy while at least one replica is on time. Otherwise no step is checked.
    fn report_steps(&self) {
        let live = || self.replica_handles.iter().filter(|handle| handle.is_up());
        let oldest_steps = live().map(ReplicaHandle::oldest_step).collect::<Option<Vec<_>>>();
        match oldest_steps
            .unwrap_or_default()
            .into_iter()
            .max_by_key(|(at_ms, limit_ms)| at_ms + limit_ms)
        {
            None => self.observers.health.steps_completed(),
            Some((at_ms, limit_ms)) => self.observers.health.step_sent(at_ms, limit_ms),
        }
    }

    /// Returns a snapshot of the prefix index of every replica.
    fn cached_blocks(&self) -> Vec<PrefixIndexSnapshot> {
        let stats = self.client.replica_stats();
        stats.iter().map(|stats| PrefixIndexSnapshot::of(&self.engine, stats)).collect()
    }

    fn stop(self) {
        self.replica_handles.iter().for_each(ReplicaHandle::stop);
    }

    /// Finishes every request after a permanent failure of the executors. The process ends afterwards.
    fn fail(self, text: String) {
        self.observers.health.set_unavailable();
        self.client.close(&ENGINE_UNAVAILABLE);
        // The send fails if the main thread has already ended (at shutdown).
        let _ = self.supervisor.send(SupervisorEvent::EngineFailed(text));
    }
}

/// Fan-out task: delivers token events to the streams until the engine ends.
pub(crate) async fn fan_out(client: EngineClient, mut events_rx: mpsc::Receiver<Vec<TokenEvent>>) {
    let mut lists = Vec::with_capacity(EVENT_LISTS_PER_TURN);
    while events_rx.recv_many(&mut lists, EVENT_LISTS_PER_TURN).await > 0 {
        for list in lists.drain(..) {
            client.deliver(list);
        }
        tokio::task::yield_now().await; // Let the woken streams write before delivering more.
    }
}
