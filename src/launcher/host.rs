//! Puts an engine behind a client: threads, link and fan-out in their places.

use super::engine_thread::{
    EngineThread, LISTS_WAITING_MAX, Notice, StepDeadline, fan_out, spawn_reader,
};
use super::start_up::ExecutorLink;
use crate::engine_client::{Admission, AdmissionLimits, EngineClient, Inbox, Signal};
use crate::server::health::Health;
use scheduler::Engine;
use std::io;
use std::sync::Arc;
use std::sync::mpsc::Sender;
use std::thread::JoinHandle;
use tokio::runtime::Handle;
use tokio::sync::mpsc;

/// A running engine.
pub struct Host {
    /// Road to it.
    pub client: EngineClient,
    inbox: Arc<Inbox<Signal>>,
    scheduler: JoinHandle<()>,
}

impl Host {
    /// Starts the threads of an engine whose executor is ready.
    pub fn start(
        engine: Engine,
        link: ExecutorLink,
        admission: AdmissionLimits,
        deadline: StepDeadline,
        health: Arc<Health>,
        notices: Sender<Notice>,
        runtime: &Handle,
    ) -> io::Result<Self> {
        let inbox = Arc::new(Inbox::default());
        let admission = Admission::new(admission);
        let client = EngineClient::new(Arc::clone(&inbox), engine.hasher(), admission);
        let (news, waiting) = mpsc::channel(LISTS_WAITING_MAX);
        runtime.spawn(fan_out(client.clone(), waiting));
        spawn_reader(link.from, Arc::clone(&inbox))?;
        let thread = EngineThread {
            engine,
            inbox: Arc::clone(&inbox),
            executor: link.to,
            news,
            client: client.clone(),
            health,
            deadline,
            notices,
        };
        Ok(Self { client, inbox, scheduler: thread.spawn()? })
    }

    /// Stops the engine after its current tick and waits for its thread.
    pub fn stop(self) {
        self.inbox.push(Signal::Stop);
        // A panic in that thread aborts the process, so joining cannot fail.
        let _ = self.scheduler.join();
    }
}
