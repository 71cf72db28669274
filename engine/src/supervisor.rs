//! Supervisor on the main thread: waits for the end of the server and restarts failed executors.

use super::engine_loop::{ExecutorRestartFailure, SupervisorEvent};
use super::executors::{ExecutorManager, FailureStage, RestartAttempt};
use super::running_engine::RunningEngine;
use crate::health::HealthMonitor;
use metrics::{RestartFailureKind, ServerMetrics};
use protocol::{Epoch, Replica};
use std::sync::Arc;
use std::sync::mpsc::{Receiver, RecvTimeoutError, Sender};
use std::time::{Duration, Instant};

/// State of the supervisor: the executor groups, the event queue and the pending restarts.
pub struct SupervisorState {
    /// Executor groups and their restart policy.
    pub world: ExecutorManager,
    /// Queue of events for the supervisor.
    pub events: Receiver<SupervisorEvent>,
    /// Sender for threads that report to the supervisor.
    pub event_sender: Sender<SupervisorEvent>,
    /// Metrics that count failed starts.
    pub metrics: Arc<ServerMetrics>,
    /// Whether the executors of each replica are running.
    serving: Vec<bool>,
    /// Class of the last failed start of each replica, until a start succeeds.
    start_failures: Vec<Option<RestartFailureKind>>,
    /// Restarts that are delayed by their back-off.
    pending: Vec<PendingRestart>,
}

/// Delayed restart of a replica's executors.
struct PendingRestart {
    due: Instant,
    replica: Replica,
    epoch: Epoch,
}

impl SupervisorState {
    /// Creates the state for a server whose executors are all running.
    pub fn new(
        world: ExecutorManager,
        events: Receiver<SupervisorEvent>,
        event_sender: Sender<SupervisorEvent>,
        metrics: Arc<ServerMetrics>,
    ) -> Self {
        let serving = vec![true; usize::from(world.settings().parallel.dp_size)];
        let (start_failures, pending) = (vec![None; serving.len()], Vec::new());
        Self { world, events, event_sender, metrics, serving, start_failures, pending }
    }

    /// Whether the executors of at least one replica are running.
    pub fn serves(&self) -> bool {
        self.serving.contains(&true)
    }

    /// Records whether the executor group of a replica is running.
    pub fn set_serving(&mut self, replica: Replica, serving: bool) {
        for replica in self.world.group_of(replica) {
            self.serving[usize::from(replica)] = serving;
        }
    }

    /// Records the class of the last failed start of the executor group of a replica; `None` = the start
    /// succeeded. Health probes report the class while no replica serves.
    fn set_start_failure(
        &mut self,
        health: &HealthMonitor,
        replica: Replica,
        failure: Option<RestartFailureKind>,
    ) {
        for replica in self.world.group_of(replica) {
            self.start_failures[usize::from(replica)] = failure;
        }
        health.set_start_failure(self.start_failures.iter().flatten().next().copied());
    }

    /// Waits for the next event; `None` = a delayed restart is due.
    #[expect(clippy::disallowed_methods, reason = "the thread ends with the senders of its events")]
    fn next_event(&self) -> Result<Option<SupervisorEvent>, RecvTimeoutError> {
        let Some(due) = self.pending.iter().map(|pending| pending.due).min() else {
            return self.events.recv().map(Some).map_err(|_| RecvTimeoutError::Disconnected);
        };
        match self.events.recv_timeout(due.saturating_duration_since(Instant::now())) {
            Ok(event) => Ok(Some(event)),
            Err(RecvTimeoutError::Timeout) => Ok(None),
            Err(error) => Err(error),
        }
    }

    /// Handles a failure in the executor group of a replica: schedules a restart after the back-off, or
    /// finishes all requests if the restart limits are exceeded.
    fn executors_failed(
        &mut self,
        host: &RunningEngine,
        replica: Replica,
        epoch: Epoch,
        stage: FailureStage,
        cause: &str,
    ) {
        self.set_serving(replica, false);
        match self.world.failed(replica, stage, cause) {
            Ok(RestartAttempt { backoff, attempt }) => {
                let pause_ms = backoff.as_millis() as u64;
                let replica_number = self.world.group_of(replica).start;
                tracing::warn!(
                    replica = replica_number,
                    epoch = epoch.0,
                    attempt,
                    pause_ms,
                    cause,
                    "restarting"
                );
                self.pending.push(PendingRestart { due: Instant::now() + backoff, replica, epoch });
            }
            // The engine replies with `SupervisorEvent::EngineFailed`, which ends the service.
            Err(exhausted) => host.fail_all_requests(exhausted.to_string()),
        }
    }

    /// Handles a failed restart of a replica's executors.
    fn start_failed(
        &mut self,
        health: &HealthMonitor,
        host: &RunningEngine,
        replica: Replica,
        epoch: Epoch,
        failed: &ExecutorRestartFailure,
    ) {
        let ExecutorRestartFailure { failure, text } = failed;
        self.metrics.executors.start_failed(replica, *failure);
        self.set_start_failure(health, replica, Some(*failure));
        let replica_number = replica.0;
        tracing::error!(
            replica_number,
            failure = failure.name(),
            text,
            "executors did not become ready"
        );
        self.executors_failed(host, replica, epoch, FailureStage::Starting, text);
    }

    /// Handles an event; returns the reason if it ends the service.
    fn handle_event(
        &mut self,
        health: &HealthMonitor,
        host: &RunningEngine,
        event: SupervisorEvent,
    ) -> Option<ServiceEndReason> {
        match event {
            SupervisorEvent::Signal(number) => return Some(ServiceEndReason::Signal(number)),
            SupervisorEvent::EngineFailed(text) => return Some(ServiceEndReason::Failed(text)),
            SupervisorEvent::ExecutorsFailed { replica, epoch, cause } => {
                self.executors_failed(host, replica, epoch, FailureStage::InService, &cause);
            }
            SupervisorEvent::StartFinished { replica, outcome: Ok((links, ready)), .. } => {
                self.world.ready(replica);
                self.set_start_failure(health, replica, None);
                host.restore_executors(replica, links, &ready);
                self.set_serving(replica, true);
            }
            SupervisorEvent::StartFinished { replica, epoch, outcome: Err(failed) } => {
                self.start_failed(health, host, replica, epoch, &failed);
            }
        }
        None
    }

    /// Starts the executor groups whose back-off has elapsed.
    fn start_due(&mut self, health: &HealthMonitor, host: &RunningEngine) {
        let now = Instant::now();
        let (due, later) =
            std::mem::take(&mut self.pending).into_iter().partition(|p| p.due <= now);
        self.pending = later;
        let due: Vec<PendingRestart> = due;
        for PendingRestart { replica, epoch, .. } in due {
            if let Err(failed) = self.world.restart(replica, epoch, &self.event_sender) {
                self.start_failed(health, host, replica, epoch, &failed);
            }
        }
    }

    /// Waits for the end of the executors, which must have been commanded to stop, and kills them after
    /// `timeout`.
    pub fn shut_down(&mut self, timeout: Duration) {
        let serving = &self.serving;
        self.world.shut_down(timeout, |replica| serving[usize::from(replica.0)]);
    }
}

/// Reason why the server stops serving requests.
#[derive(Debug, Clone, PartialEq, Eq)]
pub enum ServiceEndReason {
    /// The process received this signal.
    Signal(i32),
    /// No replica is serving requests and none will serve again. Contains the cause.
    Failed(String),
}

/// Supervises the executors: restarts failed ones until a signal or a permanent failure ends the service.
pub fn supervise(
    health: &HealthMonitor,
    host: &RunningEngine,
    state: &mut SupervisorState,
) -> ServiceEndReason {
    loop {
        state.start_due(health, host);
        match state.next_event() {
            Ok(None) => {}
            Ok(Some(event)) => {
                if let Some(reason) = state.handle_event(health, host, event) {
                    return reason;
                }
            }
            Err(_) => {
                return ServiceEndReason::Failed(
                    "the event queue of the supervisor is closed".to_owned(),
                );
            }
        }
    }
}
