//! Worker process: performs dry runs of grammars until the server closes the connection.

use super::message::{GrammarWorkerReply, GrammarWorkerRequest, VocabularyMessage};
use super::starvation_watchdog::{DryRunVerdictSender, GrammarDryRun, take_over_starved};
use crate::compile::GrammarCompiler;
use crate::limits::{DRY_RUN_STACK_BYTES, WORKER_BYTES};
use crate::lower_priority;
use crate::vocabulary::GrammarVocabulary;
use crate::worker_process::{EPOCH, limit_memory};
use protocol::link::{FrameReader, FrameWriter, LinkError, LinkSocket};
use std::panic::{AssertUnwindSafe, catch_unwind};
use std::sync::Arc;
use std::{io, process, thread};
use thread_priority::{
    NormalThreadSchedulePolicy, ThreadPriority, ThreadSchedulePolicy,
    set_thread_priority_and_policy, thread_native_id,
};

/// Number of threads that perform dry runs (test compilations of grammars). Each thread has a stack of
/// `DRY_RUN_STACK_BYTES`.
const THREADS: u64 = 2;

/// Performs dry runs for the server connected to `stream`, with low priority and limited memory. Returns when
/// the server closes the connection.
///
/// Errors: the limits cannot be set, or the connection fails.
#[expect(clippy::disallowed_methods, reason = "the thread ends with the connection")]
pub fn serve(stream: LinkSocket) -> io::Result<()> {
    limit_memory(THREADS * DRY_RUN_STACK_BYTES as u64 + WORKER_BYTES)?;
    let work = move || match serve_requests(stream) {
        Ok(()) | Err(LinkError::Closed) => Ok(()),
        Err(error) => Err(io::Error::other(error)),
    };
    let builder = thread::Builder::new().name("grammar-dry-run".to_owned());
    let thread = builder.stack_size(DRY_RUN_STACK_BYTES).spawn(work)?;
    thread.join().unwrap_or_else(|_| Err(io::Error::other("the dry-run thread panicked")))
}

fn serve_requests(stream: LinkSocket) -> Result<(), LinkError> {
    let io_error = |error: io::Error| LinkError::Io(error.kind());
    let writer = FrameWriter::new(stream.try_clone().map_err(io_error)?, EPOCH);
    let verdicts = Arc::new(DryRunVerdictSender::new(writer));
    let mut reader = FrameReader::<_, GrammarWorkerRequest>::new(stream, EPOCH);
    let mut compiler = None;
    while let Some(message) = reader.receive()? {
        match (message, &compiler) {
            (GrammarWorkerRequest::LowerPriority, _) => lower_priority(),
            (GrammarWorkerRequest::Vocabulary(message), _) => {
                // The server has already created a compiler from the same vocabulary, so an error here means
                // that the peer is not a server.
                let new_compiler =
                    GrammarCompiler::new(vocabulary(message)).map_err(|_| LinkError::Closed)?;
                let new_compiler = compiler.insert(Arc::new(new_compiler));
                start_starvation_watchdog(new_compiler, &verdicts).map_err(io_error)?;
                set_idle_priority(); // From here on, the thread runs grammars of clients.
                verdicts.send(GrammarWorkerReply::Ready)?;
            }
            (GrammarWorkerRequest::Constraint(constraint), Some(compiler)) => {
                let dry_run = Arc::new(GrammarDryRun::begin(constraint));
                verdicts.begin(&dry_run);
                verdicts.report_verdict(&dry_run, compiler.dry_run(&dry_run.constraint))?;
            }
            (GrammarWorkerRequest::Constraint(_), None) => return Err(LinkError::Closed),
        }
    }
    Ok(())
}

/// Starts the watchdog thread, which repeats a dry run (test compilation) if the idle-priority thread gets
/// no processor time.
fn start_starvation_watchdog(
    compiler: &Arc<GrammarCompiler>,
    verdicts: &Arc<DryRunVerdictSender<LinkSocket>>,
) -> io::Result<()> {
    let (compiler, verdicts) = (Arc::clone(compiler), Arc::clone(verdicts));
    let work = move || {
        lower_priority();
        take_over_starved(&verdicts, |dry_run| compiler.dry_run(&dry_run.constraint))
    };
    let builder = thread::Builder::new().name("grammar-watch".to_owned());
    builder.stack_size(DRY_RUN_STACK_BYTES).spawn(|| {
        // The thread is never joined. If it panicked without an abort of the process, the server would wait
        // for a result until its timeout. When the server closes the connection, the process exits even if
        // this thread is running.
        if catch_unwind(AssertUnwindSafe(work)).is_err() {
            process::abort();
        }
    })?;
    Ok(())
}

/// Gives this thread the idle scheduling policy. This is permanent, because the system does not allow an
/// unprivileged thread to raise its priority.
fn set_idle_priority() {
    let policy = ThreadSchedulePolicy::Normal(NormalThreadSchedulePolicy::Idle);
    let idle = set_thread_priority_and_policy(thread_native_id(), ThreadPriority::Min, policy);
    if let Err(error) = idle {
        tracing::debug!(%error, "the idle scheduling policy is not available for dry runs");
    }
    lower_priority();
}

fn vocabulary(message: VocabularyMessage) -> GrammarVocabulary {
    let VocabularyMessage { tokens, special, end_ids } = message;
    GrammarVocabulary { tokens, special, end_ids, encode: Arc::new(|_| None) }
}
