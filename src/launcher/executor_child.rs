//! `hadron executor`: process of one executor.
//!
//! Standard input is the link (socket) to the server. One thread runs the steps, the second sends messages
//! and heartbeats, and the third detects that the link has closed. The process ends only when the server
//! sends `Shutdown` or closes the link, or when the executor fails.

use crate::config::{ExecutorArgs, ProcessEnvironment};
use crate::launcher::child_process::link_to_server;
use crate::launcher::model_files::manifest;
use crate::launcher::shutdown::EXIT_CODE_FATAL;
use crate::launcher::signals::NonFatalSignals;
use anyhow::{Context, Result, bail};
use executor::{DeviceEnvironment, ExecutorConfig};
use models::ModelConfig;
use protocol::link::{
    FrameReader, FrameWriter, HeartbeatConfig, LinkError, LinkHalves, LinkSocket, MessageReceiver,
    MessageSender, run_writer,
};
use protocol::{Epoch, ExecutorCommand, ExecutorEvent, ExecutorSettings};
use rustix::event::{PollFd, PollFlags, poll};
use serde_json::{Map, Value};
use std::process::ExitCode;
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, Ordering};
use std::sync::mpsc::{SyncSender, sync_channel};
use std::thread;
use std::time::Duration;
use tokio::signal::unix::{SignalKind, signal};
use tokio::sync::mpsc::{UnboundedReceiver, UnboundedSender, unbounded_channel};
use tokio::time::{Instant, sleep_until};

/// Timeout for the settings, which the server sends when the process has started.
const SETTINGS_WAIT: Duration = Duration::from_secs(30);
/// Interval at which the process sends heartbeats to the server.
const HEARTBEAT_INTERVAL: Duration = Duration::from_secs(1);
/// Time that a running step gets to finish after the link to the server has closed.
const STEP_GRACE_PERIOD: Duration = Duration::from_millis(1_500);
/// Maximum number of messages in the queue of the thread that sends to the server.
const OUTBOX_MESSAGES: usize = 8;

/// Reason why an executor process ends: the executor has stopped, or the server has closed the link.
enum ExecutorChildExit {
    /// The executor stopped after `Shutdown` or after a failure.
    Stopped(ExitCode),
    /// The server closed the link, or its process ended.
    LinkClosed,
}

/// Inputs with which an executor process starts, in addition to the settings that the server sends.
struct ExecutorStartInputs {
    epoch: Epoch,
    environment: DeviceEnvironment,
}

/// Runs an executor with the settings that the server sends. Returns the exit code of the process.
pub fn run(args: &ExecutorArgs, environment: &ProcessEnvironment) -> Result<ExitCode> {
    let stream = link_to_server("executor")?;
    tracing::debug!(rank = args.rank, epoch = args.epoch, "executor process");
    let runtime = tokio::runtime::Builder::new_current_thread().enable_all().build()?;
    let (exit_tx, exit_rx) = unbounded_channel();
    runtime.block_on(async {
        // Terminals and supervisors send signals to the whole process group. The server handles them, so this
        // process ignores them.
        let signals = [
            signal(SignalKind::interrupt())?,
            signal(SignalKind::terminate())?,
            signal(SignalKind::quit())?,
        ];
        let _harmless = NonFatalSignals::catch()?;
        let shutdown_requested = Arc::new(AtomicBool::new(false));
        let id = ExecutorStartInputs {
            epoch: Epoch(args.epoch),
            environment: environment.devices.clone(),
        };
        start(stream, id, exit_tx, Arc::clone(&shutdown_requested))?;
        Ok(wait_for_exit(exit_rx, signals, &shutdown_requested).await)
    })
}

/// Receives the settings and starts the threads of the process.
///
/// `shutdown_requested` becomes true when the server has sent `Shutdown`.
#[expect(clippy::disallowed_methods, reason = "the thread ends with its queue or its link")]
fn start(
    stream: LinkSocket,
    ExecutorStartInputs { epoch, environment }: ExecutorStartInputs,
    exit_tx: UnboundedSender<ExecutorChildExit>,
    shutdown_requested: Arc<AtomicBool>,
) -> Result<()> {
    let watched_link = stream.try_clone()?;
    let writer = FrameWriter::new(stream.try_clone()?, epoch);
    let mut reader = FrameReader::<_, ExecutorSettings>::new(stream, epoch);
    let Some(settings) = reader.recv(SETTINGS_WAIT)? else {
        bail!("no settings from the server within {} s", SETTINGS_WAIT.as_secs());
    };
    let config = config(settings, environment)?;
    let closed = exit_tx.clone();
    thread::Builder::new().name("link-watch".to_owned()).spawn(move || {
        wait_for_hangup(&watched_link);
        let _ = closed.send(ExecutorChildExit::LinkClosed); // The send fails if the process is ending.
    })?;
    let (to_server, outbox) = sync_channel(OUTBOX_MESSAGES);
    let writer_thread = thread::Builder::new().name("link-out".to_owned()).spawn(move || {
        run_writer(
            outbox,
            writer,
            Some(&HeartbeatConfig {
                interval: HEARTBEAT_INTERVAL,
                message: || ExecutorEvent::Heartbeat,
            }),
        )
    })?;
    thread::Builder::new().name("executor".to_owned()).spawn(move || {
        let failed = Arc::new(AtomicBool::new(false));
        let sender = ExitTrackingLink { link: to_server, observed: Arc::clone(&failed) };
        let receiver =
            ExitTrackingLink { link: reader.with_message_type(), observed: shutdown_requested };
        executor::run(config, LinkHalves { sender, receiver });
        if let Ok(Err(error)) = writer_thread.join() {
            tracing::error!(%error, "writing to the server failed");
        }
        let code = if failed.load(Ordering::Relaxed) { EXIT_CODE_FATAL } else { 0 };
        let _ = exit_tx.send(ExecutorChildExit::Stopped(ExitCode::from(code)));
    })?;
    Ok(())
}

/// Reads the model folder and returns the configuration of the executor. `environment`: environment variables
/// of this process, which it inherits from the server.
fn config(settings: ExecutorSettings, environment: DeviceEnvironment) -> Result<ExecutorConfig> {
    let overrides = settings.config_overrides.as_deref().map(serde_json::from_str).transpose();
    let overrides: Option<Map<String, Value>> = overrides.context("config overrides")?;
    let model = ModelConfig::from_dir_with(&settings.model_dir, &overrides.unwrap_or_default())?;
    let draft_dir = settings.draft_model_dir.as_deref();
    let draft = draft_dir.map(ModelConfig::from_dir).transpose()?;
    let manifest = manifest(&settings.model_dir, draft_dir, executor::source(&settings))?;
    Ok(ExecutorConfig { settings, environment, model, draft, manifest })
}

/// Blocks until the server has closed the link.
fn wait_for_hangup(link: &LinkSocket) {
    loop {
        let mut poll_fds = [PollFd::new(link, PollFlags::RDHUP)];
        match poll(&mut poll_fds, None) {
            Err(rustix::io::Errno::INTR) => {}
            Ok(_) | Err(_) => return,
        }
    }
}

/// Waits until the executor stops. After the link has closed, waits for at most `STEP_GRACE_PERIOD`.
async fn wait_for_exit(
    mut exit_rx: UnboundedReceiver<ExecutorChildExit>,
    [mut interrupt, mut terminate, mut quit]: [tokio::signal::unix::Signal; 3],
    shutdown_requested: &AtomicBool,
) -> ExitCode {
    let mut deadline = None;
    loop {
        tokio::select! {
            exit = exit_rx.recv() => match exit {
                Some(ExecutorChildExit::Stopped(code)) => return code,
                Some(ExecutorChildExit::LinkClosed) => deadline = Some(Instant::now() + STEP_GRACE_PERIOD),
                None => return ExitCode::from(EXIT_CODE_FATAL),
            },
            () = sleep_until_deadline(deadline) => return ExitCode::from(EXIT_CODE_FATAL),
            _ = interrupt.recv() => {}
            _ = quit.recv() => {}
            _ = terminate.recv() => {
                if shutdown_requested.load(Ordering::Relaxed) {
                    return ExitCode::from(EXIT_CODE_FATAL);
                }
                tracing::info!("SIGTERM ignored: the server stops its executors");
            }
        }
    }
}

/// Waits until `deadline`; waits forever if there is none.
async fn sleep_until_deadline(deadline: Option<Instant>) {
    match deadline {
        Some(at) => sleep_until(at).await,
        None => std::future::pending().await,
    }
}

/// One direction of the link to the server. `observed` is set when a message is passed after which the
/// process ends: a `Fault` to the server or a `Shutdown` from the server.
struct ExitTrackingLink<L> {
    link: L,
    observed: Arc<AtomicBool>,
}

impl MessageSender for ExitTrackingLink<SyncSender<ExecutorEvent>> {
    /// Event that is sent to the server.
    type Message = ExecutorEvent;

    fn send(&mut self, message: ExecutorEvent) -> Result<(), LinkError> {
        if matches!(message, ExecutorEvent::Fault { .. }) {
            self.observed.store(true, Ordering::Relaxed);
        }
        MessageSender::send(&mut self.link, message)
    }
}

impl MessageReceiver for ExitTrackingLink<FrameReader<LinkSocket, ExecutorCommand>> {
    /// Command that is received from the server.
    type Message = ExecutorCommand;

    fn recv(&mut self, timeout: Duration) -> Result<Option<ExecutorCommand>, LinkError> {
        let message = self.link.recv(timeout)?;
        if matches!(message, Some(ExecutorCommand::Shutdown)) {
            self.observed.store(true, Ordering::Relaxed);
        }
        Ok(message)
    }
}
