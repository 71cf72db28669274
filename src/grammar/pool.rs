//! Where grammars are compiled: threads apart from the server's and the scheduler's, few at a time, none for
//! longer than allowed.
//!
//! A thread cannot be stopped, so one whose grammar takes too long is given up: its request is refused, another
//! thread takes its place, and what it still finds is dropped. Until it ends it takes what others leave of the
//! processor.

use super::cache::Cache;
use super::compile::{Compiled, Compiler, GrammarError};
use super::constraint::Constraint;
use super::limits::{
    CACHE_BYTES, COMPILE_STACK_BYTES, COMPILE_TIME, COMPILING_MAX, QUEUE_TIME, THREADS_MAX,
    WAITING_MAX,
};
use super::timings::GrammarTimings;
use super::vocabulary::Vocabulary;
use super::{lock, yield_to_others};
use std::collections::VecDeque;
use std::io;
use std::panic::{AssertUnwindSafe, catch_unwind};
use std::sync::mpsc::{Receiver, RecvTimeoutError, Sender, channel};
use std::sync::{Arc, Mutex};
use std::thread;
use std::time::{Duration, Instant};

/// Sleep of a pool that has nothing to wait for.
const PATIENCE: Duration = Duration::from_mins(1);

/// Who hears of a grammar; called once, on a thread of the pool or on the caller's.
type Reply = Box<dyn FnOnce(Result<Compiled, GrammarError>) + Send>;

/// The compiler of one server.
pub struct Grammars {
    inbox: Sender<Order>,
    cache: Arc<Mutex<Cache>>,
    timings: Arc<GrammarTimings>,
}

enum Order {
    Compile(Job),
    /// The thread of this number has ended.
    Ended(u64),
    Stop,
}

struct Job {
    constraint: Constraint,
    reply: Reply,
    arrived: Instant,
}

impl Grammars {
    /// Starts the pool. `vocabulary` is asked for with the first grammar.
    ///
    /// Errors: the system gives no thread.
    pub fn start(
        vocabulary: impl FnOnce() -> Vocabulary + Send + 'static,
        timings: Arc<GrammarTimings>,
    ) -> io::Result<Self> {
        let (inbox, orders) = channel();
        let cache = Arc::new(Mutex::new(Cache::new(CACHE_BYTES)));
        let pool = Pool {
            again: inbox.clone(),
            cache: Arc::clone(&cache),
            timings: Arc::clone(&timings),
            compiler: None,
            waiting: VecDeque::new(),
            running: Vec::new(),
            given_up: 0,
            next: 0,
        };
        let pool = thread::Builder::new()
            .name("grammar-pool".to_owned())
            .spawn(move || pool.run(&orders, vocabulary));
        pool.map(|_| Self { inbox, cache, timings })
    }

    /// Compiles a constraint and tells `reply`, at once if it is known.
    pub fn compile(
        &self,
        constraint: Constraint,
        reply: impl FnOnce(Result<Compiled, GrammarError>) + Send + 'static,
    ) {
        let known = lock(&self.cache).get(&constraint.key());
        if let Some(compiled) = known {
            return reply(Ok(compiled));
        }
        let job = Job { constraint, reply: Box::new(reply), arrived: Instant::now() };
        // The pool lives as long as this; an order it cannot take is dropped, which its reply notices.
        let _ = self.inbox.send(Order::Compile(job));
    }

    /// What grammars took.
    pub fn timings(&self) -> &Arc<GrammarTimings> {
        &self.timings
    }
}

impl Drop for Grammars {
    fn drop(&mut self) {
        let _ = self.inbox.send(Order::Stop);
    }
}

/// Hands out jobs, and gives up those that take too long.
struct Pool {
    again: Sender<Order>,
    cache: Arc<Mutex<Cache>>,
    timings: Arc<GrammarTimings>,
    compiler: Option<Result<Arc<Compiler>, String>>,
    waiting: VecDeque<Job>,
    running: Vec<Running>,
    /// Threads that run on for nobody.
    given_up: usize,
    next: u64,
}

struct Running {
    number: u64,
    since: Instant,
    reply: SharedReply,
}

/// Whoever takes it first answers.
type SharedReply = Arc<Mutex<Option<Reply>>>;

impl Pool {
    fn run(mut self, orders: &Receiver<Order>, vocabulary: impl FnOnce() -> Vocabulary) {
        let mut vocabulary = Some(vocabulary);
        loop {
            match orders.recv_timeout(self.patience()) {
                Ok(Order::Compile(job)) => {
                    if let Some(vocabulary) = vocabulary.take() {
                        self.compiler = Some(Compiler::new(vocabulary()).map(Arc::new));
                    }
                    self.take(job);
                }
                Ok(Order::Ended(number)) => self.end(number),
                Err(RecvTimeoutError::Timeout) => {}
                Ok(Order::Stop) | Err(RecvTimeoutError::Disconnected) => return,
            }
            self.give_up_late();
            self.start_waiting();
        }
    }

    /// Time until somebody is late.
    fn patience(&self) -> Duration {
        let running = self.running.iter().map(|job| job.since + COMPILE_TIME);
        let waiting = self.waiting.front().map(|job| job.arrived + QUEUE_TIME);
        let first = running.chain(waiting).min();
        first.map_or(PATIENCE, |at| at.saturating_duration_since(Instant::now()))
    }

    fn take(&mut self, job: Job) {
        let waiting = self.waiting.len();
        if waiting >= WAITING_MAX {
            return (job.reply)(Err(GrammarError::Busy { waiting, limit: WAITING_MAX }));
        }
        self.waiting.push_back(job);
    }

    fn end(&mut self, number: u64) {
        match self.running.iter().position(|job| job.number == number) {
            Some(place) => drop(self.running.swap_remove(place)),
            None => self.given_up -= 1,
        }
    }

    fn give_up_late(&mut self) {
        let now = Instant::now();
        let (late, on_time): (Vec<_>, Vec<_>) =
            self.running.drain(..).partition(|job| now - job.since >= COMPILE_TIME);
        self.running = on_time;
        self.given_up += late.len();
        for job in late {
            tracing::warn!("a grammar takes too long to compile");
            self.timings.refused.note(COMPILE_TIME);
            answer(&job.reply, Err(GrammarError::TooSlow));
        }
        while self.waiting.front().is_some_and(|job| now - job.arrived >= QUEUE_TIME) {
            let waiting = self.waiting.len();
            let Some(job) = self.waiting.pop_front() else { return };
            (job.reply)(Err(GrammarError::Busy { waiting, limit: THREADS_MAX }));
        }
    }

    fn start_waiting(&mut self) {
        while self.running.len() < COMPILING_MAX
            && self.running.len() + self.given_up < THREADS_MAX
            && let Some(job) = self.waiting.pop_front()
        {
            self.start(job);
        }
    }

    fn start(&mut self, job: Job) {
        let compiler = match &self.compiler {
            Some(Ok(compiler)) => Arc::clone(compiler),
            Some(Err(reason)) => return (job.reply)(Err(GrammarError::Invalid(reason.clone()))),
            None => return,
        };
        let (number, since) = (self.next, Instant::now());
        self.next += 1;
        let reply: SharedReply = Arc::new(Mutex::new(Some(job.reply)));
        let work = Work {
            compiler,
            cache: Arc::clone(&self.cache),
            timings: Arc::clone(&self.timings),
            constraint: job.constraint,
            reply: Arc::clone(&reply),
        };
        let again = self.again.clone();
        let thread = thread::Builder::new()
            .name("grammar-compile".to_owned())
            .stack_size(COMPILE_STACK_BYTES)
            .spawn(move || {
                yield_to_others();
                let reply = Arc::clone(&work.reply);
                if catch_unwind(AssertUnwindSafe(|| work.run())).is_err() {
                    tracing::error!("a thread that compiles grammars panicked");
                    let refusal =
                        GrammarError::Invalid("the grammar cannot be compiled".to_owned());
                    answer(&reply, Err(refusal));
                }
                // A pool that is gone counts no threads.
                let _ = again.send(Order::Ended(number));
            });
        match thread {
            Ok(_) => self.running.push(Running { number, since, reply }),
            Err(error) => {
                tracing::error!(%error, "no thread for a grammar");
                answer(&reply, Err(GrammarError::Busy { waiting: 1, limit: 0 }));
            }
        }
    }
}

/// What one thread does.
struct Work {
    compiler: Arc<Compiler>,
    cache: Arc<Mutex<Cache>>,
    timings: Arc<GrammarTimings>,
    constraint: Constraint,
    reply: SharedReply,
}

impl Work {
    fn run(self) {
        let key = self.constraint.key();
        // Another request may have brought the same text meanwhile.
        let known = lock(&self.cache).get(&key);
        if let Some(compiled) = known {
            return answer(&self.reply, Ok(compiled));
        }
        let since = Instant::now();
        let made = self.compiler.compile(&self.constraint);
        let took = since.elapsed();
        if took >= COMPILE_TIME {
            return answer(&self.reply, Err(GrammarError::TooSlow));
        }
        match &made {
            Ok(compiled) => {
                self.timings.compiled.note(took);
                lock(&self.cache).put(key, compiled.clone());
            }
            Err(_) => self.timings.refused.note(took),
        }
        answer(&self.reply, made);
    }
}

fn answer(reply: &SharedReply, result: Result<Compiled, GrammarError>) {
    let reply = lock(reply).take();
    if let Some(reply) = reply {
        reply(result);
    }
}
