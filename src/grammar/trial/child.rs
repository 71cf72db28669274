//! The child's end: tries what it is sent until the server is gone.

use super::message::{EPOCH, FromTrial, ToTrial, Words};
use crate::grammar::compile::{Compiler, Findings, GrammarError};
use crate::grammar::constraint::Constraint;
use crate::grammar::limits::{TRIAL_BYTES, TRIAL_STACK_BYTES};
use crate::grammar::vocabulary::Vocabulary;
use crate::grammar::{lock, yield_to_others};
use protocol::link::{FrameReader, FrameWriter, LinkError, Sending, Socket};
use rustix::process::{Resource, Rlimit, setrlimit};
use std::panic::{AssertUnwindSafe, catch_unwind};
use std::sync::mpsc::{self, Sender};
use std::sync::{Arc, Mutex};
use std::{fs, io, process, thread};
use thread_priority::{
    NormalThreadSchedulePolicy, ThreadPriority, ThreadSchedulePolicy,
    set_thread_priority_and_policy, thread_native_id,
};

/// This process goes first where memory runs out.
const OOM_SCORE: &str = "1000";

/// Tries grammars for the server at the other end of `stream`, with less of the processor and of memory than others.
/// Returns once the server is gone.
///
/// Errors: the process cannot be confined, or the link fails.
pub fn serve(stream: Socket) -> io::Result<()> {
    confine()?;
    let work = move || match answer(stream) {
        Ok(()) | Err(LinkError::Closed) => Ok(()),
        Err(error) => Err(io::Error::other(error)),
    };
    let named = thread::Builder::new().name("grammar-trial".to_owned());
    let thread = named.stack_size(TRIAL_STACK_BYTES).spawn(work)?;
    thread
        .join()
        .unwrap_or_else(|_| Err(io::Error::other("the thread that tries grammars panicked")))
}

/// Threads with stacks for grammars.
const THREADS: u64 = 2;

/// Bounds the memory of this process, and leaves no dump of it.
fn confine() -> io::Result<()> {
    let limit = |bytes: u64| Rlimit { current: Some(bytes), maximum: Some(bytes) };
    setrlimit(
        Resource::As,
        limit(address_space()? + THREADS * TRIAL_STACK_BYTES as u64 + TRIAL_BYTES),
    )?;
    setrlimit(Resource::Core, limit(0))?;
    if let Err(error) = fs::write("/proc/self/oom_score_adj", OOM_SCORE) {
        tracing::debug!(%error, "others may go first where memory runs out");
    }
    Ok(())
}

/// Bytes of address space that this process has now. Its allocator reserves much more than it uses.
fn address_space() -> io::Result<u64> {
    let status = fs::read_to_string("/proc/self/status")?;
    let size = status.lines().find_map(|line| line.strip_prefix("VmSize:"));
    let kib = size.and_then(|size| size.trim().trim_end_matches(" kB").parse::<u64>().ok());
    let missing = || io::Error::other("/proc/self/status does not tell VmSize");
    kib.map(|kib| kib << 10).ok_or_else(missing)
}

fn answer(stream: Socket) -> Result<(), LinkError> {
    let failed = |error: io::Error| LinkError::Io(error.kind());
    let to = FrameWriter::new(stream.try_clone().map_err(failed)?, EPOCH);
    let desk = Arc::new(Desk(Mutex::new(Outbox { to, next: 0 })));
    let mut from = FrameReader::<_, ToTrial>::new(stream, EPOCH);
    let mut idler = None;
    let mut asked = None;
    for number in 0.. {
        let Some(message) = from.receive()? else { break };
        match (message, &idler) {
            (ToTrial::Yield, _) => yield_to_others(),
            (ToTrial::Vocabulary(words), _) => {
                // The server has found the same compiler usable: else it is no server.
                let compiler = Compiler::new(vocabulary(words)).map_err(|_| LinkError::Closed)?;
                idler = Some(Idler::start(compiler, &desk).map_err(failed)?);
                yield_to_others(); // What comes next is not the server's own.
                desk.send(FromTrial::Ready)?;
            }
            (ToTrial::Constraint(constraint), Some(idler)) => {
                let trial = Arc::new(Trial { number, constraint });
                let _ = idler.queue.send(Arc::clone(&trial)); // Fails only where the process ends.
                asked = Some(trial);
            }
            (ToTrial::Hurry, Some(idler)) => {
                if let Some(trial) = asked.take().filter(|trial| desk.waits_for(trial)) {
                    desk.tell(&trial, idler.compiler.try_out(&trial.constraint))?;
                }
            }
            (ToTrial::Constraint(_) | ToTrial::Hurry, None) => return Err(LinkError::Closed),
        }
    }
    Ok(())
}

/// A grammar that the server waits for.
struct Trial {
    /// Later ones have higher numbers.
    number: u64,
    constraint: Constraint,
}

/// Where verdicts are handed in.
struct Desk(Mutex<Outbox>);

struct Outbox {
    to: FrameWriter<Socket, FromTrial>,
    /// Least number of a grammar without a verdict.
    next: u64,
}

impl Desk {
    fn send(&self, message: FromTrial) -> Result<(), LinkError> {
        lock(&self.0).to.send(message)
    }

    fn waits_for(&self, trial: &Trial) -> bool {
        trial.number >= lock(&self.0).next
    }

    /// Tells the verdict of a grammar, unless it has one.
    fn tell(
        &self,
        trial: &Trial,
        verdict: Result<Findings, GrammarError>,
    ) -> Result<(), LinkError> {
        let mut outbox = lock(&self.0);
        if trial.number < outbox.next {
            return Ok(());
        }
        outbox.next = trial.number + 1;
        outbox.to.send(FromTrial::Verdict(verdict))
    }
}

/// A thread that tries grammars where nobody else needs its processor. A thread may come to that and not back: where
/// others leave nothing, the one that listens to the server tries the grammar too.
struct Idler {
    compiler: Arc<Compiler>,
    queue: Sender<Arc<Trial>>,
}

impl Idler {
    /// Errors: the system gives no thread.
    fn start(compiler: Compiler, desk: &Arc<Desk>) -> io::Result<Self> {
        let compiler = Arc::new(compiler);
        let (queue, trials) = mpsc::channel::<Arc<Trial>>();
        let work = {
            let (compiler, desk) = (Arc::clone(&compiler), Arc::clone(desk));
            move || {
                idle();
                for trial in trials {
                    desk.tell(&trial, compiler.try_out(&trial.constraint))?;
                }
                Ok::<(), LinkError>(())
            }
        };
        let named = thread::Builder::new().name("grammar-idle".to_owned());
        named.stack_size(TRIAL_STACK_BYTES).spawn(|| {
            // Nobody joins it, and the other thread listens: a process that can try nothing has to end.
            if !matches!(catch_unwind(AssertUnwindSafe(work)), Ok(Ok(()))) {
                process::exit(1);
            }
        })?;
        Ok(Self { compiler, queue })
    }
}

/// Lets everybody else go before this thread.
fn idle() {
    let policy = ThreadSchedulePolicy::Normal(NormalThreadSchedulePolicy::Idle);
    let idle = set_thread_priority_and_policy(thread_native_id(), ThreadPriority::Min, policy);
    if let Err(error) = idle {
        tracing::debug!(%error, "grammars are tried while others need the processor");
    }
    yield_to_others();
}

fn vocabulary(words: Words) -> Vocabulary {
    let Words { tokens, special, ends } = words;
    Vocabulary { tokens, special, ends, encode: Arc::new(|_| None) }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::grammar::Form;
    use protocol::link::Receiving;
    use std::os::unix::net::UnixStream;
    use std::time::Duration;

    const WAIT: Duration = Duration::from_mins(1);

    /// What a server has of a child.
    struct Server {
        to: FrameWriter<UnixStream, ToTrial>,
        from: FrameReader<UnixStream, FromTrial>,
    }

    impl Server {
        fn hear(&mut self) -> FromTrial {
            self.from.recv(WAIT).unwrap().expect("an answer in time")
        }

        fn ask(&mut self, regex: &str) {
            let constraint = Constraint::new(Form::Regex(regex.to_owned()), "regex");
            self.to.send(ToTrial::Constraint(constraint)).unwrap();
        }
    }

    #[test]
    fn a_hurried_grammar_has_one_verdict() {
        let (ours, theirs) = UnixStream::pair().unwrap();
        let child = thread::spawn(|| answer(Socket::Unix(theirs)));
        let mut server = Server {
            to: FrameWriter::new(ours.try_clone().unwrap(), EPOCH),
            from: FrameReader::new(ours, EPOCH),
        };
        let tokens = (0..=255).map(|byte| vec![byte]).chain([b"<|end|>".to_vec()]).collect();
        let words = Words { tokens, special: vec![256], ends: vec![256] };
        server.to.send(ToTrial::Vocabulary(words)).unwrap();
        assert_eq!(server.hear(), FromTrial::Ready);
        // Right and wrong ones in turn: a verdict too many would be taken for that of the next one.
        for round in 0..50 {
            let (right, wrong) = (format!("[a-z]{{1,40}}{round}"), format!("{round}(a"));
            for (regex, fits) in [(right, true), (wrong, false)] {
                server.ask(&regex);
                server.to.send(ToTrial::Hurry).unwrap();
                let verdict = server.hear();
                let FromTrial::Verdict(verdict) = verdict else { panic!("{verdict:?}") };
                assert_eq!(verdict.is_ok(), fits, "{regex}: {verdict:?}");
            }
        }
        drop(server);
        assert_eq!(child.join().unwrap(), Err(LinkError::Closed));
    }
}
