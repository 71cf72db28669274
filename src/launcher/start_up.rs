//! The executor's start-up, seen from the scheduler's side: hello, progress, memory, ready.

use super::engine_thread::Notice;
use super::executor::ExecutorLink;
use protocol::{Epoch, FromExecutor, Hello, Memory, PROTOCOL_VERSION, Phase, Ready, ToExecutor};
use std::sync::mpsc::Receiver;
use std::time::{Duration, Instant};

/// How often a waiting start-up looks for signals.
const POLL: Duration = Duration::from_millis(100);

/// Why the executor did not come up.
#[derive(Debug, thiserror::Error)]
pub enum StartError {
    /// It said why.
    #[error("{text} (while: {phase})")]
    Fault {
        /// What it was doing.
        phase: &'static str,
        /// Its own words.
        text: String,
    },
    /// It ended without a word.
    #[error("{cause} (while: {phase})")]
    Gone {
        /// What it was doing.
        phase: &'static str,
        /// How it ended.
        cause: String,
    },
    /// Nothing moved for too long.
    #[error("no progress for {} s (while: {phase})", limit.as_secs())]
    Stalled {
        /// What it was doing.
        phase: &'static str,
        /// Longest time without progress.
        limit: Duration,
    },
    /// It moves, but the time is over.
    #[error("not ready after {} s (while: {phase}); --startup-timeout sets this bound", limit.as_secs())]
    Timeout {
        /// What it was doing.
        phase: &'static str,
        /// Longest start.
        limit: Duration,
    },
    /// It is another build, or serves something else.
    #[error("the executor has {what} {theirs}, this process {ours}")]
    Mismatch {
        /// What differs.
        what: &'static str,
        /// Of the executor.
        theirs: String,
        /// Of this process.
        ours: String,
    },
    /// The process was asked to stop.
    #[error("stopped by signal {0} while starting")]
    Signal(i32),
}

impl StartError {
    /// Whether the executor could not even open its device.
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

/// What the executor brought up.
#[derive(Debug)]
pub struct Up {
    /// Measured after warm-up.
    pub memory: Memory,
    /// Blocks allocated and graphs captured.
    pub ready: Ready,
    /// How long each part of the start took.
    pub phases: Vec<(&'static str, Duration)>,
}

/// Waits until the executor is ready. `size` chooses the number of KV blocks from those it can hold;
/// `progress` sees every step of the way.
pub fn bring_up(
    link: &mut ExecutorLink,
    notices: &Receiver<Notice>,
    patience: Patience,
    expected: Expected,
    size: impl Fn(u32) -> u32,
    mut progress: impl FnMut(Phase, u64, u64),
) -> Result<Up, StartError> {
    let mut measured = None;
    let mut clock = Clock::new(patience);
    loop {
        if let Ok(Notice::Signal(number)) = notices.try_recv() {
            return Err(StartError::Signal(number));
        }
        clock.check()?;
        let message = match link.from.messages.recv(POLL) {
            Ok(None | Some(FromExecutor::Beat)) => continue,
            Ok(Some(message)) => message,
            Err(error) => return Err(clock.gone(link.from.cause(&error))),
        };
        clock.last = Instant::now();
        match message {
            FromExecutor::Hello(hello) => {
                greet(&hello, expected)?;
                clock.enter(Phase::Device.name());
            }
            FromExecutor::Progress { phase, done, total } => {
                clock.enter(phase.name());
                progress(phase, done, total);
            }
            FromExecutor::Memory(memory) => {
                let blocks = size(memory.blocks);
                clock.enter("allocate the KV cache");
                let sized = link.to.send(ToExecutor::SizeKv { blocks });
                sized.map_err(|_| clock.gone("the executor is gone".to_owned()))?;
                measured = Some(memory);
            }
            FromExecutor::Ready(ready) => {
                let early = || clock.gone("the executor is ready before it measured".to_owned());
                let memory = measured.take().ok_or_else(early)?;
                let phases = clock.finish();
                return Ok(Up { memory, ready, phases });
            }
            FromExecutor::Fault { text, .. } => {
                return Err(StartError::Fault { phase: clock.phase, text });
            }
            FromExecutor::StepOutput(_)
            | FromExecutor::StepDone { .. }
            | FromExecutor::Profiled(_)
            | FromExecutor::Beat => {}
        }
    }
}

/// What an executor does before it has said who it is.
const HELLO: &str = "say hello";

/// How long the start has taken.
struct Clock {
    patience: Patience,
    start: Instant,
    last: Instant,
    phase: &'static str,
    entered: Instant,
    over: Vec<(&'static str, Duration)>,
}

impl Clock {
    fn new(patience: Patience) -> Self {
        let now = Instant::now();
        let (start, last, entered) = (now, now, now);
        Self { patience, start, last, phase: HELLO, entered, over: Vec::new() }
    }

    fn enter(&mut self, phase: &'static str) {
        if phase == self.phase {
            return;
        }
        self.over.push((self.phase, self.entered.elapsed()));
        (self.phase, self.entered) = (phase, Instant::now());
    }

    /// The phases and their times, of which the log hears too.
    fn finish(mut self) -> Vec<(&'static str, Duration)> {
        self.enter("ready");
        let words =
            |(phase, took): &(&str, Duration)| format!("{phase} {:.2} s", took.as_secs_f64());
        let phases: Vec<String> = self.over.iter().map(words).collect();
        let seconds = self.start.elapsed().as_secs_f64();
        tracing::info!("executor ready after {seconds:.2} s: {}", phases.join(", "));
        self.over
    }

    fn check(&self) -> Result<(), StartError> {
        let Patience { hello, stall, total } = self.patience;
        let phase = self.phase;
        let stall = if phase == HELLO { Some(hello) } else { stall };
        match stall {
            Some(limit) if self.last.elapsed() > limit => Err(StartError::Stalled { phase, limit }),
            _ if self.start.elapsed() > total => Err(StartError::Timeout { phase, limit: total }),
            _ => Ok(()),
        }
    }

    fn gone(&self, cause: String) -> StartError {
        StartError::Gone { phase: self.phase, cause }
    }
}

/// Whether this is the executor that was started.
fn greet(hello: &Hello, expected: Expected) -> Result<(), StartError> {
    let same = |what, theirs: String, ours: String| {
        if theirs == ours { Ok(()) } else { Err(StartError::Mismatch { what, theirs, ours }) }
    };
    same("protocol", hello.version.to_string(), PROTOCOL_VERSION.to_string())?;
    same("build", hello.build.clone(), env!("CARGO_PKG_VERSION").to_owned())?;
    same("epoch", hello.epoch.0.to_string(), expected.epoch.0.to_string())?;
    let digest = |of: u64| format!("{of:016x}");
    same("model digest", digest(hello.manifest), digest(expected.manifest))?;
    tracing::info!(rank = hello.rank.0, device = hello.device, "executor");
    Ok(())
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::launcher::executor::Incoming;
    use protocol::link::{InProcess, Link as _, pair};
    use protocol::{KvSpec, Pace, Rank};
    use std::sync::mpsc::channel;

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

    /// Starts against an executor that behaves like this.
    fn start(peer: impl FnOnce(InProcess<FromExecutor, ToExecutor>) + Send + 'static) -> String {
        let (ours, theirs) = pair(8);
        let (messages, epoch) = (Box::new(ours.receiver), EXPECTED.epoch);
        let from = Incoming { messages, epoch, process: None };
        let mut link = ExecutorLink { to: ours.sender, from };
        let (_keep, notices) = channel();
        let peer = std::thread::spawn(move || peer(theirs));
        let patience = Patience {
            hello: Duration::from_millis(150),
            stall: Some(Duration::from_millis(300)),
            total: Duration::from_secs(2),
        };
        let up = bring_up(&mut link, &notices, patience, EXPECTED, |b| b.min(5), |_, _, _| {});
        drop(link);
        peer.join().unwrap();
        match up {
            Ok(up) => {
                let phases: Vec<_> = up.phases.iter().map(|(phase, _)| *phase).collect();
                format!("{} blocks after {}", up.ready.blocks, phases.join(", "))
            }
            Err(error) => error.to_string(),
        }
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
        let text = start(|mut link| {
            let spec = KvSpec { block_tokens: 16, groups: Vec::new() };
            let memory = Memory { spec, blocks: 90, pace: Pace::default() };
            link.send(FromExecutor::Hello(hello())).unwrap();
            for phase in [Phase::Load, Phase::Load, Phase::Compile, Phase::WarmUp] {
                link.send(FromExecutor::Progress { phase, done: 1, total: 1 }).unwrap();
            }
            link.send(FromExecutor::Memory(memory)).unwrap();
            let Ok(Some(ToExecutor::SizeKv { blocks })) = link.recv(Duration::from_secs(2)) else {
                panic!("no size")
            };
            link.send(FromExecutor::Ready(Ready { blocks, graph_rows: Vec::new() })).unwrap();
        });
        let phases = "say hello, open device, load weights, compile kernels, warm up, \
                      allocate the KV cache";
        assert_eq!(text, format!("5 blocks after {phases}"));
    }
}
