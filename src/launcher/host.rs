//! Puts an engine behind a client: threads, link and fan-out in their places.

use super::engine_thread::{EngineThread, LISTS_WAITING_MAX, Notice, fan_out};
use super::executor::{ExecutorLink, spawn_readers};
use super::station::Station;
use crate::engine_client::{Admission, AdmissionLimits, EngineClient, Inbox, Sender, Signal};
use crate::grammar::{GrammarTimings, MaskWorkers, News};
use crate::kv_events::Feed;
use crate::metrics::Metrics;
use crate::server::health::Health;
use protocol::{Ready, Replica};
use scheduler::{Engine, Event, Loss, StepDeadline};
use std::io;
use std::sync::Arc;
use std::sync::mpsc;
use std::thread::JoinHandle;
use tokio::runtime::Handle;

/// Who hears of what the engine does.
#[derive(Clone)]
pub struct Observers {
    /// Heartbeat and step progress.
    pub health: Arc<Health>,
    /// Figures.
    pub metrics: Arc<Metrics>,
}

/// What decides, and who hears of it.
pub struct Deciding {
    /// The scheduler.
    pub engine: Engine,
    /// A feed per replica; none if nobody is told what is cached.
    pub kv_events: Vec<Feed>,
}

/// A running engine.
pub struct Host {
    /// Road to it.
    pub client: EngineClient,
    /// What grammars take: of its masks, and of whoever compiles for it.
    pub grammar_timings: Arc<GrammarTimings>,
    inbox: Arc<Inbox<Signal>>,
    scheduler: JoinHandle<()>,
}

impl Host {
    /// Starts the threads of an engine whose executors are ready; `links` has a replica's at its place.
    pub fn start(
        deciding: Deciding,
        links: Vec<ExecutorLink>,
        admission: AdmissionLimits,
        deadline: StepDeadline,
        observers: Observers,
        notices: mpsc::Sender<Notice>,
        runtime: &Handle,
    ) -> io::Result<Self> {
        let inbox = Arc::new(Inbox::default());
        let grammar_timings = Arc::clone(&observers.metrics.grammar);
        let admission = Admission::new(admission);
        let Deciding { engine, kv_events } = deciding;
        let client = {
            let metrics = Arc::clone(&observers.metrics);
            EngineClient::new(Arc::clone(&inbox), engine.hasher(), admission, metrics)
        };
        let (news, waiting) = tokio::sync::mpsc::channel(LISTS_WAITING_MAX);
        runtime.spawn(fan_out(client.clone(), waiting));
        // Who asks before the first tick finds all replicas.
        (0..links.len())
            .for_each(|replica| client.set_stats(engine.stats(Replica(replica as u16))));
        let stations = links.iter().map(|link| Station::new(link, deadline)).collect();
        let recovers = links.iter().flat_map(|link| &link.from).all(|from| from.process.is_some());
        for (link, replica) in links.into_iter().zip((0..).map(Replica)) {
            spawn_readers(replica, link.from, &inbox)?;
        }
        let thread = EngineThread {
            engine,
            kv_events,
            inbox: Arc::clone(&inbox),
            stations,
            recovers,
            news,
            client: client.clone(),
            observers,
            masks: mask_workers(&grammar_timings, &inbox)?,
            notices,
        };
        Ok(Self { client, grammar_timings, inbox, scheduler: thread.spawn()? })
    }

    /// Goes on with other executors of the replicas from `first` on, which are ready and of the engine's present
    /// generation.
    pub fn resume(&self, first: Replica, links: Vec<ExecutorLink>, ready: &Ready) {
        let replicas = || (first.0..).map(Replica);
        let (to, from): (Vec<_>, Vec<_>) =
            links.into_iter().map(|link| (link.to, link.from)).unzip();
        // All are back before any of them can be heard to be lost again.
        for (executor, replica) in to.into_iter().zip(replicas()) {
            self.inbox.push(Signal::Back { replica, executor, ready: ready.clone() });
        }
        for (from, replica) in from.into_iter().zip(replicas()) {
            let epoch = from.first().map(|from| from.epoch).unwrap_or_default();
            if let Err(error) = spawn_readers(replica, from, &self.inbox) {
                let (sender, loss) = (Sender { replica, epoch, rank: 0 }, Loss::Exited);
                let cause = format!("nobody can listen to the executor: {error}");
                self.inbox.push(Signal::Lost { sender, loss, cause });
            }
        }
    }

    /// Ends every request: there will be no executor any more. Answered by `Notice::EngineFailed`.
    pub fn give_up(&self, cause: String) {
        self.inbox.push(Signal::GiveUp(cause));
    }

    /// Stops the engine after its current tick and waits for its thread.
    pub fn stop(self) {
        self.inbox.push(Signal::Stop);
        // A panic in that thread aborts the process, so joining cannot fail.
        let _ = self.scheduler.join();
    }
}

/// The threads that make masks; the engine hears of those that come late.
fn mask_workers(
    timings: &Arc<GrammarTimings>,
    inbox: &Arc<Inbox<Signal>>,
) -> io::Result<MaskWorkers> {
    let inbox = Arc::clone(inbox);
    MaskWorkers::start(timings, move |request, news| {
        inbox.push(Signal::Event(match news {
            News::Made { outputs, ahead } => Event::MaskMade { request, outputs, ahead },
            News::Over => Event::MasksOver { request },
        }));
    })
}
