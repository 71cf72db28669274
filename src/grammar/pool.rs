//! Where grammars are compiled: on threads apart from the server's and the scheduler's, few at a time, none before it
//! has passed a trial in a process that is killed where it takes too long.

use super::cache::Cache;
use super::compile::{Compiled, Compiler, GrammarError, check};
use super::constraint::Constraint;
use super::lane::Lane;
use super::limits::{CACHE_BYTES, LANES, QUEUE_TIME, TEXT_BYTES_MAX, WAITING_MAX};
use super::lock;
use super::timings::GrammarTimings;
use super::trial::vocabulary_frame;
use super::vocabulary::Vocabulary;
use crate::worker_process::WorkerProgram;
use std::collections::VecDeque;
use std::io;
use std::sync::{Arc, Condvar, Mutex, OnceLock, PoisonError};
use std::thread;
use std::time::{Duration, Instant};

/// Who hears of a grammar; called once, on a thread of the pool or on the caller's.
type Reply = Box<dyn FnOnce(Result<Compiled, GrammarError>) + Send>;

/// The compiler of one server.
pub struct Grammars {
    desk: Arc<Desk>,
}

/// A grammar that somebody waits for.
pub(super) struct Job {
    pub(super) constraint: Arc<Constraint>,
    /// What it is kept under.
    pub(super) key: String,
    pub(super) reply: Reply,
    arrived: Instant,
}

/// What the lanes share.
pub(super) struct Desk {
    queue: Mutex<Queue>,
    added: Condvar,
    cache: Mutex<Cache>,
    timings: Arc<GrammarTimings>,
    vocabulary: Box<dyn Fn() -> Vocabulary + Send + Sync>,
    tools: OnceLock<Result<Tools, String>>,
}

#[derive(Default)]
struct Queue {
    waiting: VecDeque<Job>,
    closed: bool,
}

/// What is made of the vocabulary.
pub(super) struct Tools {
    pub(super) compiler: Compiler,
    /// What each process that tries grammars is sent first.
    pub(super) vocabulary_frame: Vec<u8>,
}

impl Grammars {
    /// Starts the pool. `vocabulary` is asked for, and `trials` started, with the first grammar.
    ///
    /// Errors: the system gives no thread.
    pub fn start(
        vocabulary: impl Fn() -> Vocabulary + Send + Sync + 'static,
        trials: &WorkerProgram,
        timings: Arc<GrammarTimings>,
    ) -> io::Result<Self> {
        let grammars = Self { desk: Arc::new(Desk::new(vocabulary, timings)) };
        for _ in 0..LANES {
            let lane = Lane::new(Arc::clone(&grammars.desk), trials.clone());
            let named = thread::Builder::new().name("grammar-lane".to_owned());
            named.spawn(move || lane.run())?;
        }
        Ok(grammars)
    }

    /// Compiles a constraint and tells `reply`, at once if it is known.
    pub fn compile(
        &self,
        constraint: impl Into<Arc<Constraint>>,
        reply: impl FnOnce(Result<Compiled, GrammarError>) + Send + 'static,
    ) {
        let constraint = constraint.into();
        let key = constraint.key();
        if let Some(known) = self.desk.known(&key) {
            return reply(Ok(known));
        }
        // What is too long does not wait for its turn: parsed, it takes many times its text. No key is shorter than that.
        if key.len() > TEXT_BYTES_MAX
            && let Err(error) = check(&constraint)
        {
            return reply(Err(error));
        }
        let reply = Box::new(reply);
        self.desk.add(Job { constraint, key, reply, arrived: Instant::now() });
    }

    /// What grammars took.
    pub fn timings(&self) -> &Arc<GrammarTimings> {
        &self.desk.timings
    }
}

impl Drop for Grammars {
    fn drop(&mut self) {
        let mut queue = lock(&self.desk.queue);
        queue.closed = true;
        // What waits is dropped, which its replies notice; not under the lock.
        let waiting = std::mem::take(&mut queue.waiting);
        drop(queue);
        drop(waiting);
        self.desk.added.notify_all();
    }
}

impl Desk {
    fn new(
        vocabulary: impl Fn() -> Vocabulary + Send + Sync + 'static,
        timings: Arc<GrammarTimings>,
    ) -> Self {
        Self {
            queue: Mutex::default(),
            added: Condvar::new(),
            cache: Mutex::new(Cache::new(CACHE_BYTES)),
            timings,
            vocabulary: Box::new(vocabulary),
            tools: OnceLock::new(),
        }
    }

    fn add(&self, job: Job) {
        let mut queue = lock(&self.queue);
        let waiting = queue.waiting.len();
        if waiting >= WAITING_MAX {
            drop(queue);
            return (job.reply)(Err(GrammarError::Busy { waiting, limit: WAITING_MAX }));
        }
        queue.waiting.push_back(job);
        self.added.notify_one();
    }

    /// Waits for a job; `None` = the desk is closed. Those that have waited too long are refused.
    pub(super) fn next(&self) -> Option<Job> {
        loop {
            let waits = |queue: &mut Queue| queue.waiting.is_empty() && !queue.closed;
            let waited = self.added.wait_while(lock(&self.queue), waits);
            let mut queue = waited.unwrap_or_else(PoisonError::into_inner);
            let job = queue.waiting.pop_front()?;
            drop(queue);
            let waited = job.arrived.elapsed();
            if waited < QUEUE_TIME {
                return Some(job);
            }
            let (waited_ms, limit_ms) = (waited.as_millis() as u64, QUEUE_TIME.as_millis() as u64);
            (job.reply)(Err(GrammarError::WaitedTooLong { waited_ms, limit_ms }));
        }
    }

    /// A grammar that is kept.
    pub(super) fn known(&self, key: &str) -> Option<Compiled> {
        lock(&self.cache).get(key)
    }

    /// Keeps what was made, and how long it took, or was waited for where nothing was.
    pub(super) fn note(&self, key: String, made: &Result<Compiled, GrammarError>, took: Duration) {
        match made {
            Ok(compiled) => {
                self.timings.compiled.note(took);
                lock(&self.cache).put(key, compiled.clone());
            }
            // Nothing was compiled.
            Err(GrammarError::NoTrials { .. }) => {}
            Err(_) => self.timings.refused.note(took),
        }
    }

    /// The compiler, made of the vocabulary with the first grammar.
    ///
    /// Errors: grammars cannot be followed with these tokens.
    pub(super) fn tools(&self) -> Result<&Tools, GrammarError> {
        let made = self.tools.get_or_init(|| Tools::new((self.vocabulary)()));
        made.as_ref().map_err(|reason| GrammarError::Invalid(reason.clone()))
    }
}

impl Tools {
    fn new(vocabulary: Vocabulary) -> Result<Self, String> {
        let vocabulary_frame = vocabulary_frame(&vocabulary).map_err(|error| error.to_string())?;
        Ok(Self { compiler: Compiler::new(vocabulary)?, vocabulary_frame })
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::grammar::Form;
    use std::sync::mpsc;

    #[test]
    fn who_has_waited_too_long_hears_of_it_and_the_next_has_its_turn() {
        let desk = Desk::new(|| unreachable!("nothing is compiled"), Arc::default());
        let (tell, told) = mpsc::channel();
        let early =
            Instant::now().checked_sub(QUEUE_TIME).expect("the machine has run for seconds");
        for (key, arrived) in [("early", early), ("late", Instant::now())] {
            let constraint = Arc::new(Constraint::new(Form::Regex("a".to_owned()), "regex"));
            let tell = tell.clone();
            let reply: Reply = Box::new(move |made| tell.send(made.map(drop)).unwrap());
            desk.add(Job { constraint, key: key.to_owned(), reply, arrived });
        }
        assert_eq!(desk.next().unwrap().key, "late");
        let refused = told.try_recv().unwrap().unwrap_err();
        let limit = QUEUE_TIME.as_millis() as u64;
        assert!(
            matches!(refused, GrammarError::WaitedTooLong { waited_ms, limit_ms } if waited_ms >= limit && limit_ms == limit),
            "{refused}"
        );
        assert!(told.try_recv().is_err(), "the other one is not refused");
    }
}
