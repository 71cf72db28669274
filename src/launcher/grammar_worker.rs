//! `hadron grammar-worker`: process that performs dry runs of grammars for the server. A dry run compiles a
//! grammar and runs it on sample tokens to measure its cost.

use super::child_process::{OWN_BINARY, link_to_server};
use super::signals::NonFatalSignals;
use crate::config::{LogFormat, SECRET_VARIABLE};
use anyhow::{Context, Result};
use grammar::serve_dry_runs;
use grammar::worker_process::WorkerProgram;
use std::process::ExitCode;
use tokio::signal::unix::{SignalKind, signal};

const ROLE: &str = "grammar-worker";

/// Returns the command with which the server starts grammar worker processes.
pub fn program(log: LogFormat) -> WorkerProgram {
    let args = [ROLE, "--log-format", log.name()];
    WorkerProgram {
        path: OWN_BINARY.into(),
        args: args.map(Into::into).into(),
        secret_variable: SECRET_VARIABLE,
    }
}

/// Compiles grammars and runs them on sample tokens, to measure their cost, until the server closes the link.
/// Returns the exit code of the process.
pub fn run() -> Result<ExitCode> {
    let link = link_to_server(ROLE)?;
    let runtime = tokio::runtime::Builder::new_current_thread().enable_all().build()?;
    // Terminals and supervisors send signals to the whole process group. The server handles them, so this
    // process ignores them.
    let runtime_guard = runtime.enter();
    let _ignored = [
        signal(SignalKind::interrupt())?,
        signal(SignalKind::terminate())?,
        signal(SignalKind::quit())?,
    ];
    let _harmless = NonFatalSignals::catch()?;
    drop(runtime_guard);
    serve_dry_runs(link).context("grammar worker failed")?;
    Ok(ExitCode::SUCCESS)
}
