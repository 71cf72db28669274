//! The child's end: tries what it is sent until the server is gone.

use super::message::{FromTrial, ToTrial, Words};
use super::watch::{Desk, Trial, watch};
use crate::grammar::compile::Compiler;
use crate::grammar::limits::{TRIAL_BYTES, TRIAL_STACK_BYTES};
use crate::grammar::vocabulary::Vocabulary;
use crate::grammar::yield_to_others;
use crate::worker_process::{EPOCH, limit_memory};
use protocol::link::{FrameReader, FrameWriter, LinkError, Socket};
use std::panic::{AssertUnwindSafe, catch_unwind};
use std::sync::Arc;
use std::{io, process, thread};
use thread_priority::{
    NormalThreadSchedulePolicy, ThreadPriority, ThreadSchedulePolicy,
    set_thread_priority_and_policy, thread_native_id,
};

/// Threads with stacks for grammars.
const THREADS: u64 = 2;

/// Tries grammars for the server at the other end of `stream`, with less of the processor and of memory than others.
/// Returns once the server is gone.
///
/// Errors: the process cannot be confined, or the link fails.
pub fn serve(stream: Socket) -> io::Result<()> {
    limit_memory(THREADS * TRIAL_STACK_BYTES as u64 + TRIAL_BYTES)?;
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

fn answer(stream: Socket) -> Result<(), LinkError> {
    let failed = |error: io::Error| LinkError::Io(error.kind());
    let to = FrameWriter::new(stream.try_clone().map_err(failed)?, EPOCH);
    let desk = Arc::new(Desk::new(to));
    let mut from = FrameReader::<_, ToTrial>::new(stream, EPOCH);
    let mut compiler = None;
    while let Some(message) = from.receive()? {
        match (message, &compiler) {
            (ToTrial::Yield, _) => yield_to_others(),
            (ToTrial::Vocabulary(words), _) => {
                // The server has found the same compiler usable: else it is no server.
                let made = Compiler::new(vocabulary(words)).map_err(|_| LinkError::Closed)?;
                let made = compiler.insert(Arc::new(made));
                start_watch(made, &desk).map_err(failed)?;
                idle(); // What comes next is not the server's own.
                desk.send(FromTrial::Ready)?;
            }
            (ToTrial::Constraint(constraint), Some(compiler)) => {
                let trial = Arc::new(Trial::begun(constraint));
                desk.begin(&trial);
                desk.tell(&trial, compiler.try_out(&trial.constraint))?;
            }
            (ToTrial::Constraint(_), None) => return Err(LinkError::Closed),
        }
    }
    Ok(())
}

/// Starts the thread that tries what this one gets no processor for.
fn start_watch(compiler: &Arc<Compiler>, desk: &Arc<Desk<Socket>>) -> io::Result<()> {
    let (compiler, desk) = (Arc::clone(compiler), Arc::clone(desk));
    let work = move || {
        yield_to_others();
        watch(&desk, |trial| compiler.try_out(&trial.constraint))
    };
    let named = thread::Builder::new().name("grammar-watch".to_owned());
    named.stack_size(TRIAL_STACK_BYTES).spawn(|| {
        // Nobody joins it, and the server would wait for a verdict. Without a server all ends anyway.
        if catch_unwind(AssertUnwindSafe(work)).is_err() {
            process::abort();
        }
    })?;
    Ok(())
}

/// Lets everybody else go before this thread, for good: the system does not give back to anybody what this gives up.
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
