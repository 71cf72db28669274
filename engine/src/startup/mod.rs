//! Engine side of executor start-up. The messages are: hello, progress, warm-up report, KV allocation, ready.
//!
//! All ranks start together: the number of KV blocks is the minimum over all ranks, and no rank serves before
//! all ranks are ready. One thread per rank reads the startup messages.

mod error;
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
use std::time::Duration;

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
        let has_several_ranks = receivers.len() > 1;
        let ranks = receivers
            .iter()
            .map(|receiver| ExecutorStartState::new(receiver, has_several_ranks))
            .collect();
        let mut barrier = StartupBarrier::new(self, commands, ranks);
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
mod tests {
    use super::*;
    use protocol::link::{InProcessLink, MessageLink as _, in_process_pair};
    use protocol::{
        ExecutorCommand, ExecutorHello, KvSpec, PROTOCOL_VERSION, ParallelConfig, Rank, StepCost,
        WeightsDigest,
    };

    const WEIGHTS: WeightsDigest = WeightsDigest { common: 1, sharded: 2, experts: 3 };
    const EXPECTED: ExpectedHello = ExpectedHello { epoch: Epoch(4), manifest: 7 };

    fn hello() -> ExecutorHello {
        ExecutorHello {
            version: PROTOCOL_VERSION,
            rank: Rank(0),
            epoch: EXPECTED.epoch,
            device: "none".to_owned(),
            build: env!("CARGO_PKG_VERSION").to_owned(),
            model_digest: EXPECTED.manifest,
        }
    }

    /// Fake executor's end of an in-process link to the engine.
    type FakeExecutorLink = InProcessLink<ExecutorEvent, ExecutorCommand>;

    /// Starts a fake executor that behaves as `peer`; returns the outcome of the start as text.
    fn start(peer: impl FnOnce(FakeExecutorLink) + Send + 'static) -> String {
        start_all(vec![Box::new(peer)])
    }

    /// Starts one fake executor for each behaviour in `peers`, each as a separate replica; returns the
    /// outcome of the start as text.
    fn start_all(peers: Vec<Box<dyn FnOnce(FakeExecutorLink) + Send>>) -> String {
        let (mut links, mut threads) = (Vec::new(), Vec::new());
        for (peer, rank) in peers.into_iter().zip(0..) {
            let (ours, theirs) = in_process_pair(8);
            let (messages, epoch) = (Box::new(ours.receiver), EXPECTED.epoch);
            let receiver = ExecutorReceiver { messages, epoch, rank: Rank(rank), process: None };
            links.push(ExecutorLink { commands: ours.sender, receivers: vec![receiver] });
            threads.push(thread::spawn(move || peer(theirs)));
        }
        let timeouts = StartTimeouts {
            hello: Duration::from_millis(150),
            stall: Some(Duration::from_millis(300)),
            total: Duration::from_secs(2),
        };
        let weights =
            WeightsDigestBaseline::new(ParallelConfig { dp_size: 4, ..ParallelConfig::default() });
        let start = ExecutorStartupParams { timeouts, expected: EXPECTED, weights };
        let report = start.bring_up(&mut links, |b| b.min(50), || None, |_, _, _| {});
        drop(links);
        for thread in threads {
            thread.join().unwrap();
        }
        match report {
            Ok(report) => {
                let phases: Vec<_> = report.phases.iter().map(|(phase, _)| *phase).collect();
                format!("{} blocks after {}", report.ready.kv_blocks, phases.join(", "))
            }
            Err(error) => error.to_string(),
        }
    }

    /// Returns the behaviour of a fake executor that can hold `blocks` KV blocks and reports this number
    /// after the time `wait`. It runs until its link is closed.
    fn executor_with_blocks(
        rank: u16,
        blocks: u32,
        wait: Duration,
    ) -> Box<dyn FnOnce(FakeExecutorLink) + Send> {
        executor_with_weights(rank, blocks, wait, WEIGHTS)
    }

    /// Returns the events of an executor before its warm-up report.
    fn load_events(rank: u16, weights: WeightsDigest) -> [ExecutorEvent; 6] {
        let progress = |phase| ExecutorEvent::Progress { phase, done: 1, total: 1 };
        [
            ExecutorEvent::Hello(ExecutorHello { rank: Rank(rank), ..hello() }),
            progress(StartupPhase::Load),
            progress(StartupPhase::Load),
            ExecutorEvent::WeightsLoaded(weights),
            progress(StartupPhase::Compile),
            progress(StartupPhase::WarmUp),
        ]
    }

    /// Like `executor_with_blocks`, for an executor that reports the digest `weights`.
    fn executor_with_weights(
        rank: u16,
        blocks: u32,
        wait: Duration,
        weights: WeightsDigest,
    ) -> Box<dyn FnOnce(FakeExecutorLink) + Send> {
        Box::new(move |mut link| {
            let spec = KvSpec { block_tokens: 16, groups: Vec::new() };
            let memory =
                WarmUpReport { kv_spec: spec, kv_blocks: blocks, step_cost: StepCost::default() };
            for event in load_events(rank, weights) {
                let _ = link.send(event);
            }
            thread::sleep(wait);
            let _ = link.send(ExecutorEvent::WarmUpDone(memory));
            if let Ok(Some(ExecutorCommand::AllocateKv { blocks })) =
                link.recv(Duration::from_secs(2))
            {
                let _ = link.send(ExecutorEvent::Ready(ExecutorReady {
                    kv_blocks: blocks,
                    capture_sizes: Vec::new(),
                }));
            }
        })
    }

    /// Returns the behaviour of a fake executor that sends a hello message changed by `change`, and then only
    /// heartbeats, which do not count as progress.
    fn hello_with(change: fn(&mut ExecutorHello)) -> impl FnOnce(FakeExecutorLink) + Send {
        move |mut link| {
            let mut hello = hello();
            change(&mut hello);
            let _ = link.send(ExecutorEvent::Hello(hello));
            while link.send(ExecutorEvent::Heartbeat).is_ok() {
                std::thread::sleep(Duration::from_millis(20));
            }
        }
    }

    #[test]
    fn every_startup_failure_is_distinguished() {
        assert_eq!(start(|_| {}), "the executor exited (while: send hello)");
        let no_messages = |link: FakeExecutorLink| {
            std::thread::sleep(Duration::from_millis(600));
            drop(link);
        };
        assert_eq!(start(no_messages), "no progress for 0 s (while: send hello)");
        assert_eq!(start(hello_with(|_| {})), "no progress for 0 s (while: open device)");
        let text = start(hello_with(|hello| hello.version = 1));
        assert_eq!(text, format!("the executor has protocol 1, this process {PROTOCOL_VERSION}"));
        let text = start(hello_with(|hello| hello.build = "0.0.1".to_owned()));
        assert!(text.starts_with("the executor has build 0.0.1"), "{text}");
        let text = start(hello_with(|hello| hello.epoch = Epoch(3)));
        assert_eq!(text, "the executor has epoch 3, this process 4");
        let text = start(hello_with(|hello| hello.model_digest = 255));
        let ours = "0000000000000007";
        assert_eq!(
            text,
            format!(
                "weights_changed: the model folder's digest is 00000000000000ff, \
                 but was {ours} when this process started"
            )
        );
    }

    #[test]
    fn progress_resets_the_stall_timeout_only() {
        let text = start(|mut link| {
            let _ = link.send(ExecutorEvent::Hello(hello()));
            let progress =
                ExecutorEvent::Progress { phase: StartupPhase::Compile, done: 1, total: 2 };
            while link.send(progress.clone()).is_ok() {
                std::thread::sleep(Duration::from_millis(50));
            }
        });
        let expected =
            "not ready after 2 s (while: compile kernels); --startup-timeout sets this bound";
        assert_eq!(text, expected);
    }

    #[test]
    fn block_count_is_chosen_by_the_server() {
        let phases = "send hello, open device, load weights, compile kernels, warm up, \
                      allocate the KV cache";
        assert_eq!(
            start_all(vec![executor_with_blocks(0, 90, Duration::ZERO)]),
            format!("50 blocks after {phases}")
        );
    }

    #[test]
    fn all_ranks_get_the_smallest_block_count() {
        let slow = Duration::from_millis(250); // Less than the stall timeout of 300 ms.
        let text = start_all(vec![
            executor_with_blocks(0, 90, Duration::ZERO),
            executor_with_blocks(1, 7, slow),
        ]);
        assert!(text.starts_with("7 blocks after send hello, "), "{text}");
        let stuck = Duration::from_millis(600);
        let text = start_all(vec![
            executor_with_blocks(0, 90, Duration::ZERO),
            executor_with_blocks(1, 7, stuck),
        ]);
        assert_eq!(text, "rank 1: no progress for 0 s (while: warm up)");
    }

    #[test]
    fn replicas_with_different_weights_never_become_ready() {
        let other = WeightsDigest { sharded: 9, ..WEIGHTS };
        let one = |rank, weights| executor_with_weights(rank, 9, Duration::ZERO, weights);
        let text = start_all(vec![one(0, WEIGHTS), one(1, WEIGHTS), one(2, WEIGHTS)]);
        assert!(text.starts_with("9 blocks after"), "{text}");
        let text = start_all(vec![one(0, WEIGHTS), one(1, other), one(2, WEIGHTS)]);
        assert!(
            text.contains("rank ")
                && text.contains(": weights_changed: the digest of the weights of"),
            "{text}"
        );
    }

    #[test]
    fn executor_without_weights_digest_is_rejected() {
        let text = start(|mut link| {
            let _ = link.send(ExecutorEvent::Hello(hello()));
            let spec = KvSpec { block_tokens: 16, groups: Vec::new() };
            let memory =
                WarmUpReport { kv_spec: spec, kv_blocks: 9, step_cost: StepCost::default() };
            let _ = link.send(ExecutorEvent::WarmUpDone(memory));
            while link.send(ExecutorEvent::Heartbeat).is_ok() {
                std::thread::sleep(Duration::from_millis(20));
            }
        });
        assert!(
            text.starts_with(
                "the executor sent its warm-up report before the digests of its weights"
            ),
            "{text}"
        );
    }

    #[test]
    fn failed_executor_is_named_in_the_error() {
        let fails: Box<dyn FnOnce(FakeExecutorLink) + Send> = Box::new(|mut link| {
            link.send(ExecutorEvent::Hello(ExecutorHello { rank: Rank(1), ..hello() })).unwrap();
            let text = "no such file".to_owned();
            link.send(ExecutorEvent::Fault { step: None, text }).unwrap();
        });
        let text = start_all(vec![executor_with_blocks(0, 9, Duration::ZERO), fails]);
        assert_eq!(text, "rank 1: no such file (while: open device)");
        let text = start_all(vec![
            executor_with_blocks(0, 9, Duration::ZERO),
            executor_with_blocks(0, 9, Duration::ZERO),
        ]);
        assert_eq!(text, "rank 1: the executor has rank 0, this process 1");
    }
}
