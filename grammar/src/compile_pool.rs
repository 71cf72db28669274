//! Where grammars are compiled: on threads apart from the server's and the scheduler's, few at a time, none before it
//! has passed a trial in a process that is killed where it takes too long.

use super::cache::GrammarCache;
use super::compile::{CompiledGrammar, GrammarCompiler, GrammarError, check};
use super::compile_thread::CompileThread;
use super::constraint::OutputConstraint;
use super::limits::{CACHE_BYTES, COMPILE_THREADS, QUEUE_TIME, TEXT_BYTES_MAX, WAITING_MAX};
use super::lock;
use super::timings::GrammarTimings;
use super::vocabulary::GrammarVocabulary;
use super::worker::vocabulary_frame;
use crate::worker_process::WorkerProgram;
use std::collections::VecDeque;
use std::io;
use std::sync::{Arc, Condvar, Mutex, OnceLock, PoisonError};
use std::thread;
use std::time::{Duration, Instant};

/// Who hears of a grammar; called once, on a thread of the pool or on the caller's.
type CompileReply = Box<dyn FnOnce(Result<CompiledGrammar, GrammarError>) + Send>;

/// The compiler of one server.
pub struct GrammarCompilePool {
    queue: Arc<CompileQueue>,
}

/// A grammar that somebody waits for.
pub(super) struct CompileJob {
    pub(super) constraint: Arc<OutputConstraint>,
    /// What it is kept under.
    pub(super) key: String,
    pub(super) reply: CompileReply,
    queued_at: Instant,
}

/// What the lanes share.
pub(super) struct CompileQueue {
    queue: Mutex<CompileQueueState>,
    added: Condvar,
    cache: Mutex<GrammarCache>,
    timings: Arc<GrammarTimings>,
    vocabulary: Box<dyn Fn() -> GrammarVocabulary + Send + Sync>,
    compiler_context: OnceLock<Result<CompilerContext, String>>,
}

#[derive(Default)]
struct CompileQueueState {
    waiting: VecDeque<CompileJob>,
    closed: bool,
}

/// What is made of the vocabulary.
pub(super) struct CompilerContext {
    pub(super) compiler: GrammarCompiler,
    /// What each process that tries grammars is sent first.
    pub(super) vocabulary_frame: Vec<u8>,
}

impl GrammarCompilePool {
    /// Starts the pool. `vocabulary` is asked for, and `trials` started, with the first grammar.
    ///
    /// Errors: the system gives no thread.
    pub fn start(
        vocabulary: impl Fn() -> GrammarVocabulary + Send + Sync + 'static,
        trials: &WorkerProgram,
        timings: Arc<GrammarTimings>,
    ) -> io::Result<Self> {
        let grammars = Self { queue: Arc::new(CompileQueue::new(vocabulary, timings)) };
        for _ in 0..COMPILE_THREADS {
            let lane = CompileThread::new(Arc::clone(&grammars.queue), trials.clone());
            let named = thread::Builder::new().name("grammar-lane".to_owned());
            named.spawn(move || lane.run())?;
        }
        Ok(grammars)
    }

    /// Compiles a constraint and tells `reply`, at once if it is known.
    pub fn compile(
        &self,
        constraint: impl Into<Arc<OutputConstraint>>,
        reply: impl FnOnce(Result<CompiledGrammar, GrammarError>) + Send + 'static,
    ) {
        let constraint = constraint.into();
        let key = constraint.cache_key();
        if let Some(known) = self.queue.cached(&key) {
            return reply(Ok(known));
        }
        // What is too long does not wait for its turn: parsed, it takes many times its text. No key is shorter than that.
        if key.len() > TEXT_BYTES_MAX
            && let Err(error) = check(&constraint)
        {
            return reply(Err(error));
        }
        let reply = Box::new(reply);
        self.queue.add(CompileJob { constraint, key, reply, queued_at: Instant::now() });
    }

    /// What grammars took.
    pub fn timings(&self) -> &Arc<GrammarTimings> {
        &self.queue.timings
    }
}

impl Drop for GrammarCompilePool {
    fn drop(&mut self) {
        let mut queue = lock(&self.queue.queue);
        queue.closed = true;
        // What waits is dropped, which its replies notice; not under the lock.
        let waiting = std::mem::take(&mut queue.waiting);
        drop(queue);
        drop(waiting);
        self.queue.added.notify_all();
    }
}

impl CompileQueue {
    fn new(
        vocabulary: impl Fn() -> GrammarVocabulary + Send + Sync + 'static,
        timings: Arc<GrammarTimings>,
    ) -> Self {
        Self {
            queue: Mutex::default(),
            added: Condvar::new(),
            cache: Mutex::new(GrammarCache::new(CACHE_BYTES)),
            timings,
            vocabulary: Box::new(vocabulary),
            compiler_context: OnceLock::new(),
        }
    }

    fn add(&self, job: CompileJob) {
        let mut queue = lock(&self.queue);
        let waiting = queue.waiting.len();
        if waiting >= WAITING_MAX {
            drop(queue);
            return (job.reply)(Err(GrammarError::QueueFull { waiting, limit: WAITING_MAX }));
        }
        queue.waiting.push_back(job);
        self.added.notify_one();
    }

    /// Waits for a job; `None` = the desk is closed. Those that have waited too long are refused.
    pub(super) fn next(&self) -> Option<CompileJob> {
        loop {
            let waits = |queue: &mut CompileQueueState| queue.waiting.is_empty() && !queue.closed;
            let waited = self.added.wait_while(lock(&self.queue), waits);
            let mut queue = waited.unwrap_or_else(PoisonError::into_inner);
            let job = queue.waiting.pop_front()?;
            drop(queue);
            let waited = job.queued_at.elapsed();
            if waited < QUEUE_TIME {
                return Some(job);
            }
            let (waited_ms, limit_ms) = (waited.as_millis() as u64, QUEUE_TIME.as_millis() as u64);
            (job.reply)(Err(GrammarError::QueueTimeout { waited_ms, limit_ms }));
        }
    }

    /// A grammar that is kept.
    pub(super) fn cached(&self, key: &str) -> Option<CompiledGrammar> {
        lock(&self.cache).get(key)
    }

    /// Keeps what was made, and how long it took, or was waited for where nothing was.
    pub(super) fn record(
        &self,
        key: String,
        made: &Result<CompiledGrammar, GrammarError>,
        took: Duration,
    ) {
        match made {
            Ok(compiled) => {
                self.timings.compiled.record(took);
                lock(&self.cache).put(key, compiled.clone());
            }
            // Nothing was compiled.
            Err(GrammarError::WorkerUnavailable { .. }) => {}
            Err(_) => self.timings.rejected.record(took),
        }
    }

    /// The compiler, made of the vocabulary with the first grammar.
    ///
    /// Errors: grammars cannot be followed with these tokens.
    pub(super) fn compiler_context(&self) -> Result<&CompilerContext, GrammarError> {
        let made = self.compiler_context.get_or_init(|| CompilerContext::new((self.vocabulary)()));
        made.as_ref().map_err(|reason| GrammarError::Invalid(reason.clone()))
    }
}

impl CompilerContext {
    fn new(vocabulary: GrammarVocabulary) -> Result<Self, String> {
        let vocabulary_frame = vocabulary_frame(&vocabulary).map_err(|error| error.to_string())?;
        Ok(Self { compiler: GrammarCompiler::new(vocabulary)?, vocabulary_frame })
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::GrammarSpec;
    use std::sync::mpsc;

    #[test]
    fn queued_compile_times_out_and_the_next_one_runs() {
        let desk = CompileQueue::new(|| unreachable!("nothing is compiled"), Arc::default());
        let (tell, told) = mpsc::channel();
        let early =
            Instant::now().checked_sub(QUEUE_TIME).expect("the machine has run for seconds");
        for (key, arrived) in [("early", early), ("late", Instant::now())] {
            let constraint =
                Arc::new(OutputConstraint::new(GrammarSpec::Regex("a".to_owned()), "regex"));
            let tell = tell.clone();
            let reply: CompileReply = Box::new(move |made| tell.send(made.map(drop)).unwrap());
            desk.add(CompileJob { constraint, key: key.to_owned(), reply, queued_at: arrived });
        }
        assert_eq!(desk.next().unwrap().key, "late");
        let refused = told.try_recv().unwrap().unwrap_err();
        let limit = QUEUE_TIME.as_millis() as u64;
        assert!(
            matches!(refused, GrammarError::QueueTimeout { waited_ms, limit_ms } if waited_ms >= limit && limit_ms == limit),
            "{refused}"
        );
        assert!(told.try_recv().is_err(), "the other one is not refused");
    }
}
