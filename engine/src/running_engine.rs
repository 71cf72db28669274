//! Running engine: starts and stops the scheduler thread, the threads that read executor messages, and the
//! task that delivers token events to the request streams.

use super::engine_loop::{EVENT_LISTS_QUEUED_MAX, EngineLoop, SupervisorEvent, fan_out};
use super::executors::{ExecutorLink, spawn_readers};
use super::replica_handle::ReplicaHandle;
use crate::client::{
    AdmissionController, AdmissionLimits, BulkInbox, EngineClient, EngineMessage, ExecutorId,
};
use crate::health::HealthMonitor;
use grammar::{GrammarTimings, MaskEvent, MaskWorkers};
use metrics::ServerMetrics;
use metrics::kv_events::KvEventFeed;
use protocol::{ExecutorReady, Replica};
use scheduler::{ExecutorFailure, Scheduler, SchedulerEvent, StepDeadlineEstimator};
use std::io;
use std::sync::Arc;
use std::sync::mpsc;
use std::thread::JoinHandle;
use tokio::runtime::Handle;

/// Health state and metrics, which the engine updates while it runs.
#[derive(Clone)]
pub struct EngineTelemetry {
    /// Health state: heartbeat of the scheduler thread, and step progress.
    pub health: Arc<HealthMonitor>,
    /// Metrics of the server.
    pub metrics: Arc<ServerMetrics>,
}

/// Scheduler of an engine that is about to start, and the feeds that send its KV events to their publishers.
pub struct SchedulerWithKvEvents {
    /// Scheduler, which the scheduler thread will own.
    pub engine: Scheduler,
    /// Feeds that send the KV events of each replica to its publisher, by replica; empty if KV events are
    /// disabled.
    pub kv_events: Vec<KvEventFeed>,
}

/// Running engine: its client, and its scheduler thread with the message queue.
pub struct RunningEngine {
    /// Client through which requests are submitted.
    pub client: EngineClient,
    /// Durations of grammar compilation and of grammar bitmask computation.
    pub grammar_timings: Arc<GrammarTimings>,
    inbox: Arc<BulkInbox<EngineMessage>>,
    scheduler: JoinHandle<()>,
}

impl RunningEngine {
    /// Starts the threads of an engine. The executors must be ready; `links` has one link per replica, in
    /// replica order.
    pub fn start(
        parts: SchedulerWithKvEvents,
        links: Vec<ExecutorLink>,
        admission: AdmissionLimits,
        deadline: StepDeadlineEstimator,
        observers: EngineTelemetry,
        supervisor: mpsc::Sender<SupervisorEvent>,
        runtime: &Handle,
    ) -> io::Result<Self> {
        let inbox = Arc::new(BulkInbox::default());
        let grammar_timings = Arc::clone(&observers.metrics.grammar);
        let admission = AdmissionController::new(admission);
        let SchedulerWithKvEvents { engine, kv_events } = parts;
        let client = {
            let metrics = Arc::clone(&observers.metrics);
            EngineClient::new(Arc::clone(&inbox), engine.hasher(), admission, metrics)
        };
        let (events_tx, events_rx) = tokio::sync::mpsc::channel(EVENT_LISTS_QUEUED_MAX);
        runtime.spawn(fan_out(client.clone(), events_rx));
        // Statistics that are read before the first scheduler tick must include all replicas.
        (0..links.len())
            .for_each(|replica| client.set_stats(engine.stats(Replica(replica as u16))));
        let replica_handles = links.iter().map(|link| ReplicaHandle::new(link, deadline)).collect();
        let can_restart = links
            .iter()
            .flat_map(|link| &link.receivers)
            .all(|receiver| receiver.process.is_some());
        for (link, replica) in links.into_iter().zip((0..).map(Replica)) {
            spawn_readers(replica, link.receivers, &inbox)?;
        }
        let engine_loop = EngineLoop {
            engine,
            kv_events,
            inbox: Arc::clone(&inbox),
            replica_handles,
            can_restart,
            token_events: events_tx,
            client: client.clone(),
            observers,
            mask_workers: mask_workers(&grammar_timings, &inbox)?,
            supervisor,
        };
        Ok(Self { client, grammar_timings, inbox, scheduler: engine_loop.spawn()? })
    }

    /// Attaches restarted executors. `links` has one link per replica, beginning with replica `first`. The
    /// executors must be ready and belong to the engine's current epoch (executor generation).
    pub fn restore_executors(
        &self,
        first: Replica,
        links: Vec<ExecutorLink>,
        ready: &ExecutorReady,
    ) {
        let replicas = || (first.0..).map(Replica);
        let (commands, receivers): (Vec<_>, Vec<_>) =
            links.into_iter().map(|link| (link.commands, link.receivers)).unzip();
        // Add all `ExecutorRestored` messages to the inbox before any reader thread can add a message that
        // one of these executors has failed.
        for (executor, replica) in commands.into_iter().zip(replicas()) {
            self.inbox.push(EngineMessage::ExecutorRestored {
                replica,
                executor,
                ready: ready.clone(),
            });
        }
        for (receivers, replica) in receivers.into_iter().zip(replicas()) {
            let epoch = receivers.first().map(|receiver| receiver.epoch).unwrap_or_default();
            if let Err(error) = spawn_readers(replica, receivers, &self.inbox) {
                let (sender, failure) =
                    (ExecutorId { replica, epoch, rank: 0 }, ExecutorFailure::Exited);
                let cause = format!("cannot start the reader threads of the executors: {error}");
                self.inbox.push(EngineMessage::ExecutorFailed { sender, failure, cause });
            }
        }
    }

    /// Finishes all requests because failed executors will not be restarted. The engine replies with
    /// `SupervisorEvent::EngineFailed`.
    pub fn fail_all_requests(&self, cause: String) {
        self.inbox.push(EngineMessage::RestartsExhausted(cause));
    }

    /// Stops the engine after the current scheduler tick and joins the scheduler thread.
    #[expect(clippy::disallowed_methods, reason = "the thread ends after the current tick")]
    pub fn stop(self) {
        self.inbox.push(EngineMessage::Stop);
        // A panic in the thread aborts the process, so joining cannot fail.
        let _ = self.scheduler.join();
    }
}

/// Starts the threads that compute grammar bitmasks. The threads notify the engine when a bitmask that no
/// sent step waits for is ready, and when a request needs no more bitmasks.
fn mask_workers(
    timings: &Arc<GrammarTimings>,
    inbox: &Arc<BulkInbox<EngineMessage>>,
) -> io::Result<MaskWorkers> {
    let inbox = Arc::clone(inbox);
    MaskWorkers::start(timings, move |request, event| {
        inbox.push(EngineMessage::Event(match event {
            MaskEvent::Ready { output_tokens, wait_for_next } => {
                SchedulerEvent::MaskReady { request, output_tokens, wait_for_next }
            }
            MaskEvent::Done => SchedulerEvent::MasksDone { request },
        }));
    })
}
