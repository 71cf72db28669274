//! `hadron template-worker`: process that renders the chat template of one request for the server.

use super::child_process::{OWN_BINARY, link_to_server};
use crate::config::SECRET_VARIABLE;
use anyhow::{Context, Result};
use grammar::worker_process::WorkerProgram;
use std::process::ExitCode;
use text::serve_templates;

const ROLE: &str = "template-worker";

/// Returns the command with which the server starts template worker processes.
pub fn program() -> WorkerProgram {
    WorkerProgram {
        path: OWN_BINARY.into(),
        args: vec![ROLE.into()],
        secret_variable: SECRET_VARIABLE,
    }
}

/// Renders one template. Returns the exit code of the process.
pub fn run() -> Result<ExitCode> {
    serve_templates(link_to_server(ROLE)?).context("cannot render a template")?;
    Ok(ExitCode::SUCCESS)
}
