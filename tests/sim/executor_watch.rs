//! Heartbeat and step-timeout monitoring of simulated executors with the real `StepWatchdog` and
//! `HeartbeatMonitor`. F25: executors of a group that makes progress are never declared failed, even if any
//! part of the engine was paused. F10: executors that hang are declared failed within a bounded time.

use crate::event_queue::SimEvent;
use crate::executor::{HangKind, SimExecutor};
use crate::fault_injector::InjectedFault;
use crate::invariant::{CheckResult, ensure};
use crate::world::{SimReplica, SimWorld, replica_changes};
use protocol::{Batch, Replica, StepCost, StepId};
use scheduler::{
    ExecutorFailure, HEARTBEAT_GRACE_PERIOD, HEARTBEAT_TIMEOUT, HeartbeatMonitor, SchedulerEvent,
    StepDeadlineEstimator, StepWatchdog, StepWorkload,
};
use std::collections::VecDeque;

/// An executor sends a heartbeat if it has sent no other message for this time in milliseconds.
const HEARTBEAT_INTERVAL_MS: u64 = 1000;
/// Longest interval in milliseconds between two iterations of the scheduler's thread, unless it is paused.
const SCHEDULER_POLL_MS: usize = 250;
/// Tolerance in milliseconds for the time in which a hang must be detected; it covers link delay, late ticks
/// and clock granularity.
const DETECTION_SLACK_MS: u64 = 700;
/// The run is considered finished after this number of consecutive heartbeats per replica without any other
/// event.
const IDLE_HEARTBEATS_MAX: usize = 100;

/// A message that shows that a replica's executors are running. The scheduler's thread processes such
/// messages at its next tick, in order of arrival.
#[derive(Debug)]
pub(crate) enum ExecutorLivenessEvent {
    /// The output of a step arrived.
    StepOutputArrived { replica: usize, step: StepId },
    /// The executors sent a heartbeat. `incarnation` counts how often the executors of the replica have been
    /// started.
    Heartbeat { replica: usize, incarnation: u32 },
}

/// Monitoring state of a replica's executors.
#[derive(Debug)]
pub(crate) struct SimExecutorWatch {
    step_watchdog: StepWatchdog,
    /// Steps in flight with their earliest start times by the simulated clock. The checks use these times,
    /// because the times of the tested `StepWatchdog` may be wrong.
    steps_begun: VecDeque<(StepId, u64)>,
    heartbeat_monitor: HeartbeatMonitor,
    /// Time at which the heartbeat timeout expires if no further message is read from the link.
    wait_until_ms: u64,
    /// Whether a message has arrived but was not read, because link readers were paused.
    unread: bool,
}

impl Default for SimExecutorWatch {
    fn default() -> Self {
        let step_watchdog =
            StepWatchdog::new(1, StepDeadlineEstimator::new(None, StepCost::default()));
        Self {
            step_watchdog,
            steps_begun: VecDeque::new(),
            heartbeat_monitor: HeartbeatMonitor::default(),
            wait_until_ms: 0,
            unread: false,
        }
    }
}

impl SimExecutorWatch {
    /// Records that a batch was sent.
    pub(crate) fn batch_sent(&mut self, batch: &Batch, now_ms: u64) {
        let tokens = batch.rows.iter().map(|row| u64::from(row.len) + u64::from(row.drafts)).sum();
        let masked = batch.rows.iter().any(|row| row.masked);
        self.step_watchdog.step_sent(
            batch.step,
            StepWorkload { tokens, attention_pairs: 0 },
            masked,
            now_ms,
        );
        self.steps_begun.push_back((batch.step, now_ms));
    }

    /// Records that a step's output has arrived.
    fn step_answered(&mut self, step: StepId, now_ms: u64) {
        self.step_watchdog.step_answered(step, now_ms);
        while self.steps_begun.pop_front_if(|(sent, _)| *sent <= step).is_some() {}
        if let Some((_, at_ms)) = self.steps_begun.front_mut() {
            *at_ms = now_ms.max(*at_ms);
        }
    }

    /// Clears the monitoring state after an executor failure.
    pub(crate) fn on_executor_failure(&mut self) {
        self.steps_begun.clear();
        self.step_watchdog.on_executor_failure();
    }

    fn message_read(&mut self, now_ms: u64) {
        self.heartbeat_monitor.on_heartbeat();
        self.restart_wait(now_ms);
    }

    fn restart_wait(&mut self, now_ms: u64) {
        self.wait_until_ms = now_ms + self.heartbeat_monitor.timeout().as_millis() as u64;
    }
}

impl SimWorld {
    /// Starts monitoring the new executors of a replica.
    pub(crate) fn watch_executors(&mut self, replica: usize) {
        if !self.config.watch_heartbeats {
            return;
        }
        let (now_ms, replica_state) = (self.now_ms, &mut self.replicas[replica]);
        let incarnation = replica_state.incarnation;
        replica_state.watch.unread = false;
        replica_state.watch.message_read(now_ms);
        self.events.add(
            replica_state.watch.wait_until_ms,
            SimEvent::CheckHeartbeat { replica, incarnation },
        );
        self.events
            .add(now_ms + HEARTBEAT_INTERVAL_MS, SimEvent::HeartbeatDue { replica, incarnation });
    }

    /// Sends a heartbeat if the executor has sent no other message for `HEARTBEAT_INTERVAL_MS`.
    pub(crate) fn heartbeat_due(&mut self, replica: usize, incarnation: u32) {
        self.idle_heartbeats += 1;
        let delay_ms = self.link_delay_ms();
        let (now_ms, over) = (self.now_ms, self.is_over());
        let replica_state = &mut self.replicas[replica];
        let current = replica_state.incarnation == incarnation && !over;
        let Some(executor) = replica_state.executor.as_mut().filter(|_| current) else { return };
        if executor.hang.is_some_and(|(hang, _)| hang == HangKind::NoHeartbeat) {
            return;
        }
        if now_ms >= executor.last_message_ms + HEARTBEAT_INTERVAL_MS {
            executor.last_message_ms = now_ms;
            executor.last_reply_ms = executor.last_reply_ms.max(now_ms + delay_ms);
            self.events
                .add(executor.last_reply_ms, SimEvent::HeartbeatArrives { replica, incarnation });
        }
        self.events.add(
            executor.last_message_ms + HEARTBEAT_INTERVAL_MS,
            SimEvent::HeartbeatDue { replica, incarnation },
        );
    }

    /// Delivers a heartbeat to the scheduler's side of the link.
    pub(crate) fn heartbeat_arrives(&mut self, replica: usize, incarnation: u32) {
        if !self.is_link_broken(replica, incarnation) {
            self.trace.record(self.now_ms, "heartbeat", &[replica as u64]);
            self.message_arrives(replica, incarnation);
            self.signals.push(ExecutorLivenessEvent::Heartbeat { replica, incarnation });
        }
    }

    /// Defers a step output or heartbeat that arrives while the scheduler's thread runs but link readers are
    /// paused; it is read when link readers resume. Returns any other event unchanged.
    pub(crate) fn defer_unread_message(&mut self, what: SimEvent) -> Option<SimEvent> {
        if !what.is_heartbeat_check() {
            self.idle_heartbeats = 0;
        }
        let sender = match &what {
            SimEvent::Reply { replica, reply } => Some((*replica, reply.incarnation)),
            SimEvent::HeartbeatArrives { replica, incarnation } => Some((*replica, *incarnation)),
            _ => None,
        };
        let (Some(at_ms), Some((replica, incarnation))) = (self.message_read_ms(), sender) else {
            return Some(what);
        };
        self.message_arrives(replica, incarnation);
        self.unread.push(what);
        self.events.add(at_ms, SimEvent::Wake);
        None
    }

    /// Records a message from executors; `incarnation` counts how often the executors of the replica have
    /// been started. If the link readers are paused, they read the message when they resume.
    pub(crate) fn message_arrives(&mut self, replica: usize, incarnation: u32) {
        let (now_ms, reads) = (self.now_ms, self.link_readers_run());
        let replica_state = &mut self.replicas[replica];
        if replica_state.announced_incarnation == incarnation {
            if reads {
                replica_state.watch.message_read(now_ms);
            } else {
                replica_state.watch.unread = true;
            }
        }
    }

    /// Checks whether the heartbeat timeout of a replica's executors has expired.
    pub(crate) fn check_heartbeat(&mut self, replica: usize, incarnation: u32) -> CheckResult {
        if self.replicas[replica].incarnation != incarnation || self.is_over() {
            return Ok(());
        }
        if let Some(until_ms) = self.link_readers_resume_ms() {
            self.events.add(until_ms, SimEvent::CheckHeartbeat { replica, incarnation });
            return Ok(());
        }
        if self.now_ms >= self.replicas[replica].watch.wait_until_ms {
            self.heartbeat_missing(replica)?;
        }
        let at_ms = self.replicas[replica].watch.wait_until_ms.max(self.now_ms + 1);
        self.events.add(at_ms, SimEvent::CheckHeartbeat { replica, incarnation });
        Ok(())
    }

    /// Handles a heartbeat timeout: it has expired and no message is waiting to be read.
    fn heartbeat_missing(&mut self, replica: usize) -> CheckResult {
        let (now_ms, hangs) = (self.now_ms, self.group_hangs(replica));
        let no_grace_period =
            self.fault_injector.injects(InjectedFault::PauseCountsAsHeartbeatTimeout);
        let watch = &mut self.replicas[replica].watch;
        if watch.heartbeat_monitor.on_timeout() || no_grace_period {
            return self.fail_executors(replica, ExecutorFailure::HeartbeatTimeout);
        }
        watch.restart_wait(now_ms);
        self.counts.false_suspicions += u64::from(!hangs);
        Ok(())
    }

    /// Resumes link readers after a pause. The seed determines whether the link readers first notice their
    /// expired timeouts or first read the messages that have arrived.
    pub(crate) fn resume_link_readers(&mut self) -> CheckResult {
        let now_ms = self.now_ms;
        for replica in 0..self.replicas.len() {
            let clock_first = self.rng.chance_per_mille(500);
            let watch = &self.replicas[replica].watch;
            if watch.wait_until_ms <= now_ms && (clock_first || !watch.unread) {
                self.heartbeat_missing(replica)?;
            }
            let watch = &mut self.replicas[replica].watch;
            if std::mem::take(&mut watch.unread) {
                watch.message_read(now_ms);
            }
        }
        Ok(())
    }

    /// Processes the executor messages since the scheduler's last tick, and declares executors failed that
    /// have exceeded a timeout.
    pub(crate) fn process_signals(&mut self) -> CheckResult {
        self.poll_watchdogs();
        let now_ms = self.now_ms;
        let mut heartbeat_ms = vec![now_ms; self.replicas.len()];
        for signal in std::mem::take(&mut self.signals) {
            match signal {
                ExecutorLivenessEvent::StepOutputArrived { replica, step } => {
                    self.replicas[replica].watch.step_answered(step, now_ms);
                }
                ExecutorLivenessEvent::Heartbeat { replica, incarnation } => {
                    let hangs = self.group_hangs(replica);
                    let replica_state = &mut self.replicas[replica];
                    if replica_state.announced_incarnation != incarnation
                        || replica_state.failed_at_ms.is_some()
                    {
                        continue; // The heartbeat is from executors that have failed.
                    }
                    let lateness =
                        replica_state.watch.step_watchdog.on_heartbeat(0, heartbeat_ms[replica]);
                    if self.fault_injector.injects(InjectedFault::QueuedHeartbeatsCountTwice) {
                        heartbeat_ms[replica] += HEARTBEAT_INTERVAL_MS;
                    }
                    self.counts.false_suspicions +=
                        u64::from(!lateness.stragglers.is_empty() && !hangs);
                    if lateness.timeout.is_some() {
                        self.fail_executors(replica, ExecutorFailure::StepTimeout)?;
                    }
                }
            }
        }
        self.check_hangs_are_detected()
    }

    /// Runs the watchdog checks that the scheduler's thread would have made since its last tick: one every
    /// `SCHEDULER_POLL_MS`, except while the thread was paused.
    fn poll_watchdogs(&mut self) {
        let (now_ms, ticked_ms) = (self.now_ms, self.last_tick_ms);
        self.last_tick_ms = now_ms;
        if self.fault_injector.injects(InjectedFault::PauseCountsAsStepTime) {
            return;
        }
        let was_paused = self.scheduler_resumed_ms > ticked_ms;
        let from_ms = if was_paused { self.scheduler_resumed_ms } else { ticked_ms };
        for replica_state in self.replicas.iter_mut().filter(|_| self.config.watch_heartbeats) {
            (from_ms..now_ms)
                .step_by(SCHEDULER_POLL_MS)
                .for_each(|ms| replica_state.watch.step_watchdog.poll(ms));
            replica_state.watch.step_watchdog.poll(now_ms);
        }
    }

    /// Declares executors failed and replaces them, unless their failure has already been reported to the
    /// scheduler.
    fn fail_executors(&mut self, replica: usize, failure: ExecutorFailure) -> CheckResult {
        let failed = replica_changes(&self.inbox, self.config.scheduler.lockstep).failed;
        let pending = self.group_of(&failed).contains(&replica);
        if pending || self.replicas[replica].executor.is_none() {
            return Ok(());
        }
        let justified = if failure == ExecutorFailure::HeartbeatTimeout {
            self.sends_no_heartbeat(replica)
        } else {
            self.group_hangs(replica)
        };
        ensure!(
            "F25",
            justified,
            "replica {replica}: {failure:?}, but it makes progress or sends heartbeats"
        );
        match failure {
            ExecutorFailure::HeartbeatTimeout => self.counts.heartbeat_timeouts += 1,
            _ => self.counts.step_timeouts += 1,
        }
        let restored_ms = self.now_ms + 1 + self.rng.below(700);
        self.trace.record(self.now_ms, "timeout", &[replica as u64]);
        self.inbox
            .push(SchedulerEvent::ExecutorsFailed { replica: Replica(replica as u16), failure });
        self.replace_executors(replica, self.now_ms, restored_ms)
    }

    /// Whether a replica's executors send no heartbeats, because they hang, have failed or have a broken
    /// link.
    fn sends_no_heartbeat(&self, replica: usize) -> bool {
        let stopped =
            |executor: &SimExecutor| matches!(executor.hang, Some((HangKind::NoHeartbeat, _)));
        let silent = |executor: &SimExecutor| stopped(executor) || executor.link_broken;
        self.replicas[replica].executor.as_ref().is_none_or(silent)
    }

    /// Whether a hang or a broken link stops the steps of a replica's group.
    pub(crate) fn group_hangs(&self, replica: usize) -> bool {
        let works = |executor: &SimExecutor| executor.hang.is_none() && !executor.link_broken;
        let group = self.group_of(&[replica]);
        !group.into_iter().all(|peer| self.replicas[peer].executor.as_ref().is_some_and(works))
    }

    /// Makes a replica's executors hang, with or without heartbeats.
    pub(crate) fn hang_executors(&mut self, replica: usize) {
        let may = !self.faults_ended && self.crashes_left > 0;
        let hang = self.rng.pick(&[HangKind::StepNeverEnds, HangKind::NoHeartbeat]);
        let Some(executor) = &mut self.replicas[replica].executor else { return };
        if may && executor.hang.is_none() {
            executor.hang = Some((hang, self.now_ms));
            self.crashes_left -= 1;
            self.counts.hangs += 1;
            self.trace.record(self.now_ms, "hang", &[replica as u64]);
        }
    }

    /// Checks F10: a hang is detected within the heartbeat timeout or the step deadline. If a pause of the
    /// engine ended after the start of the hang, the time is counted from the end of the pause (F25).
    fn check_hangs_are_detected(&self) -> CheckResult {
        if self.process_pause.is_some() || self.is_over() {
            return Ok(());
        }
        let hang = |replica_state: &SimReplica| {
            replica_state.executor.as_ref().and_then(|executor| executor.hang)
        };
        for (replica, replica_state) in self.replicas.iter().enumerate() {
            let Some((hang, since_ms)) = hang(replica_state) else { continue };
            let since_ms = since_ms.max(self.resumed_ms);
            let within_ms = match hang {
                HangKind::NoHeartbeat => {
                    Some(since_ms + (HEARTBEAT_TIMEOUT + HEARTBEAT_GRACE_PERIOD).as_millis() as u64)
                }
                HangKind::StepNeverEnds => {
                    let begun = replica_state
                        .watch
                        .steps_begun
                        .front()
                        .zip(replica_state.watch.step_watchdog.oldest_step());
                    begun.map(|((_, at_ms), (_, limit_ms))| {
                        since_ms.max(*at_ms) + limit_ms + 2 * HEARTBEAT_INTERVAL_MS
                    })
                }
            };
            let overdue =
                within_ms.is_some_and(|within_ms| self.now_ms > within_ms + DETECTION_SLACK_MS);
            let (lasts_ms, resumed_ms) = (self.now_ms - since_ms, self.resumed_ms);
            ensure!(
                "F10",
                !overdue,
                "replica {replica} hangs ({hang:?}) for {lasts_ms} ms, engine resumed at {resumed_ms}"
            );
        }
        Ok(())
    }

    /// Whether the simulation is over: all work is done, or only heartbeats have happened for so long that no
    /// other event can follow.
    fn is_over(&self) -> bool {
        let done = self.faults_ended && self.all_done() && self.scheduler.is_idle();
        let waits = self
            .replicas
            .iter()
            .any(|replica_state| replica_state.watch.step_watchdog.oldest_step().is_some());
        done && !waits || self.idle_heartbeats > IDLE_HEARTBEATS_MAX * self.replicas.len()
    }
}
