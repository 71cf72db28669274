//! Thread that compiles grammars, and its worker process, in which each grammar is test-compiled first (dry
//! run).

use super::compile::{CompiledGrammar, DryRunReport, GrammarCompiler, GrammarError};
use super::compile_pool::{CompileJob, CompileQueue, CompilerContext};
use super::constraint::OutputConstraint;
use super::limits::COMPILE_STACK_BYTES;
use super::lower_priority;
use super::worker::GrammarWorkerProcess;
use crate::worker_process::WorkerProgram;
use std::panic::{AssertUnwindSafe, catch_unwind};
use std::sync::Arc;
use std::thread;
use std::time::Instant;

/// Thread that compiles queued grammars. Each grammar occupies the thread for its dry run (test compilation
/// in a worker process) and for its compilation, which takes about as long as the dry run.
pub(super) struct CompileThread {
    queue: Arc<CompileQueue>,
    program: WorkerProgram,
    /// Worker process, started for the first job of this thread.
    process: Option<GrammarWorkerProcess>,
}

impl CompileThread {
    pub(super) fn new(queue: Arc<CompileQueue>, program: WorkerProgram) -> Self {
        Self { queue, program, process: None }
    }

    /// Compiles queued jobs until the queue is closed.
    pub(super) fn run(mut self) {
        while let Some(job) = self.queue.next() {
            if catch_unwind(AssertUnwindSafe(|| self.handle_job(job))).is_err() {
                tracing::error!("grammar compile thread panicked");
            }
        }
    }

    fn handle_job(&mut self, job: CompileJob) {
        let CompileJob { constraint, key, reply, .. } = job;
        // Another request may have compiled the same constraint while this job was queued.
        if let Some(compiled) = self.queue.cached(&key) {
            return reply(Ok(compiled));
        }
        let start = Instant::now();
        let result = self.compile(&constraint);
        self.queue.record(key, &result, start.elapsed());
        reply(result);
        self.restart_process();
    }

    fn compile(
        &mut self,
        constraint: &Arc<OutputConstraint>,
    ) -> Result<CompiledGrammar, GrammarError> {
        let queue = Arc::clone(&self.queue);
        let context = queue.compiler_context()?;
        let report = self.dry_run(context, constraint)?;
        compile_at_low_priority(&context.compiler, constraint, report)
    }

    /// Performs the dry run (test compilation) of a constraint in the worker process. If the worker exits,
    /// the dry run is repeated once in a new worker: the system's out-of-memory killer kills worker
    /// processes first, even if the grammar is not the cause.
    fn dry_run(
        &mut self,
        context: &CompilerContext,
        constraint: &Arc<OutputConstraint>,
    ) -> Result<DryRunReport, GrammarError> {
        match self.dry_run_once(context, constraint) {
            Err(GrammarError::WorkerCrashed { .. }) => self.dry_run_once(context, constraint),
            result => result,
        }
    }

    fn dry_run_once(
        &mut self,
        context: &CompilerContext,
        constraint: &Arc<OutputConstraint>,
    ) -> Result<DryRunReport, GrammarError> {
        self.process.take_if(|process| !process.is_alive());
        let process = match &mut self.process {
            Some(process) => process,
            empty => empty.insert(start_worker(&self.program, context, false)?),
        };
        process.dry_run(constraint)?
    }

    /// Starts a new worker process if the previous one was killed, so that the next grammar does not wait for
    /// the start. The new process starts with low priority, so that a client whose grammars repeatedly get
    /// workers killed takes no processor time from other requests.
    fn restart_process(&mut self) {
        let exited = self.process.take_if(|process| !process.is_alive());
        if exited.is_some()
            && let Ok(context) = self.queue.compiler_context()
        {
            drop(exited);
            self.process = start_worker(&self.program, context, true).ok();
        }
    }
}

/// Compiles on a new thread with low priority. The compile thread itself keeps its priority, because the
/// threads and processes that it starts inherit its priority.
fn compile_at_low_priority(
    compiler: &GrammarCompiler,
    constraint: &OutputConstraint,
    report: DryRunReport,
) -> Result<CompiledGrammar, GrammarError> {
    let work = || {
        lower_priority();
        compiler.compile(constraint, report)
    };
    thread::scope(|scope| {
        let builder = thread::Builder::new().name("grammar-compile".to_owned());
        let thread = builder.stack_size(COMPILE_STACK_BYTES).spawn_scoped(scope, work);
        let unavailable = |cause: String| GrammarError::WorkerUnavailable { cause };
        let thread = thread.map_err(|error| unavailable(error.to_string()))?;
        thread.join().unwrap_or_else(|_| Err(unavailable("the compiler panicked".to_owned())))
    })
}

fn start_worker(
    program: &WorkerProgram,
    context: &CompilerContext,
    low_priority: bool,
) -> Result<GrammarWorkerProcess, GrammarError> {
    GrammarWorkerProcess::start(program, &context.vocabulary_frame, low_priority).map_err(|error| {
        let program = program.path.display();
        tracing::error!(%error, %program, "grammar worker process cannot be started");
        GrammarError::WorkerUnavailable { cause: error.to_string() }
    })
}
