//! Worker process: runs dry runs of grammars until the server closes the connection.

use super::message::{GrammarWorkerReply, GrammarWorkerRequest, VocabularyMessage};
use super::starvation_watchdog::{DryRunVerdicts, GrammarDryRun, take_over_starved};
use crate::compile::GrammarCompiler;
use crate::limits::{DRY_RUN_STACK_BYTES, WORKER_BYTES};
use crate::vocabulary::GrammarVocabulary;
use crate::worker_process::{EPOCH, limit_memory};
use crate::yield_to_others;
use protocol::link::{FrameReader, FrameWriter, LinkError, LinkSocket};
use std::panic::{AssertUnwindSafe, catch_unwind};
use std::sync::Arc;
use std::{io, process, thread};
use thread_priority::{
    NormalThreadSchedulePolicy, ThreadPriority, ThreadSchedulePolicy,
    set_thread_priority_and_policy, thread_native_id,
};

/// Number of threads with stacks for grammars.
const THREADS: u64 = 2;

/// Runs dry runs for the server at the other end of `stream`, with low priority and limited memory. Returns
/// when the server closes the connection.
///
/// Errors: the limits cannot be set, or the connection fails.
pub fn serve(stream: LinkSocket) -> io::Result<()> {
    limit_memory(THREADS * DRY_RUN_STACK_BYTES as u64 + WORKER_BYTES)?;
    let work = move || match serve_requests(stream) {
        Ok(()) | Err(LinkError::Closed) => Ok(()),
        Err(error) => Err(io::Error::other(error)),
    };
    let named = thread::Builder::new().name("grammar-trial".to_owned());
    let thread = named.stack_size(DRY_RUN_STACK_BYTES).spawn(work)?;
    thread
        .join()
        .unwrap_or_else(|_| Err(io::Error::other("the thread that tries grammars panicked")))
}

fn serve_requests(stream: LinkSocket) -> Result<(), LinkError> {
    let failed = |error: io::Error| LinkError::Io(error.kind());
    let to = FrameWriter::new(stream.try_clone().map_err(failed)?, EPOCH);
    let desk = Arc::new(DryRunVerdicts::new(to));
    let mut from = FrameReader::<_, GrammarWorkerRequest>::new(stream, EPOCH);
    let mut compiler = None;
    while let Some(message) = from.receive()? {
        match (message, &compiler) {
            (GrammarWorkerRequest::LowerPriority, _) => yield_to_others(),
            (GrammarWorkerRequest::Vocabulary(words), _) => {
                // The server has created a compiler from an equal vocabulary. If this fails, the peer is not
                // a server.
                let made =
                    GrammarCompiler::new(vocabulary(words)).map_err(|_| LinkError::Closed)?;
                let made = compiler.insert(Arc::new(made));
                start_starvation_watchdog(made, &desk).map_err(failed)?;
                set_idle_priority(); // Dry runs of client grammars follow.
                desk.send(GrammarWorkerReply::Ready)?;
            }
            (GrammarWorkerRequest::Constraint(constraint), Some(compiler)) => {
                let trial = Arc::new(GrammarDryRun::begin(constraint));
                desk.begin(&trial);
                desk.report_verdict(&trial, compiler.dry_run(&trial.constraint))?;
            }
            (GrammarWorkerRequest::Constraint(_), None) => return Err(LinkError::Closed),
        }
    }
    Ok(())
}

/// Starts the thread that takes over dry runs for which this thread gets no processor time.
fn start_starvation_watchdog(
    compiler: &Arc<GrammarCompiler>,
    desk: &Arc<DryRunVerdicts<LinkSocket>>,
) -> io::Result<()> {
    let (compiler, desk) = (Arc::clone(compiler), Arc::clone(desk));
    let work = move || {
        yield_to_others();
        take_over_starved(&desk, |trial| compiler.dry_run(&trial.constraint))
    };
    let named = thread::Builder::new().name("grammar-watch".to_owned());
    named.stack_size(DRY_RUN_STACK_BYTES).spawn(|| {
        // The thread is never joined, and the server would wait for a verdict. When the server closes the
        // connection, the process ends anyway.
        if catch_unwind(AssertUnwindSafe(work)).is_err() {
            process::abort();
        }
    })?;
    Ok(())
}

/// Sets the idle scheduling policy of this thread permanently: the system does not allow an unprivileged
/// thread to raise its priority again.
fn set_idle_priority() {
    let policy = ThreadSchedulePolicy::Normal(NormalThreadSchedulePolicy::Idle);
    let idle = set_thread_priority_and_policy(thread_native_id(), ThreadPriority::Min, policy);
    if let Err(error) = idle {
        tracing::debug!(%error, "grammars are tried while others need the processor");
    }
    yield_to_others();
}

fn vocabulary(words: VocabularyMessage) -> GrammarVocabulary {
    let VocabularyMessage { tokens, special, end_ids: ends } = words;
    GrammarVocabulary { tokens, special, end_ids: ends, encode: Arc::new(|_| None) }
}
