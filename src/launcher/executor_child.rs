//! `hadron executor`: the other side, an executor in a process of its own.
//!
//! The link is its standard input. It computes on one thread; another writes, gives a sign of life every
//! second and a third watches for the end of the link. It never decides to stop by itself: the server
//! says so, or is gone.

use crate::config::ExecutorArgs;
use crate::launcher::child_process::link_to_server;
use crate::launcher::model_files::manifest;
use crate::launcher::shutdown::EXIT_CODE_FATAL;
use crate::launcher::signals::HarmlessSignals;
use anyhow::{Context, Result, bail};
use executor::ExecutorConfig;
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

/// The server sends settings as soon as the process is there.
const SETTINGS_WAIT: Duration = Duration::from_secs(30);
/// Longest silence towards the server.
const HEARTBEAT_INTERVAL: Duration = Duration::from_secs(1);
/// A step may take this long to notice that the server is gone.
const STEP_GRACE_PERIOD: Duration = Duration::from_millis(1_500);
/// Messages that may wait for the writer.
const OUTBOX_MESSAGES: usize = 8;

/// Why this process ends.
enum ChildExit {
    /// The executor stopped: told to, or failed.
    Stopped(ExitCode),
    /// The server closed the link, or is gone.
    LinkClosed,
}

/// Becomes the executor that the server asks for. Returns the process's exit code.
pub fn run(args: &ExecutorArgs) -> Result<ExitCode> {
    let stream = link_to_server("executor")?;
    tracing::debug!(rank = args.rank, epoch = args.epoch, "executor process");
    let runtime = tokio::runtime::Builder::new_current_thread().enable_all().build()?;
    let (endings, ended) = unbounded_channel();
    runtime.block_on(async {
        // Signals that a terminal or a supervisor sends to the whole family are the server's to answer.
        let signals = [
            signal(SignalKind::interrupt())?,
            signal(SignalKind::terminate())?,
            signal(SignalKind::quit())?,
        ];
        let _harmless = HarmlessSignals::catch()?;
        let told = Arc::new(AtomicBool::new(false));
        start(stream, Epoch(args.epoch), endings, Arc::clone(&told))?;
        Ok(wait_for_exit(ended, signals, &told).await)
    })
}

/// Reads the settings and starts the threads.
///
/// `told` becomes true once the server has said `Shutdown`.
fn start(
    stream: LinkSocket,
    epoch: Epoch,
    endings: UnboundedSender<ChildExit>,
    told: Arc<AtomicBool>,
) -> Result<()> {
    let watched = stream.try_clone()?;
    let writer = FrameWriter::new(stream.try_clone()?, epoch);
    let mut reader = FrameReader::<_, ExecutorSettings>::new(stream, epoch);
    let Some(settings) = reader.recv(SETTINGS_WAIT)? else {
        bail!("no settings from the server within {} s", SETTINGS_WAIT.as_secs());
    };
    let config = config(settings)?;
    let closed = endings.clone();
    thread::Builder::new().name("link-watch".to_owned()).spawn(move || {
        wait_for_hangup(&watched);
        let _ = closed.send(ChildExit::LinkClosed); // The process may be ending already.
    })?;
    let (to_server, outbox) = sync_channel(OUTBOX_MESSAGES);
    let out = thread::Builder::new().name("link-out".to_owned()).spawn(move || {
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
        let sender = ObservedLink { link: to_server, observed: Arc::clone(&failed) };
        let receiver = ObservedLink { link: reader.with_message_type(), observed: told };
        executor::run(config, LinkHalves { sender, receiver });
        if let Ok(Err(error)) = out.join() {
            tracing::error!(%error, "cannot write to the server");
        }
        let code = if failed.load(Ordering::Relaxed) { EXIT_CODE_FATAL } else { 0 };
        let _ = endings.send(ChildExit::Stopped(ExitCode::from(code)));
    })?;
    Ok(())
}

/// What the settings mean, with the folder read by this process.
fn config(settings: ExecutorSettings) -> Result<ExecutorConfig> {
    let overrides = settings.config_overrides.as_deref().map(serde_json::from_str).transpose();
    let overrides: Option<Map<String, Value>> =
        overrides.context("the replaced members of config.json")?;
    let model = ModelConfig::from_dir_with(&settings.model_dir, &overrides.unwrap_or_default())?;
    let draft_dir = settings.draft_model_dir.as_deref();
    let draft = draft_dir.map(ModelConfig::from_dir).transpose()?;
    let manifest = manifest(&settings.model_dir, draft_dir, executor::source(&settings))?;
    Ok(ExecutorConfig { settings, model, draft, manifest })
}

/// Returns once nobody is at the other end.
fn wait_for_hangup(link: &LinkSocket) {
    loop {
        let mut watched = [PollFd::new(link, PollFlags::RDHUP)];
        match poll(&mut watched, None) {
            Err(rustix::io::Errno::INTR) => {}
            Ok(_) | Err(_) => return,
        }
    }
}

/// Waits for the end of the executor, or gives it a moment once the server is gone.
async fn wait_for_exit(
    mut ended: UnboundedReceiver<ChildExit>,
    [mut interrupt, mut terminate, mut quit]: [tokio::signal::unix::Signal; 3],
    told: &AtomicBool,
) -> ExitCode {
    let mut deadline = None;
    loop {
        let overdue = async {
            match deadline {
                Some(at) => sleep_until(at).await,
                None => std::future::pending().await,
            }
        };
        tokio::select! {
            ending = ended.recv() => match ending {
                Some(ChildExit::Stopped(code)) => return code,
                Some(ChildExit::LinkClosed) => deadline = Some(Instant::now() + STEP_GRACE_PERIOD),
                None => return ExitCode::from(EXIT_CODE_FATAL),
            },
            () = overdue => return ExitCode::from(EXIT_CODE_FATAL),
            _ = interrupt.recv() => {}
            _ = quit.recv() => {}
            _ = terminate.recv() => {
                if told.load(Ordering::Relaxed) {
                    return ExitCode::from(EXIT_CODE_FATAL);
                }
                tracing::info!("SIGTERM: the server decides when to stop");
            }
        }
    }
}

/// A direction of the link, and whether the message that matters went along.
struct ObservedLink<L> {
    link: L,
    observed: Arc<AtomicBool>,
}

impl MessageSender for ObservedLink<SyncSender<ExecutorEvent>> {
    type Message = ExecutorEvent;

    fn send(&mut self, message: ExecutorEvent) -> Result<(), LinkError> {
        if matches!(message, ExecutorEvent::Fault { .. }) {
            self.observed.store(true, Ordering::Relaxed);
        }
        MessageSender::send(&mut self.link, message)
    }
}

impl MessageReceiver for ObservedLink<FrameReader<LinkSocket, ExecutorCommand>> {
    type Message = ExecutorCommand;

    fn recv(&mut self, timeout: Duration) -> Result<Option<ExecutorCommand>, LinkError> {
        let message = self.link.recv(timeout)?;
        if matches!(message, Some(ExecutorCommand::Shutdown)) {
            self.observed.store(true, Ordering::Relaxed);
        }
        Ok(message)
    }
}
