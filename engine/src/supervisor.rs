//! The main thread of a server: waits for whatever ends it, and starts lost executors again.

use super::engine_host::EngineHost;
use super::engine_loop::{StartFailureReport, SupervisorEvent};
use super::executors::{ExecutorWorld, FailureStage, NextStart};
use crate::health::HealthState;
use metrics::{ServerMetrics, StartFailure};
use protocol::{Epoch, Replica};
use std::sync::Arc;
use std::sync::mpsc::{Receiver, RecvTimeoutError, Sender};
use std::time::{Duration, Instant};

/// The executors, and what the main thread hears of them.
pub struct SupervisorState {
    /// How to start them.
    pub world: ExecutorWorld,
    /// What happens.
    pub events: Receiver<SupervisorEvent>,
    /// For those who start something on its behalf.
    pub event_sender: Sender<SupervisorEvent>,
    /// Gets the failures of starts.
    pub metrics: Arc<ServerMetrics>,
    /// Replicas whose executors are there.
    serving: Vec<bool>,
    /// Why the last start of each replica failed, until one succeeds.
    start_failures: Vec<Option<StartFailure>>,
    /// Starts that wait for the end of a pause.
    pending: Vec<PendingStart>,
}

/// A start of a replica's executors that is due later.
struct PendingStart {
    due: Instant,
    replica: Replica,
    epoch: Epoch,
}

impl SupervisorState {
    /// All executors are there.
    pub fn new(
        world: ExecutorWorld,
        notices: Receiver<SupervisorEvent>,
        sender: Sender<SupervisorEvent>,
        metrics: Arc<ServerMetrics>,
    ) -> Self {
        let up = vec![true; usize::from(world.settings().parallel.dp_size)];
        let (start_failures, pending) = (vec![None; up.len()], Vec::new());
        Self {
            world,
            events: notices,
            event_sender: sender,
            metrics,
            serving: up,
            start_failures,
            pending,
        }
    }

    /// Whether a replica serves.
    pub fn serves(&self) -> bool {
        self.serving.contains(&true)
    }

    /// Takes note that the executors of a replica, and of those that step with it, are there, or are not.
    pub fn set_serving(&mut self, replica: Replica, up: bool) {
        for replica in self.world.group_of(replica) {
            self.serving[usize::from(replica)] = up;
        }
    }

    /// Takes note why the last start of a replica and its group failed, or that it did not. Probes report it while no
    /// replica serves.
    fn set_start_failure(
        &mut self,
        health: &HealthState,
        replica: Replica,
        failure: Option<StartFailure>,
    ) {
        for replica in self.world.group_of(replica) {
            self.start_failures[usize::from(replica)] = failure;
        }
        health.set_start_failure(self.start_failures.iter().flatten().next().copied());
    }

    /// The next notice; `None` = a start is due.
    fn next_event(&self) -> Result<Option<SupervisorEvent>, RecvTimeoutError> {
        let Some(due) = self.pending.iter().map(|pending| pending.due).min() else {
            return self.events.recv().map(Some).map_err(|_| RecvTimeoutError::Disconnected);
        };
        match self.events.recv_timeout(due.saturating_duration_since(Instant::now())) {
            Ok(notice) => Ok(Some(notice)),
            Err(RecvTimeoutError::Timeout) => Ok(None),
            Err(error) => Err(error),
        }
    }

    /// The executors of a replica, or its group, have failed: starts them again, at once or after a pause. Their streams
    /// have nothing to wait for if they have failed too often.
    fn executors_failed(
        &mut self,
        host: &EngineHost,
        replica: Replica,
        epoch: Epoch,
        stage: FailureStage,
        cause: &str,
    ) {
        self.set_serving(replica, false);
        match self.world.failed(replica, stage, cause) {
            Ok(NextStart { backoff: pause, attempt }) => {
                let pause_ms = pause.as_millis() as u64;
                let replica_number = self.world.group_of(replica).start;
                tracing::warn!(
                    replica = replica_number,
                    epoch = epoch.0,
                    attempt,
                    pause_ms,
                    cause,
                    "restarting"
                );
                self.pending.push(PendingStart { due: Instant::now() + pause, replica, epoch });
            }
            Err(exhausted) => host.fail_all_requests(exhausted.to_string()), // The answer is `EngineFailed`.
        }
    }

    /// Executors that were started again have not become ready.
    fn start_failed(
        &mut self,
        health: &HealthState,
        host: &EngineHost,
        replica: Replica,
        epoch: Epoch,
        failed: &StartFailureReport,
    ) {
        let StartFailureReport { failure, text } = failed;
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

    /// Begins the starts whose pause is over.
    fn start_due(&mut self, health: &HealthState, host: &EngineHost) {
        let now = Instant::now();
        let (due, later) =
            std::mem::take(&mut self.pending).into_iter().partition(|p| p.due <= now);
        self.pending = later;
        let due: Vec<PendingStart> = due;
        for PendingStart { replica, epoch, .. } in due {
            if let Err(failed) = self.world.restart(replica, epoch, &self.event_sender) {
                self.start_failed(health, host, replica, epoch, &failed);
            }
        }
    }

    /// Ends the executors, which have been told to stop.
    pub fn shut_down(&mut self, patience: Duration) {
        let up = &self.serving;
        self.world.shut_down(patience, |replica| up[usize::from(replica.0)]);
    }
}

/// What ends the service.
#[derive(Debug, Clone, PartialEq, Eq)]
pub enum ServiceEnd {
    /// The process got this signal.
    Signal(i32),
    /// Nothing can be served any more, and why.
    Failed(String),
}

/// Waits until a signal comes, or until nothing can be served any more; has lost executors started again meanwhile.
pub fn supervise(
    health: &HealthState,
    host: &EngineHost,
    supervised: &mut SupervisorState,
) -> ServiceEnd {
    loop {
        supervised.start_due(health, host);
        match supervised.next_event() {
            Ok(None) => {}
            Ok(Some(SupervisorEvent::Signal(number))) => return ServiceEnd::Signal(number),
            Ok(Some(SupervisorEvent::EngineFailed(text))) => return ServiceEnd::Failed(text),
            Ok(Some(SupervisorEvent::StartFinished {
                replica,
                outcome: Ok((links, ready)),
                ..
            })) => {
                supervised.world.ready(replica);
                supervised.set_start_failure(health, replica, None);
                host.restore_executors(replica, links, &ready);
                supervised.set_serving(replica, true);
            }
            Ok(Some(SupervisorEvent::ExecutorsFailed { replica, epoch, cause })) => {
                supervised.executors_failed(host, replica, epoch, FailureStage::InService, &cause);
            }
            Ok(Some(SupervisorEvent::StartFinished { replica, epoch, outcome: Err(failed) })) => {
                supervised.start_failed(health, host, replica, epoch, &failed);
            }
            Err(_) => return ServiceEnd::Failed("nobody watches this process any more".to_owned()),
        }
    }
}
