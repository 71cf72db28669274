//! An executor at the end of a link: start-up in the agreed order, then a reply to every batch.
//!
//! Any failure, a panic included, becomes one `Fault` message, and the executor is gone: whoever
//! holds the other end starts another one. A closed link is an order to leave, not a failure.

use crate::{Executor, ExecutorConfig, ExecutorError, Progress};
use protocol::link::{Link, LinkError};
use protocol::{Device, FromExecutor, Hello, PROTOCOL_VERSION, StepId, ToExecutor};
use std::any::Any;
use std::cell::Cell;
use std::panic::{AssertUnwindSafe, catch_unwind};
use std::time::{Duration, Instant};

/// Waiting costs nothing; the bound only keeps a lost wake-up from lasting for ever.
const PATIENCE: Duration = Duration::from_mins(1);

/// Progress is reported at most this often, so that a slow reader does not hold up the load.
const PROGRESS_INTERVAL: Duration = Duration::from_millis(100);

/// Runs an executor on this thread until `Shutdown`, until the peer leaves, or until it fails.
pub fn run<L>(config: ExecutorConfig, mut link: L)
where
    L: Link<Out = FromExecutor, In = ToExecutor>,
{
    let step = Cell::new(None);
    let ending = catch_unwind(AssertUnwindSafe(|| serve(config, &mut link, &step)));
    let text = match ending {
        Ok(Ok(()) | Err(Stop::Closed)) => return,
        Ok(Err(Stop::Failed(error))) => error.to_string(),
        Err(panic) => format!("panic: {}", panic_text(panic.as_ref())),
    };
    tracing::error!(step = step.get().map(|step: StepId| step.0), text, "executor fault");
    // If the peer is gone as well, nobody is left to tell.
    let _ = link.send(FromExecutor::Fault { step: step.get(), text });
}

/// Why serving ended.
enum Stop {
    Closed,
    Failed(ExecutorError),
}

impl From<LinkError> for Stop {
    fn from(error: LinkError) -> Self {
        match error {
            LinkError::Closed => Self::Closed,
            broken => Self::Failed(ExecutorError::Link(broken)),
        }
    }
}

impl<E: Into<ExecutorError>> From<E> for Stop {
    fn from(error: E) -> Self {
        Self::Failed(error.into())
    }
}

fn serve<L>(config: ExecutorConfig, link: &mut L, step: &Cell<Option<StepId>>) -> Result<(), Stop>
where
    L: Link<Out = FromExecutor, In = ToExecutor>,
{
    let (rank, epoch) = (config.rank, config.epoch);
    let threads = config.threads.map_or_else(|| "all cores".to_owned(), |n| format!("{n} threads"));
    let hello = Hello {
        version: PROTOCOL_VERSION,
        rank,
        epoch,
        device: format!("cpu, {threads}"),
        build: env!("CARGO_PKG_VERSION").to_owned(),
        manifest: config.manifest,
    };
    link.send(FromExecutor::Hello(hello))?;
    match config.device {
        Device::Cpu => {}
        Device::Rocm => return Err(ExecutorError::NoBackend("rocm").into()),
        Device::Cuda => return Err(ExecutorError::NoBackend("cuda").into()),
    }
    let mut reports = Reports { link, last: None, closed: false };
    let mut executor = Executor::load(config, &mut |progress| reports.send(progress))?;
    let memory = executor.warm_up(&mut |progress| reports.send(progress))?;
    if reports.closed {
        return Err(Stop::Closed);
    }
    link.send(FromExecutor::Memory(memory))?;
    loop {
        match link.recv(PATIENCE)? {
            None => {}
            Some(ToExecutor::Shutdown) => return Ok(()),
            Some(ToExecutor::SizeKv { blocks }) => {
                let mut reports = Reports { link, last: None, closed: false };
                let ready = executor.size_kv(blocks, &mut |progress| reports.send(progress))?;
                link.send(FromExecutor::Ready(ready))?;
            }
            Some(ToExecutor::Batch(batch)) if batch.epoch != epoch => {
                tracing::warn!(
                    step = batch.step.0,
                    epoch = batch.epoch.0,
                    "batch of another epoch"
                );
            }
            Some(ToExecutor::Batch(batch)) => {
                step.set(Some(batch.step));
                let output = executor.step(&batch)?;
                link.send(FromExecutor::StepOutput(output))?;
                step.set(None);
            }
        }
    }
}

/// Sends progress, not too often; a peer that left is noticed once the phase is over.
struct Reports<'a, L> {
    link: &'a mut L,
    last: Option<Instant>,
    closed: bool,
}

impl<L: Link<Out = FromExecutor>> Reports<'_, L> {
    fn send(&mut self, Progress { phase, done, total }: Progress) {
        let recent = self.last.is_some_and(|last| last.elapsed() < PROGRESS_INTERVAL);
        if self.closed || (recent && done < total) {
            return;
        }
        self.last = Some(Instant::now());
        self.closed = self.link.send(FromExecutor::Progress { phase, done, total }).is_err();
    }
}

fn panic_text(panic: &(dyn Any + Send)) -> &str {
    let text = panic.downcast_ref::<&str>().copied();
    text.or_else(|| panic.downcast_ref::<String>().map(String::as_str)).unwrap_or("no message")
}
