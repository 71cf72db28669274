//! `hadron eval`: checks the outputs of a server. All checks use the OpenAI HTTP API, so they work with any
//! server that implements it.

mod agreement;
mod equal;
mod fixture;
mod golden;
mod logprobs;
mod questions;
mod tasks;

use std::future::Future;
use std::process::ExitCode;

use anyhow::Result;

use crate::config::{EvalCommand, ProcessEnvironment};

/// Runs one check. A check that fails returns exit code 1, not an error.
pub fn run(command: EvalCommand, environment: &ProcessEnvironment) -> Result<ExitCode> {
    let passed = match command {
        EvalCommand::Tasks(args) => block_on(tasks::run(&args, environment)),
        EvalCommand::Golden(args) => match &args.write_model {
            Some(dir) => golden::write_model(&args.fixture, dir),
            None => block_on(golden::run(&args, environment)),
        },
        EvalCommand::Logprobs(args) => block_on(logprobs::run(&args, environment)),
        EvalCommand::Equal(args) => block_on(equal::run(&args, environment)),
    }?;
    Ok(if passed { ExitCode::SUCCESS } else { ExitCode::FAILURE })
}

fn block_on(check: impl Future<Output = Result<bool>>) -> Result<bool> {
    tokio::runtime::Builder::new_multi_thread().enable_all().build()?.block_on(check)
}
