//! Startup barrier: tracks the startup phase of each executor and synchronises the phases of all executors.

use super::endpoint_collector::EndpointCollector;
use super::hello_check::check_hello;
use super::{
    ExecutorLabel, ExecutorStartupParams, POLL, StartError, StartTimeouts, StartupMessage,
    StartupReport,
};
use crate::executors::ExecutorReceiver;
use protocol::{
    ExecutorCommand, ExecutorEvent, ExecutorReady, Rank, RankEndpoint, StartupPhase, StepCost,
    WarmUpReport, WeightsDigest,
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
    pub(super) fn new(receiver: &ExecutorReceiver, has_several_ranks: bool, now: Instant) -> Self {
        let rank = receiver.rank;
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

    fn enter_phase(&mut self, phase: &'static str, now: Instant) {
        if phase == self.phase {
            return;
        }
        self.finished_phases.push((self.phase, now - self.entered));
        (self.phase, self.entered) = (phase, now);
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
///
/// Only `wait` reads the clock; the other functions get the time as an argument.
pub(super) struct StartupBarrier {
    start: ExecutorStartupParams,
    started_at: Instant,
    /// Command queues of the executors, one per replica.
    commands: Vec<SyncSender<ExecutorCommand>>,
    ranks: Vec<ExecutorStartState>,
    endpoints: EndpointCollector,
    /// Durations of the startup phases of the executor that became ready last.
    slowest_phases: Vec<(&'static str, Duration)>,
}

impl StartupBarrier {
    /// Creates the barrier of executors that have just been started.
    pub(super) fn new(
        start: ExecutorStartupParams,
        commands: Vec<SyncSender<ExecutorCommand>>,
        ranks: Vec<ExecutorStartState>,
        now: Instant,
    ) -> Self {
        let endpoints = EndpointCollector::new(ranks.len());
        Self { start, started_at: now, commands, ranks, endpoints, slowest_phases: Vec::new() }
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
            self.check_timeouts(Instant::now())?;
            let message = match messages_rx.recv_timeout(POLL) {
                Ok(message) => message,
                Err(RecvTimeoutError::Timeout | RecvTimeoutError::Disconnected) => continue,
            };
            let (index, message) = message;
            let now = Instant::now();
            if let Some(report) = self.receive(index, message, now, &size, &mut progress)? {
                return Ok(report);
            }
        }
    }

    /// Processes a startup message that is received at `now`. Returns the report of the whole start if all
    /// executors are ready now.
    pub(super) fn receive(
        &mut self,
        index: usize,
        message: Result<ExecutorEvent, String>,
        now: Instant,
        size: &impl Fn(u32) -> u32,
        progress: &mut impl FnMut(StartupPhase, u64, u64),
    ) -> Result<Option<StartupReport>, StartError> {
        let message = message.map_err(|cause| self.ranks[index].exited(cause))?;
        self.ranks[index].progressed_at = now;
        match message {
            ExecutorEvent::Progress { phase, done, total } => {
                self.ranks[index].enter_phase(phase.name(), now);
                if index == 0 {
                    progress(phase, done, total);
                }
            }
            ExecutorEvent::Endpoint(endpoint) => self.exchange_endpoints(index, now, endpoint)?,
            ExecutorEvent::WeightsLoaded(digest) => self.check_weights(index, digest)?,
            ExecutorEvent::WarmUpDone(memory) => self.set_memory(index, now, memory, size)?,
            ExecutorEvent::Ready(ready) => return self.set_ready(index, now, ready),
            other => self.handle_message(index, now, other)?,
        }
        Ok(None)
    }

    fn handle_message(
        &mut self,
        index: usize,
        now: Instant,
        message: ExecutorEvent,
    ) -> Result<(), StartError> {
        let rank = &mut self.ranks[index];
        match message {
            ExecutorEvent::Hello(hello) => {
                check_hello(&hello, rank.rank, rank.label, self.start.expected)?;
                rank.enter_phase(StartupPhase::Device.name(), now);
                rank.device = hello.device;
                Ok(())
            }
            ExecutorEvent::Fault { text, .. } => {
                Err(StartError::Reported { executor: rank.label, phase: rank.phase, text })
            }
            _ => Ok(()), // No other message has a meaning before the first step.
        }
    }

    /// Records the endpoint of an executor. Once all executors have sent theirs, sends all endpoints to all executors.
    fn exchange_endpoints(
        &mut self,
        index: usize,
        now: Instant,
        endpoint: RankEndpoint,
    ) -> Result<(), StartError> {
        let Some(endpoints) = self.endpoints.add(index, endpoint) else { return Ok(()) };
        self.ranks.iter_mut().for_each(|rank| rank.progressed_at = now);
        self.send_to_all(index, || ExecutorCommand::Endpoints(endpoints.clone()))
    }

    /// Sends a command to all executors.
    fn send_to_all(
        &self,
        index: usize,
        command: impl Fn() -> ExecutorCommand,
    ) -> Result<(), StartError> {
        for commands in &self.commands {
            let sent = commands.send(command());
            sent.map_err(|_| self.ranks[index].exited("the executor has exited".to_owned()))?;
        }
        Ok(())
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

    /// Records the warm-up measurements of an executor, which must have reported its weight digests before.
    fn set_memory(
        &mut self,
        index: usize,
        now: Instant,
        memory: WarmUpReport,
        size: &impl Fn(u32) -> u32,
    ) -> Result<(), StartError> {
        if !self.ranks[index].loaded {
            let cause = "the executor sent its warm-up report before the digests of its weights";
            return Err(self.ranks[index].exited(cause.to_owned()));
        }
        self.ranks[index].memory = Some(memory);
        self.size_if_measured(index, now, size)
    }

    /// Once all executors have reported their warm-up measurements, chooses the number of KV blocks and sends
    /// it to all executors.
    fn size_if_measured(
        &mut self,
        index: usize,
        now: Instant,
        size: &impl Fn(u32) -> u32,
    ) -> Result<(), StartError> {
        let Some(memory) = self.memory() else { return Ok(()) };
        let blocks = size(memory.kv_blocks);
        for rank in &mut self.ranks {
            rank.enter_phase(ALLOCATE, now);
            rank.progressed_at = now;
        }
        self.send_to_all(index, || ExecutorCommand::AllocateKv { blocks })
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
        now: Instant,
        ready: ExecutorReady,
    ) -> Result<Option<StartupReport>, StartError> {
        let rank = &mut self.ranks[index];
        if rank.memory.is_none() {
            return Err(rank.exited("the executor sent READY before its warm-up report".to_owned()));
        }
        rank.enter_phase("ready", now);
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
        let seconds = (now - self.started_at).as_secs_f64();
        tracing::info!("executor ready after {seconds:.2} s: {}", phase_texts.join(", "));
        let weights = self.start.weights.clone();
        let devices = self.ranks.iter().map(|rank| rank.device.clone()).collect();
        Ok(Some(StartupReport { memory, ready, phases, weights, devices }))
    }

    /// Checks the start-up timeouts of all executors at the time `now`.
    pub(super) fn check_timeouts(&self, now: Instant) -> Result<(), StartError> {
        let StartTimeouts { hello, stall, total } = self.start.timeouts;
        let without_hello =
            self.ranks.iter().find(|r| r.phase == HELLO && now - r.progressed_at > hello);
        if let Some(rank) = without_hello {
            return Err(StartError::Stalled { executor: rank.label, phase: HELLO, limit: hello });
        }
        let all_measured = self.ranks.iter().all(|rank| rank.memory.is_some());
        let indexed = || self.ranks.iter().enumerate();
        let working = || {
            let with_work = indexed().filter(|(_, rank)| rank.has_work(all_measured));
            with_work.filter(|(index, _)| !self.endpoints.is_waiting(*index)).map(|(_, rank)| rank)
        };
        let Some(last) = working().min_by_key(|rank| rank.progressed_at) else { return Ok(()) };
        let (label, phase) = (last.label, last.phase);
        // Ranks wait for each other, so the start has stalled only if no rank makes progress.
        let idle = working().map(|rank| now - rank.progressed_at).min().unwrap_or_default();
        match stall.filter(|_| phase != HELLO) {
            Some(limit) if idle > limit => {
                Err(StartError::Stalled { executor: label, phase, limit })
            }
            _ if now - self.started_at > total => {
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
