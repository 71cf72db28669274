//! Tests of executor start-up with fake executors.

use super::*;
use crate::deadlines::BoundedJoin as _;
use protocol::link::{InProcessLink, MessageLink as _, in_process_pair};
use protocol::{
    ExecutorCommand, ExecutorHello, KvSpec, PROTOCOL_VERSION, ParallelConfig, Rank, StepCost,
    WeightsDigest,
};
use std::collections::VecDeque;

mod virtual_start;
use virtual_start::{ExecutorScript, ScheduledMessage, VirtualStart};

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

const TIMEOUTS: StartTimeouts = StartTimeouts {
    hello: Duration::from_mins(1),
    stall: Some(Duration::from_mins(5)),
    total: Duration::from_mins(30),
};

fn params() -> ExecutorStartupParams {
    let parallel = ParallelConfig { dp_size: 4, ..ParallelConfig::default() };
    let weights = WeightsDigestBaseline::new(parallel);
    ExecutorStartupParams { timeouts: TIMEOUTS, expected: EXPECTED, weights }
}

/// Both ends of the link of an executor.
struct LinkEnds {
    engine: ExecutorLink,
    executor: FakeExecutorLink,
}

fn link(rank: u16) -> LinkEnds {
    let (ours, theirs) = in_process_pair(16);
    let (messages, epoch) = (Box::new(ours.receiver), EXPECTED.epoch);
    let receiver = ExecutorReceiver { messages, epoch, rank: Rank(rank), process: None };
    let engine = ExecutorLink { commands: ours.sender, receivers: vec![receiver] };
    LinkEnds { engine, executor: theirs }
}

fn outcome(report: Result<StartupReport, StartError>) -> String {
    match report {
        Ok(report) => {
            let phases: Vec<_> = report.phases.iter().map(|(phase, _)| *phase).collect();
            format!("{} blocks after {}", report.ready.kv_blocks, phases.join(", "))
        }
        Err(error) => error.to_string(),
    }
}

/// Starts one fake executor thread for each behaviour in `peers`, each as a separate replica; returns the
/// outcome of the start as text.
fn start_threads(peers: Vec<Box<dyn FnOnce(FakeExecutorLink) + Send>>) -> String {
    let (mut links, mut threads) = (Vec::new(), Vec::new());
    for (peer, rank) in peers.into_iter().zip(0..) {
        let LinkEnds { engine, executor } = link(rank);
        links.push(engine);
        threads.push(thread::spawn(move || peer(executor)));
    }
    let report = params().bring_up(&mut links, |b| b.min(50), || None, |_, _, _| {});
    drop(links);
    for thread in threads {
        thread.join_bounded();
    }
    outcome(report)
}

/// Starts one fake executor for each script, each as a separate replica, in virtual time; returns the outcome
/// of the start as text.
fn start_scripts(scripts: Vec<ExecutorScript>) -> String {
    let start = Instant::now();
    outcome(VirtualStart::new(scripts, start).run(start))
}

fn ready(kv_blocks: u32) -> ExecutorEvent {
    ExecutorEvent::Ready(ExecutorReady { kv_blocks, capture_sizes: Vec::new() })
}

/// A script whose messages are received at the start.
fn at_start(messages: impl IntoIterator<Item = ExecutorEvent>) -> ExecutorScript {
    let at = Duration::ZERO;
    messages.into_iter().map(|message| ScheduledMessage { at, message }).collect()
}

fn warm_up_done(kv_blocks: u32) -> ExecutorEvent {
    let kv_spec = KvSpec { block_tokens: 16, groups: Vec::new() };
    ExecutorEvent::WarmUpDone(WarmUpReport { kv_spec, kv_blocks, step_cost: StepCost::default() })
}

/// Returns the script of a fake executor that can hold `blocks` KV blocks and reports this number after the time
/// `wait`.
fn executor_with_blocks(rank: u16, blocks: u32, wait: Duration) -> ExecutorScript {
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
) -> ExecutorScript {
    let mut script = at_start(load_events(rank, weights));
    script.push(ScheduledMessage { at: wait, message: warm_up_done(blocks) });
    script
}

/// Returns the outcome of a start whose executor sends a hello message changed by `change`, and nothing else.
fn start_with_hello(change: fn(&mut ExecutorHello)) -> String {
    let mut hello = hello();
    change(&mut hello);
    start_scripts(vec![at_start([ExecutorEvent::Hello(hello)])])
}

#[test]
fn every_startup_failure_is_distinguished() {
    assert_eq!(start_threads(vec![Box::new(drop)]), "the executor exited (while: send hello)");
    assert_eq!(start_scripts(vec![Vec::new()]), "no progress for 60 s (while: send hello)");
    assert_eq!(start_with_hello(|_| {}), "no progress for 300 s (while: open device)");
    let text = start_with_hello(|hello| hello.version = 1);
    assert_eq!(text, format!("the executor has protocol 1, this process {PROTOCOL_VERSION}"));
    let text = start_with_hello(|hello| hello.build = "0.0.1".to_owned());
    assert!(text.starts_with("the executor has build 0.0.1"), "{text}");
    let text = start_with_hello(|hello| hello.epoch = Epoch(3));
    assert_eq!(text, "the executor has epoch 3, this process 4");
    let text = start_with_hello(|hello| hello.model_digest = 255);
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
    let progress = ExecutorEvent::Progress { phase: StartupPhase::Compile, done: 1, total: 2 };
    let mut script = at_start([ExecutorEvent::Hello(hello())]);
    // Progress a second before each stall timeout.
    script.extend((1..20).map(|number| ScheduledMessage {
        at: number * Duration::from_secs(299),
        message: progress.clone(),
    }));
    let expected =
        "not ready after 1800 s (while: compile kernels); --startup-timeout sets this bound";
    assert_eq!(start_scripts(vec![script]), expected);
}

#[test]
fn heartbeats_are_no_startup_messages() {
    let (LinkEnds { mut engine, mut executor }, is_done) = (link(0), AtomicBool::new(false));
    for message in [ExecutorEvent::Heartbeat, ready(3), ExecutorEvent::Heartbeat] {
        executor.send(message).unwrap();
    }
    let (messages_tx, messages_rx) = channel();
    forward_startup_messages(&mut engine.receivers[0], 5, &messages_tx, &is_done);
    drop(messages_tx);
    let forwarded: Vec<StartupMessage> = messages_rx.iter().collect();
    assert!(matches!(&forwarded[..], [(5, Ok(ExecutorEvent::Ready(_)))]), "{forwarded:?}");
}

#[test]
fn block_count_is_chosen_by_the_server() {
    let phases = "send hello, open device, load weights, compile kernels, warm up, \
                  allocate the KV cache";
    let expected = format!("50 blocks after {phases}");
    assert_eq!(start_scripts(vec![executor_with_blocks(0, 90, Duration::ZERO)]), expected);
    let executor: Box<dyn FnOnce(FakeExecutorLink) + Send> = Box::new(|mut link| {
        for message in load_events(0, WEIGHTS).into_iter().chain([warm_up_done(90)]) {
            link.send(message).unwrap();
        }
        let command = link.recv(TIMEOUTS.hello).unwrap();
        let Some(ExecutorCommand::AllocateKv { blocks }) = command else { panic!("{command:?}") };
        link.send(ready(blocks)).unwrap();
    });
    assert_eq!(start_threads(vec![executor]), expected);
}

#[test]
fn all_ranks_get_the_smallest_block_count() {
    let slow = Duration::from_secs(299); // Less than the stall timeout of 300 s.
    let text = start_scripts(vec![
        executor_with_blocks(0, 90, Duration::ZERO),
        executor_with_blocks(1, 7, slow),
    ]);
    assert!(text.starts_with("7 blocks after send hello, "), "{text}");
    let stuck = Duration::from_secs(301);
    let text = start_scripts(vec![
        executor_with_blocks(0, 90, Duration::ZERO),
        executor_with_blocks(1, 7, stuck),
    ]);
    assert_eq!(text, "rank 1: no progress for 300 s (while: warm up)");
}

#[test]
fn replicas_with_different_weights_never_become_ready() {
    let other = WeightsDigest { sharded: 9, ..WEIGHTS };
    let one = |rank, weights| executor_with_weights(rank, 9, Duration::ZERO, weights);
    let text = start_scripts(vec![one(0, WEIGHTS), one(1, WEIGHTS), one(2, WEIGHTS)]);
    assert!(text.starts_with("9 blocks after"), "{text}");
    let text = start_scripts(vec![one(0, WEIGHTS), one(1, other), one(2, WEIGHTS)]);
    assert!(
        text.contains("rank ") && text.contains(": weights_changed: the digest of the weights of"),
        "{text}"
    );
}

#[test]
fn executor_without_weights_digest_is_rejected() {
    let text = start_scripts(vec![at_start([ExecutorEvent::Hello(hello()), warm_up_done(9)])]);
    assert!(
        text.starts_with("the executor sent its warm-up report before the digests of its weights"),
        "{text}"
    );
}

#[test]
fn failed_executor_is_named_in_the_error() {
    let hello = ExecutorEvent::Hello(ExecutorHello { rank: Rank(1), ..hello() });
    let fault = ExecutorEvent::Fault { step: None, text: "no such file".to_owned() };
    let fails = at_start([hello, fault]);
    let text = start_scripts(vec![executor_with_blocks(0, 9, Duration::ZERO), fails]);
    assert_eq!(text, "rank 1: no such file (while: open device)");
    let text = start_scripts(vec![
        executor_with_blocks(0, 9, Duration::ZERO),
        executor_with_blocks(0, 9, Duration::ZERO),
    ]);
    assert_eq!(text, "rank 1: the executor has rank 0, this process 1");
}
