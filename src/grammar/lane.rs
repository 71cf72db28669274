//! One of the threads on which grammars are compiled, with the process that it tries them in.

use super::compile::{Compiled, Compiler, Findings, GrammarError};
use super::constraint::Constraint;
use super::limits::COMPILE_STACK_BYTES;
use super::pool::{Desk, Job, Tools};
use super::trial::TrialProcess;
use super::yield_to_others;
use crate::worker_process::WorkerProgram;
use std::panic::{AssertUnwindSafe, catch_unwind};
use std::sync::Arc;
use std::thread;
use std::time::Instant;

/// A lane: never busy for longer than a trial, and the same again for what has passed it.
pub(super) struct Lane {
    desk: Arc<Desk>,
    program: WorkerProgram,
    /// Started with the first grammar of this lane.
    process: Option<TrialProcess>,
}

impl Lane {
    pub(super) fn new(desk: Arc<Desk>, program: WorkerProgram) -> Self {
        Self { desk, program, process: None }
    }

    /// Compiles what waits, until the desk is closed.
    pub(super) fn run(mut self) {
        while let Some(job) = self.desk.next() {
            if catch_unwind(AssertUnwindSafe(|| self.serve(job))).is_err() {
                tracing::error!("a thread that compiles grammars panicked");
            }
        }
    }

    fn serve(&mut self, job: Job) {
        let Job { constraint, key, reply, .. } = job;
        // Another request may have brought the same text meanwhile.
        if let Some(known) = self.desk.known(&key) {
            return reply(Ok(known));
        }
        let since = Instant::now();
        let made = self.compile(&constraint);
        self.desk.note(key, &made, since.elapsed());
        reply(made);
        self.renew();
    }

    fn compile(&mut self, constraint: &Arc<Constraint>) -> Result<Compiled, GrammarError> {
        let desk = Arc::clone(&self.desk);
        let tools = desk.tools()?;
        let findings = self.try_out(tools, constraint)?;
        compile_aside(&tools.compiler, constraint, findings)
    }

    /// Tries a grammar in the lane's process, and in another one if that ends: the system ends these processes first
    /// where others take its memory, which is no fault of the grammar.
    fn try_out(
        &mut self,
        tools: &Tools,
        constraint: &Arc<Constraint>,
    ) -> Result<Findings, GrammarError> {
        match self.try_once(tools, constraint) {
            Err(GrammarError::Fatal { .. }) => self.try_once(tools, constraint),
            tried => tried,
        }
    }

    fn try_once(
        &mut self,
        tools: &Tools,
        constraint: &Arc<Constraint>,
    ) -> Result<Findings, GrammarError> {
        self.process.take_if(|process| !process.is_alive());
        let process = match &mut self.process {
            Some(process) => process,
            none => none.insert(start(&self.program, tools, false)?),
        };
        process.ask(constraint)?
    }

    /// Puts another process in the place of one that was killed: the next grammar need not wait for it, and whoever
    /// has one killed after the other takes nothing from others by it.
    fn renew(&mut self) {
        let lost = self.process.take_if(|process| !process.is_alive());
        if lost.is_some()
            && let Ok(tools) = self.desk.tools()
        {
            drop(lost);
            self.process = start(&self.program, tools, true).ok();
        }
    }
}

/// Compiles on a thread of little priority. The lane itself has none to spare: what it starts inherits it.
fn compile_aside(
    compiler: &Compiler,
    constraint: &Constraint,
    findings: Findings,
) -> Result<Compiled, GrammarError> {
    let work = || {
        yield_to_others();
        compiler.compile(constraint, findings)
    };
    thread::scope(|scope| {
        let named = thread::Builder::new().name("grammar-compile".to_owned());
        let thread = named.stack_size(COMPILE_STACK_BYTES).spawn_scoped(scope, work);
        let lost = |cause: String| GrammarError::NoTrials { cause };
        let thread = thread.map_err(|error| lost(error.to_string()))?;
        thread.join().unwrap_or_else(|_| Err(lost("the compiler panicked".to_owned())))
    })
}

fn start(
    program: &WorkerProgram,
    tools: &Tools,
    yields: bool,
) -> Result<TrialProcess, GrammarError> {
    TrialProcess::start(program, &tools.vocabulary_frame, yields).map_err(|error| {
        tracing::error!(%error, ?program, "grammars cannot be tried");
        GrammarError::NoTrials { cause: error.to_string() }
    })
}
