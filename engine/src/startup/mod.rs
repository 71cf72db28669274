//! Engine side of executor start-up. The messages are: hello, progress, warm-up report, KV allocation, ready.
//!
//! All ranks start together: the number of KV blocks is the minimum over all ranks, and no rank serves before
//! all ranks are ready. One thread per rank reads the startup messages.

mod endpoint_collector;
mod error;
mod hello_check;
mod startup_barrier;
mod weights_baseline;

pub use error::StartError;
pub(crate) use error::{ExecutorLabel, WeightsDigestMismatch};
pub use weights_baseline::WeightsDigestBaseline;

use super::executors::{ExecutorLink, ExecutorReceiver};
use protocol::{Epoch, ExecutorEvent, ExecutorReady, StartupPhase, WarmUpReport};
use startup_barrier::{ExecutorStartState, StartupBarrier};
use std::io;
use std::sync::atomic::{AtomicBool, Ordering};
use std::sync::mpsc::{Sender, channel};
use std::thread::{self, Scope};
use std::time::{Duration, Instant};

/// Poll interval for signals during start-up.
const POLL: Duration = Duration::from_millis(100);

/// Start-up timeouts of executors.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct StartTimeouts {
    /// Maximum time until an executor sends its hello message.
    pub hello: Duration,
    /// Maximum time without progress; `None` = no limit. A CPU has no limit, because it may take minutes for
    /// one forward pass of a large model.
    pub stall: Option<Duration>,
    /// Maximum duration of the whole start.
    pub total: Duration,
}

/// Values that the hello messages of the executors must report.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct ExpectedHello {
    /// Generation of the executors.
    pub epoch: Epoch,
    /// Digest of the model folder; every executor must have computed the same digest.
    pub manifest: u64,
}

/// Result of a successful start of executors.
#[derive(Debug)]
pub struct StartupReport {
    /// Warm-up measurements over all executors: minimum number of KV blocks, maximum step costs.
    pub memory: WarmUpReport,
    /// Number of allocated KV blocks, and sizes of the graphs that all executors have captured.
    pub ready: ExecutorReady,
    /// Duration of each startup phase of the executor that became ready last.
    pub phases: Vec<(&'static str, Duration)>,
    /// Digests of the loaded weights, including those of previous starts.
    pub weights: WeightsDigestBaseline,
    /// Device names of the executors, in the order of their ranks.
    pub devices: Vec<String>,
}

/// Parameters of an executor start: timeouts, expected hello values and weight digests.
#[derive(Debug, Clone)]
pub struct ExecutorStartupParams {
    /// Start-up timeouts.
    pub timeouts: StartTimeouts,
    /// Values that the hello messages of the executors must report.
    pub expected: ExpectedHello,
    /// Digests of the weights that previous starts have loaded.
    pub weights: WeightsDigestBaseline,
}

impl ExecutorStartupParams {
    /// Waits until all executors are ready. `size` returns the number of KV blocks to allocate; its argument
    /// is the number of blocks that every executor can hold. `stop` returns the number of a pending signal,
    /// if any. `progress` receives the startup progress of the first executor.
    pub fn bring_up(
        self,
        links: &mut [ExecutorLink],
        size: impl Fn(u32) -> u32,
        stop: impl Fn() -> Option<i32>,
        progress: impl FnMut(StartupPhase, u64, u64),
    ) -> Result<StartupReport, StartError> {
        let commands = links.iter().map(|link| link.commands.clone()).collect();
        let receivers: Vec<&mut ExecutorReceiver> =
            links.iter_mut().flat_map(|link| &mut link.receivers).collect();
        let (has_several_ranks, now) = (receivers.len() > 1, Instant::now());
        let ranks = receivers
            .iter()
            .map(|receiver| ExecutorStartState::new(receiver, has_several_ranks, now))
            .collect();
        let mut barrier = StartupBarrier::new(self, commands, ranks, now);
        let is_done = AtomicBool::new(false);
        let (messages_tx, messages_rx) = channel();
        thread::scope(|scope| {
            let report = match spawn_startup_readers(scope, receivers, &messages_tx, &is_done) {
                Ok(()) => barrier.wait(&messages_rx, size, stop, progress),
                Err(error) => Err(error.into()),
            };
            is_done.store(true, Ordering::Relaxed);
            report
        })
    }
}

/// Index of an executor, with one of its startup messages or the reason why its link failed.
type StartupMessage = (usize, Result<ExecutorEvent, String>);

/// Starts one thread per executor that forwards its startup messages to `messages_tx`.
///
/// Errors: no thread is available.
fn spawn_startup_readers<'scope>(
    scope: &'scope Scope<'scope, '_>,
    receivers: Vec<&'scope mut ExecutorReceiver>,
    messages_tx: &Sender<StartupMessage>,
    is_done: &'scope AtomicBool,
) -> io::Result<()> {
    receivers.into_iter().enumerate().try_for_each(|(index, receiver)| {
        let messages_tx = messages_tx.clone();
        let reader = thread::Builder::new().name("executor-start".to_owned());
        let reader = reader.spawn_scoped(scope, move || {
            forward_startup_messages(receiver, index, &messages_tx, is_done);
        });
        reader.map(drop)
    })
}

/// Forwards the startup messages of an executor until it is ready, its link fails or `is_done` is set.
fn forward_startup_messages(
    receiver: &mut ExecutorReceiver,
    index: usize,
    messages_tx: &Sender<StartupMessage>,
    is_done: &AtomicBool,
) {
    while !is_done.load(Ordering::Relaxed) {
        let message = match receiver.messages.recv(POLL) {
            Ok(None | Some(ExecutorEvent::Heartbeat)) => continue,
            Ok(Some(message)) => Ok(message),
            Err(error) => Err(receiver.failure_reason(&error)),
        };
        let last = matches!(message, Ok(ExecutorEvent::Ready(_) | ExecutorEvent::Fault { .. }));
        if messages_tx.send((index, message)).is_err() || last {
            return;
        }
    }
}

#[cfg(test)]
mod tests;
