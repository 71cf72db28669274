//! Executors of a group on this node. A group consists of the executors of one replica, or of all replicas if the replicas run in
//! lockstep (share experts and execute each step together); they are started and stopped together.

use super::process::SpawnedExecutor;
use super::{ExecutorLink, ExecutorProcess, ExecutorProgram, ExecutorReceiver, RankLink};
use anyhow::{Context, Result};
use executor::{ExecutorConfig, RankRendezvous};
use protocol::link::LinkSocket;
use protocol::{Epoch, ExecutorSettings, Rank};
use rustix::process::Signal;
use std::convert::Infallible;
use std::io;
use std::net::TcpStream;
use std::ops::Range;
use std::path::PathBuf;
use std::sync::Arc;
use std::sync::mpsc::{Receiver, RecvTimeoutError, channel};
use std::thread;
use std::time::{Duration, Instant};

/// Capacity in messages of the in-process link to an executor thread.
const LINK_MESSAGES: usize = 32;
/// Maximum wait for a process to exit after SIGKILL; only a device driver can delay the exit.
const KILL_WAIT: Duration = Duration::from_secs(5);
/// Wait for an executor process to exit after SIGTERM, before SIGKILL is sent.
const TERM_WAIT: Duration = Duration::from_secs(2);

/// Whether executors are threads or processes, and how processes are launched.
#[derive(Debug, Clone, Copy)]
pub struct ExecutorLaunchOptions {
    /// Whether each executor is a process; otherwise the only executor is a thread.
    pub as_processes: bool,
    /// Program of the executor processes.
    pub program: ExecutorProgram,
}

/// Links to the executors of this node.
pub(crate) enum LocalLinks {
    /// The executor is a thread of this process.
    Thread(ExecutorLink),
    /// Each executor is a process.
    Processes(Vec<RankLink>),
}

/// Executors of this node that are started and stopped together; they can be started repeatedly.
pub(crate) struct LocalExecutors {
    config: ExecutorConfig,
    /// World ranks of the executors.
    ranks: Range<u16>,
    launch_options: ExecutorLaunchOptions,
    /// Running executor processes, in the order of their ranks.
    current: Vec<Arc<ExecutorProcess>>,
    /// Shared memory in which the ranks rendezvous to set up their collectives; `None` if there is only one
    /// rank.
    rendezvous: Option<RankRendezvous>,
    /// Channel that is disconnected when the executor thread of this process ends; `None` if the executors
    /// are processes.
    thread: Option<Receiver<Infallible>>,
}

impl LocalExecutors {
    /// Describes the executors with the world ranks `ranks`, without starting them. At each start, every rank receives
    /// `config` with its rank number and the rendezvous (shared memory for setting up collectives).
    pub(crate) fn new(
        config: ExecutorConfig,
        ranks: Range<u16>,
        launch_options: ExecutorLaunchOptions,
    ) -> Self {
        let (current, rendezvous, thread) = (Vec::new(), None, None);
        Self { config, ranks, launch_options, current, rendezvous, thread }
    }

    /// Starts the executors with the epoch (executor generation) `epoch`. Must be called on the main thread.
    ///
    /// Errors: no process, thread or file descriptor is available. Executors already started are killed.
    pub(crate) fn start(&mut self, epoch: Epoch) -> Result<LocalLinks> {
        self.config.settings.epoch = epoch;
        if !self.launch_options.as_processes {
            let (link, thread) =
                start_thread(self.config.clone()).context("cannot start the executor thread")?;
            self.thread = Some(thread);
            return Ok(LocalLinks::Thread(link));
        }
        let links = self.start_processes(epoch).context("cannot start the executor");
        if links.is_err() {
            self.kill();
        }
        links.map(LocalLinks::Processes)
    }

    /// Creates the shared memory in which the ranks rendezvous to set up their collectives, if the group has
    /// several ranks.
    fn create_rendezvous(&mut self) -> Result<()> {
        let parallel = self.config.settings.parallel;
        let has_several_ranks = parallel.ranks_per_group() > 1;
        let new_rendezvous = || RankRendezvous::new(parallel);
        self.rendezvous = has_several_ranks.then(new_rendezvous).transpose()?;
        Ok(())
    }

    fn start_processes(&mut self, epoch: Epoch) -> Result<Vec<RankLink>> {
        self.create_rendezvous()?;
        let mut links = Vec::new();
        for rank in self.ranks.clone().map(Rank) {
            let rendezvous =
                self.rendezvous.as_ref().map(|rendezvous| rendezvous.path().to_owned());
            let settings = ExecutorSettings { rank, rendezvous, ..self.config.settings.clone() };
            let SpawnedExecutor { process, sender, messages } =
                ExecutorProcess::start(settings, &self.launch_options.program)?;
            let process = Arc::new(process);
            self.current.push(Arc::clone(&process));
            let (messages, process) = (Box::new(messages), Some(process as _));
            links.push(RankLink {
                sender,
                receiver: ExecutorReceiver { messages, epoch, rank, process },
            });
        }
        Ok(links)
    }

    /// Starts the executors with the epoch (executor generation) `epoch` for a scheduler on another node.
    /// `dial` opens the connection of a rank to the scheduler; its second argument is the path of the shared
    /// memory in which the ranks rendezvous. Kills the previous executors first. Must be called on the main
    /// thread.
    ///
    /// Errors: no connection, process, thread or file descriptor is available. Executors already started are
    /// killed.
    pub(crate) fn start_linked(
        &mut self,
        epoch: Epoch,
        dial: impl FnMut(Rank, Option<PathBuf>) -> Result<TcpStream>,
    ) -> Result<Vec<(Rank, Arc<ExecutorProcess>)>> {
        self.fence();
        let started = self.spawn_linked(epoch, dial);
        if started.is_err() {
            self.kill();
        }
        started
    }

    fn spawn_linked(
        &mut self,
        epoch: Epoch,
        mut dial: impl FnMut(Rank, Option<PathBuf>) -> Result<TcpStream>,
    ) -> Result<Vec<(Rank, Arc<ExecutorProcess>)>> {
        self.create_rendezvous()?;
        for rank in self.ranks.clone().map(Rank) {
            let rendezvous =
                self.rendezvous.as_ref().map(|rendezvous| rendezvous.path().to_owned());
            let stream = dial(rank, rendezvous)?;
            let link =
                LinkSocket::from(stream.try_clone().context("no file descriptor is available")?);
            let program = &self.launch_options.program;
            let process = ExecutorProcess::spawn(rank, epoch, program, stream.into(), link)
                .context("cannot start the executor")?;
            self.current.push(Arc::new(process));
        }
        Ok(self.ranks.clone().map(Rank).zip(self.current.iter().cloned()).collect())
    }

    /// Whether an executor process of the group has exited.
    pub(crate) fn has_ended(&self) -> bool {
        self.current.iter().any(|process| process.wait(Duration::ZERO).is_some())
    }

    /// Kills the remaining executors after a failure: the replacement executors need the device memory, and
    /// ranks that wait for a failed rank would block forever. Must be called on the main thread.
    pub(crate) fn fence(&mut self) {
        self.log_collective_calls();
        self.kill();
    }

    /// Logs the last collectives of each rank, which show which rank is late (the straggler). Must be called
    /// before the processes are killed.
    fn log_collective_calls(&self) {
        let calls = self.rendezvous.as_ref().map(RankRendezvous::calls).unwrap_or_default();
        for calls in calls.iter().filter(|calls| self.ranks.contains(&calls.rank.0)) {
            tracing::warn!("last collective: {calls}");
            for line in calls.lines() {
                tracing::info!(axis = calls.axis, rank = calls.rank.0, "collectives: {line}");
            }
        }
    }

    /// Ends executors that have been commanded to stop: waits up to `timeout` for their current step and
    /// pending output, then sends SIGTERM, then SIGKILL. An executor thread ends with this process.
    pub(crate) fn shut_down(&mut self, timeout: Duration) {
        let deadline = Instant::now() + timeout;
        if let Some(thread) = self.thread.take()
            && thread.recv_timeout(timeout) == Err(RecvTimeoutError::Timeout)
        {
            tracing::warn!("the executor did not stop in time");
        }
        let time_left = |until: Instant| until.saturating_duration_since(Instant::now());
        self.current.retain(|process| process.wait(time_left(deadline)).is_none());
        for process in &self.current {
            process.signal(Signal::TERM);
        }
        let deadline = Instant::now() + TERM_WAIT;
        self.current.retain(|process| process.wait(time_left(deadline)).is_none());
        for process in &self.current {
            tracing::warn!("{process} did not stop: killed");
        }
        self.kill();
    }

    /// Kills the processes and waits for their exit, because the replacement executors need the device
    /// memory.
    pub(crate) fn kill(&mut self) {
        for process in &self.current {
            process.signal(Signal::KILL);
        }
        for process in self.current.drain(..) {
            if process.wait(KILL_WAIT).is_none() {
                tracing::error!("{process} did not exit after SIGKILL");
            }
        }
        self.rendezvous = None;
    }
}

/// Starts the executor as a thread of this process. The receiver is disconnected when the thread ends.
fn start_thread(config: ExecutorConfig) -> io::Result<(ExecutorLink, Receiver<Infallible>)> {
    let ExecutorSettings { epoch, rank, .. } = config.settings;
    let (alive, ended) = channel();
    let (ours, theirs) = protocol::link::in_process_pair(LINK_MESSAGES);
    thread::Builder::new().name("executor".to_owned()).spawn(move || {
        executor::run(config, theirs);
        drop(alive);
    })?;
    let receiver =
        ExecutorReceiver { messages: Box::new(ours.receiver), epoch, rank, process: None };
    Ok((ExecutorLink { commands: ours.sender, receivers: vec![receiver] }, ended))
}
