//! Startup barrier: tracks the startup phase of each executor and synchronises the phases of all executors.

use super::{
    ExecutorLabel, ExecutorStartupParams, ExpectedHello, POLL, StartError, StartTimeouts,
    StartupMessage, StartupReport, WeightsDigestMismatch,
};
use crate::executors::ExecutorReceiver;
use protocol::{
    ExecutorCommand, ExecutorEvent, ExecutorHello, ExecutorReady, PROTOCOL_VERSION, Rank,
    StartupPhase, StepCost, WarmUpReport, WeightsDigest,
};
use std::sync::mpsc::{Receiver, RecvTimeoutError, SyncSender};
use std::time::{Duration, Instant};

/// Name of the startup phase that ends with the executor's hello message.
const HELLO: &str = "send hello";
/// Name of the startup phase that begins when the executor receives the number of KV blocks.
const ALLOCATE: &str = "allocate the KV cache";

/// Startup state of one executor.
pub(super) struct ExecutorStartState {
    rank: Rank,
    label: ExecutorLabel,
    phase: &'static str,
    entered: Instant,
    /// Time of the executor's last progress.
    progressed_at: Instant,
    finished_phases: Vec<(&'static str, Duration)>,
    /// Device name in the hello message; empty before this message.
    device: String,
    /// Whether the executor has loaded its weights and reported their digests.
    loaded: bool,
    memory: Option<WarmUpReport>,
    ready: Option<ExecutorReady>,
}

impl ExecutorStartState {
    pub(super) fn new(receiver: &ExecutorReceiver, has_several_ranks: bool) -> Self {
        let (now, rank) = (Instant::now(), receiver.rank);
        let node = receiver.process.as_ref().and_then(|process| process.node());
        let label = ExecutorLabel { node, rank: has_several_ranks.then_some(rank) };
        let (memory, ready, finished_phases) = (None, None, Vec::new());
        Self {
            rank,
            label,
            phase: HELLO,
            entered: now,
            progressed_at: now,
            finished_phases,
            device: String::new(),
            loaded: false,
            memory,
            ready,
        }
    }

    fn enter_phase(&mut self, phase: &'static str) {
        if phase == self.phase {
            return;
        }
        self.finished_phases.push((self.phase, self.entered.elapsed()));
        (self.phase, self.entered) = (phase, Instant::now());
    }

    /// Whether the executor is expected to make progress; otherwise it is ready or waits for other ranks.
    /// `all_measured`: all executors have reported their warm-up measurements.
    fn has_work(&self, all_measured: bool) -> bool {
        self.ready.is_none() && (self.memory.is_none() || all_measured)
    }

    fn exited(&self, cause: String) -> StartError {
        StartError::Exited { phase: self.phase, cause }
    }
}

/// Synchronises executors that start together: they allocate the KV cache after all executors have measured
/// their memory, and serve after all executors are ready.
pub(super) struct StartupBarrier {
    start: ExecutorStartupParams,
    started_at: Instant,
    /// Command queues of the executors, one per replica.
    commands: Vec<SyncSender<ExecutorCommand>>,
    ranks: Vec<ExecutorStartState>,
    /// Durations of the startup phases of the executor that became ready last.
    slowest_phases: Vec<(&'static str, Duration)>,
}

impl StartupBarrier {
    /// Creates the barrier of executors that have just been started.
    pub(super) fn new(
        start: ExecutorStartupParams,
        commands: Vec<SyncSender<ExecutorCommand>>,
        ranks: Vec<ExecutorStartState>,
    ) -> Self {
        Self { start, started_at: Instant::now(), commands, ranks, slowest_phases: Vec::new() }
    }

    /// Processes startup messages until all executors are ready.
    pub(super) fn wait(
        &mut self,
        messages_rx: &Receiver<StartupMessage>,
        size: impl Fn(u32) -> u32,
        stop: impl Fn() -> Option<i32>,
        mut progress: impl FnMut(StartupPhase, u64, u64),
    ) -> Result<StartupReport, StartError> {
        loop {
            if let Some(number) = stop() {
                return Err(StartError::Interrupted(number));
            }
            self.check_timeouts()?;
            let (index, message) = match messages_rx.recv_timeout(POLL) {
                Ok(message) => message,
                Err(RecvTimeoutError::Timeout | RecvTimeoutError::Disconnected) => continue,
            };
            let message = message.map_err(|cause| self.ranks[index].exited(cause))?;
            self.ranks[index].progressed_at = Instant::now();
            match message {
                ExecutorEvent::Progress { phase, done, total } => {
                    self.ranks[index].enter_phase(phase.name());
                    if index == 0 {
                        progress(phase, done, total);
                    }
                }
                ExecutorEvent::WeightsLoaded(digest) => self.check_weights(index, digest)?,
                ExecutorEvent::WarmUpDone(memory) => {
                    if !self.ranks[index].loaded {
                        let cause = "the executor sent its warm-up report before the digests of its weights";
                        return Err(self.ranks[index].exited(cause.to_owned()));
                    }
                    self.ranks[index].memory = Some(memory);
                    self.size_if_measured(index, &size)?;
                }
                ExecutorEvent::Ready(ready) => {
                    if let Some(report) = self.set_ready(index, ready)? {
                        return Ok(report);
                    }
                }
                other => self.handle_message(index, other)?,
            }
        }
    }

    fn handle_message(&mut self, index: usize, message: ExecutorEvent) -> Result<(), StartError> {
        let rank = &mut self.ranks[index];
        match message {
            ExecutorEvent::Hello(hello) => {
                check_hello(&hello, rank, self.start.expected)?;
                rank.enter_phase(StartupPhase::Device.name());
                rank.device = hello.device;
                Ok(())
            }
            ExecutorEvent::Fault { text, .. } => {
                Err(StartError::Reported { executor: rank.label, phase: rank.phase, text })
            }
            _ => Ok(()), // No other message has a meaning before the first step.
        }
    }

    /// Compares the weight digests of an executor with those of previous starts and of the other ranks.
    fn check_weights(&mut self, index: usize, digest: WeightsDigest) -> Result<(), StartError> {
        let ExecutorStartState { rank, label, .. } = self.ranks[index];
        self.ranks[index].loaded = true;
        let WeightsDigest { common, sharded, experts } = digest;
        tracing::info!(
            rank = rank.0,
            "weights loaded: digests {common:016x} {sharded:016x} {experts:016x}"
        );
        let checked = self.start.weights.admit(rank, digest);
        checked.map_err(|conflict| StartError::WeightsChanged {
            executor: label,
            change: conflict.into(),
        })
    }

    /// Once all executors have reported their warm-up measurements, chooses the number of KV blocks and sends
    /// it to all executors.
    fn size_if_measured(
        &mut self,
        index: usize,
        size: &impl Fn(u32) -> u32,
    ) -> Result<(), StartError> {
        let Some(memory) = self.memory() else { return Ok(()) };
        let blocks = size(memory.kv_blocks);
        for rank in &mut self.ranks {
            rank.enter_phase(ALLOCATE);
            rank.progressed_at = Instant::now();
        }
        for commands in &self.commands {
            let sent = commands.send(ExecutorCommand::AllocateKv { blocks });
            sent.map_err(|_| self.ranks[index].exited("the executor has exited".to_owned()))?;
        }
        Ok(())
    }

    /// Returns the combined warm-up measurements of all executors; `None` until all executors have reported.
    fn memory(&self) -> Option<WarmUpReport> {
        let all = self.ranks.iter().map(|rank| rank.memory.as_ref());
        let all = all.collect::<Option<Vec<&WarmUpReport>>>()?;
        let first = all.first()?;
        let kv_blocks = all.iter().map(|memory| memory.kv_blocks).min()?;
        let slowest =
            |of: fn(&StepCost) -> u64| all.iter().map(|memory| of(&memory.step_cost)).max();
        let step_cost = StepCost {
            fixed_ns: slowest(|cost| cost.fixed_ns)?,
            per_token_ns: slowest(|cost| cost.per_token_ns)?,
        };
        Some(WarmUpReport { kv_spec: first.kv_spec.clone(), kv_blocks, step_cost })
    }

    /// Records that an executor is ready. Returns the report of the whole start if all executors are ready
    /// now.
    fn set_ready(
        &mut self,
        index: usize,
        ready: ExecutorReady,
    ) -> Result<Option<StartupReport>, StartError> {
        let rank = &mut self.ranks[index];
        if rank.memory.is_none() {
            return Err(rank.exited("the executor sent READY before its warm-up report".to_owned()));
        }
        rank.enter_phase("ready");
        rank.ready = Some(ready);
        self.slowest_phases = std::mem::take(&mut rank.finished_phases);
        let all = self.ranks.iter().map(|rank| rank.ready.as_ref());
        let Some(all) = all.collect::<Option<Vec<&ExecutorReady>>>() else { return Ok(None) };
        let Some(memory) = self.memory() else { return Ok(None) };
        let ready = common_ready(&all);
        let phases = std::mem::take(&mut self.slowest_phases);
        let phase_text =
            |(phase, took): &(&str, Duration)| format!("{phase} {:.2} s", took.as_secs_f64());
        let phase_texts: Vec<String> = phases.iter().map(phase_text).collect();
        let seconds = self.started_at.elapsed().as_secs_f64();
        tracing::info!("executor ready after {seconds:.2} s: {}", phase_texts.join(", "));
        let weights = self.start.weights.clone();
        let devices = self.ranks.iter().map(|rank| rank.device.clone()).collect();
        Ok(Some(StartupReport { memory, ready, phases, weights, devices }))
    }

    /// Checks the start-up timeouts of all executors.
    fn check_timeouts(&self) -> Result<(), StartError> {
        let StartTimeouts { hello, stall, total } = self.start.timeouts;
        let without_hello =
            self.ranks.iter().find(|r| r.phase == HELLO && r.progressed_at.elapsed() > hello);
        if let Some(rank) = without_hello {
            return Err(StartError::Stalled { executor: rank.label, phase: HELLO, limit: hello });
        }
        let all_measured = self.ranks.iter().all(|rank| rank.memory.is_some());
        let working = || self.ranks.iter().filter(|rank| rank.has_work(all_measured));
        let Some(last) = working().min_by_key(|rank| rank.progressed_at) else { return Ok(()) };
        let (label, phase) = (last.label, last.phase);
        // Ranks wait for each other, so the start has stalled only if no rank makes progress.
        let idle = working().map(|rank| rank.progressed_at.elapsed()).min().unwrap_or_default();
        match stall.filter(|_| phase != HELLO) {
            Some(limit) if idle > limit => {
                Err(StartError::Stalled { executor: label, phase, limit })
            }
            _ if self.started_at.elapsed() > total => {
                Err(StartError::Timeout { executor: label, phase, limit: total })
            }
            _ => Ok(()),
        }
    }
}

/// Combines the reports of all executors: the minimum number of KV blocks, and the graph sizes that every
/// executor has captured.
fn common_ready(all: &[&ExecutorReady]) -> ExecutorReady {
    let kv_blocks = all.iter().map(|ready| ready.kv_blocks).min().unwrap_or(0);
    let mut capture_sizes = all[0].capture_sizes.clone();
    capture_sizes.retain(|rows| all.iter().all(|ready| ready.capture_sizes.contains(rows)));
    ExecutorReady { kv_blocks, capture_sizes }
}

/// Checks that the hello message comes from the expected executor.
fn check_hello(
    hello: &ExecutorHello,
    rank: &ExecutorStartState,
    expected: ExpectedHello,
) -> Result<(), StartError> {
    let label = rank.label;
    let same = |what, theirs: String, ours: String| {
        if theirs == ours {
            Ok(())
        } else {
            Err(StartError::Mismatch { executor: label, what, theirs, ours })
        }
    };
    same("protocol", hello.version.to_string(), PROTOCOL_VERSION.to_string())?;
    same("build", hello.build.clone(), env!("CARGO_PKG_VERSION").to_owned())?;
    same("epoch", hello.epoch.0.to_string(), expected.epoch.0.to_string())?;
    same("rank", hello.rank.0.to_string(), rank.rank.0.to_string())?;
    if hello.model_digest != expected.manifest {
        let change =
            WeightsDigestMismatch::Folder { theirs: hello.model_digest, ours: expected.manifest };
        return Err(StartError::WeightsChanged { executor: label, change });
    }
    tracing::info!(rank = hello.rank.0, device = hello.device, "executor");
    Ok(())
}
