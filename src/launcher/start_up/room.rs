//! Where the executors of one start are brought together: how far each is, and what they wait for.

use super::{Expected, Heard, POLL, Patience, Start, StartError, Up, WeightsChange, Who};
use crate::launcher::executor::Incoming;
use protocol::{
    FromExecutor, Hello, Memory, PROTOCOL_VERSION, Pace, Phase, Rank, Ready, ToExecutor,
    WeightsDigest,
};
use std::sync::mpsc::{Receiver, RecvTimeoutError, SyncSender};
use std::time::{Duration, Instant};

/// What an executor does before it has said who it is.
const HELLO: &str = "say hello";
/// What it does with the number of blocks.
const ALLOCATE: &str = "allocate the KV cache";

/// How far one executor is.
pub(super) struct Starting {
    rank: Rank,
    who: Who,
    phase: &'static str,
    entered: Instant,
    /// When it last moved.
    moved: Instant,
    over: Vec<(&'static str, Duration)>,
    /// Whether it has said which weights it has loaded.
    loaded: bool,
    memory: Option<Memory>,
    ready: Option<Ready>,
}

impl Starting {
    pub(super) fn new(from: &Incoming, several: bool) -> Self {
        let (now, rank) = (Instant::now(), from.rank);
        let node = from.process.as_ref().and_then(|process| process.node());
        let who = Who { node, rank: several.then_some(rank) };
        let (memory, ready, over) = (None, None, Vec::new());
        let loaded = false;
        Self { rank, who, phase: HELLO, entered: now, moved: now, over, loaded, memory, ready }
    }

    fn enter(&mut self, phase: &'static str) {
        if phase == self.phase {
            return;
        }
        self.over.push((self.phase, self.entered.elapsed()));
        (self.phase, self.entered) = (phase, Instant::now());
    }

    /// Whether it is this one's turn to move.
    fn works(&self, all_measured: bool) -> bool {
        self.ready.is_none() && (self.memory.is_none() || all_measured)
    }

    fn gone(&self, cause: String) -> StartError {
        StartError::Gone { phase: self.phase, cause }
    }
}

/// Where the executors of one start are brought together.
pub(super) struct Room {
    start: Start,
    began: Instant,
    /// The roads to them, one for each group.
    to: Vec<SyncSender<ToExecutor>>,
    ranks: Vec<Starting>,
    /// The phases of the last one that became ready.
    over: Vec<(&'static str, Duration)>,
}

impl Room {
    /// The executors at the ends of these roads, which have just been started.
    pub(super) fn new(start: Start, to: Vec<SyncSender<ToExecutor>>, ranks: Vec<Starting>) -> Self {
        Self { start, began: Instant::now(), to, ranks, over: Vec::new() }
    }

    /// Hears them until all are ready.
    pub(super) fn wait(
        &mut self,
        news: &Receiver<Heard>,
        size: impl Fn(u32) -> u32,
        stop: impl Fn() -> Option<i32>,
        mut progress: impl FnMut(Phase, u64, u64),
    ) -> Result<Up, StartError> {
        loop {
            if let Some(number) = stop() {
                return Err(StartError::Signal(number));
            }
            self.check()?;
            let (index, message) = match news.recv_timeout(POLL) {
                Ok(heard) => heard,
                Err(RecvTimeoutError::Timeout | RecvTimeoutError::Disconnected) => continue,
            };
            let message = message.map_err(|cause| self.ranks[index].gone(cause))?;
            self.ranks[index].moved = Instant::now();
            match message {
                FromExecutor::Progress { phase, done, total } => {
                    self.ranks[index].enter(phase.name());
                    if index == 0 {
                        progress(phase, done, total);
                    }
                }
                FromExecutor::Loaded(digest) => self.note_loaded(index, digest)?,
                FromExecutor::Memory(memory) => {
                    if !self.ranks[index].loaded {
                        let cause = "the executor measured before it had loaded its weights";
                        return Err(self.ranks[index].gone(cause.to_owned()));
                    }
                    self.ranks[index].memory = Some(memory);
                    self.size_if_measured(index, &size)?;
                }
                FromExecutor::Ready(ready) => {
                    if let Some(up) = self.note_ready(index, ready)? {
                        return Ok(up);
                    }
                }
                other => self.hear(index, other)?,
            }
        }
    }

    fn hear(&mut self, index: usize, message: FromExecutor) -> Result<(), StartError> {
        let rank = &mut self.ranks[index];
        match message {
            FromExecutor::Hello(hello) => {
                greet(&hello, rank, self.start.expected)?;
                rank.enter(Phase::Device.name());
                Ok(())
            }
            FromExecutor::Fault { text, .. } => {
                Err(StartError::Fault { who: rank.who, phase: rank.phase, text })
            }
            _ => Ok(()), // Nothing else means anything before a step.
        }
    }

    /// Compares what one has loaded with former starts and with the other ranks.
    fn note_loaded(&mut self, index: usize, digest: WeightsDigest) -> Result<(), StartError> {
        let Starting { rank, who, .. } = self.ranks[index];
        self.ranks[index].loaded = true;
        let WeightsDigest { common, sharded, experts } = digest;
        tracing::info!(
            rank = rank.0,
            "weights loaded: digests {common:016x} {sharded:016x} {experts:016x}"
        );
        let admitted = self.start.weights.admit(rank, digest);
        admitted.map_err(|conflict| StartError::WeightsChanged { who, change: conflict.into() })
    }

    /// Once all have measured: tells them how many blocks to hold.
    fn size_if_measured(
        &mut self,
        index: usize,
        size: &impl Fn(u32) -> u32,
    ) -> Result<(), StartError> {
        let Some(memory) = self.memory() else { return Ok(()) };
        let blocks = size(memory.blocks);
        for rank in &mut self.ranks {
            rank.enter(ALLOCATE);
            rank.moved = Instant::now();
        }
        for to in &self.to {
            let sized = to.send(ToExecutor::SizeKv { blocks });
            sized.map_err(|_| self.ranks[index].gone("the executor is gone".to_owned()))?;
        }
        Ok(())
    }

    /// What all can hold, once all have measured.
    fn memory(&self) -> Option<Memory> {
        let all = self.ranks.iter().map(|rank| rank.memory.as_ref());
        let all = all.collect::<Option<Vec<&Memory>>>()?;
        let first = all.first()?;
        let blocks = all.iter().map(|memory| memory.blocks).min()?;
        let slowest = |of: fn(&Pace) -> u64| all.iter().map(|memory| of(&memory.pace)).max();
        let pace = Pace {
            fixed_ns: slowest(|pace| pace.fixed_ns)?,
            per_token_ns: slowest(|pace| pace.per_token_ns)?,
        };
        Some(Memory { spec: first.spec.clone(), blocks, pace })
    }

    /// Takes note that one is ready; the outcome, if it was the last.
    fn note_ready(&mut self, index: usize, ready: Ready) -> Result<Option<Up>, StartError> {
        let rank = &mut self.ranks[index];
        if rank.memory.is_none() {
            return Err(rank.gone("the executor is ready before it measured".to_owned()));
        }
        rank.enter("ready");
        rank.ready = Some(ready);
        self.over = std::mem::take(&mut rank.over);
        let all = self.ranks.iter().map(|rank| rank.ready.as_ref());
        let Some(all) = all.collect::<Option<Vec<&Ready>>>() else { return Ok(None) };
        let Some(memory) = self.memory() else { return Ok(None) };
        let blocks = all.iter().map(|ready| ready.blocks).min().unwrap_or(0);
        let mut graph_rows = all[0].graph_rows.clone();
        graph_rows.retain(|rows| all.iter().all(|ready| ready.graph_rows.contains(rows)));
        let phases = std::mem::take(&mut self.over);
        let words =
            |(phase, took): &(&str, Duration)| format!("{phase} {:.2} s", took.as_secs_f64());
        let told: Vec<String> = phases.iter().map(words).collect();
        let seconds = self.began.elapsed().as_secs_f64();
        tracing::info!("executor ready after {seconds:.2} s: {}", told.join(", "));
        let weights = self.start.weights.clone();
        Ok(Some(Up { memory, ready: Ready { blocks, graph_rows }, phases, weights }))
    }

    /// Whether somebody has taken too long.
    fn check(&self) -> Result<(), StartError> {
        let Patience { hello, stall, total } = self.start.patience;
        let silent = self.ranks.iter().find(|r| r.phase == HELLO && r.moved.elapsed() > hello);
        if let Some(rank) = silent {
            return Err(StartError::Stalled { who: rank.who, phase: HELLO, limit: hello });
        }
        let all_measured = self.ranks.iter().all(|rank| rank.memory.is_some());
        let at_work = || self.ranks.iter().filter(|rank| rank.works(all_measured));
        let Some(last) = at_work().min_by_key(|rank| rank.moved) else { return Ok(()) };
        let (who, phase) = (last.who, last.phase);
        // Ranks wait for each other: only if none moves something is wrong.
        let idle = at_work().map(|rank| rank.moved.elapsed()).min().unwrap_or_default();
        match stall.filter(|_| phase != HELLO) {
            Some(limit) if idle > limit => Err(StartError::Stalled { who, phase, limit }),
            _ if self.began.elapsed() > total => {
                Err(StartError::Timeout { who, phase, limit: total })
            }
            _ => Ok(()),
        }
    }
}

/// Whether this is the executor that was started, in what it says of itself.
fn greet(hello: &Hello, rank: &Starting, expected: Expected) -> Result<(), StartError> {
    let who = rank.who;
    let same = |what, theirs: String, ours: String| {
        if theirs == ours { Ok(()) } else { Err(StartError::Mismatch { who, what, theirs, ours }) }
    };
    same("protocol", hello.version.to_string(), PROTOCOL_VERSION.to_string())?;
    same("build", hello.build.clone(), env!("CARGO_PKG_VERSION").to_owned())?;
    same("epoch", hello.epoch.0.to_string(), expected.epoch.0.to_string())?;
    same("rank", hello.rank.0.to_string(), rank.rank.0.to_string())?;
    if hello.manifest != expected.manifest {
        let change = WeightsChange::Folder { theirs: hello.manifest, ours: expected.manifest };
        return Err(StartError::WeightsChanged { who, change });
    }
    tracing::info!(rank = hello.rank.0, device = hello.device, "executor");
    Ok(())
}
