//! The simulation: a virtual clock, an event queue, the real scheduler, simulated executors and clients.
//!
//! A run has two phases. Safety: faults happen, and all invariants are checked after every tick. Liveness:
//! faults end, and within a bounded number of steps every request must end and the scheduler must be idle
//! (`final_checks.rs`).

use crate::batch_checks::BatchChecker;
use crate::client::{ClientStage, SimClient};
use crate::event_queue::{SimEvent, SimEventQueue};
use crate::executor::{FreedMemory, SimExecutor};
use crate::executor_watch::{ExecutorLivenessEvent, SimExecutorWatch};
use crate::fault_injector::{FaultInjector, InjectedFault};
use crate::index_mirror::IndexMirror;
use crate::introspection::is_free;
use crate::invariant::{CheckResult, ensure};
use crate::kv_memory::MEMORY_DRAWS_STREAM;
use crate::process_pause::{PROCESS_PAUSES_MAX, ProcessPause};
use crate::rng::SimRng;
use crate::sim_config::{
    FaultRates, GROUP_SEEDS_FROM, LATE_DRAWS_STREAM, LINK_SEEDS_FROM, STATE_SEEDS_FROM, SimConfig,
    WINDOW_SEEDS_FROM,
};
use crate::subscriber::SimKvEventSubscriber;
use crate::trace::SimTrace;
use protocol::{BlockId, Replica, StateSlot};
use scheduler::{
    ControlCommand, ExecutorFailure, Scheduler, SchedulerEffect, SchedulerEvent, SchedulerStats,
    StepCosts,
};

/// State of one replica in the simulation.
#[derive(Debug, Default)]
pub(crate) struct SimReplica {
    /// The replica's executors, unless they have failed.
    pub(crate) executor: Option<SimExecutor>,
    /// Number of times that the executors of the replica have been started.
    pub(crate) incarnation: u32,
    /// Value of `incarnation` of the executors that were last announced to the scheduler as ready.
    pub(crate) announced_incarnation: u32,
    /// Time at which the scheduler received the failure of the executors; cleared when the scheduler learns
    /// that new executors are ready.
    pub(crate) failed_at_ms: Option<u64>,
    /// Checks the batches that are sent to the executors.
    pub(crate) batch_checker: BatchChecker,
    /// Number of evicted blocks whose lifetime was reported.
    pub(crate) lifetimes: u64,
    /// Prefix index, as a subscriber rebuilds it from the KV events.
    pub(crate) mirror: IndexMirror,
    /// A second subscriber, which disconnects and reconnects.
    pub(crate) subscriber: Option<SimKvEventSubscriber>,
    /// Values of `incarnation` (number of executor starts) at which the link was broken. Messages in flight
    /// on these links are lost.
    pub(crate) broken_links: Vec<u32>,
    /// Heartbeat and step-timeout monitoring of the executors.
    pub(crate) watch: SimExecutorWatch,
    /// The replica's counters as the scheduler last reported them.
    pub(crate) stats: SchedulerStats,
    /// Number of outputs of failed executors that the scheduler must have dropped.
    pub(crate) stale_outputs: u64,
    /// Number of KV blocks that the executors allocated.
    pub(crate) blocks: u32,
    /// Bytes that the executors gave to the KV blocks.
    pub(crate) kv_bytes: u64,
    /// For each block, by id: whether the block was neither referenced nor cached after the last tick.
    free_blocks: Vec<bool>,
    /// For each slot of each state group: whether the slot was neither referenced nor a checkpoint after the last
    /// tick.
    free_state_slots: Vec<Vec<bool>>,
}

impl SimReplica {
    fn new(config: &SimConfig) -> Self {
        let blocks = config.scheduler.kv.blocks;
        Self { blocks, kv_bytes: config.kv_memory.pool_bytes(blocks), ..Self::default() }
    }

    /// Sets the KV pool of new executors.
    pub(crate) fn set_kv_memory(&mut self, blocks: u32, bytes: u64) {
        (self.blocks, self.kv_bytes) = (blocks, bytes);
    }
}

/// Event counts of a simulation, used to check that the intended faults happened.
#[derive(Debug, Clone, Copy, Default)]
pub(crate) struct SimCounts {
    pub(crate) steps: u64,
    pub(crate) ticks: u64,
    pub(crate) rows: u64,
    pub(crate) tokens: u64,
    pub(crate) requests: u64,
    pub(crate) preemptions: u64,
    pub(crate) hits: u64,
    /// Number of replicas on which missing windows or checkpoints shortened a prefix hit.
    pub(crate) missed_hits: u64,
    /// Number of rows that wrote another state slot than the one that they read.
    pub(crate) forks: u64,
    /// Number of requests that resumed from a checkpoint of recurrent state.
    pub(crate) resumed_states: u64,
    /// Number of rows of models with MLA groups.
    pub(crate) mla_rows: u64,
    /// Number of rows of models whose groups store different numbers of bytes per block.
    pub(crate) unequal_block_rows: u64,
    pub(crate) stored: u64,
    pub(crate) removed: u64,
    pub(crate) lifetimes: u64,
    pub(crate) aborts: u64,
    pub(crate) crashes: u64,
    pub(crate) stale_outputs: u64,
    pub(crate) failed_rows: u64,
    pub(crate) masked_rows: u64,
    pub(crate) overdue_masks: u64,
    pub(crate) ended_masks: u64,
    /// Number of rows whose first bitmask was ready in time and whose bitmasks after draft tokens were
    /// overdue.
    pub(crate) overdue_draft_masks: u64,
    /// Number of draft tokens verified in rows that are sampled under a grammar bitmask.
    pub(crate) masked_drafted: u64,
    /// Number of draft tokens accepted in rows that are sampled under a grammar bitmask.
    pub(crate) masked_accepted: u64,
    pub(crate) rejected: u64,
    /// Number of draft tokens verified.
    pub(crate) drafted: u64,
    /// Number of draft tokens accepted.
    pub(crate) accepted: u64,
    /// Number of rows that started after their planned `start`, because draft tokens of an earlier step in
    /// flight were accepted.
    pub(crate) shifted_rows: u64,
    /// Number of batches of lockstep groups of 8 ranks.
    pub(crate) batches_of_eight: u64,
    /// Number of batches without rows in lockstep groups of 8 ranks.
    pub(crate) idle_of_eight: u64,
    /// Number of failures of a rank before all ranks of its lockstep group were restored.
    pub(crate) repeated_failures: u64,
    /// Number of links that broke.
    pub(crate) broken_links: u64,
    /// Number of broken links that lost only messages to the executors until the failure was detected.
    pub(crate) one_way_breaks: u64,
    /// Number of batches and step outputs that were lost on broken links.
    pub(crate) lost_frames: u64,
    /// Number of reconnected subscribers that received the missed changes from the replay buffer.
    pub(crate) replays: u64,
    /// Number of reconnected subscribers that received a snapshot of the prefix index.
    pub(crate) snapshots: u64,
    /// Number of requests that were sent while another request with the same client id was in flight.
    pub(crate) shared_client_ids: u64,
    /// Number of aborts by client id that ended several requests.
    pub(crate) aborts_by_client_id: u64,
    /// Number of pauses of the engine's process or threads.
    pub(crate) process_pauses: u64,
    /// Number of executors that hung.
    pub(crate) hangs: u64,
    /// Number of executors declared failed by step timeout.
    pub(crate) step_timeouts: u64,
    /// Number of executors declared failed by heartbeat timeout.
    pub(crate) heartbeat_timeouts: u64,
    /// Number of times that executors exceeded a first timeout but were not declared failed, because they
    /// made progress.
    pub(crate) false_suspicions: u64,
}

/// The simulation of one seed.
#[derive(Debug)]
pub(crate) struct SimWorld {
    pub(crate) config: SimConfig,
    pub(crate) rng: SimRng,
    pub(crate) now_ms: u64,
    pub(crate) events: SimEventQueue,
    pub(crate) scheduler: Scheduler,
    /// Alters the scheduler's inputs and outputs if a fault is injected.
    pub(crate) fault_injector: FaultInjector,
    pub(crate) replicas: Vec<SimReplica>,
    pub(crate) clients: Vec<SimClient>,
    pub(crate) trace: SimTrace,
    pub(crate) counts: SimCounts,
    /// Whether an operator has cleared the prefix cache; the blocks of finished requests need not be prefix
    /// hits after that.
    pub(crate) cleared: bool,
    /// Whether a replica fails in this tick, which clears its prefix cache.
    pub(crate) failure_in_tick: bool,
    pub(crate) effects: Vec<SchedulerEffect>,
    pub(crate) inbox: Vec<SchedulerEvent>,
    /// Messages that show that executors are running, since the scheduler's last tick, in order of arrival.
    pub(crate) signals: Vec<ExecutorLivenessEvent>,
    control_ops: u64,
    pub(crate) crashes_left: u32,
    pub(crate) pauses_left: u32,
    /// The current pause of the engine, if any.
    pub(crate) process_pause: Option<ProcessPause>,
    /// Messages that arrived while link readers were paused, in the order of their arrival.
    pub(crate) unread: Vec<SimEvent>,
    /// Time at which the last pause ended.
    pub(crate) resumed_ms: u64,
    /// Time at which the scheduler's thread last resumed from a pause.
    pub(crate) scheduler_resumed_ms: u64,
    /// Time of the scheduler's last tick.
    pub(crate) last_tick_ms: u64,
    /// Whether the phase with faults has ended.
    pub(crate) faults_ended: bool,
    /// Number of heartbeats since the last event of another kind.
    pub(crate) idle_heartbeats: usize,
}

impl SimWorld {
    /// Creates the simulation of a seed, before its first event.
    pub(crate) fn new(seed: u64, fault: Option<InjectedFault>, readable: bool) -> Self {
        let mut rng = SimRng::new(seed);
        let draw = match seed {
            STATE_SEEDS_FROM.. => SimConfig::draw_states,
            WINDOW_SEEDS_FROM.. => SimConfig::draw_windows,
            LINK_SEEDS_FROM.. => SimConfig::draw_links,
            GROUP_SEEDS_FROM.. => SimConfig::draw_group,
            _ => SimConfig::draw,
        };
        let mut config = draw(&mut rng);
        let mut late_rng = SimRng::new(seed ^ LATE_DRAWS_STREAM);
        config.draw_late_additions(&mut late_rng);
        config.draw_kv_memory(&mut SimRng::new(seed ^ MEMORY_DRAWS_STREAM));
        let scheduler = Scheduler::new(config.scheduler.clone()).expect("a valid configuration");
        let mut trace = SimTrace::new(readable);
        trace.line(|| format!("seed {seed}: {config:#?}"));
        let mut world = Self {
            crashes_left: config.faults.max_crashes,
            replicas: (0..config.scheduler.replicas).map(|_| SimReplica::new(&config)).collect(),
            scheduler,
            fault_injector: FaultInjector::new(fault),
            config,
            rng,
            now_ms: 0,
            events: SimEventQueue::default(),
            clients: Vec::new(),
            trace,
            counts: SimCounts::default(),
            cleared: false,
            failure_in_tick: false,
            effects: Vec::new(),
            inbox: Vec::new(),
            signals: Vec::new(),
            control_ops: 0,
            pauses_left: PROCESS_PAUSES_MAX,
            process_pause: None,
            unread: Vec::new(),
            resumed_ms: 0,
            scheduler_resumed_ms: 0,
            last_tick_ms: 0,
            faults_ended: false,
            idle_heartbeats: 0,
        };
        world.add_subscribers();
        world.draw_clients();
        world.assign_client_ids(&mut late_rng);
        for replica in 0..world.replicas.len() {
            world.start_executor(replica);
        }
        world
    }

    /// Runs the phase with faults and the phase without faults: handles all events in order and ticks the
    /// scheduler.
    pub(crate) fn run(&mut self) -> CheckResult {
        while let Some(next_ms) = self.events.next_ms() {
            self.now_ms = self.now_ms.max(next_ms);
            if self.rng.chance_per_mille(self.config.faults.late_tick) {
                self.now_ms += self.rng.below(60);
            }
            if self.rng.chance_per_mille(self.config.faults.clock_jump) {
                self.now_ms += 86_400_000;
                (self.resumed_ms, self.scheduler_resumed_ms) = (self.now_ms, self.now_ms);
            }
            self.end_process_pause()?;
            while let Some(what) = self.events.pop_due(self.now_ms) {
                self.handle_event(what)?;
            }
            self.maybe_pause_process();
            self.tick()?;
            self.run_process_pause()?;
            let bound = self.step_bound();
            ensure!("I12", self.counts.steps <= bound, "not finished after {bound} steps");
        }
        self.check_final_state()
    }

    /// Starts executors for a replica, with the epoch that the scheduler expects.
    pub(crate) fn start_executor(&mut self, replica: usize) {
        let epoch = self.scheduler.epoch(Replica(replica as u16));
        let replica_state = &mut self.replicas[replica];
        let mut executor = SimExecutor::new(epoch, replica_state.blocks, &self.config);
        executor.set_replay(self.fault_injector.replay_tokens());
        replica_state.executor = Some(executor);
        replica_state.batch_checker.reset();
        replica_state.free_blocks = vec![true; replica_state.blocks as usize];
        let state_groups = self.config.kv_kinds().filter(|kind| kind.is_state()).count();
        let state_slots = self.config.scheduler.kv.state_slots as usize;
        replica_state.free_state_slots = vec![vec![true; state_slots]; state_groups];
        self.watch_executors(replica);
    }

    pub(crate) fn handle_event(&mut self, what: SimEvent) -> CheckResult {
        let Some(what) = self.defer_unread_message(what) else { return Ok(()) };
        match what {
            SimEvent::Arrive(index) => self.arrive(index),
            SimEvent::Abort(index, cause) => self.abort(index, cause),
            SimEvent::StepDone { replica, incarnation } => {
                if self.replicas[replica].incarnation == incarnation {
                    self.step_done(replica)?;
                }
            }
            SimEvent::Reply { replica, reply } => self.reply(replica, reply),
            SimEvent::ExecutorsFailed { replica, incarnation } => {
                // If the executors fail twice, only the second failure is reported. Executors that were
                // restored between the failures must not be treated as failed.
                if self.replicas[replica].incarnation == incarnation {
                    self.trace.record(self.now_ms, "failed", &[replica as u64]);
                    let (replica, failure) = (Replica(replica as u16), ExecutorFailure::Exited);
                    self.inbox.push(SchedulerEvent::ExecutorsFailed { replica, failure });
                }
            }
            SimEvent::ExecutorsReady { replica, incarnation } => {
                if self.replicas[replica].incarnation == incarnation {
                    self.executors_ready(replica);
                }
            }
            SimEvent::FailAgain { replica, incarnation } => {
                self.fail_again(replica, incarnation)?;
            }
            SimEvent::LinkFailureSeen { replica, incarnation } => {
                if self.replicas[replica].incarnation == incarnation {
                    self.crash(replica)?;
                }
            }
            SimEvent::HeartbeatDue { replica, incarnation } => {
                self.heartbeat_due(replica, incarnation);
            }
            SimEvent::HeartbeatArrives { replica, incarnation } => {
                self.heartbeat_arrives(replica, incarnation);
            }
            SimEvent::CheckHeartbeat { replica, incarnation } => {
                self.check_heartbeat(replica, incarnation)?;
            }
            SimEvent::Hang { replica } => self.hang_executors(replica),
            SimEvent::ClearPrefixCache => {
                self.cleared = true;
                self.control_ops += 1;
                let op_id = self.control_ops;
                let restart = op_id.is_multiple_of(2);
                self.inbox.push(SchedulerEvent::Control(ControlCommand::ClearPrefixCache {
                    op_id,
                    requeue_running: restart,
                }));
            }
            SimEvent::MaskReady { request, output_tokens: outputs } => {
                self.mask_ready(request, outputs);
            }
            SimEvent::MasksDone { request } => {
                self.trace.record(self.now_ms, "masks done", &[request.0]);
                self.inbox.push(SchedulerEvent::MasksDone { request });
            }
            SimEvent::Wake => {}
            SimEvent::EndFaults => {
                self.config.faults = FaultRates::none();
                self.faults_ended = true;
                self.trace.record(self.now_ms, "faults end", &[]);
                if self.rng.chance_per_mille(100) {
                    self.abort_all();
                }
            }
        }
        Ok(())
    }

    /// Changes the estimated costs of steps, by which chunks are shortened. Derived from the tick, because a draw would change the later
    /// draws of every seed.
    fn change_step_costs(&mut self) {
        let ticks = self.counts.ticks as f64;
        let costs = StepCosts {
            fixed_ns: ticks % 7.0 * 2e5,
            token_ns: ticks % 11.0 * 1e4,
            pair_ns: ticks % 5.0 * 1e3,
        };
        for replica in 0..self.config.scheduler.replicas {
            self.scheduler.set_step_costs(Replica(replica), costs);
        }
    }

    fn tick(&mut self) -> CheckResult {
        if self.rng.chance_per_mille(self.config.faults.clear_prefix_cache) {
            self.handle_event(SimEvent::ClearPrefixCache)?;
        }
        let clients_with_id = self.abort_by_client_id();
        self.process_signals()?;
        let mut inbox = std::mem::take(&mut self.inbox);
        let aborted: Vec<usize> = aborted_live(&inbox, &self.clients);
        let ReplicaChanges { failed, restored, failed_again } =
            replica_changes(&inbox, self.config.scheduler.lockstep);
        let submitted = submitted(&inbox);
        self.failure_in_tick = !failed.is_empty();
        for replica in failed_again {
            self.replicas[replica].failed_at_ms = None; // The replica has failed again, at this time.
        }
        self.record_failures(&failed);
        self.counts.ticks += 1;
        let mut effects = std::mem::take(&mut self.effects);
        self.fault_injector.alter_inbox(&mut inbox, &self.scheduler);
        self.change_step_costs();
        self.scheduler.tick(self.now_ms, &mut inbox, &mut effects);
        self.fault_injector.alter_effects(&mut effects);
        self.inbox = inbox;
        for replica in restored {
            self.replicas[replica].failed_at_ms = None;
            self.start_executor(replica);
            // Removes the new executor if the replica has failed again before the scheduler processed that
            // the replica was restored.
            let replica_state = &mut self.replicas[replica];
            replica_state
                .executor
                .take_if(|_| replica_state.announced_incarnation != replica_state.incarnation);
        }
        self.apply_effects(&mut effects)?;
        if self.rng.chance_per_mille(100) {
            self.scheduler.tick(self.now_ms, &mut Vec::new(), &mut effects);
            let sends =
                effects.iter().any(|effect| matches!(effect, SchedulerEffect::SendBatch { .. }));
            ensure!("I12", !sends, "the tick was incomplete: a second tick sends {effects:?}");
            effects.clear();
        }
        self.effects = effects;
        self.check_queue_migration()?;
        for replica in self.group_of(&failed) {
            self.replicas[replica].mirror.clear_computed();
        }
        self.check_aborts_and_rejections(&aborted, &submitted)?;
        self.check_abort_by_client_id(&clients_with_id)?;
        self.churn_subscribers()?;
        self.check_queue_limits()?;
        self.check_failure_timeout()?;
        self.scheduler.check();
        self.poison_freed();
        for replica in 0..self.replicas.len() {
            self.start_next_step(replica);
        }
        Ok(())
    }

    /// Checks I9: aborted requests, and requests that can never be served, have ended.
    fn check_aborts_and_rejections(&self, aborted: &[usize], submitted: &[usize]) -> CheckResult {
        for &index in aborted {
            let (id, stage) = (self.clients[index].id().0, self.clients[index].stage);
            ensure!(
                "I9",
                stage == ClientStage::Done,
                "request {id} was aborted, but has not ended"
            );
        }
        for &index in submitted {
            let client = &self.clients[index];
            let (id, rejected) = (client.id().0, client.stage == ClientStage::Done);
            let must_be_rejected = client.must_be_rejected(&self.config);
            ensure!(
                "I9",
                rejected || !must_be_rejected,
                "request {id} must be rejected, but is live"
            );
        }
        Ok(())
    }

    /// Records which replicas have failed, and since when each has been failed.
    fn record_failures(&mut self, failed: &[usize]) {
        let now_ms = self.now_ms;
        for replica in self.group_of(failed) {
            self.replicas[replica].failed_at_ms.get_or_insert(now_ms);
            self.replicas[replica].batch_checker.reset();
            self.replicas[replica].watch.on_executor_failure();
        }
        let timeout_ms = self.config.scheduler.limits.failure_timeout_ms;
        let timed_out = |replica_state: &SimReplica| {
            replica_state.failed_at_ms.is_some_and(|at_ms| now_ms - at_ms >= timeout_ms)
        };
        if self.replicas.iter().any(timed_out) {
            for client in &mut self.clients {
                client.allowed.unavailable |= client.stage == ClientStage::Live;
            }
        }
    }

    pub(crate) fn group_of(&self, failed: &[usize]) -> Vec<usize> {
        if self.config.scheduler.lockstep && !failed.is_empty() {
            return (0..self.replicas.len()).collect();
        }
        failed.to_vec()
    }

    /// Whether every request has ended.
    pub(crate) fn all_done(&self) -> bool {
        self.clients.iter().all(|client| client.stage == ClientStage::Done)
    }

    /// Overwrites freed blocks and state slots with invalid values, after the executor has processed all messages
    /// sent before they were freed.
    fn poison_freed(&mut self) {
        for (replica, replica_state) in self.replicas.iter_mut().enumerate() {
            let Some(executor) = &mut replica_state.executor else { continue };
            let mut freed = FreedMemory::default();
            for (block, was_free) in replica_state.free_blocks.iter_mut().enumerate() {
                let block = BlockId(block as u32);
                let free = is_free(&self.scheduler, Replica(replica as u16), block);
                if free && !*was_free {
                    freed.blocks.push(block);
                }
                *was_free = free;
            }
            let states = self.scheduler.kv(Replica(replica as u16)).states();
            for (group, was_free) in replica_state.free_state_slots.iter_mut().enumerate() {
                let slots = (0..was_free.len() as u32).map(StateSlot);
                let is_free = slots.map(|slot| states.is_free(group, slot));
                freed.state_slots.push(Vec::new());
                for (slot, (free, was_free)) in (0..).zip(is_free.zip(was_free)) {
                    if free && !*was_free {
                        freed.state_slots[group].push(StateSlot(slot));
                    }
                    *was_free = free;
                }
            }
            if !freed.blocks.is_empty() || freed.state_slots.iter().any(|slots| !slots.is_empty()) {
                executor.free(freed);
            }
        }
    }

    /// Maximum number of steps until all requests have ended. Each token is forwarded at most once per
    /// admission of its request and once more for each overdue bitmask, and every step forwards at least one
    /// token on some replica.
    fn step_bound(&self) -> u64 {
        let tokens: u64 = self.clients.iter().map(|c| u64::from(c.limit())).sum();
        // Every second time that the prefix cache is cleared, the running requests are requeued, as after an
        // executor failure.
        let timeouts = self.counts.step_timeouts + self.counts.heartbeat_timeouts;
        let incarnations = 6 + self.counts.crashes + timeouts + self.control_ops / 2;
        tokens * incarnations * u64::from(self.config.scheduler.replicas)
            + self.counts.overdue_masks
            + 1000
    }
}

/// Indices of the clients whose submission is in the inbox.
fn submitted(inbox: &[SchedulerEvent]) -> Vec<usize> {
    let index = |event: &SchedulerEvent| match event {
        SchedulerEvent::Submit(submit) => Some(submit.id.0 as usize - 1),
        _ => None,
    };
    inbox.iter().filter_map(index).collect()
}

/// Indices of the live clients whose abort is in the inbox after their submission.
fn aborted_live(inbox: &[SchedulerEvent], clients: &[SimClient]) -> Vec<usize> {
    let arrives_later = |at: usize, id| {
        inbox[at..].iter().any(|e| matches!(e, SchedulerEvent::Submit(submit) if submit.id == id))
    };
    let live = |(at, event): (usize, &SchedulerEvent)| match event {
        SchedulerEvent::Abort { request, .. } if !arrives_later(at, *request) => {
            let index = request.0 as usize - 1;
            clients
                .get(index)
                .is_some_and(|client| client.stage == ClientStage::Live)
                .then_some(index)
        }
        _ => None,
    };
    inbox.iter().enumerate().filter_map(live).collect()
}

/// Replicas that failed and replicas that were restored, according to the events of one inbox.
#[derive(Debug, Default)]
pub(crate) struct ReplicaChanges {
    /// Replicas that failed.
    pub(crate) failed: Vec<usize>,
    /// Replicas that were restored.
    pub(crate) restored: Vec<usize>,
    /// Replicas of a lockstep group that were restored and then failed again, within one inbox.
    pub(crate) failed_again: Vec<usize>,
}

/// Returns the failures and restores in an inbox. With `lockstep`, all replicas are one group that fails as a
/// whole.
pub(crate) fn replica_changes(inbox: &[SchedulerEvent], lockstep: bool) -> ReplicaChanges {
    let mut changes = ReplicaChanges::default();
    for event in inbox {
        match event {
            SchedulerEvent::ExecutorsFailed { replica, .. } => {
                let failed = usize::from(replica.0);
                let same_group = |restored: &mut usize| lockstep || *restored == failed;
                let failed_again = changes.restored.extract_if(.., same_group);
                changes.failed_again.extend(failed_again);
                changes.failed.push(failed);
            }
            SchedulerEvent::ExecutorsReady { replica, .. } => {
                changes.restored.push(usize::from(replica.0));
            }
            _ => {}
        }
    }
    changes
}
