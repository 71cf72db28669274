//! `hadron template-worker`: a process that renders the template of one request for the server that started it.

use super::child_process::{OWN_BINARY, link_to_server};
use crate::text::serve_templates;
use crate::worker_process::WorkerProgram;
use anyhow::{Context, Result};
use std::process::ExitCode;

const ROLE: &str = "template-worker";

/// What a server starts.
pub fn program() -> WorkerProgram {
    WorkerProgram { path: OWN_BINARY.into(), args: vec![ROLE.into()] }
}

/// Renders one template.
pub fn run() -> Result<ExitCode> {
    serve_templates(link_to_server(ROLE)?).context("cannot render a template")?;
    Ok(ExitCode::SUCCESS)
}
