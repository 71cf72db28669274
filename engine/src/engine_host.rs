//! Puts an engine behind a client: threads, link and fan-out in their places.

use super::engine_loop::{EVENT_LISTS_QUEUED_MAX, EngineLoop, SupervisorEvent, fan_out};
use super::executors::{ExecutorLink, spawn_readers};
use super::replica_handle::ReplicaHandle;
use crate::client::{
    AdmissionController, AdmissionLimits, BatchInbox, EngineClient, EngineMessage, ExecutorId,
};
use crate::health::HealthState;
use grammar::{GrammarTimings, MaskEvent, MaskWorkers};
use metrics::ServerMetrics;
use metrics::kv_events::KvEventFeed;
use protocol::{ExecutorReady, Replica};
use scheduler::{ExecutorFailure, Scheduler, SchedulerEvent, StepDeadline};
use std::io;
use std::sync::Arc;
use std::sync::mpsc;
use std::thread::JoinHandle;
use tokio::runtime::Handle;

/// Who hears of what the engine does.
#[derive(Clone)]
pub struct EngineObservers {
    /// Heartbeat and step progress.
    pub health: Arc<HealthState>,
    /// Figures.
    pub metrics: Arc<ServerMetrics>,
}

/// What decides, and who hears of it.
pub struct EngineParts {
    /// The scheduler.
    pub engine: Scheduler,
    /// A feed per replica; none if nobody is told what is cached.
    pub kv_events: Vec<KvEventFeed>,
}

/// A running engine.
pub struct EngineHost {
    /// Road to it.
    pub client: EngineClient,
    /// What grammars take: of its masks, and of whoever compiles for it.
    pub grammar_timings: Arc<GrammarTimings>,
    inbox: Arc<BatchInbox<EngineMessage>>,
    scheduler: JoinHandle<()>,
}

impl EngineHost {
    /// Starts the threads of an engine whose executors are ready; `links` has a replica's at its place.
    pub fn start(
        deciding: EngineParts,
        links: Vec<ExecutorLink>,
        admission: AdmissionLimits,
        deadline: StepDeadline,
        observers: EngineObservers,
        notices: mpsc::Sender<SupervisorEvent>,
        runtime: &Handle,
    ) -> io::Result<Self> {
        let inbox = Arc::new(BatchInbox::default());
        let grammar_timings = Arc::clone(&observers.metrics.grammar);
        let admission = AdmissionController::new(admission);
        let EngineParts { engine, kv_events } = deciding;
        let client = {
            let metrics = Arc::clone(&observers.metrics);
            EngineClient::new(Arc::clone(&inbox), engine.hasher(), admission, metrics)
        };
        let (news, waiting) = tokio::sync::mpsc::channel(EVENT_LISTS_QUEUED_MAX);
        runtime.spawn(fan_out(client.clone(), waiting));
        // Who asks before the first tick finds all replicas.
        (0..links.len())
            .for_each(|replica| client.set_stats(engine.stats(Replica(replica as u16))));
        let stations = links.iter().map(|link| ReplicaHandle::new(link, deadline)).collect();
        let recovers =
            links.iter().flat_map(|link| &link.receivers).all(|from| from.process.is_some());
        for (link, replica) in links.into_iter().zip((0..).map(Replica)) {
            spawn_readers(replica, link.receivers, &inbox)?;
        }
        let thread = EngineLoop {
            engine,
            kv_events,
            inbox: Arc::clone(&inbox),
            replica_handles: stations,
            can_restart: recovers,
            token_events: news,
            client: client.clone(),
            observers,
            mask_workers: mask_workers(&grammar_timings, &inbox)?,
            supervisor: notices,
        };
        Ok(Self { client, grammar_timings, inbox, scheduler: thread.spawn()? })
    }

    /// Goes on with other executors of the replicas from `first` on, which are ready and of the engine's present
    /// generation.
    pub fn restore_executors(
        &self,
        first: Replica,
        links: Vec<ExecutorLink>,
        ready: &ExecutorReady,
    ) {
        let replicas = || (first.0..).map(Replica);
        let (to, from): (Vec<_>, Vec<_>) =
            links.into_iter().map(|link| (link.commands, link.receivers)).unzip();
        // All are back before any of them can be heard to be lost again.
        for (executor, replica) in to.into_iter().zip(replicas()) {
            self.inbox.push(EngineMessage::ExecutorRestored {
                replica,
                executor,
                ready: ready.clone(),
            });
        }
        for (from, replica) in from.into_iter().zip(replicas()) {
            let epoch = from.first().map(|from| from.epoch).unwrap_or_default();
            if let Err(error) = spawn_readers(replica, from, &self.inbox) {
                let (sender, loss) =
                    (ExecutorId { replica, epoch, rank: 0 }, ExecutorFailure::Exited);
                let cause = format!("nobody can listen to the executor: {error}");
                self.inbox.push(EngineMessage::ExecutorFailed { sender, failure: loss, cause });
            }
        }
    }

    /// Ends every request: there will be no executor any more. Answered by `SupervisorEvent::EngineFailed`.
    pub fn fail_all_requests(&self, cause: String) {
        self.inbox.push(EngineMessage::RestartsExhausted(cause));
    }

    /// Stops the engine after its current tick and waits for its thread.
    pub fn stop(self) {
        self.inbox.push(EngineMessage::Stop);
        // A panic in that thread aborts the process, so joining cannot fail.
        let _ = self.scheduler.join();
    }
}

/// The threads that make masks; the engine hears of those that come late.
fn mask_workers(
    timings: &Arc<GrammarTimings>,
    inbox: &Arc<BatchInbox<EngineMessage>>,
) -> io::Result<MaskWorkers> {
    let inbox = Arc::clone(inbox);
    MaskWorkers::start(timings, move |request, news| {
        inbox.push(EngineMessage::Event(match news {
            MaskEvent::Ready { outputs, ahead } => {
                SchedulerEvent::MaskReady { request, output_tokens: outputs, wait_for_next: ahead }
            }
            MaskEvent::Done => SchedulerEvent::MasksDone { request },
        }));
    })
}
