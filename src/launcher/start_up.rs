//! The executors' start-up, seen from the scheduler's side: hello, progress, memory, ready.
//!
//! All ranks start together: the number of KV blocks is the least that any of them can hold, and none serves
//! before all are ready. A thread listens to each of them meanwhile.

use super::executor::{ExecutorLink, Incoming};
use protocol::{
    Epoch, FromExecutor, Hello, Memory, PROTOCOL_VERSION, Pace, Phase, Rank, Ready, ToExecutor,
};
use std::fmt;
use std::sync::atomic::{AtomicBool, Ordering};
use std::sync::mpsc::{Receiver, RecvTimeoutError, Sender, SyncSender, channel};
use std::thread;
use std::time::{Duration, Instant};

/// How often a waiting start-up looks for signals.
const POLL: Duration = Duration::from_millis(100);

/// Why the executors did not come up.
#[derive(Debug, thiserror::Error)]
pub enum StartError {
    /// One said why.
    #[error("{who}{text} (while: {phase})")]
    Fault {
        /// Whose words these are.
        who: Who,
        /// What it was doing.
        phase: &'static str,
        /// Its own words.
        text: String,
    },
    /// One ended without a word.
    #[error("{cause} (while: {phase})")]
    Gone {
        /// What it was doing.
        phase: &'static str,
        /// Who it was, and how it ended.
        cause: String,
    },
    /// Nothing moved for too long.
    #[error("{who}no progress for {} s (while: {phase})", limit.as_secs())]
    Stalled {
        /// Who moved least.
        who: Who,
        /// What it was doing.
        phase: &'static str,
        /// Longest time without progress.
        limit: Duration,
    },
    /// They move, but the time is over.
    #[error("{who}not ready after {} s (while: {phase}); --startup-timeout sets this bound", limit.as_secs())]
    Timeout {
        /// Who moved least.
        who: Who,
        /// What it was doing.
        phase: &'static str,
        /// Longest start.
        limit: Duration,
    },
    /// One is another build, or serves something else.
    #[error("{who}the executor has {what} {theirs}, this process {ours}")]
    Mismatch {
        /// Which one.
        who: Who,
        /// What differs.
        what: &'static str,
        /// Of the executor.
        theirs: String,
        /// Of this process.
        ours: String,
    },
    /// A node has not come.
    #[error("node {node} has not joined after {} s; --startup-timeout sets this bound", limit.as_secs())]
    Absent {
        /// Which.
        node: u16,
        /// Longest time.
        limit: Duration,
    },
    /// The process was asked to stop.
    #[error("stopped by signal {0} while starting")]
    Signal(i32),
    /// The system gives no thread.
    #[error("cannot listen to the executors: {0}")]
    Threads(#[from] std::io::Error),
}

/// An executor in front of what is said of it; nobody, if there is only one.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct Who {
    /// Another node than this.
    node: Option<u16>,
    rank: Option<Rank>,
}

impl Who {
    /// Whichever executor of another node.
    pub fn of_node(node: u16) -> Self {
        Self { node: Some(node), rank: None }
    }
}

impl fmt::Display for Who {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match (self.node, self.rank) {
            (None, None) => Ok(()),
            (None, Some(rank)) => write!(f, "rank {}: ", rank.0),
            (Some(node), None) => write!(f, "node {node}: "),
            (Some(node), Some(rank)) => write!(f, "node {node}, rank {}: ", rank.0),
        }
    }
}

impl StartError {
    /// Whether an executor could not even open its device.
    pub fn is_of_the_device(&self) -> bool {
        let opening = Phase::Device.name();
        matches!(self, Self::Fault { phase, .. } | Self::Gone { phase, .. } if *phase == opening)
    }
}

/// How long a start may take.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct Patience {
    /// Until the executor has said who it is.
    pub hello: Duration,
    /// Without progress; `None` = no bound. A CPU may take minutes for one pass of a large model.
    pub stall: Option<Duration>,
    /// In all.
    pub total: Duration,
}

/// Who must answer.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct Expected {
    /// Generation.
    pub epoch: Epoch,
    /// Digest of the model folder.
    pub manifest: u64,
}

/// What the executors brought up.
#[derive(Debug)]
pub struct Up {
    /// Measured after warm-up: the least blocks, the slowest pace.
    pub memory: Memory,
    /// Blocks allocated and graphs captured, by all of them.
    pub ready: Ready,
    /// How long each part of the start took the one that was ready last.
    pub phases: Vec<(&'static str, Duration)>,
}

/// A start: how long it may take, and who must answer.
#[derive(Debug, Clone, Copy)]
pub struct Start {
    /// How long.
    pub patience: Patience,
    /// Who.
    pub expected: Expected,
}

impl Start {
    /// Waits until all executors are ready. `size` chooses the number of KV blocks from those each of them can
    /// hold; `stop` says which signal has come; `progress` sees every step of the first one's way.
    pub fn bring_up(
        self,
        links: &mut [ExecutorLink],
        size: impl Fn(u32) -> u32,
        stop: impl Fn() -> Option<i32>,
        progress: impl FnMut(Phase, u64, u64),
    ) -> Result<Up, StartError> {
        let to = links.iter().map(|link| link.to.clone()).collect();
        let from: Vec<&mut Incoming> = links.iter_mut().flat_map(|link| &mut link.from).collect();
        let several = from.len() > 1;
        let ranks = from.iter().map(|from| Starting::new(from, several)).collect();
        let mut room = Room { start: self, began: Instant::now(), to, ranks, over: Vec::new() };
        let over = AtomicBool::new(false);
        let (heard, news) = channel();
        thread::scope(|scope| {
            let listens = from.into_iter().enumerate().try_for_each(|(index, from)| {
                let (heard, over) = (heard.clone(), &over);
                let listener = thread::Builder::new().name("executor-start".to_owned());
                let listener =
                    listener.spawn_scoped(scope, move || listen(from, index, &heard, over));
                listener.map(drop)
            });
            let up = match listens {
                Ok(()) => room.wait(&news, size, stop, progress),
                Err(error) => Err(error.into()),
            };
            over.store(true, Ordering::Relaxed);
            up
        })
    }
}

/// What a listener heard from its executor: a message, or what became of it.
type Heard = (usize, Result<FromExecutor, String>);

/// Passes on what an executor says, until it is ready or gone, or the start is `over`.
fn listen(from: &mut Incoming, index: usize, heard: &Sender<Heard>, over: &AtomicBool) {
    while !over.load(Ordering::Relaxed) {
        let message = match from.messages.recv(POLL) {
            Ok(None | Some(FromExecutor::Beat)) => continue,
            Ok(Some(message)) => Ok(message),
            Err(error) => Err(from.cause(&error)),
        };
        let last = matches!(message, Ok(FromExecutor::Ready(_) | FromExecutor::Fault { .. }));
        if heard.send((index, message)).is_err() || last {
            return;
        }
    }
}

/// What an executor does before it has said who it is.
const HELLO: &str = "say hello";
/// What it does with the number of blocks.
const ALLOCATE: &str = "allocate the KV cache";

/// How far one executor is.
struct Starting {
    rank: Rank,
    who: Who,
    phase: &'static str,
    entered: Instant,
    /// When it last moved.
    moved: Instant,
    over: Vec<(&'static str, Duration)>,
    memory: Option<Memory>,
    ready: Option<Ready>,
}

impl Starting {
    fn new(from: &Incoming, several: bool) -> Self {
        let (now, rank) = (Instant::now(), from.rank);
        let node = from.process.as_ref().and_then(|process| process.node());
        let who = Who { node, rank: several.then_some(rank) };
        let (memory, ready, over) = (None, None, Vec::new());
        Self { rank, who, phase: HELLO, entered: now, moved: now, over, memory, ready }
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
struct Room {
    start: Start,
    began: Instant,
    /// The roads to them, one for each group.
    to: Vec<SyncSender<ToExecutor>>,
    ranks: Vec<Starting>,
    /// The phases of the last one that became ready.
    over: Vec<(&'static str, Duration)>,
}

impl Room {
    fn wait(
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
                FromExecutor::Memory(memory) => {
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
        Ok(Some(Up { memory, ready: Ready { blocks, graph_rows }, phases }))
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
    let digest = |of: u64| format!("{of:016x}");
    same("model digest", digest(hello.manifest), digest(expected.manifest))?;
    tracing::info!(rank = hello.rank.0, device = hello.device, "executor");
    Ok(())
}

#[cfg(test)]
mod tests {
    use super::*;
    use protocol::KvSpec;
    use protocol::link::{InProcess, Link as _, pair};

    const EXPECTED: Expected = Expected { epoch: Epoch(4), manifest: 7 };

    fn hello() -> Hello {
        Hello {
            version: PROTOCOL_VERSION,
            rank: Rank(0),
            epoch: EXPECTED.epoch,
            device: "none".to_owned(),
            build: env!("CARGO_PKG_VERSION").to_owned(),
            manifest: EXPECTED.manifest,
        }
    }

    type Peer = InProcess<FromExecutor, ToExecutor>;

    /// Starts against an executor that behaves like this.
    fn start(peer: impl FnOnce(Peer) + Send + 'static) -> String {
        start_all(vec![Box::new(peer)])
    }

    /// Starts against executors that behave like these, each a replica of its own.
    fn start_all(peers: Vec<Box<dyn FnOnce(Peer) + Send>>) -> String {
        let (mut links, mut threads) = (Vec::new(), Vec::new());
        for (peer, rank) in peers.into_iter().zip(0..) {
            let (ours, theirs) = pair(8);
            let (messages, epoch) = (Box::new(ours.receiver), EXPECTED.epoch);
            let from = Incoming { messages, epoch, rank: Rank(rank), process: None };
            links.push(ExecutorLink { to: ours.sender, from: vec![from] });
            threads.push(thread::spawn(move || peer(theirs)));
        }
        let patience = Patience {
            hello: Duration::from_millis(150),
            stall: Some(Duration::from_millis(300)),
            total: Duration::from_secs(2),
        };
        let start = Start { patience, expected: EXPECTED };
        let up = start.bring_up(&mut links, |b| b.min(50), || None, |_, _, _| {});
        drop(links);
        for thread in threads {
            thread.join().unwrap();
        }
        match up {
            Ok(up) => {
                let phases: Vec<_> = up.phases.iter().map(|(phase, _)| *phase).collect();
                format!("{} blocks after {}", up.ready.blocks, phases.join(", "))
            }
            Err(error) => error.to_string(),
        }
    }

    /// An executor that can hold so many blocks and says so after `wait`, for as long as somebody listens.
    fn holds(rank: u16, blocks: u32, wait: Duration) -> Box<dyn FnOnce(Peer) + Send> {
        Box::new(move |mut link| {
            let spec = KvSpec { block_tokens: 16, groups: Vec::new() };
            let memory = Memory { spec, blocks, pace: Pace::default() };
            let _ = link.send(FromExecutor::Hello(Hello { rank: Rank(rank), ..hello() }));
            for phase in [Phase::Load, Phase::Load, Phase::Compile, Phase::WarmUp] {
                let _ = link.send(FromExecutor::Progress { phase, done: 1, total: 1 });
            }
            thread::sleep(wait);
            let _ = link.send(FromExecutor::Memory(memory));
            if let Ok(Some(ToExecutor::SizeKv { blocks })) = link.recv(Duration::from_secs(2)) {
                let _ = link.send(FromExecutor::Ready(Ready { blocks, graph_rows: Vec::new() }));
            }
        })
    }

    #[test]
    fn every_end_of_a_start_is_told_apart() {
        assert_eq!(start(|_| {}), "the executor exited (while: say hello)");
        let silent = |link: InProcess<FromExecutor, ToExecutor>| {
            std::thread::sleep(Duration::from_millis(600));
            drop(link);
        };
        assert_eq!(start(silent), "no progress for 0 s (while: say hello)");
        let greets = |change: fn(&mut Hello)| {
            move |mut link: InProcess<FromExecutor, ToExecutor>| {
                let mut hello = hello();
                change(&mut hello);
                let _ = link.send(FromExecutor::Hello(hello));
                // Beats are no progress.
                while link.send(FromExecutor::Beat).is_ok() {
                    std::thread::sleep(Duration::from_millis(20));
                }
            }
        };
        assert_eq!(start(greets(|_| {})), "no progress for 0 s (while: open device)");
        let text = start(greets(|hello| hello.version = 9));
        assert_eq!(text, format!("the executor has protocol 9, this process {PROTOCOL_VERSION}"));
        let text = start(greets(|hello| hello.build = "0.0.1".to_owned()));
        assert!(text.starts_with("the executor has build 0.0.1"), "{text}");
        let text = start(greets(|hello| hello.epoch = Epoch(3)));
        assert_eq!(text, "the executor has epoch 3, this process 4");
        let text = start(greets(|hello| hello.manifest = 255));
        let ours = "0000000000000007";
        assert_eq!(
            text,
            format!("the executor has model digest 00000000000000ff, this process {ours}")
        );
    }

    #[test]
    fn progress_prolongs_a_phase_but_not_the_whole() {
        let text = start(|mut link| {
            let _ = link.send(FromExecutor::Hello(hello()));
            let news = FromExecutor::Progress { phase: Phase::Compile, done: 1, total: 2 };
            while link.send(news.clone()).is_ok() {
                std::thread::sleep(Duration::from_millis(50));
            }
        });
        let expected =
            "not ready after 2 s (while: compile kernels); --startup-timeout sets this bound";
        assert_eq!(text, expected);
    }

    #[test]
    fn the_size_is_chosen_by_this_side() {
        let phases = "say hello, open device, load weights, compile kernels, warm up, \
                      allocate the KV cache";
        assert_eq!(
            start_all(vec![holds(0, 90, Duration::ZERO)]),
            format!("50 blocks after {phases}")
        );
    }

    #[test]
    fn all_get_what_the_smallest_can_hold_and_wait_for_the_slowest() {
        let slow = Duration::from_millis(250); // Within the stall of 300 ms.
        let text = start_all(vec![holds(0, 90, Duration::ZERO), holds(1, 7, slow)]);
        assert!(text.starts_with("7 blocks after say hello, "), "{text}");
        let stuck = Duration::from_millis(600);
        let text = start_all(vec![holds(0, 90, Duration::ZERO), holds(1, 7, stuck)]);
        assert_eq!(text, "rank 1: no progress for 0 s (while: warm up)");
    }

    #[test]
    fn who_does_not_come_up_is_named() {
        let fails: Box<dyn FnOnce(Peer) + Send> = Box::new(|mut link| {
            link.send(FromExecutor::Hello(Hello { rank: Rank(1), ..hello() })).unwrap();
            let text = "no such file".to_owned();
            link.send(FromExecutor::Fault { step: None, text }).unwrap();
        });
        let text = start_all(vec![holds(0, 9, Duration::ZERO), fails]);
        assert_eq!(text, "rank 1: no such file (while: open device)");
        let text = start_all(vec![holds(0, 9, Duration::ZERO), holds(0, 9, Duration::ZERO)]);
        assert_eq!(text, "rank 1: the executor has rank 0, this process 1");
    }
}
