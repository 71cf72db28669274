//! Tests of an executor on a link: the order of start-up messages, the replies, and how the executor exits.
#![allow(clippy::unwrap_used, reason = "a test that cannot go on fails")]

#[path = "../../tests/support/deadlines.rs"]
mod deadlines;
#[path = "scheduler_harness/mod.rs"]
#[allow(dead_code, unused_imports, reason = "shared with the invariance tests")]
mod scheduler_harness;

use deadlines::BoundedJoin as _;
use executor::{ExecutorConfig, KvCacheSize, ModelDtype, RankRendezvous, run};
use protocol::link::{
    InProcessLink, LinkError, LinkHalves, MessageLink, MessageReceiver, in_process_pair,
};
use protocol::{
    Batch, BatchRow, BlockId, BlockTableUpdate, Epoch, ExecutorCommand, ExecutorEvent,
    ProfilerStatus, Rank, RequestId, RowInput, SamplingParams, SequenceInit, SequenceSlot,
    StartupPhase, StepId, StepLaunchMode, WeightsDigest,
};
use std::path::Path;
use std::thread::JoinHandle;
use std::time::Duration;

/// Engine's end of an in-process link to the executor under test.
type EngineLinkEnd = InProcessLink<ExecutorCommand, ExecutorEvent>;

fn start(config: ExecutorConfig) -> (EngineLinkEnd, JoinHandle<()>) {
    let (ours, theirs) = in_process_pair(64);
    (ours, std::thread::spawn(move || run(config, theirs)))
}

fn next(peer: &mut EngineLinkEnd) -> ExecutorEvent {
    peer.recv(Duration::from_mins(1)).unwrap().expect("a message within a minute")
}

/// Receives messages up to the first message that is not a progress report. Returns that message and the
/// progress reports.
fn skip_progress(peer: &mut EngineLinkEnd) -> (ExecutorEvent, Vec<(StartupPhase, u64, u64)>) {
    let mut seen = Vec::new();
    loop {
        match next(peer) {
            ExecutorEvent::Progress { phase, done, total } => seen.push((phase, done, total)),
            ExecutorEvent::WeightsLoaded(_) => {}
            other => return (other, seen),
        }
    }
}

fn ready(peer: &mut EngineLinkEnd) {
    let ExecutorEvent::Hello(hello) = next(peer) else { panic!("no hello") };
    assert_eq!((hello.version, hello.epoch), (protocol::PROTOCOL_VERSION, Epoch(1)));
    let (memory, progress) = skip_progress(peer);
    assert!(matches!(memory, ExecutorEvent::WarmUpDone(_)), "{memory:?}");
    for phase in [StartupPhase::Load, StartupPhase::WarmUp] {
        let (_, done, total) = progress.iter().rfind(|p| p.0 == phase).unwrap();
        assert_eq!(done, total, "{phase:?}");
    }
    peer.send(ExecutorCommand::AllocateKv { blocks: 20 }).unwrap();
    let ExecutorEvent::Ready(ready) = next(peer) else { panic!("not ready") };
    assert_eq!((ready.kv_blocks, ready.capture_sizes), (20, vec![]));
}

fn batch(step: u64, epoch: u64, block: u32) -> ExecutorCommand {
    let init = SequenceInit {
        sampling: SamplingParams::greedy(),
        rng_key: 1,
        prompt_len: 3,
        token_history: Vec::new(),
    };
    let row = BatchRow {
        request: RequestId(1),
        epoch: 1,
        seq_slot: SequenceSlot(0),
        start: 0,
        len: 3,
        drafts: 0,
        samples: true,
        masked: false,
        input: RowInput::Tokens(vec![1, 2, 3].into()),
        table_updates: vec![BlockTableUpdate {
            group: 0,
            first_entry: 0,
            blocks: vec![BlockId(block)].into(),
        }]
        .into(),
        state_slots: protocol::ThinVec::new(),
        next_token: None,
        seq_init: Some(Box::new(init)),
    };
    let dispatch = StepLaunchMode::Eager { tokens: 3 };
    let (step, epoch) = (StepId(step), Epoch(epoch));
    ExecutorCommand::Batch(Batch {
        step,
        epoch,
        dispatch,
        moe_tokens: 0,
        draft_rows: 0,
        rows: vec![row],
    })
}

#[test]
fn starts_serves_and_exits_on_command() {
    let (mut peer, thread) = start(scheduler_harness::config(ModelDtype::Float32, 1));
    ready(&mut peer);
    peer.send(batch(4, 0, 2)).unwrap(); // A batch of an older epoch gets no reply.
    peer.send(batch(5, 1, 2)).unwrap();
    let ExecutorEvent::StepOutput(output) = next(&mut peer) else { panic!("no output") };
    assert_eq!((output.step, output.rows[0].sampled_tokens.len()), (StepId(5), 1));
    assert!(output.timing.forward_ns > 0);
    peer.send(ExecutorCommand::Shutdown).unwrap();
    assert_eq!(peer.recv(Duration::from_mins(1)), Err(LinkError::Closed));
    thread.join_bounded();
}

#[test]
fn invalid_batch_is_reported_as_fault_with_step() {
    let (mut peer, thread) = start(scheduler_harness::config(ModelDtype::Float32, 1));
    ready(&mut peer);
    peer.send(batch(7, 1, 99)).unwrap();
    let ExecutorEvent::Fault { step, text } = next(&mut peer) else { panic!("no fault") };
    assert_eq!(
        (step, text.as_str()),
        (Some(StepId(7)), "invalid batch: block 99 is out of range: the pool has 20")
    );
    assert_eq!(peer.recv(Duration::from_mins(1)), Err(LinkError::Closed));
    thread.join_bounded();
}

/// A receiver that panics when a batch arrives.
struct PanickingReceiver<R>(R);

impl<R: MessageReceiver<Message = ExecutorCommand>> MessageReceiver for PanickingReceiver<R> {
    type Message = ExecutorCommand;

    fn recv(&mut self, timeout: Duration) -> Result<Option<ExecutorCommand>, LinkError> {
        let message = self.0.recv(timeout)?;
        assert!(!matches!(message, Some(ExecutorCommand::Batch(_))), "a broken invariant");
        Ok(message)
    }
}

#[test]
fn panic_is_reported_as_fault() {
    let (mut peer, theirs) = in_process_pair(64);
    let (sender, receiver) = theirs.split();
    let broken = LinkHalves { sender, receiver: PanickingReceiver(receiver) };
    let thread =
        std::thread::spawn(|| run(scheduler_harness::config(ModelDtype::Float32, 1), broken));
    ready(&mut peer);
    peer.send(batch(7, 1, 0)).unwrap();
    let ExecutorEvent::Fault { text, .. } = next(&mut peer) else { panic!("no fault") };
    assert_eq!(text, "panic: a broken invariant");
    assert_eq!(peer.recv(Duration::from_mins(1)), Err(LinkError::Closed));
    thread.join_bounded();
}

#[test]
fn failed_start_is_reported_as_fault() {
    let mut small = scheduler_harness::config(ModelDtype::Float32, 1);
    small.settings.kv_cache_size = KvCacheSize::Blocks(3);
    let mut missing = scheduler_harness::config(ModelDtype::Float32, 1);
    missing.settings.model_dir = "/nonexistent/model".into();
    missing.settings.synth_seed = None;
    let mut traced = scheduler_harness::config(ModelDtype::Float32, 1);
    traced.settings.profile_dir = Some("/dev/null/traces".into());
    for (config, expected) in
        [(small, "the pool has 3"), (missing, "/nonexistent/model"), (traced, "/dev/null/traces")]
    {
        let (mut peer, thread) = start(config);
        assert!(matches!(next(&mut peer), ExecutorEvent::Hello(_)));
        let (last, _) = skip_progress(&mut peer);
        let ExecutorEvent::Fault { step: None, text } = last else { panic!("{last:?}") };
        assert!(text.contains(expected), "{text}");
        thread.join_bounded();
    }
}

/// Returns the weights digests that an executor with synthetic seed `seed` reports between loading and
/// warm-up.
fn loaded(seed: u64) -> WeightsDigest {
    let mut config = scheduler_harness::config(ModelDtype::Float32, 1);
    config.settings.synth_seed = Some(seed);
    let (mut peer, thread) = start(config);
    let mut loaded = None;
    let digest = loop {
        match next(&mut peer) {
            ExecutorEvent::WeightsLoaded(digest) => loaded = Some(digest),
            ExecutorEvent::WarmUpDone(_) => {
                break loaded.expect("WeightsLoaded is sent before WarmUpDone");
            }
            ExecutorEvent::Fault { text, .. } => panic!("{text}"),
            _ => {}
        }
    };
    drop(peer);
    thread.join_bounded();
    digest
}

#[test]
fn startup_reports_weights_digests() {
    let first = loaded(3);
    assert_eq!(loaded(3), first);
    let other = loaded(4);
    assert!(other.common != first.common && other.sharded != first.sharded, "{other:?} {first:?}");
}

/// Starts the executors of all ranks of a replica, each on a thread, and waits until they are ready. Also
/// returns the shared memory of their communication groups.
fn start_ranks(size: u16) -> (RankRendezvous, Vec<(EngineLinkEnd, JoinHandle<()>)>) {
    let mut config =
        scheduler_harness::shared(scheduler_harness::config(ModelDtype::Float32, 1), size, false);
    let rendezvous = RankRendezvous::new(config.settings.parallel).unwrap();
    config.settings.rendezvous = Some(rendezvous.path().to_owned());
    let rank = |rank| {
        config.settings.rank = Rank(rank);
        start(config.clone())
    };
    let mut ranks: Vec<_> = (0..size).map(rank).collect();
    for (peer, _) in &mut ranks {
        ready(peer);
    }
    (rendezvous, ranks)
}

#[test]
fn only_one_rank_reports_outputs() {
    let (rendezvous, mut ranks) = start_ranks(2);
    for (peer, _) in &mut ranks {
        peer.send(batch(5, 1, 2)).unwrap();
    }
    let first = next(&mut ranks[0].0);
    assert!(matches!(first, ExecutorEvent::StepOutput(_)), "{first:?}");
    let second = next(&mut ranks[1].0);
    let ExecutorEvent::StepDone { step: StepId(5), duration_ns: 1.. } = second else {
        panic!("{second:?}")
    };
    let calls: Vec<_> = rendezvous.calls().iter().map(|rank| rank.calls.len()).collect();
    assert!(calls[0] > 0 && calls[0] == calls[1], "{calls:?}");
    for (mut peer, thread) in ranks {
        peer.send(ExecutorCommand::Shutdown).unwrap();
        thread.join_bounded();
    }
}

#[test]
fn failed_rank_fails_waiting_ranks() {
    let (rendezvous, mut ranks) = start_ranks(2);
    ranks[0].0.send(batch(7, 1, 2)).unwrap();
    ranks[1].0.send(batch(7, 1, 99)).unwrap();
    let ExecutorEvent::Fault { text, .. } = next(&mut ranks[1].0) else { panic!("no fault") };
    assert_eq!(text, "invalid batch: block 99 is out of range: the pool has 20");
    let ExecutorEvent::Fault { step, text } = next(&mut ranks[0].0) else { panic!("no fault") };
    assert_eq!((step, text.as_str()), (Some(StepId(7)), "rank 1 left the group"));
    let calls = rendezvous.calls().iter().map(ToString::to_string).collect::<Vec<_>>();
    assert!(calls[0].contains("Failed") && calls[1].contains("Done"), "{calls:?}");
    for (_, thread) in ranks {
        thread.join_bounded();
    }
}

/// Sends a profile command and returns the reply.
fn profile(peer: &mut EngineLinkEnd, on: bool) -> ProfilerStatus {
    peer.send(ExecutorCommand::Profile { enabled: on }).unwrap();
    let ExecutorEvent::ProfilerStatus(profiled) = next(peer) else {
        panic!("no ProfilerStatus reply")
    };
    profiled
}

#[test]
fn traces_are_switched_between_steps() {
    let folder = std::env::temp_dir().join(format!("hadron-link-{}", std::process::id()));
    let mut config = scheduler_harness::config(ModelDtype::Float32, 1);
    config.settings.profile_dir = Some(folder.clone());
    let (mut peer, thread) = start(config);
    ready(&mut peer);
    peer.send(batch(1, 1, 2)).unwrap();
    assert!(matches!(next(&mut peer), ExecutorEvent::StepOutput(_)));
    let path = |n: u32| folder.join(format!("rank0-{n}.json")).display().to_string();
    assert_eq!(profile(&mut peer, true), ProfilerStatus::Started(path(2)));
    peer.send(batch(2, 1, 3)).unwrap();
    assert!(matches!(next(&mut peer), ExecutorEvent::StepOutput(_)));
    assert_eq!(profile(&mut peer, false), ProfilerStatus::Stopped(Some(path(2))));
    assert_eq!(profile(&mut peer, false), ProfilerStatus::Stopped(None));
    let steps = |n| std::fs::read_to_string(path(n)).unwrap().matches("\"cat\":\"step\"").count();
    assert_eq!((steps(1), steps(2)), (1, 1), "traced from the start");
    assert_eq!(profile(&mut peer, true), ProfilerStatus::Started(path(3)));
    assert_eq!(profile(&mut peer, false), ProfilerStatus::Stopped(None));
    assert!(!Path::new(&path(3)).exists(), "a trace without a step leaves no file");
    peer.send(ExecutorCommand::Shutdown).unwrap();
    thread.join_bounded();
    std::fs::remove_dir_all(folder).unwrap();

    let (mut peer, thread) = start(scheduler_harness::config(ModelDtype::Float32, 1));
    ready(&mut peer);
    let ProfilerStatus::Failed(text) = profile(&mut peer, true) else { panic!("no folder") };
    assert!(text.contains("--profile"), "{text}");
    drop(peer);
    thread.join_bounded();
}

#[test]
fn peer_disconnect_ends_the_executor() {
    let (mut peer, thread) = start(scheduler_harness::config(ModelDtype::Float32, 1));
    ready(&mut peer);
    drop(peer);
    thread.join_bounded();
    let (peer, thread) = start(scheduler_harness::config(ModelDtype::Float32, 1));
    drop(peer); // The link closes during the load.
    thread.join_bounded();
}
