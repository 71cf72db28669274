//! Tests of executor start-up with fake executors.

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
        if let Ok(Some(ExecutorCommand::AllocateKv { blocks })) = link.recv(Duration::from_secs(2))
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
        let progress = ExecutorEvent::Progress { phase: StartupPhase::Compile, done: 1, total: 2 };
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
        text.contains("rank ") && text.contains(": weights_changed: the digest of the weights of"),
        "{text}"
    );
}

#[test]
fn executor_without_weights_digest_is_rejected() {
    let text = start(|mut link| {
        let _ = link.send(ExecutorEvent::Hello(hello()));
        let spec = KvSpec { block_tokens: 16, groups: Vec::new() };
        let memory = WarmUpReport { kv_spec: spec, kv_blocks: 9, step_cost: StepCost::default() };
        let _ = link.send(ExecutorEvent::WarmUpDone(memory));
        while link.send(ExecutorEvent::Heartbeat).is_ok() {
            std::thread::sleep(Duration::from_millis(20));
        }
    });
    assert!(
        text.starts_with("the executor sent its warm-up report before the digests of its weights"),
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
