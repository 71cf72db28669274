//! Thread pool that compiles grammars. Its threads are separate from the threads of the server and the
//! scheduler, and only a few grammars compile at a time. Each grammar is first compiled in a worker process
//! that is killed at a time limit (dry run), and only after that in this process.

use super::cache::GrammarCache;
use super::compile::{CompiledGrammar, GrammarCompiler, GrammarError};
use super::compile_thread::CompileThread;
use super::constraint::OutputConstraint;
use super::limits::{CACHE_BYTES, COMPILE_THREADS, QUEUE_TIME, TEXT_BYTES_MAX, WAITING_MAX};
use super::llguidance_grammar::check;
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

/// Callback for the result of a compilation. Called once, on a thread of the pool or on the caller's thread.
type CompileCallback = Box<dyn FnOnce(Result<CompiledGrammar, GrammarError>) + Send>;

/// Pool of compile threads of one server.
pub struct GrammarCompilePool {
    queue: Arc<CompileQueue>,
}

/// A constraint in the compile queue, and the callback for its result.
pub(super) struct CompileJob {
    pub(super) constraint: Arc<OutputConstraint>,
    /// Key of the constraint in the grammar cache.
    pub(super) key: String,
    pub(super) reply: CompileCallback,
    queued_at: Instant,
}

/// Queue, grammar cache and compiler shared by the compile threads.
pub(super) struct CompileQueue {
    queue: Mutex<CompileQueueState>,
    added: Condvar,
    cache: Mutex<GrammarCache>,
    timings: Arc<GrammarTimings>,
    vocabulary: Box<dyn Fn() -> GrammarVocabulary + Send + Sync>,
    compiler_context: OnceLock<Result<CompilerContext, String>>,
}

/// Waiting compile jobs, and whether the queue is closed.
#[derive(Default)]
struct CompileQueueState {
    waiting: VecDeque<CompileJob>,
    closed: bool,
}

/// Grammar compiler, and the message that sends the vocabulary to worker processes.
pub(super) struct CompilerContext {
    pub(super) compiler: GrammarCompiler,
    /// Frame with the vocabulary, the first frame sent to each worker process.
    pub(super) vocabulary_frame: Vec<u8>,
}

impl GrammarCompilePool {
    /// Starts the pool. The first compilation calls `vocabulary` and starts a worker process from
    /// `worker_program`.
    ///
    /// Errors: a thread cannot be started.
    pub fn start(
        vocabulary: impl Fn() -> GrammarVocabulary + Send + Sync + 'static,
        worker_program: &WorkerProgram,
        timings: Arc<GrammarTimings>,
    ) -> io::Result<Self> {
        let pool = Self { queue: Arc::new(CompileQueue::new(vocabulary, timings)) };
        for _ in 0..COMPILE_THREADS {
            let compile_thread =
                CompileThread::new(Arc::clone(&pool.queue), worker_program.clone());
            let builder = thread::Builder::new().name("grammar-pool".to_owned());
            builder.spawn(move || compile_thread.run())?;
        }
        Ok(pool)
    }

    /// Compiles a constraint and passes the result to `reply`. If the grammar is cached or too long, `reply`
    /// is called immediately.
    pub fn compile(
        &self,
        constraint: impl Into<Arc<OutputConstraint>>,
        reply: impl FnOnce(Result<CompiledGrammar, GrammarError>) + Send + 'static,
    ) {
        let constraint = constraint.into();
        let key = constraint.cache_key();
        if let Some(compiled) = self.queue.cached(&key) {
            return reply(Ok(compiled));
        }
        // Overlong constraints are rejected before they are queued, because a parsed schema takes many times
        // the memory of its text. The key is never shorter than the text.
        if key.len() > TEXT_BYTES_MAX
            && let Err(error) = check(&constraint)
        {
            return reply(Err(error));
        }
        let reply = Box::new(reply);
        self.queue.add(CompileJob { constraint, key, reply, queued_at: Instant::now() });
    }

    /// Returns duration histograms and counters of compilations and masks.
    pub fn timings(&self) -> &Arc<GrammarTimings> {
        &self.queue.timings
    }
}

impl Drop for GrammarCompilePool {
    fn drop(&mut self) {
        let mut queue = lock(&self.queue.queue);
        queue.closed = true;
        // Dropping a queued job drops its `reply`, which the caller detects. Jobs are dropped after the lock
        // is released.
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

    /// Waits for a job and returns it; `None` if the queue is closed. Jobs that waited too long in the queue
    /// are rejected.
    pub(super) fn next(&self) -> Option<CompileJob> {
        loop {
            let is_idle = |queue: &mut CompileQueueState| queue.waiting.is_empty() && !queue.closed;
            let waited = self.added.wait_while(lock(&self.queue), is_idle);
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

    /// Returns a grammar from the cache, if it is cached.
    pub(super) fn cached(&self, key: &str) -> Option<CompiledGrammar> {
        lock(&self.cache).get(key)
    }

    /// Records the duration of a successful or failed compilation, and inserts a compiled grammar into the
    /// cache.
    pub(super) fn record(
        &self,
        key: String,
        result: &Result<CompiledGrammar, GrammarError>,
        elapsed: Duration,
    ) {
        match result {
            Ok(compiled) => {
                self.timings.compiled.record(elapsed);
                lock(&self.cache).put(key, compiled.clone());
            }
            // No worker process could be started, so no compilation was attempted.
            Err(GrammarError::WorkerUnavailable { .. }) => {}
            Err(_) => self.timings.rejected.record(elapsed),
        }
    }

    /// Returns the compiler, which the first call creates from the vocabulary.
    ///
    /// Errors: grammars cannot be enforced with this vocabulary.
    pub(super) fn compiler_context(&self) -> Result<&CompilerContext, GrammarError> {
        let result =
            self.compiler_context.get_or_init(|| CompilerContext::new((self.vocabulary)()));
        result.as_ref().map_err(|reason| GrammarError::Invalid(reason.clone()))
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
        let queue = CompileQueue::new(|| unreachable!("nothing is compiled"), Arc::default());
        let (results_tx, results_rx) = mpsc::channel();
        let queued_early =
            Instant::now().checked_sub(QUEUE_TIME).expect("the machine has run for seconds");
        for (key, queued_at) in [("early", queued_early), ("late", Instant::now())] {
            let constraint =
                Arc::new(OutputConstraint::new(GrammarSpec::Regex("a".to_owned()), "regex"));
            let results_tx = results_tx.clone();
            let reply: CompileCallback =
                Box::new(move |result| results_tx.send(result.map(drop)).unwrap());
            queue.add(CompileJob { constraint, key: key.to_owned(), reply, queued_at });
        }
        assert_eq!(queue.next().unwrap().key, "late");
        let rejected = results_rx.try_recv().unwrap().unwrap_err();
        let limit = QUEUE_TIME.as_millis() as u64;
        assert!(
            matches!(rejected, GrammarError::QueueTimeout { waited_ms, limit_ms } if waited_ms >= limit && limit_ms == limit),
            "{rejected}"
        );
        assert!(results_rx.try_recv().is_err(), "the second job is not rejected");
    }
}
