//! The end of a server: drain, second signal, failed engine.

use super::engine_thread::Notice;
use super::host::Host;
use crate::server::app::App;
use crate::server::listen::Connections;
use scheduler::{AbortCause, Finish, StepStats};
use std::process::ExitCode;
use std::sync::mpsc::{Receiver, RecvTimeoutError};
use std::time::{Duration, Instant};
use tokio::runtime::Handle;

/// How often a drain looks whether it is done.
const POLL: Duration = Duration::from_millis(10);
/// Time for the last bytes of streams that were ended.
const FLUSH: Duration = Duration::from_millis(1_500);
/// Exit code after a failure at run time.
pub const FATAL: u8 = 3;

/// Waits for the first reason to stop, then stops. Returns the process's exit code.
pub fn wait(
    app: &App,
    host: Host,
    connections: &Connections,
    notices: &Receiver<Notice>,
    timeout: Duration,
    runtime: &Handle,
) -> ExitCode {
    match notices.recv() {
        Ok(Notice::Signal(number)) => {
            tracing::info!(signal = number, "draining");
            drain(app, host, connections, notices, timeout, runtime)
        }
        Ok(Notice::EngineFailed(text)) => fail(&text, connections, runtime),
        Err(_) => fail("nobody watches this process any more", connections, runtime),
    }
}

/// Lets streams run out, ends the rest at the deadline.
fn drain(
    app: &App,
    host: Host,
    connections: &Connections,
    notices: &Receiver<Notice>,
    timeout: Duration,
    runtime: &Handle,
) -> ExitCode {
    app.health.set_draining();
    let deadline = Instant::now() + timeout;
    let busy = || host.client.requests_in_flight() > 0 || host.client.admission().requests() > 0;
    while busy() && Instant::now() < deadline {
        match notices.recv_timeout(POLL) {
            Ok(Notice::Signal(number)) => return at_once(number),
            Ok(Notice::EngineFailed(text)) => return fail(&text, connections, runtime),
            Err(RecvTimeoutError::Timeout | RecvTimeoutError::Disconnected) => {}
        }
    }
    host.client.end_all(&Finish::Abort(AbortCause::Drain));
    let closing =
        runtime.block_on(async { tokio::time::timeout(FLUSH, connections.close()).await });
    if closing.is_err() {
        tracing::warn!("some connections did not take their last bytes");
    }
    if let Ok(Notice::Signal(number)) = notices.try_recv() {
        return at_once(number);
    }
    report(&host.client.stats());
    host.stop();
    ExitCode::SUCCESS
}

/// What was done over the life of the process, in one line.
fn report(stats: &StepStats) {
    tracing::info!(
        steps = stats.steps_total,
        prompt_tokens = stats.prompt_tokens_total,
        generated_tokens = stats.generated_tokens_total,
        prefix_hits = stats.prefix_hits_total,
        preemptions = stats.preemptions_total,
        "drained"
    );
}

fn at_once(number: i32) -> ExitCode {
    tracing::warn!(signal = number, "second signal: stopping at once");
    ExitCode::from(128_u8.saturating_add(number as u8))
}

/// Every request has been ended already; their last bytes get a moment.
fn fail(text: &str, connections: &Connections, runtime: &Handle) -> ExitCode {
    tracing::error!(text, "fatal");
    let _ = runtime.block_on(async { tokio::time::timeout(FLUSH, connections.close()).await });
    ExitCode::from(FATAL)
}
