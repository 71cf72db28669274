//! The executor's start-up, seen from the scheduler's side: hello, progress, memory, ready.

use super::engine_thread::Notice;
use protocol::{FromExecutor, Memory, PROTOCOL_VERSION, Phase, Ready, ToExecutor};
use std::sync::mpsc::{Receiver, RecvTimeoutError, SyncSender};
use std::time::{Duration, Instant};

/// How often a waiting start-up looks for signals.
const POLL: Duration = Duration::from_millis(100);

/// Why the executor did not come up.
#[derive(Debug, thiserror::Error)]
pub enum StartError {
    /// It said why.
    #[error("{0}")]
    Fault(String),
    /// It ended without a word.
    #[error("the executor exited while starting")]
    Gone,
    /// Nothing moved for too long.
    #[error("no progress for {0} s while starting; --startup-timeout sets this bound")]
    Timeout(u64),
    /// It is another build.
    #[error("the executor speaks protocol {theirs}, this process {ours}")]
    Version {
        /// Of the executor.
        theirs: u16,
        /// Of this process.
        ours: u16,
    },
    /// The process was asked to stop.
    #[error("stopped by signal {0} while starting")]
    Signal(i32),
}

/// What the executor brought up.
#[derive(Debug)]
pub struct Up {
    /// Measured after warm-up.
    pub memory: Memory,
    /// Blocks allocated and graphs captured.
    pub ready: Ready,
}

/// Both directions of the link to one executor.
pub struct ExecutorLink {
    /// To it.
    pub to: SyncSender<ToExecutor>,
    /// From it.
    pub from: Receiver<FromExecutor>,
}

/// Waits until the executor is ready. `size` chooses the number of KV blocks; `progress` sees every
/// step of the way; the timeout starts anew with each message.
pub fn bring_up(
    link: &ExecutorLink,
    notices: &Receiver<Notice>,
    timeout: Duration,
    size: impl Fn(&Memory) -> u32,
    mut progress: impl FnMut(Phase, u64, u64),
) -> Result<Up, StartError> {
    let mut measured = None;
    let mut last = Instant::now();
    loop {
        if let Ok(Notice::Signal(number)) = notices.try_recv() {
            return Err(StartError::Signal(number));
        }
        let message = match link.from.recv_timeout(POLL) {
            Ok(message) => message,
            Err(RecvTimeoutError::Disconnected) => return Err(StartError::Gone),
            Err(RecvTimeoutError::Timeout) if last.elapsed() > timeout => {
                return Err(StartError::Timeout(timeout.as_secs()));
            }
            Err(RecvTimeoutError::Timeout) => continue,
        };
        last = Instant::now();
        match message {
            FromExecutor::Hello(hello) if hello.version != PROTOCOL_VERSION => {
                let (theirs, ours) = (hello.version, PROTOCOL_VERSION);
                return Err(StartError::Version { theirs, ours });
            }
            FromExecutor::Hello(hello) => tracing::info!(device = hello.device, "executor"),
            FromExecutor::Progress { phase, done, total } => progress(phase, done, total),
            FromExecutor::Memory(memory) => {
                let blocks = size(&memory);
                let sized = link.to.send(ToExecutor::SizeKv { blocks });
                sized.map_err(|_| StartError::Gone)?;
                measured = Some(memory);
            }
            FromExecutor::Ready(ready) => {
                let memory = measured.take().ok_or(StartError::Gone)?;
                return Ok(Up { memory, ready });
            }
            FromExecutor::Fault { text, .. } => return Err(StartError::Fault(text)),
            FromExecutor::StepOutput(_) | FromExecutor::Beat => {}
        }
    }
}
