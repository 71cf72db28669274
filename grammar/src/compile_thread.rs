//! Thread that compiles grammars, with its worker process for dry runs.

use super::compile::{CompiledGrammar, DryRunReport, GrammarCompiler, GrammarError};
use super::compile_pool::{CompileJob, CompileQueue, CompilerContext};
use super::constraint::OutputConstraint;
use super::limits::COMPILE_STACK_BYTES;
use super::worker::GrammarWorkerProcess;
use super::yield_to_others;
use crate::worker_process::WorkerProgram;
use std::panic::{AssertUnwindSafe, catch_unwind};
use std::sync::Arc;
use std::thread;
use std::time::Instant;

/// Compile thread. A job occupies it for at most one dry run, and about as long again for the compilation.
pub(super) struct CompileThread {
    queue: Arc<CompileQueue>,
    program: WorkerProgram,
    /// Worker process, started by the first job of this thread.
    process: Option<GrammarWorkerProcess>,
}

impl CompileThread {
    pub(super) fn new(desk: Arc<CompileQueue>, program: WorkerProgram) -> Self {
        Self { queue: desk, program, process: None }
    }

    /// Compiles queued jobs until the queue is closed.
    pub(super) fn run(mut self) {
        while let Some(job) = self.queue.next() {
            if catch_unwind(AssertUnwindSafe(|| self.handle_job(job))).is_err() {
                tracing::error!("a thread that compiles grammars panicked");
            }
        }
    }

    fn handle_job(&mut self, job: CompileJob) {
        let CompileJob { constraint, key, reply, .. } = job;
        // Another request may have compiled the same constraint meanwhile.
        if let Some(known) = self.queue.cached(&key) {
            return reply(Ok(known));
        }
        let since = Instant::now();
        let made = self.compile(&constraint);
        self.queue.record(key, &made, since.elapsed());
        reply(made);
        self.restart_process();
    }

    fn compile(
        &mut self,
        constraint: &Arc<OutputConstraint>,
    ) -> Result<CompiledGrammar, GrammarError> {
        let desk = Arc::clone(&self.queue);
        let tools = desk.compiler_context()?;
        let findings = self.dry_run(tools, constraint)?;
        compile_at_low_priority(&tools.compiler, constraint, findings)
    }

    /// Runs a dry run in the worker process, and repeats it in a new one if the worker ends: the system's
    /// out-of-memory killer ends worker processes first, which is not the fault of the grammar.
    fn dry_run(
        &mut self,
        tools: &CompilerContext,
        constraint: &Arc<OutputConstraint>,
    ) -> Result<DryRunReport, GrammarError> {
        match self.dry_run_once(tools, constraint) {
            Err(GrammarError::WorkerCrashed { .. }) => self.dry_run_once(tools, constraint),
            tried => tried,
        }
    }

    fn dry_run_once(
        &mut self,
        tools: &CompilerContext,
        constraint: &Arc<OutputConstraint>,
    ) -> Result<DryRunReport, GrammarError> {
        self.process.take_if(|process| !process.is_alive());
        let process = match &mut self.process {
            Some(process) => process,
            none => none.insert(start_worker(&self.program, tools, false)?),
        };
        process.dry_run(constraint)?
    }

    /// Replaces a worker process that was killed, with low priority, so that the next grammar does not wait
    /// for the start. A client that gets one worker process after the other killed takes no processor time
    /// from other requests.
    fn restart_process(&mut self) {
        let lost = self.process.take_if(|process| !process.is_alive());
        if lost.is_some()
            && let Ok(tools) = self.queue.compiler_context()
        {
            drop(lost);
            self.process = start_worker(&self.program, tools, true).ok();
        }
    }
}

/// Compiles on a new thread of low priority. The compile thread itself keeps its priority, because threads
/// and processes that it starts inherit it.
fn compile_at_low_priority(
    compiler: &GrammarCompiler,
    constraint: &OutputConstraint,
    findings: DryRunReport,
) -> Result<CompiledGrammar, GrammarError> {
    let work = || {
        yield_to_others();
        compiler.compile(constraint, findings)
    };
    thread::scope(|scope| {
        let named = thread::Builder::new().name("grammar-compile".to_owned());
        let thread = named.stack_size(COMPILE_STACK_BYTES).spawn_scoped(scope, work);
        let lost = |cause: String| GrammarError::WorkerUnavailable { cause };
        let thread = thread.map_err(|error| lost(error.to_string()))?;
        thread.join().unwrap_or_else(|_| Err(lost("the compiler panicked".to_owned())))
    })
}

fn start_worker(
    program: &WorkerProgram,
    tools: &CompilerContext,
    yields: bool,
) -> Result<GrammarWorkerProcess, GrammarError> {
    GrammarWorkerProcess::start(program, &tools.vocabulary_frame, yields).map_err(|error| {
        tracing::error!(%error, ?program, "grammars cannot be tried");
        GrammarError::WorkerUnavailable { cause: error.to_string() }
    })
}
